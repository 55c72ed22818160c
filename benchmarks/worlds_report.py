"""The runs of ``benchmarks.worlds``: what is claimed of each task, their curves, one file and one figure for all."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.charts import COLORS, mean_curve
from benchmarks.timing import machine
from embodichain.agents.rl.runs import read_metrics

CONFIGS = Path(__file__).parents[1] / "configs" / "agents" / "rl"
FILES = {"cuda": "train_config_gpu.json", "cpu": "train_config.json"}
LIMITS = {"cuda": 180.0, "cpu": 1800.0}
"""Seconds in which a task has to be learned: three minutes on a GPU, half an hour on two cores."""
PACKAGES = ("torch", "mujoco", "mujoco-warp", "warp-lang", "gymnasium", "tensordict", "numpy")


@dataclass(frozen=True)
class Claim:
    """What a run has to reach."""

    measure: str = "eval/success"
    """What is judged, as it is called in ``metrics.jsonl``."""
    goal: float = 0.9
    """What it has to reach."""
    falls: bool = False
    """Whether it is an error, which has to fall to the goal."""
    seconds: float | None = None
    """In which time, on a GPU; ``None``: as all others."""

    def reached(self, value: float) -> bool:
        """Tell whether a value is good enough."""
        return value <= self.goal if self.falls else value >= self.goal


_OTHER_CLAIMS = {
    "quadruped_velocity": Claim("eval/tracking_error", 0.15, falls=True, seconds=300.0),
    "biped_velocity": Claim("eval/tracking_error", 0.25, falls=True, seconds=300.0),
    "basic/cart_pole": Claim("eval/return", 475.0),
}
_LEFT_OUT = ("gymnasium",)  # judged by their returns, beside a peer: benchmarks.learn


@cache
def claims(device: str) -> dict[str, Claim]:
    """Return what is claimed of every task with a config for a device, by the folder of that config."""
    folders = [path.parent.relative_to(CONFIGS) for path in sorted(CONFIGS.rglob(FILES[device]))]
    names = [folder.as_posix() for folder in folders if folder.parts[0] not in _LEFT_OUT]
    return {name: _OTHER_CLAIMS.get(name, Claim()) for name in names}


def settings_digest(task: str, device: str, overrides: Sequence[str] = ()) -> str:
    """Return a digest of the files and flags of a run, so that runs with different settings are never mixed."""
    folder = (CONFIGS / task / FILES[device]).parent
    texts = [
        file.read_text() for file in sorted(folder.glob("*.json")) if file.name in (FILES[device], "gym_config.json")
    ]
    return hashlib.sha256("\n".join([*texts, *overrides]).encode()).hexdigest()[:12]


@dataclass
class Run:
    """One run: its curve so far, and how it ended."""

    task: str
    device: str
    seed: int
    settings: str
    """Digest of the config."""
    jobs: int
    """How many runs the machine had at the same time, at most."""
    limit: float
    """Seconds it may take after the first update."""
    status: str = "running"
    """``running`` (or killed with the benchmark), ``reached``, ``ended``, ``out of time`` or ``failed``."""
    start_seconds: float | None = None
    """From the beginning of the training to the end of the first update: compilation, for the most part."""
    steps: list[int] = field(default_factory=list)
    """Environment steps at each evaluation."""
    seconds: list[float] = field(default_factory=list)
    """Seconds since the first update, of the same."""
    curves: dict[str, list[float]] = field(default_factory=dict)
    """What the evaluations measured, by name."""
    steps_taken: int = 0
    """Environment steps by now."""
    seconds_taken: float = 0.0
    """Seconds since the first update by now."""
    machine: str = ""
    """What it ran on."""

    @classmethod
    def of(cls, task: str, device: str, seed: int, settings: str, jobs: int) -> Run:
        """Return a run that is to be made."""
        limit = claims(device)[task].seconds if device == "cuda" else None
        return cls(task, device, seed, settings, jobs, limit or LIMITS[device], machine=_machine(device))

    @property
    def path(self) -> Path:
        """The config's file."""
        return CONFIGS / self.task / FILES[self.device]

    @property
    def claim(self) -> Claim:
        """What is claimed of it."""
        return claims(self.device)[self.task]

    @property
    def key(self) -> tuple[str, str, int]:
        """Which run it is."""
        return self.task, self.device, self.seed

    def read(self, folder: Path) -> None:
        """Take in what a run has written so far."""
        lines = read_metrics(folder / "run" / "metrics.jsonl")
        updates = [line for line in lines if "update/learning_rate" in line or "time/update_seconds" in line]
        if not updates:
            return
        first = updates[0]["time/total_seconds"]
        since = lambda line: round(line["time/total_seconds"] - first, 2)  # noqa: E731
        self.start_seconds = round(first, 2)
        self.steps_taken, self.seconds_taken = int(lines[-1]["step"]), since(lines[-1])
        evaluations = [line for line in lines if self.claim.measure in line]
        self.steps, self.seconds = [int(e["step"]) for e in evaluations], [since(e) for e in evaluations]
        names = {name for line in evaluations for name in line if name.startswith("eval/")}
        self.curves = {name: [round(e.get(name, math.nan), 4) for e in evaluations] for name in sorted(names)}

    def reached(self) -> dict[str, float | int] | None:
        """Return when the goal was first reached in an evaluation, within the limit."""
        values = self.curves.get(self.claim.measure, [])
        for step, second, value in zip(self.steps, self.seconds, values, strict=True):
            if self.claim.reached(value) and second <= self.limit:
                return {"step": step, "seconds": round(second, 1)}
        return None

    def is_over(self, keep_going: bool) -> bool:
        """Tell whether it has reached its goal, or its time is over."""
        return self.seconds_taken > self.limit or (not keep_going and self.reached() is not None)

    def conclude(self, code: int | None, folder: Path) -> None:
        """Note how it ended; ``code`` is that of its process, ``None`` if it was stopped."""
        if code:
            self.status = "failed"
            print(f"{self.describe()}:\n{(folder / 'log').read_text(errors='replace')[-2000:]}", flush=True)
        else:
            reached = self.reached() is not None
            self.status = "reached" if reached else "ended" if code == 0 else "out of time"

    def describe(self) -> str:
        """Return one line about it."""
        values, when = self.curves.get(self.claim.measure), self.reached()
        last = f"{self.claim.measure} {values[-1]:.3f}" if values else "no evaluation"
        goal = f", goal after {when['seconds']:.0f} s" if when else ""
        speed = self.steps_taken / self.seconds_taken if self.seconds_taken else 0.0
        start = "?" if self.start_seconds is None else f"{self.start_seconds:.0f}"
        where = f"{self.task} on {self.device}, seed {self.seed}"
        progress = f"{self.steps_taken:,} steps in {self.seconds_taken:.0f} s ({speed:,.0f}/s), {start} s to start"
        return f"{where}: {self.status}, {last}{goal}; {progress}"


