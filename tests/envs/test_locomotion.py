"""Walking robots: commands, errors, rewards and falls, against MuJoCo itself and numbers computed by hand."""

import mujoco
import numpy as np
import pytest
import torch

from embodichain.envs.checker import check_env
from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.tasks import locomotion
from embodichain.errors import ConfigError
from tests.envs.rollouts import assert_same, random_actions, record, rows

WALKERS = ("QuadrupedVelocityRL", "BipedVelocityRL")


def walker(task: str, num_envs: int = 2, **changes) -> TaskEnv:
    env = make(task, **{"num_envs": num_envs, "seed": 3, "num_threads": 2} | changes)
    assert isinstance(env, TaskEnv)
    return env


@pytest.fixture(scope="module", params=WALKERS)
def task(request) -> str:
    return request.param


def test_a_robot_that_does_nothing_stands(task):
    """The quadruped for good; the biped, whose ankles are too soft to balance by themselves, for half a second."""
    steps, rest = (150, 0.2) if task == "QuadrupedVelocityRL" else (25, 1.0)
    with walker(task, 8) as env:
        for _ in range(steps):
            obs, _, terminated, _, _ = env.step(torch.zeros(env.action_manager.shape))
            assert not bool(terminated.any())
        nominal = env.physics.model.body("robot/base").pos[2]
        assert bool((obs["critic", "height"] > 0.8 * nominal).all())
        assert float(obs["base", "gravity"][:, 2].max()) < -0.98
        assert float(env.physics.qvel.abs().max()) < rest
        limits = torch.tensor(env.physics.model.actuator_forcerange[:, 1])
        assert bool((env.physics.outputs["actuator_force"].abs() < 0.5 * limits).all())


def test_it_keeps_the_contract(task):
    changes = {"max_episode_steps": 40, "env": {"command": {"interval": 0.2}}}
    problems = check_env(walker(task, 3, **changes), lambda num_envs: walker(task, num_envs, **changes), 100)
    assert problems == []


def test_bodies_are_measured_as_mujoco_measures_them(task):
    """Velocities in the frame of the base, gravity and feet, against MuJoCo's own functions."""
    with walker(task, 3) as env:
        for action in random_actions(env, 12):
            env.step(action)
        scene, model, data = env.task.read(), env.physics.model, mujoco.MjData(env.physics.model)
        base = model.body("robot/base").id
        for i in range(3):
            env.physics.load(data, i)
            mujoco.mj_forward(model, data)
            velocity, rotation = np.zeros(6), data.xmat[base].reshape(3, 3)
            # Of the frame of the body's joint, which mj_objectVelocity has at the middle of its mass
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, base, velocity, 1)
            np.testing.assert_allclose(scene["angular"][i], velocity[:3], atol=1e-5)
            np.testing.assert_allclose(scene["linear"][i], velocity[3:], atol=1e-5)
            np.testing.assert_allclose(scene["gravity"][i], rotation.T @ [0.0, 0.0, -1.0], atol=1e-6)
            np.testing.assert_allclose(scene["qpos"][i], data.qpos[7:] - env.robot.init_qpos.numpy(), atol=1e-6)


def test_feet_in_contact_count_as_touching(task):
    with walker(task, 8) as env:
        model, data, noticed = env.physics.model, mujoco.MjData(env.physics.model), []
        feet = [model.geom(f"robot/{name}").id for name in env.task.feet]
        for action in 0.5 * random_actions(env, 30):
            env.step(action)
            scene = env.task.read()
            flagged = scene["feet"][scene["contact"]]
            assert float(flagged[:, 2].max()) < model.geom_size[feet[0], 0] + env.task.clearance + 0.001
            for i in range(8):
                env.physics.load(data, i)
                mujoco.mj_forward(model, data)
                touching = {geom for pair in data.contact.geom[: data.ncon].tolist() for geom in pair}
                noticed += [bool(scene["contact"][i, k]) for k, foot in enumerate(feet) if foot in touching]
        assert len(noticed) > 100
        assert np.mean(noticed) > 0.95  # one that has landed in the last substep is still above the ground


def test_commands_follow_each_other_and_stay_in_their_ranges(task):
    command = {"forward": [0.5, 1.0], "sideways": [-0.2, 0.0], "turning": [0.1, 0.3], "standing": 0.3, "interval": 0.2}
    seen = []
    with walker(task, 64, max_episode_steps=60, env={"command": command}) as env:
        for _ in range(59):
            obs, _, _, _, _ = env.step(torch.zeros(env.action_manager.shape))
            seen.append(obs["command", "velocity"].clone())
    trace = torch.stack(seen)
    changed = (trace[1:] != trace[:-1]).any(dim=2)
    assert float(changed.float().sum(dim=0).mean()) == pytest.approx(0.91 * 5.8, abs=0.4)  # two zeros in turn: 9%
    stands = (trace == 0).all(dim=2)
    assert float(stands.float().mean()) == pytest.approx(0.3, abs=0.06)
    low, high = (torch.tensor([command[name][i] for name in ("forward", "sideways", "turning")]) for i in (0, 1))
    inside = (trace >= low - 1e-6) & (trace <= high + 1e-6)
    assert bool((inside.all(dim=2) | stands).all())


