"""What a user wants to watch about a running stream."""

from __future__ import annotations

import time
from dataclasses import dataclass

from embodichain.agents.engine.shared_buffer import Control, Read, SharedBuffer, Work


@dataclass(frozen=True)
class StreamStats:
    """A snapshot of a stream; totals are since the start, rates since the snapshot before."""

    episodes_written: int
    episodes_per_second: float
    frames_per_second: float
    """Simulated environment steps per second, in episodes that were finished."""
    samples: int
    """Chunks drawn by all processes."""
    samples_per_second: float
    refills: float
    """How often the buffer was written anew after the first fill."""
    mean_age_refills: float
    """Mean age of a sampled episode, in refills of the buffer."""
    mean_age_seconds: float
    success_rate: float | None
    """Of all finished episodes, stored or not; None if the environment does not say."""
    restarts: int
    rejected_reads: int
    """Chunks that were drawn again because their row was overwritten while they were copied."""


class StatsCounter:
    """Turns the shared counters into statistics; remembers the last snapshot for the rates."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._last = (time.monotonic(), *self._totals())

    def _totals(self) -> tuple[int, int, int]:
        work = self._buffer.workers.sum(axis=0)
        return int(work[Work.WRITTEN]), int(work[Work.FRAMES]), self._buffer.samples

    def snapshot(self) -> StreamStats:
        """Return the statistics of this moment."""
        buffer, now = self._buffer, time.monotonic()
        work, read = buffer.workers.sum(axis=0), buffer.readers.sum(axis=0)
        then, *before = self._last
        episodes, frames, samples = self._totals()
        self._last = (now, episodes, frames, samples)
        rates = [(new - old) / max(now - then, 1e-9) for new, old in zip(self._last[1:], before, strict=True)]
        aged, judged = max(read[Read.AGED], 1.0), int(work[Work.JUDGED])
        return StreamStats(
            episodes_written=episodes,
            episodes_per_second=rates[0],
            frames_per_second=rates[1],
            samples=samples,
            samples_per_second=rates[2],
            refills=max(episodes / buffer.num_rows - 1.0, 0.0),
            mean_age_refills=float(read[Read.AGE_EPISODES] / aged / buffer.num_rows),
            mean_age_seconds=float(read[Read.AGE_SECONDS] / aged),
            success_rate=int(work[Work.SUCCEEDED]) / judged if judged else None,
            restarts=int(buffer.control[Control.RESTARTS]),
            rejected_reads=int(read[Read.REDRAWN]),
        )
