"""GRPO: equal starts, group advantages by hand, one update against a straightforward one, errors."""

from __future__ import annotations

import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from embodichain.agents.rl.algo import GRPO, GRPOCfg
from embodichain.agents.rl.algo.grpo import group_advantage, until_first_done
from embodichain.agents.rl.buffer.rollout_buffer import evaluate_rollout
from embodichain.agents.rl.collector import SyncCollector
from embodichain.errors import ConfigError, RolloutError
from tests.agents.rl.helpers import ScriptedEnv, make_policy


def setup(num_steps: int = 6, cfg: GRPOCfg | None = None, **settings):
    torch.manual_seed(0)
    cfg = cfg or GRPOCfg(group_size=4, n_epochs=2, batch_size=1000, learning_rate=1e-2)
    env = ScriptedEnv(8, ends=[3, 4, 100, 100, 100, 2, 100, 100], limit=100)
    policy = make_policy(env, "actor_only", **settings)
    algorithm = GRPO(cfg, policy)
    collector = SyncCollector(env, policy, start_rollout=algorithm.start_rollout)
    return env, policy, algorithm, collector, collector.collect(num_steps)


@pytest.mark.parametrize("supports_state", [True, False])
def test_groups_start_from_the_same_state_every_rollout(supports_state: bool) -> None:
    env, _, _, collector, rollout = setup()
    env.supports_state = supports_state
    starts = []
    for _ in range(3):
        rollout = collector.collect(3)
        assert (rollout["observation", "object", "step"][:, 0] == 0).all()
        first = rollout["observation", "robot", "qpos"][:, 0, 0].view(2, 4)
        assert (first == first[:, :1]).all()
        starts.append(first[:, 0].tolist())
    assert len({tuple(start) for start in starts}) > 1  # but not always the same one
    # members part ways afterwards: the policy's noise differs
    assert (rollout["action"][0] != rollout["action"][1]).any()


def test_without_reset_rollouts_go_on() -> None:
    _, _, _, collector, _ = setup(cfg=GRPOCfg(group_size=4, reset_every_rollout=False))
    assert (collector.collect(2)["observation", "object", "step"][2, :, 0] == torch.tensor([6.0, 7.0])).all()


