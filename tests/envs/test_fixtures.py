"""Fixtures: where their parts are, what moves and what does not, and that resets place them."""

import mujoco
import numpy as np
import pytest
import torch

from embodichain.envs.env_cfg import RobotCfg
from embodichain.envs.fixtures import (
    ButtonsCfg,
    DoorCfg,
    DrawersCfg,
    HoleCfg,
    PartPoint,
    PegCfg,
    add_fixture,
)
from embodichain.envs.physics.mujoco_cpu import MujocoCpuPhysics
from embodichain.envs.robots import build_model
from embodichain.envs.scene_cfg import SceneCfg
from embodichain.errors import AssetError, ConfigError, SimulationError

ALL = {
    "cabinet": DrawersCfg(pos=(0.8, 0.5, 0.0), yaw=0.4),
    "left": DoorCfg(pos=(0.8, 0.0, 0.0), yaw=-0.3),
    "right": DoorCfg(pos=(0.8, -0.5, 0.1), hinge="right"),
    "console": ButtonsCfg(pos=(0.4, -0.3, 0.0), colors=("red", "green", "blue")),
    "block": HoleCfg(pos=(0.4, 0.2, 0.0)),
    "peg": PegCfg(pos=(0.4, 0.2, 0.3)),
}


def furnished(**fixtures) -> mujoco.MjModel:
    def furnish(spec):
        for name, cfg in fixtures.items():
            add_fixture(spec, name, cfg)

    return build_model("reach_scene.xml", RobotCfg(tool="gripper"), furnish=furnish)


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return furnished(**ALL)


def test_points_of_parts_are_where_mujoco_has_them(model):
    data, rng = mujoco.MjData(model), np.random.default_rng(0)
    sites = [model.site(i).name for i in range(model.nsite) if "/" in model.site(i).name]
    points = {site: PartPoint(model, site) for site in sites if not site.startswith("robot/")}
    assert len(points) == 9  # three drawers, two doors, three buttons, a hole
    for _ in range(5):
        data.mocap_pos[:] = rng.uniform(-1, 1, data.mocap_pos.shape)
        data.mocap_quat[:] = rng.normal(size=data.mocap_quat.shape)
        data.mocap_quat /= np.linalg.norm(data.mocap_quat, axis=1, keepdims=True)
        for point in points.values():
            if point.qpos >= 0:
                data.qpos[point.qpos] = rng.uniform(0, point.limit)
        mujoco.mj_forward(model, data)
        for site, point in points.items():
            mocap = int(model.body(point.fixture).mocapid[0])
            pos, quat = (torch.tensor(x[mocap], dtype=torch.float32)[None] for x in (data.mocap_pos, data.mocap_quat))
            joint = None if point.qpos < 0 else torch.tensor(data.qpos[[point.qpos]], dtype=torch.float32)
            np.testing.assert_allclose(point.position(pos, quat, joint)[0], data.site(site).xpos, atol=1e-6)


def test_drawers_slide_and_doors_swing_towards_the_robot(model):
    for name, site in (("cabinet", "drawer_1"), ("left", "door"), ("right", "door")):
        point = PartPoint(model, f"{name}/{site}")
        at = lambda joint, point=point: point.position(  # noqa: E731
            torch.zeros(1, 3), torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([joint])
        )
        assert float((at(0.1) - at(0.0))[0, 0]) < -0.01
        assert point.limit == pytest.approx(1.8 if site == "door" else 0.18)
    # The handles of doors are at the side that is not hung.
    left, right = (PartPoint(model, f"{side}/door").position(*POSE)[0, 1] for side in ("left", "right"))
    assert left < -0.1 < 0.1 < right


POSE = (torch.zeros(1, 3), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))


