"""Collection in a process of its own, which is replaced when it dies or hangs.

``SupervisedBackend`` is what this has in common with collection in a Ray cluster.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from embodichain.agents.processes.channel import Channel
from embodichain.agents.processes.failure import FailureReport, drop_locals
from embodichain.agents.processes.pool import Heartbeat, Restarts, WorkerPool, WorkerProcess
from embodichain.agents.rl.collector.rollout_worker import (
    POLL_SECONDS,
    ROOM_SECONDS,
    STOP_SECONDS,
    Command,
    Instruction,
    Learner,
    NewWeights,
    PauseReports,
    RolloutRequest,
    RolloutResult,
    RolloutWorker,
    Stopped,
    WorkerSpec,
)
from embodichain.agents.rl.collector.weights import WeightSnapshot, move
from embodichain.envs.random import combine
from embodichain.errors import BufferWaitError, CollectorError, EmbodiChainError, EnvironmentHungError

_NAME = "the collecting process"


class SupervisedBackend(ABC):
    """Workers in other processes, and a thread in this one that starts them, hears what they say, and replaces them.

    Environments are made there, every time that collection is started. The learner's thread calls the methods without
    an underscore; all others are the thread's.
    """

    num_envs: int | None = None
    restarts = 0
    _failure: Exception | None = None

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec, self._cfg = spec, spec.cfg
        self._seed: int | None = None
        self._state: Mapping[str, Any] | None = None
        self._lock = threading.RLock()

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """How many workers have an environment at present."""

    @abstractmethod
    def send(self, instruction: Instruction) -> None:
        """Give an instruction."""

    @abstractmethod
    def _open(self) -> None:
        """Prepare to start workers."""

    @abstractmethod
    def _watch(self) -> None:
        """Start workers that are missing, wait for something to happen, and deal with it."""

    @abstractmethod
    def _close(self) -> None:
        """End the workers, however they are."""

    def start(self, num_steps: int, learner: Learner) -> None:
        """Start workers, and wait until an environment is there."""
        self._spec, self._learner = replace(self._spec, num_steps=num_steps), learner
        self.restarts, self._failure = 0, None
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._reports = PauseReports(self.check)
        self._thread = threading.Thread(target=self._run, name="embodichain-collector", daemon=True)
        self._thread.start()
        try:
            while not self._ready.wait(POLL_SECONDS):
                self.check()
        except BaseException:  # Ctrl-C included: nothing may be left running
            self.stop()
            raise
        self._state = None

    def check(self) -> None:
        """Raise what keeps it from continuing."""
        if self._failure is not None:
            raise self._failure

    def wait_until_paused(self, timeout: float) -> dict[str, Any] | None:
        """Wait until nothing is delivered any more; return the state after ``save``."""
        return self._reports.wait(timeout)

    def stop(self) -> None:
        """End the workers, and the thread."""
        self._stopping.set()
        self._thread.join()

    def reset(self, seed: int | None) -> None:
        """Begin with new episodes, once started."""
        self._seed = seed

    def state(self) -> dict[str, Any]:
        """Return what the first rollout depends on: nothing has happened yet, or is gone with its process."""
        return {"collector": {}, "env": None, "generator": None, "requests": [], "seed": self._seed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, once started."""
        self._state, self._seed = state, state.get("seed", self._seed)

    def _run(self) -> None:
        try:
            self._open()
            while not self._stopping.is_set():
                self._watch()
        except Exception as error:  # noqa: BLE001 - it is raised in the learner's thread
            drop_locals(error)
            self._failure = error
            self._stopping.set()
        finally:
            self._close()

    def _deliver(self, result: RolloutResult) -> None:
        """Hand over a rollout, waiting for room if somebody else took it."""
        while not self._stopping.is_set():
            try:
                return self._learner.on_result(result, ROOM_SECONDS)
            except BufferWaitError:
                continue


def collector_error(report: FailureReport, who: str, replacements: int = 0) -> EmbodiChainError:
    """Return the error that ends a run, of a worker that cannot be replaced."""
    return report.as_error(who, replacements, EnvironmentHungError if report.hung else CollectorError)


