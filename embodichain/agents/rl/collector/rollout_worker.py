"""The worker that collects rollouts in a thread, a process or a Ray actor, and its messages with the learner.

A worker is paused, stopped and given new weights only between two environment steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from tensordict import TensorDict, TensorDictBase

from embodichain.agents.processes.pool import Heartbeat
from embodichain.agents.rl.collector.base import StepCallback
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.sync_collector import RolloutStart, SyncCollector
from embodichain.agents.rl.collector.weights import InferenceCopy, WeightSnapshot, without_weights
from embodichain.agents.rl.models.policy import Policy
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import WeightsError
from embodichain.utils.torch_runtime import get_random_state, set_random_state

_BEAT_SECONDS = 0.5
"""Interval of the heartbeats of a waiting worker."""


@dataclass(frozen=True)
class RolloutRequest:
    """A request to collect one rollout."""

    number: int
    """Number of the rollout; rollouts are collected in this order."""
    version: int
    """Latest version of the weights when the request was sent; with ``lockstep`` the version to use."""
    random: dict[str, Any] | None = None
    """Random state to continue from, if learner and worker process share one random sequence."""


Command = Literal["pause", "save", "resume", "stop"]
"""``pause`` waits after the current step; ``save`` finishes the rollout, reports the state and waits; ``resume``
continues; ``stop`` ends the worker."""
Instruction = RolloutRequest | WeightSnapshot | Command


@dataclass(frozen=True)
class RolloutResult:
    """A rollout and its metadata."""

    number: int
    rollout: TensorDictBase
    """``[num_envs, num_steps]``; the receiver owns it."""
    statistics: dict[str, float]
    episodes: TensorDict
    """``return`` and ``length`` of the episodes that ended in the rollout."""
    seconds: float
    """Time it took to collect."""
    waited: float
    """Time the worker waited for the request."""
    random: dict[str, Any] | None = None
    """Random state to continue from, if the request had one."""
    ready: torch.cuda.Event | None = field(default=None, compare=False)
    """On a GPU, recorded when the rollout is complete."""

    def content(self) -> dict[str, Any]:
        """Return the message for another process, with the rollout time-major, as it is stored."""
        content = {name: value for name, value in vars(self).items() if name not in ("rollout", "ready")}
        return content | {"steps": self.rollout.transpose(0, 1)}

    @staticmethod
    def of(content: Mapping[str, Any]) -> RolloutResult:
        """Return the result from the message of another process."""
        parts = dict(content)
        return RolloutResult(rollout=parts.pop("steps").transpose(0, 1), **parts)


class Endpoint(Protocol):
    """The worker's end of the connection with the learner."""

    heartbeat: Heartbeat

    def receive(self, timeout: float | None) -> Instruction | None:
        """Return the next instruction, or ``None`` after ``timeout`` seconds."""

    def report(self, kind: str, content: Any) -> None:
        """Report ``adopted`` weights (version, hash), a ``result``, or ``paused`` (after ``save`` with the state)."""


class Stopped(Exception):  # noqa: N818 - not an error
    """The worker was asked to stop."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything needed to set up a worker, possibly in another process."""

    make_env: Callable[[], VecEnv]
    policy: Policy
    device: torch.device
    """Device on which rollouts are stored."""
    callback: StepCallback | None
    start_rollout: RolloutStart | None
    cfg: AsyncCfg
    num_steps: int = 1
    """Steps per environment and rollout."""
    make_another: Callable[[], VecEnv] | None = None
    """In a thread, replaces an environment that failed."""
    return_discount: float | None = None
    """Discount of ``discounted_return``, if rollouts need it."""

    def for_another_process(self) -> WorkerSpec:
        """Return a picklable copy, whose policy has no weights."""
        return replace(self, policy=without_weights(self.policy), make_another=None)


