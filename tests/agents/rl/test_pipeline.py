"""Groups of envs in turn: the same rollouts as one after the other, in less time, and clean ends."""

from __future__ import annotations

import contextlib
import gc
import threading
import time

import pytest
import torch

from embodichain.agents.rl.collector import SyncCollector
from embodichain.envs.wrappers import GroupedEnv
from embodichain.errors import ConfigError
from tests.agents.rl.helpers import LinearPolicy, make_policy
from tests.agents.rl.helpers import ScriptedEnv as PlainEnv
from tests.programs import wait_until


class ScriptedEnv(PlainEnv):
    action_manager = None  # actions are plain tensors here


def grouped(**settings):
    return GroupedEnv([ScriptedEnv(2, seed=group, **settings) for group in range(2)])


def rollouts_alone(policy, count, num_steps, **settings):
    """What each group gives when it is collected from alone."""
    collectors = [SyncCollector(ScriptedEnv(2, seed=group, **settings), policy) for group in range(2)]
    return [[collector.collect(num_steps).clone() for collector in collectors] for _ in range(count)]


@pytest.mark.parametrize("memory", [None, {"hidden_size": 4}, {"type": "lstm", "hidden_size": 4}])
def test_groups_in_turn_give_what_each_gives_alone(memory):
    """With a policy that draws no noise, every number is the same, across the ends of rollouts and episodes."""
    torch.manual_seed(0)
    settings = {"ends": [3, 100], "limit": 5}
    policy = make_policy(ScriptedEnv(2), memory=memory)
    with torch.no_grad():
        policy.head.log_std.fill_(-40.0)  # noise of 1e-18 changes nothing
    expected = rollouts_alone(policy, 2, 7, **settings)
    collector = SyncCollector(grouped(**settings), policy, pipeline_stages=2)
    for parts in expected:
        rollout = collector.collect(7)
        assert rollout.batch_size == (4, 7)
        for name, leaf in torch.cat(parts).exclude("sample_log_prob").items(include_nested=True, leaves_only=True):
            assert torch.allclose(rollout[name].float(), leaf.float(), atol=1e-6), name
    assert collector.statistics()["episode/count"] == float(len(collector.episodes)) > 0


def test_time_limits_are_valued_by_what_was_reached():
    rollout = SyncCollector(grouped(limit=3), LinearPolicy(), pipeline_stages=2).collect(5)
    position = rollout["observation", "robot", "qpos"][..., 0]
    assert torch.allclose(rollout["next_value"][:, 2], position[:, 2] + 0.5 + 300.0)


def test_the_order_of_decisions_does_not_depend_on_who_is_faster():
    class Slow(ScriptedEnv):
        pauses = [0.0]

        def step(self, action):
            time.sleep(self.pauses[int(self.count[0]) % len(self.pauses)])
            return super().step(action)

    def collect(*pauses):
        groups = [Slow(2, seed=group) for group in range(2)]
        for group, pause in zip(groups, pauses, strict=True):
            group.pauses = pause
        torch.manual_seed(1)
        return SyncCollector(GroupedEnv(groups), policy, pipeline_stages=2).collect(6).clone()

    policy = make_policy(ScriptedEnv(2))
    first, second = collect([0.01, 0.0], [0.0]), collect([0.0], [0.0, 0.01])
    assert torch.equal(first["action"], second["action"])
    assert torch.equal(first["reward"], second["reward"])


def test_simulation_and_decisions_overlap():
    """No group ends a step before the policy decides for the other one: one after the other, all would wait in vain."""
    num_steps, decisions = 10, []

    class Waiting(ScriptedEnv):
        def __init__(self, group):
            super().__init__(2)
            self.group, self.taken = group, 0

        def step(self, action):
            self.taken += 1
            decided = 2 * self.taken + self.group - 1  # its own decision is the last of these
            wait_until(lambda: len(decisions) > decided or decided == 2 * num_steps)
            return super().step(action)

    class Noting(LinearPolicy):
        def get_action(self, obs, deterministic=False):
            decisions.append(len(obs))
            return super().get_action(obs, deterministic)

    collector = SyncCollector(GroupedEnv([Waiting(0), Waiting(1)]), Noting(), pipeline_stages=2)
    assert collector.collect(num_steps).batch_size == (4, num_steps)
    assert len(decisions) == 2 * num_steps


def test_version_is_the_one_that_decided_even_if_it_changes_meanwhile():
    policy = LinearPolicy()
    collector = SyncCollector(grouped(), policy, pipeline_stages=2)
    counts = iter(range(100))
    collector.before_step = lambda: policy.version.fill_(next(counts))
    assert collector.collect(5)["policy_version"].tolist() == [[0, 1, 2, 3, 4]] * 4


def test_an_error_in_a_group_comes_out_and_leaves_no_step_under_way():
    class Failing(ScriptedEnv):
        def step(self, action):
            if self.count[0] == 2:
                raise RuntimeError("the simulation broke")
            return super().step(action)

    env = GroupedEnv([ScriptedEnv(2), Failing(2)])
    collector = SyncCollector(env, LinearPolicy(), pipeline_stages=2)
    with pytest.raises(RuntimeError, match="the simulation broke"):
        collector.collect(5)
    count = env.groups[0].count.clone()
    time.sleep(0.05)
    assert torch.equal(env.groups[0].count, count)


@pytest.mark.parametrize("fails", [False, True])
def test_threads_end_with_the_collector(fails):
    """After an error, too: its traceback must not keep everything alive that it passed through."""
    before = set(threading.enumerate())
    env = grouped()
    collector = SyncCollector(env, LinearPolicy(), pipeline_stages=2)
    collector.collect(1)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    if fails:
        env.groups[1].step = lambda action: 1 / 0
        with contextlib.suppress(ZeroDivisionError):
            collector.collect(1)
    del collector
    deadline = time.monotonic() + 60.0
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert not any(thread.is_alive() for thread in threads)


def test_environments_without_groups_are_refused():
    with pytest.raises(ConfigError, match=r"2 groups.*got ScriptedEnv"):
        SyncCollector(ScriptedEnv(4), LinearPolicy(), pipeline_stages=2)
    with pytest.raises(ConfigError, match="got 2 groups"):
        SyncCollector(grouped(), LinearPolicy(), pipeline_stages=3)


@pytest.mark.parametrize("stages", [1, 2])
def test_after_a_rollout_that_was_broken_off_everything_begins_anew(stages):
    """The step that was under way is lost, and what ended in it: going on would mix up episodes."""
    env = grouped(limit=6) if stages == 2 else ScriptedEnv(4, limit=6)
    collector = SyncCollector(env, LinearPolicy(), pipeline_stages=stages)
    collector.collect(4)
    steps = []

    def break_off():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt

    collector.before_step = break_off
    with pytest.raises(KeyboardInterrupt):
        collector.collect(8)
    collector.before_step = None
    rollout = collector.collect(14)
    assert rollout["observation", "object", "step"][..., 0].tolist() == [[t % 6 for t in range(14)]] * 4
    assert rollout["done"].tolist() == [[t % 6 == 5 for t in range(14)]] * 4
    position = rollout["observation", "robot", "qpos"][..., 0]
    assert torch.allclose(rollout["reward"], position + rollout["action"][..., 0].clamp(-1.0, 1.0), atol=1e-6)
    assert collector.episodes["length"].tolist() == [6] * 8
    ended = rollout["reward"].view(4, 14)[:, :12].reshape(4, 2, 6).sum(-1)
    assert torch.allclose(collector.episodes["return"].sort().values, ended.flatten().double().sort().values, atol=1e-5)
