"""Hyperparameter search with Optuna: ``embodichain sweep CONFIG --space 'lr=log(1e-4,1e-2)' --trials 40``.

Trials are stored in ``study.db`` (SQLite), which survives a killed process. A running trial is then resumed in its
folder, and finished runs are scored from their logs, so no trial is lost or repeated. The first trial has the settings
of the config itself. It and the best trials are confirmed with further seeds.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from embodichain.agents.processes.ray_backend import PlacementCfg
from embodichain.agents.rl.config import TrainCfg, override
from embodichain.agents.rl.reports.page import write_report
from embodichain.agents.rl.run_records import RunInfo, RunRecord, trust_flags
from embodichain.agents.rl.sweeps.confirmation import Candidate, Confirmation, Confirmed
from embodichain.agents.rl.sweeps.group import (
    DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    LOGS,
    GroupFolder,
    GroupRequest,
    Runner,
)
from embodichain.agents.rl.sweeps.jobs import Job, Launcher
from embodichain.agents.rl.sweeps.scores import Direction, Judge, ScoreKind, chunk_size, planned_evaluations
from embodichain.agents.rl.sweeps.space import Domain, current_values, parse_space
from embodichain.config import save_config
from embodichain.errors import ConfigError, nearest
from embodichain.extras import require
from embodichain.utils.console import MessageConsole, check_counts, shown_messages

BEST_CONFIG, DATABASE, REPORT = "best_config.json", "study.db", "report.html"
_OF_CONFIG = "of_config"
"""Attribute of the trial that has the settings of the config itself."""
_STUDY = "sweep"
_HOPELESS_TRIALS = 5
"""The sweep stops if this many first trials have all failed."""
_STARTUP_TRIALS, _WARMUP_EVALUATIONS = 5, 2
"""Number of complete trials before any is pruned, and of evaluations before a trial is pruned."""
_CONFIRMED_TRIALS = 3
"""Number of trials to confirm, besides the config itself."""
_UNPLANNED = 100_000
"""Assumed maximum number of evaluations of a run if it is unknown."""
_LOOK_SECONDS = 1.0
"""How often the logs of runs are read for new evaluations."""


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep."""

    space: tuple[str, ...]
    trials: int = 20
    metric: str = "eval/return"
    score: ScoreKind = "mean"
    direction: Direction = "maximize"
    prune: bool = True
    sampler_seed: int = 0
    confirm: int = 5
    """Number of further seeds with which the best trials are confirmed."""

    def __post_init__(self) -> None:
        check_counts({"--trials": self.trials})
        if self.confirm < 0:
            raise ConfigError(f"--confirm: expected a number of seeds, 0 for none, got {self.confirm}", "command line")

    @property
    def judge(self) -> Judge:
        """Computes the score of runs."""
        return Judge(self.metric, self.score, self.direction)


@dataclass
class ActiveTrial:
    """A running trial, whose seeds are trained one after the other."""

    trial: Any
    candidate: Candidate
    slot: int
    seeds: list[int]
    """Remaining seeds, the current one first."""
    reported: set[int]
    """Steps that were reported to the study."""
    scores: list[float] = field(default_factory=list)
    """Scores of finished runs."""
    job: Job | None = None


