"""The HTML page of a report: one self-contained file with figures, videos and settings."""

from __future__ import annotations

import base64
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from embodichain import __version__
from embodichain.agents.rl.reports import figures
from embodichain.agents.rl.reports.series import ABSENT, Selection, Series, SweepResult, differences, select
from embodichain.agents.rl.run_records import CONFIG_FILE, RunInfo, command_of, trust_flags
from embodichain.errors import writing

_MAIN = (
    "eval/return",
    "eval/success",
    "episode/return",
    "episode/length",
    "update/action_loss",
    "update/imitation_loss",
)
"""Curves that are shown first; the losses are those of imitation and distillation."""
_KINDS = {"videos": (".mp4", "video/mp4"), "plots": (".png", "image/png")}
_TOTAL, _SUFFIX = "time/total_seconds", "_seconds"
_PER_STEP = ("sample",)
"""Times that are logged per step, not as the sum since the last line."""
_PANELS = 24
"""Maximum number of panels in a group of further curves."""


@dataclass(frozen=True)
class Film:
    """The video, or a plot instead, of one evaluation."""

    label: str
    colour: str
    step: str
    source: Markup
    is_video: bool


def write_report(paths: Sequence[Path], file: Path, max_videos: int = 12, title: str | None = None) -> Path:
    """Write a report about the runs, groups of runs and sweeps in these folders."""
    selection = select(paths)
    text = render(selection, max_videos, title or _title(selection, paths))
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    return file


def _title(selection: Selection, paths: Sequence[Path]) -> str:
    """Return the name of a single folder, or the names of the experiments."""
    if len(paths) == 1:
        return paths[0].resolve().name
    names = dict.fromkeys(run.record.name for one in selection.series for run in one.runs)
    return f"{', '.join(names)}: {sum(len(one.runs) for one in selection.series)} runs"


def render(selection: Selection, max_videos: int, title: str) -> str:
    """Return the HTML of the page."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": _number, "value": _value, "drawn": _rounded}
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    series = selection.series
    colours = [figures.colour(index) for index in range(len(series))]
    logged = list(dict.fromkeys(name for one in series for name in one.names))
    main = [name for name in _MAIN if name in logged]
    seconds = [_seconds(one) for one in series]
    films, left_out = _films(series, colours, max_videos)
    return template.render(
        title=title,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
        rows=[_summary(one, colour) for one, colour in zip(series, colours, strict=True)],
        series=series,
        colours=colours,
        differences=differences(series),
        common=_common(series),
        main=Markup(figures.curves(series, main, over_time=_TOTAL in logged)),
        more=[(name, Markup(figures.curves(series, names))) for name, names in _groups(logged, main)],
        sweeps=[(sweep, Markup(figures.trials(sweep)), _best_command(sweep)) for sweep in selection.sweeps],
        left_out_trials=selection.left_out,
        films=films,
        left_out_films=left_out,
        seconds=seconds,
        kinds=list(dict.fromkeys(kind for row in seconds for kind in row)),
        timing=Markup(figures.timing(series, seconds) if any(seconds) else ""),
        machines=_machines(series),
        commands=[(one, [(run, run.record.command, _repeat_command(run)) for run in one.runs]) for one in series],
        configs=[(one.label, json.dumps(one.runs[0].config, indent=2, ensure_ascii=False)) for one in series],
    )


def _summary(series: Series, colour: str) -> dict[str, Any]:
    """Return the row of a series in the table of results."""
    total = series.final(_TOTAL)
    steps = np.array([run.step for run in series.runs])
    return {
        "label": series.label,
        "colour": colour,
        "seeds": series.seeds,
        "states": ", ".join(dict.fromkeys(run.state for run in series.runs)),
        "steps": steps.mean(),
        "last": _mean_and_deviation(series.final("eval/return")),
        "best": _mean_and_deviation(series.best("eval/return")),
        "success": _mean_and_deviation(series.final("eval/success"), percent=True),
        "recent": _mean_and_deviation(series.final("episode/return")),
        "seconds": total.mean() if len(total) else None,
        "speed": (steps.sum() / total.sum()) if len(total) == len(steps) and total.sum() else None,
        "evaluations": [_evaluation(entry) for run in series.runs for entry in run.evaluations[-1:]],
    }


def _evaluation(entry: dict[str, Any]) -> str:
    rate, mean = entry.get("success_rate"), entry.get("mean_return")
    success = f", success {rate:.0%}" if isinstance(rate, int | float) else ""
    text = f"{mean:.2f}" if isinstance(mean, int | float) else "no return"
    return f"{text}{success} ({entry.get('episodes')} episodes)"


def _mean_and_deviation(values: np.ndarray, percent: bool = False) -> str:
    """Return a mean over seeds, with its standard deviation if there are several."""
    if not len(values):
        return "–"
    mean, deviation = values.mean(), values.std(ddof=1) if len(values) > 1 else None
    if percent:
        return f"{mean:.0%}" if deviation is None else f"{mean:.0%} ± {deviation:.0%}"
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def _seconds(series: Series) -> dict[str, float]:
    """Return the seconds that an average run spent on each activity."""
    spent: dict[str, float] = {}
    for run in series.runs:
        parts: dict[str, float] = {}
        before = 0
        for line in run.lines:
            for name, value in line.items():
                if name.startswith("time/") and name.endswith(_SUFFIX) and name != _TOTAL and value is not None:
                    kind = name.removeprefix("time/").removesuffix(_SUFFIX)
                    count = line["step"] - before if kind in _PER_STEP else 1
                    before = line["step"] if kind in _PER_STEP else before
                    parts[kind] = parts.get(kind, 0.0) + count * value
        total = run.latest(_TOTAL)
        if total is not None:
            parts["checkpoints, other"] = max(0.0, total - sum(parts.values()))
        for kind, value in parts.items():
            spent[kind] = spent.get(kind, 0.0) + value / len(series.runs)
    return spent


def _groups(logged: Sequence[str], main: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the names of further curves, grouped by the part before the slash."""
    groups: dict[str, list[str]] = {}
    for name in logged:
        if name not in main and name != _TOTAL:
            groups.setdefault(name.partition("/")[0], []).append(name)
    return [(group, names[:_PANELS]) for group, names in groups.items()]


