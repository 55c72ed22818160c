"""Does it learn, how well and how fast: several seeds of each task, with curves as PNG and figures as JSON.

::

    python -m benchmarks.learn                                   # everything, one run at a time; takes hours
    python -m benchmarks.learn --tasks cart_pole push_cube --threads 2
    python -m benchmarks.learn --jobs 16 --time-limit 540        # sixteen runs at a time, one core each
    python -m benchmarks.learn --merge OTHER/learn.json          # add the runs of another machine

Every task is a config under ``configs/agents/rl``. On Gymnasium's tasks Stable-Baselines3 (the extra ``peers``) is
trained with the same hyperparameters, and evaluated in the same way. ``learn.json`` is written after every run; what is
in it already is not run again, and a run of ours that a time limit has stopped goes on from where it was, as its folder
stays in ``OUTPUT/learn_runs``: a benchmark can be made in several calls. Each run is a process with cores of its own.
The exit code is 1 if a claim does not hold, or if some of its runs are missing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learn_report import Results, summarize, write_report
from benchmarks.learn_runs import run_all
from benchmarks.learn_tasks import OURS, PEER, ROOT, TASKS, Job, settings_of
from embodichain.extras import available


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--frameworks", nargs="+", choices=[OURS, PEER], default=[OURS, PEER], help="who is trained")
    parser.add_argument("--steps", type=int, help="environment steps per run (default: what the config says)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="cores per run")
    parser.add_argument("--time-limit", type=float, help="seconds after which runs are stopped; the next call goes on")
    parser.add_argument("--again", action="store_true", help="run what is in the results already, too")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], help="only add the runs of these results")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a claim does not hold."""
    args = parse_args(argv)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended, too
    results = Results.read(args.output / "learn.json", {name: settings_of(name, args.steps) for name in TASKS})
    for file in args.merge:
        results.merge(json.loads(file.read_text()), str(file))
    if not args.merge:
        wanted = [
            Job(task, framework, seed)
            for task in args.tasks
            for framework in TASKS[task].frameworks
            if framework in args.frameworks
            for seed in range(args.seeds)
        ]
        if PEER in args.frameworks and not available(PEER):
            print("Stable-Baselines3 is not installed: pip install 'embodichain-agents[peers]'", file=sys.stderr)
            wanted = [job for job in wanted if job.framework != PEER]
        todo = [job for job in wanted if args.again or not results.has_finished(job)]
        command = shlex.join(["python", "-m", "benchmarks.learn", *(sys.argv[1:] if argv is None else argv)])
        deadline = None if args.time_limit is None else began + args.time_limit
        home = args.output / "learn_runs"
        for outcome in run_all(todo, results.settings, home, args.jobs, args.threads, args.steps, deadline):
            results.add(outcome, command)
    figures = {name: summarize(name, results.of_task(name), args.seeds) for name in TASKS if results.of_task(name)}
    results.write(figures)
    write_report(args.output, figures, results)
    return 0 if all(figures[name]["holds"] is not False for name in args.tasks if name in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
