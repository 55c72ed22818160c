"""DAgger: a policy acts, and the expert labels every state that it reaches (Ross, Gordon and Bagnell, 2011).

The mistakes of a behaviour-cloned policy lead to states that no demonstration covers. DAgger includes these states:
``action`` is the expert's label, ``executed_action`` is what the envs execute, and ``expert_acted`` says who chose it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.datasets.frames import Frames
from embodichain.agents.engine.config import ActionSourceCfg
from embodichain.agents.engine.sources import Actor, ExpertActor
from embodichain.agents.processes.channel import PublishedWeights
from embodichain.envs.vec_env import VecEnv

_POLICY = "embodichain.agents.rl.published:StreamPolicy"


class ActingPolicy(Protocol):
    """A policy that acts in a subset of the envs."""

    version: int

    @property
    def is_ready(self) -> bool:
        """Whether weights are loaded."""

    @property
    def chunk_size(self) -> int:
        """Steps per decision."""

    def act(self, observation: TensorDict, rows: Tensor) -> Tensor:
        """Return actions ``[num_envs, ...]``; only those where the mask ``rows`` ``[num_envs]`` is True are defined."""

    def reset(self, env_ids: list[int]) -> None:
        """Reset the per-episode state of these envs."""

    def adopt(self, weights: PublishedWeights) -> None:
        """Load these weights."""


class DaggerActor(Actor):
    """Returns the expert's action as the label of every state; ``extra`` holds the action to execute and who chose it.

    For every decision or episode, the expert acts with probability ``expert_share``, else the policy. The expert always
    acts until the policy has weights.
    """

    def __init__(
        self, env: VecEnv, *, seed: int, trusted_modules: Sequence[str], cfg: ActionSourceCfg, num_workers: int
    ) -> None:
        self._expert, self._cfg, self._workers = ExpertActor(env), cfg, num_workers
        settings = {"path": cfg.policy, "deterministic": cfg.deterministic, "seed": seed}
        self._policy: ActingPolicy = resolve_name(_POLICY)(env, **settings, trusted_modules=trusted_modules)
        self._generator = torch.Generator().manual_seed(seed)
        self._by_expert = torch.ones(env.num_envs, dtype=torch.bool)
        self._left = torch.zeros(env.num_envs, dtype=torch.int64)
        """Steps until each env's next decision; -1: none in this episode."""
        self._num_envs, self._device = env.num_envs, env.device
        self._steps = self._episodes = 0
        self.extra: Frames = {}

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._policy.version

    @property
    def expert_share(self) -> float:
        """Current probability that the expert takes a decision."""
        if not self._policy.is_ready:
            return 1.0
        counts = {"episodes": self._episodes * self._workers, "steps": self._steps * self._workers}
        return self._cfg.expert_share.at(counts.get(self._cfg.expert_share.unit, self.version))

    def __call__(self, observation: TensorDict) -> Tensor:
        label = self._expert(observation)
        self._choose_who_acts()
        executed, by_expert = label, self._by_expert.to(self._device)
        if not self._by_expert.all():
            chosen = self._policy.act(observation, ~self._by_expert).to(label.dtype)
            executed = torch.where(by_expert.view(-1, *[1] * (label.ndim - 1)), label, chosen)
        self._steps += self._num_envs
        self.extra = {("executed_action",): executed, ("expert_acted",): by_expert}
        return label

    def _choose_who_acts(self) -> None:
        due = self._left == 0
        if due.any():  # one number per env, so that the draws of an env do not depend on the others
            drawn = torch.rand(self._num_envs, generator=self._generator) < self.expert_share
            self._by_expert = torch.where(due, drawn, self._by_expert)
            for_episode = self._cfg.expert_acts_for == "episode" and self._policy.is_ready
            self._left[due] = -1 if for_episode else self._policy.chunk_size
        self._left[self._left > 0] -= 1

    def reset(self, env_ids: list[int]) -> None:
        self._left[env_ids] = 0
        self._policy.reset(env_ids)
        self._episodes += len(env_ids)

    def resume(self, steps: int, episodes: int) -> None:
        """Continue the schedule of ``expert_share`` from the counts of the worker that this one replaces."""
        self._steps, self._episodes = steps, episodes

    def adopt(self, weights: PublishedWeights) -> None:
        """Load these weights into the policy; they apply from its next decision on."""
        self._policy.adopt(weights)
