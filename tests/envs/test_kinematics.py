"""Batched kinematics against MuJoCo's own."""

import mujoco
import numpy as np
import pytest
import torch

from embodichain.envs.env_cfg import RobotCfg
from embodichain.envs.kinematics import SerialChain, dot, length, rotation_error, solve_spd
from embodichain.envs.robots import ROBOTS, build_model
from embodichain.errors import AssetError

JOINTS = [f"robot/{name}" for name in ROBOTS["ur5"].joints]
SITE = "robot/tool/tool"


@pytest.fixture(scope="module", params=["pusher", "gripper"])
def model(request):
    return build_model("reach_scene.xml", RobotCfg(tool=request.param))


@pytest.fixture(scope="module")
def arm():
    return build_model("reach_scene.xml", RobotCfg(tool="pusher"))


def random_joints(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 6, generator=torch.Generator().manual_seed(seed)) * 6.0 - 3.0


def mujoco_pose(model: mujoco.MjModel, qpos: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Position, rotation and Jacobian of the tool for one row of joint positions."""
    data = mujoco.MjData(model)
    data.qpos[:6] = qpos.numpy()
    mujoco.mj_forward(model, data)
    site = model.site(SITE).id
    jacobian = np.zeros((6, model.nv))
    mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], site)
    return data.site_xpos[site].copy(), data.site_xmat[site].reshape(3, 3).copy(), jacobian[:, :6]


def test_pose_and_jacobian_equal_mujoco(model):
    chain, qpos = SerialChain(model, SITE, JOINTS), random_joints(50)
    positions, rotations = chain.pose(qpos)
    jacobians = chain.jacobian(qpos)
    assert positions.dtype == rotations.dtype == jacobians.dtype == torch.float32
    assert positions.shape == (50, 3)
    assert rotations.shape == (50, 3, 3)
    assert jacobians.shape == (50, 6, 6)
    torch.testing.assert_close(chain.position(qpos), positions, rtol=0, atol=1e-6)
    for i in range(50):
        position, rotation, jacobian = mujoco_pose(model, qpos[i])
        np.testing.assert_allclose(positions[i], position, atol=2e-6)
        np.testing.assert_allclose(rotations[i], rotation, atol=2e-6)
        np.testing.assert_allclose(jacobians[i], jacobian, atol=4e-6)


def test_the_arm_has_the_reach_of_a_ur5(arm):
    """Link lengths 0.425 and 0.392 m, wrist offsets 0.093 and 0.095 m: about 0.85 m to the wrist's centre."""
    chain = SerialChain(arm, SITE, JOINTS)
    shoulder = torch.tensor([0.0, 0.0, 0.0892])
    reach = (chain.pose(random_joints(5000))[0] - shoulder).norm(dim=1)
    assert 0.9 < float(reach.max()) < 1.15


def test_inverse_step_moves_the_tool_where_asked(arm):
    chain = SerialChain(arm, SITE, JOINTS)
    home = torch.tensor([[-0.22, 0.0103, 1.6931, -0.1326, -1.5708, -0.22]])
    qpos = home + 0.2 * torch.rand(20, 6, generator=torch.Generator().manual_seed(1))
    twist = 0.004 * (torch.rand(20, 6, generator=torch.Generator().manual_seed(2)) - 0.5)
    moved = qpos + chain.inverse_step(qpos, twist, damping=1e-3)
    (before, turned_from), (after, turned_to) = chain.pose(qpos), chain.pose(moved)
    torch.testing.assert_close(after - before, twist[:, :3], atol=4e-5, rtol=0.02)
    torch.testing.assert_close(rotation_error(turned_to, turned_from), twist[:, 3:], atol=4e-5, rtol=0.02)


def test_inverse_step_stays_small_where_the_arm_is_singular(arm):
    """Stretched straight up the arm cannot rise further: an undamped inverse would be unbounded."""
    chain = SerialChain(arm, SITE, JOINTS)
    twist = torch.tensor([[0.0, 0.0, 0.05, 0.0, 0.0, 0.0]])
    step = chain.inverse_step(torch.zeros(1, 6), twist, damping=0.05)
    assert bool(torch.isfinite(step).all())
    assert float(step.abs().max()) < 0.5


def test_inverse_step_repeated_reaches_a_point(arm):
    chain = SerialChain(arm, SITE, JOINTS)
    qpos = torch.tensor([[-0.22, 0.0103, 1.6931, -0.1326, -1.5708, -0.22]]).repeat(2, 1)
    goal = torch.tensor([[0.5, 0.1, 0.3], [0.4, -0.2, 0.2]])
    for _ in range(40):
        error = goal - chain.pose(qpos)[0]
        qpos = qpos + chain.inverse_step(qpos, torch.cat((error, torch.zeros(2, 3)), dim=1))
    assert float((goal - chain.pose(qpos)[0]).abs().max()) < 1e-4


@pytest.mark.parametrize("count", [1, 2, 3, 7, 33])
def test_a_row_does_not_depend_on_the_others(arm, count):
    chain, qpos, twist = SerialChain(arm, SITE, JOINTS), random_joints(200), random_joints(200, seed=5)
    part = qpos[:count].clone()
    for whole, alone in zip(chain.pose(qpos), chain.pose(part), strict=True):
        assert torch.equal(whole[:count], alone)
    assert torch.equal(chain.position(qpos)[:count], chain.position(part))
    assert torch.equal(chain.jacobian(qpos)[:count], chain.jacobian(part))
    assert torch.equal(chain.inverse_step(qpos, twist)[:count], chain.inverse_step(part, twist[:count].clone()))


def test_no_rows_are_no_problem(arm):
    chain = SerialChain(arm, SITE, JOINTS)
    assert chain.pose(torch.zeros(0, 6))[0].shape == (0, 3)
    assert chain.inverse_step(torch.zeros(0, 6), torch.zeros(0, 6)).shape == (0, 6)


def test_solve_spd_equals_numpy():
    factor = np.random.default_rng(0).normal(size=(40, 6, 6))
    matrix = factor @ factor.transpose(0, 2, 1) + 0.1 * np.eye(6)
    right = np.random.default_rng(1).normal(size=(40, 6))
    expected = np.linalg.solve(matrix, right[..., None])[..., 0]
    got = solve_spd(torch.tensor(matrix), torch.tensor(right))
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("angle", [0.0, 0.01, -0.3, 1.2])
def test_rotation_error_is_axis_times_sine(angle):
    axis = np.array([0.48, -0.6, 0.64])
    quat, matrix = np.zeros(4), np.zeros(9)
    mujoco.mju_axisAngle2Quat(quat, axis, angle)
    mujoco.mju_quat2Mat(matrix, quat)
    turn = torch.tensor(matrix.reshape(3, 3))
    start = torch.linalg.qr(torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))[0]
    error = rotation_error((turn @ start).unsqueeze(0), start.unsqueeze(0))
    np.testing.assert_allclose(error[0], np.sin(angle) * axis, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_dot_and_length(size):
    a, b = torch.rand(2, 50, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(dot(a, b), (a * b).sum(dim=1))
    torch.testing.assert_close(length(a), (a * a).sum(dim=1).sqrt())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dot_and_length_take_each_row_by_itself(size, dtype):
    a, b = torch.rand(2, 5000, size + 2, generator=torch.Generator().manual_seed(0), dtype=dtype)[..., 1 : 1 + size]
    for count in (1, 2, 3, 4, 7, 8, 9, 31, 64, 1000):
        assert torch.equal(dot(a[:count].clone(), b[:count].clone()), dot(a, b)[:count])
        assert torch.equal(length(a[:count].clone()), length(a)[:count])


def test_a_site_that_is_not_there_is_named(arm):
    with pytest.raises(AssetError, match=r"no site 'tip'.*robot/tool/tool"):
        SerialChain(arm, "tip", JOINTS)


def test_joints_in_another_order_are_refused(arm):
    with pytest.raises(AssetError, match="expected the joints"):
        SerialChain(arm, SITE, JOINTS[::-1])


@pytest.mark.parametrize("joint", ["ball", "free"])
def test_what_is_no_hinge_and_no_slide_is_refused(joint):
    xml = f"""<mujoco><worldbody><body><joint name="a" type="{joint}"/><geom size="0.1"/><site name="s"/></body>
      </worldbody></mujoco>"""
    with pytest.raises(AssetError, match="'a': a serial chain needs hinges and slides"):
        SerialChain(mujoco.MjModel.from_xml_string(xml), "s", ["a"])


SEVEN = """<mujoco><compiler angle="radian"/><worldbody><body pos="0.1 0.2 0.3" quat="0.9 0.1 0.3 -0.2">
  <joint name="lift" type="slide" axis="1 2 3" pos="0.1 0 0" ref="0.2"/>
  <joint name="turn" axis="0 0 1" pos="0.1 -0.2 0.05"/><geom size="0.1"/>
  <body pos="0 0 0.4" quat="0.7 0.1 0 0.7"><joint name="a" axis="0 1 0" pos="0 0.05 0" ref="-0.3"/><geom size="0.1"/>
  <body pos="0.3 0 0"><joint name="b" axis="0 1 1"/><joint name="out" type="slide" axis="-1 0 0.2"/><geom size="0.1"/>
  <body pos="0.2 0 0.1"><joint name="c" axis="1 0 0"/><geom size="0.1"/>
  <body pos="0 0 0.1"><joint name="d" axis="0 1 0"/><geom size="0.1"/>
  <site name="s" pos="0.1 0.2 0.1" quat="0.8 0.1 0.2 0"/></body></body></body></body></body></worldbody></mujoco>"""
NAMES = ["lift", "turn", "a", "b", "out", "c", "d"]


def test_slides_offsets_references_and_several_joints_of_a_body_equal_mujoco():
    model = mujoco.MjModel.from_xml_string(SEVEN)
    data, chain = mujoco.MjData(model), SerialChain(model, "s", NAMES)
    qpos = torch.rand(20, 7, generator=torch.Generator().manual_seed(3)) * 3.0 - 1.5
    positions, rotations = chain.pose(qpos)
    jacobians, points = chain.jacobian(qpos), chain.position(qpos)
    for i, row in enumerate(qpos):
        data.qpos[:] = row.numpy()
        mujoco.mj_forward(model, data)
        jacobian = np.zeros((6, 7))
        mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], 0)
        np.testing.assert_allclose(positions[i], data.site_xpos[0], atol=3e-6)
        np.testing.assert_allclose(points[i], data.site_xpos[0], atol=3e-6)
        np.testing.assert_allclose(rotations[i], data.site_xmat[0].reshape(3, 3), atol=3e-6)
        np.testing.assert_allclose(jacobians[i], jacobian, atol=6e-6)
    alone = SerialChain(model, "s", NAMES).inverse_step(qpos[:3].clone(), torch.ones(3, 6))
    assert torch.equal(alone, chain.inverse_step(qpos, torch.ones(20, 6))[:3])


