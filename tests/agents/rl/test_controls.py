"""Controls for fine-tuning: step sizes, weight decay, warm-up, a reference policy, clips and schedules, baselines."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg, compute_gae
from embodichain.agents.rl.algo.gradient_steps import PolicyOptimizer
from embodichain.agents.rl.algo.grpo import group_advantage
from embodichain.agents.rl.buffer.rollout_buffer import evaluate_rollout
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.utils.ratios import clipped_gain, is_clipped
from embodichain.envs.wrappers import chunked
from embodichain.errors import CheckpointError, ConfigError
from tests.agents.rl.helpers import LinearPolicy, ScriptedEnv, make_policy
from tests.agents.rl.test_checkpoint import same
from tests.agents.rl.vla_cases import language_env, vla_policy

pytestmark = pytest.mark.usefixtures("one_thread")

CONTROLS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "weight_decay": 0.3,
    "lr_warmup": 4,
    "clip_coef": 0.2,
    "clip_coef_high": 0.3,
    "clip_coef_final": 0.1,
    "ent_coef": 0.04,
    "ent_coef_final": 0.0,
    "kl_coef": 0.5,
}


def setup(name: str = "actor_critic", **settings: Any):
    torch.manual_seed(0)
    env = ScriptedEnv(6, ends=[3, 4, 100, 100, 100, 100], limit=5)
    policy = make_policy(env, name, **settings)
    return policy, SyncCollector(env, policy)


def distribution(policy: Any, obs: Any) -> torch.distributions.Normal:
    return torch.distributions.Normal(policy.actor(policy.encoder(obs)[0]), policy.head.log_std.exp())


class ByHand:
    """Updates of PPO or GRPO as they are written down: one minibatch per epoch, AdamW of PyTorch, Python numbers."""

    def __init__(self, policy: Any, cfg: PPOCfg | GRPOCfg) -> None:
        self.policy, self.cfg, self.first, self.updates = policy, cfg, copy.deepcopy(policy), 0
        value = cfg.value_learning_rate if isinstance(cfg, PPOCfg) and cfg.value_learning_rate else cfg.learning_rate
        self.groups = []
        for name, parameter in policy.named_parameters():
            rate = value if name.startswith("critic") else cfg.learning_rate
            decay = cfg.weight_decay if name.endswith("weight") else 0.0
            self.groups.append({"params": [parameter], "lr": rate, "first": rate, "weight_decay": decay})
        self.adam = torch.optim.AdamW(self.groups, eps=1e-5)

    def update(self, data: Any, progress: float, advantage: Tensor, returns: Tensor | None) -> None:
        cfg = self.cfg
        warm = min(1.0, (self.updates + 1) / cfg.lr_warmup) if cfg.lr_warmup else 1.0
        for group in self.adam.param_groups:
            group["lr"] = group["first"] * warm * (1.0 - progress if cfg.lr_schedule == "linear" else 1.0)
        clip = 0.2 + (0.1 - 0.2) * progress
        high, entropy_weight = 0.3 * clip / 0.2, 0.04 * (1.0 - progress)
        obs, action = data["observation"], data["action"]
        old_log_prob = data["sample_log_prob"]
        with torch.no_grad():
            reference = distribution(self.first, obs).log_prob(action).sum(-1)
        for _ in range(cfg.n_epochs):
            now = distribution(self.policy, obs)
            log_prob = now.log_prob(action).sum(-1)
            ratio = (log_prob - old_log_prob).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + high) * advantage).mean()
            to_reference = (reference - log_prob).exp() - 1 - (reference - log_prob)
            loss = loss + 0.5 * to_reference.mean() - entropy_weight * now.entropy().sum(-1).mean()
            if returns is not None:
                value = self.policy.critic(self.policy.encoder(obs)[0]).squeeze(-1)
                loss = loss + cfg.vf_coef * (value - returns).square().mean()
            self.adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), cfg.max_grad_norm)
            self.adam.step()
        self.updates += 1


def collect(collector: SyncCollector) -> Any:
    """Return a rollout of a policy that was another one, so that many ratios leave the clip range."""
    rollout = collector.collect(8)
    rollout["sample_log_prob"] += 0.3 * torch.randn(6, 8)
    return rollout


def assert_near(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5), name


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_ppo_equals_a_straightforward_implementation(schedule: Any) -> None:
    policy, collector = setup()
    cfg = PPOCfg(n_epochs=3, batch_size=48, value_learning_rate=4e-2, lr_schedule=schedule, **CONTROLS)
    expected = ByHand(copy.deepcopy(policy), cfg)
    algorithm = PPO(cfg, policy)
    for progress in (0.0, 0.25, 0.5):
        algorithm.progress = progress
        rollout = collect(collector)
        data = rollout.clone().reshape(-1)
        gae = (rollout[k] for k in ("reward", "value", "next_value", "terminated", "done"))
        advantage, returns = (x.reshape(-1) for x in compute_gae(*gae, cfg.gamma, cfg.gae_lambda))
        metrics = algorithm.update(rollout)
        normal = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        expected.update(data, progress, normal, returns)
        assert_near(policy, expected.policy)
        assert metrics["clip_coef"] == pytest.approx(0.2 - 0.1 * progress)
        assert metrics["ent_coef"] == pytest.approx(0.04 * (1.0 - progress))
        assert metrics["value_learning_rate"] == pytest.approx(4.0 * metrics["learning_rate"])
        assert metrics["reference_kl"] > 0.0
        assert metrics["clip_fraction"] > 0.0


def test_advantages_are_normalised_in_each_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodichain.agents.rl.algo.base.CPU_ROWS", 2)  # minibatches of 16 are taken in pieces
    policy, collector = setup()
    algorithm = PPO(PPOCfg(n_epochs=2, batch_size=16, advantage_scope="minibatch"), policy)
    seen: list[Tensor] = []
    loss = algorithm._loss
    monkeypatch.setattr(algorithm, "_loss", lambda batch: (seen.append(batch["advantage"]), loss(batch))[1])
    rollout = collect(collector)
    algorithm.update(rollout)
    assert max(len(part) for part in seen) < 16
    whole = torch.cat(seen).view(6, 16)
    assert torch.allclose(whole.mean(1), torch.zeros(6), atol=1e-6)
    assert torch.allclose(whole.std(1, correction=0), torch.ones(6), atol=1e-4)
    raw = rollout["advantage"].flatten()
    assert abs(raw.mean()) > 1e-3  # what is stored is as it was estimated


def test_grpo_equals_a_straightforward_implementation() -> None:
    policy, collector = setup("actor_only")
    settings = {"group_size": 3, "baseline": "leave_one_out", "normalize_advantage": False, "gamma": 1.0}
    cfg = GRPOCfg(n_epochs=3, batch_size=48, lr_schedule="linear", advantage="trajectory", **settings, **CONTROLS)
    expected = ByHand(copy.deepcopy(policy), cfg)
    algorithm = GRPO(cfg, policy)
    for progress in (0.0, 0.25, 0.5):
        algorithm.progress = progress
        rollout = collect(collector)
        rollout["done"][:] = False  # all steps count
        total = rollout["reward"].sum(1)
        others = [(total[i // 3 * 3 : i // 3 * 3 + 3].sum() - total[i]) / 2 for i in range(6)]
        advantage = (total - torch.stack(others)).unsqueeze(1).expand(-1, 8).reshape(-1)
        data = rollout.clone().reshape(-1)
        metrics = algorithm.update(rollout)
        expected.update(data, progress, advantage, None)
        assert_near(policy, expected.policy)
        assert metrics["learning_rate"] == pytest.approx(1e-2 * (1 - progress) * min(1.0, (1 + 4 * progress) / 4))
        assert metrics["skipped_groups"] == 0.0


def test_baselines_by_hand() -> None:
    returns = torch.tensor([[6.0, 1.0], [3.0, 3.0], [0.0, 9.0]])
    valid = torch.tensor([[True, True], [True, True], [True, False]])

    def advantages(**settings: Any) -> list[list[float]]:
        found, spread = group_advantage(returns, valid, GRPOCfg(group_size=3, **settings))
        assert spread.tolist() == [True]
        return [[round(x, 4) for x in row] for row in found.tolist()]

    # at the first step all three compare, at the second two: deviations from the mean, and from the others' mean
    assert advantages(normalize_advantage=False) == [[3.0, -1.0], [0.0, 1.0], [-3.0, 0.0]]
    alone = {"baseline": "leave_one_out"}
    assert advantages(normalize_advantage=False, **alone) == [[4.5, -2.0], [0.0, 2.0], [-4.5, 0.0]]
    std = math.sqrt((9 + 9 + 1 + 1) / 5)
    assert advantages(**alone) == [[round(x / std, 4) for x in row] for row in [[4.5, -2.0], [0.0, 2.0], [-4.5, 0.0]]]
    # a step that one member alone reaches says nothing, and a group of equal returns is left out
    valid[1, 1] = False
    assert advantages(normalize_advantage=False, **alone)[0] == [4.5, 0.0]
    equal = torch.full((3, 2), 5.0)
    for settings in ({}, {"normalize_advantage": False}, alone):
        found, spread = group_advantage(equal, torch.ones(3, 2).bool(), GRPOCfg(group_size=3, **settings))
        assert spread.tolist() == [False]
        assert found.abs().max() == 0.0


def test_grpo_stops_early_and_adapts_its_rate() -> None:
    for settings, epochs, factor in (
        ({"target_kl": 1e-4}, 1, 1.0),
        ({"target_kl": 1e4}, 5, 1.0),
        ({"lr_schedule": "adaptive", "desired_kl": 1e-9}, 5, 1.5**-5),
        ({"lr_schedule": "adaptive", "desired_kl": 1e4, "lr_max": 3e-2}, 5, 1.5),
    ):
        policy, collector = setup("actor_only")
        cfg = GRPOCfg(group_size=3, n_epochs=5, batch_size=16, learning_rate=2e-2, **settings)
        metrics = GRPO(cfg, policy).update(collector.collect(8))
        assert metrics["epochs"] == epochs, settings
        assert metrics["learning_rate"] == pytest.approx(2e-2 * factor), settings


def test_a_leap_of_the_policy_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    policy, collector = setup()
    moderate = PPO(PPOCfg(n_epochs=2, learning_rate=1e-4), policy)
    assert moderate.update(collect(collector))["approx_kl"] < 1.0
    assert not caplog.records
    rash = PPO(PPOCfg(n_epochs=4, learning_rate=0.5), policy)
    moved = [rash.update(collect(collector))["approx_kl"] for _ in range(2)]
    assert moved[0] > 1.0
    told = [record.getMessage() for record in caplog.records if "KL divergence" in record.getMessage()]
    assert len(told) == 1
    assert "lr_warmup" in told[0]
    assert "5.0e-01" in told[0]
    caplog.clear()
    rising = PPO(PPOCfg(n_epochs=4, learning_rate=5.0, lr_warmup=5), policy)
    rising.update(collect(collector))
    (told,) = [record.getMessage() for record in caplog.records if "KL divergence" in record.getMessage()]
    assert "lr_warmup" not in told  # it is set already
    assert "(now 1.0e+00)" in told


@pytest.mark.parametrize("name", ["actor_critic", "flow"])
def test_two_step_sizes_move_by_one_factor(name: str) -> None:
    policy, _ = setup(name)
    optimizer = PolicyOptimizer(policy, 1e-3, 1.0, value_rate=7e-3)
    of_value = {id(p) for p in policy.critic.parameters()}
    assert len(optimizer.adam.param_groups) == 2

    def rates() -> tuple[float, float]:
        found: dict[bool, set[float]] = {True: set(), False: set()}
        for group in optimizer.adam.param_groups:
            assert {id(p) in of_value for p in group["params"]} in ({True}, {False})
            found[id(group["params"][0]) in of_value].add(float(group["lr"]))
        assert len(found[True]) == len(found[False]) == 1
        return found[False].pop(), found[True].pop()

    assert rates() == (1e-3, 7e-3)
    for on_device in (False, True):
        if on_device:  # as on a GPU, where CUDA graphs read them
            optimizer._rate, optimizer._value_rate = torch.tensor(1e-3), torch.tensor(7e-3)
            optimizer._point_to_rates()
        for change in (0.0, 1.0):
            before = rates()
            optimizer.adapt_learning_rate(torch.tensor(change), 0.01, (1e-5, 1e-2))
            factor = 1.5 if change == 0.0 else 1 / 1.5
            assert rates() == pytest.approx((before[0] * factor, before[1] * factor), rel=1e-5)
        optimizer.learning_rate = 2.5e-4
        assert rates() == pytest.approx((2.5e-4, 7e-3 / 4), rel=1e-6)
        assert list(optimizer.rates().values()) == pytest.approx(rates(), rel=1e-6)
        optimizer.learning_rate = 1e-3
        assert rates() == pytest.approx((1e-3, 7e-3), rel=1e-6)


def test_weights_decay_where_they_are_learned_and_deviations_do_not() -> None:
    policy, _ = setup(distribution={"std": "gsde", "init_log_std": -2.0})
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    optimizer = PolicyOptimizer(policy, 1e-1, 1.0, weight_decay=0.5)
    for parameter in optimizer.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in policy.named_parameters():
        factor = 1.0 - 0.1 * 0.5 if name.endswith("weight") else 1.0
        assert torch.allclose(parameter, before[name] * factor), name
    assert policy.head.log_std.ndim == 2
    # what has no gradient, because the critic alone learns, does not decay either
    policy, collector = setup()
    before = copy.deepcopy(policy.state_dict())
    PPO(PPOCfg(n_epochs=1, weight_decay=0.5, value_warmup=1), policy).update(collector.collect(8))
    changed = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"version"} | {name for name in before if name.startswith("critic.")}


def test_a_value_that_learns_alone_leaves_the_policy_as_it_was() -> None:
    """The statistics of observations, too, which would change every action."""
    policy, collector = setup(normalize_obs=True)
    algorithm = PPO(PPOCfg(n_epochs=1, value_warmup=2, lr_warmup=2, learning_rate=1e-3), policy)
    algorithm.policy.update_normalizer(collector.collect(8)["observation"].reshape(-1))
    obs = collector.collect(8)["observation"].reshape(-1)
    action, rates = policy.get_action(obs, deterministic=True)[0], []
    for update in range(5):
        rates.append(algorithm.update(collector.collect(8))["learning_rate"])
        assert torch.equal(policy.get_action(obs, deterministic=True)[0], action) == (update < 2)
    assert rates == pytest.approx([1e-3, 1e-3, 5e-4, 1e-3, 1e-3])  # the warm-up is the policy's


def make(kind: str, **changes: Any) -> tuple[Any, SyncCollector]:
    """Return an algorithm with every control, and what collects for it."""
    schedule = {"lr_schedule": "adaptive", "desired_kl": 1e-3, "lr_warmup": 2}
    settings = CONTROLS | {"n_epochs": 2, "batch_size": 16} | schedule | changes
    if kind == "grpo":
        policy, collector = setup("actor_only", normalize_obs=True)
        more: dict[str, Any] = {"group_size": 3, "baseline": "leave_one_out", "normalize_advantage": False}
        return GRPO(GRPOCfg(**more, **settings), policy), collector
    policy, collector = setup(normalize_obs=True, normalize_value=True)
    return PPO(PPOCfg(**{"value_learning_rate": 3e-2, **settings}), policy), collector


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_training_continues_bit_by_bit(kind: str) -> None:
    algorithm, collector = make(kind)
    rollouts = [collector.collect(8).clone() for _ in range(5)]
    found, saved = [], {}
    for number, rollout in enumerate(rollouts):
        algorithm.progress = number / 5
        if number == 1:  # in the middle of the warm-up
            saved = copy.deepcopy({"algorithm": algorithm.state_dict(), "policy": algorithm.policy.state_dict()})
            noise = torch.get_rng_state()
        found.append(algorithm.update(rollout.clone()))
    other, _ = make(kind)
    other.load_state_dict(saved["algorithm"])
    other.policy.load_state_dict(saved["policy"])
    torch.set_rng_state(noise)
    for number, rollout in enumerate(rollouts[1:], 1):
        other.progress = number / 5
        assert other.update(rollout.clone()) == found[number]
    assert same(other.policy.state_dict(), algorithm.policy.state_dict())
    assert same(other.state_dict(), algorithm.state_dict())
    assert len({metrics["learning_rate"] for metrics in found}) > 3


def test_groups_of_parameters_are_no_part_of_the_state() -> None:
    """Another step size of the value, or another decay, takes effect in a resumed run; moments stay whose they are."""
    plain = {"value_learning_rate": None, "weight_decay": 0.0, "lr_schedule": "constant", "lr_warmup": 0}
    other = {"value_learning_rate": 5e-2, "weight_decay": 0.1}
    before, collector = make("ppo", **plain)
    before.update(collector.collect(8))
    after, _ = make("ppo", **plain | other)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert after.optimizer.rates() == {"learning_rate": 1e-2, "value_learning_rate": 5e-2}
    for here, there in zip(after.optimizer.parameters, before.optimizer.parameters, strict=True):
        assert same(dict(after.optimizer.adam.state[here]), dict(before.optimizer.adam.state[there]))
    assert {group["weight_decay"] for group in after.optimizer.adam.param_groups} == {0.0, 0.1}
    again, _ = make("ppo", **plain)
    again.load_state_dict(copy.deepcopy(after.state_dict()))
    assert same(again.optimizer.state_dict()["adam"]["state"], before.optimizer.state_dict()["adam"]["state"])
    # another warm-up, or another first rate, begins from what the config says
    warm, _ = make("ppo", **plain | {"lr_warmup": 10})
    warm.load_state_dict(copy.deepcopy(before.state_dict()))
    assert warm.update(collector.collect(8))["learning_rate"] == pytest.approx(2e-3)
    faster, _ = make("ppo", **plain | other | {"learning_rate": 2e-2})
    faster.load_state_dict(copy.deepcopy(before.state_dict()))
    assert faster.optimizer.rates() == {"learning_rate": 2e-2, "value_learning_rate": 5e-2}
    # a state of other parameters is refused, and so is one without the reference
    state = copy.deepcopy(before.state_dict())
    state["optimizer"]["adam"]["param_groups"][0]["params"] = [0, 1]
    with pytest.raises(CheckpointError, match=r"Adam's state is that of 2 trained parameters, and here 13 are"):
        again.load_state_dict(state)
    del state["reference"]
    state["optimizer"] = before.optimizer.state_dict()
    with pytest.raises(CheckpointError, match=r"kl_coef is 0\.5.*without a reference policy.*kl_coef 0"):
        again.load_state_dict(state)


@pytest.mark.parametrize(("name", "level"), [("flow", "chunk"), ("flow", "denoising_step"), ("tokens", "token")])
def test_a_reference_of_policies_with_decisions(name: str, level: Any) -> None:
    torch.manual_seed(0)
    env = ScriptedEnv(6, ends=5, limit=6)
    small = {"flow": {"num_steps": 3}} if name == "flow" else {"tokens": {"width": 8}}
    policy = make_policy_of_chunks(env, name, small)
    env.action_manager = SimpleNamespace(action_type="delta_qpos")
    collector = SyncCollector(chunked(env, 2), policy)
    cfg = PPOCfg(n_epochs=1, batch_size=24, learning_rate=1e-2, kl_coef=0.3, log_prob_per=level)
    algorithm = PPO(cfg, policy)
    assert algorithm.update(collector.collect(4))["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    rollout = collector.collect(4)
    difference = [evaluate_rollout(p, rollout)[0].detach() for p in (algorithm.reference, policy)]
    apart = difference[0] - difference[1]  # [6, 4, chunk, factors] or [6, 4, 1, factors]
    taken = torch.arange(apart.shape[2]) < rollout["num_actions"].unsqueeze(-1)
    apart = torch.where(taken.unsqueeze(-1), apart, 0.0)
    if level == "chunk":
        estimate = (apart.sum((2, 3)).exp() - 1 - apart.sum((2, 3))).mean()
    else:
        counted = taken.unsqueeze(-1).expand_as(apart).sum((2, 3))
        estimate = ((apart.exp() - 1 - apart).sum((2, 3)) / counted).mean()
    assert float(estimate) > 1e-6
    assert algorithm.update(rollout)["reference_kl"] == pytest.approx(float(estimate), rel=1e-3)


def make_policy_of_chunks(env: ScriptedEnv, name: str, settings: dict[str, Any]) -> Any:
    from embodichain.agents.rl.models import build_policy

    block = {"name": name, "chunk_size": 2, **settings}
    return build_policy(block, env.observation_space, env.action_space, "cpu")


def test_a_penalty_keeps_the_policy_near_the_reference() -> None:
    distances = []
    for weight in (0.0, 30.0):
        policy, collector = setup()
        first = copy.deepcopy(policy)
        algorithm = PPO(PPOCfg(n_epochs=4, batch_size=16, learning_rate=1e-2, kl_coef=weight), policy)
        assert (algorithm.reference is None) == (weight == 0.0)
        for _ in range(5):
            rollout = collector.collect(8)
            algorithm.update(rollout)
        with torch.no_grad():
            obs = rollout["observation"].reshape(-1)
            both = distribution(policy, obs), distribution(first, obs)
            distances.append(float(torch.distributions.kl_divergence(*both).mean()))
    assert distances[1] < 0.2 * distances[0]


def test_a_reference_takes_no_larger_batches_than_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout of images would not fit into memory at once."""
    policy, collector = setup()
    algorithm, sizes = PPO(PPOCfg(n_epochs=1, batch_size=7, kl_coef=0.1), policy), list[int]()
    evaluate = type(policy).evaluate

    def measured(self: Any, batch: Any) -> Any:
        sizes.append(batch.batch_size[0])
        return evaluate(self, batch)

    monkeypatch.setattr(type(policy), "evaluate", measured)
    algorithm.update(collector.collect(8))
    assert sum(sizes) == 2 * 48
    assert max(sizes) == 7


