"""Robots as URDF files: frames of fixed joints, visual geometry, meshes of ROS packages, and hands without a site."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
import pytest

from embodichain.cli.main import main
from embodichain.envs.env_cfg import RobotCfg
from embodichain.envs.model_files import read_spec
from embodichain.envs.robot_check import suggest
from embodichain.envs.robots import Robot, build_model, describe
from embodichain.errors import AssetError

INERTIA = '<inertial><mass value="1"/><inertia ixx=".01" iyy=".01" izz=".01" ixy="0" ixz="0" iyz="0"/></inertial>'
BOX = '<geometry><box size=".06 .06 .2"/></geometry>'
TETRA = "v 0 0 0\nv .1 0 0\nv 0 .1 0\nv 0 0 .1\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 1 4 3\n"


def joint(name: str, parent: str, child: str, xyz: str, axis: str = "0 1 0", kind: str = "revolute") -> str:
    limit = '<limit lower="-2" upper="2" effort="50" velocity="2"/>' if kind == "revolute" else ""
    limit = '<limit lower="0" upper="0.04" effort="50" velocity="1"/>' if kind == "prismatic" else limit
    return (
        f'<joint name="{name}" type="{kind}"><parent link="{parent}"/><child link="{child}"/><origin xyz="{xyz}"/>'
        f'<axis xyz="{axis}"/>{limit}</joint>'
    )


def urdf(shape: str = "", more: str = "", settings: str = "") -> str:
    """The text of an arm of three joints, 0.7 m high when stretched, whose link ``c`` has a shape."""
    links = "".join(f'<link name="{name}">{INERTIA}{shape if name == "c" else ""}</link>' for name in "abc")
    joints = (
        joint("ja", "base", "a", "0 0 .1", "0 0 1") + joint("jb", "a", "b", "0 0 .2") + joint("jc", "b", "c", "0 0 .4")
    )
    return f'<robot name="mine">{settings}<link name="base"/>{links}{joints}{more}</robot>'


TOOL = '<link name="tool0"/>' + joint("jt", "c", "tool0", "0 0 .25", kind="fixed")


@pytest.fixture
def save(tmp_path):
    def write(text: str, name: str = "mine.urdf") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def built(**settings) -> tuple[mujoco.MjModel, Robot]:
    cfg = RobotCfg(**settings)
    model = build_model("reach_scene.xml", cfg)
    return model, Robot(model, describe(cfg))


def tool_at(model: mujoco.MjModel, robot: Robot) -> np.ndarray:
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return data.site(robot.arms[""].site).xpos


@pytest.mark.parametrize("tool", [{}, {"tool_site": "tool0"}])
def test_frame_of_a_fixed_joint_is_the_tool(save, tool):
    model, robot = built(mjcf=save(urdf(more=TOOL)), **tool)
    assert robot.num_joints == 3
    np.testing.assert_allclose(tool_at(model, robot), [0.0, 0.0, 0.95], atol=1e-6)


def test_what_the_file_says_of_fixed_joints_counts(save):
    spec = read_spec(Path(save(urdf(more=TOOL, settings='<mujoco><compiler fusestatic="true"/></mujoco>'))))
    assert "tool0" not in [spec.compile().body(i).name for i in range(spec.compile().nbody)]


def test_visual_geometry_is_drawn_instead_of_collision_geometry(save):
    visual, collision = f"<visual>{BOX}</visual>", f"<collision>{BOX}</collision>"
    for shape, drawn, hidden in ((visual, 1, 0), (collision, 1, 0), (visual + collision, 1, 1)):
        model = read_spec(Path(save(urdf(shape)))).compile()
        assert (model.geom_group < 3).sum() == drawn
        assert (model.geom_group >= 3).sum() == hidden
        colliding = (model.geom_contype > 0) | (model.geom_conaffinity > 0)
        assert colliding.sum() == shape.count("<collision>")


@pytest.mark.parametrize("kept", ["urdf/mine.urdf", "share/robots/mine.urdf"])
def test_meshes_are_found_in_ros_packages(save, tmp_path, kept):
    """A mesh of the same name for drawing and colliding; one for drawing that MuJoCo cannot read is left out."""
    folder = "mine_description" if kept.startswith("urdf") else "share/mine_description"
    save(TETRA, f"{folder}/meshes/c.obj")
    save(TETRA.replace(".1", ".2"), f"{folder}/meshes/visual/c.obj")
    shape = "".join(
        f'<{kind}><geometry><mesh filename="package://mine_description/meshes/{file}"/></geometry></{kind}>'
        for kind, file in (("collision", "c.obj"), ("visual", "visual/c.obj"), ("visual", "c.dae"))
    )
    path = save(urdf(shape, TOOL), f"{folder}/{kept}" if kept.startswith("urdf") else kept)
    model = read_spec(Path(path)).compile()
    assert model.nmesh == 2
    assert sorted(model.geom_group) == [1, 3]
    visual, collision = np.argsort(model.geom_group)
    assert model.geom_rbound[visual] == pytest.approx(2 * model.geom_rbound[collision])
    assert built(mjcf=path)[1].num_joints == 3


def test_a_missing_ros_package_is_named(save, capsys):
    mesh = '<geometry><mesh filename="package://other_description/meshes/c.stl"/></geometry>'
    path = save(urdf(f"<collision>{mesh}</collision>"))
    with pytest.raises(AssetError, match=r"no package://other_description/meshes/c.stl\. The ROS package 'other_desc"):
        read_spec(Path(path))
    assert main(["robots", "check", path]) == 2
    assert "write their paths relative to mine.urdf" in capsys.readouterr().err.replace("\n", " ")
    assert read_spec(Path(save(urdf(f"<visual>{mesh}</visual>")))).compile().ngeom == 0  # not needed


def fingers(tip: float) -> str:
    """Two fingers that slide along y, whose boxes end at a height above the last joint."""
    shape = f'<collision><origin xyz="0 0 .03"/><geometry><box size=".02 .01 .06"/></geometry></collision>{INERTIA}'
    links = '<link name="hand"/>' + "".join(f'<link name="{side}">{shape}</link>' for side in ("left", "right"))
    ends = "".join(  # the hand is 5 cm above the joint
        joint(f"{side}_slide", "hand", side, f"0 0 {tip - 0.11:.3f}", f"0 {sign} 0", "prismatic")
        for side, sign in (("left", 1), ("right", -1))
    )
    return links + joint("jh", "c", "hand", "0 0 .05", kind="fixed") + ends


def test_tool_of_a_hand_without_a_site_is_between_the_tips_of_the_fingers(save, capsys):
    path = save(urdf(f"<collision>{BOX}</collision>", fingers(0.2)))
    model, robot = built(mjcf=path)
    assert robot.num_fingers == 2
    np.testing.assert_allclose(tool_at(model, robot), [0.0, 0.0, 0.7 + 0.19], atol=1e-6)
    model, robot = built(mjcf=path, tool_site="hand")  # a body that is named is meant itself
    np.testing.assert_allclose(tool_at(model, robot), [0.0, 0.0, 0.75], atol=1e-6)
    assert main(["robots", "check", path]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "body hand, between the tips of the fingers" in out
    assert '"tool_site"' not in out  # it would be the origin of the hand


def test_a_frame_named_like_a_tool_is_the_tool(save):
    """Of several frames, and although there are fingers."""
    other = '<link name="ft_frame"/>' + joint("jf", "c", "ft_frame", "0 0 .1", kind="fixed")
    np.testing.assert_allclose(tool_at(*built(mjcf=save(urdf(more=other + TOOL)))), [0.0, 0.0, 0.95], atol=1e-6)
    frame = '<link name="tcp"/>' + joint("jt", "hand", "tcp", "0.02 0 .06", kind="fixed")
    np.testing.assert_allclose(
        tool_at(*built(mjcf=save(urdf(more=fingers(0.2) + frame)))), [0.02, 0.0, 0.81], atol=1e-6
    )


def test_tools_of_two_arms_are_where_the_check_says(save):
    """The config that it suggests has the same tools as the arms named by their joints."""
    one = urdf(f"<collision>{BOX}</collision>", fingers(0.2))
    links = one.partition('<link name="base"/>')[2].removesuffix("</robot>")
    for name in ("a", "b", "c", "ja", "jb", "jc", "hand", "jh", "left", "right", "left_slide", "right_slide"):
        links = links.replace(f'"{name}"', '"{side}_' + name + '"')
    arms = links.replace("{side}", "l") + links.replace("{side}", "r")
    path = save(f'<robot name="two"><link name="base"/>{arms}</robot>')
    cfg, _ = suggest(RobotCfg(mjcf=path))
    joints = {side: {"joints": [f"{side}_{name}" for name in ("ja", "jb", "jc")]} for side in "lr"}
    for given in (cfg, RobotCfg.from_dict({"mjcf": path, "arms": joints})):
        for arm in [arm for _, spec in describe(given) for arm in spec.arms]:
            assert arm.parts.site_pos == pytest.approx((0.0, 0.0, 0.14))


@pytest.mark.parametrize("shape", ["", '<geometry><mesh filename="c.stl"/></geometry>'])
def test_what_cannot_be_drawn_is_left_out(save, shape):
    save("solid ascii\nendsolid ascii\n", "c.stl")
    visual = f"<visual>{shape}</visual><collision>{BOX}</collision>"
    assert read_spec(Path(save(urdf(visual)))).compile().ngeom == 1


def test_meshes_without_their_path_are_found(save):
    save(TETRA, "assets/c.obj")
    mesh = '<geometry><mesh filename="package://other/meshes/c.obj"/></geometry>'
    settings = '<mujoco><compiler meshdir="assets" strippath="true"/></mujoco>'
    model = read_spec(
        Path(save(urdf(f"<collision>{mesh}</collision><visual>{mesh}</visual>", TOOL, settings)))
    ).compile()
    assert sorted(model.geom_group) == [1, 3]


@pytest.mark.parametrize("encoding", ["gbk", "foo"])
def test_encodings_that_python_cannot_parse_are_left_to_mujoco(save, encoding):
    body = '<mujoco><worldbody><body><geom size="1"/></body></worldbody></mujoco>'
    text = f'<?xml version="1.0" encoding="{encoding}"?>{body}'
    assert read_spec(Path(save(text, "mine.xml"))).compile().ngeom == 1


@pytest.mark.extra("robots")
def test_the_urdf_of_a_panda(capsys):
    """Its tool is where Franka's documentation has it: 103.4 mm from the hand."""
    path = "package://robosuite/models/assets/bullet_data/panda_description/urdf/panda_arm_hand.urdf"
    model, robot = built(mjcf=path)
    assert (robot.num_joints, robot.num_fingers) == (7, 2)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    hand = data.body("robot/panda_hand")
    away = hand.xmat.reshape(3, 3).T @ (data.site(robot.arms[""].site).xpos - hand.xpos)
    np.testing.assert_allclose(away, [0.0, 0.0, 0.1034], atol=3e-3)
    assert main(["robots", "check", path]) == 0
    assert "register_robot(\n    'panda_arm_hand'," in capsys.readouterr().out
