"""Robots of a user's own: what is found out from an MJCF file, what cannot be, and tasks that use them."""

from __future__ import annotations

import json
import re

import mujoco
import numpy as np
import pytest
import torch

from embodichain.cli.main import main
from embodichain.envs import model_files, robot_files
from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import ActionsCfg, EndEffectorTermCfg, JointTermCfg, RobotCfg
from embodichain.envs.registration import load_gym_config, make
from embodichain.envs.robots import Robot, build_model, describe, register_robot
from embodichain.errors import AssetError, ConfigError, UnknownNameError

TETRA = "v 0 0 0\nv 0.05 0 0\nv 0 0.05 0\nv 0 0 0.05\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 1 4 3\n"
LINK = """<body name="l{i}" pos="0 0 {up}"><joint name="j{i}" axis="{axis}" range="{range}" class="arm"/>
  <geom type="capsule" fromto="0 0 0 0 0 {next}" size="0.04" mass="2"/>"""
HAND = """<body name="hand" pos="0 0 0.1"><geom type="box" size="0.05 0.02 0.02" mass="0.2"/>
  <geom type="mesh" mesh="tetra" contype="0" conaffinity="0" mass="0.01"/>{site}{fingers}</body>"""
FINGER = """<body name="{name}" pos="{x} 0 0.03"><joint name="{name}" type="slide" axis="{axis} 0 0" range="0 0.04"
  damping="5" armature="0.05"/><geom type="box" size="0.008 0.012 0.03" pos="0 0 0.03" mass="0.05"/></body>"""
FINGERS = FINGER.format(name="f1", x="0.008", axis="1") + FINGER.format(name="f2", x="-0.008", axis="-1")
SITE = '<site name="grip" pos="0 0 0.08"/>'
AXES = ("0 0 1", "0 1 0", "0 0 1", "0 1 0", "0 0 1", "0 1 0", "0 0 1")
UPS = ("0.15", "0.15", "0.2", "0.2", "0.2", "0.2", "0.1")
MOTORS = "".join(f'<motor joint="j{i}" ctrlrange="-1 1" gear="80"/>' for i in range(7))
SERVOS = "".join(f'<position joint="j{i}" kp="800" dampratio="1"/>' for i in range(7))
TENDON = '<tendon><fixed name="split"><joint joint="f1" coef="0.5"/><joint joint="f2" coef="0.5"/></fixed></tendon>'
EQUAL = '<equality><joint joint1="f2" joint2="f1"/></equality>'
POSE = [0.0, 0.3, 0.0, 1.5, 0.0, 1.3, 0.0]
PULL = '<position name="squeeze" tendon="split" kp="2000" dampratio="1" ctrlrange="0 0.04" forcerange="-40 40"/>'


