"""What to draw from a mirrored buffer, and how the windows are copied.

A key, one number of the caller's generator, decides a whole batch: item ``i`` takes the hashes ``2i`` and ``2i + 1`` of
it, for its episode and for its start. A GPU computes them where they are used, so that nothing but the key is sent to
it; the CPU can compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from embodichain.agents.engine.layout import Key, Leaf
from embodichain.agents.engine.shared_buffer import Ints
from embodichain.agents.utils.kernels import kernels_work
from embodichain.envs.random import combine
from embodichain.errors import ChunkSizeError

if TYPE_CHECKING:
    from embodichain.agents.engine.mirror_kernel import WindowKernel


def draw_key(generator: np.random.Generator) -> int:
    """Return the key of the next batch."""
    return int(generator.bit_generator.random_raw()) - 2**63  # any 64 bits, as a signed number


def pick(key: int, batch_size: int, rows: Ints, length: Ints, chunk_size: int) -> tuple[Ints, Ints]:
    """Return the row and the start of every window: a row uniformly among ``rows``, a start uniformly within it."""
    numbers = torch.arange(2 * batch_size)
    bits = combine(torch.full_like(numbers, key), numbers).numpy().view(np.uint64) >> np.uint64(11)
    unit = (bits * 2.0**-53).reshape(batch_size, 2)  # 53 bits fill a double
    chosen = rows[(unit[:, 0] * len(rows)).astype(np.int64)]
    return chosen, (unit[:, 1] * (length[chosen] - (chunk_size - 1))).astype(np.int64)


@dataclass
class Table:
    """The rows that are long enough for chunks of one size, here and on the device."""

    chunk_size: int
    rows: Ints
    length: Ints
    """Length of every row; never written to, so that what was drawn can be told later."""
    on_device: tuple[Tensor, Tensor, Tensor]
    """``rows``, their number ``[1]``, and ``length``; the same memory for as long as the table lives."""

    @classmethod
    def of(cls, length: Ints, chunk_size: int, device: torch.device) -> Table:
        """Make the table for chunks of a size."""
        sizes = (len(length), 1, len(length))
        room = tuple(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes)
        table = cls(chunk_size, length[:0], length[:0], (room[0], room[1], room[2]))
        table.refresh(length)
        return table

    def refresh(self, length: Ints) -> None:
        """Take in new lengths, unless they are those already known; a GPU is not waited for."""
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


class WindowCopier:
    """Copies drawn windows of all keys on a device: by one kernel per key on a GPU, else by ``index_select``."""

    def __init__(self, frames: dict[Key, Tensor], leaves: tuple[Leaf, ...], device: torch.device) -> None:
        self._frames, self._leaves, self._device = frames, leaves, device
        self._key = torch.zeros(1, dtype=torch.int64, device=device)
        self.in_kernels = kernels_work(device)
        """Whether the draws, too, happen on the device: what is launched then depends on no number of the host."""
        self._kernels = _kernels(frames, leaves) if self.in_kernels else {}

    def room(self, batch_size: int, chunk_size: int) -> dict[Key, Tensor]:
        """Return fresh memory ``[batch_size, chunk_size, ...]`` for every key."""
        return {
            leaf.key: torch.empty((batch_size, chunk_size, *leaf.shape), dtype=leaf.dtype, device=self._device)
            for leaf in self._leaves
        }

    def set_key(self, key: int) -> None:
        """Say what ``launch`` is to draw."""
        self._key.fill_(key)

    def launch(self, table: Table, out: dict[Key, Tensor]) -> None:
        """Draw and copy in kernels."""
        with torch.cuda.device(self._device):
            for name, kernel in self._kernels.items():
                kernel(out[name], self._key, table.on_device, table.chunk_size)

    def fill(self, key: int, table: Table, out: dict[Key, Tensor]) -> None:
        """Draw and copy a batch."""
        if self.in_kernels:
            self.set_key(key)
            self.launch(table, out)
            return
        batch_size = next(iter(out.values())).shape[0]
        rows, starts = pick(key, batch_size, table.rows, table.length, table.chunk_size)
        max_steps = next(iter(self._frames.values())).shape[1]
        index = torch.from_numpy(rows * max_steps + starts).to(self._device)
        count = len(table.length) * max_steps - table.chunk_size + 1
        for leaf in self._leaves:  # all windows of a key, overlapping in memory; see ``sampling``
            size = table.chunk_size * leaf.elements
            windows = self._frames[leaf.key].as_strided((count, size), (leaf.elements, 1))
            torch.index_select(windows, 0, index, out=out[leaf.key].view(batch_size, size))


def _kernels(frames: dict[Key, Tensor], leaves: tuple[Leaf, ...]) -> dict[Key, WindowKernel]:
    from embodichain.agents.engine.mirror_kernel import WindowKernel  # triton is there on a GPU alone

    return {leaf.key: WindowKernel(frames[leaf.key], leaf.nbytes) for leaf in leaves if leaf.elements}
