"""Pipelined collection: one group of envs is simulated while the policy computes the actions of another.

With two groups A and B, the policy and the simulation are both busy all the time::

    policy      A0 B0 A1 B1 A2 B2
    simulation     A0 B0 A1 B1 A2 B2

The order of decisions is fixed, so random numbers, and thereby rollouts, do not depend on timing.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer
from embodichain.agents.rl.collector.base import PolicyStep, result_to
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.envs.vec_env import ActionBounds, StepResult, StepsInHalves, VecEnv
from embodichain.errors import ConfigError, EmbodiChainError

if TYPE_CHECKING:
    from embodichain.agents.rl.collector.sync_collector import SyncCollector


@runtime_checkable
class EnvGroups(Protocol):
    """An environment made of groups that can be stepped one by one, such as ``GroupedEnv``."""

    device: torch.device
    groups: Sequence[VecEnv]
    slices: Sequence[slice]
    """Env indices of each group."""

    def join(self, results: Sequence[StepResult], obs: TensorDict | None = None) -> StepResult:
        """Concatenate the results of all groups."""


class Pipeline:
    """Collects steps of a ``GroupedEnv`` with overlapping groups."""

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
        self._groups = [_Group(group, device) for group in env.groups]

    def run(self, collector: SyncCollector, obs: Observation, buffer: RolloutBuffer) -> Observation:
        """Fill a buffer with steps of all envs, starting from ``obs``; return the observation after them."""
        state, groups = collector.state, self._groups
        for group, rows in zip(groups, self.env.slices, strict=True):
            group.rows = rows
            group.obs, group.state = obs[rows], None if state is None else state[rows]
        try:
            version = collector.next_version()
            for group in groups:
                group.begin(collector)
            for remaining in reversed(range(buffer.num_steps)):
                decisions = [group.decision for group in groups]
                results, next_version = [], collector.next_version() if remaining else version
                for group in groups:
                    results.append(group.finish(collector))
                    if remaining:
                        group.begin(collector)
                obs = collector.record(_join(decisions), self._joined(results), version, buffer)
                version = next_version
            return obs
        finally:  # after an error, too: an environment must not be stepped twice at a time
            for group in groups:
                group.settle()

    def _joined(self, results: list[StepResult]) -> StepResult:
        """Return the results of all groups as one, on the collector's device, where their observations are already."""
        if self.env.device == self.device:
            return self.env.join(results)
        return result_to(self.env.join(results, torch.cat([group.obs for group in self._groups])), self.device)


class _StepThread:
    """A daemon thread that runs calls in order; unlike an executor's, it does not block the exit if it hangs."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(self._calls,), name="embodichain-group", daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call; return the future of its result."""
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    @staticmethod
    def _run(calls: queue.SimpleQueue[Any]) -> None:
        while (call := calls.get()) is not None:
            future, function, args = call
            try:
                future.set_result(function(*args))
            except BaseException as error:  # noqa: BLE001 - raised by future.result()
                future.set_exception(error)
            del call, future, function, args  # release references while waiting for the next call

    def __del__(self) -> None:
        self._calls.put(None)


class _Group:
    """One group and its running step; stepped in a thread, unless it is simulated in other processes."""

    rows: slice
    obs: Observation
    state: Tensor | None
    decision: PolicyStep
    _finish_step: Callable[[], StepResult]

    def __init__(self, env: VecEnv, device: torch.device) -> None:
        self._env, self._device, self._under_way = env, device, False
        self._bounds = ActionBounds(env.action_space)
        self._thread = _StepThread()

    def begin(self, collector: SyncCollector) -> None:
        """Compute actions and start the simulation step."""
        self.decision = collector.decide(self.obs, self.state, self.rows)
        action = self._bounds.clip(self.decision.action).to(self._env.device)
        if isinstance(self._env, StepsInHalves):
            with collector.env_errors:
                self._env.begin_step(action)
            self._finish_step = self._env.finish_step
        else:
            self._finish_step = self._thread.submit(self._env.step, action).result
        self._under_way = True

    def finish(self, collector: SyncCollector) -> StepResult:
        """Wait for the simulation step and return its result."""
        self._under_way = False
        with collector.env_errors:
            result = self._finish_step()
        del self._finish_step  # release the future's result, or the traceback of its error
        done = result[2] | result[3]
        self.obs = result[0].to(self._device)
        self.state = collector.clear_ended(self.decision.new_state, done.to(self._device))
        return result

    def settle(self) -> None:
        """Wait for a running step and discard its result, after an error elsewhere."""
        if self._under_way and isinstance(self._env, StepsInHalves):
            with contextlib.suppress(EmbodiChainError):
                self._env.finish_step()
        elif self._under_way:
            self._thread.submit(bool).result()  # runs after the step
        self._under_way = False


def _join(decisions: list[PolicyStep]) -> PolicyStep:
    """Concatenate the decisions of all groups."""
    parts: list[Any] = [None if values[0] is None else torch.cat(values) for values in zip(*decisions, strict=True)]
    return PolicyStep(*parts)
