"""Rewards divided by the spread of discounted returns: statistics as VecNormalize has, saved, shared, not logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.algo.advantages import RewardNormalizer
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector
from embodichain.agents.rl.collector.base import DiscountedReturns
from embodichain.agents.rl.runs import read_metrics
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.agents.rl.utils import torch_threads
from embodichain.agents.rl.utils.distributed import Moments, Ranks
from embodichain.envs.gymnasium_env import GymnasiumVecEnv
from embodichain.errors import RolloutError
from tests.agents.rl.helpers import ScriptedEnv, make_policy
from tests.agents.rl.test_checkpoint import same
from tests.agents.rl.training_cases import write_config

GAMMA = 0.9
CFG: dict[str, Any] = {"normalize_reward": True, "gamma": GAMMA, "n_epochs": 1, "batch_size": 64}


class PlainNormalizer:
    """The definition, step by step: Welford's update of the mean and variance of every env's discounted return."""

    def __init__(self, num_envs: int) -> None:
        self.returns, self.count, self.mean, self.var = np.zeros(num_envs), 1e-4, 0.0, 1.0

    def step(self, reward: np.ndarray, done: np.ndarray) -> None:
        self.returns = self.returns * GAMMA + reward
        n, mean, var = len(reward), self.returns.mean(), self.returns.var()
        total, delta = self.count + n, mean - self.mean
        m2 = self.var * self.count + var * n + delta**2 * self.count * n / total
        self.mean, self.var, self.count = self.mean + delta * n / total, m2 / total, total
        self.returns = self.returns * ~done


def scripted(seed: int = 0) -> ScriptedEnv:
    return ScriptedEnv(4, ends=[3, 5, 100, 4], limit=7, seed=seed)


def test_statistics_are_those_of_the_definition_across_rollouts() -> None:
    torch.manual_seed(0)
    env = scripted()
    policy = make_policy(env)
    algorithm, plain = PPO(PPOCfg(**CFG), policy), PlainNormalizer(4)
    collector = SyncCollector(env, policy, return_discount=algorithm.return_discount)
    for _ in range(3):
        rollout = collector.collect(8)
        for t in range(8):
            plain.step(rollout["reward"][:, t].double().numpy(), rollout["done"][:, t].numpy())
        raw = rollout["reward"].clone()
        metrics = algorithm.update(rollout)
        assert torch.equal(rollout["reward"], raw)  # what was collected stays as it is
        assert algorithm.reward_normalizer is not None
        assert float(algorithm.reward_normalizer.variance) == pytest.approx(plain.var, rel=1e-9)
        assert float(algorithm.reward_normalizer.mean) == pytest.approx(plain.mean, rel=1e-9)
        assert metrics["reward_std"] == pytest.approx(np.sqrt(plain.var + 1e-8))
    scaled = algorithm.reward_normalizer(torch.tensor([1.0, -2.0, 1e9]))
    std = np.sqrt(plain.var + 1e-8)
    assert scaled.tolist() == pytest.approx([1 / std, -2 / std, 10.0], rel=1e-6)


@pytest.mark.extra("peers")
def test_statistics_are_those_of_stable_baselines() -> None:
    from stable_baselines3.common.running_mean_std import RunningMeanStd

    torch.manual_seed(0)
    normalizer, theirs, returns = RewardNormalizer(10.0), RunningMeanStd(shape=()), np.zeros(3)
    generator = np.random.default_rng(0)
    for _ in range(5):
        rows = []
        for _ in range(6):
            returns = returns * GAMMA + generator.normal(2.0, 3.0, 3)
            theirs.update(returns)
            rows.append(torch.from_numpy(returns.copy()))
        normalizer.update(torch.stack(rows), Ranks())
        assert float(normalizer.variance) == pytest.approx(float(theirs.var), rel=1e-9)


def test_advantages_are_those_of_scaled_rewards() -> None:
    torch.manual_seed(0)
    env = scripted()
    policy = make_policy(env)
    plain = PPO(PPOCfg(**(CFG | {"normalize_reward": False})), policy)
    algorithm = PPO(PPOCfg(**CFG), policy)
    rollout = SyncCollector(env, policy, return_discount=GAMMA).collect(8).clone()
    by_hand = rollout.clone()
    algorithm.update(rollout)
    assert algorithm.reward_normalizer is not None
    by_hand["reward"] = by_hand["reward"] / float(algorithm.reward_normalizer.variance + 1e-8) ** 0.5
    plain.update(by_hand)
    assert torch.allclose(rollout["advantage"], by_hand["advantage"], atol=1e-5)
    assert not torch.allclose(rollout["reward"], by_hand["reward"])


def test_a_rollout_without_discounted_returns_is_refused() -> None:
    env = scripted()
    policy = make_policy(env)
    with pytest.raises(RolloutError, match=r"return_discount=algorithm\.return_discount"):
        PPO(PPOCfg(**CFG), policy).update(SyncCollector(env, policy).collect(4))
    algorithm = PPO(PPOCfg(**CFG), policy)
    algorithm.initialize_buffer(4, 4, 4, 1)
    algorithm.collect_rollout(env, policy, None, 4)
    assert algorithm.update()["reward_std"] > 0  # the documented interface needs nothing more


@pytest.mark.parametrize("lag", [0, 1])
def test_asynchronous_collection_brings_the_same_returns(lag: int) -> None:
    torch.manual_seed(0)
    env = scripted()
    policy = make_policy(env)
    with torch.no_grad():
        policy.head.log_std.fill_(-30.0)  # no noise, so that both collect the same
    collector = AsyncCollector(
        scripted(), policy, VLABuffer(64), cfg=AsyncCfg(num_steps=8, max_policy_lag=lag), return_discount=GAMMA
    )
    sync = SyncCollector(env, policy, return_discount=GAMMA)
    sync.reset(seed=3)
    try:
        collector.reset(seed=3)
        for _ in range(2):
            theirs, ours = collector.collect(8), sync.collect(8)
            assert torch.allclose(theirs["discounted_return"], ours["discounted_return"], atol=1e-5)
            policy.version += 1
            collector.publish()
    finally:
        collector.stop()


def test_ranks_share_their_statistics() -> None:
    class Two(Ranks):
        count = 2

        def share_moments(self, own: Moments) -> list[Moments]:
            return [own, (torch.tensor(2.0).double(), torch.tensor([5.0]).double(), torch.tensor([8.0]).double())]

    normalizer, pooled = RewardNormalizer(10.0), RewardNormalizer(10.0)
    normalizer.update(torch.tensor([[1.0, 2.0]]), Two())
    pooled.update(torch.tensor([[1.0, 2.0], [3.0, 7.0]]), Ranks())  # 3 and 7 have mean 5 and squared deviations 8
    assert float(normalizer.variance) == pytest.approx(float(pooled.variance), rel=1e-12)


def test_a_resumed_run_has_the_statistics_and_returns_of_one_that_never_stopped(tmp_path: Path) -> None:
    algorithm = {"cfg": {"normalize_reward": True}}
    for name, iterations in (("whole", 6), ("cut", 3)):
        write_config(
            tmp_path / f"{name}.json", tmp_path / name, trainer={"iterations": iterations}, algorithm=algorithm
        )
        train_from_config(tmp_path / f"{name}.json")
    resume_training(tmp_path / "cut", ["--trainer.iterations", "6"])
    whole, cut = (load_checkpoint(find_checkpoint(tmp_path / name)) for name in ("whole", "cut"))
    assert set(whole["algorithm"]["reward_normalizer"]) == {"count", "mean", "m2"}
    assert whole["collector"]["discounted_return"].abs().sum() > 0
    for part in ("policy", "algorithm", "collector"):
        assert same(whole[part], cut[part])
    # The log has the environment's own returns: cart pole's reward is at most 1 a step
    for line in read_metrics(tmp_path / "whole" / "metrics.jsonl"):
        if "episode/return" in line:
            assert line["episode/return"] <= line["episode/length"]
        if "update/reward_std" in line:
            assert line["update/reward_std"] > 1.5  # which rewards were divided by


class Lottery(gym.Env):
    """Two arms with rewards of thousands, the better one 1,000 more: values are far from what a new network gives."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        reward = 1000.0 * (int(action) + self.np_random.normal())
        return np.zeros(1, np.float32), reward, self.count == 10, False, {}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_large_rewards_are_learned_from_with_a_critic_that_keeps_up(seed: int) -> None:
    value_loss = {}
    for normalize in (True, False):
        torch.manual_seed(seed)
        env = GymnasiumVecEnv.from_factory(Lottery, 16, max_episode_steps=10, seed=seed)
        policy = make_policy(env)
        algorithm = PPO(PPOCfg(n_epochs=4, batch_size=80, learning_rate=1e-2, normalize_reward=normalize), policy)
        collector = SyncCollector(env, policy, return_discount=algorithm.return_discount)
        with torch_threads(1):
            losses = [algorithm.update(collector.collect(20))["value_loss"] for _ in range(15)]
        value_loss[normalize] = losses[-1]
        if normalize:
            assert float(collector.episodes["return"].mean()) > 7000.0  # 10,000 at best, 5,000 by chance
        env.close()
    assert value_loss[True] < 2.0  # in units of the returns' spread
    assert value_loss[False] > 1e5


