"""A search for better settings with Optuna: ``embodichain sweep CONFIG --space 'lr=log(1e-4,1e-2)' --trials 40``.

Trials are kept in ``study.db`` (SQLite), which a killed process leaves whole. A trial that was running is continued in
its folder, and one whose runs are over is judged by what they logged: none is lost, and none is run twice.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from embodichain.agents.processes.ray_backend import PlacementCfg
from embodichain.agents.rl.config import TrainCfg, override
from embodichain.agents.rl.reports.page import write_report
from embodichain.agents.rl.run_records import RunInfo, RunRecord
from embodichain.agents.rl.sweeps.group import (
    DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    GroupFolder,
    GroupRequest,
    Runner,
)
from embodichain.agents.rl.sweeps.jobs import Job, Launcher
from embodichain.agents.rl.sweeps.space import Domain, current_values, parse_space
from embodichain.config import save_config
from embodichain.errors import ConfigError
from embodichain.extras import require
from embodichain.utils.console import MessageConsole, check_counts, shown_messages

BEST_CONFIG, DATABASE, REPORT = "best_config.json", "study.db", "report.html"
_STARTUP_TRIALS, _WARMUP_EVALUATIONS = 5, 2
"""Trials that are complete before any is pruned, and evaluations that every one has."""
_LOOK_SECONDS = 1.0
"""How often the logs of runs are read for new evaluations."""


@dataclass(frozen=True)
class SweepSettings:
    """How trials are made and judged."""

    space: tuple[str, ...]
    trials: int = 20
    metric: str = "eval/return"
    score: Literal["last", "best", "mean"] = "last"
    direction: Literal["maximize", "minimize"] = "maximize"
    prune: bool = True
    sampler_seed: int = 0

    def __post_init__(self) -> None:
        check_counts({"--trials": self.trials})


@dataclass
class ActiveTrial:
    """A trial whose runs are made one after the other."""

    trial: Any
    folder: str
    words: list[str]
    slot: int
    seeds: list[int]
    """Seeds that are still to be run, the present one first."""
    scores: list[float]
    """Scores of the runs that are over."""
    job: Job | None = None
    reported: int = 0
    """Evaluations that the study knows of."""


class Sweep:
    """A search in progress: asks Optuna for trials, runs them, and tells it how they do."""

    def __init__(
        self,
        request: GroupRequest,
        settings: SweepSettings,
        space: dict[str, Domain],
        group: GroupFolder,
        runner: Runner,
    ) -> None:
        self._optuna = require("optuna", extra="sweep")
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        self.request, self.settings, self.space, self.group, self.runner = request, settings, space, group, runner
        pruners = self._optuna.pruners
        median = pruners.MedianPruner(_STARTUP_TRIALS, _WARMUP_EVALUATIONS)
        self.study = self._optuna.create_study(
            storage=f"sqlite:///{(group.path / DATABASE).absolute()}",
            study_name="sweep",
            direction=settings.direction,
            pruner=median if settings.prune else pruners.NopPruner(),
            load_if_exists=True,
        )
        states = self._optuna.trial.TrialState
        if not self.study.trials:
            values = current_values(space, group.cfg)
            if values is not None:  # so that the best trial is at least as good as what there was
                self.study.enqueue_trial(values)
        self._left = [trial for trial in self.study.trials if trial.state == states.RUNNING]
        """Trials that were running when the process before this one ended."""
        self.active: list[ActiveTrial] = []
        self._looked = 0.0

    @property
    def _begun(self) -> int:
        """Number of trials that were begun, whatever became of them."""
        waiting = self._optuna.trial.TrialState.WAITING
        return sum(trial.state != waiting for trial in self.study.get_trials(deepcopy=False))

    def step(self) -> bool:
        """Take note of what happened, and start what can be; tell whether all trials are over."""
        for job, problem in self.runner.ended():
            active = next(one for one in self.active if one.job == job)
            self._report(active)
            self._run_ended(active, problem)
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            for active in list(self.active):
                if self._report(active) and active.trial.should_prune():
                    self._prune(active)
            self._looked = time.monotonic()
        while self.runner.free and len(self.active) < self.request.jobs:
            taken = {one.slot for one in self.active}
            slot = next(slot for slot in range(self.request.jobs) if slot not in taken)
            if self._left:
                left = self._left.pop(0)
                self._set_sampler(left.number)
                self._begin(self._optuna.Trial(self.study, left._trial_id), slot, again=True)
            elif self._begun < self.settings.trials:
                self._set_sampler(self._begun)
                self._begin(self.study.ask(), slot)
            else:
                break
        return not self.active

    def _set_sampler(self, number: int) -> None:
        """Let the draws of a trial depend on its number, not on how often the sweep was interrupted, even between
        the beginning of the trial and its draws."""
        seed = 1009 * self.settings.sampler_seed + number
        self.study.sampler = self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    def _begin(self, trial: Any, slot: int, again: bool = False) -> None:
        """Draw the settings of a trial, or take those that it has, and start its first run."""
        params = {name: self._draw(trial, name, domain) for name, domain in self.space.items()}
        words = [word for name, value in params.items() for word in self.space[name].words(value)]
        active = ActiveTrial(trial, f"trial_{trial.number:04d}", words, slot, list(self.request.seeds), [])
        known = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        active.reported = len(known)
        self.active.append(active)
        shown = ", ".join(f"{name}={_short(value)}" for name, value in params.items())
        self.runner.print(f"trial {trial.number}{' continues' if again else ''}: {shown}")
        self._next_run(active)
        self._write()

    def _draw(self, trial: Any, name: str, domain: Domain) -> Any:
        if domain.choices:
            return trial.suggest_categorical(name, domain.choices)
        if domain.is_integer:
            return trial.suggest_int(name, domain.low, domain.high, log=domain.log)
        return trial.suggest_float(name, domain.low, domain.high, log=domain.log)

    def _next_run(self, active: ActiveTrial) -> None:
        """Start the run of the next seed; those that are over count as they are."""
        while active.seeds:
            job = self.group.job(active.seeds[0], self.request, active.slot, active.folder, active.words)
            run = RunInfo(job.run_dir)
            active.job = job
            if run.state not in DONE:
                self.runner.start(job, active.slot)
                return
            self._report(active)
            if not self._take_score(active, run):
                return
        self._complete(active)

    def _run_ended(self, active: ActiveTrial, problem: str | None) -> None:
        if active.job is None:
            return
        run = RunInfo(active.job.run_dir)
        if run.state in DONE and problem is None:
            if self._take_score(active, run):
                self._next_run(active)
            return
        reason = problem or f"its run is {run.state}"
        self._fail(active, f"{reason} (see {active.job.log})")

    def _take_score(self, active: ActiveTrial, run: RunInfo) -> bool:
        """Add the score of a run that is over; a trial without one has failed."""
        score = self._score([line[self.settings.metric] for line in self._evaluations(run)])
        if score is None:
            self._fail(active, f"nothing was logged as {self.settings.metric}")
            return False
        active.scores.append(score)
        active.seeds.pop(0)
        return True

    def _evaluations(self, run: RunInfo) -> list[dict[str, Any]]:
        metric = self.settings.metric
        return [line for line in run.lines if line.get(metric) is not None and math.isfinite(line[metric])]

    def _score(self, values: Sequence[float]) -> float | None:
        """Return one number for the evaluations of a run."""
        if not values:
            return None
        if self.settings.score == "best":
            return max(values) if self.settings.direction == "maximize" else min(values)
        return values[-1] if self.settings.score == "last" else sum(values) / len(values)

    def _report(self, active: ActiveTrial) -> bool:
        """Tell the study of evaluations that it does not know yet; return whether there were any.

        Step ``n`` of a trial is its ``n``-th evaluation, over all seeds; the value there is the mean over the seeds
        that are over and the one that runs.
        """
        if active.job is None:
            return False
        values = [line[self.settings.metric] for line in self._evaluations(RunInfo(active.job.run_dir))]
        before = sum(self._count(active, seed) for seed in self.request.seeds[: len(active.scores)])
        fresh = range(max(0, active.reported - before), len(values))
        for index in fresh:
            score = self._score(values[: index + 1])
            if score is not None:
                scores = [*active.scores, score]
                active.trial.report(sum(scores) / len(scores), before + index + 1)
        active.reported = max(active.reported, before + len(values))
        return len(fresh) > 0

    def _count(self, active: ActiveTrial, seed: int) -> int:
        job = self.group.job(seed, self.request, active.slot, active.folder, active.words)
        return len(self._evaluations(RunInfo(job.run_dir)))

    def _prune(self, active: ActiveTrial) -> None:
        """End a trial that is worse than most were at this point."""
        if active.job is not None:
            self.runner.end(active.job)
            RunRecord.end(active.job.run_dir, "pruned")
        self._tell(active, state=self._optuna.trial.TrialState.PRUNED)
        self.runner.print(f"trial {active.trial.number}: pruned after {active.reported} evaluations")

    def _complete(self, active: ActiveTrial) -> None:
        value = sum(active.scores) / len(active.scores)
        self._tell(active, values=value)
        best = self.study.best_trial
        is_best = " (the best so far)" if best.number == active.trial.number else ""
        self.runner.print(f"trial {active.trial.number}: {self.settings.metric} {value:.4g}{is_best}")

    def _fail(self, active: ActiveTrial, reason: str) -> None:
        self._tell(active, state=self._optuna.trial.TrialState.FAIL)
        self.runner.print(f"trial {active.trial.number} failed: {reason}")

    def _tell(self, active: ActiveTrial, **result: Any) -> None:
        self.active.remove(active)
        self.study.tell(active.trial, **result)
        self._write()

    def _write(self, **changes: Any) -> None:
        """Write what is known into ``group.json``, and the best config so far."""
        trials = [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "value": _value(trial),
                "params": trial.params,
                "folder": f"trial_{trial.number:04d}",
            }
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.name != "WAITING"
        ]
        best = self.best()
        if best is not None:
            save_config(best[1], self.group.path / BEST_CONFIG)
            changes |= {"best": best[0], "best_config": BEST_CONFIG}
        self.group.write(trials=trials, **changes)

    def best(self) -> tuple[int, TrainCfg] | None:
        """Return the number of the best trial and its config, if a trial is complete."""
        with contextlib.suppress(ValueError):  # none is
            trial = self.study.best_trial
            words = [word for name, domain in self.space.items() for word in domain.words(trial.params[name])]
            cfg = override(self.group.cfg, [*words, "--trainer.seed", str(self.request.seeds[0])])
            return trial.number, cfg
        return None

    def conclude(self) -> int:
        """Write the report, say what was found, and return the exit code."""
        is_done = not self.active and self._begun >= self.settings.trials
        self._write(done=is_done)
        best = self.best()
        path = self.group.path
        if best is not None:
            trial = self.study.best_trial
            shown = ", ".join(f"{name}={_short(value)}" for name, value in trial.params.items())
            self.runner.print(f"best: trial {trial.number}, {self.settings.metric} {trial.value:.4g}, {shown}")
            self.runner.print(f"train it: embodichain train {path / BEST_CONFIG}")
            self.runner.print(f"report: {write_report([path], path / REPORT)}")
        if self.runner.interrupted:
            self.runner.print(f"interrupted; the same command continues {path}")
            return EXIT_INTERRUPTED
        return 0 if best is not None else EXIT_FAILED


def _value(trial: Any) -> float | None:
    """Return the value of a trial; of one that was pruned or still runs, the last one known."""
    if trial.value is not None:
        return float(trial.value)
    last = trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None
    return None if last is None else float(last)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def sweep(
    request: GroupRequest,
    settings: SweepSettings,
    cluster: PlacementCfg | None = None,
    address: str | None = None,
    console: Console | None = None,
) -> int:
    """Search for better settings, or continue that; return the exit code."""
    require("optuna", extra="sweep")
    console = console or MessageConsole()
    cfg = request.load("embodichain sweep")
    if not cfg.trainer.enable_eval:
        raise ConfigError("trainer.enable_eval: expected true, as evaluations judge trials, got false", "command line")
    space = parse_space(settings.space, cfg)
    facts = {
        "space": {name: domain.to_data() for name, domain in space.items()},
        "seeds": list(request.seeds),
        "metric": settings.metric,
        "score": settings.score,
        "direction": settings.direction,
    }
    with shown_messages(), GroupFolder.opened("sweep", cfg, facts) as group, contextlib.ExitStack() as stack:
        launcher = Launcher(request.jobs, cluster, address)
        stack.callback(launcher.close)
        runner = Runner(request.jobs, launcher, console)
        for name, domain in space.items():
            runner.print(f"{name}: {domain.field}, {domain}")
        runner.print(
            f"{settings.trials} trials of {len(request.seeds)} seed(s), {request.jobs} at a time: {group.path}"
        )
        search = Sweep(request, settings, space, group, runner)
        runner.loop(search.step)
        return search.conclude()
