"""The snapshots of weights that workers of a cluster may still need."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodichain.agents.rl.collector.ray_hand import Hand
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.extras import require


class StoredWeights:
    """Snapshots in the object store, each put there once; every node fetches it once.

    Usually a worker needs the latest one alone. In lockstep a ticket names the version it is for, so those that open
    tickets name are kept, which are no more than the lag allows: a worker's replacement gets them all.
    """

    def __init__(self, lockstep: bool) -> None:
        self._lockstep = lockstep
        self._kept: dict[int, WeightSnapshot] = {}
        self._stored: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, snapshot: WeightSnapshot) -> None:
        """Keep a new snapshot."""
        if not self._lockstep:
            self.clear()
        self._kept[snapshot.version] = snapshot

    def send(self, hand: Hand, version: int | None = None) -> None:
        """Give a worker all that it may need, or one version."""
        for snapshot in self._kept.values():
            if version in (None, snapshot.version):
                hand.send_weights(snapshot, self._reference(snapshot))

    def forget_before(self, version: int) -> None:
        """Let go of what no ticket names any more; the latest snapshot stays."""
        for old in [v for v in self._kept if v < version and v != max(self._kept)]:
            del self._kept[old]
            self._stored.pop(old, None)

    def store_anew(self) -> None:
        """Put everything into the object store again, when it is needed next: something there may be lost."""
        self._stored.clear()

    def clear(self) -> None:
        """Let go of everything."""
        self._kept.clear()
        self._stored.clear()

    def _reference(self, snapshot: WeightSnapshot) -> Any:
        if snapshot.version not in self._stored:
            data: np.ndarray[Any, Any] = snapshot.data.cpu().numpy()
            self._stored[snapshot.version] = require("ray", extra="ray").put(data)
        return self._stored[snapshot.version]
