"""Where a worker process begins: it ties its life to its parent's before anything heavy is imported.

Run as a script, by path, by whoever starts the process: the main module of the user's program is not imported again, so
an engine can be started at the top level of a script, in a notebook or at a prompt.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def main() -> int:
    """Receive the job and do it, with the function ``run`` of the module that the parent named."""
    parent, descriptor, document = map(int, sys.argv[1:4])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    connection = socket.socket(fileno=descriptor)
    with open(document) as file:
        job = json.load(file)
    sys.path[:] = job.pop("sys_path")

    code: int = importlib.import_module(sys.argv[4]).run(connection, parent, job)
    return code


def leave(code: int) -> None:
    """End the process after its exit handlers; taking every imported module apart first would take a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