def test_a_reference_shares_what_is_not_trained() -> None:
    policy, collector = setup(normalize_obs=True)
    policy.actor[0].requires_grad_(False)
    algorithm = PPO(PPOCfg(n_epochs=2, learning_rate=1e-2, kl_coef=0.1), policy)
    algorithm.update(collector.collect(8))
    reference = algorithm.reference
    for (name, here), there in zip(policy.named_parameters(), reference.parameters(), strict=True):
        assert (here is there) == name.startswith("actor.0."), name
        assert not there.requires_grad
    first = float(policy.encoder.normalizer.count)  # both take the statistics of the first rollout
    algorithm.update(collector.collect(8))
    assert reference.encoder.normalizer.count == first < policy.encoder.normalizer.count
    state = copy.deepcopy(algorithm.state_dict())
    assert {*reference.state_dict()} - {*state["reference"]} == {"actor.0.weight", "actor.0.bias"}
    other, _ = setup(normalize_obs=True)
    other.load_state_dict(policy.state_dict())
    other.actor[0].requires_grad_(False)
    resumed = PPO(algorithm.cfg, other)
    resumed.load_state_dict(state)
    assert same(resumed.reference.state_dict(), reference.state_dict())
    assert resumed.update(collector.collect(8))["reference_kl"] > 0.0


