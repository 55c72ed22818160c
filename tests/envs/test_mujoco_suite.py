"""Gymnasium's MuJoCo suite, simulated in batches, against Gymnasium's own environments, step by step."""

import copy
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import torch

from embodichain.envs import MUJOCO_SUITE
from embodichain.envs.gymnasium_env import GymnasiumVecEnv
from embodichain.envs.physics import contact_forces
from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv
from embodichain.errors import ConfigError

ARGUMENTS = {
    "Ant-v5": {"include_cfrc_ext_in_observation": False, "contact_force_range": (-20.0, 20.0), "main_body": 3},
    "HalfCheetah-v5": {"frame_skip": 2, "exclude_current_positions_from_observation": False, "ctrl_cost_weight": 0.5},
    "Hopper-v5": {"healthy_state_range": (-2.0, 2.0), "terminate_when_unhealthy": False},
    "Humanoid-v5": {"include_cvel_in_observation": False, "contact_cost_range": (-1.0, 1e-4), "healthy_reward": 2.0},
    "HumanoidStandup-v5": {"include_cinert_in_observation": False, "uph_cost_weight": 3.0},
    "InvertedDoublePendulum-v5": {"healthy_reward": 3.0, "reset_noise_scale": 0.3},
    "InvertedPendulum-v5": {"reset_noise_scale": 0.1},
    "Pusher-v5": {"reward_near_weight": 2.0},
    "Reacher-v5": {"reward_dist_weight": 2.0, "reward_control_weight": 0.5},
    "Swimmer-v5": {"forward_reward_weight": 2.0, "exclude_current_positions_from_observation": False},
    "Walker2d-v5": {"healthy_angle_range": (-0.1, 0.1), "frame_skip": 1},
}


class Reference:
    """One env of Gymnasium that begins its episodes where a batched one does."""

    def __init__(self, id: str, kwargs: dict[str, Any]) -> None:
        self.env: Any = gym.make(id, **kwargs).unwrapped
        low, high = (bound.astype(np.float64) for bound in (self.env.action_space.low, self.env.action_space.high))
        self._half, self._middle = (high - low) / 2, (high + low) / 2

    def begin(self, env: TaskEnv, row: int) -> np.ndarray:
        mujoco.mj_resetData(self.env.model, self.env.data)
        self.env.set_state(env.physics.qpos[row].numpy().copy(), env.physics.qvel[row].numpy().copy())
        return np.asarray(self.env._get_obs())

    def step(self, action: torch.Tensor) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.env.step((action.double().numpy() * self._half + self._middle).astype(np.float32))


def batched(id: str, num_envs: int = 2, **settings: Any) -> TaskEnv:
    env = make(id, num_envs=num_envs, seed=3, **settings)
    assert isinstance(env, TaskEnv)
    return env


