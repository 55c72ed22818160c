"""A whole training on a GPU: nothing but ``device`` in the config is different, and it goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embodichain.agents.rl.config import TrainCfg
from embodichain.agents.rl.train import resume_training, train_from_config
from tests.gpu.gpu import simulates

pytestmark = simulates


def config(folder: Path, algorithm: dict[str, Any], policy: str) -> TrainCfg:
    return TrainCfg.from_dict(
        {
            "trainer": {
                "device": "cuda",
                "gym_config": {"id": "PushCubeRL", "device": "cuda", "max_episode_steps": 10},
                "num_envs": 64,
                "buffer_size": 12,
                "iterations": 3,
                "num_eval_episodes": 32,
                "eval_video": False,
                "run_dir": str(folder),
            },
            "policy": {"name": policy, "normalize_obs": True},
            "algorithm": algorithm,
        }
    )


@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [
        ({"name": "ppo", "cfg": {"batch_size": 192, "lr_schedule": "adaptive"}}, "actor_critic"),
        ({"name": "grpo", "cfg": {"batch_size": 192, "group_size": 8}}, "actor_only"),
    ],
    ids=["ppo", "grpo"],
)
def test_training_and_resuming(tmp_path: Path, algorithm: dict[str, Any], policy: str) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run"
    result = train_from_config(config(folder, algorithm, policy))
    assert (result.iteration, result.global_step) == (3, 3 * 64 * 12)
    assert result.evaluation is not None
    again = resume_training(folder, ["--trainer.iterations", "5"])
    assert (again.iteration, again.global_step) == (5, 5 * 64 * 12)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["update/policy_loss"] for line in lines if "update/policy_loss" in line]
    assert len(losses) == 5
