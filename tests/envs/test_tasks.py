"""The tasks: what they reward, when they are solved, and that their experts solve them."""

import math

import mujoco
import numpy as np
import pytest
import torch

from embodichain.envs.registration import make
from embodichain.envs.tasks import cart_pole
from embodichain.errors import ConfigError
from tests.envs.rollouts import TASKS, random_actions, small

REQUIRED = {"ReachRL": 0.99, "PushCubeRL": 0.95, "PushCubeLanguageRL": 0.95, "PickCubeRL": 0.90, "CartPoleRL": 1.0}
ARMS = ("ReachRL", "PushCubeRL", "PickCubeRL")


def success_rate(env) -> float:
    """The share of envs whose first episode ends in success under the expert."""
    running, solved = torch.ones(env.num_envs, dtype=torch.bool), torch.zeros(env.num_envs, dtype=torch.bool)
    for _ in range(env.max_episode_steps):
        action = env.expert_action()
        assert action.abs().max() <= 1.0
        _, _, terminated, truncated, info = env.step(action)
        solved |= running & (terminated | truncated) & (info["metrics"]["success"] > 0)
        running &= ~(terminated | truncated)
        if not bool(running.any()):
            break
    return float(solved.float().mean())


@pytest.mark.parametrize("task", TASKS)
def test_the_expert_solves_the_task(task):
    steps = {"max_episode_steps": 200} if task == "CartPoleRL" else {}
    with make(task, num_envs=60, seed=11, **steps) as env:
        assert success_rate(env) >= REQUIRED[task]


@pytest.mark.parametrize("task", ARMS)
@pytest.mark.parametrize("term", [{"qpos": {}}, {"ee_delta": {}}, {"ee_delta": {"rotation_scale": 0.1}}])
def test_the_expert_drives_every_action_term(task, term):
    with make(task, num_envs=20, seed=3, env={"actions": term}) as env:
        assert success_rate(env) >= 0.9


@pytest.mark.parametrize("task", ["PushCubeRL", "PickCubeRL"])
def test_the_expert_copes_with_other_cubes(task):
    events = {"randomize_friction": {"scale": [0.6, 1.4]}, "randomize_mass": {"scale": [0.5, 2.0]}}
    with make(task, num_envs=40, seed=5, env={"events": events}) as env:
        assert success_rate(env) >= 0.9


@pytest.mark.parametrize("task", ARMS)
def test_demo_actions_replay_to_success_and_leave_the_state(task):
    env = make(task, num_envs=5, seed=2)
    for action in random_actions(env, 3):
        env.step(0.3 * action)
    state, obs = env.get_state(), env.step(torch.zeros(env.action_manager.shape))[0]
    env.set_state(state)
    actions = env.create_demo_action_list()
    assert bool((env.get_state() == state).all())
    assert all(action.shape == env.action_manager.shape for action in actions)
    after = env.step(torch.zeros(env.action_manager.shape))[0]
    assert bool((after == obs).all())
    env.set_state(state)
    solved = torch.zeros(5, dtype=torch.bool)
    for action in actions:
        _, _, _, _, info = env.step(action)
        solved |= info["metrics"]["success"] > 0
    assert bool(solved.all())


@pytest.mark.parametrize("task", ARMS)
def test_doing_nothing_does_not_solve_an_arms_task(task):
    env = make(task, num_envs=20, seed=0, max_episode_steps=60)
    for _ in range(60):
        _, _, terminated, _, info = env.step(torch.zeros(env.action_manager.shape))
        assert not bool(terminated.any())
        assert float(info["metrics"]["success"].max()) == 0.0


def test_a_pole_left_alone_falls():
    env = make("CartPoleRL", num_envs=20, seed=0)
    fallen = torch.zeros(20, dtype=torch.bool)
    for _ in range(200):
        fallen |= env.step(torch.zeros(20, 1))[2]
    assert bool(fallen.all())


