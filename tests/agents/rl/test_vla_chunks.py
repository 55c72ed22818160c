"""What a learner makes of chunks: returns, discounts and ratios, against sums written out by hand."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg, compute_gae
from embodichain.agents.rl.algo.advantages import reward_and_discount
from embodichain.agents.rl.buffer import count_transitions
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.utils.ratios import decision_entropy, like, log_ratio, per_decision
from tests.agents.rl.vla_cases import chunked_pair

GAMMA, LAMBDA, CHUNK = 0.9, 0.8, 3


def chunk_rollout(num_envs: int = 2, num_steps: int = 5) -> TensorDict:
    draw = torch.Generator().manual_seed(0)
    done = torch.rand(num_envs, num_steps, generator=draw) < 0.4
    taken = torch.where(done, torch.randint(1, CHUNK + 1, done.shape, generator=draw), CHUNK)
    rewards = torch.randn(num_envs, num_steps, CHUNK, generator=draw) * (torch.arange(CHUNK) < taken.unsqueeze(-1))
    terminated = done & (torch.rand(done.shape, generator=draw) < 0.5)
    value, following = (torch.randn(num_envs, num_steps, generator=draw) for _ in range(2))
    parts = {"reward": rewards.sum(-1), "chunk_reward": rewards, "num_actions": taken, "done": done}
    parts |= {"terminated": terminated, "value": value, "next_value": following}
    return TensorDict(parts, [num_envs, num_steps])


def step_by_step_advantage(rollout: TensorDict, env: int) -> list[float]:
    """Advantages of one env, from the definition on single actions: rewards in turn, then the value of what follows."""
    advantage, following = [0.0] * rollout.batch_size[1], 0.0
    for t in reversed(range(rollout.batch_size[1])):
        row = rollout[env, t]
        total, discount = 0.0, 1.0
        for i in range(int(row["num_actions"])):
            total += discount * float(row["chunk_reward"][i])
            discount *= GAMMA
        if not row["terminated"]:
            total += discount * float(row["next_value"])
        delta = total - float(row["value"])
        advantage[t] = delta + (0.0 if row["done"] else discount * LAMBDA * following)
        following = advantage[t]
    return advantage


def test_rewards_are_discounted_inside_a_chunk_and_what_follows_by_its_length():
    rollout = chunk_rollout()
    reward, discount = reward_and_discount(rollout, GAMMA)
    parts = (reward, rollout["value"], rollout["next_value"], rollout["terminated"], rollout["done"])
    advantage, _ = compute_gae(*parts, discount, LAMBDA)
    for env in range(2):
        assert advantage[env].tolist() == pytest.approx(step_by_step_advantage(rollout, env), abs=1e-5)


def test_a_discount_for_each_transition_agrees_with_one_for_all():
    rollout = chunk_rollout()
    parts = [rollout[name] for name in ("reward", "value", "next_value", "terminated", "done")]
    one = compute_gae(*parts, GAMMA, LAMBDA)
    each = compute_gae(*parts, torch.full((2, 5), GAMMA), LAMBDA)
    assert torch.allclose(one[0], each[0], atol=1e-6)


def test_single_actions_are_left_exactly_as_they_are():
    rollout = chunk_rollout().exclude("chunk_reward", "num_actions")
    reward, discount = reward_and_discount(rollout, GAMMA)
    assert reward is rollout["reward"]
    assert discount == GAMMA
    batch, values = rollout.reshape(-1), torch.randn(10)
    assert per_decision(values, batch) is values
    assert decision_entropy(values, batch, "chunk") is values
    assert like(values, values) is values
    assert torch.equal(log_ratio(values, values * 2, batch, "action"), values - values * 2)


@pytest.mark.parametrize("anything", [5.0, float("-inf"), float("nan")])
def test_ratios_count_the_actions_that_were_taken(anything):
    batch = TensorDict({"num_actions": torch.tensor([3, 1])}, [2])
    new, old = torch.tensor([[0.1, 0.2, 0.3], [0.4, anything, anything]]), torch.zeros(2, 3)
    assert log_ratio(new, old, batch, "chunk").tolist() == pytest.approx([0.6, 0.4])
    assert log_ratio(new, old, batch, "action").tolist() == [pytest.approx([0.1, 0.2, 0.3]), pytest.approx([0.4, 0, 0])]
    assert per_decision(new, batch).tolist() == pytest.approx([0.2, 0.4])
    assert decision_entropy(new, batch, "chunk").tolist() == pytest.approx([0.6, 0.4])
    assert decision_entropy(new, batch, "action").tolist() == pytest.approx([0.2, 0.4])


def test_a_rollout_of_chunks_counts_actions():
    env, policy = chunked_pair()
    collector = SyncCollector(env, policy)
    rollout = collector.collect(8)  # 10 steps per episode: chunks of 3, 3, 3 and 1
    assert rollout["action"].shape == (4, 8, 3, 3)
    assert rollout["sample_log_prob"].shape == (4, 8, 3)
    assert rollout["value"].shape == (4, 8)
    assert count_transitions(rollout) == int(rollout["num_actions"].sum())
    assert set(collector.episodes["length"].tolist()) <= {10} | set(range(1, 10))
    assert 10 in collector.episodes["length"].tolist()
    cut = rollout["truncated"] & ~rollout["terminated"]
    assert cut.any()
    assert (rollout["num_actions"][cut] == 1).all()
    assert (rollout["next_value"][cut] != 0).all()  # the value of the state the time limit cut off


def test_discounted_returns_of_chunks_count_action_by_action():
    env, policy = chunked_pair()
    collector = SyncCollector(env, policy, return_discount=GAMMA)
    rollout = torch.cat([collector.collect(4).clone() for _ in range(2)], dim=1)
    assert rollout["done"].any()
    for row in rollout.unbind(0):
        x = 0.0
        for step in row.unbind(0):
            for i in range(int(step["num_actions"])):
                x = float(step["chunk_reward"][i]) + GAMMA * x
            assert float(step["discounted_return"]) == pytest.approx(x, rel=1e-5)
            x *= not step["done"]


def test_the_value_at_a_cut_is_that_of_the_observation_reached_there():
    env, policy = chunked_pair(2)
    seen = []
    step = env.step

    def watch(action):
        result = step(action)
        seen.append(result[4]["final_observation"])
        return result

    env.step = watch
    rollout = SyncCollector(env, policy).collect(4)
    assert rollout["truncated"][:, 3].all()
    assert torch.allclose(rollout["next_value"][:, 3], policy.get_value(seen[3]), atol=1e-6)


@pytest.mark.parametrize("level", ["chunk", "action"])
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_both_algorithms_learn_from_chunks(algo, level):
    torch.manual_seed(0)
    env, policy = chunked_pair()
    if algo == "ppo":
        algorithm = PPO(PPOCfg(n_epochs=2, batch_size=8, log_prob_per=level, ent_coef=0.01), policy)
    else:
        cfg = GRPOCfg(n_epochs=2, batch_size=8, log_prob_per=level, group_size=2, kl_coef=0.1, ent_coef=0.01)
        algorithm = GRPO(cfg, policy)
    before = [p.detach().clone() for p in policy.parameters()]
    collector = SyncCollector(env, policy, start_rollout=algorithm.start_rollout)
    for _ in range(2):
        measures = algorithm.update(collector.collect(4))
    assert all(torch.isfinite(torch.tensor(value)) for value in measures.values())
    changed = [not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True)]
    assert any(changed)
    assert int(policy.version) == 2


@pytest.mark.parametrize("level", ["chunk", "action"])
def test_first_gradient_is_that_of_the_policy_gradient_theorem(level):
    """At unchanged weights the ratio is 1, and the loss has the gradient of ``-A log pi`` over the actions taken."""
    torch.manual_seed(0)
    env, policy = chunked_pair(2)
    algorithm = PPO(PPOCfg(log_prob_per=level, vf_coef=0.0, normalize_advantage=False), policy)
    rollout = SyncCollector(env, policy).collect(4)
    rollout["advantage"], rollout["return"] = torch.randn(2, 4), torch.randn(2, 4)
    batch = rollout.reshape(-1)
    loss, measures = algorithm._loss(batch)
    assert float(measures["approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    (ours,) = torch.autograd.grad(loss, [policy.model.to_action[-1].weight])
    log_prob, _, _ = policy.evaluate(batch)
    taken = (torch.arange(3) < batch["num_actions"].unsqueeze(-1)).float()
    of_decision = (log_prob * taken).sum(-1)
    if level == "action":
        of_decision = of_decision / taken.sum(-1)
    (expected,) = torch.autograd.grad(-(batch["advantage"] * of_decision).mean(), [policy.model.to_action[-1].weight])
    assert torch.allclose(ours, expected, atol=1e-6)
