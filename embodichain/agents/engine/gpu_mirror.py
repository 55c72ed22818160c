"""``DeviceMirror``: a copy of the buffer on a GPU, from which batches are gathered on the GPU.

A thread copies changed rows to pinned memory (checking sequence numbers), then to the device on its own stream. The
copy into the mirror runs on the sampler's stream, between two gathers, so no gather reads half a row and none waits.

One 64-bit key from the caller's generator determines a whole batch: item ``i`` uses the key's hashes ``2i`` (episode)
and ``2i + 1`` (start). The GPU computes the hashes, so only the key is sent to it. The CPU can compute the same ones.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.datasets.frames import Key
from embodichain.agents.engine.sampling import Output, OutputRing
from embodichain.agents.engine.shared_buffer import Control, Ints, SharedBuffer, State
from embodichain.agents.processes.shared_memory import fence
from embodichain.envs.random import combine
from embodichain.errors import ChunkSizeError, StreamStalledError
from embodichain.utils.cuda_graphs import Recorded, Recorder, kernels_work, record

if TYPE_CHECKING:
    from embodichain.agents.engine.mirror_kernel import WindowKernel

_SLOTS = 4
_IDLE_SECONDS = 0.002
_FIRST_SECONDS = 60.0
_RING_SHAPES = 8
"""Number of batch shapes kept for ``reuse_outputs``; fewer than on the CPU to save GPU memory."""


def draw_key(generator: np.random.Generator) -> int:
    """Return the key of the next batch."""
    return int(generator.bit_generator.random_raw()) - 2**63  # 64 random bits as a signed integer


def pick(key: int, batch_size: int, rows: Ints, length: Ints, chunk_size: int) -> tuple[Ints, Ints]:
    """Return the row and the start of every window of a batch, both ``[batch_size]``: the row uniform among ``rows``,
    the start uniform within it. ``length`` holds the episode length of every row of the buffer."""
    numbers = torch.arange(2 * batch_size)
    bits = combine(torch.full_like(numbers, key), numbers).numpy().view(np.uint64) >> np.uint64(11)
    unit = (bits * 2.0**-53).reshape(batch_size, 2)  # a double has 53 significant bits
    chosen = rows[(unit[:, 0] * len(rows)).astype(np.int64)]
    return chosen, (unit[:, 1] * (length[chosen] - (chunk_size - 1))).astype(np.int64)


class Table:
    """The rows that are long enough for one chunk size, on the host and on the device."""

    def __init__(self, num_rows: int, chunk_size: int, device: torch.device) -> None:
        self.chunk_size = chunk_size
        self.rows: Ints = np.zeros(0, np.int64)
        self.length: Ints = np.zeros(0, np.int64)
        """Length of every row; never modified in place, as past draws are recomputed from it."""
        on_device = (torch.zeros(size, dtype=torch.int64, device=device) for size in (num_rows, 1, num_rows))
        self.on_device: tuple[Tensor, ...] = tuple(on_device)
        """``rows``, their number ``[1]``, and ``length``; at fixed addresses, as CUDA graphs require."""

    def refresh(self, length: Ints) -> None:
        """Update the table if the lengths have changed, without synchronizing with the GPU."""
        if length is self.length:
            return
        rows = np.flatnonzero(length >= self.chunk_size)
        if not len(rows):
            longest = int(length.max())
            raise ChunkSizeError(f"chunk_size is {self.chunk_size}, but the longest stored episode has {longest} steps")
        self.rows, self.length = rows, length
        for memory, values in zip(self.on_device, (rows, np.array([len(rows)]), length), strict=True):
            source = torch.from_numpy(values)
            source = source.pin_memory() if memory.is_cuda else source
            memory[: len(values)].copy_(source, non_blocking=True)


class DeviceOutput(Output):
    """Memory of a batch on a device; a reused one gets a CUDA graph that fills it."""

    is_used = False
    graph: Recorded[None] | None = None


@dataclass
class _Slot:
    """Staging memory for one row: pinned on the host, and on the device."""

    host: dict[Key, Tensor]
    device: dict[Key, Tensor]
    row: int = -1
    length: int = 0
    free: torch.cuda.Event | None = None
    """Recorded when the device no longer reads this slot."""


class DeviceMirror:
    """A copy of the shared buffer on a device, updated by a background thread; belongs to one process."""

    def __init__(self, buffer: SharedBuffer, device: torch.device) -> None:
        self._buffer, self._device = buffer, device
        self._frames = {key: torch.empty_like(value, device=device) for key, value in buffer.frames.items()}
        self._length: Ints = np.zeros(buffer.num_rows, np.int64)
        self._taken: Ints = np.zeros(buffer.num_rows, np.int64)
        """Sequence number of the last copy of each row."""
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._last_stream: torch.cuda.Stream | None = None
        self._key = torch.zeros(1, dtype=torch.int64, device=device)
        self._kernels: dict[Key, WindowKernel] = {}
        if kernels_work(device):  # draws also happen on the device, so that CUDA graphs can replay them
            from embodichain.agents.engine.mirror_kernel import WindowKernel  # imports Triton, which needs a GPU

            leaves = [leaf for leaf in buffer.layout.leaves if leaf.elements]
            self._kernels = {leaf.key: WindowKernel(self._frames[leaf.key], leaf.nbytes) for leaf in leaves}
        self._recorder = Recorder("batches are drawn")
        self._tables: dict[int, Table] = {}
        self._local = threading.local()
        self._complete = False
        self._empty: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(_SLOTS):
            host = buffer.layout.empty(buffer.max_steps, pin_memory=self._is_cuda)
            self._empty.put(_Slot(host, buffer.layout.empty(buffer.max_steps, device=device)))
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="embodichain-stream-mirror", daemon=True)
        self._thread.start()

    def sample(
        self, generator: np.random.Generator, batch_size: int, chunk_size: int, reuse_outputs: bool = False
    ) -> tuple[TensorDict, Callable[[], Ints]]:
        """Return a batch ``[batch_size, chunk_size]`` on the device, and a function that returns its rows.
        ``reuse_outputs`` cycles through a few batches, which CUDA graphs fill."""
        with self._lock:
            self._follow_stream()
            self._take_in()
            table = self._tables.get(chunk_size)
            if table is None:
                table = self._tables[chunk_size] = Table(self._buffer.num_rows, chunk_size, self._device)
            table.refresh(self._length)
            key = draw_key(generator)
            new_output = self._ring.get if reuse_outputs else self._new_output
            out = new_output(batch_size, chunk_size)
            self._fill(key, table, out)
            drawn = (key, batch_size, table.rows, table.length, chunk_size)
        return out.batch, lambda: pick(*drawn)[0]

    @property
    def _ring(self) -> OutputRing[DeviceOutput]:
        """Reused batches of this thread."""
        if not hasattr(self._local, "ring"):
            self._local.ring = OutputRing(self._new_output, _RING_SHAPES)
        ring: OutputRing[DeviceOutput] = self._local.ring
        return ring

    def _new_output(self, batch_size: int, chunk_size: int) -> DeviceOutput:
        tensors = self._buffer.layout.empty(batch_size, chunk_size, device=self._device)
        return DeviceOutput(tensors, batch_size, chunk_size, self._device)

    def _fill(self, key: int, table: Table, out: DeviceOutput) -> None:
        """Draw a batch and copy its windows: with one kernel per array on a GPU, else with ``index_select``."""
        if not self._kernels:
            self._select(key, table, out)
            return
        self._key.fill_(key)
        if out.graph is not None:
            out.graph.replay()
            return
        self._launch(table, out)
        if out.is_used and self._recorder.possible:  # second use: the kernels are compiled
            with torch.cuda.device(self._device):
                out.graph = self._recorder.attempt(lambda: record(lambda: self._launch(table, out)))
        out.is_used = True

    def _launch(self, table: Table, out: Output) -> None:
        with torch.cuda.device(self._device):
            for name, kernel in self._kernels.items():
                kernel(out.tensors[name], self._key, table.on_device, table.chunk_size)

    def _select(self, key: int, table: Table, out: Output) -> None:
        batch_size, max_steps = out.batch.batch_size[0], self._buffer.max_steps
        rows, starts = pick(key, batch_size, table.rows, table.length, table.chunk_size)
        index = torch.from_numpy(rows * max_steps + starts).to(self._device)
        count = len(table.length) * max_steps - table.chunk_size + 1
        for leaf in self._buffer.layout.leaves:  # overlapping windows, see ``sampling``
            size = table.chunk_size * leaf.elements
            windows = self._frames[leaf.key].as_strided((count, size), (leaf.elements, 1))
            torch.index_select(windows, 0, index, out=out.tensors[leaf.key].view(batch_size, size))

    def _follow_stream(self) -> None:
        """Make the current CUDA stream wait for the previous draw if that used another stream."""
        if self._is_cuda:
            stream = torch.cuda.current_stream(self._device)
            if self._last_stream is not None and stream != self._last_stream:
                stream.wait_stream(self._last_stream)
            self._last_stream = stream

    def close(self) -> None:
        """Stop the background thread."""
        self._closing.set()
        self._thread.join()

    def _take_in(self) -> None:
        """Copy the rows that have arrived into the mirror; the first call waits until all rows have."""
        if self._complete and self._arrived.empty() and self._error is None:
            return
        deadline = time.monotonic() + _FIRST_SECONDS
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._copy_in(self._arrived.get_nowait())
            if self._error is not None:
                raise self._error
            if self._length.all():
                self._complete = True
                return
            if time.monotonic() > deadline:
                missing = int((self._length == 0).sum())
                raise StreamStalledError(f"{missing} rows did not reach {self._device} in {_FIRST_SECONDS:g} s")
            time.sleep(_IDLE_SECONDS)

    def _copy_in(self, slot: _Slot) -> None:
        for key, value in slot.device.items():
            self._frames[key][slot.row, : slot.length].copy_(value[: slot.length], non_blocking=True)
        self._length = self._length.copy()  # earlier draws still reference the old lengths
        self._length[slot.row] = slot.length
        if self._is_cuda:
            slot.free = torch.cuda.Event()
            slot.free.record(torch.cuda.current_stream(self._device))
        self._empty.put(slot)

    def _follow(self) -> None:
        """Send changed rows to the device until the engine stops."""
        try:
            with torch.cuda.stream(self._stream) if self._is_cuda else contextlib.nullcontext():
                for row in self._changed_rows():
                    slot = self._next_slot()
                    if slot is not None:
                        self._arrived.put(slot) if self._send(row, slot) else self._empty.put(slot)
        except RuntimeError as error:  # the device failed: the next call of ``sample`` raises it
            self._error = error

    def _next_slot(self) -> _Slot | None:
        """Wait for a free slot and return it; None if the mirror is being closed."""
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
        """Copy one row to the device; return False if it was rewritten during the copy."""
        sequence = int(self._buffer.sequence[row])
        fence()
        slot.row, slot.length = row, int(self._buffer.length[row])
        for key, value in slot.host.items():
            value[: slot.length].copy_(self._buffer.frames[key][row, : slot.length])
        fence()
        if sequence % 2 or sequence != int(self._buffer.sequence[row]):
            return False
        for key, value in slot.device.items():
            value[: slot.length].copy_(slot.host[key][: slot.length], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        self._taken[row] = sequence
        return True
