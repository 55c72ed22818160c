"""A child process that cannot outlive its parent, nor leave anything running behind it.

Children are forked by a server process that has imported everything and done nothing (multiprocessing's forkserver): a
simulator that died is replaced in a fraction of a second, and inherits no thread, lock or GL context of the learner.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

from embodichain.agents.processes.boot import die_with_parent
from embodichain.errors import ConfigError, WorkerError


class ChildProcess:
    """A process at the head of a process group of its own; it ends with this object, or with the program."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Start ``target(*args)``, which calls ``begin_as_child`` first; its module is imported by the server."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([target.__module__])
        self._process = context.Process(target=target, args=args)
        multiprocessing.resource_tracker.ensure_running()  # it lets interrupts in again when it starts
        with _interrupts_put_off():  # for good, in the server: a Ctrl-C would end it while it imports
            multiprocessing.forkserver.ensure_running()
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"what a process is to do cannot be sent to it ({error}): give functions of a module, or "
                "functools.partial of one",
                "collector",
            ) from error
        except (EOFError, ConnectionError) as error:
            raise WorkerError(f"no process could be started: multiprocessing's server has ended ({error})") from error
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


def begin_as_child() -> None:
    """Tie this process's life to that of the program that started it, and lead a group of processes."""
    # The server ends when nobody holds this descriptor any more. A child does not need it, and one that hangs would
    # keep the server, and so itself, alive after the program is gone.
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    die_with_parent(os.getppid())
    os.setpgid(0, 0)  # whatever the environment starts can be ended together with this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # as usual for what the environment starts


@contextlib.contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """Let a Ctrl-C wait until the end of the block; processes that are started in it have that blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
