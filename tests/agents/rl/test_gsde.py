"""Generalised state-dependent exploration: exact densities, noise that is kept as long as it should, and learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import distributions as td

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector
from embodichain.agents.rl.evaluation import PolicyActor, evaluate
from embodichain.agents.rl.export import export_onnx
from embodichain.agents.rl.models import Policy
from embodichain.agents.rl.models.distributions import DistributionCfg, GaussianHead, SquashedGaussianHead, build_head
from embodichain.agents.rl.utils import torch_threads
from embodichain.envs.gymnasium_env import GymnasiumVecEnv
from embodichain.envs.vec_env import VecEnv
from embodichain.envs.wrappers import GroupedEnv
from embodichain.errors import ConfigError
from tests.agents.rl.helpers import make_policy, network
from tests.agents.rl.test_evaluation import Recorder

ACTIONS, LATENT = 3, 5
GSDE = DistributionCfg(std="gsde", init_log_std=-0.5)


def head_and_params(rows: int, squash: bool = False) -> tuple[GaussianHead, torch.Tensor]:
    torch.manual_seed(0)
    kind = SquashedGaussianHead if squash else GaussianHead
    head = kind(ACTIONS, GSDE.replace(squash=squash), LATENT)
    with torch.no_grad():
        head.log_std.add_(0.3 * torch.randn_like(head.log_std))
    return head, torch.randn(rows, ACTIONS + LATENT)


def reference(head: GaussianHead, params: torch.Tensor) -> td.MultivariateNormal:
    """Return the distribution of ``mean + x^T M``, ``M_la ~ N(0, std_la^2)`` independently, by its full covariance."""
    mean, x = params.split([ACTIONS, LATENT], dim=-1)
    # vec(x^T M) = (I kron x^T) vec(M), so its covariance is (I kron x^T) diag(std^2) (I kron x)
    rows = []
    for one in x:
        linear = torch.block_diag(*[one.unsqueeze(0)] * ACTIONS)
        spread = torch.diag(head.log_std.exp().square().t().reshape(-1)).to(one)
        rows.append(linear @ spread @ linear.t() + 1e-6 * torch.eye(ACTIONS).to(one))
    return td.MultivariateNormal(mean, torch.stack(rows))


def test_densities_and_entropies_are_those_of_the_linear_function() -> None:
    head, params = head_and_params(50)
    wanted = reference(head, params)
    action, log_prob = head.sample(params)
    assert torch.allclose(log_prob, wanted.log_prob(action), atol=1e-4)
    again, entropy = head.evaluate(params, action)
    assert torch.allclose(again, log_prob, atol=1e-4)
    assert torch.allclose(entropy, wanted.entropy(), atol=1e-4)
    given = action.detach()
    pair = head.evaluate(params, given)[0], reference(head, params).log_prob(given)
    ours, theirs = (torch.autograd.grad(log_prob.sum(), head.log_std)[0] for log_prob in pair)
    assert torch.allclose(ours, theirs, atol=1e-3)


def test_held_noise_is_the_linear_function_itself() -> None:
    head, params = head_and_params(4)
    head.held = torch.randn(4, LATENT, ACTIONS)
    action, log_prob = head.sample(params)
    by_hand = torch.stack([params[i, ACTIONS:] @ (head.log_std.exp() * head.held[i]) for i in range(4)])
    assert torch.allclose(action, params[:, :ACTIONS] + by_hand, atol=1e-5)
    assert torch.allclose(log_prob, head.evaluate(params, action)[0], atol=1e-4)
    assert torch.equal(head.sample(params)[0], action)  # as long as it is held
    # Over many functions the noise of a state is what its density says
    one = params[:1].expand(40_000, -1)
    head.held = torch.randn(40_000, LATENT, ACTIONS)
    drawn, _ = head.sample(one)
    expected = reference(head, params[:1])
    assert torch.allclose(drawn.mean(0), expected.mean[0], atol=0.05)
    assert torch.allclose(torch.cov(drawn.t()), expected.covariance_matrix[0], rtol=0.05, atol=0.05)


def test_squashed_actions_have_the_density_of_their_tanh() -> None:
    head, params = head_and_params(50, squash=True)
    head.held = torch.randn(50, LATENT, ACTIONS)
    action, log_prob = head.sample(params)
    assert action.abs().max() < 1.0
    raw = torch.atanh(action.double())
    wanted = reference(head, params.double()).log_prob(raw) - torch.log1p(-action.double().square()).sum(-1)
    inner = action.abs().amax(-1) < 0.999
    assert torch.allclose(log_prob[inner].double(), wanted[inner], atol=2e-3)
    assert torch.equal(log_prob, head.evaluate(params, action)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("squash", [False, True])
def test_autocast_leaves_densities_and_noise_in_float32(squash: bool, dtype: torch.dtype) -> None:
    head, params = head_and_params(50, squash)
    with torch.no_grad():
        head.log_std.sub_(8.0)  # a variance of 1e-7 or so, which float16 cannot tell from zero
    params = params.to(dtype)  # as the networks return them there
    head.held = torch.randn(50, LATENT, ACTIONS)
    action = head.sample(params)[0].detach()

    plain = [*head.sample(params), *head.evaluate(params, action)]
    with torch.autocast("cpu", dtype):
        reduced = [*head.sample(params), *head.evaluate(params, action)]
        assert (params.float() @ params.float().t()).dtype == dtype  # networks that follow run reduced again
    for results in (plain, reduced):
        results += torch.autograd.grad(results[-2].sum() + results[-1].sum(), head.log_std)
    for got, wanted in zip(reduced, plain, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, wanted)


@pytest.mark.extra("peers")
def test_densities_are_those_of_stable_baselines() -> None:
    from stable_baselines3.common.distributions import StateDependentNoiseDistribution

    head, params = head_and_params(20)
    theirs = StateDependentNoiseDistribution(ACTIONS, full_std=True, use_expln=False, learn_features=False)
    theirs.proba_distribution_net(LATENT, LATENT)
    theirs.proba_distribution(params[:, :ACTIONS], head.log_std, params[:, ACTIONS:])
    action, _ = head.sample(params)
    log_prob, entropy = head.evaluate(params, action)
    assert torch.allclose(log_prob, theirs.log_prob(action), atol=1e-4)
    assert torch.allclose(entropy, theirs.entropy(), atol=1e-4)


class Still(gym.Env):
    """Always the same observation; the reward is the negative distance of the action from a target."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.array([0.5, -0.3], np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        reward = -float(np.abs(action - np.array([0.6, -0.4])).sum())
        return np.array([0.5, -0.3], np.float32), reward, self.count == 5, False, {}


