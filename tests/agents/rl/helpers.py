"""A small environment whose every number is known beforehand, and policies for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.rl.models import Policy, build_policy
from embodichain.envs.vec_env import EnvIds, StepResult, VecEnv


def box(*shape: int, dtype: type = np.float32) -> gym.spaces.Box:
    low, high = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
    return gym.spaces.Box(low, high, shape, dtype)


class ScriptedEnv(VecEnv):
    """``pos += action`` and ``reward = pos``; env ``i`` terminates after ``ends[i]`` steps or is cut after ``limit``.

    ``robot/qpos`` is ``[pos, env]``, ``object/step`` the step inside the episode, ``object/episode`` its number.
    Episodes begin at a random position, given by their seed.
    """

    def __init__(self, num_envs: int = 3, ends: Sequence[int] | int = 10**6, limit: int = 10**6, seed: int = 0) -> None:
        self.num_envs, self.device, self.max_episode_steps = num_envs, torch.device("cpu"), limit
        self.ends = torch.tensor([ends] * num_envs if isinstance(ends, int) else list(ends))
        robot = gym.spaces.Dict({"qpos": box(2)})
        self.observation_space = gym.spaces.Dict(
            {"robot": robot, "object": gym.spaces.Dict({"step": box(1), "episode": box()})}
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.random = torch.Generator().manual_seed(seed)
        self.pos, self.count, self.episode = torch.zeros(num_envs), torch.zeros(num_envs), torch.zeros(num_envs)
        self.seeds = torch.zeros(num_envs, dtype=torch.int64)
        self.resets = 0

    def observe(self) -> TensorDict:
        n = self.num_envs
        robot = TensorDict({"qpos": torch.stack([self.pos, torch.arange(n).float()], -1)}, [n])
        things = TensorDict({"step": self.count.clone().unsqueeze(-1), "episode": self.episode.clone()}, [n])
        return TensorDict({"robot": robot, "object": things}, [n])

    def start(self, ids: Tensor, seeds: Tensor | None = None) -> None:
        drawn = torch.randint(0, 1000, (len(ids),), generator=self.random) if seeds is None else seeds
        self.seeds = self.seeds.index_copy(0, ids, drawn)
        self.pos = self.pos.index_copy(0, ids, (drawn % 7).float() / 10)
        self.count = self.count.index_fill(0, ids, 0.0)

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        ids = self.resolve_ids(env_ids)
        self.resets += 1
        if isinstance(seed, int):
            self.random.manual_seed(seed)
        self.start(ids, seed if isinstance(seed, Tensor) else None)
        return self.observe(), {"episode_seed": self.seeds}

    def step(self, action: Any) -> StepResult:
        assert action.abs().max() <= 1.0
        self.pos = self.pos + action[:, 0]
        self.count = self.count + 1
        reward = self.pos.clone()
        terminated, truncated = self.count >= self.ends, self.count >= self.max_episode_steps
        done = terminated | truncated
        final = self.observe()
        if done.any():
            self.episode = self.episode + done
            self.start(done.nonzero().squeeze(-1))
        info: dict[str, Any] = {
            "final_observation": final,
            "rewards": {"pos": reward},
            "metrics": {"success": terminated},
            "episode_seed": self.seeds,
        }
        return (self.observe() if done.any() else final), reward, terminated, truncated, info

    def get_state(self) -> TensorDict:
        noise = self.random.get_state().expand(self.num_envs, -1).clone()
        parts = {"pos": self.pos, "count": self.count, "episode": self.episode, "seeds": self.seeds, "random": noise}
        return TensorDict({k: v.clone() for k, v in parts.items()}, [self.num_envs])

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        ids = self.resolve_ids(env_ids)
        for name in ("pos", "count", "episode", "seeds"):
            setattr(self, name, getattr(self, name).index_copy(0, ids, state[name]))
        self.random.set_state(state["random"][0].clone())
        return self.observe()


class LinearPolicy(Policy):
    """``value = pos + 100 * step``, ``action = 0.5`` (or noise); written as an author would, on tensors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def get_action(self, obs, deterministic=False):
        value = self.get_value(obs)
        return torch.full((len(value), 1), 0.5), torch.full_like(value, -0.25), value

    def get_value(self, obs):
        return obs["robot", "qpos"][:, 0] + 100.0 * obs["object", "step"][:, 0]

    def evaluate_actions(self, obs, actions):
        value = self.get_value(obs)
        return self.weight.expand_as(value) * 0.0, torch.zeros_like(value), value * self.weight


def network(sizes: Sequence[int] = (16, 16), activation: str = "tanh") -> dict[str, Any]:
    return {"type": "mlp", "network_cfg": {"hidden_sizes": list(sizes), "activation": activation}}


def make_policy(env: VecEnv, name: str = "actor_critic", **settings: Any) -> Policy:
    block: dict[str, Any] = {"name": name, "actor": network(), **settings}
    if name == "actor_critic":
        block.setdefault("critic", network())
    return build_policy(block, env.observation_space, env.action_space, "cpu")
