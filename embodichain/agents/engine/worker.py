"""A simulation process: opens the source, reports its layout, writes episodes to its rows (in Ray: sends them)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodichain.agents.datasets.frames import Episode, EpisodeSource, FrameLayout, Key
from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.shared_buffer import (
    WORK_WORDS,
    Control,
    Ints,
    SharedBuffer,
    State,
    Work,
    count_finished,
    task_weights,
)
from embodichain.agents.engine.sources import MixedEpisodes, SimulatedEpisodes, open_source
from embodichain.agents.processes.channel import Channel, PublishedWeights
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.pool import Heartbeat
from embodichain.agents.processes.ray_backend import location_of_actor
from embodichain.agents.processes.shared_memory import Segment, tensor_of
from embodichain.errors import ConfigError, EngineStateError
from embodichain.utils.tensor_tree import BlockLayout

MAX_BATCH_BYTES = 64 << 20
"""A batch is sent when it is as large as this, however many episodes were asked for."""
_FIRST_BYTES = 1 << 20

_IDLE_SECONDS = 0.002


def simulate(channel: Channel, heartbeat: Heartbeat, settings: dict[str, Any], worker: int, incarnation: int) -> None:
    """Do a worker's job in its process, until the engine stops."""
    cfg = OnlineDataEngineCfg.from_dict(settings)
    source = open_source(cfg, worker, incarnation)
    try:
        channel.send("layout", _describe(source))
        inbox = Inbox(channel, source)
        while (segment := inbox.receive(None)) is None:
            continue
        length = cfg.max_episode_steps or source.max_steps
        buffer = SharedBuffer(source.layout, cfg.buffer_size, length, cfg.num_workers, segment, task_weights(cfg))
        Worker(cfg, worker, source, buffer).loop(heartbeat, inbox)
    finally:
        source.close()


class Inbox:
    """What the engine sends to a worker: the buffer, and weights that its actor adopts at once."""

    def __init__(self, channel: Channel, source: EpisodeSource) -> None:
        self._channel, self._source = channel, source
        self._description = torch.empty(0, dtype=torch.uint8)

    def receive(self, timeout: float | None = 0.0) -> Segment | None:
        """Read the next message, waiting for it at most so long; return the buffer's memory if it is that."""
        message = self._channel.receive(timeout)
        if message is None:
            return None
        if message.kind == "policy":
            self._description = message.content()["description"]
            return None
        if message.segment is None:
            raise EngineStateError(f"the engine sent {message.kind} without its memory")
        if message.kind == "weights":
            segment, version = message.segment, message.content()["version"]
            adopt(self._source, PublishedWeights(version, self._description, segment.bytes, segment))
            return None
        return message.segment

    def read_all(self) -> None:
        """Deal with all messages that have arrived."""
        while self._channel.has_arrived():
            self.receive()


def adopt(source: EpisodeSource, weights: PublishedWeights) -> None:
    """Let who acts in a simulation do so by these weights."""
    if isinstance(source, SimulatedEpisodes | MixedEpisodes):
        source.adopt(weights)


def resume(source: EpisodeSource, record: Ints) -> None:
    """Let a source continue where the worker of this record, which it replaces, was."""
    if isinstance(source, SimulatedEpisodes | MixedEpisodes):
        source.resume(int(record[Work.STEPS]) * source.num_envs, int(record[Work.FINISHED]))


class Worker:
    """Writes the episodes of a source into the rows of one worker, as fast as the refill policy wants them."""

    def __init__(self, cfg: OnlineDataEngineCfg, worker: int, source: EpisodeSource, buffer: SharedBuffer) -> None:
        self._index = worker
        self._source = source
        self._buffer = buffer
        self._rows = buffer.rows_of(worker)
        self._record: Ints = buffer.workers[worker]
        self._only_success = cfg.check().only_success
        self._refill = RefillPolicy(cfg, buffer, worker)
        self._mixed = source if isinstance(source, MixedEpisodes) else None
        tasks = range(len(buffer.weights) if self._mixed is not None else 0)
        self._task_rows = [buffer.rows_of_task(worker, task) for task in tasks]
        self._task_refills = [RefillPolicy(cfg, buffer, worker, task) for task in tasks]
        resume(source, self._record)

    def loop(self, heartbeat: Heartbeat, inbox: Inbox) -> None:
        """Simulate while episodes are wanted, sleep while they are not, until the engine stops."""
        while self._buffer.control[Control.STATE] in (State.STARTING, State.RUNNING):
            heartbeat.beat()
            inbox.read_all()
            wanted, task = self._due()
            self._record[Work.IDLE] = not wanted
            if not wanted:
                time.sleep(_IDLE_SECONDS)
                continue
            for episode in self._source.advance() if self._mixed is None else self._mixed.advance(task):
                self.take(episode)
            self._record[Work.STEPS] += 1

    def _due(self) -> tuple[bool, int]:
        """Tell whether episodes are wanted, and of which of several tasks most, as a share of its rows."""
        if self._mixed is None:
            return self._refill.episodes_due() > 0, 0
        shares = [r.episodes_due() / len(rows) for r, rows in zip(self._task_refills, self._task_rows, strict=True)]
        return max(shares) > 0, shares.index(max(shares))

    def take(self, episode: Episode) -> None:
        """Count a finished episode and store it if it is wanted."""
        rows, own = self._rows, None
        if self._mixed is not None:
            rows, own = self._task_rows[episode.task_index], self._task_refills[episode.task_index].record
            count_finished(episode, own)
        if is_wanted(episode, self._only_success, self._record):
            written = int((self._record if own is None else own)[Work.WRITTEN])
            self._buffer.write(rows[written % len(rows)], self._index, episode)
            self._record[Work.WRITTEN] += 1
            if own is not None:
                own[Work.WRITTEN] += 1


