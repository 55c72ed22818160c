"""The lock on the folder of a run, so that only one process at a time trains in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
import weakref
from pathlib import Path
from typing import Any, BinaryIO

from embodichain.errors import OutputError, TrainingStateError, writing

LOCK_FILE = "run.lock"
_LOCK_BYTES = 4096
_LOG = logging.getLogger(__name__)


class RunLock:
    """An exclusive lock on the folder of a run, held until it is released or the process ends.

    It is a ``flock``, which the operating system releases if the process is killed. The file names the holder. Child
    processes do not inherit the lock.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._file: BinaryIO | None = None
        _locks.add(self)

    def acquire(self) -> None:
        """Acquire the lock; raise ``TrainingStateError`` if another process holds it. May be called repeatedly."""
        if self._file is not None:
            return
        folder = self._path.parent
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = self._open()
            former, holder = read_holder(file), {"host": socket.gethostname(), "pid": os.getpid()}
            self._write(file, json.dumps(holder | {"since": time.strftime("%Y-%m-%d %H:%M:%S %z")}) + "\n")
        self._file = file
        if former and former["host"] != holder["host"]:
            _LOG.warning(
                "%s was left by process %s on %s, which has not ended in an orderly way. If it still runs, stop it: "
                "not all file systems that machines share lock files for all of them",
                folder,
                former["pid"],
                former["host"],
            )

    def release(self) -> None:
        """Release the lock; may be called repeatedly."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # disk full or gone: the file still names the holder, but is unlocked
                self._write(self._file, "")
            self.forget()

    def forget(self) -> None:
        """Close the file, as a forked child does; the parent keeps the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        """Return the file, locked."""
        while True:
            file = os.fdopen(self._descriptor(), "r+b", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    with file:
                        self._refuse(read_holder(file))
                _LOG.warning(
                    "the file system of %s has no locks (%s): make sure that no other process trains in this folder",
                    self._path.parent,
                    error.strerror,
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.lstat(self._path)):
                    return file
            file.close()  # the folder was removed meanwhile: try again

    def _descriptor(self) -> int:
        """Open the file; refuse links and devices."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        try:
            descriptor = os.open(self._path, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        raise OutputError(f"{self._path} is no file: expected one that only says who trains in its folder; remove it")

    def _refuse(self, holder: dict[str, Any] | None) -> None:
        """Raise an error that names the holder of the lock."""
        who, how = "another process", "stop it"
        if holder is not None:
            own = " (this one)" if (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid()) else ""
            who = f"process {holder['pid']} on {holder['host']}{own}, since {holder['since']}"
            how = f"stop it there with 'kill {holder['pid']}', which saves a checkpoint"
        folder = self._path.parent
        raise TrainingStateError(
            f"{folder} is in use by {who}: wait until it has ended, or {how}; then continue with --resume {folder}"
        )

    @staticmethod
    def _write(file: BinaryIO, text: str) -> None:
        file.truncate(0)
        file.seek(0)
        file.write(text.encode())


_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""Errors of file systems without file locks."""
_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_locks() -> None:
    for lock in _locks:
        lock.forget()


os.register_at_fork(after_in_child=_forget_locks)


def read_holder(file: BinaryIO) -> dict[str, Any] | None:
    """Return the holder in a lock file; ``None`` if it is empty or cannot be read."""
    file.seek(0)
    with contextlib.suppress(ValueError, RecursionError):
        holder = json.loads(file.read(_LOCK_BYTES))
        if isinstance(holder, dict) and {"host", "pid", "since"} <= holder.keys():
            return holder
    return None
