"""Does a sweep find settings at least as good as those that are shipped?

    python -m benchmarks.sweep                     # 40 trials of CartPoleRL on two cores, then five other seeds each
    python -m benchmarks.sweep --trials 10 --seeds 10..12

It runs ``embodichain sweep``, then trains the shipped config and ``best_config.json`` with seeds that the sweep has not
seen, and prints returns of both: at the end, and on average over all evaluations, which is what the sweep looked for.
The same command continues what was interrupted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from embodichain.agents.rl.run_records import RunInfo, find_runs
from embodichain.cli.main import main as embodichain

BUDGET = ["--trainer.total_steps", "100000", "--trainer.eval_freq", "20000", "--trainer.target_return", "null"]
BUDGET += ["--trainer.eval_video", "false"]


def returns(folder: Path) -> dict[str, list[float]]:
    """Return what each run of a folder reached: at the end, and on average over its evaluations."""
    found: dict[str, list[float]] = {"last": [], "mean": []}
    for path in find_runs(folder):
        values = [line["eval/return"] for line in RunInfo(path).lines if "eval/return" in line]
        found["last"].append(values[-1])
        found["mean"].append(statistics.fmean(values))
    return found


def main() -> int:
    """Run the sweep and the comparison; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="CartPoleRL")
    parser.add_argument("--space", default="lr=log(1e-4,1e-2),ent=[0,0.01]")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", default="10..14")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark_sweep"))
    args = parser.parse_args()
    jobs, sweep = ["--jobs", str(args.jobs)], args.output / "sweep"
    words = ["sweep", args.config, "--space", args.space, "--trials", str(args.trials), "--score", "mean", *jobs]
    code = embodichain([*words, *BUDGET, "--trainer.run_dir", str(sweep)])
    configs = {"shipped": args.config, "found": str(sweep / "best_config.json")}
    for name, config in configs.items():
        folder = ["--trainer.run_dir", str(args.output / name)]
        code = code or embodichain(["train", config, "--seeds", args.seeds, *jobs, *BUDGET, *folder])
    if code:
        return code
    found = {name: returns(args.output / name) for name in configs}
    for name, values in found.items():
        told = ", ".join(f"{kind} {statistics.fmean(numbers):.1f}" for kind, numbers in values.items())
        print(f"{name}: return over seeds {args.seeds}: {told}")
    (args.output / "sweep.json").write_text(json.dumps(found, indent=2) + "\n")
    is_as_good = statistics.fmean(found["found"]["mean"]) >= statistics.fmean(found["shipped"]["mean"])
    return 0 if is_as_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