def arm(
    site=SITE, fingers=FINGERS, drives=SERVOS + PULL, more=TENDON + EQUAL, world="", free="", limits="-160 160", keys=""
):
    """The text of an arm of seven joints: degrees, default classes, an include, a mesh in a folder, its own ground."""
    links = "".join(LINK.format(i=i, up=UPS[i], axis=AXES[i], range=limits, next=UPS[min(i + 1, 6)]) for i in range(7))
    return f"""<mujoco model="mine"><compiler meshdir="meshes" autolimits="true"/>
      <default><default class="arm"><joint damping="1" armature="0.05"/></default></default>
      <include file="assets.xml"/><worldbody><light pos="0 0 3"/><geom name="floor" type="plane" size="2 2 0.1"/>{world}
      <body name="base">{free}<geom type="cylinder" size="0.06 0.05"/>
      {links}{HAND.format(site=site, fingers=fingers)}{"</body>" * 7}</body></worldbody>
      <actuator>{drives}</actuator>{more}{keys}</mujoco>"""


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Write a robot into a folder of its own, with what it includes, and return its path."""
    (tmp_path / "meshes").mkdir()
    (tmp_path / "meshes" / "tetra.obj").write_text(TETRA)
    (tmp_path / "assets.xml").write_text(
        '<mujocoinclude><asset><mesh name="tetra" file="tetra.obj"/></asset></mujocoinclude>'
    )
    monkeypatch.setattr(robot_files, "ROBOTS", robot_files.ROBOTS)

    def write(text: str, name: str = "mine.xml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def built(scene="pick_scene.xml", **settings):
    cfg = RobotCfg(**settings)
    model = build_model(scene, cfg)
    return model, Robot(model, describe(cfg)), cfg


def test_an_arm_is_found_out(save):
    """Joints, tool, gripper through a tendon, ground and light left out, and a posture with the tool pointing down."""
    model, robot, _ = built(mjcf=save(arm()))
    assert robot.num_joints == 7
    assert robot.num_fingers == 2
    one = robot.arms[""]
    assert one.site == "robot/grip"
    assert one.has_servos
    assert one.grip_open.tolist() == pytest.approx([0.04], abs=1e-3)
    assert one.grip_closed.tolist() == pytest.approx([0.0], abs=1e-3)
    assert one.opening(torch.tensor([[0.02, 0.02]])).tolist() == pytest.approx([0.02], abs=2e-3)
    assert robot.upper.tolist() == pytest.approx([np.radians(160)] * 7)
    lights = [model.light(i).name for i in range(model.nlight)]
    assert not any(name.startswith("robot/") for name in lights)
    assert sum(int(model.geom_type[i]) == 0 for i in range(model.ngeom)) == 1  # the table alone
    data = mujoco.MjData(model)
    data.qpos[:] = robot.home(torch.tensor(model.qpos0)).numpy()
    mujoco.mj_forward(model, data)
    site = model.site("robot/grip").id
    np.testing.assert_allclose(data.site_xmat[site].reshape(3, 3)[:, 2], [0, 0, -1], atol=0.05)
    assert data.site_xpos[site][2] > 0.1
    np.testing.assert_allclose(one.down.numpy()[:, 2], [0, 0, -1], atol=1e-6)


def test_the_base_stands_at_pos_wherever_the_file_has_it(save):
    """The offset of the body that carries the arm is dropped, and what stands in its world moves along."""
    block = '<geom name="block" type="box" size=".1 .1 .1" pos="{}"/>'
    path = save(arm(world=block.format("1 2 .4")))
    shifted = arm(world=block.format("2 3 .9")).replace('<body name="base">', '<body name="base" pos="1 1 .5">')
    off = save(shifted, "off.xml")
    tools = []
    for file in (path, off):
        model, robot, _ = built(mjcf=file, pos=[0.1, 0.0, 0.0], init_qpos=POSE)
        data = mujoco.MjData(model)
        data.qpos[:] = robot.home(torch.tensor(model.qpos0)).numpy()
        mujoco.mj_forward(model, data)
        assert data.body("robot/base").xpos.tolist() == pytest.approx([0.1, 0.0, 0.0], abs=1e-9)
        assert data.geom("robot/block").xpos.tolist() == pytest.approx([1.1, 2.0, 0.4], abs=1e-9)
        tools.append(data.site("robot/grip").xpos.copy())
    np.testing.assert_allclose(*tools, atol=1e-9)
    free = save(arm(free=FREE).replace('<body name="base">', '<body name="base" pos="1 1 .5">'), "free.xml")
    model, _, _ = built(mjcf=free, fix_base=True)
    assert model.body("robot/base").pos.tolist() == pytest.approx(
        [0.0, 0.0, 0.5]
    )  # a base that was free, at its height


def test_views_of_what_is_left_out_are_left_out(save):
    views = "".join(f'<{kind} name="at" mode="targetbody" target="ball" pos="0 0 1"/>' for kind in ("camera", "light"))
    model, _, _ = built(mjcf=save(arm(world=f'<body name="ball"><geom size=".1"/></body>{views}')))
    names = [model.camera(i).name for i in range(model.ncam)] + [model.light(i).name for i in range(model.nlight)]
    assert "robot/at" not in names


def test_angles_of_a_tool_that_states_no_unit(save):
    """They are radians if no finger could move otherwise, and its joints take limits as those of the arm do."""
    hinge = FINGER.replace('type="slide" axis="{axis} 0 0" range="0 0.04"', 'axis="0 {axis} 0" range="0 {end}"')
    fingers = [hinge.replace("{end}", end) for end in ("0.7", "40")]
    for finger, unit, end in ((fingers[0], "", 0.7), (fingers[1], "", np.radians(40)), (fingers[1], "degree", None)):
        said = f'<compiler angle="{unit}"/>' if unit else ""
        pads = "".join(finger.format(name=f"p{i}", x=x, axis=a) for i, x, a in ((1, "0.02", "1"), (2, "-0.02", "-1")))
        drives = "".join(f'<position joint="p{i}" kp="20" ctrlrange="0 0.6"/>' for i in (1, 2))
        text = f'<body name="palm"><geom size=".02"/><site name="tip" pos="0 0 .1"/>{pads}</body>'
        tool = save(f"<mujoco>{said}<worldbody>{text}</worldbody><actuator>{drives}</actuator></mujoco>", "tool.xml")
        bare = save(arm(fingers="", drives=SERVOS, more=""), "bare.xml")
        model, robot, _ = built(mjcf=bare, tool=tool, flange="hand")
        assert robot.num_fingers == 2
        wanted = np.radians(40) if end is None else end
        assert model.joint("robot/tool/p1").range.tolist() == pytest.approx([0.0, wanted], abs=1e-6)
        model, _, _ = built(mjcf=bare, tool=tool, flange="hand", limits={"tool/p1": [0.0, 0.5], "j0": [-1.0, 1.0]})
        assert model.joint("robot/tool/p1").range.tolist() == pytest.approx([0.0, 0.5], abs=1e-6)
        assert model.joint("robot/j0").range.tolist() == pytest.approx([-1.0, 1.0], abs=1e-6)
    with pytest.raises(ConfigError, match=r"limits\.tool/p9: the model has no such joint"):
        built(mjcf=bare, tool=tool, flange="hand", limits={"tool/p9": [0.0, 0.5]})


def test_settings_of_the_file_are_no_warning(save, recwarn, caplog):
    sizes = '<size njmax="500" nconmax="100"/><visual><map znear=".1"/></visual><statistic extent="3"/>'
    built(mjcf=save(arm().replace("<default>", f"{sizes}<default>", 1)))
    assert not [one for one in recwarn if "conflict" in str(one.message)]
    assert "conflict" not in caplog.text


def test_kinematics_and_all_actions_of_a_found_arm(save):
    """Joint and tool commands move the arm as asked, in a real simulation; forward kinematics are MuJoCo's."""
    path = save(arm())
    for term, dim in (
        ({"delta_qpos": JointTermCfg(scale=0.05)}, 8),
        ({"qpos": JointTermCfg()}, 8),
        ({"ee_delta": EndEffectorTermCfg()}, 4),
        ({"ee_delta": EndEffectorTermCfg(rotation_scale=0.1)}, 7),
    ):
        model, robot, _ = built("reach_scene.xml", mjcf=path, init_qpos=POSE)
        terms = RobotActionManager(ActionsCfg(**term), robot, 1, "cpu")
        assert terms.action_dim == dim
        data = mujoco.MjData(model)
        data.qpos[:] = robot.home(torch.tensor(model.qpos0)).numpy()
        qpos = torch.tensor(data.qpos[None, robot.qpos])
        before = robot.chain.position(qpos[:, :7].float())
        twist = torch.tensor([[0.0, 0.01, 0.01, 0.0, 0.0, 0.0]])
        for _ in range(8):
            now = torch.tensor(data.qpos[None, robot.qpos])
            action = terms.encode(now.float(), twist, torch.ones(1, 1))
            data.ctrl[:] = terms.control(action, now)[0].numpy()
            for _ in range(5):
                mujoco.mj_step(model, data)
        mujoco.mj_forward(model, data)
        after = data.site_xpos[model.site("robot/grip").id]
        moved = after - before[0].numpy()
        assert np.linalg.norm(moved) > 0.03, term
        assert moved @ [0.0, 1.0, 1.0] / np.sqrt(2.0) > 0.9 * np.linalg.norm(moved), term
        reached = robot.chain.position(torch.tensor(data.qpos[None, robot.qpos], dtype=torch.float32)[:, :7])
        np.testing.assert_allclose(reached[0], after, atol=1e-5)