class RolloutWorker:
    """Collects rollouts on request, with its own environment and its own copy of the policy."""

    def __init__(self, env: VecEnv, spec: WorkerSpec) -> None:
        cfg = spec.cfg
        self.cfg, self.copy = cfg, InferenceCopy(spec.policy)
        if cfg.max_policy_lag > 0:  # concurrent with the learner, so both need their own random numbers
            self.copy.policy.generator = torch.Generator(spec.policy.device).manual_seed(cfg.seed or 0)
        self.collector = SyncCollector(
            env,
            self.copy.policy,
            spec.device,
            spec.callback,
            start_rollout=spec.start_rollout,
            num_threads=cfg.num_threads,
            pipeline_stages=cfg.pipeline_stages,
            return_discount=spec.return_discount,
        )
        device = self.collector.device
        # High priority: the simulation waits for these short kernels, while those of an update are long.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._endpoint: Endpoint
        self.clear()

    @property
    def env(self) -> VecEnv:
        """The current environment."""
        return self.collector.env

    def state(self, requests: tuple[RolloutRequest, ...] = ()) -> dict[str, Any]:
        """Return the worker's state; ``requests`` are the pending ones."""
        env, generator = self.collector.env_state(), self.copy.policy.generator
        return {
            "collector": {name: part.clone() for name, part in self.collector.state_dict().items()},
            "env": env,
            "generator": None if generator is None else generator.get_state(),
            "requests": [[request.number, request.version] for request in requests],
        }

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Restore a state; return whether it includes the environment. The learner sends pending requests again."""
        env, generator = self.env, self.copy.policy.generator
        if generator is not None and state["generator"] is not None:
            generator.set_state(state["generator"].cpu().clone())
        if state["env"] is None or not state["collector"]:
            return False
        env.set_state(state["env"].to(env.device))
        self.collector.load_state_dict(state["collector"])
        return True

    def clear(self) -> None:
        """Discard all requests and weights received."""
        self._requests: deque[RolloutRequest] = deque()
        self._snapshots: dict[int, WeightSnapshot] = {}
        self._in_use: int | None = None
        self._paused = self._save_requested = False

    def run(self, endpoint: Endpoint, num_steps: int) -> None:
        """Collect rollouts of ``num_steps`` steps until stopped."""
        self._endpoint = endpoint
        self.collector.before_step = self._between_steps
        stream: AbstractContextManager[Any] = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with stream:
                while True:
                    self._collect_one(num_steps)
        except Stopped:
            return
        finally:
            endpoint.heartbeat.beat(busy=False)
            self.collector.before_step = None

    def _collect_one(self, num_steps: int) -> None:
        began = time.monotonic()
        request = self._next_request()
        requested = time.monotonic()
        self._endpoint.heartbeat.beat(busy=True)
        self._adopt(request.version if self.cfg.adopt == "lockstep" else max(self._snapshots))
        if request.random is not None:
            set_random_state(request.random)
        self.collector.buffer = None  # new memory for each rollout, as the receiver owns it
        rollout = self.collector.collect(num_steps)
        result = RolloutResult(
            request.number,
            rollout,
            self.collector.statistics(),
            self.collector.episodes,
            seconds=time.monotonic() - requested,
            waited=requested - began,
            random=get_random_state() if request.random is not None else None,
            ready=None if self._stream is None else self._stream.record_event(),
        )
        self._endpoint.heartbeat.beat(busy=False)
        self._endpoint.report("result", result)

    def _next_request(self) -> RolloutRequest:
        """Wait for a request; the state can only be saved here, between two rollouts."""
        while True:
            self._receive_all()
            if self._save_requested:
                self._save_requested = False
                self._pause(self.state(tuple(self._requests)))
            elif self._paused:
                self._pause(None)
            elif self._requests:
                return self._requests.popleft()
            else:
                self._wait()

    def _between_steps(self) -> None:
        self._receive_all()
        if self._paused:
            self._pause(None)
        self._endpoint.heartbeat.beat(busy=True)
        if self.cfg.adopt == "step":
            self._adopt(max(self._snapshots))

    def _pause(self, state: dict[str, Any] | None) -> None:
        self._paused = True
        self._endpoint.heartbeat.beat(busy=False)
        self._endpoint.report("paused", state)
        while self._paused:
            self._wait()

    def _wait(self) -> None:
        """Wait for an instruction, with a heartbeat."""
        self._endpoint.heartbeat.beat(busy=False)
        self._follow(self._endpoint.receive(_BEAT_SECONDS))

    def _receive_all(self) -> None:
        while (instruction := self._endpoint.receive(0.0)) is not None:
            self._follow(instruction)

    def _follow(self, instruction: Instruction | None) -> None:
        if isinstance(instruction, RolloutRequest):
            self._requests.append(instruction)
        elif isinstance(instruction, WeightSnapshot):
            if self.cfg.adopt != "lockstep":
                self._snapshots.clear()
            self._snapshots[instruction.version] = instruction
        elif instruction == "stop":
            raise Stopped
        elif instruction is not None:
            self._paused, self._save_requested = instruction == "pause", instruction == "save"

    def _adopt(self, version: int) -> None:
        if self._in_use is not None and version <= self._in_use:
            return
        if version not in self._snapshots:
            raise WeightsError(f"version {version} is wanted, but {sorted(self._snapshots)} arrived")
        self._in_use, digest = self.copy.adopt(self._snapshots[version])
        self._endpoint.report("adopted", {"version": self._in_use, "digest": digest})
        self.collector.record_policy()  # captured here if there were no weights before
        for old in [v for v in self._snapshots if v < version]:
            del self._snapshots[old]