class ProcessBackend(SupervisedBackend):
    """A collecting process and the thread that watches over it.

    What the process was told and has not done yet is remembered, so that the next one can be told the same: a rollout
    that was half collected is collected again, from new episodes, and nothing of the half one is ever seen.
    """

    _command: Command | None

    @property
    def num_workers(self) -> int:
        """How many collecting processes have an environment: one, or none yet."""
        return int(self._ready.is_set())

    def send(self, instruction: Instruction) -> None:
        """Give an instruction; it is remembered until it is done."""
        with self._lock:
            if isinstance(instruction, RolloutRequest):
                self._requests[instruction.number] = instruction
            elif isinstance(instruction, NewWeights):
                if self._cfg.adopt != "lockstep":
                    self._weights.clear()
                self._weights[instruction.snapshot.version] = instruction.snapshot
            else:
                self._command = instruction
                self._reports.clear()
            self._transmit(instruction)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        cfg = self._cfg
        self._weights: dict[int, WeightSnapshot] = {}
        self._requests: dict[int, RolloutRequest] = {}
        self._command = None
        self._process: WorkerProcess | None = None
        self._restarts = Restarts(_NAME, 1, cfg.max_restarts)
        self._pool = WorkerPool(collect, lambda *_: self._job, cfg.start_timeout, cfg.step_timeout)
        self._job = (self._spec.for_another_process(), str(self._spec.policy.device))

    def _close(self) -> None:
        """End the process, gracefully, then firmly."""
        with self._lock:
            self._transmit(Command("stop"))
            self._process = None
        self._pool.stop(STOP_SECONDS - 1.0 if self._failure is None else 0.0)

    def _watch(self) -> None:
        for index, incarnation in self._restarts.due():
            self._start_process(index, incarnation)
        for process, kind, content in self._pool.poll(POLL_SECONDS):
            if kind == "failed":
                self._replace(process, content)
            elif kind == "ready":
                process.joined, self.num_envs = time.monotonic(), content
                self._ready.set()
            elif kind == "adopted":
                self._learner.on_adopted(**content)
            elif kind == "paused":
                self._reports.put(content)
            else:
                self._finish(RolloutResult.of(content))

    def _start_process(self, index: int, incarnation: int) -> None:
        """Start a process and tell it everything that is still to be done."""
        process = self._pool.start(index, incarnation)
        process.channel.send("begin", {"seed": self._seed, "state": self._state}, wait=False)
        with self._lock:
            self._process = process
            for snapshot in self._weights.values():
                self._transmit(NewWeights(snapshot))
            for number in sorted(self._requests):
                self._transmit(self._requests[number])
            if self._command is not None and self._command.name in ("pause", "save"):
                self._transmit(self._command)

    def _transmit(self, instruction: Instruction) -> None:
        """Send an instruction, the lock being held, without waiting for a process that may hang."""
        if self._process is None:
            return
        channel = self._process.channel
        if isinstance(instruction, NewWeights):
            snapshot = instruction.snapshot
            about = {"version": snapshot.version, "digest": snapshot.digest}
            channel.send("weights", about, snapshot.segment, wait=False)
        else:
            kind = "request" if isinstance(instruction, RolloutRequest) else "command"
            channel.send(kind, vars(instruction), wait=False)

    def _finish(self, result: RolloutResult) -> None:
        self._deliver(result)
        with self._lock:
            request = self._requests.pop(result.number)
            for old in [v for v in self._weights if v < request.version]:
                del self._weights[old]

    def _replace(self, process: WorkerProcess, report: FailureReport) -> None:
        """Have another process come in place of one that died or hung, or give up."""
        with self._lock:
            self._process = None
        if self._stopping.is_set():
            return
        if report.exception or not self._ready.is_set() or not self._restarts.replace(report, process.incarnation):
            raise collector_error(report, _NAME, self.restarts)
        self.restarts += 1
        self._state = None  # it begins new episodes, others than the first one began
        if self._seed is not None:
            self._seed = int(combine(torch.tensor(self._seed), torch.tensor(self.restarts))) % 2**31


# --- in the process -------------------------------------------------------------------------------------------------


def collect(channel: Channel, heartbeat: Heartbeat, spec: WorkerSpec, device: str) -> None:
    """Collect until told to stop; ``device`` is where the policy belongs."""
    torch.set_num_threads(spec.cfg.num_threads or 1)
    move(spec.policy, torch.device(device))
    env = spec.make_env()
    try:
        worker = RolloutWorker(env, spec)
        message = channel.receive()
        begin = message.content() if message is not None else {"state": None, "seed": None}
        loaded = begin["state"] is not None and worker.load_state(begin["state"])
        if not loaded and begin["seed"] is not None:
            worker.reset(begin["seed"])
        heartbeat.beat(busy=False)
        channel.send("ready", env.num_envs)
        worker.run(ProcessEndpoint(channel, heartbeat), spec.num_steps)
    finally:
        env.close()


class ProcessEndpoint:
    """The worker's end of the connection with the learner's process."""

    def __init__(self, channel: Channel, heartbeat: Heartbeat) -> None:
        self._channel = channel
        self.beat = heartbeat.beat

    def receive(self, timeout: float | None) -> Instruction | None:
        """Return the next instruction, waiting for it at most so long."""
        try:
            message = self._channel.receive(timeout)
        except EOFError:
            raise Stopped from None
        if message is None:
            return None
        if message.kind == "weights" and message.segment is not None:
            return NewWeights(WeightSnapshot(**message.content(), data=message.segment.bytes, segment=message.segment))
        return (RolloutRequest if message.kind == "request" else Command)(**message.content())

    def adopted(self, version: int, digest: str | None) -> None:
        """Acknowledge weights."""
        self._channel.send("adopted", {"version": version, "digest": digest})

    def deliver(self, result: RolloutResult) -> None:
        """Hand over a rollout."""
        self._channel.send("result", result.content())

    def paused(self, state: dict[str, Any] | None) -> None:
        """Report that nothing moves until further notice."""
        self._channel.send("paused", state)
