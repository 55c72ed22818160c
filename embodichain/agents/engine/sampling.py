"""Random windows of stored episodes, gathered while workers overwrite rows.

The picks are numpy on a few hundred row headers. The copy is one ``index_select`` per key over overlapping windows:
the frames ``[num_rows, max_steps, ...]`` seen as ``[num_rows * max_steps - chunk_size + 1, chunk_size, ...]`` with the
stride of one frame, so that window ``row * max_steps + start`` is one contiguous piece of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodichain.agents.datasets.frames import Key
from embodichain.agents.engine.outputs import Target
from embodichain.agents.engine.shared_buffer import Floats, Ints, SharedBuffer
from embodichain.agents.processes.shared_memory import fence
from embodichain.errors import ChunkSizeError, StreamStalledError

_NONE: Ints = np.zeros(0, np.int64)
_QUICK_TRIES = 16
STALL_SECONDS = 60.0
"""How long a reader waits for rows that are being rewritten before it says so; a new worker repairs what a killed one
left half-written, and takes its time to start."""


@dataclass
class Windows:
    """All windows of one key, overlapping in memory."""

    tensor: Tensor
    """``[num_windows, chunk_size, ...]``, for copying many."""
    bytes: NDArray[np.uint8]
    """``[num_windows, chunk_size * bytes_per_frame]``, for copying one: numpy has the smaller overhead."""


@dataclass
class Candidates:
    """What was known of the rows at one moment: all sequence numbers, and where long enough episodes are."""

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
        self._windows: dict[int, dict[Key, Windows]] = {}
        self._known = Candidates(b"", b"", 0, _NONE, _NONE, np.zeros(0))

    def draw(self, generator: np.random.Generator, out: Target, batch_size: int, chunk_size: int) -> tuple[Ints, int]:
        """Fill ``out``; return which windows were drawn (``row * max_steps + start``), and how many again.

        An episode is drawn uniformly from those that are long enough, then a start uniformly within it.
        """
        known, chosen, picks = self.pick(generator, batch_size, chunk_size)
        index = torch.from_numpy(picks)
        for key, windows in self._windows_of(chunk_size).items():
            torch.index_select(windows.tensor, 0, index, out=out.tensors[key])
        changed = self._changed(known, chosen)
        return picks, self._redraw(generator, out, picks, changed, chunk_size) if len(changed) else 0

    def pick(self, generator: np.random.Generator, count: int, chunk_size: int) -> tuple[Candidates, Ints, Ints]:
        """Choose ``count`` windows: return the candidates, which of their rows were chosen, and the windows.

        Some of these rows may be in the middle of a write.
        """
        deadline = 0.0
        while True:
            known = self._candidates(chunk_size)
            if len(known.rows):
                # u * n, rounded down, is uniform on 0 .. n-1 (to 2^-53) and cheaper than bounded integers.
                u = generator.random(2 * count)
                chosen = (u[:count] * len(known.rows)).astype(np.int64)
                return known, chosen, known.first[chosen] + (u[count:] * known.starts[chosen]).astype(np.int64)
            self._explain_nothing_long_enough(known, chunk_size)
            deadline = self._wait_for_writers(deadline)

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

    def _changed(self, known: Candidates, chosen: Ints) -> Ints:
        """Return the places in ``chosen`` whose row was being written at the time of ``known``, or has been since."""
        fence()
        now = self.buffer.sequence.tobytes()
        if now == known.stamp and not known.is_busy:
            return _NONE
        # Numbers only grow: with the last bit cleared, an odd one differs from all that can follow.
        changed = np.frombuffer(now, np.int64) != known.sequence & -2
        marks = changed[known.rows[chosen]]
        return np.flatnonzero(marks) if b"\1" in marks.tobytes() else _NONE

    def _redraw(self, generator: np.random.Generator, out: Target, picks: Ints, changed: Ints, chunk_size: int) -> int:
        """Replace the windows whose row changed while it was copied, and only those, one by one; return how often."""
        sources = [windows.bytes for windows in self._windows_of(chunk_size).values()]
        pairs = list(zip(out.bytes, sources, strict=True))
        redrawn, deadline = 0, time.monotonic() + STALL_SECONDS
        for slot in changed.tolist():
            while True:
                row, start, sequence = self._pick_one(generator, chunk_size)
                window = row * self.buffer.max_steps + start
                for target, source in pairs:
                    target[slot] = source[window]
                redrawn += 1
                fence()
                if self.buffer.sequence[row] == sequence:
                    break
                if time.monotonic() > deadline:
                    raise StreamStalledError(
                        f"rows are rewritten faster than a chunk of {chunk_size} steps can be copied: raise buffer_size"
                    )
            picks[slot] = window
        return redrawn

    def _pick_one(self, generator: np.random.Generator, chunk_size: int) -> tuple[int, int, int]:
        """Choose one window of a row that nobody is writing to: return row, start and the row's sequence number."""
        deadline = 0.0
        while True:
            for _ in range(_QUICK_TRIES):  # uniform over all rows, until one is fit: uniform over those that are
                row = int(generator.random() * self.buffer.num_rows)
                sequence = int(self.buffer.sequence[row])
                fence()
                length = int(self.buffer.length[row])
                if sequence % 2 == 0 and length >= chunk_size:
                    return row, int(generator.random() * (length - chunk_size + 1)), sequence
            known, _, (window,) = self.pick(generator, 1, chunk_size)  # few are fit: ask for these
            row, start = divmod(int(window), self.buffer.max_steps)
            if known.sequence[row] % 2 == 0:
                return row, start, int(known.sequence[row])
            deadline = self._wait_for_writers(deadline)

    def _windows_of(self, chunk_size: int) -> dict[Key, Windows]:
        windows = self._windows.get(chunk_size)
        if windows is None:
            count = self.buffer.num_rows * self.buffer.max_steps - chunk_size + 1
            windows = self._windows[chunk_size] = {}
            for leaf in self.buffer.layout.leaves:
                frames = self.buffer.frames[leaf.key]
                tensor = frames.as_strided((count, chunk_size, *leaf.shape), (leaf.elements, *leaf.strides))
                flat = frames.as_strided((count, chunk_size * leaf.elements), (leaf.elements, 1))
                windows[leaf.key] = Windows(tensor, flat.view(torch.uint8).numpy())
        return windows

    @staticmethod
    def _explain_nothing_long_enough(known: Candidates, chunk_size: int) -> None:
        if known.is_busy:
            return  # a row that is being written may turn out long enough
        length = np.frombuffer(known.lengths, np.int64)
        longest = int(length.max(initial=0))
        raise ChunkSizeError(
            f"chunk_size is {chunk_size}, but the longest of the {int((length > 0).sum())} stored episodes has "
            f"{longest} steps: use a chunk_size of at most {longest}"
        )

    def _wait_for_writers(self, deadline: float) -> float:
        self._check_state()
        now = time.monotonic()
        if deadline and now > deadline:
            raise StreamStalledError(
                f"no row could be read for {STALL_SECONDS:g} s: all that may be long enough are being written"
            )
        time.sleep(0.0002)
        return deadline or now + STALL_SECONDS
