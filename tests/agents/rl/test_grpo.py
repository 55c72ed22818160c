"""GRPO: equal starts, group advantages by hand, one update against a straightforward one, errors."""

from __future__ import annotations

import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from embodichain.agents.rl.algo import GRPO, GRPOCfg, build_algo
from embodichain.agents.rl.algo.grpo import group_advantage, until_first_done
from embodichain.agents.rl.buffer.rollout_buffer import evaluate_rollout
from embodichain.agents.rl.checkpoint import load_policy
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.config import TrainCfg, load_train_config
from embodichain.agents.rl.evaluation import PolicyActor, evaluate
from embodichain.agents.rl.train import train_from_config
from embodichain.envs.recording import Summary, roll
from embodichain.envs.registration import make
from embodichain.errors import ConfigError, RolloutError
from tests.agents.rl.helpers import ScriptedEnv, make_policy
from tests.agents.rl.training_cases import GRPO as TINY
from tests.agents.rl.training_cases import train_config, write_config


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


def test_groups_of_unrelated_states_are_refused() -> None:
    """Without a common start, or without anybody to compare with, there is no baseline."""
    with pytest.raises(ConfigError, match=r"reset_every_rollout: expected true, .*same state.*got False"):
        GRPOCfg(reset_every_rollout=False)
    with pytest.raises(ConfigError, match=r"reset_every_rollout: expected true"):
        GRPOCfg.from_dict({"reset_every_rollout": False}, source="algorithm.cfg")
    with pytest.raises(ConfigError, match=r"group_size: expected greater than or equal to 2, got 1"):
        GRPOCfg(group_size=1)


def test_the_first_episode_of_every_env_counts_whoever_ended_it() -> None:
    """A rollout that begins with a reset and ends in the middle of episodes is no excuse for counting survivors."""
    _, _, _, collector, rollout = setup()
    lengths = [3, 4, 6, 6, 6, 2, 6, 6]  # of the eight envs, three end by themselves and the rollout cuts the others
    returns = [float(rollout["reward"][env, :length].double().sum()) for env, length in enumerate(lengths)]
    stats = collector.statistics()
    assert stats["episode/count"] == 8.0
    assert stats["episode/success"] == pytest.approx(3 / 8)
    assert stats["episode/length"] == pytest.approx(sum(lengths) / 8)
    assert stats["episode/return"] == pytest.approx(sum(returns) / 8)
    assert sorted(collector.episodes["length"].tolist()) == sorted(lengths)
    # steps count as before: ends of later episodes are among them
    assert stats["metrics/success"] == pytest.approx(float(rollout["terminated"].float().mean()))
    assert stats["rewards/pos"] == pytest.approx(float(rollout["reward"].mean()), rel=1e-5)


def test_logged_episodes_are_those_of_an_evaluation() -> None:
    """The same policy in the same episodes, cut after 20 steps by the rollout here and by the time limit there."""
    task = {"success_threshold": 0.22, "terminate_on_success": True}  # where many succeed at once
    settings = {"id": "PushCubeRL", "num_envs": 16, "num_threads": 1, "env": task}
    with make(settings | {"max_episode_steps": 30}) as env, make(settings | {"max_episode_steps": 20}) as shorter:
        policy = make_policy(env, "actor_only", distribution={"init_log_std": -12.0})  # as good as deterministic
        collector = SyncCollector(env, policy, start_rollout=GRPO(GRPOCfg(group_size=2), policy).start_rollout)
        env.reset(seed=4)
        first = collector.collect(20)["observation"][:, 0]
        logged = collector.statistics()
        env.reset(seed=4)
        seeds = env.reset()[1]["episode_seed"].view(-1, 2)[:, :1].expand(-1, 2).reshape(-1)
        steps = list(roll(shorter, PolicyActor(policy, shorter), 16, seeds))
    assert bool((steps[0].obs == first).all())
    evaluated = Summary.of([episode for step in steps for episode in step.ended])
    assert 0.2 < evaluated.success_rate < 0.8
    assert logged["episode/count"] == evaluated.episodes == 16
    assert logged["episode/success"] == pytest.approx(evaluated.success_rate)
    assert logged["episode/return"] == pytest.approx(evaluated.mean_return, rel=1e-3)
    assert logged["episode/length"] == pytest.approx(evaluated.mean_length)


def test_the_shipped_config_trains_on_whole_episodes() -> None:
    cfg = load_train_config("configs/agents/rl/push_cube/train_config_grpo.json")
    assert cfg.trainer.buffer_size == cfg.trainer.environment["max_episode_steps"]


@pytest.mark.parametrize(("buffer_size", "warns"), [(19, True), (20, False)])
def test_a_rollout_shorter_than_an_episode_is_warned_of(tmp_path, caplog, buffer_size: int, warns: bool) -> None:
    trainer = {"buffer_size": buffer_size, "iterations": 1, "enable_eval": False}
    with caplog.at_level("WARNING"):
        train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", algorithm=TINY, trainer=trainer))
    found = [record.getMessage() for record in caplog.records if "buffer_size" in record.getMessage()]
    assert len(found) == warns
    if warns:
        assert "trainer.buffer_size is 19, an episode has up to 20 steps" in found[0]
        assert "--trainer.buffer_size 20" in found[0]


