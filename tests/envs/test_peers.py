"""Our tasks in other libraries: TorchRL opens them, Stable-Baselines3 trains on them. (The extra ``peers``.)"""

import gymnasium as gym
import numpy as np
import pytest
import torch

import embodichain.envs
from embodichain.envs.gymnasium_env import TaskGymnasiumEnv
from embodichain.envs.registration import make

pytestmark = pytest.mark.extra("peers")
TASKS = sorted(embodichain.envs.TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_torchrl_opens_it(task):
    """The specs hold, and a rollout has the numbers of the task itself."""
    from torchrl.envs import GymEnv, check_env_specs

    env = GymEnv(f"embodichain/{task}-v0")
    check_env_specs(env, seed=0)
    env.set_seed(3)
    rollout = env.rollout(5, policy=lambda td: td.set("action", torch.full(env.action_spec.shape, 0.1)))
    ours = make(task, num_envs=1)
    ours.reset(seed=3)
    obs, _ = ours.reset()  # set_seed has begun an episode, and a rollout begins the next
    assert torch.equal(rollout["robot", "qpos"][0], obs["robot", "qpos"][0])
    for t in range(5):
        _, reward, terminated, truncated, info = ours.step(torch.full((1, env.action_spec.shape[-1]), 0.1))
        assert torch.equal(rollout["next", "robot", "qvel"][t], info["final_observation"]["robot", "qvel"][0])
        assert rollout["next", "reward"][t].item() == reward.item()
        assert rollout["next", "terminated"][t].item() == terminated.item()
        assert rollout["next", "truncated"][t].item() == truncated.item()
    env.close()


@pytest.mark.parametrize("task", TASKS)
def test_torchrl_ends_and_resets_episodes(task):
    from torchrl.envs import GymEnv

    env = GymEnv(f"embodichain/{task}-v0", max_episode_steps=4)
    rollout = env.rollout(10, break_when_any_done=False, policy=lambda td: td.set("action", env.action_spec.zero()))
    assert rollout["next", "done"].reshape(-1).nonzero().reshape(-1).tolist() == [3, 7]
    env.close()


@pytest.mark.parametrize("task", TASKS)
def test_torchrl_skips_frames_itself(task):
    """``frame_skip`` reaches ``gymnasium.make`` first, which must say in TorchRL's words that it does not know it."""
    from torchrl.envs import GymEnv

    env, ours = GymEnv(f"embodichain/{task}-v0", frame_skip=3), make(task, num_envs=1)
    env.set_seed(5)
    rollout = env.rollout(2, policy=lambda td: td.set("action", env.action_spec.zero()))
    ours.reset(seed=5)
    ours.reset()
    rewards = [ours.step(torch.zeros(1, env.action_spec.shape[-1]))[1].item() for _ in range(6)]
    expected = np.add.reduceat(rewards, [0, 3])
    np.testing.assert_allclose(rollout["next", "reward"].reshape(-1), expected, rtol=1e-6)
    env.close()


@pytest.mark.parametrize("task", ["CartPoleRL", "PushCubeRL"])
def test_torchrl_wraps_a_made_env(task):
    from torchrl.envs import GymWrapper, check_env_specs

    env = GymWrapper(TaskGymnasiumEnv(task))
    check_env_specs(env, seed=0)
    assert env.rollout(3)["next", "robot", "qpos"].shape[0] == 3
    env.close()


@pytest.mark.slow
def test_torchrl_runs_several_in_processes():
    """Each process imports the module that stands before the id, as it knows nothing of this one's registrations."""
    from torchrl.envs import GymEnv

    env = GymEnv("embodichain.envs:embodichain/PushCubeRL-v0", num_envs=2)
    try:
        rollout = env.rollout(3)
        assert rollout.batch_size == torch.Size([2, 3])
        assert not torch.equal(rollout["robot", "qpos"][0], rollout["robot", "qpos"][1])
    finally:
        env.close()


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_torchrl_wraps_a_batch(mode):
    from torchrl.envs import GymWrapper, check_env_specs

    env = GymWrapper(gym.make_vec("embodichain/CartPoleRL-v0", num_envs=3, autoreset_mode=mode, max_episode_steps=4))
    check_env_specs(env, seed=0)
    rollout = env.rollout(9, break_when_any_done=False, policy=lambda td: td.set("action", env.action_spec.zero()))
    assert rollout.batch_size == torch.Size([3, 9])
    assert rollout["next", "truncated"][..., 0].sum(1).tolist() == [2, 2, 2]
    env.close()


def test_torchrl_reads_infos():
    from torchrl.envs import GymEnv, default_info_dict_reader

    env = GymEnv("embodichain/ReachRL-v0").auto_register_info_dict()
    assert env.rollout(2)["next", "episode_seed"].unique().numel() == 1
    env = GymEnv("embodichain/ReachRL-v0")
    env.set_info_dict_reader(default_info_dict_reader(["metrics/distance"]))
    assert (env.rollout(2)["next", "metrics/distance"] > 0).all()


def test_torchrl_applies_its_transforms():
    from torchrl.envs import CatTensors, Compose, GymEnv, RewardSum, StepCounter, TransformedEnv, check_env_specs

    keys = [("robot", "qpos"), ("robot", "qvel")]
    parts = Compose(CatTensors(keys, out_key="observation", del_keys=False), RewardSum(), StepCounter())
    env = TransformedEnv(GymEnv("embodichain/CartPoleRL-v0"), parts)
    check_env_specs(env, seed=0)
    rollout = env.rollout(4)
    assert rollout["observation"].shape == (4, 4)
    torch.testing.assert_close(rollout["next", "episode_reward"][-1], rollout["next", "reward"].sum(0))
    env.close()


@pytest.mark.parametrize("task", TASKS)
def test_sb3_trains_on_it(task):
    """As ``docs/environments.md`` has it: flattened, as Stable-Baselines3 takes no nested observations."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_checker import check_env

    env = gym.wrappers.FlattenObservation(gym.make(f"embodichain/{task}-v0"))
    check_env(env, warn=False)
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(64)
    assert model.num_timesteps == 64
    after = list(model.policy.parameters())
    assert all(torch.isfinite(p).all() for p in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    env.close()
