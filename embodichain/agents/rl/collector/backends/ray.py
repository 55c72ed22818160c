"""Collection by several actors anywhere in a Ray cluster; any of them may die, hang, be slow, or come back.

The way of a rollout: ``send`` queues a request -> an idle worker gets it with the latest weights -> its rollout arrives
-> ``RolloutQueue`` says which number it becomes -> the learner's buffer. A rollout that is lost with its worker is
collected again, by any other, from other episodes.
"""

from __future__ import annotations

import atexit
import logging
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.pool import FIRST_STEPS, Restarts
from embodichain.agents.processes.ray_backend import (
    ActorHandle,
    NodeNames,
    RayCluster,
    is_unreachable,
    load_ray,
    node_is_gone,
    wait_for_answers,
)
from embodichain.agents.processes.shared_memory import tensor_of
from embodichain.agents.rl.collector.backends.base import (
    POLL_SECONDS,
    ROOM_SECONDS,
    Learner,
    SupervisedBackend,
    collector_error,
)
from embodichain.agents.rl.collector.backends.ray_actor import CONCURRENCY, Event, RolloutActor
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.rollout_worker import Instruction, NewWeights, RolloutRequest, RolloutResult
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.envs.random import combine
from embodichain.errors import BufferWaitError, CollectorError
from embodichain.utils.tensor_tree import decode, encode

log = logging.getLogger("embodichain.collector")

_STATUS_SECONDS = 1.0
"""How often a worker is asked what it is doing."""
_EMPTY_STATE: dict[str, Any] = {"collector": {}, "env": None, "generator": None, "requests": []}


class RolloutWorkerHandle(ActorHandle):
    """One worker, what it is doing, and what is awaited from it."""

    def __init__(self, index: int, actor: Any, incarnation: int) -> None:
        super().__init__(index, actor)
        self.incarnation = incarnation
        """How many workers it replaces."""
        self.ready = False
        """Whether it has an environment."""
        self.located_at = 0.0
        self.request: RolloutRequest | None = None
        """The rollout it is collecting."""
        self.deadline = 0
        """The last number that this rollout can have."""
        self.interrupted = False
        """Whether the rollout it is collecting was given to another."""
        self.began = 0.0
        self.rests_until = 0.0
        """A worker that was too slow pauses before it gets another request."""
        self.delays = 0
        """How often it was too slow since it last was not."""
        self._sequence = 0
        self._status_due = 0.0
        self.status: Any = None
        self.answered_at = time.monotonic()
        """When it last answered a question that is always answered at once."""
        self.call: Any = actor.locate.remote()
        """The answer that comes next."""

    @property
    def idle(self) -> bool:
        """Whether it can collect a rollout now."""
        return self.ready and self.call is None and time.monotonic() >= self.rests_until

    def awaited(self) -> list[Any]:
        """Return the answers that are awaited."""
        return [answer for answer in (self.call, self.status) if answer is not None]

    def collect(self, request: RolloutRequest, deadline: int, snapshot: WeightSnapshot, data: Any) -> None:
        """Let it collect a rollout, beginning with weights that are in the object store."""
        random = None
        if request.random is not None:
            description, block = encode(request.random)
            random = (description, block.numpy())
        self.request, self.deadline, self.began, self.interrupted = request, deadline, time.monotonic(), False
        self._sequence += 1
        weights = (snapshot.version, snapshot.digest)
        self.call = self.actor.collect.remote(self._sequence, request.number, weights, data, random, request.version)

    def adopt(self, snapshot: WeightSnapshot, data: Any) -> None:
        """Let it use newer weights in the rollout that it is collecting."""
        self._control("adopt", (snapshot.version, snapshot.digest), data)

    def interrupt(self) -> None:
        """Break off what it is collecting."""
        self.request, self.interrupted = None, True
        self._control("interrupt", self._sequence)

    def ask_again(self) -> None:
        """Ask a worker that cannot be reached where it is; what it was collecting is given up."""
        self.ready, self.unreachable, self.request, self.status = False, True, None, None
        self.call = self._control("interrupt", self._sequence)

    def ask_status(self) -> None:
        """Ask what it is doing, now and then."""
        now = time.monotonic()
        if self.ready and self.status is None and now >= self._status_due:
            self.status, self._status_due = self._control("status"), now + _STATUS_SECONDS

    def silence(self, cfg: AsyncCfg) -> FailureReport | None:
        """Return what is wrong with a worker that has owed an answer for too long."""
        now, start = time.monotonic(), cfg.start_timeout
        silent = now - self.answered_at
        owed = self.unreachable or self.status is not None
        if owed and silent > (start if self.unreachable else _STATUS_SECONDS + cfg.step_timeout):
            return FailureReport(
                self.index, f"cannot be reached for {silent:.0f} s", hung=True, lost=node_is_gone(self.node_id)
            )
        if self.located_at and not self.ready and not self.unreachable and now - self.located_at > start:
            return FailureReport(
                self.index, f"did not build its environment within start_timeout ({start:g} s)", hung=True
            )
        return None

    def hang(self, status: Event, cfg: AsyncCfg) -> FailureReport | None:
        """Return what is wrong with a worker, by what it is doing."""
        limit = cfg.step_timeout if status["steps"] > FIRST_STEPS else cfg.start_timeout
        if status["busy"] > limit:
            return FailureReport(self.index, f"hung: it has not come back from a step for {limit:g} s", hung=True)
        waiting = time.monotonic() - self.began
        if self.call is not None and status["sequence"] < self._sequence and waiting > cfg.start_timeout:
            return FailureReport(self.index, f"has not begun a rollout for {waiting:.0f} s", hung=True)
        return None

    def _control(self, method: str, *arguments: Any) -> Any:
        return getattr(self.actor, method).options(concurrency_group="control").remote(*arguments)