def test_returns_at_the_end_of_chunks_are_those_of_single_actions() -> None:
    """A chunk that an episode's end cuts has fewer actions; the rest of it is zero."""
    torch.manual_seed(0)
    steps, size = 6, 4
    taken = torch.tensor([[4, 2, 4, 4, 1, 4], [3, 4, 4, 2, 4, 4]]).t()
    done = taken < size
    rewards = torch.rand(steps, 2, size) * (torch.arange(size) < taken.unsqueeze(-1))
    expected = torch.zeros(steps, 2, dtype=torch.float64)
    for env in range(2):
        x = 0.0
        for step in range(steps):
            for i in range(int(taken[step, env])):
                x = float(rewards[step, env, i]) + GAMMA * x
            expected[step, env] = x
            x *= not done[step, env]
    returns, parts = DiscountedReturns(GAMMA, 2, torch.device("cpu")), (rewards.sum(-1), done, taken, rewards)
    given = torch.cat([returns.update(*(part[chosen] for part in parts)) for chosen in (slice(0, 3), slice(3, 6))])
    torch.testing.assert_close(given, expected)


def test_a_chunk_of_actions_discounts_by_as_many_steps() -> None:
    returns = DiscountedReturns(GAMMA, 1, torch.device("cpu"))
    reward, done = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[False], [True], [False]])
    given = returns.update(reward, done, torch.tensor([[2], [3], [1]]))
    assert given[:, 0].tolist() == pytest.approx([1.0, 2.0 + GAMMA**3, 4.0])
    assert returns.update(torch.ones(1, 1), torch.tensor([[False]]), torch.tensor([[2]])).item() == pytest.approx(
        1.0 + GAMMA**2 * 4.0
    )
