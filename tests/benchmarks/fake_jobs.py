"""Jobs that sleep, and a plan of two of them as a program: ``python -m tests.benchmarks.fake_jobs SECONDS OPTIONS``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_all import main
from benchmarks.gpu_jobs import ALL, Job

_PROGRAM = """
import os, sys, time
begin = f"{time.monotonic()} {len(os.sched_getaffinity(0))}"
open(r"{work}/NAME.began", "w").write(begin)
for _ in range(600):
    if all(os.path.exists(rf"{work}/{other}.began") for other in BESIDE):
        break
    time.sleep(0.1)
time.sleep(SECONDS)
open(r"{work}/NAME.ended", "w").write(str(time.monotonic()))
print("NAME has spoken")
sys.exit(CODE)
"""


def sleeper(
    name: str, seconds: float = 0.0, code: int = 0, told: float = 1.0, beside: Sequence[str] = (), **given: Any
) -> Job:
    """Return a job that notes when it begins and ends; between the two it waits for others to begin, and sleeps."""
    words = {"NAME": name, "SECONDS": str(seconds), "CODE": str(code), "BESIDE": str([*beside])}
    program = _PROGRAM
    for word, value in words.items():
        program = program.replace(word, value)
    return Job(name, "fake", ("-c", program), told, **given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], [sleeper("one"), sleeper("two", float(sys.argv[1]), cores=ALL)]))
