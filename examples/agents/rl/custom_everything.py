"""A custom policy, algorithm and environment in one file. Run it as a script, or:
embodichain train examples/agents/rl/custom_everything.json --trust custom_everything
"""

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.algo import BaseAlgorithm, compute_gae, register_algo
from embodichain.agents.rl.models import Policy, register_policy
from embodichain.agents.rl.train import train_from_config
from embodichain.agents.rl.utils import AlgorithmCfg, flatten_dict_observation


class PointMass(gym.Env):
    """Push a point on a line to the origin; any Gymnasium environment works like this."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.state = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)
        return self.state.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        velocity = 0.9 * self.state[1] + 0.1 * float(action[0])
        self.state = np.array([self.state[0] + 0.1 * velocity, velocity], np.float32)
        return self.state.copy(), -float(self.state @ self.state), False, False, {}


gym.register("PointMass-v0", entry_point=PointMass, max_episode_steps=60)


class LinearPolicy(Policy):
    """Gaussian policy with a linear mean and a linear value; a policy implements three methods."""

    def __init__(self, obs_space: gym.Space, action_space: gym.Space, device: torch.device, std: float = 0.5) -> None:
        super().__init__()
        size = gym.spaces.flatdim(obs_space)
        self.mean, self.value = nn.Linear(size, action_space.shape[0]), nn.Linear(size, 1)
        self.std, self.device = std, device
        self.to(device)

    def get_action(self, obs: Any, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.mean(flatten_dict_observation(obs))
        action = mean if deterministic else torch.normal(mean, self.std)
        return action, self._log_prob(mean, action), self.get_value(obs)

    def get_value(self, obs: Any) -> Tensor:
        return self.value(flatten_dict_observation(obs)).squeeze(-1)

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_prob = self._log_prob(self.mean(flatten_dict_observation(obs)), actions)
        return log_prob, torch.zeros_like(log_prob), self.get_value(obs)

    def _log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        return -((action - mean) / self.std).square().sum(-1) / 2  # up to a constant


class A2C(BaseAlgorithm):
    """Advantage actor-critic with one gradient step per rollout; an algorithm implements ``update``."""

    def __init__(self, cfg: AlgorithmCfg, policy: Policy) -> None:
        super().__init__(cfg, policy)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.learning_rate)

    def update(self, rollout: TensorDictBase | None = None) -> dict[str, float]:
        keys = ("reward", "value", "next_value", "terminated", "done")
        rollout = self._take(rollout, keys)  # validates the shape [num_envs, num_steps]
        advantage, returns = compute_gae(*(rollout[key] for key in keys), self.cfg.gamma, self.cfg.gae_lambda)
        log_prob, _, value = self.policy.evaluate(rollout.reshape(-1))
        scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = -(log_prob * scaled.reshape(-1)).mean()
        value_loss = (value - returns.reshape(-1)).square().mean()
        self.optimizer.zero_grad()
        (policy_loss + value_loss).backward()
        self.optimizer.step()
        self._finish_update(rollout)
        return {"policy_loss": policy_loss.item(), "value_loss": value_loss.item()}

    def state_dict(self) -> dict[str, Any]:  # saved in checkpoints
        return super().state_dict() | {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["optimizer"])


register_policy("linear", LinearPolicy)
register_algo("a2c", A2C)
if __name__ == "__main__":
    sys.modules["custom_everything"] = sys.modules["__main__"]  # the module named in the config
    print(train_from_config(__file__.replace(".py", ".json"), sys.argv[1:], ["custom_everything"]).evaluation)
