"""Simulation worker: opens a source of episodes and writes them into its rows of the buffer (on Ray: sends them)."""

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
"""A batch is sent once it reaches this size, even if more episodes were requested."""
_FIRST_BYTES = 1 << 20

_IDLE_SECONDS = 0.002


def simulate(channel: Channel, heartbeat: Heartbeat, settings: dict[str, Any], worker: int, incarnation: int) -> None:
    """Run a local worker: open the source, report its layout, receive the buffer and fill it until the engine stops."""
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
    """Messages from the engine to a worker: the buffer, and weights, which the actor loads immediately."""

    def __init__(self, channel: Channel, source: EpisodeSource) -> None:
        self._channel, self._source = channel, source
        self._description = torch.empty(0, dtype=torch.uint8)

    def receive(self, timeout: float | None = 0.0) -> Segment | None:
        """Process the next message, waiting up to ``timeout`` seconds (None: forever); return the buffer's segment if
        the message holds it, else None."""
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
        """Process all messages that have arrived."""
        while self._channel.has_arrived():
            self.receive()


def adopt(source: EpisodeSource, weights: PublishedWeights) -> None:
    """Load weights into the actor of a simulation; other sources ignore them."""
    if isinstance(source, SimulatedEpisodes | MixedEpisodes):
        source.adopt(weights)


def resume(source: EpisodeSource, record: Ints) -> None:
    """Continue a simulation's schedules from the counts of the worker that it replaces."""
    if isinstance(source, SimulatedEpisodes | MixedEpisodes):
        source.resume(int(record[Work.STEPS]) * source.num_envs, int(record[Work.FINISHED]))


class Worker:
    """Writes the episodes of a source into the rows of one worker, as the refill policy requests them."""

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
        """Simulate while episodes are due and sleep otherwise, until the engine stops."""
        while self._buffer.control[Control.STATE] in (State.STARTING, State.RUNNING):
            heartbeat.beat()
            inbox.read_all()
            is_due, task = self._due()
            self._record[Work.IDLE] = not is_due
            if not is_due:
                time.sleep(_IDLE_SECONDS)
                continue
            for episode in self._source.advance() if self._mixed is None else self._mixed.advance(task):
                self.take(episode)
            self._record[Work.STEPS] += 1

    def _due(self) -> tuple[bool, int]:
        """Return whether episodes are due, and the task with the largest share of its rows due."""
        if self._mixed is None:
            return self._refill.episodes_due() > 0, 0
        shares = [r.episodes_due() / len(rows) for r, rows in zip(self._task_refills, self._task_rows, strict=True)]
        return max(shares) > 0, shares.index(max(shares))

    def take(self, episode: Episode) -> None:
        """Count a finished episode and store it, unless it failed and only successes are stored."""
        rows, task_record = self._rows, None
        if self._mixed is not None:
            rows, task_record = self._task_rows[episode.task_index], self._task_refills[episode.task_index].record
            count_finished(episode, task_record)
        if is_wanted(episode, self._only_success, self._record):
            written = int((self._record if task_record is None else task_record)[Work.WRITTEN])
            self._buffer.write(rows[written % len(rows)], self._index, episode)
            self._record[Work.WRITTEN] += 1
            if task_record is not None:
                task_record[Work.WRITTEN] += 1


def is_wanted(episode: Episode, only_success: bool, record: Ints) -> bool:
    """Check a finished episode for NaN, count it in ``record``, and return whether to store it."""
    episode.check_finite()
    count_finished(episode, record)
    if episode.success is None and only_success:
        raise ConfigError("only_success: the episodes do not report success", "action_config")
    return not only_success or bool(episode.success)