class WorldResults:
    """``worlds.json``: figures by task, and all runs."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: dict[tuple[str, str, int], Run] = {}

    @classmethod
    def read(cls, file: Path) -> WorldResults:
        """Return what is in a file, if there is one; runs of configs that are gone are dropped."""
        results = cls(file)
        entries = json.loads(file.read_text())["runs"] if file.exists() else []
        for entry in entries:
            run = Run(**entry)
            if run.task in claims(run.device):
                results.runs[run.key] = run
        return results

    def is_over(self, run: Run) -> bool:
        """Tell whether this run, with these settings, was made and came to its end.

        One that ran out of time beside more others than this one will have may be tried again.
        """
        old = self.runs.get(run.key)
        if old is None or old.settings != run.settings or old.status in ("running", "failed"):
            return False
        return old.status != "out of time" or old.jobs <= run.jobs

    def add(self, run: Run) -> None:
        """Take in a run that begins."""
        self.runs[run.key] = run

    def merge(self, others: WorldResults) -> None:
        """Add other runs; one that is over with the settings of today is only replaced by another such one."""
        for run in others.runs.values():
            if run.status == "running" and not run.steps:  # killed before its first evaluation
                continue
            current = run.settings == settings_digest(run.task, run.device)
            if run.key not in self.runs or (current and others.is_over(run)):
                self.runs[run.key] = run

    def of(self, task: str, device: str) -> list[Run]:
        """Return the runs of a task, by seed."""
        chosen = [run for run in self.runs.values() if (run.task, run.device) == (task, device)]
        return sorted(chosen, key=lambda run: run.seed)

    def figures(self) -> dict[str, Any]:
        """Return what holds of every task, by device."""
        keys = sorted({(run.device, run.task) for run in self.runs.values()})
        return {f"{task} ({device})": summarize(self.of(task, device)) for device, task in keys}

    def write(self) -> None:
        """Write everything, whole or not at all."""
        head = json.dumps({"tasks": self.figures(), "versions": _versions()}, indent=1)
        lines = ",\n".join(f"  {json.dumps(asdict(run))}" for _, run in sorted(self.runs.items()))
        partial = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        partial.write_text(f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n')
        partial.replace(self.file)


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of the runs of one task; it holds if every seed reached the goal in time."""
    claim, when = runs[0].claim, [run.reached() for run in runs]
    curves = [run.curves.get(claim.measure, []) for run in runs]
    best = [(min if claim.falls else max)(curve) if curve else None for curve in curves]
    speeds = [round(run.steps_taken / run.seconds_taken) for run in runs if run.seconds_taken]
    return {
        **asdict(claim),
        "limit": max(run.limit for run in runs),
        "seeds": [run.seed for run in runs],
        "reached": when,
        "best": best,
        "steps_per_second": speeds,
        "start_seconds": [run.start_seconds for run in runs],
        "jobs": sorted({run.jobs for run in runs}),
        "holds": all(entry is not None for entry in when),
    }


