"""The commands ``stream`` and ``record``, as a user types them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from embodichain.cli.main import main
from embodichain.cli.record import quotas_of
from embodichain.cli.stream import load_stream_config
from embodichain.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs" / "agents"


@pytest.mark.parametrize("path", sorted((CONFIGS / "stream").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_settings_are_valid(path: Path) -> None:
    cfg = load_stream_config(path)
    assert cfg.check().only_success
    assert cfg.gym_config["id"] == "PushCubeRL"


def test_settings_from_a_gym_config_or_an_id() -> None:
    from_file = load_stream_config(CONFIGS / "rl" / "push_cube" / "gym_config.json")
    assert from_file.max_episode_steps is None  # the environment knows it
    assert from_file.buffer_size >= from_file.gym_config["num_envs"]
    assert load_stream_config("CartPoleRL").gym_config["id"] == "CartPoleRL"
    assert load_stream_config("CartPole-v1").action_config == {"source": "random"}


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    path = tmp_path / "stream.json"
    path.write_text(json.dumps({"bufer_size": 3, "gym_config": {"id": "ReachRL"}}))
    with pytest.raises(ConfigError, match="buffer_size"):
        load_stream_config(path)


@pytest.mark.parametrize(
    ("words", "flag", "now"),
    [
        (["stream", "--help"], "--watch", "(default: 'local')"),
        (["stream", str(CONFIGS / "stream" / "push_cube.json"), "--help"], "--gym_config.num_envs", "now: 128"),
        (["record", "-h"], "--episodes", "(default: 'local')"),
    ],
)
def test_help_lists_the_settings_of_the_engine_as_well(
    words: list[str], flag: str, now: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(words)
    listed = capfd.readouterr().out
    for name in (flag, "--workers {local,ray}", "--num_workers", "--address", "--placement.num_gpus"):
        assert name in listed
    assert now in listed


def test_stream_shows_the_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "stream",
        "ReachRL",
        "--duration",
        "2",
        "--chunk-size",
        "4",
        "--buffer_size",
        "8",
        "--num_workers",
        "1",
    ]
    assert main(arguments) == 0
    words = capfd.readouterr().out
    assert "mean of the whole run" in words
    assert re.search(r"episodes +\d+ .* succeeded", words)
    chunks = next(line for line in words.splitlines() if line.startswith("chunks"))
    assert int(chunks.split()[1].replace(",", "")) >= 32


@pytest.mark.extra("data")
def test_record_writes_a_folder_that_reads_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "reach"
    assert main(["record", "ReachRL", "--out", str(out), "--episodes", "5", "--read", "--seed", "4"]) == 0
    words = capfd.readouterr().out
    assert "read back: 5 episodes" in words
    assert "numbers identical" in words
    info = json.loads((out / "meta" / "info.json").read_text())
    assert info["total_episodes"] == 5
    assert main(["record", "ReachRL", "--out", str(out), "--episodes", "5"]) == 2  # the folder is in use
    assert main(["record", "ReachRL", "--out", str(tmp_path / "x"), "--episodes", "0"]) == 2


@pytest.mark.extra("data")
def test_record_tells_that_actions_are_random(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = "CartPole-v1 has no scripted expert, so random actions are recorded; --action_config.source policy"
    assert main(["record", "CartPole-v1", "--out", str(tmp_path / "pole"), "--episodes", "2"]) == 0
    assert told in " ".join(capfd.readouterr().out.split())
    words = ["--episodes", "1", "--action_config.source", "random"]  # it has an expert, which was not wanted
    assert main(["record", "ReachRL", "--out", str(tmp_path / "reach"), *words]) == 0
    assert "no scripted expert" not in capfd.readouterr().out


@pytest.mark.extra("data")
def test_few_recorded_episodes_of_several_tasks_follow_the_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Eight envs of the first task end at the same time; it still gets two thirds of eight episodes."""
    tasks = [
        {"id": "ReachRL", "num_envs": 8, "max_episode_steps": 3, "task": "reach far", "weight": 2},
        {"id": "ReachRL", "num_envs": 8, "max_episode_steps": 6, "task": "reach slowly", "weight": 1},
    ]
    path, out = tmp_path / "tasks.json", tmp_path / "two"
    settings = {"buffer_size": 16, "gym_config": tasks, "action_config": {"only_success": False}}
    path.write_text(json.dumps(settings))
    assert main(["record", str(path), "--out", str(out), "--episodes", "8", "--read"]) == 0
    words = capfd.readouterr().out
    assert "8 episodes, 33 frames" in words
    assert "ReachRL: 5 (" in words
    assert "ReachRL 2: 3 (" in words


@pytest.mark.extra("data")
def test_a_task_that_gets_no_episodes_is_not_simulated(tmp_path: Path) -> None:
    """Its episodes always fail, which nobody would count."""
    tasks = [
        {"id": "PushCubeRL", "num_envs": 4, "max_episode_steps": 1, "weight": 1},
        {"id": "ReachRL", "num_envs": 4, "max_episode_steps": 60, "weight": 2},
    ]
    path, out = tmp_path / "tasks.json", tmp_path / "one"
    settings = {"buffer_size": 16, "gym_config": tasks, "task_observations": "padded"}
    path.write_text(json.dumps(settings | {"action_config": {"only_success": True}}))
    assert main(["record", str(path), "--out", str(out), "--episodes", "1"]) == 0
    assert json.loads((out / "meta" / "info.json").read_text())["total_episodes"] == 1


@pytest.mark.extra("data")
def test_a_folder_is_recorded_again_whatever_tasks_the_config_has(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["record", "ReachRL", "--out", str(first), "--episodes", "2"]) == 0
    tasks = [{"id": "ReachRL", "num_envs": 2}, {"id": "ReachRL", "num_envs": 2, "task": "reach again"}]
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"buffer_size": 16, "gym_config": tasks}))
    source = ["--action_config.source", "dataset", "--action_config.path", str(first)]
    assert main(["record", str(path), "--out", str(second), "--episodes", "4", *source]) == 0
    assert json.loads((second / "meta" / "info.json").read_text())["total_episodes"] == 4


@pytest.mark.parametrize(
    ("weights", "episodes", "quotas"),
    [
        ([2, 1], 8, [5, 3]),
        ([100, 1, 1], 8, [6, 1, 1]),
        ([1, 2, 3], 2, [0, 1, 1]),
        ([1, 1, 1], 3, [1, 1, 1]),
        ([], 4, []),
    ],
)
def test_quotas_of_recorded_tasks(weights: list[float], episodes: int, quotas: list[int]) -> None:
    assert quotas_of(weights, episodes) == quotas
