"""What a policy returns is checked where it acts: one message that names the method, whichever collector asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector
from embodichain.agents.rl.collector.acting import Decider
from embodichain.envs.wrappers import GroupedEnv
from embodichain.errors import PolicyContractError
from tests.agents.rl.async_cases import NUM_ENVS, make_env
from tests.agents.rl.helpers import ScriptedEnv
from tests.agents.rl.test_decision import Mixture

pytestmark = pytest.mark.usefixtures("one_thread")

N = NUM_ENVS
Parts = tuple[Tensor, Tensor, Tensor, TensorDict]


def decision_of(parts: Parts, **changes: Any) -> TensorDict:
    return TensorDict({**parts[3].to_dict(), **changes}, parts[3].batch_size)


WRONG: dict[str, tuple[Callable[[Parts], Any], str]] = {
    "shape": (lambda p: (*p[:3], p[3][1:]), f"a decision of batch [{N - 1}], expected a TensorDict of batch [{N}]"),
    "scalar": (
        lambda p: (*p[:3], TensorDict({"component": p[3]["component"].sum()}, [])),
        f"a decision of batch [], expected a TensorDict of batch [{N}]",
    ),
    "dict": (lambda p: (*p[:3], p[3].to_dict()), f"a dict as decision, expected a TensorDict of batch [{N}]"),
    "none": (lambda p: (*p[:3], None), f"None as decision, expected a TensorDict of batch [{N}]"),
    "text": (lambda p: (*p[:3], decision_of(p, words="go")), "with a str as 'words', expected tensors only"),
    "triple": (lambda p: p[:3], "3 values, expected (action, log_prob, value, decision)"),
    "list": (list, "a list, expected (action, log_prob, value, decision)"),
    "logp": (
        lambda p: (p[0], torch.zeros(N, 3), *p[2:]),
        f"log_prob of shape [{N}, 3], expected [{N}] or [{N}, 1, factors]",
    ),
    "value": (lambda p: (*p[:2], p[2][:, None], p[3]), f"value of shape [{N}, 1], expected [{N}] or []"),
    "no tensor": (lambda p: (None, *p[1:]), f"None as action, expected a tensor [{N}, ...]"),
}
CHANGED: dict[str, tuple[Callable[[Parts], Any], str]] = {
    "changes": (lambda p: (*p[:3], p[3].rename_key_("component", "other")), f"decision of {{'other': 'int64 [{N}]'"),
    "dtype": (lambda p: (*p[:3], decision_of(p, component=p[3]["component"].float())), f"'float32 [{N}]'"),
    "width": (lambda p: (*p[:3], decision_of(p, component=p[3]["component"][:, None])), f"'int64 [{N}, 1]'"),
    "more": (lambda p: (*p[:3], decision_of(p, more=p[3]["component"])), f"'more': 'int64 [{N}]'"),
    "factors": (
        lambda p: (p[0], p[1][..., :1], *p[2:]),
        f"log_prob of shape [{N}, 1, 1], expected [{N}, 1, 2], as in the first step",
    ),
    **{name: WRONG[name] for name in ("shape", "dict", "none", "triple")},
}


class Group(ScriptedEnv):
    action_manager = None


class Broken(Mixture):
    """Returns something wrong from its call number ``first`` on."""

    def __init__(self, spoil: Callable[[Parts], Any], first: int = 1) -> None:
        super().__init__()
        self.spoil, self.first, self.calls = spoil, first, 0

    def decide(self, obs: TensorDictBase, deterministic: bool = False) -> Any:
        self.calls += 1
        parts = super().decide(obs, deterministic)
        return parts if self.calls < self.first else self.spoil(parts)


def spoil_shape(parts: Parts) -> Any:
    """Module level, as a worker process unpickles it."""
    return *parts[:3], parts[3][1:]


@pytest.mark.parametrize(("spoil", "message"), WRONG.values(), ids=WRONG)
def test_the_first_output_is_checked(spoil, message):
    policy = Broken(spoil)
    with pytest.raises(PolicyContractError) as error:
        SyncCollector(make_env()(), policy).collect(4)
    assert str(error.value).startswith("Broken.decide returned ")
    assert message in str(error.value)
    assert policy.calls == 1


@pytest.mark.parametrize(("spoil", "message"), CHANGED.values(), ids=CHANGED)
def test_later_outputs_are_compared_with_the_first(spoil, message):
    policy = Broken(spoil, first=4)
    with pytest.raises(PolicyContractError) as error:
        SyncCollector(make_env()(), policy).collect(6)
    assert message in str(error.value)
    assert policy.calls == 4
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("first", [1, 4])
def test_pipelined_groups_are_checked(first):
    env = GroupedEnv([Group(1), Group(2)])
    policy = Broken(spoil_shape, first)
    collector = SyncCollector(env, policy, pipeline_stages=2)
    with pytest.raises(PolicyContractError, match=r"batch \[[01]\], expected a TensorDict of batch \[[12]\]"):
        collector.collect(4)


def test_groups_of_other_sizes_are_alike():
    rollout = SyncCollector(GroupedEnv([Group(1), Group(2)]), Mixture(), pipeline_stages=2).collect(4)
    assert rollout["decision", "component"].shape == (3, 4)


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_an_asynchronous_collector_has_the_same_message(worker):
    cfg = AsyncCfg(num_steps=4, max_policy_lag=1, worker=worker)
    collector = AsyncCollector(make_env(), Broken(spoil_shape), VLABuffer(64), cfg=cfg)
    with collector, pytest.raises(PolicyContractError) as error:
        collector.collect()
    expected = f"Broken.decide returned a decision of batch [{N - 1}], expected a TensorDict of batch [{N}]"
    assert str(error.value) == expected


class Plain(Mixture):
    """Has no decision; ``wrong`` is what ``get_action`` returns."""

    has_decision = False

    def __init__(self, spoil: Callable[[Any], Any]) -> None:
        super().__init__()
        self.spoil = spoil

    def get_action(self, obs: TensorDictBase, deterministic: bool = False) -> Any:
        action, _, value, _ = Mixture.decide(self, obs, deterministic)
        return self.spoil((action, value, value))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p[:2], "Plain.get_action returned 2 values, expected (action, log_prob, value)"),
        (lambda p: (*p, None), "Plain.get_action returned 4 values, expected (action, log_prob, value)"),
        (
            lambda p: (p[0], p[1][:, None], p[2]),
            f"Plain.get_action returned log_prob of shape [{N}, 1], expected [{N}]",
        ),
        (lambda p: (p[0][1:], *p[1:]), f"Plain.get_action returned action of shape [{N - 1}, 1], expected [{N}, ...]"),
    ],
)
def test_the_first_output_without_a_decision_is_checked(spoil, message):
    with pytest.raises(PolicyContractError) as error:
        SyncCollector(make_env()(), Plain(spoil)).collect(2)
    assert message in str(error.value)


def test_without_a_decision_only_the_first_output_is_checked():
    policy, obs = Plain(lambda parts: parts), make_env()().reset(seed=0)[0]
    decider = Decider(policy, torch.device("cpu"))
    decider.decide(obs, None, deferred=False, kept=False)
    assert not decider._check.is_due
    assert decider.decide(obs, None, deferred=False, kept=False).decision is None


class Summed(Mixture):
    """Sums the factors of actions when they are evaluated, but not when they are chosen."""

    choosing = False

    def decide(self, obs: TensorDictBase, deterministic: bool = False) -> Any:
        self.choosing = True
        try:
            return super().decide(obs, deterministic)
        finally:
            self.choosing = False

    def evaluate_actions(self, obs: TensorDictBase, actions: Tensor, decision: TensorDictBase | None = None) -> Any:
        log_prob, entropy, value = super().evaluate_actions(obs, actions, decision)
        return log_prob if self.choosing else log_prob.sum((1, 2)), entropy, value


def test_evaluated_log_probs_have_the_shape_of_the_stored_ones():
    policy = Summed()
    rollout = SyncCollector(make_env()(), policy).collect(3)
    message = f"Summed.evaluate_actions returned log_prob of shape [{3 * N}], expected [{3 * N}, 1, 2], as it was"
    with pytest.raises(PolicyContractError) as error:
        policy.evaluate(rollout.reshape(-1))
    assert message in str(error.value)
