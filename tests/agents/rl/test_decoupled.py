"""Decoupled PPO and GRPO against a straightforward writing of their loss; the default stays what it was."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg
from embodichain.agents.rl.algo.advantages import Proximal
from embodichain.agents.rl.buffer.rollout_buffer import evaluate_rollout
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.collector.async_collector import behaviour_kl
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.agents.rl.utils.ratios import bounded, clipped_gain, is_clipped, kl_estimate
from embodichain.errors import ConfigError
from tests.agents.rl.helpers import ScriptedEnv, make_policy

ENVS, STEPS, CLIP, CAP = 4, 6, 0.2, 1.3


pytestmark = pytest.mark.usefixtures("one_thread")


def stale(name="actor_critic", change=0.3, **settings):
    """Return a policy and a rollout that an older version of it collected."""
    torch.manual_seed(0)
    env = ScriptedEnv(ENVS, ends=4)
    policy = make_policy(env, name, **settings)
    rollout = SyncCollector(env, copy.deepcopy(policy)).collect(STEPS).clone()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += change * torch.randn_like(parameter)
    policy.version += 1
    return policy, rollout


def straightforward_ppo_gradient(policy, rollout, cfg):
    """The first gradient of decoupled PPO, written from its formula: all transitions in one minibatch."""
    rows = rollout.reshape(-1)
    with torch.no_grad():
        prox = policy.evaluate_actions(rows["observation"], rows["action"])[0]
    mu = rows["sample_log_prob"]
    weight = torch.minimum((prox - mu).exp(), torch.tensor(cfg.max_importance_weight))
    advantage = rollout["advantage"].reshape(-1)
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    log_prob, _, value = policy.evaluate_actions(rows["observation"], rows["action"])
    ratio = (log_prob - prox).exp()
    clipped = ratio.clamp(1 - cfg.clip_coef, 1 + cfg.clip_coef)
    policy_loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).mean()
    value_loss = (value - rollout["return"].reshape(-1)).square().mean()
    policy.zero_grad()
    (policy_loss + cfg.vf_coef * value_loss).backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}, weight


class Recording(PPO):
    """PPO that keeps the gradient of its first step."""

    gradient: dict | None = None

    def _step(self, batch, meter, share=1.0):
        step = self.optimizer.step

        def keep_and_step():
            if self.gradient is None:
                self.gradient = {name: p.grad.clone() for name, p in self.policy.named_parameters()}
            return step()

        self.optimizer.step = keep_and_step
        super()._step(batch, meter, share)
        self.optimizer.step = step


@pytest.mark.parametrize("memory", [None, {"type": "gru", "hidden_size": 4}])
@pytest.mark.parametrize("scope", ["rollout", "minibatch"])
def test_gradient_is_that_of_the_formula(memory, scope):
    policy, rollout = stale(memory=memory)
    rollout["reward"] += 3.0  # advantages far from zero: their mean is subtracted before they are weighted
    cfg = PPOCfg(
        correction="decoupled",
        max_importance_weight=CAP,
        advantage_scope=scope,
        batch_size=10**6,
        n_epochs=1,
        max_grad_norm=1e9,
    )
    algorithm = Recording(cfg, policy)
    before = copy.deepcopy(policy)
    metrics = algorithm.update(rollout)
    if memory is not None:  # the formula above is for policies without memory; the log-probabilities are checked below
        assert metrics["behaviour_kl"] > 0
        return
    expected, weight = straightforward_ppo_gradient(before, rollout, cfg)
    for name, gradient in expected.items():
        assert torch.allclose(algorithm.gradient[name], gradient, atol=1e-5, rtol=1e-4), name
    assert (weight == CAP).any()  # the bound was met
    assert metrics["importance_max"] > CAP
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)  # the clip is centred on the policy itself


def test_plain_ppo_on_the_same_rollout_is_something_else():
    gradients = []
    for correction in ("none", "decoupled"):
        policy, rollout = stale()
        cfg = PPOCfg(correction=correction, batch_size=10**6, n_epochs=1, max_grad_norm=1e9)
        algorithm = Recording(cfg, policy)
        algorithm.update(rollout)
        gradients.append(algorithm.gradient["actor.0.weight"])
    assert not torch.allclose(*gradients, rtol=1e-2)


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": "decoupled"},
        {"advantage_estimator": "vtrace"},
        {"correction": "decoupled", "advantage_estimator": "vtrace"},
    ],
)
def test_without_lag_the_corrections_change_nothing_but_rounding(settings):
    def trained(**chosen):
        torch.manual_seed(0)
        env = ScriptedEnv(ENVS, ends=4, limit=3)
        algorithm = PPO(PPOCfg(batch_size=8, n_epochs=2, learning_rate=1e-2, **chosen), make_policy(env))
        collector = SyncCollector(env, algorithm.policy)
        torch.manual_seed(1)
        for _ in range(3):
            algorithm.update(collector.collect(STEPS))
        return algorithm.policy

    plain, corrected = trained(), trained(**settings)
    for mine, other in zip(plain.parameters(), corrected.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-4)


@pytest.mark.parametrize("estimator", ["gae", "vtrace"])
@pytest.mark.parametrize("memory", [None, {"type": "gru", "hidden_size": 4}])
def test_advantages_of_an_old_rollout_are_those_of_the_present_critic(memory, estimator):
    """The critic's bias moved, the actor did not: as if the present policy had collected, up to the rollout's end."""

    def learned(change, age):
        torch.manual_seed(0)
        env = ScriptedEnv(ENVS, ends=[4, 10, 10, 10], limit=5)
        policy = make_policy(env, memory=memory)
        later = copy.deepcopy(policy)
        with torch.no_grad():
            later.critic[-1].bias += 3.0
        collected = SyncCollector(env, policy if change else later).collect(STEPS).clone()
        later.version += age
        cfg = PPOCfg(correction="decoupled", advantage_estimator=estimator, n_epochs=1, batch_size=10**6)
        metrics = PPO(cfg, later).update(collected)
        return collected, metrics

    (old, old_metrics), (new, new_metrics) = learned(change=True, age=1), learned(change=False, age=0)
    assert (new["truncated"] & ~new["terminated"]).any()
    assert new["terminated"].any()
    for key in ("value", "next_value", "advantage", "return"):
        assert torch.allclose(old[key], new[key], atol=1e-5), key
    for key in ("value_loss", "policy_loss", "explained_variance"):
        assert old_metrics[key] == pytest.approx(new_metrics[key], abs=1e-4), key


def test_values_of_a_rollout_without_lag_stay_bit_by_bit():
    policy, rollout = stale()
    rollout["policy_version"][:, 3:] = policy.version  # weights that were adopted on the way
    before = rollout.clone()
    value, next_value = Proximal.of(policy, rollout, 7).values(rollout, policy.version)
    assert torch.equal(value[:, 3:], before["value"][:, 3:])
    assert torch.equal(next_value[:, 3:], before["next_value"][:, 3:])
    assert not torch.isclose(value[:, :3], before["value"][:, :3]).any()
    assert torch.equal(rollout["value"], before["value"])


@pytest.mark.parametrize("memory", [None, {"type": "gru", "hidden_size": 4}])
def test_evaluating_a_rollout_gives_what_was_stored_for_unchanged_weights(memory):
    policy, rollout = stale(change=0.0, memory=memory)
    for rows in (5, 10**6):
        log_prob, value = evaluate_rollout(policy, rollout, rows)
        assert torch.allclose(log_prob, rollout["sample_log_prob"], atol=1e-5)
        assert torch.allclose(value, rollout["value"], atol=1e-5)
    assert behaviour_kl(policy, rollout, 1000) == pytest.approx(0.0, abs=1e-6)


def test_behaviour_kl_is_the_divergence_between_the_policies():
    """Of two Gaussians, known in closed form, estimated from many samples."""
    torch.manual_seed(0)
    env = ScriptedEnv(64)
    policy = make_policy(env)
    rollout = SyncCollector(env, copy.deepcopy(policy)).collect(200).clone()
    with torch.no_grad():
        policy.head.log_std += 0.2  # KL = log s2/s1 + s1^2 / (2 s2^2) - 1/2
    expected = 0.2 + 0.5 * torch.tensor(-0.4).exp() - 0.5
    assert behaviour_kl(policy, rollout, 10**6) == pytest.approx(float(expected), rel=0.05)


class Keeping(GRPO):
    """GRPO that keeps what its loss is given."""

    def _minibatches(self, data, rollout, valid=None):
        self.data = data.clone()
        return super()._minibatches(data, rollout, valid)


def test_grpo_weighs_its_groups_and_centres_its_clip():
    policy, rollout = stale("actor_only")
    cfg = GRPOCfg(correction="decoupled", group_size=2, batch_size=10**6, n_epochs=1, max_importance_weight=CAP)
    algorithm = Keeping(cfg, policy)
    proximal = Proximal.of(policy, rollout, 10**6)
    metrics = algorithm.update(rollout)
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["behaviour_kl"] == pytest.approx(proximal.measures(Ranks())["behaviour_kl"], rel=1e-4)
    assert metrics["behaviour_kl"] > 1e-3
    weight = proximal.log_importance.exp().clamp(max=CAP)
    assert torch.allclose(algorithm.data["advantage"], rollout["advantage"] * weight)
    assert torch.allclose(algorithm.data["sample_log_prob"], proximal.log_prob)


@pytest.mark.parametrize("algorithm_class", [PPO, GRPO])
def test_what_has_become_all_too_unlikely_teaches_nothing(algorithm_class):
    policy, rollout = stale()
    cfg = PPOCfg() if algorithm_class is PPO else GRPOCfg(group_size=2)
    algorithm = algorithm_class(cfg, policy)
    rows = rollout.reshape(-1)
    with torch.no_grad():
        log_prob = policy.evaluate(rows)[0]
    valid = torch.ones_like(rows["reward"])
    batch = rows.clone().update({"advantage": torch.randn(len(rows)), "return": rows["reward"], "valid": valid})
    far = torch.arange(len(rows)) % 3 == 0
    batch["advantage"][far] = torch.tensor([0.0, -1.0]).repeat(len(rows))[: int(far.sum())]
    batch["sample_log_prob"] = log_prob - 0.1
    apart, without = batch.clone(), batch.clone()
    apart["sample_log_prob"][far] -= 3000.0  # a ratio of e**3000, with an advantage of zero or below it
    without["sample_log_prob"][far], without["advantage"][far] = log_prob[far], 0.0
    gradients = []
    for part in (apart, without):
        loss, measures = algorithm._loss(part)
        assert loss.isfinite()
        assert all(measure.isfinite() for measure in measures.values())
        found = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
        gradients.append(torch.cat([part.flatten() for part in found if part is not None]))
    assert gradients[1].norm() > 1e-3
    torch.testing.assert_close(*gradients)


def test_ratios_are_bounded_only_where_they_say_nothing():
    log_r = torch.tensor([-3000.0, -1.0, 0.0, 19.0, 21.0, 3000.0], requires_grad=True)
    found = bounded(log_r)
    assert torch.equal(found.detach(), torch.tensor([-3000.0, -1.0, 0.0, 19.0, 20.0, 20.0]))
    found.sum().backward()
    assert log_r.grad.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert kl_estimate(torch.tensor([0.5])).item() == pytest.approx(math.exp(0.5) - 1.5)
    assert kl_estimate(torch.tensor([3000.0])).isfinite().all()


def test_the_estimate_of_the_kl_divergence_is_never_negative_and_exact_for_small_ratios():
    generator = torch.Generator().manual_seed(0)
    log_r = torch.cat([torch.randn(100_000, generator=generator) * scale for scale in (1e-7, 1e-5, 1e-4, 1e-3, 0.1)])
    found, expected = kl_estimate(log_r), torch.expm1(log_r.double()) - log_r.double()
    assert (found >= 0.0).all()
    rounding = 2.0**-23 * log_r.abs()  # of the difference of two numbers of that size
    assert ((found - expected).abs() <= rounding + 1e-6 * expected).all()
    log_r = torch.linspace(-1e-3, 1e-3, 2001, requires_grad=True)
    kl_estimate(log_r).sum().backward()
    assert log_r.grad is not None
    torch.testing.assert_close(log_r.grad, torch.expm1(log_r.detach()), atol=2e-7, rtol=0.0)


def test_corrected_ppo_learns_from_very_stale_rollouts():
    """Rollouts of a policy that is four updates older; the reward is the position, so pushing up pays."""
    torch.manual_seed(0)
    env = ScriptedEnv(16, limit=10)
    cfg = PPOCfg(
        correction="decoupled", advantage_estimator="vtrace", batch_size=80, n_epochs=4, learning_rate=1e-2, gamma=0.9
    )
    algorithm = PPO(cfg, make_policy(env))
    waiting = [copy.deepcopy(algorithm.policy)] * 4
    rewards = []
    collector = SyncCollector(env, waiting[0])
    for _ in range(25):
        waiting.append(copy.deepcopy(algorithm.policy))
        collector.policy = waiting.pop(0)
        rollout = collector.collect(10)
        rewards.append(float(rollout["reward"].mean()))
        algorithm.update(rollout)
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5.0


@pytest.mark.parametrize("clip", [0.1, 0.2, 1.0, 1.5])
@pytest.mark.parametrize("per_action", [False, True])
def test_the_clipped_gain_is_that_of_the_formula(clip, per_action):
    torch.manual_seed(0)
    log_r = torch.cat([torch.randn(500), torch.tensor([0.0, 5.0, -30.0])]).requires_grad_()
    gain = torch.cat([torch.randn(501), torch.zeros(2)])
    if per_action:
        log_r, gain = torch.stack([log_r, log_r.flip(0)], dim=1).detach().requires_grad_(), gain.unsqueeze(1)
    ratio = log_r.exp()
    expected = torch.min(ratio * gain, ratio.clamp(1.0 - clip, 1.0 + clip) * gain)
    found = clipped_gain(log_r, gain, clip)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(gained.sum(), log_r)[0] for gained in (found, expected)]
    torch.testing.assert_close(*gradients)
    assert torch.equal(is_clipped(log_r, clip), ((ratio - 1.0).abs() > clip).float())


@pytest.mark.parametrize(
    "settings", [{"correction": "some"}, {"max_importance_weight": 0.0}, {"advantage_estimator": "td"}]
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PPOCfg.from_dict(settings)
