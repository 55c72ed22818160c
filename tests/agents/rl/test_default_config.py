"""Trainings that are named by their environment alone: the shipped config, or defaults by the kind of its spaces."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from rich.console import Console

from embodichain.agents.rl import default_config
from embodichain.agents.rl.config import TrainerCfg, load_train_config, log_run_size, override
from embodichain.agents.rl.train import train_from_config
from embodichain.cli.main import main
from embodichain.errors import ConfigError, UnknownNameError


class Pictures(gym.Env):
    """An environment of images and choices."""

    observation_space = gym.spaces.Box(0, 255, (3, 32, 24), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}


@pytest.mark.parametrize(
    ("name", "num_envs", "num_steps", "total", "rate"),
    [
        ("Pendulum-v1", 8, 256, 1_000_000, 3e-4),
        ("CartPole-v1", 8, 128, 500_000, 5e-4),
        ("Pictures-v0", 8, 128, 5_000_000, 2.5e-4),
        ("InvertedPendulum-v5", 64, 64, 1_000_000, 3e-4),
    ],
)
def test_defaults_go_by_actions_and_observations(name, num_envs, num_steps, total, rate, monkeypatch):
    monkeypatch.setitem(gym.registry, "Pictures-v0", gym.envs.registration.EnvSpec("Pictures-v0", Pictures))
    cfg = override(load_train_config(name), [])
    assert (cfg.trainer.num_envs, cfg.trainer.buffer_size, cfg.trainer.total_steps) == (num_envs, num_steps, total)
    assert cfg.algorithm.cfg["learning_rate"] == rate
    assert cfg.algorithm.cfg["normalize_reward"]
    assert cfg.policy["normalize_obs"]


def test_shipped_config_goes_before_defaults():
    cfg = load_train_config("pushcuberl")
    assert (cfg.trainer.exp_name, cfg.trainer.num_envs) == ("push_cube_ppo", 256)
    assert load_train_config("configs/agents/rl/push_cube/train_config.json") == cfg


def test_configs_for_a_gpu_and_instructions_are_told(caplog, monkeypatch):
    """Of a task whose only shipped config is for a GPU."""
    shipped = default_config.shipped_config
    monkeypatch.setattr(default_config, "shipped_config", lambda name, *file: shipped(name, *file) if file else None)
    with caplog.at_level("INFO"):
        load_train_config("StackCubeLanguageRL")
    assert "embodichain train" in caplog.text
    assert "stack_cube_language/train_config_gpu.json" in caplog.text
    assert "the words of 'instruction' as bytes" in caplog.text


def test_steps_of_chunks_are_not_foretold(caplog):
    caplog.set_level("INFO")
    log_run_size(TrainerCfg(num_envs=4, buffer_size=8, iterations=2), chunk_size=3)
    assert caplog.messages == ["4 envs, rollouts of 8 decisions on up to 3 actions"]


def test_a_gymnasium_environment_trains_by_its_name(tmp_path, caplog):
    caplog.set_level("INFO")
    words = ["--trainer.total_steps", "60", "--trainer.buffer_size", "8", "--trainer.output_dir", str(tmp_path)]
    result = train_from_config("CartPole-v1", [*words, "--trainer.enable_eval", "false"], console=Console(quiet=True))
    assert result.global_step == 64
    told = "8 envs, rollouts of 8 steps, 64 steps in all (total_steps, 60, rounded up to whole rollouts)"
    assert told in caplog.messages
    assert result.run_dir.name.startswith("cartpole_v1_ppo_")


def test_what_is_no_environment_is_told(tmp_path, capfd):
    with pytest.raises(UnknownNameError, match="'CartPole-v1'"):
        load_train_config("CartPoel-v1")
    with pytest.raises(ConfigError, match=r"got a folder.*--resume"):
        load_train_config(tmp_path)
    assert main(["train", str(tmp_path / "no.json")]) == 2
    assert "no such file" in capfd.readouterr().err
