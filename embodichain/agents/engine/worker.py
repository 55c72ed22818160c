"""What runs in a simulation process: open the source, tell its layout, then write episodes into the rows it owns."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from embodichain.agents.datasets.frames import Episode, EpisodeSource, FrameLayout
from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.shared_buffer import WORK_WORDS, Control, Ints, SharedBuffer, State, Work
from embodichain.agents.engine.sources import open_source
from embodichain.agents.processes.channel import Channel
from embodichain.agents.processes.pool import Heartbeat
from embodichain.errors import ConfigError, EngineStateError

_IDLE_SECONDS = 0.002


def simulate(channel: Channel, heartbeat: Heartbeat, settings: dict[str, Any], worker: int, incarnation: int) -> None:
    """Do a worker's job in its process, until the engine stops."""
    cfg = OnlineDataEngineCfg.from_dict(settings)
    source = open_source(cfg, worker, incarnation)
    try:
        Worker(cfg, worker, source, _join(channel, source)).loop(heartbeat)
    finally:
        source.close()


class Worker:
    """Writes the episodes of a source into the rows of one worker, as fast as the refill policy wants them."""

    def __init__(self, cfg: OnlineDataEngineCfg, worker: int, source: EpisodeSource, buffer: SharedBuffer) -> None:
        self._index = worker
        self._source = source
        self._buffer = buffer
        self._rows = buffer.rows_of(worker)
        self._record: Ints = buffer.workers[worker]
        self._wanted = Selection(cfg.check().only_success, self._record)
        self._refill = RefillPolicy(cfg, buffer, worker)

    def loop(self, heartbeat: Heartbeat) -> None:
        """Simulate while episodes are wanted, sleep while they are not, until the engine stops."""
        while self._buffer.control[Control.STATE] in (State.STARTING, State.RUNNING):
            heartbeat.beat()
            wanted = self._refill.episodes_due() > 0
            self._record[Work.IDLE] = not wanted
            if not wanted:
                time.sleep(_IDLE_SECONDS)
                continue
            for episode in self._source.advance():
                self.take(episode)

    def take(self, episode: Episode) -> None:
        """Count a finished episode and store it if it is wanted."""
        if self._wanted.takes(episode):
            row = self._rows[int(self._record[Work.WRITTEN]) % len(self._rows)]
            self._buffer.write(row, self._index, episode)
            self._record[Work.WRITTEN] += 1


class Selection:
    """Counts finished episodes and tells which of them are to be stored."""

    def __init__(self, only_success: bool, record: Ints) -> None:
        self._only_success, self._record = only_success, record

    def takes(self, episode: Episode) -> bool:
        """Count an episode, after a look at its numbers; tell whether it is wanted."""
        episode.check_finite()
        record = self._record
        record[Work.FINISHED] += 1
        record[Work.FRAMES] += episode.length
        if episode.success is not None:
            record[Work.JUDGED] += 1
            record[Work.SUCCEEDED] += int(episode.success)
        elif self._only_success:
            raise ConfigError("only_success: the episodes do not say whether they succeeded", "action_config")
        return not self._only_success or bool(episode.success)


class RefillPolicy:
    """Decides when a worker simulates (for None, when all together do): how many samples an episode is good for.

    Every row is filled once. Then ``threshold`` fills all rows again each time ``refill_threshold * buffer_size`` more
    samples were drawn, by all readers in all processes; requests that come while a fill is under way collapse into one.
    ``continuous`` writes one more episode for every ``refill_threshold`` samples; a worker that cannot keep up owes at
    most one buffer, so that it does not run on for long after the sampling has stopped. What was decided is kept in the
    worker's record: a worker that replaces another continues where that one was.
    """

    def __init__(self, cfg: OnlineDataEngineCfg, buffer: SharedBuffer, worker: int | None) -> None:
        self._buffer, self._is_continuous = buffer, cfg.refill == "continuous"
        self._rows = buffer.num_rows if worker is None else len(buffer.rows_of(worker))
        self._samples_per_fill = cfg.refill_threshold * cfg.buffer_size
        self.record: Ints = np.zeros(WORK_WORDS, np.int64) if worker is None else buffer.workers[worker]
        """Where ``Work.WRITTEN`` is counted, and where the policy keeps what it decided."""
        if self.record[Work.TARGET] == 0:
            self.record[Work.TARGET] = self._rows

    def episodes_due(self) -> int:
        """Return how many episodes should be written as soon as possible."""
        record, rows, samples = self.record, self._rows, self._buffer.samples
        if self._is_continuous:  # SERVED counts the episodes whose debt was forgotten
            due = rows + samples * rows // self._samples_per_fill - int(record[Work.SERVED]) - int(record[Work.WRITTEN])
            record[Work.SERVED] += max(due - rows, 0)
            return min(max(due, 0), rows)
        fills = samples // self._samples_per_fill
        if record[Work.WRITTEN] >= record[Work.TARGET] and fills > record[Work.SERVED]:
            record[Work.SERVED] = fills
            record[Work.TARGET] = record[Work.WRITTEN] + rows
        return max(int(record[Work.TARGET] - record[Work.WRITTEN]), 0)


def _join(channel: Channel, source: EpisodeSource) -> SharedBuffer:
    """Tell the engine what frames look like, and map the buffer it answers with."""
    channel.send("layout", {"layout": source.layout.to_json(), "max_steps": source.max_steps})
    answer = channel.receive()
    if answer is None or answer.segment is None:
        raise EngineStateError("the engine answered without its buffer")
    terms = answer.content()
    layout = FrameLayout.from_json(terms["layout"])
    return SharedBuffer(layout, terms["num_rows"], terms["max_steps"], terms["num_workers"], answer.segment)
