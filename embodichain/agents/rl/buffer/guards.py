"""Mutual exclusion with waiting, for threads and for processes that may be killed at any moment."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import reduction
from types import TracebackType
from typing import Any, Protocol, Self

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005
"""Seconds between two looks at what another process may have changed."""


class Guard(Protocol):
    """A lock (``with guard:``) whose holder can wait for something that others have to bring about."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def wait_for(self, is_so: Callable[[], bool], timeout: float | None) -> bool:
        """Give the lock up until ``is_so()`` holds; return whether it does, within ``timeout`` seconds."""

    def notify_all(self) -> None:
        """Let those who wait look again."""


class ThreadGuard(threading.Condition):
    """A guard between the threads of one process."""


class ProcessGuard:
    """A guard between processes; the kernel releases it when its holder dies, even of ``kill -9``.

    It is a record lock on a file that exists in memory only, and a thread lock for the threads of each process. Those
    who wait look again every few milliseconds: no wake-up can be lost with a process that was to send it.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = os.memfd_create("embodichain-guard", os.MFD_CLOEXEC) if fd is None else fd
        self._threads, self._pid = threading.Lock(), os.getpid()

    def __enter__(self) -> Self:
        if self._pid != os.getpid():  # forked: a thread that held the lock does not exist here
            self._threads, self._pid = threading.Lock(), os.getpid()
        self._threads.acquire()
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._release()

    def _release(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        self._threads.release()

    def wait_for(self, is_so: Callable[[], bool], timeout: float | None) -> bool:
        """Give the lock up until ``is_so()`` holds; return whether it does, within ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while not is_so():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._release()
            time.sleep(pause)
            pause = min(2.0 * pause, _LONGEST_PAUSE)
            self.__enter__()
        return True

    def notify_all(self) -> None:
        """Do nothing: those who wait look by themselves."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self._fd),)

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)


def _attach(duplicate: Any) -> ProcessGuard:
    return ProcessGuard(duplicate.detach())
