"""Replayed gradient steps, as far as they can be tested without a GPU: their data, their order and their step size."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.rl.algo.gradient_steps import (
    LEARNING_RATE_STEP,
    GraphedSteps,
    PolicyOptimizer,
    StaticRows,
    adapted_rate,
)
from embodichain.agents.rl.algo.grpo import GRPO, GRPOCfg
from embodichain.agents.rl.buffer.rollout_buffer import Minibatches
from embodichain.agents.rl.models import build_policy

ENVS, STEPS = 6, 4


def rollout(seed: int = 0, num_steps: int = STEPS) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    parts = {
        "observation": {"a": torch.randn(num_steps, ENVS, 3, generator=generator)},
        "action": torch.randn(num_steps, ENVS, 2, generator=generator),
        "advantage": torch.randn(num_steps, ENVS, generator=generator),
        "sample_log_prob": torch.randn(num_steps, ENVS, generator=generator) - 3.0,
        "valid": torch.rand(num_steps, ENVS, generator=generator) > 0.3,
    }
    return TensorDict(parts, batch_size=[num_steps, ENVS]).transpose(0, 1)


def test_data_stay_where_they_are_from_update_to_update() -> None:
    first = Minibatches(rollout(0), 8)
    store = StaticRows(first, own=False)
    places = {path: part.data_ptr() for path, part in store._parts.items()}
    second = Minibatches(rollout(1), 8)
    assert store.take(second)
    assert {path: part.data_ptr() for path, part in store._parts.items()} == places
    chosen = torch.tensor([3, 0, 17])
    assert (store.gather(chosen) == second.gather(chosen)).all()
    assert not store.take(Minibatches(rollout(0, num_steps=5), 8))
    assert not store.take(Minibatches(rollout(0).exclude("action"), 8))


def test_sequences_are_gathered_from_the_table_too() -> None:
    data = rollout(0)
    data["done"], data["hidden"] = data["valid"], torch.randn(ENVS, STEPS, 2, 5)
    minibatches = Minibatches(data, 8, sequence_length=2)
    store, chosen = StaticRows(minibatches, own=False), minibatches.draw()[0]
    assert store.gather(chosen).batch_size == (2, chosen.numel())
    assert (store.gather(chosen) == minibatches.gather(chosen)).all()


def test_large_data_are_looked_up_where_they_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodichain.agents.rl.algo.gradient_steps._SMALL", 100)
    monkeypatch.setattr("embodichain.agents.rl.algo.gradient_steps._NARROW", 1)
    data = rollout(0)
    store = StaticRows(Minibatches(data, 8), own=False)
    assert store._parts["action",].data_ptr() == data["action"].data_ptr()
    assert store._parts["valid",].data_ptr() != data["valid"].data_ptr()
    assert store.take(Minibatches(data, 8))
    assert not store.take(Minibatches(rollout(1), 8))  # it is somewhere else
    moving = StaticRows(Minibatches(rollout(1), 8), own=True)
    assert moving.take(Minibatches(rollout(2), 8))


def test_minibatches_filled_up_give_the_same_gradient() -> None:
    torch.manual_seed(0)
    policy = build_policy({"name": "actor_only"}, 3, 2, "cpu")
    algorithm = GRPO(GRPOCfg(group_size=2, kl_coef=0.0, ent_coef=0.1), policy)
    data = rollout(0)
    data["observation"] = data["observation", "a"]
    minibatches = Minibatches(data, 10, valid=data["valid"])
    steps = GraphedSteps(algorithm._step, algorithm.optimizer, "valid")
    rows = steps._load(minibatches)
    chosen = minibatches.draw()[0]
    filled = torch.full((minibatches.largest,), -1)
    filled[: chosen.numel()] = chosen
    plain, padded = minibatches.gather(chosen), steps._gather(rows, filled)
    assert padded.batch_size[0] == 10 > chosen.numel()
    for a, b in zip(_gradient(algorithm, plain), _gradient(algorithm, padded), strict=True):
        torch.testing.assert_close(a, b)


def _gradient(algorithm: GRPO, batch: TensorDict) -> list[Tensor]:
    loss, measures = algorithm._loss(batch)
    return [*torch.autograd.grad(loss, algorithm.optimizer.parameters), loss.detach(), *measures.values()]


@pytest.mark.parametrize("kl", [0.0, 0.004, 0.0051, 0.01, 0.0199, 0.021, 1.0])
@pytest.mark.parametrize("bounds", [(1e-5, 1e-2), (1e-7, 1.0), (2e-4, 3e-4)])
@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1.2e-5, 1e-3, 9e-3, 1e-2, 2e-2])
def test_the_step_size_on_a_device_is_that_of_the_host(rate: float, bounds: tuple[float, float], kl: float) -> None:
    optimizer = PolicyOptimizer(torch.nn.Linear(2, 2), rate, 1.0)
    optimizer.adapt_learning_rate(torch.tensor(kl), 0.01, bounds)
    found = adapted_rate(torch.tensor(rate), torch.tensor(kl), 0.01, bounds)
    assert float(found) == pytest.approx(optimizer.learning_rate, rel=1e-6)
    # whatever the bounds are, too large a change never raises the rate, and too small a one never lowers it
    change = optimizer.learning_rate / rate
    least, most = (1.0 if kl <= 0.02 else 1 / LEARNING_RATE_STEP), (1.0 if kl >= 0.005 else LEARNING_RATE_STEP)
    assert least * 0.9999 <= change <= most * 1.0001
    if bounds[0] * 1.5 < rate < bounds[1] / 1.5 and not 0.005 <= kl <= 0.02:
        assert abs(change - 1.0) > 0.3


def test_an_optimizer_continues_from_a_state_of_another_device() -> None:
    """A state from a GPU has a recorded Adam and its step counts there; on the CPU it becomes an ordinary one."""
    ours, theirs = (PolicyOptimizer(torch.nn.Linear(2, 2), 1e-3, 1.0) for _ in range(2))
    for parameter in ours.parameters:
        parameter.grad = torch.ones_like(parameter)
    ours.step()
    state = copy.deepcopy(ours.state_dict())
    assert isinstance(state["adam"]["param_groups"][0]["lr"], float)
    state["adam"]["param_groups"][0] |= {"capturable": True, "lr": 5e-4}
    theirs.load_state_dict(state)
    assert theirs.learning_rate == 5e-4
    assert theirs.adam.param_groups[0]["capturable"] is False
    for parameter in theirs.parameters:
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
