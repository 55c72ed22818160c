"""How fast a stream is: over the last moments and over the whole run.

Workers write in bursts, a whole buffer at a time, and rest in between. What happened since the last look says little;
rates are means over a time that is long enough for several bursts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embodichain.agents.engine import StreamStats, WorkerStats

WINDOW_SECONDS = 30.0
"""Rates are means over about so long, until the stream ends."""


@dataclass(frozen=True)
class Moment:
    """What was seen of a stream at one moment."""

    seconds: float
    """Since the beginning."""
    stats: StreamStats
    workers: Sequence[WorkerStats] = ()


@dataclass(frozen=True)
class Rates:
    """Means over a time, per second."""

    seconds: float
    """How long that time was."""
    episodes: float
    frames: float
    samples: float
    of_workers: Mapping[int, tuple[float, float]]
    """Episodes and simulated steps of each worker, by its index."""

    @classmethod
    def between(cls, first: Moment, last: Moment) -> Rates:
        """Return the means between two moments."""
        seconds = last.seconds - first.seconds

        def rate(before: int, after: int) -> float:
            return (after - before) / seconds if seconds > 0 else 0.0

        former = {worker.worker: worker for worker in first.workers}
        return cls(
            seconds,
            rate(first.stats.episodes_written, last.stats.episodes_written),
            rate(first.stats.frames, last.stats.frames),
            rate(first.stats.samples, last.stats.samples),
            {
                w.worker: (rate(f.episodes_written, w.episodes_written), rate(f.frames, w.frames))
                for w in last.workers
                if (f := former.get(w.worker)) is not None
            },
        )


class History:
    """Moments of a stream: the first one, and those of the last ``WINDOW_SECONDS``."""

    def __init__(self, first: Moment) -> None:
        self._first = first
        self._recent = deque([first])

    def add(self, moment: Moment) -> None:
        """Remember a moment; those that are too long ago are forgotten."""
        self._recent.append(moment)
        while moment.seconds - self._recent[1].seconds >= WINDOW_SECONDS:
            self._recent.popleft()

    def recent(self) -> Rates:
        """Return the rates of the last seconds."""
        return Rates.between(self._recent[0], self._recent[-1])

    def whole(self) -> Rates:
        """Return the rates since the beginning."""
        return Rates.between(self._first, self._recent[-1])
