"""Who acts: a trained policy from a checkpoint, an expert with noise, chance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stream_envs import gym_config, stream_settings
from tensordict import TensorDict

from embodichain.agents.datasets.frames import Episode, EpisodeSource
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg, register_actor
from embodichain.agents.engine.shared_buffer import SharedBuffer
from embodichain.agents.engine.sources import open_source, stream_seed
from embodichain.agents.engine.worker import Worker
from embodichain.agents.rl.checkpoint import load_policy, save_checkpoint
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.train import train_from_config
from embodichain.agents.rl.utils.tensordicts import space_to_data
from embodichain.cli.stream import load_stream_config
from embodichain.envs.registration import make
from embodichain.errors import CheckpointError, ConfigError
from tests.agents.rl.training_cases import write_config

TASK = {"id": "CartPoleRL", "num_envs": 4, "max_episode_steps": 30, "num_threads": 1}
POLICY = {"name": "actor_critic", "actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}}


def episodes(source: EpisodeSource, count: int) -> list[tuple[dict, int, int]]:
    """Return copies of the frames, seeds and policy versions of the next episodes."""
    found: list[tuple[dict, int, int]] = []
    while len(found) < count:
        for episode in source.advance():
            frames = {key: torch.cat(pieces) for key, pieces in episode.frames.items()}
            found.append((frames, episode.seed, episode.policy_version))
    source.close()
    return found[:count]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    env = make(TASK)
    policy = build_policy({**POLICY, "critic": POLICY["actor"]}, env.observation_space, env.action_space, "cpu")
    policy.version.fill_(17)
    spaces = {"observation": space_to_data(env.observation_space), "action": space_to_data(env.action_space)}
    config = {"trainer": {}, "policy": {**POLICY, "critic": POLICY["actor"]}}
    return save_checkpoint(tmp_path / "policy", {"config": config, "spaces": spaces, "policy": policy.state_dict()})


def test_a_policy_acts_as_its_checkpoint_says(checkpoint: Path) -> None:
    action = {"source": "policy", "path": str(checkpoint), "deterministic": True}
    cfg = OnlineDataEngineCfg(gym_config=TASK, action_config=action)
    policy = load_policy(checkpoint)
    for frames, _, version in episodes(open_source(cfg), 3):
        assert version == 17
        # The observation of every frame, through the policy, gives the action of that frame.
        observation = TensorDict(
            {key[1:]: value for key, value in frames.items() if key[0] == "observation"},
            batch_size=[len(frames[("action",)])],
        )
        expected = policy.get_action(observation, deterministic=True)[0].clamp(-1, 1)
        assert torch.allclose(frames[("action",)], expected, atol=1e-6)


def test_a_run_of_the_trainer_feeds_an_engine(tmp_path: Path) -> None:
    """Train for a moment, then stream what was learned: every stored action is the policy's for what it saw."""
    task = {"id": "CartPoleRL", "max_episode_steps": 20, "num_threads": 1, "num_envs": 4}
    train_from_config(write_config(tmp_path / "train.json", tmp_path / "run"))
    policy = load_policy(tmp_path / "run")
    action = {"source": "policy", "path": str(tmp_path / "run"), "deterministic": True}
    cfg = OnlineDataEngineCfg(
        buffer_size=8, max_episode_steps=20, gym_config=task, action_config=action, progress=False
    )
    with OnlineDataEngine(cfg) as engine:
        assert {engine.episode_info(row).policy_version for row in range(8)} == {int(policy.version)}
        batch = engine.sample_batch(64, 3)
    observation = batch["observation"].reshape(-1)
    expected = policy.get_action(observation, deterministic=True)[0].clamp(-1, 1)
    assert int(policy.version) > 0
    assert torch.allclose(batch["action"].reshape(len(observation), -1), expected, atol=1e-5)


def test_a_checkpoint_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    cfg = OnlineDataEngineCfg(gym_config=TASK, action_config={"source": "policy", "path": str(tmp_path / "none")})
    with pytest.raises(CheckpointError):
        open_source(cfg)


def test_an_actor_of_a_trusted_module_acts_in_worker_processes() -> None:
    with OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(action_config={"source": "constant"}))) as engine:
        assert (engine.sample_batch(32, 4)["action"] == 0.25).all()
        assert engine.episode_info(0).policy_version == 5


def test_names_of_actors_are_checked() -> None:
    with pytest.raises(ConfigError, match="expert"):
        OnlineDataEngineCfg(gym_config=TASK, action_config={"source": "exprt"}).check()
    with pytest.raises(ConfigError, match="expert"):  # and in the worker, which knows those of trusted modules, too
        open_source(OnlineDataEngineCfg(**stream_settings(action_config={"source": "exprt"})))
    with pytest.raises(ConfigError, match="taken"):
        register_actor("policy", lambda env, **_: None)


