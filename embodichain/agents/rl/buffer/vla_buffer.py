"""A queue between collectors and a learner: first in, first out, each entry handed out once."""

from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.processes.shared_memory import Segment
from embodichain.agents.rl.utils.observations import sorted_leaves
from embodichain.errors import BufferWaitError, RolloutError

# MERGED guards: Mutual exclusion with waiting, for threads and for processes that may be killed at any moment.


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


# MERGED shelves: Where the entries of a queue lie: in this process, by reference, or in memory that several processes
# share.


_ALIGNMENT = 64
Counts = np.ndarray[Any, np.dtype[np.int64]]


class Shelf(Protocol):
    """Keeps entries by their numbers; whoever uses it makes sure that only one does at a time."""

    counts: Counts
    """Room for counters, int64, that lie beside the entries."""

    def put(self, number: int, entry: TensorDictBase) -> None:
        """Store an entry."""

    def look(self, number: int) -> TensorDictBase:
        """Return an entry as it lies there; see ``take`` for one that stays valid."""

    def take(self, number: int) -> TensorDictBase:
        """Remove an entry and return it; it belongs to the caller."""

    def total(self, numbers: range) -> int:
        """Return the number of transitions in these entries."""


class LocalShelf:
    """Entries of any shape, by reference."""

    def __init__(self, num_counts: int) -> None:
        self.counts: Counts = np.zeros(num_counts, dtype=np.int64)
        self._entries: dict[int, TensorDictBase] = {}
        self._total = 0

    def put(self, number: int, entry: TensorDictBase) -> None:
        """Store an entry."""
        self._entries[number] = entry
        self._total += entry.numel()

    def look(self, number: int) -> TensorDictBase:
        """Return an entry."""
        return self._entries[number]

    def take(self, number: int) -> TensorDictBase:
        """Remove an entry and return it."""
        entry = self._entries.pop(number)
        self._total -= entry.numel()
        return entry

    def total(self, numbers: range) -> int:
        """Return the number of transitions in these entries, which are all there are."""
        return self._total


class SharedShelf:
    """A ring of places for entries that all look like an example, in shared memory known by its descriptor alone."""

    def __init__(self, num_counts: int, example: TensorDictBase, num_places: int) -> None:
        self.batch_size = list(example.batch_size)
        self.num_places = num_places
        self._leaves = [(path, leaf.dtype, tuple(leaf.shape)) for path, leaf in sorted_leaves(example)]
        self._offsets = []
        end = _aligned(8 * num_counts)
        for _, dtype, shape in self._leaves:
            self._offsets.append(end)
            end += _aligned(num_places * math.prod(shape) * dtype.itemsize)
        self._num_counts = num_counts
        self._attach(Segment.create(max(end, _ALIGNMENT), "a shared VLABuffer"))

    def _attach(self, segment: Segment) -> None:
        self._segment = segment
        self.counts: Counts = segment.view(0, torch.int64, (self._num_counts,)).numpy()
        self._places: dict[tuple[str, ...], Tensor] = {
            path: segment.view(offset, dtype, (self.num_places, *shape))
            for (path, dtype, shape), offset in zip(self._leaves, self._offsets, strict=True)
        }

    def put(self, number: int, entry: TensorDictBase) -> None:
        """Copy an entry in; it must look like the example."""
        given = [(path, leaf.dtype, tuple(leaf.shape)) for path, leaf in sorted_leaves(entry)]
        if given != self._leaves or list(entry.batch_size) != self.batch_size:
            wrong = next(
                (f"{'/'.join(mine[0])} is {mine}" for mine in given if mine not in self._leaves), "keys differ"
            )
            raise RolloutError(f"a shared buffer takes entries like its example, {self.batch_size}; here {wrong}")
        for path, place in self._places.items():
            place[number % self.num_places].copy_(entry.get(path))

    def look(self, number: int) -> TensorDictBase:
        """Return an entry where it lies, valid until its place is used again."""
        entry = TensorDict({}, batch_size=self.batch_size)
        for path, place in self._places.items():
            entry.set(path, place[number % self.num_places])
        return entry

    def take(self, number: int) -> TensorDictBase:
        """Return a copy of an entry, whose place may then be used again."""
        return self.look(number).clone()

    def total(self, numbers: range) -> int:
        """Return the number of transitions in these entries."""
        return len(numbers) * math.prod(self.batch_size)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("batch_size", "num_places", "_leaves", "_offsets", "_num_counts", "_segment")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach(self._segment)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


# The counters that lie beside the entries: numbers of the oldest and of the next entry, transitions that went out on
# either way, the size of the last entry, and microseconds of waiting. What is inside follows from the first two alone,
# so that a process that dies between two of them leaves nothing that contradicts itself.
_FIRST, _NEXT, _TAKEN, _DROPPED, _LAST_SIZE, _ADD_WAIT, _GET_WAIT, _COUNTS = range(8)


class Producer(Protocol):
    """A collector that fills a buffer; the consumer's thread calls these."""

    def before_get(self) -> None:
        """Learn that the consumer is about to take something, so that it is busy with nothing else."""

    def after_get(self, taken: Sequence[tuple[int, TensorDictBase]]) -> None:
        """Learn what was taken: numbers and entries."""

    def raise_failure(self) -> None:
        """Raise what keeps the collector from going on, if anything does."""


