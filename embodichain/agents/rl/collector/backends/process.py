"""Collection in a separate process, which is replaced when it dies or hangs."""

import dataclasses
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from embodichain.agents.processes.channel import Channel
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.pool import Heartbeat, Restarts, WorkerPool, WorkerProcess
from embodichain.agents.rl.collector.backends.thread import POLL_SECONDS, STOP_SECONDS, Backend, Deliver
from embodichain.agents.rl.collector.recovery import mixed_seed
from embodichain.agents.rl.collector.rollout_worker import (
    Command,
    Instruction,
    RolloutRequest,
    RolloutResult,
    RolloutWorker,
    Stopped,
    WorkerSpec,
)
from embodichain.agents.rl.collector.weights import WeightSnapshot, WeightStore, move
from embodichain.errors import CollectorError, EmbodiChainError, EnvironmentHungError, PolicyContractError

_NAME = "the collecting process"
EMPTY_STATE: dict[str, Any] = {"collector": {}, "env": None, "generator": None, "requests": []}
"""State of a worker before its first rollout, or if it cannot be saved."""


class SupervisedBackend(Backend):
    """Base class for workers in other processes, with a thread that starts, supervises and replaces them."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._state: Mapping[str, Any] | None = None
        self._lock = threading.RLock()

    @abstractmethod
    def _watch(self) -> None:
        """Start missing workers, wait for their messages for a short time, and process them."""

    def start(self, num_steps: int, store: WeightStore, deliver: Deliver) -> None:
        self._ready = threading.Event()
        super().start(num_steps, store, deliver)
        try:
            while not self._ready.wait(POLL_SECONDS):
                self.check()
        except BaseException:  # also KeyboardInterrupt: leave nothing running
            self.stop()
            raise
        self._state = None

    def reset(self, seed: int | None) -> None:
        self._seed = seed

    def state(self) -> dict[str, Any]:
        return {**EMPTY_STATE, "seed": self._seed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._state, self._seed = state, state.get("seed", self._seed)

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._watch()


def collector_error(report: FailureReport, who: str, replacements: int = 0) -> EmbodiChainError:
    """Return the error to raise for a worker that cannot be replaced."""
    original = report.original()
    if isinstance(original, PolicyContractError):  # a message that needs no traceback
        return original
    return report.as_error(who, replacements, EnvironmentHungError if report.hung else CollectorError)


class ProcessBackend(SupervisedBackend):
    """One worker process and the thread that supervises it.

    A replacement gets the pending requests of the process that died; an unfinished rollout restarts with new episodes.
    """

    def _open(self) -> None:
        cfg = self._cfg
        self._requests: dict[int, RolloutRequest] = {}
        self._command: Command = "resume"
        self._process: WorkerProcess | None = None
        self._restarts = Restarts(_NAME, 1, cfg.max_restarts, max(cfg.start_timeout, cfg.step_timeout))
        job = (self._spec.for_another_process(), str(self._spec.policy.device))
        self._pool = WorkerPool(collect, lambda *_: job, cfg.start_timeout, cfg.step_timeout)

    @property
    def num_workers(self) -> int:
        return int(self._ready.is_set())

    def send(self, instruction: Instruction) -> None:
        with self._lock:
            if isinstance(instruction, RolloutRequest):
                self._requests[instruction.number] = instruction
            elif not isinstance(instruction, WeightSnapshot):
                self._command = instruction
                self._forget_pauses()
            self._transmit(instruction)

    def _close(self) -> None:
        with self._lock:
            self._transmit("stop")
            self._process = None
        self._pool.stop(STOP_SECONDS - 1.0 if self._failure is None else 0.0)

    def _watch(self) -> None:
        for index, incarnation in self._restarts.due():
            process = self._pool.start(index, incarnation)
            process.channel.send("begin", {"seed": self._seed, "state": self._state}, wait=False)
            with self._lock:  # send everything that is pending
                self._process = process
                for snapshot in self._store.kept():
                    self._transmit(snapshot)
                for number in sorted(self._requests):
                    self._transmit(self._requests[number])
                if self._command in ("pause", "save"):
                    self._transmit(self._command)
        for process, kind, content in self._pool.poll(POLL_SECONDS):
            if kind == "failed":
                self._replace(process, content)
            elif kind == "ready":
                process.joined, self.num_envs = time.monotonic(), content
                self._ready.set()
            elif kind == "result":
                result = RolloutResult.of(content)
                self.report(kind, result)
                with self._lock:
                    del self._requests[result.number]
            else:
                self.report(kind, content)

    def _transmit(self, instruction: Instruction) -> None:
        """Send an instruction without blocking, as the process may hang; the caller holds the lock."""
        if self._process is None:
            return
        send = self._process.channel.send
        if isinstance(instruction, WeightSnapshot):
            about = {"version": instruction.version, "digest": instruction.digest}
            send("weights", about, instruction.segment, wait=False)
        elif isinstance(instruction, RolloutRequest):
            send("request", vars(instruction), wait=False)
        else:
            send("command", instruction, wait=False)

    def _replace(self, process: WorkerProcess, report: FailureReport) -> None:
        with self._lock:
            self._process = None
        if self._stopping.is_set():
            return
        never_worked = report.final or not self._ready.is_set()
        if never_worked or not self._restarts.replace(report, process.incarnation):
            raise collector_error(report, _NAME, self.restarts)
        self.restarts += 1
        self._state = None  # start new episodes, with another seed than the first process
        self._seed = mixed_seed(self._cfg.seed or 0 if self._seed is None else self._seed, self.restarts)


def collect(channel: Channel, heartbeat: Heartbeat, spec: WorkerSpec, device: str) -> None:
    """Main function of the worker process; ``device`` is the policy's."""
    torch.set_num_threads(spec.cfg.num_threads or 1)
    move(spec.policy, torch.device(device))
    env = spec.make_env()
    try:
        worker = RolloutWorker(env, spec)
        message = channel.receive()
        begin = message.content() if message is not None else {"state": None, "seed": None}
        loaded = begin["state"] is not None and worker.load_state(begin["state"])
        if not loaded and begin["seed"] is not None:
            worker.collector.reset(begin["seed"])
        heartbeat.beat(busy=False)
        channel.send("ready", env.num_envs)
        try:
            worker.run(ProcessEndpoint(channel, heartbeat), spec.num_steps)
        except Exception as error:
            if worker.collector.env_errors.include(error):
                raise
            report = FailureReport.of_exception(0, error)  # final: a policy or callback would raise it again
            channel.send("failed", dataclasses.replace(report, final=True).to_json())
    finally:
        env.close()


class ProcessEndpoint:
    """The ``Endpoint`` of a worker process."""

    def __init__(self, channel: Channel, heartbeat: Heartbeat) -> None:
        self._channel, self.heartbeat = channel, heartbeat

    def receive(self, timeout: float | None) -> Instruction | None:
        try:
            message = self._channel.receive(timeout)
        except EOFError:
            raise Stopped from None
        if message is None:
            return None
        if message.kind == "weights" and message.segment is not None:
            return WeightSnapshot(**message.content(), data=message.segment.bytes, segment=message.segment)
        instruction: Instruction = message.content()
        return RolloutRequest(**message.content()) if message.kind == "request" else instruction

    def report(self, kind: str, content: Any) -> None:
        self._channel.send(kind, content.content() if isinstance(content, RolloutResult) else content)
