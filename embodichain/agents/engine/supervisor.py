"""``Supervisor``: the thread that starts an engine's workers, gives them the buffer, replaces and stops them."""

from __future__ import annotations

import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from embodichain.agents.datasets.frames import FrameLayout
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
from embodichain.agents.processes.channel import PublishedWeights
from embodichain.agents.processes.failure import ENGINE, FailureReport, drop_locals
from embodichain.agents.processes.pool import Restarts, WorkerHandle, WorkerPool, WorkerProcess
from embodichain.agents.processes.ray_backend import ActorHandle, ActorPool, load_ray
from embodichain.errors import EmbodiChainError, StreamStalledError

if TYPE_CHECKING:
    from embodichain.agents.engine.worker import EpisodeBatch, RefillPolicy

log = logging.getLogger("embodichain.workers")

_POLL_SECONDS = 0.05
_IDLE_SECONDS = 0.002
_TURN_SECONDS = 0.25
"""Longest time that a Ray worker simulates per request; its replies serve as heartbeats."""
_DEPTH = 2
"""Pending requests per Ray worker: it starts the next one while its last reply is in transit."""
STOP_SECONDS = 3.0
"""Time that workers have to stop by themselves before they are killed."""
_OVERDUE = 3
"""An episode is overdue after this many times the steps of the longest one."""


class LocalPool(WorkerPool):
    """Worker processes on this machine, which write into the buffer themselves."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        from embodichain.agents.engine.worker import simulate  # not needed by processes that only sample

        settings = cfg.to_dict()
        super().__init__(simulate, lambda *worker: (settings, *worker), cfg.start_timeout, cfg.worker_timeout)
        self._published: PublishedWeights | None = None
        self._publishing = threading.Lock()

    def share(self, worker: WorkerHandle, buffer: SharedBuffer) -> None:
        """Send a worker the newest weights, if any, and the buffer, which it starts to fill."""
        if isinstance(worker, WorkerProcess):  # if it has died, the next poll reports it
            with self._publishing:
                if self._published is not None:
                    self._send(worker, self._published, described=False)
                worker.channel.send("buffer", {}, buffer.segment, wait=False)
                worker.joined = time.monotonic()

    def publish(self, weights: PublishedWeights) -> None:
        """Send weights to all running workers; the others get the newest ones from ``share``."""
        with self._publishing:
            described = self._published is not None and self._published.description is weights.description
            self._published = weights
            for worker in list(self._workers):
                if worker.joined and not worker.is_closed:
                    self._send(worker, weights, described)

    @staticmethod
    def _send(worker: WorkerProcess, weights: PublishedWeights, described: bool) -> None:
        if not described:
            worker.channel.send("policy", {"description": weights.description}, wait=False)
        worker.channel.send("weights", {"version": weights.version}, weights.segment, wait=False)

    def progress(self, buffer: SharedBuffer) -> Iterator[tuple[str, Ints, float | None]]:
        """Yield each writer's name, its record, and the time of its last heartbeat (None: it has nothing to do)."""
        for worker in self._workers:
            record: Ints = buffer.workers[worker.index]
            is_working = worker.joined and not worker.is_closed and not record[Work.IDLE]
            yield f"simulation worker {worker.index}", record, worker.heartbeat.last if is_working else None


