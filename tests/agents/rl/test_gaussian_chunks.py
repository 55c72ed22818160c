"""A Gaussian over chunks of actions, for vectors: its probabilities, what it imitates, and that it is reinforced."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Normal

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models import build_policy
from embodichain.envs.registration import make
from embodichain.envs.wrappers import chunked

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"network_cfg": {"hidden_sizes": [16]}}


def make_policy(chunk_size: int = 3, action_dim: int = 2):
    torch.manual_seed(0)
    block = {"name": "gaussian", "chunk_size": chunk_size, "init_log_std": -0.7, "actor": SMALL, "critic": SMALL}
    spaces = [gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Box(-1.0, 1.0, (action_dim,), np.float32)]
    return build_policy(block, *spaces, "cpu")


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_probabilities_are_those_of_independent_actions(chunk_size):
    policy, obs = make_policy(chunk_size), torch.randn(5, 4)
    shape = (5, 2) if chunk_size == 1 else (5, chunk_size, 2)
    action, log_prob, value = policy.get_action(obs)
    mean = policy.get_action(obs, deterministic=True)[0]
    assert action.shape == mean.shape == shape
    expected = Normal(mean, torch.tensor(-0.7).exp()).log_prob(action).sum(-1)
    torch.testing.assert_close(log_prob, expected)
    again, entropy, same_value = policy.evaluate_actions(obs, action)
    torch.testing.assert_close(again, log_prob)
    torch.testing.assert_close(entropy, Normal(mean, torch.tensor(-0.7).exp()).entropy().sum(-1))
    assert torch.equal(value, same_value)
    assert not policy.has_decision


def test_of_two_ways_it_learns_the_mean():
    policy, generator = make_policy(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    obs = torch.zeros(256, 4)
    for _ in range(100):
        side = torch.randint(2, (256, 1, 1), generator=generator) * 2.0 - 1.0
        loss = policy.imitation_loss(obs, (0.5 * side).expand(256, 3, 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(policy.get_action(obs[:1], deterministic=True)[0].abs().max()) < 0.1
    assert float(loss.detach()) == pytest.approx(0.25, abs=0.02)


def test_actions_that_do_not_count_do_not_teach():
    policy, obs, actions = make_policy(), torch.randn(5, 4), torch.randn(5, 3, 2)
    valid = torch.tensor([True, True, False]).expand(5, 3)
    torch.testing.assert_close(policy.imitation_loss(obs, actions, valid), policy.imitation_loss(obs, actions[:, :2]))


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_it_is_learned_with(name):
    with make("ReachRL", num_envs=4, seed=0, max_episode_steps=12) as env:
        block = {"name": "gaussian", "chunk_size": 3, "actor": SMALL, "critic": SMALL}
        policy = build_policy(block, env.observation_space, env.action_space, "cpu")
        settings = {"n_epochs": 2, "batch_size": 8, "log_prob_per": "action"}
        algorithm = PPO(PPOCfg(**settings), policy) if name == "ppo" else GRPO(GRPOCfg(**settings), policy)
        collector = SyncCollector(chunked(env, 3), policy, start_rollout=algorithm.start_rollout)
        before = {key: value.clone() for key, value in policy.state_dict().items()}
        assert all(np.isfinite(value) for value in algorithm.update(collector.collect(4)).values())
        moved = {key for key, value in policy.state_dict().items() if not torch.equal(value, before[key])}
        assert {"head.mean_net.0.weight", "head.distribution.log_std"} <= moved
