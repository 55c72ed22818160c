"""What a learner and the backends that collect for it know of each other, and what backends elsewhere share."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from embodichain.agents.processes.failure import FailureReport, drop_locals
from embodichain.agents.rl.collector.rollout_worker import Instruction, RolloutResult, WorkerSpec
from embodichain.errors import BufferWaitError, CollectorError, EmbodiChainError, EnvironmentHungError

STOP_SECONDS = 4.0
"""How long a collector may take to end by itself."""
POLL_SECONDS = 0.05
"""How often something else is looked at while one thing is waited for."""
ROOM_SECONDS = 0.2
"""How long a rollout waits for room in the learner's buffer before something else is looked at."""


class Learner(Protocol):
    """What a backend tells the learner's side; called from the backend's thread."""

    def on_adopted(self, version: int, digest: int | None) -> None:
        """Weights are in use."""

    def on_result(self, result: RolloutResult, timeout: float) -> None:
        """A rollout is there; ``BufferWaitError`` if there is no room for it in time."""


class Backend(Protocol):
    """Collects in the background; it can be started and stopped several times."""

    num_envs: int | None
    """Number of environments; ``None`` as long as it is not known."""
    restarts: int
    """How often a worker was replaced since the start."""

    @property
    def num_workers(self) -> int:
        """How many workers have an environment at present."""

    def start(self, num_steps: int, learner: Learner) -> None:
        """Begin to collect by the learner's instructions, once an environment is there."""

    def send(self, instruction: Instruction) -> None:
        """Give an instruction."""

    def check(self) -> None:
        """Raise what keeps it from continuing."""

    def wait_until_paused(self, timeout: float) -> dict[str, Any] | None:
        """Wait until nothing moves after ``pause`` or ``save``; return the state after ``save``."""

    def stop(self) -> None:
        """End collection; returns within a few seconds, whatever it is doing."""

    def reset(self, seed: int | None) -> None:
        """Begin with new episodes; not while it collects."""

    def state(self) -> dict[str, Any]:
        """Return what the next rollout depends on; not while it collects."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; not while it collects."""


class PauseReports:
    """Hands the report that nothing moves any more from a backend's thread to the learner's."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._states: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.put = self._states.put

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
                return self._states.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise CollectorError(f"the collector did not pause within {timeout:g} s") from None


class SupervisedBackend(ABC):
    """Workers in other processes, and a thread in this one that starts them, hears what they say, and replaces them.

    Environments are made there, every time that collection is started. The learner's thread calls the methods without
    an underscore; all others are the thread's.
    """

    num_envs: int | None = None
    restarts = 0
    _failure: Exception | None = None

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec, self._cfg = spec, spec.cfg
        self._seed: int | None = None
        self._state: Mapping[str, Any] | None = None
        self._lock = threading.RLock()

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """How many workers have an environment at present."""

    @abstractmethod
    def send(self, instruction: Instruction) -> None:
        """Give an instruction."""

    @abstractmethod
    def _open(self) -> None:
        """Prepare to start workers."""

    @abstractmethod
    def _watch(self) -> None:
        """Start workers that are missing, wait for something to happen, and deal with it."""

    @abstractmethod
    def _close(self) -> None:
        """End the workers, however they are."""

    def start(self, num_steps: int, learner: Learner) -> None:
        """Start workers, and wait until an environment is there."""
        self._spec, self._learner = replace(self._spec, num_steps=num_steps), learner
        self.restarts, self._failure = 0, None
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._reports = PauseReports(self.check)
        self._thread = threading.Thread(target=self._run, name="embodichain-collector", daemon=True)
        self._thread.start()
        try:
            while not self._ready.wait(POLL_SECONDS):
                self.check()
        except BaseException:  # Ctrl-C included: nothing may be left running
            self.stop()
            raise
        self._state = None

    def check(self) -> None:
        """Raise what keeps it from continuing."""
        if self._failure is not None:
            raise self._failure

    def wait_until_paused(self, timeout: float) -> dict[str, Any] | None:
        """Wait until nothing is delivered any more; return the state after ``save``."""
        return self._reports.wait(timeout)

    def stop(self) -> None:
        """End the workers, and the thread."""
        self._stopping.set()
        self._thread.join()

    def reset(self, seed: int | None) -> None:
        """Begin with new episodes, once started."""
        self._seed = seed

    def state(self) -> dict[str, Any]:
        """Return what the first rollout depends on: nothing has happened yet, or is gone with its process."""
        return {"collector": {}, "env": None, "generator": None, "requests": [], "seed": self._seed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, once started."""
        self._state, self._seed = state, state.get("seed", self._seed)

    def _run(self) -> None:
        try:
            self._open()
            while not self._stopping.is_set():
                self._watch()
        except Exception as error:  # noqa: BLE001 - it is raised in the learner's thread
            drop_locals(error)
            self._failure = error
            self._stopping.set()
        finally:
            self._close()

    def _deliver(self, result: RolloutResult) -> None:
        """Hand over a rollout, waiting for room if somebody else took it."""
        while not self._stopping.is_set():
            try:
                return self._learner.on_result(result, ROOM_SECONDS)
            except BufferWaitError:
                continue


def collector_error(report: FailureReport, who: str, replacements: int = 0) -> EmbodiChainError:
    """Return the error that ends a run, of a worker that cannot be replaced."""
    return report.as_error(who, replacements, EnvironmentHungError if report.hung else CollectorError)