def still_envs(num_envs: int, seed: int = 0) -> GymnasiumVecEnv:
    return GymnasiumVecEnv.from_factory(Still, num_envs, max_episode_steps=5, seed=seed)


def gsde_policy(env: VecEnv, name: str = "actor_critic", **settings: Any) -> Policy:
    distribution = {"std": "gsde", "init_log_std": -1.0, **settings}
    return make_policy(env, name, actor=network((16,)), distribution=distribution)


def check_kept(action: torch.Tensor, freq: int) -> None:
    """Check that actions ``[num_envs, num_steps, action_dim]`` in equal states change after ``freq`` steps alone."""
    changed = (action[:, 1:] - action[:, :-1]).abs().amax(-1) > 1e-6
    due = torch.arange(1, action.shape[1]) % freq == 0
    assert torch.equal(changed, due.expand_as(changed))
    assert len(action[:, 0].unique(dim=0)) == len(action)  # every env has a function of its own


@pytest.mark.parametrize("freq", [-1, 1, 4])
@pytest.mark.parametrize("squash", [False, True])
def test_collectors_keep_noise_for_as_many_steps(freq: int, squash: bool) -> None:
    torch.manual_seed(0)
    env = still_envs(4)
    policy = gsde_policy(env, sde_sample_freq=freq, squash=squash)
    collector = SyncCollector(env, policy)
    rollouts = [collector.collect(10).clone() for _ in range(2)]
    for rollout in rollouts:
        check_kept(rollout["action"], 10 if freq < 1 else freq)
        flat = rollout.reshape(-1)
        with torch.no_grad():
            log_prob, _, _ = policy.evaluate(flat)
        assert torch.allclose(log_prob, flat["sample_log_prob"], atol=1e-4)
    assert not torch.allclose(rollouts[0]["action"][:, -1], rollouts[1]["action"][:, 0])
    with torch.no_grad():  # outside of a rollout, every action has noise of its own
        obs = rollouts[0]["observation"][:, 0]
        assert not torch.allclose(policy.get_action(obs)[0], policy.get_action(obs)[0])
    env.close()


