"""Samples random windows of stored episodes while workers overwrite rows, and manages the memory of sampled batches.

The copy is one ``index_select`` per key over overlapping windows: the frames ``[num_rows, max_steps, ...]`` viewed as
``[num_rows * max_steps - chunk_size + 1, chunk_size, ...]`` with the stride of one frame, so that window
``row * max_steps + start`` is contiguous. Allocating fresh pages costs more than the copy, so each thread reuses the
memory of its batches: see :class:`OutputPool` and :class:`OutputRing`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.datasets.frames import FrameLayout, Key, Leaf, unflatten
from embodichain.agents.engine.shared_buffer import Floats, Ints, SharedBuffer
from embodichain.agents.processes.shared_memory import fence
from embodichain.errors import ChunkSizeError, StreamStalledError

RING_SIZE = 2
"""One batch in use while the next is sampled; more would evict the frames from the CPU caches."""
STALL_SECONDS = 60.0
"""Longest wait for rows that are being written. A row left half-written by a killed worker stays so until its
replacement has started."""
_POOL_SIZE = 8
_NONE: Ints = np.zeros(0, np.int64)

# Reference count of a storage; torch has no public API for it.
_use_count: Callable[[int], int] = torch._C._storage_Use_Count


class Output:
    """Memory of a batch, contiguous ``[batch_size, chunk_size, ...]`` per key, and the TensorDict of these tensors."""

    def __init__(
        self, tensors: dict[Key, Tensor], batch_size: int, chunk_size: int, device: torch.device | None = None
    ) -> None:
        self.tensors = tensors
        # The shapes are known to be valid; the checks of the public constructor would dominate the cost.
        self.batch = TensorDict._new_unsafe(unflatten(tensors), torch.Size((batch_size, chunk_size)), device)


AnyOutput = TypeVar("AnyOutput", bound=Output)


class _Block:
    """Memory of one tensor of a batch."""

    def __init__(self, leaf: Leaf, frames: int) -> None:
        self._leaf, self.frames = leaf, frames
        self._base = torch.empty(frames * leaf.elements, dtype=leaf.dtype)
        self.storage = self._base.untyped_storage()
        self._own_count = _use_count(self.storage._cdata)

    def is_free(self) -> bool:
        return _use_count(self.storage._cdata) == self._own_count

    def tensor(self, batch_size: int, chunk_size: int) -> Tensor:
        """Return a new tensor ``[batch_size, chunk_size, ...]`` on this memory."""
        leaf = self._leaf
        return self._base.as_strided((batch_size, chunk_size, *leaf.shape), (chunk_size * leaf.elements, *leaf.strides))


class OutputPool:
    """Memory that is reused once nothing references the batch: no tensor, view or saved autograd input."""

    def __init__(self, layout: FrameLayout) -> None:
        self._layout = layout
        self._blocks: dict[Key, list[_Block]] = {leaf.key: [] for leaf in layout.leaves}

    def get(self, batch_size: int, chunk_size: int) -> Output:
        """Return memory that nothing else references."""
        blocks = {leaf.key: self._block(leaf, batch_size * chunk_size) for leaf in self._layout.leaves}
        tensors = {key: block.tensor(batch_size, chunk_size) for key, block in blocks.items()}
        return Output(tensors, batch_size, chunk_size)

    def _block(self, leaf: Leaf, frames: int) -> _Block:
        blocks = self._blocks[leaf.key]
        for index, block in enumerate(blocks):
            if block.is_free():
                # Memory shared with another process is not reused: references there are not counted.
                if block.frames < frames or block.storage.is_shared():
                    block = blocks[index] = _Block(leaf, frames)
                return block
        if len(blocks) == _POOL_SIZE:  # the caller keeps many batches: stop tracking the oldest block
            blocks.pop(0)
        blocks.append(_Block(leaf, frames))
        return blocks[-1]


class OutputRing(Generic[AnyOutput]):
    """Cycles through ``RING_SIZE`` batches per shape: each is overwritten by the ``RING_SIZE``-th later draw."""

    def __init__(self, new_output: Callable[[int, int], AnyOutput], shapes: int = 16) -> None:
        """``new_output(batch_size, chunk_size)`` allocates a batch; at most ``shapes`` shapes are kept."""
        self._new_output, self._shapes = new_output, shapes
        self._rings: dict[tuple[int, int], list[AnyOutput]] = {}

    def get(self, batch_size: int, chunk_size: int) -> AnyOutput:
        """Return the least recently returned batch of this shape."""
        shape = (batch_size, chunk_size)
        ring = self._rings.get(shape)
        if ring is None:
            if len(self._rings) == self._shapes:
                self._rings.pop(next(iter(self._rings)))
            ring = self._rings[shape] = [self._new_output(*shape) for _ in range(RING_SIZE)]
        ring.append(ring.pop(0))
        return ring[-1]


@dataclass
class Candidates:
    """A snapshot of the rows: all sequence numbers, and the rows whose episode is long enough for a chunk."""

    stamp: bytes
    """Sequence numbers of all rows, as int64 bytes."""
    lengths: bytes
    """Episode lengths of all rows, as int64 bytes."""
    chunk_size: int
    rows: Ints
    """Rows with an episode of at least ``chunk_size`` steps."""
    first: Ints
    """First window of each of ``rows``."""
    starts: Floats
    """Number of windows in each of ``rows``."""

    @property
    def sequence(self) -> Ints:
        """Sequence numbers of all rows."""
        return np.frombuffer(self.stamp, np.int64)

    def length_of(self, chosen: Ints) -> Ints:
        """Return the episode lengths of ``rows[chosen]``."""
        return np.frombuffer(self.lengths, np.int64)[self.rows[chosen]]

    @cached_property
    def is_busy(self) -> bool:
        """Whether any row was being written."""
        return bool(np.bitwise_or.reduce(self.sequence) & 1)


class WindowSampler:
    """Samples windows from a shared buffer; one instance per thread."""

    def __init__(self, buffer: SharedBuffer, check_state: Callable[[], None] = lambda: None) -> None:
        """``check_state`` is called while the sampler waits, and raises if the engine has failed or stopped."""
        self.buffer = buffer
        self._check_state = check_state
        self._windows: dict[int, list[Tensor]] = {}
        self._known = Candidates(b"", b"", 0, _NONE, _NONE, np.zeros(0))

    def draw(self, generator: np.random.Generator, out: Output, batch_size: int, chunk_size: int) -> tuple[Ints, int]:
        """Fill ``out``; return the windows ``row * max_steps + start`` and the number of redrawn ones.
        An episode is drawn uniformly among those that are long enough, then a start uniformly within it."""
        known, chosen, picks = self.pick(generator, batch_size, chunk_size)
        index = torch.from_numpy(picks)
        for windows, target in zip(self._windows_of(chunk_size), out.tensors.values(), strict=True):
            torch.index_select(windows, 0, index, out=target)
        changed = self.changed(known, chosen)
        return picks, self._redraw(generator, out, picks, changed, chunk_size) if len(changed) else 0

    def _redraw(self, generator: np.random.Generator, out: Output, picks: Ints, changed: Ints, chunk_size: int) -> int:
        """Replace only the windows whose row changed while it was copied; return the number of draws."""
        pairs = list(zip(self._windows_of(chunk_size), out.tensors.values(), strict=True))
        redrawn, deadline = 0, 0.0
        while len(changed):
            redrawn += len(changed)
            known, chosen, picks[changed] = self.pick(generator, len(changed), chunk_size)
            for slot, window in zip(changed.tolist(), picks[changed].tolist(), strict=True):
                for source, target in pairs:
                    target.select(0, slot).copy_(source.select(0, window))
            again = self.changed(known, chosen)
            if len(again) == len(changed):
                deadline = self.wait_for_writers(deadline)
            changed = changed[again]
        return redrawn

    def pick(self, generator: np.random.Generator, count: int, chunk_size: int) -> tuple[Candidates, Ints, Ints]:
        """Draw ``count`` windows without copying them: return the candidates, the indices into their ``rows``, and the
        windows. Some of these rows may be in the middle of a write."""
        deadline = 0.0
        while True:
            known = self._candidates(chunk_size)
            if len(known.rows):
                # floor(u * n) is uniform on 0 .. n-1 (up to 2^-53) and faster than bounded integers.
                u = generator.random(2 * count)
                chosen = (u[:count] * len(known.rows)).astype(np.int64)
                return known, chosen, known.first[chosen] + (u[count:] * known.starts[chosen]).astype(np.int64)
            if not known.is_busy:  # else a row that is being written may become long enough
                length = np.frombuffer(known.lengths, np.int64)
                longest = int(length.max(initial=0))
                raise ChunkSizeError(
                    f"chunk_size is {chunk_size}, but the longest of the {int((length > 0).sum())} stored episodes has "
                    f"{longest} steps: use a chunk_size of at most {longest}"
                )
            deadline = self.wait_for_writers(deadline)

    def _candidates(self, chunk_size: int) -> Candidates:
        """Take a snapshot of all rows, or reuse the last one if nothing has changed."""
        known, stamp = self._known, self.buffer.sequence.tobytes()
        if chunk_size != known.chunk_size:
            known = Candidates(b"", b"", chunk_size, _NONE, _NONE, known.starts)
        if stamp == known.stamp:
            return known
        fence()  # read sequence numbers before lengths: a later change of a length is then detected
        rows, first, starts, lengths = known.rows, known.first, known.starts, self.buffer.length.tobytes()
        if lengths != known.lengths:
            length = np.frombuffer(lengths, np.int64)
            rows = np.flatnonzero(length >= chunk_size)
            first, starts = rows * self.buffer.max_steps, (length[rows] - (chunk_size - 1)).astype(np.float64)
        self._known = Candidates(stamp, lengths, chunk_size, rows, first, starts)
        return self._known

    def changed(self, known: Candidates, chosen: Ints) -> Ints:
        """Return the indices into ``chosen`` whose row was written during or after the snapshot ``known``."""
        fence()
        now = self.buffer.sequence.tobytes()
        if now == known.stamp and not known.is_busy:
            return _NONE
        # Sequence numbers only grow: an odd one with its last bit cleared differs from every later one.
        changed = np.frombuffer(now, np.int64) != known.sequence & -2
        marks = changed[known.rows[chosen]]
        return np.flatnonzero(marks) if b"\1" in marks.tobytes() else _NONE

    def _windows_of(self, chunk_size: int) -> list[Tensor]:
        """Return views of all windows, one per key; windows overlap in memory."""
        if chunk_size not in self._windows:
            count, buffer = self.buffer.num_rows * self.buffer.max_steps - chunk_size + 1, self.buffer
            self._windows[chunk_size] = [
                buffer.frames[leaf.key].as_strided((count, chunk_size, *leaf.shape), (leaf.elements, *leaf.strides))
                for leaf in buffer.layout.leaves
            ]
        return self._windows[chunk_size]

    def wait_for_writers(self, deadline: float) -> float:
        """Sleep briefly while rows are being written; return the deadline for the next call (0 in the first call).
        Raises ``StreamStalledError`` after the deadline."""
        self._check_state()
        now = time.monotonic()
        if deadline and now > deadline:
            raise StreamStalledError(
                f"no row could be read for {STALL_SECONDS:g} s: all that may be long enough are being written; if that "
                "is because they are rewritten faster than a chunk can be copied, raise buffer_size"
            )
        time.sleep(0.0002)
        return deadline or now + STALL_SECONDS