def write_report(folder: Path, results: WorldResults, tasks: Iterable[str], device: str) -> int:
    """Print how it went and draw the curves; 1 if a claim does not hold, or was not tried."""
    holds = []
    for task in tasks:
        runs = results.of(task, device)
        figures: Mapping[str, Any] = summarize(runs) if runs else {"holds": False}
        holds.append(bool(figures["holds"]))
        times = [f"{w['seconds']:.0f} s" if w else "not" for w in figures.get("reached", ())]
        print(f"{task}: {'holds' if holds[-1] else 'does not hold'} ({', '.join(times) or 'no run'})", flush=True)
    for name in sorted({run.device for run in results.runs.values()}):
        draw(folder / f"worlds_{name}.png", results, name)
    return 0 if all(holds) else 1


def draw(path: Path, results: WorldResults, device: str) -> None:
    """Draw the runs of every task over time: seeds thin, their mean thick, the goal dashed."""
    tasks = sorted({run.task for run in results.runs.values() if run.device == device and run.steps})
    if not tasks:
        return
    columns = min(4, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure((3.4 * columns, 2.7 * rows), dpi=100, layout="constrained")
    for number, task in enumerate(tasks):
        runs = [run for run in results.of(task, device) if run.steps]
        claim, plot = runs[0].claim, figure.add_subplot(rows, columns, number + 1)
        curves = [(np.array(run.seconds), np.array(run.curves[claim.measure])) for run in runs]
        for x, y in curves:
            plot.plot(x, y, color=COLORS[0], alpha=0.4, linewidth=1, marker=".", markersize=4)
        plot.plot(*mean_curve(curves), color=COLORS[0], linewidth=2.5)
        plot.axhline(claim.goal, color="#787e88", linestyle="--", linewidth=1)
        plot.set_title(task, loc="left", fontsize=11)
        plot.set_xlabel("seconds", fontsize=8)
        plot.set_ylabel(claim.measure.removeprefix("eval/"), fontsize=8)
        plot.tick_params(labelsize=8)
        plot.grid(color="#e8eaee")
        plot.set_axisbelow(True)
        plot.spines[["top", "right"]].set_visible(False)
        plot.set_xlim(left=0.0)
        plot.set_ylim(bottom=0.0, top=None if claim.falls or claim.goal > 1.0 else 1.02)
    FigureCanvasAgg(figure).print_png(path)


def train(config: str, words: list[str]) -> None:
    """Train once, as ``embodichain train`` does, and no longer than there is somebody who waits for it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    from rich.console import Console

    from embodichain.agents.rl.train import train_from_config

    train_from_config(Path(config), words, console=Console(stderr=True))


@cache
def _versions() -> dict[str, str | int]:
    """Return the processor and the versions of what is installed."""
    installed = {found.metadata["Name"].lower().replace("_", "-") for found in importlib.metadata.distributions()}
    return machine([name for name in PACKAGES if name in installed])


def _machine(device: str) -> str:
    """Return the name of what computes."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return str(machine(())["processor"])
