"""Action chunks: what a decision of several actions comes to, and what is drawn for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodichain.envs.recording import Summary, roll
from embodichain.envs.registration import make
from embodichain.envs.wrappers import ChunkedEnv, chunked, step_deferred, step_each
from embodichain.errors import ActionError, ChunkSizeError

CAMERA = {"name": "top", "width": 24, "height": 24}


def push_cube(num_envs: int = 4, **changes):
    return make("PushCubeRL", num_envs=num_envs, seed=0, num_threads=1, **changes)


def expert_chunks(num_envs: int, chunk_size: int, steps: int, **changes):
    """Return the expert's actions ``[num_envs, steps * chunk_size, action_dim]`` of the first episode."""
    env = push_cube(num_envs, **changes)
    env.reset(seed=3)
    return torch.stack([_act(env) for _ in range(steps * chunk_size)], dim=1)


def _act(env):
    action = env.expert_action()
    env.step(action)
    return action


def test_chunk_equals_its_steps_one_by_one():
    chunk = 7
    actions = expert_chunks(4, chunk, 2)
    plain, inner = push_cube(), push_cube()
    env = ChunkedEnv(inner, chunk)
    plain.reset(seed=3)
    env.reset(seed=3)
    for part in actions.split(chunk, dim=1):
        rewards = [plain.step(action)[1] for action in part.unbind(1)]
        obs, reward, terminated, truncated, info = env.step(part)
        assert torch.equal(info["chunk"]["chunk_reward"], torch.stack(rewards, 1))
        assert torch.equal(reward, torch.stack(rewards, 1).sum(1))
        assert info["chunk"]["num_actions"].tolist() == [chunk] * 4
        assert not (terminated | truncated).any()
        assert info["final_observation"] is obs
    assert torch.equal(inner.get_state()["physics"], plain.get_state()["physics"])


