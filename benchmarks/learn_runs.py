"""Many training runs at a time: a process and some cores of its own for each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.learn_tasks import ROOT, TASKS, Job, Outcome
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
    at_once: int,
    threads: int,
    steps: int | None = None,
    deadline: float | None = None,
) -> Iterator[Outcome]:
    """Train all jobs, the longest first, and yield each outcome as it comes.

    Run number ``n`` of those at the same time has the cores ``n * threads`` to ``(n + 1) * threads - 1`` of this
    process's. At the ``deadline`` (of ``time.monotonic``) what is still running is stopped, and yielded unfinished.
    """
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    waiting = sorted(jobs, key=lambda job: job.minutes)
    free = list(range(at_once))
    running: list[_Running] = []
    with tempfile.TemporaryDirectory() as home:
        try:
            while waiting or running:
                over = deadline is not None and time.monotonic() >= deadline
                while waiting and free and not over:
                    slot = free.pop(0)
                    job, own = waiting.pop(), (cores * threads * at_once)[slot * threads : (slot + 1) * threads]
                    running.append(_start(job, slot, Path(home), own, threads, steps))
                for run in [run for run in running if over or run.process.poll() is not None]:
                    finished = run.process.poll() == 0
                    _stop(run)
                    running.remove(run)
                    free.append(run.slot)
                    outcome = _outcome(run, settings[run.job.task], finished, threads, min(at_once, len(jobs)) - 1)
                    if outcome is not None:
                        yield outcome
                if over:
                    return
                time.sleep(_PAUSE)
        finally:
            for run in running:
                _stop(run)


def _start(job: Job, slot: int, home: Path, cores: list[int], threads: int, steps: int | None) -> _Running:
    folder = home / str(job).replace(" ", "_")
    folder.mkdir()
    words = ["-m", "benchmarks.learn_tasks", job.task, job.framework, str(job.seed), str(folder / "run")]
    words += [] if steps is None else ["--steps", str(steps)]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    if cores:
        os.sched_setaffinity(process.pid, cores)  # before it has imported anything that counts them
    return _Running(job, slot, folder, process)


def _stop(run: _Running) -> None:
    if run.process.poll() is None:
        run.process.kill()
    run.process.wait()


def _outcome(run: _Running, settings: str, finished: bool, cores: int, beside: int) -> Outcome | None:
    """Return the evaluations of a run that ended, or was stopped; ``None`` if it failed, which is told."""
    job, measure = run.job, TASKS[run.job.task].measure
    lines = [line for line in read_metrics(run.folder / "run" / "metrics.jsonl") if measure in line]
    if not finished and run.process.returncode >= 0:
        tail = (run.folder / "log").read_text(errors="replace")[-2000:]
        print(f"{job} failed with status {run.process.returncode}:\n{tail}", file=sys.stderr, flush=True)
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
