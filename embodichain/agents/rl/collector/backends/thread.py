"""Base class of the backends of ``AsyncCollector``, and the backend that collects in a thread."""

import logging
import queue
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from embodichain.agents.processes.failure import drop_locals
from embodichain.agents.processes.pool import HangDetector, Heartbeat
from embodichain.agents.rl.collector.recovery import EnvRecovery
from embodichain.agents.rl.collector.rollout_worker import (
    Instruction,
    RolloutRequest,
    RolloutResult,
    RolloutWorker,
    Stopped,
    WorkerSpec,
)
from embodichain.agents.rl.collector.weights import WeightSnapshot, WeightStore
from embodichain.envs.vec_env import StepsInHalves, VecEnv
from embodichain.errors import BufferWaitError, CollectorError, EnvironmentHungError, PolicyContractError
from embodichain.utils.cuda_graphs import concurrent_use

log = logging.getLogger("embodichain.collector")

POLL_SECONDS = 0.05
"""Polling interval while waiting."""
STOP_SECONDS = 4.0
"""How long a collector may take to stop by itself."""
_ROOM_SECONDS = 0.2
"""How long one attempt to put a rollout into the learner's buffer waits for room."""

Deliver = Callable[[RolloutResult, float], None]
"""Puts a rollout into the learner's buffer; raises ``BufferWaitError`` if there is no room within the given seconds."""


