"""Does it learn, how well and how fast: several seeds of each task, with curves as PNG and figures as JSON.

::

    python -m benchmarks.learn                                   # everything; takes hours
    python -m benchmarks.learn --tasks cart_pole push_cube       # some of it
    python -m benchmarks.learn --tasks hopper --seeds 2 --steps 200000

Every task is a config under ``configs/agents/rl``. On Gymnasium's tasks Stable-Baselines3 (the extra ``peers``) is
trained in the same run with the same hyperparameters, seed by seed in turn, and evaluated in the same way.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.charts import Series, draw_curves
from benchmarks.timing import machine
from embodichain.agents.rl.train import train_from_config
from embodichain.agents.rl.training.run_log import read_metrics
from embodichain.extras import available

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "mujoco", "gymnasium", "tensordict", "numpy")


@dataclass(frozen=True)
class LearningTask:
    """One claim about learning."""

    config: str
    """File under ``configs/agents/rl``."""
    measure: str
    """What is judged, as it is called in ``metrics.jsonl``."""
    goal: float | None = None
    """What every seed has to reach; none where the figures are reported only."""
    seconds: float | None = None
    """How long that may take."""
    peer: bool = False
    """Whether Stable-Baselines3 is trained beside."""


TASKS = {
    "cart_pole": LearningTask("basic/cart_pole/train_config.json", "eval/return", goal=475.0, seconds=60.0),
    "reach": LearningTask("reach/train_config.json", "eval/success"),
    "push_cube": LearningTask("push_cube/train_config.json", "eval/success", goal=0.9, seconds=600.0),
    "push_cube_grpo": LearningTask("push_cube/train_config_grpo.json", "eval/success", goal=0.8),
    "pick_cube": LearningTask("pick_cube/train_config.json", "eval/success"),
    "half_cheetah": LearningTask("gymnasium/half_cheetah/train_config.json", "eval/return", peer=True),
    "hopper": LearningTask("gymnasium/hopper/train_config.json", "eval/return", peer=True),
}


@dataclass(frozen=True)
class Curve:
    """The evaluations of one run."""

    seed: int
    steps: list[int]
    seconds: list[float]
    values: list[float]

    def reached(self, goal: float) -> dict[str, float | int] | None:
        """Return when a value was first reached."""
        for step, second, value in zip(self.steps, self.seconds, self.values, strict=True):
            if value >= goal:
                return {"step": step, "seconds": round(second, 1)}
        return None

    def final(self) -> float:
        """Return the last evaluation."""
        return self.values[-1]


def run_ours(task: LearningTask, seed: int, overrides: Sequence[str], console: Console) -> Curve:
    """Train once and return its evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--trainer.seed", str(seed), "--trainer.run_dir", f"{folder}/run", "--trainer.eval_video", "false"]
        train_from_config(ROOT / "configs" / "agents" / "rl" / task.config, [*words, *overrides], console=console)
        lines = [line for line in read_metrics(Path(folder) / "run" / "metrics.jsonl") if task.measure in line]
    steps, seconds = [line["step"] for line in lines], [line["time/total_seconds"] for line in lines]
    return Curve(seed, steps, seconds, [line[task.measure] for line in lines])


def run_task(name: str, seeds: Sequence[int], steps: int | None, output: Path, console: Console) -> dict[str, Any]:
    """Train all seeds of a task (and the peer beside), write curves and figures, and return the figures."""
    task = TASKS[name]
    overrides = [] if steps is None else ["--trainer.total_steps", str(steps)]
    curves: dict[str, list[Curve]] = {"embodichain": []}
    if task.peer and available("stable_baselines3"):
        curves["stable_baselines3"] = []
    for seed in seeds:
        curves["embodichain"].append(run_ours(task, seed, overrides, console))
        if "stable_baselines3" in curves:
            from benchmarks.learn_sb3 import run_peer

            curves["stable_baselines3"].append(Curve(seed, *run_peer(ROOT, task.config, seed, steps)))
        for library, entries in curves.items():
            console.print(f"{name} seed {seed} {library}: {entries[-1].final():.3f}", highlight=False)
    figures = summarize(task, curves)
    series = [
        Series(key, [(np.array(c.steps), np.array(c.values)) for c in entries]) for key, entries in curves.items()
    ]
    draw_curves(output / f"learn_{name}.png", name, ("environment steps", task.measure), series, task.goal)
    return figures


def summarize(task: LearningTask, curves: dict[str, list[Curve]]) -> dict[str, Any]:
    """Return the figures of a task, and whether it holds what is claimed of it."""
    figures: dict[str, Any] = {
        "config": task.config,
        "measure": task.measure,
        "goal": task.goal,
        "seconds": task.seconds,
    }
    for library, entries in curves.items():
        finals = [curve.final() for curve in entries]
        figures[library] = {
            "final_mean": float(np.mean(finals)),
            "final_std": float(np.std(finals)),
            "total_seconds": [round(curve.seconds[-1], 1) for curve in entries],
            "curves": [vars(curve) for curve in entries],
        }
    ours = curves["embodichain"]
    if task.goal is not None:
        when = [curve.reached(task.goal) for curve in ours]
        figures["reached"] = when
        limit = float("inf") if task.seconds is None else task.seconds
        figures["holds"] = all(entry is not None and entry["seconds"] <= limit for entry in when)
    if "stable_baselines3" in curves:
        figures["holds"] = figures["embodichain"]["final_mean"] >= figures["stable_baselines3"]["final_mean"]
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--steps", type=int, help="environment steps per run (default: what the config says)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    held = True
    for name in args.tasks:
        began = time.perf_counter()
        figures = run_task(name, range(args.seeds), args.steps, args.output, console)
        figures["command"] = shlex.join(["python", "-m", "benchmarks.learn", *(sys.argv[1:] if argv is None else argv)])
        figures["machine"] = machine(PACKAGES)
        figures["wall_seconds"] = round(time.perf_counter() - began, 1)
        held &= figures.get("holds", True)
        (args.output / f"learn_{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
        ours = figures["embodichain"]
        verdict = {True: "holds", False: "does not hold", None: "reported"}[figures.get("holds")]
        print(f"{name}: {ours['final_mean']:.3f} +- {ours['final_std']:.3f} ({verdict})")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
