"""What collects rollouts for a learner, be it in a thread, a process or a Ray actor, and how the two talk.

A worker can be paused, stopped and given new weights between two environment steps, and nowhere else.
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
"""How often a worker that waits shows that it is alive."""


@dataclass(frozen=True)
class RolloutRequest:
    """The permission to collect a rollout."""

    number: int
    """Number of the rollout; they are collected in this order."""
    version: int
    """Latest weights when it was issued; with ``lockstep`` the ones to use."""
    random: dict[str, Any] | None = None
    """Random state to continue from, where collector and learner share one although they are two processes."""


Command = Literal["pause", "save", "resume", "stop"]
"""``pause`` waits after the present step; ``save`` finishes the rollout, reports its state and waits; ``resume``
continues; ``stop`` ends."""
Instruction = RolloutRequest | WeightSnapshot | Command


@dataclass(frozen=True)
class RolloutResult:
    """A rollout and what is to be known about it."""

    number: int
    rollout: TensorDictBase
    """``[num_envs, num_steps]``; it belongs to whoever gets it."""
    statistics: dict[str, float]
    episodes: TensorDict
    """``return`` and ``length`` of the episodes that ended in it."""
    seconds: float
    """Time it took to collect."""
    waited: float
    """Time that was spent waiting for its request before."""
    random: dict[str, Any] | None = None
    """Random state to continue from, if the request brought one."""
    ready: torch.cuda.Event | None = field(default=None, compare=False)
    """On a GPU: when the rollout is complete."""

    def content(self) -> dict[str, Any]:
        """Return what another process is sent; the rollout in the order in which it lies in memory."""
        content = {name: value for name, value in vars(self).items() if name not in ("rollout", "ready")}
        return content | {"steps": self.rollout.transpose(0, 1)}

    @staticmethod
    def of(content: Mapping[str, Any]) -> RolloutResult:
        """Return what another process sent."""
        parts = dict(content)
        return RolloutResult(rollout=parts.pop("steps").transpose(0, 1), **parts)


class Endpoint(Protocol):
    """The worker's end of the connection with the learner."""

    heartbeat: Heartbeat

    def receive(self, timeout: float | None) -> Instruction | None:
        """Return the next instruction, waiting for it at most so long."""

    def report(self, kind: str, content: Any) -> None:
        """Report weights ``adopted`` (version, hash), a request's ``result``, or ``paused`` (after ``save``: state)."""


class Stopped(Exception):  # noqa: N818 - it is no error
    """Somebody asked the worker to end."""


@dataclass(frozen=True)
class WorkerSpec:
    """How a worker is set up; one in another process is sent this."""

    make_env: Callable[[], VecEnv]
    policy: Policy
    device: torch.device
    """Where rollouts are stored."""
    callback: StepCallback | None
    start_rollout: RolloutStart | None
    cfg: AsyncCfg
    num_steps: int = 1
    """Steps per environment and rollout."""
    make_another: Callable[[], VecEnv] | None = None
    """In a thread: makes an environment in place of one that failed."""
    return_discount: float | None = None
    """Discount of the returns that rollouts are to have, if any."""

    def for_another_process(self) -> WorkerSpec:
        """Return it with a policy that can be sent: a copy without weights."""
        return replace(self, policy=without_weights(self.policy), make_another=None)


class RolloutWorker:
    """An environment, a copy of the policy, and the loop that collects rollouts with them by request."""

    def __init__(self, env: VecEnv, spec: WorkerSpec) -> None:
        cfg = spec.cfg
        self.cfg, self.copy = cfg, InferenceCopy(spec.policy)
        if cfg.max_policy_lag > 0:  # it runs beside the learner, so neither may disturb the other's random numbers
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
        # Its kernels come first: they are short, and simulation waits for them, while those of an update are long.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._endpoint: Endpoint
        self.clear()

    @property
    def env(self) -> VecEnv:
        """The environment it collects in at present."""
        return self.collector.env

    def state(self, requests: tuple[RolloutRequest, ...] = ()) -> dict[str, Any]:
        """Return everything that the next rollout depends on; ``requests`` are those that wait."""
        env, generator = self.collector.env_state(), self.copy.policy.generator
        return {
            "collector": {name: part.clone() for name, part in self.collector.state_dict().items()},
            "env": env,
            "generator": None if generator is None else generator.get_state(),
            "requests": [[request.number, request.version] for request in requests],
        }

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Continue from a state; return whether the environment's was in it. The learner repeats the requests."""
        env, generator = self.env, self.copy.policy.generator
        if generator is not None and state["generator"] is not None:
            generator.set_state(state["generator"].cpu().clone())
        if state["env"] is None or not state["collector"]:
            return False
        env.set_state(state["env"].to(env.device))
        self.collector.load_state_dict(state["collector"])
        return True

    def clear(self) -> None:
        """Forget the requests and weights that a learner has sent."""
        self._requests: deque[RolloutRequest] = deque()
        self._snapshots: dict[int, WeightSnapshot] = {}
        self._in_use: int | None = None
        self._paused = self._save_asked = False

    def run(self, endpoint: Endpoint, num_steps: int) -> None:
        """Collect rollouts of ``num_steps`` steps until told to stop."""
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
        self.collector.buffer = None  # a rollout belongs to whoever gets it: the next one is written elsewhere
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
        """Wait for a request; only here the state is complete and can be saved."""
        while True:
            self._receive_all()
            if self._save_asked:
                self._save_asked = False
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
        """Wait for an instruction; give signs of life meanwhile."""
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
            self._paused, self._save_asked = instruction == "pause", instruction == "save"

    def _adopt(self, version: int) -> None:
        if self._in_use is not None and version <= self._in_use:
            return
        if version not in self._snapshots:
            raise WeightsError(f"version {version} is wanted, but {sorted(self._snapshots)} arrived")
        self._in_use, digest = self.copy.adopt(self._snapshots[version])
        self._endpoint.report("adopted", {"version": self._in_use, "digest": digest})
        self.collector.record_policy()  # if that had to wait for weights
        for old in [v for v in self._snapshots if v < version]:
            del self._snapshots[old]
