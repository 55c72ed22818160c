"""Gymnasium's MuJoCo suite on a GPU: as on the CPU within the precision of float32, recorded as CUDA graphs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.envs.mujoco.mujoco_env import expand_model_path

from embodichain.envs import MUJOCO_SUITE
from tests.gpu.gpu import make_task, simulates

pytestmark = simulates


@pytest.mark.parametrize("id", MUJOCO_SUITE)
def test_steps_and_resets_agree_with_the_cpu(id: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Half of the envs to 1e-3 for 14 steps (forces of contacts are large numbers), and the same episodes begin.

    MuJoCo Warp turns the friction pyramids of some contacts differently, so the ant gets cones here.
    """
    settings: dict[str, Any] = {"max_episode_steps": 6}
    if id == "Ant-v5":
        text = Path(expand_model_path("ant.xml")).read_text()
        (tmp_path / "ant.xml").write_text(text.replace("<option ", '<option cone="elliptic" '))
        settings["kwargs"] = {"xml_file": str(tmp_path / "ant.xml")}
    with make_task(id, "cpu", 32, **settings) as cpu, make_task(id, "cuda", 32, **settings) as gpu:
        (first, _), (first2, _) = cpu.reset(seed=1), gpu.reset(seed=1)
        torch.testing.assert_close(first2["state"].cpu(), first["state"], rtol=1e-4, atol=1e-4)
        generator = torch.Generator().manual_seed(0)
        with caplog.at_level(logging.WARNING):
            for _ in range(14):  # the fourth step is recorded, later ones are replayed
                action = 2.0 * torch.rand(32, *cpu.action_space.shape, generator=generator) - 1.0
                obs, reward, ended, cut, info = cpu.step(action)
                obs2, reward2, ended2, cut2, info2 = gpu.step(action.cuda())
                scale = 1.0 + info["final_observation"]["state"].abs()
                error = (info["final_observation"]["state"] - info2["final_observation"]["state"].cpu()).abs() / scale
                assert error.amax(dim=1).median() < 1e-3
                assert ((reward - reward2.cpu()).abs() / (1.0 + reward.abs())).median() < 1e-3
                assert torch.equal(cut, cut2.cpu())
                begins = (ended | cut) & (ended2 | cut2).cpu() & (info["episode_seed"] == info2["episode_seed"].cpu())
                torch.testing.assert_close(obs2["state"].cpu()[begins], obs["state"][begins], rtol=1e-4, atol=1e-4)
        assert "without CUDA graphs" not in caplog.text


def test_a_saved_state_holds_positions_of_bodies() -> None:
    with make_task("Ant-v5", num_envs=16) as env:
        action = torch.zeros(16, 8, device="cuda")
        for _ in range(6):
            env.step(action + 0.3)
        saved = env.get_state()
        reached = env.step(action)[0]["state"].clone()
        env.step(action)
        env.set_state(saved)
        torch.testing.assert_close(env.step(action)[0]["state"], reached, rtol=1e-4, atol=1e-4)
