"""Simulation workers in a Ray cluster: they send batches of episodes, and this side writes them into the buffer.

Rows are written one after the other, whoever sends an episode: a worker that is slow, or waits for a node, leaves its
work to the others, and no row grows old because its worker is gone.
"""

from __future__ import annotations

import functools
import math
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
from embodichain.agents.engine.shared_buffer import WORK_WORDS, Ints, SharedBuffer, Work
from embodichain.agents.engine.sources import open_source
from embodichain.agents.engine.worker import RefillPolicy, Selection
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.pool import WorkerHandle
from embodichain.agents.processes.ray_backend import ActorHandle, ActorPool, location_of_actor
from embodichain.agents.processes.shared_memory import tensor_of
from embodichain.errors import EngineStateError
from embodichain.utils.tensor_tree import BlockLayout

MAX_BATCH_BYTES = 64 << 20
"""A batch is sent when it is as large as this, however many episodes were asked for."""
_TURN_SECONDS = 0.25
"""How long a worker simulates before it answers; its answers are its heartbeat."""
_DEPTH = 2
"""Requests that a worker has at a time: it begins the next one while the answer to the last one is on its way."""
_IDLE_SECONDS = 0.002
_FIRST_BYTES = 1 << 20


class StreamWorker:
    """What a worker does, as a Ray actor.

    Answers are plain data. An exception becomes a report, because the engine's process may lack what it takes to
    rebuild exceptions of user code.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        """Take the job; nothing heavy happens before ``open``."""
        sys.path += [entry for entry in job["sys_path"] if entry not in sys.path]
        self._job = job
        self._index = int(job["worker"])
        self._source: EpisodeSource | None = None
        self._batch: BatchWriter | None = None
        self._wanted: Selection | None = None

    def locate(self) -> dict[str, Any]:
        """Return where the worker runs."""
        return location_of_actor()

    def open(self) -> dict[str, Any]:
        """Build the environment and return what its frames look like."""
        if self._source is not None:  # the answer got lost
            return self._opened(self._source)
        try:
            torch.set_num_threads(1)
            cfg = OnlineDataEngineCfg.from_dict(self._job["cfg"])
            source = self._source = open_source(cfg, self._index, int(self._job["incarnation"]))
            self._batch = BatchWriter(source.layout)
            self._wanted = Selection(cfg.check().only_success, self._batch.counts)
            return self._opened(source)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine reports it
            return self._failed(error)

    def work(self, episodes: int, seconds: float) -> dict[str, Any]:
        """Simulate until there are so many episodes to send, or for so long; return those that are finished."""
        source, batch, wanted = self._source, self._batch, self._wanted
        if source is None or batch is None or wanted is None:
            return self._failed(EngineStateError("open() comes before work()"))
        try:
            until = time.monotonic() + seconds
            while len(batch) < episodes and batch.nbytes < MAX_BATCH_BYTES and time.monotonic() < until:
                for episode in source.advance():
                    if wanted.takes(episode):
                        batch.add(episode)
            return {"event": "episodes", "batch": batch.take()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine reports it
            return self._failed(error)

    def _opened(self, source: EpisodeSource) -> dict[str, Any]:
        return {"event": "layout", "layout": source.layout.to_json(), "max_steps": source.max_steps}

    def _failed(self, error: Exception) -> dict[str, Any]:
        return {"event": "failed", "report": FailureReport.of_exception(self._index, error).to_json()}


class RayPool(ActorPool[ActorHandle]):
    """Starts workers in a cluster, asks them for episodes as the refill policy wants, and writes these."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        super().__init__(StreamWorker, ActorHandle, cfg, cfg.worker_timeout)
        self._settings = _worker_settings(cfg)
        self._make_refill = functools.partial(RefillPolicy, cfg)
        self._buffer: SharedBuffer | None = None
        self._refill: RefillPolicy | None = None
        self._row = 0
        self._requested: dict[Any, int] = {}
        """Numbers of episodes that were asked for, by the answers that will bring them."""

    def start(self, index: int, incarnation: int) -> WorkerHandle:
        """Ask for a worker."""
        job = {"sys_path": sys.path, "worker": index, "incarnation": incarnation, "cfg": self._settings}
        return self.launch(index, incarnation, job)

    def share(self, worker: WorkerHandle, buffer: SharedBuffer) -> None:
        """Write what the worker sends into this buffer from now on."""
        worker.joined = time.monotonic()
        worker.heartbeat.beat(busy=False)
        if self._buffer is None:
            self._buffer, self._refill = buffer, self._make_refill(buffer, None)

    def poll(self, seconds: float) -> Iterator[tuple[WorkerHandle, str, Any]]:
        """Ask for what is due, wait for answers, and write the episodes in them; return ``layout`` and ``failed``."""
        self._ask_for_episodes()
        is_waiting = any(worker.calls for worker in self.workers)
        for worker, kind, content in self.answers(seconds if is_waiting else _IDLE_SECONDS):
            if kind == "located" and not worker.joined:
                worker.calls.append(worker.actor.open.remote())
            elif kind == "episodes":
                self._write(worker, content["batch"])
            elif kind == "layout":
                yield worker, kind, {"layout": content["layout"], "max_steps": content["max_steps"]}
            elif kind == "failed":
                yield worker, kind, content

    def _ask_for_episodes(self) -> None:
        """Share what is due among the workers that can take more; who has waited longest is asked first."""
        if self._refill is None or self._buffer is None:
            return
        reachable = [worker for worker in self.workers if worker.joined and not worker.unreachable]
        for worker in reachable:
            if not worker.calls:
                worker.heartbeat.beat(busy=False)  # it was not asked for anything, so no answer is due
        awaited = {answer for worker in self.workers for answer in worker.calls}
        self._requested = {answer: count for answer, count in self._requested.items() if answer in awaited}
        due = self._refill.episodes_due() - sum(self._requested.values())
        able = sorted((w for w in reachable if len(w.calls) < _DEPTH), key=lambda worker: len(worker.calls))
        for position, worker in enumerate(able):
            share = math.ceil(due / (len(able) - position))
            if share > 0:
                answer = worker.actor.work.remote(share, _TURN_SECONDS)
                worker.calls.append(answer)
                worker.heartbeat.beat()
                self._requested[answer] = share
                due -= share
        for worker in reachable:
            self._buffer.workers[worker.index, Work.IDLE] = not worker.calls

    def _write(self, worker: ActorHandle, batch: EpisodeBatch) -> None:
        """Write a batch into the next rows, and count what its worker did."""
        buffer, refill = self._buffer, self._refill
        if buffer is None or refill is None:
            return
        record: Ints = buffer.workers[worker.index]
        record += batch.counts
        worker.heartbeat.beat()
        for episode in batch.episodes(buffer.layout):
            buffer.write(self._row, worker.index, episode)
            self._row = (self._row + 1) % buffer.num_rows
            record[Work.WRITTEN] += 1
            refill.record[Work.WRITTEN] += 1
        self.workers.remove(worker)  # to the end of the queue
        self.workers.append(worker)

    def stop(self, seconds: float = 0.0) -> None:
        """End the workers and leave the cluster."""
        self._requested.clear()
        super().stop(seconds)


