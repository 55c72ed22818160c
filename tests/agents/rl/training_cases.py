"""Small runs for the tests of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodichain.config import merge

PPO: dict[str, Any] = {"name": "ppo", "cfg": {"batch_size": 64, "n_epochs": 2, "learning_rate": 1e-3}}
GRPO: dict[str, Any] = {"name": "grpo", "cfg": {"batch_size": 64, "n_epochs": 2, "group_size": 4, "kl_coef": 0.01}}
SMALL = {"type": "mlp", "hidden_sizes": [16], "activation": "tanh"}


def train_config(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return a config of a run that takes a second; ``changes`` are laid over it."""
    base = {
        "trainer": {
            "exp_name": "test",
            "gym_config": {"id": "CartPoleRL", "max_episode_steps": 20, "num_threads": 1},
            "num_envs": 8,
            "buffer_size": 16,
            "iterations": 4,
            "eval_freq": 256,
            "save_freq": 128,
            "num_eval_episodes": 4,
            "eval_video": False,
            "run_dir": str(run_dir),
        },
        "policy": {"name": "actor_critic", "actor": SMALL, "critic": SMALL, "normalize_obs": True},
        "algorithm": PPO,
    }
    return merge(base, changes)


def write_config(path: Path, run_dir: Path, **changes: Any) -> Path:
    """Write such a config to a file."""
    path.write_text(json.dumps(train_config(run_dir, **changes)))
    return path
