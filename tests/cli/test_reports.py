"""Runs are listed with their state, and compared in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import socket
import statistics
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from embodichain.agents.rl.algo.ppo import PPO
from embodichain.agents.rl.reports.figures import _curve_panel, curves, trials
from embodichain.agents.rl.reports.series import SweepResult, curves_of, mean_and_band, select
from embodichain.agents.rl.run_lock import RunLock
from embodichain.agents.rl.run_records import RunInfo, find_runs
from embodichain.agents.rl.train import resume_training
from embodichain.cli.main import main
from embodichain.envs import registration
from tests.agents.rl.training_cases import write_config

pytestmark = pytest.mark.usefixtures("one_thread")


def make_run(folder: Path, seed: int, returns: list[float], reason: str | None = "total_steps", **more: Any) -> Path:
    """Write the folder of a run that was evaluated every 100 steps."""
    folder.mkdir(parents=True)
    cfg = {"learning_rate": more.get("lr", 0.001), "gamma": 0.99}
    trainer = {
        "exp_name": "pole",
        "seed": seed,
        "run_dir": str(folder),
        "gym_config": {"id": "CartPoleRL", "seed": seed},
    }
    config = {"trainer": trainer, "policy": {"name": "actor_critic"}, "algorithm": {"name": "ppo", "cfg": cfg}}
    (folder / "train_config.json").write_text(json.dumps(config))
    record = {
        "name": "pole",
        "seed": seed,
        "overrides": ["--trainer.seed", str(seed), f"--algorithm.cfg.learning_rate={cfg['learning_rate']}"],
        "command": f"embodichain train CartPoleRL --trainer.seed {seed}",
        "machine": {"host": "rig<7>", "processor": "Abacus 3000", "cores": 2},
        "versions": {"torch": "9.8.7"},
        "began": time.time() - 60,
        "reason": reason,
    }
    (folder / "run.json").write_text(json.dumps(record))
    lines = []
    for count, value in enumerate(returns, start=1):
        times = {"time/collect_seconds": 2.0, "time/update_seconds": 1.0, "time/total_seconds": 4.0 * count}
        lines += [{"step": 100 * count, "episode/return": value - 1, "update/loss": None, **times}]
        lines += [
            {
                "step": 100 * count,
                "eval/return": value,
                "eval/success": value / 10,
                "time/total_seconds": 5.0 * count,
            }
        ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99999, "ev')
    return folder


class References(HTMLParser):
    """Collects what a page refers to, and which elements are left open."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "poster")]
        self.tags.add(tag)
        if tag not in ("meta", "br", "img", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_states_are_what_became_of_runs(tmp_path, capsys):
    for state, reason in (
        ("finished", "target"),
        ("interrupted", "interrupted"),
        ("failed", "failed"),
        ("killed", None),
    ):
        make_run(tmp_path / state, 0, [1.0], reason)
    make_run(tmp_path / "evaluated", 3, [1.0, 2.0])
    (tmp_path / "evaluated" / "evaluations.jsonl").write_text('{"step": 200, "mean_return": 2.5, "episodes": 9}\n')
    make_run(tmp_path / "stopped", 0, [1.0])
    (tmp_path / "stopped" / "run.json").unlink()
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": "x"}  # another process has its number by now
    (tmp_path / "stopped" / "run.lock").write_text(json.dumps(holder))
    make_run(tmp_path / "deep" / "er" / "running", 0, [])
    lock = RunLock(tmp_path / "deep" / "er" / "running")
    lock.acquire()
    try:
        assert main(["runs", str(tmp_path), "--json"]) == 0
    finally:
        lock.release()
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    assert {Path(name).name: row["state"] for name, row in rows.items()} == {
        name.rpartition("/")[2]: name.rpartition("/")[2] for name in rows
    }
    assert len(rows) == 7
    row = rows["evaluated"]
    assert (row["seed"], row["steps"], row["return"], row["success"]) == (3, 200, 2.0, 0.2)
    assert row["overrides"] == {"algorithm.cfg.learning_rate": "0.001"}
    assert 0 <= row["age"] < 60
    assert rows["deep/er/running"]["return"] is None


def test_the_list_fits_a_narrow_terminal_and_is_sorted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    make_run(tmp_path / "pole_20261116-150426", 0, [30.0])
    make_run(tmp_path / "pole_20261116-150427", 1, [20.0, 4.0])
    assert main(["runs", str(tmp_path), "--sort", "return"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["run", "state", "seed", "steps", "return", "success", "age"]
    assert [line.split()[0] for line in lines[1::2]] == ["pole_20261116-150427", "pole_20261116-150426"]
    assert lines[1].split()[1:6] == ["finished", "1", "200", "4", "40%"]
    assert lines[2].strip() == "learning_rate=0.001"
    record = json.loads((tmp_path / "pole_20261116-150427" / "run.json").read_text())
    record["overrides"] = ["--dagger", "--trainer.total_steps", "9"]
    (tmp_path / "pole_20261116-150427" / "run.json").write_text(json.dumps(record))
    assert main(["runs", str(tmp_path), "--sort", "return"]) == 0
    assert capsys.readouterr().out.splitlines()[2].strip() == "dagger total_steps=9"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["runs", "nowhere"], "nowhere: expected a folder of runs"),
        (["runs", "."], "there is no run in it"),
        (["report", "."], "expected the folder of a run, or of several"),
        (["report"], "RUN"),
        (["report", "a", "--videos", "-1"], "--videos: expected at least 0"),
    ],
)
def test_mistakes_are_told_in_one_message(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "Traceback" not in said


def test_seeds_are_one_series_with_mean_and_band(tmp_path):
    """The oracle is ``statistics`` on numbers interpolated by hand."""
    make_run(tmp_path / "a", 0, [1.0, 2.0, 6.0])
    make_run(tmp_path / "b", 1, [3.0, 8.0], reason="target")
    make_run(tmp_path / "c", 0, [0.0, 0.0], lr=0.01)
    one, other = select([tmp_path]).series
    assert (one.seeds, other.seeds) == ("0, 1", "0")
    assert (one.label, other.label) == ("pole learning_rate=0.001", "pole learning_rate=0.01")
    grid, mean, deviation = mean_and_band(curves_of(one, "eval/return"))
    assert grid.tolist() == [100, 200, 300]
    values = [(1.0, 3.0), (2.0, 8.0), (6.0, 8.0)]  # the run that reached its target keeps its last value
    np.testing.assert_allclose(mean, [statistics.mean(pair) for pair in values])
    np.testing.assert_allclose(deviation, [statistics.stdev(pair) for pair in values])
    assert mean_and_band(curves_of(other, "eval/return")) is None
    between = mean_and_band(
        [(np.array([0.0, 10.0]), np.array([0.0, 10.0])), (np.array([5.0, 8.0]), np.array([1.0, 4.0]))]
    )
    assert [part.tolist() for part in between[:2]] == [[5.0, 8.0], [3.0, 6.0]]


def test_a_label_names_what_differs_from_runs_of_the_same_name(tmp_path):
    for name, exp_name, lr in (("a", "pole", 0.001), ("b", "pole", 0.01), ("c", "cart", 0.001)):
        file = make_run(tmp_path / name, 0, [1.0], lr=lr) / "train_config.json"
        data = json.loads(file.read_text())
        data["trainer"] |= {"exp_name": exp_name, "gym_config": {"id": exp_name}}
        file.write_text(json.dumps(data))
        record = json.loads((tmp_path / name / "run.json").read_text())
        (tmp_path / name / "run.json").write_text(json.dumps(record | {"name": exp_name}))
    labels = [one.label for one in select([tmp_path]).series]
    assert labels == ["pole learning_rate=0.001", "pole learning_rate=0.01", "cart"]


def test_a_single_evaluation_is_seen(tmp_path):
    """A line through one point draws nothing: it has a dot, and a bar for the deviation of several seeds."""
    for seed in (0, 1):
        make_run(tmp_path / f"seed{seed}", seed, [10.0 + seed])
    axes = Figure().subplots()
    _curve_panel(select([tmp_path]).series, "eval/return")(axes)
    (dot,) = [line for line in axes.lines if line.get_label() == "pole"]
    assert (dot.get_marker(), dot.get_xydata().tolist()) == (".", [[100.0, 10.5]])
    (bar,) = axes.containers
    np.testing.assert_allclose(bar[2][0].get_segments()[0][:, 1], [10.5 - 0.5**0.5, 10.5 + 0.5**0.5])


@pytest.mark.parametrize("label", ["short", "w" * 70, "v" * 300])
def test_the_legend_fits_into_its_figure(tmp_path, label):
    """Long labels get a line each, and end with an ellipsis where even that is too narrow."""
    make_run(tmp_path / "run", 0, [10.0, 11.0])
    series = [replace(one, label=f"{label}{i}") for one in select([tmp_path]).series for i in range(4)]
    text = curves(series, ["eval/return", "episode/return"])
    width = float(re.search(r'viewBox="0 0 (\S+)', text)[1])
    places = [float(x) for x in re.findall(rf"<text[^>]*translate\((-?[\d.]+)[^>]*>{label[:5]}", text)]
    places += [float(x) for x in re.findall(rf'<text[^>]* x="(-?[\d.]+)"[^>]*>{label[:5]}', text)]
    assert len(places) == 4
    assert all(0 < x < width for x in places)
    assert len({round(x) for x in places}) == (2 if label == "short" else 1)


def test_magnitudes_are_labelled_with_plain_numbers(tmp_path):
    values = [1e-4, 5e-4, 9e-3]
    tried = [
        {"number": i, "state": "complete", "value": float(i), "params": {"lr": lr}, "folder": f"trial_{i}"}
        for i, lr in enumerate(values)
    ]
    group = {"space": {"lr": {"low": 1e-4, "high": 1e-2, "log": True}}, "metric": "eval/return"}
    text = trials(SweepResult(tmp_path, group, tried))
    assert ">0.001<" in text
    assert "mathdefault" not in text


def test_what_holds_no_run_among_others_is_left_out(tmp_path, monkeypatch, capsys):
    """``runs/*`` matches an earlier report, and seeds that were stopped before the first run began."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "one", 0, [10.0])
    (tmp_path / "runs" / "pole_seeds").mkdir()
    (tmp_path / "runs" / "pole_seeds" / "group.json").write_text("{}")
    assert main(["report", "runs"]) == 0
    capsys.readouterr()
    assert main(["report", *(f"runs/{path.name}" for path in sorted((tmp_path / "runs").iterdir()))]) == 0
    assert "no run in it: runs/pole_seeds, runs/report.html" in capsys.readouterr().out
    assert main(["report", "runs/one", "runs/two"]) == 2
    assert "runs/two: expected the folder of a run" in capsys.readouterr().err
    assert main(["report", "runs/pole_seeds"]) == 2


def test_a_report_holds_everything_and_refers_to_nothing(tmp_path, capsys):
    for name, seed, returns, lr in (
        ("a", 0, [1.0, 5.0], 0.001),
        ("b", 1, [3.0, 7.0], 0.001),
        ("c", 4, [0.0, 2.0], 0.01),
    ):
        make_run(tmp_path / "runs" / name, seed, returns, lr=lr)
    film = tmp_path / "runs" / "b" / "videos" / "step_000000000200.mp4"
    film.parent.mkdir()
    film.write_bytes(bytes(range(256)))
    film.with_name("step_000000000100.mp4").write_bytes(b"older")
    assert (
        main(["report", *(str(tmp_path / "runs" / name) for name in "abc"), "--out", str(tmp_path / "o" / "r.html")])
        == 0
    )
    assert "wrote" in capsys.readouterr().out
    text = (tmp_path / "o" / "r.html").read_text()
    page = References()
    page.feed(text)
    assert page.open == []
    videos = [found for found in page.found if found.startswith("data:video/mp4;base64,")]
    assert [base64.b64decode(video.partition(",")[2]) for video in videos] == [film.read_bytes()]
    assert all(found.startswith(("#", "data:")) for found in page.found)  # what is inside the page
    assert not re.search(r"https?://(?!www\.w3\.org|purl\.org|creativecommons\.org|matplotlib\.org)", text)
    plain = html.unescape(re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", text)))
    assert (
        "what differs pole learning_rate=0.001 pole learning_rate=0.01 algorithm.cfg.learning_rate 0.001 0.01" in plain
    )
    assert "algorithm.cfg.gamma 0.99" in plain
    assert f"6.00 ± {statistics.stdev([5.0, 7.0]):.2f}" in plain
    assert "60% ± 14%" in plain
    assert "embodichain train CartPoleRL --trainer.seed 4" in plain
    assert "Abacus 3000" in plain
    assert "rig<7>" in plain
    assert "rig<7>" not in text
    assert "torch 9.8.7" in plain
    assert re.search(r"seconds per run collect update checkpoints, other pole learning_rate=0.001 4 2 4 ", plain)
    assert text.count("<svg") == text.count("</svg>") == 3  # main curves, those of times, where the time went
    assert "eval/return by time" in text
    assert "update/loss" not in text  # it was never a number


def test_one_evaluation_is_not_drawn_over_time_where_other_metrics_have_curves(tmp_path: Path):
    make_run(tmp_path / "a", 0, [1.0])
    lines = [{"step": 50 * k, "episode/return": float(k), "time/total_seconds": 2.0 * k} for k in (1, 2)]
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    text = curves(select([tmp_path / "a"]).series, ["eval/return", "episode/return"], over_time=True)
    assert "episode/return by time" in text
    assert "eval/return by time" not in text


def test_runs_of_another_shape_and_damaged_ones_are_reported(tmp_path):
    """A run of imitation logs losses; whatever is broken is left out."""
    run = make_run(tmp_path / "i", 0, [])
    lines = [
        {"step": step, "update/action_loss": 1.0 / step, "time/sample_seconds": 0.5, "time/total_seconds": 1.0 * step}
        for step in (10, 20, 40)
    ]
    (run / "metrics.jsonl").write_text("not json\n[1]\n" + "".join(json.dumps(line) + "\n" for line in lines))
    (run / "run.json").write_text("{")
    (run / "train_config.json").write_text("[]")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train_config.json").write_text("{}")  # a config is no run
    make_run(tmp_path / "empty", 1, [])
    (tmp_path / "empty" / "metrics.jsonl").unlink()
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "update/action_loss by time" in text
    assert "Not recorded" in text
    plain = re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", text))
    assert re.search(
        "seconds per run sample checkpoints, other .* i 20 20 ", plain
    )  # a sample's time is that of a step


_EVIL = "<script>alert(1)</script>\"'>$\\bad{_^$"
_LINES = [{"step": step, "eval/return": 1.0 * step, "time/total_seconds": 2.0 * step} for step in (1, 2, 3)]
_TRIAL = {"number": 0, "state": "complete", "value": 1.0, "params": {_EVIL: _EVIL}, "folder": "trial_0000"}
_CONFIRMED = {"name": _EVIL, "trial": 0, "value": 1.0, "scores": [1.0]}
_DAMAGED: dict[str, tuple[Any, list[Any], Any]] = {
    "names of markup": (
        {"name": _EVIL, "command": _EVIL, "machine": {_EVIL: _EVIL}, "versions": {_EVIL: _EVIL}, "overrides": [_EVIL]},
        [{**line, _EVIL: 1.0} for line in _LINES],
        {
            "kind": "sweep",
            "metric": _EVIL,
            "space": {_EVIL: {"choices": [_EVIL]}},
            "trials": [_TRIAL],
            "confirmed": [_CONFIRMED],
        },
    ),
    "no numbers": (
        {"name": "_n", "reason": "total_steps"},
        [{"step": 1, "eval/return": "high"}, {"step": 2, "eval/return": [1, 2]}, *_LINES],
        {"kind": "seeds", "seeds": "0..3", "overrides": 5},
    ),
    "not finite": (
        {"name": "n", "reason": "total_steps"},
        [{"step": 10**200, "eval/return": 1.0}, *_LINES, {"step": 4, "eval/return": float("nan"), "x/y": 1e308}],
        {"kind": "sweep"},
    ),
    "null": (
        dict.fromkeys(("name", "seed", "overrides", "command", "began", "resumed", "machine", "versions", "reason")),
        _LINES,
        {"kind": "sweep", "seeds": None, "trials": [{"number": 0}], "space": {"lr": {}}, "confirmed": [None, {}]},
    ),
    "of other types": (
        {"name": 5, "seed": "zero", "overrides": 7, "machine": "m", "versions": [1], "reason": 3, "began": "x"},
        [{"step": -5, "time/sample_seconds": "x", "time/total_seconds": None}, *_LINES],
        {"kind": "sweep", "trials": 7, "space": [1], "best": "x", "metric": 3, "confirmed": "x"},
    ),
}


@pytest.mark.parametrize("case", _DAMAGED)
def test_odd_names_and_files_are_listed_and_reported_without_markup_or_errors(tmp_path, capsys, case):
    record, lines, group = _DAMAGED[case]
    run = tmp_path / "g" / "trial_0000" / "r"
    run.mkdir(parents=True)
    (run / "train_config.json").write_text(
        json.dumps({"trainer": {"exp_name": _EVIL, "seed": 0}, _EVIL: {_EVIL: _EVIL}})
    )
    (run / "run.json").write_text(json.dumps(record))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "evaluations.jsonl").write_text('{"step": 1, "mean_return": null, "success_rate": "x"}\n')
    for folder in (run, tmp_path / "g"):
        assert main(["runs", str(folder)]) == 0
        capsys.readouterr()
        assert main(["runs", str(folder), "--all", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert (row["return"], row["steps"]) == (3.0, 4 if case == "not finite" else 3)
        assert main(["report", str(folder), "--out", str(tmp_path / "report.html")]) == 0
        page = References()
        page.feed((tmp_path / "report.html").read_text())
        assert page.open == []
        assert "script" not in page.tags
        (tmp_path / "g" / "group.json").write_text(json.dumps(group))


def test_a_training_records_itself(tmp_path, capsys, monkeypatch):
    """From the command line, through a failure and a resume, to an evaluation by hand."""
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"num_eval_envs": 4})
    words = ["train", str(config), "--trainer.iterations", "3", "--trainer.seed=5"]
    update, calls = PPO.update, []

    def fails(self, rollout):
        calls.append(0)
        if len(calls) == 3:
            raise RuntimeError("the bit bucket is full")
        return update(self, rollout)

    monkeypatch.setattr(PPO, "update", fails)
    with pytest.raises(RuntimeError):
        main(words)
    run = RunInfo(tmp_path / "run")
    assert run.state == "failed"
    assert run.record.error == "RuntimeError: the bit bucket is full"
    assert run.overrides() == {"trainer.iterations": "3", "trainer.seed": "5"}
    assert (run.record.name, run.record.seed) == ("test", 5)
    assert run.record.command == f"embodichain train {config} --trainer.iterations 3 --trainer.seed=5"
    assert run.record.versions["torch"].startswith("2.")
    assert run.record.machine["cores"] >= 1
    resume_training(tmp_path / "run")
    run = RunInfo(tmp_path / "run")
    assert (run.state, run.record.reason, run.record.error, run.step) == ("finished", "iterations", None, 3 * 8 * 16)
    assert len(run.record.resumed) == 1
    assert run.record.ended >= run.record.resumed[0] >= run.record.began
    assert run.latest("eval/return") == run.mean_return
    assert main(["eval", str(tmp_path / "run"), "--episodes", "2"]) == 0
    run = RunInfo(tmp_path / "run")
    assert run.state == "evaluated"
    assert run.evaluations[0]["episodes"] == 2
    assert find_runs(tmp_path) == [tmp_path / "run"]
    capsys.readouterr()


def test_a_run_that_cannot_be_continued_stays_what_it_was(tmp_path, monkeypatch, capsys):
    """Without the module of its task, which the error names, a run is neither evaluated nor resumed."""
    module = tmp_path / "own_reach.py"
    module.write_text(
        "from embodichain.envs.registration import register_task\n"
        "from embodichain.envs.tasks.reach import Reach\n"
        "register_task('OwnReach', Reach)\n"
    )
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"gym_config": "OwnReach", "num_eval_envs": 4})
    with monkeypatch.context() as patch:
        patch.setattr(registration, "_TASKS", dict(registration._TASKS))
        assert main(["train", str(config), "--trust", str(module), "--trainer.iterations", "1"]) == 0
    before = (tmp_path / "run" / "run.json").read_text()
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "run", "--trainer.iterations", "2"]) == 2
    assert "continue with: embodichain train --resume run --trust own_reach.py" in capsys.readouterr().err
    assert main(["eval", "run", "--episodes", "1"]) == 2
    assert f"the run was made with --trust {module}" in capsys.readouterr().err
    assert (tmp_path / "run" / "run.json").read_text() == before
    assert RunInfo(tmp_path / "run").state == "finished"
