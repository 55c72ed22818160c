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

_QUICK_TRIES = 16
STALL_SECONDS = 10.0
"""How long a reader waits for rows that are being rewritten before it says so."""


@dataclass
class Windows:
    """All windows of one key, overlapping in memory."""

    tensor: Tensor
    """``[num_windows, chunk_size * elements]``, for copying many."""
    bytes: NDArray[np.uint8]
    """``[num_windows, chunk_size * bytes_per_frame]``, for copying one: numpy has the smaller overhead."""


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
        self._windows: dict[int, dict[Key, Windows]] = {}

    def draw(
        self, generator: np.random.Generator, out: dict[Key, Tensor], batch_size: int, chunk_size: int
    ) -> tuple[Ints, int]:
        """Fill ``out`` (``[batch_size, chunk_size * elements]`` per key); return the rows drawn and how many again.

        An episode is drawn uniformly from those that are long enough, then a start uniformly within it.
        """
        picks = self.pick(generator, batch_size, chunk_size)
        index = torch.from_numpy(picks.rows * self.buffer.max_steps + picks.starts)
        for key, windows in self._windows_of(chunk_size).items():
            torch.index_select(windows.tensor, 0, index, out=out[key])
        changed = self._changed(picks)
        if not len(changed):
            return picks.rows, 0
        return picks.rows, self._redraw(generator, out, picks, changed, chunk_size)

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
    ) -> int:
        """Replace the windows whose row changed while it was copied, and only those, one by one; return how often."""
        windows = self._windows_of(chunk_size)
        pairs = [(out[key].view(torch.uint8).numpy(), windows[key].bytes) for key in windows]
        redrawn, deadline = 0, time.monotonic() + STALL_SECONDS
        for slot in changed.tolist():
            while True:
                row, start, sequence = self._pick_one(generator, chunk_size)
                for target, source in pairs:
                    target[slot] = source[row * self.buffer.max_steps + start]
                redrawn += 1
                fence()
                if self.buffer.sequence[row] == sequence:
                    break
                if time.monotonic() > deadline:
                    raise StreamStalledError(
                        f"rows are rewritten faster than a chunk of {chunk_size} steps can be copied: raise buffer_size"
                    )
            picks.rows[slot] = row
        return redrawn

    def _pick_one(self, generator: np.random.Generator, chunk_size: int) -> tuple[int, int, int]:
        """Choose one window, as ``pick`` does: return its row, its start and the row's sequence number."""
        for _ in range(_QUICK_TRIES):  # uniform over all rows, until one is fit: uniform over those that are
            u, v = generator.random(2).tolist()
            row = int(u * self.buffer.num_rows)
            sequence = int(self.buffer.sequence[row])
            fence()
            length = int(self.buffer.length[row])
            if sequence % 2 == 0 and length >= chunk_size:
                return row, int(v * (length - chunk_size + 1)), sequence
        picks = self.pick(generator, 1, chunk_size)
        return int(picks.rows[0]), int(picks.starts[0]), int(picks.sequence[0])

    def _changed(self, picks: Picks) -> NDArray[np.int64]:
        fence()
        return np.flatnonzero(self.buffer.sequence[picks.rows] != picks.sequence)

    def _windows_of(self, chunk_size: int) -> dict[Key, Windows]:
        windows = self._windows.get(chunk_size)
        if windows is None:
            count = self.buffer.num_rows * self.buffer.max_steps - chunk_size + 1
            windows = self._windows[chunk_size] = {}
            for leaf in self.buffer.layout.leaves:
                size = (count, chunk_size * leaf.elements)
                tensor = self.buffer.frames[leaf.key].as_strided(size, (leaf.elements, 1))
                windows[leaf.key] = Windows(tensor, tensor.view(torch.uint8).numpy())
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
