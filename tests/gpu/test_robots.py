"""Robots of a user's own on a GPU: meshes, servos, grippers through tendons, two arms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodichain.envs.registration import make
from tests.envs.test_robots import MOTORS, PULL, TETRA, arm
from tests.gpu.gpu import make_task, simulates

pytestmark = simulates
ASSETS = "package://robosuite/models/assets"


@pytest.fixture
def own(tmp_path: Path) -> dict[str, object]:
    """An arm of seven joints with a mesh and a gripper that one motor drives through a tendon."""
    (tmp_path / "meshes").mkdir()
    (tmp_path / "meshes" / "tetra.obj").write_text(TETRA)
    assets = '<mujocoinclude><asset><mesh name="tetra" file="tetra.obj"/></asset></mujocoinclude>'
    (tmp_path / "assets.xml").write_text(assets)
    (tmp_path / "mine.xml").write_text(arm(drives=MOTORS + PULL))
    return {"mjcf": str(tmp_path / "mine.xml"), "servos": True, "init_tool": [0.5, 0.0, 0.3]}


def success(env) -> float:
    solved = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
    for _ in range(env.max_episode_steps):
        solved |= env.step(env.expert_action())[4]["metrics"]["success"] > 0
    return float(solved.float().mean())


def test_an_arm_with_meshes_moves_as_on_the_cpu(own):
    """The same actions lead to the same tool positions, within the tolerance of float32, and the expert grasps."""
    ends = []
    for device in ("cpu", "cuda"):
        with make({"id": "ReachRL", "num_envs": 4, "seed": 0, "device": device, "robot": own}) as env:
            action = 0.5 * torch.ones(4, env.action_space.shape[0], device=env.device)
            for _ in range(10):
                obs = env.step(action)[0]
            ends.append(obs["robot", "ee_pos"].cpu())
    torch.testing.assert_close(ends[0], ends[1], atol=5e-3, rtol=0)
    with make({"id": "PickCubeRL", "num_envs": 64, "seed": 0, "device": "cuda", "robot": own}) as env:
        assert success(env) > 0.9


@pytest.mark.parametrize("task", ["LiftBarRL", "HandOverRL"])
def test_two_arms(task):
    with make_task(task, num_envs=64) as env:
        assert success(env) > 0.9


@pytest.mark.extra("robots")
def test_a_panda_grasps():
    robot = {
        "mjcf": f"{ASSETS}/robots/panda/robot.xml",
        "tool": f"{ASSETS}/grippers/panda_gripper.xml",
        "flange": "right_hand",
        "servos": True,
    }
    with make({"id": "PickCubeRL", "num_envs": 64, "seed": 0, "device": "cuda", "robot": robot}) as env:
        assert success(env) > 0.9
