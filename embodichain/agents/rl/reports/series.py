"""Selects the runs of a report; runs that differ only in the seed form a series."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from embodichain.agents.rl.run_records import RunInfo, find_runs, read_group
from embodichain.config.files import dotted
from embodichain.errors import ConfigError

_NOT_COMPARED = ("seed", "run_dir", "output_dir", "num_threads", "collect_threads", "update_threads", "use_wandb")
"""Fields (last part of their names) that are ignored when runs are grouped."""
ABSENT = "–"
"""Placeholder for a setting that a config does not have."""
_LABEL_PARTS = 3
_POINTS = 200
BEST_TRIALS = 5
"""Number of trials of a sweep whose curves are drawn."""


@dataclass
class Series:
    """Runs with the same settings."""

    runs: list[RunInfo]
    settings: dict[str, Any]
    """Their settings by dotted name, without those that are ignored."""
    label: str = ""
    trials: tuple[int, ...] = ()
    """Numbers of their trials, if they belong to a sweep."""

    @property
    def seeds(self) -> str:
        """The seeds of the runs, as text."""
        return ", ".join("?" if run.record.seed is None else str(run.record.seed) for run in self.runs)

    @cached_property
    def names(self) -> list[str]:
        """Names of all numbers that the runs have logged."""
        lines = [line for run in self.runs for line in run.lines]
        return sorted({name for line in lines for name, value in line.items() if value is not None and name != "step"})

    def final(self, name: str) -> np.ndarray:
        """Return the last value of each run that has one, ``[num_runs]``."""
        return np.array([value for run in self.runs if (value := run.latest(name)) is not None])

    def best(self, name: str) -> np.ndarray:
        """Return the maximum of each run that has values, ``[num_runs]``."""
        curves = [curve(run, name)[1] for run in self.runs]
        return np.array([values.max() for values in curves if len(values)])


def curve(run: RunInfo, name: str, over: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """Return ``(x, y)``, each ``[num_points]``: the values logged under ``name``, over steps or another name."""
    points = [
        (line[over], line[name]) for line in run.lines if line.get(name) is not None and line.get(over) is not None
    ]
    values = np.array(points, dtype=np.float64).reshape(-1, 2)
    return values[:, 0], values[:, 1]


def curves_of(series: Series, name: str, over: str = "step") -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the curves of all runs of a series.

    A run that stopped at its target is extended, with its last value, to the end of the longest run.
    """
    found = [curve(run, name, over) for run in series.runs]
    longest = max((x[-1] for x, _ in found if len(x)), default=0.0)
    for index, (run, (x, y)) in enumerate(zip(series.runs, found, strict=True)):
        if run.record.reason == "target" and len(x) and x[-1] < longest:
            found[index] = np.append(x, longest), np.append(y, y[-1])
    return found