def _worker_settings(cfg: OnlineDataEngineCfg) -> dict[str, Any]:
    """Return the settings that are sent to workers: a simulator has as many threads as its worker has cores."""
    data = cfg.to_dict()
    if cfg.gym_config:
        threads = max(1, math.floor(cfg.placement.num_cpus))
        data["gym_config"] = {"num_threads": threads, **cfg.gym_config}
    return data


# --- batches ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpisodeBatch:
    """Episodes of one worker, and what it has done meanwhile."""

    headers: Ints
    """``[num_episodes, 5]``: where an episode begins in ``data``, its length, seed, policy version, and success."""
    data: NDArray[np.uint8]
    """The frames: each episode in one piece, its arrays one after the other in the order of the layout."""
    counts: Ints
    """Counts to be added to the worker's record, see ``Work``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return EpisodeBatch, (self.headers, self.data, self.counts)

    def episodes(self, layout: FrameLayout) -> Iterator[Episode]:
        """Return the episodes; their frames lie in ``data``, which is not copied."""
        memory = tensor_of(self.data)
        for offset, length, seed, version, success in self.headers.tolist():
            views = _block(layout, length).views(memory[offset:])
            frames: dict[Key, tuple[Tensor, ...]] = {key: (view,) for key, view in views.items()}
            yield Episode(frames, length, seed, None if success < 0 else bool(success), version)


class BatchWriter:
    """Gathers episodes, whose frames are copied at once, into a batch."""

    def __init__(self, layout: FrameLayout) -> None:
        self.layout = layout
        self.counts: Ints = np.zeros(WORK_WORDS, np.int64)
        self._headers: list[tuple[int, ...]] = []
        self._data = np.empty(_FIRST_BYTES, np.uint8)
        self._used = 0

    def __len__(self) -> int:
        return len(self._headers)

    @property
    def nbytes(self) -> int:
        """Bytes gathered so far."""
        return self._used

    def add(self, episode: Episode) -> None:
        """Copy an episode into the batch."""
        block, offset = _block(self.layout, episode.length), self._used
        size = block.nbytes
        if offset + size > self._data.size:
            grown = np.empty(max(2 * self._data.size, offset + size), np.uint8)
            grown[:offset] = self._data[:offset]
            self._data = grown
        for key, view in block.views(torch.from_numpy(self._data[offset : offset + size])).items():
            torch.cat(episode.frames[key], out=view)
        success = -1 if episode.success is None else int(episode.success)
        self._headers.append((offset, episode.length, episode.seed, episode.policy_version, success))
        self._used = offset + size

    def take(self) -> EpisodeBatch:
        """Return the batch, and begin the next one."""
        headers = np.array(self._headers, np.int64).reshape(len(self._headers), 5)
        batch = EpisodeBatch(headers, self._data[: self._used], self.counts.copy())
        self._headers, self._used = [], 0
        self.counts[:] = 0
        self._data = np.empty(self._data.size, np.uint8)
        return batch


def _block(layout: FrameLayout, length: int) -> BlockLayout[Key]:
    """Return where the arrays ``[length, ...]`` of an episode lie."""
    return BlockLayout((leaf.key, leaf.dtype, (length, *leaf.shape)) for leaf in layout.leaves)
