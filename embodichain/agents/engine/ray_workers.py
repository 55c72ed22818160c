"""Simulation workers in a Ray cluster: they send batches of episodes, and this side writes them into the buffer.

Rows are written one after the other, whoever sends an episode: a worker that is slow, or waits for a node, leaves its
work to the others, and no row grows old because its worker is gone.
"""

from __future__ import annotations

import collections
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
from embodichain.agents.engine.refill import RefillPolicy, make_refill
from embodichain.agents.engine.shared_buffer import WORK_WORDS, Ints, SharedBuffer, Work
from embodichain.agents.engine.sources import open_source
from embodichain.agents.engine.worker import Selection
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.pool import HangDetector, Heartbeat, WorkerHandle
from embodichain.agents.processes.ray_backend import (
    ActorHandle,
    NodeNames,
    RayCluster,
    error_text,
    is_unreachable,
    load_ray,
    location_of_actor,
    wait_for_answers,
)
from embodichain.agents.processes.shared_memory import tensor_of
from embodichain.errors import ClusterError, EngineStateError
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
        return {"event": "located", **location_of_actor()}

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

    def work(self, episodes: int, seconds: float) -> EpisodeBatch | dict[str, Any]:
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
            return batch.take()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine reports it
            return self._failed(error)

    def _opened(self, source: EpisodeSource) -> dict[str, Any]:
        return {"event": "layout", "layout": source.layout.to_json(), "max_steps": source.max_steps}

    def _failed(self, error: Exception) -> dict[str, Any]:
        return {"event": "failed", "report": FailureReport.of_exception(self._index, error).to_json()}


class RayWorker(ActorHandle):
    """One worker in the cluster, seen from the engine."""

    def __init__(self, pool: RayPool, index: int, incarnation: int, actor: Any) -> None:
        super().__init__(index, actor)
        self.incarnation = incarnation
        self.started, self.joined = math.inf, 0.0
        self.heartbeat = Heartbeat()
        self.requests: collections.deque[tuple[Any, int]] = collections.deque()
        """Answers that are awaited, and the number of episodes that each was asked for."""
        self._pool = pool

    def ask(self, answer: Any, episodes: int = 0) -> None:
        """Await an answer."""
        self.requests.append((answer, episodes))

    def located(self, message: dict[str, Any]) -> None:
        """Note where the worker runs, and let it build its environment unless it has one."""
        self.locate(message, self._pool.nodes)
        if not self.joined:
            self.started = time.monotonic()
            self.ask(self.actor.open.remote())

    def ask_again(self) -> None:
        """Ask a worker that cannot be reached where it is; what it was asked for before is given up."""
        self.unreachable = True
        self.requests.clear()
        self.ask(self.actor.locate.remote())

    def wait(self, seconds: float) -> bool:
        """Do nothing: a worker has nothing to finish."""
        return False

    def kill(self) -> None:
        """End it, now."""
        self.requests.clear()
        self._pool.forget(self)
        super().kill()


