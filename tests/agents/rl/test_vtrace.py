"""V-trace against its definition, number by number, and against GAE where they must agree."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.rl.algo.advantages import compute_gae, compute_vtrace, next_values

ENVS, STEPS, GAMMA, LAMBDA = 3, 7, 0.9, 0.8
ORDER = ("reward", "value", "now", "next_value", "log_importance", "terminated", "done")


@pytest.fixture
def rollout():
    random = torch.Generator().manual_seed(0)
    shape = [ENVS, STEPS]
    terminated = torch.rand(shape, generator=random) < 0.15
    truncated = torch.rand(shape, generator=random) < 0.15
    parts = {name: torch.randn(shape, generator=random) for name in ("reward", "value", "next_value", "now")}
    parts["log_importance"] = 0.7 * torch.randn(shape, generator=random)
    data = TensorDict({**parts, "terminated": terminated, "truncated": truncated}, shape)
    data["done"] = terminated | truncated
    data["policy_version"] = torch.zeros(shape, dtype=torch.int64)
    data["next_value"] = data["next_value"] * ~terminated
    return data


def vtrace(data, log_importance, gamma, clip=(1.0, 1.0)):
    """Estimate with the values of now."""
    present = data.clone()
    present["value"], present["next_value"] = data["now"], next_values(data, data["now"])
    return compute_vtrace(present, log_importance, data["reward"], gamma, LAMBDA, clip)


def by_definition(data, rho_max, c_max):
    """The sum of the paper: v_s = V(x_s) + sum_t gamma^(t-s) (prod_{s<=i<t} c_i) rho_t delta_t, in plain numbers."""
    rows = [one_env({name: data[name][env].tolist() for name in ORDER}, rho_max, c_max) for env in range(ENVS)]
    return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])


def one_env(data, rho_max, c_max):
    reward, now, ended, terminated = data["reward"], data["now"], data["done"], data["terminated"]
    ratio = [math.exp(x) for x in data["log_importance"]]
    inside = [t + 1 < STEPS and not ended[t] for t in range(STEPS)]
    edge = [data["next_value"][t] + now[t] - data["value"][t] for t in range(STEPS)]
    following = [now[t + 1] if inside[t] else edge[t] for t in range(STEPS)]
    targets = []
    for s in range(STEPS):
        total, weight = now[s], 1.0
        for t in range(s, STEPS):
            bootstrap = 0.0 if terminated[t] else GAMMA * following[t]
            total += weight * min(rho_max, ratio[t]) * (reward[t] + bootstrap - now[t])
            if ended[t]:
                break
            weight *= GAMMA * LAMBDA * min(c_max, ratio[t])
        targets.append(total)
    advantages = []
    for t in range(STEPS):
        after = 0.0 if terminated[t] else following[t]
        if inside[t]:
            after = LAMBDA * targets[t + 1] + (1 - LAMBDA) * now[t + 1]
        advantages.append(reward[t] + GAMMA * after - now[t])
    return advantages, targets


@pytest.mark.parametrize("clip", [(1.0, 1.0), (2.0, 0.5), (1e9, 1e9)])
def test_numbers_are_those_of_the_definition(rollout, clip):
    advantage, returns = vtrace(rollout, rollout["log_importance"], GAMMA, clip)
    expected_advantage, expected_returns = by_definition(rollout, *clip)
    assert torch.allclose(advantage, expected_advantage, atol=1e-5)
    assert torch.allclose(returns, expected_returns, atol=1e-5)


def test_on_policy_it_is_gae(rollout):
    on_policy = torch.zeros(ENVS, STEPS)
    value = rollout["now"]
    reached = next_values(rollout, value)
    got = vtrace(rollout, on_policy, GAMMA)
    expected = compute_gae(rollout["reward"], value, reached, rollout["terminated"], rollout["done"], GAMMA, LAMBDA)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_discounts_may_differ_from_decision_to_decision(rollout):
    discount = torch.full((ENVS, STEPS), GAMMA)
    same = vtrace(rollout, rollout["log_importance"], discount)
    expected = by_definition(rollout, 1.0, 1.0)
    assert torch.allclose(same[0], expected[0], atol=1e-5)


def test_values_of_states_that_are_not_stored_follow_their_neighbours(rollout):
    done, terminated = rollout["done"], rollout["terminated"]
    rollout["policy_version"][:, 3:] = 1
    reached = next_values(rollout, rollout["now"])
    gained = rollout["now"] - rollout["value"]
    last = done.clone()
    last[:, -1] = True
    late = torch.arange(STEPS) >= 3
    assert (last & ~terminated & ~late).any()
    for cut, expected in (
        (last & ~terminated & late, rollout["next_value"] + gained),
        (last & ~terminated & ~late, rollout["next_value"]),  # other weights valued what was reached
        (terminated, torch.zeros(ENVS, STEPS)),
    ):
        assert cut.any()
        assert torch.equal(reached[cut], expected[cut])
    inside = ~done[:, :-1]
    assert torch.equal(reached[:, :-1][inside], rollout["now"][:, 1:][inside])
