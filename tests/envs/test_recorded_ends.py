"""Recordings show the states in which episodes ended, although envs begin the next episode in the same step."""

import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodichain.envs.gymnasium_env import GymnasiumVecEnv, make_gymnasium
from embodichain.envs.recording import EpisodeRecorder, roll
from embodichain.envs.registration import make
from embodichain.envs.vec_env import VecEnv
from embodichain.envs.wrappers import ChunkedEnv, GroupedEnv
from tests.envs.test_gymnasium_env import SameStep


def reach(**settings):
    return make("ReachRL", num_envs=2, seed=0, num_threads=1, max_episode_steps=3, **settings)


def ends_of(env, qpos, steps=3):
    """Step with random actions; return the states seen at ends of episodes, and the results of the steps."""
    seen, results = [], []
    assert env.on_episode_end(lambda ended: seen.append((ended.tolist(), qpos())))
    env.reset(seed=3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        results.append(env.step(torch.rand((env.num_envs, *env.action_space.shape), generator=generator) - 0.5))
    return seen, results


def test_the_ends_of_a_task_are_seen_before_the_next_episodes():
    with reach() as env:
        seen, results = ends_of(env, lambda: env.physics.qpos[:, :6].clone())
        obs, *_, info = results[-1]
        (ended, qpos), *others = seen
        assert (ended, others) == ([True, True], [])
        assert torch.equal(qpos.float(), info["final_observation"]["robot", "qpos"])
        assert not torch.equal(qpos.float(), obs["robot", "qpos"])
        env.on_episode_end(None)
        for _ in range(3):
            env.step(torch.zeros(2, *env.action_space.shape))
        assert len(seen) == 1


def test_watching_changes_no_episode():
    with reach() as watched, reach() as plain:
        plain.reset(seed=3)
        _, results = ends_of(watched, lambda: watched.render([0], size=(24, 32)), steps=4)
        generator = torch.Generator().manual_seed(0)
        for obs, reward, *_ in results:
            expected = plain.step(torch.rand((2, *plain.action_space.shape), generator=generator) - 0.5)
            assert torch.equal(obs["robot", "qpos"], expected[0]["robot", "qpos"])
            assert torch.equal(reward, expected[1])


def test_the_ends_inside_a_chunk_are_seen():
    with reach() as env:
        seen, results = ends_of(ChunkedEnv(env, 2), lambda: env.physics.qpos[:, :6].float(), steps=2)
        assert torch.equal(seen[0][1], results[-1][4]["final_observation"]["robot", "qpos"])


def test_groups_are_seen_in_their_own_rows():
    seen = []
    with reach() as one, reach() as other:
        env = GroupedEnv([one, other])
        env.on_episode_end(lambda ended: seen.append(ended.tolist()))
        env.reset(seed=0)
        for _ in range(3):
            env.step(torch.zeros(4, *env.action_space.shape))
        assert seen == [[True, True, False, False], [False, False, True, True]]


def test_the_ends_of_gymnasium_envs_are_seen_unless_they_reset_themselves():
    with make_gymnasium("CartPole-v1", 2, max_episode_steps=4, seed=0) as env:
        seen = []
        env.on_episode_end(lambda ended: seen.append([e.unwrapped.state for e in env.vector_env.unwrapped.envs]))
        env.reset(seed=0)
        for _ in range(4):
            *_, info = env.step(torch.ones(2, dtype=torch.int64))
        assert np.allclose(seen[0], info["final_observation"]["state"].numpy())
    assert not GymnasiumVecEnv(SameStep(), max_episode_steps=10).on_episode_end(print)


class Brightening(VecEnv):
    """Episodes of 5 steps; an image is as bright as its step."""

    def __init__(self, num_envs=2, shows_ends=True):
        self.num_envs, self.device, self.max_episode_steps = num_envs, torch.device("cpu"), 5
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,))
        self.shows_ends, self.count, self.callback = shows_ends, 0, None

    def _observe(self):
        return TensorDict({"step": torch.full((self.num_envs,), self.count)}, batch_size=[self.num_envs])

    def reset(self, seed=None, env_ids=None):
        self.count = 0
        return self._observe(), {}

    def on_episode_end(self, callback):
        self.callback = callback if self.shows_ends else None
        return self.shows_ends

    def step(self, action):
        self.count += 1
        final, done = self._observe(), torch.full((self.num_envs,), self.count == 5)
        if done.all():
            if self.callback is not None:
                self.callback(done)
            self.count = 0
        info = {"final_observation": final, "rewards": {}, "metrics": {}}
        return self._observe(), torch.zeros(self.num_envs), done, torch.zeros_like(done), info

    def render(self, env_ids=None, camera=None, size=(240, 320)):
        return np.full((1, *size, 3), self.count * 40, dtype=np.uint8)


def brightness(env, tmp_path, episodes, of=3):
    """Return the brightness, in steps, of the frames of a video of ``episodes`` episodes in all."""
    recorder = EpisodeRecorder(env, tmp_path / "steps.mp4", of, size=(96, 128))
    for step in roll(env, lambda obs: torch.zeros(env.num_envs, 1), episodes):
        recorder.watch(step)
    (path,) = recorder.finish()
    recorder.close()
    return [round(float(frame[:40].mean()) / 40) for frame in iio.imread(path)]


HOLD = 24  # frames of the end of an episode: 0.8 s


@pytest.mark.parametrize(("shows_ends", "end"), [(True, 5), (False, 4)])
def test_a_video_holds_the_end_of_an_episode(tmp_path, shows_ends, end):
    env = Brightening(shows_ends=shows_ends)
    assert brightness(env, tmp_path, 4) == ([0, 1, 2, 3, 4] + [end] * HOLD) * 2
    assert env.callback is None


def test_a_video_ends_with_the_last_episode_that_counts(tmp_path):
    assert brightness(Brightening(1), tmp_path, 1) == [0, 1, 2, 3, 4] + [5] * HOLD
    assert brightness(Brightening(2), tmp_path, 3, of=1) == [0, 1, 2, 3, 4] + [5] * HOLD