class RayBackend(SupervisedBackend):
    """Workers of a cluster and the thread that gives them requests, reads their answers, and replaces them."""

    def start(self, num_steps: int, learner: Learner) -> None:
        """Connect with the cluster, start workers, and wait until an environment is there."""
        cfg = self._cfg
        self._cluster = RayCluster(cfg.address, cfg.num_workers, cfg.placement)
        try:
            ray = load_ray()
            self._actor = ray.remote(concurrency_groups=CONCURRENCY)(RolloutActor)
            self._actor = self._actor.options(**cfg.placement.actor_options())
            self._job = ray.put(replace(self._spec, num_steps=num_steps).for_another_process())
        except BaseException:
            self._cluster.close()
            raise
        self._workers: dict[int, RolloutWorkerHandle] = {}
        self._restarts = Restarts("worker {}", cfg.num_workers, cfg.max_restarts)
        self._names = NodeNames()
        self._rollouts = RolloutQueue()
        self._weights = StoredWeights(cfg.adopt == "lockstep")
        self._paused, self._had_room, self._began = False, False, time.monotonic()
        self._command: str | None = None
        """The command that this thread still has to answer: from then on nothing is delivered."""
        atexit.register(self.stop)  # after the cluster's: this thread ends before Ray does
        super().start(num_steps, learner)

    # --- the learner's side ---------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """How many workers have an environment."""
        with self._lock:
            return sum(worker.ready for worker in self._workers.values())

    def send(self, instruction: Instruction) -> None:
        """Give an instruction; what a worker does not finish is given to another."""
        with self._lock:
            if self._stopping.is_set():  # Ray may be shut down
                return
            if isinstance(instruction, RolloutRequest):
                self._rollouts.add(instruction)
                self._assign()
            elif isinstance(instruction, NewWeights):
                self._weights.add(instruction.snapshot)
                if self._cfg.adopt == "step":
                    for worker in self._workers.values():
                        if worker.request is not None:
                            worker.adopt(instruction.snapshot, self._weights.stored(instruction.snapshot))
            else:
                self._reports.clear()
                self._paused = instruction.name in ("pause", "save")
                self._command = instruction.name if self._paused else None

    # --- the thread -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._start_missing()

    def _close(self) -> None:
        """End the workers, and let go of everything that is Ray's before it is shut down."""
        atexit.unregister(self.stop)
        try:
            with self._lock:
                for worker in self._workers.values():
                    worker.kill()
                self._workers.clear()
                self._weights.clear()
                del self._actor, self._job
        finally:
            self._cluster.close()

    def _watch(self) -> None:
        if not RayCluster.is_alive():
            raise CollectorError("Ray was shut down while rollouts were collected")
        self._start_missing()
        self._read_answers()
        self._deliver_all()
        with self._lock:
            command, self._command = self._command, None
            if command is not None:
                self._reports.put(dict(_EMPTY_STATE) if command == "save" else None)
            if not self._paused:
                self._rollouts.interrupt_straggler(self._workers.values(), self._cfg.patience)
            self._assign()
        for worker in list(self._workers.values()):
            report = worker.silence(self._cfg)
            if report is not None:
                self._replace(worker, report)
        if not self._had_room and time.monotonic() - self._began > self._cfg.start_timeout:
            raise self._cfg.placement.no_room(self._cfg.start_timeout)

    def _start_missing(self) -> None:
        """Ask for workers where one is missing; each is there once a node has room for it."""
        path = [os.path.abspath(entry) for entry in sys.path]  # "" is this process's folder
        for index, incarnation in self._restarts.due():
            with self._lock:
                self._workers[index] = RolloutWorkerHandle(index, self._actor.remote(path), incarnation)

    def _read_answers(self) -> None:
        """Wait a moment for answers, and deal with them."""
        with self._lock:
            for worker in self._workers.values():
                worker.ask_status()
            awaited = {answer: worker for worker in self._workers.values() for answer in worker.awaited()}
        for reference, worker, answer in wait_for_answers(awaited, POLL_SECONDS):
            with self._lock:
                if self._workers.get(worker.index) is not worker or reference not in worker.awaited():
                    continue  # an answer before this one was its last
                if is_unreachable(answer):  # it, or its node, may be gone; Ray answers the next call once it knows
                    if worker.unreachable:
                        self._stopping.wait(POLL_SECONDS)
                    self._rollouts.give_back(worker.request)
                    worker.ask_again()
                elif isinstance(answer, Exception):
                    self._weights.store_again()  # they may be what is missing
                    self._replace(worker, worker.end_of(answer))
                elif reference == worker.status:
                    worker.status, worker.answered_at = None, time.monotonic()
                    report = worker.hang(answer, self._cfg)
                    if report is not None:
                        self._replace(worker, report)
                else:
                    worker.call, worker.answered_at = None, time.monotonic()
                    self._take(worker, answer)

    def _take(self, worker: RolloutWorkerHandle, event: Event) -> None:
        kind = event["event"]
        if kind == "located":
            worker.locate(event, self._names)
            worker.located_at, self._had_room = time.monotonic(), True
            device = "cuda" if self._cfg.placement.num_gpus > 0 else "cpu"
            seeds = self._seeds(worker.index + self._cfg.num_workers * self.restarts)
            worker.call = worker.actor.build.remote(self._job, device, *seeds)
        elif kind == "built":
            worker.ready, self.num_envs = True, event["num_envs"]
            self._ready.set()
        elif kind == "failed":
            self._replace(worker, replace(FailureReport.from_json(event["report"]), worker=worker.index))
        elif kind == "rollout" and worker.request is not None and not worker.interrupted:
            self._arrive(worker, worker.request, event)
        if worker.call is None:
            self._assign()

    def _assign(self) -> None:
        """Give requests to idle workers; the lock is held."""
        if not self._paused:
            self._rollouts.assign(self._workers.values(), self._weights)

    def _arrive(self, worker: RolloutWorkerHandle, request: RolloutRequest, event: Event) -> None:
        description, block = event["content"]  # copied, for the object store's memory cannot be written to
        result = RolloutResult.of(decode(description, tensor_of(block)))
        for version in result.rollout["policy_version"][0].unique().tolist():
            self._learner.on_adopted(version, event["adopted"][version])
        self._rollouts.arrive(worker, result)
        self._weights.forget_before(request.version)

    def _deliver_all(self) -> None:
        """Hand over what has arrived, as far as nothing else becomes too old by it.

        The lock is not held meanwhile, for the learner may be waiting for it while the buffer is waiting for the
        learner.
        """
        while not self._paused and not self._stopping.is_set():
            with self._lock:
                result = self._rollouts.next_one(self._workers.values())
            if result is None:
                return
            try:
                self._learner.on_result(result, ROOM_SECONDS)
            except BufferWaitError:
                return
            self._rollouts.handed_over()

    def _replace(self, worker: RolloutWorkerHandle, report: FailureReport) -> None:
        """Start a new worker instead of one that failed, or give up; another collects what it was collecting."""
        with self._lock:
            self._rollouts.give_back(worker.request)
            worker.kill()
            del self._workers[worker.index]
        never_worked = not report.lost and not self._ready.is_set()
        if never_worked or not self._restarts.replace(report, worker.incarnation):
            raise collector_error(report, f"worker {worker.index}", self._restarts.faults[worker.index])
        self.restarts += 1

    def _seeds(self, number: int) -> tuple[int | None, int | None]:
        """Return the seeds of a worker's episodes and actions; the first one's are those of one that is alone."""
        if number == 0:
            return self._seed, self._cfg.seed
        both = [combine(torch.tensor(seed or 0), torch.tensor(number)) for seed in (self._seed, self._cfg.seed)]
        return int(both[0]) % 2**31, int(both[1]) % 2**31