# --- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_the_parts_add_up_to_the_reward(task):
    env = small(task, 8)
    for action in random_actions(env, 6):
        _, reward, _, _, info = env.step(action)
        assert set(info["rewards"]) == set(env.task.reward_weights)
        torch.testing.assert_close(sum(info["rewards"].values()), reward, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_weights_come_from_the_config(task):
    standard = small(task, 4)
    names = list(standard.task.reward_weights)
    weights = {names[0]: 3.5, names[1]: 0.0}
    changed = small(task, 4, env={"rewards": {"weights": weights}})
    for action in random_actions(standard, 3):
        ours, theirs = standard.step(action), changed.step(action)
        before, after = ours[4]["rewards"], theirs[4]["rewards"]
        assert set(after) == set(names) - {names[1]}
        torch.testing.assert_close(after[names[0]], before[names[0]] * (3.5 / standard.task.reward_weights[names[0]]))
        torch.testing.assert_close(sum(after.values()), theirs[1])


def test_a_reward_term_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"env\.rewards\.weights\.plase: .* Did you mean 'place'"):
        small("PushCubeRL", env={"rewards": {"weights": {"plase": 1.0}}})


@pytest.mark.parametrize("task", TASKS)
def test_sparse_reward_is_success(task):
    env = make(task, num_envs=12, seed=0, max_episode_steps=60, env={"rewards": {"mode": "sparse"}})
    total = 0.0
    for _ in range(60):
        _, reward, terminated, _, info = env.step(env.expert_action())
        assert torch.equal(reward, info["metrics"]["success"])
        assert torch.equal(info["rewards"]["success"], reward)
        total += float(reward.sum())
        if task != "CartPoleRL":
            assert torch.equal(reward > 0, terminated)
    assert total >= 10


def test_the_reward_sees_the_action_that_was_applied():
    """A policy that leaves [-1, 1] pays for 1, however far it went."""
    env, bold = small("ReachRL", 3), small("ReachRL", 3)
    inside, outside = env.step(torch.ones(3, 6)), bold.step(torch.full((3, 6), 1e30))
    assert torch.equal(inside[1], outside[1])
    torch.testing.assert_close(inside[4]["rewards"]["effort"], torch.full((3,), -0.01))