def test_torque_motors_take_efforts_or_servos(save):
    path = save(arm(drives=MOTORS + PULL))
    _, robot, _ = built(mjcf=path)
    assert not robot.has_servos
    effort = {"id": "ReachRL", "num_envs": 2, "robot": {"mjcf": path}, "env": {"actions": {"effort": {}}}}
    with make(effort) as env:
        assert env.action_space.shape == (8,)
        env.step(torch.ones(2, 8))
        assert env.physics.ctrl[0].max() == 1.0
    with pytest.raises(ConfigError, match=r"robot\.servos to true"):
        make({"id": "ReachRL", "robot": {"mjcf": path}})
    model, robot, _ = built(mjcf=path, servos=True)
    assert robot.has_servos
    limits = [model.actuator(f"robot/j{i}_servo").forcerange[1] for i in range(7)]
    assert limits == [80.0] * 7
    assert model.body_gravcomp[model.body("robot/l3").id] == 1.0


def test_joints_without_a_drive_get_servos(save):
    model, robot, _ = built(mjcf=save(arm(drives="", more=EQUAL)))
    assert robot.has_servos
    names = [model.actuator(i).name for i in range(model.nu)]
    assert names == [*(f"robot/j{i}_servo" for i in range(7)), "robot/f1_servo"]
    assert robot.arms[""].finger_open.tolist() == pytest.approx([0.04, 0.04], abs=2e-3)


