"""Rolling episodes: every env runs its share, and the sums are right."""

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict

from embodichain.envs.recording import Episode, Summary, roll
from embodichain.envs.vec_env import VecEnv


class CountingEnv(VecEnv):
    """Env ``i`` ends after ``i + 1`` steps; the reward of step ``t`` is ``t``; odd envs succeed."""

    def __init__(self, num_envs):
        self.num_envs, self.device, self.max_episode_steps = num_envs, torch.device("cpu"), num_envs
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,))
        self.seeds = []
        self._step = torch.zeros(num_envs, dtype=torch.int64)

    def _observe(self):
        return TensorDict({"step": self._step.clone()}, batch_size=[self.num_envs])

    def reset(self, seed=None, env_ids=None):
        self.seeds.append(seed)
        self._step.zero_()
        return self._observe(), {}

    def step(self, action):
        self._step += 1
        final = self._observe()
        ended = self._step > torch.arange(self.num_envs)
        reward = self._step.float()
        self._step[ended] = 0
        success = (torch.arange(self.num_envs) % 2).float()
        info = {"final_observation": final, "rewards": {}, "metrics": {"success": success}}
        return self._observe(), reward, ended, torch.zeros_like(ended), info


def no_action(obs):
    return torch.zeros(obs.batch_size[0], 1)


def test_each_env_runs_its_share():
    env = CountingEnv(3)
    steps = list(roll(env, no_action, episodes=7, seed=5))
    episodes = [episode for step in steps for episode in step.ended]
    assert env.seeds == [5]
    assert sorted(e.env for e in episodes) == [0, 0, 0, 1, 1, 2, 2]
    assert {(e.env, e.length, e.total_reward, e.success) for e in episodes} == {
        (0, 1, 1.0, False),
        (1, 2, 1.0 + 2.0, True),
        (2, 3, 1.0 + 2.0 + 3.0, False),
    }
    assert len(steps) == 1 + 6  # the start, and as long as the slowest env takes for its share


def test_moments_hold_the_state_between_steps():
    start, first, second, *_ = roll(CountingEnv(2), no_action, episodes=4)
    assert start.obs["step"].tolist() == [0, 0]
    assert start.ended == []
    assert first.obs["step"].tolist() == [0, 1]  # env 0 ended and begins again
    assert first.final_obs["step"].tolist() == [1, 1]
    assert second.final_obs["step"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="at least 1"):
        next(roll(CountingEnv(1), no_action, episodes=0))


def test_summary_is_the_mean():
    episodes = [Episode(0, 1.0, 10, True), Episode(1, 4.0, 20, False), Episode(0, 4.0, 30, True)]
    summary = Summary.of(episodes)
    assert summary.mean_return == pytest.approx(3.0)
    assert summary.std_return == pytest.approx(2.0**0.5)
    assert summary.mean_length == pytest.approx(20.0)
    assert summary.success_rate == pytest.approx(2 / 3)
    assert Summary.of([Episode(0, 1.0, 1, None)]).success_rate is None
    with pytest.raises(ValueError, match="at least one"):
        Summary.of([])