def mean_and_band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return grid points that all curves cover, with mean and standard deviation; ``None`` for less than two curves."""
    filled = [(x, y) for x, y in curves if len(x)]
    if len(filled) < 2:
        return None
    first, last = max(x[0] for x, _ in filled), min(x[-1] for x, _ in filled)
    if first > last:
        return None
    known = np.unique(np.concatenate([x for x, _ in filled]))
    grid = known[(known >= first) & (known <= last)]
    if len(grid) > _POINTS:
        grid = np.linspace(first, last, _POINTS)
    values = np.stack([np.interp(grid, x, y) for x, y in filled])
    return grid, values.mean(0), values.std(0, ddof=1)


@dataclass(frozen=True)
class SweepResult:
    """A sweep, as read from its folder."""

    path: Path
    group: dict[str, Any]
    trials: list[dict[str, Any]]
    """Number, state, value and params of every trial, in order."""

    @classmethod
    def read(cls, folder: Path) -> SweepResult | None:
        """Return the sweep in a folder, or ``None``."""
        group = read_group(folder)
        return cls(folder, group, list(group.get("trials", []))) if group and group.get("kind") == "sweep" else None

    @property
    def finished(self) -> list[dict[str, Any]]:
        """Trials with a value, best first."""
        known = [trial for trial in self.trials if trial["value"] is not None and trial["state"] == "complete"]
        return sorted(known, key=lambda trial: trial["value"], reverse=self.is_maximized)

    @property
    def best(self) -> list[dict[str, Any]]:
        """Trials whose runs are shown: confirmed ones, best first, then others by value."""
        confirmed = [entry["trial"] for entry in self.group.get("confirmed", [])]
        known = {trial["number"]: trial for trial in self.finished}
        first = [known[number] for number in confirmed if number in known]
        others = [trial for trial in self.finished if trial not in first]
        return first + others[: max(0, BEST_TRIALS - len(first))]

    @property
    def is_maximized(self) -> bool:
        """Whether larger values are better."""
        return bool(self.group.get("direction", "maximize") == "maximize")


@dataclass
class Selection:
    """The content of a report."""

    series: list[Series]
    sweeps: list[SweepResult] = field(default_factory=list)
    left_out: int = 0
    """Number of trials that are shown only in tables."""


def select(paths: Sequence[Path]) -> Selection:
    """Find the runs in folders and group them; raise ``ConfigError`` for folders without runs."""
    found: dict[Path, RunInfo] = {}
    trials: dict[Path, int] = {}
    sweeps: list[SweepResult] = []
    problems, left_out = [], 0
    for path in paths:
        runs = find_runs(path)
        if not runs:
            problems.append(f"{path}: expected the folder of a run, or of several, found no train_config.json there")
        sweep = SweepResult.read(path)
        if sweep is not None:
            sweeps.append(sweep)
            chosen = {path / trial["folder"]: trial["number"] for trial in sweep.best}
            numbers = {run: number for folder, number in chosen.items() for run in runs if folder in run.parents}
            left_out += len(sweep.trials) - len(chosen)
            trials |= numbers
            runs = [run for run in runs if run in numbers]
        found |= {run.resolve(): RunInfo(run) for run in runs}
    if problems:
        raise ConfigError(problems, "command line")
    return Selection(_in_series(list(found.values()), trials), sweeps, left_out)


def _in_series(runs: Sequence[RunInfo], trials: Mapping[Path, int]) -> list[Series]:
    """Group runs with the same settings, and give each series a label with its distinctive settings."""
    grouped: dict[str, Series] = {}
    for run in runs:
        settings = compared(run.config)
        key = json.dumps(settings, sort_keys=True, default=str)
        grouped.setdefault(key, Series([], settings)).runs.append(run)
    series = list(grouped.values())
    used: set[str] = set()
    for one in series:
        numbers = {trials[run.path] for run in one.runs if run.path in trials}
        one.trials = tuple(sorted(numbers))
        name = one.runs[0].record.name
        peers = series if one.trials else [other for other in series if other.runs[0].record.name == name]
        others = [key for key, _ in differences(peers) if not key.endswith("exp_name")]
        parts = [f"{key.rpartition('.')[2]}={_short(one.settings.get(key, ABSENT))}" for key in others[:_LABEL_PARTS]]
        more = ["…"] if len(others) > _LABEL_PARTS else []
        first = f"trial {', '.join(map(str, one.trials))}" if one.trials else name
        one.label = " ".join([first, *parts, *more])
        if one.label in used:
            one.label = f"{one.label} ({one.runs[0].path.name})"
        used.add(one.label)
    ranks = {number: rank for rank, number in enumerate(dict.fromkeys(trials.values()))}
    return sorted(series, key=lambda one: min((ranks[number] for number in one.trials), default=len(ranks)))


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else value
    text = text if isinstance(text, str) else json.dumps(value, default=str)
    return text if len(text) <= 24 else f"{text[:23]}…"


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config by dotted name, without those that are ignored."""
    return {key: value for key, value in dotted(config).items() if key.rpartition(".")[2] not in _NOT_COMPARED}


def differences(series: Sequence[Series]) -> list[tuple[str, list[Any]]]:
    """Return the settings in which series differ, with the value of each series, ``ABSENT`` if it has none."""
    keys = dict.fromkeys(key for one in series for key in one.settings)
    rows = [(key, [one.settings.get(key, ABSENT) for one in series]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]
