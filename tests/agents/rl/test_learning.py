"""Short trainings that must reach a return: discrete actions, and a task that only a policy with memory solves."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models import Policy
from embodichain.agents.rl.utils import torch_threads
from embodichain.envs.gymnasium_env import make_gymnasium
from embodichain.envs.vec_env import EnvIds, StepResult, VecEnv
from tests.agents.rl.helpers import box, make_policy, network


class Recall(VecEnv):
    """A cue, +1 or -1, is shown once; four steps later the action must name it. Reward 1 if it does."""

    length = 5

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.device, self.max_episode_steps = num_envs, torch.device("cpu"), self.length
        self.observation_space = gym.spaces.Dict({"cue": box(1), "answer": box(1)})
        self.action_space = gym.spaces.Discrete(2)
        self.cue, self.count = torch.zeros(num_envs), torch.zeros(num_envs, dtype=torch.int64)

    def observe(self) -> TensorDict:
        cue = torch.where(self.count == 0, self.cue, 0.0)
        parts = {"cue": cue.unsqueeze(-1), "answer": (self.count == self.length - 1).float().unsqueeze(-1)}
        return TensorDict(parts, [self.num_envs])

    def reset(self, seed: Any = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        self.cue = torch.randint(0, 2, (self.num_envs,)) * 2.0 - 1.0
        self.count = torch.zeros_like(self.count)
        return self.observe(), {}

    def step(self, action: Any) -> StepResult:
        answered = self.count == self.length - 1
        reward = (answered & (action * 2 - 1 == self.cue)).float()
        self.count = self.count + 1
        final = self.observe()
        if answered.any():  # all envs run in step
            self.reset()
        return self.observe(), reward, answered, torch.zeros_like(answered), {"final_observation": final}


def train(env: VecEnv, policy: Policy, cfg: PPOCfg, num_steps: int, iterations: int, enough: float) -> float:
    """Return the mean return of the best rollout; stop as soon as it is enough."""
    collector, algorithm = SyncCollector(env, policy), PPO(cfg, policy)
    best = -float("inf")
    with torch_threads(1):
        for _ in range(iterations):
            algorithm.update(collector.collect(num_steps))
            if len(collector.episodes):
                best = max(best, float(collector.episodes["return"].mean()))
            if best >= enough:
                break
    return best


def test_ppo_learns_cart_pole_with_discrete_actions() -> None:
    torch.manual_seed(0)
    env = make_gymnasium("CartPole-v1", num_envs=16)
    env.reset(seed=0)
    policy = make_policy(env, actor=network((64, 64)), critic=network((64, 64)), normalize_value=True)
    cfg = PPOCfg(n_epochs=8, batch_size=256, learning_rate=3e-3, gamma=0.98, gae_lambda=0.9)
    assert train(env, policy, cfg, num_steps=64, iterations=60, enough=195.0) >= 195.0
    env.close()


@pytest.mark.parametrize("memory", ["gru", "lstm", None])
def test_only_memory_solves_a_memory_task(memory: str | None) -> None:
    torch.manual_seed(0)
    env = Recall(64)
    policy = make_policy(env, memory={"type": memory, "hidden_size": 24} if memory else None)
    cfg = PPOCfg(n_epochs=4, batch_size=320, learning_rate=5e-3, ent_coef=0.01, sequence_length=10 if memory else None)
    best = train(env, policy, cfg, num_steps=10, iterations=60, enough=0.97)
    assert (best >= 0.97) if memory else (best < 0.75)  # by chance: 0.5