def test_a_scene_at_rest_stays_at_rest(model):
    data = mujoco.MjData(model)
    data.ctrl[:] = 0.0
    before = {name: np.array(data.joint(name).qpos) for name in ("cabinet/drawer_0", "left/door", "console/button_1")}
    for _ in range(250):
        mujoco.mj_step(model, data)
    for name, start in before.items():
        np.testing.assert_allclose(data.joint(name).qpos, start, atol=2e-3)
    assert data.body("cabinet").xpos == pytest.approx([0.8, 0.5, 0.0])
    # The peg, dropped over the hole, stands in it: the walls hold it within their clearance.
    assert data.joint("peg").qpos[2] == pytest.approx(0.06, abs=0.005)
    assert np.abs(data.joint("peg").qpos[:2] - [0.4, 0.2]).max() < 0.01


def test_a_peg_beside_the_hole_stays_out(model):
    data = mujoco.MjData(model)
    data.joint("peg").qpos[:3] = [0.43, 0.2, 0.13]
    for _ in range(100):
        mujoco.mj_step(model, data)
    assert data.joint("peg").qpos[2] > 0.06 + 0.012 - 0.003  # on or beside the block, not in its metal
    data.xfrc_applied[:] = 0.0


def test_a_button_springs_back_and_stops_at_its_travel():
    model = furnished(console=ButtonsCfg())
    data = mujoco.MjData(model)
    button = model.body("console/button_0").id
    data.xfrc_applied[button, 2] = -30.0
    for _ in range(100):
        mujoco.mj_step(model, data)
    assert data.joint("console/button_0").qpos[0] == pytest.approx(0.016, abs=0.002)
    data.xfrc_applied[:] = 0.0
    for _ in range(200):
        mujoco.mj_step(model, data)
    assert data.joint("console/button_0").qpos[0] == pytest.approx(0.0, abs=2e-3)


def test_resets_place_fixtures_and_leave_other_envs_alone(model):
    physics = MujocoCpuPhysics(model, 3, num_threads=1)
    qpos, qvel = torch.tensor(model.qpos0)[None], torch.zeros(1, model.nv)
    pose = torch.tensor([[0.6, -0.2, 0.1, 0.0, 0.0, 0.0, 1.0]])
    before, mocap = physics.state(), physics.mocap_id("cabinet")
    physics.set(torch.tensor([1]), qpos, qvel, {"cabinet": pose})
    assert torch.equal(physics.state()[[0, 2]], before[[0, 2]])
    assert physics.mocap_pos[1, mocap].tolist() == pytest.approx([0.6, -0.2, 0.1])
    saved = physics.state()
    physics.step(3)
    data = mujoco.MjData(model)
    physics.load(data, 1)
    mujoco.mj_forward(model, data)
    assert data.body("cabinet").xpos == pytest.approx([0.6, -0.2, 0.1])
    physics.set_where(torch.tensor([False, True, False]), qpos.repeat(3, 1), qvel.repeat(3, 1))
    assert physics.mocap_pos[1, mocap].tolist() == pytest.approx([0.8, 0.5, 0.0])  # where the model has it
    physics.set_state(torch.arange(3), saved)
    assert torch.equal(physics.state(), saved)
    with pytest.raises(SimulationError, match="is no mocap body"):
        physics.set(torch.tensor([0]), qpos, qvel, {"peg": pose})
    physics.close()


def test_fixtures_in_configs():
    scene = SceneCfg.from_dict({"fixtures": {"a": {"kind": "drawer", "drawers": 2}, "b": {"kind": "hole"}}})
    assert isinstance(scene.fixtures["a"], DrawersCfg)
    assert scene.fixtures["a"].drawers == 2
    assert isinstance(scene.fixtures["b"], HoleCfg)
    assert SceneCfg.from_dict(scene.to_dict()) == scene
    with pytest.raises(ConfigError, match="drawer"):
        SceneCfg.from_dict({"fixtures": {"a": {"kind": "drawr"}}})


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (DrawersCfg(travel=0.3), "falls out"),
        (HoleCfg(width=0.2), "does not fit"),
        (PegCfg(length=0.02), "shorter than it is thick"),
    ],
)
def test_fixtures_that_cannot_be_built_say_why(cfg, message):
    with pytest.raises(AssetError, match=message):
        furnished(thing=cfg)


def test_points_of_what_is_no_fixture_are_refused(model):
    with pytest.raises(AssetError, match="expected one of a fixture"):
        PartPoint(model, "robot/tool/tool")