def close(ours: Any, theirs: Any) -> bool:
    return np.allclose(np.asarray(ours, np.float64), np.asarray(theirs, np.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("changed", [False, True], ids=["defaults", "arguments"])
@pytest.mark.parametrize("id", MUJOCO_SUITE)
def test_every_step_is_that_of_gymnasium(id: str, changed: bool) -> None:
    kwargs = ARGUMENTS[id] if changed else {}
    env = batched(id, kwargs=kwargs, max_episode_steps=40)
    references = [Reference(id, kwargs) for _ in range(env.num_envs)]
    assert env.observation_space["state"].shape == references[0].env.observation_space.shape
    obs, _ = env.reset()
    for row, reference in enumerate(references):
        assert close(obs["state"][row], reference.begin(env, row))
    generator = torch.Generator().manual_seed(0)
    resets = 0
    for _ in range(60):
        action = 2.0 * torch.rand(env.num_envs, *env.action_space.shape, generator=generator) - 1.0
        obs, reward, terminated, truncated, info = env.step(action)
        for row, reference in enumerate(references):
            theirs, their_reward, their_end, _, their_info = reference.step(action[row])
            assert close(info["final_observation"]["state"][row], theirs)
            assert close(reward[row], their_reward)
            assert bool(terminated[row]) == their_end
            named = {**info["rewards"], **info["metrics"]}
            assert all(close(named[name][row], their_info[name]) for name in named.keys() & their_info.keys())
            if terminated[row] or truncated[row]:
                resets += 1
                assert close(obs["state"][row], reference.begin(env, row))
    assert resets > 0
    env.close()


def test_an_episode_is_as_long_as_in_gymnasium() -> None:
    for id in MUJOCO_SUITE:
        with batched(id, 1) as env:
            assert env.max_episode_steps == gym.spec(id).max_episode_steps


@pytest.mark.parametrize("id", ["Ant-v5", "HalfCheetah-v5"])
def test_threads_do_not_change_a_bit(id: str) -> None:
    actions = torch.rand(20, 5, 8 if id == "Ant-v5" else 6, generator=torch.Generator().manual_seed(1)) * 2 - 1
    results = []
    for threads in (1, 3):
        with batched(id, 5, num_threads=threads) as env:
            env.reset()
            results.append([env.step(action)[:2] for action in actions])
    for (obs, reward), (other_obs, other_reward) in zip(*results, strict=True):
        assert torch.equal(obs["state"], other_obs["state"])
        assert torch.equal(reward, other_reward)


@pytest.mark.parametrize("id", ["Ant-v5", "InvertedDoublePendulum-v5", "Pusher-v5"])
def test_a_saved_state_continues_bit_for_bit(id: str) -> None:
    with batched(id, 4) as env:
        env.reset()
        action = torch.zeros(4, *env.action_space.shape)
        for _ in range(3):
            env.step(action + 0.5)
        saved = env.get_state()
        first = [env.step(action)[:2] for _ in range(5)]
        env.set_state(saved)
        second = [env.step(action)[:2] for _ in range(5)]
    for (obs, reward), (again, same) in zip(first, second, strict=True):
        assert torch.equal(obs["state"], again["state"])
        assert torch.equal(reward, same)


def test_targets_are_drawn_where_gymnasium_draws_them() -> None:
    with batched("Reacher-v5", 2000) as env:
        env.reset()
        radius = env.physics.qpos[:, -2:].norm(dim=1)
    assert radius.max() < 0.2
    assert abs(float((radius < 0.1).double().mean()) - 0.25) < 0.03  # a quarter of the disc's area
    with batched("Pusher-v5", 2000) as env:
        env.reset()
        places = env.physics.qpos[:, -4:-2]
    assert bool((places.norm(dim=1) > 0.17).all())
    assert places[:, 0].min() >= -0.3
    assert places[:, 0].max() <= 0.0
    assert places[:, 1].abs().max() <= 0.2
    cells, theirs = [], gym.make("Pusher-v5").unwrapped
    for seed in range(300):
        theirs.reset(seed=seed)
        cells.append(float(theirs.data.qpos[-4]) < -0.2)
    assert abs(np.mean(cells) - float((places[:, 0] < -0.2).double().mean())) < 0.1


@pytest.mark.parametrize(
    "settings",
    [{"native": False}, {"kwargs": {"camera_id": 0}}, {"asynchronous": True, "kwargs": {}}],
    ids=["native", "camera", "asynchronous"],
)
def test_gymnasium_itself_is_used_where_it_is_asked_for(settings: dict[str, Any]) -> None:
    with make("HalfCheetah-v5", num_envs=1, **settings) as env:
        assert isinstance(env, GymnasiumVecEnv)


@pytest.mark.parametrize(
    ("id", "kwargs"),
    [
        ("HalfCheetah-v5", {"no_such_argument": 1}),
        ("HalfCheetah-v5", {"frame_skip": "x"}),
        ("HalfCheetah-v5", {"frame_skip": 0}),
        ("HalfCheetah-v5", {"frame_skip": 2.7}),
        ("HalfCheetah-v5", {"xml_file": "nope.xml"}),
        ("HalfCheetah-v5", {"reset_noise_scale": "x"}),
        ("HalfCheetah-v5", {"ctrl_cost_weight": None}),
        ("HalfCheetah-v5", {"exclude_current_positions_from_observation": "no"}),
        ("Ant-v5", {"healthy_z_range": 5}),
        ("Ant-v5", {"contact_force_range": [1.0]}),
        ("Ant-v5", {"contact_force_range": [1.0, -1.0]}),
        ("Ant-v5", {"main_body": "nope"}),
        ("Reacher-v5", {"xml_file": "ant.xml"}),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(id: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"kwargs\.{next(iter(kwargs))}"):
        make(id, kwargs=kwargs)


@pytest.mark.parametrize(
    "settings",
    [
        {"env": {"events": {"randomize_robot": {"position": 0.1}}}},
        {"env": {"actions": {"qpos": {}}}},
        {"robot": {"init_qpos": [0.1]}},
    ],
    ids=["events", "actions", "robot"],
)
def test_settings_of_robots_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no such settings"):
        make("HalfCheetah-v5", **settings)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("native", [True, False], ids=["plugin", "python"])
def test_contact_forces_are_those_of_each_envs_own_model(
    native: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is ``mj_step`` and ``mj_rnePostConstraint`` with Gymnasium's model, once of 20 times the mass."""
    if not native:
        monkeypatch.setattr(contact_forces, "_register", lambda: False)
    plain = gym.make("Ant-v5").unwrapped.model  # type: ignore[attr-defined]
    with batched("Ant-v5", 3, num_threads=threads) as env:
        assert contact_forces.computes_contact_forces(env.physics.model) == native
        env.reset()
        env.physics.model_field("body_mass")[1].mul_(20.0)
        env.physics.refresh_model(torch.tensor([1]))
        masses = [env.physics._batch.get_model(row).body_mass for row in range(3)]  # type: ignore[attr-defined]
        data = [mujoco.MjData(plain) for _ in range(3)]
        models = [copy.copy(plain) for _ in range(3)]
        for row, (model, one) in enumerate(zip(models, data, strict=True)):
            model.body_mass[:] = masses[row]
            mujoco.mj_setConst(model, mujoco.MjData(model))
            one.qpos[:], one.qvel[:] = env.physics.qpos[row].numpy(), env.physics.qvel[row].numpy()
        for _ in range(12):
            env.step(torch.full((3, 8), 0.5))
            for row, (model, one) in enumerate(zip(models, data, strict=True)):
                one.ctrl[:] = env.physics.ctrl[row].numpy()
                mujoco.mj_step(model, one, env.task.substeps)
                mujoco.mj_rnePostConstraint(model, one)
                assert np.array_equal(env.physics.qvel[row].numpy(), one.qvel)
                assert np.array_equal(env.physics.outputs["cfrc_ext"][row].numpy(), one.cfrc_ext)
        assert all(one.cfrc_ext.any() for one in data)
        assert not torch.equal(env.physics.qvel[0], env.physics.qvel[1])


def test_a_suite_task_has_no_sparse_reward() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.mode"):
        make("HalfCheetah-v5", env={"rewards": {"mode": "sparse"}})


def test_it_is_filmed_without_a_render_mode() -> None:
    with batched("HalfCheetah-v5", 2, kwargs={"render_mode": "rgb_array"}) as env:
        env.reset()
        frames = env.render(size=(48, 64))
    assert frames.shape == (2, 48, 64, 3)
    assert frames.std() > 5