@pytest.mark.parametrize("memory", [None, {"hidden_size": 8}])
@pytest.mark.parametrize("freq", [-1, 1, 2])
def test_evaluations_that_sample_keep_noise_within_an_episode(freq: int, memory: Any) -> None:
    torch.manual_seed(0)
    env = Recorder(still_envs(3))
    policy = make_policy(
        env,
        actor=network((16,)),
        distribution={"std": "gsde", "init_log_std": -3.0, "sde_sample_freq": freq, "squash": True},
        memory=memory,
    )
    evaluate(policy, env, episodes=6, seed=0, deterministic=False)
    episodes = torch.stack(env.actions, dim=1).split(5, dim=1)  # Still ends after five steps
    assert len(episodes) == 2
    if memory is None:  # with memory, features differ from step to step, and so does the noise of one function
        for episode in episodes:
            check_kept(episode, 5 if freq < 1 else freq)
    assert not torch.allclose(episodes[0][:, -1], episodes[1][:, 0])
    assert policy.head.held is None  # the policy is left as it was
    sampled = [torch.stack(env.actions)]
    for _ in range(2):
        env.actions.clear()
        evaluate(policy, env, episodes=6, seed=0, deterministic=False)
        sampled.append(torch.stack(env.actions))
    assert torch.equal(sampled[0], sampled[1])
    assert torch.equal(sampled[1], sampled[2])
    env.close()


def test_noise_of_an_env_is_renewed_where_its_own_episode_ends() -> None:
    torch.manual_seed(0)
    env = still_envs(3)
    actor = PolicyActor(gsde_policy(env, sde_sample_freq=3), env, deterministic=False)
    obs, _ = env.reset(seed=0)
    actions = []
    for step in range(7):
        if step == 2:
            actor.reset([1])
        actions.append(actor(obs))
    changed = (torch.stack(actions[1:]) - torch.stack(actions[:-1])).abs().amax(-1) > 1e-6
    due = [[step in steps for steps in ({3, 6}, {2, 5}, {3, 6})] for step in range(1, 7)]
    assert changed.tolist() == due
    env.close()


def test_groups_in_turn_and_asynchronous_workers_keep_it_as_well() -> None:
    torch.manual_seed(0)
    env = GroupedEnv([still_envs(2), still_envs(2, seed=1)])
    policy = gsde_policy(env, sde_sample_freq=3)
    check_kept(SyncCollector(env, policy, pipeline_stages=2).collect(9)["action"], 3)
    for lag in (0, 1):
        cfg = AsyncCfg(num_steps=9, max_policy_lag=lag)
        collector = AsyncCollector(still_envs(4), policy, VLABuffer(200), cfg=cfg)
        try:
            check_kept(collector.collect(9)["action"], 3)
        finally:
            collector.stop()


def test_recurrent_policies_and_discrete_actions_take_the_setting() -> None:
    torch.manual_seed(0)
    env = still_envs(4)
    policy = make_policy(env, distribution={"std": "gsde"}, memory={"hidden_size": 8}, actor=network(()))
    assert policy.head.param_dim == 2 + 8  # without hidden layers, noise depends on what the actor sees
    rollout = SyncCollector(env, policy).collect(4)
    PPO(PPOCfg(batch_size=16, n_epochs=1), policy).update(rollout)
    discrete = build_head(gym.spaces.Discrete(3), GSDE)
    assert discrete.param_dim == 3
    with pytest.raises(ConfigError, match="gsde needs an actor network"):
        build_head(2, GSDE)
    with pytest.raises(ConfigError, match="sde_sample_freq"):
        gsde_policy(env, sde_sample_freq=-2)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_it_is_learned_with(algorithm: str, seed: int) -> None:
    torch.manual_seed(seed)
    env = still_envs(16, seed)
    settings: dict[str, Any] = {"n_epochs": 5, "batch_size": 64, "learning_rate": 1e-2, "gamma": 0.0}
    policy = gsde_policy(env, "actor_critic" if algorithm == "ppo" else "actor_only", sde_sample_freq=2)
    learner = PPO(PPOCfg(**settings), policy) if algorithm == "ppo" else GRPO(GRPOCfg(**settings), policy)
    collector = SyncCollector(env, policy, start_rollout=learner.start_rollout)
    before = evaluate(policy, env, episodes=16, seed=1).summary.mean_return
    with torch_threads(1):
        for _ in range(30):
            learner.update(collector.collect(5 if algorithm == "grpo" else 10))
    after = evaluate(policy, env, episodes=16, seed=1).summary.mean_return
    assert before < -4.0  # five steps at a distance of 1
    assert after > -1.0
    env.close()


@pytest.mark.extra("export")
def test_it_is_exported_without_its_noise(tmp_path: Path) -> None:
    env = still_envs(1)
    torch.manual_seed(0)
    policy = gsde_policy(env)
    written = export_onnx(policy, env.observation_space, env.action_space, tmp_path / "p.onnx")  # compares actions
    session = pytest.importorskip("onnxruntime").InferenceSession(str(written))
    seen = torch.randn(4, 2)
    with torch.no_grad():
        wanted = policy.get_action(TensorDict({"state": seen}, [4]), deterministic=True)[0]
    assert np.allclose(session.run(None, {"state": seen.numpy()})[0], wanted.clamp(-1, 1).numpy(), atol=1e-5)
    env.close()
