"""The contract of ``VecEnv``, as our own environments keep it."""

import gc
import os

import mujoco
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodichain.envs.tasks.cart_pole import CartPole
from embodichain.envs.vec_env import HasExpert, VecEnv
from embodichain.envs.wrappers import ChunkedEnv
from embodichain.errors import EnvContractError, RenderingError
from tests.envs.rollouts import TASKS, assert_same_leaves, flat, random_actions, record, small


@pytest.fixture(scope="module", params=TASKS)
def env(request):
    with small(request.param, 6) as env:
        yield env


def test_shapes_types_and_spaces(env):
    assert isinstance(env, VecEnv)
    assert isinstance(env, HasExpert)
    obs, info = env.reset(seed=0)
    assert obs.batch_size == (6,)
    assert info["episode_seed"].shape == (6,)
    obs, reward, terminated, truncated, info = env.step(random_actions(env, 1)[0])
    assert isinstance(obs, TensorDict)
    assert reward.dtype == torch.float32
    assert terminated.dtype == truncated.dtype == torch.bool
    assert info["episode_seed"].dtype == torch.int64
    named = [*info["rewards"].values(), *info["metrics"].values()]
    for value in (reward, terminated, truncated, info["episode_seed"], *named):
        assert value.shape == (6,)
    assert "success" in info["metrics"]
    assert env.observation_space.contains(arrays(obs[0].to_dict()))
    assert env.action_space.shape == (env.action_manager.action_dim,)
    assert not any(leaf.dtype == torch.float64 for leaf in flat(obs).values())


def test_the_observation_belongs_to_the_returned_state(env):
    """Joint positions, velocities and the tool's place, from a fresh ``mj_forward`` on the state the env is in."""
    env.reset(seed=3)
    data = mujoco.MjData(env.physics.model)
    for action in random_actions(env, 5):
        obs = env.step(action)[0]
        for i in range(6):
            env.physics.load(data, i)
            mujoco.mj_forward(env.physics.model, data)
            joints = slice(0, 2) if env.robot.chain is None else env.robot.qpos
            speeds = slice(0, 2) if env.robot.chain is None else env.robot.qvel
            np.testing.assert_array_equal(obs["robot", "qpos"][i], data.qpos[joints].astype(np.float32))
            np.testing.assert_array_equal(obs["robot", "qvel"][i], data.qvel[speeds].astype(np.float32))
            if env.robot.chain is not None:
                np.testing.assert_allclose(obs["robot", "ee_pos"][i], data.site("robot/tool/tool").xpos, atol=3e-6)
            if "object" in obs:
                np.testing.assert_allclose(obs["object", "pos"][i], data.body("cube").xpos, atol=1e-6)
                np.testing.assert_allclose(obs["object", "quat"][i], data.body("cube").xquat, atol=1e-6)
                np.testing.assert_array_equal(obs["object", "linvel"][i], data.qvel[:3].astype(np.float32))


def test_what_was_returned_is_never_written_to_again(env):
    env.reset(seed=1)
    kept, copies = [], []
    for action in random_actions(env, 15):  # the episodes end in between
        obs, reward, terminated, truncated, info = env.step(action)
        leaves = {**dict(flat_live(obs)), **{f"final/{k}": v for k, v in flat_live(info["final_observation"])}}
        leaves |= {"reward": reward, "terminated": terminated, "truncated": truncated, "seed": info["episode_seed"]}
        leaves |= {f"part/{k}": v for k, v in info["rewards"].items()}
        leaves |= {f"metric/{k}": v for k, v in info["metrics"].items()}
        kept.append(leaves)
        copies.append({name: value.clone() for name, value in leaves.items()})
    env.reset(env_ids=[0, 2])
    env.set_state(env.get_state())
    env.reset(seed=2)
    for leaves, before in zip(kept, copies, strict=True):
        for name, value in leaves.items():
            assert torch.equal(value, before[name]), name


