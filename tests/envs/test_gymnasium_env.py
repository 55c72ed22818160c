"""Gymnasium envs as VecEnv: every number is compared with a plain loop over single Gymnasium envs."""

import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from embodichain.envs.checker import check_env
from embodichain.envs.gymnasium_env import GymnasiumVecEnv, make_gymnasium
from embodichain.envs.gymnasium_env.construct import RowwiseSyncVectorEnv
from embodichain.envs.wrappers import ChunkedEnv
from embodichain.errors import (
    ActionError,
    ChunkSizeError,
    ConfigError,
    EnvContractError,
    RenderingError,
    UnknownNameError,
    UntrustedModuleError,
)

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


class Everything(gym.Env):
    """A walk with one observation of every kind; it ends when it leaves [-3, 3], succeeding on the right."""

    def __init__(self, action="discrete"):
        self.observation_space = spaces.Dict(
            {
                "walk": spaces.Dict({"x": spaces.Box(-9, 9, (2,), np.float64)}),
                "image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
                "where": spaces.Discrete(9, start=-4),
                "many": spaces.MultiDiscrete([2, 3, 4]),
                "flags": spaces.MultiBinary(3),
            }
        )
        self.action_space = (
            spaces.Discrete(3, start=5) if action == "discrete" else spaces.Box(-2, 6, (1, 2), np.float64)
        )

    def observe(self):
        x = int(np.clip(np.rint(self.x[0]), -4, 4))
        picture = np.full((4, 5, 3), (37 * (x + 4)) % 256, np.uint8)
        many = np.array([x % 2, x % 3, x % 4])
        return {
            "walk": {"x": self.x.copy()},
            "image": picture,
            "where": np.int64(x),
            "many": many,
            "flags": np.array([x > 0, x < 0, x == 0], np.int8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1, 2)
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        push = float(action) - 6 if isinstance(self.action_space, spaces.Discrete) else float(action[0, 0]) / 4
        self.x = self.x + push + self.np_random.normal(0, 0.3, 2)
        terminated = bool(abs(self.x[0]) > 3)
        return self.observe(), self.x[1], terminated, False, {"is_success": bool(self.x[0] > 3)}


def limited(limit=12, **kwargs):
    return gym.wrappers.TimeLimit(Everything(**kwargs), limit)


def flatten(obs):
    """A nested observation as one float64 vector per env, image and all."""
    leaves = obs.flatten_keys("/").to_dict()
    return torch.cat([leaves[k].double().reshape(len(leaves[k]), -1) for k in sorted(leaves)], dim=1)


def rollout(env, actions, seed=3):
    """Everything that comes back, as tensors [steps, num_envs, ...]."""
    obs, info = env.reset(seed=seed)
    rows = [
        (flatten(obs), flatten(obs), *[torch.zeros(env.num_envs)] * 3, info["episode_seed"], torch.zeros(env.num_envs))
    ]
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(action)
        success = info["metrics"].get("success", torch.zeros(env.num_envs))
        final = flatten(info["final_observation"])
        rows.append((flatten(obs), final, reward, terminated, truncated, info["episode_seed"], success))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def assert_equal(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def check_against_plain_loop(env, make_single, encode, native, steps, seed=3):
    """Play `env`, and beside it single Gymnasium envs that are reset with plain `reset(seed=episode_seed)`."""
    generator = torch.Generator().manual_seed(0)
    singles = [make_single() for _ in range(env.num_envs)]
    obs, info = env.reset(seed=seed)
    for i, single in enumerate(singles):
        expected, _ = single.reset(seed=int(info["episode_seed"][i]))
        encode(expected, obs[i])
    ends = 0
    for _ in range(steps):
        if isinstance(env.action_space, spaces.Discrete):
            action = torch.randint(0, int(env.action_space.n), (env.num_envs,), generator=generator)
        else:
            action = torch.rand(env.num_envs, env.action_manager.action_dim, generator=generator) * 2 - 1
        obs, reward, terminated, truncated, info = env.step(action)
        for i, single in enumerate(singles):
            expected, r, term, trunc, _ = single.step(native(action[i]))
            encode(expected, info["final_observation"][i])
            assert float(reward[i]) == np.float32(r)
            assert (bool(terminated[i]), bool(truncated[i])) == (term, trunc)
            if term or trunc:
                ends += 1
                expected, _ = single.reset(seed=int(info["episode_seed"][i]))
            encode(expected, obs[i])
    return ends


def box_equal(expected, obs):
    np.testing.assert_array_equal(np.asarray(expected, np.float32), obs["state"].numpy())


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_cartpole_equals_a_plain_loop_in_every_mode(mode):
    env = GymnasiumVecEnv(
        SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=30)] * 5, autoreset_mode=mode)
    )
    single = lambda: gym.make("CartPole-v1", max_episode_steps=30)  # noqa: E731
    ends = check_against_plain_loop(env, single, box_equal, lambda a: int(a), steps=120)
    assert ends > 15
    assert env.max_episode_steps == 30


