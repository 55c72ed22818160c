"""Collection by several actors anywhere in a Ray cluster; any of them may die, hang, be slow, or come back.

``send`` queues a request -> an idle worker gets it with the latest weights -> ``RolloutQueue`` numbers its rollout ->
the learner's buffer. A rollout that is lost with its worker is collected again, by any other, from other episodes.
"""

import atexit
import logging
import os
import queue
import statistics
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.pool import Heartbeat, Restarts
from embodichain.agents.processes.ray_backend import ActorHandle, ActorPool, cores_of_actor, load_ray, location_of_actor
from embodichain.agents.processes.shared_memory import tensor_of
from embodichain.agents.rl.collector.backends.process import EMPTY_STATE, SupervisedBackend, collector_error
from embodichain.agents.rl.collector.backends.thread import POLL_SECONDS
from embodichain.agents.rl.collector.recovery import mixed_seed
from embodichain.agents.rl.collector.rollout_worker import (
    Instruction,
    RolloutRequest,
    RolloutResult,
    RolloutWorker,
    Stopped,
    WorkerSpec,
)
from embodichain.agents.rl.collector.weights import WeightSnapshot, move
from embodichain.envs.physics.mujoco_cpu import limit_cores
from embodichain.errors import CollectorError
from embodichain.utils.tensor_tree import decode, encode

log = logging.getLogger("embodichain.collector")

_STATUS_SECONDS = 1.0
"""How often a worker is asked what it is doing."""
_CONCURRENCY = {"control": 1}
"""Calls of this group are answered while a rollout is collected."""

Event = dict[str, Any]
Bytes = NDArray[np.uint8]
Encoded = tuple[dict[str, Any], Bytes]
"""Nested data with tensors in it: its description, and one block of memory."""
Weights = tuple[int, str | None]
"""Version and hash of a snapshot, the bytes of which travel beside it."""


