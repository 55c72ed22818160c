"""Every task of the package that has an expert, on a GPU: the expert succeeds there as it does on the CPU."""

from __future__ import annotations

import pytest
import torch

from embodichain.envs import TASKS
from embodichain.envs.registration import list_envs
from tests.gpu.gpu import make_task, simulates

pytestmark = simulates
DEMONSTRATED = [spec.id for spec in list_envs() if spec.id in TASKS and spec.task.has_expert()]
STEPS = 200  # of the longest episodes that are waited for


@pytest.mark.parametrize("task", DEMONSTRATED)
def test_the_expert_succeeds_as_on_the_cpu(task: str) -> None:
    """The step is recorded as CUDA graphs, fixtures are placed by mask, and no contact is left out."""
    with make_task(task, num_envs=64, **({"max_episode_steps": STEPS} if task == "CartPoleRL" else {})) as env:
        running = torch.ones(64, dtype=torch.bool, device=env.device)
        solved = torch.zeros_like(running)
        for _ in range(min(env.max_episode_steps, STEPS)):
            obs, _, terminated, truncated, info = env.step(env.expert_action())
            done = terminated | truncated
            solved |= running & done & (info["metrics"]["success"] > 0)
            running &= ~done
        assert all(bool(torch.isfinite(value).all()) for value in obs.values(True, True))
        assert not bool(running.any())
        assert float(solved.float().mean()) >= 0.93


@pytest.mark.parametrize("task", ["OpenDrawerLanguageRL", "PressButtonLanguageRL"])
def test_fixtures_start_where_they_do_on_the_cpu(task: str) -> None:
    with make_task(task, "cpu") as cpu, make_task(task) as gpu:
        for _ in range(2):  # the second time by a reset
            torch.testing.assert_close(gpu.physics.mocap_pos.cpu().double(), cpu.physics.mocap_pos, atol=1e-6, rtol=0)
            torch.testing.assert_close(gpu.physics.mocap_quat.cpu().double(), cpu.physics.mocap_quat, atol=1e-6, rtol=0)
            cpu.reset()
            gpu.reset()
