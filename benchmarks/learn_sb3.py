"""Stable-Baselines3's PPO with the hyperparameters of one of our configs, evaluated as ours is."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from embodichain.config import load_config

_ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "elu": torch.nn.ELU}


class Evaluations(BaseCallback):
    """Evaluates the most likely actions on crossing multiples of a number of steps, in envs of its own."""

    def __init__(self, id: str, frequency: int, episodes: int, seed: int) -> None:
        super().__init__()
        self.env, self.frequency, self.episodes, self.seed = gym.make(id), frequency, episodes, seed
        self.next = frequency
        self.began = time.perf_counter()
        self.steps: list[int] = []
        self.seconds: list[float] = []
        self.returns: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:  # the policy has just been updated
        if self.num_timesteps >= self.next:
            self.next = (self.num_timesteps // self.frequency + 1) * self.frequency
            self.evaluate()

    def evaluate(self) -> None:
        """Run the episodes; the same ones every time."""
        totals = []
        for episode in range(self.episodes):
            obs, _ = self.env.reset(seed=self.seed + episode)
            total, done = 0.0, False
            while not done:
                normalized = self.training_env.normalize_obs(obs)  # type: ignore[union-attr]
                action, _ = self.model.predict(normalized, deterministic=True)
                obs, reward, terminated, truncated, _ = self.env.step(action)
                total += float(reward)
                done = terminated or truncated
            totals.append(total)
        self.steps.append(self.num_timesteps)
        self.seconds.append(time.perf_counter() - self.began)
        self.returns.append(float(np.mean(totals)))


def run_peer(root: Path, config: str, seed: int, steps: int | None) -> tuple[list[int], list[float], list[float]]:
    """Train and return ``(steps, seconds, mean returns)`` of the evaluations."""
    data: dict[str, Any] = load_config(root / "configs" / "agents" / "rl" / config)
    trainer, policy, algorithm = data["trainer"], data["policy"], data["algorithm"]["cfg"]
    network = policy["actor"]["network_cfg"]
    id, total = trainer["gym_config"]["id"], steps or trainer["total_steps"]
    env: Any = DummyVecEnv([lambda: gym.make(id)] * trainer["num_envs"])
    env = VecNormalize(env, norm_obs=policy["normalize_obs"], norm_reward=False)
    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=trainer["buffer_size"],
        batch_size=algorithm["batch_size"],
        n_epochs=algorithm["n_epochs"],
        learning_rate=algorithm["learning_rate"],
        gamma=algorithm["gamma"],
        gae_lambda=algorithm["gae_lambda"],
        clip_range=algorithm["clip_coef"],
        ent_coef=algorithm["ent_coef"],
        vf_coef=algorithm["vf_coef"],
        max_grad_norm=algorithm["max_grad_norm"],
        policy_kwargs={
            "net_arch": network["hidden_sizes"],
            "activation_fn": _ACTIVATIONS[network["activation"]],
            "log_std_init": policy["distribution"]["init_log_std"],
        },
        seed=seed,
        device="cpu",
    )
    rollout = trainer["num_envs"] * trainer["buffer_size"]
    watcher = Evaluations(id, trainer["eval_freq"], trainer["num_eval_episodes"], seed=10_000)
    model.learn(math.ceil(total / rollout) * rollout, callback=watcher)
    if not watcher.steps or watcher.steps[-1] != watcher.num_timesteps:
        watcher.evaluate()
    env.close()
    return watcher.steps, watcher.seconds, watcher.returns
