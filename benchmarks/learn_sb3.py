"""Stable-Baselines3's PPO with the hyperparameters of one of our configs, evaluated as ours is."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from embodichain.config import load_config

_ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "elu": torch.nn.ELU}


class Evaluations(BaseCallback):
    """Evaluates the most likely actions on crossing multiples of a number of steps, in envs of its own."""

    def __init__(self, env: VecEnv, frequency: int, episodes: int, seed: int, log: tuple[Path, str]) -> None:
        """Prepare; ``log`` is the file that gets a line for each evaluation, and what its mean return is called."""
        super().__init__()
        self.env, self.frequency, self.episodes, self.seed, self.log = env, frequency, episodes, seed, log
        self.next = frequency
        self.evaluated_at = 0
        self.began = time.perf_counter()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:  # the policy has just been updated
        if self.num_timesteps >= self.next:
            self.next = (self.num_timesteps // self.frequency + 1) * self.frequency
            self.evaluate()

    def evaluate(self) -> None:
        """Run the episodes, the same ones every time, as many envs at a time as there are."""
        self.env.seed(self.seed)
        obs, running = self.env.reset(), np.zeros(self.env.num_envs)
        ended: list[float] = []
        quota = [self.episodes // self.env.num_envs] * self.env.num_envs
        while len(ended) < sum(quota):
            normalized = self.training_env.normalize_obs(obs)  # type: ignore[attr-defined]
            action, _ = self.model.predict(normalized, deterministic=True)
            obs, reward, done, _ = self.env.step(action)
            running += reward
            for env in np.flatnonzero(done):
                if quota[env]:
                    quota[env] -= 1
                    ended.append(float(running[env]))
                running[env] = 0.0
        self.evaluated_at = self.num_timesteps
        line = {"step": self.num_timesteps, self.log[1]: float(np.mean(ended))}
        line["time/total_seconds"] = time.perf_counter() - self.began
        with self.log[0].open("a") as file:
            file.write(json.dumps(line) + "\n")


def run_peer(config: Path, seed: int, steps: int | None, log: Path, measure: str) -> None:
    """Train, and write the evaluations to ``log`` under the name ``measure``."""
    data: dict[str, Any] = load_config(config)
    trainer, policy, algorithm = data["trainer"], data["policy"], data["algorithm"]["cfg"]
    network = policy["actor"]["network_cfg"]
    id, total = trainer["gym_config"]["id"], steps or trainer["total_steps"]
    env: Any = DummyVecEnv([lambda: gym.make(id)] * trainer["num_envs"])
    env = VecNormalize(env, norm_obs=policy["normalize_obs"], norm_reward=False)
    log.parent.mkdir(parents=True, exist_ok=True)
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
    envs = DummyVecEnv([lambda: gym.make(id)] * trainer["num_eval_envs"])
    watcher = Evaluations(envs, trainer["eval_freq"], trainer["num_eval_episodes"], 10_000, (log, measure))
    model.learn(math.ceil(total / rollout) * rollout, callback=watcher)
    if watcher.evaluated_at != watcher.num_timesteps:
        watcher.evaluate()
    env.close()
    envs.close()
