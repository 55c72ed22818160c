"""Where the entries of a queue lie: in this process, by reference, or in memory that several processes share."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.processes.segment import Segment
from embodichain.agents.rl.utils.observations import sorted_leaves
from embodichain.errors import RolloutError

_ALIGNMENT = 64
Counts = np.ndarray[Any, np.dtype[np.int64]]


class Shelf(Protocol):
    """Keeps entries by their numbers; whoever uses it makes sure that only one does at a time."""

    counts: Counts
    """Room for counters, int64, that lie beside the entries."""

    def put(self, number: int, entry: TensorDictBase) -> None:
        """Store an entry."""

    def look(self, number: int) -> TensorDictBase:
        """Return an entry as it lies there; see ``take`` for one that stays valid."""

    def take(self, number: int) -> TensorDictBase:
        """Remove an entry and return it; it belongs to the caller."""

    def total(self, numbers: range) -> int:
        """Return the number of transitions in these entries."""


class LocalShelf:
    """Entries of any shape, by reference."""

    def __init__(self, num_counts: int) -> None:
        self.counts: Counts = np.zeros(num_counts, dtype=np.int64)
        self._entries: dict[int, TensorDictBase] = {}
        self._total = 0

    def put(self, number: int, entry: TensorDictBase) -> None:
        """Store an entry."""
        self._entries[number] = entry
        self._total += entry.numel()

    def look(self, number: int) -> TensorDictBase:
        """Return an entry."""
        return self._entries[number]

    def take(self, number: int) -> TensorDictBase:
        """Remove an entry and return it."""
        entry = self._entries.pop(number)
        self._total -= entry.numel()
        return entry

    def total(self, numbers: range) -> int:
        """Return the number of transitions in these entries, which are all there are."""
        return self._total


class SharedShelf:
    """A ring of places for entries that all look like an example, in shared memory known by its descriptor alone."""

    def __init__(self, num_counts: int, example: TensorDictBase, num_places: int) -> None:
        self.batch_size = list(example.batch_size)
        self.num_places = num_places
        self._leaves = [(path, leaf.dtype, tuple(leaf.shape)) for path, leaf in sorted_leaves(example)]
        self._offsets = []
        end = _aligned(8 * num_counts)
        for _, dtype, shape in self._leaves:
            self._offsets.append(end)
            end += _aligned(num_places * math.prod(shape) * dtype.itemsize)
        self._num_counts = num_counts
        self._attach(Segment.create(max(end, _ALIGNMENT), "a shared VLABuffer"))

    def _attach(self, segment: Segment) -> None:
        self._segment = segment
        self.counts: Counts = segment.view(0, torch.int64, (self._num_counts,)).numpy()
        self._places: dict[tuple[str, ...], Tensor] = {
            path: segment.view(offset, dtype, (self.num_places, *shape))
            for (path, dtype, shape), offset in zip(self._leaves, self._offsets, strict=True)
        }

    def put(self, number: int, entry: TensorDictBase) -> None:
        """Copy an entry in; it must look like the example."""
        given = [(path, leaf.dtype, tuple(leaf.shape)) for path, leaf in sorted_leaves(entry)]
        if given != self._leaves or list(entry.batch_size) != self.batch_size:
            wrong = next(
                (f"{'/'.join(mine[0])} is {mine}" for mine in given if mine not in self._leaves), "keys differ"
            )
            raise RolloutError(f"a shared buffer takes entries like its example, {self.batch_size}; here {wrong}")
        for path, place in self._places.items():
            place[number % self.num_places].copy_(entry.get(path))

    def look(self, number: int) -> TensorDictBase:
        """Return an entry where it lies, valid until its place is used again."""
        entry = TensorDict({}, batch_size=self.batch_size)
        for path, place in self._places.items():
            entry.set(path, place[number % self.num_places])
        return entry

    def take(self, number: int) -> TensorDictBase:
        """Return a copy of an entry, whose place may then be used again."""
        return self.look(number).clone()

    def total(self, numbers: range) -> int:
        """Return the number of transitions in these entries."""
        return len(numbers) * math.prod(self.batch_size)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("batch_size", "num_places", "_leaves", "_offsets", "_num_counts", "_segment")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach(self._segment)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
