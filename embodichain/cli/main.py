"""``embodichain COMMAND``: finds the command, runs it, and turns errors into messages and exit codes.
Commands import heavy libraries, so this module imports none of them: ``--help`` answers at once."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from embodichain import __version__
from embodichain.errors import EmbodiChainError, UnknownNameError, nearest

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE
_HINT = "(--traceback shows where it was raised)"
TRACEBACK_VARIABLE = "EMBODICHAIN_TRACEBACK"
COMMANDS = {
    "envs": "list the environments, or check that one keeps the contract",
    "robots": "list the robots, or see what is recognised in a robot's MJCF file",
    "play": "roll an environment and show what happens",
    "view": "watch an environment, a trained policy or a recording in the browser",
    "stream": "stream episodes from simulation workers and watch the numbers",
    "record": "write the episodes of a stream as a LeRobotDataset folder",
    "dataset": "look at LeRobot folders, and merge, split or filter them",
    "train": "train a policy as a config says, or continue a run",
    "imitate": "let a policy imitate a stream or a recording, or continue a run",
    "sweep": "search for better settings of a training",
    "eval": "see how well the policy of a run does",
    "runs": "list runs with their state, return, success and age",
    "report": "write one HTML file that compares runs",
    "export": "write the policy of a run as an ONNX file",
    "demo": "see the main job in small, on the CPU",
    "completion": "print a script that completes commands and options in bash or zsh",
}
"""Commands and what they do; the module of each has its name, and its ``main`` takes the words after it. It returns the
exit code, or what is left to do once the words are understood, which is called then and returns the code."""
OTHER_NAMES = {"train-rl": "train"}
"""Names of commands that guides of this framework use as well."""


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
        command = OTHER_NAMES.get(words[0], words[0])
        if command not in COMMANDS:
            raise UnknownNameError(f"unknown command {command!r}.{nearest(command, list(COMMANDS))}")
        done: int | Callable[[], int] = importlib.import_module(f"embodichain.cli.{command}").main(words[1:])
        code = done if isinstance(done, int) else done()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interruption:
        print("interrupted", *getattr(interruption, "__notes__", []), sep="\n", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, `head` say, has seen enough; keep the interpreter from flushing once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except EmbodiChainError as error:
        if show_traceback:
            traceback.print_exc()
        else:
            notes = (*getattr(error, "__notes__", []), _HINT)
            print(f"embodichain: {error}", *notes, sep="\n", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        if show_traceback or error.filename is None:  # without a file it is no problem of the user's files
            raise
        print(f"embodichain: {error.filename}: {error.strerror}", _HINT, sep="\n", file=sys.stderr)
        return EXIT_USAGE


def usage() -> str:
    """Return the help text."""
    lines = "\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())
    return f"""usage: embodichain [--help] [--version] [--traceback] COMMAND ...

Train embodied agents from live simulation.

commands:
{lines}

'embodichain COMMAND --help' says more about one of them.
--traceback (or {TRACEBACK_VARIABLE}=1) shows where an error was raised."""
