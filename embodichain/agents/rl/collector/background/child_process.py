"""A child process that cannot outlive its parent, nor leave anything running behind it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
from collections.abc import Callable
from typing import Any


class ChildProcess:
    """A spawned process at the head of a process group of its own; it ends with this object, or with the program."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._process = multiprocessing.get_context("spawn").Process(target=target, args=args)
        self._process.start()
        # A finaliser of multiprocessing's own: it runs before that module waits for all processes at the end.
        self.kill = multiprocessing.util.Finalize(self, _kill, args=(self._process,), exitpriority=100)
        """Ends the process and whatever it started; calling it twice is fine."""

    @property
    def pid(self) -> int:
        """The process id."""
        return int(self._process.pid or 0)

    def wait(self, seconds: float) -> bool:
        """Wait for the process to end; tell whether it did."""
        return bool(multiprocessing.connection.wait([self._process.sentinel], seconds))

    def exit_words(self) -> str:
        """Wait for a process that has hung up to end, and say how it did."""
        if not self.wait(5.0):
            return "closed its connection without ending"
        self.kill()  # what it started, while its number is still its own
        code = self._process.exitcode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _kill(process: Any) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it had no time yet to make a group of its own
        process.kill()
    process.join(5.0)


def lead_a_group() -> None:
    """Begin a process group; the child calls it first."""
    os.setpgid(0, 0)
