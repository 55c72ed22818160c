"""Actions of every kind of space arrive as they were chosen: boxes with and without bounds, and several choices."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.engine.config import ActionSourceCfg
from embodichain.agents.engine.sources import SimulatedEpisodes, make_actor
from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.checkpoint import load_policy
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, RemoteEnv, SyncCollector
from embodichain.agents.rl.config import TrainCfg
from embodichain.agents.rl.evaluation import evaluate
from embodichain.agents.rl.export import export_onnx
from embodichain.agents.rl.models import Policy, build_policy
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.agents.rl.utils import torch_threads
from embodichain.envs.checker import check_env
from embodichain.envs.gymnasium_env import GymnasiumVecEnv
from embodichain.envs.vec_env import ActionBounds, VecEnv
from embodichain.envs.wrappers import ChunkedEnv, GroupedEnv
from embodichain.errors import ActionError, ConfigError, EnvContractError
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


SEVERAL = {
    "choices": (gym.spaces.MultiDiscrete([5, 3, 4]), np.array([4, 0, 2])),
    "shifted grid": (gym.spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-2, 7]]), np.array([[2, 2], [-2, 7]])),
    "switches": (gym.spaces.MultiBinary(4), np.array([1, 0, 1, 1])),
    "grid of switches": (gym.spaces.MultiBinary([2, 2]), np.array([[1, 0], [0, 1]])),
}


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("way", WAYS)
def test_several_choices_arrive_as_gymnasium_has_them(kind: str, way: str) -> None:
    space, target = SEVERAL[kind]
    env = target_envs(8, space, target)
    policy = make_policy(env)
    WAYS[way](env, policy)
    actions = arrived(env)
    assert actions.dtype == space.dtype
    assert all(space.contains(action) for action in actions)
    assert all(len(np.unique(column)) > 1 for column in actions.reshape(len(actions), -1).T)
    flat = env.action_space
    assert isinstance(flat, type(space))
    assert flat.shape == (space.sample().size,)
    with torch.no_grad():
        action, log_prob, _ = policy.get_action(env.reset()[0])
    assert (action.dtype, action.shape, log_prob.shape) == (torch.int64, (8, *flat.shape), (8,))
    env.close()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", ["shifted grid", "switches"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_several_choices_are_learned(kind: str, seed: int, algorithm: str) -> None:
    torch.manual_seed(seed)
    space, target = SEVERAL[kind]
    env = target_envs(16, space, target)
    settings: dict[str, Any] = {"n_epochs": 4, "batch_size": 64, "learning_rate": 1e-2, "gamma": 0.0}
    if algorithm == "ppo":
        policy, learner = make_policy(env), None
        learner = PPO(PPOCfg(**settings), policy)
    else:
        policy = make_policy(env, "actor_only")
        learner = GRPO(GRPOCfg(**settings), policy)
    collector = SyncCollector(env, policy, start_rollout=learner.start_rollout)
    with torch_threads(1):
        for _ in range(25):
            learner.update(collector.collect(4 if algorithm == "grpo" else 16))
    assert evaluate(policy, env, episodes=16, seed=1).summary.mean_return == 0.0  # the best there is
    env.close()


def test_choices_that_do_not_exist_are_refused() -> None:
    env = target_envs(2, *SEVERAL["choices"])
    env.reset()
    for bad, message in (
        (torch.tensor([[0, 0, 0], [0, 3, 0]]), r"env 1 must lie in \[0, \[5, 3, 4\]\), got \[0, 3, 0\]"),
        (torch.tensor([[0, -1, 0], [0, 0, 0]]), "env 0"),
        (torch.zeros(2, 3), "integers"),
        (torch.zeros(2, dtype=torch.int64), "shape"),
    ):
        with pytest.raises(ActionError, match=message):
            env.step(bad)
    env.close()
    switches = target_envs(1, *SEVERAL["switches"])
    switches.reset()
    with pytest.raises(ActionError, match=r"\[0, 2\)"):
        switches.step(torch.tensor([[0, 1, 2, 0]]))
    switches.step(torch.tensor([[False, True, True, False]]))  # bits may be booleans
    assert arrived(switches)[-1].tolist() == [0, 1, 1, 0]
    switches.close()
    with pytest.raises(EnvContractError, match="MultiDiscrete or MultiBinary"):
        target_envs(1, gym.spaces.Tuple([gym.spaces.Discrete(2)]), 0)


@pytest.mark.parametrize("kind", SEVERAL)
def test_the_checker_and_random_actors_know_several_choices(kind: str) -> None:
    space, target = SEVERAL[kind]

    def make(num_envs: int = 3) -> VecEnv:
        return target_envs(num_envs, space, target)

    assert check_env(make(), make) == []
    env = target_envs(4, space, target)
    source = SimulatedEpisodes(env, make_actor(ActionSourceCfg(source="random"), env, seed=0), seed=0, noise_std=1.0)
    for _ in range(16):
        source.advance()
    assert all(space.contains(action) for action in arrived(env))


@pytest.mark.parametrize("kind", ["choices", "switches"])
def test_a_run_with_several_choices_is_saved_resumed_and_loaded(kind: str, tmp_path: Path) -> None:
    space, target = SEVERAL[kind]
    name = f"Target-{kind}-v0"
    gym.register(name, entry_point=lambda: Target(space, target), max_episode_steps=4)
    try:
        trainer = {"gym_config": {"id": name}, "num_envs": 4, "buffer_size": 8, "num_eval_episodes": 4}
        trainer |= {"iterations": 2, "eval_video": False, "run_dir": str(tmp_path / "run")}
        cfg = TrainCfg.from_dict({"trainer": trainer, "policy": {"name": "actor_critic", "action_dim": target.size}})
        train_from_config(cfg, ["--trainer.collector.pipeline_stages", "2"])
        assert resume_training(tmp_path / "run", ["--trainer.iterations", "3"]).global_step == 3 * 4 * 8
        policy = load_policy(tmp_path / "run")
        with torch.no_grad():
            action, _, _ = policy.get_action(TensorDict({"state": torch.zeros(5, 1)}, [5]))
        assert all(space.contains(one.astype(space.dtype)) for one in action.numpy())
    finally:
        del gym.registry[name]


@pytest.mark.parametrize("kind", ["choices", "switches"])
def test_several_choices_reach_another_process(kind: str) -> None:
    space, target = SEVERAL[kind]
    with RemoteEnv(partial(target_envs, 2, space, target)) as env:
        assert env.action_space == space
        rollout = SyncCollector(env, make_policy(env)).collect(4)
        expected = -(rollout["action"] - torch.from_numpy(target)).square().sum(-1).float()
        assert torch.equal(rollout["reward"], expected)


@pytest.mark.extra("export")
@pytest.mark.parametrize("kind", ["choices", "switches"])
def test_several_choices_are_exported(kind: str, tmp_path: Path) -> None:
    space, _ = SEVERAL[kind]
    torch.manual_seed(0)
    observations = gym.spaces.Dict({"state": gym.spaces.Box(-1, 1, (3,), np.float32)})
    policy = build_policy(
        {"name": "actor_only", "actor": {"type": "mlp", "hidden_sizes": [8]}}, observations, space, "cpu"
    )
    with torch.no_grad():
        policy.actor[-1].weight.mul_(1000.0)
    session = pytest.importorskip("onnxruntime").InferenceSession(
        str(export_onnx(policy, observations, space, tmp_path / "p.onnx"))
    )
    seen = torch.randn(9, 3)
    with torch.no_grad():
        wanted = policy.get_action(TensorDict({"state": seen}, [9]), deterministic=True)[0]
    assert len(wanted.unique(dim=0)) > 2
    assert np.array_equal(session.run(None, {"state": seen.numpy()})[0], wanted.numpy())
    data = json.loads(session.get_modelmeta().custom_metadata_map["action_space"])
    assert (
        data
        == {"choices": {"type": "multi_discrete", "nvec": [5, 3, 4]}, "switches": {"type": "multi_binary", "n": 4}}[
            kind
        ]
    )


def test_the_largest_number_is_no_bound() -> None:
    class Reads(gym.Env):
        observation_space = gym.spaces.Box(-1.0, 1.0, (1,))
        largest = float(np.finfo(np.float32).max)
        action_space = gym.spaces.Box(-largest, largest, (2,))

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
            return np.zeros(1, np.float32), {}

        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            return np.zeros(1, np.float32), float(action[0]), False, False, {}

    with GymnasiumVecEnv.from_factory(Reads, 1, max_episode_steps=5) as env:
        env.reset()
        assert float(env.step(torch.tensor([[0.5, 2.5]]))[1]) == 0.5
        assert np.isinf(env.action_space.high).all()  # type: ignore[attr-defined]
