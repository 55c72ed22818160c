"""Statistics of a running stream and of its workers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from embodichain.agents.engine.shared_buffer import Control, Read, SharedBuffer, Work
from embodichain.agents.processes.pool import WorkerHandle


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
    """How often the buffer was written again after the first fill."""
    mean_age_refills: float
    """Mean age of a sampled episode, in refills of the buffer."""
    mean_age_seconds: float
    success_rate: float | None
    """Of all finished episodes, stored or not; None if the environment does not say."""
    restarts: int
    rejected_reads: int
    """Chunks that were drawn again because their row was overwritten while they were copied."""
    frames: int
    """Simulated environment steps, in episodes that were finished."""


class StatsCounter:
    """Turns the shared counters into statistics; remembers the last snapshot for the rates."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._last = (time.monotonic(), *self._totals())

    def _totals(self) -> tuple[int, int, int]:
        work = self._buffer.workers.sum(axis=0)
        return int(work[Work.WRITTEN]), int(work[Work.FRAMES]), self._buffer.samples

    def snapshot(self) -> StreamStats:
        """Return the present statistics."""
        buffer, (then, *before) = self._buffer, self._last
        self._last = (now, episodes, frames, samples) = (time.monotonic(), *self._totals())
        rates = [(new - old) / max(now - then, 1e-9) for new, old in zip(self._last[1:], before, strict=True)]
        work, read = buffer.workers.sum(axis=0), buffer.readers.sum(axis=0)
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
            frames=frames,
        )


WorkerState = Literal["waiting", "building", "running", "unreachable"]


@dataclass(frozen=True)
class WorkerStats:
    """A snapshot of one worker; rates are since the snapshot before."""

    worker: int
    node: str
    """Name of its machine; empty while it has none."""
    pid: int
    """Its process id there."""
    state: WorkerState
    """``waiting`` for a node, ``building`` its environment, ``running``, or ``unreachable``: it did run, but
    the cluster does not know at present whether it still does."""
    episodes_written: int
    episodes_per_second: float
    frames_per_second: float
    silent_seconds: float
    """Time since its last sign of life; 0 unless it is running."""
    mean_age_seconds: float
    """Mean age of its episodes that are in the buffer; 0 if there are none."""
    restarts: int
    """How often this worker was replaced."""
    frames: int
    """Simulated environment steps, in episodes that were finished."""
    idle: bool
    """Whether it is running but has nothing to do, because the buffer is full of episodes that are still good."""


class WorkersCounter:
    """Turns the records of the workers into statistics; remembers the last snapshot for the rates."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._last = (time.monotonic(), buffer.workers.copy())

    def snapshot(self, handles: Mapping[int, WorkerHandle], replaced: Sequence[int]) -> list[WorkerStats]:
        """Return the present statistics of all workers, those that are being replaced included."""
        buffer, now, clock = self._buffer, time.monotonic(), time.time()
        (then, before), records = self._last, buffer.workers.copy()
        self._last = (now, records)
        rates = (records - before) / max(now - then, 1e-9)
        owners, times = buffer.origins[:, 0].copy(), buffer.stamps[:, 0].copy()
        filled = buffer.length > 0
        stats = []
        for index, count in enumerate(replaced):
            handle, own = handles.get(index), filled & (owners == index)
            state = _state(handle)
            running = state == "running"
            stats.append(
                WorkerStats(
                    worker=index,
                    node="" if handle is None else handle.node,
                    pid=0 if handle is None else handle.pid,
                    state=state,
                    episodes_written=int(records[index, Work.WRITTEN]),
                    episodes_per_second=float(rates[index, Work.WRITTEN]),
                    frames_per_second=float(rates[index, Work.FRAMES]),
                    silent_seconds=max(now - handle.heartbeat.last, 0.0) if handle is not None and running else 0.0,
                    mean_age_seconds=float(clock - times[own].mean()) if own.any() else 0.0,
                    restarts=count,
                    frames=int(records[index, Work.FRAMES]),
                    idle=running and bool(records[index, Work.IDLE]),
                )
            )
        return stats


def _state(handle: WorkerHandle | None) -> WorkerState:
    if handle is None or math.isinf(handle.started):
        return "waiting"
    if handle.unreachable:
        return "unreachable"
    return "running" if handle.joined else "building"