class RayPool(ActorPool[ActorHandle]):
    """Workers in a Ray cluster: this process requests episodes when the refill policy has them due, and writes them.
    An episode of any worker goes to the next row, so a slow or lost worker delays no row."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        from embodichain.agents.engine.worker import RefillPolicy, StreamWorker

        super().__init__(StreamWorker, ActorHandle, cfg, cfg.worker_timeout, cfg.worker_timeout)
        self._settings = cfg.to_dict()
        if cfg.gym_config:  # one simulation thread per core of the worker
            threads = max(1, math.floor(cfg.placement.num_cpus))
            tasks = [entry.gym_config | {"weight": entry.weight, "task": entry.words} for entry in cfg.tasks()]
            given = [{"num_threads": threads, **task} for task in tasks]
            self._settings["gym_config"] = given or {"num_threads": threads, **dict(cfg.gym_config)}
            self._settings["task_observations"] = cfg.agreement
        self._make_refill = functools.partial(RefillPolicy, cfg)
        self._refill: RefillPolicy | None = None
        self._row = 0
        self._published: PublishedWeights | None = None
        self._stored: tuple[int, Any, Any] | None = None
        """Version of the weights in the object store, and references to the policy's description and weights there."""
        self._requested: dict[Any, int] = {}
        """Number of requested episodes by pending reply."""

    def start(self, index: int, incarnation: int) -> WorkerHandle:
        """Launch a worker; a replacement continues from its predecessor's record."""
        record = np.zeros(WORK_WORDS, np.int64) if self._refill is None else self._refill.buffer.workers[index].copy()
        job = {"sys_path": sys.path, "worker": index, "incarnation": incarnation, "cfg": self._settings}
        job["record"] = record
        return self.launch(index, incarnation, job)

    def share(self, worker: WorkerHandle, buffer: SharedBuffer) -> None:
        """Start to request episodes from a worker and write them into this buffer."""
        worker.joined = time.monotonic()
        worker.heartbeat.beat(busy=False)
        if self._refill is None:
            self._refill = self._make_refill(buffer, None)

    def publish(self, weights: PublishedWeights) -> None:
        """Send these weights along with all further requests."""
        self._published = weights

    def _weights(self) -> tuple[Any, ...]:
        """Return the newest weights as arguments of a request; they are put into the object store once."""
        weights, put = self._published, load_ray().put
        if weights is None:
            return ()
        if self._stored is None or self._stored[0] != weights.version:
            self._stored = (weights.version, put(weights.description.numpy()), put(weights.data.cpu().numpy()))
        return self._stored

    def poll(self, seconds: float) -> Iterator[tuple[WorkerHandle, str, Any]]:
        """Request due episodes, wait for replies and write their episodes; yield ``layout`` and ``failed`` replies."""
        self._ask_for_episodes()
        is_waiting = any(worker.calls for worker in self.workers)
        for worker, kind, content in self.answers(seconds if is_waiting else _IDLE_SECONDS):
            if kind == "located" and not worker.joined:
                worker.calls.append(worker.actor.open.remote())
            elif kind == "episodes":
                self._write(worker, content["batch"])
            elif kind == "layout":
                yield worker, kind, {name: content[name] for name in ("layout", "max_steps", "step_seconds")}
            elif kind == "failed":
                yield worker, kind, content

    def progress(self, buffer: SharedBuffer) -> Iterator[tuple[str, Ints, float | None]]:
        """Yield one entry as in :meth:`LocalPool.progress` for all workers together, as any of them may write next."""
        beats = [w.heartbeat.last for w in self.workers if w.joined and not w.unreachable and not w.is_killed]
        total: Ints = buffer.workers.sum(axis=0)
        yield "the workers of the cluster", total, max(beats) if beats and self.is_needed else None

    def _ask_for_episodes(self) -> None:
        """Divide the due episodes among the workers that can take another request, least recently used first."""
        if self._refill is None:
            return
        reachable = [worker for worker in self.workers if worker.joined and not worker.unreachable]
        for worker in reachable:
            if not worker.calls:
                worker.heartbeat.beat(busy=False)  # no request is pending, so no reply is expected
        awaited = {answer for worker in self.workers for answer in worker.calls}
        self._requested = {answer: count for answer, count in self._requested.items() if answer in awaited}
        due = self._refill.episodes_due()
        self.is_needed = due > 0
        due -= sum(self._requested.values())
        able = sorted((w for w in reachable if len(w.calls) < _DEPTH), key=lambda worker: len(worker.calls))
        for position, worker in enumerate(able):
            share = math.ceil(due / (len(able) - position))
            if share > 0:
                answer = worker.actor.work.remote(share, _TURN_SECONDS, *self._weights())
                worker.calls.append(answer)
                worker.heartbeat.beat()
                self._requested[answer] = share
                due -= share
        for worker in reachable:
            self._refill.buffer.workers[worker.index, Work.IDLE] = not worker.calls

    def _write(self, worker: ActorHandle, batch: EpisodeBatch) -> None:
        """Write a batch into the next rows, and add its counts to the worker's record."""
        refill = self._refill
        if refill is None:
            return
        buffer = refill.buffer
        record: Ints = buffer.workers[worker.index]
        record += batch.counts
        worker.heartbeat.beat()
        for episode in batch.episodes(buffer.layout):
            buffer.write(self._row, worker.index, episode)
            count_finished(episode, buffer.tasks[worker.index, episode.task_index])
            buffer.tasks[worker.index, episode.task_index, Work.WRITTEN] += 1
            self._row = (self._row + 1) % buffer.num_rows
            record[Work.WRITTEN] += 1
            refill.record[Work.WRITTEN] += 1
        self.workers.remove(worker)  # to the end of the queue
        self.workers.append(worker)

    def stop(self, seconds: float = 0.0) -> None:
        self._requested.clear()
        self._stored = None
        super().stop(seconds)


