"""Policies that are replayed as CUDA graphs while somebody else uses the GPU decide what they would decide anyway."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector
from embodichain.agents.rl.collector import acting as module
from embodichain.agents.rl.models import ActorCritic, build_policy
from embodichain.agents.rl.models.policy import Policy
from embodichain.config import load_config
from embodichain.envs.registration import make
from embodichain.envs.vec_env import VecEnv
from embodichain.envs.wrappers import chunked, make_grouped
from tests.gpu.gpu import needs_opengl, on_gpu

pytestmark = on_gpu
LANGUAGE = Path(__file__).parents[2] / "configs/agents/rl/push_cube/gym_config_language_small.json"
MLP = {"name": "actor_critic", "normalize_obs": True}
VLA = {
    "name": "vla",
    "vla_config": {
        "model_class": "tiny_vla",
        "model_config": {"width": 32, "depth": 1, "num_heads": 2, "chunk_size": 4},
    },
}


def vectors(num_envs: int) -> VecEnv:
    return make("PushCubeRL", num_envs=num_envs, seed=0, num_threads=1, max_episode_steps=10)


def images(num_envs: int) -> VecEnv:
    needs_opengl()
    return chunked(make(load_config(LANGUAGE), num_envs=num_envs, seed=0, num_threads=1), 4)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING):
        yield lambda: [record.message for record in caplog.records if "CUDA graphs" in record.message]


def learn_a_little(policy: Policy) -> None:
    """Use the GPU, and its random numbers, as an update does."""
    for _ in range(50):
        torch.randperm(1000, device="cuda")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.95)
    policy.version += 1


def asynchronous(make_env: Callable[[int], VecEnv], block: dict[str, Any], lag: int, groups: int) -> list[Any]:
    torch.manual_seed(0)
    with make_grouped(make_env, 8, groups) as env:
        policy = build_policy(block, env.observation_space, env.action_space, "cuda")
        settings = {"num_steps": 8, "max_policy_lag": lag, "adopt": "lockstep", "pipeline_stages": groups, "seed": 3}
        buffer = VLABuffer(2 * 64, "cuda")
        rollouts = []
        with AsyncCollector(env, policy, buffer, "cuda", cfg=AsyncCfg(**settings)) as collector:
            for _ in range(5):
                rollouts.append(collector.collect().clone())
                learn_a_little(policy)
    return rollouts


def synchronous(make_env: Callable[[int], VecEnv], block: dict[str, Any], groups: int) -> list[Any]:
    torch.manual_seed(0)
    with make_grouped(make_env, 8, groups) as env:
        policy = build_policy(block, env.observation_space, env.action_space, "cuda")
        collector = SyncCollector(env, policy, "cuda", pipeline_stages=groups)
        rollouts = []
        for _ in range(5):
            rollouts.append(collector.collect(8).clone())
            learn_a_little(policy)
    return rollouts


def assert_same(mine: list[TensorDictBase], other: list[TensorDictBase]) -> None:
    assert len(mine) == len(other)
    for number, (left, right) in enumerate(zip(mine, other, strict=True)):
        for name in ("action", "sample_log_prob", "reward", "done", "value", "policy_version"):
            assert torch.equal(left[name], right[name]), f"{name} of rollout {number}"


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("make_env", "block"), [(vectors, MLP), (images, VLA)], ids=["mlp", "vla"])
def test_replayed_decisions_are_the_same(
    make_env: Callable[[int], VecEnv],
    block: dict[str, Any],
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
) -> None:
    recorded = asynchronous(make_env, block, 1, groups)
    in_turn, at_once = asynchronous(make_env, block, 0, groups), synchronous(make_env, block, groups)
    assert warnings() == []
    monkeypatch.setattr(module, "can_record", lambda policy, device: False)
    assert_same(recorded, asynchronous(make_env, block, 1, groups))
    assert_same(at_once, synchronous(make_env, block, groups))
    assert_same(in_turn, at_once)


class OwnWay(ActorCritic):
    """Draws from torch's default generator, whichever one it is given."""

    def choose(self, obs: Any) -> Any:
        action, log_prob = super().choose(obs)
        return action + 0.0 * torch.randn_like(action), log_prob


def test_a_policy_that_draws_from_the_learners_generator_is_not_recorded(warnings: Callable[[], list[str]]) -> None:
    torch.manual_seed(0)
    with vectors(8) as env:
        policy = OwnWay.build({}, env.observation_space, env.action_space, torch.device("cuda"))
        with AsyncCollector(env, policy, VLABuffer(128, "cuda"), "cuda", cfg=AsyncCfg(num_steps=8)) as collector:
            assert collector.collect().batch_size == (8, 8)
    assert any("generator that others use" in line for line in warnings())


def test_weights_that_move_are_noticed() -> None:
    torch.manual_seed(0)
    with vectors(8) as env:
        policy = build_policy({"name": "actor_critic"}, env.observation_space, env.action_space, "cuda")
        collector = SyncCollector(env, policy, "cuda")
        collector.reset(seed=0)
        for _ in range(2):
            collector.collect(8)
        for parameter in policy.parameters():  # elsewhere, and so large that every action is far from where it was
            parameter.data = torch.full_like(parameter, 0.5)
        action = collector.collect(8)["action"]
        expected = policy.act(collector.obs)[0]
        assert action.mean() > 1.0
        assert expected.mean() > 1.0
