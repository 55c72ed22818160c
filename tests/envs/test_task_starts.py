"""Another arm starts with its tool where the task's own has it, and experts solve tasks with it."""

import shutil
from pathlib import Path

import pytest
import torch

from embodichain.envs import registration
from embodichain.envs.env_cfg import RobotCfg
from embodichain.envs.registration import load_gym_config, make
from embodichain.envs.task_starts import with_start
from embodichain.envs.tasks.drawer import OpenDrawer
from embodichain.errors import ConfigError

pytestmark = pytest.mark.extra("robots")
ASSETS = "package://robosuite/models/assets"
ROBOTS = {
    name: {
        "mjcf": f"{ASSETS}/robots/{name}/robot.xml",
        "tool": f"{ASSETS}/grippers/panda_gripper.xml",
        "flange": "right_hand",
        "servos": True,
    }
    for name in ("panda", "sawyer")
}
HOME = [0.1, 0.1, 0.1, -1.5, 0.1, 1.6, 0.1]
PRESS_TASK = Path(__file__).parents[2] / "examples/envs/press_task.py"


def test_tool_points_at_the_drawers_with_one_finger_above_the_other():
    with make("OpenDrawerRL", num_envs=1, seed=0) as own, make("OpenDrawerRL", robot=ROBOTS["sawyer"], seed=0) as other:
        poses = [
            env.robot.chain.pose(env.robot.init_qpos[None, : env.robot.num_joints].float()) for env in (own, other)
        ]
        down = other.robot.arms[""].down
    assert float((poses[0][0] - poses[1][0]).norm()) < 0.01
    points = poses[1][1][0] @ -down[2]
    assert points.tolist() == pytest.approx([1.0, 0.0, 0.0], abs=0.05)


def test_own_arm_and_given_postures_stay_as_they_are():
    for config in ({"id": "OpenDrawerRL"}, {"id": "OpenDrawerRL", "robot": ROBOTS["panda"] | {"init_qpos": HOME}}):
        cfg = load_gym_config(config)
        assert with_start(cfg, OpenDrawer) is cfg


def test_an_arm_that_stands_too_far_away_is_warned_of(caplog):
    cfg = load_gym_config({"id": "OpenDrawerRL", "robot": ROBOTS["sawyer"] | {"pos": [-2.0, 0.0, 0.0]}})
    assert with_start(cfg, OpenDrawer) is cfg
    assert "does not reach the pose in which the tool of OpenDrawerRL starts" in caplog.text


class DrawerFarAway(OpenDrawer):
    """A task whose own robot is another one, and does not reach the cabinet."""

    @classmethod
    def default_cfg(cls):
        robot = RobotCfg.from_dict(ROBOTS["sawyer"] | {"pos": [-2.0, 0.0, 0.0]})
        return OpenDrawer.default_cfg().replace(id="DrawerFarAway", robot=robot)


def test_places_out_of_reach_are_warned_of_where_the_posture_is_given(monkeypatch, caplog):
    """Also where the task's own config names the robot; not for robots of this package."""
    monkeypatch.setitem(registration._TASKS, "DrawerFarAway", registration.EnvSpec("DrawerFarAway", DrawerFarAway))
    make("DrawerFarAway").close()
    assert "robot: the arm does not reach all places of DrawerFarAway" in caplog.text
    caplog.clear()
    make({"id": "PickCubeRL", "robot": ROBOTS["panda"] | {"init_qpos": HOME, "pos": [-2.0, 0.0, 0.0]}}).close()
    assert "does not reach all places of PickCubeRL" in caplog.text
    caplog.clear()
    make("PickCubeRL").close()
    assert not caplog.text


@pytest.mark.parametrize("away", [1.1, 3.0])
def test_two_arms_out_of_reach_are_warned_of(away, caplog):
    arms = {"left": {"pos": [0.5, away, 0.0], "yaw": -1.5708}, "right": {"pos": [0.5, -away, 0.0], "yaw": 1.5708}}
    make({"id": "LiftBarRL", "robot": ROBOTS["panda"] | {"arms": arms}}).close()
    assert all(f"robot.arms.{name}: the arm does not reach" in caplog.text for name in arms)


def test_arms_that_the_task_does_not_have_are_named_before_a_search():
    arms = {"lefft": {"pos": [0.5, 0.7, 0.0]}, "right": {"pos": [0.5, -0.7, 0.0]}}
    with pytest.raises(ConfigError, match=r"needs arms called 'left' and 'right', got 'lefft'\. Did you mean 'left'"):
        make({"id": "LiftBarRL", "robot": ROBOTS["panda"] | {"arms": arms}})


@pytest.mark.parametrize(
    ("robot", "task"), [("panda", "OpenDoorRL"), ("panda", "PlaceInBinRL"), ("sawyer", "OpenDrawerRL")]
)
def test_expert_solves_the_task_with_another_arm(robot, task):
    solved = torch.zeros(8, dtype=torch.bool)
    with make(task, num_envs=8, seed=0, robot=ROBOTS[robot]) as env:
        for _ in range(env.max_episode_steps):
            *_, info = env.step(env.expert_action())
            solved |= info["metrics"]["success"] > 0
    assert int(solved.sum()) >= 7


@pytest.mark.parametrize("names", [["left"], ["left", "right"]])
def test_expert_solves_the_task_where_some_of_several_arms_are_others(names):
    arms = {name: {key: ROBOTS["panda"][key] for key in ("mjcf", "tool", "flange")} for name in names}
    solved = torch.zeros(8, dtype=torch.bool)
    with make("LiftBarRL", num_envs=8, seed=0, robot={"servos": True, "arms": arms}) as env:
        for _ in range(env.max_episode_steps):
            *_, info = env.step(env.expert_action())
            solved |= info["metrics"]["success"] > 0
    assert int(solved.sum()) >= 7


def test_expert_keeps_a_button_pressed_with_another_arm(tmp_path):
    module = shutil.copy(
        PRESS_TASK, tmp_path / "press_task_of_this_test.py"
    )  # other tests may have imported the example
    config = {"id": "PressTask", "num_envs": 8, "seed": 0, "robot": ROBOTS["panda"]}
    with make(config | {"env": {"terminate_on_success": False}}, trusted_modules=[str(module)]) as env:
        for _ in range(99):
            *_, info = env.step(env.expert_action())
        assert bool((info["metrics"]["success"] > 0).all())
