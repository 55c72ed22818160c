"""What the learner's side and the two kinds of workers know of each other."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any, Protocol

from embodichain.agents.rl.collector.background.loop import Delivery, Order
from embodichain.errors import CollectorError

STOP_SECONDS = 4.0
"""How long a collector may take to end by itself."""
FIRST_STEPS = 2
"""Steps that may take as long as a start, because something is loaded or compiled in them."""


class Learner(Protocol):
    """What a worker tells the learner's side; called from the worker's thread."""

    def on_adopted(self, version: int, digest: int | None) -> None:
        """Weights are in use."""

    def on_delivery(self, delivery: Delivery, timeout: float) -> None:
        """A rollout is there; ``BufferWaitError`` if there is no room for it in time."""


class Worker(Protocol):
    """Collects in the background: in a thread (``thread_worker.py``) or in a process (``process_worker.py``)."""

    num_envs: int
    restarts: int
    """How often the simulator was replaced."""

    @property
    def num_workers(self) -> int:
        """How many simulators there are at present."""

    def send(self, order: Order) -> None:
        """Give an order."""

    def check(self) -> None:
        """Raise what keeps it from going on."""

    def wait_until_standing(self, timeout: float) -> dict[str, Any] | None:
        """Wait for it to stand still after ``pause`` or ``save``; return its state after ``save``."""

    def stop(self) -> None:
        """End it; returns within a few seconds, whatever it is doing."""


class Reports:
    """Hands the report that nothing moves any more from a worker's thread to the learner's."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._states: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def put(self, state: dict[str, Any] | None) -> None:
        """Report."""
        self._states.put(state)

    def clear(self) -> None:
        """Forget what was reported: something else is asked for now."""
        while not self._states.empty():
            self._states.get()

    def wait(self, timeout: float) -> dict[str, Any] | None:
        """Return the state that was reported, if one was; raise what the worker failed of meanwhile."""
        deadline = time.monotonic() + timeout
        while True:
            self._check()
            try:
                return self._states.get(timeout=0.05)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise CollectorError(f"the collector did not come to a stand within {timeout:g} s") from None
