"""The documented interface of algorithms: buffer, collect, update; names and settings; what is refused."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from embodichain.agents.rl.algo import PPO, BaseAlgorithm, PPOCfg, build_algo, get_registered_algo_names, register_algo
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.utils import AlgorithmCfg
from embodichain.errors import ConfigError, RolloutError, UnknownNameError
from tests.agents.rl.helpers import ScriptedEnv, make_policy


def setup():
    torch.manual_seed(0)
    env = ScriptedEnv(6, ends=[3, 4, 100, 100, 100, 100], limit=5)
    policy = make_policy(env)
    return env, policy, SyncCollector(env, policy).collect(8)


def test_buffer_collect_update_of_the_base_class() -> None:
    env, policy, _ = setup()
    algorithm = PPO(PPOCfg(n_epochs=1), policy)
    algorithm.initialize_buffer(5, env.num_envs, 4, 1, torch.device("cpu"))
    steps = []
    obs, _ = env.reset()
    info = algorithm.collect_rollout(env, policy, obs, 5, on_step_callback=lambda *step: steps.append(step))
    assert len(steps) == 5
    assert "rewards/pos" in info
    assert algorithm.buffer.is_full()
    metrics = algorithm.update()
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "learning_rate"} <= set(metrics)
    assert all(isinstance(value, float) for value in metrics.values())
    with pytest.raises(RolloutError, match=r"needs collect_rollout\(\) before it"):
        algorithm.update()
    resets = env.resets
    algorithm.collect_rollout(env, policy, None, 5)  # goes on
    assert env.resets == resets
    algorithm.update()


def test_both_ways_give_the_same_numbers() -> None:
    parameters = []
    for old in (True, False):
        torch.manual_seed(3)
        env = ScriptedEnv(6, ends=4, limit=5)
        policy = make_policy(env)
        algorithm = PPO(PPOCfg(n_epochs=2, batch_size=16), policy)
        if old:
            algorithm.initialize_buffer(8, 6, 4, 1)
            algorithm.collect_rollout(env, policy, None, 8)
            algorithm.update()
        else:
            algorithm.update(SyncCollector(env, policy).collect(8))
        parameters.append(nn.utils.parameters_to_vector(policy.parameters()))
    assert torch.allclose(parameters[0], parameters[1], atol=1e-6)


def test_every_algorithm_takes_a_rollout_or_nothing() -> None:
    for name in get_registered_algo_names():
        algorithm = type(build_algo(name, {}, setup()[1]))
        assert inspect.signature(algorithm.update).parameters["rollout"].default is None
        assert issubclass(algorithm, BaseAlgorithm)


def test_a_flattened_rollout_is_an_error_not_a_rollout_of_single_steps() -> None:
    _, policy, rollout = setup()
    with pytest.raises(RolloutError, match=r"got batch size \[48\].*time axis"):
        PPO(PPOCfg(), policy).update(rollout.reshape(-1))


def test_documented_positional_settings() -> None:
    cfg = PPOCfg("cpu", 1e-4, 32, 0.9, 0.8, 1.0, 3, 0.1, 0.01, 0.25)
    assert (cfg.n_epochs, cfg.clip_coef, cfg.ent_coef, cfg.vf_coef) == (3, 0.1, 0.01, 0.25)


def test_names_and_registration() -> None:
    assert {"ppo", "grpo"} <= set(get_registered_algo_names())
    _, policy, _ = setup()
    algorithm = build_algo("ppo", {"learning_rate": 1e-4}, policy, torch.device("cpu"))
    assert isinstance(algorithm, PPO)
    assert algorithm.cfg.learning_rate == 1e-4
    with pytest.raises(UnknownNameError, match="Did you mean 'ppo'"):
        build_algo("pppo", {}, policy)
    with pytest.raises(ConfigError, match="learning_rate"):
        build_algo("ppo", {"learningrate": 1e-4}, policy)

    class Still(BaseAlgorithm):
        def update(self, rollout=None):
            return {"reward": float(self._take(rollout, ["reward"])["reward"].mean())}

    register_algo("test_still", Still)
    _env, policy, rollout = setup()
    own = build_algo("test_still", {"gamma": 0.5}, policy)
    assert isinstance(own.cfg, AlgorithmCfg)
    assert own.update(rollout) == {"reward": pytest.approx(float(rollout["reward"].mean()))}
    with pytest.raises(ConfigError, match="taken by Still"):
        register_algo("test_still", PPO)
    with pytest.raises(ConfigError, match="taken by Still"):  # no two names that differ in case alone
        register_algo("Test_Still", PPO)


def test_algorithms_are_registered_by_a_decorator_and_found_whatever_the_case_of_their_name() -> None:
    @register_algo("test_Decorated")
    class Decorated(PPO):
        pass

    assert Decorated.__name__ == "Decorated"  # the class itself, not what registered it
    _env, policy, _ = setup()
    for name in ("test_Decorated", "test_decorated", "TEST_DECORATED"):
        assert type(build_algo(name, {}, policy)) is Decorated
    assert type(build_algo("PPO", {}, policy)) is PPO
    assert "test_Decorated" in get_registered_algo_names()