@pytest.mark.parametrize(
    ("fingers", "drives", "more", "closed", "opened"),
    [
        (FINGERS, '<position joint="f1" kp="300"/><position joint="f2" kp="300"/>', "", [0, 0], [0.04, 0.04]),
        (FINGERS, '<position joint="f1" kp="300"/>', EQUAL, [0], [0.04]),
        (FINGER.format(name="f1", x="0.008", axis="1"), '<position joint="f1" kp="300"/>', "", [0], [0.04]),
        (
            FINGERS.replace('axis="1 0 0"', 'axis="-1 0 0"').replace('range="0 0.04"', 'range="-0.04 0"', 1),
            '<position joint="f1" kp="300"/><position joint="f2" kp="300"/>',
            "",
            [0, 0],
            [-0.04, 0.04],
        ),
        (
            FINGERS,
            '<general tendon="split" gainprm="2" biastype="affine" biasprm="0 -400 -40" ctrlrange="0 8"/>',
            TENDON + EQUAL,
            [0],
            [8],
        ),
        (FINGERS, '<motor joint="f1" ctrlrange="-5 5"/>', EQUAL, [-5], [5]),
    ],
    ids=["two servos", "equality", "one finger", "reversed", "scaled tendon", "motor"],
)
def test_grippers(save, fingers, drives, more, closed, opened):
    """Which end is open is found by trying; controls may be in any unit."""
    _, robot, _ = built(mjcf=save(arm(fingers=fingers, drives=SERVOS + drives, more=more)), init_qpos=POSE)
    one = robot.arms[""]
    assert one.grip_closed.tolist() == pytest.approx(closed, abs=1e-6)
    assert one.grip_open.tolist() == pytest.approx(opened, abs=1e-6)
    wide = one.opening(one.finger_open.unsqueeze(0)) - one.opening(one.finger_closed.unsqueeze(0))
    assert 0.015 < float(wide) < 0.045


def test_keyframe_home_is_the_start(save):
    values = " ".join(str(0.1 * i) for i in range(9))
    keys = f'<keyframe><key name="other" qpos="{"0 " * 9}"/><key name="home" qpos="{values}"/></keyframe>'
    _, robot, _ = built(mjcf=save(arm(keys=keys)))
    assert robot.init_qpos[:7].tolist() == pytest.approx([0.1 * i for i in range(7)])


