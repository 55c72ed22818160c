"""Groups of envs in turn: one is simulated while the policy decides for another.

With two groups A and B the policy and the simulation are both busy all the time::

    policy      A0 B0 A1 B1 A2 B2
    simulation     A0 B0 A1 B1 A2 B2

The order of decisions is fixed, so the random numbers, and with them the rollout, do not depend on who is faster.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.rl.collector.base import Decision, bound_action, result_to
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.envs.vec_env import StepResult, StepsInHalves, VecEnv
from embodichain.errors import ConfigError, EmbodiChainError, RolloutError

if TYPE_CHECKING:
    from embodichain.agents.rl.collector.sync_collector import SyncCollector


@runtime_checkable
class EnvGroups(Protocol):
    """An environment made of groups that can be stepped one by one, such as ``GroupedEnv``."""

    device: torch.device
    groups: Sequence[VecEnv]
    slices: Sequence[slice]
    """Envs of each group."""

    def join(self, results: Sequence[StepResult], obs: TensorDict | None = None) -> StepResult:
        """Return the steps of all groups as one."""


class Pipeline:
    """Collects steps of a ``GroupedEnv``, whose groups take turns."""

    def __init__(self, env: VecEnv, device: torch.device, stages: int) -> None:
        if not isinstance(env, EnvGroups) or len(env.groups) != stages:
            got = f"{len(env.groups)} groups" if isinstance(env, EnvGroups) else type(env).__name__
            raise ConfigError(
                f"pipeline_stages={stages} needs an environment of {stages} groups: GroupedEnv([...]) of "
                f"embodichain.envs.wrappers, or arrange(environments, {stages}) of those in processes; got {got}",
                "collector",
            )
        self.env: EnvGroups = env
        self.device = device
        self._simulators = [
            _ProcessSimulator(group) if isinstance(group, StepsInHalves) else _ThreadSimulator(group)
            for group in env.groups
        ]

    def run(self, collector: SyncCollector, obs: Observation, num_steps: int) -> Observation:
        """Take ``num_steps`` in all envs from the collector's present observation; return the one after them."""
        state, groups = collector.state, zip(self._simulators, self.env.slices, strict=True)
        turns = [_Turn(self, sim, obs[rows], None if state is None else state[rows]) for sim, rows in groups]
        try:
            version = collector.next_version()
            for turn in turns:
                turn.begin(collector)
            for remaining in reversed(range(num_steps)):
                begun = [turn.decision for turn in turns]
                results, next_version = [], collector.next_version() if remaining else version
                for turn in turns:
                    results.append(turn.finish(collector))
                    if remaining:
                        turn.begin(collector)
                obs = collector.record(_join(begun), self._joined(results, turns), num_steps, version)
                version = next_version
            return obs
        finally:  # after an error, too: nobody may step an environment that is being stepped
            for simulator in self._simulators:
                simulator.settle()

    def _joined(self, results: list[StepResult], turns: list[_Turn]) -> StepResult:
        """Return a step of all envs on the collector's device, where the groups' observations already are."""
        if self.env.device == self.device:
            return self.env.join(results)
        return result_to(self.env.join(results, torch.cat([turn.obs for turn in turns])), self.device)


class _ThreadSimulator:
    """Steps one group in a thread of its own, which ends with this object and never keeps the program from ending."""

    def __init__(self, env: VecEnv) -> None:
        requests: queue.SimpleQueue[tuple[Tensor, Future[StepResult]] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(env, requests), name="embodichain-group", daemon=True).start()
        # At the program's end it is left waiting: Python must not wake threads that own C++ objects by then.
        weakref.finalize(self, requests.put, None).atexit = False
        self._requests = requests
        self._step: Future[StepResult] | None = None

    def begin(self, action: Tensor) -> None:
        """Begin a step."""
        self._step = Future()
        self._requests.put((action, self._step))

    def finish(self) -> StepResult:
        """Wait for the step and return its result."""
        step, self._step = self._step, None
        if step is None:
            raise RolloutError("this group has no step under way")
        return step.result()

    def settle(self) -> None:
        """Wait for a step that nobody wants any more."""
        if self._step is not None:
            wait([self._step])
            self._step = None


def _serve(env: VecEnv, requests: queue.SimpleQueue[tuple[Tensor, Future[StepResult]] | None]) -> None:
    while (request := requests.get()) is not None:
        action, future = request
        try:
            future.set_result(env.step(action))
        except BaseException as error:  # noqa: BLE001 - it is raised where the step is waited for
            future.set_exception(error)
        del request, action, future  # the result belongs to whoever waits, not to this thread until the next step


class _ProcessSimulator:
    """Steps one group that is in a process of its own, which needs no thread."""

    def __init__(self, env: StepsInHalves) -> None:
        self._env = env
        self._under_way = False

    def begin(self, action: Tensor) -> None:
        """Begin a step."""
        self._env.begin_step(action)
        self._under_way = True

    def finish(self) -> StepResult:
        """Wait for the step and return its result."""
        self._under_way = False
        return self._env.finish_step()

    def settle(self) -> None:
        """Wait for a step that nobody wants any more."""
        if self._under_way:
            with contextlib.suppress(EmbodiChainError):  # something else went wrong before
                self.finish()


class _Turn:
    """One group: its observation, its recurrent state, the decision for it, and its step under way."""

    decision: Decision

    def __init__(
        self,
        pipeline: Pipeline,
        simulator: _ThreadSimulator | _ProcessSimulator,
        obs: Observation,
        state: Tensor | None,
    ) -> None:
        self.pipeline, self.simulator, self.obs, self.state = pipeline, simulator, obs, state

    def begin(self, collector: SyncCollector) -> None:
        """Decide, and let the simulation continue with that."""
        self.decision = collector.decide(self.obs, self.state)
        self.simulator.begin(bound_action(self.decision.action).to(self.pipeline.env.device))

    def finish(self, collector: SyncCollector) -> StepResult:
        """Wait for the simulation and take its observation."""
        result = self.simulator.finish()
        device, done = self.pipeline.device, result[2] | result[3]
        self.obs, self.state = result[0].to(device), collector.clear_ended(self.decision.new_state, done.to(device))
        return result


def _join(decisions: list[Decision]) -> Decision:
    """Return the decisions of all groups as one."""
    parts: list[Any] = [None if values[0] is None else torch.cat(values) for values in zip(*decisions, strict=True)]
    return Decision(*parts)
