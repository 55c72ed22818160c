"""The buffer once more, on a GPU: rows follow as they are written, and batches are gathered there.

A thread takes every row that has changed to pinned memory (checking its sequence number like any reader), and from
there to the device on a stream of its own, while training goes on. The copy into the mirror itself happens on the
stream of whoever samples, between two of its gathers: no gather ever sees half a row, and nobody waits.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.engine.layout import Key, unflatten
from embodichain.agents.engine.mirror_draw import Table, WindowCopier, draw_key, pick
from embodichain.agents.engine.mirror_ring import BatchRing, nested
from embodichain.agents.engine.ordering import fence
from embodichain.agents.engine.shared_buffer import Control, Ints, SharedBuffer, State
from embodichain.errors import StreamStalledError

_SLOTS = 4
_IDLE_SECONDS = 0.002
_FIRST_SECONDS = 60.0


@dataclass
class _Slot:
    """One row on its way: in pinned memory, then on the device."""

    host: dict[Key, Tensor]
    device: dict[Key, Tensor]
    row: int = -1
    length: int = 0
    sequence: int = 0
    free: torch.cuda.Event | None = None
    """When the device no longer reads this slot."""


class DeviceMirror:
    """A copy of the shared buffer on a device, kept up to date in the background; belongs to one process."""

    def __init__(self, buffer: SharedBuffer, device: torch.device) -> None:
        self._buffer, self._device = buffer, device
        self._frames = {key: torch.empty_like(value, device=device) for key, value in buffer.frames.items()}
        self._length: Ints = np.zeros(buffer.num_rows, np.int64)
        self._taken: Ints = np.zeros(buffer.num_rows, np.int64)
        """Sequence number of each row that was last sent on its way."""
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._last_stream: torch.cuda.Stream | None = None
        self._copier = WindowCopier(self._frames, buffer.layout.leaves, device)
        self._tables: dict[int, Table] = {}
        self._local = threading.local()
        self._complete = False
        self._empty: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(_SLOTS):
            self._empty.put(self._new_slot())
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="embodichain-stream-mirror", daemon=True)
        self._thread.start()

    def sample(
        self, generator: np.random.Generator, batch_size: int, chunk_size: int, reuse_outputs: bool = False
    ) -> tuple[TensorDict, Callable[[], Ints]]:
        """Return a batch ``[batch_size, chunk_size]`` on the device, and what tells the rows it was drawn from.

        With ``reuse_outputs`` the same few batches are filled in turn, by CUDA graphs.
        """
        with self._lock:
            self._follow_stream()
            self._take_in()
            table = self._table(chunk_size)
            key = draw_key(generator)
            if reuse_outputs:
                batch = self._ring().fill(key, batch_size, table)
            else:
                out = self._copier.room(batch_size, chunk_size)
                self._copier.fill(key, table, out)
                batch = nested(unflatten(out), torch.Size([batch_size, chunk_size]), self._device)
            drawn = (key, batch_size, table.rows, table.length, chunk_size)
        return batch, lambda: pick(*drawn)[0]

    def _table(self, chunk_size: int) -> Table:
        """Return which rows are long enough."""
        table = self._tables.get(chunk_size)
        if table is None:
            table = self._tables[chunk_size] = Table.of(self._length, chunk_size, self._device)
        table.refresh(self._length)
        return table

    def _ring(self) -> BatchRing:
        ring: BatchRing | None = getattr(self._local, "ring", None)
        if ring is None:
            ring = self._local.ring = BatchRing(self._copier, self._device)
        return ring

    def _follow_stream(self) -> None:
        """Order what comes after what was done before, should another thread have used another stream."""
        if not self._is_cuda:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    def close(self) -> None:
        """Stop following the buffer."""
        self._closing.set()
        self._thread.join()

    def _take_in(self) -> None:
        """Put the rows that have arrived into the mirror; the first time, wait until all have."""
        if self._complete and self._arrived.empty() and self._error is None:
            return
        deadline = time.monotonic() + _FIRST_SECONDS
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._place(self._arrived.get_nowait())
            if self._error is not None:
                raise self._error
            if self._length.all():
                self._complete = True
                return
            if time.monotonic() > deadline:
                missing = int((self._length == 0).sum())
                raise StreamStalledError(f"{missing} rows did not reach {self._device} in {_FIRST_SECONDS:g} s")
            time.sleep(_IDLE_SECONDS)

    def _place(self, slot: _Slot) -> None:
        for key, value in slot.device.items():
            self._frames[key][slot.row, : slot.length].copy_(value[: slot.length], non_blocking=True)
        self._length = self._length.copy()  # what was drawn before still refers to the old lengths
        self._length[slot.row] = slot.length
        if self._is_cuda:
            slot.free = torch.cuda.Event()
            slot.free.record(torch.cuda.current_stream(self._device))
        self._empty.put(slot)

    def _follow(self) -> None:
        """Send changed rows on their way, until the engine ends."""
        try:
            with torch.cuda.stream(self._stream) if self._is_cuda else contextlib.nullcontext():
                for row in self._changed_rows():
                    slot = self._next_slot()
                    if slot is not None:
                        self._arrived.put(slot) if self._send(row, slot) else self._empty.put(slot)
        except RuntimeError as error:  # the device failed: whoever samples next must hear of it
            self._error = error

    def _next_slot(self) -> _Slot | None:
        """Return a slot that is free, or None if nobody frees one because the mirror is being closed."""
        while not self._closing.is_set():
            with contextlib.suppress(queue.Empty):
                slot = self._empty.get(timeout=0.1)
                if slot.free is not None:
                    slot.free.synchronize()
                return slot
        return None

    def _changed_rows(self) -> Iterator[int]:
        while not self._closing.is_set() and self._buffer.control[Control.STATE] in (State.STARTING, State.RUNNING):
            sequence = self._buffer.sequence.copy()
            changed = np.flatnonzero((sequence != self._taken) & (sequence & 1 == 0)).tolist()
            yield from changed
            if not changed:
                time.sleep(_IDLE_SECONDS)

    def _send(self, row: int, slot: _Slot) -> bool:
        """Copy one row to the device; tell whether it stayed the same meanwhile."""
        sequence = int(self._buffer.sequence[row])
        fence()
        slot.row, slot.sequence, slot.length = row, sequence, int(self._buffer.length[row])
        for key, value in slot.host.items():
            value[: slot.length].copy_(self._buffer.frames[key][row, : slot.length])
        fence()
        if sequence % 2 or sequence != int(self._buffer.sequence[row]):
            return False  # it was rewritten while we copied: it comes again
        for key, value in slot.device.items():
            value[: slot.length].copy_(slot.host[key][: slot.length], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        self._taken[row] = sequence
        return True

    def _new_slot(self) -> _Slot:
        shapes = {leaf.key: (self._buffer.max_steps, *leaf.shape) for leaf in self._buffer.layout.leaves}
        dtypes = {leaf.key: leaf.dtype for leaf in self._buffer.layout.leaves}
        host = {k: torch.empty(shape, dtype=dtypes[k], pin_memory=self._is_cuda) for k, shape in shapes.items()}
        device = {k: torch.empty(shape, dtype=dtypes[k], device=self._device) for k, shape in shapes.items()}
        return _Slot(host, device)