def test_only_some_joints_and_own_limits(save):
    """Joints that are left out are held; limits of the config go before those of the model."""
    settings = {"joints": ["j1", "j3", "j5", "j6"], "limits": {"j3": [-1.0, 0.5]}, "init_qpos": [0.1, 0.2, 0.3, 0.4]}
    model, robot, cfg = built(mjcf=save(arm()), **settings)
    assert describe(cfg)[0][1].locked == ("j0", "j2", "j4")
    assert model.joint("robot/j3").range.tolist() == pytest.approx([-1.0, 0.5])
    assert robot.init_qpos[:4].tolist() == [0.1, 0.2, 0.3, 0.4]
    data = mujoco.MjData(model)
    data.qpos[:] = robot.home(torch.tensor(model.qpos0)).numpy()
    mujoco.mj_forward(model, data)
    position = robot.chain.position(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    np.testing.assert_allclose(position[0], data.site_xpos[model.site("robot/grip").id], atol=1e-5)


def test_a_body_stands_for_a_missing_site(save):
    model, robot, _ = built(mjcf=save(arm(site="")), tool_site="hand", tool_axis="z")
    assert robot.arms[""].site == "robot/hand_tool_frame"
    assert model.site("robot/hand_tool_frame").bodyid[0] == model.body("robot/hand").id
    assert (
        built(mjcf=save(arm(site="", fingers="", drives=SERVOS, more="")))[1].arms[""].site == "robot/hand_tool_frame"
    )


def test_our_tool_on_their_flange(save):
    """A gripper of this package continues the axis of a foreign flange, whatever its name."""
    path = save(arm(site='<site name="plate" pos="0 0 0.02"/>', fingers="", drives=SERVOS, more=""))
    model, robot, _ = built(mjcf=path, tool="gripper", flange="plate", init_qpos=POSE)
    assert robot.num_fingers == 2
    data = mujoco.MjData(model)
    data.qpos[:] = robot.home(torch.tensor(model.qpos0)).numpy()
    mujoco.mj_forward(model, data)
    tool, plate = data.site("robot/tool/tool"), data.site("robot/plate")
    np.testing.assert_allclose(tool.xpos - plate.xpos, 0.105 * plate.xmat.reshape(3, 3)[:, 2], atol=1e-6)


FREE = "<freejoint name='root'/>"
SECOND = arm()[arm().index('<body name="base">') : arm().index("</worldbody>")]
for _old in ("base", "hand", "grip", "f1", "f2", *(f"{kind}{i}" for kind in "lj" for i in range(7))):
    SECOND = SECOND.replace(f'"{_old}"', f'"other_{_old}"')


@pytest.mark.parametrize(
    ("text", "settings", "error", "words"),
    [
        ({}, {"joints": ["j0", "elbow"]}, ConfigError, r"robot\.joints: the model has no joint 'elbow'.*j0, j1"),
        ({}, {"joints": ["j3", "j1"]}, ConfigError, r"order from the base to the tool, \['j1', 'j3'\]; got"),
        ({"limits": "0 0"}, {}, ConfigError, r"no limits: j0, j1, .*robot\.limits: \{\"j0\": \[-6\.28, 6\.28\]"),
        ({"free": FREE}, {}, ConfigError, r"base of this robot is free \(joint 'root'\).*fix_base"),
        ({}, {"tool_site": "gripp"}, ConfigError, r"no site or body is called 'gripp'. Did you mean 'grip'"),
        ({}, {"joints": ["j0", "j1"], "tool_site": "grip"}, ConfigError, r"'grip' is not fixed to the last link 'l1'"),
        ({}, {"init_qpos": [0.0] * 5}, ConfigError, r"init_qpos: expected 7 joints and 2 fingers, got 5"),
        ({}, {"init_tool": [5.0, 0.0, 0.2]}, ConfigError, r"init_tool: the arm does not reach \[5\.0"),
        ({}, {"gripper": ["thumb"]}, ConfigError, r"gripper: no joint of the hand is called 'thumb'.*f1, f2"),
        ({}, {"limits": {"j9": [0.0, 1.0]}}, ConfigError, r"limits\.j9: the model has no such joint"),
        ({}, {"flange": "hand", "tool": "spoon"}, UnknownNameError, "unknown tool 'spoon'"),
        ({"world": SECOND}, {}, ConfigError, r"has 2 chains of joints .*robot\.arms"),
        ({}, {"flange": "nope", "tool": "pusher"}, ConfigError, r"robot\.flange: no site or body is called 'nope'"),
        (
            {},
            {"arms": {"a": {"pos": [0, 0, 0]}, "b": {"tool_site": "grip"}}},
            ConfigError,
            "either robots of their own",
        ),
    ],
    ids=lambda value: None if not isinstance(value, str) else value[:30],
)
def test_what_cannot_be_found_out_is_one_message(save, text, settings, error, words):
    with pytest.raises(error, match=words):
        built(mjcf=save(arm(**text)), **settings)


def test_files_that_cannot_be_read(save, tmp_path):
    with pytest.raises(AssetError, match=r"no such file: nowhere\.xml"):
        built(mjcf="nowhere.xml")
    with pytest.raises(AssetError, match="'nobody_has_it' is not installed"):
        built(mjcf="package://nobody_has_it/arm.xml")
    path = save(arm())
    (tmp_path / "meshes" / "tetra.obj").unlink()
    place = str(tmp_path / "meshes" / "tetra.obj")
    with pytest.raises(AssetError, match=rf"needs the file 'tetra\.obj', and there is no {re.escape(place)}\. Put"):
        built(mjcf=path)
    with pytest.raises(AssetError, match=r"no valid MJCF model: it is no XML \(.*line 2"):
        built(mjcf=save("<mujoco>\n<worldbody>"))
    with pytest.raises(AssetError, match=r"a part that models include \(<mujocoinclude>\), and no model by itself"):
        built(mjcf=str(tmp_path / "assets.xml"))
    with pytest.raises(AssetError, match="no valid URDF model"):
        built(mjcf=save('<robot name="a"><link name="b"/><joint name="j" type="fixed"/></robot>', "a.urdf"))
    with pytest.raises(ConfigError, match="no joints that could be an arm's"):
        built(mjcf=save("<mujoco><worldbody><body><geom size='1'/></body></worldbody></mujoco>"))
    finger = "<body><joint/><geom size='.1'/><body pos='0 0 1'><joint/><geom size='.1'/></body></body>"
    with pytest.raises(ConfigError, match=r"2 chains of joints .* Name one by robot\.joints"):
        built(mjcf=save(f"<mujoco><worldbody>{finger}{finger}</worldbody></mujoco>"))
    (tmp_path / "meshes" / "tetra.obj").write_text(TETRA)
    path = save(arm(fingers="", drives="", more="").replace('axis="0 1 0" range="-160 160"', 'type="ball"'))
    with pytest.raises(ConfigError, match=r"ball joints are not supported: joint 'j1', 'j3', 'j5'"):
        built(mjcf=path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('damping="1"', 'damping="nan"', "damping of the joint 'j0' is nan"),
        ('kp="800"', 'kp="inf"', "of (the )?actuator .* is -?inf"),
        ('name="grip" pos="0 0 0.08"', 'name="grip" pos="0 nan 0.08"', "pos of the site 'grip' is nan"),
    ],
)
def test_a_number_that_is_not_finite_is_one_message(save, tmp_path, monkeypatch, capfd, old, new, said):
    """Checked and built alike, and MuJoCo writes no file and no warning."""
    (tmp_path / "meshes" / "tetra.obj").write_text(TETRA)
    path = save(arm(drives=SERVOS, more="").replace(old, new))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssetError, match=rf"mine\.xml: .*{said}; expected finite numbers"):
        make({"id": "ReachRL", "robot": {"mjcf": path}})
    assert main(["robots", "check", path]) == 2
    out, err = capfd.readouterr()
    assert re.search(said, err.replace("\n", " "))
    assert "WARNING" not in out + err
    assert not (tmp_path / "MUJOCO_LOG.TXT").exists()


