"""``embodichain COMMAND``: runs a command, and turns errors into messages and exit codes.

Heavy libraries are imported by the commands only, so that ``--help`` is fast."""

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
    "envs": "list environments, or check one against the VecEnv contract",
    "robots": "list robots, or analyse a robot's MJCF file",
    "play": "roll out an environment and show what happens",
    "view": "watch an environment, a trained policy or a recording in the browser",
    "stream": "stream episodes from simulation workers and show statistics",
    "record": "write the episodes of a stream to a LeRobotDataset folder",
    "dataset": "inspect LeRobot folders, and merge, split or filter them",
    "train": "train a policy from a config, or continue a run",
    "imitate": "train a policy by imitating a stream or a recording, or continue a run",
    "sweep": "tune the hyperparameters of a training with Optuna",
    "eval": "evaluate the policy of a run",
    "runs": "list runs with their state, return, success and age",
    "report": "write one HTML file that compares runs",
    "export": "export the policy of a run to an ONNX file",
    "demo": "run a small demonstration on the CPU",
    "completion": "print a script for shell completion in bash or zsh",
}
"""Commands and their summaries. Each has a module of the same name, whose ``main`` takes the remaining arguments and
returns the exit code, or a function that does the work and returns the exit code."""
OTHER_NAMES = {"train-rl": "train"}
"""Aliases of commands that other guides of this framework use."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``embodichain`` with these arguments (default: ``sys.argv[1:]``) and return the exit code."""
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
    except BrokenPipeError:  # the reader, such as `head`, has exited; avoid another flush at interpreter exit
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
        if show_traceback or error.filename is None:  # without a file name, it is not about a file of the user
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

'embodichain COMMAND --help' shows the options of a command.
--traceback (or {TRACEBACK_VARIABLE}=1) shows where an error was raised."""
