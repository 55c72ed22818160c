"""Several environments that look like one: the contract holds, and every group is what it would be alone."""

from __future__ import annotations

import pytest
import torch

from embodichain.envs.checker import check_env
from embodichain.envs.registration import make
from embodichain.envs.wrappers import GroupedEnv, join_parts, make_grouped
from embodichain.errors import ConfigError, EnvContractError


def reach(num_envs: int):
    return make("ReachRL", num_envs=num_envs, seed=3, num_threads=1, max_episode_steps=20)


def test_a_grouped_environment_fulfils_the_contract():
    with make_grouped(reach, 4, 2) as env:
        assert check_env(env) == []


def test_groups_do_what_they_would_do_alone_and_differ_from_each_other():
    with make_grouped(reach, 4, 2) as env, reach(2) as alone:
        obs, single = env.reset(seed=7)[0], alone.reset(seed=7)[0]
        random = torch.Generator().manual_seed(0)
        for _ in range(25):
            assert torch.equal(obs["robot", "qpos"][:2], single["robot", "qpos"])
            assert not torch.equal(obs["goal", "pos"][2:], single["goal", "pos"])
            action = torch.rand(4, *env.action_space.shape, generator=random) * 2 - 1
            obs, reward, _, truncated, info = env.step(action)
            single, one, _, cut, own = alone.step(action[:2])
            assert torch.equal(reward[:2], one)
            assert torch.equal(truncated[:2], cut)
            final = info["final_observation"]["robot", "qpos"]
            assert torch.equal(final[:2], own["final_observation"]["robot", "qpos"])
            assert all(part.shape == (4,) for part in info["rewards"].values())


def test_states_and_seeds_reach_the_right_envs():
    with make_grouped(reach, 4, 2) as env:
        _, info = env.reset(seed=1)
        seeds, before = info["episode_seed"], env.get_state()
        env.step(torch.ones(4, *env.action_space.shape))
        moved = env.get_state()
        env.set_state(before[[3, 0]], env_ids=[3, 0])
        after = env.get_state()
        for name in ("physics", "streams", "step"):
            assert torch.equal(after[name][[0, 3]], before[name][[0, 3]])
            assert torch.equal(after[name][[1, 2]], moved[name][[1, 2]])
        _, info = env.reset(seed=seeds.flip(0))
        assert torch.equal(info["episode_seed"], seeds.flip(0))


def test_nothing_ended_means_the_final_observation_is_the_observation():
    with make_grouped(reach, 4, 2) as env:
        env.reset(seed=0)
        obs, *_, info = env.step({env.action_manager.action_type: torch.zeros(4, *env.action_space.shape)})
        assert info["final_observation"] is obs


def test_bad_groups_are_refused():
    with pytest.raises(EnvContractError, match="got none"):
        GroupedEnv([])
    with reach(1) as one, make("CartPoleRL", num_envs=1) as other, pytest.raises(EnvContractError, match="alike"):
        GroupedEnv([one, other])
    with pytest.raises(ConfigError, match="multiple of the 2 groups"):
        make_grouped(reach, 3, 2)
    with make_grouped(reach, 3, 1) as plain:
        assert not isinstance(plain, GroupedEnv)


def test_what_was_joined_already_is_not_joined_again() -> None:
    with make_grouped(reach, 4, 2) as env:
        env.reset(seed=0)
        results = [group.step(torch.zeros(2, *(env.action_space.shape or ()))) for group in env.groups]
        own = torch.cat([result[0] for result in results]) + 0.0
        joined = env.join(results, own)
        assert joined[0] is own
        final = joined[4]["final_observation"]  # where the envs are, while the other may be on a GPU
        assert final is not own
        assert torch.equal(final["robot", "qpos"], own["robot", "qpos"])
        assert env.reset(env_ids=[0])[0].batch_size == (4,)  # what the groups see is known


def test_what_only_some_groups_report_is_joined() -> None:
    """As an env that reports success at an episode's end alone: whoever is silent counts as zero."""
    speaking = {"metrics": {"success": torch.ones(2), "pair": torch.ones(2, 3)}, "episode_seed": torch.arange(2)}
    silent = {"metrics": {}, "episode_seed": torch.arange(3)}
    for parts, sizes, expected in (
        ([speaking, silent], [2, 3], [1, 1, 0, 0, 0]),
        ([silent, speaking], [3, 2], [0, 0, 0, 1, 1]),
    ):
        joined = join_parts(parts, sizes)
        assert joined["metrics"]["success"].tolist() == expected
        assert joined["metrics"]["pair"].shape == (5, 3)
        assert joined["episode_seed"].shape == (5,)


def test_groups_of_groups_differ_from_each_other() -> None:
    with GroupedEnv([GroupedEnv([reach(1), reach(1)]), GroupedEnv([reach(1), reach(1), reach(1)])]) as env:
        seeds = env.reset(seed=7)[1]["episode_seed"]
        assert env.num_parts == 5
    assert len(set(seeds.tolist())) == 5