@pytest.mark.parametrize(("clip", "high"), [(0.2, None), (0.2, 0.28), (0.3, 0.1), (1.0, 2.0), (1.5, None)])
def test_clips_by_tensors_are_those_by_numbers(clip: float, high: float | None) -> None:
    torch.manual_seed(0)
    log_r, gain = torch.randn(400), torch.randn(400)
    upper = clip if high is None else high
    expected = torch.minimum(log_r.exp() * gain, log_r.exp().clamp(max(0.0, 1 - clip), 1 + upper) * gain)
    outside = (log_r.exp() < 1 - clip) | (log_r.exp() > 1 + upper)
    bounds = torch.tensor(clip), None if high is None else torch.tensor(high)
    for given in ((clip, high), bounds):
        torch.testing.assert_close(clipped_gain(log_r, gain, *given), expected)
        assert torch.equal(is_clipped(log_r, *given), outside.float())


def test_the_value_of_a_vla_is_its_head() -> None:
    with language_env(2) as env:
        policy = vla_policy(env)
    named = [name for name, _ in policy.named_parameters() if policy.in_critic(name)]
    assert named
    assert all(name.startswith("model.to_value.") for name in named)
    algorithm = PPO(PPOCfg(value_learning_rate=1e-3, learning_rate=1e-5, value_warmup=1), policy)
    slow, fast = (
        {id(p) for group in algorithm.optimizer.adam.param_groups for p in group["params"] if group["lr"] == rate}
        for rate in (1e-5, 1e-3)
    )
    assert fast == {id(p) for p in policy.model.to_value.parameters()}
    assert len(slow) == len(algorithm.optimizer.parameters) - len(fast)


