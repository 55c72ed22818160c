"""Several seeds and sweeps: what the command line means, and that nothing is lost or done twice when it is killed."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from embodichain.agents.imitation.config import ImitateCfg
from embodichain.agents.rl.config import load_train_config
from embodichain.agents.rl.run_loop import crossed
from embodichain.agents.rl.run_records import RunInfo, RunRecord, format_seeds, read_group
from embodichain.agents.rl.runs import read_metrics
from embodichain.agents.rl.sweeps import group, study
from embodichain.agents.rl.sweeps.group import parse_seeds
from embodichain.agents.rl.sweeps.jobs import JobHandle, Launcher
from embodichain.agents.rl.sweeps.scores import Judge, chunk_size, planned_evaluations
from embodichain.agents.rl.sweeps.space import Domain, current_values, parse_space
from embodichain.agents.rl.train import train_from_config
from embodichain.cli.main import main
from embodichain.errors import ConfigError, TrainingStateError
from embodichain.utils.console import MessageConsole
from tests.agents.rl.training_cases import write_config
from tests.programs import suspend, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("text", "seeds"), [("0..4", [0, 1, 2, 3, 4]), ("7", [7]), ("0..1, 9,1", [0, 1, 9]), ("3..3", [3])]
)
def test_seeds_are_ranges_and_lists(text, seeds):
    assert parse_seeds(text) == seeds
    assert parse_seeds(format_seeds(seeds)) == seeds


@pytest.mark.parametrize("text", ["", "4..0", "a", "-1", "0...4", "0..99999999", "1,,2"])
def test_what_are_no_seeds_is_told(text):
    with pytest.raises(ConfigError, match=r"expected seeds such as 0\.\.4"):
        parse_seeds(text)


@pytest.fixture
def cfg(tmp_path):
    return load_train_config(write_config(tmp_path / "c.json", tmp_path / "run"))


def test_a_space_has_intervals_magnitudes_and_choices_of_fields_by_short_names(cfg):
    text = "lr=log(1e-4,1e-2),ent=[0,0.01],n_epochs=[2,8],trainer.buffer_size=log(8,64),gamma={0.9,0.99}"
    space = parse_space([text, "policy.actor.hidden_sizes={[16],[32,32]}"], cfg)
    assert space == {
        "lr": Domain("algorithm.cfg.learning_rate", 1e-4, 1e-2, log=True),
        "ent": Domain("algorithm.cfg.ent_coef", 0.0, 0.01),
        "n_epochs": Domain("algorithm.cfg.n_epochs", 2, 8, is_integer=True),
        "trainer.buffer_size": Domain("trainer.buffer_size", 8, 64, log=True, is_integer=True),
        "gamma": Domain("algorithm.cfg.gamma", choices=(0.9, 0.99)),
        "policy.actor.hidden_sizes": Domain("policy.actor.hidden_sizes", choices=("[16]", "[32,32]")),
    }
    assert type(space["n_epochs"].low) is int
    values = current_values({name: space[name] for name in ("lr", "n_epochs", "gamma")}, cfg)
    assert values == {"lr": 1e-3, "n_epochs": 2, "gamma": 0.99}
    assert current_values({"policy.actor.hidden_sizes": space["policy.actor.hidden_sizes"]}, cfg) == {
        "policy.actor.hidden_sizes": "[16]"
    }
    assert current_values({"x": Domain("algorithm.cfg.learning_rate", 0.1, 0.2)}, cfg) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lr=log(0,1)", "expected numbers above 0"),
        ("learning_rat=[1,2]", "algorithm.cfg.learning_rate"),
        ("leraning_rate=[1,2]", "unknown field. Did you mean --algorithm.cfg.learning_rate"),
        ("lrr=[1,2]", "unknown field. Did you mean --algorithm.cfg.learning_rate"),
        ("lr=[2,1]", "the lower one first"),
        ("lr", "expected a field and its values, such as 'lr=log"),
        ("lr=log(1e-4,1e-2", "quotes keep the shell"),
        ("n_epochs=[0.5,2]", "expected whole numbers, as algorithm.cfg.n_epochs is one"),
        ("n_epochs=[0,2]", "algorithm.cfg.n_epochs: expected greater than or equal to 1, got 0"),
        ("gamma={0.9,much}", "gamma"),
        ("seed={1,2}", "--seeds"),
        ("lr=[1,2],learning_rate=[1,2]", "expected every field once"),
        ("hidden_sizes={[1],[2]}", "policy.actor.hidden_sizes or policy.critic.hidden_sizes"),
        ("", "expected at least one field"),
    ],
)
def test_what_is_wrong_with_a_space_is_told_before_anything_runs(cfg, text, told):
    if told == "algorithm.cfg.learning_rate":  # the beginning of a name will do
        assert parse_space([text], cfg)["learning_rat"].field == told
        return
    with pytest.raises(ConfigError) as caught:
        parse_space([text], cfg)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "CartPoleRL", "--jobs", "2"], "--jobs: expected --seeds"),
        (["train", "--resume", "x", "--seeds", "0..1"], "--seeds: expected a config"),
        (["train", "CartPoleRL", "--seeds", "0..1", "--trainer.seed", "3"], "either --seeds or --trainer.seed"),
        (["train", "CartPoleRL", "--seeds", "0..1", "--jobs", "0"], "--jobs: expected at least 1"),
        (["train", "CartPoleRL", "--seeds", "0..1", "--trainer.nope", "3"], "trainer.nope: unknown flag"),
    ],
)
def test_mistakes_with_seeds_are_told_and_leave_nothing(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def weights(run: Path) -> dict:
    return load_file(run / "checkpoints" / "latest" / "tensors.safetensors")


def test_seeds_are_trained_together_and_a_killed_one_is_continued(tmp_path, monkeypatch, capsys):
    """One of two runs is killed after its first evaluation; the same command continues it, and it alone, bit by bit."""
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path / "c.json", tmp_path / "none", trainer={"run_dir": None, "iterations": 12})
    words = ["train", str(config), "--seeds", "3,5", "--jobs", "2"]
    start, killed = Launcher.start, []

    def start_and_kill(self, job):
        handle = start(self, job)
        pid = handle._process.pid

        def is_killed():
            suspend(pid)  # so that nothing changes between looking and killing
            is_evaluated = any("eval/return" in line for line in read_metrics(job.run_dir / "metrics.jsonl"))
            os.kill(pid, signal.SIGKILL if is_evaluated else signal.SIGCONT)
            return is_evaluated

        if job.run_dir.name == "test_seed5" and not killed:
            wait_until(is_killed, 200)
            killed.append(job.run_dir)
        return handle

    monkeypatch.setattr(Launcher, "start", start_and_kill)
    assert main(words) == 1
    (folder,) = (tmp_path / "runs").iterdir()
    said = capsys.readouterr().err
    assert killed == [folder / "test_seed5"]
    assert "seed 5: failed: its process was killed by SIGKILL" in said
    assert "the same command" in said
    assert RunInfo(killed[0]).state == "killed"
    finished = RunInfo(folder / "test_seed3")
    assert (finished.state, finished.record.seed) == ("finished", 3)
    before = finished.lines
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "seed 3: finished before" in said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]  # no other group was begun
    assert RunInfo(folder / "test_seed3").lines == before
    assert RunInfo(folder / "test_seed3").record.resumed == []
    assert len(RunInfo(killed[0]).record.resumed) == 1
    steps = [line["step"] for line in RunInfo(killed[0]).lines if "episode/count" in line]
    assert steps == [128 * count for count in range(1, 13)]
    returns = [RunInfo(folder / f"test_seed{seed}").mean_return for seed in (3, 5)]
    assert f"mean return over 2 seeds: {sum(returns) / 2:.2f}" in said
    train_from_config(config, ["--trainer.seed", "5", "--trainer.run_dir", str(tmp_path / "plain")])
    plain, continued = weights(tmp_path / "plain"), weights(killed[0])
    assert plain.keys() == continued.keys()
    assert all(plain[name].equal(continued[name]) for name in plain if not name.startswith("env"))
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["seed"], row["state"], row["runs"]) == ("3,5", "finished", 2)
    assert main([*words, "--trainer.run_dir", str(folder), "--algorithm.cfg.gamma", "0.9"]) == 2
    assert "holds other runs (algorithm.cfg.gamma: 0.99 there, 0.9 now)" in capsys.readouterr().err


def test_a_group_that_is_not_continued_says_in_what_it_differs(cfg, tmp_path):
    trainer = cfg.trainer.replace(run_dir=None, output_dir=str(tmp_path / "runs"))
    cfg = cfg.replace(trainer=trainer)
    with group.GroupFolder.opened("sweep", cfg, {"seeds": [0], "metric": "eval/return"}) as first:
        assert first.note == ""
    with group.GroupFolder.opened("sweep", cfg, {"seeds": [0], "metric": "eval/return"}) as again:
        assert (again.path, again.note) == (first.path, "")
    with group.GroupFolder.opened("sweep", cfg, {"seeds": [0, 1], "metric": "eval/return"}) as other:
        assert other.path != first.path
        assert other.note == f"{first.path} is not finished, and is left as it is (seeds: [0] there, [0, 1] now)"
    named = cfg.replace(trainer=trainer.replace(run_dir=str(first.path)))
    with (
        pytest.raises(TrainingStateError, match=r"\(seeds: \[0\] there, \[5\] now; metric: .* there, 'x' now\)"),
        group.GroupFolder.opened("sweep", named, {"seeds": [5], "metric": "x"}),
    ):
        pass
    base = json.loads((first.path / "base_config.json").read_text())  # of a version that knows no exp_name
    del base["trainer"]["exp_name"]
    (first.path / "base_config.json").write_text(json.dumps(base))
    with (
        pytest.raises(
            TrainingStateError, match=r"seeds: \[0\] there, \[5\] now; trainer\.exp_name: absent there, 'test' now\)"
        ),
        group.GroupFolder.opened("sweep", named, {"seeds": [5], "metric": "eval/return"}),
    ):
        pass


def trials_in(folder: Path) -> dict[int, str]:
    """Read the study's database without Optuna."""
    with sqlite3.connect(f"file:{folder / 'study.db'}?mode=ro", uri=True) as database:
        return dict(database.execute("select number, state from trials order by number").fetchall())


