"""Part ``parity`` of ``benchmarks.flow_vla``: both ways until they level off, several runs at a time.

Each run is a process on cores of its own, so that the lag of an asynchronous run is about that of a run alone: with
fewer cores, simulation takes longer beside the update, and less of a rollout is old. Rates are judged in part ``rate``.

``VARIANTS`` has the asynchronous run with the settings of the synchronous one, which is judged, and others that give
less weight to transitions of older weights, or take smaller steps, which are reported beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.async_vla_gpu import CameraVLA
from benchmarks.async_vla_runs import Outcome, run
from benchmarks.async_vla_task import LARGE, SMALL
from benchmarks.processes import start, stop, tail
from embodichain.agents.rl.algo import PPO

SYNC, ASYNC = "sync, apart", "async, pipelined, apart"
LEAST_SPREAD = 0.02
"""Share of successes by which as many episodes differ by chance."""
_EVALUATE_EVERY = 25
"""Rollouts between evaluations; what a run has done until then survives its end."""
_PAUSE = 0.2


@dataclass(frozen=True)
class Variant:
    """A way to collect, and settings of PPO that differ from the recipe's."""

    way: str
    settings: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = {
    "sync": Variant(SYNC),
    "async": Variant(ASYNC),
    "async, weights up to 1": Variant(ASYNC, {"max_importance_weight": 1.0}),
    "async, KL up to 0.1": Variant(ASYNC, {"target_kl": 0.1}),
}
JUDGED = ("sync", "async")
Job = tuple[str, int]
"""Name of a variant, and the seed."""


def plan(variants: Sequence[str], seeds: int) -> list[Job]:
    """Return what is run, in order: what is judged for all seeds, then one variant after the other."""
    pairs = [(name, seed) for seed in range(seeds) for name in JUDGED]
    return pairs + [(name, seed) for name in variants if name not in JUDGED for seed in range(seeds)]


