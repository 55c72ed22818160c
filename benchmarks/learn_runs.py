"""Many training runs at a time: a process and some cores of its own for each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.learn_tasks import INTERRUPTED, TASKS, Job, Outcome
from benchmarks.processes import start, stop, tail
from benchmarks.timing import machine
from embodichain.agents.rl.runs import read_metrics

_PAUSE = 0.2


@dataclass
class _Running:
    """A run under way."""

    job: Job
    slot: int
    folder: Path
    process: subprocess.Popen[bytes]


def run_all(
    jobs: Sequence[Job],
    settings: Mapping[str, str],
    home: Path,
    at_once: int,
    threads: int,
    steps: int | None = None,
    deadline: float | None = None,
) -> Iterator[Outcome]:
    """Train all jobs, the longest first, and yield each outcome as it comes.

    Run number ``n`` of those at the same time has the cores ``n * threads`` to ``(n + 1) * threads - 1`` of this
    process's. At the ``deadline`` (of ``time.monotonic``) what is still running is stopped, and yielded unfinished; the
    next call goes on with it, as its folder stays in ``home`` until it is finished.
    """
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    waiting = sorted(jobs, key=lambda job: job.minutes)
    free = list(range(at_once))
    running: list[_Running] = []
    try:
        while waiting or running:
            over = deadline is not None and time.monotonic() >= deadline
            while waiting and free and not over:
                slot = free.pop(0)
                job, own = waiting.pop(), (cores * threads * at_once)[slot * threads : (slot + 1) * threads]
                folder = home / f"{str(job).replace(' ', '_')}_{settings[job.task]}"
                running.append(_start(job, slot, folder, own, threads, steps))
            ended = [run for run in running if over or run.process.poll() is not None]
            whole = {run.slot for run in ended if run.process.poll() == 0}
            stop(run.process for run in ended)
            for run in ended:
                finished = run.slot in whole
                running.remove(run)
                free.append(run.slot)
                outcome = _outcome(run, settings[run.job.task], finished, threads, min(at_once, len(jobs)) - 1)
                if outcome is not None:
                    yield outcome
                if finished:
                    shutil.rmtree(run.folder)
            if over:
                return
            time.sleep(_PAUSE)
    finally:
        stop(run.process for run in running)


def _start(job: Job, slot: int, folder: Path, cores: list[int], threads: int, steps: int | None) -> _Running:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["-m", "benchmarks.learn_tasks", job.task, job.framework, str(job.seed), str(folder / "run")]
    words += [] if steps is None else ["--steps", str(steps)]
    variables = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    return _Running(job, slot, folder, start(words, folder / "log", cores, variables))


def _outcome(run: _Running, settings: str, finished: bool, cores: int, beside: int) -> Outcome | None:
    """Return the evaluations of a run that ended, or was stopped; ``None`` if it failed, which is printed."""
    job, measure = run.job, TASKS[run.job.task].measure
    lines = [line for line in read_metrics(run.folder / "run" / "metrics.jsonl") if measure in line]
    if not finished and run.process.returncode >= 0 and run.process.returncode != INTERRUPTED:
        text = tail(run.folder / "log")
        print(f"{job} failed with status {run.process.returncode}:\n{text}", file=sys.stderr, flush=True)
        return None
    clock = run.folder / "run" / "cpu_seconds"
    last = f"{lines[-1][measure]:.3f} after {lines[-1]['step']} steps" if lines else "no evaluation"
    print(f"{job}: {last}{'' if finished else ' (unfinished)'}", file=sys.stderr, flush=True)
    return Outcome(
        job.task,
        job.framework,
        job.seed,
        settings,
        finished,
        [line["step"] for line in lines],
        [round(line["time/total_seconds"], 2) for line in lines],
        [round(line[measure], 4) for line in lines],
        str(machine(())["processor"]),
        cores,
        beside,
        float(clock.read_text()) if finished else None,
    )
