"""Recordings in the real ``lerobot``, and its recordings here: ``make test-lerobot``.

Its versions of other packages differ from ours, so it runs in a Python of its own, which ``LEROBOT_PYTHON`` names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from embodichain.cli.main import main
from embodichain.envs import TASKS

pytest.importorskip("pyarrow", reason="needs the extra 'data'")
pytest.importorskip("av", reason="needs the extra 'data'")

from embodichain.agents.datasets.lerobot import LeRobotReader

PYTHON = os.environ.get("LEROBOT_PYTHON", "")
CLIENT = Path(__file__).with_name("lerobot_client.py")

pytestmark = [
    pytest.mark.extra("data"),
    pytest.mark.skipif(not PYTHON, reason="LEROBOT_PYTHON names no Python with lerobot: make test-lerobot"),
    pytest.mark.timeout(600),
]


def lerobot(*words: object) -> str:
    done = subprocess.run([PYTHON, CLIENT, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def recorded(name: str, folder: Path, *words: str) -> Path:
    steps = ["--gym_config.max_episode_steps", "6", "--gym_config.num_envs", "2", "--episodes", "3"]
    assert main(["record", name, "--out", str(folder), *steps, *words]) == 0
    return folder


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Any]:
    """Every shipped task, one with a camera, and a Gymnasium environment with choices, as ``lerobot`` sees them."""
    root = tmp_path_factory.mktemp("sets")
    folders = [recorded(name, root / name) for name in TASKS]
    anyhow = ["--action_config.only_success", "false"]
    camera = "configs/agents/stream/push_cube_camera.json"
    folders.append(recorded(camera, root / "camera", "--max_episode_steps", "6", *anyhow))
    folders.append(recorded("CartPole-v1", root / "CartPole-v1"))
    folders.append(recorded("HalfCheetah-v5", root / "HalfCheetah-v5"))
    seen = json.loads(lerobot("open", *folders).splitlines()[-1])
    return {folder: seen[str(folder)] for folder in folders}


def test_every_shipped_task_opens_in_lerobot(opened: dict[Path, Any]) -> None:
    for folder, seen in opened.items():
        reader = LeRobotReader(folder)
        episodes = [reader.read(index) for index in range(len(reader))]
        assert (seen["episodes"], seen["frames"]) == (3, sum(episode.length for episode in episodes)), folder
        assert seen["fps"] == reader.fps
        assert sorted(seen["tasks"]) == sorted({str(episode.task) for episode in episodes})
        actions = torch.cat([piece for episode in episodes for piece in episode.frames[("action",)]])
        for row, values in seen["rows"].items():
            shape = [] if list(actions.shape[1:]) == [1] else list(actions.shape[1:])  # one number is a scalar there
            assert values["action"]["shape"] == shape
            assert values["action"]["sum"] == pytest.approx(float(actions[int(row)].double().sum()), abs=1e-5)
        assert seen["rows"]["0"]["task"] == episodes[0].task
        assert seen["batch"]["action_is_pad"]["shape"] == [3, 2]
        if folder.name in TASKS:
            assert seen["robot_type"]
        for name, feature in seen["names"].items():
            size = seen["rows"]["0"][name]["shape"]
            if name.startswith(("observation.", "action")) and len(size) <= 1 and not name.endswith("instruction"):
                expected = size or ([] if reader.layout.shape_of("action") == () and name == "action" else [1])
                assert len(feature or []) == (expected[0] if expected else 0), (folder, name)


def test_names_of_segmentation_ids_are_no_trouble_in_lerobot(tmp_path: Path) -> None:
    camera = {"name": "top", "height": 32, "width": 48, "outputs": ["rgb", "segmentation"]}
    config = tmp_path / "push.json"
    config.write_text(json.dumps({"id": "PushCubeRL", "env": {"observations": {"cameras": [camera]}}}))
    folder = recorded(str(config), tmp_path / "set", "--action_config.only_success", "false")
    key = "observation.segmentation.top"
    row = json.loads(lerobot("open", folder).splitlines()[-1])[str(folder)]["rows"]["0"]
    reader = LeRobotReader(folder)
    assert row[key]["shape"] == [32, 48, 1]
    assert row[key]["sum"] == float(torch.cat(reader.read(0).frames[tuple(key.split("."))])[0].sum())
    assert "cube" in reader.names["observation", "segmentation", "top"]


def test_instructions_are_lerobots_tasks(opened: dict[Path, Any]) -> None:
    found = {folder.name: seen["tasks"] for folder, seen in opened.items()}
    assert any(words.startswith("push the cube to the ") for words in found["PushCubeLanguageRL"])
    assert any(words.startswith("press the ") for words in found["PressButtonLanguageRL"])
    assert list(found["PushCubeRL"]) == ["PushCubeRL"]


def test_what_lerobot_writes_is_read(tmp_path: Path) -> None:
    lerobot("write", tmp_path / "theirs")
    reader = LeRobotReader(tmp_path / "theirs")
    episodes = [reader.read(index) for index in range(len(reader))]
    assert [(episode.task, episode.length) for episode in episodes] == [("lift it", 6), ("lower it", 7), ("lift it", 8)]
    state = torch.cat(episodes[2].frames[("observation", "state")])
    assert state[:, :2].tolist() == [[2.0, step] for step in range(8)]
    images = torch.cat(episodes[1].frames[("observation", "image", "top")]).float()
    expected = torch.tensor([40.0 + 3 * step for step in range(7)]).view(7, 1, 1, 1)
    assert (images - expected).abs().mean() < 3
    assert reader.names[("observation", "state")] == ["a", "b", "c"]
    parts = [tmp_path / "lifted", tmp_path / "twice"]
    assert main(["dataset", "filter", str(tmp_path / "theirs"), "--out", str(parts[0]), "--task", "lift"]) == 0
    assert main(["dataset", "merge", *[str(tmp_path / "theirs")] * 2, "--out", str(parts[1])]) == 0
    seen = json.loads(lerobot("open", *parts).splitlines()[-1])
    lifted, twice = (seen[str(part)] for part in parts)
    assert (lifted["episodes"], lifted["frames"], lifted["tasks"]) == (2, 14, {"lift it": 0})
    assert (twice["episodes"], twice["frames"], twice["robot_type"]) == (6, 42, "so100")
    assert "next.success" in lifted["rows"]["0"]
    image = lifted["rows"]["13"]["observation.images.top"]  # the last of the third episode, in [0, 1]
    assert image["sum"] / (3 * 64 * 96) == pytest.approx((80 + 3 * 7) / 255, abs=0.02)