@pytest.mark.timeout(300)
@pytest.mark.extra("sweep")
def test_a_sweep_that_is_killed_loses_no_trial_and_runs_none_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer = {"run_dir": None, "iterations": 10, "eval_freq": 512, "save_freq": 256}
    config = write_config(tmp_path / "c.json", tmp_path / "none", trainer=trainer)
    space = "lr=log(1e-4,1e-2),ent=[0,0.01]"
    words = ["sweep", str(config), "--space", space, "--seeds", "0,1", "--trials", "3", "--jobs", "2", "--no-prune"]
    words += ["--confirm", "0", "--trainer.run_dir", str(tmp_path / "sweep")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(group.__file__).parents[4])}
    folder, deadline = tmp_path / "sweep", time.monotonic() + 250
    with subprocess.Popen(
        [sys.executable, "-m", "embodichain", *words], env=environment, stderr=subprocess.PIPE
    ) as process:
        while True:
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "the third trial did not begin"
            suspend(process.pid)  # so that nothing changes between looking and killing
            trials = {trial["number"]: trial["state"] for trial in (read_group(folder) or {}).get("trials", [])}
            if trials.get(2) == "running" and not (folder / "trial_0002" / "test_seed1").exists():
                process.send_signal(signal.SIGKILL)
                break
            process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
    states = trials_in(folder)
    over = [number for number, state in states.items() if state == "COMPLETE"]
    assert 1 <= len(over) < 3
    runs = {number: sorted(folder.glob(f"trial_{number:04d}/*")) for number in states}
    logs = {run: (run / "metrics.jsonl").read_bytes() for number in over for run in runs[number]}
    begun = {run: RunInfo(run).record.began for number in runs for run in runs[number] if (run / "run.json").exists()}
    assert main(words) == 0
    said = capsys.readouterr().err
    assert set(trials_in(folder).items()) == {(number, "COMPLETE") for number in range(3)}
    for number in range(3):
        for seed in (0, 1):
            run = RunInfo(folder / f"trial_{number:04d}" / f"test_seed{seed}")
            assert run.state == "finished"
            steps = [line["step"] for line in run.lines if "episode/count" in line]
            assert steps == [128 * count for count in range(1, 11)]
            assert begun.get(run.path, run.record.began) == run.record.began
    assert all((run / "metrics.jsonl").read_bytes() == log for run, log in logs.items())
    assert not any(f"trial {number}:" in said for number in over)
    assert "trial 2 continues: " in said

    told = json.loads((folder / "group.json").read_text())
    values = {}
    for trial in told["trials"]:
        runs = [RunInfo(folder / trial["folder"] / f"test_seed{seed}") for seed in (0, 1)]
        evaluations = [[line["eval/return"] for line in run.lines if "eval/return" in line] for run in runs]
        assert [len(one) for one in evaluations] == [3, 3]
        values[trial["number"]] = sum(map(sum, evaluations)) / 6
        assert trial["value"] == pytest.approx(values[trial["number"]])
    assert told["best"] == max(values, key=values.__getitem__)
    assert told["trials"][0]["params"] == {"lr": 1e-3, "ent": 0.0}  # what the config has comes first
    best = json.loads((folder / "best_config.json").read_text())
    params = told["trials"][told["best"]]["params"]
    assert best["algorithm"]["cfg"]["learning_rate"] == params["lr"]
    assert best["algorithm"]["cfg"]["ent_coef"] == params["ent"]
    assert best["trainer"]["run_dir"] is None
    page = (folder / "report.html").read_text()
    assert "eval/return by lr" in page
    assert "best_config.json" in page


