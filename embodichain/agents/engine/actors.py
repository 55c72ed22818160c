"""Who acts in a simulated episode: the task's expert, chance, or a trained policy."""

from __future__ import annotations

from collections.abc import Sequence
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
    """How many updates shaped the policy that acts; -1 where there is none."""

    def act(self, observation: TensorDict) -> Tensor:
        """Return the actions ``[num_envs, ...]`` for the present observation."""

    def ended(self, env_ids: list[int]) -> None:
        """Take note that the episodes of these envs ended."""


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

    def ended(self, env_ids: list[int]) -> None:
        """Do nothing: the expert looks at the state alone."""


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

    def ended(self, env_ids: list[int]) -> None:
        """Do nothing: chance has no memory."""


class PolicyActor:
    """A trained policy, from a checkpoint."""

    def __init__(self, env: VecEnv, path: str, deterministic: bool, trusted_modules: Sequence[str]) -> None:
        # Here, because only this actor needs the reinforcement-learning half.
        from embodichain.agents.rl.utils.checkpoint import load_policy
        from embodichain.agents.rl.utils.evaluation import PolicyActor as Acting

        policy = load_policy(path, env, device=env.device, trusted_modules=trusted_modules)
        if policy.chunk_size != 1:
            raise ConfigError(f"path: {path} chooses {policy.chunk_size} actions at once, expected 1", "action_config")
        self.version = int(policy.version)
        self._acting = Acting(policy, env, deterministic)

    @torch.no_grad()
    def act(self, observation: TensorDict) -> Tensor:
        """Return what the policy does, remembering what it saw if it has a memory."""
        return self._acting(observation)

    def ended(self, env_ids: list[int]) -> None:
        """Clear the policy's memory of these envs."""
        self._acting.forget(env_ids)


def make_actor(cfg: ActionSourceCfg, env: VecEnv, seed: int, trusted_modules: Sequence[str] = ()) -> Actor:
    """Return the actor that the config names."""
    if cfg.source == "expert":
        return ExpertActor(env)
    if cfg.source == "policy":
        torch.manual_seed(seed)  # policies draw from torch's own generator
        return PolicyActor(env, str(cfg.path), cfg.deterministic, trusted_modules)
    return RandomActor(env, torch.Generator().manual_seed(seed))
