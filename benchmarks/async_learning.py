"""Does learning from rollouts that are one update old cost samples? Several seeds, the same samples for every way.

::

    python -m benchmarks.async_learning                                # everything, one run after the other
    python -m benchmarks.async_learning --tasks cart_pole --seconds 300

``async`` here is ``lockstep`` with a lag of 1: every transition is exactly one update old when it is learned from. That
is the most that a lag of 1 allows, and does not depend on how fast the machine is. Runs are added one by one to
``results/async_learning.json``; what is in it already is not run again. The exit code is 1 if a way ends below the
spread of ``sync``, or if runs are missing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.charts import Series, draw_curves
from benchmarks.timing import machine
from embodichain.agents.rl.config import TrainCfg
from embodichain.agents.rl.runs import read_metrics
from embodichain.agents.rl.train import train_from_config
from embodichain.config import load_config, merge

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "agents" / "rl"
_LATE = {"collector": {"mode": "async", "max_policy_lag": 1, "adopt": "lockstep", "kl_rows": 0}}
WAYS: dict[str, tuple[dict[str, Any], str]] = {  # trainer, correction
    "sync": ({"collector": {"mode": "sync"}}, "none"),
    "async": (_LATE, "none"),
    "async, decoupled": (_LATE, "decoupled"),
}


@dataclass(frozen=True)
class Task:
    """What is learned."""

    config: str
    """File under ``configs/agents/rl``."""
    trainer: dict[str, Any]
    """What differs from it."""
    measure: str
    """What is judged, as it is called in ``metrics.jsonl``."""
    seeds: int
    imitates: bool = False
    """Whether a VLA goes on from what it imitated."""


TASKS = {
    "push_cube_vla": Task(
        "push_cube/train_config_vla.json",
        {"buffer_size": 16, "total_steps": None, "iterations": 20, "eval_freq": 16_000, "num_eval_episodes": 128},
        "eval/success",
        seeds=3,
        imitates=True,
    ),
    "cart_pole": Task(
        "basic/cart_pole/train_config.json",
        {"iterations": 50, "eval_freq": 20_480, "target_return": None},
        "eval/return",
        seeds=10,
    ),
    "push_cube": Task(
        "push_cube/train_config.json", {"total_steps": 983_040, "eval_freq": 98_304}, "eval/success", seeds=3
    ),
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, help="number of seeds (default: what the task says)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after these")
    parser.add_argument("--start", type=Path, default=Path("runs/async_learning_start"), help="the imitated policy")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    began, file = time.monotonic(), args.output / "async_learning.json"
    torch.set_num_threads(1)
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    content["machine"] = machine(("torch", "mujoco", "tensordict"))
    complete = True
    for name in args.tasks:
        runs = content["runs"].setdefault(name, {way: {} for way in WAYS})
        for seed in range(args.seeds or TASKS[name].seeds):
            for way in (way for way in WAYS if str(seed) not in runs[way]):
                if time.monotonic() - began > args.seconds:
                    complete = False
                    continue
                runs[way][str(seed)] = run(name, way, seed, args.start)
                print(f"{name}, {way}, seed {seed}: {runs[way][str(seed)]['values'][-1]:.3f}", flush=True)
                write(file, content)
    verdicts = {name: judge(content["runs"][name]) for name in args.tasks if all(content["runs"][name].values())}
    content["summary"] = content.get("summary", {}) | verdicts
    write(file, content)
    for name, rows in verdicts.items():
        draw(args.output / f"async_learning_{name}.png", name, content["runs"][name])
        print("\n".join([f"{name} ({TASKS[name].measure}, {rows['sync']['seeds']} seeds)", *map(_line, rows.items())]))
    return 0 if complete and all(row["within_spread"] for rows in verdicts.values() for row in rows.values()) else 1


def run(name: str, way: str, seed: int, start: Path) -> dict[str, Any]:
    """Train once; return the evaluations."""
    task, (collection, correction) = TASKS[name], WAYS[way]
    path = CONFIGS / task.config
    config = merge(load_config(path), {"trainer": merge(task.trainer, collection)})
    config["trainer"]["gym_config"] = load_config(path.parent / str(config["trainer"]["gym_config"]))
    if task.imitates:
        _continue_imitated(config, start)
    config["algorithm"]["cfg"]["correction"] = correction
    with tempfile.TemporaryDirectory() as folder:
        own = {"seed": seed, "run_dir": f"{folder}/run", "eval_video": False, "save_freq": 0}
        config["trainer"] = merge(config["trainer"], own | {"collect_threads": 1, "update_threads": 1})
        result = train_from_config(TrainCfg.from_dict(config), console=Console(quiet=True))
        lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    judged = [(line["step"], line[task.measure]) for line in lines if task.measure in line]
    lags = [line["async/lag_mean"] for line in lines if "async/lag_mean" in line]
    return {
        "steps": [step for step, _ in judged],
        "values": [value for _, value in judged],
        "lag": statistics.mean(lags) if lags else 0.0,
        "seconds": result.seconds,
    }


def _continue_imitated(config: dict[str, Any], start: Path) -> None:
    """Let a config go on from a policy that imitated the expert, by the recipe of the VLA example."""
    from benchmarks.async_vla_gpu import TRAINED, CameraVLA
    from benchmarks.async_vla_task import MEDIUM

    if not (start / "config.json").exists():
        CameraVLA(MEDIUM, start=start)
    config["policy"]["vla_config"] = {"model_path": str(start), "trainable": TRAINED}
    config["trainer"]["gym_config"] = load_config(CONFIGS / "push_cube" / "gym_config_language_small.json")
    config["algorithm"]["cfg"] |= {"batch_size": 512, "n_epochs": MEDIUM.sizes.epochs}


def judge(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, for each way, where it ends and how good it was on the way, compared with ``sync``."""
    final = {way: [run["values"][-1] for run in seeds.values()] for way, seeds in runs.items()}
    whole = {way: [statistics.mean(run["values"]) for run in seeds.values()] for way, seeds in runs.items()}
    base = final["sync"]
    lowest = statistics.mean(base) - (max(base) - min(base))
    rows: dict[str, dict[str, Any]] = {}
    for way, seeds in runs.items():
        difference = statistics.mean(whole[way]) - statistics.mean(whole["sync"])
        rows[way] = {
            "seeds": len(seeds),
            "final": statistics.mean(final[way]),
            "final_range": [min(final[way]), max(final[way])],
            "within_spread": statistics.mean(final[way]) >= lowest,
            "curve_mean": statistics.mean(whole[way]),
            "curve_difference": difference,
            "curve_standard_error": math.hypot(_error(whole[way]), _error(whole["sync"])),
            "lag": statistics.mean(run["lag"] for run in seeds.values()),
        }
    return rows


def _error(values: list[float]) -> float:
    """Return the standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _line(item: tuple[str, dict[str, Any]]) -> str:
    way, row = item
    low, high = row["final_range"]
    verdict = "" if row["within_spread"] else "  BELOW the spread of sync"
    return (
        f"  {way:<18} final {row['final']:8.3f} ({low:.3f} to {high:.3f})   mean of the curve {row['curve_mean']:8.3f} "
        f"({row['curve_difference']:+.3f} +- {row['curve_standard_error']:.3f})   lag {row['lag']:.2f}{verdict}"
    )


def draw(file: Path, name: str, runs: dict[str, dict[str, Any]]) -> None:
    """Draw all curves over environment steps."""
    series = [
        Series(way, [(np.array(run["steps"], float), np.array(run["values"], float)) for run in seeds.values()])
        for way, seeds in runs.items()
    ]
    draw_curves(file, f"{name}: rollouts of the present policy, and of the one before", ("steps", "score"), series)


def write(file: Path, content: dict[str, Any]) -> None:
    """Write the results."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
