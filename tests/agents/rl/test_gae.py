"""Advantages against numbers computed by hand, a plain loop, and TorchRL."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from embodichain.agents.rl.algo import compute_gae
from embodichain.agents.rl.algo.advantages import TimeMajor, _accumulate
from embodichain.errors import RolloutError


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def flags(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bool)


def random_rollout(num_envs: int = 5, num_steps: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (num_envs, num_steps)
    terminated = torch.rand(shape, generator=g) < 0.1
    done = terminated | (torch.rand(shape, generator=g) < 0.1)
    reward, value, next_value = (torch.randn(shape, generator=g) for _ in range(3))
    # Where an episode goes on, the next value is the value of the next step.
    next_value[:, :-1] = torch.where(done[:, :-1], next_value[:, :-1], value[:, 1:])
    return {"reward": reward, "value": value, "next_value": next_value, "terminated": terminated, "done": done}


def loop(gamma: float, lam: float, reward, value, next_value, terminated, done) -> torch.Tensor:
    """The definition, one number at a time, in float64."""
    advantage = torch.zeros(reward.shape, dtype=torch.float64)
    for env in range(reward.shape[0]):
        following = 0.0
        for t in reversed(range(reward.shape[1])):
            alive = 0.0 if terminated[env, t] else 1.0
            delta = float(reward[env, t]) + gamma * float(next_value[env, t]) * alive - float(value[env, t])
            following = delta + (0.0 if done[env, t] else gamma * lam * following)
            advantage[env, t] = following
    return advantage


def test_by_hand_without_an_end() -> None:
    # deltas: 1 + 0.5*3 - 2 = 0.5 ; 2 + 0.5*4 - 3 = 1 ; 3 + 0.5*8 - 4 = 3, with gamma * lambda = 0.25
    advantage, returns = compute_gae(
        row(1, 2, 3), row(2, 3, 4), row(3, 4, 8), flags(0, 0, 0), flags(0, 0, 0), gamma=0.5, gae_lambda=0.5
    )
    assert torch.allclose(advantage, row(0.5 + 0.25 * 1.75, 1.75, 3.0))
    assert torch.allclose(returns, advantage + row(2, 3, 4))


def test_by_hand_a_termination_does_not_bootstrap_and_a_time_limit_does() -> None:
    common = (row(1, 1, 1), row(0, 0, 0), row(10, 10, 10))
    terminated, _ = compute_gae(*common, flags(0, 1, 0), flags(0, 1, 0), gamma=0.5, gae_lambda=1.0)
    # t=2: 1 + 5 = 6; t=1 ends: 1; t=0: 1 + 5 + 0.5 * 1 = 6.5
    assert torch.allclose(terminated, row(6.5, 1.0, 6.0))
    truncated, _ = compute_gae(*common, flags(0, 0, 0), flags(0, 1, 0), gamma=0.5, gae_lambda=1.0)
    # t=1 is cut: 1 + 5 = 6, and nothing of t=2 reaches it; t=0: 6 + 0.5 * 6 = 9
    assert torch.allclose(truncated, row(9.0, 6.0, 6.0))


def test_one_step_td_and_monte_carlo() -> None:
    data = random_rollout()
    td, _ = compute_gae(**data, gamma=0.9, gae_lambda=0.0)
    delta = data["reward"] + 0.9 * data["next_value"] * ~data["terminated"] - data["value"]
    assert torch.allclose(td, delta, atol=1e-6)
    never = torch.zeros(1, 4, dtype=torch.bool)
    _, returns = compute_gae(row(1, 2, 4, 8), row(5, 6, 7, 9), row(6, 7, 9, 3), never, never, gamma=1.0, gae_lambda=1.0)
    assert torch.allclose(returns, row(18, 17, 15, 11))  # rewards to come plus the last value, whatever the values are


@pytest.mark.parametrize("contiguous", [True, False])
def test_equals_the_definition(contiguous: bool) -> None:
    data = random_rollout()
    if not contiguous:  # as collectors store it: time-major underneath
        data = {name: tensor.t().contiguous().t() for name, tensor in data.items()}
    advantage, returns = compute_gae(**data, gamma=0.97, gae_lambda=0.9)
    expected = loop(0.97, 0.9, **data)
    assert torch.allclose(advantage.double(), expected, atol=1e-5)
    assert torch.allclose(returns.double(), expected + data["value"], atol=1e-5)
    assert advantage.shape == data["reward"].shape


def test_the_path_for_other_devices_gives_the_same_numbers() -> None:
    data = random_rollout(7, 33)
    expected, _ = compute_gae(**data, gamma=0.99, gae_lambda=0.95)
    rows = [data[name].t().contiguous() for name in ("reward", "value", "next_value", "terminated", "done")]
    advantage, _ = _accumulate(TimeMajor(*rows, 0.99, 0.99 * 0.95))
    assert torch.allclose(advantage.t(), expected, atol=1e-6)


@pytest.mark.extra("peers")
def test_equals_torchrl_on_random_terminations_and_truncations() -> None:
    from torchrl.objectives.value import functional

    data = random_rollout(16, 100, seed=3)
    advantage, returns = compute_gae(**data, gamma=0.99, gae_lambda=0.95)
    columns = {name: tensor.unsqueeze(-1) for name, tensor in data.items()}
    expected, target = functional.generalized_advantage_estimate(
        0.99,
        0.95,
        columns["value"],
        columns["next_value"],
        columns["reward"],
        columns["done"],
        terminated=columns["terminated"],
    )
    assert torch.allclose(advantage, expected.squeeze(-1), atol=1e-5)
    assert torch.allclose(returns, target.squeeze(-1), atol=1e-5)


def test_a_single_step_and_a_graph_are_fine() -> None:
    value = row(2.0).requires_grad_()
    advantage, _ = compute_gae(row(1), value, row(4), flags(0), flags(0), gamma=0.5, gae_lambda=0.9)
    assert advantage.tolist() == [[1.0]]
    assert not advantage.requires_grad


@pytest.mark.parametrize("name", ["reward", "value", "next_value", "terminated", "done"])
def test_wrong_shapes_name_the_tensor(name: str) -> None:
    data = random_rollout(2, 3)
    data[name] = data[name].reshape(-1)
    expected = "reward: expected" if name == "reward" else f"{name}: expected .* got \\[6\\]"
    with pytest.raises(RolloutError, match=expected):
        compute_gae(**data, gamma=0.99, gae_lambda=0.95)


def test_is_about_as_fast_as_a_bare_numpy_loop() -> None:
    data = {name: tensor.t().contiguous().t() for name, tensor in random_rollout(1024, 256).items()}
    reward, value, next_value, done = (data[n].t().numpy() for n in ("reward", "value", "next_value", "done"))
    ended = done.astype(np.float32)

    def numpy_loop() -> None:
        alive = 1 - ended
        advantage = reward + 0.99 * alive * next_value - value
        decay = np.float32(0.99 * 0.95) * alive
        for t in range(254, -1, -1):
            advantage[t] += decay[t] * advantage[t + 1]

    def best(action, repeats: int = 15) -> float:
        times = []
        for _ in range(repeats):
            begin = time.process_time()  # not what others do meanwhile
            action()
            times.append(time.process_time() - begin)
        return min(times)

    ours = best(lambda: compute_gae(**data, gamma=0.99, gae_lambda=0.95))
    assert ours < 3.0 * best(numpy_loop)  # 1.0 on a quiet machine; the bar leaves room for a busy one
