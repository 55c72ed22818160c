"""When workers write and when readers wait: how many samples an episode is good for.

Both policies aim at ``refill_threshold`` samples per written episode, summed over all readers in all processes. They
live in the workers, read the shared counters, and keep what they decided in the worker's record, so that a worker that
replaces another continues where that one was.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.shared_buffer import WORK_WORDS, Ints, SharedBuffer, Work
from embodichain.errors import StreamStalledError

_POLL_SECONDS = 0.001


class RefillPolicy(ABC):
    """Decides when a worker simulates; for None, when all workers together do."""

    def __init__(self, buffer: SharedBuffer, worker: int | None) -> None:
        self._buffer = buffer
        self._rows = buffer.num_rows if worker is None else len(buffer.rows_of(worker))
        self.record: Ints = np.zeros(WORK_WORDS, np.int64) if worker is None else buffer.workers[worker]
        """Where ``Work.WRITTEN`` is counted, and where the policy keeps what it decided."""

    @abstractmethod
    def episodes_due(self) -> int:
        """Return how many episodes should be written as soon as possible."""

    def wants_episode(self) -> bool:
        """Tell whether the worker should simulate now."""
        return self.episodes_due() > 0


class ThresholdRefill(RefillPolicy):
    """Fill every row once; then again each time ``samples_per_fill`` more samples were drawn.

    Requests that come while a fill is under way collapse into one: slow simulation never falls behind by more.
    """

    def __init__(self, buffer: SharedBuffer, worker: int | None, samples_per_fill: int) -> None:
        super().__init__(buffer, worker)
        self._samples_per_fill = samples_per_fill
        if self.record[Work.TARGET] == 0:
            self.record[Work.TARGET] = self._rows

    def episodes_due(self) -> int:
        """Return what the fill that is under way or due still lacks."""
        missing = int(self.record[Work.TARGET] - self.record[Work.WRITTEN])
        if missing > 0:
            return missing
        requests = self._buffer.samples // self._samples_per_fill
        if requests <= self.record[Work.SERVED]:
            return 0
        self.record[Work.SERVED] = requests
        self.record[Work.TARGET] = self.record[Work.WRITTEN] + self._rows
        return self._rows


class ContinuousRefill(RefillPolicy):
    """Fill every row once; then one more episode for every ``samples_per_episode`` samples.

    A worker that cannot keep up owes at most one buffer: older debts are forgotten, so that it does not run on for
    long after the sampling has stopped.
    """

    def __init__(self, buffer: SharedBuffer, worker: int | None, samples_per_episode: float) -> None:
        super().__init__(buffer, worker)
        self._samples_per_own_episode = samples_per_episode * buffer.num_rows / self._rows

    def episodes_due(self) -> int:
        """Return how many episodes the samples drawn so far have earned."""
        # SERVED counts the episodes whose debt was forgotten.
        earned = self._rows + int(self._buffer.samples / self._samples_per_own_episode)
        due = earned - int(self.record[Work.SERVED]) - int(self.record[Work.WRITTEN])
        if due > self._rows:
            self.record[Work.SERVED] += due - self._rows
        return min(max(due, 0), self._rows)


def make_refill(cfg: OnlineDataEngineCfg, buffer: SharedBuffer, worker: int | None) -> RefillPolicy:
    """Return the policy that the config names, for one worker or, with None, for all of them together."""
    if cfg.refill == "continuous":
        return ContinuousRefill(buffer, worker, cfg.refill_threshold)
    return ThresholdRefill(buffer, worker, cfg.refill_threshold * cfg.buffer_size)


class ReadLimiter:
    """Makes readers wait when they are about to draw more than ``max_samples_per_episode``."""

    def __init__(self, buffer: SharedBuffer, max_samples_per_episode: float, timeout: float) -> None:
        self._buffer, self._limit, self._timeout = buffer, max_samples_per_episode, timeout

    def wait(self, batch_size: int, check_state: Callable[[], None]) -> None:
        """Return once ``batch_size`` more samples are within the limit; raise if they never will be."""
        most = int(self._limit * self._buffer.num_rows)
        if batch_size > self._limit * self._buffer.num_rows:
            raise StreamStalledError(
                f"a batch of {batch_size} can never be drawn: the limit of {self._limit:g} samples per episode and "
                f"{self._buffer.num_rows} rows allow {most} at a time; raise max_samples_per_episode or buffer_size"
            )
        before, started = self._buffer.episodes_written, time.monotonic()
        while self._limit * self._buffer.episodes_written - self._buffer.samples < batch_size:
            check_state()
            if time.monotonic() - started > self._timeout:
                written = self._buffer.episodes_written - before
                raise StreamStalledError(
                    f"a batch of {batch_size} waited {self._timeout:g} s for new episodes, but the workers wrote "
                    f"{written} in that time: raise max_samples_per_episode or num_workers"
                )
            time.sleep(_POLL_SECONDS)
