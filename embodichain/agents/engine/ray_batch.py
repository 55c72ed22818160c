"""Finished episodes on their way through Ray's object store: one array of bytes and one of numbers per batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodichain.agents.datasets.frames import Episode, FrameLayout, Key
from embodichain.agents.engine.shared_buffer import WORK_WORDS, Ints
from embodichain.agents.processes.shared_memory import tensor_of
from embodichain.utils.tensor_tree import BlockLayout

_FIRST_BYTES = 1 << 20
_OFFSET, _LENGTH, _SEED, _VERSION, _SUCCESS = range(5)


@dataclass(frozen=True)
class EpisodeBatch:
    """Episodes of one worker, and what it has done meanwhile."""

    headers: Ints
    """``[num_episodes, 5]``: where an episode begins in ``data``, its length, seed, policy version, and success."""
    data: NDArray[np.uint8]
    """The frames: each episode in one piece, its arrays one after the other in the order of the layout."""
    counts: Ints
    """Counts to be added to the worker's record, see ``Work``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return EpisodeBatch, (self.headers, self.data, self.counts)

    def episodes(self, layout: FrameLayout) -> Iterator[Episode]:
        """Return the episodes; their frames lie in ``data``, which is not copied."""
        memory = tensor_of(self.data)
        for offset, length, seed, version, success in self.headers.tolist():
            views = _block(layout, length).views(memory[offset:])
            frames: dict[Key, tuple[Tensor, ...]] = {key: (view,) for key, view in views.items()}
            yield Episode(frames, length, seed, None if success < 0 else bool(success), version)


class BatchWriter:
    """Gathers episodes, whose frames are copied at once, into a batch."""

    def __init__(self, layout: FrameLayout) -> None:
        self.layout = layout
        self.counts: Ints = np.zeros(WORK_WORDS, np.int64)
        self._headers: list[tuple[int, ...]] = []
        self._data = np.empty(_FIRST_BYTES, np.uint8)
        self._used = 0

    def __len__(self) -> int:
        return len(self._headers)

    @property
    def nbytes(self) -> int:
        """Bytes gathered so far."""
        return self._used

    def add(self, episode: Episode) -> None:
        """Copy an episode into the batch."""
        block, offset = _block(self.layout, episode.length), self._used
        size = block.nbytes
        if offset + size > self._data.size:
            grown = np.empty(max(2 * self._data.size, offset + size), np.uint8)
            grown[:offset] = self._data[:offset]
            self._data = grown
        for key, view in block.views(torch.from_numpy(self._data[offset : offset + size])).items():
            torch.cat(episode.frames[key], out=view)
        success = -1 if episode.success is None else int(episode.success)
        self._headers.append((offset, episode.length, episode.seed, episode.policy_version, success))
        self._used = offset + size

    def take(self) -> EpisodeBatch:
        """Return the batch, and begin the next one."""
        headers = np.array(self._headers, np.int64).reshape(len(self._headers), 5)
        batch = EpisodeBatch(headers, self._data[: self._used], self.counts.copy())
        self._headers, self._used = [], 0
        self.counts[:] = 0
        self._data = np.empty(self._data.size, np.uint8)
        return batch


def _block(layout: FrameLayout, length: int) -> BlockLayout[Key]:
    """Return where the arrays ``[length, ...]`` of an episode lie."""
    return BlockLayout((leaf.key, leaf.dtype, (length, *leaf.shape)) for leaf in layout.leaves)