class RolloutWorkerHandle(ActorHandle):
    """One worker, what it is doing, and what is awaited from it."""

    def __init__(self, index: int, incarnation: int, actor: Any) -> None:
        super().__init__(index, incarnation, actor)
        self.request: RolloutRequest | None = None
        """The rollout it is collecting; ``None`` as well if that was given to another."""
        self.deadline = 0
        """The last number that this rollout can have."""
        self.began = 0.0
        self.rests_until = 0.0
        """A worker that was too slow pauses before it gets another request."""
        self.delays = 0
        """How often it was too slow since it last was not."""
        self._sequence = 0
        self._status: Any = None
        self._status_due = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it can collect a rollout now."""
        return bool(self.joined) and not self.calls and time.monotonic() >= self.rests_until

    def collect(self, request: RolloutRequest, deadline: int, weights: Weights, data: Any) -> None:
        """Let it collect a rollout, beginning with weights that are in the object store."""
        random = None if request.random is None else _encode(request.random)
        self.request, self.deadline, self.began = request, deadline, time.monotonic()
        self._sequence += 1
        self.heartbeat.beat()
        call = self.actor.collect.remote(self._sequence, request.number, weights, data, random, request.version)
        self.calls.append(call)

    def interrupt(self) -> None:
        """Break off what it is collecting."""
        self.request = None
        self.control("interrupt", self._sequence)

    def locate(self) -> None:
        """Ask where it is; whatever it is collecting is broken off."""
        self.joined, self.request, self._status = 0.0, None, None
        self.calls.append(self.control("interrupt", self._sequence))

    def awaited(self) -> list[Any]:
        now = time.monotonic()
        if self.joined and self._status is None and now >= self._status_due:
            self._status, self._status_due = self.control("status"), now + _STATUS_SECONDS
        return super().awaited() if self._status is None else [*super().awaited(), self._status]

    def answered(self, answer: Any) -> None:
        if answer == self._status:
            self._status = None
        else:
            super().answered(answer)

    def kill(self) -> None:
        self._status = None
        super().kill()

    def control(self, method: str, *arguments: Any) -> Any:
        """Call a method that is answered while a rollout is collected."""
        return getattr(self.actor, method).options(concurrency_group="control").remote(*arguments)


class RayBackend(SupervisedBackend):
    """Workers of a cluster and the thread that gives them requests, reads their answers, and replaces them."""

    def _open(self) -> None:
        cfg = self._cfg
        self._pool = ActorPool(
            RolloutActor, RolloutWorkerHandle, cfg, cfg.step_timeout, cfg.start_timeout, _CONCURRENCY
        )
        try:
            self._stored_spec = load_ray().put(self._spec.for_another_process())
        except BaseException:
            self._pool.stop()
            raise
        silence = max(cfg.start_timeout, cfg.step_timeout)
        self._restarts = Restarts("worker {}", cfg.num_workers, cfg.max_restarts, silence)
        self._rollouts = RolloutQueue()
        self._stored: tuple[int, Any] | None = None
        """The snapshot that was sent last: it is put into the object store once, and every node fetches it once."""
        self._paused = False
        self._command: str | None = None
        """The command that this thread still has to answer: from then on nothing is delivered."""
        atexit.register(self.stop)  # after the cluster's: this thread ends before Ray does

    @property
    def num_workers(self) -> int:
        return sum(bool(worker.joined) and not worker.is_killed for worker in self._pool.workers)

    def send(self, instruction: Instruction) -> None:
        with self._lock:
            if self._stopping.is_set():  # Ray may be shut down
                return
            if isinstance(instruction, RolloutRequest):
                self._rollouts.add(instruction)
                self._assign()
            elif isinstance(instruction, WeightSnapshot):
                for worker in self._pool.workers if self._cfg.adopt == "step" else ():
                    if worker.request is not None:
                        worker.control("adopt", *self._stored_weights(instruction))
            else:
                self._forget_pauses()
                self._paused = instruction in ("pause", "save")
                self._command = instruction if self._paused else None

    def _close(self) -> None:
        """End the workers, and release everything that is Ray's before it is shut down."""
        atexit.unregister(self.stop)
        with self._lock:
            self._stored = None
            del self._stored_spec
            self._pool.stop()

    def _watch(self) -> None:
        path = [os.path.abspath(entry) for entry in sys.path]  # "" is this process's folder
        with self._lock:
            for index, incarnation in self._restarts.due():
                self._pool.launch(index, incarnation, path)
            self._pool.is_needed = self._rollouts.is_waiting and not self._paused
        for worker, kind, content in self._pool.answers(POLL_SECONDS):
            with self._lock:
                self._take(worker, kind, content)
        self._deliver_all()
        with self._lock:
            command, self._command = self._command, None
            if command is not None:
                self.report("paused", dict(EMPTY_STATE) if command == "save" else None)
            if not self._paused:
                self._rollouts.interrupt_straggler(self._pool.workers, self._cfg.patience)
            self._assign()

    def _take(self, worker: RolloutWorkerHandle, kind: str, content: Any) -> None:
        """Deal with an answer; the lock is held."""
        if kind == "located":
            device = "cuda" if self._cfg.placement.num_gpus > 0 else "cpu"
            seeds = self._seeds(worker.index + self._cfg.num_workers * self.restarts)
            worker.calls.append(worker.actor.build.remote(self._stored_spec, device, *seeds))
        elif kind == "built":
            worker.joined, self.num_envs = time.monotonic(), content["num_envs"]
            worker.heartbeat.beat(busy=False)
            self._ready.set()
        elif kind == "status":
            if content["busy"]:
                worker.heartbeat.copy(content["seconds_ago"], content["steps"], content["busy"])
            else:  # the answer itself is a sign of life
                worker.heartbeat.beat(busy=False)
        elif kind == "rollout" and worker.request is not None:
            worker.heartbeat.beat(busy=False)
            description, block = content["content"]  # copied, for the object store's memory cannot be written to
            result = RolloutResult.of(decode(description, tensor_of(block)))
            for version in result.rollout["policy_version"][0].unique().tolist():
                self._store.acknowledge(version, content["adopted"][version])
            self._rollouts.arrive(worker, result)
        elif kind == "unreachable":
            self._rollouts.give_back(worker.request)
        elif kind == "failed":
            self._replace(worker, content)
        self._assign()

    def _assign(self) -> None:
        """Give requests to idle workers, the quickest first; the lock is held."""
        latest = self._store.latest
        if self._paused or latest is None:
            return
        idle = (worker for worker in self._pool.workers if worker.is_idle and not worker.is_killed)
        for worker in sorted(idle, key=lambda worker: worker.delays):
            if (taken := self._rollouts.take()) is not None:
                snapshot = self._store.at(taken[0].version) if self._cfg.adopt == "lockstep" else latest
                worker.collect(*taken, *self._stored_weights(snapshot))

    def _stored_weights(self, snapshot: WeightSnapshot) -> tuple[Weights, Any]:
        """Return version and hash of a snapshot, and its reference in the object store."""
        if self._stored is None or self._stored[0] != snapshot.version:
            self._stored = (snapshot.version, load_ray().put(snapshot.data.cpu().numpy()))
        return (snapshot.version, snapshot.digest), self._stored[1]

    def _deliver_all(self) -> None:
        """Hand over what has arrived; the lock is not held, for the learner may wait for it, and the buffer for him."""
        while not self._paused and not self._stopping.is_set():
            with self._lock:
                chosen = self._rollouts.next_one(self._pool.workers)
            if chosen is None or not self._put(chosen[1]):
                return
            self._rollouts.handed_over(chosen[0])

    def _replace(self, worker: RolloutWorkerHandle, report: FailureReport) -> None:
        """Start a new worker instead of one that failed, or give up; another collects what it was collecting."""
        self._rollouts.give_back(worker.request)
        self._stored = None  # weights in the object store may be what is missing
        worker.request = None
        worker.kill()
        never_worked = not self._ready.is_set() and not report.lost
        if never_worked or not self._restarts.replace(report, worker.incarnation):
            raise collector_error(report, f"worker {worker.index}", self._restarts.faults[worker.index])
        self.restarts += 1

    def _seeds(self, number: int) -> tuple[int | None, int | None]:
        """Return the seeds of a worker's episodes and actions; the first one's are those of one that is alone."""
        if number == 0:
            return self._seed, self._cfg.seed
        return mixed_seed(self._seed or 0, number), mixed_seed(self._cfg.seed or 0, number)


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
        self._durations: deque[float] = deque(maxlen=16)

    def add(self, request: RolloutRequest) -> None:
        """Have one more rollout collected."""
        self._requests.append(request)
        self._highest = max(self._highest, request.number)
        self._next = request.number if self._next < 0 else self._next

    @property
    def is_waiting(self) -> bool:
        """Whether there are rollouts that nobody has begun to collect."""
        return bool(self._requests)

    def give_back(self, request: RolloutRequest | None) -> None:
        """Have a rollout collected by another worker, before all others."""
        if request is not None:
            self._requests.appendleft(request)

    def take(self) -> tuple[RolloutRequest, int] | None:
        """Return the next rollout to be collected and the last number that it can become, if there is one."""
        return (self._requests.popleft(), self._highest) if self._requests else None

    def arrive(self, worker: RolloutWorkerHandle, result: RolloutResult) -> None:
        """Take what a worker has collected."""
        self._durations.append(time.monotonic() - worker.began)
        self._arrived[result.number] = (worker.deadline, result)
        worker.request, worker.delays = None, 0

    def next_one(self, workers: Collection[RolloutWorkerHandle]) -> tuple[int, RolloutResult] | None:
        """Return the key of what can be learned from next, and the rollout; None if another would become too old."""
        running = [worker.deadline for worker in workers if worker.request is not None]
        key = choose({key: deadline for key, (deadline, _) in self._arrived.items()}, running, self._next)
        return None if key is None else (key, replace(self._arrived[key][1], number=self._next))

    def handed_over(self, key: int) -> None:
        """Note that the learner has what ``next_one`` returned."""
        del self._arrived[key]
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
    """Return which of the arrived rollouts (deadlines by key) becomes ``next_number``; None: wait for those running."""
    if not arrived:
        return None
    first = min(arrived, key=lambda key: arrived[key])
    others = [deadline for key, deadline in arrived.items() if key != first]
    return first if in_time([*others, *running], next_number + 1) else None


