"""Actions: what is accepted, what each term makes of them, and what an expert says to get what it wants."""

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodichain.envs.actions import ActionManager, RobotActionManager
from embodichain.envs.env_cfg import ActionsCfg, EffortTermCfg, EndEffectorTermCfg, JointTermCfg, RobotCfg
from embodichain.envs.robots import Robot, build_model, describe
from embodichain.errors import ActionError, ConfigError

HOME = [-0.22, 0.0103, 1.6931, -0.1326, -1.5708, -0.22]


def manager(num_envs: int = 3, tool: str = "pusher", **term) -> RobotActionManager:
    fingers = [0.04, 0.04] if tool == "gripper" else []
    cfg = RobotCfg(tool=tool, init_qpos=HOME + fingers)
    return RobotActionManager(
        ActionsCfg(**term), Robot(build_model("reach_scene.xml", cfg), describe(cfg)), num_envs, torch.device("cpu")
    )


def joints(num_envs: int = 3, tool: str = "pusher") -> torch.Tensor:
    row = HOME + ([0.04, 0.04] if tool == "gripper" else [])
    return torch.tensor(row).repeat(num_envs, 1)


def actions(num_envs: int = 3, dim: int = 6) -> torch.Tensor:
    return torch.rand(num_envs, dim, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0


# --- the envelope -----------------------------------------------------------------------------------------------------


@pytest.fixture
def box() -> ActionManager:
    return ActionManager("delta_qpos", gym.spaces.Box(-1.0, 1.0, (6,)), 3, "cpu")


@pytest.fixture
def discrete() -> ActionManager:
    return ActionManager("discrete", gym.spaces.Discrete(4), 3, "cpu")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a: a,
        lambda a: a.numpy(),
        lambda a: a.double(),
        lambda a: {"delta_qpos": a},
        lambda a: {"delta_qpos": a.numpy()[:, ::-1][:, ::-1]},
        lambda a: {"delta_qpos": a.tolist()},
        lambda a: TensorDict({"delta_qpos": a}, batch_size=[3]),
        lambda a: TensorDict({"delta_qpos": a}),
        lambda a: a.clone().requires_grad_(),
        lambda a: a.t().contiguous().t(),
    ],
    ids=["tensor", "array", "double", "dict", "strided", "list", "tensordict", "batchless", "gradient", "transposed"],
)
def test_every_form_of_an_action_means_the_same(box, wrap):
    value = box.unwrap(wrap(actions()))
    assert value.dtype == torch.float32
    assert not value.requires_grad
    torch.testing.assert_close(value, actions(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.zeros(3, 5), r"shape \[3, 6\], envs first, got \[3, 5\]"),
        (torch.zeros(6), r"shape \[3, 6\], envs first, got \[6\]"),
        (torch.zeros(4, 6), r"got \[4, 6\]"),
        ({"qpos": torch.zeros(3, 6)}, r"one key 'delta_qpos', got \['qpos'\]"),
        ({"delta_qpos": torch.zeros(3, 6), "x": 0}, r"one key 'delta_qpos', got \['delta_qpos', 'x'\]"),
        ({}, r"one key 'delta_qpos', got \[\]"),
        (TensorDict({"a": torch.zeros(3, 6)}, [3]), r"one key 'delta_qpos', got \['a'\]"),
        ([[0.0] * 6] * 3, r"tensor \[3, 6\] or a dict with the key 'delta_qpos', got list"),
        (None, "got NoneType"),
        ({"delta_qpos": None}, "real numbers, got NoneType"),
        ({"delta_qpos": "left"}, "real numbers, got str"),
        ({"delta_qpos": [[1.0], [1.0, 2.0]]}, "real numbers, got list"),
        ({"delta_qpos": {"delta_qpos": 1}}, "real numbers, got another dict"),
        (np.full((3, 6), None), "real numbers, got ndarray of object"),
        (torch.zeros(3, 6, dtype=torch.complex64), "real numbers, got .*complex64"),
        (torch.zeros(3, 6).to_sparse(), "real numbers, got .*sparse"),
        (torch.zeros(3, 6, device="meta"), "real numbers, got .*meta"),
    ],
)
def test_anything_else_is_an_error_that_names_the_key(box, action, message):
    with pytest.raises(ActionError, match=message):
        box.unwrap(action)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_named_with_env_and_step(box, value):
    action = torch.zeros(3, 6)
    action[2, 4] = value
    with pytest.raises(ActionError, match=r"of env 2 at step 17 of its episode is not finite.*1 of 3 envs"):
        box.unwrap(action, torch.tensor([3, 5, 17]))
    with pytest.raises(ActionError, match=r"of env 2 is not finite"):
        box.unwrap(action)