class VLABuffer:
    """A bounded queue of whole rollouts or of single transitions, for any number of threads.

    ``add_rollout`` and ``add`` wait while there is no room (back-pressure); with ``overwrite=True`` they push out the
    oldest entries instead. What ``get`` returned is the caller's, and nobody gets it again. Rollouts and transitions do
    not mix: the queue takes the other kind once it is empty.

    With an ``example`` of its entries the queue lies in shared memory and can be handed to other processes; a process
    that is killed in the middle of an ``add`` leaves nothing behind, neither a lock nor half an entry.
    """

    def __init__(
        self,
        buffer_size: int = 4096,
        device: torch.device | str = "cpu",
        *,
        overwrite: bool = False,
        example: TensorDictBase | None = None,
    ) -> None:
        """Make room for ``buffer_size`` transitions; ``get`` returns them on ``device``."""
        if buffer_size < 1:
            raise RolloutError(f"buffer_size must be at least 1 transition, got {buffer_size}")
        self.buffer_size, self.device, self.overwrite = buffer_size, torch.device(device), overwrite
        self.producer: Producer | None = None
        """The collector that fills it, if it wants to know when something is taken."""
        self._creator = os.getpid()
        self._guard: Guard
        self._shelf: Shelf
        if example is None:
            self._guard, self._shelf = ThreadGuard(), LocalShelf(_COUNTS)
        else:
            if example.numel() > buffer_size:
                raise RolloutError(f"one entry has {example.numel()} transitions, buffer_size is {buffer_size}")
            self._guard = ProcessGuard()
            self._shelf = SharedShelf(_COUNTS, example, buffer_size // max(1, example.numel()))

    # --- in -------------------------------------------------------------------------------------------------------

    def add(self, transition: TensorDictBase, timeout: float | None = None) -> int:
        """Add one transition ``[]``, or one step of all envs ``[num_envs]``; return the number of the entry.

        Waits for room, at most ``timeout`` seconds, then raises ``BufferWaitError``. A whole rollout is passed on to
        ``add_rollout``.
        """
        if transition.batch_dims > 2:
            raise RolloutError(f"expected a transition [] or [num_envs], got {list(transition.batch_size)}")
        return self._put(transition, timeout, copy=True)

    def add_rollout(self, rollout: TensorDictBase, timeout: float | None = None, copy: bool = True) -> int:
        """Add a rollout ``[num_envs, num_steps]``; return the number of the entry.

        ``copy=False`` hands it over: the caller must not write to it again.
        """
        if rollout.batch_dims != 2:
            raise RolloutError(f"expected a rollout [num_envs, num_steps], got {list(rollout.batch_size)}")
        return self._put(rollout, timeout, copy)

    def _put(self, entry: TensorDictBase, timeout: float | None, copy: bool) -> int:
        size = entry.numel()
        if not 1 <= size <= self.buffer_size:
            raise RolloutError(f"an entry of {size} transitions does not fit into a buffer of {self.buffer_size}")
        if isinstance(self._shelf, LocalShelf):  # a shared one copies anyway
            entry = _copied(entry, self.device) if copy else entry.to(self.device)
        counts = self._counts()
        began = time.monotonic()
        with self._guard:
            if self.overwrite:
                while not self._has_room(size):
                    self._drop_oldest()
            elif not self._guard.wait_for(lambda: self._has_room(size), timeout):
                raise BufferWaitError(f"no room for {size} transitions in {timeout} s: {self._words()}")
            counts[_ADD_WAIT] += round(1e6 * (time.monotonic() - began))
            self._check_kind(entry)
            number = int(counts[_NEXT])
            self._shelf.put(number, entry)
            counts[_LAST_SIZE] = size
            counts[_NEXT] += 1  # from here on it is there: whoever dies before has added nothing
            self._guard.notify_all()
        return number

    # --- out ------------------------------------------------------------------------------------------------------

    def get(self, flatten: bool = False, timeout: float | None = 0.0) -> TensorDictBase:
        """Hand out the oldest rollout ``[num_envs, num_steps]``, or all single transitions, stacked along time.

        Single transitions become ``[num_envs, num_steps]`` as well, ``[1, num_steps]`` if they were added one by one.
        ``flatten=True`` hands out everything there is as rows ``[len(buffer)]``, oldest first, for looking at:
        algorithms need the time axis. Waits at most ``timeout`` seconds (``None``: as long as it takes), then raises
        ``BufferWaitError``.
        """
        entries = [entry for _, entry in self.take(everything=flatten, timeout=timeout)]
        if flatten:
            rows = [entry.reshape(-1) for entry in entries]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        if entries[0].batch_dims == 2:
            return entries[0]
        steps: TensorDictBase = torch.stack(entries)  # [num_steps, ...]
        return steps.transpose(0, 1) if steps.batch_dims == 2 else steps.unsqueeze(0)

    def take(self, everything: bool = False, timeout: float | None = 0.0) -> list[tuple[int, TensorDictBase]]:
        """Remove the oldest rollout, or ``everything`` (always, for single transitions); return numbers and entries."""
        if self.producer is not None:
            self.producer.before_get()
        counts = self._counts()
        began = time.monotonic()
        with self._guard:
            if not self._guard.wait_for(lambda: bool(counts[_NEXT] > counts[_FIRST]), timeout):
                raise BufferWaitError(f"the buffer is empty, also after {timeout} s: nothing was added to it")
            counts[_GET_WAIT] += round(1e6 * (time.monotonic() - began))
            first = int(counts[_FIRST])
            one = not everything and self._shelf.look(first).batch_dims == 2
            taken = []
            for number in range(first, first + 1 if one else int(counts[_NEXT])):
                entry = self._shelf.take(number)
                counts[_FIRST] += 1
                counts[_TAKEN] += entry.numel()
                taken.append((number, entry))
            self._guard.notify_all()
        taken = [(number, entry.to(self.device)) for number, entry in taken]
        if self.producer is not None:
            self.producer.after_get(taken)
        return taken

    @property
    def first(self) -> int:
        """Number of the oldest entry: so many went out."""
        with self._guard:
            return int(self._counts()[_FIRST])

    @property
    def next(self) -> int:
        """Number of the next entry to be added: so many came in."""
        with self._guard:
            return int(self._counts()[_NEXT])

    # --- how it stands --------------------------------------------------------------------------------------------

    def is_full(self) -> bool:
        """Tell whether there is no room for another entry like the last one."""
        if self.producer is not None:
            self.producer.raise_failure()
        counts = self._counts()
        with self._guard:
            return bool(counts[_NEXT] > counts[_FIRST]) and not self._has_room(int(counts[_LAST_SIZE]))

    def clear(self) -> None:
        """Forget everything that is in it."""
        counts = self._counts()
        with self._guard:
            while counts[_NEXT] > counts[_FIRST]:
                self._drop_oldest()
            self._guard.notify_all()

    def __len__(self) -> int:
        """Return the number of transitions in it."""
        self._counts()
        with self._guard:
            return self._size()

    def get_stats(self) -> dict[str, float]:
        """Return how full it is, what went through it (in transitions) and how long both sides waited (in seconds)."""
        counts = self._counts()
        with self._guard:
            return {
                "size": self._size(),
                "buffer_size": self.buffer_size,
                "entries": int(counts[_NEXT] - counts[_FIRST]),
                "added": self._size() + int(counts[_TAKEN] + counts[_DROPPED]),
                "taken": int(counts[_TAKEN]),
                "dropped": int(counts[_DROPPED]),
                "add_wait_seconds": counts[_ADD_WAIT] / 1e6,
                "get_wait_seconds": counts[_GET_WAIT] / 1e6,
            }

    def state_dict(self) -> dict[str, Any]:
        """Return what is in it, oldest first, and its counters."""
        counts = self._counts()
        with self._guard:
            numbers = range(int(counts[_FIRST]), int(counts[_NEXT]))
            return {"counts": counts.tolist(), "entries": [self._shelf.look(number).clone() for number in numbers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.clear()
        counts = self._counts()
        with self._guard:
            counts[:] = state["counts"]
            for number, entry in enumerate(state["entries"], int(counts[_FIRST])):
                self._shelf.put(number, entry.to(self.device) if isinstance(self._shelf, LocalShelf) else entry)
            self._guard.notify_all()

    # --- inside; the guard is held --------------------------------------------------------------------------------

    def _size(self) -> int:
        counts = self._shelf.counts
        return self._shelf.total(range(int(counts[_FIRST]), int(counts[_NEXT])))

    def _has_room(self, size: int) -> bool:
        return self._size() + size <= self.buffer_size

    def _drop_oldest(self) -> None:
        counts = self._shelf.counts
        counts[_DROPPED] += self._shelf.take(int(counts[_FIRST])).numel()
        counts[_FIRST] += 1

    def _check_kind(self, entry: TensorDictBase) -> None:
        counts = self._shelf.counts
        if counts[_NEXT] == counts[_FIRST]:
            return
        there = self._shelf.look(int(counts[_NEXT]) - 1)
        if there.batch_dims != entry.batch_dims:
            raise RolloutError(
                f"the buffer holds entries {list(there.batch_size)}, got {list(entry.batch_size)}: rollouts and single "
                "transitions do not mix, get() or clear() comes first"
            )

    def _words(self) -> str:
        return f"{self._size()} of {self.buffer_size} transitions are waiting to be taken"

    def _counts(self) -> Any:
        if isinstance(self._shelf, LocalShelf) and os.getpid() != self._creator:
            raise RolloutError("this buffer belongs to another process: make it with example=... to share it")
        return self._shelf.counts

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the way to the shared memory: another process uses the same queue."""
        if isinstance(self._shelf, LocalShelf):
            raise RolloutError("a buffer that processes share is made with example=..., an entry like those to come")
        return {**self.__dict__, "producer": None}


def _copied(entry: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Return a copy of an entry on a device."""
    return entry.to(device).clone() if entry.device in (None, device) else entry.to(device)
