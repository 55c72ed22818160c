"""The synchronous collector: what it writes, when it resets, what it values, and exact resume."""

from __future__ import annotations

import inspect

import pytest
import torch

from embodichain.agents.rl.buffer import RolloutBuffer
from embodichain.agents.rl.collector import BaseCollector, SyncCollector
from embodichain.agents.rl.collector.base import EpisodeTracker, InfoAverages, collection_threads
from embodichain.errors import RolloutError
from tests.agents.rl.helpers import LinearPolicy, ScriptedEnv, make_policy, network


def test_a_rollout_holds_what_happened() -> None:
    env = ScriptedEnv(3, ends=[2, 100, 100], limit=3)
    seen = []
    collector = SyncCollector(env, LinearPolicy(), torch.device("cpu"), lambda *step: seen.append(step))
    rollout = collector.collect(num_steps=5)
    assert rollout.batch_size == (3, 5)
    assert rollout["terminated"].int().tolist() == [[0, 1, 0, 1, 0], [0] * 5, [0] * 5]
    assert rollout["truncated"].int().tolist() == [[0] * 5, [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]]
    assert torch.equal(rollout["done"], rollout["terminated"] | rollout["truncated"])
    # the observation after a done step is the first of the next episode
    assert rollout["observation", "object", "step"][..., 0].tolist() == [
        [0, 1, 0, 1, 0],
        [0, 1, 2, 0, 1],
        [0, 1, 2, 0, 1],
    ]
    # reward = position after the action 0.5
    position = rollout["observation", "robot", "qpos"][..., 0]
    assert torch.allclose(rollout["reward"], position + 0.5)
    assert len(seen) == 5
    _obs, _action, reward, _done, info, next_obs = seen[1]
    assert torch.equal(reward, rollout["reward"][:, 1])
    assert torch.equal(next_obs["robot", "qpos"], rollout["observation", "robot", "qpos"][:, 2])
    assert info["metrics"]["success"].tolist() == [True, False, False]


def test_time_limits_are_valued_by_what_was_really_reached() -> None:
    env = ScriptedEnv(3, ends=[2, 100, 100], limit=3)
    rollout = SyncCollector(env, LinearPolicy()).collect(5)
    value, next_value, position = (
        rollout["value"],
        rollout["next_value"],
        rollout["observation", "robot", "qpos"][..., 0],
    )
    assert next_value[0, 1] == 0.0  # terminated: there is no next state
    # cut at step 3 of the episode: value = position + 100 * step, of the final observation, not of the next episode's
    assert torch.allclose(next_value[1, 2], position[1, 2] + 0.5 + 300.0)
    assert torch.allclose(next_value[1, 0], value[1, 1])
    # the last step leads to an observation that is in no row: position + 100 * 2
    assert torch.allclose(next_value[1, 4], position[1, 4] + 0.5 + 200.0)


def test_only_cut_rows_are_evaluated_and_only_once() -> None:
    class Counting(LinearPolicy):
        calls: list[int]

        def get_action(self, obs, deterministic=False):
            value = super().get_value(obs)
            return torch.full((len(value), 1), 0.5), torch.zeros_like(value), value

        def get_value(self, obs):
            self.calls.append(len(obs))
            return super().get_value(obs)

    policy = Counting()
    policy.calls = []
    SyncCollector(ScriptedEnv(4, ends=[2, 2, 100, 100], limit=3), policy).collect(7)
    assert policy.calls == [4 + 2 * 2]  # the last observations; two envs, cut twice


def test_the_environment_is_reset_once_and_goes_on() -> None:
    env = ScriptedEnv(2)
    collector = SyncCollector(env, LinearPolicy())
    assert env.resets == 0
    collector.collect(3)
    second = collector.collect(3)
    assert env.resets == 1
    assert second["observation", "object", "step"][0, :, 0].tolist() == [3.0, 4.0, 5.0]


