"""Real robots out of PyPI packages: a Panda, a UR5e, a Fetch, a Baxter, two Pandas and a Spot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import imageio.v3 as iio
import mujoco
import numpy as np
import pytest
import torch

from embodichain.cli.main import main
from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import ActionsCfg, EffortTermCfg, EndEffectorTermCfg, JointTermCfg, RobotCfg
from embodichain.envs.kinematics import rotation_error
from embodichain.envs.registration import load_gym_config, make
from embodichain.envs.robots import ROBOTS as ROBOTS_BY_NAME
from embodichain.envs.robots import Arm, Robot, build_model, describe
from embodichain.errors import ConfigError

pytestmark = pytest.mark.extra("robots")
ASSETS = "package://robosuite/models/assets"
FETCH = "package://gymnasium_robotics/envs/assets/fetch/pick_and_place.xml"
PANDA = {
    "mjcf": f"{ASSETS}/robots/panda/robot.xml",
    "tool": f"{ASSETS}/grippers/panda_gripper.xml",
    "flange": "right_hand",
    "servos": True,
}
FETCH_ARM = ("torso_lift", "shoulder_pan", "shoulder_lift", "upperarm_roll", "elbow_flex", "forearm_roll")
ROBOTS = {
    "panda": PANDA,
    "ur5e": {"mjcf": f"{ASSETS}/robots/ur5e/robot.xml", "tool": "pusher", "flange": "right_hand", "servos": True},
    "fetch": {
        "mjcf": FETCH,
        "joints": [f"robot0:{name}_joint" for name in (*FETCH_ARM, "wrist_flex", "wrist_roll")],
        "limits": {f"robot0:{name}_roll_joint": [-6.28, 6.28] for name in ("upperarm", "forearm", "wrist")},
        "pos": [-0.063, -0.006, -0.4],
    },
    "baxter": {
        "mjcf": f"{ASSETS}/robots/baxter/robot.xml",
        "servos": True,
        "arms": {"left": {"tool_site": "left_hand"}, "right": {"tool_site": "right_hand"}},
    },
    "two pandas": {
        **PANDA,
        "arms": {"left": {"pos": [0.5, 0.7, 0.0], "yaw": -1.5708}, "right": {"pos": [0.5, -0.7, 0.0], "yaw": 1.5708}},
    },
}
TERMS = {
    "delta_qpos": JointTermCfg(scale=0.05),
    "qpos": JointTermCfg(scale=0.05),
    "ee_delta": EndEffectorTermCfg(rotation_scale=0.1),
}


@pytest.fixture(scope="module", params=ROBOTS)
def robot(request):
    cfg = RobotCfg.from_dict(ROBOTS[request.param])
    model = build_model("reach_scene.xml", cfg)
    return request.param, model, Robot(model, describe(cfg)), cfg


def place(model: mujoco.MjModel, robot: Robot) -> mujoco.MjData:
    data = mujoco.MjData(model)
    data.qpos[:] = robot.home(torch.tensor(model.qpos0)).numpy()
    mujoco.mj_forward(model, data)
    return data


def test_what_is_recognised(robot):
    name, model, found, cfg = robot
    joints = {"panda": [7], "ur5e": [6], "fetch": [8], "baxter": [7, 7], "two pandas": [7, 7]}[name]
    fingers = {"panda": [2], "ur5e": [0], "fetch": [2], "baxter": [0, 0], "two pandas": [2, 2]}[name]
    assert [arm.num_joints for arm in found.arms.values()] == joints
    assert [arm.num_fingers for arm in found.arms.values()] == fingers
    assert found.has_servos
    assert model.nmesh > 10
    data = place(model, found)
    for arm in found.arms.values():
        low = arm.lower - 1e-3 <= arm.init_qpos[: arm.num_joints]
        assert bool((low & (arm.init_qpos[: arm.num_joints] <= arm.upper + 1e-3)).all())
        assert data.site(arm.site).xpos[2] > 0.1  # over the table
    if name == "fetch":
        ((_, spec),) = describe(cfg)
        assert set(spec.dropped) == {"floor0", "robot0:mocap", "table0", "object0"}
        assert "robot0:head_pan_joint" in spec.locked


def test_forward_and_inverse_kinematics(robot):
    """Poses are MuJoCo's to 1e-5; steps of inverse kinematics reach points around the start, turned as there."""
    _, model, found, _ = robot
    data = place(model, found)
    home = data.qpos.copy()
    for arm in found.arms.values():
        start = arm.init_qpos[: arm.num_joints].float()
        drawn = torch.rand(20, arm.num_joints, generator=torch.Generator().manual_seed(0)) - 0.5
        qpos = torch.clamp(start + drawn, arm.lower, arm.upper)
        positions, rotations = arm.chain.pose(qpos)
        addresses = [int(model.joint(name).qposadr[0]) for name in arm.joints]
        for i in range(20):
            data.qpos[:] = home
            data.qpos[addresses] = qpos[i].numpy()
            mujoco.mj_forward(model, data)
            np.testing.assert_allclose(positions[i], data.site(arm.site).xpos, atol=1e-5)
            np.testing.assert_allclose(rotations[i], data.site(arm.site).xmat.reshape(3, 3), atol=1e-5)
        at, turned = arm.chain.pose(start.unsqueeze(0))
        goal = at + 0.1 * (torch.rand(8, 3, generator=torch.Generator().manual_seed(1)) - 0.5)
        now = start.repeat(8, 1)
        for _ in range(100):
            position, rotation = arm.chain.pose(now)
            twist = torch.cat((goal - position, rotation_error(turned, rotation)), dim=1)
            now = torch.clamp(now + arm.chain.inverse_step(now, twist), arm.lower, arm.upper)
        assert float((arm.chain.position(now) - goal).norm(dim=1).max()) < 2e-3