class RefillPolicy:
    """Decides how many episodes one worker (None: all workers together) has to write.

    Every row is filled once. Then ``threshold`` refills all rows for every ``refill_threshold * buffer_size`` samples
    of all readers; requests during a refill are merged into one. ``continuous`` writes one episode for every
    ``refill_threshold`` samples. Its backlog is at most one buffer, so that it stops soon after sampling stops. The
    state is kept in the worker's record, so that a replacement worker continues from it.
    """

    def __init__(
        self, cfg: OnlineDataEngineCfg, buffer: SharedBuffer, worker: int | None, task: int | None = None
    ) -> None:
        """``task`` restricts the policy to the worker's rows of that task; None: all of its rows."""
        self.buffer, self._is_continuous = buffer, cfg.refill == "continuous"
        self._rows = buffer.num_rows if worker is None else len(buffer.rows_of(worker))
        self._samples_per_fill = cfg.refill_threshold * cfg.buffer_size
        self.record: Ints = np.zeros(WORK_WORDS, np.int64) if worker is None else buffer.workers[worker]
        """``Work`` record: the episodes written, and the state of the policy (``TARGET``, ``SERVED``)."""
        if worker is not None and task is not None:
            self._rows, self.record = len(buffer.rows_of_task(worker, task)), buffer.tasks[worker, task]
        if self.record[Work.TARGET] == 0:
            self.record[Work.TARGET] = self._rows

    def episodes_due(self) -> int:
        """Return how many episodes are due now."""
        record, rows, samples = self.record, self._rows, self.buffer.samples
        if self._is_continuous:  # SERVED counts the episodes dropped from a backlog of more than one buffer
            due = rows + samples * rows // self._samples_per_fill - int(record[Work.SERVED]) - int(record[Work.WRITTEN])
            record[Work.SERVED] += max(due - rows, 0)
            return min(max(due, 0), rows)
        fills = samples // self._samples_per_fill
        if record[Work.WRITTEN] >= record[Work.TARGET] and fills > record[Work.SERVED]:
            record[Work.SERVED] = fills
            record[Work.TARGET] = record[Work.WRITTEN] + rows
        return max(int(record[Work.TARGET] - record[Work.WRITTEN]), 0)


def _describe(source: EpisodeSource) -> dict[str, Any]:
    """Return the layout, episode length and step duration of a source, as the engine needs them."""
    return {"layout": source.layout.to_json(), "max_steps": source.max_steps, "step_seconds": source.step_seconds}


class StreamWorker:
    """A worker as a Ray actor, which returns episodes as plain arrays on request.
    Exceptions are returned as reports: the engine's process may be unable to unpickle exceptions of user code."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Store the job; the environment is built by ``open``."""
        sys.path += [entry for entry in job["sys_path"] if entry not in sys.path]
        self._job = job
        self._index = int(job["worker"])
        self._source: EpisodeSource | None = None
        self._batch: BatchWriter | None = None
        self._only_success = False

    def locate(self) -> dict[str, Any]:
        """Return the node and process in which the worker runs."""
        return location_of_actor()

    def open(self) -> dict[str, Any]:
        """Build the environment and return the layout of its frames."""
        try:
            if self._source is None:  # else a previous reply was lost
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
        """Simulate until ``episodes`` are finished or ``seconds`` have passed; return the finished episodes.
        Weights, if given, are loaded into the actor first, unless it already has this version."""
        source, batch = self._source, self._batch
        if source is None or batch is None:
            return self._failed(EngineStateError("open() comes before work()"))
        try:
            if description is not None and weights is not None:
                adopt(source, PublishedWeights(version, tensor_of(description), tensor_of(weights)))
            deadline = time.monotonic() + seconds
            while len(batch) < episodes and batch.nbytes < MAX_BATCH_BYTES and time.monotonic() < deadline:
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
    """Episodes of one worker, and its counters since the last batch."""

    headers: Ints
    """``[num_episodes, 6]``: byte offset in ``data``, length, seed, policy version, success (-1 unknown), task."""
    data: NDArray[np.uint8]
    """Frames of the episodes, one episode after the other; the arrays of an episode follow the order of the layout."""
    counts: Ints
    """Increments of the worker's record, see ``Work``."""

    def episodes(self, layout: FrameLayout) -> Iterator[Episode]:
        """Yield the episodes; their frames are views of ``data``."""
        memory = tensor_of(self.data)
        for offset, length, seed, version, success, task in self.headers.tolist():
            views = _block(layout, length).views(memory[offset:])
            frames: dict[Key, tuple[Tensor, ...]] = {key: (view,) for key, view in views.items()}
            known = None if success < 0 else bool(success)
            yield Episode(frames, length, seed, known, version, task_index=task)


class BatchWriter:
    """Collects copies of episodes into a batch."""

    def __init__(self, layout: FrameLayout) -> None:
        self.layout = layout
        self.counts: Ints = np.zeros(WORK_WORDS, np.int64)
        self._headers: list[tuple[int, ...]] = []
        self._data = np.empty(_FIRST_BYTES, np.uint8)
        self.nbytes = 0
        """Bytes of frames in the batch so far."""

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
        """Return the batch and start a new one."""
        headers = np.array(self._headers, np.int64).reshape(len(self._headers), 6)
        batch = EpisodeBatch(headers, self._data[: self.nbytes], self.counts.copy())
        self._headers, self.nbytes = [], 0
        self.counts[:] = 0
        self._data = np.empty(self._data.size, np.uint8)
        return batch


def _block(layout: FrameLayout, length: int) -> BlockLayout[Key]:
    """Return the memory layout of an episode's arrays ``[length, ...]``."""
    return BlockLayout((leaf.key, leaf.dtype, (length, *leaf.shape)) for leaf in layout.leaves)