@pytest.mark.extra("sweep")
def test_trials_that_fall_behind_are_pruned_and_failed_ones_are_told(tmp_path, monkeypatch):
    """Runs are written by hand: the seventh trial is worse than the others, the third fails."""
    monkeypatch.setattr(study, "_LOOK_SECONDS", 0.0)
    config = write_config(tmp_path / "c.json", tmp_path / "sweep")
    request = group.GroupRequest.of(config, [], [], "0", 1)
    settings = study.SweepSettings(("lr=log(1e-4,1e-2)",), trials=8, metric="eval/success", confirm=0)
    started: list[int] = []

    class Written(JobHandle):
        """Writes one evaluation each time it is looked at; those of trial 6 are poor."""

        def __init__(self, job):
            self.run, self.values = job.run_dir, [0.2, 0.1, 0.1, 0.1] if "trial_0006" in str(job.run_dir) else [0.5] * 4
            self.is_killed = False
            started.append(int(job.run_dir.parent.name.removeprefix("trial_")))
            self.run.mkdir(parents=True)
            (self.run / "train_config.json").write_text("{}")
            RunRecord(seed=0).write(self.run)
            if started[-1] == 2:
                self.problem, self.values = "RuntimeError: out of luck", []

        def is_over(self):
            if self.values:
                with (self.run / "metrics.jsonl").open("a") as file:
                    file.write(
                        json.dumps({"step": 10 * (5 - len(self.values)), "eval/success": self.values.pop(0)}) + "\n"
                    )
                return False
            RunRecord.end(self.run, "iterations" if self.problem is None else "failed")
            return True

        def stop(self): ...

        def kill(self):
            self.is_killed = True

    monkeypatch.setattr(Launcher, "start", lambda self, job: Written(job))
    output = io.StringIO()
    assert study.sweep(request, settings, console=MessageConsole(file=output)) == 0
    assert started == list(range(8))
    states = trials_in(tmp_path / "sweep")
    assert {number for number, state in states.items() if state != "COMPLETE"} == {2, 6}
    assert (states[2], states[6]) == ("FAIL", "PRUNED")
    said = output.getvalue()
    assert "trial 2 failed: RuntimeError: out of luck (see " in said
    assert "trial 6: pruned after 2 evaluations" in said
    told = json.loads((tmp_path / "sweep" / "group.json").read_text())
    assert [trial["value"] for trial in told["trials"]][:2] == [0.5, 0.5]
    assert told["trials"][2]["value"] is None
    assert RunInfo(tmp_path / "sweep" / "trial_0006" / "test_seed0").state == "pruned"
    with sqlite3.connect(tmp_path / "sweep" / "study.db") as database:
        values = "select step, intermediate_value from trial_intermediate_values v join trials t using (trial_id) "
        rows = database.execute(f"{values} where number = 6 order by step").fetchall()
    assert rows[:2] == [(1, 0.2), (2, pytest.approx(0.15))]  # the mean of what there is so far


