"""Actions of every kind of space arrive as they were chosen: unbounded, half-bounded, and bounded boxes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from embodichain.agents.engine.config import ActionSourceCfg
from embodichain.agents.engine.sources import SimulatedEpisodes, make_actor
from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector
from embodichain.agents.rl.evaluation import evaluate
from embodichain.agents.rl.models import Policy
from embodichain.agents.rl.utils import torch_threads
from embodichain.envs.checker import check_env
from embodichain.envs.gymnasium_env import GymnasiumVecEnv
from embodichain.envs.vec_env import ActionBounds, VecEnv
from embodichain.envs.wrappers import ChunkedEnv, GroupedEnv
from embodichain.errors import ConfigError
from tests.agents.rl.helpers import make_policy

INF = np.inf
SIDES = {"none": (-INF, INF), "below": (-0.5, INF), "above": (-INF, 0.5), "both": (-2.0, 6.0)}
"""One action dimension each, by the sides it is bounded on; the last one is mapped from [-1, 1]."""


class Target(gym.Env):
    """Episodes of four steps; the reward is the negative squared distance of the action from a target."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, space: gym.Space[Any] | None = None, target: Any = 3.0) -> None:
        self.action_space = gym.spaces.Box(-INF, INF, (1,), np.float32) if space is None else space
        self.target = target
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        self.actions.append(np.array(action))
        reward = -float(np.square(np.asarray(action, np.float64) - self.target).sum())
        return np.full(1, self.count / 4, np.float32), reward, self.count == 4, False, {}


def sided_box() -> gym.spaces.Box:
    low, high = (np.array(bound, np.float32) for bound in zip(*SIDES.values(), strict=True))
    return gym.spaces.Box(low, high)


def target_envs(num_envs: int, *args: Any) -> GymnasiumVecEnv:
    return GymnasiumVecEnv.from_factory(lambda: Target(*args), num_envs, max_episode_steps=4, seed=0)


def arrived(env: GymnasiumVecEnv) -> np.ndarray:
    """Return all actions that the envs were given, ``[actions, ...]``."""
    return np.concatenate([np.stack(sub.unwrapped.actions) for sub in env.vector_env.envs])  # type: ignore[attr-defined]


def wide_policy(env: VecEnv) -> Policy:
    """Return a policy with a standard deviation of e."""
    torch.manual_seed(0)
    return make_policy(env, distribution={"init_log_std": 1.0})


def collect_sync(env: GymnasiumVecEnv, policy: Policy) -> None:
    SyncCollector(env, policy).collect(32)


def collect_async(env: GymnasiumVecEnv, policy: Policy) -> None:
    collector = AsyncCollector(env, policy, VLABuffer(32 * env.num_envs), cfg=AsyncCfg(num_steps=32, max_policy_lag=0))
    try:
        collector.collect(32)
    finally:
        collector.stop()


def run_evaluation(env: GymnasiumVecEnv, policy: Policy) -> None:
    evaluate(policy, env, episodes=64, seed=0, deterministic=False)


WAYS = {"sync": collect_sync, "async": collect_async, "evaluation": run_evaluation}


@pytest.mark.parametrize("way", WAYS)
def test_actions_are_clipped_on_their_bounded_sides_alone(way: str) -> None:
    env = target_envs(8, sided_box(), 0.0)
    WAYS[way](env, wide_policy(env))
    low, high = arrived(env).min(0), arrived(env).max(0)
    # 256 draws of a standard deviation of 2.7 reach beyond 4 on both sides; bounds are touched, and never passed
    assert low[0] < -4
    assert high[0] > 4
    assert low[1] == -0.5
    assert high[1] > 4
    assert low[2] < -4
    assert high[2] == 0.5
    assert low[3] == -2.0
    assert high[3] == 6.0
    env.close()