class Sweep:
    """A running sweep: asks Optuna for trials, runs them, and reports their results."""

    def __init__(
        self,
        request: GroupRequest,
        settings: SweepSettings,
        space: dict[str, Domain],
        group: GroupFolder[TrainCfg],
        runner: Runner,
    ) -> None:
        self._optuna = require("optuna", extra="sweep")
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        self.request, self.settings, self.space, self.group, self.runner = request, settings, space, group, runner
        self.judge = settings.judge
        self.study = self._opened()
        states = self._optuna.trial.TrialState
        if self._all_failed():  # the cause may be fixed by now: try the same trials again
            self._optuna.delete_study(study_name=_STUDY, storage=self._storage)
            self.study = self._opened()
        if not self.study.trials:
            values = current_values(space, group.cfg)
            if values is not None:  # so that the best trial is at least as good as the config
                self.study.enqueue_trial(values, user_attrs={_OF_CONFIG: True})
        self._left = [trial for trial in self.study.trials if trial.state == states.RUNNING]
        """Trials that were running when the previous process ended."""
        self.active: list[ActiveTrial] = []
        self.confirmed: list[Confirmed] = []
        self._looked = 0.0

    @property
    def _storage(self) -> str:
        return f"sqlite:///{(self.group.path / DATABASE).absolute()}"

    def _opened(self) -> Any:
        """Return the study in the folder, or create it."""
        pruners = self._optuna.pruners
        median = pruners.MedianPruner(_STARTUP_TRIALS, _WARMUP_EVALUATIONS)
        return self._optuna.create_study(
            storage=self._storage,
            study_name=_STUDY,
            direction=self.settings.direction,
            pruner=median if self.settings.prune else pruners.NopPruner(),
            load_if_exists=True,
        )

    def _all_failed(self) -> bool:
        """Return whether there are finished trials and all of them have failed."""
        states = self._optuna.trial.TrialState
        over = {trial.state for trial in self.study.get_trials(deepcopy=False)} - {states.WAITING, states.RUNNING}
        return over == {states.FAIL}

    @property
    def _begun(self) -> int:
        """Number of trials that were started."""
        waiting = self._optuna.trial.TrialState.WAITING
        return sum(trial.state != waiting for trial in self.study.get_trials(deepcopy=False))

    def step(self) -> bool:
        """Process finished runs and new evaluations, and start trials; return whether all are finished."""
        for job, problem in self.runner.ended():
            active = next(one for one in self.active if one.job == job)
            self._report(active)
            self._run_ended(active, problem)
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            for active in list(self.active):
                is_new = self._report(active)
                if is_new and _OF_CONFIG not in active.trial.user_attrs and active.trial.should_prune():
                    self._prune(active)
            self._looked = time.monotonic()
        while self.runner.free and len(self.active) < self.request.jobs:
            taken = {one.slot for one in self.active}
            slot = next(slot for slot in range(self.request.jobs) if slot not in taken)
            if self._left:
                left = self._left.pop(0)
                self._set_sampler(left.number)
                self._begin(self._optuna.Trial(self.study, left._trial_id), slot, again=True)
            elif self._begun < self.settings.trials and not self._is_hopeless():
                self._set_sampler(self._begun)
                self._begin(self.study.ask(), slot)
            else:
                break
        return not self.active

    def _is_hopeless(self) -> bool:
        """Return whether the first ``_HOPELESS_TRIALS`` trials have all failed."""
        return self._all_failed() and self._begun - len(self.active) >= _HOPELESS_TRIALS

    def _set_sampler(self, number: int) -> None:
        """Seed the sampler by the number of the trial, so that its settings do not depend on interruptions."""
        seed = 1009 * self.settings.sampler_seed + number
        self.study.sampler = self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    def _begin(self, trial: Any, slot: int, again: bool = False) -> None:
        """Sample the settings of a trial, unless it has them already, and start its first run."""
        params = {name: self._draw(trial, name, domain) for name, domain in self.space.items()}
        known = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        active = ActiveTrial(trial, self._candidate(trial.number, params), slot, list(self.request.seeds), set(known))
        self.active.append(active)
        shown = ", ".join(f"{name}={_short(value)}" for name, value in params.items())
        self.runner.print(f"trial {trial.number}{' continues' if again else ''}: {shown}")
        self._next_run(active)
        self._write()

    def _candidate(self, number: int, params: dict[str, Any]) -> Candidate:
        words = tuple(word for name, domain in self.space.items() for word in domain.words(params[name]))
        return Candidate(f"trial {number}", f"trial_{number:04d}", words, self._planned(words), number)

    def _planned(self, words: tuple[str, ...]) -> int | None:
        """Return the number of evaluations of a run with these settings, ``None`` if it is unknown."""
        if not self.judge.metric.startswith("eval/"):
            return None
        cfg = override(self.group.cfg, list(words))
        return planned_evaluations(cfg.trainer, chunk_size(cfg.policy))

    def _draw(self, trial: Any, name: str, domain: Domain) -> Any:
        if domain.choices:
            return trial.suggest_categorical(name, domain.choices)
        if domain.is_integer:
            return trial.suggest_int(name, domain.low, domain.high, log=domain.log)
        return trial.suggest_float(name, domain.low, domain.high, log=domain.log)

    def _next_run(self, active: ActiveTrial) -> None:
        """Start the run of the next seed; finished runs are only scored."""
        while active.seeds:
            candidate = active.candidate
            job = self.group.job(active.seeds[0], self.request, active.slot, candidate.folder, candidate.words)
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
        """Add the score of a finished run; if it has none, fail the trial and return ``False``."""
        score = self.judge.of(self.judge.evaluations(run, active.candidate.planned))
        if score is None:
            logged = {name for line in run.lines for name in line if name.startswith("eval/")}
            self._fail(active, f"nothing was logged as {self.settings.metric}.{nearest(self.settings.metric, logged)}")
            return False
        active.scores.append(score)
        active.seeds.pop(0)
        return True

    def _report(self, active: ActiveTrial) -> bool:
        """Report new evaluations to the study; return whether there were any.

        The steps of a trial count its evaluations, seed after seed, so that equal steps of two trials are the same
        evaluation of the same seed. The value is the mean over finished seeds and the running one.
        """
        if active.job is None:
            return False
        most = active.candidate.planned or _UNPLANNED
        values = self.judge.evaluations(RunInfo(active.job.run_dir), active.candidate.planned)
        before = most * len(active.scores)
        fresh = [count for count in range(1, min(len(values), most) + 1) if before + count not in active.reported]
        for count in fresh:
            score = self.judge.of(values[:count])
            if score is not None:
                scores = [*active.scores, score]
                active.trial.report(sum(scores) / len(scores), before + count)
        active.reported |= {before + count for count in fresh}
        return len(fresh) > 0

    def _prune(self, active: ActiveTrial) -> None:
        """Stop a trial that is worse than the median at this step."""
        if active.job is not None:
            self.runner.end(active.job)
            RunRecord.end(active.job.run_dir, "pruned")
        self._tell(active, state=self._optuna.trial.TrialState.PRUNED)
        self.runner.print(f"trial {active.trial.number}: pruned after {len(active.reported)} evaluations")

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
        """Write ``group.json`` and the best config so far."""
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
            cfg = override(self.group.cfg, [*best.words, "--trainer.seed", str(self.request.seeds[0])])
            save_config(cfg, self.group.path / BEST_CONFIG)
            trusted = list(self.request.trusted_modules)
            changes |= {"best": best.number, "best_config": BEST_CONFIG, "trusted_modules": trusted}
        self.group.write(trials=trials, **changes)

    def best(self) -> Candidate | None:
        """Return the best confirmed candidate, or else the best trial so far; ``None`` if no trial is complete."""
        if self.confirmed:
            return self.confirmed[0].candidate
        with contextlib.suppress(ValueError):  # no trial is complete
            trial = self.study.best_trial
            return self._candidate(trial.number, trial.params)
        return None

    def confirmation(self) -> Confirmation | None:
        """Return the confirmation of the best trials; ``None`` if interrupted or there is nothing to confirm."""
        if self.runner.interrupted or not self.settings.confirm or self.best() is None:
            return None
        trials = self.study.get_trials(deepcopy=False)
        complete = [trial for trial in trials if trial.state == self._optuna.trial.TrialState.COMPLETE]
        complete.sort(key=lambda trial: self.judge.rank(trial.value))
        best = [self._candidate(trial.number, trial.params) for trial in complete[:_CONFIRMED_TRIALS]]
        of_config = next((trial for trial in trials if _OF_CONFIG in trial.user_attrs), None)
        if of_config is None:
            config = Candidate("the config as it was", "config", (), self._planned(()))
        else:
            config = self._candidate(of_config.number, of_config.params)
        return Confirmation(self.request, self.group, self.runner, self.judge, config, best, self.settings.confirm)

    def conclude(self, confirmation: Confirmation | None) -> int:
        """Write the report, print the result, and return the exit code."""
        is_done = not self.active and self._begun >= self.settings.trials and not self._all_failed()
        unconfirmed: list[str] = []
        if confirmation is not None:
            is_done = is_done and not self.runner.interrupted
            self.confirmed = confirmation.ranking() if is_done else []
            unconfirmed = confirmation.failed
            is_done = is_done and not unconfirmed
        self._write(done=is_done, confirmed=[confirmed.to_data() for confirmed in self.confirmed])
        best = self.best()
        path = self.group.path
        if best is not None:
            self.runner.print(f"best: {self._described(best)}")
            words = ["embodichain", "train", str(path / BEST_CONFIG), *trust_flags(self.request.trusted_modules)]
            self.runner.print(f"train it: {shlex.join(words)}")
            self.runner.print(f"report: {write_report([path], path / REPORT)}")
        if self.runner.interrupted:
            self.runner.print(f"interrupted; the same command continues {path}")
            return EXIT_INTERRUPTED
        if best is None:
            self.runner.print(f"the first {self._begun} trials have all failed; what they printed is in {path / LOGS}")
            self.runner.print("once that is mended, the same command tries them again")
            return EXIT_FAILED
        if unconfirmed:
            self.runner.print(
                f"not confirmed, as runs failed: {', '.join(unconfirmed)}; the same command tries them again"
            )
            return EXIT_FAILED
        return 0

    def _described(self, best: Candidate) -> str:
        """Return the best candidate and its result as text."""
        if self.confirmed:
            value, count = self.confirmed[0].value, len(self.confirmed[0].scores)
            result = f"{self.judge.metric} {value:.4g} with {count} further seed(s)"
        else:
            result = f"{self.judge.metric} {self.study.best_trial.value:.4g}"
        if best.number is None:
            return f"{best.name}, {result}"
        params = self.study.get_trials(deepcopy=False)[best.number].params
        shown = ", ".join(f"{name}={_short(value)}" for name, value in params.items())
        return f"{best.name}, {result}, {shown}"


def _value(trial: Any) -> float | None:
    """Return the value of a trial; for a pruned or running one, the last intermediate value."""
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
    """Run a sweep, or resume it; return the exit code."""
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
        if group.note:
            runner.print(group.note)
        for name, domain in space.items():
            runner.print(f"{name}: {domain.field}, {domain}")
        runner.print(
            f"{settings.trials} trials of {len(request.seeds)} seed(s), {request.jobs} at a time: {group.path}"
        )
        search = Sweep(request, settings, space, group, runner)
        runner.loop(search.step)
        confirmation = search.confirmation()
        if confirmation is not None:
            runner.loop(confirmation.step)
        return search.conclude(confirmation)
