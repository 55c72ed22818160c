"""Does every task of this package learn in the time that is claimed: several seeds of each, curves as JSON and PNG.

::

    python -m benchmarks.worlds --device cuda --jobs 4 --seeds 0 1 2        # all tasks with a train_config_gpu.json
    python -m benchmarks.worlds --device cpu --tasks push_cube stack_cube --jobs 1 --threads 2
    python -m benchmarks.worlds --report                                    # only sum up and draw what is there
    python -m benchmarks.worlds --device cuda --merge OTHER/worlds.json     # add the runs of another machine
    python -m benchmarks.worlds --tasks push_cube --device cpu --time-limit 60 -- --trainer.num_envs 32

A task is a folder of ``configs/agents/rl``: ``train_config_gpu.json`` for ``--device cuda``, ``train_config.json`` for
the CPU. Every run is ``train_from_config`` in a process of its own, until an evaluation reaches the goal or the time is
over. Time counts from the end of the first update on, evaluations included; what comes before, compilation above all,
is reported apart. Runs on one GPU share it, so that a run alone would need less time. Only one run at a time starts:
what it compiles is in the cache for the next one.

``worlds.json`` is written while runs train, and their folders stay in ``OUTPUT/worlds_runs``: whatever is killed, what
was measured is there. Runs that are over are not made again without ``--again``. Whatever follows ``--`` goes to every
run.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT, start, stop
from benchmarks.worlds_report import Run, WorldResults, claims, settings_digest, write_report

_PAUSE, _WRITE_EVERY = 0.5, 10.0
_START_LIMIT = 600.0
"""Seconds after which a run that has not made its first update no longer keeps others from starting."""


@dataclass
class Worker:
    """A run under way."""

    run: Run
    folder: Path
    process: subprocess.Popen[bytes]
    began: float

    @property
    def is_starting(self) -> bool:
        """Whether it still compiles, as far as one can tell."""
        return not self.run.steps_taken and time.monotonic() - self.began < _START_LIMIT

    def refresh(self) -> None:
        """Read how far it is."""
        self.run.read(self.folder)

    def end(self) -> None:
        """Stop it, and read how far it came."""
        stop([self.process])
        self.refresh()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tasks", nargs="+", help="folders of configs/agents/rl (default: all that have a config)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of the simulation per run")
    parser.add_argument(
        "--time-limit", type=float, help="seconds per run after its first update (default: the claim's)"
    )
    parser.add_argument("--budget", type=float, help="seconds for all of it; what is not begun by then is left out")
    parser.add_argument("--keep-going", action="store_true", help="train until the time is over, even at the goal")
    parser.add_argument("--again", action="store_true", help="run what is in the results already, too")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], help="only add the runs of these results")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    args = parser.parse_args(words[:split])
    args.overrides = words[split + 1 :]
    available = list(claims(args.device))
    unknown = [name for name in args.tasks or () if name not in available]
    if unknown:
        parser.error(f"--tasks: no config for {args.device} of {', '.join(unknown)}; there are {', '.join(available)}")
    args.tasks = args.tasks or available
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a claim about one of the tasks does not hold."""
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended, too
    args.output.mkdir(parents=True, exist_ok=True)
    results = WorldResults.read(args.output / "worlds.json")
    for file in args.merge:
        results.merge(WorldResults.read(file))
    if args.merge:
        results.write()
    elif not args.report:
        todo = [
            Run.of(task, args.device, seed, settings_digest(task, args.device, args.overrides), args.jobs)
            for seed in args.seeds  # all tasks once before any a second time, in case the time is short
            for task in args.tasks
        ]
        todo = [run for run in todo if args.again or not results.is_over(run)]
        for run in todo if args.time_limit is not None else []:
            run.limit = args.time_limit
        run_all(todo, results, args)
    return write_report(args.output, results, args.tasks, args.device)


def run_all(todo: Sequence[Run], results: WorldResults, args: argparse.Namespace) -> None:
    """Train all runs, ``--jobs`` at a time, and keep the results up to date."""
    waiting, workers, written, began = list(todo), list[Worker](), 0.0, time.monotonic()
    try:
        while waiting or workers:
            out_of_time = args.budget is not None and time.monotonic() - began > args.budget
            if out_of_time and not workers:
                print(f"out of time: {len(waiting)} runs are left out", flush=True)
                return
            starting = any(worker.is_starting for worker in workers)
            if waiting and not out_of_time and len(workers) < args.jobs and not starting:
                run = waiting.pop(0)
                results.add(run)
                workers.append(_start(run, args))
            for worker in list(workers):
                worker.refresh()
                run, code = worker.run, worker.process.poll()
                if code is None and not run.is_over(args.keep_going):
                    continue
                worker.end()
                workers.remove(worker)
                run.conclude(code, worker.folder)
                print(run.describe(), flush=True)
                written = 0.0
            if time.monotonic() - written > _WRITE_EVERY:
                results.write()
                written = time.monotonic()
            time.sleep(_PAUSE)
    finally:
        stop([worker.process for worker in workers])
        results.write()


def _start(run: Run, args: argparse.Namespace) -> Worker:
    """Begin a run in a folder of its own."""
    folder = args.output / "worlds_runs" / f"{run.task}_{run.device}_{run.seed}_{time.strftime('%m%d_%H%M%S')}"
    folder.mkdir(parents=True)
    longest = str(run.limit + 2 * _START_LIMIT)
    words = ["--trainer.seed", str(run.seed), "--trainer.run_dir", str(folder / "run"), "--trainer.eval_video", "false"]
    words += ["--trainer.max_seconds", longest, *args.overrides]
    threads = str(args.threads)
    variables = {"OMP_NUM_THREADS": threads}
    if args.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
        words += [] if "--trainer.gym_config.num_threads" in words else ["--trainer.gym_config.num_threads", threads]
    script = "import sys; from benchmarks.worlds_report import train; train(sys.argv[1], sys.argv[2:])"
    process = start(["-c", script, str(run.path), *words], folder / "log", variables=variables, cwd=folder)
    return Worker(run, folder, process, time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