def test_a_double_too_large_for_float32_is_not_finite(box):
    with pytest.raises(ActionError, match="env 0"):
        box.unwrap(torch.full((3, 6), 1e300, dtype=torch.float64))


def test_discrete_actions(discrete):
    assert discrete.unwrap(torch.tensor([0, 3, 1], dtype=torch.int32)).tolist() == [0, 3, 1]
    assert discrete.unwrap({"discrete": np.array([1, 2, 3])}).dtype == torch.int64
    assert discrete.action_dim == 1
    for bad, message in (
        (torch.tensor([0, 4, 1]), r"env 1 must lie in \[0, 4\), got 4"),
        (torch.tensor([0, 1, -1]), r"env 2 must lie in \[0, 4\), got -1"),
        (torch.zeros(3), "integers"),
        (np.zeros(3, dtype=bool), "integers"),
        (torch.zeros(3, 1, dtype=torch.int64), r"shape \[3\]"),
    ):
        with pytest.raises(ActionError, match=message):
            discrete.unwrap(bad)


# --- the terms --------------------------------------------------------------------------------------------------------


def test_delta_qpos_adds_to_the_joints_within_their_limits():
    terms = manager(delta_qpos=JointTermCfg(scale=0.08))
    assert terms.action_type == "delta_qpos"
    assert terms.action_dim == 6
    control = terms.control(terms.unwrap(actions()), joints())
    torch.testing.assert_close(control, joints() + 0.08 * actions())
    at_limit = terms.control(torch.ones(3, 6), terms.robot.upper.repeat(3, 1))
    torch.testing.assert_close(at_limit, terms.robot.upper.repeat(3, 1))


def test_qpos_spans_the_joint_limits():
    terms = manager(qpos=JointTermCfg())
    for action, expected in ((-1.0, terms.robot.lower), (1.0, terms.robot.upper)):
        torch.testing.assert_close(terms.control(torch.full((3, 6), action), joints()), expected.repeat(3, 1))
    middle = 0.5 * (terms.robot.lower + terms.robot.upper)
    torch.testing.assert_close(terms.control(torch.zeros(3, 6), joints()), middle.repeat(3, 1))


@pytest.mark.parametrize("term", ["delta_qpos", "qpos", "ee_delta"])
def test_actions_are_clipped_as_configured(term):
    cfg = EndEffectorTermCfg(clip=0.5) if term == "ee_delta" else JointTermCfg(clip=0.5)
    terms = manager(**{term: cfg})
    clipped = terms.unwrap(torch.full(terms.shape, 7.0))
    assert bool((clipped == 0.5).all())
    assert bool((terms.unwrap(torch.full(terms.shape, -7.0)) == -0.5).all())
    assert terms.space.low.tolist() == [-1.0] * terms.action_dim


def test_ee_delta_moves_the_tool_and_keeps_it_upright():
    """Through MuJoCo: the joint targets, looked at with ``mj_forward``, move the site by ``scale * action``."""
    terms = manager(ee_delta=EndEffectorTermCfg(scale=0.01, damping=1e-3))
    assert terms.action_dim == 3
    targets = terms.control(actions(dim=3), joints())
    model = build_model("reach_scene.xml", RobotCfg(tool="pusher"))
    (start, turned), moved = site_pose(model, torch.tensor(HOME)), [site_pose(model, row) for row in targets]
    for action, (position, rotation) in zip(actions(dim=3), moved, strict=True):
        np.testing.assert_allclose(position - start, 0.01 * action.numpy(), atol=3e-4)
        np.testing.assert_allclose(rotation, turned, atol=2e-4)


def test_ee_delta_turns_back_a_tool_that_leans():
    terms = manager(ee_delta=EndEffectorTermCfg(damping=1e-3))
    leaning = joints()
    leaning[:, 3] += 0.2
    upright = terms.robot.chain.pose(joints())[1]
    before = (terms.robot.chain.pose(leaning)[1] - upright).norm()
    after = (terms.robot.chain.pose(terms.control(torch.zeros(3, 3), leaning))[1] - upright).norm()
    assert float(after) < 0.05 * float(before)


def test_ee_delta_with_rotation_turns_the_tool():
    terms = manager(ee_delta=EndEffectorTermCfg(scale=0.01, rotation_scale=0.05, damping=1e-3))
    assert terms.action_dim == 6
    action = torch.zeros(3, 6)
    action[:, 5] = 1.0
    target = terms.control(action, joints())
    (before, turned), (after, turned_to) = terms.robot.chain.pose(joints()), terms.robot.chain.pose(target)
    torch.testing.assert_close(after, before, atol=3e-4, rtol=0)
    angle = torch.atan2((turned_to @ turned.transpose(1, 2))[:, 1, 0], (turned_to @ turned.transpose(1, 2))[:, 0, 0])
    torch.testing.assert_close(angle, torch.full((3,), 0.05), atol=2e-3, rtol=0)


