"""Action chunks: one decision is several actions, taken one after the other without looking.

``ChunkedEnv`` makes an environment of decisions out of one of actions. A step of it takes ``[num_envs, chunk_size,
action_dim]`` and observes once, at the end. An env that ends inside a chunk takes no further action: it keeps the
reward of its last step and ``final_observation`` is what it saw there, and its next episode begins with the next chunk.

``info["chunk"]`` says what the decision came to: ``num_actions`` (int64 ``[num_envs]``, actions really taken) and
``chunk_reward`` (``[num_envs, chunk_size]``, the reward of each, zero for those not taken). ``reward`` is their plain
sum; whoever learns discounts inside the chunk by its own factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.vec_env import Action, EnvIds, StepResult, VecEnv
from embodichain.errors import ActionError, ChunkSizeError


@dataclass(frozen=True)
class Moment:
    """What one step came to, before anything is observed or restarted; each part is ``[num_envs]``."""

    parts: dict[str, Tensor]
    """Named parts of the reward."""
    reward: Tensor
    """Their sum."""
    terminated: Tensor
    """Where the task ended."""
    truncated: Tensor
    """Where time ran out."""
    metrics: dict[str, Tensor]
    """Measures of the state reached."""


class ChunkTally:
    """Adds up the steps of one chunk; an env that has ended stays as it was at its end."""

    def __init__(self, num_envs: int, chunk_size: int, device: torch.device) -> None:
        self.active = torch.ones(num_envs, dtype=torch.bool, device=device)
        """Envs that have not ended in this chunk, ``[num_envs]``."""
        self.num_actions = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.rewards = torch.zeros(num_envs, chunk_size, device=device)
        self.terminated = torch.zeros_like(self.active)
        self.truncated = torch.zeros_like(self.active)
        self._parts: dict[str, Tensor] = {}
        self._metrics: dict[str, Tensor] = {}
        self._step = 0

    def add(self, moment: Moment) -> Tensor:
        """Take in one step and return which envs ended with it, ``[num_envs]``."""
        active = self.active
        self.rewards[:, self._step] = torch.where(active, moment.reward, 0.0)
        self._step += 1
        self.num_actions += active
        for name, part in moment.parts.items():
            taken = torch.where(active, part, 0.0)
            self._parts[name] = self._parts[name] + taken if name in self._parts else taken
        for name, metric in moment.metrics.items():
            self._metrics[name] = torch.where(active, metric, self._metrics[name]) if name in self._metrics else metric
        self.terminated |= moment.terminated & active
        self.truncated |= moment.truncated & active
        ended = active & (moment.terminated | moment.truncated)
        self.active = active & ~ended
        return ended

    def result(self, obs: TensorDict, final: TensorDict, episode_seed: Tensor) -> StepResult:
        """Return the chunk as one step, for the observations after it and at the envs' ends."""
        info = {
            "final_observation": final,
            "rewards": self._parts,
            "metrics": self._metrics,
            "episode_seed": episode_seed,
            "chunk": {"num_actions": self.num_actions, "chunk_reward": self.rewards},
        }
        return obs, self.rewards.sum(1), self.terminated, self.truncated, info


@runtime_checkable
class StepsChunks(Protocol):
    """An environment that can take several actions and observe once, which saves drawing what nobody sees."""

    def step_chunk(self, actions: Tensor) -> StepResult:
        """Take actions ``[num_envs, chunk_size, action_dim]``; see the module's docstring for what is returned."""


