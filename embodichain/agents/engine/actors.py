"""Who acts in a simulated episode: the task's expert, chance, or a trained policy."""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.engine.config import ActionSourceCfg
from embodichain.envs.vec_env import HasExpert, VecEnv
from embodichain.errors import ConfigError


class Actor(Protocol):
    """Chooses the actions of all envs."""

    version: int
    """Step of the checkpoint that acts; -1 where there is none."""

    def act(self, observation: TensorDict) -> Tensor:
        """Return the actions ``[num_envs, ...]`` for the present observation."""


class ExpertActor:
    """The scripted expert of the environment."""

    version = -1

    def __init__(self, env: VecEnv) -> None:
        if not isinstance(env, HasExpert):
            raise ConfigError(
                f'source: {type(env).__name__} has no expert; use "random", or "policy" with a checkpoint',
                "action_config",
            )
        self._env: HasExpert = env

    def act(self, observation: TensorDict) -> Tensor:
        """Return what the expert does in the present state."""
        return self._env.expert_action()


class RandomActor:
    """Uniform actions."""

    version = -1

    def __init__(self, env: VecEnv, generator: torch.Generator) -> None:
        self._generator = generator
        self._device = env.device
        self._num_envs = env.num_envs
        self._space: gym.Space[Any] = env.action_space

    def act(self, observation: TensorDict) -> Tensor:
        """Return uniform draws from [-1, 1], or from the choices of a discrete space."""
        if isinstance(self._space, gym.spaces.Discrete):
            action = torch.randint(int(self._space.n), (self._num_envs,), generator=self._generator)
        else:
            action = torch.rand((self._num_envs, *(self._space.shape or ())), generator=self._generator) * 2 - 1
        return action.to(self._device)


def make_actor(cfg: ActionSourceCfg, env: VecEnv, generator: torch.Generator) -> Actor:
    """Return the actor that the config names."""
    if cfg.source == "expert":
        return ExpertActor(env)
    if cfg.source == "random":
        return RandomActor(env, generator)
    raise ConfigError(f"source: {cfg.source!r} does not act in a simulation", "action_config")
