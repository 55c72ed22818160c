"""The examples run as their first lines say."""

from __future__ import annotations

import re
from pathlib import Path

from embodichain.agents.rl.runs import read_metrics
from tests.programs import run_program

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "agents" / "rl" / "custom_everything.py"


def run(*words):
    return run_program("-m", "embodichain", *words, cwd=ROOT)


def test_everything_of_ones_own_is_trained_when_trusted(tmp_path):
    config = str(EXAMPLE.with_suffix(".json"))
    done = run("train", config, "--trust", "custom_everything", "--trainer.run_dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    returns = [
        line["eval/return"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval/return" in line
    ]
    assert returns[-1] > -8.0 > -20.0 > returns[0]  # doing nothing gives about -30
    shown = run("eval", str(tmp_path / "run"), "--episodes", "8", "--trust", str(EXAMPLE), "--num-envs", "8")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"episodes\s+│\s+8 ", shown.stdout)


def test_it_is_refused_otherwise():
    done = run("train", str(EXAMPLE.with_suffix(".json")))
    assert done.returncode == 2
    assert "--trust custom_everything" in done.stderr


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 100