def test_robots_check_takes_urdf_and_tells_folders(tmp_path, capsys):
    body = '<inertial><mass value="1"/><inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial>'
    joint = (
        '<parent link="a"/><child link="b"/><axis xyz="0 0 1"/><limit lower="-1" upper="1" effort="9" velocity="1"/>'
    )
    links = "".join(f'<link name="{name}">{body}</link>' for name in "ab")
    path = tmp_path / "mine.urdf"
    path.write_text(f'<robot name="r">{links}<joint name="j" type="revolute">{joint}</joint></robot>')
    assert main(["robots", "check", str(path)]) == 0
    assert "1 joints to b" in capsys.readouterr().out
    assert main(["robots", "check", str(tmp_path)]) == 2
    assert "is a folder; expected a file" in capsys.readouterr().err.replace("\n", " ")


def test_a_free_base_can_be_bolted_down(save):
    model, robot, _ = built(mjcf=save(arm(free=FREE)), fix_base=True)
    assert robot.num_joints == 7
    assert mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_JOINT, "robot/root") == -1


def test_paths_are_relative_to_the_config(save, tmp_path, monkeypatch):
    """A config finds the robot beside it, and the settings of the task's own robot do not get mixed in."""
    save(arm())
    (tmp_path / "gym.json").write_text(json.dumps({"id": "ReachRL", "num_envs": 1, "robot": {"mjcf": "mine.xml"}}))
    monkeypatch.chdir(tmp_path.parent)
    cfg = load_gym_config(tmp_path / "gym.json")
    assert cfg.robot.mjcf == str(tmp_path / "mine.xml")
    assert cfg.robot.tool is None
    assert cfg.robot.init_qpos == []
    monkeypatch.chdir(tmp_path)
    again = load_gym_config({"id": "ReachRL", "robot": {"mjcf": "mine.xml"}})
    assert again.robot.mjcf == str(tmp_path / "mine.xml")
    assert load_gym_config(again.to_dict()).to_dict() == again.to_dict()


def test_registered_robots_solve_our_tasks(save):
    """The expert of a task, written for another arm, reaches with this one, whose hand is not the UR5's."""
    register_robot("seven", save(arm(drives=MOTORS + PULL)), init_tool=[0.5, 0.0, 0.3], servos=True)
    try:
        area = {"x": [0.4, 0.55], "y": [-0.2, 0.2], "z": [0.15, 0.35]}
        for task, change in (("ReachRL", {"randomize_target": area}), ("PickCubeRL", {})):
            with make(
                {"id": task, "num_envs": 8, "seed": 0, "robot": {"uid": "seven"}, "env": {"events": change}}
            ) as env:
                assert env.robot.num_joints == 7
                solved = torch.zeros(8, dtype=torch.bool)
                for _ in range(env.max_episode_steps):
                    solved |= env.step(env.expert_action())[4]["metrics"]["success"] > 0
                assert solved.float().mean() >= 0.9, task
    finally:
        robot_files.ROBOTS.pop("seven")
    with pytest.raises(UnknownNameError, match="unknown robot 'seven'"):
        built(uid="seven")
    with pytest.raises(ConfigError, match="a robot of this package"):
        register_robot("ur5", save(arm()))