def test_writing_to_an_observation_does_not_reach_the_simulation():
    """Whoever normalises in place, or adds keys, spoils nothing but their own copy."""
    env, spoiled = small("PickCubeRL", 4), small("PickCubeRL", 4)
    for _ in range(20):
        assert torch.equal(env.expert_action(), spoiled.expert_action())
        obs, reward, *_ = env.step(env.expert_action())
        theirs, their_reward, _, _, info = spoiled.step(spoiled.expert_action())
        assert torch.equal(reward, their_reward)
        assert torch.equal(obs["object", "pos"], theirs["object", "pos"])
        named = (*info["rewards"].values(), *info["metrics"].values())
        for leaf in (*dict(flat_live(theirs)).values(), their_reward, *named):
            leaf.fill_(100.0)
        theirs["mine"] = torch.zeros(4)
    spoiled.reset(env_ids=[1])


def test_done_envs_start_over_in_the_same_step():
    env = small("PushCubeRL", 3, max_episode_steps=4)
    start, _ = env.reset(seed=0)
    goals = start["goal", "pos"].clone()
    for step in range(1, 5):
        obs, _, terminated, truncated, info = env.step(torch.zeros(3, 6))
        if step < 4:
            assert not bool(truncated.any())
            assert info["final_observation"] is obs
    assert bool(truncated.all())
    assert not bool(terminated.any())
    assert torch.equal(info["final_observation"]["goal", "pos"], goals)
    assert not bool((obs["goal", "pos"] == goals).any())
    assert obs["robot", "qvel"].abs().max() == 0.0
    assert not bool(env.step(torch.zeros(3, 6))[3].any())


def test_final_observation_equals_obs_where_nothing_ended():
    env = small("PushCubeRL", 4, max_episode_steps=6)
    env.reset(seed=0)
    env.step(torch.zeros(4, 6))
    env.reset(env_ids=[1, 3])  # these are one step behind from now on
    for _ in range(5):
        obs, _, _, truncated, info = env.step(torch.zeros(4, 6))
    assert truncated.tolist() == [True, False, True, False]
    final = flat(info["final_observation"])
    for name, value in flat(obs).items():
        assert torch.equal(value[[1, 3]], final[name][[1, 3]])
    assert not bool((obs["goal", "pos"][[0, 2]] == final["goal/pos"][[0, 2]]).any())


def test_final_observation_is_what_would_have_come_without_the_limit():
    limited, free = small("PickCubeRL", 3, max_episode_steps=5), small("PickCubeRL", 3, max_episode_steps=50)
    actions = random_actions(limited, 5)
    last, expected = record(limited, actions)[-1], record(free, actions)[-1]
    for name in (name for name in last if name.startswith("final/")):
        assert torch.equal(last[name], expected[name])
        assert torch.equal(expected[name], expected[name.replace("final/", "obs/")])


def test_a_failure_terminates_and_a_limit_truncates():
    env = small("CartPoleRL", 2, max_episode_steps=40)
    env.reset(seed=0)
    push = torch.tensor([[1.0], [0.0]])
    ended = []
    for step in range(1, 41):
        action = torch.where(torch.tensor([[True], [False]]), push, env.expert_action())
        _, _, terminated, truncated, info = env.step(action)
        assert not bool(terminated[1])
        assert info["metrics"]["success"].tolist() == (~terminated).float().tolist()
        if bool(terminated[0]):
            ended.append(step)
    assert ended
    assert ended[0] < 40
    assert truncated.tolist() == [False, True]


@pytest.mark.parametrize("terminates", [True, False])
def test_success_ends_an_episode_if_it_is_told_to(terminates):
    env = small("ReachRL", 4, env={"terminate_on_success": terminates, "success_threshold": 10.0})
    for _ in range(3):
        _, _, terminated, _, info = env.step(torch.zeros(4, 6))
        assert info["metrics"]["success"].tolist() == [1.0] * 4
        assert terminated.tolist() == [terminates] * 4


def test_a_limit_and_a_success_may_fall_together():
    env = small("ReachRL", 2, max_episode_steps=1, env={"success_threshold": 10.0})
    _, _, terminated, truncated, _ = env.step(torch.zeros(2, 6))
    assert bool((terminated & truncated).all())


