"""Policies with a decision: it is stored in the rollout and handed back to ``evaluate_actions``."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg
from embodichain.agents.rl.buffer import RolloutBuffer, VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector
from embodichain.agents.rl.models import Policy
from embodichain.agents.rl.utils.ratios import count_ratios, decision_entropy, like, log_ratio, per_decision
from embodichain.envs.wrappers import GroupedEnv
from embodichain.errors import ConfigError, RolloutError
from tests.agents.rl.async_cases import NUM_ENVS, NUM_STEPS, Env, make_env
from tests.agents.rl.test_checkpoint import same

pytestmark = pytest.mark.usefixtures("one_thread")


class Mixture(Policy):
    """Draws one of two Gaussians, then an action from it: the action alone does not tell which it was.

    Its log-probability has two factors, that of the component and that of the action given the component.
    """

    has_decision = True

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.means, self.value = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)

    def get_action(self, obs: TensorDictBase, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        return self.decide(obs, deterministic)[:3]

    def decide(self, obs: TensorDictBase, deterministic: bool = False):
        seen = obs["robot", "qpos"]
        drawn = torch.rand(seen.shape[0], generator=self.generator)
        component = (drawn < self.logits(seen).softmax(-1)[:, 1]).long()
        noise = torch.randn(seen.shape[0], 1, generator=self.generator)
        action = self.means(seen).gather(1, component.unsqueeze(1)) + noise
        decision = TensorDict({"component": component, "drawn": {"noise": noise}}, [seen.shape[0]])
        log_prob, _, value = self.evaluate_actions(obs, action, decision)
        return action, log_prob, value, decision

    def get_value(self, obs: TensorDictBase) -> Tensor:
        return self.value(obs["robot", "qpos"]).squeeze(-1)

    def evaluate_actions(self, obs: TensorDictBase, actions: Tensor, decision: TensorDictBase | None = None):
        seen, component = obs["robot", "qpos"], decision["component"].unsqueeze(1)
        of_component = self.logits(seen).log_softmax(-1).gather(1, component)
        error = actions - self.means(seen).gather(1, component)
        of_action = -0.5 * error.square() - 0.5 * math.log(2.0 * math.pi)
        entropy = torch.zeros_like(of_action).expand(-1, 2).unsqueeze(1)
        return torch.stack([of_component, of_action], dim=-1), entropy, self.get_value(obs)


def make_mixture(seed: int = 0) -> Mixture:
    torch.manual_seed(seed)
    return Mixture()


def make_learner(name: str, **settings) -> PPO | GRPO:
    common = {"batch_size": 8, "n_epochs": 2, "learning_rate": 1e-2}
    if name == "ppo":
        return PPO(PPOCfg(**common | settings), make_mixture())
    return GRPO(GRPOCfg(**common | {"group_size": 2, "kl_coef": 0.01} | settings), make_mixture())


def weights(algorithm) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in algorithm.policy.state_dict().items()}


def test_a_rollout_keeps_what_was_decided():
    policy = make_mixture()
    rollout = SyncCollector(make_env()(), policy).collect(NUM_STEPS)
    assert rollout["decision", "component"].shape == (NUM_ENVS, NUM_STEPS)
    assert rollout["decision", "component"].dtype == torch.int64
    assert set(rollout["decision", "component"].unique().tolist()) == {0, 1}
    assert rollout["sample_log_prob"].shape == (NUM_ENVS, NUM_STEPS, 1, 2)
    mean = policy.means(rollout["observation", "robot", "qpos"])
    chosen = mean.gather(-1, rollout["decision", "component"].unsqueeze(-1))
    torch.testing.assert_close(rollout["action"], chosen + rollout["decision", "drawn", "noise"])


def test_forward_writes_it_beside_the_action():
    policy, env = make_mixture(), make_env()()
    written = policy(TensorDict({"observation": env.reset(seed=0)[0]}, [NUM_ENVS]))
    assert written["decision", "component"].shape == (NUM_ENVS,)
    log_prob = policy.evaluate(written)[0]
    assert torch.equal(log_prob, written["sample_log_prob"])


def test_policies_without_one_have_none_of_it():
    from tests.agents.rl.helpers import make_policy

    env = make_env()()
    rollout = SyncCollector(env, make_policy(env)).collect(2)
    assert "decision" not in rollout.keys()  # noqa: SIM118
    assert make_policy(env).decide(env.reset(seed=0)[0])[3] is None


@pytest.mark.parametrize("level", ["chunk", "action", "token", "denoising_step"])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_unchanged_weights_have_a_ratio_of_one(name, level):
    algorithm = make_learner(name, log_prob_per=level, n_epochs=1, batch_size=10**6)
    collector = SyncCollector(make_env()(), algorithm.policy, start_rollout=algorithm.start_rollout)
    before = weights(algorithm)
    measures = algorithm.update(collector.collect(NUM_STEPS))
    assert measures["approx_kl"] == 0.0
    assert measures["clip_fraction"] == 0.0
    assert not same(before, weights(algorithm))


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_no_lag_is_the_synchronous_algorithm_bit_by_bit(name, worker):
    sync, other = make_learner(name), make_learner(name)
    collector = SyncCollector(make_env()(), sync.policy, start_rollout=sync.start_rollout)
    collector.reset(seed=3)
    torch.manual_seed(1)
    expected = []
    for _ in range(3):
        rollout = collector.collect(NUM_STEPS)
        expected.append(rollout.clone())
        sync.update(rollout)
    cfg = AsyncCfg(num_steps=NUM_STEPS, max_policy_lag=0, worker=worker)
    buffer = VLABuffer(4 * NUM_ENVS * NUM_STEPS)
    collector = AsyncCollector(make_env(), other.policy, buffer, cfg=cfg, start_rollout=other.start_rollout)
    collector.reset(seed=3)
    torch.manual_seed(1)
    with collector:
        for wanted in expected:
            rollout = collector.collect()
            assert same(rollout["decision"].to_dict(), wanted["decision"].to_dict())
            assert torch.equal(rollout["sample_log_prob"], wanted["sample_log_prob"])
            other.update(rollout)
            collector.publish()
    assert same(weights(sync), weights(other))


def test_old_rollouts_are_valued_again_with_what_was_decided():
    algorithm = make_learner("ppo", correction="decoupled", advantage_estimator="vtrace", log_prob_per="token")
    rollout = SyncCollector(make_env()(), algorithm.policy).collect(NUM_STEPS).clone()
    first = algorithm.update(rollout.clone())
    assert first["behaviour_kl"] == 0.0
    second = algorithm.update(rollout)
    assert 0.0 < second["behaviour_kl"] < 1.0


def test_groups_that_take_turns_are_joined():
    policy = make_mixture()
    env = GroupedEnv([Env(ends=6, limit=4), Env(ends=6, limit=4)])
    rollout = SyncCollector(env, policy, pipeline_stages=2).collect(NUM_STEPS)
    assert rollout["decision", "component"].shape == (2 * NUM_ENVS, NUM_STEPS)
    again = policy.evaluate(rollout.select("observation", "action", "decision").reshape(-1))[0]
    torch.testing.assert_close(again.view_as(rollout["sample_log_prob"]), rollout["sample_log_prob"])


def step_parts(decision) -> dict[str, Tensor]:
    zeros = torch.zeros(2)
    parts = {"action": torch.zeros(2, 1), "reward": zeros, "done": zeros.bool(), "value": zeros, "logprob": zeros}
    return parts | {"decision": decision}


@pytest.mark.parametrize(
    ("decision", "named"),
    [
        (
            TensorDict({"tokens": torch.zeros(2, 4)}, [2]),
            r"expected \{'tokens': \[2, 3\]\}.*got \{'tokens': \[2, 4\]\}",
        ),
        (TensorDict({"other": torch.zeros(2, 3)}, [2]), r"got \{'other'"),
        (TensorDict({"tokens": torch.zeros(3, 3)}, [3]), r"expected a TensorDict \[2\], got \[3\]"),
        (torch.zeros(2, 3), r"expected a TensorDict \[2\], got Tensor"),
        (None, r"got \{\}"),
    ],
)
def test_a_decision_of_another_shape_is_refused(decision, named):
    buffer = RolloutBuffer(2, 2)
    obs = torch.zeros(2, 3)
    good = TensorDict({"tokens": torch.zeros(2, 3)}, [2])
    buffer.add(obs, **step_parts(good))
    buffer.add(obs, **step_parts(good))
    buffer.finalize()
    buffer.clear()
    with pytest.raises(RolloutError, match="decision: .*" + named):
        buffer.add(obs, **step_parts(decision))


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_rollout_without_what_was_decided_is_refused(name):
    algorithm = make_learner(name)
    rollout = SyncCollector(make_env()(), algorithm.policy).collect(NUM_STEPS)
    with pytest.raises(RolloutError, match="the rollout lacks 'decision'"):
        algorithm.update(rollout.exclude("decision"))


def test_a_recurrent_policy_with_one_is_refused():
    policy = make_mixture()
    policy.is_recurrent = True
    for take in (lambda: PPO(PPOCfg(), policy), lambda: SyncCollector(make_env()(NUM_ENVS), policy)):
        with pytest.raises(ConfigError, match="Mixture sets both is_recurrent and has_decision"):
            take()


def test_ratios_of_factors_are_those_written_out_by_hand():
    new, old = torch.randn(2, 3, 2), torch.randn(2, 3, 2)
    batch = TensorDict({"num_actions": torch.tensor([3, 1])}, [2])
    d = new - old
    expected = {
        "chunk": torch.stack([d[0].sum(), d[1, 0].sum()]),
        "action": torch.stack([d[0].sum(-1), torch.tensor([d[1, 0].sum(), 0.0, 0.0])]),
        "token": torch.stack([d[0], torch.cat([d[1, :1], torch.zeros(2, 2)])]),
    }
    for level, wanted in expected.items():
        ratio = log_ratio(new, old, batch, level)
        torch.testing.assert_close(ratio, wanted)
        assert like(torch.ones(2), ratio).shape == (2, *[1] * (ratio.ndim - 1))
    torch.testing.assert_close(per_decision(new, batch), torch.stack([new[0].mean(), new[1, 0].mean()]))
    entropy = decision_entropy(new, batch, "action")
    torch.testing.assert_close(entropy, torch.stack([new[0].sum(-1).mean(), new[1, 0].sum()]))
    assert [float(x) for x in count_ratios(new, batch, "token")] == [6.0, 2.0]
    assert [float(x) for x in count_ratios(new, batch, "action")] == [3.0, 1.0]
    assert count_ratios(new, batch, "chunk") == 1.0
    whole = torch.randn(2, 1, 5)  # a chain that chooses the chunk as a whole: all of it counts
    torch.testing.assert_close(log_ratio(whole, torch.zeros(2, 1, 5), batch, "chunk"), whole.sum((1, 2)))