def is_wanted(episode: Episode, only_success: bool, record: Ints) -> bool:
    """Count a finished episode, after a look at its numbers; tell whether it is to be stored."""
    episode.check_finite()
    count_finished(episode, record)
    if episode.success is None and only_success:
        raise ConfigError("only_success: the episodes do not say whether they succeeded", "action_config")
    return not only_success or bool(episode.success)


class RefillPolicy:
    """Decides when a worker simulates (for None, when all together do): how many samples an episode is good for.

    Every row is filled once. Then ``threshold`` fills all rows again for every ``refill_threshold * buffer_size``
    samples of all readers; requests during a fill collapse into one. ``continuous`` writes one episode for every
    ``refill_threshold`` samples, and owes at most one buffer, so that it stops soon after the sampling does. The
    worker's record keeps the decisions: a worker that replaces another continues from there.
    """

    def __init__(
        self, cfg: OnlineDataEngineCfg, buffer: SharedBuffer, worker: int | None, task: int | None = None
    ) -> None:
        """``task`` names the one of several tasks whose rows of the worker are meant; None: all of its rows."""
        self.buffer, self._is_continuous = buffer, cfg.refill == "continuous"
        self._rows = buffer.num_rows if worker is None else len(buffer.rows_of(worker))
        self._samples_per_fill = cfg.refill_threshold * cfg.buffer_size
        self.record: Ints = np.zeros(WORK_WORDS, np.int64) if worker is None else buffer.workers[worker]
        if worker is not None and task is not None:
            self._rows, self.record = len(buffer.rows_of_task(worker, task)), buffer.tasks[worker, task]
        """Where ``Work.WRITTEN`` is counted, and where the policy keeps what it decided."""
        if self.record[Work.TARGET] == 0:
            self.record[Work.TARGET] = self._rows

    def episodes_due(self) -> int:
        """Return how many episodes should be written as soon as possible."""
        record, rows, samples = self.record, self._rows, self.buffer.samples
        if self._is_continuous:  # SERVED counts the episodes whose debt was forgotten
            due = rows + samples * rows // self._samples_per_fill - int(record[Work.SERVED]) - int(record[Work.WRITTEN])
            record[Work.SERVED] += max(due - rows, 0)
            return min(max(due, 0), rows)
        fills = samples // self._samples_per_fill
        if record[Work.WRITTEN] >= record[Work.TARGET] and fills > record[Work.SERVED]:
            record[Work.SERVED] = fills
            record[Work.TARGET] = record[Work.WRITTEN] + rows
        return max(int(record[Work.TARGET] - record[Work.WRITTEN]), 0)


def _describe(source: EpisodeSource) -> dict[str, Any]:
    """Return what the engine needs to know of a source."""
    return {"layout": source.layout.to_json(), "max_steps": source.max_steps, "step_seconds": source.step_seconds}