def test_ids_equal_a_plain_loop():
    env = make_gymnasium("CartPole-v1", 4, max_episode_steps=25)
    ends = check_against_plain_loop(
        env, lambda: gym.make("CartPole-v1", max_episode_steps=25), box_equal, lambda a: int(a), steps=100
    )
    assert ends > 10


def test_bounded_box_actions_are_mapped_to_the_bounds():
    env = make_gymnasium("Pendulum-v1", 3, max_episode_steps=20)
    assert env.action_space == spaces.Box(-1, 1, (1,), np.float32)
    ends = check_against_plain_loop(
        env,
        lambda: gym.make("Pendulum-v1", max_episode_steps=20),
        box_equal,
        lambda a: (2.0 * a.double()).numpy().astype(np.float32),  # torque in [-2, 2]
        steps=45,
    )
    assert ends == 6  # three envs, truncated twice each


def test_mujoco_float64_observations_become_float32():
    env = make_gymnasium("Hopper-v5", 2, max_episode_steps=40)
    assert env.observation_space["state"].dtype == np.float32
    ends = check_against_plain_loop(
        env, lambda: gym.make("Hopper-v5", max_episode_steps=40), box_equal, lambda a: a.numpy(), steps=60
    )
    assert ends >= 2


def everything_equal(expected, obs):
    x = int(expected["where"])
    np.testing.assert_array_equal(expected["walk"]["x"].astype(np.float32), obs["walk", "x"].numpy())
    assert obs["image"].dtype == torch.uint8
    np.testing.assert_array_equal(expected["image"], obs["image"].numpy())
    np.testing.assert_array_equal(np.eye(9, dtype=np.float32)[x + 4], obs["where"].numpy())
    hot = np.concatenate([np.eye(n, dtype=np.float32)[v] for n, v in zip((2, 3, 4), expected["many"], strict=True)])
    np.testing.assert_array_equal(hot, obs["many"].numpy())
    np.testing.assert_array_equal(expected["flags"].astype(np.float32), obs["flags"].numpy())


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_every_kind_of_observation_and_action(action):
    native = {"discrete": lambda a: np.int64(int(a) + 5), "box": lambda a: (a.double() * 4 + 2).numpy().reshape(1, 2)}
    env = GymnasiumVecEnv.from_factory(lambda: limited(action=action), 3)
    ends = check_against_plain_loop(env, lambda: limited(action=action), everything_equal, native[action], steps=60)
    assert ends > 10
    for name, value in env.reset(seed=0)[0][0].items():
        space = env.observation_space[name]
        assert space["x"].contains(value["x"].numpy()) if name == "walk" else space.contains(value.numpy()), name


@pytest.mark.parametrize("vector_class", [SyncVectorEnv, AsyncVectorEnv])
def test_all_modes_give_the_same_numbers(vector_class):
    actions = torch.randint(0, 3, (50, 4), generator=torch.Generator().manual_seed(1))
    reference = rollout(GymnasiumVecEnv.from_factory(limited, 4), actions)
    assert reference[3].sum() > 5
    assert reference[4].sum() > 5
    assert reference[6].sum() > 2
    for mode in MODES:
        with GymnasiumVecEnv(vector_class([limited] * 4, autoreset_mode=mode), max_episode_steps=12) as env:
            assert_equal(rollout(env, actions), reference)


