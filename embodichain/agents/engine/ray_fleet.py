"""Workers anywhere in a Ray cluster. They send batches of episodes; this side writes them into the shared buffer.

Which rows an episode goes to is decided here, one after the other: a worker that is slow, or waits for a node, leaves
its work to the others, and no row grows old because its worker is gone.
"""

from __future__ import annotations

import collections
import logging
import math
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.fleet import Message, WorkerHandle
from embodichain.agents.engine.ray_batch import EpisodeBatch
from embodichain.agents.engine.ray_nodes import NodeNames
from embodichain.agents.engine.ray_worker import StreamWorker
from embodichain.agents.engine.refill import RefillPolicy, make_refill
from embodichain.agents.engine.shared_buffer import Ints, SharedBuffer, Work
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.ray_session import RaySession, actor_options, error_text, no_room, node_died
from embodichain.errors import ClusterError, EngineStateError
from embodichain.extras import require

log = logging.getLogger("embodichain.stream")

_TURN_SECONDS = 0.25
"""How long a worker simulates before it answers; its answers are its signs of life."""
_DEPTH = 2
"""Requests that a worker has at a time: it begins the next one while the answer to the last one is on its way."""
_IDLE_SECONDS = 0.002
_LINE_LENGTH = 120
"""Ray tells of a dead process in one line with all that may have killed it; the whole of it follows the message."""


class RayWorker:
    """One worker in the cluster, seen from the engine."""

    def __init__(self, fleet: RayFleet, index: int, incarnation: int, actor: Any) -> None:
        self.index, self.incarnation = index, incarnation
        self.node = ""
        self.node_id: str | None = None
        self.started, self.joined = math.inf, 0.0
        self.lost = False
        self.actor = actor
        self.requests: collections.deque[tuple[Any, int]] = collections.deque()
        """Answers that are awaited, and the number of episodes that each was asked for."""
        self.unreachable = False
        """Whether Ray could not reach it and does not know yet what has become of it."""
        self._fleet = fleet
        self._pid = 0
        self._end = FailureReport(index, "ended")

    @property
    def pid(self) -> int:
        """The process id on its node; 0 while there is none."""
        return self._pid

    def ask(self, answer: Any, episodes: int = 0) -> None:
        """Await an answer."""
        self.requests.append((answer, episodes))

    def placed(self, message: Message) -> None:
        """Note where the worker is, and let it build its environment unless it has one."""
        self.node_id, self._pid = message["node_id"], message["pid"]
        self.node = self._fleet.nodes.name(message["node_id"], message["node"])
        self.unreachable = False
        if not self.joined:
            self.started = time.monotonic()
            self.ask(self.actor.open.remote())

    def doubt(self) -> None:
        """Ask where the worker is; what it was asked for before is given up."""
        self.unreachable = True
        self.requests.clear()
        self.ask(self.actor.place.remote())

    def ended(self, error: Exception) -> None:
        """Note how the worker ended."""
        self.lost, text = node_died(error, self.node_id), error_text(error)
        if self.lost:  # what Ray says of it are ids alone
            self._end = FailureReport(self.index, f"is gone with its node {self.node}".rstrip())
        else:
            last = textwrap.shorten(text.splitlines()[-1], _LINE_LENGTH, placeholder=" ...")
            self._end = FailureReport(self.index, f"ended: {last}", traceback=text)

    def share(self, buffer: SharedBuffer) -> None:
        """Let it begin to fill the buffer."""
        self.joined = time.monotonic()
        self._fleet.fill(buffer)

    def last_words(self) -> FailureReport:
        """Say how the worker ended."""
        return self._end

    def wait(self, seconds: float) -> bool:
        """Do nothing: a worker has nothing to finish."""
        return False

    def kill(self) -> None:
        """End it, now."""
        self.requests.clear()
        if RaySession.alive():
            require("ray", extra="ray").kill(self.actor, no_restart=True)


