"""Evaluations: the right episodes are counted, nothing else is touched, memory ends with an episode."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.rl.evaluation import PolicyActor, evaluate
from embodichain.agents.rl.models import Policy, build_policy
from embodichain.agents.rl.train import train_from_config
from embodichain.cli.eval import main as eval_command
from embodichain.config import load_config
from embodichain.envs.registration import make
from embodichain.errors import CheckpointError, ConfigError
from embodichain.utils.torch_runtime import get_random_state
from tests.agents.rl.test_checkpoint import same
from tests.agents.rl.training_cases import write_config


class CountingPolicy(Policy):
    """Acts with how many observations of the episode it has seen; draws random numbers, as a policy may."""

    is_recurrent = True

    def initial_state(self, batch_size):
        return torch.zeros(batch_size, 1)

    def act(self, obs, state=None, deterministic=False):
        torch.rand(3)
        seen = self.initial_state(obs.batch_size[0]) if state is None else state
        zeros = torch.zeros(obs.batch_size[0])
        return seen / 100, zeros, zeros, seen + 1

    def get_action(self, obs, deterministic=False):
        return self.act(obs)[:3]

    def get_value(self, obs):
        return torch.zeros(obs.batch_size[0])

    def evaluate_actions(self, obs, actions):
        raise NotImplementedError


class Recorder:
    """An environment whose actions are written down."""

    def __init__(self, env: Any) -> None:
        self.env, self.actions = env, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, action):
        self.actions.append(action.clone())
        return self.env.step(action)


@pytest.fixture
def env():
    with make("CartPoleRL", num_envs=3, max_episode_steps=5, num_threads=1) as made:
        yield made


def test_memory_begins_anew_with_every_episode(env):
    recorder = Recorder(env)
    result = evaluate(CountingPolicy(), recorder, episodes=6, seed=0)
    counts = (torch.stack(recorder.actions)[:, :, 0] * 100).round().int()
    assert [episode.length for episode in result.episodes] == [5] * 6
    assert counts.tolist() == [[step % 5] * 3 for step in range(10)]


def test_return_is_the_sum_of_rewards(env):
    policy = build_policy({"name": "actor_critic"}, env.observation_space, env.action_space, "cpu")
    result = evaluate(policy, env, episodes=3, seed=7)
    total = torch.zeros(3, dtype=torch.float64)
    obs, _ = env.reset(seed=7)
    for _ in range(5):
        obs, reward, *_ = env.step(policy.eval().get_action(obs, deterministic=True)[0].detach().clamp(-1, 1))
        total += reward.double()
    assert sorted(episode.total_reward for episode in result.episodes) == pytest.approx(sorted(total.tolist()))
    assert result.scalars()["eval/return"] == pytest.approx(float(total.mean()))


def test_random_generators_and_mode_are_left_alone(env):
    policy = CountingPolicy().train()
    before = get_random_state()
    first = evaluate(policy, env, episodes=4, seed=1)
    assert same(get_random_state(), before)
    assert policy.training
    second = evaluate(policy, env, episodes=4, seed=1)
    assert [e.total_reward for e in first.episodes] == [e.total_reward for e in second.episodes]


def test_discrete_actions_are_evaluated():
    with make({"id": "CartPole-v1"}, num_envs=2) as env:
        policy = build_policy({"name": "actor_critic"}, env.observation_space, env.action_space, "cpu")
        result = evaluate(policy, env, episodes=4, seed=0)
    assert result.summary.episodes == 4
    assert result.summary.mean_return == result.summary.mean_length  # one reward per step
    assert result.summary.success_rate is None


def test_actor_forgets_only_the_envs_named():
    policy = build_policy({"name": "actor_critic", "memory": {"hidden_size": 4}}, 3, 2, "cpu")
    with make("CartPoleRL", num_envs=3, num_threads=1) as env:
        actor = PolicyActor(policy, env)
    actor(TensorDict({"x": torch.ones(3, 3)}, batch_size=[3]))
    before = actor.state.clone()
    actor.reset([1])
    assert torch.equal(actor.state[[0, 2]], before[[0, 2]])
    assert actor.state[1].abs().sum() == 0 < before[1].abs().sum()


def test_command_reports_the_best_checkpoint(tmp_path, capsys):
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run"))
    assert eval_command([str(tmp_path / "run"), "--episodes", "5", "--output", str(tmp_path / "figures.json")]) == 0
    figures = load_config(tmp_path / "figures.json")
    assert figures["episodes"] == len(figures["each"]) == 5
    assert figures["mean_return"] == pytest.approx(sum(e["total_reward"] for e in figures["each"]) / 5)
    assert re.search(r"episodes\s+│\s+5 ", capsys.readouterr().out)
    again = tmp_path / "again.json"
    eval_command([str(tmp_path / "run"), "--episodes", "5", "--output", str(again)])
    assert load_config(again) == figures


def test_command_films_one_episode(tmp_path, capsys):
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 1}))
    eval_command([str(tmp_path / "run"), "--episodes", "2", "--video"])
    said = capsys.readouterr().out
    films = list((tmp_path / "run" / "videos").glob("eval_step_*.mp4"))
    assert len(films) == 1 or "no video: " in said


def test_command_says_what_is_wrong(tmp_path):
    with pytest.raises(CheckpointError, match="found neither"):
        eval_command([str(tmp_path)])
    with pytest.raises(ConfigError, match="--episodes: expected at least 1, got 0"):
        eval_command([str(tmp_path), "--episodes", "0"])


def test_command_help_is_quick_to_import():
    heavy = "import sys, embodichain.cli.eval; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", heavy]).returncode == 0
