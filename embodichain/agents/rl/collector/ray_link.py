"""The connection of a collecting process in a Ray cluster with its learner."""

from __future__ import annotations

import queue
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodichain.agents.processes.shared_memory import tensor_of
from embodichain.agents.rl.collector.background.loop import Delivery, Order
from embodichain.utils.tensor_tree import decode, encode

Event = dict[str, Any]
Bytes = NDArray[np.uint8]


class RayLink:
    """The loop's connection with a learner somewhere in the cluster; calls put orders in and take events out."""

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.steps, self._last_beat, self._working = 0, time.monotonic(), False

    @property
    def busy_seconds(self) -> float:
        """Time since the present step began; 0 if there is none."""
        return time.monotonic() - self._last_beat if self._working else 0.0

    def receive(self, timeout: float | None) -> Order | None:
        """Return the next order, waiting for it at most so long."""
        try:
            return self.orders.get(timeout != 0.0, timeout or None)
        except queue.Empty:
            return None

    def beat(self, working: bool) -> None:
        """Show a sign of life."""
        self.steps += working
        self._last_beat, self._working = time.monotonic(), working

    def adopted(self, version: int, digest: int) -> None:
        """Acknowledge weights."""
        self.events.put({"event": "adopted", "version": version, "digest": digest})

    def deliver(self, delivery: Delivery) -> None:
        """Hand over a rollout."""
        words, block = encode(delivery.content())
        self.events.put({"event": "rollout", "number": delivery.number, "words": words, "memory": block.numpy()})

    def standing(self, state: dict[str, Any] | None) -> None:
        """Do nothing: nobody tells a loop in a cluster to stand still."""


def read_delivery(event: Event) -> Delivery:
    """Return the rollout that an event brought; it is copied, for the object store's memory cannot be written to."""
    return Delivery.of(event["number"], decode(event["words"], tensor_of(event["memory"])))
