"""Values at the end of a rollout: the same as while acting, of the right policy, and only where they can be apart."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.buffer import RolloutBuffer
from embodichain.agents.rl.collector import SyncCollector, acting
from embodichain.agents.rl.collector.acting import DeferredValues
from embodichain.agents.rl.models import ActorCritic, build_policy
from embodichain.envs.registration import make
from embodichain.errors import ConfigError, RolloutError
from tests.agents.rl.helpers import LinearPolicy, ScriptedEnv, make_policy


class WhileActing(ActorCritic):
    """Values each observation as it acts on it."""

    values_apart = False


def rollout_of(policy, can_read_flags=True, buffer=None, limit=3):
    torch.manual_seed(0)
    env = ScriptedEnv(5, ends=[2, 4, 100, 100, 100], limit=limit)
    collector = SyncCollector(env, policy, buffer=buffer)
    collector._values = DeferredValues(policy, collector.device, collector._decider.value, can_read_flags)
    collector.collect(7)
    return collector.collect(7).clone()


@pytest.mark.parametrize("limit", [3, 1000])
@pytest.mark.parametrize("can_read_flags", [True, False])
@pytest.mark.parametrize("rows", [4, 2048])
def test_values_are_those_of_valuing_every_step(monkeypatch, can_read_flags, rows, limit) -> None:
    monkeypatch.setattr(acting, "CPU_ROWS", rows)
    policy = make_policy(ScriptedEnv(), critic_obs=["object"], normalize_obs=True, normalize_value=True)
    policy.update_normalizer(ScriptedEnv(64).reset()[0])
    policy.update_value_normalizer(3.0 + 2.0 * torch.randn(64))
    assert policy.values_apart
    apart = rollout_of(policy, can_read_flags, limit=limit)
    policy.__class__ = WhileActing
    assert not policy.values_apart
    for other in (rollout_of(policy, True, limit=limit), rollout_of(policy, False, limit=limit)):
        for name in ("value", "next_value"):
            assert torch.allclose(apart[name], other[name], rtol=0.0, atol=1e-6)
            assert other[name].std() > 0.1
        for name in ("action", "sample_log_prob", "reward", "done"):
            assert torch.equal(apart[name], other[name])
    assert bool((apart["truncated"] & ~apart["terminated"]).any()) == (limit == 3)


def test_flat_storage_is_valued_alike() -> None:
    policy = make_policy(ScriptedEnv(), critic_obs=["object"])
    flat = rollout_of(policy, buffer=RolloutBuffer(7, 5, obs_dim=4, action_dim=1))
    assert torch.allclose(flat["value"], rollout_of(policy)["value"], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("settings", "apart"), [({}, True), ({"memory": {"hidden_size": 4}}, False)])
def test_the_critic_rests_while_acting(settings, apart) -> None:
    policy = make_policy(ScriptedEnv(), **settings)
    rows: list[int] = []
    policy.critic.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    SyncCollector(ScriptedEnv(4, limit=3), policy).collect(6)
    assert rows == ([24, 4 + 8] if apart else [4] * 6 + [4 + 8])


def test_values_are_those_of_the_policy_at_the_end() -> None:
    policy = make_policy(ScriptedEnv())
    collector = SyncCollector(ScriptedEnv(3), policy)
    collector.before_step = lambda: policy.critic[-1].bias.data.add_(1.0)  # new weights before every step
    rollout = collector.collect(5)
    with torch.no_grad():
        expected = policy.get_value(rollout["observation"].reshape(-1)).view(3, 5)
    assert torch.allclose(rollout["value"], expected, atol=1e-6)


def test_a_subclass_with_an_act_of_its_own_is_asked_by_it() -> None:
    class Own(ActorCritic):
        def act(self, obs, state=None, deterministic=False):
            action, log_prob, value, state = super().act(obs, state, deterministic)
            return action, log_prob, value + 7.0, state

    policy = make_policy(ScriptedEnv())
    plain = rollout_of(policy)["value"]
    policy.__class__ = Own
    assert torch.allclose(rollout_of(policy)["value"], plain + 7.0, atol=1e-5)


def test_without_a_critic_all_values_are_zero() -> None:
    rollout = rollout_of(make_policy(ScriptedEnv(), "actor_only"), buffer=RolloutBuffer(7))
    assert rollout["value"].abs().max() == rollout["next_value"].abs().max() == 0.0


@pytest.mark.parametrize("pictures", [True, False])
def test_final_pictures_are_valued_at_once_instead_of_being_kept(pictures) -> None:
    valued: list[int] = []

    def value_now(obs, state):
        valued.append(len(obs))
        return torch.zeros(len(obs))

    class Apart(LinearPolicy):
        values_apart = True

    policy = Apart()
    keeper = DeferredValues(policy, torch.device("cpu"), value_now, can_read_flags=False)
    picture = torch.zeros(2, 4, 4, 3, dtype=torch.uint8 if pictures else torch.float32)
    keeper.keep(torch.zeros(2, dtype=torch.bool), TensorDict({"image": {"front": picture}}, [2]), None)
    assert valued == ([2] if pictures else [])


def test_steps_without_values_need_them_at_the_end() -> None:
    buffer = RolloutBuffer(2, 3)
    for _ in range(2):
        buffer.add(torch.zeros(3, 4), torch.zeros(3, 1), torch.zeros(3), torch.zeros(3), None, torch.zeros(3))
    with pytest.raises(RolloutError, match="without their values"):
        buffer.finalize()
    buffer.finalize(torch.full((3,), 9.0), value=torch.tensor([[1.0] * 3, [2.0] * 3]))
    assert buffer.get()["next_value"].tolist() == [[2.0, 9.0]] * 3


def test_a_simulation_that_diverges_is_bootstrapped() -> None:
    """Rewards are negative: an end of value zero would be what the policy looks for."""
    torch.manual_seed(0)
    env = make({"id": "PushCubeRL", "num_envs": 3, "num_threads": 1, "max_episode_steps": 50, "seed": 5})
    policy = make_policy(env)
    with torch.no_grad():
        policy.critic[-1].bias.fill_(-40.0)
    steps = []

    def poison(*_) -> None:
        steps.append(None)
        if len(steps) == 3:
            env.physics.qvel[1] = float("nan")  # after the fourth observation, before the fourth action is taken

    rollout = SyncCollector(env, policy, callback=poison).collect(6).clone()
    assert rollout["truncated"].nonzero().tolist() == [[1, 3]]
    assert not rollout["terminated"].any()
    value, reward = rollout["value"], rollout["reward"]
    assert (reward < 0.0).all()
    assert reward[1, 3] == reward[1, 2]  # as if nothing had moved
    assert (value < -30.0).all()
    assert rollout["next_value"][1, 3] == pytest.approx(float(value[1, 3]), abs=1e-4)  # of what it saw last
    assert rollout["next_value"][1, 2] == value[1, 3]
    PPO(PPOCfg(gamma=0.9, gae_lambda=0.5, n_epochs=1), policy).update(rollout)
    # by hand: delta_3 = r_3 + 0.9 V(s_3) - V(s_3); delta_2 = r_2 + 0.9 V(s_3) - V(s_2); A_2 = delta_2 + 0.45 delta_3
    delta_3 = float(reward[1, 3] + 0.9 * value[1, 3] - value[1, 3])
    delta_2 = float(reward[1, 2] + 0.9 * value[1, 3] - value[1, 2])
    assert float(rollout["return"][1, 3]) == pytest.approx(delta_3 + float(value[1, 3]), rel=1e-4)
    assert float(rollout["return"][1, 2]) == pytest.approx(delta_2 + 0.45 * delta_3 + float(value[1, 2]), rel=1e-4)
    assert float(rollout["return"][1, 3]) < -30.0
    env.close()


def test_a_critic_without_images_values_vectors_alone() -> None:
    """Images change actions and not values; values are computed at the end, and no images are kept for them."""
    space = gym.spaces.Dict(
        {
            "image": gym.spaces.Dict({"top": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)}),
            "object": gym.spaces.Box(-np.inf, np.inf, (2,)),
            "robot": gym.spaces.Box(-np.inf, np.inf, (3,)),
        }
    )
    block = {"name": "actor_critic", "critic_obs": ["object"], "critic_images": False, "normalize_obs": True}
    policy = build_policy(block, space, 2, "cpu")
    images = torch.randint(0, 256, (2, 5, 8, 8, 3), dtype=torch.uint8)
    vectors = {"object": torch.randn(5, 2), "robot": torch.randn(5, 3)}
    one, other = (TensorDict({"image": {"top": image}, **vectors}, [5]) for image in images)
    assert policy.values_apart
    assert torch.equal(policy.get_value(one), policy.get_value(other))
    assert not torch.equal(policy.get_action(one, True)[0], policy.get_action(other, True)[0])
    assert torch.equal(policy.get_action(one)[2], policy.get_value(one))
    assert torch.equal(policy.evaluate_actions(one, torch.zeros(5, 2))[2], policy.get_value(one))
    assert set(policy.seen_by_critic(one).keys(True, True)) == {"object", "robot"}
    assert torch.equal(policy.get_value(policy.seen_by_critic(one)), policy.get_value(one))
    for change in ({"memory": {"hidden_size": 4}}, {}):
        alone = space if change else gym.spaces.Dict({"image": space["image"]})
        with pytest.raises(ConfigError, match="critic_images: expected true"):
            build_policy({**block, "critic_obs": [], **change}, alone, 2, "cpu")
