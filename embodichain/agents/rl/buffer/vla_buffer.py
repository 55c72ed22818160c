"""A bounded first-in, first-out queue between collectors and a learner."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from embodichain.errors import BufferWaitError, RolloutError

PATIENCE_SECONDS = 30.0
"""How long the thread that created a buffer waits until another thread takes from it for the first time."""
_LOOK_SECONDS = 0.5


class Producer(Protocol):
    """Callbacks of the collector that fills a buffer; the consumer's thread calls them."""

    def before_get(self) -> None:
        """Called before the consumer takes entries, when it runs no update."""

    def after_get(self, taken: Sequence[tuple[int, TensorDictBase]]) -> None:
        """Called with the numbers and entries that were taken."""

    def raise_failure(self) -> None:
        """Raise the error that stopped the collector, if any."""


class VLABuffer:
    """A bounded, thread-safe queue of whole rollouts or of single transitions.

    When it is full, a single transition replaces the oldest ones, as in a circular buffer, and a rollout waits for
    room. ``overwrite=True`` makes both replace, ``overwrite=False`` makes both wait. Rollouts and transitions cannot be
    mixed, unless the queue is empty in between. Entries are numbered in order.
    """

    def __init__(
        self, buffer_size: int = 4096, device: torch.device | str = "cpu", *, overwrite: bool | None = None
    ) -> None:
        """Create a queue for up to ``buffer_size`` transitions; ``get`` returns them on ``device``."""
        if buffer_size < 1:
            raise RolloutError(f"buffer_size must be at least 1 transition, got {buffer_size}")
        self.buffer_size, self.device, self.overwrite = buffer_size, torch.device(device), overwrite
        self.producer: Producer | None = None
        """The collector to notify when entries are taken."""
        self._changed = threading.Condition()  # reentrant
        self._creator = threading.current_thread()
        self._takers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._entries: deque[TensorDictBase] = deque()
        self._first = 0  # number of the oldest entry
        self._size = self._taken = self._dropped = self._last_size = 0  # transitions
        self._add_wait = self._get_wait = 0.0  # seconds

    def add(self, transition: TensorDictBase, timeout: float | None = None) -> int:
        """Add one transition ``[]``, or one step of all envs ``[num_envs]``; return the number of the entry.

        Raises ``BufferWaitError`` if there is no room after ``timeout`` seconds. Without a timeout, it does so if
        waiting would deadlock because no other thread takes entries. For whole rollouts, use ``add_rollout``.
        """
        if transition.batch_dims > 2:
            raise RolloutError(f"expected a transition [] or [num_envs], got {list(transition.batch_size)}")
        return self._put(transition, timeout, copy=True)

    def add_rollout(self, rollout: TensorDictBase, timeout: float | None = None, copy: bool = True) -> int:
        """Add a rollout ``[num_envs, num_steps]``, by reference with ``copy=False``; return the number of the entry."""
        if rollout.batch_dims != 2:
            raise RolloutError(f"expected a rollout [num_envs, num_steps], got {list(rollout.batch_size)}")
        return self._put(rollout, timeout, copy)

    def _put(self, entry: TensorDictBase, timeout: float | None, copy: bool) -> int:
        size = entry.numel()
        if not 1 <= size <= self.buffer_size:
            raise RolloutError(f"an entry of {size} transitions does not fit into a buffer of {self.buffer_size}")
        moved = entry.to(self.device)
        entry = moved.clone() if copy and entry.device in (None, self.device) else moved
        began = time.monotonic()
        with self._changed:
            overwrite = entry.batch_dims < 2 if self.overwrite is None else self.overwrite
            while overwrite and not self._has_room(size):
                self._drop_oldest()
            while not self._has_room(size):
                waited = time.monotonic() - began
                waiting = f"{self._size} of {self.buffer_size} transitions are waiting to be taken"
                if timeout is None and self._waits_for_itself(waited):
                    raise BufferWaitError(
                        f"no room for {size} transitions: {waiting}, and as no other thread takes any, this one would "
                        "wait for itself. Call get() first, or make the buffer with overwrite=True: it drops the oldest"
                    )
                if timeout is not None and waited >= timeout:
                    raise BufferWaitError(f"no room for {size} transitions in {timeout} s: {waiting}")
                self._changed.wait(_LOOK_SECONDS if timeout is None else min(timeout - waited, _LOOK_SECONDS))
            self._add_wait += time.monotonic() - began
            if self._entries and self._entries[-1].batch_dims != entry.batch_dims:
                raise RolloutError(
                    f"the buffer holds entries {list(self._entries[-1].batch_size)}, got {list(entry.batch_size)}: "
                    "rollouts and single transitions do not mix, get() or clear() comes first"
                )
            self._entries.append(entry)
            self._size += size
            self._last_size = size
            self._changed.notify_all()
            return self.next - 1

    def _waits_for_itself(self, waited: float) -> bool:
        """Return whether the calling thread, which has waited ``waited`` seconds for room, is the only consumer."""
        own = threading.current_thread()
        if any(taker is not own and taker.is_alive() for taker in self._takers):
            return False
        if own in self._takers or threading.active_count() == 1:
            return True
        return own is self._creator and waited >= PATIENCE_SECONDS  # otherwise the creator may still take

    def get(self, flatten: bool = False, timeout: float | None = 0.0) -> TensorDictBase:
        """Remove and return the oldest rollout ``[num_envs, num_steps]``, or all single transitions, stacked in time.

        Transitions ``[]`` become ``[1, num_steps]``. ``flatten=True`` returns all entries as rows ``[len(buffer)]``,
        oldest first, for inspection; algorithms need the time axis. Waits at most ``timeout`` seconds (``None``:
        without limit), then raises ``BufferWaitError``.
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
        """Remove the oldest rollout, or all entries (always for transitions); return ``(number, entry)`` pairs."""
        self._takers.add(threading.current_thread())
        if self.producer is not None:
            self.producer.before_get()
        began = time.monotonic()
        with self._changed:
            if timeout is None and not self._entries and self.producer is None and threading.active_count() == 1:
                raise BufferWaitError("the buffer is empty, and no other thread could add to it: add something first")
            if not self._changed.wait_for(lambda: bool(self._entries), timeout):
                raise BufferWaitError(f"the buffer is empty, also after {timeout} s: nothing was added to it")
            self._get_wait += time.monotonic() - began
            first = self._first
            one = not everything and self._entries[0].batch_dims == 2
            entries = [self._pop() for _ in range(1 if one else len(self._entries))]
            self._taken += sum(entry.numel() for entry in entries)
            self._changed.notify_all()
        taken = list(enumerate(entries, first))
        if self.producer is not None:
            self.producer.after_get(taken)
        return taken

    @property
    def first(self) -> int:
        """Number of the oldest entry, which equals the count of removed entries."""
        with self._changed:
            return self._first

    @property
    def next(self) -> int:
        """Number of the next entry to be added, which equals the count of added entries."""
        with self._changed:
            return self._first + len(self._entries)

    def is_full(self) -> bool:
        """Return whether another entry of the last one's size would not fit."""
        if self.producer is not None:
            self.producer.raise_failure()
        with self._changed:
            return bool(self._entries) and not self._has_room(self._last_size)

    def clear(self) -> None:
        """Drop all entries."""
        with self._changed:
            while self._entries:
                self._drop_oldest()
            self._changed.notify_all()

    def __len__(self) -> int:
        """Return the number of transitions in the queue."""
        with self._changed:
            return self._size

    def get_stats(self) -> dict[str, float]:
        """Return the fill level and throughput in transitions, and how long both sides waited in seconds."""
        with self._changed:
            return {
                "size": self._size,
                "buffer_size": self.buffer_size,
                "entries": len(self._entries),
                "added": self._size + self._taken + self._dropped,
                "taken": self._taken,
                "dropped": self._dropped,
                "add_wait_seconds": self._add_wait,
                "get_wait_seconds": self._get_wait,
            }

    def state_dict(self) -> dict[str, Any]:
        """Return the entries, oldest first, and the counters."""
        with self._changed:
            waits = [round(1e6 * seconds) for seconds in (self._add_wait, self._get_wait)]
            counts = [self._first, self.next, self._taken, self._dropped, self._last_size, *waits]
            return {"counts": counts, "entries": [entry.clone() for entry in self._entries]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore entries and counters from ``state_dict``."""
        with self._changed:
            self._entries = deque(entry.to(self.device) for entry in state["entries"])
            self._size = sum(entry.numel() for entry in self._entries)
            self._first, _, self._taken, self._dropped, self._last_size, *waits = state["counts"]
            self._add_wait, self._get_wait = (microseconds / 1e6 for microseconds in waits)
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return self._size + size <= self.buffer_size

    def _pop(self) -> TensorDictBase:
        entry = self._entries.popleft()
        self._first += 1
        self._size -= entry.numel()
        return entry

    def _drop_oldest(self) -> None:
        self._dropped += self._pop().numel()
