"""Configs in the form of DexForce's EmbodiChain: understood, ignored with one warning, or refused in one error."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from embodichain.agents.rl.config import load_train_config, override
from embodichain.agents.rl.train import train_from_config
from embodichain.cli.stream import load_stream_config
from embodichain.envs.registration import load_gym_config
from embodichain.errors import ConfigError, UnknownNameError

NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "relu", "orthogonal_init": [1.4, 0.01]}}
TRAIN: dict[str, Any] = {
    "trainer": {
        "exp_name": "reach",
        "gym_config": "tasks/reach.json",
        "device": "cpu",
        "headless": True,
        "gpu_id": 0,
        "renderer": "hybrid",
        "enable_rt": False,
        "num_envs": 4,
        "iterations": 1,
        "rollout_steps": 8,
        "wandb_project_name": "arms",
        "events": {"eval": {"film": {"func": "record_camera_data", "params": {"eye": [0, 0, 1]}}}},
    },
    "policy": {"name": "actor_critic", "initial_log_std": -0.5, "actor": NETWORK, "critic": NETWORK},
    "algorithm": {"name": "PPO", "cfg": {"optimizer": {"name": "adam", "learning_rate": 2e-4}, "batch_size": 16}},
}
SCENE: dict[str, Any] = {
    "id": "ReachRL",
    "max_episodes": 5,
    "max_episode_steps": 40,
    "env": {
        "events": {"film": {"func": "record_camera_data_async", "mode": "interval"}},
        "observations": {},
        "rewards": {},
        "actions": {"delta_qpos": {"func": "DeltaQposTerm", "params": {"scale": 0.2}}},
        "extensions": {"success_threshold": 0.1},
        "dataset": {"lerobot": {"func": "LeRobotRecorder"}},
    },
    "sensor": [],
    "light": {},
    "rigid_object": [],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the environment in ``tasks``, and the config of the training elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "trainings").mkdir()
    write(tmp_path / "tasks/reach.json", SCENE)
    return tmp_path


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(json.dumps(data))
    return path


def changed(data: dict[str, Any], **entries: Any) -> dict[str, Any]:
    """Return a copy with entries such as ``trainer__seed=1`` set."""
    new = copy.deepcopy(data)
    for path, value in entries.items():
        *parents, last = path.split("__")
        block = new
        for parent in parents:
            block = block[parent]
        block[last] = value
    return new


def test_a_training_config_loads_with_one_warning_for_each_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cfg = override(load_train_config(write(folder / "trainings/train.json", TRAIN)), [])
    trainer, settings = cfg.trainer, cfg.algorithm.cfg
    assert (trainer.buffer_size, trainer.wandb_project, trainer.eval_video) == (8, "arms", True)
    assert settings["learning_rate"] == 2e-4
    assert cfg.policy["distribution"] == {"init_log_std": -0.5}
    environment = load_gym_config(trainer.environment)
    assert (environment.max_episode_steps, environment.env.success_threshold) == (40, 0.1)
    assert environment.env.actions.delta_qpos is not None
    assert environment.env.actions.delta_qpos.scale == 0.2
    of_training, of_scene = [record.getMessage() for record in caplog.records]
    for name in ("headless", "gpu_id", "renderer", "enable_rt", "film.params", "actor.network_cfg.orthogonal_init"):
        assert name in of_training
    for name in ("max_episodes", "env.events.film", "env.dataset"):
        assert name in of_scene


def test_such_a_training_runs(folder: Path) -> None:
    data = changed(TRAIN, trainer__enable_eval=False, trainer__run_dir=str(folder / "run"))
    result = train_from_config(write(folder / "trainings/train.json", data))
    assert result.global_step == 4 * 8


@pytest.mark.parametrize("place", ["trainings/tasks", "tasks", "trainings"])
def test_the_environment_is_found_beside_the_config_and_in_the_working_directory(folder: Path, place: str) -> None:
    (folder / "tasks/reach.json").unlink()
    (folder / place).mkdir(exist_ok=True)
    write(folder / place / "reach.json", {"id": "ReachRL", "max_episode_steps": 33})
    cfg = load_train_config(write(folder / "trainings/train.json", TRAIN))
    assert cfg.trainer.environment["max_episode_steps"] == 33


def test_a_file_that_is_only_called_the_same_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "tasks/reach.json").unlink()
    write(folder / "trainings/reach.json", {"id": "ReachRL"})
    with caplog.at_level(logging.WARNING):
        load_train_config(write(folder / "trainings/train.json", changed(TRAIN, trainer__gym_config="reach.json")))
        assert "reach.json" not in caplog.text.replace(str(folder / "trainings/train.json"), "")
        load_train_config(write(folder / "trainings/train.json", TRAIN))
    assert f"tasks/reach.json: no such file, taking {folder / 'trainings/reach.json'}" in caplog.text


def test_an_absolute_path_is_that_file_or_an_error(folder: Path) -> None:
    write(folder / "trainings/reach.json", {"id": "ReachRL"})
    path = str(folder / "elsewhere/reach.json")
    with pytest.raises(ConfigError) as caught:
        load_train_config(write(folder / "trainings/train.json", changed(TRAIN, trainer__gym_config=path)))
    assert f"no such file (looked for {path})" in str(caught.value)


def test_a_missing_environment_says_where_it_was_looked_for(folder: Path) -> None:
    (folder / "tasks/reach.json").unlink()
    with pytest.raises(ConfigError) as caught:
        load_train_config(write(folder / "trainings/train.json", TRAIN))
    for place in ("trainings/tasks/reach.json", "tasks/reach.json", "trainings/reach.json"):
        assert str(folder / place) in str(caught.value)


def test_all_that_is_not_understood_stands_in_one_error(folder: Path) -> None:
    write(
        folder / "tasks/reach.json",
        changed(
            SCENE,
            env__rewards={"near": {"func": "distance_to_target", "weight": 0.8}},
            env__extensions={"success_threshold": 0.1, "arm": "left"},
            env__sorcery=1,
            rigid_object=[{"uid": "cube"}],
            robot={"uid": "Arm", "urdf_cfg": {"components": []}},
        ),
    )
    data = changed(
        TRAIN,
        trainer__segment_length=100,
        trainer__buffer_size=9,
        trainer__events={"train": {"push": {"func": "push_robot"}}},
        algorithm__cfg={
            "optimizer": {"name": "sgd", "weight_decay": 0.1},
            "lr_scheduler": {"name": "cosine"},
            "bets": 1,
        },
    )
    with pytest.raises(ConfigError) as caught:
        load_train_config(write(folder / "trainings/train.json", data))
    text = str(caught.value)
    for name in (
        "trainer.rollout_steps: is called trainer.buffer_size",
        "trainer.segment_length: unknown key",
        "trainer.events.train.push",
        "algorithm.cfg.optimizer.name",
        "algorithm.cfg.optimizer.weight_decay",
        "algorithm.cfg.lr_scheduler",
        "bets: unknown key",
        "env.rewards.near",
        "env.extensions.arm",
        "env.sorcery: unknown key",
        "rigid_object",
        "robot",
        "--trainer.gym_config ReachRL",
    ):
        assert text.count(name) >= 1, name
    assert text.count("Valid: buffer_size") == 1  # the valid names are listed once


def test_problems_have_the_names_that_were_given(folder: Path) -> None:
    data = changed(TRAIN, trainer__rollout_steps=-1, algorithm__cfg__optimizer={"learning_rate": -1.0})
    with pytest.raises(ConfigError) as caught:
        load_train_config(write(folder / "trainings/train.json", data))
    assert "trainer.rollout_steps: expected greater than" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_gym_config({"id": "ReachRL", "env": {"events": {"a": {"func": "mass", "mode": "resett"}}}})
    assert caught.value.problems[0].startswith("env.events.a.mode: expected 'reset'")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"algorithm__cfg": {"optimizer": "sgd"}}, "algorithm.cfg.optimizer: expected a mapping, got 'sgd'"),
        (
            {"algorithm__cfg": {"lr_scheduler": "cosine"}},
            "algorithm.cfg.lr_scheduler: expected a mapping, got 'cosine'",
        ),
        ({"trainer__events": ["film"]}, "trainer.events: expected a mapping, got ['film']"),
        ({"trainer__events": {"eval": "film"}}, "trainer.events.eval: expected a mapping, got 'film'"),
        (
            {"algorithm__cfg__learning_rate": 1e-3},
            "algorithm.cfg.optimizer.learning_rate: is called algorithm.cfg.learning_rate here, and both are given",
        ),
        (
            {"algorithm__cfg": {"lr_schedule": "constant", "lr_scheduler": {"name": "linear"}}},
            "algorithm.cfg.lr_scheduler.name: is called algorithm.cfg.lr_schedule here, and both are given",
        ),
        (
            {"algorithm__cfg": {"lr_scheduler": {"name": "linear", "kwargs": {"total_iters": 10}}}},
            "algorithm.cfg.lr_scheduler.kwargs.total_iters: ",
        ),
        (
            {"algorithm__cfg": {"lr_scheduler": {"name": "linear", "kwargs": {"end_factor": 0.1}}}},
            "algorithm.cfg.lr_scheduler.kwargs.end_factor: ",
        ),
        ({"algorithm__cfg": {"lr_scheduler": {"name": "linear", "warmup": 5}}}, "algorithm.cfg.lr_scheduler.warmup: "),
        (
            {"algorithm__cfg": {"lr_scheduler": {"name": "linear", "kwargs": 5}}},
            "algorithm.cfg.lr_scheduler.kwargs: expected a mapping, got 5",
        ),
        (
            {"policy__distribution": {"init_log_std": 0.5}},
            "policy.initial_log_std: is called policy.distribution.init_log_std here, and both are given",
        ),
        ({"policy__distribution": "gaussian"}, "policy.distribution: expected a mapping, got 'gaussian'"),
        ({"policy__distribution": ["a"]}, "policy.distribution: expected a mapping, got ['a']"),
        (
            {"policy__actor__network_cfg__orthogonal_init": False},
            "policy.actor.network_cfg.orthogonal_init: expected true or gains, as weights are always orthogonal",
        ),
    ],
)
def test_what_cannot_be_said_here_is_not_dropped(folder: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_train_config(write(folder / "trainings/train.json", changed(TRAIN, **changes)))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"env__extensions": "fast"}, "env.extensions: expected a mapping, got 'fast'"),
        (
            {"env__success_threshold": 0.2},
            "env.extensions.success_threshold: is called env.success_threshold here, and both are given",
        ),
        (
            {"env__actions": {"delta_qpos": {"func": "DeltaQposTerm", "params": 5}}},
            "env.actions.delta_qpos.params: expected a mapping, got 5",
        ),
    ],
)
def test_what_an_environment_cannot_be_told_is_not_dropped(folder: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_gym_config(write(folder / "tasks/reach.json", changed(SCENE, **changes)))
    assert problem in str(caught.value)


@pytest.mark.parametrize("scheduler", [None, {"name": "linear", "kwargs": None}, {"name": "linear"}])
def test_empty_entries_say_nothing(folder: Path, scheduler: dict[str, Any] | None) -> None:
    settings = {"optimizer": None, "lr_scheduler": scheduler}
    data = changed(TRAIN, algorithm__cfg=settings, trainer__events=None, policy__distribution=None)
    cfg = load_train_config(write(folder / "trainings/train.json", data))
    assert cfg.algorithm.cfg["lr_schedule"] == ("linear" if scheduler else "constant")
    assert cfg.policy["distribution"] == {"init_log_std": -0.5}


def test_an_environment_given_by_a_flag_takes_the_place_of_a_scene(folder: Path) -> None:
    write(folder / "tasks/reach.json", changed(SCENE, robot={"urdf_cfg": {}}))
    path = write(folder / "trainings/train.json", changed(TRAIN, trainer__enable_eval=False))
    with pytest.raises(ConfigError, match="robot"):
        train_from_config(path)
    result = train_from_config(path, ["--trainer.gym_config", "ReachRL", "--trainer.run_dir", str(folder / "run")])
    assert result.global_step == 4 * 8


def test_unknown_names_are_in_the_same_error(folder: Path) -> None:
    path = write(folder / "tasks/reach.json", changed(SCENE, id="PourWater-v3", robot={"fpath": "a.urdf"}))
    train = write(folder / "trainings/train.json", changed(TRAIN, algorithm__name="apg", trainer__horizon=1))
    with pytest.raises(ConfigError, match=r"(?s)trainer.horizon.*robot.*PourWater-v3.*apg"):
        load_train_config(train)
    with pytest.raises(ConfigError, match=r"(?s)reach.json: 2 problems.*robot.*PourWater-v3"):
        load_stream_config(path)
    with pytest.raises(UnknownNameError, match="apg"):  # alone, it is what it is
        load_train_config(write(train, changed(TRAIN, algorithm__name="apg", trainer__gym_config="ReachRL")))


def test_a_stream_of_such_an_environment(folder: Path) -> None:
    cfg = load_stream_config(folder / "tasks/reach.json")
    assert load_gym_config(cfg.gym_config).max_episode_steps == 40
    stream = write(folder / "trainings/stream.json", {"buffer_size": 8, "gym_config": "tasks/reach.json"})
    assert load_stream_config(stream).gym_config["id"] == "ReachRL"