def test_two_arms_of_one_model_are_driven_arm_by_arm(save):
    """Two arms of one file: each has its part of the action, and moves nothing of the other's."""
    drives = SERVOS + SERVOS.replace('joint="j', 'joint="other_j')
    text = arm(world=SECOND.replace('name="other_base"', 'name="other_base" pos="0 1 0"'), drives=drives, more="")
    arms = {
        "left": {"tool_site": "grip", "gripper": [], "init_qpos": POSE},
        "right": {"tool_site": "other_grip", "gripper": [], "init_qpos": POSE},
    }
    model, robot, _ = built("reach_scene.xml", mjcf=save(text), arms=arms)
    assert list(robot.arms) == ["left", "right"]
    terms = RobotActionManager(ActionsCfg(delta_qpos=JointTermCfg(scale=0.1)), robot, 1, "cpu")
    assert terms.action_dim == 14
    data = mujoco.MjData(model)
    home = data.qpos[:] = robot.home(torch.tensor(model.qpos0)).numpy()
    action = torch.zeros(1, 14)
    action[:, 7:] = 1.0
    data.ctrl[:] = terms.control(action, torch.tensor(home[None, robot.qpos]))[0].numpy()
    for _ in range(100):
        mujoco.mj_step(model, data)
    moved = np.abs(data.qpos - home)[robot.qpos]
    assert moved[:7].max() < 0.02
    assert moved[7:].min() > 0.02
    with pytest.raises(ConfigError, match="needs one arm, and this robot has left, right"):
        make({"id": "ReachRL", "robot": {"mjcf": save(text), "arms": arms}})


def test_arms_with_models_of_their_own_leave_the_posture_of_the_task_behind(save):
    """They stand where the task's arms do, and inherit what names no part of a model."""
    path = save(arm(drives=MOTORS + PULL))
    left, right = {"mjcf": path}, {"mjcf": path, "pos": [0.5, -0.7, 0.0], "quat": [0.7071, 0.0, 0.0, 0.7071]}
    with make({"id": "LiftBarRL", "robot": {"servos": True, "arms": {"left": left, "right": right}}}) as env:
        assert env.robot.has_servos
        assert [one.num_joints for one in env.robot.arms.values()] == [7, 7]
    cfg = load_gym_config({"id": "LiftBarRL", "robot": {"arms": {"left": left, "right": right}}}).robot
    assert cfg.tool is None
    assert (cfg.arms["left"].pos, cfg.arms["left"].yaw) == ((0.5, 0.62, 0.0), -1.5708)
    assert (cfg.arms["right"].pos, cfg.arms["right"].yaw) == ((0.5, -0.7, 0.0), None)
    mixed = load_gym_config({"id": "LiftBarRL", "robot": {"arms": {"left": left}}}).robot
    assert (mixed.tool, mixed.arms["left"].tool, mixed.arms["right"].tool) == (None, None, "gripper")
    assert len(mixed.arms["right"].init_qpos) == 8
    shared = RobotCfg.from_dict({"tool": "gripper", "flange": "hand", "arms": {"a": left, "b": {"pos": [0, 0, 0]}}})
    one, other = (part.cfg for part in robot_files.split_robot(shared))
    assert (one.tool, one.flange) == ("gripper", None)
    assert (other.tool, other.flange) == ("gripper", "hand")


@pytest.mark.parametrize(("task", "dim"), [("LiftBarRL", 8), ("HandOverRL", 8)])
def test_two_arm_tasks(task, dim):
    """The expert solves it; nothing is solved by standing still or at random, and the expert earns the most."""
    returns = {}
    for who in ("expert", "still", "random"):
        with make(task, num_envs=4, seed=3) as env:
            assert env.action_space.shape == (dim,)
            assert env.observation_space["robot"]["ee_pos"].shape == (6,)
            generator, solved = torch.Generator().manual_seed(0), torch.zeros(4, dtype=torch.bool)
            ended, total = torch.zeros(4, dtype=torch.bool), torch.zeros(4)
            for _ in range(env.max_episode_steps):
                drawn = (2.0 * torch.rand(4, dim, generator=generator) - 1.0) * (who == "random")
                action = env.expert_action() if who == "expert" else drawn
                _, reward, terminated, truncated, info = env.step(action)
                total += reward * ~ended
                solved |= (info["metrics"]["success"] > 0) & ~ended
                ended |= terminated | truncated
            returns[who] = float(total.mean())
            assert bool(solved.all()) == (who == "expert"), who
            assert bool(solved.any()) == (who == "expert"), who
    assert returns["expert"] > max(returns["still"], returns["random"]) + 20.0