def test_an_env_that_becomes_unstable_is_cut_and_says_so():
    env = small("ReachRL", 3, env={"success_threshold": 10.0, "terminate_on_success": False})
    calm = small("ReachRL", 3, env={"success_threshold": 10.0, "terminate_on_success": False})
    before = env.reset(seed=3)[0]
    calm.reset(seed=3)
    env.physics.qvel[1] = 1e12
    for step in range(2):
        obs, _, terminated, truncated, info = env.step(torch.zeros(3, 6))
        expected = calm.step(torch.zeros(3, 6))[0]
        assert info["metrics"]["diverged"].tolist() == ([0.0, 1.0, 0.0] if step == 0 else [0.0] * 3)
        assert info["metrics"]["success"].tolist() == ([1.0, 0.0, 1.0] if step == 0 else [1.0] * 3)
        assert not terminated.any()  # the task has not ended: nobody knows what would have come
        assert truncated.tolist() == ([False, True, False] if step == 0 else [False] * 3)
        if step == 0:  # what it saw last, and not the state that MuJoCo puts it back to
            final = flat(info["final_observation"])
            assert all(torch.equal(leaf[1], flat(before)[name][1]) for name, leaf in final.items())
            assert all(torch.equal(leaf[[0, 2]], flat(expected)[name][[0, 2]]) for name, leaf in final.items())
            assert not torch.equal(flat(obs)["robot/qpos"][1], flat(before)["robot/qpos"][1])  # a new episode
        assert all(bool(torch.isfinite(leaf).all()) for leaf in flat(obs).values())
        for name, leaf in flat(obs).items():
            assert torch.equal(leaf[[0, 2]], flat(expected)[name][[0, 2]])


def test_a_task_that_fails_where_mujoco_puts_an_env_back_does_not_end_it(monkeypatch):
    """Neither success nor failure of that state is the policy's."""
    env = small("CartPoleRL", 2)
    monkeypatch.setattr(type(env.task), "failed", lambda self, scene: scene["success"] < 2.0)
    env.physics.qvel[1] = float("nan")
    _, _, terminated, truncated, _ = env.step(torch.zeros(2, 1))
    assert terminated.tolist() == [True, False]
    assert truncated.tolist() == [False, True]


def test_an_unstable_env_inside_a_chunk_ends_with_what_the_chunk_began_with():
    env = small("ReachRL", 2, env={"terminate_on_success": False})
    chunks = ChunkedEnv(env, 3)
    before = chunks.reset(seed=3)[0]
    env.physics.qvel[1] = 1e12
    _, _, terminated, truncated, info = chunks.step(torch.zeros(2, 3, 6))
    assert (terminated.tolist(), truncated.tolist()) == ([False, False], [False, True])
    assert info["chunk"]["num_actions"].tolist() == [3, 1]
    final, first = flat(info["final_observation"]), flat(before)
    assert all(torch.equal(leaf[1], first[name][1]) for name, leaf in final.items())
    assert not torch.equal(final["robot/qvel"][0], first["robot/qvel"][0])


def test_masked_steps_end_unstable_envs_alike():
    """On a GPU envs are reset by mask, and the last observation is kept at a fixed address."""
    envs = [small("ReachRL", 3) for _ in range(2)]
    envs[0]._masked, envs[0]._before = True, envs[0]._packed.copy()
    paid = torch.zeros(3)
    for step in range(4):
        for env in envs:
            if step == 2:
                env.physics.qvel[1] = 1e12
            elif step == 3:
                env.reset(env_ids=[2])
                env.physics.qvel[2] = float("nan")
        mine, theirs = (env.step(torch.full((3, 6), 0.3)) for env in envs)
        assert mine[2].tolist() == theirs[2].tolist() == [False] * 3
        assert mine[3].tolist() == theirs[3].tolist() == [False, step == 2, step == 3]
        assert_same_leaves(flat(mine[4]["final_observation"]), flat(theirs[4]["final_observation"]))
        assert torch.equal(mine[1], theirs[1])
        if step == 2:
            assert mine[1][1] == paid[1]  # what the step before paid
        elif step == 3:
            assert mine[1][2] == 0.0  # there was none
        paid = mine[1]


def test_contiguous_vectors_equal_the_views():
    """On a GPU observations are contiguous, so that they can be copied together."""
    env = small("PushCubeRL", 3)
    env.step(torch.full((3, 6), 0.3))
    split = env._packed.vectors.split(env._observations._sizes, dim=1)
    for leaf, view in zip(env._observations._contiguous(env._packed.vectors), split, strict=True):
        assert leaf.is_contiguous()
        assert torch.equal(leaf, view)


