"""Scratch memory for MuJoCo Warp that is taken once.

Each of its steps makes and drops dozens of arrays. Recorded in a graph they become nodes that allocate and free memory
at every replay. With this allocator a first run takes the memory, and the recording finds it there.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

_GRAIN = 512  # bytes; what torch aligns its own memory to


class Workspace:
    """An allocator for Warp (its ``Allocator`` protocol) that keeps what is given back, for the next of that size.

    Memory is used again at once, so all work on it has to be on one stream, or in one graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._used: dict[int, Tensor] = {}

    def allocate(self, size_in_bytes: int) -> int:
        """Return the address of free memory."""
        size = -(-size_in_bytes // _GRAIN) * _GRAIN
        free = self._free[size]
        block = free.pop() if free else torch.empty(size, dtype=torch.uint8, device=self._device)
        self._used[block.data_ptr()] = block
        return block.data_ptr()

    def deallocate(self, ptr: int, size_in_bytes: int) -> None:
        """Take memory back."""
        block = self._used.pop(ptr)
        self._free[block.numel()].append(block)

    @property
    def num_bytes(self) -> int:
        """Bytes taken so far."""
        blocks = [*self._used.values(), *(block for free in self._free.values() for block in free)]
        return sum(block.numel() for block in blocks)
