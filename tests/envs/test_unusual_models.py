"""Models and configs that are built differently from ours: order of joints, gears, control ranges, several events."""

from pathlib import Path
from typing import Any

import mujoco
import pytest
import torch

from embodichain.envs.registration import make
from embodichain.errors import ConfigError


def build(id: str, env: dict[str, Any] | None = None, num_envs: int = 1, **cfg: Any) -> Any:
    made = make({"id": id, "num_envs": num_envs, "seed": 0, "env": env or {}, **cfg})
    made.reset(seed=0)
    return made


def arm(prefix: str = "", y: float = 0.0, limits: str = 'range="-3 3"') -> str:
    geoms = ['<geom size=".05"/>'] * 3 + ['<geom type="capsule" size=".03" fromto="0 0 0 0 0 .1"/>']
    body = f'<site name="{prefix}tcp" pos="0 0 .1"/>'
    for number in (4, 3, 2, 1):
        axis, up = ("0 0 1", 0.2) if number == 1 else ("0 1 0", 0.3)
        at = f"0 {y if number == 1 else 0} {up}"
        joint = f'<joint name="{prefix}j{number}" axis="{axis}" {limits}/>'
        body = f'<body name="{prefix}l{number}" pos="{at}">{joint}{geoms[number - 1]}{body}</body>'
    return body


def write(folder: Path, bodies: str, rest: str = "") -> str:
    file = folder / "robot.xml"
    file.write_text(f'<mujoco><compiler angle="radian"/><worldbody>{bodies}</worldbody>{rest}</mujoco>')
    return str(file)


def drives(kind: str) -> str:
    return "<actuator>" + "".join(f"<{kind.format(f'j{i}')}/>" for i in (1, 2, 3, 4)) + "</actuator>"


def legs(folder: Path, foot: str, spin: str = 'range="-1 1"') -> str:
    shin = '<geom type="capsule" size=".03" fromto="0 0 0 0 0 -.15"/>'
    sides = [
        f'<body pos="0 {y} 0"><joint name="{n}_hip" axis="0 1 0" range="-1 1"/>{shin}'
        f'<body pos="0 0 -.2"><joint name="{n}_spin" axis="0 1 0" {spin}/>{shin}'
        f'<body name="{n}_foot" pos="0 0 -.2">'
        f'<joint name="{n}_ankle" axis="0 1 0" range="-1 1"/>{foot}</body></body></body>'
        for n, y in (("l", 0.1), ("r", -0.1))
    ]
    base = f'<body name="base" pos="0 0 1"><freejoint/><geom type="box" size=".1 .1 .1"/>{"".join(sides)}</body>'
    return write(folder, base)


BOX_FOOT = '<geom type="box" size=".1 .05 .02"/>'


@pytest.mark.parametrize("case", ["unlimited", "reordered"])
def test_walker_observes_velocities_of_its_own_joints(tmp_path: Path, case: str) -> None:
    file = legs(tmp_path, BOX_FOOT, spin="" if case == "unlimited" else 'range="-1 1"')
    order = [f"{side}_{name}" for side in "rl" for name in ("hip", "spin", "ankle")]
    robot = {"mjcf": file, "walks": True, **({"joints": order} if case == "reordered" else {})}
    env = build("BipedVelocityRL", robot=robot)
    env.step(torch.rand(1, env.action_space.shape[-1], generator=torch.Generator().manual_seed(1)))
    model, robot_ = env.physics.model, env.robot
    joints = [name for one in robot_.arms.values() for name in one.joints]
    expected = env.physics.qvel[:, [int(model.joint(name).dofadr[0]) for name in joints]].float()
    torch.testing.assert_close(env.task.read()["qvel"], expected)
    assert expected.unique().numel() == len(joints)


def test_two_arms_of_one_file_hold_a_gripper_each(tmp_path: Path) -> None:
    torso = f'<body name="torso"><geom size=".1" pos="0 0 .1"/>{arm("a_", 0.3)}{arm("b_", -0.3)}</body>'
    arms = {
        side: {"joints": [f"{p}_j{i}" for i in (1, 2, 3, 4)], "flange": f"{p}_tcp", "tool": "gripper"}
        for side, p in (("left", "a"), ("right", "b"))
    }
    env = build("LiftBarRL", robot={"mjcf": write(tmp_path, torso), "arms": arms})
    found = [one.fingers for one in env.robot.arms.values()]
    assert [len(fingers) for fingers in found] == [2, 2]
    assert len({name for fingers in found for name in fingers}) == 4


