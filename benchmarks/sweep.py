"""Does a sweep find settings at least as good as those that are shipped, and does it lose nothing when it is killed?

    python -m benchmarks.sweep                     # 40 trials of CartPoleRL, two at a time, then eight other seeds each
    python -m benchmarks.sweep --trials 10 --seeds 100..103

It runs ``embodichain sweep``, kills it with SIGKILL in the middle and continues it: trials that were over have to be as
they were, and every trial has to be there once. Then it trains the shipped config and ``best_config.json`` with seeds
that the sweep has not seen, for the same number of steps. The sweep has found something *at least as good* if neither
the return at the end nor the mean return over all evaluations is below that of the shipped config by more than the
standard error of the difference of the two means. The same command continues what was interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.timing import machine
from embodichain.agents.rl.run_records import RunInfo, find_runs, read_group
from embodichain.cli.main import main as embodichain

BUDGET = ["--trainer.total_steps", "100000", "--trainer.eval_freq", "20000", "--trainer.target_return", "null"]
BUDGET += ["--trainer.eval_video", "false"]
OVER = ("complete", "pruned", "fail")
KILLED = "killed.json"


def trials_in(folder: Path) -> list[dict[str, Any]]:
    """Return the trials of a sweep, as its folder has them."""
    return list((read_group(folder) or {}).get("trials", []))


def logs_of(folder: Path, trials: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the beginning, the resumptions and the log of every run of these trials."""
    runs = [RunInfo(path) for trial in trials for path in find_runs(folder / trial["folder"])]
    return {str(run.path.relative_to(folder)): [run.record.began, run.record.resumed, run.lines] for run in runs}


def sweep_and_kill(words: list[str], folder: Path, kill_after: int) -> int:
    """Run the sweep, once with SIGKILL after so many trials, and return its exit code."""
    command = [sys.executable, "-m", "embodichain", "sweep", *words]
    with subprocess.Popen(command) as process:
        while kill_after and not (folder / KILLED).exists() and process.poll() is None:
            states = Counter(trial["state"] for trial in trials_in(folder))
            over = [trial for trial in trials_in(folder) if trial["state"] in OVER]
            if len(over) >= kill_after and states["running"]:
                process.send_signal(signal.SIGKILL)
                process.wait()
                over = [trial for trial in trials_in(folder) if trial["state"] in OVER]
                left = {"trials": over, "running": states["running"], "runs": logs_of(folder, over)}
                (folder / KILLED).write_text(json.dumps(left))
                print(f"killed with {len(over)} trials over and {states['running']} running", flush=True)
                break
            time.sleep(0.1)
        code = process.wait()
    return subprocess.run(command, check=False).returncode if code == -signal.SIGKILL else code


def nothing_lost(folder: Path, count: int) -> list[str]:
    """Return what a kill has changed that it should not: nothing, if all is well."""
    trials, problems = trials_in(folder), []
    if [trial["number"] for trial in trials] != list(range(count)):
        problems.append(f"expected trials 0 to {count - 1}, found {[trial['number'] for trial in trials]}")
    problems += [f"trial {trial['number']} is {trial['state']}" for trial in trials if trial["state"] not in OVER]
    if (folder / KILLED).exists():
        left = json.loads((folder / KILLED).read_text())
        problems += [f"trial {trial['number']} has changed" for trial in left["trials"] if trial not in trials]
        now = logs_of(folder, left["trials"])
        problems += [f"run {name} has changed" for name, told in left["runs"].items() if now.get(name) != told]
    for path in find_runs(folder):
        steps = [line["step"] for line in RunInfo(path).lines if "episode/count" in line]
        if steps != sorted(set(steps)):
            problems.append(f"{path}: steps were made twice")
    return problems


def returns(folder: Path) -> dict[str, list[float]]:
    """Return what each run of a folder reached: at the end, and on average over its evaluations."""
    found: dict[str, list[float]] = {"last": [], "mean": []}
    for path in find_runs(folder):
        values = [line["eval/return"] for line in RunInfo(path).lines if "eval/return" in line]
        found["last"].append(values[-1])
        found["mean"].append(statistics.fmean(values))
    return found


def compare(shipped: list[float], found: list[float]) -> dict[str, Any]:
    """Return both means, the standard error of their difference, and whether what was found is at least as good."""
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (shipped, found)))
    means = {"shipped": statistics.fmean(shipped), "found": statistics.fmean(found)}
    return means | {"standard_error": error, "at_least_as_good": means["found"] >= means["shipped"] - error}


def main() -> int:
    """Run the sweep and the comparison; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="CartPoleRL")
    parser.add_argument("--space", default="lr=log(1e-4,1e-2),ent=[0,0.01]")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trial-seeds", default="0..2", help="seeds of the search")
    parser.add_argument("--seeds", default="100..107", help="seeds of the comparison")
    parser.add_argument("--kill-after", type=int, help="trials before the kill (default: half; 0: no kill)")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark_sweep"))
    args = parser.parse_args()
    jobs, folder = ["--jobs", str(args.jobs)], args.output / "sweep"
    words = [args.config, "--space", args.space, "--trials", str(args.trials), "--seeds", args.trial_seeds, *jobs]
    kill_after = args.trials // 2 if args.kill_after is None else args.kill_after
    code = sweep_and_kill([*words, *BUDGET, "--trainer.run_dir", str(folder)], folder, kill_after)
    configs = {"shipped": args.config, "found": str(folder / "best_config.json")}
    for name, config in configs.items():
        into = ["--trainer.run_dir", str(args.output / name)]
        code = code or embodichain(["train", config, "--seeds", args.seeds, *jobs, *BUDGET, *into])
    if code:
        return code
    problems = nothing_lost(folder, args.trials)
    for problem in problems:
        print(problem)
    reached = {name: returns(args.output / name) for name in configs}
    summary = {kind: compare(reached["shipped"][kind], reached["found"][kind]) for kind in ("last", "mean")}
    for kind, told in summary.items():
        figures = (
            f"found {told['found']:.1f}, shipped {told['shipped']:.1f}, standard error {told['standard_error']:.1f}"
        )
        print(f"{kind} return over seeds {args.seeds}: {figures}")
    _write(args, folder, reached, summary, problems)
    return 0 if not problems and all(told["at_least_as_good"] for told in summary.values()) else 1


def _write(args: argparse.Namespace, folder: Path, reached: Any, summary: Any, problems: list[str]) -> None:
    """Write the figures into ``sweep.json``."""
    group = read_group(folder) or {}
    killed = json.loads((folder / KILLED).read_text()) if (folder / KILLED).exists() else None
    trials = [{key: trial[key] for key in ("number", "state", "value", "params")} for trial in trials_in(folder)]
    figures = {
        "config": args.config,
        "space": args.space,
        "trial_seeds": args.trial_seeds,
        "seeds": args.seeds,
        "killed": killed and {"over": len(killed["trials"]), "running": killed["running"]},
        "problems": problems,
        "states": Counter(trial["state"] for trial in trials),
        "best": group.get("best"),
        "confirmed": group.get("confirmed"),
        "summary": summary,
        "returns": reached,
        "trials": trials,
        "machine": machine(("torch", "mujoco", "tensordict", "optuna")),
    }
    (args.output / "sweep.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
