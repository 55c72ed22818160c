"""Collection in a thread of the learner's process."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from embodichain.agents.processes.pool import FIRST_STEPS, Heartbeat
from embodichain.agents.rl.collector.rollout_worker import (
    ROOM_SECONDS,
    STOP_SECONDS,
    Command,
    Instruction,
    Learner,
    PauseReports,
    RolloutResult,
    RolloutWorker,
    Stopped,
    WorkerSpec,
)
from embodichain.errors import BufferWaitError, CollectorError, EnvironmentHungError

log = logging.getLogger("embodichain.collector")


class ThreadBackend:
    """Runs a ``RolloutWorker`` in a thread, and is both ends of the connection with it.

    The environment lives here, and continues from where it is when collection is started again.
    """

    restarts = 0
    num_workers = 1

    def __init__(self, spec: WorkerSpec) -> None:
        self._worker, self._cfg = RolloutWorker(spec.make_env(), spec), spec.cfg
        self.env = self._worker.env
        self.num_envs: int | None = self.env.num_envs
        self.reset, self.state = self._worker.reset, self._worker.state
        self._thread: threading.Thread | None = None

    # --- the learner's end ----------------------------------------------------------------------------------------

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._worker.load_state(state)

    def start(self, num_steps: int, learner: Learner) -> None:
        """Begin to collect."""
        if self._thread is not None and self._thread.is_alive():
            raise CollectorError("the former collection still hangs in its environment: make a new collector")
        self._worker.clear()
        self._worker.prepare()
        self._learner = learner
        self._instructions: queue.SimpleQueue[Instruction] = queue.SimpleQueue()
        self._reports, self._heartbeat = PauseReports(self.check), Heartbeat()
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=(num_steps,), name="embodichain-collector", daemon=True)
        self._thread.start()

    def send(self, instruction: Instruction) -> None:
        """Give an instruction."""
        if isinstance(instruction, Command):
            self._reports.clear()
        self._instructions.put(instruction)

    def check(self) -> None:
        """Raise what keeps it from continuing."""
        if self._failure is not None:
            details = "".join(traceback.format_exception(self._failure))
            kind = type(self._failure).__name__
            raise CollectorError(
                f"collection failed: {kind}: {self._failure}\n\nIn the collector:\n{details}"
            ) from self._failure
        beats = self._heartbeat
        limit = self._cfg.step_timeout if beats.steps > FIRST_STEPS else self._cfg.start_timeout
        if beats.busy and time.monotonic() - beats.last > limit:
            raise EnvironmentHungError(
                f"the collector has not come back from a step for {limit:g} s (step_timeout); it is here:\n"
                f"{self._stack()}\nWith worker='process' such a simulator is replaced."
            )

    def wait_until_paused(self, timeout: float) -> dict[str, Any] | None:
        """Wait until nothing moves; return the state after ``save``."""
        return self._reports.wait(timeout)

    def stop(self) -> None:
        """End the thread; one that hangs in its environment is left to itself."""
        if self._thread is None:
            return
        self._stopping = True
        self.send(Command("stop"))
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.warning("the collector hangs in its environment and is left behind; it is here:\n%s", self._stack())

    def _stack(self) -> str:
        thread = None if self._thread is None else self._thread.ident
        frame = sys._current_frames().get(thread or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"

    # --- the worker's end -----------------------------------------------------------------------------------------

    def _run(self, num_steps: int) -> None:
        try:
            self._worker.run(self, num_steps)
        except BaseException as error:  # noqa: BLE001 - it is raised in the learner's thread
            self._failure = error

    def receive(self, timeout: float | None) -> Instruction | None:
        """Return the next instruction, waiting for it at most so long."""
        if self._stopping:  # whatever else was sent before it
            raise Stopped
        try:
            return self._instructions.get(block=timeout != 0.0, timeout=timeout or None)
        except queue.Empty:
            return None

    def beat(self, busy: bool) -> None:
        """Show a sign of life."""
        self._heartbeat.beat(busy)

    def adopted(self, version: int, digest: str | None) -> None:
        """Acknowledge weights."""
        self._learner.on_adopted(version, digest)

    def deliver(self, result: RolloutResult) -> None:
        """Hand over a rollout, waiting for room if somebody else took it."""
        while not self._stopping:
            try:
                return self._learner.on_result(result, ROOM_SECONDS)
            except BufferWaitError:
                continue
        raise Stopped

    def paused(self, state: dict[str, Any] | None) -> None:
        """Report that nothing moves until further notice."""
        self._reports.put(state)