def test_a_gripper_adds_one_action():
    terms = manager(tool="gripper", delta_qpos=JointTermCfg(scale=0.1))
    assert terms.action_dim == 7
    action = torch.zeros(3, 7)
    action[:, 6] = torch.tensor([1.0, -1.0, 0.0])
    control = terms.control(action, joints(tool="gripper"))
    assert control.shape == (3, 8)
    torch.testing.assert_close(control[:, :6], joints())
    torch.testing.assert_close(control[:, 6], torch.tensor([0.042, -0.002, 0.02]))
    assert torch.equal(control[:, 6], control[:, 7])


def test_effort_is_scaled_to_what_the_motor_can_do():
    cfg = RobotCfg(uid="cart")
    robot = Robot(build_model("cart_pole.xml", cfg), describe(cfg))
    robot.arms[""].max_control, robot.arms[""].min_control = torch.tensor([3.0]), torch.tensor([-3.0])
    terms = RobotActionManager(ActionsCfg(effort=EffortTermCfg()), robot, 2, torch.device("cpu"))
    assert terms.control(torch.tensor([[0.5], [-1.0]]), torch.zeros(2, 1)).tolist() == [[1.5], [-3.0]]


@pytest.mark.parametrize(
    "term",
    [
        {"delta_qpos": JointTermCfg(scale=0.5)},
        {"qpos": JointTermCfg(scale=0.5)},
        {"ee_delta": EndEffectorTermCfg(scale=0.5, rotation_scale=0.5)},
    ],
    ids=lambda term: next(iter(term)),
)
def test_what_an_expert_encodes_moves_the_tool_as_meant(term):
    terms = manager(**term)
    twist = torch.tensor([[0.01, 0.0, -0.005, 0.0, 0.0, 0.02]]).repeat(3, 1)
    action = terms.encode(joints(), twist)
    assert float(action.abs().max()) <= 1.0
    before = terms.robot.chain.pose(joints())[0]
    after = terms.robot.chain.pose(terms.control(action, joints()))[0]
    torch.testing.assert_close(after - before, twist[:, :3], atol=1.5e-3, rtol=0)


def test_an_expert_that_wants_too_much_keeps_its_direction():
    terms = manager(ee_delta=EndEffectorTermCfg(scale=0.01))
    action = terms.encode(joints(), torch.tensor([[0.4, -0.2, 0.1, 0.0, 0.0, 0.0]]).repeat(3, 1))
    torch.testing.assert_close(action, torch.tensor([[1.0, -0.5, 0.25]]).repeat(3, 1))


def test_an_expert_without_a_wish_for_the_fingers_closes_them():
    terms = manager(tool="gripper", delta_qpos=JointTermCfg())
    action = terms.encode(joints(tool="gripper"), torch.zeros(3, 6))
    assert action.shape == (3, 7)
    assert action[:, 6].tolist() == [-1.0] * 3


# --- what cannot be built ---------------------------------------------------------------------------------------------


def test_exactly_one_term_is_chosen():
    with pytest.raises(ConfigError, match=r"exactly one of delta_qpos, qpos, ee_delta, effort, got none"):
        manager()
    with pytest.raises(ConfigError, match=r"exactly one of .*got \['delta_qpos', 'qpos'\]"):
        manager(delta_qpos=JointTermCfg(), qpos=JointTermCfg())


def test_a_term_must_fit_the_motors():
    with pytest.raises(ConfigError, match=r"env\.actions\.effort: needs joints with motors"):
        manager(effort=EffortTermCfg())
    cfg = RobotCfg(uid="cart")
    robot = Robot(build_model("cart_pole.xml", cfg), describe(cfg))
    for term in ({"delta_qpos": JointTermCfg()}, {"qpos": JointTermCfg()}, {"ee_delta": EndEffectorTermCfg()}):
        with pytest.raises(ConfigError, match=r"needs joints with servos"):
            RobotActionManager(ActionsCfg(**term), robot, 2, torch.device("cpu"))


def site_pose(model: mujoco.MjModel, qpos: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    data = mujoco.MjData(model)
    data.qpos[:6] = qpos.numpy()
    mujoco.mj_forward(model, data)
    site = model.site("robot/tool/tool").id
    return data.site_xpos[site].copy(), data.site_xmat[site].copy().reshape(3, 3)