def test_errors_are_the_means_of_the_steady_parts():
    """By hand, from observations: relative errors from a second after each change of command on."""
    env = walker(
        "QuadrupedVelocityRL", 4, seed=1, max_episode_steps=140, env={"command": {"interval": 1.4, "standing": 0.0}}
    )
    sums, counts, since = np.zeros((4, 2)), np.zeros((4, 2)), np.zeros(4)
    last = env.reset(seed=1)[0]["command", "velocity"].numpy().copy()
    for action in 0.15 * random_actions(env, 139):
        obs, _, terminated, _, info = env.step(action)
        assert not bool(terminated.any())
        command, velocity = obs["command", "velocity"].numpy(), obs["critic", "linvel"].numpy()
        since = np.where((command != last).any(axis=1), 0, since + 1)
        last = command.copy()
        for i in range(4):
            size = np.hypot(*command[i, :2]), abs(command[i, 2])
            wrong = np.hypot(*(velocity[i, :2] - command[i, :2])), abs(obs["base", "angvel"][i, 2] - command[i, 2])
            for k in range(2):
                if since[i] * 0.02 >= locomotion.SETTLING - 1e-9 and size[k] >= locomotion.SLOWEST:
                    sums[i, k] += wrong[k] / size[k]
                    counts[i, k] += 1
    assert counts.sum() > 50
    expected = sums / np.maximum(counts, 1)
    np.testing.assert_allclose(info["metrics"]["tracking_error"], expected[:, 0], rtol=1e-4)
    np.testing.assert_allclose(info["metrics"]["turning_error"], expected[:, 1], rtol=1e-4)


def test_a_fall_ends_the_episode(task):
    with walker(task, 4) as env:
        qpos = env.physics.qpos.clone()
        qpos[1, 3:7] = torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64)  # on its side
        qpos[2, 2] = 0.4 * qpos[2, 2]
        env.physics.set(torch.arange(4), qpos, env.physics.qvel.clone())
        assert env.task.failed(env.task.read()).tolist() == [False, True, True, False]
        _, _, terminated, _, info = env.step(torch.zeros(env.action_manager.shape))
        assert terminated.tolist()[:2] == [False, True]
        assert info["metrics"]["fallen"].tolist()[:2] == [0.0, 1.0]
        assert info["metrics"]["tracking_error"].tolist() == [1.0] * 4  # nothing was followed yet
        assert not bool(info["metrics"]["success"].any())


def test_rewards_of_tracking_grow_towards_the_command(task):
    """The same motion is worth more the closer the command is to it; perfect tracking pays the whole weight."""
    with walker(task, 5, env={"command": {"standing": 0.0}}) as env:
        scene = env.task.read()
        scene["linear"], scene["angular"] = torch.zeros(5, 3), torch.zeros(5, 3)
        scene["command"] = torch.tensor([[x, 0.0, x] for x in (0.0, 0.1, 0.3, 0.6, 1.0)])
        terms = env.task.reward_terms(scene, torch.zeros(env.action_manager.shape))
        for name in ("track_linear", "track_turning"):
            values = terms[name]
            assert values[0] == 1.0
            assert bool((values[1:] < values[:-1]).all())


def test_results_do_not_depend_on_the_batch_and_continue_exactly(task):
    settings = {"max_episode_steps": 20, "env": {"command": {"interval": 0.1}}}
    many, few = walker(task, 5, num_threads=3, **settings), walker(task, 2, **settings)
    actions = random_actions(many, 30)
    trace = record(many, actions)
    assert_same(rows(trace, [0, 1]), record(few, actions[:, :2]))
    state = many.get_state()
    onwards = record(many, actions[:8])
    many.set_state(state)
    assert_same(record(many, actions[:8]), onwards)


