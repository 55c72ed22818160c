"""Python processes that a benchmark starts: each with a log and cores of its own, and an end that is certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
GRACE = 15.0
"""Seconds that a process has to save what it holds before it is killed."""


def start(
    words: Sequence[str],
    log: Path,
    cores: Iterable[int] = (),
    variables: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    leads_group: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ``python WORDS`` on some cores; all it starts belongs to its group if it leads one."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, set(cores) or allowed)  # of this thread; what it starts inherits it
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=cwd,
                env=os.environ | {"PYTHONPATH": search_path()} | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=leads_group,
            )
    finally:
        os.sched_setaffinity(0, allowed)


def stop(processes: Iterable[subprocess.Popen[bytes]], grace: float = GRACE) -> None:
    """End processes, so that they can save at first, and then for good; with their groups, where they lead one."""
    running = [process for process in processes if process.poll() is None]
    leaders = [process.pid for process in running if os.getpgid(process.pid) == process.pid]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + grace
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    for pid in leaders:
        kill_group(pid)
    for process in running:
        process.wait()


def kill_group(leader: int) -> None:
    """Kill what is left of a process group."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def search_path() -> str:
    """Return a PYTHONPATH with this repository in front, and whatever there was."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def tail(log: Path, count: int = 2000) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-count:] if log.exists() else ""