def test_rollouts_are_written_in_place_without_copies() -> None:
    collector = SyncCollector(ScriptedEnv(2), LinearPolicy())
    first = collector.collect(4)
    pointer, old = first["reward"].data_ptr(), first["reward"].clone()
    second = collector.collect(4)
    assert second["reward"].data_ptr() == pointer
    assert not torch.equal(first["reward"], old)  # valid until the next collect
    assert collector.collect(6).batch_size == (2, 6)


def test_every_transition_is_stamped_with_the_policys_version() -> None:
    policy = LinearPolicy()
    collector = SyncCollector(ScriptedEnv(2), policy)
    assert collector.collect(2)["policy_version"].unique().tolist() == [0]
    policy.version += 5
    assert collector.collect(2)["policy_version"].unique().tolist() == [5]


def test_another_policy_may_take_the_place_of_the_first() -> None:
    env = ScriptedEnv(3, limit=4)
    torch.manual_seed(0)
    first, second = make_policy(env), make_policy(env)
    second.version += 7
    collector = SyncCollector(env, first)
    collector.collect(2)
    collector.policy = second
    rollout = collector.collect(6)
    assert rollout["policy_version"].unique().tolist() == [7]
    obs = rollout["observation"].flatten(0, 1)
    assert torch.allclose(rollout["value"].flatten(), second.get_value(obs), atol=1e-6)
    log_prob = second.evaluate_actions(obs, rollout["action"].flatten(0, 1))[0]
    assert torch.allclose(rollout["sample_log_prob"].flatten(), log_prob, atol=1e-5)


def test_signature_is_that_of_the_base_class() -> None:
    base, ours = (inspect.signature(cls.collect) for cls in (BaseCollector, SyncCollector))
    assert base == ours
    with pytest.raises(RolloutError, match="at least 1, got 0"):
        SyncCollector(ScriptedEnv(), LinearPolicy()).collect(0)


def test_sampled_actions_are_kept_and_bounded_ones_executed() -> None:
    torch.manual_seed(0)
    env = ScriptedEnv(16)  # asserts that actions are in [-1, 1]
    policy = make_policy(env, distribution={"init_log_std": 1.0})
    rollout = SyncCollector(env, policy).collect(8)
    assert rollout["action"].abs().max() > 1.5
    with torch.no_grad():
        log_prob, _, _ = policy.evaluate(rollout.reshape(-1))
    assert torch.allclose(log_prob, rollout["sample_log_prob"].reshape(-1), atol=1e-4)


def test_statistics() -> None:
    env = ScriptedEnv(2, ends=[2, 100], limit=3)
    collector = SyncCollector(env, LinearPolicy())
    rollout = collector.collect(6)
    stats = collector.statistics()
    assert stats["episode/count"] == 5.0  # three episodes of two steps, two of three
    assert collector.episodes["length"].tolist() == [2, 3, 2, 2, 3]  # in the order in which they ended
    reward = rollout["reward"]
    expected = [reward[0, :2], reward[1, :3], reward[0, 2:4], reward[0, 4:], reward[1, 3:]]
    assert torch.allclose(collector.episodes["return"], torch.stack([part.sum() for part in expected]).double())
    assert stats["episode/return"] == pytest.approx(float(collector.episodes["return"].mean()))
    assert stats["rewards/pos"] == pytest.approx(float(reward.mean()), rel=1e-5)
    assert stats["metrics/success"] == pytest.approx(3 / 12)
    assert stats["episode/success"] == pytest.approx(3 / 5)
    quiet = SyncCollector(ScriptedEnv(2), LinearPolicy())
    quiet.collect(2)
    assert "episode/return" not in quiet.statistics()
    assert quiet.statistics()["episode/count"] == 0.0


