"""The examples of the stream run as they stand."""

from __future__ import annotations

import os
from pathlib import Path

from tests.programs import run_program

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "agents" / "datasets"


def run(name: str, *arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = run_program(EXAMPLES / name, *arguments, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_online_dataset_demo() -> None:
    words = run("online_dataset_demo.py", "--batches", "1")
    assert "batch [8, 16], action [8, 16, 6]" in words
    assert "chunks of [" in words


def test_train_from_stream(tmp_path: Path) -> None:
    video = tmp_path / "cubes.mp4"
    words = run("train_from_stream.py", "--steps", "30", "--episodes", "10", "--output", str(video))
    assert "of 10 episodes" in words
    assert video.exists() or video.with_suffix(".png").exists()
