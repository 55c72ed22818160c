"""What collectors have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.utils.observations import Observation
from embodichain.envs.vec_env import StepResult

LARGE_STEP = 50_000_000
"""Multiplications per environment step above which one thread is no longer the fastest choice."""


class StepCallback(Protocol):
    """Called after every environment step; whatever it raises ends the collection."""

    def __call__(
        self,
        obs: Observation,
        action: Tensor,
        reward: Tensor,
        done: Tensor,
        info: dict[str, Any],
        next_obs: Observation,
    ) -> None:
        """See one step of all envs."""


class Decision(NamedTuple):
    """What a policy made of an observation, each part ``[envs, ...]``."""

    obs: Observation
    """What it saw."""
    state: Tensor | None
    """Its memory before that."""
    action: Tensor
    """What it chose."""
    log_prob: Tensor
    """Logarithm of the choice's probability."""
    value: Tensor | None
    """What it expects from here; ``None`` if all observations of a rollout are valued at its end."""
    new_state: Tensor | None
    """Its memory afterwards."""


class BaseCollector(ABC):
    """Lets a policy act in an environment and returns what happened as rollouts."""

    @abstractmethod
    def collect(self, num_steps: int) -> TensorDictBase:
        """Return a rollout ``[num_envs, num_steps]``; see ``buffer/layout.py`` for its keys."""

    def publish(self) -> None:  # noqa: B027 - there is nothing to do if the policy itself collects
        """Give the collector the policy's present weights; the learner calls it right after an update."""

    def hold(self) -> AbstractContextManager[None]:
        """Keep the collector between two rollouts, so that its state can be saved."""
        return nullcontext()

    def stop(self) -> None:  # noqa: B027 - there is nothing to do if nothing goes on in the background
        """Stop collecting."""


def result_to(result: StepResult, device: torch.device) -> StepResult:
    """Return a step's result on a device; ``info`` stays where the environment is."""
    obs, reward, terminated, truncated, info = result
    return obs.to(device), reward.to(device), terminated.to(device), truncated.to(device), info


def bound_action(action: Tensor) -> Tensor:
    """Return what an environment is given for an action of the policy.

    Continuous actions are clipped to [-1, 1], the range of every environment; the rollout keeps the action as it was
    sampled, for its probability is that of the unclipped one.
    """
    return action.clamp(-1.0, 1.0) if action.is_floating_point() else action


def collection_threads(policy: nn.Module, num_envs: int) -> int | None:
    """Return 1 if the policy's work per step is too small to share between threads, ``None`` for torch's own choice."""
    size = sum(parameter.numel() for parameter in policy.parameters())
    return 1 if size * num_envs < LARGE_STEP else None