class Backend(ABC):
    """Runs a thread that collects, or supervises workers elsewhere; it can be started and stopped repeatedly."""

    num_envs: int | None = None
    """Number of environments; ``None`` until it is known."""
    restarts = 0
    """Number of workers or environments replaced since the start."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec, self._cfg = spec, spec.cfg
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._seed: int | None = None

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers that have an environment."""

    @abstractmethod
    def send(self, instruction: Instruction) -> None:
        """Send an instruction to the workers."""

    @abstractmethod
    def reset(self, seed: int | None) -> None:
        """Reset all envs; only while stopped."""

    def seed_recovery(self, seed: int) -> None:
        """Set the base seed for workers and environments that replace failed ones."""
        self._seed = seed

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the worker's state; only while stopped."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state; only while stopped."""

    @abstractmethod
    def _open(self) -> None:
        """Prepare to collect; called in the learner's thread."""

    @abstractmethod
    def _work(self) -> None:
        """Collect until ``_stopping`` is set; called in the backend's thread."""

    @abstractmethod
    def _close(self) -> None:
        """Clean up, also after an error; called in the backend's thread."""

    def start(self, num_steps: int, store: WeightStore, deliver: Deliver) -> None:
        """Start collecting; returns once an environment is ready."""
        self._spec, self._store, self._deliver = replace(self._spec, num_steps=num_steps), store, deliver
        self._open()
        self.restarts = 0
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._forget_pauses()
        self._thread = threading.Thread(target=self._run, name="embodichain-collector", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop collecting; returns within a few seconds, even if a worker hangs."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:  # noqa: B027 - most backends release everything in stop()
        """Release remaining resources after ``stop``."""

    def check(self) -> None:
        """Raise the error that stopped the backend, if any."""
        if self._failure is not None:
            raise self._failure

    def wait_until_paused(self, timeout: float) -> dict[str, Any] | None:
        """Wait until the workers have paused after ``pause`` or ``save``; return the state after ``save``."""
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            try:
                return self._pauses.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise CollectorError(f"the collector did not pause within {timeout:g} s") from None

    def report(self, kind: str, content: Any) -> None:
        """Process the report of a worker (see ``Endpoint``)."""
        if kind == "adopted":
            self._store.acknowledge(**content)
        elif kind == "paused":
            self._pauses.put(content)
        else:
            while not self._stopping.is_set() and not self._put(content):
                pass

    def _put(self, result: RolloutResult) -> bool:
        """Try to deliver a rollout; return whether there was room."""
        try:
            self._deliver(result, _ROOM_SECONDS)
        except BufferWaitError:
            return False
        return True

    def _forget_pauses(self) -> None:
        self._pauses: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def _run(self) -> None:
        try:
            with concurrent_use():
                self._work()
        except Exception as error:  # noqa: BLE001 - raised in the learner's thread, by check()
            drop_locals(error)
            self._failure = error
            self._stopping.set()
        finally:
            self._close()


class ThreadBackend(Backend):
    """Runs a ``RolloutWorker`` in a thread of this process, and is its ``Endpoint``."""

    num_workers = 1

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._given = spec.make_env()
        self._worker = RolloutWorker(self._given, spec)
        self.num_envs = self._given.num_envs

    @property
    def env(self) -> VecEnv:
        """The current environment, which may have replaced the given one."""
        return self._worker.env

    def close(self) -> None:
        if self.env is not self._given:
            self.env.close()

    def reset(self, seed: int | None) -> None:
        self._seed = self._seed if seed is None else seed
        self._worker.collector.reset(seed)

    def state(self) -> dict[str, Any]:
        return self._worker.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._worker.load_state(state)

    def _open(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise CollectorError("the former collection still hangs in its environment: make a new collector")
        self._worker.clear()
        if self._worker.copy.has_weights:
            self._worker.collector.record_policy()  # while no other thread uses the GPU yet
        self._instructions: queue.SimpleQueue[Instruction] = queue.SimpleQueue()
        self.heartbeat = Heartbeat()
        silence = max(self._cfg.start_timeout, self._cfg.step_timeout)
        self._worker.collector.recovery = EnvRecovery(
            self._cfg.max_restarts, self._spec.make_another, self._pause, self._before_build, silence
        )
        self._worker.collector.recovery.seed = self._cfg.seed or 0 if self._seed is None else self._seed
        self._hangs = HangDetector(self._cfg.start_timeout, self._cfg.step_timeout)

    def send(self, instruction: Instruction) -> None:
        if not isinstance(instruction, (RolloutRequest, WeightSnapshot)):
            self._forget_pauses()
        self._instructions.put(instruction)

    def receive(self, timeout: float | None) -> Instruction | None:
        if self._stopping.is_set():  # skips the instructions before "stop"
            raise Stopped
        try:
            return self._instructions.get(block=timeout != 0.0, timeout=timeout or None)
        except queue.Empty:
            return None

    def check(self) -> None:
        super().check()
        self._hangs.look()  # if the process was suspended, this thread was, too
        cfg, since = self._cfg, self._hangs.awake_since
        patience = 2.0 if isinstance(self.env, StepsInHalves) else 1.0  # such an env enforces the same limit itself
        if limit := self.heartbeat.overdue(cfg.start_timeout * patience, cfg.step_timeout * patience, since):
            raise EnvironmentHungError(
                f"the collector has not come back from a step for {limit:g} s (step_timeout); it is here:\n"
                f"{self._stack()}\nWith worker='process' such a simulator is replaced."
            )

    def stop(self) -> None:
        """Stop the thread; a thread that hangs in its environment is abandoned."""
        if self._thread is None:
            return
        self._stopping.set()
        self.send("stop")
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.warning("the collector hangs in its environment and is left behind; it is here:\n%s", self._stack())

    def _stack(self) -> str:
        thread = None if self._thread is None else self._thread.ident
        frame = sys._current_frames().get(thread or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"

    def _work(self) -> None:
        try:
            self._worker.run(self, self._spec.num_steps)
        except (CollectorError, PolicyContractError):  # no restarts left; a message that needs no traceback
            raise
        except BaseException as error:
            details = "".join(traceback.format_exception(error))
            raise CollectorError(
                f"collection failed: {type(error).__name__}: {error}\n\nIn the collector:\n{details}"
            ) from error

    def _pause(self, seconds: float) -> None:
        """Wait before an environment that failed is replaced."""
        self.heartbeat.beat(busy=False)
        if self._stopping.wait(seconds):
            raise Stopped

    def _before_build(self) -> None:
        self.restarts += 1
        self.heartbeat.begin_again()

    def _close(self) -> None:
        pass