class RayFleet:
    """Starts workers in a cluster, asks them for episodes as the refill policy wants, and writes these."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        self._session = RaySession(cfg.address, cfg.num_workers, cfg.placement)
        self._ray: Any = require("ray", extra="ray")
        self._cfg = cfg
        self._job_cfg = _cfg_of_worker(cfg)
        self._actor = self._ray.remote(StreamWorker).options(**actor_options(cfg.placement))
        self._workers: collections.deque[RayWorker] = collections.deque()
        self._buffer: SharedBuffer | None = None
        self._refill: RefillPolicy | None = None
        self._row = 0
        self.nodes = NodeNames(lambda: {node["NodeID"] for node in self._ray.nodes() if node["Alive"]})
        self._began, self._had_place = time.monotonic(), False

    def start(self, index: int, incarnation: int) -> WorkerHandle:
        """Ask for a worker; it waits in the cluster until a node has room for it."""
        job = {"sys_path": sys.path, "worker": index, "incarnation": incarnation, "cfg": self._job_cfg}
        worker = RayWorker(self, index, incarnation, self._actor.remote(job))
        worker.ask(worker.actor.place.remote())
        self._workers.append(worker)
        return worker

    def fill(self, buffer: SharedBuffer) -> None:
        """Write into this buffer from now on."""
        if self._buffer is None:
            self._buffer, self._refill = buffer, make_refill(self._cfg, buffer, None)

    def hear(self, seconds: float) -> Iterator[tuple[WorkerHandle, Message | None]]:
        """Ask for what is due, wait a moment, write what came, and return what else workers said."""
        if not RaySession.alive():
            raise EngineStateError("Ray was shut down while the engine was running")
        try:
            yield from self._hear(seconds)
        except (OSError, self._ray.exceptions.RayError) as error:  # those of single answers are dealt with there
            raise ClusterError(
                f"the connection with the Ray cluster is lost ({error_text(error)}): the node of this machine or the "
                "head is gone. See 'ray status'"
            ) from error

    def _hear(self, seconds: float) -> Iterator[tuple[WorkerHandle, Message | None]]:
        self._check_places()
        self._ask_for_episodes()
        awaited = {worker.requests[0][0]: worker for worker in self._workers if worker.requests}
        if not awaited:
            time.sleep(_IDLE_SECONDS)
            return
        ready, _ = self._ray.wait(list(awaited), num_returns=1, timeout=seconds)
        if len(awaited) > len(ready) > 0:
            ready, _ = self._ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        for answer in ready:
            worker = awaited[answer]
            if worker in self._workers:
                yield from self._take(worker)

    def forget(self, worker: WorkerHandle) -> None:
        """Listen to a worker no more."""
        self._workers = collections.deque(other for other in self._workers if other is not worker)

    def close(self) -> None:
        """Leave the cluster; a Ray that was started here ends, and nothing of it is left in this process."""
        self._workers.clear()
        del self._actor
        self._session.close()

    # --- asking ---------------------------------------------------------------------------------------------------

    def _ask_for_episodes(self) -> None:
        """Share what is due among the workers that can take more; who has waited longest is asked first."""
        if self._refill is None or self._buffer is None:
            return
        for worker in self._workers:
            if worker.joined and (worker.unreachable or not worker.requests):
                self._beat(worker)  # it is not asked for anything, so it owes no sign of life
        due = self._refill.episodes_due() - sum(count for worker in self._workers for _, count in worker.requests)
        reachable = [worker for worker in self._workers if worker.joined and not worker.unreachable]
        able = sorted((w for w in reachable if len(w.requests) < _DEPTH), key=lambda worker: len(worker.requests))
        for position, worker in enumerate(able):
            share = math.ceil(due / (len(able) - position))
            if share > 0:
                worker.ask(worker.actor.work.remote(share, _TURN_SECONDS), share)
                due -= share
        for worker in reachable:
            self._buffer.workers[worker.index, Work.IDLE] = not worker.requests

    def _beat(self, worker: RayWorker) -> None:
        if self._buffer is not None:
            self._buffer.workers[worker.index, Work.HEARTBEAT] = time.monotonic_ns()

    def _check_places(self) -> None:
        """Raise if the cluster has had no place for any worker since the beginning."""
        if self._had_place or time.monotonic() - self._began < self._cfg.start_timeout:
            return
        raise no_room(self._cfg.placement, self._cfg.start_timeout)

    # --- writing --------------------------------------------------------------------------------------------------

    def _take(self, worker: RayWorker) -> Iterator[tuple[WorkerHandle, Message | None]]:
        """Deal with the next answer of a worker."""
        try:
            answer = self._ray.get(worker.requests[0][0])
        except self._ray.exceptions.ActorUnavailableError:
            worker.doubt()  # Ray answers the next question once it knows what has become of it
            return
        except self._ray.exceptions.RayError as error:
            worker.ended(error)
            yield worker, None
            return
        worker.requests.popleft()
        if isinstance(answer, EpisodeBatch):
            self._write(worker, answer)
        elif answer["event"] == "placed":
            self._had_place = True
            worker.placed(answer)
        else:
            yield worker, answer

    def _write(self, worker: RayWorker, batch: EpisodeBatch) -> None:
        """Write a batch into the next rows, and count what its worker did."""
        buffer, refill = self._buffer, self._refill
        if buffer is None or refill is None:
            return
        record: Ints = buffer.workers[worker.index]
        record += batch.counts
        self._beat(worker)
        for episode in batch.episodes(buffer.layout):
            buffer.write(self._row, worker.index, episode)
            self._row = (self._row + 1) % buffer.num_rows
            record[Work.WRITTEN] += 1
            refill.record[Work.WRITTEN] += 1
        self._workers.remove(worker)  # to the end of the queue
        self._workers.append(worker)


def _cfg_of_worker(cfg: OnlineDataEngineCfg) -> dict[str, Any]:
    """Return the settings that are sent to workers: a simulator has as many threads as its worker has cores."""
    data = cfg.to_dict()
    if cfg.gym_config:
        threads = max(1, math.floor(cfg.placement.num_cpus))
        data["gym_config"] = {"num_threads": threads, **cfg.gym_config}
    return data