def test_forces_of_two_events_add_up() -> None:
    force = {"func": "apply_force", "mode": "reset"}
    events = {
        axis: {**force, "params": {"bodies": "cube", "force_range": {axis: [0.5, 0.5]}, "duration_s": seconds}}
        for axis, seconds in (("z", 10.0), ("x", 0.01))
    }
    env = build("PushCubeRL", {"events": events})
    body, still = env.physics.model.body("cube").id, torch.zeros(1, env.action_space.shape[-1])
    env.step(still)
    assert env.physics.applied_forces()[0, body, :3].tolist() == [0.5, 0.0, 0.5]
    env.step(still)
    assert env.physics.applied_forces()[0, body, :3].tolist() == [0.0, 0.0, 0.5]


def test_joint_offset_of_servos_with_a_gear(tmp_path: Path) -> None:
    servo = 'position joint="{}" kp="500" kv="50" gear="3" ctrlrange="-9 9"'
    offset = {"events": {"o": {"func": "joint_offset", "params": {"range": [0.1, 0.1]}}}}
    env = build("ReachRL", offset, robot={"mjcf": write(tmp_path, arm(), drives(servo))}, max_episode_steps=1000)
    before = env.reset(seed=0)[0]["robot", "qpos"].clone()
    for _ in range(30):
        obs, *_ = env.step(torch.zeros(1, 4))
    torch.testing.assert_close(obs["robot", "qpos"], before, atol=0.02, rtol=0)