def test_an_environment_is_closed_if_its_actor_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    env = make({"id": "CartPole-v1"})
    env.close()
    monkeypatch.setattr(type(env), "close", lambda self: closed.append(True))
    with pytest.raises(ConfigError, match="has no expert"):
        open_source(OnlineDataEngineCfg(gym_config={"id": "CartPole-v1"}, action_config={"source": "expert"}))
    assert closed


def test_the_stored_action_is_the_one_before_the_noise() -> None:
    """A disturbed expert: the stored actions are the expert's for the stored observations, not those executed."""
    cfg = OnlineDataEngineCfg(gym_config={**TASK, "id": "ReachRL"}, action_config={"noise_std": 0.3})
    env = make({**TASK, "id": "ReachRL", "num_envs": 1})
    differs = 0
    for frames, seed, _ in episodes(open_source(cfg), 3):
        obs, _ = env.reset(seed=torch.tensor([seed]))
        assert torch.equal(obs["robot", "qpos"][0], frames[("observation", "robot", "qpos")][0])
        assert torch.allclose(env.expert_action()[0], frames[("action",)][0], atol=1e-6)
        obs, *_ = env.step(frames[("action",)][:1])
        differs += int(not torch.allclose(obs["robot", "qpos"][0], frames[("observation", "robot", "qpos")][1]))
    assert differs == 3


SHIPPED = Path(__file__).parents[3] / "configs/agents"


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ("stream/push_cube.json", 100),
        ("rl/push_cube_language/gym_config.json", 100),
        ("rl/pick_cube/gym_config.json", 150),
    ],
)
def test_demonstrations_run_to_the_time_limit_and_end_solved(config: str, steps: int) -> None:
    """Of the shipped configs, as they are: success ends an episode of training, but no demonstration."""
    source = open_source(load_stream_config(SHIPPED / config))
    found: list[Episode] = []
    while not found:
        found = source.advance()
    source.close()
    assert {episode.length for episode in found} == {steps}
    assert sum(bool(episode.success) for episode in found) >= 0.95 * len(found)
    assert not any(torch.cat(episode.frames[("terminated",)]).any() for episode in found)


@pytest.mark.parametrize(
    ("action", "ends"),
    [
        ({}, False),
        ({"terminate_on_success": True}, True),
        ({"source": "random"}, True),
        ({"source": "random", "terminate_on_success": False}, False),
    ],
)
def test_whether_success_ends_episodes_can_be_chosen(action: dict, ends: bool) -> None:
    task = {"id": "ReachRL", "num_envs": 4, "max_episode_steps": 6, "num_threads": 1, "env": {"success_threshold": 5.0}}
    lengths = [len(frames[("action",)]) for frames, _, _ in episodes(open_source(_cfg(task, action)), 4)]
    assert lengths == [1 if ends else 6] * 4


def test_success_of_other_environments_cannot_be_made_to_end_them() -> None:
    with pytest.raises(ConfigError, match=r"terminate_on_success.*CartPole-v1"):
        open_source(_cfg({"id": "CartPole-v1"}, {"source": "random", "terminate_on_success": True}))


def _cfg(gym_config: dict, action_config: dict) -> OnlineDataEngineCfg:
    return OnlineDataEngineCfg(gym_config=gym_config, action_config=action_config)


def test_the_same_seed_gives_the_same_episodes() -> None:
    cfg = OnlineDataEngineCfg(**stream_settings(gym_config=gym_config(num_envs=2)))
    first, again, other = (
        [seed for _, seed, _ in episodes(open_source(cfg, worker, incarnation), 6)]
        for worker, incarnation in ((0, 0), (0, 0), (0, 1))
    )
    assert first == again
    assert not set(first) & set(other)


def test_workers_and_their_replacements_have_seeds_of_their_own() -> None:
    seeds = {
        stream_seed(seed, worker, incarnation) for seed in range(3) for worker in range(4) for incarnation in range(4)
    }
    assert len(seeds) == 48
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_only_success_needs_an_environment_that_tells() -> None:
    cfg = OnlineDataEngineCfg(
        gym_config={"id": "CartPole-v1"}, action_config={"source": "random", "only_success": True}
    )
    source = open_source(cfg)
    buffer = SharedBuffer(source.layout, cfg.buffer_size, source.max_steps, 1)
    worker = Worker(cfg, 0, source, buffer)
    while not (ended := source.advance()):
        pass
    assert ended[0].frames[("action",)][0].dtype == torch.int64
    with pytest.raises(ConfigError, match="do not report success"):
        worker.take(ended[0])
    source.close()