def test_asynchronous_equals_synchronous():
    actions = torch.randint(0, 2, (40, 3), generator=torch.Generator().manual_seed(1))
    with make_gymnasium("CartPole-v1", 3, asynchronous=True) as env:
        assert_equal(rollout(env, actions), rollout(make_gymnasium("CartPole-v1", 3), actions))


def test_success_is_that_of_the_state_reached():
    env = GymnasiumVecEnv.from_factory(limited, 4)
    actions = torch.full((30, 4), 2)
    _, final, _, terminated, _, _, success = rollout(env, actions)
    right = final[..., -11] > 3  # the first coordinate of walk/x, which the nine of "where" follow
    assert terminated.sum() > 8
    assert torch.equal(success.bool(), terminated.bool() & right)
    assert "success" not in make_and_step("CartPole-v1")["metrics"]


def make_and_step(id):
    env = make_gymnasium(id, 2)
    env.reset(seed=0)
    return env.step(torch.zeros(2, dtype=torch.int64))[4]


def test_env_i_behaves_the_same_whatever_num_envs_is():
    actions = torch.randint(0, 2, (60, 5), generator=torch.Generator().manual_seed(2))
    few = rollout(make_gymnasium("CartPole-v1", 2), actions[:, :2])
    many = rollout(make_gymnasium("CartPole-v1", 5), actions)
    assert_equal(few, [column[:, :2] for column in many])
    other = rollout(make_gymnasium("CartPole-v1", 2), actions[:, :2], seed=4)
    assert not torch.equal(few[0], other[0])


def test_an_episode_can_be_replayed_from_its_seed():
    env = make_gymnasium("CartPole-v1", 3)
    actions = torch.randint(0, 2, (200, 3), generator=torch.Generator().manual_seed(2))
    env.reset(seed=0)
    for t in range(120):
        info = env.step(actions[t])[4]
    seeds = info["episode_seed"]
    assert len(set(seeds.tolist())) == 3
    first, again = env.reset(seed=seeds)
    assert torch.equal(again["episode_seed"], seeds)
    plain, _ = gym.make("CartPole-v1").reset(seed=int(seeds[1]))
    np.testing.assert_array_equal(first["state"][1].numpy(), plain)
    same = env.reset(seed=seeds[:1].expand(3))[0]["state"]
    assert torch.equal(same[0], same[2])


def test_episode_seeds_go_on_for_ever_and_do_not_repeat_soon():
    env = make_gymnasium("Pendulum-v1", 2, max_episode_steps=1)
    env.reset(seed=0)
    seen = [env.step(torch.zeros(2, 1))[4]["episode_seed"] for _ in range(200)]  # beyond one table of seeds
    assert len(torch.stack(seen).unique()) == 400


def test_reset_of_some_envs_leaves_the_others():
    env = make_gymnasium("Pendulum-v1", 4, max_episode_steps=10)
    with pytest.raises(EnvContractError, match="first reset"):
        env.reset(env_ids=[1])
    env.reset(seed=0)
    for _ in range(6):
        before, *_ = env.step(torch.ones(4, 1))
    after, info = env.reset(seed=torch.tensor([7, 8]), env_ids=[1, 3])
    assert torch.equal(after["state"][[0, 2]], before["state"][[0, 2]])
    assert info["episode_seed"][[1, 3]].tolist() == [7, 8]
    truncated = [env.step(torch.ones(4, 1))[3].tolist() for _ in range(10)]
    assert truncated[3] == [True, False, True, False]  # steps 10 of the old episodes
    assert truncated[9] == [False, True, False, True]


def test_returned_data_is_never_written_again():
    env = GymnasiumVecEnv.from_factory(limited, 3)
    obs, info = env.reset(seed=0)
    kept, copies = [obs], [obs.clone()]
    seeds = [info["episode_seed"]], [info["episode_seed"].clone()]
    for _ in range(40):
        obs, _, _, _, info = env.step(torch.randint(0, 3, (3,)))
        kept += [obs, info["final_observation"]]
        copies += [obs.clone(), info["final_observation"].clone()]
        seeds[0].append(info["episode_seed"])
        seeds[1].append(info["episode_seed"].clone())
    assert all((a == b).all() for a, b in zip(kept, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*seeds, strict=True))