@pytest.mark.parametrize("term", TERMS)
def test_the_tool_moves_as_an_action_says(robot, term):
    """Each arm of each robot rises on command, and the gripper closes, in MuJoCo's own simulation."""
    _, model, found, _ = robot
    terms = RobotActionManager(ActionsCfg(**{term: TERMS[term]}), found, 1, "cpu")
    data = place(model, found)
    before = {name: data.site(arm.site).xpos.copy() for name, arm in found.arms.items()}
    twist, closed = torch.tensor([[0.0, 0.0, 0.01, 0.0, 0.0, 0.0]]), -torch.ones(1, 1)
    for _ in range(25):
        qpos = torch.tensor(data.qpos[None, found.qpos])
        names = list(found.arms) if len(found.arms) > 1 else [None]
        action = torch.cat([terms.encode(qpos.float(), twist, closed, name) for name in names], dim=1)
        assert action.shape == (1, terms.action_dim)
        data.ctrl[:] = terms.control(action, qpos)[0].numpy()
        mujoco.mj_step(model, data, nstep=5)
    mujoco.mj_forward(model, data)
    for name, arm in found.arms.items():
        moved = data.site(arm.site).xpos - before[name]
        assert moved[2] > 0.04, (name, moved)
        assert np.linalg.norm(moved[:2]) < 0.5 * moved[2], (name, moved)
        if arm.num_fingers:
            assert _opening(data, model, arm) < 0.3 * float(arm.opening(arm.finger_open.unsqueeze(0)))


def _opening(data: mujoco.MjData, model: mujoco.MjModel, arm: Arm) -> float:
    fingers = [data.qpos[model.joint(name).qposadr[0]] for name in arm.fingers]
    return float(arm.opening(torch.tensor([fingers], dtype=torch.float32)))


def test_motors_take_efforts():
    cfg = RobotCfg.from_dict(PANDA | {"servos": None, "gravity_compensation": True})
    model = build_model("reach_scene.xml", cfg)
    found = Robot(model, describe(cfg))
    terms = RobotActionManager(ActionsCfg(effort=EffortTermCfg()), found, 1, "cpu")
    control = terms.control(torch.ones(1, 8), torch.zeros(1, 9))
    assert control[0, found.arms[""].actuators[:7]].tolist() == [80.0, 80.0, 80.0, 80.0, 80.0, 12.0, 12.0]