def test_rows_keep_their_places_whatever_the_order_of_the_ids():
    env, ordered = small("PushCubeRL", 3), small("PushCubeRL", 3)
    permuted = flat(env.reset(seed=5, env_ids=[2, 0, 1])[0])
    assert_same_leaves(permuted, flat(ordered.reset(seed=5)[0]))
    state = ordered.get_state()
    assert_same_leaves(flat(env.set_state(state[[2, 0, 1]], env_ids=[2, 0, 1])), permuted)


def test_close_releases_threads_and_may_be_called_twice():
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        env = small("PushCubeRL", 8, num_threads=3)
        env.step(torch.zeros(8, 6))
        env.close()
        env.close()
    assert len(os.listdir("/proc/self/task")) == before


def test_env_ids_are_indices_or_a_mask(env):
    assert env.resolve_ids(None).tolist() == [0, 1, 2, 3, 4, 5]
    assert env.resolve_ids(torch.tensor([4, 1], dtype=torch.int32)).tolist() == [4, 1]
    assert env.resolve_ids(np.array([2])).tolist() == [2]
    assert env.resolve_ids(torch.tensor([True, False, False, False, False, True])).tolist() == [0, 5]
    assert env.resolve_ids([]).tolist() == []
    for wrong in ([6], [-1], [0.5], [True, False], [1, 1], "ab", [None]):
        with pytest.raises(EnvContractError, match="env_ids"):
            env.resolve_ids(wrong)


def test_seeds_are_ints_or_episode_seeds(env):
    by_int = env.reset(seed=5)[1]["episode_seed"]
    assert torch.equal(env.reset(seed=np.int64(5))[1]["episode_seed"], by_int)
    assert torch.equal(env.reset(seed=torch.tensor(5))[1]["episode_seed"], by_int)
    assert torch.equal(env.reset(seed=by_int.flip(0))[1]["episode_seed"], by_int.flip(0))
    for wrong in (1.5, "5", [1, 2], -1, torch.zeros(6), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(EnvContractError, match="reset"):
            env.reset(seed=wrong)


def test_a_camera_is_observed_as_bytes():
    camera = {"name": "top", "width": 32, "height": 24}
    try:
        env = small("PushCubeRL", 3, max_episode_steps=3, env={"observations": {"cameras": [camera]}})
    except RenderingError as error:
        pytest.skip(str(error))
    with env:
        for step in range(1, 4):
            obs, _, _, truncated, info = env.step(torch.ones(3, 6))
            frames = obs["image", "top"]
            assert frames.shape == (3, 24, 32, 3)
            assert frames.dtype == torch.uint8
            assert bool(truncated.all()) == (step == 3)
        assert env.observation_space["image"]["top"].shape == (24, 32, 3)
        np.testing.assert_array_equal(frames, env.render(camera="top", size=(24, 32), quality="lean"))
        assert not torch.equal(frames, info["final_observation"]["image", "top"])
        assert env.render([2], size=(40, 60)).shape == (1, 40, 60, 3)


def flat_live(obs: TensorDict):
    """Return the leaves of an observation themselves."""
    return [(str(key), value) for key, value in obs.items(include_nested=True, leaves_only=True)]


def arrays(tree: dict) -> dict:
    """Return a nested dict of tensors as one of arrays."""
    return {key: arrays(value) if isinstance(value, dict) else value.numpy() for key, value in tree.items()}


def test_metrics_keep_their_types_and_what_a_task_shows_belongs_to_the_observation(monkeypatch):
    """A count stays an integer; a picture of the task's own is copied, as nobody knows what the task does with it."""
    picture = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    plain = CartPole.observe
    monkeypatch.setattr(CartPole, "metrics", lambda self, scene: {"count": torch.tensor([2**30 + 1, 3])})
    monkeypatch.setattr(CartPole, "observe", lambda self, scene: plain(self, scene) | {"image": {"own": picture}})
    env = small("CartPoleRL", 2)
    obs, _, _, _, info = env.step(torch.zeros(2, 1))
    assert info["metrics"]["count"].tolist() == [2**30 + 1, 3]
    assert info["metrics"]["success"].dtype == torch.float32
    picture.fill_(7)
    assert obs["image", "own"].max() == 0