def test_final_observation_is_obs_when_no_env_is_done():
    env = make_gymnasium("Pendulum-v1", 2, max_episode_steps=3)
    env.reset(seed=0)
    same = [(lambda r: r[4]["final_observation"] is r[0])(env.step(torch.zeros(2, 1))) for _ in range(3)]
    assert same == [True, True, False]


# --- actions ----------------------------------------------------------------------------------------------------------


class Gain(gym.Env):
    """Its observation is the action it was given."""

    def __init__(self, low, high, dtype=np.float32):
        self.action_space = spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
        self.observation_space = spaces.Box(-np.inf, np.inf, self.action_space.shape, np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.action_space.shape), {}

    def step(self, action):
        assert action.dtype == self.action_space.dtype
        return np.asarray(action, np.float64), 0.0, False, False, {}


def given(action, *bounds, **kwargs):
    env = GymnasiumVecEnv.from_factory(lambda: Gain(*bounds, **kwargs), 1, max_episode_steps=9)
    env.reset()
    return env.step(torch.tensor([action]))[0]["state"][0].tolist()


def test_box_actions_reach_their_bounds_exactly_and_are_clipped():
    assert given([-1.0, 1.0], [-0.3, 0.1], [0.7, 0.5]) == np.array([-0.3, 0.5], np.float32).tolist()
    assert given([0.0, -5.0], [-2, 0], [6, 4]) == [2.0, 0.0]
    assert given([0.6, -1.0], [0, 0], [10, 10], dtype=np.int32) == [8.0, 0.0]


def test_unbounded_box_actions_pass_through_and_the_space_says_so():
    low, high = [-np.inf, 0.0, -2.0], [np.inf, np.inf, 2.0]
    assert given([123.0, -4.0, 0.5], low, high) == [123.0, 0.0, 1.0]
    env = GymnasiumVecEnv.from_factory(lambda: Gain(low, high), 1, max_episode_steps=9)
    assert env.action_space.low.tolist() == [-np.inf, 0.0, -1.0]
    assert env.action_space.high.tolist() == [np.inf, np.inf, 1.0]


def test_a_bad_action_is_refused_and_changes_nothing():
    env = make_gymnasium("Pendulum-v1", 2)
    env.reset(seed=1)
    with pytest.raises(ActionError, match=r"\[2, 1\]"):
        env.step(torch.zeros(3, 1))
    with pytest.raises(ActionError, match="env 1 at step 0"):
        env.step(torch.tensor([[0.0], [float("nan")]]))
    with pytest.raises(ActionError, match="'action'"):
        env.step({"force": torch.zeros(2, 1)})
    obs = env.step({"action": torch.ones(2, 1)})[0]
    clean = make_gymnasium("Pendulum-v1", 2)
    clean.reset(seed=1)
    assert torch.equal(obs["state"], clean.step(torch.ones(2, 1))[0]["state"])
    discrete = make_gymnasium("CartPole-v1", 2)
    discrete.reset()
    with pytest.raises(ActionError, match=r"\[0, 2\)"):
        discrete.step(torch.tensor([0, 2]))


def test_step_before_reset_is_an_error():
    with pytest.raises(EnvContractError, match="reset"):
        make_gymnasium("CartPole-v1", 2).step(torch.zeros(2, dtype=torch.int64))


# --- what cannot be adapted -------------------------------------------------------------------------------------------


