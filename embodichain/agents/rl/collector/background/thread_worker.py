"""Collection in a thread of the learner's process."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from typing import Any

from embodichain.agents.rl.collector.background.loop import CollectionLoop, Command, Delivery, Order, Stopped
from embodichain.agents.rl.collector.background.station import Station
from embodichain.agents.rl.collector.background.worker import FIRST_STEPS, STOP_SECONDS, Learner, Reports
from embodichain.errors import BufferWaitError, CollectorError, EnvironmentHungError

log = logging.getLogger("embodichain.collector")

_ROOM_SECONDS = 0.2


class ThreadWorker:
    """Runs the loop in a thread; it is both ends of the connection."""

    restarts = 0
    num_workers = 1

    def __init__(self, station: Station, num_steps: int, learner: Learner) -> None:
        if station.collector.before_step is not None:
            raise CollectorError("the former collection still hangs in its environment: make a new collector")
        self.num_envs = station.collector.env.num_envs
        self._station, self._cfg, self._learner = station, station.cfg, learner
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._reports = Reports(self.check)
        self._stopping = False
        self._failure: BaseException | None = None
        self._working, self._steps, self._last_beat = False, 0, time.monotonic()
        self._loop = CollectionLoop(station, self, num_steps)
        self._thread = threading.Thread(target=self._run, name="embodichain-collector", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001 - it is raised in the learner's thread
            self._failure = error
        finally:
            self._station.collector.before_step = None

    # --- the learner's side ---------------------------------------------------------------------------------------

    def send(self, order: Order) -> None:
        """Give an order."""
        if isinstance(order, Command):
            self._reports.clear()
        self._orders.put(order)

    def check(self) -> None:
        """Raise what keeps it from going on."""
        if self._failure is not None:
            told = "".join(traceback.format_exception(self._failure))
            kind = type(self._failure).__name__
            raise CollectorError(
                f"collection failed: {kind}: {self._failure}\n\nIn the collector:\n{told}"
            ) from self._failure
        limit = self._cfg.step_timeout if self._steps > FIRST_STEPS else self._cfg.start_timeout
        if self._working and time.monotonic() - self._last_beat > limit:
            raise EnvironmentHungError(
                f"the collector has not come back from a step for {limit:g} s (step_timeout); it stands here:\n"
                f"{self._stack()}\nWith worker='process' such a simulator is replaced."
            )

    def wait_until_standing(self, timeout: float) -> dict[str, Any] | None:
        """Wait for it to stand still; return its state after ``save``."""
        return self._reports.wait(timeout)

    def stop(self) -> None:
        """End the thread; one that hangs in its environment is left to itself."""
        self._stopping = True
        self.send(Command("stop"))
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.warning("the collector hangs in its environment and is left behind; it stands here:\n%s", self._stack())

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"

    # --- the loop's side ------------------------------------------------------------------------------------------

    def receive(self, timeout: float | None) -> Order | None:
        """Return the next order, waiting for it at most so long."""
        if self._stopping:  # whatever else was ordered before it
            raise Stopped
        try:
            return self._orders.get(block=timeout != 0.0, timeout=timeout or None)
        except queue.Empty:
            return None

    def beat(self, working: bool) -> None:
        """Show a sign of life."""
        self._steps += working
        self._last_beat = time.monotonic()
        self._working = working

    def adopted(self, version: int, digest: int | None) -> None:
        """Acknowledge weights."""
        self._learner.on_adopted(version, digest)

    def deliver(self, delivery: Delivery) -> None:
        """Hand over a rollout, waiting for room if somebody else took it."""
        while not self._stopping:
            try:
                return self._learner.on_delivery(delivery, _ROOM_SECONDS)
            except BufferWaitError:
                continue
        raise Stopped

    def standing(self, state: dict[str, Any] | None) -> None:
        """Report that nothing moves until further notice."""
        self._reports.put(state)
