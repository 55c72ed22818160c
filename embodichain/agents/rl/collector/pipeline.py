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
from concurrent.futures import Future, wait
from typing import Any, Protocol

import torch
from torch import Tensor

from embodichain.agents.rl.collector.base import Decision, bound_action, result_to
from embodichain.agents.rl.utils.observations import Observation
from embodichain.envs.vec_env import StepResult, StepsInHalves, VecEnv
from embodichain.envs.wrappers import GroupedEnv
from embodichain.errors import ConfigError, EmbodiChainError, RolloutError


class Steps(Protocol):
    """What the pipeline needs of a collector: the halves of a step."""

    state: Tensor | None

    def moment(self) -> Tensor:
        """Return the version of the policy that decides next."""

    def decide(self, obs: Observation, state: Tensor | None) -> Decision:
        """Let the policy choose the actions of some envs."""

    def record(self, decision: Decision, result: StepResult, num_steps: int, version: Tensor) -> Observation:
        """Write what came of the decisions for all envs; return the next observation."""

    def clear_ended(self, state: Tensor | None, done: Tensor) -> Tensor | None:
        """Return the memory with the rows of ended episodes as at an episode's start."""


class Pipeline:
    """Collects steps of a ``GroupedEnv``, whose groups take turns."""

    def __init__(self, env: VecEnv, device: torch.device, stages: int) -> None:
        if not isinstance(env, GroupedEnv) or len(env.groups) != stages:
            got = f"{len(env.groups)} groups" if isinstance(env, GroupedEnv) else type(env).__name__
            raise ConfigError(
                f"pipeline_stages={stages} needs an environment of {stages} groups: GroupedEnv([...]) of "
                f"embodichain.envs.wrappers, or arrange(environments, {stages}) of those in processes; got {got}",
                "collector",
            )
        self.env, self.device = env, device
        self._simulators = [
            _Apart(group) if isinstance(group, StepsInHalves) else _Simulator(group) for group in env.groups
        ]

    def run(self, steps: Steps, obs: Observation, num_steps: int) -> Observation:
        """Take ``num_steps`` in all envs from the collector's present observation; return the one after them."""
        turns = [_Turn(self, group) for group in range(len(self.env.groups))]
        for turn, rows in zip(turns, self.env.slices, strict=True):
            turn.obs, turn.state = obs[rows], None if steps.state is None else steps.state[rows]
        try:
            version = steps.moment()
            for turn in turns:
                turn.begin(steps)
            for _ in range(num_steps - 1):
                begun = [turn.decided for turn in turns]
                results, next_version = [], steps.moment()
                for turn in turns:
                    results.append(turn.finish(steps))
                    turn.begin(steps)
                steps.record(_join(begun), self._joined(results, turns), num_steps, version)
                version = next_version
            begun = [turn.decided for turn in turns]
            results = [turn.finish(steps) for turn in turns]
            return steps.record(_join(begun), self._joined(results, turns), num_steps, version)
        finally:  # after an error, too: nobody may step an environment that is being stepped
            for simulator in self._simulators:
                simulator.settle()

    def _joined(self, results: list[StepResult], turns: list[_Turn]) -> StepResult:
        """Return a step of all envs on the collector's device, where the groups have brought what they see already."""
        if self.env.device == self.device:
            return self.env.join(results)
        return result_to(self.env.join(results, torch.cat([turn.obs for turn in turns])), self.device)

    def begin(self, group: int, action: Tensor) -> None:
        """Begin a step of one group."""
        self._simulators[group].begin(bound_action(action).to(self.env.device))

    def finish(self, group: int) -> StepResult:
        """Wait for that step."""
        return self._simulators[group].finish()


class _Simulator:
    """Steps one group in a thread of its own, which ends with this object and never keeps the program from ending."""

    def __init__(self, env: VecEnv) -> None:
        orders: queue.SimpleQueue[tuple[Tensor, Future[StepResult]] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(env, orders), name="embodichain-group", daemon=True).start()
        # At the program's end it is left waiting: Python must not wake threads that own C++ objects by then.
        weakref.finalize(self, orders.put, None).atexit = False
        self._orders = orders
        self._step: Future[StepResult] | None = None

    def begin(self, action: Tensor) -> None:
        """Begin a step."""
        self._step = Future()
        self._orders.put((action, self._step))

    def finish(self) -> StepResult:
        """Wait for the step and return what came of it."""
        step, self._step = self._step, None
        if step is None:
            raise RolloutError("this group has no step under way")
        return step.result()

    def settle(self) -> None:
        """Wait for a step that nobody wants any more."""
        if self._step is not None:
            wait([self._step])
            self._step = None


class _Apart:
    """Steps one group that is in a process of its own, which needs no thread."""

    def __init__(self, env: StepsInHalves) -> None:
        self._env = env
        self._under_way = False

    def begin(self, action: Tensor) -> None:
        """Begin a step."""
        self._env.begin_step(action)
        self._under_way = True

    def finish(self) -> StepResult:
        """Wait for the step and return what came of it."""
        self._under_way = False
        return self._env.finish_step()

    def settle(self) -> None:
        """Wait for a step that nobody wants any more."""
        if self._under_way:
            with contextlib.suppress(EmbodiChainError):  # something else went wrong before
                self.finish()


def _serve(env: VecEnv, orders: queue.SimpleQueue[tuple[Tensor, Future[StepResult]] | None]) -> None:
    while (order := orders.get()) is not None:
        action, future = order
        try:
            future.set_result(env.step(action))
        except BaseException as error:  # noqa: BLE001 - it is raised where the step is waited for
            future.set_exception(error)
        del order, action, future  # what came of it belongs to whoever waits, not to this thread until the next step


class _Turn:
    """One group: what it sees, what was decided for it, and its step under way."""

    def __init__(self, pipeline: Pipeline, group: int) -> None:
        self.pipeline, self.group = pipeline, group
        self.obs: Observation
        self.state: Tensor | None
        self.decided: Decision

    def begin(self, steps: Steps) -> None:
        """Decide, and let the simulation go on with that."""
        self.decided = steps.decide(self.obs, self.state)
        self.pipeline.begin(self.group, self.decided.action)

    def finish(self, steps: Steps) -> StepResult:
        """Wait for the simulation and look at what came of it."""
        result = self.pipeline.finish(self.group)
        device, done = self.pipeline.device, result[2] | result[3]
        self.obs, self.state = result[0].to(device), steps.clear_ended(self.decided.new_state, done.to(device))
        return result


def _join(decisions: list[Decision]) -> Decision:
    """Return the decisions of all groups as one."""
    parts: list[Any] = [None if values[0] is None else torch.cat(values) for values in zip(*decisions, strict=True)]
    return Decision(*parts)