def test_a_next_step_vector_env_that_ignores_the_mask_is_refused():
    with pytest.raises(EnvContractError, match=r"reset_mask.*make_gymnasium"):
        GymnasiumVecEnv(gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"))
    alone = GymnasiumVecEnv(gym.make_vec("CartPole-v1", num_envs=1, vectorization_mode="vector_entry_point"))
    assert alone.max_episode_steps == 500
    alone.reset(seed=0)
    for _ in range(60):  # pushing right only: an episode lasts about ten steps
        obs, reward, terminated, _, info = alone.step(torch.ones(1, dtype=torch.int64))
        assert reward.item() == 1.0  # a made-up step would be worth 0
        assert info["episode_seed"].item() == -1
        if terminated.item():
            assert obs["state"].abs().max() <= 0.05
            assert info["final_observation"]["state"][0, 2].abs() > 0.2


def test_async_without_shared_memory_in_next_step_mode_is_refused():
    vector = AsyncVectorEnv([limited], shared_memory=False)
    with pytest.raises(EnvContractError, match="DISABLED"):
        GymnasiumVecEnv(vector, max_episode_steps=12)
    vector.close()


class SameStep(VectorEnv):
    """A foreign vector env: one seed for all, no masks, batched final observations; env i counts to 3 + i."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self):
        self.num_envs = 2
        self.single_observation_space = spaces.Box(0, 99, (1,), np.float32)
        self.observation_space = spaces.Box(0, 99, (2, 1), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.action_space = spaces.MultiDiscrete([2, 2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = np.zeros(2)
        return self.count[:, None].astype(np.float32), {}

    def step(self, actions):
        self.count += 1
        done = self.count >= [3, 4]
        final = self.count[:, None].astype(np.float32)
        self.count[done] = 0
        info = {"final_obs": final, "_final_obs": done} if done.any() else {}
        return self.count[:, None].astype(np.float32), np.ones(2), done, np.zeros(2, bool), info


def test_a_foreign_same_step_vector_env():
    env = GymnasiumVecEnv(SameStep(), max_episode_steps=10)
    env.reset(seed=5)
    rows = [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(6)]
    assert [r[0]["state"][:, 0].tolist() for r in rows] == [[1, 1], [2, 2], [0, 3], [1, 0], [2, 1], [0, 2]]
    finals = [r[4]["final_observation"]["state"][:, 0].tolist() for r in rows]
    assert finals == [[1, 1], [2, 2], [3, 3], [1, 4], [2, 1], [3, 2]]
    with pytest.raises(EnvContractError, match="one seed for all"):
        env.reset(seed=torch.tensor([1, 2]))
    with pytest.raises(EnvContractError, match="alone"):
        env.reset(env_ids=[0])
    short = GymnasiumVecEnv(SameStep(), max_episode_steps=2)
    short.reset()
    short.step(torch.zeros(2, dtype=torch.int64))
    assert short.step(torch.zeros(2, dtype=torch.int64))[3].tolist() == [True, True]  # all at once: a plain reset


def test_unsupported_spaces_are_named():
    class Odd(Everything):
        def __init__(self, kind):
            super().__init__()
            if kind == "text":
                self.observation_space = spaces.Dict({"words": spaces.Text(5)})
            else:
                self.action_space = spaces.Tuple([spaces.Discrete(2)])

    with pytest.raises(EnvContractError, match="observation/words is a Text space"):
        GymnasiumVecEnv.from_factory(lambda: Odd("text"), 2, max_episode_steps=5)
    with pytest.raises(EnvContractError, match=r"MultiDiscrete or MultiBinary, got Tuple"):
        GymnasiumVecEnv.from_factory(lambda: Odd("actions"), 2, max_episode_steps=5)


def test_tuple_observations_get_numbered_keys():
    env = make_gymnasium("Blackjack-v1", 2, max_episode_steps=20)
    obs, _ = env.reset(seed=0)
    assert sorted(obs.keys()) == ["0", "1", "2"]
    assert obs["0"].shape == (2, 32)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_env_that_ends_by_itself_needs_no_time_limit(asynchronous):
    """Blackjack states none; the oracle is Gymnasium's own env, played with the same seeds and actions."""
    with make_gymnasium("Blackjack-v1", 2, asynchronous=asynchronous, seed=0) as env:
        assert env.max_episode_steps is None
        _, info = env.reset()
        single, ends = gym.make("Blackjack-v1"), 0
        single.reset(seed=int(info["episode_seed"][1]))
        for _ in range(60):
            _, reward, terminated, truncated, info = env.step(torch.tensor([0, 1]))
            _, reward_, terminated_, truncated_, _ = single.step(1)
            assert (reward[1], terminated[1], truncated[1]) == (reward_, terminated_, truncated_)
            if terminated_:
                ends += 1
                single.reset(seed=int(info["episode_seed"][1]))
        assert ends > 10
    if not asynchronous:
        assert check_env(make_gymnasium("Blackjack-v1", 2, seed=0), lambda n: make_gymnasium("Blackjack-v1", n)) == []


def test_chunks_of_an_env_without_a_time_limit():
    with pytest.raises(ChunkSizeError, match=r"\[1, inf\]"):
        ChunkedEnv(unlimited(), 0)
    assert ChunkedEnv(unlimited(), 3).max_episode_steps is None


def unlimited():
    return GymnasiumVecEnv.from_factory(lambda: gym.make("Pendulum-v1").unwrapped, 1)


def test_the_time_limit_is_checked_and_enforced():
    with pytest.raises(ConfigError, match="at least 1"):
        make_gymnasium("CartPole-v1", 2, max_episode_steps=0)
    assert make_gymnasium("CartPole-v1", 2).max_episode_steps == 500
    assert GymnasiumVecEnv.from_factory(limited, 2, max_episode_steps=99).max_episode_steps == 12
    for mode in MODES:
        env = GymnasiumVecEnv(SyncVectorEnv([limited] * 2, autoreset_mode=mode), max_episode_steps=2)
        env.reset(seed=0)
        flags = [env.step(torch.ones(2, dtype=torch.int64))[3].tolist() for _ in range(4)]
        assert flags == [[False, False], [True, True]] * 2


# --- ids and trust ----------------------------------------------------------------------------------------------------


@pytest.fixture
def spy(tmp_path, monkeypatch):
    """A module that registers an env and leaves a file behind when it is imported."""
    (tmp_path / "spy_module.py").write_text(
        "import pathlib, gymnasium as gym\n"
        f"pathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
        "gym.register('Spy-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=7)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "imported"
    sys.modules.pop("spy_module", None)
    gym.registry.pop("Spy-v0", None)


def test_a_module_in_an_id_is_imported_only_if_trusted(spy):
    with pytest.raises(UntrustedModuleError, match="--trust spy_module"):
        make_gymnasium("spy_module:Spy-v0", 2)
    with pytest.raises(UntrustedModuleError):
        make_gymnasium("spy_module:Spy-v0", 2, trusted_modules=("spy", "spy_module.x"))
    with pytest.raises(UntrustedModuleError):
        make_gymnasium("spy_module:x:Spy-v0", 2, trusted_modules=("spy_module",))
    with pytest.raises(UntrustedModuleError):
        make_gymnasium("GymV21Environment-v0", 2, kwargs={"env_id": "spy_module:Spy-v0"})
    assert not spy.exists()
    assert make_gymnasium("spy_module:Spy-v0", 2, trusted_modules=("spy_module",)).max_episode_steps == 7
    assert spy.exists()


def test_unknown_ids_are_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="'CartPole-v1'"):
        make_gymnasium("CartPoel-v1", 2)
    with pytest.raises(UnknownNameError, match="cannot be imported"):
        make_gymnasium("no_such_module_here:X-v0", 2, trusted_modules=("no_such_module_here",))
    assert make_gymnasium("Pendulum", 1).max_episode_steps == 200  # without a version: the latest
    with pytest.raises(ConfigError, match=r"kwargs\.max_episode_steps"):
        make_gymnasium("CartPole-v1", 2, kwargs={"max_episode_steps": 5})


def test_rendering_without_a_render_mode_says_what_to_do():
    env = make_gymnasium("CartPole-v1", 2)
    env.reset(seed=0)
    with pytest.raises(RenderingError, match="render_mode"):
        env.render()


def test_frames_come_in_the_size_that_was_asked_for():
    class Seen(Everything):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
        render_mode = "rgb_array"

        def render(self):
            return np.repeat(np.repeat(self.observe()["image"], 10, 0), 10, 1)

    env = GymnasiumVecEnv.from_factory(Seen, 3, max_episode_steps=9)
    obs, _ = env.reset(seed=0)
    frames = env.render(env_ids=[2, 0], size=(20, 30))
    assert frames.shape == (2, 20, 30, 3)
    assert frames[:, 0, 0].tolist() == obs["image"][[2, 0], 0, 0].tolist()
    assert env.render().shape == (3, 240, 320, 3)


# --- states -----------------------------------------------------------------------------------------------------------

CLASSIC = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]
MUJOCO = [
    "Ant-v5",
    "HalfCheetah-v5",
    "Hopper-v5",
    "Humanoid-v5",
    "InvertedDoublePendulum-v5",
    "Reacher-v5",
    "Swimmer-v5",
]


