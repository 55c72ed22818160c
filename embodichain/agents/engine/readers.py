"""One place per sampling process to count in, so that counting needs no lock between processes and loses nothing."""

from __future__ import annotations

import fcntl
import os
import threading

import numpy as np

from embodichain.agents.engine.shared_buffer import MAX_READERS, Floats, Read, SharedBuffer
from embodichain.errors import EngineStateError

_SAMPLES = int(Read.SAMPLES)  # a plain int: numpy takes ten times as long to index with an enum


class ReaderSlot:
    """The counters of this process in the shared buffer.

    A slot is claimed at the first count and after a fork. The slot of a process that has ended is taken over with its
    counts: what was drawn stays drawn, and the sum over all slots never goes back.
    """

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._mine: Floats = buffer.readers[0]
        self._index = 0
        self._forks = -1
        self._lock = threading.Lock()

    def add(self, samples: int, redrawn: int, ages: tuple[float, float] | None = None) -> None:
        """Count one batch, with its mean age (in seconds, in episodes) where that was measured."""
        mine = self._slot()
        with self._lock:
            mine[_SAMPLES] += samples
            if redrawn:
                mine[Read.REDRAWN] += redrawn
            if ages is not None:
                mine[Read.AGED] += 1
                mine[Read.AGE_SECONDS] += ages[0]
                mine[Read.AGE_EPISODES] += ages[1]

    def new_stream(self, seed: int) -> np.random.SeedSequence:
        """Return the seed of a random stream that no other thread or process draws from."""
        mine = self._slot()
        with self._lock:
            mine[Read.STREAMS] += 1
            return np.random.SeedSequence(seed, spawn_key=(self._index, int(mine[Read.STREAMS])))

    def _slot(self) -> Floats:
        if self._forks != Forks.count:
            with Forks.lock:
                if self._forks != Forks.count:
                    self._lock = threading.Lock()  # the parent may have held it while it forked
                    self._index = _claim(self._buffer, os.getpid())
                    self._mine = self._buffer.readers[self._index]
                    self._forks = Forks.count
        return self._mine


class Forks:
    """How a process notices that it is a forked copy of the one that made an object; a fraction of ``os.getpid``."""

    count = 0
    """Number of forks between the first process and this one."""
    lock = threading.Lock()
    """Under which the threads of one process claim their common slot; a forked child gets its own."""

    @classmethod
    def after_in_child(cls) -> None:
        """Make the child differ from its parent."""
        cls.count += 1
        cls.lock = threading.Lock()


os.register_at_fork(after_in_child=Forks.after_in_child)


def _claim(buffer: SharedBuffer, pid: int) -> int:
    """Return the index of a free slot, or of one whose process is gone."""
    # A record lock belongs to the process, not to the descriptor, which all processes share.
    fcntl.lockf(buffer.segment.fd, fcntl.LOCK_EX, 1, 0)
    try:
        owners = buffer.owners.tolist()
        # A slot under our own number is that of an ended process whose number we were given.
        index = next((i for i, owner in enumerate(owners) if owner in (0, pid) or not _alive(owner)), None)
        if index is None:
            raise EngineStateError(f"more than {MAX_READERS} processes sample from one engine: use fewer")
        buffer.owners[index] = pid
        return index
    finally:
        fcntl.lockf(buffer.segment.fd, fcntl.LOCK_UN, 1, 0)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
