"""``embodichain runs [DIR]``: list the runs in a folder with their state and results."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.text import Text

from embodichain.agents.rl.run_records import RunInfo, find_runs, format_seeds, is_running, read_group
from embodichain.cli.options import parse_options
from embodichain.errors import ConfigError
from embodichain.utils.console import short_number

_COLOURS = {
    "running": "cyan",
    "finished": "green",
    "evaluated": "green",
    "interrupted": "yellow",
    "pruned": "dim",
    "failed": "red",
    "killed": "red",
    "stopped": "dim",
}
_MAX_STATES = 3
"""Maximum number of states that are named for a group."""
_MIN_WIDTH = 16
"""Minimum width in columns to show changed settings on the same line."""


@dataclass(frozen=True)
class RunsArgs:
    """List runs: state, seed, changed settings, steps, return, success and age. Groups of seeds and sweeps are one
    line, unless --all is given."""

    dir: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Folder of runs, searched recursively."""
    all: bool = False
    """List every run of a group or sweep on its own line."""
    sort: Literal["age", "return", "success", "steps", "name"] = "age"
    """Sort order: the newest run, or the highest return, success or number of steps, comes last."""
    json: bool = False
    """Print JSON."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = parse_options(RunsArgs, argv, "embodichain runs")
    if not args.dir.is_dir():
        raise ConfigError(f"{args.dir}: expected a folder of runs; embodichain train makes runs in it", "command line")
    rows = _rows(args.dir, args.all)
    if not rows and not args.json:
        raise ConfigError(f"{args.dir}: there is no run in it (a folder with train_config.json)", "command line")
    rows.sort(key=lambda row: _key(row, args.sort))
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    _print(Console(), rows)
    return 0


def _print(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each run, with its changed settings on the same line if they fit, else below it."""
    cells = [["run", "state", "seed", "steps", "return", "success", "age"], *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    room = console.width - sum(widths) - 2 * len(widths)
    for line, row in zip(cells, [None, *rows], strict=True):
        text = Text()
        for index, (cell, width) in enumerate(zip(line, widths, strict=True)):
            style = _COLOURS.get(cell.split()[-1] if cell else "", "") if index == 1 else ""
            text.append(cell.ljust(width) if index < 2 else cell.rjust(width), "bold" if row is None else style)
            text.append("  ")
        changed = "changed" if row is None else _changed(row)
        if room >= _MIN_WIDTH and len(changed) <= room:
            text.append(changed, "bold" if row is None else "dim")
        text.rstrip()
        console.print(text, soft_wrap=True)
        if row is not None and changed and (room < _MIN_WIDTH or len(changed) > room):
            for part in textwrap.wrap(changed, max(20, console.width - 4), break_long_words=False):
                console.print(Text(f"    {part}", "dim"), soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    mean_return = "" if row["return"] is None else f"{row['return']:.4g}"
    success = "" if row["success"] is None else f"{row['success']:.0%}"
    seed = "" if row["seed"] is None else str(row["seed"])
    return [row["run"], row["state"], seed, short_number(row["steps"]), mean_return, success, _ago(row["age"])]


def _changed(row: dict[str, Any]) -> str:
    changed = ((name.rpartition(".")[2], value) for name, value in row["overrides"].items())
    return " ".join(f"{name}={value}" if value else name for name, value in changed)


def _rows(folder: Path, every: bool) -> list[dict[str, Any]]:
    """Return a row for each run, or each group of runs, below a folder."""
    grouped: dict[Path, list[RunInfo]] = {}
    for path in find_runs(folder):
        above = [path, *path.parents]
        inside = above[: above.index(folder) + 1] if folder in above else above[:1]
        group = next((parent for parent in reversed(inside) if read_group(parent) is not None), path)
        grouped.setdefault(path if every else group, []).append(RunInfo(path))
    return [_row(path, runs, folder) for path, runs in grouped.items()]


def _row(path: Path, runs: Sequence[RunInfo], folder: Path) -> dict[str, Any]:
    name = str(path) if path == folder else str(path.relative_to(folder))
    first = runs[0]
    ignored = ("trainer.seed", "trainer.run_dir", "trainer.output_dir", "trainer.gym_config.num_threads")
    shared = (read_group(first.path.parent) or {}).get("overrides", {})  # flags of the command that created the group
    changed = shared | first.overrides()
    row = {
        "run": name,
        "name": first.record.name,
        "state": first.state,
        "seed": first.record.seed,
        "overrides": {key: value for key, value in changed.items() if key not in ignored},
        "steps": first.step,
        "return": first.mean_return,
        "success": first.success,
        "age": first.age,
    }
    group = None if path == first.path else read_group(path)
    if group is None:
        return row
    states = [run.state for run in runs]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    listed = ", ".join(f"{count} {state}" for state, count in list(counts.items())[:_MAX_STATES])
    returns = [value for run in runs if (value := run.mean_return) is not None]
    successes = [value for run in runs if (value := run.success) is not None]
    row |= {
        "state": listed if len(counts) > 1 else states[0],
        "seed": format_seeds(group.get("seeds", [])),
        "steps": sum(run.step for run in runs),
        "return": fmean(returns) if returns else None,
        "success": fmean(successes) if successes else None,
        "age": min(run.age for run in runs),
        "runs": len(runs),
        "overrides": {key: value for key, value in group.get("overrides", {}).items() if key not in ignored},
    }
    if group.get("kind") == "sweep":
        trials = group.get("trials", [])
        failed = sum(trial["state"] == "fail" for trial in trials)
        done = sum(trial["state"] not in ("running", "fail") for trial in trials)
        best = next((trial["folder"] for trial in trials if trial["number"] == group.get("best")), None)
        chosen = [run for run in runs if best in run.path.parts]
        parts = [f"{done} trial{'s' if done != 1 else ''} done"]
        parts += [f"{failed} failed"] if failed else []
        row["state"] = ", ".join(parts + (["running"] if is_running(path) else []))
        for name, values in (("return", [r.mean_return for r in chosen]), ("success", [r.success for r in chosen])):
            known = [value for value in values if value is not None]
            row[name] = fmean(known) if known else None
        row["overrides"] = {f"space.{name}": _domain(domain) for name, domain in group.get("space", {}).items()}
    return row


def _domain(domain: dict[str, Any]) -> str:
    """Return the domain of a sweep in the syntax of the command line."""
    if "choices" in domain:
        return f"{{{','.join(map(str, domain['choices']))}}}"
    ends = f"{domain['low']:g},{domain['high']:g}"
    return f"log({ends})" if domain.get("log") else f"[{ends}]"


def _key(row: dict[str, Any], by: str) -> Any:
    if by == "name":
        return row["run"]
    if by == "age":
        return -row["age"]
    return float("-inf") if row[by] is None else row[by]


def _ago(seconds: float) -> str:
    for size, letter in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {letter}"
    return f"{seconds:.0f} s"