@pytest.mark.parametrize("id", CLASSIC + MUJOCO)
def test_a_state_continues_bitwise(id):
    env = make_gymnasium(id, 3, max_episode_steps=25)
    assert env.supports_state
    generator = torch.Generator().manual_seed(0)
    if isinstance(env.action_space, spaces.Discrete):
        actions = torch.randint(0, int(env.action_space.n), (50, 3), generator=generator)
    else:
        actions = torch.rand(50, 3, env.action_manager.action_dim, generator=generator) * 2 - 1
    env.reset(seed=0)
    for action in actions[:17]:
        obs = env.step(action)[0]
    state = env.get_state()
    assert state.batch_size == (3,)

    def go_on(env):
        rows = [env.step(action) for action in actions[17:]]
        return [(flatten(o), r, te, tr, info["episode_seed"]) for o, r, te, tr, info in rows]

    reference = go_on(env)
    assert any((terminated | truncated).any() for _, _, terminated, truncated, _ in reference)
    for other in (env, make_gymnasium(id, 3, max_episode_steps=25)):  # back in time, and in an env that is new
        assert torch.equal(flatten(other.set_state(state)), flatten(obs))
        for a, b in zip(go_on(other), reference, strict=True):
            assert_equal(a, b)


def test_the_state_of_one_env_can_be_given_to_another():
    env = make_gymnasium("Pendulum-v1", 3, max_episode_steps=20)
    env.reset(seed=0)
    for _ in range(5):
        before = env.step(torch.ones(3, 1))[0]["state"]
    after = env.set_state(env.get_state()[[0, 0]], env_ids=[1, 2])["state"]
    assert torch.equal(after, before[[0, 0, 0]])
    obs = env.step(torch.ones(3, 1))[0]["state"]
    assert torch.equal(obs[0], obs[2])


