"""Episodes from a simulation: step all envs, and hand out each episode when it ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodichain.agents.engine.actors import Actor
from embodichain.agents.engine.episode import Episode
from embodichain.agents.engine.layout import FrameLayout, Key, flatten
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import EnvContractError


class SimulatedEpisodes:
    """Steps a ``VecEnv`` and keeps the last ``max_episode_steps`` frames of every env.

    The frames are kept time-major, ``[max_steps, num_envs, ...]``, as a ring: one step is one contiguous write per key,
    and an episode of env ``i`` is column ``i`` from its first step to now, in one piece or, across the end of the ring,
    in two.
    """

    def __init__(self, env: VecEnv, actor: Actor, seed: int, noise_std: float = 0.0) -> None:
        self.env = env
        self.actor = actor
        self.max_steps = env.max_episode_steps
        self._noise_std = noise_std
        self._generator = torch.Generator().manual_seed(seed)
        self._observation, info = env.reset(seed=seed)
        self._seeds = _episode_seeds(info, env.num_envs)
        self.layout = FrameLayout.of_step(self._observation, actor.act(self._observation))
        self._ring: dict[Key, Tensor] = {
            leaf.key: torch.empty((self.max_steps, env.num_envs, *leaf.shape), dtype=leaf.dtype)
            for leaf in self.layout.leaves
        }
        self._begin = [0] * env.num_envs
        self._step = 0

    def advance(self) -> list[Episode]:
        """Take one step in every env and return the episodes that ended, valid until the next step."""
        at, env = self._step % self.max_steps, self.env
        action = self.actor.act(self._observation)
        for key, value in flatten(self._observation).items():
            self._ring[("observation", *key)][at] = value
        self._ring[("action",)][at] = action
        self._observation, reward, terminated, truncated, info = env.step(self._disturbed(action))
        self._ring[("reward",)][at] = reward
        self._ring[("terminated",)][at] = terminated
        self._ring[("truncated",)][at] = truncated
        self._step += 1
        ended = torch.nonzero(terminated | truncated).reshape(-1).tolist()
        return self._collect(ended, info) if ended else []

    def _disturbed(self, action: Tensor) -> Tensor:
        if not self._noise_std or not action.is_floating_point():
            return action
        noise = torch.randn(action.shape, generator=self._generator).to(action.device)
        return (action + self._noise_std * noise).clamp(-1, 1)

    def _collect(self, ended: list[int], info: dict[str, Any]) -> list[Episode]:
        """Cut the episodes of these envs out of the ring, and note where their next ones begin."""
        success = info.get("metrics", {}).get("success")
        solved = None if success is None else (success > 0.5).tolist()
        next_seeds = _episode_seeds(info, self.env.num_envs)
        episodes = []
        for index in ended:
            length = self._step - self._begin[index]
            if length > self.max_steps:
                raise EnvContractError(
                    f"env {index} ran {length} steps without ending, but max_episode_steps is {self.max_steps}"
                )
            frames = {key: self._column(ring, index, length) for key, ring in self._ring.items()}
            known = None if solved is None else bool(solved[index])
            episodes.append(Episode(frames, length, self._seeds[index], known, self.actor.version))
            self._begin[index] = self._step
            self._seeds[index] = next_seeds[index]
        self.actor.ended(ended)
        return episodes

    def _column(self, ring: Tensor, env: int, length: int) -> tuple[Tensor, ...]:
        first, column = self._begin[env] % self.max_steps, ring.select(1, env)
        if first + length <= self.max_steps:
            return (column.narrow(0, first, length),)
        return column[first:], column[: first + length - self.max_steps]

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def _episode_seeds(info: dict[str, Any], num_envs: int) -> list[int]:
    """Return the seed of the episode each env is in; -1 where the environment does not tell."""
    seeds = info.get("episode_seed")
    return [-1] * num_envs if seeds is None else [int(seed) for seed in seeds.tolist()]
