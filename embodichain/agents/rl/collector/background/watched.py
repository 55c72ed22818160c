"""A worker in another process and the thread in this one that watches over it: what all such workers share."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from embodichain.agents.processes.failure import FailureReport, drop_locals
from embodichain.agents.rl.collector.background.worker import Learner, Reports
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.errors import CollectorError, EnvironmentHungError

LOOK_SECONDS = 0.05
"""How often something else is looked at while one thing is waited for."""
ROOM_SECONDS = 0.2
"""How long a rollout waits for room in the learner's buffer before something else is looked at."""


@dataclass(frozen=True)
class Fault:
    """Why a worker cannot go on."""

    what: str
    """To be read after its name: ``was killed by SIGKILL``."""
    text: str = ""
    """Everything that it left behind: a traceback, or what is known of its end."""
    cause: Exception | None = None
    hung: bool = False
    lost: bool = False
    """Whether it is gone with its machine, which is no fault of its own."""

    @staticmethod
    def told(report: str) -> Fault:
        """Return the fault that a worker reported of itself."""
        said = FailureReport.from_json(report)
        return Fault(f"{said.what}: {said.message}", said.traceback, said.original())

    def error(self, who: str, replacements: int = 0) -> CollectorError:
        """Return the error that ends the run."""
        after = f", after {replacements} replacements" if replacements else ""
        text = f"\n\nIn the process:\n{self.text}" if self.text else ""
        error = (EnvironmentHungError if self.hung else CollectorError)(f"{who} {self.what}{after}{text}")
        error.__cause__ = self.cause
        return error


class WatchedWorker(ABC):
    """A thread that starts what collects, hears what it says, and replaces it.

    The learner's thread calls the methods without an underscore; all others are the thread's.
    """

    def __init__(self, cfg: AsyncCfg, learner: Learner) -> None:
        self.num_envs, self.restarts = 0, 0
        self._cfg, self._learner = cfg, learner
        self._lock = threading.RLock()
        self._failure: Exception | None = None
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._reports = Reports(self.check)
        self._thread = threading.Thread(target=self._run, name="embodichain-collector", daemon=True)

    def begin(self) -> None:
        """Start the thread, once everything that it uses is there."""
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Wait until an environment is there."""
        while not self._ready.wait(LOOK_SECONDS):
            self.check()

    def check(self) -> None:
        """Raise what keeps it from going on."""
        if self._failure is not None:
            raise self._failure

    def wait_until_standing(self, timeout: float) -> dict[str, Any] | None:
        """Wait until nothing is delivered any more; return the state after ``save``."""
        return self._reports.wait(timeout)

    def stop(self) -> None:
        """End what collects, and the thread."""
        self._stopping.set()
        self._thread.join()

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

    @abstractmethod
    def _open(self) -> None:
        """Start what collects."""

    @abstractmethod
    def _watch(self) -> None:
        """Wait a moment for something to happen, and deal with it."""

    @abstractmethod
    def _close(self) -> None:
        """End what collects, however it is."""