class StreamWorker:
    """A worker as a Ray actor, which sends episodes, as plain data, when it is asked for them.
    An exception becomes a report: the engine's process may be unable to rebuild exceptions of user code."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Take the job; nothing heavy happens before ``open``."""
        sys.path += [entry for entry in job["sys_path"] if entry not in sys.path]
        self._job = job
        self._index = int(job["worker"])
        self._source: EpisodeSource | None = None
        self._batch: BatchWriter | None = None
        self._only_success = False

    def locate(self) -> dict[str, Any]:
        """Return where the worker runs."""
        return location_of_actor()

    def open(self) -> dict[str, Any]:
        """Build the environment and return what its frames look like."""
        try:
            if self._source is None:  # else the answer got lost
                torch.set_num_threads(1)
                cfg = OnlineDataEngineCfg.from_dict(self._job["cfg"])
                self._source = open_source(cfg, self._index, int(self._job["incarnation"]))
                self._batch = BatchWriter(self._source.layout)
                self._only_success = cfg.check().only_success
                resume(self._source, self._job["record"])
            return {"event": "layout", **_describe(self._source)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine reports it
            return self._failed(error)

    def work(
        self,
        episodes: int,
        seconds: float,
        version: int = -1,
        description: NDArray[np.uint8] | None = None,
        weights: NDArray[np.uint8] | None = None,
    ) -> dict[str, Any]:
        """Simulate until there are so many episodes to send, or for so long; return those that are finished.
        If there are weights, the actor adopts them before, unless it did already."""
        source, batch = self._source, self._batch
        if source is None or batch is None:
            return self._failed(EngineStateError("open() comes before work()"))
        try:
            if description is not None and weights is not None:
                adopt(source, PublishedWeights(version, tensor_of(description), tensor_of(weights)))
            until = time.monotonic() + seconds
            while len(batch) < episodes and batch.nbytes < MAX_BATCH_BYTES and time.monotonic() < until:
                for episode in source.advance():
                    if is_wanted(episode, self._only_success, batch.counts):
                        batch.add(episode)
                batch.counts[Work.STEPS] += 1
            return {"event": "episodes", "batch": batch.take()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine reports it
            return self._failed(error)

    def _failed(self, error: Exception) -> dict[str, Any]:
        return {"event": "failed", "report": FailureReport.of_exception(self._index, error).to_json()}


@dataclass(frozen=True)
class EpisodeBatch:
    """Episodes of one worker, and what it has done meanwhile."""

    headers: Ints
    """``[num_episodes, 6]``: where an episode begins in ``data``, its length, seed, policy version, success, task."""
    data: NDArray[np.uint8]
    """The frames: each episode in one piece, its arrays one after the other in the order of the layout."""
    counts: Ints
    """Counts to be added to the worker's record, see ``Work``."""

    def episodes(self, layout: FrameLayout) -> Iterator[Episode]:
        """Return the episodes; their frames lie in ``data``, which is not copied."""
        memory = tensor_of(self.data)
        for offset, length, seed, version, success, task in self.headers.tolist():
            views = _block(layout, length).views(memory[offset:])
            frames: dict[Key, tuple[Tensor, ...]] = {key: (view,) for key, view in views.items()}
            known = None if success < 0 else bool(success)
            yield Episode(frames, length, seed, known, version, task_index=task)


class BatchWriter:
    """Gathers episodes, whose frames are copied at once, into a batch."""

    def __init__(self, layout: FrameLayout) -> None:
        self.layout = layout
        self.counts: Ints = np.zeros(WORK_WORDS, np.int64)
        self._headers: list[tuple[int, ...]] = []
        self._data = np.empty(_FIRST_BYTES, np.uint8)
        self.nbytes = 0
        """Bytes gathered so far."""

    def __len__(self) -> int:
        return len(self._headers)

    def add(self, episode: Episode) -> None:
        """Copy an episode into the batch."""
        block, offset = _block(self.layout, episode.length), self.nbytes
        size = block.nbytes
        if offset + size > self._data.size:
            grown = np.empty(max(2 * self._data.size, offset + size), np.uint8)
            grown[:offset] = self._data[:offset]
            self._data = grown
        for key, view in block.views(torch.from_numpy(self._data[offset : offset + size])).items():
            torch.cat(episode.frames[key], out=view)
        success = -1 if episode.success is None else int(episode.success)
        header = (offset, episode.length, episode.seed, episode.policy_version, success, episode.task_index)
        self._headers.append(header)
        self.nbytes = offset + size

    def take(self) -> EpisodeBatch:
        """Return the batch, and begin the next one."""
        headers = np.array(self._headers, np.int64).reshape(len(self._headers), 6)
        batch = EpisodeBatch(headers, self._data[: self.nbytes], self.counts.copy())
        self._headers, self.nbytes = [], 0
        self.counts[:] = 0
        self._data = np.empty(self._data.size, np.uint8)
        return batch


def _block(layout: FrameLayout, length: int) -> BlockLayout[Key]:
    """Return where the arrays ``[length, ...]`` of an episode lie."""
    return BlockLayout((leaf.key, leaf.dtype, (length, *leaf.shape)) for leaf in layout.leaves)