class RayPool:
    """Starts workers in a cluster, asks them for episodes as the refill policy wants, and writes these."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        self._hangs = HangDetector(cfg.start_timeout, cfg.worker_timeout)
        self._cluster = RayCluster(cfg.address, cfg.num_workers, cfg.placement)
        self._cfg = cfg
        self._job_cfg = _worker_cfg(cfg)
        self._actor = load_ray().remote(StreamWorker).options(**cfg.placement.actor_options())
        self._workers: collections.deque[RayWorker] = collections.deque()
        self._buffer: SharedBuffer | None = None
        self._refill: RefillPolicy | None = None
        self._row = 0
        self.nodes = NodeNames()
        self._began, self._had_room = time.monotonic(), False

    def start(self, index: int, incarnation: int) -> WorkerHandle:
        """Ask for a worker; it waits in the cluster until a node has room for it."""
        job = {"sys_path": sys.path, "worker": index, "incarnation": incarnation, "cfg": self._job_cfg}
        worker = RayWorker(self, index, incarnation, self._actor.remote(job))
        worker.ask(worker.actor.locate.remote())
        self._workers.append(worker)
        return worker

    def share(self, worker: WorkerHandle, buffer: SharedBuffer) -> None:
        """Write what the worker sends into this buffer from now on."""
        worker.joined = time.monotonic()
        worker.heartbeat.beat(busy=False)
        if self._buffer is None:
            self._buffer, self._refill = buffer, make_refill(self._cfg, buffer, None)

    def poll(self, seconds: float) -> Iterator[tuple[WorkerHandle, str, Any]]:
        """Ask for what is due, wait a moment, write what came, and return other messages of workers."""
        if not RayCluster.is_alive():
            raise EngineStateError("Ray was shut down while the engine was running")
        try:
            yield from self._poll(seconds)
            self._hangs.look()
            for worker in list(self._workers):
                if report := self._hangs.check(worker):
                    yield worker, "failed", report
        except (OSError, load_ray().exceptions.RayError) as error:  # those of single answers are dealt with there
            raise ClusterError(
                f"the connection with the Ray cluster is lost ({error_text(error)}): the node of this machine or the "
                "head is gone. See 'ray status'"
            ) from error

    def forget(self, worker: WorkerHandle) -> None:
        """Listen to a worker no more."""
        self._workers = collections.deque(other for other in self._workers if other is not worker)

    def stop(self, seconds: float) -> None:
        """End the workers and leave the cluster; a Ray that was started here ends, and nothing of it is left here."""
        for worker in list(self._workers):
            worker.kill()
        del self._actor
        self._cluster.close()

    # --- requests -------------------------------------------------------------------------------------------------

    def _poll(self, seconds: float) -> Iterator[tuple[WorkerHandle, str, Any]]:
        if not self._had_room and time.monotonic() - self._began > self._cfg.start_timeout:
            raise self._cfg.placement.no_room(self._cfg.start_timeout)
        self._ask_for_episodes()
        awaited = {worker.requests[0][0]: worker for worker in self._workers if worker.requests}
        for _, worker, answer in wait_for_answers(awaited, seconds if awaited else _IDLE_SECONDS):
            if worker in self._workers:
                yield from self._take(worker, answer)

    def _ask_for_episodes(self) -> None:
        """Share what is due among the workers that can take more; who has waited longest is asked first."""
        if self._refill is None or self._buffer is None:
            return
        for worker in self._workers:
            if worker.joined and (worker.unreachable or not worker.requests):
                worker.heartbeat.beat(busy=False)  # it is not asked for anything, so no heartbeat is due
        due = self._refill.episodes_due() - sum(count for worker in self._workers for _, count in worker.requests)
        reachable = [worker for worker in self._workers if worker.joined and not worker.unreachable]
        able = sorted((w for w in reachable if len(w.requests) < _DEPTH), key=lambda worker: len(worker.requests))
        for position, worker in enumerate(able):
            share = math.ceil(due / (len(able) - position))
            if share > 0:
                worker.ask(worker.actor.work.remote(share, _TURN_SECONDS), share)
                worker.heartbeat.beat()
                due -= share
        for worker in reachable:
            self._buffer.workers[worker.index, Work.IDLE] = not worker.requests

    # --- answers --------------------------------------------------------------------------------------------------

    def _take(self, worker: RayWorker, answer: Any) -> Iterator[tuple[WorkerHandle, str, Any]]:
        """Deal with the next answer of a worker."""
        if is_unreachable(answer):
            worker.ask_again()  # Ray answers once it knows what has become of it
            return
        if isinstance(answer, Exception):
            yield worker, "failed", worker.end_of(answer)
            return
        worker.requests.popleft()
        if isinstance(answer, EpisodeBatch):
            self._write(worker, answer)
        elif answer["event"] == "located":
            self._had_room = True
            worker.located(answer)
        elif answer["event"] == "failed":
            yield worker, "failed", FailureReport.from_json(answer["report"])
        else:
            yield worker, "layout", {"layout": answer["layout"], "max_steps": answer["max_steps"]}

    def _write(self, worker: RayWorker, batch: EpisodeBatch) -> None:
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
        self._workers.remove(worker)  # to the end of the queue
        self._workers.append(worker)


def _worker_cfg(cfg: OnlineDataEngineCfg) -> dict[str, Any]:
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
