"""The runs of the learning benchmark so far: kept in one file, summed up, drawn."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learn_tasks import OURS, PEER, TASKS, Job, Outcome
from benchmarks.timing import machine
from embodichain.extras import available

PACKAGES = ("torch", "mujoco", "gymnasium", "tensordict", "numpy")


class Results:
    """``learn.json``: ``runs``, the ``commands`` that made them, and figures by task."""

    def __init__(self, file: Path, settings: Mapping[str, str]) -> None:
        self.file, self.settings = file, dict(settings)
        self.outcomes: dict[Job, Outcome] = {}
        self.commands: list[dict[str, Any]] = []

    @classmethod
    def read(cls, file: Path, settings: Mapping[str, str]) -> Results:
        """Return what is in a file, if there is one; ``settings`` are the digests of the tasks' configs now."""
        results = cls(file, settings)
        if file.exists():
            results.merge(json.loads(file.read_text()), str(file))
        return results

    def merge(self, data: Mapping[str, Any], source: str) -> None:
        """Add the runs of other results; a finished run is kept in the place of an unfinished one."""
        for entry in data["runs"]:
            outcome = Outcome(**entry)
            if outcome.settings != self.settings[outcome.task]:
                raise SystemExit(
                    f"{source}: {outcome.job} was trained with other settings than those of today. Choose another "
                    "--output, or move the file away."
                )
            if outcome.finished or not self.has_finished(outcome.job):
                self.outcomes[outcome.job] = outcome
        self.commands += [command for command in data["commands"] if command not in self.commands]

    def add(self, outcome: Outcome, command: str) -> None:
        """Take in a run and write the file, so that nothing is lost when the next one is broken off."""
        made = {"command": command, **machine(PACKAGES)}
        if made not in self.commands:
            self.commands.append(made)
        if outcome.finished or not self.has_finished(outcome.job):
            self.outcomes[outcome.job] = outcome
        self.write({})

    def has_finished(self, job: Job) -> bool:
        """Tell whether a run is there, whole."""
        return job in self.outcomes and self.outcomes[job].finished

    def of_task(self, task: str) -> list[Outcome]:
        """Return the runs of a task, by framework and seed."""
        chosen = [outcome for outcome in self.outcomes.values() if outcome.task == task]
        return sorted(chosen, key=lambda outcome: (outcome.framework, outcome.seed))

    def write(self, figures: Mapping[str, Any]) -> None:
        """Write everything, whole or not at all."""
        runs = [outcome.to_dict() for task in TASKS for outcome in self.of_task(task)]
        head = json.dumps({"tasks": figures, "commands": self.commands}, indent=1)
        lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        partial.write_text(f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n')
        partial.replace(self.file)


def summarize(name: str, outcomes: Sequence[Outcome], seeds: int) -> dict[str, Any]:
    """Return the figures of a task, and whether it holds what is claimed of it (``None``: nothing is claimed)."""
    task = TASKS[name]
    figures: dict[str, Any] = {"config": task.config, "measure": task.measure, "goal": task.goal, "holds": None}
    whole = {
        framework: [o for o in outcomes if o.framework == framework and o.finished] for framework in task.frameworks
    }
    for framework, runs in whole.items():
        finals = [run.values[-1] for run in runs]
        figures[framework] = {
            "finished_runs": len(runs),
            "unfinished_runs": sum(o.framework == framework and not o.finished for o in outcomes),
            "final_mean": float(np.mean(finals)) if finals else None,
            "final_std": float(np.std(finals)) if finals else None,
            "best_mean": float(np.mean([max(run.values) for run in runs])) if finals else None,
            "total_seconds": [run.seconds[-1] for run in runs],
            "cpu_seconds": [run.cpu_seconds for run in runs],
            "cores_per_run": sorted({run.cores for run in runs}),
        }
    complete = all(len(runs) >= seeds for runs in whole.values())
    if task.goal is not None:
        goal, limit = task.goal, float("inf") if task.seconds is None else task.seconds
        when = [run.reached(goal) for run in whole[OURS]]
        figures |= {"seconds": task.seconds, "reached": when}
        figures["holds"] = complete and all(entry is not None and entry["seconds"] <= limit for entry in when)
    if task.peer:
        means = [figures[framework]["final_mean"] for framework in (OURS, PEER)]
        figures["holds"] = complete and means[0] >= means[1]
    return figures


def write_report(folder: Path, figures: Mapping[str, Any], results: Results) -> None:
    """Draw the curves of every task, where matplotlib is installed, and print how it went."""
    can_draw = available("matplotlib")
    if not can_draw:
        print("matplotlib is not installed, so no curves are drawn; --merge this learn.json elsewhere", file=sys.stderr)
    for name, entry in figures.items():
        task = TASKS[name]
        for framework in task.frameworks:
            figure = entry[framework]
            if figure["final_mean"] is not None:
                text = f"{figure['final_mean']:.3f} +- {figure['final_std']:.3f}, {figure['finished_runs']} runs"
                print(f"{name}: {framework} {text}")
        if can_draw:
            _draw(folder / f"learn_{name}.png", name, results.of_task(name))
        verdict = {True: "holds", False: "does not hold", None: "reported"}[entry["holds"]]
        print(f"{name}: {verdict}", file=sys.stdout)


def _draw(file: Path, name: str, outcomes: Sequence[Outcome]) -> None:
    """Draw the curves of a task, one series per framework."""
    from benchmarks.charts import Series, draw_curves  # matplotlib; runs on a bare machine do without

    task, series = TASKS[name], []
    for framework in task.frameworks:
        runs = [o for o in outcomes if o.framework == framework and o.steps]
        if runs:
            series.append(Series(framework, [(np.array(o.steps), np.array(o.values)) for o in runs]))
    draw_curves(file, name, ("environment steps", task.measure), series, task.goal)
