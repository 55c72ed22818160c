"""Memory for sampled batches: fresh pages cost more than the copy itself, so memory is used again.

Two ways, both per thread:

* :class:`OutputPool` gives out memory that nobody holds any more. Every batch is the caller's own for as long as the
  caller keeps it, or a view of it, or a gradient that saved it.
* :class:`OutputRing` gives out the same few TensorDicts in turn, which also saves building them. A batch is
  overwritten by the ``RING_SIZE``-th draw of its shape after it, by the same thread; a ``clone()`` lives longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.datasets.frames import FrameLayout, Key, Leaf, unflatten

RING_SIZE = 2
"""One batch to work with while the next is drawn; more of them would take the place of the frames in the caches."""
_RING_SHAPES = 16
_POOL_SIZE = 8

# How many tensors share a storage. torch has the number but no public name for it; without it nothing is recycled.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class Target:
    """Where the windows of a batch are copied to."""

    def __init__(self, tensors: dict[Key, Tensor]) -> None:
        self.tensors = tensors
        """``[batch_size, chunk_size, ...]`` per key, contiguous."""

    @cached_property
    def bytes(self) -> list[NDArray[np.uint8]]:
        """The same memory, ``[batch_size, chunk_size * bytes_per_frame]`` per key, for copying single windows."""
        return [value.flatten(1).view(torch.uint8).numpy() for value in self.tensors.values()]

    def as_batch(self, batch_size: int, chunk_size: int) -> TensorDict:
        """Return a nested batch ``[batch_size, chunk_size]`` on this memory."""
        # The shapes are ours; the checks of the public constructor take several times as long as the rest.
        return TensorDict._new_unsafe(unflatten(self.tensors), batch_size=torch.Size((batch_size, chunk_size)))


class _Block:
    """Memory for one array of a batch."""

    def __init__(self, leaf: Leaf, frames: int) -> None:
        self.frames = frames
        self._leaf = leaf
        self._base = torch.empty(frames * leaf.elements, dtype=leaf.dtype)
        self._storage = self._base.untyped_storage()
        self._own_count = self._count()

    def _count(self) -> int:
        return -1 if _use_count is None else _use_count(self._storage._cdata)

    def is_free(self) -> bool:
        """Tell whether no tensor but our own uses this memory."""
        return _use_count is not None and self._count() == self._own_count

    def is_shared(self) -> bool:
        """Tell whether the memory went to another process (a DataLoader does that), whose holders cannot be counted."""
        return self._storage.is_shared()

    def tensor(self, batch_size: int, chunk_size: int) -> Tensor:
        """Return a new tensor ``[batch_size, chunk_size, ...]`` on this memory."""
        leaf = self._leaf
        return self._base.as_strided((batch_size, chunk_size, *leaf.shape), (chunk_size * leaf.elements, *leaf.strides))


class OutputPool:
    """Memory that is used again once nobody holds it."""

    def __init__(self, layout: FrameLayout) -> None:
        self._layout = layout
        self._blocks: dict[Key, list[_Block]] = {leaf.key: [] for leaf in layout.leaves}

    def get(self, batch_size: int, chunk_size: int) -> Target:
        """Return memory that nothing else refers to."""
        frames, leaves = batch_size * chunk_size, self._layout.leaves
        return Target({leaf.key: self._block(leaf, frames).tensor(batch_size, chunk_size) for leaf in leaves})

    def _block(self, leaf: Leaf, frames: int) -> _Block:
        blocks = self._blocks[leaf.key]
        for index, block in enumerate(blocks):
            if block.is_free():
                if block.frames < frames or block.is_shared():
                    block = blocks[index] = _Block(leaf, frames)
                return block
        if len(blocks) == _POOL_SIZE:  # the caller hoards batches: the oldest is his now, and forgotten here
            blocks.pop(0)
        blocks.append(_Block(leaf, frames))
        return blocks[-1]


@dataclass
class Output:
    """One batch to be filled again and again."""

    target: Target
    batch: TensorDict
    """The same memory as ``[batch_size, chunk_size]``."""


class OutputRing:
    """The same ``RING_SIZE`` TensorDicts per shape, in turn."""

    def __init__(self, layout: FrameLayout) -> None:
        self._layout = layout
        self._rings: dict[tuple[int, int], list[Output]] = {}

    def get(self, batch_size: int, chunk_size: int) -> Output:
        """Return the batch of this shape that was given out longest ago."""
        ring = self._rings.get((batch_size, chunk_size))
        if ring is None:
            if len(self._rings) == _RING_SHAPES:
                self._rings.pop(next(iter(self._rings)))
            ring = self._rings[(batch_size, chunk_size)] = [self._new(batch_size, chunk_size) for _ in range(RING_SIZE)]
        ring.append(ring.pop(0))
        return ring[-1]

    def _new(self, batch_size: int, chunk_size: int) -> Output:
        leaves = self._layout.leaves
        target = Target(
            {leaf.key: torch.empty(batch_size, chunk_size, *leaf.shape, dtype=leaf.dtype) for leaf in leaves}
        )
        return Output(target, target.as_batch(batch_size, chunk_size))