def test_settings_out_of_range_are_named() -> None:
    for settings, problem in (
        ({"value_learning_rate": 0.0}, "value_learning_rate: expected greater than 0"),
        ({"weight_decay": -0.1}, "weight_decay: expected greater than or equal to 0"),
        ({"lr_warmup": -1}, "lr_warmup: expected greater than or equal to 0"),
        ({"clip_coef_high": 0.0}, "clip_coef_high: expected greater than 0"),
        ({"clip_coef_final": 0.0}, "clip_coef_final: expected greater than 0"),
        ({"ent_coef_final": -1.0}, "ent_coef_final: expected greater than or equal to 0"),
        ({"kl_coef": -1.0}, "kl_coef: expected greater than or equal to 0"),
    ):
        with pytest.raises(ConfigError, match=problem):
            PPOCfg.from_dict(settings, source="algorithm.cfg")
    with pytest.raises(ConfigError, match=r"baseline: expected .*leave_one_out"):
        GRPOCfg.from_dict({"baseline": "median"}, source="algorithm.cfg")
    with pytest.raises(ConfigError, match=r"lr_min: expected at most learning_rate"):
        GRPOCfg.from_dict({"lr_schedule": "adaptive", "lr_min": 1.0}, source="algorithm.cfg")
    with pytest.raises(ConfigError, match=r"value_learning_rate: expected None, as LinearPolicy trains no part"):
        PPO(PPOCfg(value_learning_rate=1e-3), LinearPolicy())
    policy, _ = setup()
    policy.critic.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"value_warmup: expected 0, as ActorCritic trains no part.*got 3"):
        PPO(PPOCfg(value_warmup=3), policy)


