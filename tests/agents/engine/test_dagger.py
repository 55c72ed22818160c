"""DAgger on the stream: a policy acts, the expert labels, and newer weights reach real worker processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.datasets.frames import EpisodeSource
from embodichain.agents.engine import ExpertShareCfg, OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.sources import open_source
from embodichain.agents.rl.checkpoint import save_checkpoint
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.tensordicts import space_to_data
from embodichain.envs.registration import make
from embodichain.errors import ConfigError, WeightsError
from tests.programs import wait_until

STEPS = 12
TASK = {
    "id": "ReachRL",
    "num_envs": 3,
    "max_episode_steps": STEPS,
    "num_threads": 1,
    "env": {"terminate_on_success": False},
}
MLP = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
GAUSSIAN = {"name": "actor_critic", "actor": MLP, "critic": MLP}
FLOW = {"name": "flow", "actor": MLP, "critic": MLP, "chunk_size": 5, "flow": {"num_steps": 2}}

Frames = dict[tuple[str, ...], Tensor]


def new_policy(block: dict, version: int, seed: int = 0) -> Policy:
    env = make({**TASK, "num_envs": 1})
    torch.manual_seed(seed)
    policy = build_policy(block, env.observation_space, env.action_space, "cpu")
    env.close()
    policy.version.fill_(version)
    with torch.no_grad():  # untrained, policies hardly move
        for parameter in policy.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return policy.eval()


def checkpoint_of(policy: Policy, block: dict, folder: Path) -> str:
    env = make({**TASK, "num_envs": 1})
    spaces = {"observation": space_to_data(env.observation_space), "action": space_to_data(env.action_space)}
    state = {"config": {"trainer": {}, "policy": block}, "spaces": spaces, "policy": policy.state_dict()}
    return str(save_checkpoint(folder, state))


def dagger(policy: str | None = None, **settings: object) -> OnlineDataEngineCfg:
    action = {"source": "dagger", "deterministic": True, "policy": policy, **settings}
    return OnlineDataEngineCfg(gym_config=TASK, action_config=action, progress=False)


def episodes(source: EpisodeSource, count: int) -> list[tuple[Frames, int, int]]:
    found: list[tuple[Frames, int, int]] = []
    while len(found) < count:
        for episode in source.advance():
            frames = {key: torch.cat(pieces) for key, pieces in episode.frames.items()}
            found.append((frames, episode.seed, episode.policy_version))
    source.close()
    return found[:count]


def observations(frames: Frames) -> TensorDict:
    flat = {key[1:]: value for key, value in frames.items() if key[0] == "observation"}
    return TensorDict(flat, batch_size=[len(frames["action",])])


@torch.no_grad()
def chosen(policy: Policy, frames: Frames) -> Tensor:
    """Return what the policy does in an episode in which it alone acts, decision by decision."""
    obs, size = observations(frames), policy.chunk_size
    actions = policy.get_action(obs[::size], deterministic=True)[0].clamp(-1, 1)
    return actions if size == 1 else actions.flatten(0, 1)[: len(obs)]


@pytest.mark.parametrize("block", [GAUSSIAN, FLOW], ids=["gaussian", "flow in chunks"])
@pytest.mark.parametrize("unit", ["decision", "episode"])
def test_labels_are_the_experts_in_the_states_that_the_policy_reached(block: dict, unit: str, tmp_path: Path) -> None:
    """Episodes are repeated from their seeds with the actions that were executed: states and labels must agree."""
    policy, size = new_policy(block, 7), block.get("chunk_size", 1)
    cfg = dagger(checkpoint_of(policy, block, tmp_path / "p"), expert_share=0.4, expert_acts_for=unit)
    env, who = make({**TASK, "num_envs": 1}), []
    for frames, seed, version in episodes(open_source(cfg), 12):
        assert version == 7
        label, executed, by_expert = frames["action",], frames["executed_action",], frames["expert_acted",]
        obs, _ = env.reset(seed=torch.tensor([seed]))
        for step in range(STEPS):
            assert torch.allclose(obs["robot", "qpos"][0], frames["observation", "robot", "qpos"][step], atol=1e-6)
            assert torch.allclose(env.expert_action()[0], label[step], atol=1e-5)
            obs, *_ = env.step(executed[step : step + 1])
        assert torch.equal(executed[by_expert], label[by_expert])
        assert not torch.isclose(executed[~by_expert], label[~by_expert]).all(-1).any()
        decisions = by_expert[::size]  # one draw for each
        assert torch.equal(decisions.repeat_interleave(size)[:STEPS], by_expert)
        assert unit == "decision" or len(decisions.unique()) == 1
        if not by_expert.any():
            assert torch.allclose(executed, chosen(policy, frames), atol=1e-5)
        who += decisions.tolist()
    assert 0 < sum(who) < len(who)
    if unit == "decision" and size == 1:
        assert sum(who) / len(who) == pytest.approx(0.4, abs=0.13)


def test_the_same_seed_gives_the_same_episodes_and_noise_reaches_what_is_executed(tmp_path: Path) -> None:
    path = checkpoint_of(new_policy(FLOW, 1), FLOW, tmp_path / "p")
    cfg = dagger(path, expert_share=0.5, deterministic=False, noise_std=0.05)
    first, again, other = (episodes(open_source(cfg, 0, incarnation), 4) for incarnation in (0, 0, 1))
    for (one, seed, _), (two, same, _) in zip(first, again, strict=True):
        assert seed == same
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert not {seed for _, seed, _ in first} & {seed for _, seed, _ in other}
    frames = first[0][0]
    assert not torch.isclose(frames["executed_action",], frames["action",]).all(-1)[frames["expert_acted",]].any()


def test_shares_follow_their_schedule() -> None:
    linear = ExpertShareCfg(schedule="linear", start=0.8, end=0.2, over=100)
    assert [round(linear.at(count), 6) for count in (0, 25, 50, 100, 1000)] == [0.8, 0.65, 0.5, 0.2, 0.2]
    falling = ExpertShareCfg(schedule="exponential", start=1.0, end=0.1, over=10, decay=0.5)
    assert [round(falling.at(count), 6) for count in (0, 10, 20, 1000)] == [1.0, 0.55, 0.325, 0.1]
    assert ExpertShareCfg(start=0.3).at(1e9) == 0.3


@pytest.mark.parametrize("unit", ["episodes", "steps", "updates"])
def test_a_schedule_goes_on_where_the_worker_before_was(unit: str, tmp_path: Path) -> None:
    path = checkpoint_of(new_policy(GAUSSIAN, 5), GAUSSIAN, tmp_path / "p")
    over = {"episodes": 12, "steps": 12 * STEPS, "updates": 10}[unit]
    cfg = dagger(path, expert_share={"schedule": "linear", "start": 1.0, "unit": unit, "over": over})
    source = open_source(cfg.replace(num_workers=2))
    actor = source.actor
    assert actor.expert_share == (0.5 if unit == "updates" else 1.0)
    for _ in range(STEPS):  # three episodes of this worker count for two workers
        source.advance()
    assert actor.expert_share == 0.5
    source.resume(steps=6 * STEPS, episodes=6)
    assert actor.expert_share == (0.5 if unit == "updates" else 0.0)
    source.close()


def rows_of(engine: OnlineDataEngine) -> list[Frames]:
    """Return the frames of all rows; nothing may be written meanwhile."""
    found = []
    for row in range(engine.buffer_size):
        items = engine.shared_buffer[row].items(include_nested=True, leaves_only=True)
        found.append({key if isinstance(key, tuple) else (key,): value.clone() for key, value in items})
    return found


def renew(engine: OnlineDataEngine, version: int) -> list[Frames]:
    """Draw until every row is of episodes that began after this version was adopted; return them."""
    for _ in range(3):
        wait_until(lambda: all(worker.idle for worker in engine.worker_stats()))
        infos = [engine.episode_info(row) for row in range(engine.buffer_size)]
        engine.sample_batch(engine.buffer_size, 1)
        wait_until(lambda before=infos: all(engine.episode_info(i.row).sequence > i.sequence for i in before))
    wait_until(lambda: all(worker.idle for worker in engine.worker_stats()))
    assert {engine.episode_info(row).policy_version for row in range(engine.buffer_size)} == {version}
    return rows_of(engine)


def test_published_weights_reach_workers_and_those_that_replace_them() -> None:
    """Two processes: the expert alone, newer and newer weights, another architecture, and a worker that is killed."""
    cfg = dagger().replace(buffer_size=12, num_workers=2, refill_threshold=1)
    first, flow = new_policy(GAUSSIAN, 0), new_policy(FLOW, 3)
    with OnlineDataEngine(cfg) as engine:
        for frames in rows_of(engine):
            assert frames["expert_acted",].all()
            assert torch.equal(frames["executed_action",], frames["action",])
        assert engine.episode_info(0).policy_version == -1
        published = [engine.publish(first) for _ in range(5)]  # a policy that does not count its updates
        assert published == [0, 1, 2, 3, 4]
        with torch.no_grad():
            for parameter in first.parameters():
                parameter *= 1.5
        first.version.fill_(9)
        assert engine.publish(first) == 9
        for frames in renew(engine, 9):
            assert not frames["expert_acted",].any()
            assert torch.allclose(frames["executed_action",], chosen(first, frames), atol=1e-5)

        assert engine.publish(flow) == 10
        for frames in renew(engine, 10):
            assert torch.allclose(frames["executed_action",], chosen(flow, frames), atol=1e-5)

        victim = engine.worker_pids[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: engine.stats().restarts == 1)
        wait_until(lambda: len(engine.worker_pids) == 2 and victim not in engine.worker_pids)
        for frames in renew(engine, 10):
            assert torch.allclose(frames["executed_action",], chosen(flow, frames), atol=1e-5)
        batch = engine.sample_batch(8, 3)
        assert batch["executed_action"].shape == batch["action"].shape
        assert batch["expert_acted"].dtype == torch.bool


def test_weights_published_before_the_start_act_from_the_first_step_on() -> None:
    cfg, policy = dagger().replace(buffer_size=6, action_config=dagger().action_config), new_policy(GAUSSIAN, 4)
    engine = OnlineDataEngine(cfg)
    engine.publish(policy)
    with engine:
        for frames in rows_of(engine):
            assert torch.allclose(frames["executed_action",], chosen(policy, frames), atol=1e-5)
        assert engine.episode_info(0).policy_version == 4


@pytest.mark.extra("ray")
def test_weights_reach_workers_in_a_ray_cluster() -> None:
    cfg, policy = dagger().replace(buffer_size=6, refill_threshold=1, workers="ray"), new_policy(FLOW, 4)
    with OnlineDataEngine(cfg) as engine:
        assert all(frames["expert_acted",].all() for frames in rows_of(engine))
        assert engine.publish(policy) == 4
        for frames in renew(engine, 4):
            assert torch.allclose(frames["executed_action",], chosen(policy, frames), atol=1e-5)


class OwnPolicy(Policy):
    """An object that cannot be pickled: its class claims to be of the main module."""

    __module__ = "__main__"

    def get_action(self, obs, deterministic=False):
        raise AssertionError

    get_value = evaluate_actions = get_action


def test_what_cannot_be_published_is_refused() -> None:
    expert = OnlineDataEngine(OnlineDataEngineCfg(gym_config=TASK))
    with pytest.raises(ConfigError, match=r"no policy acts with 'expert'.*'dagger'"):
        expert.publish(new_policy(GAUSSIAN, 0))
    engine = OnlineDataEngine(dagger())
    with pytest.raises(WeightsError, match="Linear"):
        engine.publish(torch.nn.Linear(2, 2))
    with pytest.raises(WeightsError, match="OwnPolicy cannot be sent"):
        engine.publish(OwnPolicy())


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"source": "dagger", "only_success": True}, "only_success"),
        ({"source": "dagger", "path": "runs/a"}, r"path.*'policy': 'runs/a'"),
        ({"source": "dagger", "expert_share": 1.5}, r"expert_share\.start"),
        ({"source": "dagger", "expert_share": {"schedule": "cosine"}}, r"expert_share\.schedule"),
        ({"expert_share": 0.5}, r"expert_share.*only source 'dagger'"),
        ({"source": "policy", "path": "a", "policy": "b"}, r"policy: only source 'dagger'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(action: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OnlineDataEngineCfg(gym_config=TASK, action_config=action).check()


def test_a_task_without_an_expert_cannot_be_corrected() -> None:
    with pytest.raises(ConfigError, match="has no expert"):
        open_source(OnlineDataEngineCfg(gym_config={"id": "CartPole-v1"}, action_config={"source": "dagger"}))