class StoredWeights:
    """Snapshots in the object store, each put there once; every node fetches it once.

    Usually a worker needs the latest one alone. In lockstep a request names the version it is for, so those that open
    requests name are kept, which are no more than the lag allows.
    """

    def __init__(self, lockstep: bool) -> None:
        self._lockstep = lockstep
        self._kept: dict[int, WeightSnapshot] = {}
        self._stored: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, snapshot: WeightSnapshot) -> None:
        """Keep a new snapshot."""
        if not self._lockstep:
            self.clear()
        self._kept[snapshot.version] = snapshot

    def needed_for(self, request: RolloutRequest) -> WeightSnapshot:
        """Return the snapshot with which a rollout begins."""
        return self._kept[request.version if self._lockstep else max(self._kept)]

    def stored(self, snapshot: WeightSnapshot) -> Any:
        """Return the reference of a snapshot in the object store."""
        if snapshot.version not in self._stored:
            self._stored[snapshot.version] = load_ray().put(snapshot.data.cpu().numpy())
        return self._stored[snapshot.version]

    def forget_before(self, version: int) -> None:
        """Let go of what no request names any more; the latest snapshot stays."""
        for old in [v for v in self._kept if v < version and v != max(self._kept)]:
            del self._kept[old]
            self._stored.pop(old, None)

    def store_again(self) -> None:
        """Put everything into the object store again, when it is needed next: something there may be lost."""
        self._stored.clear()

    def clear(self) -> None:
        """Let go of everything."""
        self._kept.clear()
        self._stored.clear()