def test_joint_limits_are_those_of_all_arms() -> None:
    env = build("LiftBarRL", {"rewards": {"terms": {"x": {"func": "joint_limits", "params": {"margin": 5.5}}}}})
    info = env.step(torch.zeros(1, env.action_space.shape[-1]))[-1]
    expected, model = 0.0, env.physics.model
    for name in [name for one in env.robot.arms.values() for name in one.joints]:
        joint = model.joint(name)
        at = float(env.physics.qpos[0, int(joint.qposadr[0])])
        expected += max(0.0, joint.range[0] + 5.5 - at) + max(0.0, at - joint.range[1] + 5.5)
    assert float(info["rewards"]["x"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ends", [(-40.0, 10.0), (-40.0, 0.0), (-20.0, 20.0)])
def test_effort_reaches_both_ends_of_the_control_range(tmp_path: Path, ends: tuple[float, float]) -> None:
    motor = f'motor joint="{{}}" ctrlrange="{ends[0]} {ends[1]}"'
    actions = {"actions": {"delta_qpos": None, "effort": {}}}
    env = build("ReachRL", actions, robot={"mjcf": write(tmp_path, arm(), drives(motor))})
    qpos = env.physics.qpos[:, env.robot.qpos]
    for action, expected in ((-1.0, ends[0]), (-0.5, ends[0] / 2), (0.0, 0.0), (1.0, ends[1])):
        assert env.action_manager.control(torch.full((1, 4), action), qpos)[0].tolist() == [expected] * 4


def test_limits_from_a_servo_with_a_gear(tmp_path: Path) -> None:
    servo = 'position joint="{}" kp="500" kv="50" gear="-2" ctrlrange="-2 4"'
    robot = build("ReachRL", robot={"mjcf": write(tmp_path, arm(limits=""), drives(servo))}).robot
    assert (robot.lower.tolist(), robot.upper.tolist()) == ([-2.0] * 4, [1.0] * 4)


def test_events_that_overwrite_each_other_are_refused() -> None:
    mass = {"func": "mass", "params": {"bodies": "cube", "range": [2, 2]}}
    inertia = {"func": "inertia", "params": {"bodies": "cube", "range": [1.1, 1.1]}}
    with pytest.raises(ConfigError, match=r"env\.events\.b: a draws the same elements of body_inertia"):
        build("PushCubeRL", {"events": {"a": mass, "b": inertia}})
    mass["params"]["inertia"] = False
    rolling = {"func": "friction", "params": {"geoms": "cube", "kind": "rolling", "range": [2, 2]}}
    sliding = {"func": "friction", "params": {"geoms": "cube", "range": [3, 3]}}
    env = build("PushCubeRL", {"events": {"a": mass, "b": inertia, "c": rolling, "d": sliding}})
    model, geom, body = env.physics.model, env.physics.model.geom("cube").id, env.physics.model.body("cube").id
    factor = env.physics.model_field("geom_friction")[0, geom] / torch.tensor(model.geom_friction[geom])
    assert factor.tolist() == pytest.approx([3.0, 1.0, 2.0])
    assert float(env.physics.model_field("body_mass")[0, body]) == pytest.approx(2 * model.body_mass[body])


@pytest.mark.parametrize("name", ["a/x", "a.x"])
def test_names_of_events_have_no_separators(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a name of an event without"):
        build("PushCubeRL", {"events": {name: {"func": "mass", "params": {"range": [1, 2]}}}})


@pytest.mark.parametrize(
    ("func", "params"), [("closeness", {"to": "goal", "start": 0.1, "end": 0.2}), ("opened", {"target": 0.0})]
)
def test_progress_without_a_way_is_refused(func: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"env\.rewards\.terms\.x: {func}: expected a "):
        build("PushCubeRL", {"rewards": {"terms": {"x": {"func": func, "params": {"of": "cube", **params}}}}})


def test_mesh_off_its_origin_is_placed_by_its_middle_and_rests_on_the_table(tmp_path: Path) -> None:
    corners = [(1 + x, 1 + y, 1 + z) for x in (0, 0.1) for y in (0, 0.04) for z in (0, 0.02)]
    faces = ["1 2 4", "1 4 3", "5 7 8", "5 8 6", "1 5 6", "1 6 2", "3 4 8", "3 8 7", "1 3 7", "1 7 5", "2 6 8", "2 8 4"]
    lines = [f"v {x} {y} {z}" for x, y, z in corners] + [f"f {face}" for face in faces]
    (tmp_path / "m.obj").write_text("\n".join(lines))
    pose = {"x": [0.3, 0.3], "y": [0.3, 0.3], "yaw": [0.7, 0.7]}
    thing = {"shape": "mesh", "file": str(tmp_path / "m.obj"), "pose": pose}
    env = build("PushCubeRL", {"scene": {"objects": {"q": thing}}})
    model = env.physics.model
    data = mujoco.MjData(model)
    env.physics.load(data, 0)
    mujoco.mj_forward(model, data)
    geom = model.geom("q").id
    points = model.mesh_vert @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom]
    assert 0.5 * (points.min(axis=0) + points.max(axis=0))[:2] == pytest.approx([0.3, 0.3], abs=1e-6)
    assert points[:, 2].min() == pytest.approx(0.0, abs=1e-6)


def test_objects_keep_their_distance_from_a_fixture_that_stays() -> None:
    thing = {"min_distance": 0.2, "pose": {"x": [0.2, 0.7], "y": [-0.4, 0.4]}}
    scene = {"fixtures": {"tray": {"kind": "bin", "pos": [0.5, 0, 0]}}, "objects": {"b": thing}}
    obs, _ = build("ReachRL", {"scene": scene}, num_envs=64).reset(seed=0)
    assert (obs["tray", "pos"] - obs["b", "pos"])[:, :2].norm(dim=1).min() >= 0.2


@pytest.mark.parametrize("name", ["depth", "instruction", "cab_drawer_0"])
def test_names_that_are_observed_already_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .*choose another"):
        build("PushCubeRL", {"scene": {"fixtures": {"cab": {"kind": "drawer"}}, "objects": {name: {}}}})


@pytest.mark.parametrize("foot", ["box", "capsule", "cylinder"])
def test_walkers_start_with_their_feet_on_the_ground(tmp_path: Path, foot: str) -> None:
    shapes = {
        "box": BOX_FOOT,
        "capsule": '<geom type="capsule" size=".02 .05"/>',
        "cylinder": '<geom type="cylinder" size=".05 .02"/>',
    }
    env = build("BipedVelocityRL", robot={"mjcf": legs(tmp_path, shapes[foot]), "walks": True})
    model = env.physics.model
    data = mujoco.MjData(model)
    data.qpos[:] = env.task._home.cpu().numpy()
    mujoco.mj_kinematics(model, data)
    half = {"box": 0.02, "capsule": 0.07, "cylinder": 0.02}[foot]
    soles = [data.body(f"robot/{side}_foot").xpos[2] - half for side in "lr"]
    assert soles == pytest.approx([0.0, 0.0], abs=1e-6)
    assert env.task.read()["feet"].shape == (1, 2, 3)


def test_gap_of_one_finger_is_its_distance_from_the_jaw(tmp_path: Path) -> None:
    pad = '<geom type="box" size=".01 .005 .05" {}/>'
    slide = '<joint name="f1" type="slide" axis="0 -1 0" range="0 .04"/>'
    jaw = pad.format('pos="0 -.04 .2"')
    hand = f'<body name="f1" pos="0 .04 .2">{slide}{pad.format("")}</body>{jaw}'
    bodies = arm().replace('<site name="tcp" pos="0 0 .1"/>', f'<site name="tcp" pos="0 0 .25"/>{hand}')
    grip = '<actuator><motor name="grip" joint="f1" ctrlrange="-1 1" gear="10"/></actuator>'
    found = build("PickCubeRL", robot={"mjcf": write(tmp_path, bodies, grip)}).robot.only_arm
    gaps = [2 * float(found.opening(torch.tensor([[at]]))) for at in (0.0, 0.04)]
    assert gaps == pytest.approx([0.07, 0.03], abs=1e-4)