def test_states_are_not_promised_where_they_could_not_be_exact():
    wrapped = lambda: gym.wrappers.RescaleAction(gym.make("Pendulum-v1"), -1, 1)  # noqa: E731
    for env in (GymnasiumVecEnv.from_factory(wrapped, 2), GymnasiumVecEnv.from_factory(limited, 2)):
        assert not env.supports_state
        with pytest.raises(EnvContractError, match="supports_state"):
            env.get_state()


def test_closing_twice_is_fine():
    for asynchronous in (False, True):
        env = make_gymnasium("CartPole-v1", 2, asynchronous=asynchronous)
        env.reset()
        env.close()
        env.close()
        assert env.vector_env.closed


def test_the_adapter_costs_little_beyond_gymnasium():
    """At random CartPole, where an env ends in nearly every step, which is the worst case; measured: 1.1 to 1.5."""
    plain = gym.make_vec(
        "CartPole-v1", 64, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}
    )
    adapted = make_gymnasium("CartPole-v1", 64)
    actions = torch.randint(0, 2, (60, 64), generator=torch.Generator().manual_seed(0))

    def seconds(env, actions):
        env.reset(seed=0)
        start = time.process_time()  # not what others do meanwhile
        for action in actions:
            env.step(action)
        return time.process_time() - start

    pairs = [(seconds(plain, actions.numpy()), seconds(adapted, actions)) for _ in range(6)]
    best_plain, best_adapted = (min(column) for column in zip(*pairs, strict=True))
    assert best_adapted < 2.5 * best_plain


