"""All that is measured on a GPU, in order of importance and in as much time as there is; called again, it goes on.

::

    python -m benchmarks.gpu_all --list                              # what there is, how long it takes, what is done
    python -m benchmarks.gpu_all --minutes 9.5 --output DIR
    python -m benchmarks.gpu_all --minutes 9.5 --output DIR --only worlds checks
    python -m benchmarks.gpu_all --merge DIR                         # add what DIR has to benchmarks/results

Every measurement is a benchmark's own command in a process of its own, with a log and a time limit (the list is in
``gpu_jobs.py``). One that needs the GPU for itself is alone there, one that needs all cores is alone altogether; all
others run beside each other on cores of their own, and trainings share the GPU through MPS where it is installed.
Measurements begin in the order of the list, each only if the time that is left suffices for something.

They work in ``--work`` (by default ``build/gpu_all``), which begins with what ``--output``, or else
``benchmarks/results``, has of a result: what is there already is not measured again. After every measurement, and every
few seconds, the results are copied to ``--output``: eight small files at most. ``gpu_all.json`` tells how every command
ended, with the last lines of its log.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_jobs import ALL, Job, all_jobs
from benchmarks.processes import ROOT, kill_group, start, stop, tail

RESULTS = ROOT / "benchmarks" / "results"
RECORDS = "gpu_all.json"
FILES = ("worlds", "gpu_cameras", "gpu_envs", "sim", "learn", "flow_vla", "heads")
MERGED = {"worlds": ("--device", "cuda"), "learn": (), "heads": ()}
"""Results that their own benchmark merges, and the arguments that it needs for that."""
_GRACE = 20.0
"""Seconds for a command that has to end; its own processes have less."""
_PAUSE, _COPY_EVERY = 0.2, 5.0


class Records:
    """``gpu_all.json``: how every command ended."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / RECORDS
        self.jobs: dict[str, dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def note(self, job: Job, status: str, **details: Any) -> None:
        """Write down what is known of a command."""
        self.jobs[job.name] = {"command": " ".join(("python", *job.words)), "status": status, **details}
        partial = self.file.with_name(f".{self.file.name}")
        partial.write_text(json.dumps(self.jobs, indent=1) + "\n")
        partial.replace(self.file)

    def is_done(self, job: Job) -> bool:
        """Tell whether nothing is left of a measurement."""
        if job.left is not None:
            return job.left(self.file.parent) == 0
        record = self.jobs.get(job.name, {})
        return record.get("status") == "done" and record["command"] == " ".join(("python", *job.words))

    def end_leftovers(self) -> None:
        """Kill what runs on from a call that was killed."""
        for record in self.jobs.values():
            pid = record.get("pid")
            if record["status"] == "running" and pid and _born(pid) == record["born"]:
                kill_group(pid)


@dataclass
class Running:
    """A measurement under way."""

    job: Job
    cores: list[int]
    process: subprocess.Popen[bytes]
    log: Path
    ends: float
    began: float = field(default_factory=time.monotonic)


class Planner:
    """Runs as many measurements as time, cores and the GPU allow."""

    def __init__(self, jobs: Sequence[Job], work: Path, output: Path, seconds: float, again: bool = False) -> None:
        self.work, self.output, self.deadline = work, output, time.monotonic() + seconds
        for folder in (work / "logs", output):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (f"{name}.json" for name in ("gpu_all", *FILES)):
            known = [folder / file for folder in (work, output, RESULTS) if (folder / file).exists()]
            if known and known[0].parent != work:
                shutil.copy(known[0], work / file)
        self.records = Records(work)
        self.waiting = [job for job in jobs if again or not self.records.is_done(job)]
        self.running: list[Running] = []
        self.cores = sorted(os.sched_getaffinity(0))
        self.mps = False

    def run(self) -> None:
        """Run what there is time for."""
        lock = (self.work / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while another call is under way
        self.records.end_leftovers()
        copied = 0.0
        try:
            while True:
                now = time.monotonic()
                over = [one for one in self.running if one.process.poll() is not None or now >= one.ends]
                self._end(over)
                self._begin()
                if not self.running:
                    return
                if over or now - copied > _COPY_EVERY:
                    self.copy()
                    copied = now
                time.sleep(_PAUSE)
        finally:
            self._end(list(self.running))
            self.copy()
            self._end_mps()
            lock.close()

    def copy(self) -> None:
        """Copy the results that are whole."""
        for name in ("gpu_all", *FILES):
            file, kept = self.work / f"{name}.json", RESULTS / f"{name}.json"
            try:
                text = file.read_text()
                json.loads(text)
            except (OSError, ValueError):  # not there, or being written
                continue
            if kept.exists() and kept.read_text() == text:  # nothing was measured: merging it later could undo others
                continue
            partial = self.output / f".{file.name}"
            partial.write_text(text)
            partial.replace(self.output / file.name)

    def _begin(self) -> None:
        """Start what can run now, in the order of the list; on the GPU nothing overtakes what waits for it."""
        gpu_awaited = False
        for job in list(self.waiting):
            left = self.deadline - _GRACE - time.monotonic()
            if job.needed > left or (job.gpu and gpu_awaited):
                continue
            if self._has_room(job):
                self.waiting.remove(job)
                self._start(job, min(job.limit, left))
            elif job.cores == ALL:
                return
            gpu_awaited = gpu_awaited or (bool(job.gpu) and job in self.waiting)

    def _has_room(self, job: Job) -> bool:
        if job.cores == ALL:
            return not self.running
        uses = {one.job.gpu for one in self.running} - {""}
        fits = not job.gpu or not uses or (job.gpu == "shared" and uses == {"shared"})
        if job.left and any(one.job.left and one.job.group == job.group for one in self.running):
            return False  # both would write the same file
        return fits and min(job.cores, len(self.cores)) <= len(self._free())

    def _free(self) -> list[int]:
        return [core for core in self.cores if not any(core in one.cores for one in self.running)]

    def _start(self, job: Job, seconds: float) -> None:
        cores = self._free()[: job.cores or None]
        variables = {"PYTHONUNBUFFERED": "1"}
        if job.mps and self._start_mps():
            variables |= self._mps_variables()
        log = self.work / "logs" / f"{job.name.replace(' ', '_').replace('/', '_')}.log"
        own = str(int(max(1.0, seconds - 20.0)))  # so that it can end by itself
        words = [word.replace("{work}", str(self.work)).replace("{seconds}", own) for word in job.words]
        process = start(words, log, cores, variables, leads_group=True)
        self.records.note(job, "running", pid=process.pid, born=_born(process.pid))
        self.running.append(Running(job, cores, process, log, time.monotonic() + seconds))
        print(f"{job.name}: begins on {len(cores)} cores, at most {seconds:.0f} s", flush=True)

    def _end(self, over: Iterable[Running]) -> None:
        """Stop what still runs of these, and note how they ended; a missed bar is a figure, not a failure."""
        codes = [(one, one.process.poll()) for one in over]
        stop((one.process for one, _ in codes), min(_GRACE, max(1.0, self.deadline - time.monotonic())))
        for one, code in codes:
            kill_group(one.process.pid)  # what it may have left behind
            self.running.remove(one)
            text, seconds = tail(one.log, 1500), round(time.monotonic() - one.began, 1)
            crashed = code not in (None, 0, 1) or (code == 1 and "Traceback (most recent call last)" in text)
            status = "out of time" if code is None else "failed" if crashed else "done"
            self.records.note(one.job, status, code=code, seconds=seconds, cores=len(one.cores), log=text)
            last = (text.strip() or "no output").splitlines()[-1]
            print(f"{one.job.name}: {status} after {seconds:.0f} s, exit code {code}: {last}", flush=True)

    def _start_mps(self) -> bool:
        """Start the daemon that lets processes share the GPU, where there is one."""
        if not self.mps and shutil.which("nvidia-cuda-mps-control"):
            (self.work / "mps").mkdir(exist_ok=True)
            subprocess.run(["nvidia-cuda-mps-control", "-d"], env=self._mps_variables(), check=False)
            self.mps = True
        return self.mps

    def _end_mps(self) -> None:
        if self.mps:
            with contextlib.suppress(subprocess.TimeoutExpired):
                words, quitting = ["nvidia-cuda-mps-control"], b"quit -t 5\n"
                subprocess.run(words, input=quitting, env=self._mps_variables(), check=False, timeout=10.0)

    def _mps_variables(self) -> dict[str, str]:
        folder = str(self.work / "mps")
        return os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}


def _born(pid: int) -> str | None:
    """Return when a process started, which tells it from another one with its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None


def merge(folder: Path) -> None:
    """Add the results of a folder to those that are kept."""
    for name in FILES:
        if not (file := folder / f"{name}.json").exists():
            continue
        if name in MERGED:
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *MERGED[name], "--merge", str(file)], cwd=ROOT)
        else:
            shutil.copy(file, RESULTS)
    kept = Records(RESULTS).jobs | Records(folder).jobs
    (RESULTS / RECORDS).write_text(json.dumps(kept, indent=1) + "\n")


def main(argv: Sequence[str] | None = None, jobs: Sequence[Job] = ()) -> int:
    """Measure; the exit code is 1 if something is left to do."""
    jobs = jobs or list(all_jobs())
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    groups = list(dict.fromkeys(job.group for job in jobs))
    parser.add_argument("--minutes", type=float, default=9.5, help="for all of it")
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, help="groups of measurements")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu_all_results", help="folder of the results")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu_all", help="folder for logs and runs")
    parser.add_argument("--again", action="store_true", help="run commands that have ended, too, such as failed checks")
    parser.add_argument("--list", action="store_true", help="only show what there is")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="only add what DIR has to benchmarks/results")
    args = parser.parse_args(argv)
    if args.merge:
        merge(args.merge)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    chosen = [job for job in jobs if job.group in args.only]
    planner = Planner(chosen, args.work.resolve(), args.output.resolve(), 60.0 * args.minutes, args.again)
    if not args.list:
        planner.run()
    undone = 0
    for number, job in enumerate(chosen):
        is_done, record = planner.records.is_done(job), planner.records.jobs.get(job.name, {})
        where = f"{job.gpu + ' GPU, ' if job.gpu else ''}{job.cores or 'all'} cores"
        rest = f", {job.left(planner.work)} runs are left" if job.left and not is_done else ""
        code = f", exit code {record['code']}" if record.get("code") else ""
        how_far = f"{'done' if is_done else record.get('status', 'not begun')}{code}{rest}"
        print(f"{number:3d} {job.group:8s} {job.name:34s} {job.seconds:5.0f} s  {where:21s} {how_far}")
        undone += not is_done
    return 1 if undone else 0


if __name__ == "__main__":
    sys.exit(main())
