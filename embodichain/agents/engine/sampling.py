"""Random windows of stored episodes, gathered while workers overwrite rows.

The picks are numpy on a few hundred row headers. The copy is one ``index_select`` per key over overlapping windows:
the frames ``[num_rows, max_steps, ...]`` seen as ``[num_rows * max_steps - chunk_size + 1, chunk_size * elements]``
with the stride of one frame, so that window ``row * max_steps + start`` is one contiguous piece of memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodichain.agents.engine.layout import Key
from embodichain.agents.engine.ordering import fence
from embodichain.agents.engine.shared_buffer import Ints, SharedBuffer
from embodichain.errors import ChunkSizeError, StreamStalledError

STALL_SECONDS = 10.0
"""How long a reader waits for rows that are being rewritten before it says so."""


@dataclass
class Picks:
    """Which windows to copy, and the sequence numbers their rows had when they were picked."""

    rows: Ints
    starts: Ints
    sequence: Ints

    def __len__(self) -> int:
        return len(self.rows)


class WindowSampler:
    """Draws windows from a shared buffer; one per thread."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self.buffer = buffer
        self._windows: dict[int, dict[Key, Tensor]] = {}

    def draw(
        self, generator: np.random.Generator, out: dict[Key, Tensor], batch_size: int, chunk_size: int
    ) -> tuple[Ints, int]:
        """Fill ``out`` (``[batch_size, chunk_size * elements]`` per key); return the rows drawn and how many again.

        An episode is drawn uniformly from those that are long enough, then a start uniformly within it.
        """
        picks = self.pick(generator, batch_size, chunk_size)
        windows = self._windows_of(chunk_size)
        index = torch.from_numpy(picks.rows * self.buffer.max_steps + picks.starts)
        for key, window in windows.items():
            torch.index_select(window, 0, index, out=out[key])
        changed = self._changed(picks)
        if not len(changed):
            return picks.rows, 0
        return self._redraw(generator, out, picks, changed, chunk_size)

    def pick(self, generator: np.random.Generator, count: int, chunk_size: int) -> Picks:
        """Choose ``count`` windows among the rows that nobody is writing to."""
        deadline = 0.0
        while True:
            sequence = self.buffer.sequence.copy()  # before the lengths: a length that changes later fails the check
            fence()
            length = self.buffer.length.copy()
            rows = np.flatnonzero((length >= chunk_size) & (sequence & 1 == 0))
            if len(rows):
                # u * n, rounded down, is uniform on 0 .. n-1 (to 2^-53) and cheaper than bounded integers.
                u = generator.random((2, count))
                chosen = rows[(u[0] * len(rows)).astype(np.int64)]
                starts = (u[1] * (length[chosen] - (chunk_size - 1))).astype(np.int64)
                return Picks(chosen, starts, sequence[chosen])
            self._explain_nothing_long_enough(sequence, length, chunk_size)
            deadline = self._wait_for_writers(deadline)

    def _redraw(
        self, generator: np.random.Generator, out: dict[Key, Tensor], picks: Picks, changed: Ints, chunk_size: int
    ) -> tuple[Ints, int]:
        """Replace the windows whose row changed while it was copied, and only those."""
        windows, redrawn, deadline = self._windows_of(chunk_size), 0, time.monotonic() + STALL_SECONDS
        while len(changed):
            redrawn += len(changed)
            again = self.pick(generator, len(changed), chunk_size)
            index, slots = (
                torch.from_numpy(again.rows * self.buffer.max_steps + again.starts),
                torch.from_numpy(changed),
            )
            for key, window in windows.items():
                out[key].index_copy_(0, slots, window.index_select(0, index))
            picks.rows[changed] = again.rows
            changed = changed[self._changed(again)]
            if time.monotonic() > deadline:
                raise StreamStalledError(
                    f"rows are rewritten faster than a chunk of {chunk_size} steps can be copied: raise buffer_size"
                )
        return picks.rows, redrawn

    def _changed(self, picks: Picks) -> NDArray[np.int64]:
        fence()
        return np.flatnonzero(self.buffer.sequence[picks.rows] != picks.sequence)

    def _windows_of(self, chunk_size: int) -> dict[Key, Tensor]:
        windows = self._windows.get(chunk_size)
        if windows is None:
            count = self.buffer.num_rows * self.buffer.max_steps - chunk_size + 1
            windows = {}
            for leaf in self.buffer.layout.leaves:
                size = (count, chunk_size * leaf.elements)
                windows[leaf.key] = self.buffer.frames[leaf.key].as_strided(size, (leaf.elements, 1))
            self._windows[chunk_size] = windows
        return windows

    def _explain_nothing_long_enough(self, sequence: Ints, length: Ints, chunk_size: int) -> None:
        if (sequence & 1).any():
            return  # a row that is being written may turn out long enough
        longest = int(length.max(initial=0))
        raise ChunkSizeError(
            f"chunk_size is {chunk_size}, but the longest of the {int((length > 0).sum())} stored episodes has "
            f"{longest} steps: use a chunk_size of at most {longest}"
        )

    @staticmethod
    def _wait_for_writers(deadline: float) -> float:
        now = time.monotonic()
        if deadline and now > deadline:
            raise StreamStalledError(
                f"no row could be read for {STALL_SECONDS:g} s: all that may be long enough are being written"
            )
        time.sleep(0.0002)
        return deadline or now + STALL_SECONDS