class RolloutActor:
    """An environment and a policy in a cluster, and the endpoint of the worker that brings them together."""

    def __init__(self, sys_path: list[str]) -> None:
        """Prepare; nothing heavy happens before ``build``."""
        sys.path += [entry for entry in sys_path if entry not in sys.path]
        self.heartbeat = Heartbeat()
        self._worker: RolloutWorker | None = None
        self._num_steps = 1
        self._idle_since = 0.0
        self._sequence = self._interrupted = self._newest = -1
        self._instructions: queue.SimpleQueue[Instruction] = queue.SimpleQueue()
        self._result: RolloutResult | None = None
        self._adoptions: dict[int, str | None] = {}
        """Hashes of the weights that are used in the present rollout, by version."""

    def build(self, spec: WorkerSpec, device: str, seed: int | None, action_seed: int | None) -> Event:
        """Build the environment, unless it is there already because an answer got lost."""
        try:
            if self._worker is None:
                cfg, cores = spec.cfg.replace(seed=action_seed), cores_of_actor()
                limit_cores(cores)
                torch.set_num_threads(cfg.num_threads or cores)
                spec = replace(spec, device=torch.device(device), cfg=cfg)
                move(spec.policy, spec.device)
                worker = RolloutWorker(spec.make_env(), spec)
                if seed is not None:
                    worker.collector.reset(seed)
                self._worker, self._num_steps, self._idle_since = worker, spec.num_steps, time.monotonic()
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner reports it
            return _failed(error)
        return {"event": "built", "num_envs": self._worker.env.num_envs}

    def collect(
        self, sequence: int, number: int, weights: Weights, data: Bytes, random: Encoded | None, required: int
    ) -> Event:
        """Collect a rollout, beginning with these weights; in lockstep, ``required`` is the version to use."""
        waited = time.monotonic() - self._idle_since
        try:
            if self._worker is None:
                raise CollectorError("build() comes before collect()")
            state = None if random is None else decode(random[0], tensor_of(random[1]))
            self._instructions, self._result = queue.SimpleQueue(), None
            self._adoptions = dict(list(self._adoptions.items())[-1:])  # it begins with those in use, or newer ones
            self._newest = weights[0]
            self._instructions.put(WeightSnapshot(*weights, tensor_of(data)))
            self._instructions.put(RolloutRequest(number, required, state))
            self._sequence = sequence
            self._worker.run(self, self._num_steps)
            if self._result is None:
                self._worker.clear()
                return {"event": "interrupted"}
            content = _encode(replace(self._result, waited=waited).content())
            return {"event": "rollout", "adopted": self._adoptions, "content": content}
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner reports it
            return _failed(error)
        finally:
            self._idle_since = time.monotonic()

    def receive(self, timeout: float | None) -> Instruction | None:
        if self._result is not None or self._interrupted >= self._sequence:
            raise Stopped
        try:
            return self._instructions.get_nowait()
        except queue.Empty:
            return None

    def report(self, kind: str, content: Any) -> None:
        if kind == "adopted":
            self._adoptions[content["version"]] = content["digest"]
        elif kind == "result":
            self._result = content

    def adopt(self, weights: Weights, data: Bytes) -> None:
        """Use newer weights from the next step on; calls of this group (control) may arrive in any order."""
        if weights[0] > self._newest:
            self._newest = weights[0]
            self._instructions.put(WeightSnapshot(*weights, tensor_of(data)))

    def interrupt(self, sequence: int) -> Event:
        """Break off this rollout, or an earlier one, after the present step; return where this runs (control)."""
        self._interrupted = sequence
        return location_of_actor()

    def status(self) -> Event:
        """Return the last sign of life (control)."""
        return {"event": "status", **self.heartbeat.status()}


def _encode(content: Any) -> Encoded:
    description, block = encode(content)
    return description, block.numpy()


def _failed(error: Exception) -> Event:
    return {"event": "failed", "report": FailureReport.of_exception(0, error).to_json()}