def test_transitions_until_the_first_done() -> None:
    done = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]).bool()
    assert until_first_done(done).int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_group_advantage_by_hand() -> None:
    returns = torch.tensor([[4.0, 1.0], [2.0, 3.0], [5.0, 5.0], [5.0, 5.0]])
    valid = torch.ones(4, 2, dtype=torch.bool)
    advantage, spread = group_advantage(returns, valid, GRPOCfg(group_size=2))
    assert torch.allclose(advantage, torch.tensor([[1.0, -1.0], [-1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    assert spread.tolist() == [True, False]
    # means are those of a step, the unit is the group's: deviations 3, 3, 1, 1 have a root mean square of sqrt(5)
    uneven = torch.tensor([[9.0, 4.0], [3.0, 2.0]])
    advantage, _ = group_advantage(uneven, torch.ones(2, 2, dtype=torch.bool), GRPOCfg(group_size=2))
    assert torch.allclose(advantage, torch.tensor([[3.0, 1.0], [-3.0, -1.0]]) / 5.0**0.5)
    # steps after the end take no part: at the second step there is nobody to compare with; deviations are 1, 1 and 0
    valid[1, 1] = False
    advantage, _ = group_advantage(returns, valid, GRPOCfg(group_size=2))
    assert torch.allclose(advantage[:2], torch.tensor([[1.0, 0.0], [-1.0, 0.0]]) * 1.5**0.5)
    # whole trajectories: the return of the first step, for every valid step
    advantage, _ = group_advantage(returns, valid, GRPOCfg(group_size=2, advantage="trajectory"))
    assert torch.allclose(advantage[:2], torch.tensor([[1.0, 1.0], [-1.0, 0.0]]))


def test_the_last_steps_of_a_cut_rollout_weigh_what_they_decide() -> None:
    """One reward is left to the last step, and 0.01 of it differs: a thousandth of what the first step decides."""
    _, _, algorithm, _, rollout = setup(cfg=GRPOCfg(group_size=4, n_epochs=1, gamma=1.0))
    rollout["done"][:] = rollout["terminated"][:] = False
    rollout["reward"][:] = 0.0
    rollout["reward"][0, 0], rollout["reward"][0, 5] = 9.99, 0.01
    algorithm.update(rollout)
    deviation = torch.tensor([7.5] + [0.0075] * 5)  # of env 0: returns 10, 0.01, ... less their mean over four envs
    others = torch.tensor([2.5] + [0.0025] * 5)
    unit = ((deviation.square().sum() + 3 * others.square().sum()) / 24).sqrt()
    assert torch.allclose(rollout["advantage"][0], deviation / unit, rtol=1e-4)
    assert torch.allclose(rollout["advantage"][1:4], -others.expand(3, 6) / unit, rtol=1e-4)


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
    for first in range(0, num_envs, cfg.group_size):
        group = range(first, first + cfg.group_size)
        deviations = []
        for env in group:
            for t in range(lengths[env]):
                alive = torch.stack([returns[g, t] for g in group if t < lengths[g]])
                rows.append((env, t))
                deviations.append(returns[env, t] - alive.mean())
        advantages.append(torch.stack(deviations) / (torch.stack(deviations).square().mean().sqrt() + cfg.eps))
    advantage = torch.cat(advantages)
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
    cfg = GRPOCfg("cpu", 1e-4, 32, 0.9, 0.8, 1.0, 3, 0.1, 0.01, 0.02, 8, 1e-6, True, False)
    assert (cfg.kl_coef, cfg.group_size, cfg.eps) == (0.02, 8, 1e-6)
    assert cfg.reset_every_rollout
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


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluations_act_as_told(tmp_path, deterministic: bool) -> None:
    """Sampled actions of a wide distribution keep a pole up for less long than its mean, which does nothing."""
    trainer = {"iterations": 1, "eval_deterministic": deterministic, "eval_freq": 0, "num_eval_episodes": 8}
    policy = {"name": "actor_only", "normalize_obs": False, "distribution": {"init_log_std": 1.0}}
    data = train_config(tmp_path / "run", algorithm=TINY, trainer=trainer)
    result = train_from_config(TrainCfg.from_dict(data | {"policy": policy}))
    saved = load_policy(tmp_path / "run", which="latest")
    with make(data["trainer"]["gym_config"] | {"num_envs": 8}) as env:
        expected = evaluate(saved, env, 8, 1_000_003, deterministic=deterministic)
        other = evaluate(saved, env, 8, 1_000_003, deterministic=not deterministic)
    assert result.evaluation.summary == expected.summary != other.summary


def test_a_loss_of_the_policys_own_is_added_and_none_is_left() -> None:
    """In the first step it is that of the policy as it was; a copy of a policy with one that waits has none."""
    env = ScriptedEnv(8)
    torch.manual_seed(0)
    policy = make_policy(env, critic_obs=["object"], auxiliary_coef=0.5)
    cfg = GRPOCfg(group_size=4, n_epochs=1, batch_size=1000, learning_rate=1e-2)
    algorithm = GRPO(cfg, policy)
    rollout = SyncCollector(env, policy, start_rollout=algorithm.start_rollout).collect(4)
    obs, actions = rollout["observation"].reshape(-1), rollout["action"].reshape(32, -1)
    policy.evaluate_actions(obs, actions)
    before = copy.deepcopy(policy)
    assert before.take_auxiliary_loss() is None
    features, hidden = before.encoder(obs)
    expected = 0.5 * nn.functional.mse_loss(before.auxiliary(features), hidden)
    metrics = algorithm.update(rollout)
    assert metrics["transitions_used"] == 32
    assert metrics["auxiliary_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert not torch.equal(policy.auxiliary.weight, before.auxiliary.weight)
    assert policy.take_auxiliary_loss() is None


def test_a_frozen_policy_is_one_message() -> None:
    policy = make_policy(ScriptedEnv(2)).requires_grad_(False)
    for name in ("grpo", "ppo"):
        with pytest.raises(ConfigError, match=r"is frozen until you call policy\.requires_grad_\(\)"):
            build_algo(name, {}, policy)
