"""Random windows of stored episodes, gathered while workers overwrite rows, and the memory of sampled batches.

The copy is one ``index_select`` per key over overlapping windows: the frames ``[num_rows, max_steps, ...]`` viewed as
``[num_rows * max_steps - chunk_size + 1, chunk_size, ...]`` with the stride of one frame, so that window
``row * max_steps + start`` is contiguous. Fresh pages cost more than the copy itself, so each thread uses the memory of
batches again: :class:`OutputPool` and :class:`OutputRing`.
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
"""One batch to work with while the next is drawn; more of them would push the frames out of the caches."""
STALL_SECONDS = 60.0
"""Longest wait for rows being rewritten; a new worker, slow to start, repairs what a killed one left half-written."""
_POOL_SIZE = 8
_NONE: Ints = np.zeros(0, np.int64)

# How many tensors share a storage; torch has no public name for it.
_use_count: Callable[[int], int] = torch._C._storage_Use_Count


class Output:
    """Memory for a batch: ``[batch_size, chunk_size, ...]`` per key, contiguous, and the batch on it."""

    def __init__(
        self, tensors: dict[Key, Tensor], batch_size: int, chunk_size: int, device: torch.device | None = None
    ) -> None:
        self.tensors = tensors
        # The shapes are ours; the checks of the public constructor take several times as long as the rest.
        self.batch = TensorDict._new_unsafe(unflatten(tensors), torch.Size((batch_size, chunk_size)), device)


AnyOutput = TypeVar("AnyOutput", bound=Output)


class _Block:
    """Memory for one array of a batch."""

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
    """Memory that is used again once nobody holds the batch, a view of it, or a gradient that saved it."""

    def __init__(self, layout: FrameLayout) -> None:
        self._layout = layout
        self._blocks: dict[Key, list[_Block]] = {leaf.key: [] for leaf in layout.leaves}

    def get(self, batch_size: int, chunk_size: int) -> Output:
        """Return memory that nothing else refers to."""
        blocks = {leaf.key: self._block(leaf, batch_size * chunk_size) for leaf in self._layout.leaves}
        tensors = {key: block.tensor(batch_size, chunk_size) for key, block in blocks.items()}
        return Output(tensors, batch_size, chunk_size)

    def _block(self, leaf: Leaf, frames: int) -> _Block:
        blocks = self._blocks[leaf.key]
        for index, block in enumerate(blocks):
            if block.is_free():
                # Memory that went to another process is not used again: its holders there cannot be counted.
                if block.frames < frames or block.storage.is_shared():
                    block = blocks[index] = _Block(leaf, frames)
                return block
        if len(blocks) == _POOL_SIZE:  # the caller keeps many batches: the oldest block is not tracked any more
            blocks.pop(0)
        blocks.append(_Block(leaf, frames))
        return blocks[-1]


class OutputRing(Generic[AnyOutput]):
    """The same ``RING_SIZE`` batches per shape, in turn: each is overwritten by the ``RING_SIZE``-th draw after it."""

    def __init__(self, new_output: Callable[[int, int], AnyOutput], shapes: int = 16) -> None:
        """``new_output`` makes batches; for more than ``shapes`` shapes, the oldest are dropped."""
        self._new_output, self._shapes = new_output, shapes
        self._rings: dict[tuple[int, int], list[AnyOutput]] = {}

    def get(self, batch_size: int, chunk_size: int) -> AnyOutput:
        """Return the batch of this shape that was given out longest ago."""
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
    """A snapshot of the rows: all sequence numbers, and where long enough episodes are."""

    stamp: bytes
    """The sequence numbers of all rows."""
    lengths: bytes
    """The lengths of all rows."""
    chunk_size: int
    rows: Ints
    """The rows with a long enough episode."""
    first: Ints
    """The first window of each of these rows."""
    starts: Floats
    """How many windows each of these rows has."""

    @property
    def sequence(self) -> Ints:
        """The sequence numbers as numbers."""
        return np.frombuffer(self.stamp, np.int64)

    def length_of(self, chosen: Ints) -> Ints:
        """Return the lengths of the episodes in these of the rows."""
        return np.frombuffer(self.lengths, np.int64)[self.rows[chosen]]

    @cached_property
    def is_busy(self) -> bool:
        """Whether any row was being written."""
        return bool(np.bitwise_or.reduce(self.sequence) & 1)


class WindowSampler:
    """Draws windows from a shared buffer; one per thread."""

    def __init__(self, buffer: SharedBuffer, check_state: Callable[[], None] = lambda: None) -> None:
        """``check_state`` is called while the sampler waits, to end the waiting by an exception if it is in vain."""
        self.buffer = buffer
        self._check_state = check_state
        self._windows: dict[int, list[Tensor]] = {}
        self._known = Candidates(b"", b"", 0, _NONE, _NONE, np.zeros(0))

    def draw(self, generator: np.random.Generator, out: Output, batch_size: int, chunk_size: int) -> tuple[Ints, int]:
        """Fill ``out``; return the windows drawn (``row * max_steps + start``), and how many were drawn again.
        An episode is drawn uniformly from those that are long enough, then a start uniformly within it."""
        known, chosen, picks = self.pick(generator, batch_size, chunk_size)
        index = torch.from_numpy(picks)
        for windows, target in zip(self._windows_of(chunk_size), out.tensors.values(), strict=True):
            torch.index_select(windows, 0, index, out=target)
        changed = self.changed(known, chosen)
        return picks, self._redraw(generator, out, picks, changed, chunk_size) if len(changed) else 0

    def _redraw(self, generator: np.random.Generator, out: Output, picks: Ints, changed: Ints, chunk_size: int) -> int:
        """Replace the windows whose row changed while it was copied, and only those; return how often."""
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
        """Choose ``count`` windows: return the candidates, which of their rows were chosen, and the windows.
        Some of these rows may be in the middle of a write."""
        deadline = 0.0
        while True:
            known = self._candidates(chunk_size)
            if len(known.rows):
                # u * n, rounded down, is uniform on 0 .. n-1 (to 2^-53) and cheaper than bounded integers.
                u = generator.random(2 * count)
                chosen = (u[:count] * len(known.rows)).astype(np.int64)
                return known, chosen, known.first[chosen] + (u[count:] * known.starts[chosen]).astype(np.int64)
            if not known.is_busy:  # else a row that is being written may turn out long enough
                length = np.frombuffer(known.lengths, np.int64)
                longest = int(length.max(initial=0))
                raise ChunkSizeError(
                    f"chunk_size is {chunk_size}, but the longest of the {int((length > 0).sum())} stored episodes has "
                    f"{longest} steps: use a chunk_size of at most {longest}"
                )
            deadline = self.wait_for_writers(deadline)

    def _candidates(self, chunk_size: int) -> Candidates:
        """Look at all rows; what was found out last time is not worked out again where nothing has changed."""
        known, stamp = self._known, self.buffer.sequence.tobytes()
        if chunk_size != known.chunk_size:
            known = Candidates(b"", b"", chunk_size, _NONE, _NONE, known.starts)
        if stamp == known.stamp:
            return known
        fence()  # sequence numbers before lengths: a length that changes later fails the check
        rows, first, starts, lengths = known.rows, known.first, known.starts, self.buffer.length.tobytes()
        if lengths != known.lengths:
            length = np.frombuffer(lengths, np.int64)
            rows = np.flatnonzero(length >= chunk_size)
            first, starts = rows * self.buffer.max_steps, (length[rows] - (chunk_size - 1)).astype(np.float64)
        self._known = Candidates(stamp, lengths, chunk_size, rows, first, starts)
        return self._known

    def changed(self, known: Candidates, chosen: Ints) -> Ints:
        """Return the indices into ``chosen`` whose row was being written at the time of ``known`` or has been since."""
        fence()
        now = self.buffer.sequence.tobytes()
        if now == known.stamp and not known.is_busy:
            return _NONE
        # Numbers only grow: with the last bit cleared, an odd one differs from all that can follow.
        changed = np.frombuffer(now, np.int64) != known.sequence & -2
        marks = changed[known.rows[chosen]]
        return np.flatnonzero(marks) if b"\1" in marks.tobytes() else _NONE

    def _windows_of(self, chunk_size: int) -> list[Tensor]:
        """Return all windows of every key, which overlap in memory."""
        if chunk_size not in self._windows:
            count, buffer = self.buffer.num_rows * self.buffer.max_steps - chunk_size + 1, self.buffer
            self._windows[chunk_size] = [
                buffer.frames[leaf.key].as_strided((count, chunk_size, *leaf.shape), (leaf.elements, *leaf.strides))
                for leaf in buffer.layout.leaves
            ]
        return self._windows[chunk_size]

    def wait_for_writers(self, deadline: float) -> float:
        """Wait a moment for rows that are being written; raise if that takes too long. ``deadline`` is 0 at first,
        then what this returned."""
        self._check_state()
        now = time.monotonic()
        if deadline and now > deadline:
            raise StreamStalledError(
                f"no row could be read for {STALL_SECONDS:g} s: all that may be long enough are being written; if that "
                "is because they are rewritten faster than a chunk can be copied, raise buffer_size"
            )
        time.sleep(0.0002)
        return deadline or now + STALL_SECONDS