# --- weights of lower precision -----------------------------------------------------------------------------------


def trained(dtype: torch.dtype, steps: int) -> tuple[nn.Module, PolicyOptimizer]:
    """Fit a linear layer to a line with steps far below the spacing of bfloat16 numbers near 1."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 1)
    layer.weight.data.uniform_(0.9, 1.1)
    layer.to(dtype)
    optimizer = PolicyOptimizer(layer, 1e-5, 100.0)
    step(layer, optimizer, steps)
    return layer, optimizer


def step(layer: nn.Module, optimizer: PolicyOptimizer, steps: int) -> None:
    x = torch.ones(4, 8, dtype=layer.weight.dtype)
    for _ in range(steps):
        optimizer.backward(layer(x).float().mean())
        optimizer.step()


def test_small_steps_add_up_in_weights_of_lower_precision() -> None:
    """1000 steps of 1e-5 are 0.01; one alone is a hundredth of what bfloat16 can tell apart there."""
    exact, _ = trained(torch.float32, 1000)
    for dtype in (torch.bfloat16, torch.float16):
        begun, _ = trained(dtype, 0)
        ended, optimizer = trained(dtype, 1000)
        assert ended.weight.dtype == dtype
        assert {values["exp_avg_sq"].dtype for values in optimizer.adam.state.values()} == {torch.float32}
        moved, wanted = (begun.weight - ended.weight).detach().float().mean(), 1000 * 1e-5
        assert float(moved) == pytest.approx(wanted, rel=0.25)  # a mean of eight rounded weights
        assert torch.allclose(ended.weight.float(), exact.weight, rtol=2**-7)


def test_weights_of_lower_precision_are_resumed_to_the_last_bit() -> None:
    whole, whole_optimizer = trained(torch.bfloat16, 700)
    half, optimizer = trained(torch.bfloat16, 300)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(half.state_dict())
    other, second = trained(torch.bfloat16, 5)
    other.load_state_dict(weights)
    second.load_state_dict(state)
    step(other, second, 400)
    assert torch.equal(other.weight, whole.weight)
    for mine, theirs in zip(second.state_dict()["float32"], whole_optimizer.state_dict()["float32"], strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cleared_gradients_are_gone_whatever_the_precision(dtype: torch.dtype) -> None:
    layer, optimizer = trained(dtype, 0)
    x = torch.ones(1, 8, dtype=dtype)
    optimizer.backward(1000.0 * layer(x).float().mean())
    optimizer.clear_gradients()
    optimizer.backward(layer(x).float().mean())
    assert float(optimizer.step()) == pytest.approx(3.0)  # eight weights and a bias, with a gradient of 1 each
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_are_too_large_for_fp16_are_left_out_and_have_no_norm(dtype: torch.dtype) -> None:
    """The loss scale begins at 65536 and is halved until gradients fit, which is no failure of the run."""
    layer = nn.Linear(8, 1, dtype=dtype)
    optimizer = PolicyOptimizer(layer, 1e-3, 100.0, "fp16")
    begun, norms, x = layer.weight.detach().clone(), list[float](), torch.ones(4, 8, dtype=dtype)
    for _ in range(3):
        with optimizer.autocast():
            output = layer(x)
        optimizer.backward(1.5 * output.float().mean())  # 1.5 * 65536 is more than fp16 holds, half of it is not
        norms.append(float(optimizer.step()))
        if len(norms) == 1:
            assert torch.equal(layer.weight, begun)
    assert norms == pytest.approx([0.0, 4.5, 4.5])  # eight weights and a bias, with a gradient of 1.5 each
    assert not torch.equal(layer.weight, begun)
    assert optimizer.scaler.get_scale() == 2**15


def test_copies_of_other_weights_are_refused() -> None:
    _, optimizer = trained(torch.bfloat16, 5)
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(4, 1, dtype=dtype)
        with pytest.raises(CheckpointError, match=r"float32 copies of 2 weights.*same dtype"):
            PolicyOptimizer(layer, 1e-5, 100.0).load_state_dict(optimizer.state_dict())


def test_weights_that_are_loaded_behind_the_optimiser_count() -> None:
    layer, optimizer = trained(torch.bfloat16, 50)
    with torch.no_grad():
        layer.weight.fill_(-3.0)
    step(layer, optimizer, 1)
    assert torch.allclose(layer.weight.float(), torch.full((1, 8), -3.0), atol=1e-4)
    assert trained(torch.float32, 1)[1].state_dict().keys() == {"adam", "scaler"}
