"""Running statistics: right, mergeable, frozen when they should be, and part of the policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.buffer.rollout_buffer import evaluate_rollout
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models.actor_critic import NormalizedCritic
from embodichain.agents.rl.models.mlp import MLP
from embodichain.agents.rl.models.observation import RunningNormalizer
from embodichain.agents.rl.utils.distributed import batch_moments, merge_moments
from embodichain.errors import ConfigError
from tests.agents.rl.helpers import ScriptedEnv, make_policy


def data(rows: int = 1000, seed: int = 0) -> torch.Tensor:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
    return x * torch.tensor([1.0, 100.0, 1e-3]) + torch.tensor([0.0, 5e4, 3.0])


def test_many_small_batches_equal_one_large_one() -> None:
    x = data()
    running = RunningNormalizer(3)
    for part in x.split(7):
        running.update(part)
    exact = x.double()
    assert torch.allclose(running.mean, exact.mean(0), rtol=1e-12)
    assert torch.allclose(running.variance, exact.var(0, correction=0), rtol=1e-9)
    assert running.count == 1000
    normal = running(x)
    assert torch.allclose(normal.mean(0), torch.zeros(3), atol=1e-2)
    assert torch.allclose(normal.std(0), torch.ones(3), atol=1e-2)


def test_moments_of_two_ranks_merge_to_those_of_all() -> None:
    a, b = data(300, 1), data(500, 2)
    merged = merge_moments(batch_moments(a, 3), batch_moments(b, 3))
    for ours, expected in zip(merged, batch_moments(torch.cat([a, b]), 3), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-9)
    shared = RunningNormalizer(3)
    shared.share = lambda own: [own, batch_moments(b, 3)]
    shared.update(a)
    assert torch.allclose(shared.mean, torch.cat([a, b]).double().mean(0), rtol=1e-12)


def test_starts_as_identity_and_is_frozen_in_evaluation() -> None:
    running = RunningNormalizer(3, clip=1e9)
    x = data(10)
    assert torch.equal(running(x), x)
    running.eval()
    running.update(x)
    assert running.count == 0
    running.train()
    running.update(x)
    assert running.count == 10


@pytest.mark.parametrize("rows", [0, 10])
def test_frozen_statistics_stay_and_can_be_released(rows: int) -> None:
    running = RunningNormalizer(3)
    if rows:
        running.update(data(rows))
    variance = running.variance
    running.frozen = True
    before = running.state_dict()
    copy = RunningNormalizer(3)
    copy.load_state_dict(before)
    for normalizer in (running, copy):  # it is part of what is saved
        normalizer.update(data(20, seed=1))
        assert normalizer.frozen
        assert torch.equal(normalizer.variance, variance)
        assert all(torch.equal(value, before[name]) for name, value in normalizer.state_dict().items())
    copy.frozen = False
    copy.update(data(20, seed=1))
    assert copy.count == rows + 20
    expected = RunningNormalizer(3)
    expected.update(torch.cat([data(rows), data(20, seed=1)]))
    assert torch.allclose(copy.scale, expected.scale)


def test_constant_columns_are_shifted_and_not_blown_up() -> None:
    running = RunningNormalizer(2)
    running.update(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert running(torch.tensor([[2.0, 5.0], [2.0, 5.5]])).tolist() == [[0.0, 0.0], [0.0, 0.5]]


def test_clips_and_survives_saving() -> None:
    running = RunningNormalizer(3, clip=2.0)
    running.update(data())
    other = RunningNormalizer(3, clip=2.0)
    other.load_state_dict(running.state_dict())
    x = data(20, seed=5) * 3
    assert torch.equal(running(x), other(x))
    assert running(x).abs().max() == 2.0
    other.update(data(7, seed=9))
    running.update(data(7, seed=9))
    assert torch.equal(running.m2, other.m2)


def test_leading_dimensions_do_not_matter() -> None:
    flat, nested = RunningNormalizer(3), RunningNormalizer(3)
    flat.update(data(12))
    nested.update(data(12).view(3, 4, 3))
    assert torch.equal(flat.mean, nested.mean)


def test_critic_keeps_its_values_when_the_statistics_of_returns_change() -> None:
    torch.manual_seed(0)
    critic = NormalizedCritic(MLP(4, 1, [8]))
    features = torch.randn(20, 4)
    assert torch.allclose(critic(features), critic.network(features))
    critic.update(500.0 + 10.0 * torch.randn(6, 100))  # the first returns set the scale
    assert abs(critic(features).mean() - 500.0) < 20.0
    assert 9.0 < critic.scale < 11.0
    before = critic(features)
    critic.update(-300.0 + 80.0 * torch.randn(6, 100))
    assert critic.scale > 100.0
    assert torch.allclose(critic(features), before, rtol=1e-4)


def test_critic_learns_returns_of_any_scale_alike() -> None:
    errors = []
    for scale in (1.0, 1e4):
        torch.manual_seed(0)
        critic = NormalizedCritic(MLP(2, 1, [32], activation="tanh"))
        features = torch.randn(256, 2)
        returns = scale * (5.0 + features[:, 0] * features[:, 1])
        critic.update(returns)
        optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
        for _ in range(200):
            loss = ((critic(features).squeeze(-1) - returns) / critic.scale).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        errors.append(float(loss.detach()))
    assert errors[0] < 0.1
    assert abs(errors[0] - errors[1]) < 0.02


def test_critic_must_end_in_one_linear_output() -> None:
    with pytest.raises(ConfigError, match="one linear output"):
        NormalizedCritic(MLP(4, 1, [8], last_activation="tanh"))


# --- the first rollout --------------------------------------------------------------------------------------------


def collected(normalize: bool = True, **settings: Any) -> tuple[Any, SyncCollector]:
    torch.manual_seed(0)
    env = ScriptedEnv(6, ends=[3, 4, 100, 100, 100, 100], limit=5)
    policy = make_policy(env, normalize_obs=normalize, **settings)
    return policy, SyncCollector(env, policy)


@pytest.mark.parametrize("settings", [{}, {"memory": {"hidden_size": 4}}], ids=["plain", "recurrent"])
def test_the_first_rollout_is_trained_on_with_its_own_statistics(settings: dict[str, Any]) -> None:
    """Its log-probabilities and values are evaluated again, so that ratios begin at 1; it counts once."""
    policy, collector = collected(**settings)
    algorithm = PPO(PPOCfg(n_epochs=1, batch_size=48, sequence_length=8 if settings else None), policy)
    rollout = collector.collect(8)
    before = copy.deepcopy(policy)
    before.update_normalizer(rollout["observation"].reshape(-1))
    with torch.no_grad():
        log_prob, value = evaluate_rollout(before, rollout)
    raw = rollout["value"].clone()
    metrics = algorithm.update(rollout)
    assert abs(metrics["approx_kl"]) < 1e-7
    assert torch.allclose(rollout["sample_log_prob"], log_prob, atol=1e-6)
    assert torch.allclose(rollout["value"], value, atol=1e-6)
    assert not torch.allclose(rollout["value"], raw, atol=1e-3)
    inside = ~rollout["done"][:, :-1]
    assert torch.allclose(rollout["next_value"][:, :-1][inside], value[:, 1:][inside], atol=1e-6)
    normalizer = policy.encoder.normalizer
    assert normalizer.count == 48
    assert torch.allclose(normalizer.mean, before.encoder.normalizer.mean)
    second = collector.collect(8)
    kept = second["sample_log_prob"].clone()
    algorithm.update(second)
    assert torch.equal(second["sample_log_prob"], kept)
    assert normalizer.count == 96


@pytest.mark.parametrize("type", ["gru", "lstm"])
def test_recurrent_states_of_the_first_rollout_are_those_of_normalised_observations(type: str) -> None:
    """A sequence that begins in the middle of the rollout, here in the middle of an episode, begins in such a state."""
    policy, collector = collected(memory={"type": type, "hidden_size": 4})
    algorithm = PPO(PPOCfg(n_epochs=1, batch_size=48, sequence_length=2, learning_rate=1e-12), policy)
    rollout = collector.collect(8)
    raw = rollout["hidden"].clone()
    metrics = algorithm.update(rollout)
    assert abs(metrics["approx_kl"]) < 1e-7
    assert torch.equal(rollout["hidden"][:, 0], raw[:, 0])
    assert not torch.allclose(rollout["hidden"], raw, atol=1e-2)
    for begin in range(0, 8, 2):
        log_prob, value = evaluate_rollout(policy, rollout[:, begin : begin + 2])
        assert torch.allclose(value, rollout["value"][:, begin : begin + 2], atol=1e-5)
        assert torch.allclose(log_prob, rollout["sample_log_prob"][:, begin : begin + 2], atol=1e-5)


def test_statistics_that_exist_or_are_frozen_leave_the_first_rollout_as_it_is() -> None:
    for frozen in (False, True):
        policy, collector = collected()
        if frozen:
            policy.encoder.normalizer.frozen = True
        else:
            policy.update_normalizer(collector.collect(8)["observation"].reshape(-1))
        rollout = collector.collect(8)
        kept = rollout["sample_log_prob"].clone()
        PPO(PPOCfg(n_epochs=1), policy).update(rollout)
        assert torch.equal(rollout["sample_log_prob"], kept)
        assert policy.encoder.normalizer.count.abs() == (0 if frozen else 96)


def test_a_critic_that_is_trained_alone_leaves_the_statistics_to_the_first_update_of_the_policy() -> None:
    """They would change the actions of a policy that was pretrained on observations as they are."""
    policy, collector = collected()
    algorithm = PPO(PPOCfg(n_epochs=1, value_warmup=1), policy)
    algorithm.update(collector.collect(8))
    assert policy.encoder.normalizer.count == 0
    assert abs(algorithm.update(collector.collect(8))["approx_kl"]) < 0.05
    assert policy.encoder.normalizer.count == 48


def test_a_restored_algorithm_takes_first_statistics_as_a_new_one_does() -> None:
    policy, collector = collected()
    algorithm = PPO(PPOCfg(n_epochs=1), policy)
    rollout, weights, state = collector.collect(8), copy.deepcopy(policy.state_dict()), algorithm.state_dict()
    losses = []
    for _ in range(2):
        policy.load_state_dict(weights)
        algorithm.load_state_dict(copy.deepcopy(state))
        torch.manual_seed(1)
        losses.append(algorithm.update(rollout.clone())["value_loss"])
    assert losses[0] == losses[1]


def test_statistics_take_in_the_rollout_after_one_whose_update_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, collector = collected()
    algorithm = PPO(PPOCfg(n_epochs=1), policy)

    def fail(returns: torch.Tensor) -> None:
        raise MemoryError

    rollout = collector.collect(8)
    with monkeypatch.context() as patch:
        patch.setattr(policy, "update_value_normalizer", fail)
        with pytest.raises(MemoryError):
            algorithm.update(rollout)
    assert policy.encoder.normalizer.count == 48
    algorithm.update(collector.collect(8))
    assert policy.encoder.normalizer.count == 96
