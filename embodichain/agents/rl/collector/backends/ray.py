"""Collection by actors of a Ray cluster; a worker may die, hang, be slow or become reachable again.

Data flow: ``send`` queues a request -> an idle worker gets it with the latest weights -> ``RolloutQueue`` numbers its
rollout -> the learner's buffer. If a worker is lost, another one collects its rollout, with other episodes.
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
"""Interval of the status requests to a worker."""
_CONCURRENCY = {"control": 1}
"""Ray concurrency group of calls that are answered while a rollout is collected."""

Event = dict[str, Any]
Bytes = NDArray[np.uint8]
Encoded = tuple[dict[str, Any], Bytes]
"""Nested data with tensors: a description and one block of memory."""
Weights = tuple[int, str | None]
"""Version and hash of a snapshot, whose bytes are passed separately."""


class RolloutWorkerHandle(ActorHandle):
    """Handle of one worker, with its current request and pending calls."""

    def __init__(self, index: int, incarnation: int, actor: Any) -> None:
        super().__init__(index, incarnation, actor)
        self.request: RolloutRequest | None = None
        """The request it works on; ``None`` if it is idle or the request was given to another worker."""
        self.deadline = 0
        """The highest number that its rollout may get."""
        self.began = 0.0
        self.rests_until = 0.0
        """A worker that was too slow gets no request before this time."""
        self.delays = 0
        """Number of consecutive rollouts that were too slow."""
        self._sequence = 0
        self._status: Any = None
        self._status_due = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it can take a request now."""
        return bool(self.joined) and not self.calls and time.monotonic() >= self.rests_until

    def collect(self, request: RolloutRequest, deadline: int, weights: Weights, data: Any) -> None:
        """Start collecting a rollout; ``data`` references the weights in the object store."""
        random = None if request.random is None else _encode(request.random)
        self.request, self.deadline, self.began = request, deadline, time.monotonic()
        self._sequence += 1
        self.heartbeat.beat()
        call = self.actor.collect.remote(self._sequence, request.number, weights, data, random, request.version)
        self.calls.append(call)

    def interrupt(self) -> None:
        """Interrupt the current rollout."""
        self.request = None
        self.control("interrupt", self._sequence)

    def locate(self) -> None:
        """Ask for the worker's location; interrupts the current rollout."""
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
        """Call a method in the control group, which is answered while a rollout is collected."""
        return getattr(self.actor, method).options(concurrency_group="control").remote(*arguments)


class RayBackend(SupervisedBackend):
    """Workers of a cluster and the thread that sends requests, receives rollouts and replaces failed workers."""

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
        """Version and object reference of the last snapshot: it is stored once, and each node fetches it once."""
        self._paused = False
        self._command: str | None = None
        """The ``pause`` or ``save`` that this thread has not confirmed yet."""
        atexit.register(self.stop)  # registered after Ray's handler, so this thread ends before Ray does

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
        """Stop the workers and release all Ray objects before Ray shuts down."""
        atexit.unregister(self.stop)
        with self._lock:
            self._stored = None
            del self._stored_spec
            self._pool.stop()

    def _watch(self) -> None:
        path = [os.path.abspath(entry) for entry in sys.path]  # "" is the working directory
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
        """Process an answer; the caller holds the lock."""
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
            else:  # the answer itself counts as a heartbeat
                worker.heartbeat.beat(busy=False)
        elif kind == "rollout" and worker.request is not None:
            worker.heartbeat.beat(busy=False)
            description, block = content["content"]  # decode copies, as the object store's memory is read-only
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
        """Give requests to idle workers, those with the fewest delays first; the caller holds the lock."""
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
        """Deliver arrived rollouts, without the lock: a full buffer waits for the learner, which may need the lock."""
        while not self._paused and not self._stopping.is_set():
            with self._lock:
                chosen = self._rollouts.next_one(self._pool.workers)
            if chosen is None or not self._put(chosen[1]):
                return
            self._rollouts.handed_over(chosen[0])

    def _replace(self, worker: RolloutWorkerHandle, report: FailureReport) -> None:
        """Replace a failed worker or raise its error; its request goes to another worker."""
        self._rollouts.give_back(worker.request)
        self._stored = None  # the weights in the object store may be lost
        worker.request = None
        worker.kill()
        never_worked = not self._ready.is_set() and not report.lost
        if never_worked or not self._restarts.replace(report, worker.incarnation):
            raise collector_error(report, f"worker {worker.index}", self._restarts.faults[worker.index])
        self.restarts += 1

    def _seeds(self, number: int) -> tuple[int | None, int | None]:
        """Return the seeds of a worker's episodes and actions; worker 0 has those of a single worker."""
        if number == 0:
            return self._seed, self._cfg.seed
        return mixed_seed(self._seed or 0, number), mixed_seed(self._cfg.seed or 0, number)