def write_run(folder: Path, values: list[float], reason: str = "iterations") -> None:
    """Write a run that is over, with its evaluations."""
    folder.mkdir(parents=True)
    (folder / "train_config.json").write_text("{}")
    lines = [json.dumps({"step": 512 * count, "eval/return": value}) for count, value in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    RunRecord(seed=0, reason=reason).write(folder)


def test_runs_are_judged_by_the_area_under_their_curves_also_beyond_a_target(tmp_path):
    """A run that reaches its target after one of four evaluations is better than one that needs all four."""
    write_run(tmp_path / "early", [100.0], "target")
    write_run(tmp_path / "late", [10.0, 20.0, 30.0, 100.0], "target")
    write_run(tmp_path / "cut", [100.0], "max_seconds")
    early, late, cut = (RunInfo(tmp_path / name) for name in ("early", "late", "cut"))
    judge = Judge()
    assert judge.evaluations(early, 4) == [100.0] * 4
    assert judge.evaluations(cut, 4) == judge.evaluations(early, None) == [100.0]
    assert (judge.of(judge.evaluations(early, 4)), judge.of(judge.evaluations(late, 4))) == (100.0, 40.0)
    assert judge.of([]) is None
    values = [3.0, 1.0, 2.0]
    found = {(s, d): Judge("x", s, d).of(values) for s in ("mean", "last", "best") for d in ("maximize", "minimize")}
    assert [found[s, "maximize"] for s in ("mean", "last", "best")] == [2.0, 2.0, 3.0]
    assert [found[s, "minimize"] for s in ("mean", "last", "best")] == [2.0, 2.0, 1.0]


@pytest.mark.parametrize("frequency", [0, 50, 128, 200, 256, 300, 512, 5000])
@pytest.mark.parametrize("iterations", [1, 10, 12])
def test_the_number_of_evaluations_is_that_of_a_run(cfg, frequency, iterations):
    trainer = cfg.trainer.replace(iterations=iterations, num_envs=8, buffer_size=16, eval_freq=frequency)
    steps = [128 * count for count in range(iterations + 1)]
    due = {step for before, step in itertools.pairwise(steps) if crossed(frequency, before, step)}
    assert planned_evaluations(trainer) == len(due | {steps[-1]})
    assert planned_evaluations(trainer.replace(iterations=None, total_steps=None)) is None
    assert planned_evaluations(trainer, chunk_size({"name": "vla", "vla": {"chunk_size": 4}})) is None
    assert planned_evaluations(trainer, chunk_size({"name": "flow", "chunk_size": 1})) == planned_evaluations(trainer)


def test_seeds_of_a_recording_need_no_environment(tmp_path):
    cfg = ImitateCfg.from_dict({"source": {"dataset": str(tmp_path)}})
    assert "gym_config" not in group._shared(cfg)["trainer"]


class Confirming:
    """Starts runs that are over at once; what they reach is a function of the trial's name and of the seed."""

    def __init__(self, value_of):
        self.value_of, self.started = value_of, []

    def start(self, launcher, job):
        trial, seed = job.run_dir.parent.name, int(job.run_dir.name.removeprefix("test_seed"))
        self.started.append((trial, seed))
        handle = OverAtOnce()
        value = self.value_of(trial, seed)
        if value is None:
            handle.problem = "RuntimeError: out of luck"
        else:
            write_run(job.run_dir, [value])
        return handle


class OverAtOnce(JobHandle):
    def is_over(self):
        return True

    def stop(self): ...

    def kill(self): ...


def lucky(trial: str, seed: int) -> float:
    """Trial 1 is the best by far with the seeds of the search, trial 2 is good with any."""
    return {"trial_0001": 9.0 if seed < 2 else 0.0, "trial_0002": 5.0}.get(trial, 1.0)


def all_alike(trial: str, seed: int) -> float:
    return 2.0


def best_as_it_was(trial: str, seed: int) -> float:
    return 3.0 if trial == "config" else 2.0


def fails_later(trial: str, seed: int) -> float | None:
    """Trial 1 is the best, and fails with a further seed."""
    return None if (trial, seed) == ("trial_0001", 3) else float(trial == "trial_0001")


@pytest.mark.extra("sweep")
@pytest.mark.parametrize(
    ("space", "value_of", "best"),
    [
        ("lr=log(1e-4,1e-2)", lucky, 2),
        ("lr=log(1e-4,1e-2)", all_alike, 0),  # what the config has, the first trial, is kept
        ("lr=log(1e-2,1e-1)", best_as_it_was, None),  # it is no trial of this space, and beats all of them
    ],
)
def test_what_is_written_out_is_confirmed_with_further_seeds(tmp_path, monkeypatch, space, value_of, best):
    config = write_config(tmp_path / "c.json", tmp_path / "sweep")
    request = group.GroupRequest.of(config, [], [], "0,1", 1)
    settings = study.SweepSettings((space,), trials=4, confirm=2)
    runs, output = Confirming(value_of), io.StringIO()
    monkeypatch.setattr(Launcher, "start", lambda self, job: runs.start(self, job))
    monkeypatch.setattr(study, "write_report", lambda paths, file: file)
    monkeypatch.setattr(group, "_POLL_SECONDS", 0.0)
    assert study.sweep(request, settings, console=MessageConsole(file=output)) == 0
    told = json.loads((tmp_path / "sweep" / "group.json").read_text())
    assert (told["best"], told["done"]) == (best, True)
    searched = {(f"trial_{number:04d}", seed) for number in range(4) for seed in (0, 1)}
    assert {run for run in runs.started if run[1] < 2} == searched
    further = {run for run in runs.started if run[1] >= 2}
    assert {seed for _, seed in further} == {2, 3}
    assert ("config" if best is None else "trial_0000") in {trial for trial, _ in further}
    assert len(runs.started) == len(set(runs.started))
    cfg = json.loads((tmp_path / "sweep" / "best_config.json").read_text())
    wanted = 1e-3 if best is None else told["trials"][best]["params"]["lr"]
    assert cfg["algorithm"]["cfg"]["learning_rate"] == wanted
    means = [entry["value"] for entry in told["confirmed"]]
    assert means == sorted(means, reverse=True)
    assert (
        f"best: {'the config as it was' if best is None else f'trial {best}'}, eval/return {means[0]:.4g}"
        in output.getvalue()
    )


@pytest.mark.extra("sweep")
def test_a_failed_confirmation_is_told_and_tried_again(tmp_path, monkeypatch):
    config = write_config(tmp_path / "c.json", tmp_path / "sweep")
    request = group.GroupRequest.of(config, [], [], "0,1", 1)
    settings = study.SweepSettings(("lr=log(1e-4,1e-2)",), trials=4, confirm=2)
    runs, output = Confirming(fails_later), io.StringIO()
    monkeypatch.setattr(Launcher, "start", lambda self, job: runs.start(self, job))
    monkeypatch.setattr(study, "write_report", lambda paths, file: file)
    monkeypatch.setattr(group, "_POLL_SECONDS", 0.0)

    def told() -> tuple[int, bool]:
        group_data = json.loads((tmp_path / "sweep" / "group.json").read_text())
        return group_data["best"], group_data["done"]

    assert study.sweep(request, settings, console=MessageConsole(file=output)) == group.EXIT_FAILED
    assert told() == (0, False)  # of those that were confirmed
    assert "not confirmed, as runs failed: trial 1; the same command tries" in " ".join(output.getvalue().split())
    begun = len(runs.started)
    runs.value_of = lambda trial, seed: float(trial == "trial_0001")
    assert study.sweep(request, settings, console=MessageConsole(file=output)) == 0
    assert told() == (1, True)
    assert runs.started[begun:] == [("trial_0001", 3)]


@pytest.mark.extra("sweep")
def test_a_sweep_whose_trials_all_fail_stops_and_tries_them_again(tmp_path, monkeypatch):
    config = write_config(tmp_path / "c.json", tmp_path / "sweep")
    request = group.GroupRequest.of(config, [], ["json"], "0", 2)
    settings = study.SweepSettings(("lr=log(1e-4,1e-2)",), trials=30, confirm=0)
    runs, output = Confirming(lambda trial, seed: None), io.StringIO()
    monkeypatch.setattr(Launcher, "start", lambda self, job: runs.start(self, job))
    monkeypatch.setattr(study, "write_report", lambda paths, file: file)
    monkeypatch.setattr(group, "_POLL_SECONDS", 0.0)
    assert study.sweep(request, settings, console=MessageConsole(file=output)) == 1
    begun = json.loads((tmp_path / "sweep" / "group.json").read_text())
    assert 5 <= len(runs.started) < 8
    assert f"the first {len(runs.started)} trials have all failed" in output.getvalue()
    assert not begun["done"]
    runs.value_of = all_alike
    settings = study.SweepSettings(("lr=log(1e-4,1e-2)",), trials=len(runs.started), confirm=0)
    assert study.sweep(request, settings, console=MessageConsole(file=output)) == 0
    told = json.loads((tmp_path / "sweep" / "group.json").read_text())
    assert [trial["params"] for trial in told["trials"]] == [trial["params"] for trial in begun["trials"]]
    assert {trial["state"] for trial in told["trials"]} == {"complete"}
    assert f"train it: embodichain train {tmp_path / 'sweep' / 'best_config.json'} --trust json" in output.getvalue()
    assert told["trusted_modules"] == ["json"]


@pytest.mark.extra("sweep")
def test_a_metric_that_is_not_logged_is_told_with_those_that_are(tmp_path, monkeypatch, capsys):
    config = write_config(tmp_path / "c.json", tmp_path / "sweep")
    request = group.GroupRequest.of(config, [], [], "0", 1)
    settings = study.SweepSettings(("lr=log(1e-4,1e-2)",), trials=1, metric="eval/retrun", confirm=0)
    runs, output = Confirming(all_alike), io.StringIO()
    monkeypatch.setattr(Launcher, "start", lambda self, job: runs.start(self, job))
    monkeypatch.setattr(group, "_POLL_SECONDS", 0.0)
    assert study.sweep(request, settings, console=MessageConsole(file=output)) == 1
    assert "trial 0 failed: nothing was logged as eval/retrun. Did you mean 'eval/return'?" in output.getvalue()
    assert main(["runs", str(tmp_path)]) == 0
    assert "0 trials done, 1 failed" in capsys.readouterr().out


@pytest.mark.extra("sweep")
def test_the_same_evaluation_of_the_same_seed_is_compared_when_runs_end_early(tmp_path, monkeypatch):
    """Every run of trial 0 reaches its target at its first evaluation of three: its steps are those of the others."""
    target = {"iterations": 12, "eval_freq": 512, "target_return": 400.0}
    config = write_config(tmp_path / "c.json", tmp_path / "sweep", trainer=target)
    request = group.GroupRequest.of(config, [], [], "0,1", 1)
    settings = study.SweepSettings(("lr=log(1e-4,1e-2)",), trials=2, confirm=0)

    def start(self, job):
        early = job.run_dir.parent.name == "trial_0000"
        write_run(job.run_dir, [500.0] if early else [1.0, 2.0, 3.0], "target" if early else "iterations")
        return OverAtOnce()

    monkeypatch.setattr(Launcher, "start", start)
    monkeypatch.setattr(study, "write_report", lambda paths, file: file)
    assert study.sweep(request, settings, console=MessageConsole(file=io.StringIO())) == 0
    with sqlite3.connect(tmp_path / "sweep" / "study.db") as database:
        values = (
            "select number, step, intermediate_value from trial_intermediate_values v join trials t using (trial_id) "
        )
        rows = database.execute(f"{values} order by number, step").fetchall()
    assert [row[:2] for row in rows] == [(number, step) for number in (0, 1) for step in range(1, 7)]
    assert [row[2] for row in rows] == [500.0] * 6 + [1.0, 1.5, 2.0, 1.5, 1.75, 2.0]


@pytest.mark.extra("sweep")
def test_a_trial_that_was_killed_before_its_draws_gets_the_same_ones(tmp_path, monkeypatch):
    class Killed(BaseException): ...

    class Done(JobHandle):
        """A run that is over at once."""

        def __init__(self, job):
            job.run_dir.mkdir(parents=True)
            (job.run_dir / "train_config.json").write_text("{}")
            (job.run_dir / "metrics.jsonl").write_text('{"step": 1, "eval/return": 1.0}\n')
            RunRecord(seed=0, reason="iterations").write(job.run_dir)

        def is_over(self):
            return True

        def stop(self): ...

        def kill(self): ...

    def drawn(name: str) -> list[dict]:
        config = write_config(tmp_path / "c.json", tmp_path / name)
        request = group.GroupRequest.of(config, [], [], "0", 1)
        settings = study.SweepSettings(("lr=log(1e-4,1e-2)",), trials=3, confirm=0)
        study.sweep(request, settings, console=MessageConsole(file=io.StringIO()))
        return [trial["params"] for trial in json.loads((tmp_path / name / "group.json").read_text())["trials"]]

    monkeypatch.setattr(Launcher, "start", lambda self, job: Done(job))
    monkeypatch.setattr(study, "write_report", lambda paths, file: file)
    wanted, draw = drawn("plain"), study.Sweep._draw

    def draw_or_die(self, trial, name, domain):
        if trial.number == 1:
            raise Killed
        return draw(self, trial, name, domain)

    with monkeypatch.context() as patch:
        patch.setattr(study.Sweep, "_draw", draw_or_die)
        with pytest.raises(Killed):
            drawn("killed")
    assert trials_in(tmp_path / "killed")[1] == "RUNNING"
    assert drawn("killed") == wanted


@pytest.mark.extra("sweep", "ray")
@pytest.mark.timeout(300)
def test_trials_are_trained_in_a_cluster(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer = {"run_dir": None, "iterations": 2, "num_eval_envs": 4}
    config = write_config(tmp_path / "c.json", tmp_path / "none", trainer=trainer)
    words = ["sweep", str(config), "--space", "lr=log(1e-4,1e-2)", "--trials", "1", "--worker", "ray"]
    assert main([*words, "--seeds", "0", "--confirm", "0", "--num-cpus", "0.5"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert set(trials_in(folder).values()) == {"COMPLETE"}
    run = RunInfo(folder / "trial_0000" / "test_seed0")
    assert (run.state, run.step) == ("finished", 256)
    assert "embodichain train" in capsys.readouterr().err