class ChunkedEnv(VecEnv):
    """An environment whose actions are chunks ``[num_envs, chunk_size, action_dim]`` of another's."""

    def __init__(self, env: VecEnv, chunk_size: int) -> None:
        if not isinstance(env.action_space, gym.spaces.Box) or len(env.action_space.shape) != 1:
            raise ChunkSizeError(f"chunks are made of actions [action_dim], got the action space {env.action_space}")
        if chunk_size < 1 or chunk_size > env.max_episode_steps:
            raise ChunkSizeError(
                f"chunk_size must lie in [1, {env.max_episode_steps}], the longest episode there is, got {chunk_size}"
            )
        self.env, self.chunk_size = env, chunk_size
        self.num_envs, self.device = env.num_envs, env.device
        self.max_episode_steps = -(-env.max_episode_steps // chunk_size)
        self.observation_space = env.observation_space
        low, high = (np.tile(bound, (chunk_size, 1)) for bound in (env.action_space.low, env.action_space.high))
        self.action_space = gym.spaces.Box(low, high, dtype=np.float32)
        self.action_manager = env.action_manager
        self.supports_state = env.supports_state

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        return self.env.reset(seed, env_ids)

    def step(self, action: Action) -> StepResult:
        actions = self._checked(action)
        if isinstance(self.env, StepsChunks):
            return self.env.step_chunk(actions)
        return step_one_by_one(self.env, actions)

    def get_state(self) -> TensorDict:
        return self.env.get_state()

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        return self.env.set_state(state, env_ids)

    def render(
        self, env_ids: EnvIds = None, camera: str | None = None, size: tuple[int, int] = (240, 320)
    ) -> np.ndarray:
        return self.env.render(env_ids, camera, size)

    def prepare(self) -> None:
        self.env.prepare()

    def close(self) -> None:
        self.env.close()

    def _checked(self, action: Action) -> Tensor:
        """Look at the whole chunk before the first of its actions is taken."""
        name = self.action_manager.action_type
        if isinstance(action, (Mapping, TensorDictBase)):
            keys = [str(key) for key in action.keys()]  # noqa: SIM118 - a TensorDict iterates over its rows
            if keys != [name]:
                raise ActionError(f"an action dict has the one key {name!r}, got {keys}")
            action = action[name]
        expected = [self.num_envs, *(self.action_space.shape or ())]
        actions = torch.as_tensor(action)
        if list(actions.shape) != expected:
            raise ActionError(f"a chunk of {name!r} must have shape {expected}, envs first, got {list(actions.shape)}")
        actions = actions.detach().to(self.device, torch.float32)
        if actions.device.type == "cpu" and not bool(torch.isfinite(actions).all()):
            env = int(torch.nonzero(~torch.isfinite(actions))[0, 0])
            raise ActionError(f"the chunk of env {env} is not finite: {actions[env].tolist()}; nothing was simulated")
        return actions


def step_one_by_one(env: VecEnv, actions: Tensor) -> StepResult:
    """Take a chunk of actions in an environment that knows steps alone.

    It resets itself as soon as an episode ends, so the actions left over reach the next episode; that one is started
    again from its seed when the chunk is over.
    """
    tally = ChunkTally(env.num_envs, actions.shape[1], env.device)
    ends: list[tuple[Tensor, TensorDict, Tensor]] = []
    for action in actions.unbind(1):
        obs, reward, terminated, truncated, info = env.step(action)
        ended = tally.add(Moment(info["rewards"], reward, terminated, truncated, info["metrics"]))
        ids = torch.nonzero(ended).reshape(-1)
        if ids.numel():
            ends.append((ids, info["final_observation"][ids], info["episode_seed"][ids]))
        if not bool(tally.active.any()):
            break
    final = obs
    if ends:
        ids, seeds = torch.cat([end[0] for end in ends]), torch.cat([end[2] for end in ends])
        final = replace_rows(obs, torch.cat([end[1] for end in ends]), ids)
        obs, info = env.reset(seed=seeds, env_ids=ids)
    return tally.result(obs, final, info["episode_seed"])


def replace_rows(obs: TensorDict, rows: TensorDict, ids: Tensor) -> TensorDict:
    """Return an observation that is ``rows`` at ``ids`` and ``obs`` elsewhere."""
    replaced = obs.clone()
    replaced[ids] = rows
    return replaced


def chunked(env: VecEnv, chunk_size: int) -> VecEnv:
    """Return the environment for decisions of so many actions: itself for one, or if it is chunked so already."""
    present = env.chunk_size if isinstance(env, ChunkedEnv) else 1
    if present == chunk_size:
        return env
    if present != 1:
        raise ChunkSizeError(f"the environment takes chunks of {present} actions, the policy chooses {chunk_size}")
    return ChunkedEnv(env, chunk_size)