def _films(series: Sequence[Series], colours: Sequence[str], most: int) -> tuple[list[Film], int]:
    """Return at most ``most`` videos, of the last evaluation of each run, and the number of those left out."""
    found: list[tuple[Series, str, RunInfo, Path]] = []
    for one, colour in zip(series, colours, strict=True):
        for run in one.runs:
            files = sorted(
                file for suffix, _ in _KINDS.values() for file in (run.path / "videos").glob(f"step_*{suffix}")
            )
            found += [(one, colour, run, file) for file in files[-1:]]
    films = []
    for one, colour, run, file in found[:most]:
        kind = dict(_KINDS.values())[file.suffix]
        data = base64.b64encode(file.read_bytes()).decode()
        seed = "" if run.record.seed is None else f", seed {run.record.seed}"
        step = (
            f"step {int(file.stem.removeprefix('step_')):,}" if file.stem.removeprefix("step_").isdigit() else file.stem
        )
        films.append(
            Film(f"{one.label}{seed}", colour, step, Markup(f"data:{kind};base64,{data}"), file.suffix == ".mp4")
        )
    return films, len(found) - len(films)


def _common(series: Sequence[Series]) -> list[tuple[str, Any]]:
    """Return the settings that all series share."""
    changed = {key for key, _ in differences(series)}
    return [(key, value) for key, value in series[0].settings.items() if key not in changed] if series else []


def _machines(series: Sequence[Series]) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
    """Return the names of runs with their machine and versions, grouped by these."""
    known: dict[str, tuple[list[str], dict[str, Any], dict[str, str]]] = {}
    for one in series:
        for run in one.runs:
            record = run.record
            key = json.dumps([record.machine, record.versions], sort_keys=True)
            known.setdefault(key, ([], record.machine, record.versions))[0].append(run.path.name)
    return [(", ".join(names), machine, versions) for names, machine, versions in known.values()]


def _repeat_command(run: RunInfo) -> str:
    """Return the command that repeats a run from the config in its folder."""
    new = f"{run.path}_again"
    words = [command_of(run.config), str(run.path / CONFIG_FILE), "--trainer.run_dir", new]
    return shlex.join(["embodichain", *words, *trust_flags(run.record.trusted_modules)])


def _best_command(sweep: SweepResult) -> str:
    best = sweep.group.get("best_config")
    trusted = map(str, sweep.group.get("trusted_modules", []))
    return shlex.join(["embodichain", "train", str(sweep.path / best), *trust_flags(trusted)]) if best else ""


def _number(value: float | None) -> str:
    """Format a number for a table."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rounded(value: Any) -> str:
    """Format a setting of a trial for a table, rounded."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _value(value: Any) -> str:
    """Format a setting as JSON."""
    return ABSENT if value == ABSENT else json.dumps(value, ensure_ascii=False, default=str)