@pytest.mark.parametrize(
    ("name", "task", "change"),
    [
        ("panda", "PickCubeRL", {}),
        ("panda", "PushCubeRL", {}),
        ("ur5e", "PushCubeRL", {}),
        ("fetch", "PushCubeRL", {}),
        ("fetch", "ReachRL", {"randomize_target": {"x": [0.35, 0.5], "y": [-0.2, 0.2], "z": [0.1, 0.3]}}),
    ],
)
def test_experts_of_our_tasks_work_with_them(name, task, change):
    settings = {"events": change, "observations": {"cameras": [{"name": "side", "width": 48, "height": 48}]}}
    config = {"id": task, "num_envs": 8, "seed": 0, "robot": ROBOTS[name], "max_episode_steps": 150, "env": settings}
    with make(config | {"env": {"events": change}}) as env:
        solved = torch.zeros(8, dtype=torch.bool)
        for _ in range(150):
            solved |= env.step(env.expert_action())[4]["metrics"]["success"] > 0
        assert solved.float().mean() >= 0.85
    if task == "PickCubeRL":
        with make(config | {"num_envs": 1}) as env:
            image = env.reset()[0]["image", "side"]
            assert image.shape == (1, 48, 48, 3)
            assert image.float().std() > 20.0


def test_a_quadruped_is_recognised_and_no_arm(capsys, tmp_path):
    """The printed config stands, from a posture within the limits, and all of it is seen."""
    spot = f"{ASSETS}/robots/spot/robot.xml"
    assert main(["robots", "check", spot, "--image", str(tmp_path / "spot.png")]) == 0
    said = capsys.readouterr().out
    assert "walks: a robot with legs" in said
    assert "register_robot(" in said
    assert iio.imread(tmp_path / "spot.png")[:50].mean() > 100.0  # the sky
    config = json.JSONDecoder().raw_decode(said[said.index('"robot": {') + len('"robot": ') :])[0]
    with make({"id": "QuadrupedVelocityRL", "num_envs": 2, "seed": 0, "robot": config}) as env:
        assert torch.all((env.robot.init_qpos > env.robot.lower) & (env.robot.init_qpos < env.robot.upper))
        env.reset()
        for _ in range(100):
            _, _, terminated, _, _ = env.step(torch.zeros(2, 12))
            assert not terminated.any()
        model, data = env.physics.model, mujoco.MjData(env.physics.model)
        data.qpos[:] = env.physics.qpos[0].numpy()
        mujoco.mj_forward(model, data)
        camera = model.camera(env.task.camera).id
        seen = (data.geom_xpos[model.geom_bodyid > 0] - data.cam_xpos[camera]) @ data.cam_xmat[camera].reshape(3, 3)
        angle = np.degrees(np.arctan2(np.abs(seen[:, :2]).max(axis=1), -seen[:, 2]))
        assert 8.0 < angle.max() < 0.5 * model.cam_fovy[camera]
    with pytest.raises(ConfigError, match="base of this robot is free"):
        make({"id": "ReachRL", "robot": {"mjcf": spot}})
    with pytest.raises(ConfigError, match="2 chains of joints"):
        make({"id": "ReachRL", "robot": {"mjcf": f"{ASSETS}/robots/baxter/robot.xml"}})
    with pytest.raises(ConfigError, match=r"no limits: Actuator1, Actuator3"):
        make({"id": "ReachRL", "robot": {"mjcf": f"{ASSETS}/robots/kinova3/robot.xml"}})


def test_the_page_of_the_documentation_says_what_is():
    """Its Python runs from top to bottom, its settings are those there are, and its config is one."""
    page = (Path(__file__).parents[2] / "docs/robots.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    try:
        for snippet in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
            exec(compile(snippet, "docs/robots.md", "exec"), names)
    finally:
        ROBOTS_BY_NAME.pop("ur5e", None)
    cfg = RobotCfg.from_dict(names["baxter"])
    assert Robot(build_model("reach_scene.xml", cfg), describe(cfg))
    told = set(
        re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in re.findall(r"^\| `.*$", page, re.MULTILINE)))
    )
    fields = set(RobotCfg().to_dict()) - {"uid", "arms", "servo_frequency"}
    assert fields <= told
    config = json.loads(re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)[0])
    assert load_gym_config(config).robot.servos is True


def test_the_training_of_the_documentation_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/robots.md").read_text(encoding="utf-8").partition("## Train it")[2]
    (tmp_path / "panda_reach.json").write_text(re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)[0])
    command = re.findall(r"^embodichain (train .*)$", page, flags=re.MULTILINE)[0]
    monkeypatch.chdir(tmp_path)
    few = "--trainer.num_envs 4 --trainer.buffer_size 8 --trainer.total_steps 32 --trainer.enable_eval false"
    assert main([*command.split(), *few.split()]) == 0
