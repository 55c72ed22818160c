"""Data parallelism on GPUs: NCCL where every rank has a GPU of its own, gloo where they share one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint
from embodichain.agents.rl.runs import read_metrics
from tests.agents.rl import rank_cases
from tests.agents.rl.rank_cases import run_ranks
from tests.agents.rl.training_cases import GRPO, PPO, train_config
from tests.gpu.gpu import on_gpu

pytestmark = on_gpu


def test_nccl_adds_up_gradients_and_statistics(tmp_path: Path) -> None:
    count = min(2, torch.cuda.device_count())
    assert run_ranks(count, rank_cases.talk_over_nccl, tmp_path) == [0] * count
    numbers = torch.arange(10.0 * count)
    for rank in range(count):
        heard = load_checkpoint(tmp_path / f"nccl_{rank}")
        assert torch.equal(heard["weight"], torch.ones(2, 3))
        assert torch.equal(heard["grad"], torch.full((2, 3), 4.0 * sum(range(1, count + 1))))
        assert float(heard["loss"]) == sum(range(1, count + 1))
        assert torch.allclose(torch.stack(heard["spread"]), torch.stack([numbers.mean(), numbers.std(correction=0)]))
        assert heard["words"] == [["word", other] for other in range(count)]


def test_two_ranks_train_on_the_gpus_there_are(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for name, algorithm in {"ppo": PPO, "grpo": GRPO}.items():
        run = tmp_path / name
        config = train_config(run, algorithm=algorithm, trainer={"device": "cuda", "iterations": 3})
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(config))
        assert run_ranks(2, rank_cases.train, file, []) == [0, 0]
        saved = load_checkpoint(find_checkpoint(run))
        assert saved["trainer"]["global_step"] == 3 * 2 * 8 * 16
        assert saved["config"]["trainer"]["device"] == "cuda"
        losses = [line["update/policy_loss"] for line in read_metrics(run / "metrics.jsonl") if "update/epochs" in line]
        assert all(loss is not None for loss in losses)