class RolloutQueue:
    """Queue of requests and arrived rollouts, which assigns a number to each rollout.

    A rollout starts with the latest weights. Let ``d`` be the highest number requested at that time; the learner has
    then consumed number ``d - max_policy_lag - 1``. The rollout respects the lag if its number is ``d`` or lower, so
    ``d`` is its deadline. Rollouts are numbered in the order of arrival, so that a slow worker blocks no other. But an
    early rollout is held back while numbering it would make a running one miss its deadline.
    """

    def __init__(self) -> None:
        self._requests: deque[RolloutRequest] = deque()
        self._highest = self._next = -1
        """The highest number of a request so far, and the number of the next rollout delivered."""
        self._arrived: dict[int, tuple[int, RolloutResult]] = {}
        self._durations: deque[float] = deque(maxlen=16)

    def add(self, request: RolloutRequest) -> None:
        """Queue a request."""
        self._requests.append(request)
        self._highest = max(self._highest, request.number)
        self._next = request.number if self._next < 0 else self._next

    @property
    def is_waiting(self) -> bool:
        """Whether there are unassigned requests."""
        return bool(self._requests)

    def give_back(self, request: RolloutRequest | None) -> None:
        """Put a request back at the front of the queue."""
        if request is not None:
            self._requests.appendleft(request)

    def take(self) -> tuple[RolloutRequest, int] | None:
        """Remove the next request; return it and its deadline, or ``None``."""
        return (self._requests.popleft(), self._highest) if self._requests else None

    def arrive(self, worker: RolloutWorkerHandle, result: RolloutResult) -> None:
        """Add the rollout that a worker has collected."""
        self._durations.append(time.monotonic() - worker.began)
        self._arrived[result.number] = (worker.deadline, result)
        worker.request, worker.delays = None, 0

    def next_one(self, workers: Collection[RolloutWorkerHandle]) -> tuple[int, RolloutResult] | None:
        """Return key and rollout to deliver next; ``None`` if that would make another one miss its deadline."""
        running = [worker.deadline for worker in workers if worker.request is not None]
        key = choose({key: deadline for key, (deadline, _) in self._arrived.items()}, running, self._next)
        return None if key is None else (key, replace(self._arrived[key][1], number=self._next))

    def handed_over(self, key: int) -> None:
        """Remove the rollout that ``next_one`` returned, after its delivery."""
        del self._arrived[key]
        self._next += 1

    def interrupt_straggler(self, workers: Collection[RolloutWorkerHandle], patience: float) -> None:
        """Reassign the request that blocks arrived rollouts if it takes longer than ``patience`` times the median."""
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
    """Return whether rollouts can be numbered from ``next_number`` on without missing a deadline."""
    return all(deadline >= number for number, deadline in enumerate(sorted(deadlines), next_number))


def choose(arrived: dict[int, int], running: Iterable[int], next_number: int) -> int | None:
    """Return which arrived rollout (deadlines by key) gets ``next_number``; ``None`` to wait for the running ones."""
    if not arrived:
        return None
    first = min(arrived, key=lambda key: arrived[key])
    others = [deadline for key, deadline in arrived.items() if key != first]
    return first if in_time([*others, *running], next_number + 1) else None


class RolloutActor:
    """Ray actor that runs a ``RolloutWorker`` and is its ``Endpoint``."""

    def __init__(self, sys_path: list[str]) -> None:
        """Create a cheap actor; ``build`` creates the environment."""
        sys.path += [entry for entry in sys_path if entry not in sys.path]
        self.heartbeat = Heartbeat()
        self._worker: RolloutWorker | None = None
        self._num_steps = 1
        self._idle_since = 0.0
        self._sequence = self._interrupted = self._newest = -1
        self._instructions: queue.SimpleQueue[Instruction] = queue.SimpleQueue()
        self._result: RolloutResult | None = None
        self._adoptions: dict[int, str | None] = {}
        """Hashes of the weights used in the current rollout, by version."""

    def build(self, spec: WorkerSpec, device: str, seed: int | None, action_seed: int | None) -> Event:
        """Build the environment; does nothing if it exists because an earlier answer got lost."""
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
        except Exception as error:  # noqa: BLE001 - the learner reports any error
            return _failed(error)
        return {"event": "built", "num_envs": self._worker.env.num_envs}

    def collect(
        self, sequence: int, number: int, weights: Weights, data: Bytes, random: Encoded | None, required: int
    ) -> Event:
        """Collect a rollout, starting with these weights; in lockstep, ``required`` is the version to use."""
        waited = time.monotonic() - self._idle_since
        try:
            if self._worker is None:
                raise CollectorError("build() comes before collect()")
            state = None if random is None else decode(random[0], tensor_of(random[1]))
            self._instructions, self._result = queue.SimpleQueue(), None
            self._adoptions = dict(list(self._adoptions.items())[-1:])  # the weights in use, until newer ones
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
        except Exception as error:  # noqa: BLE001 - the learner reports any error
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
        """Use newer weights from the next step on (control); calls may arrive in any order."""
        if weights[0] > self._newest:
            self._newest = weights[0]
            self._instructions.put(WeightSnapshot(*weights, tensor_of(data)))

    def interrupt(self, sequence: int) -> Event:
        """Interrupt this rollout or an earlier one after the current step; return the actor's location (control)."""
        self._interrupted = sequence
        return location_of_actor()

    def status(self) -> Event:
        """Return the last heartbeat (control)."""
        return {"event": "status", **self.heartbeat.status()}


def _encode(content: Any) -> Encoded:
    description, block = encode(content)
    return description, block.numpy()


def _failed(error: Exception) -> Event:
    return {"event": "failed", "report": FailureReport.of_exception(0, error).to_json()}