def test_joints_to_spare_go_to_rest_and_leave_the_tool_alone():
    model = mujoco.MjModel.from_xml_string(SEVEN)
    rest = [0.3, 0.2, 0.9, -0.4, 0.1, 0.3, 0.8]
    chain = SerialChain(model, "s", NAMES, rest=rest)
    qpos = torch.tensor([rest]) + 0.3 * torch.randn(1, 7, generator=torch.Generator().manual_seed(0))
    position, rotation = chain.pose(qpos)
    far = [float((qpos - torch.tensor(rest)).norm())]
    for _ in range(100):
        now, turned = chain.pose(qpos)
        twist = torch.cat((position - now, rotation_error(rotation, turned)), dim=1)
        qpos = qpos + chain.inverse_step(qpos, twist, damping=0.01)
        far.append(float((qpos - torch.tensor(rest)).norm()))
    assert far[-1] < 0.9 * far[0]
    torch.testing.assert_close(chain.pose(qpos)[0], position, atol=1e-3, rtol=0)
    assert float((qpos - torch.tensor(rest)).abs().max()) < 1.5


def test_an_arm_of_few_joints_puts_position_first():
    """Three joints cannot hold an orientation as well: they reach the point all the same."""
    xml = """<mujoco><worldbody><body pos="0 0 0.2"><joint name="a" axis="0 0 1"/><geom size="0.05"/>
      <body pos="0 0 0.1"><joint name="b" axis="0 1 0"/><geom size="0.05"/>
      <body pos="0.4 0 0"><joint name="c" axis="0 1 0"/><geom size="0.05"/>
      <site name="s" pos="0.3 0 0"/></body></body></body></worldbody></mujoco>"""
    chain = SerialChain(mujoco.MjModel.from_xml_string(xml), "s", ["a", "b", "c"])
    qpos, goal = torch.tensor([[0.2, -0.6, 1.2]]), torch.tensor([[0.35, -0.25, 0.3]])
    upright = chain.pose(qpos)[1]
    for _ in range(200):
        position, rotation = chain.pose(qpos)
        twist = torch.cat((goal - position, rotation_error(upright, rotation).clamp(-0.1, 0.1)), dim=1)
        qpos = qpos + chain.inverse_step(qpos, twist)
    assert float((chain.position(qpos) - goal).norm()) < 0.03


def test_oblique_axes_and_turned_bodies():
    xml = """<mujoco><worldbody><body pos="0.1 0.2 0.3" quat="0.9 0.1 0.3 -0.2"><joint name="a" axis="1 2 -0.5"/>
      <geom size="0.1"/><body pos="0 0 0.4" euler="20 30 40"><body pos="0.1 0 0"><joint name="b" axis="0 -1 1"/>
      <geom size="0.1"/><site name="s" pos="0.1 0.2 0.1" euler="5 6 7"/></body></body></body></worldbody></mujoco>"""
    model = mujoco.MjModel.from_xml_string(xml)
    data = mujoco.MjData(model)
    data.qpos[:] = [0.7, -1.1]
    mujoco.mj_forward(model, data)
    position, rotation = SerialChain(model, "s", ["a", "b"]).pose(torch.tensor([[0.7, -1.1]]))
    np.testing.assert_allclose(position[0], data.site_xpos[0], atol=1e-6)
    np.testing.assert_allclose(rotation[0], data.site_xmat[0].reshape(3, 3), atol=1e-6)