@pytest.mark.parametrize(
    ("drive", "joint"),
    [
        ('<position joint="j{}" kp="800" dampratio="1" forcerange="-4 6"/>', ""),
        ('<position joint="j{}" kp="2" kv="0.1" gear="20" forcerange="-0.2 0.2"/>', ""),
        ('<position joint="j{}" kp="800" dampratio="1"/>', ' actuatorfrcrange="-4 4"'),
    ],
)
def test_servos_saturate_alike_wherever_their_torque_is_limited(save, drive, joint):
    drives = "".join(drive.format(i) for i in range(7))
    text = arm(drives=drives + PULL).replace(' class="arm"/>', f' class="arm"{joint}/>')
    assert built(mjcf=save(text))[1].only_arm.saturation == pytest.approx(4.0 / 800.0)


def test_robots_check_says_what_it_found(save, capsys, monkeypatch):
    """The printed config works; a stuck joint and a free base are reported."""
    monkeypatch.setenv("COLUMNS", "200")
    path = save(arm(drives=MOTORS + PULL))
    assert main(["robots", "check", path]) == 0
    said = capsys.readouterr().out
    assert "7 joints to l6" in said
    assert "with the base at (0.000, 0.000, 0.000) and the tool at (" in said
    assert "driven by squeeze" in said
    assert "servos take their place" in said
    config = json.JSONDecoder().raw_decode(said[said.index('"robot": {') + len('"robot": ') :])[0]
    assert built(**config)[1].has_servos
    assert "The file alone is not enough" in said
    given = {}
    calls = {"register_robot": lambda name, mjcf, **settings: given.update(name=name, mjcf=mjcf, **settings)}
    exec(said[said.index("register_robot(") :], calls)
    assert given.pop("name") == path.split("/")[-2]
    assert given == config
    assert main(["robots", "check", save(arm(free=FREE))]) == 2
    assert "this arm is free (joint 'root'), and it has no legs" in capsys.readouterr().err
    assert main(["robots", "check", path, "--image", "robot.txt"]) == 2
    assert "ends in .png" in capsys.readouterr().err
    weak = SERVOS.replace('joint="j3" kp="800"', 'joint="j3" kp="800" forcerange="-0.01 0.01"')
    assert main(["robots", "check", save(arm(drives=weak + PULL))]) == 1
    assert "does not follow: robot/j3" in capsys.readouterr().out.replace("\n", " ")
    assert (
        main(["robots", "check", save(arm(limits="0 0", drives=SERVOS.replace("/>", ' ctrllimited="false"/>') + PULL))])
        == 0
    )
    assert "limits are required" in capsys.readouterr().out
    assert main(["robots", "list"]) == 0
    assert "ur5" in capsys.readouterr().out
    assert main(["robots", "check", "ur6"]) == 2
    assert "Did you mean 'ur5'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tool", "turned"),
    [
        ('<frame euler="0 90 0"><geom name="it" size="0.01"/></frame>', 90.0),
        ('<geom name="it" type="box" size="0.01 0.01 0.01" axisangle="0 1 0 90"/>', 90.0),
        ('<!-- a -- b --><geom name="it" type="box" size="0.01 0.01 0.01" euler="0 1 0"/>', 1.0),
    ],
)
def test_angles_of_a_tool_without_joints_are_in_degrees(tmp_path, tool, turned):
    file = tmp_path / "tool.xml"
    file.write_text(f'<mujoco><worldbody><body name="hand">{tool}</body></worldbody></mujoco>')
    quat = model_files.read_tool(file).compile().geom("it").quat
    assert np.degrees(2.0 * np.arccos(quat[0])) == pytest.approx(turned)


def test_pedestals_move_with_the_base(save):
    ends = '<geom name="foot" type="capsule" fromto="0.5 0 0 0.5 0 0.7" size="0.03"/>'
    text = arm(world=ends).replace('<body name="base">', '<body name="base" pos="0.5 0 0.8">')
    model, robot, _ = built(mjcf=save(text))
    base = model.body(model.jnt_bodyid[model.joint(robot.only_arm.joints[0]).id]).rootid[0]
    assert model.body_pos[base].tolist() == pytest.approx([0.0, 0.0, 0.0])


def test_anchors_in_the_world_move_with_the_base(save):
    """A link is tied to a point of the world, which is where it is in both models."""
    found = []
    for x, z in ((0.0, 0.0), (0.5, 0.8)):
        tie = f'<connect body1="world" body2="l2" anchor="{x} 0 {z + 0.4}"/>'
        text = arm(more=TENDON + EQUAL.replace("</equality>", f"{tie}</equality>"))
        model, *_ = built(mjcf=save(text.replace('<body name="base">', f'<body name="base" pos="{x} 0 {z}">')))
        found.append(model.eq_data[model.eq_type == int(mujoco.mjtEq.mjEQ_CONNECT)][0, :6].tolist())
    assert found[1] == pytest.approx(found[0])