def test_averages_of_what_only_some_steps_report() -> None:
    averages, yes, no = InfoAverages(), torch.tensor([True, False]), torch.tensor([False, False])
    assert averages.means() == {}
    averages.add({"rewards": {"a": torch.tensor([1.0, 2.0])}, "metrics": {}}, yes)
    averages.add({"rewards": {"a": torch.tensor([3.0, 6.0])}, "metrics": {"success": torch.tensor([1.0, 1.0])}}, yes)
    averages.add({"metrics": {"success": torch.tensor([True, False])}}, no)
    found = {name: float(mean) for name, mean in averages.means().items()}
    # means over all three steps; the first one ended an episode of which nothing is known
    assert found == pytest.approx({"rewards/a": 12 / 6, "metrics/success": 3 / 6, "episode/success": 1.0})


def test_episodes_are_followed_across_rollouts_like_a_plain_loop() -> None:
    g = torch.Generator().manual_seed(0)
    tracker = EpisodeTracker(5, torch.device("cpu"))
    total, length = [0.0] * 5, [0] * 5
    for _ in range(4):
        reward, done = torch.randn(9, 5, generator=g), torch.rand(9, 5, generator=g) < 0.2
        expected = []
        for t in range(9):
            for env in range(5):
                total[env] += float(reward[t, env])
                length[env] += 1
                if done[t, env]:
                    expected.append((total[env], length[env]))
                    total[env], length[env] = 0.0, 0
        tracker.update(reward, done)
        done.fill_(False)  # as when the next rollout is written to the same memory
        ended = tracker.ended
        assert ended["length"].tolist() == [n for _, n in expected]
        assert torch.allclose(ended["return"], torch.tensor([r for r, _ in expected], dtype=torch.float64))
    assert torch.allclose(tracker.episode_return, torch.tensor(total, dtype=torch.float64))
    assert tracker.episode_length.tolist() == length


@pytest.mark.parametrize("memory", [None, {"hidden_size": 4}])
def test_state_resumes_exactly(memory) -> None:
    def fresh():
        torch.manual_seed(1)
        env = ScriptedEnv(4, ends=[3, 5, 100, 100], limit=6)
        return env, SyncCollector(env, make_policy(env, memory=memory))

    env, collector = fresh()
    collector.collect(4)
    saved = {name: tensor.clone() for name, tensor in collector.state_dict().items()}
    simulation, random = env.get_state(), torch.get_rng_state()
    expected = collector.collect(4).clone()
    episodes = collector.episodes

    other_env, other = fresh()
    other_env.set_state(simulation)
    other.load_state_dict(saved)
    torch.set_rng_state(random)
    assert (other.collect(4) == expected).all()
    assert (other.episodes == episodes).all()
    assert other_env.resets == 0
    assert SyncCollector(env, LinearPolicy()).state_dict() == {}


def test_a_given_buffer_is_written_to() -> None:
    env = ScriptedEnv(3)
    buffer = RolloutBuffer(4, 3, obs_dim=4, action_dim=1)
    rollout = SyncCollector(env, LinearPolicy(), buffer=buffer).collect(4)
    assert rollout["observation"].shape == (3, 4, 4)  # flat, as the buffer was made for
    assert rollout["reward"].data_ptr() == buffer.storage["reward"].data_ptr()


def test_threads_one_for_small_policies_and_restored() -> None:
    env = ScriptedEnv(8)
    assert collection_threads(make_policy(env), 8) == 1
    assert collection_threads(make_policy(env, actor=network((512, 512))), 4096) is None
    before = torch.get_num_threads()
    inside = []
    collector = SyncCollector(env, LinearPolicy(), callback=lambda *_: inside.append(torch.get_num_threads()))
    collector.collect(1)
    assert inside == [1]
    assert torch.get_num_threads() == before


def test_an_error_in_the_callback_is_not_swallowed_and_can_be_recovered_from() -> None:
    def broken(*_):
        if len(calls) == 2:
            raise ZeroDivisionError
        calls.append(1)

    calls: list[int] = []
    collector = SyncCollector(ScriptedEnv(), LinearPolicy(), callback=broken)
    with pytest.raises(ZeroDivisionError):
        collector.collect(4)
    collector.callback = None
    assert collector.collect(4).batch_size == (3, 4)