@pytest.mark.parametrize("id", ["CartPole-v1", "Blackjack-v1"])
def test_resetting_some_envs_is_what_gymnasium_does(id):
    ours = RowwiseSyncVectorEnv([lambda: gym.make(id)] * 4)
    theirs = SyncVectorEnv([lambda: gym.make(id)] * 4, autoreset_mode=AutoresetMode.DISABLED)

    def same(call):
        mine, other = call(ours), call(theirs)
        for a, b in zip(mine[:-1], other[:-1], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert mine[-1].keys() == other[-1].keys()
        return mine

    same(lambda env: env.reset(seed=[1, 2, 3, 4]))
    for t in range(30):
        _, _, terminated, truncated, _ = same(lambda env, t=t: env.step(np.full(4, t % 2)))
        mask = terminated | truncated | (np.arange(4) == t % 4)
        same(lambda env, t=t, mask=mask: env.reset(seed=[t, t + 1, t + 2, t + 3], options={"reset_mask": mask}))
    same(lambda env: env.reset(seed=5))


class OldGym(gym.Env):
    """An environment with results of the old interface."""

    action_space = spaces.Discrete(2)

    def __init__(self, old, space):
        self.old, self.observation_space = old, space

    def reset(self, *, seed=None, options=None):
        obs = self.observation_space.sample()
        return obs if self.old == "reset" else (obs, {})

    def step(self, action):
        if self.old == "own":
            raise ValueError("not enough values to unpack (expected 5, got 4)")
        parts = (self.observation_space.sample(), 0.0, False, False, {})
        return parts[:3] + parts[4:] if self.old == "step" else parts


class OldReset(OldGym):
    def reset(self):
        return self.observation_space.sample()


_PAIR = spaces.Dict(a=spaces.Box(0.0, 1.0, (2,)), b=spaces.Box(0.0, 1.0, (2,)))


@pytest.mark.filterwarnings("ignore:.*(ERROR|WARN)")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("cls", "old", "space", "expected"),
    [
        (OldGym, "step", spaces.Box(0.0, 1.0, (4,)), r"step must return \(obs, reward, terminated, truncated, info\)"),
        (OldGym, "reset", spaces.Box(0.0, 1.0, (4,)), r"reset must .* return \(obs, info\)"),
        (OldGym, "reset", spaces.Box(0.0, 1.0, (2,)), r"reset must .* return \(obs, info\)"),
        (OldGym, "reset", spaces.Discrete(3), r"reset must .* return \(obs, info\)"),
        (OldGym, "reset", _PAIR, r"reset must .* return \(obs, info\)"),
        (OldReset, "reset", _PAIR, r"reset must take seed and options"),
    ],
)
def test_old_gym_interface_is_named(cls, old, space, expected, asynchronous):
    env = GymnasiumVecEnv.from_factory(
        lambda: cls(old, space), 2, max_episode_steps=5, asynchronous=asynchronous, seed=0
    )
    in_worker = f"({old} failed in another process.*old Gym: )?"  # or in this one, where Gymnasium joins the results
    told = f"AsyncVectorEnv: {in_worker}" if asynchronous else f"{cls.__name__}: "
    with pytest.raises(EnvContractError, match=f"{told}{expected}.*shimmy"):
        rollout(env, torch.zeros(1, 2, dtype=torch.int64))
    env.vector_env.close(**({"terminate": True} if asynchronous else {}))


def test_error_of_the_env_itself_is_not_taken_for_the_old_interface():
    env = GymnasiumVecEnv.from_factory(lambda: OldGym("own", _PAIR), 1, max_episode_steps=5)
    env.reset()
    with pytest.raises(ValueError, match=r"^not enough values to unpack"):
        env.step(torch.zeros(1, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:.*(ERROR|WARN)")
def test_error_of_an_asynchronous_env_is_told_as_it_is():
    env = GymnasiumVecEnv.from_factory(lambda: OldGym("own", _PAIR), 1, max_episode_steps=5, asynchronous=True)
    env.reset()
    with pytest.raises(EnvContractError, match=r"step failed in another process: not enough values.*false shows where"):
        env.step(torch.zeros(1, dtype=torch.int64))
    env.vector_env.close(terminate=True)


def test_envs_check_names_the_old_interface():
    env = GymnasiumVecEnv.from_factory(lambda: OldGym("step", _PAIR), 2, max_episode_steps=5)
    assert any("step must return (obs, reward, terminated, truncated, info)" in str(p) for p in check_env(env))
