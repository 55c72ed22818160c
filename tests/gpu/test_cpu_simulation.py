"""A policy on a GPU with simulation on the CPU: rollouts move between the two, in every way of collecting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodichain.agents.rl.config import TrainCfg
from embodichain.agents.rl.runs import read_metrics
from embodichain.agents.rl.train import train_from_config
from tests.gpu.gpu import on_gpu

pytestmark = on_gpu
PPO = {"name": "ppo", "cfg": {"batch_size": 96}}
ASYNC = {"collector": {"mode": "async"}}
GRPO = {"name": "grpo", "cfg": {"batch_size": 96, "group_size": 4}}


@pytest.mark.parametrize(
    ("trainer", "algorithm", "policy"),
    [
        ({}, PPO, {"name": "actor_critic"}),
        ({}, PPO, {"name": "actor_critic", "memory": {"hidden_size": 16}}),
        ({"collector": {"pipeline_stages": 2}}, PPO, {"name": "actor_critic"}),
        (ASYNC, PPO, {"name": "actor_critic"}),
        ({"collector": {"mode": "async", "pipeline_stages": 2}}, PPO, {"name": "actor_critic"}),
        (ASYNC, GRPO, {"name": "actor_only"}),
    ],
    ids=["sync", "memory", "pipelined", "async", "async-pipelined", "async-grpo"],
)
def test_training(tmp_path: Path, trainer: dict[str, Any], algorithm: dict[str, Any], policy: dict[str, Any]) -> None:
    pytest.importorskip("tensorboard")
    shared = {
        "device": "cuda",
        "gym_config": {"id": "PushCubeRL", "device": "cpu", "max_episode_steps": 10},
        "num_envs": 16,
        "buffer_size": 12,
        "iterations": 3,
        "num_eval_episodes": 16,
        "eval_video": False,
        "run_dir": str(tmp_path / "run"),
    }
    block = {"trainer": shared | trainer, "policy": policy | {"normalize_obs": True}, "algorithm": algorithm}
    result = train_from_config(TrainCfg.from_dict(block))
    assert (result.iteration, result.global_step) == (3, 3 * 16 * 12)
    assert result.evaluation is not None
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum(line.get("episode/count", 0) for line in lines) >= 16 * 2  # every env was cut at least twice
