"""Algorithms learn: each run is a few seconds long and must reach a return that chance does not."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from embodichain.agents.rl.checkpoint import load_policy
from embodichain.agents.rl.config import TrainCfg
from embodichain.agents.rl.evaluation import evaluate
from embodichain.agents.rl.train import train_from_config
from embodichain.envs.registration import make

RECALL_STEPS = 5


class Recall(gym.Env):
    """Shows +1 or -1 once; four steps later the same sign has to be named. The reward is 1 if it is."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        self.cue, self.time = int(self.np_random.integers(2)), 0
        return np.array([2.0 * self.cue - 1.0, 0.0], np.float32), {}

    def step(self, action):
        self.time += 1
        over = self.time == RECALL_STEPS
        correct = over and int(action) == self.cue
        return np.array([0.0, self.time / RECALL_STEPS], np.float32), float(correct), over, False, {}


gym.register("TestRecall-v0", entry_point=Recall, max_episode_steps=RECALL_STEPS + 1)


def learn(tmp_path, environment, steps, policy=None, algorithm=None, **trainer):
    """Train with settings that suit small tasks; return the mean returns of the first and of the last policy."""
    network = {"type": "mlp", "hidden_sizes": [64, 64], "activation": "tanh"}
    networks = (
        {"actor": network} if (policy or {}).get("name") == "actor_only" else {"actor": network, "critic": network}
    )
    data = {
        "trainer": {
            "gym_config": environment,
            "num_envs": 32,
            "buffer_size": 64,
            "total_steps": steps,
            "eval_freq": 10_000,
            "save_freq": 0,
            "keep_checkpoints": 99,
            "num_eval_episodes": 32,
            "eval_video": False,
            "run_dir": str(tmp_path / "run"),
            **trainer,
        },
        "policy": {"name": "actor_critic", **networks, **(policy or {})},
        "algorithm": {"name": "ppo", **(algorithm or {})},
    }
    result = train_from_config(TrainCfg.from_dict(data))
    untrained = load_policy(tmp_path / "run" / "checkpoints" / f"step_{0:012d}")
    with make(environment, num_envs=32) as env:
        before = evaluate(untrained, env, 32, seed=0).summary
    return before.mean_return, result.evaluation.summary.mean_return


def ppo(**changes) -> dict[str, Any]:
    settings = {"learning_rate": 1e-3, "batch_size": 512, "n_epochs": 5, "lr_schedule": "adaptive", **changes}
    return {"name": "ppo", "cfg": settings}


def test_ppo_balances_the_pole(tmp_path):
    environment = {"id": "CartPoleRL", "max_episode_steps": 200, "num_threads": 1}
    before, after = learn(
        tmp_path,
        environment,
        steps=80_000,
        policy={"normalize_obs": True, "distribution": {"init_log_std": -0.5}},
        algorithm=ppo(),
        target_return=190.0,
    )
    assert before < 100.0 < 190.0 <= after  # of 200


def test_grpo_balances_the_pole(tmp_path):
    environment = {"id": "CartPoleRL", "max_episode_steps": 100, "num_threads": 1}
    before, after = learn(
        tmp_path,
        environment,
        steps=160_000,
        policy={"name": "actor_only", "normalize_obs": True, "distribution": {"init_log_std": -0.5}},
        algorithm={
            "name": "grpo",
            "cfg": {"learning_rate": 2e-3, "batch_size": 512, "n_epochs": 5, "group_size": 8, "gamma": 0.97},
        },
        num_envs=64,
        buffer_size=100,
        target_return=95.0,
    )
    assert before < 50.0 < 95.0 <= after  # of 100


def test_ppo_learns_discrete_actions_of_gymnasium(tmp_path):
    before, after = learn(
        tmp_path,
        {"id": "CartPole-v1", "max_episode_steps": 200},
        steps=100_000,
        algorithm=ppo(),
        target_return=190.0,
    )
    assert before < 100.0 < 190.0 <= after  # of 200


@pytest.mark.parametrize(("memory", "low", "high"), [({"hidden_size": 16}, 0.95, 1.0), (None, 0.0, 0.75)])
def test_only_memory_recalls_what_is_gone(tmp_path, memory, low, high):
    """Without memory the sign can only be guessed: half of the answers are right."""
    policy = {"actor": {"hidden_sizes": [16]}, "critic": {"hidden_sizes": [16]}, "memory": memory}
    before, after = learn(
        tmp_path,
        {"id": "TestRecall-v0"},
        steps=40_000,
        policy=policy,
        algorithm=ppo(learning_rate=3e-3, sequence_length=None, ent_coef=0.01, lr_schedule="constant"),
        num_envs=64,
        buffer_size=RECALL_STEPS * 2,
        num_eval_episodes=128,
        target_return=1.0,
    )
    assert before < 0.75
    assert low <= after <= high