def test_targets_are_around_the_initial_pose(task):
    with walker(task, 2) as env:
        manager, init = env.action_manager, env.robot.init_qpos.float()
        ctrl = manager.control(torch.full(manager.shape, 0.5), env.physics.qpos[:, env.robot.qpos])
        scale = env.cfg.env.actions.qpos.scale
        expected = torch.minimum(torch.maximum(init + 0.5 * scale, env.robot.lower), env.robot.upper)
        torch.testing.assert_close(ctrl, expected.expand_as(ctrl))


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match=r"env\.command: ReachRL takes no commanded velocities"):
        make("ReachRL", env={"command": {}})
    with pytest.raises(ConfigError, match=r"robot\.uid: QuadrupedVelocityRL needs"):
        make("QuadrupedVelocityRL", robot={"uid": "ur5", "init_qpos": []})
    with pytest.raises(ConfigError, match=r"env\.command\.forward: .*low <= high"):
        make("QuadrupedVelocityRL", env={"command": {"forward": [1.0, 0.0]}})


def foreign_quadruped(folder, base: str = "<freejoint/>") -> str:
    """Write a model as others do: its own ground and light, no names of actuators, no sites, high above the ground."""
    leg = """<body name="leg{0}" pos="{1} {2} 0"><joint name="hip{0}" axis="0 1 0" range="-80 80"/>
      <geom type="capsule" fromto="0 0 0 0 0 -.2" size=".02" mass=".5"/><body pos="0 0 -.2">
      <joint name="knee{0}" axis="0 1 0" range="-150 -10"/>
      <geom type="capsule" fromto="0 0 0 0 0 -.2" size=".02" mass=".2"/>
      <geom type="sphere" size=".025" pos="0 0 -.2" mass=".05"/></body></body>"""
    legs = "".join(leg.format(i, x, y) for i, (x, y) in enumerate(((0.2, 0.1), (0.2, -0.1), (-0.2, 0.1), (-0.2, -0.1))))
    trunk = f'<body name="trunk" pos="0 0 2">{base}<geom type="box" size=".2 .08 .05" mass="6"/>{legs}</body>'
    motors = "".join(f'<motor joint="{j}{i}" ctrlrange="-20 20"/>' for i in range(4) for j in ("hip", "knee"))
    text = f'<mujoco><worldbody><geom type="plane" size="1 1 1"/><light pos="0 0 1"/>{trunk}</worldbody>'
    file = folder / "dog.xml"
    file.write_text(f"{text}<actuator>{motors}</actuator></mujoco>")
    return str(file)


def test_a_quadruped_of_a_users_own_stands_and_is_measured(tmp_path):
    robot = {"mjcf": foreign_quadruped(tmp_path), "walks": True, "servos": True, "init_qpos": [0.6, -1.2] * 4}
    with walker("QuadrupedVelocityRL", 3, robot=robot, env={"events": {"randomize_robot": None}}) as env:
        assert env.action_manager.action_dim == 8
        height = 0.4 * np.cos(0.6) + 0.025
        assert float(env.physics.qpos[0, 2]) == pytest.approx(height, abs=1e-6)  # it stands on the ground
        for _ in range(60):
            obs, _, terminated, _, _ = env.step(torch.zeros(env.action_manager.shape))
            assert not bool(terminated.any())
        assert bool(env.task.read()["contact"].all())
        assert obs["critic", "feet"].shape == (3, 4)
        assert float(obs["critic", "height"].min()) > 0.7 * height
        assert env.render([0], size=(60, 80)).shape == (1, 60, 80, 3)


def test_what_cannot_walk_is_told(tmp_path):
    fixed, free = foreign_quadruped(tmp_path, base=""), {"walks": True, "servos": True, "init_qpos": []}
    with pytest.raises(ConfigError, match=r"robot\.walks: expected a robot with a free base, and dog\.xml has none"):
        make("QuadrupedVelocityRL", robot={"mjcf": fixed, **free})
    with pytest.raises(ConfigError, match=r"robot\.mjcf: QuadrupedVelocityRL needs .* '.*dog\.xml' is fixed"):
        make("QuadrupedVelocityRL", robot={"mjcf": foreign_quadruped(tmp_path, base=""), "joints": ["hip1", "knee1"]})
    file = foreign_quadruped(tmp_path)
    with pytest.raises(ConfigError, match=r"base of this robot is free .* Set robot\.walks to true"):
        make("QuadrupedVelocityRL", robot={"mjcf": file})
    with pytest.raises(ConfigError, match=r"robot\.joints: no joint 'hip9'\. Did you mean 'hip"):
        make("QuadrupedVelocityRL", robot={"mjcf": file, "joints": ["hip9"], **free})
    with pytest.raises(ConfigError, match=r"robot\.init_qpos: expected 8 joints"):
        make("QuadrupedVelocityRL", robot={"mjcf": file, **free, "init_qpos": [0.0]})


def test_there_is_no_expert(task):
    with walker(task) as env:
        assert not env.has_expert
        with pytest.raises(ConfigError, match="has no expert"):
            env.expert_action()