class Parity:
    """The runs so far, and what follows from them."""

    def __init__(self, before: Mapping[str, Any], rollouts: int) -> None:
        """Keep the runs of earlier calls that are as long."""
        same = before.get("rollouts") == rollouts
        self.rollouts = rollouts
        self.what: list[str] = before["what"] if same else []
        self.runs: dict[Job, dict[str, Any]] = {(r["name"], r["seed"]): r for r in before["runs"]} if same else {}

    def add(self, job: Job, outcome: Mapping[str, Any], start_success: float | None) -> None:
        """Take in a run, finished or not, unless the one that is there went further."""
        if job not in self.runs or len(outcome["curve"]) >= len(self.runs[job]["curve"]):
            self.runs[job] = {"name": job[0], "seed": job[1], "start": start_success, **outcome}

    def keep_from(self, start_success: float) -> None:
        """Forget the runs that began with another policy than the one whose success this is."""
        self.runs = {job: one for job, one in self.runs.items() if one["start"] == start_success}

    def is_over(self, job: Job) -> bool:
        """Tell whether a run was evaluated at its end."""
        return job in self.runs and self.runs[job]["final"] is not None

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Return what is left to run."""
        return [job for job in jobs if not self.is_over(job)]

    def figures(self, seeds: int) -> dict[str, Any]:
        """Return what is written down."""
        finals = {name: [r["final"] for r in self._finished(name)] for name in VARIANTS}
        finals = {name: values for name, values in finals.items() if values}
        means = {name: statistics.mean(values) for name, values in finals.items()}
        bound = parity_bound(finals["sync"]) if "sync" in finals else None
        within = {name: bound is not None and mean >= bound for name, mean in means.items() if name != "sync"}
        complete = not self.missing(plan(JUDGED, seeds))
        return {
            "what": self.what,
            "rollouts": self.rollouts,
            "final": finals,
            "mean": means,
            "bound": bound,
            "within": within,
            "rising": {name: self._rising(name) for name in finals},
            "lag": {name: statistics.mean(r["lag_mean"] for r in self._finished(name)) for name in finals},
            "holds": complete and within["async"],
            "runs": [self.runs[job] for job in sorted(self.runs, key=lambda job: (list(VARIANTS).index(job[0]), job))],
        }

    def _finished(self, name: str) -> list[dict[str, Any]]:
        return [self.runs[job] for job in sorted(self.runs) if job[0] == name and self.is_over(job)]

    def _rising(self, name: str) -> float:
        """Return by how much success in the last fifth of the rollouts exceeds that in the fifth before."""
        part = max(1, self.rollouts // 5)
        scores = [[score for _, _, score in run["curve"]] for run in self._finished(name)]
        return statistics.mean(
            statistics.mean(one[-part:]) - statistics.mean(one[-2 * part : -part] or one[-part:]) for one in scores
        )


def parity_bound(finals: Sequence[float]) -> float:
    """Return the least mean success that is within the spread of synchronous runs."""
    return statistics.mean(finals) - 2.0 * max(statistics.pstdev(finals), LEAST_SPREAD)


def describe(figures: Mapping[str, Any]) -> Iterator[str]:
    """Say what the runs come to."""
    if figures["bound"] is not None:
        yield f"parity after {figures['rollouts']} rollouts: a mean final success of {figures['bound']:.1%} or more"
    for name, finals in figures["final"].items():
        verdict = "" if name not in figures["within"] else ", within" if figures["within"][name] else ", MISSED"
        yield (
            f"{name:<24}{figures['mean'][name]:>7.1%}  ({', '.join(f'{one:.1%}' for one in finals)}), rising by "
            f"{figures['rising'][name]:+.1%}, mean lag {figures['lag'][name]:.2f}{verdict}"
        )


def compare(args: argparse.Namespace, rollouts: int, start_folder: Path, before: Mapping[str, Any]) -> Iterator[Any]:
    """Train what is missing from the same policy; yield the figures after every run."""
    began = time.monotonic()
    parity = Parity(before, rollouts)
    jobs = parity.missing(plan(args.variants, args.seeds))
    if jobs:
        case = CameraVLA(SMALL if args.small else LARGE, rollouts=rollouts, start=start_folder, head="flow")
        parity.keep_from(case.start_success)
        jobs = parity.missing(plan(args.variants, args.seeds))
        parity.what = [*case.words(), f"runs at a time, each on its own part of the cores: {args.jobs}"]
        for line in parity.what:
            print(line, flush=True)
        left = args.budget - (time.monotonic() - began)
        for job, outcome in train_all(jobs, args, rollouts, start_folder, left):
            parity.add(job, outcome, case.start_success)
            yield parity.figures(args.seeds)
    figures = parity.figures(args.seeds)
    for line in describe(figures):
        print(line, flush=True)
    yield figures


@dataclass
class Running:
    """A run under way."""

    job: Job
    file: Path
    """What it has written so far."""
    cores: list[int]
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.monotonic() - self.began

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.file.with_suffix(".log")

    def outcome(self) -> dict[str, Any] | None:
        """Return what it has written so far, if anything."""
        return json.loads(self.file.read_text()) if self.file.exists() else None


def train_all(
    jobs: Sequence[Job], args: argparse.Namespace, rollouts: int, start_folder: Path, budget: float
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Train, ``args.jobs`` at a time, and yield what each run gives; begin none that would not end in time.

    Runs that are under way when the time is over are stopped; what they gave until then is yielded, too.
    """
    ends, waiting = time.monotonic() + budget, list(jobs)
    free, running, longest = split_cores(args.jobs), list[Running](), dict[str, float]()
    folder = start_folder.with_name(f"{start_folder.name}_runs")
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--rollouts", str(rollouts), "--start", str(start_folder), *(["--small"] if args.small else [])]
    with gpu_shared(folder, args.jobs) as variables:
        try:
            while (waiting or running) and time.monotonic() < ends:
                while waiting and free:
                    job = waiting.pop(0)
                    if time.monotonic() + longest.get(VARIANTS[job[0]].way, 0.0) > ends:
                        print(f"{job[0]}, seed {job[1]}: left out, it would not end in time", flush=True)
                    else:
                        running.append(_started(job, words, folder, free.pop(0), variables))
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    free.append(one.cores)
                    way = VARIANTS[one.job[0]].way
                    longest[way] = max(one.seconds, longest.get(way, 0.0))
                    yield from _ended(one)
                time.sleep(_PAUSE)
        finally:
            stop(one.process for one in running)
    for one in running:
        yield from _ended(one)