def test_end_inside_a_chunk_keeps_its_reward_and_wastes_no_action_on_the_next_episode():
    limit, chunk = 10, 4  # the third chunk is cut after two actions
    env = ChunkedEnv(push_cube(3, max_episode_steps=limit), chunk)
    plain = push_cube(3, max_episode_steps=limit)
    env.reset(seed=1)
    plain.reset(seed=1)
    actions = torch.rand(3, 12, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for part in actions[:, :8].split(chunk, dim=1):
        env.step(part)
        for action in part.unbind(1):
            plain.step(action)
    first = plain.step(actions[:, 8])[1]
    at_end, second, _, cut, at_end_info = plain.step(actions[:, 9])
    assert cut.all()
    obs, reward, terminated, truncated, info = env.step(actions[:, 8:])
    assert info["chunk"]["num_actions"].tolist() == [2, 2, 2]
    assert torch.equal(info["chunk"]["chunk_reward"][:, 2:], torch.zeros(3, 2))
    assert torch.equal(reward, first + second)
    assert truncated.all()
    assert not terminated.any()
    final, expected = info["final_observation"], at_end_info["final_observation"]
    assert torch.equal(final["object", "pos"], expected["object", "pos"])
    assert torch.equal(obs["object", "pos"], at_end["object", "pos"])  # the first of the next episode, untouched
    assert torch.equal(info["episode_seed"], at_end_info["episode_seed"])
    assert torch.equal(env.get_state()["step"], torch.zeros(3, dtype=torch.int64))


def test_native_chunks_equal_those_of_single_steps():
    """The simulation's own chunks against single steps with restarts, with ends at different times."""
    chunk, num_envs = 6, 6
    native, stepped = (push_cube(num_envs, max_episode_steps=60) for _ in range(2))
    expert = push_cube(num_envs, max_episode_steps=60)
    for env in (native, stepped, expert):
        env.reset(seed=5)
    ended = set()
    for _ in range(10):
        part = torch.stack([_act(expert) for _ in range(chunk)], dim=1)
        ours, theirs = step_deferred(native, part), step_each(stepped, part)
        for a, b in zip(ours[1:4], theirs[1:4], strict=True):
            assert torch.equal(a, b)
        for key in ("num_actions", "chunk_reward"):
            assert torch.equal(ours[4]["chunk"][key], theirs[4]["chunk"][key])
        assert torch.equal(ours[4]["metrics"]["success"], theirs[4]["metrics"]["success"])
        assert torch.equal(ours[4]["episode_seed"], theirs[4]["episode_seed"])
        for ours_obs, their_obs in (
            (ours[0], theirs[0]),
            (ours[4]["final_observation"], theirs[4]["final_observation"]),
        ):
            assert torch.equal(ours_obs["object", "pos"], their_obs["object", "pos"])
            assert torch.equal(ours_obs["robot", "qpos"], their_obs["robot", "qpos"])
        ended |= set(ours[4]["chunk"]["num_actions"].tolist())
        done = ours[2] | ours[3]
        if done.any():
            break
    assert ended - {chunk}, "no episode ended inside a chunk, so nothing was shown"


def test_nothing_is_drawn_inside_a_chunk(monkeypatch):
    env = push_cube(3, max_episode_steps=10, env={"observations": {"cameras": [CAMERA]}})
    drawn: list[int] = []
    draw = env._cameras.observe

    def count(load, env_ids, *more):
        drawn.append(len(env_ids))
        return draw(load, env_ids, *more)

    monkeypatch.setattr(env._cameras, "observe", count)
    wrapped = ChunkedEnv(env, 4)
    wrapped.reset(seed=0)
    drawn.clear()
    zero = torch.zeros(3, 4, 6)
    wrapped.step(zero)
    assert sum(drawn) == 3  # one picture per env
    wrapped.step(zero)
    drawn.clear()
    _, _, _, truncated, _ = wrapped.step(zero)  # all envs are cut after two actions
    assert truncated.all()
    assert sum(drawn) == 6  # where they ended, and where they begin again


def test_pictures_at_the_end_are_those_of_single_steps():
    settings = {"max_episode_steps": 6, "env": {"observations": {"cameras": [CAMERA]}}}
    env, plain = ChunkedEnv(push_cube(2, **settings), 4), push_cube(2, **settings)
    env.reset(seed=0)
    plain.reset(seed=0)
    actions = torch.rand(2, 8, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1
    env.step(actions[:, :4])
    obs, *_, info = env.step(actions[:, 4:])
    for action in actions[:, :5].unbind(1):
        plain.step(action)
    plain_obs, *_, plain_info = plain.step(actions[:, 5])
    assert torch.equal(info["final_observation"]["image", "top"], plain_info["final_observation"]["image", "top"])
    assert torch.equal(obs["image", "top"], plain_obs["image", "top"])


def test_gymnasium_environments_take_chunks_too():
    env = ChunkedEnv(make("Pendulum-v1", num_envs=2, seed=0, max_episode_steps=7), 3)
    plain = make("Pendulum-v1", num_envs=2, seed=0, max_episode_steps=7)
    env.reset(seed=0)
    plain.reset(seed=0)
    actions = torch.rand(2, 9, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for start in (0, 3):
        env.step(actions[:, start : start + 3])
        for action in actions[:, start : start + 3].unbind(1):
            plain.step(action)
    obs, reward, _, truncated, info = env.step(actions[:, 6:])
    plain_obs, plain_reward, *_, plain_info = plain.step(actions[:, 6])
    assert truncated.all()
    assert info["chunk"]["num_actions"].tolist() == [1, 1]
    assert torch.equal(reward, plain_reward)
    for ours, theirs in ((obs, plain_obs), (info["final_observation"], plain_info["final_observation"])):
        for key, leaf in ours.items():
            assert torch.equal(leaf, theirs[key])


def test_lengths_are_counted_in_actions():
    env = ChunkedEnv(push_cube(2, max_episode_steps=10), 4)
    episodes = [e for step in roll(env, lambda obs: torch.zeros(2, 4, 6), 4, seed=0) for e in step.ended]
    assert Summary.of(episodes).mean_length == 10.0


def test_chunk_longer_than_the_episode_is_refused():
    env = push_cube(1, max_episode_steps=8)
    with pytest.raises(ChunkSizeError, match=r"chunk_size must lie in \[1, 8\].*got 9"):
        ChunkedEnv(env, 9)
    with pytest.raises(ChunkSizeError, match="got 0"):
        ChunkedEnv(env, 0)
    assert ChunkedEnv(env, 8).max_episode_steps == 1


def test_wrong_chunks_are_refused_before_anything_moves():
    env = ChunkedEnv(push_cube(2), 3)
    before = env.get_state()["physics"]
    with pytest.raises(ActionError, match=r"must have shape \[2, 3, 6\].*got \[2, 6\]"):
        env.step(torch.zeros(2, 6))
    bad = torch.zeros(2, 3, 6)
    bad[1, 2, 0] = np.nan
    with pytest.raises(ActionError, match="env 1 is not finite"):
        env.step(bad)
    with pytest.raises(ActionError, match="one key 'delta_qpos'"):
        env.step({"qpos": torch.zeros(2, 3, 6)})
    assert torch.equal(env.get_state()["physics"], before)
    env.step({"delta_qpos": torch.zeros(2, 3, 6)})


def test_discrete_actions_cannot_be_chunked():
    with pytest.raises(ChunkSizeError, match="actions"):
        ChunkedEnv(make("CartPole-v1", num_envs=1), 2)


def test_chunked_wraps_once():
    env = push_cube(1)
    assert chunked(env, 1) is env
    wrapped = chunked(env, 4)
    assert isinstance(wrapped, ChunkedEnv)
    assert chunked(wrapped, 4) is wrapped
    with pytest.raises(ChunkSizeError, match="chunks of 4"):
        chunked(wrapped, 2)