def test_actions_of_pipelined_groups_and_of_chunks_pass_as_well() -> None:
    groups = [target_envs(4, sided_box(), 0.0) for _ in range(2)]
    env = GroupedEnv(groups)
    SyncCollector(env, wide_policy(env), pipeline_stages=2).collect(32)
    for group in groups:
        low, high = arrived(group).min(0), arrived(group).max(0)
        assert high[0] > 3
        assert high[1] > 3
        assert high[2] == 0.5
        assert (low[3], high[3]) == (-2.0, 6.0)
    inner = target_envs(2, sided_box(), 0.0)
    bounds, chunk = ActionBounds(ChunkedEnv(inner, 2).action_space), torch.full((2, 2, 4), 9.0)
    assert bounds.clip(chunk)[1, 1].tolist() == [9.0, 9.0, 0.5, 1.0]
    assert bounds.clip(-chunk)[1, 1].tolist() == [-9.0, -0.5, -9.0, -1.0]


def test_what_has_no_bounds_is_the_same_tensor() -> None:
    action = torch.tensor([[3.0]])
    assert ActionBounds(gym.spaces.Box(-INF, INF, (1,))).clip(action) is action
    choice = torch.tensor([3])
    assert ActionBounds(gym.spaces.Discrete(4)).clip(choice) is choice
    assert ActionBounds(gym.spaces.Box(-1, 1, (1,))).clip(action).tolist() == [[1.0]]


@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_finds_an_optimum_beyond_one(seed: int) -> None:
    torch.manual_seed(seed)
    env = target_envs(16)
    policy = make_policy(env)
    algorithm = PPO(PPOCfg(n_epochs=5, batch_size=64, learning_rate=1e-2, gamma=0.0), policy)
    collector = SyncCollector(env, policy)
    with torch_threads(1):
        for _ in range(40):
            algorithm.update(collector.collect(16))
    result = evaluate(policy, env, episodes=16, seed=1)
    assert result.summary.mean_return > -4 * 0.3**2  # four steps, each within 0.3 of the target
    assert arrived(env)[-16:].mean() == pytest.approx(3.0, abs=0.3)
    env.close()


def test_squashed_actions_are_refused_where_there_is_no_bound_to_squash_to() -> None:
    env = target_envs(1, sided_box(), 0.0)
    with pytest.raises(ConfigError, match=r"distribution.squash: expected false.*3 of 4"):
        make_policy(env, distribution={"squash": True})
    env.close()
    bounded = target_envs(1, gym.spaces.Box(-3, 3, (2,), np.float32), 0.0)
    assert make_policy(bounded, distribution={"squash": True}).head.cfg.squash
    bounded.close()


def test_stream_actors_reach_into_half_bounded_and_unbounded_spaces() -> None:
    space = gym.spaces.Box(np.array([-INF, 5.0, -INF], np.float32), np.array([INF, INF, -7.0], np.float32))
    env = target_envs(4, space, 0.0)
    actor = make_actor(ActionSourceCfg(source="random"), env, seed=0)
    source = SimulatedEpisodes(env, actor, seed=0, noise_std=3.0)
    for _ in range(32):
        source.advance()
    actions = arrived(env)
    assert np.abs(actions[:, 0]).max() > 3  # the noise is not cut off at 1
    assert actions[:, 1].min() == 5.0
    assert actions[:, 1].max() > 8
    assert actions[:, 2].max() == -7.0
    assert actions[:, 2].min() < -10
    assert actor(env.reset()[0])[:, 1].min() >= 5.0  # random choices are valid, and not all the same
    assert len(actor(env.reset()[0])[:, 1].unique()) == 4
    env.close()


def test_the_checker_plays_valid_actions_in_half_bounded_spaces() -> None:
    low, high = np.array([-INF, 5.0], np.float32), np.array([-7.0, INF], np.float32)

    def make(num_envs: int = 3) -> VecEnv:
        return target_envs(num_envs, gym.spaces.Box(low, high), 0.0)

    env = make()
    check_env(env)
    played = arrived(env)  # type: ignore[arg-type]
    assert (played <= high).all()
    assert (played >= low).all()
    assert len(np.unique(played)) > 10