# --- the order of rollouts ----------------------------------------------------------------------------------------


class RolloutQueue:
    """Which rollouts are to be collected, which have arrived, and which number each becomes.

    A rollout is begun with the latest weights. At that moment requests were sent up to number ``d``, and the learner
    has learned from number ``d - max_policy_lag - 1``: this one is within the bound if it becomes number ``d`` or an
    earlier one. So ``d`` is its deadline. Rollouts get their numbers as they arrive, so that nobody waits for a slow
    worker without need; but one that arrives early is held back while taking it would make another one late.
    """

    def __init__(self) -> None:
        self._requests: deque[RolloutRequest] = deque()
        self._highest = self._next = -1
        """The highest number of a request so far, and the number that the next rollout becomes."""
        self._arrived: dict[int, tuple[int, RolloutResult]] = {}
        self._chosen = -1
        self._durations: deque[float] = deque(maxlen=16)

    def add(self, request: RolloutRequest) -> None:
        """Have one more rollout collected."""
        self._requests.append(request)
        self._highest = max(self._highest, request.number)
        self._next = request.number if self._next < 0 else self._next

    def give_back(self, request: RolloutRequest | None) -> None:
        """Have a rollout collected by another worker, before all others."""
        if request is not None:
            self._requests.appendleft(request)

    def assign(self, workers: Collection[RolloutWorkerHandle], weights: StoredWeights) -> None:
        """Give requests to idle workers, the quickest first."""
        for worker in sorted(workers, key=lambda worker: worker.delays):
            if self._requests and worker.idle and len(weights):
                request = self._requests.popleft()
                snapshot = weights.needed_for(request)
                worker.collect(request, self._highest, snapshot, weights.stored(snapshot))

    def arrive(self, worker: RolloutWorkerHandle, result: RolloutResult) -> None:
        """Take what a worker has collected."""
        self._durations.append(time.monotonic() - worker.began)
        self._arrived[result.number] = (worker.deadline, result)
        worker.request, worker.delays = None, 0

    def next_one(self, workers: Collection[RolloutWorkerHandle]) -> RolloutResult | None:
        """Return what can be learned from next, under its number; ``None`` if something else would become too old."""
        running = [worker.deadline for worker in workers if worker.request is not None]
        chosen = choose({key: deadline for key, (deadline, _) in self._arrived.items()}, running, self._next)
        if chosen is None:
            return None
        self._chosen = chosen
        return replace(self._arrived[chosen][1], number=self._next)

    def handed_over(self) -> None:
        """Note that the learner has what ``next_one`` returned."""
        del self._arrived[self._chosen]
        self._next += 1

    def interrupt_straggler(self, workers: Collection[RolloutWorkerHandle], patience: float) -> None:
        """Give the rollout that all others have waited for longer than ``patience`` times the usual to another one."""
        slow = min((worker for worker in workers if worker.request), key=lambda worker: worker.deadline, default=None)
        if slow is None or not self._arrived or not self._durations:
            return
        taken, usual = time.monotonic() - slow.began, statistics.median(self._durations)
        if taken < patience * usual:
            return
        words = "worker %d on %s has collected for %.1f s, others take %.1f s: its rollout is given to another"
        log.warning(words, slow.index, slow.node, taken, usual)
        self.give_back(slow.request)
        slow.interrupt()
        slow.delays += 1
        slow.rests_until = time.monotonic() + patience * usual * 2**slow.delays


def in_time(deadlines: Iterable[int], next_number: int) -> bool:
    """Tell whether rollouts can become the numbers from ``next_number`` on, none after its deadline."""
    return all(deadline >= next_number + place for place, deadline in enumerate(sorted(deadlines)))


def choose(arrived: dict[int, int], running: Iterable[int], next_number: int) -> int | None:
    """Return which of the ``arrived`` rollouts (deadlines by key) becomes ``next_number``, None if it must be waited.

    ``running`` are the deadlines of those that are still being collected.
    """
    if not arrived:
        return None
    first = min(arrived, key=lambda key: arrived[key])
    others = [deadline for key, deadline in arrived.items() if key != first]
    return first if in_time([*others, *running], next_number + 1) else None
