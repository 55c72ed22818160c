"""``embodichain COMMAND``: finds the command, runs it, and turns errors into messages and exit codes.

Commands import heavy libraries, so this module imports none of them: ``--help`` answers at once.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from embodichain import __version__
from embodichain.errors import EmbodiChainError, UnknownNameError, nearest

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE
TRACEBACK_VARIABLE = "EMBODICHAIN_TRACEBACK"


class Command(NamedTuple):
    """One subcommand; its module has ``main(argv) -> int``."""

    name: str
    summary: str
    module: str


COMMANDS = (
    Command("envs", "list the environments, or check that one keeps the contract", "embodichain.cli.envs"),
    Command("play", "roll an environment and show what happens", "embodichain.cli.play"),
    Command("stream", "stream episodes from simulation workers and watch the numbers", "embodichain.cli.stream"),
    Command("record", "write the episodes of a stream as a LeRobotDataset folder", "embodichain.cli.record"),
    Command("train", "train a policy as a config says, or go on with a run", "embodichain.cli.train"),
    Command("eval", "see how well the policy of a run does", "embodichain.cli.eval"),
    Command("export", "write the policy of a run as an ONNX file", "embodichain.cli.export"),
    Command("demo", "see the main job in small, on the CPU", "embodichain.cli.demo"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``embodichain`` with these arguments (default: those of the process) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    show_traceback = os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0")
    if "--traceback" in words:
        words.remove("--traceback")
        show_traceback = True
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        print(f"embodichain {__version__}")
        return 0
    try:
        code = _run(words[0], words[1:])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interruption:
        print("\n".join(["interrupted", *_notes(interruption)]), file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, `head` say, has seen enough; keep the interpreter from flushing once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except EmbodiChainError as error:
        if show_traceback:
            traceback.print_exc()
        else:
            told = [f"embodichain: {error}", *_notes(error), "(--traceback shows where it was raised)"]
            print("\n".join(told), file=sys.stderr)
        return EXIT_USAGE


def _notes(error: BaseException) -> list[str]:
    """Return what was added to an error on its way."""
    return list(getattr(error, "__notes__", []))


def _run(name: str, argv: list[str]) -> int:
    """Import the module of a command and call it."""
    for command in COMMANDS:
        if command.name == name:
            code: int = importlib.import_module(command.module).main(argv)
            return code
    raise UnknownNameError(f"unknown command {name!r}.{nearest(name, [command.name for command in COMMANDS])}")


def usage() -> str:
    """Return the help text."""
    lines = [f"  {command.name:<8} {command.summary}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: embodichain [--help] [--version] [--traceback] COMMAND ...",
            "",
            "Train embodied agents from live simulation.",
            "",
            "commands:",
            *lines,
            "",
            "'embodichain COMMAND --help' says more about one of them.",
            f"--traceback (or {TRACEBACK_VARIABLE}=1) shows where an error was raised.",
        ]
    )