def _started(job: Job, words: Sequence[str], folder: Path, cores: list[int], variables: Mapping[str, str]) -> Running:
    """Begin a run."""
    name, seed = job
    file = folder / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}.json"
    file.unlink(missing_ok=True)
    module = ["-m", "benchmarks.flow_vla_parity", name, str(seed), "--output", str(file), *words]
    return Running(job, file, cores, start(module, file.with_suffix(".log"), cores, variables))


def _ended(one: Running) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Say how a run ended, and yield what it gave."""
    name, outcome = f"{one.job[0]}, seed {one.job[1]}", one.outcome()
    if one.process.returncode:
        print(
            f"{name}: ended with status {one.process.returncode} after {one.seconds:.0f} s\n{tail(one.log)}", flush=True
        )
    if outcome is not None:
        final = "not finished" if outcome["final"] is None else f"final success {outcome['final']:.1%}"
        print(f"  {name}: {len(outcome['curve'])} rollouts, {final}, {one.seconds:.0f} s in all", flush=True)
        yield one.job, outcome


def split_cores(parts: int) -> list[list[int]]:
    """Split the cores into parts of the same size; where there are fewer cores, all runs share them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    size = len(cores) // parts
    return [cores[i * size : (i + 1) * size] if size else cores for i in range(parts)]


@contextmanager
def gpu_shared(folder: Path, processes: int) -> Iterator[dict[str, str]]:
    """Give the variables with which processes share the GPU through MPS, where it is installed and not on yet."""
    control, pipes = shutil.which("nvidia-cuda-mps-control"), "CUDA_MPS_PIPE_DIRECTORY"
    if processes == 1 or control is None or pipes in os.environ:
        yield {}
        return
    variables = {pipes: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    started = subprocess.run([control, "-d"], env=os.environ | variables, check=False).returncode == 0
    try:
        yield variables if started else {}
    finally:
        if started:
            with suppress(subprocess.TimeoutExpired):
                words, quitting = os.environ | variables, b"quit -t 5\n"
                subprocess.run([control], input=quitting, env=words, check=False, timeout=10.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Train one run, and write what it gives to a file, after every evaluation."""
    parser = argparse.ArgumentParser(description="One run of a variant.")
    parser.add_argument("name", choices=list(VARIANTS))
    parser.add_argument("seed", type=int)
    parser.add_argument("--rollouts", type=int, required=True)
    parser.add_argument("--start", type=Path, required=True, help="folder that has the imitated policy")
    parser.add_argument("--output", type=Path, required=True, help="file for what it gives")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(argv)
    variant, scale = VARIANTS[args.name], SMALL if args.small else LARGE
    case = CameraVLA(scale, rollouts=args.rollouts, start=args.start, head="flow", settings=variant.settings)

    def watch(outcome: Outcome, learner: PPO) -> None:
        count = len(outcome.curve)
        if count % _EVALUATE_EVERY == 0 and count < args.rollouts:
            outcome.evaluations.append((count, case.final_score(learner) or 0.0))
            write_whole(args.output, outcome.to_dict())

    outcome = run(case, variant.way, args.seed, watch=watch)
    print(outcome.line(), flush=True)
    write_whole(args.output, outcome.to_dict())
    return 0


def write_whole(file: Path, content: Any) -> None:
    """Write a file, whole or not at all."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(file)


if __name__ == "__main__":
    sys.exit(main())
