"""Our tasks as Gymnasium envs: single and batched, judged by Gymnasium's own checker and by the tasks themselves."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import embodichain.envs
from embodichain.envs.gymnasium_env import TaskGymnasiumEnv, TaskGymnasiumVectorEnv, make_gymnasium
from embodichain.envs.registration import make
from embodichain.errors import EnvContractError

TASKS = sorted(embodichain.envs.TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_gymnasium_finds_nothing_wrong(task):
    env = gym.make(f"embodichain/{task}-v0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*observation space (minimum|maximum) value is -?infinity.*")
        check_env(env.unwrapped, skip_render_check=True)  # drawing has tests of its own, for machines that can
    env.close()


def test_a_single_env_is_the_task_and_stops_at_the_end():
    env = TaskGymnasiumEnv("ReachRL", max_episode_steps=6)
    obs, info = env.reset(seed=5)
    task = make("ReachRL", num_envs=1, max_episode_steps=6)
    expected, _ = task.reset(seed=5)
    assert env.observation_space.contains(obs)
    np.testing.assert_array_equal(obs["robot"]["qpos"], expected["robot", "qpos"][0])
    seed = info["episode_seed"]
    for t in range(6):
        action = np.full(6, 0.3 * np.sin(t), np.float32)
        obs, reward, terminated, truncated, info = env.step(action)
        _, reward_, terminated_, truncated_, info_ = task.step(torch.from_numpy(action)[None])
        assert (reward, terminated, truncated) == (reward_.item(), terminated_.item(), truncated_.item())
        np.testing.assert_array_equal(obs["robot"]["qpos"], info_["final_observation"]["robot", "qpos"][0])
        assert info["metrics"]["success"] == info_["metrics"]["success"].item()
        assert sum(info["rewards"].values()) == pytest.approx(reward, rel=1e-4)
        assert info["is_success"] is bool(info["metrics"]["success"])
    assert (terminated, truncated) == (False, True)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(action)
    first, again = env.reset(seed=5)
    assert again["episode_seed"] == seed
    assert env.reset()[1]["episode_seed"] != seed
    np.testing.assert_array_equal(first["goal"]["pos"], expected["goal", "pos"][0])
    env.close()
    env.close()


def test_step_before_the_first_reset_is_an_error():
    with pytest.raises(gym.error.ResetNeeded):
        TaskGymnasiumEnv("CartPoleRL").step(np.zeros(1, np.float32))


def test_a_batch_cannot_be_a_single_env():
    with pytest.raises(EnvContractError, match="num_envs=1, got 2"):
        TaskGymnasiumEnv(make("CartPoleRL", num_envs=2))


def test_a_vector_env_reports_ends_as_gymnasium_does():
    env = gym.make_vec("embodichain/CartPoleRL-v0", num_envs=4, max_episode_steps=12)
    assert isinstance(env, TaskGymnasiumVectorEnv)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    task = make("CartPoleRL", num_envs=4, max_episode_steps=12)
    obs, _ = env.reset(seed=3)
    expected, _ = task.reset(seed=3)
    assert env.observation_space.contains(obs)
    generator, ends = np.random.default_rng(0), 0
    for _ in range(40):
        action = generator.uniform(-1, 1, (4, 1)).astype(np.float32)
        obs, reward, terminated, truncated, info = env.step(action)
        expected, reward_, terminated_, truncated_, info_ = task.step(torch.from_numpy(action))
        np.testing.assert_array_equal(obs["robot"]["qpos"], expected["robot", "qpos"])
        np.testing.assert_array_equal(reward, reward_)
        np.testing.assert_array_equal(terminated, terminated_)
        np.testing.assert_array_equal(truncated, truncated_)
        done = terminated | truncated
        ends += done.sum()
        assert ("final_obs" in info) == done.any()
        for i in np.flatnonzero(done):
            reached = info_["final_observation"][int(i)]
            np.testing.assert_array_equal(info["final_obs"][i]["robot"]["qvel"], reached["robot", "qvel"])
            assert info["_final_obs"][i]
            assert info["final_info"]["metrics"]["success"][i] == info_["metrics"]["success"][i]
            assert info["final_info"]["_metrics"][i]
        if not done.all():
            assert info["_metrics"].tolist() == (~done).tolist()
    assert ends >= 12
    env.close()


def test_some_envs_of_a_vector_env_are_reset_by_mask_and_seed():
    env = TaskGymnasiumVectorEnv("ReachRL", num_envs=3)
    env.reset(seed=0)
    before, *_ = env.step(np.ones((3, 6), np.float32))
    mask = np.array([False, True, True])
    after, info = env.reset(seed=[None, 11, 11], options={"reset_mask": mask})
    np.testing.assert_array_equal(after["robot"]["qpos"][0], before["robot"]["qpos"][0])
    np.testing.assert_array_equal(after["goal"]["pos"][1], after["goal"]["pos"][2])
    assert info["episode_seed"][1:].tolist() == [11, 11]
    with pytest.raises(ValueError, match="at least one true"):
        env.reset(options={"reset_mask": np.zeros(3, np.bool_)})
    with pytest.raises(ValueError, match="expected 3, got 2"):
        env.reset(seed=[1, 2])
    with pytest.raises(ValueError, match="to every env"):
        env.reset(seed=[1, None, 2])


def test_gymnasiums_own_wrappers_work_on_it():
    env = gym.wrappers.vector.RecordEpisodeStatistics(
        TaskGymnasiumVectorEnv("CartPoleRL", num_envs=2, max_episode_steps=4)
    )
    env.reset(seed=0)
    returns = np.zeros(2)
    for _ in range(4):
        _, reward, *_, info = env.step(np.zeros((2, 1), np.float32))
        returns += reward
    np.testing.assert_allclose(info["episode"]["r"], returns, rtol=1e-6)
    assert info["episode"]["l"].tolist() == [4, 4]


def test_the_registered_name_works_through_the_adapter_too():
    with make_gymnasium("embodichain/CartPoleRL-v0", 2) as env:
        assert env.max_episode_steps == make("CartPoleRL").max_episode_steps
        obs, _ = env.reset(seed=0)
        assert obs["robot", "qpos"].shape == (2, 2)
        assert "success" in env.step(torch.zeros(2, 1))[4]["metrics"]