def test_transitions_until_the_first_done() -> None:
    done = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]).bool()
    assert until_first_done(done).int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_group_advantage_by_hand() -> None:
    returns = torch.tensor([[4.0, 1.0], [2.0, 3.0], [5.0, 5.0], [5.0, 5.0]])
    valid = torch.ones(4, 2, dtype=torch.bool)
    advantage, spread = group_advantage(returns, valid, GRPOCfg(group_size=2))
    assert torch.allclose(advantage, torch.tensor([[1.0, -1.0], [-1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    assert spread.tolist() == [True, False]
    # steps after the end take no part: at the second step there is nobody to compare with
    valid[1, 1] = False
    advantage, _ = group_advantage(returns, valid, GRPOCfg(group_size=2))
    assert torch.allclose(advantage[:2], torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    # whole trajectories: the return of the first step, for every valid step
    advantage, _ = group_advantage(returns, valid, GRPOCfg(group_size=2, advantage="trajectory"))
    assert torch.allclose(advantage[:2], torch.tensor([[1.0, 1.0], [-1.0, 0.0]]))


def test_rounding_is_no_spread() -> None:
    returns = torch.tensor([[1e6], [1e6 * (1 + 1e-7)]])
    advantage, spread = group_advantage(returns, torch.ones(2, 1, dtype=torch.bool), GRPOCfg(group_size=2))
    assert spread.tolist() == [False]
    assert advantage.abs().max() == 0.0


def reference_update(policy, frozen, rollout, cfg: GRPOCfg) -> None:
    """GRPO as it is written down: loops for returns and groups, torch.distributions for probabilities."""
    num_envs, num_steps = rollout.batch_size
    rows, advantages = [], []
    returns = torch.zeros(num_envs, num_steps)
    lengths = []
    for env in range(num_envs):
        ends = rollout["done"][env].nonzero()
        lengths.append(int(ends[0]) + 1 if len(ends) else num_steps)
        for t in reversed(range(lengths[env])):
            later = returns[env, t + 1] if t + 1 < lengths[env] else 0.0
            returns[env, t] = rollout["reward"][env, t] + cfg.gamma * later
    for env in range(num_envs):
        group = [g for g in range(num_envs) if g // cfg.group_size == env // cfg.group_size]
        for t in range(lengths[env]):
            alive = torch.stack([returns[g, t] for g in group if t < lengths[g]])
            std = alive.std(correction=0)
            rows.append((env, t))
            advantages.append((returns[env, t] - alive.mean()) / (std + cfg.eps) if std > 1e-6 else torch.tensor(0.0))
    advantage = torch.stack(advantages)
    envs, steps = torch.tensor(rows).unbind(-1)
    data = rollout[envs, steps]
    optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.learning_rate, eps=1e-5)

    def log_prob(p):
        distribution = torch.distributions.Normal(p.actor(p.encoder(data["observation"])[0]), p.head.log_std.exp())
        return distribution.log_prob(data["action"]).sum(-1), distribution.entropy().sum(-1)

    for _ in range(cfg.n_epochs):
        now, entropy = log_prob(policy)
        ratio = (now - data["sample_log_prob"]).exp()
        clipped = ratio.clamp(1 - cfg.clip_coef, 1 + cfg.clip_coef)
        difference = log_prob(frozen)[0].detach() - now
        kl = (difference.exp() - difference - 1).mean()
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        loss = loss + cfg.kl_coef * kl - cfg.ent_coef * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
        optimizer.step()


def test_equals_a_straightforward_implementation() -> None:
    cfg = GRPOCfg(
        group_size=4, n_epochs=3, batch_size=1000, learning_rate=1e-2, kl_coef=0.1, ent_coef=0.01, clip_coef=0.05
    )
    _, policy, algorithm, _, rollout = setup(cfg=cfg)
    expected, frozen = copy.deepcopy(policy), copy.deepcopy(policy)
    reference_update(expected, frozen, rollout, cfg)
    metrics = algorithm.update(rollout)
    for (name, ours), theirs in zip(policy.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.allclose(ours, theirs[1], atol=2e-5), name
    assert metrics["reference_kl"] > 0.0
    assert metrics["transitions_used"] == 3 + 4 + 4 * 6 + 2 + 6


def test_reference_stays_while_the_policy_moves() -> None:
    cfg = GRPOCfg(group_size=4, kl_coef=0.1, n_epochs=1)
    _, _policy, algorithm, _collector, rollout = setup(cfg=cfg)
    before = evaluate_rollout(algorithm.reference, rollout)[0].clone()
    assert torch.allclose(before, rollout["sample_log_prob"], atol=1e-5)
    algorithm.update(rollout)
    assert torch.equal(evaluate_rollout(algorithm.reference, rollout)[0], before)
    assert all(not p.requires_grad for p in algorithm.reference.parameters())
    saved = copy.deepcopy(algorithm.state_dict())
    other = GRPO(cfg, make_policy(ScriptedEnv(8), "actor_only"))
    other.load_state_dict(saved)
    assert torch.allclose(evaluate_rollout(other.reference, rollout)[0], before)
    assert GRPO(GRPOCfg(), make_policy(ScriptedEnv(8), "actor_only")).reference is None


def test_groups_without_spread_are_skipped_and_counted() -> None:
    _, policy, algorithm, _, rollout = setup()
    rollout["reward"][4:] = 1.0
    rollout["done"][:] = False
    assert algorithm.update(rollout)["skipped_groups"] == 1.0
    weights = nn.utils.parameters_to_vector(policy.parameters()).clone()
    rollout["reward"][:] = 1.0
    metrics = algorithm.update(rollout)
    assert metrics["skipped_groups"] == 2.0
    assert metrics["transitions_used"] == 0.0
    assert "policy_loss" not in metrics
    assert torch.equal(weights, nn.utils.parameters_to_vector(policy.parameters()))


def test_all_steps_count_unless_truncated_at_the_first_done() -> None:
    cfg = GRPOCfg(group_size=4, n_epochs=1, truncate_at_first_done=False)
    _, _, algorithm, _, rollout = setup(cfg=cfg)
    assert algorithm.update(rollout)["transitions_used"] == 48.0


@pytest.mark.parametrize("sequence_length", [None, 3])
def test_policies_with_memory(sequence_length: int | None) -> None:
    cfg = GRPOCfg(group_size=4, n_epochs=2, batch_size=12, kl_coef=0.1, sequence_length=sequence_length)
    _, policy, algorithm, _, rollout = setup(cfg=cfg, memory={"hidden_size": 5})
    assert torch.allclose(evaluate_rollout(algorithm.reference, rollout)[0], rollout["sample_log_prob"], atol=1e-5)
    before = policy.memory.gru.weight_hh_l0.clone()
    metrics = algorithm.update(rollout)
    assert metrics["transitions_used"] == 39.0
    assert not torch.equal(before, policy.memory.gru.weight_hh_l0)


def test_num_envs_must_be_a_multiple_of_the_group_size() -> None:
    env = ScriptedEnv(6)
    policy = make_policy(env, "actor_only")
    algorithm = GRPO(GRPOCfg(group_size=4), policy)
    message = "num_envs 6 is no multiple of group_size 4"
    with pytest.raises(ConfigError, match=message):
        SyncCollector(env, policy, start_rollout=algorithm.start_rollout).collect(2)
    with pytest.raises(ConfigError, match=message):
        algorithm.initialize_buffer(2, 6, 4, 1)
    with pytest.raises(ConfigError, match=message):
        algorithm.update(SyncCollector(env, policy).collect(2))


def test_flattened_rollouts_are_refused() -> None:
    _, _, algorithm, _, rollout = setup()
    with pytest.raises(RolloutError, match="time axis"):
        algorithm.update(rollout.reshape(-1))


def test_the_documented_interface() -> None:
    env, policy, algorithm, _, _ = setup()
    algorithm.initialize_buffer(5, 8, 4, 1, torch.device("cpu"))
    info = algorithm.collect_rollout(env, policy, env.reset()[0], 5)
    assert info["episode/count"] > 0
    assert algorithm.update()["transitions_used"] > 0
    cfg = GRPOCfg("cpu", 1e-4, 32, 0.9, 0.8, 1.0, 3, 0.1, 0.01, 0.02, 8, 1e-6, False, False)
    assert (cfg.kl_coef, cfg.group_size, cfg.eps) == (0.02, 8, 1e-6)
    assert not cfg.reset_every_rollout
    assert not cfg.truncate_at_first_done


@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("correction", ["none", "decoupled"])
def test_unchanged_weights_have_no_divergence_in_any_precision(precision: str, correction: str) -> None:
    actor = {"type": "mlp", "hidden_sizes": [32, 32], "dropout_p": 0.1}
    same = {"group_size": 4, "n_epochs": 1, "batch_size": 16, "learning_rate": 1e-30, "kl_coef": 0.1}
    cfg = GRPOCfg(**same, mixed_precision=precision, correction=correction)
    torch.manual_seed(0)
    env = ScriptedEnv(8, ends=[3, 4, 100, 100, 100, 2, 100, 100], limit=100)
    env.action_space = gym.spaces.Box(-1.0, 1.0, (24,), np.float32)
    policy = make_policy(env, "actor_only", actor=actor, distribution={"init_log_std": math.log(0.05)})
    with torch.no_grad():
        policy.actor[-1].weight.mul_(100.0)
    algorithm = GRPO(cfg, policy)
    rollout = SyncCollector(env, policy, start_rollout=algorithm.start_rollout).collect(6)
    metrics = algorithm.update(rollout)
    assert metrics["approx_kl"] < 1e-6
    assert metrics["clip_fraction"] == 0.0
    assert metrics["reference_kl"] < 1e-6
