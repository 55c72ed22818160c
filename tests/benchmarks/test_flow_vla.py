"""Parity of ``benchmarks.flow_vla``: what is judged, what is left to run, and what survives the end of the time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import flow_vla_parity
from benchmarks.async_vla_runs import Outcome
from benchmarks.flow_vla_parity import Parity, Running, parity_bound, plan, train_all

ROLLOUTS = 10


def outcome(final: float | None, rollouts: int = ROLLOUTS, score: float = 0.5) -> dict[str, Any]:
    curve = [(number, float(number), score) for number in range(rollouts)]
    return Outcome(final=final, curve=curve).to_dict()


def judged(sync: list[float], others: list[float], name: str = "async") -> Parity:
    parity = Parity({}, ROLLOUTS)
    for seed, (one, other) in enumerate(zip(sync, others, strict=True)):
        parity.add(("sync", seed), outcome(one), 0.2)
        parity.add((name, seed), outcome(other), 0.2)
    return parity


def test_what_is_judged_comes_first():
    jobs = plan(["async, weights up to 1"], 2)
    assert jobs[:4] == [("sync", 0), ("async", 0), ("sync", 1), ("async", 1)]
    assert jobs[4:] == [("async, weights up to 1", 0), ("async, weights up to 1", 1)]


def test_the_bound_is_two_spreads_below_the_synchronous_mean():
    assert parity_bound([0.9, 0.9]) == pytest.approx(0.86)
    assert parity_bound([0.8, 1.0]) == pytest.approx(0.7)


@pytest.mark.parametrize(("finals", "holds"), [([0.87, 0.86], True), ([0.86, 0.85], False)])
def test_parity_is_that_of_the_settings_that_both_share(finals: list[float], holds: bool):
    assert judged([0.9, 0.9], finals).figures(2)["holds"] is holds
    other = judged([0.9, 0.9], finals, "async, weights up to 1").figures(2)
    assert other["within"] == {"async, weights up to 1": holds}
    assert not other["holds"]


def test_seeds_that_are_missing_decide_nothing():
    figures = judged([0.9], [0.9]).figures(2)
    assert figures["within"] == {"async": True}
    assert not figures["holds"]


def test_runs_that_ended_are_kept_if_they_are_as_long():
    parity = judged([0.9], [0.9])
    parity.add(("sync", 1), outcome(None, 5), 0.2)
    written = json.loads(json.dumps(parity.figures(2)))
    jobs = plan([], 2)
    assert Parity(written, ROLLOUTS).missing(jobs) == [("sync", 1), ("async", 1)]
    assert Parity(written, ROLLOUTS + 1).missing(jobs) == jobs
    parity.add(("sync", 1), outcome(None, 3), 0.2)  # it came less far than before
    assert len(parity.runs["sync", 1]["curve"]) == 5


def test_what_a_run_gave_before_the_time_was_over_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[Running] = []

    def started(job: flow_vla_parity.Job, words: Any, folder: Path, cores: list[int], variables: Any) -> Running:
        file = folder / f"{job[0]}_{job[1]}.json"
        file.write_text(json.dumps(outcome(0.5 if job[0] == "sync" else None, 5)))
        seconds = 0.0 if job[0] == "sync" else 100.0
        process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
        begun.append(Running(job, file, cores, process))
        return begun[-1]

    monkeypatch.setattr(flow_vla_parity, "_started", started)
    args = argparse.Namespace(jobs=2, small=True)
    found = dict(train_all([("sync", 0), ("async", 0), ("async", 1)], args, ROLLOUTS, tmp_path / "start", 5.0))
    assert set(found) == {("sync", 0), ("async", 0), ("async", 1)}
    assert found["sync", 0]["final"] == 0.5
    assert found["async", 1]["final"] is None
    assert all(one.process.poll() is not None for one in begun)
