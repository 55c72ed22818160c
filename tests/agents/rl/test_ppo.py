"""PPO: one update against a straightforward implementation, its options, its memory."""

from __future__ import annotations

import copy
import math
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg, build_algo, compute_gae
from embodichain.agents.rl.algo import base as minibatch
from embodichain.agents.rl.collector import SyncCollector
from embodichain.errors import ConfigError
from embodichain.utils import torch_runtime
from embodichain.utils.torch_runtime import torch_threads
from tests.agents.rl.helpers import ScriptedEnv, make_policy


def setup(seed: int = 0, **settings):
    torch.manual_seed(seed)
    env = ScriptedEnv(6, ends=[3, 4, 100, 100, 100, 100], limit=5)
    policy = make_policy(env, **settings)
    rollout = SyncCollector(env, policy).collect(8)
    return env, policy, rollout


def reference_update(policy: nn.Module, rollout, cfg: PPOCfg) -> list[float]:
    """PPO as it is written down, with torch.distributions and one whole-rollout minibatch per epoch."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.learning_rate, eps=1e-5)
    gae_keys = ("reward", "value", "next_value", "terminated", "done")
    advantage, returns = compute_gae(*(rollout[key] for key in gae_keys), cfg.gamma, cfg.gae_lambda)
    flat = {k: rollout[k].reshape(48, *rollout[k].shape[2:]) for k in ("action", "sample_log_prob", "value")}
    obs, advantage, returns = rollout["observation"].reshape(-1), advantage.reshape(-1), returns.reshape(-1)
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    losses = []
    for _ in range(cfg.n_epochs):
        features, _ = policy.encoder(obs)
        distribution = torch.distributions.Normal(policy.actor(features), policy.head.log_std.exp())
        log_prob = distribution.log_prob(flat["action"]).sum(-1)
        value = policy.critic(features).squeeze(-1)
        ratio = (log_prob - flat["sample_log_prob"]).exp()
        clipped = ratio.clamp(1 - cfg.clip_coef, 1 + cfg.clip_coef)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        error = (value - returns) ** 2
        if cfg.clip_value_loss:
            near = flat["value"] + (value - flat["value"]).clamp(-cfg.clip_coef, cfg.clip_coef)
            error = torch.maximum(error, (near - returns) ** 2)
        loss = loss + cfg.vf_coef * error.mean() - cfg.ent_coef * distribution.entropy().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
        optimizer.step()
        losses.append(float(error.detach().mean()))
    return losses


@pytest.mark.parametrize("options", [{}, {"clip_value_loss": True, "ent_coef": 0.02, "max_grad_norm": 0.05}])
@pytest.mark.parametrize("rows", [2048, 7])
def test_equals_a_straightforward_implementation(options, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minibatch, "CPU_ROWS", rows)  # pieces of a minibatch add up to the same
    _, policy, rollout = setup()
    expected = copy.deepcopy(policy)
    cfg = PPOCfg(n_epochs=3, batch_size=48, learning_rate=1e-2, **options)
    losses = reference_update(expected, rollout, cfg)
    metrics = PPO(cfg, policy).update(rollout)
    for (name, ours), theirs in zip(policy.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5), name
    assert metrics["value_loss"] == pytest.approx(sum(losses) / 3, rel=1e-3)


def test_update_adds_advantage_and_return_and_counts_itself() -> None:
    _, policy, rollout = setup()
    PPO(PPOCfg(n_epochs=1), policy).update(rollout)
    expected = compute_gae(*(rollout[k] for k in ("reward", "value", "next_value", "terminated", "done")), 0.99, 0.95)
    assert torch.equal(rollout["advantage"], expected[0])
    assert torch.equal(rollout["return"], expected[1])
    assert policy.version == 1


def test_first_ratio_is_one_even_with_normalised_observations() -> None:
    env, policy, _rollout = setup(normalize_obs=True)
    algorithm = PPO(PPOCfg(n_epochs=1, batch_size=48), policy)
    collector = SyncCollector(env, policy)
    for _ in range(3):  # statistics change between rollouts, never between acting and learning
        metrics = algorithm.update(collector.collect(8))
        assert metrics["approx_kl"] < 1e-6
        assert metrics["clip_fraction"] == 0.0
    assert policy.encoder.normalizer.count == 3 * 48


def test_normalised_values_learn_large_returns() -> None:
    explained = []
    for normalize in (False, True):
        env, policy, _ = setup(normalize_value=normalize)
        algorithm, collector = (
            PPO(PPOCfg(n_epochs=4, batch_size=16, learning_rate=1e-2), policy),
            SyncCollector(env, policy),
        )
        for _ in range(15):
            rollout = collector.collect(8)
            rollout["reward"].mul_(1000.0)
            metrics = algorithm.update(rollout)
        explained.append(metrics["explained_variance"])
        assert policy.value_scale > 100.0 if normalize else policy.value_scale == 1.0
    assert explained[1] > explained[0] + 0.2


def test_two_updates_from_the_same_seed_are_the_same() -> None:
    results = []
    for _ in range(2):
        _, policy, rollout = setup()
        metrics = PPO(PPOCfg(n_epochs=2, batch_size=16), policy).update(rollout)
        results.append((metrics, [p.clone() for p in policy.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("options", [{}, {"value_warmup": 1}, {"mixed_precision": "bf16"}])
def test_actor_and_critic_at_the_same_time_learn_as_one_after_the_other(
    options, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned, threads = [], []
    for count in (1, 2):
        monkeypatch.setattr(torch_runtime, "WORK_PER_THREAD", 1 if count == 2 else 10**18)
        _, policy, rollout = setup(normalize_value=True)
        policy.critic.register_forward_hook(lambda *_: threads.append((len(learned), threading.current_thread().name)))
        algorithm = PPO(PPOCfg(n_epochs=2, batch_size=16, learning_rate=1e-2, **options), policy)
        threads.clear()
        with torch_threads(count):
            learned.append((algorithm.update(rollout), copy.deepcopy(policy).state_dict()))
            assert torch.get_num_threads() == count
    names = {name for turn, name in threads if turn == 1}
    assert any(name.startswith("beside") for name in names) == (options.get("mixed_precision") is None)
    assert learned[0][0] == learned[1][0]
    for name, value in learned[0][1].items():
        assert torch.equal(value, learned[1][1][name]), name
    assert not any(thread.name.startswith("beside") for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("settings", "options", "count", "expected"),
    [
        ({}, {}, 3, {2, 1}),  # all of them are used
        ({"memory": {"hidden_size": 8}}, {}, 2, {2}),
        ({}, {"mixed_precision": "bf16"}, 2, {2}),
    ],
)
def test_threads_are_divided_only_where_two_networks_use_them(
    settings, options, count, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_runtime, "WORK_PER_THREAD", 1)
    _, policy, rollout = setup(**settings)
    used: set[int] = set()
    for network in (policy.actor, policy.critic):
        network.register_forward_hook(lambda *_: used.add(torch.get_num_threads()) if torch.is_grad_enabled() else None)
    with torch_threads(count):
        PPO(PPOCfg(n_epochs=1, batch_size=16, **options), policy).update(rollout)
    assert used == expected


def test_what_a_critic_raises_in_a_thread_of_its_own_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_runtime, "WORK_PER_THREAD", 1)
    _, policy, rollout = setup()
    algorithm = PPO(PPOCfg(batch_size=48), policy)
    hook = policy.critic[0].weight.register_hook(lambda _: 1 / 0)
    with torch_threads(2), pytest.raises(ZeroDivisionError):
        algorithm.update(rollout)
    hook.remove()
    with torch_threads(2):
        assert math.isfinite(algorithm.update(rollout)["value_loss"])


def test_a_critic_that_is_not_learned_gets_no_thread_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_runtime, "WORK_PER_THREAD", 1)
    _, policy, rollout = setup()
    names: set[str] = set()
    policy.critic.register_forward_hook(lambda *_: names.add(threading.current_thread().name))
    algorithm = GRPO(GRPOCfg(batch_size=48, group_size=2), policy)
    with torch_threads(2):
        algorithm.update(rollout)
    assert names == {threading.current_thread().name}
    assert all(parameter not in algorithm.optimizer.adam.state for parameter in policy.critic.parameters())


def test_linear_learning_rate_follows_progress() -> None:
    _, policy, rollout = setup()
    algorithm = PPO(PPOCfg(n_epochs=1, learning_rate=1e-3, lr_schedule="linear"), policy)
    algorithm.progress = 0.75
    assert algorithm.update(rollout)["learning_rate"] == pytest.approx(2.5e-4)


@pytest.mark.parametrize(("desired_kl", "expected"), [(1e3, 1.5**3), (1e-9, 1.5**-3)])
def test_adaptive_learning_rate_keeps_the_kl(desired_kl: float, expected: float) -> None:
    _, policy, rollout = setup()
    cfg = PPOCfg(n_epochs=3, batch_size=16, learning_rate=1e-3, lr_schedule="adaptive", desired_kl=desired_kl)
    assert PPO(cfg, policy).update(rollout)["learning_rate"] == pytest.approx(1e-3 * expected)


@pytest.mark.parametrize(
    ("rate", "desired_kl", "expected"),
    [
        (5e-6, 1e-3, 5e-6 / 1.5**3),  # a change 100 times too large: a small rate falls, too
        (5e-6, 10.0, 5e-6 * 1.5**3),
        (6e-7, 1e-3, 6e-7 / 1.5**3),
        (2e-2, 10.0, 2e-2),  # hardly any change: a large rate rises no further, but stays what it was
        (2e-2, 1e-3, 2e-2 / 1.5**3),
        (9e-3, 10.0, 1e-2),
        (1.2e-4, 1e-3, 1.2e-4 / 1.5**3),
    ],
)
def test_bounds_of_the_adaptive_rate_move_no_rate_by_themselves(
    rate: float, desired_kl: float, expected: float
) -> None:
    _, policy, rollout = setup()
    rollout["sample_log_prob"] -= 0.5  # a KL divergence of exp(0.5) - 1.5 = 0.15, whatever the rate
    cfg = PPOCfg(n_epochs=3, learning_rate=rate, lr_schedule="adaptive", desired_kl=desired_kl, clip_coef=0.01)
    metrics = PPO(cfg, policy).update(rollout)
    assert 0.1 < metrics["approx_kl"] < 0.4
    assert metrics["learning_rate"] == pytest.approx(expected, rel=1e-9)


def test_bounds_of_the_adaptive_rate_are_settings() -> None:
    adaptive = {"lr_schedule": "adaptive", "n_epochs": 9, "learning_rate": 1e-3}
    for desired_kl, bounds, expected in (
        (1e-3, {"lr_min": 4e-4}, 4e-4),
        (1e-3, {"lr_min": 1e-3}, 1e-3),
        (10.0, {"lr_max": 2e-3}, 2e-3),
        (10.0, {"lr_max": 1e-3}, 1e-3),
        (10.0, {"lr_max": 1.0}, 1e-3 * 1.5**9),
        (1e-3, {"lr_min": 1e-9}, 1e-3 / 1.5**9),
    ):
        _, policy, rollout = setup()
        rollout["sample_log_prob"] -= 0.5
        algorithm = PPO(PPOCfg(desired_kl=desired_kl, **adaptive, **bounds), policy)
        assert algorithm.update(rollout)["learning_rate"] == pytest.approx(expected), bounds
    for bounds, problem in (
        ({"lr_min": 2e-3}, r"lr_min: expected at most learning_rate, 0\.001, got 0\.002"),
        ({"lr_max": 5e-4}, r"lr_max: expected at least learning_rate, 0\.001, got 0\.0005"),
        ({"lr_min": 0.0}, r"lr_min: expected greater than 0"),
    ):
        with pytest.raises(ConfigError, match=problem):
            PPOCfg(**adaptive, **bounds)
        with pytest.raises(ConfigError, match=problem):
            PPOCfg.from_dict({**adaptive, **bounds}, source="algorithm.cfg")
    assert PPOCfg(learning_rate=1e-3, lr_max=5e-4).lr_max == 5e-4  # other schedules know no bounds


def test_a_loaded_adaptive_rate_keeps_within_other_bounds() -> None:
    adaptive = {"lr_schedule": "adaptive", "learning_rate": 1e-3}
    before = PPO(PPOCfg(**adaptive), setup()[1])
    for kl, bounds, expected in (
        (0.0, {"lr_max": 2e-3}, 2e-3),
        (0.0, {"lr_min": 5e-4}, None),
        (0.0, {}, None),  # None: what it was, to the last bit
        (1.0, {"lr_min": 5e-4}, 5e-4),
        (1.0, {"lr_max": 2e-3}, None),
        (1.0, {}, None),
    ):
        before.optimizer.learning_rate = 1e-3
        for _ in range(3):
            before.optimizer.adapt_learning_rate(torch.tensor(kl), 0.01, before.cfg.lr_bounds)
        rate = before.optimizer.learning_rate
        assert rate == pytest.approx(1e-3 * 1.5 ** (3 if kl == 0.0 else -3))
        after = PPO(PPOCfg(**adaptive, **bounds), setup()[1])
        after.load_state_dict(before.state_dict())
        assert after.optimizer.learning_rate == (rate if expected is None else expected), bounds


def test_early_stop_on_kl() -> None:
    _, policy, rollout = setup()
    cfg = PPOCfg(n_epochs=9, batch_size=16, learning_rate=0.1, target_kl=1e-4)
    assert PPO(cfg, policy).update(rollout)["epochs"] == 1.0
    _, policy, rollout = setup()
    assert PPO(cfg.replace(target_kl=None), policy).update(rollout)["epochs"] == 9.0


def test_gradient_norm_is_bounded() -> None:
    _, policy, rollout = setup()
    algorithm = PPO(PPOCfg(n_epochs=1, batch_size=48, max_grad_norm=1e-3), policy)
    step, seen = algorithm.optimizer.step, []

    def watch() -> torch.Tensor:
        seen.append(float(torch.stack([p.grad.norm() for p in policy.parameters()]).norm()))
        return step()

    algorithm.optimizer.step = watch
    metrics = algorithm.update(rollout)
    assert seen[0] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    assert seen[0] > 1e-3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_stays_close_to_full(precision: str) -> None:
    values = {}
    for mode in ("off", precision):
        _, policy, rollout = setup()
        before = [p.clone() for p in policy.parameters()]
        values[mode] = PPO(PPOCfg(n_epochs=2, batch_size=48, mixed_precision=mode), policy).update(rollout)
        assert all(p.dtype == torch.float32 for p in policy.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert values[precision]["value_loss"] == pytest.approx(values["off"]["value_loss"], rel=0.05)


UNCHANGED = {"n_epochs": 1, "batch_size": 16, "learning_rate": 1e-30}
"""An update that leaves the weights as they are: every ratio has to be 1."""


def precise_setup(name: str = "actor_critic", start_rollout=None, **settings):
    """Return a policy of 24 actions with a small spread, whose probabilities show every rounding, and a rollout."""
    torch.manual_seed(0)
    env = ScriptedEnv(8, ends=[3, 4, 100, 100, 100, 100, 100, 100], limit=5)
    env.action_space = gym.spaces.Box(-1.0, 1.0, (24,), np.float32)
    policy = make_policy(env, name, distribution={"init_log_std": math.log(0.05)}, **settings)
    with torch.no_grad():
        policy.actor[-1].weight.mul_(100.0)
    return policy, SyncCollector(env, policy, start_rollout=start_rollout)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("memory", [None, {"hidden_size": 8}])
@pytest.mark.parametrize("options", [{}, {"correction": "decoupled"}, {"clip_value_loss": True}])
def test_ratios_of_unchanged_weights_are_one_in_every_precision(precision: str, memory, options) -> None:
    policy, collector = precise_setup(memory=memory)
    rollout = collector.collect(8)
    collected = rollout["sample_log_prob"].clone()
    cfg = PPOCfg(**UNCHANGED, mixed_precision=precision, sequence_length=4 if memory else None, **options)
    metrics = PPO(cfg, policy).update(rollout)
    assert metrics["approx_kl"] < 1e-6
    assert metrics["clip_fraction"] == 0.0
    assert torch.equal(rollout["sample_log_prob"], collected)  # the rollout keeps what the collector wrote
    if options.get("correction"):  # the weights that collected are those that learn
        assert metrics["behaviour_kl"] < 1e-6
        assert metrics["importance_max"] == pytest.approx(1.0, abs=1e-3)


def test_what_older_weights_collected_keeps_its_probabilities_in_every_precision() -> None:
    policy, collector = precise_setup()
    rollout = collector.collect(8)
    rollout["policy_version"][:, :4] = -1
    rollout["sample_log_prob"][:, :4] += 0.5
    metrics = PPO(PPOCfg(**UNCHANGED, mixed_precision="bf16"), policy).update(rollout)
    assert 0.4 < metrics["clip_fraction"] <= 0.5  # half of the ratios are near exp(-0.5), the other half are 1


def test_values_are_clipped_around_those_of_the_same_precision() -> None:
    policy, collector = precise_setup()
    rollout = collector.collect(8)
    algorithm = PPO(PPOCfg(**UNCHANGED, clip_coef=1e-3, mixed_precision="bf16", clip_value_loss=True), policy)
    seen = []
    loss = algorithm._loss

    def watch(batch):
        with algorithm.optimizer.autocast(), torch.no_grad():
            seen.append((policy.evaluate(batch)[2] - batch["value"]).abs().max())
        return loss(batch)

    algorithm._loss = watch
    algorithm.update(rollout)
    assert len(seen) == 4
    assert max(seen) < 1e-5


@pytest.mark.parametrize("memory", [None, {"hidden_size": 8}])
def test_dropout_is_off_while_ratios_are_computed(memory) -> None:
    network = {"type": "mlp", "hidden_sizes": [32, 32], "dropout_p": 0.1}
    policy, collector = precise_setup(actor=network, critic=network, memory=memory)
    metrics = PPO(PPOCfg(**UNCHANGED), policy).update(collector.collect(8))
    assert metrics["approx_kl"] < 1e-6
    assert metrics["clip_fraction"] == 0.0
    assert all(module.training for module in policy.modules())  # imitation, for one, may use it


def test_what_depends_on_the_mode_of_a_module_is_off_while_ratios_are_computed() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    policy, collector = precise_setup()
    policy.actor = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), Noisy(16, 24))
    before = copy.deepcopy(policy.actor[1])
    rollout = collector.collect(8)
    metrics = PPO(PPOCfg(**UNCHANGED), policy).update(rollout)
    assert metrics["approx_kl"] < 1e-6
    assert metrics["clip_fraction"] == 0.0
    assert torch.equal(policy.actor[1].running_mean, before.running_mean)


def test_state_resumes_bitwise() -> None:
    _, policy, rollout = setup()
    rollout = rollout.clone()
    algorithm = PPO(PPOCfg(n_epochs=2, batch_size=16, lr_schedule="adaptive"), policy)
    algorithm.update(rollout)
    saved = copy.deepcopy((policy.state_dict(), algorithm.state_dict()))
    random = torch.get_rng_state()
    algorithm.update(rollout)

    _, other, _ = setup(seed=9)
    resumed = PPO(PPOCfg(n_epochs=2, batch_size=16, lr_schedule="adaptive"), other)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    torch.set_rng_state(random)
    resumed.update(rollout)
    for key, tensor in policy.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key
    assert resumed.optimizer.learning_rate == algorithm.optimizer.learning_rate


def test_update_allocates_no_more_than_minibatches() -> None:
    # Peak memory is the rollout, a few numbers per transition, and one minibatch.
    torch.manual_seed(0)
    env = ScriptedEnv(64)
    policy = make_policy(env)
    rollout = SyncCollector(env, policy).collect(64)
    stored = {leaf.untyped_storage().data_ptr() for leaf in rollout.values(True, True)}
    sizes = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in stored:
                    sizes.append(tensor.numel())
            return out

    with Allocations():
        PPO(PPOCfg(n_epochs=1, batch_size=256), policy).update(rollout)
    assert rollout["observation", "robot", "qpos"].numel() == 64 * 64 * 2
    assert max(sizes) <= max(256 * 16, 64 * 64)


def test_a_policy_without_a_critic_is_refused() -> None:
    """Its values are zero: PPO would learn from returns of nothing but the rewards of one rollout."""
    policy = make_policy(ScriptedEnv(3), "actor_only")
    message = "PPO learns from values, and ActorOnly has none: expected a policy with a critic, such as actor_critic"
    with pytest.raises(ConfigError, match=message):
        PPO(PPOCfg(), policy)
    with pytest.raises(ConfigError, match=message):
        build_algo("ppo", {}, policy)
    assert not GRPO(GRPOCfg(), policy).policy.has_critic


def test_an_auxiliary_loss_teaches_what_only_the_critic_sees() -> None:
    """Its gradient is that of the mean squared error, and reaches the features that the actor uses."""
    _, policy, rollout = setup(critic_obs=["object"], normalize_obs=True, auxiliary_coef=0.5)
    obs, actions = rollout["observation"].reshape(-1), rollout["action"].reshape(48, -1)
    with torch.no_grad():
        policy.evaluate_actions(obs, actions)
    assert policy.take_auxiliary_loss() is None  # nobody learns
    policy.evaluate_actions(obs, actions)
    loss = policy.take_auxiliary_loss()
    assert loss is not None
    assert policy.take_auxiliary_loss() is None
    features, hidden = policy.encoder(obs)
    expected = 0.5 * nn.functional.mse_loss(policy.auxiliary(features), hidden)
    assert torch.allclose(loss, expected)
    weight = policy.auxiliary.weight
    assert torch.allclose(*(torch.autograd.grad(part, weight, retain_graph=True)[0] for part in (loss, expected)))
    algorithm = PPO(PPOCfg(device="cpu", n_epochs=20, batch_size=48, learning_rate=3e-3), policy)
    first = algorithm.update(rollout)["auxiliary_loss"]
    for _ in range(3):
        last = algorithm.update(rollout)["auxiliary_loss"]
    assert last < 0.8 * first
    copy.deepcopy(policy)
    with pytest.raises(ConfigError, match="name it in critic_obs"):
        make_policy(ScriptedEnv(), auxiliary_coef=0.5)
