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
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.engine.layout import FrameLayout, Key, unflatten

RING_SIZE = 4
_POOL_SIZE = 8
_RING_SHAPES = 16

# How many tensors share a storage. torch has the number but no public name for it; without it nothing is recycled.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


@dataclass
class Output:
    """One batch to be filled: what the gather writes to, and what the caller gets."""

    flat: dict[Key, Tensor]
    """``[batch_size, chunk_size * elements]`` per key."""
    batch: TensorDict
    """The same memory as ``[batch_size, chunk_size]``."""


class Outputs(Protocol):
    """A supply of batches to fill."""

    def get(self, batch_size: int, chunk_size: int) -> Output:
        """Return memory for one batch."""


class _Block:
    """Memory for ``frames`` frames, one storage per key so that keeping one key does not keep the others alive."""

    def __init__(self, layout: FrameLayout, frames: int) -> None:
        self.frames = frames
        self.layout = layout
        self._bases = [torch.empty(frames * leaf.elements, dtype=leaf.dtype) for leaf in layout.leaves]
        self._storages = [base.untyped_storage() for base in self._bases]
        self._unshared = [self._count(storage) for storage in self._storages]

    @staticmethod
    def _count(storage: torch.UntypedStorage) -> int:
        return -1 if _use_count is None else _use_count(storage._cdata)

    def is_free(self) -> bool:
        """Tell whether no tensor but our own uses this memory."""
        if _use_count is None:
            return False
        return all(_use_count(s._cdata) == n for s, n in zip(self._storages, self._unshared, strict=True))

    def is_shared(self) -> bool:
        """Tell whether the memory went to another process (a DataLoader does that), whose holders cannot be counted."""
        return any(base.is_shared() for base in self._bases)

    def output(self, batch_size: int, chunk_size: int) -> Output:
        """Return new tensors on the first ``batch_size * chunk_size`` frames."""
        flat, shaped = {}, {}
        for leaf, base in zip(self.layout.leaves, self._bases, strict=True):
            width = chunk_size * leaf.elements
            flat[leaf.key] = base.as_strided((batch_size, width), (width, 1))
            shaped[leaf.key] = flat[leaf.key].view(batch_size, chunk_size, *leaf.shape)
        return Output(flat, TensorDict(unflatten(shaped), batch_size=[batch_size, chunk_size]))


class OutputPool:
    """Memory that is used again once nobody holds it."""

    def __init__(self, layout: FrameLayout) -> None:
        self._layout = layout
        self._blocks: list[_Block] = []

    def get(self, batch_size: int, chunk_size: int) -> Output:
        """Return memory for one batch that nothing else refers to."""
        return self._block(batch_size * chunk_size).output(batch_size, chunk_size)

    def _block(self, frames: int) -> _Block:
        self._blocks = [block for block in self._blocks if not block.is_shared()]
        for index, block in enumerate(self._blocks):
            if block.is_free():
                if block.frames < frames:
                    self._blocks[index] = block = _Block(self._layout, frames)
                return block
        block = _Block(self._layout, frames)
        # Beyond the limit the caller hoards batches: the oldest is his now, and forgotten here.
        self._blocks = [*self._blocks[-(_POOL_SIZE - 1) :], block]
        return block


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
            blocks = [_Block(self._layout, batch_size * chunk_size) for _ in range(RING_SIZE)]
            ring = self._rings[(batch_size, chunk_size)] = [block.output(batch_size, chunk_size) for block in blocks]
        ring.append(ring.pop(0))
        return ring[-1]