class RefreshWatch:
    """Detects a stalled stream: due episodes are not written although the workers are alive.

    The limit is ``worker_timeout``, or three times the longest wait for an episode so far, whichever is longer. The
    stream has stalled if nobody writes for that long although episodes end, or are overdue. A warning comes first, at
    half the limit. A writer that is only slow, or that writes nothing while others do, gets the warning alone.
    """

    def __init__(self, worker_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout, self._clock = worker_timeout, clock
        self._since: dict[str, tuple[float, Ints]] = {}
        """By writer: the last time it wrote or had nothing to do, and its record at that time."""
        self._longest: dict[str, float] = {}
        self._warned: set[str] = set()
        self._last_write = 0.0
        """Time of the last write by any writer."""

    def check(
        self, who: str, record: Ints, alive_at: float | None, awake_since: float, most_steps: int
    ) -> tuple[str, bool]:
        """Return a message about a writer that does not write ("": none), and whether the stream has stalled.
        ``most_steps`` is the number of steps within which an episode ends."""
        since, before = self._since.get(who, (0.0, record))
        has_written = record[Work.WRITTEN] > before[Work.WRITTEN]
        if has_written:
            self._last_write = self._clock()
        if has_written and alive_at is not None:
            self._longest[who] = max(self._longest.get(who, 0.0), alive_at - since)
        if who not in self._since or has_written or alive_at is None or since < awake_since:
            self._since[who] = self._clock(), record.copy()
            self._warned.discard(who)
            return "", False
        limit, waited = max(self._timeout, 3.0 * self._longest.get(who, 0.0)), alive_at - since
        done = record - before
        is_overdue = done[Work.FINISHED] > 0 or done[Work.STEPS] > _OVERDUE * most_steps
        has_stalled = bool(is_overdue and min(waited, alive_at - self._last_write) >= limit)
        if waited < limit / 2 or (who in self._warned and not has_stalled):
            return "", False
        self._warned.add(who)
        return f"{who} wrote no episode for {waited:.0f} s, although some are due: {_outcomes(done)}", has_stalled


def _outcomes(record: Ints) -> str:
    """Describe the finished episodes of a ``Work`` record."""
    succeeded = f"{record[Work.SUCCEEDED]} of {record[Work.JUDGED]} with a known outcome succeeded"
    return f"{record[Work.FINISHED]} episodes finished, {succeeded}"


class Supervisor(threading.Thread):
    """Owns the workers of an engine from start to stop."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        super().__init__(name="embodichain-stream-supervisor", daemon=True)
        self.buffer: SharedBuffer | None = None
        self.error: Exception | None = None
        """The error that prevented the start or ended the engine."""
        self.changed = threading.Event()
        """Set when the buffer is allocated, when it is full for the first time, and at the end."""
        self._cfg = cfg
        self.workers: dict[int, WorkerHandle] = {}
        """Workers by index, without those that are being replaced."""
        silence = max(cfg.start_timeout, cfg.worker_timeout)
        self.restarts = Restarts("simulation worker {}", cfg.num_workers, cfg.max_restarts, silence)
        self._pool = RayPool(cfg) if cfg.workers == "ray" else LocalPool(cfg)
        self._stopping = threading.Event()
        self._progress = (0, 0.0)
        """During the first fill: episodes written, and seconds since the last one."""
        self._last_look = time.monotonic()
        self._refresh = RefreshWatch(cfg.worker_timeout)
        self._most_steps = 0
        """Steps of a worker within which an episode ends."""

    @property
    def is_ready(self) -> bool:
        """Whether every row was written at least once."""
        return self.buffer is not None and bool(self.buffer.control[Control.READY])

    def publish(self, weights: PublishedWeights) -> None:
        """Send weights to all current and future workers."""
        self._pool.publish(weights)

    def stop(self) -> None:
        """Stop the workers, kill those that do not stop in time, and wait for the thread to end."""
        self._stopping.set()
        # A finalizer may call this from any thread, including this one.
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        """Start the workers and monitor them until ``stop`` or a permanent failure."""
        try:
            while not self._stopping.is_set():
                self._watch()
        except Exception as error:  # noqa: BLE001 - any error must reach the processes that sample
            report = FailureReport.of_exception(ENGINE, error)
            drop_locals(error)
            self.error = error if isinstance(error, (EmbodiChainError, OSError)) else report.as_user_error()
            if self.buffer is not None and self.buffer.control[Control.STATE] != State.FAILED:
                self.buffer.fail(report.to_json())
        finally:
            if self.buffer is not None and self.buffer.control[Control.STATE] != State.FAILED:
                self.buffer.control[Control.STATE] = State.STOPPED
            try:
                self._pool.stop(STOP_SECONDS)
            finally:
                self.workers.clear()
                self.changed.set()

    def _watch(self) -> None:
        for index, incarnation in self.restarts.due():
            try:
                self.workers[index] = self._pool.start(index, incarnation)
            except OSError as error:
                self._give_up(FailureReport(index, f"could not be started ({error})"))
        for worker, kind, content in self._pool.poll(_POLL_SECONDS):
            if kind == "failed":
                self._replace(worker, content)
            else:
                self._admit(worker, **content)
        if self.buffer is not None:
            was_ready = self.is_ready
            if not was_ready:
                self._check_first_fill(self.buffer)
            self._check_refresh(self.buffer, was_ready)

    def _admit(self, worker: WorkerHandle, layout: list[list[Any]], max_steps: int, step_seconds: float | None) -> None:
        """Give the buffer to a worker that has built its environment; the first worker determines the layout."""
        frames = FrameLayout.from_json(layout)
        self._most_steps = max(self._most_steps, max_steps)
        if self.buffer is None:
            cfg = self._cfg
            sizes = (cfg.buffer_size, cfg.max_episode_steps or max_steps, cfg.num_workers)
            self.buffer = SharedBuffer(frames, *sizes, weights=task_weights(cfg))
            self.buffer.control[Control.STEP_NANOSECONDS] = round(1e9 * (step_seconds or 0.0))
            self._last_look = time.monotonic()
            self.changed.set()
        elif frames != self.buffer.layout:
            what = "built an environment with other observations or actions than the first worker"
            return self._replace(worker, FailureReport(worker.index, what))
        self._pool.share(worker, self.buffer)

    def _check_first_fill(self, buffer: SharedBuffer) -> None:
        if (buffer.sequence >= 2).all():
            buffer.control[Control.READY] = 1
            buffer.control[Control.STATE] = State.RUNNING
            self.changed.set()
            return
        now, count = time.monotonic(), buffer.episodes_written
        passed, self._last_look = min(now - self._last_look, 1.0), now  # a longer gap means a suspended process
        self._progress = (count, 0.0 if count > self._progress[0] else self._progress[1] + passed)
        placed = [worker for worker in self.workers.values() if math.isfinite(worker.started)]
        built = bool(placed or not self.workers) and all(worker.joined for worker in placed)
        if built and self._progress[1] > self._cfg.start_timeout:
            raise StreamStalledError(
                f"no episode was written in start_timeout ({self._cfg.start_timeout:g} s): "
                f"{count} of {buffer.num_rows} rows are filled; {_outcomes(buffer.workers.sum(axis=0))}. "
                "Raise start_timeout, or check only_success"
            )

    def _check_refresh(self, buffer: SharedBuffer, is_filled: bool) -> None:
        """Warn if due episodes are not written, and raise once the stream has stalled."""
        most_steps = self._most_steps * (self._cfg.num_workers if self._cfg.workers == "ray" else 1)
        for who, record, alive_at in self._pool.progress(buffer):
            message, has_stalled = self._refresh.check(who, record, alive_at, self._pool.awake_since, most_steps)
            if message and is_filled:  # during the first fill, start_timeout applies instead
                hint = "Readers get old episodes; check only_success and the actor, or raise worker_timeout"
                if has_stalled:
                    raise StreamStalledError(f"{message}. {hint}")
                log.warning("%s. %s", message, hint)

    def _replace(self, worker: WorkerHandle, report: FailureReport) -> None:
        """Schedule the replacement of a failed worker, or give up."""
        worker.kill()
        del self.workers[worker.index]
        if self._stopping.is_set():
            return
        if report.lost and math.isinf(worker.started):  # it was never placed on a node, so this is no failure
            return self.restarts.plan(worker.index, worker.incarnation)
        if (self.buffer is None and not report.lost) or report.is_mistake:
            raise report.as_user_error()  # no worker has ever started, or the author is wrong: a retry would not help
        if not self.restarts.replace(report, worker.incarnation):
            self._give_up(report)
        if self.buffer is not None:
            self.buffer.control[Control.RESTARTS] += 1

    def _give_up(self, report: FailureReport) -> None:
        if self.buffer is not None:
            self.buffer.fail(report.to_json())
        raise report.as_error()
