"""Runs that are over are not made again, except those that had too little of the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.worlds_report import Run, WorldResults


@pytest.mark.parametrize(
    ("status", "jobs", "over"),
    [
        ("reached", 1, True),
        ("ended", 1, True),
        ("failed", 4, False),
        ("running", 4, False),
        ("out of time", 4, True),
        ("out of time", 3, False),
    ],
)
def test_a_run_out_of_time_is_tried_again_beside_fewer_others(tmp_path: Path, status: str, jobs: int, over: bool):
    run = Run("reach", "cuda", 0, "digest", 4, 180.0)
    results = WorldResults(tmp_path / "worlds.json")
    results.add(replace(run, status=status))
    assert results.is_over(replace(run, jobs=jobs)) is over
    assert not results.is_over(replace(run, settings="another"))
    assert not results.is_over(replace(run, seed=1))
