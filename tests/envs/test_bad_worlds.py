"""Odd robots, scenes and terms: what can be understood works, and what is wrong is one message that says what to do."""

import mujoco
import pytest
import torch

from embodichain.envs.env_cfg import RobotCfg
from embodichain.envs.robots import Robot, build_model, describe
from embodichain.errors import AssetError, ConfigError

LINK = """<body name="l{i}" pos="0 0 0.2"><joint name="j{i}" axis="{axis}" range="-2 2" damping="1" armature="0.05"/>
  <geom type="capsule" fromto="0 0 0 0 0 0.2" size="0.03" mass="1"/>"""


def robot(end="", motors="", more="", base=""):
    """The text of an arm of four joints."""
    links = "".join(LINK.format(i=i, axis="0 0 1" if i == 1 else "0 1 0") for i in range(1, 5))
    return f"""<mujoco><compiler angle="radian"/><worldbody><body name="base">{base}
      {links}{end}{"</body>" * 5}</worldbody>
      <actuator>{motors}</actuator>{more}</mujoco>"""


def built(tmp_path, text, **settings):
    (tmp_path / "mine.xml").write_text(text)
    cfg = RobotCfg(mjcf=str(tmp_path / "mine.xml"), **settings)
    model = build_model("table_scene.xml", cfg)
    return model, Robot(model, describe(cfg))


def key(qpos):
    return f'<keyframe><key name="home" qpos="{qpos}"/></keyframe>'


@pytest.mark.parametrize(
    ("parts", "site"),
    [
        ({"end": '<site pos="0 0 0.2"/>'}, "unnamed_site"),
        ({"end": '<site pos="0 0 0.2"/><site pos="0 0 0.1"/><site name="mount_of_hand"/>'}, "unnamed_site"),
        ({"end": '<site pos="0 0 0.1"/><site name="tcp" pos="0 0 0.2"/>'}, "tcp"),
        ({"motors": '<position name="j1_servo" joint="j2" kp="50"/>'}, "l4_tool_frame"),
        ({"base": '<site name="l4_tool_frame"/>'}, "l4_tool_frame_2"),
    ],
)
def test_names_that_are_missing_or_taken_are_no_obstacle(tmp_path, parts, site):
    model, found = built(tmp_path, robot(**parts), init_qpos=[0.1, 0.5, 1.0, 1.0])
    assert found.num_joints == 4
    assert found.arms[""].site == f"robot/{site}"
    data = mujoco.MjData(model)
    data.qpos[:] = found.home(torch.tensor(model.qpos0)).numpy()
    mujoco.mj_kinematics(model, data)
    reached = found.chain.position(found.init_qpos[None].float())[0]
    torch.testing.assert_close(reached, torch.tensor(data.site(f"robot/{site}").xpos).float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        (robot(), {"arms": {"a": {}, "b": {}}}, "robot.arms.b: it moves the same joints as robot.arms.a"),
        (robot(), {"init_qpos": [0, 9, 0, 0]}, "robot.init_qpos has j2 at 9, outside its limits [-2, 2]"),
        (robot(more=key("0 0 -8 0")), {}, "keyframe of the model, which has j3 at -8, outside its limits"),
        (robot(more=key("0 0")), {}, "qpos"),
        (robot(), {"quat": [0, 0, 0, 0]}, "quat: expected a rotation"),
        (robot(), {"joints": ["j1", "j1"]}, "robot.joints: j1 is given twice"),
    ],
)
def test_robots_that_cannot_be_meant_are_one_message(tmp_path, text, settings, told):
    (tmp_path / "mine.xml").write_text(text)
    given = {"mjcf": str(tmp_path / "mine.xml"), **settings}
    with pytest.raises((ConfigError, AssetError)) as caught:
        build_model("table_scene.xml", RobotCfg.from_dict(given))
    assert told in str(caught.value)