def cube_and_tool(env, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The places of cube and tool, from MuJoCo, and the goal of one env."""
    data = mujoco.MjData(env.physics.model)
    env.physics.load(data, index)
    mujoco.mj_forward(env.physics.model, data)
    cube = data.body("cube").xpos.copy() if env.task.object_body else np.zeros(3)
    return cube, data.site("robot/tool/tool").xpos.copy(), env.task.variables["goal"][index].numpy()


def test_reach_rewards_the_distance_to_the_goal():
    env = small("ReachRL", 4)
    _, _, _, _, info = env.step(random_actions(env, 1)[0])
    for i in range(4):
        _, tool, goal = cube_and_tool(env, i)
        assert float(info["metrics"]["distance"][i]) == pytest.approx(np.linalg.norm(goal - tool), abs=1e-5)
        assert float(info["rewards"]["distance"][i]) == pytest.approx(-np.linalg.norm(goal - tool), abs=1e-5)


def test_push_rewards_being_behind_the_cube_and_the_cube_at_the_goal():
    env = small("PushCubeRL", 4)
    action = random_actions(env, 1)[0]
    _, _, _, _, info = env.step(action)
    for i in range(4):
        cube, tool, goal = cube_and_tool(env, i)
        distance = np.linalg.norm(goal - cube[:2])
        behind = np.append(cube[:2] - 0.05 * (goal - cube[:2]) / distance, 0.03)
        assert float(info["rewards"]["place"][i]) == pytest.approx(-4.0 * distance, abs=1e-5)
        assert float(info["rewards"]["reach"][i]) == pytest.approx(-np.linalg.norm(behind - tool), abs=1e-5)
        assert float(info["rewards"]["effort"][i]) == pytest.approx(-0.01 * float((action[i] ** 2).mean()), abs=1e-6)


def test_pick_rewards_reaching_holding_and_placing():
    env = make("PickCubeRL", num_envs=4, seed=1)
    held_once = False
    for _ in range(30):
        _, _, terminated, _, info = env.step(env.expert_action())
        if bool(terminated.any()):
            break
        for i in range(4):
            cube, tool, goal = cube_and_tool(env, i)
            held = float(info["metrics"]["held"][i])
            held_once |= held == 1.0
            reach, place = math.tanh(5 * np.linalg.norm(cube - tool)), math.tanh(5 * np.linalg.norm(goal - cube))
            assert float(info["rewards"]["reach"][i]) == pytest.approx(-reach, abs=1e-4)
            assert float(info["rewards"]["grasp"][i]) == pytest.approx(held - 1.0)
            assert float(info["rewards"]["place"][i]) == pytest.approx(-2.0 * (1.0 - held * (1.0 - place)), abs=1e-4)
    assert held_once


def test_a_held_cube_is_off_the_table_and_between_the_fingers():
    env = make("PickCubeRL", num_envs=10, seed=4)
    for _ in range(60):
        _, _, terminated, _, info = env.step(env.expert_action())
        if bool(terminated.any()):
            solved = terminated
            assert bool((info["metrics"]["held"][solved] == 1.0).all())
            assert float(info["metrics"]["height"][solved].min()) > 0.06
            return
    pytest.fail("nothing was picked")


# --- cart-pole --------------------------------------------------------------------------------------------------------


def test_cart_pole_pays_for_every_step_the_pole_stands():
    env = make("CartPoleRL", num_envs=3, seed=0, max_episode_steps=100)
    total = sum(env.step(env.expert_action())[1] for _ in range(100))
    assert 99.0 < float(total.min()) <= float(total.max()) <= 100.0


def test_the_cart_pole_expert_is_the_linear_quadratic_regulator():
    """Linearise MuJoCo's own step, and solve the Riccati equation by iteration."""
    env = make("CartPoleRL", num_envs=1)
    model = env.physics.model
    one, force = np.zeros((4, 4)), np.zeros((4, 1))
    mujoco.mjd_transitionFD(model, mujoco.MjData(model), 1e-6, True, one, force, None, None)
    force /= 10.0  # newtons, not units of the motor
    substeps = env.cfg.env.substeps
    a = np.linalg.matrix_power(one, substeps)
    b = sum(np.linalg.matrix_power(one, i) for i in range(substeps)) @ force
    q, p = np.diag([1.0, 10.0, 0.1, 0.1]), np.eye(4)
    for _ in range(5000):
        gain = np.linalg.solve(1.0 + b.T @ p @ b, b.T @ p @ a)
        p = q + a.T @ p @ (a - b @ gain)
    np.testing.assert_allclose(gain[0, [0, 2, 1, 3]] / 10.0, cart_pole._GAIN, rtol=0.02)


@pytest.mark.parametrize("column", [0, 1])
def test_the_cart_pole_fails_at_its_limits(column):
    env, limit = make("CartPoleRL", num_envs=2, seed=0), (cart_pole.MAX_POSITION, cart_pole.MAX_ANGLE)[column]
    env.physics.qpos[0, column], env.physics.qpos[1, column] = 1.02 * limit, 0.95 * limit
    assert env.step(torch.zeros(2, 1))[2].tolist() == [True, False]


# --- robots that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "robot", "message"),
    [
        ("PickCubeRL", {"tool": "pusher", "init_qpos": []}, r"robot\.tool: PickCubeRL needs a tool with fingers"),
        ("ReachRL", {"tool": None}, r"robot\.tool: ReachRL needs a robot with a tool"),
        ("CartPoleRL", {"uid": "ur5"}, r"robot\.uid: CartPoleRL needs the robot 'cart'"),
        ("CartPoleRL", {"tool": "gripper"}, r"robot\.tool: the robot 'cart' cannot hold a tool"),
        ("ReachRL", {"init_qpos": [0.0]}, r"robot\.init_qpos: expected 6 joints and 0 fingers, got 1"),
    ],
)
def test_a_robot_that_cannot_do_it_is_refused(task, robot, message):
    with pytest.raises(ConfigError, match=message):
        make(task, robot=robot)


def test_a_gripper_can_reach_and_push_too():
    home = [-0.22, 0.0103, 1.6931, -0.1326, -1.5708, -0.22, 0.0, 0.0]
    with make("ReachRL", num_envs=10, seed=0, robot={"tool": "gripper", "init_qpos": home}) as env:
        assert success_rate(env) >= 0.9
