"""What a new user stumbles over: each mistake is one short message, and nothing is left behind."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from rich.console import Console

from embodichain.agents.rl.algo.base import ALGORITHMS
from embodichain.agents.rl.checkpoint import load_policy
from embodichain.agents.rl.models.registry import POLICIES
from embodichain.agents.rl.train import train_from_config
from embodichain.cli.main import main
from embodichain.envs.registration import make
from embodichain.utils.console import ProgressView
from tests.agents.rl.training_cases import write_config

ROOT = Path(__file__).parents[2]


class Wrong(gym.Env):
    """Declares three numbers and returns four."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    lengths = (4, 4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.lengths[0], np.float32), {}

    def step(self, action):
        return np.zeros(self.lengths[1], np.float32), 1.0, False, False, {}


class Later(Wrong):
    lengths = (3, 4)


class Parts(Wrong):
    observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Box(-1, 1, (1,))})

    def reset(self, *, seed=None, options=None):
        return {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}, {}


class Empty(Wrong):
    observation_space = gym.spaces.Box(-1, 1, (0,), np.float32)
    lengths = (0, 0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, with the odd environments registered."""
    for kind in (Wrong, Later, Parts, Empty):
        spec = gym.envs.registration.EnvSpec(f"{kind.__name__}-v0", kind, max_episode_steps=5)
        monkeypatch.setitem(gym.registry, spec.id, spec)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "missing.json").write_text(json.dumps({"trainer": {"gym_config": "nothing.json", "iterations": 1}}))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train Wrong-v0", "Wrong-v0: reset() returned observation of shape (4,), but observation_space declares (3,)"),
        ("train Later-v0", "Later-v0: step() returned observation of shape (4,)"),
        ("train Parts-v0", "Parts-v0: reset() returned observation['b'] of shape (3,)"),
        ("train Empty-v0", "the observation holds no numbers for the policy to see"),
        ("play Wrong-v0 --policy random", "Wrong-v0: reset() returned observation of shape (4,)"),
        ("train missing.json", "no such file (looked for {}/nothing.json)"),
        ("train nothing.json", "no such file"),
        ("train CartPoleRL --trainer.device tpu", "trainer.device: expected a device"),
        ("train CartPoleRL --trainer.num_envs four", "--trainer.num_envs: expected an integer, got 'four'"),
        ("train CartPoleRL --lr 1e-3", "lr: unknown flag. Did you mean --algorithm.cfg.learning_rate?"),
        ("train CartPoleRL --policy.critic_obs robot", "holds no numbers for the policy to see, as all of it is in"),
        ("play runs/nope", "runs/nope: there is no such folder or file"),
        ("play CartPoleRL --num_envs four", "--num-envs: expected an integer, got 'four'"),
        ("play CartPoleRL --speed fast", "--speed: expected a number, got 'fast'"),
        ("play CartPoleRl --epsiodes 3", "--epsiodes, 3. Did you mean --episodes?"),
        ("stream CartPoleRL --num_envs four", "num_envs: unknown flag. Did you mean --gym_config.num_envs?"),
        ("imitate CartPoleRL --trainer.iterations 2", "Did you mean --trainer.total_steps?"),
        ("envs chek CartPoleRL", "chek, CartPoleRL. Expected one of list, check."),
        (
            "train CartPoleRL --trainer.run_dir a/b/c --policy.critic_obs robot",
            "holds no numbers for the policy to see",
        ),
        ("envs check CartPole-v9", "unknown environment 'CartPole-v9'"),
        ("envs check CartPoleRL --device tpu", "device: expected cpu, cuda or cuda:N"),
        ("robots check iiwa", "calls register_robot, name it: --trust MODULE"),
        ("stream CartPoleRL --duration -1", "--duration: expected a number of seconds above 0, got -1.0"),
        ("train --trainer.exp_name a/b CartPoleRL", "trainer.exp_name: expected a name of letters, digits and . _ + -"),
        ("eval nowhere", "nowhere: expected a run or a checkpoint, but there is no such folder"),
        ("play Pendulum-v1", "Pendulum-v1 has no expert: use --policy random"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(folder, capfd, words, said):
    before = set(folder.iterdir())
    assert main(words.split()) == 2
    told = capfd.readouterr().err
    assert said.format(folder) in told
    assert "Traceback" not in told
    assert "RowwiseSyncVectorEnv" not in told
    assert set(folder.iterdir()) == before


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stumbles")
    config = write_config(folder / "c.json", folder / "run", trainer={"iterations": 1, "num_eval_episodes": 2})
    return train_from_config(config, console=Console(quiet=True)).run_dir


def test_a_folder_that_was_there_stays(folder):
    """Only what a failed start made itself is removed."""
    (folder / "mine").mkdir()
    (folder / "runs").mkdir()
    assert main(["train", "Empty-v0", "--trainer.run_dir", "mine"]) == 2
    assert main(["train", "Empty-v0"]) == 2
    assert (folder / "mine" / "train_config.json").is_file()
    assert list((folder / "runs").iterdir()) == []


def test_play_and_eval_show_the_same_table_of_a_run(run, capfd):
    assert main(["eval", str(run), "--episodes", "3", "--seed", "5", "--num-envs", "3"]) == 0
    table = [line for line in capfd.readouterr().out.splitlines() if "mean" in line or "rate" in line]
    assert len(table) == 3
    assert main(["play", str(run), "--episodes", "3", "--seed", "5", "--num-envs", "3"]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert [line for line in shown if "mean" in line or "rate" in line] == table
    assert main(["play", str(run), "--policy", "random"]) == 2


def test_a_policy_is_judged_in_another_setting_of_its_environment(run, folder, capfd):
    short = folder / "short.json"
    short.write_text(json.dumps({"id": "CartPoleRL", "max_episode_steps": 3}))
    words = ["--episodes", "2", "--seed", "5"]
    assert main(["eval", str(run), *words, "--config", "short.json", "--output", "figures.json"]) == 0
    figures = json.loads((folder / "figures.json").read_text())
    assert [each["length"] for each in figures["each"]] == [3, 3]
    assert figures["config"] == "short.json"
    assert main(["play", str(run), *words, "--config", "short.json"]) == 0
    assert main(["play", "short.json", *words, "--policy", "zero"]) == 0
    told = capfd.readouterr().out
    assert len(re.findall(r"mean length\s+│\s+3", told)) == 3, told


@pytest.mark.parametrize("command", ["eval", "play"])
def test_a_setting_with_other_observations_is_refused_by_name(run, folder, capfd, command):
    camera = {"cameras": [{"name": "side", "width": 32, "height": 32}]}
    (folder / "camera.json").write_text(json.dumps({"id": "CartPoleRL", "env": {"observations": camera}}))
    assert main([command, str(run), "--episodes", "2", "--config", "camera.json"]) == 2
    told = capfd.readouterr().err
    assert "was trained with other observations than the environment has: image/side [32, 32, 3] is unknown" in told
    assert "leave it out of env.observations.cameras" in told


def test_a_folder_of_one_run_names_it(run, folder, monkeypatch, capfd):
    monkeypatch.chdir(run.parent)
    assert main(["train", "--resume", "."]) == 2
    assert ". is no run, but holds one: name that, run" in capfd.readouterr().err


def test_a_loaded_policy_acts_without_gradients(run):
    policy = load_policy(run)
    with make("CartPoleRL", num_envs=2) as env:
        action, log_prob, value = policy.get_action(env.reset(seed=0)[0], deterministic=True)
    assert not any(part.requires_grad for part in (action, log_prob, value))
    assert action.numpy().shape == (2, 1)
    assert policy.requires_grad_().get_value(torch.zeros(2, 4)).requires_grad


@pytest.mark.parametrize("width", [80, 60, 120])
def test_progress_and_time_left_fit_into_a_line(width):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, color_system=None)
    with ProgressView("quadruped_velocity_language_ppo", console) as view:
        view._marks.append((time.monotonic() - 10.0, 0, 0.0))
        view.show(1_234_000, 0.01, -1234.56, 0.95)
        assert view._bar is not None
        view._bar.refresh()
        lines = [line for line in output.getvalue().replace("\r", "\n").split("\n") if "success" in line]
    assert lines
    assert all(len(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip()) <= width for line in lines)
    assert "left" in lines[-1]


def test_the_example_of_everything_is_a_script(tmp_path, monkeypatch, capfd):
    example = ROOT / "examples/agents/rl/custom_everything.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), "--trainer.iterations", "2"])
    monkeypatch.setattr(POLICIES, "classes", dict(POLICIES.classes))
    monkeypatch.setattr(ALGORITHMS, "classes", dict(ALGORITHMS.classes))
    monkeypatch.setitem(sys.modules, example.stem, None)
    runpy.run_path(str(example), run_name="__main__")
    assert "over 32 episodes" in capfd.readouterr().out
    gym.registry.pop("PointMass-v0")
