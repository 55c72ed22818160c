"""Asynchronous against synchronous collection: same seeds, same samples, how much sooner.

::

    python -m benchmarks.async_vla                     # (a) on a CPU; inference is a sleep of 100 ms, off the cores
    python -m benchmarks.async_vla --part gpu          # (b) a VLA of 129 M parameters on a GPU, cameras on the CPU
    python -m benchmarks.async_vla --part gpu --small  # (b) in small and on the CPU, to see that it runs

Learning has three stages: inference, simulation and the update. Every way to arrange them is timed, and compared with
the least time that the stage times allow. Each of these is measured where nothing else happens, beside the runs of
every seed. Runs are written to ``results/async_vla_PART.json`` one by one; what is in it already is not run again, so
that a benchmark can be made in several calls. The exit code is 1 if a bar is missed, or if runs are missing: (a) 1.9
times the speed of ``sync``, (b) 1.8 times, at a final success within the spread of ``sync``, and both at least 90% of
the bound. Every figure is a mean over all runs that were made; ratios are of those with a run of ``sync`` beside them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.async_vla_report import Summary, draw
from benchmarks.async_vla_runs import WAYS, Outcome, Sizes, Stages, Way, measure_stages, run
from benchmarks.timing import machine

BARS = {"cpu": 1.9, "gpu": 1.8}
SEEDS = {"cpu": 5, "gpu": 3}
ORDER = (
    "sync",
    "async, pipelined, apart",
    "sync, apart",
    "async, pipelined",
    "async, pipelined, process",
    "async",
    "sync, pipelined",
)
"""What is compared runs one after the other, for a machine is not equally fast all day."""
JUDGED = ORDER[:5]
RESULTS = Path(__file__).parent / "results"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=["cpu", "gpu"], default="cpu", help="(a) or (b)")
    parser.add_argument("--small", action="store_true", help="(b) in small, on the CPU; nothing is judged")
    parser.add_argument("--seeds", type=int, help="number of seeds, each with a run of every way: (a) 5, (b) 3")
    parser.add_argument("--first-seed", type=int, default=0, help="where to begin")
    parser.add_argument("--rollouts", type=int, help="rollouts per run")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="ways to run (default: all)")
    parser.add_argument("--again", action="store_true", help="forget the runs that were made before")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run that would end after these")
    parser.add_argument("--start", type=Path, help="(b) folder that keeps the imitated policy for later calls")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a bar is missed."""
    args = parse_args(argv)
    began = time.monotonic()
    name = f"async_vla_{args.part}{'_small' if args.small else ''}"
    book = Book(args.output / f"{name}.json", args.again)
    case = _case(args, book.sizes)
    ways = args.ways or _ways(args.part)
    book.open(case)
    for line in case.words():
        print(line, flush=True)
    complete, longest = True, 0.0
    for way, seed in plan(range(args.first_seed, args.seeds or SEEDS[args.part]), ways):
        if seed not in book.runs[way] and time.monotonic() - began + longest > args.seconds:
            complete = False
            break
        run_began = time.monotonic()
        book.measure(case, WAYS[way], seed)
        if seed in book.runs[way]:
            continue
        book.add(way, seed, run(case, way, seed))
        longest = max(longest, time.monotonic() - run_began)
        print(f"  seed {seed}, {way}: {book.runs[way][seed].line()}", flush=True)
    if not book.runs["sync"]:
        print("nothing to compare with: sync was not run")
        return 1
    summary = Summary(case.sizes, book.parts, book.runs)
    print("\n".join(summary.words()))
    missed = [] if args.small else summary.misses(BARS[args.part])
    book.close(summary, missed)
    draw(args.output, name, case.title, case.score_name, book.runs)
    for line in missed if complete else [*missed, "some runs are missing: time was up"]:
        print("MISSED:", line)
    return 1 if missed or not complete else 0


def _ways(part: str) -> list[str]:
    """Return what is run if nobody says otherwise.

    Weights on a GPU have nothing to win from another process, nor has a simulation that draws no pictures.
    """
    return [way for way in ORDER if not (WAYS[way].apart if part == "cpu" else WAYS[way].worker == "process")]


def plan(seeds: Sequence[int], ways: Sequence[str]) -> list[tuple[str, int]]:
    """Return what is run, in order: what is judged comes first for all seeds, the rest if time is left."""
    first, rest = ([way for way in ORDER if way in ways and (way in JUDGED) is judged] for judged in (True, False))
    return [(way, seed) for block in (first, rest) for seed in seeds for way in block]


class Book:
    """The file of results: runs are added one by one, and found again by the next call."""

    def __init__(self, path: Path, again: bool) -> None:
        self.path = path
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not again else {}
        self.sizes = Sizes(**found["sizes"]) if found else None
        parts = found.get("parts", {})
        if any("inference" in times for times in parts.values()):
            raise SystemExit(f"{path} holds stage times of another version: --again begins anew, or choose --output")
        self.parts = {kind: {int(s): Stages(**t) for s, t in times.items()} for kind, times in parts.items()}
        written = found.get("runs", {})
        self.runs = {way: {int(s): Outcome(**o) for s, o in written.get(way, {}).items()} for way in WAYS}
        self._content = found

    def open(self, case: Any) -> None:
        """Begin to write, or go on."""
        self._content["machine"] = machine(case.packages) | case.machine()
        self._content["what"] = case.words()
        self._content["sizes"] = dataclasses.asdict(case.sizes)

    def measure(self, case: Any, way: Way, seed: int) -> None:
        """Time the stages of one of several groups, beside the runs that they are compared with."""
        if way.groups > 1 and seed not in self.parts.setdefault(way.kind, {}):
            self.parts[way.kind][seed] = measure_stages(case, way)

    def add(self, way: str, seed: int, outcome: Outcome) -> None:
        """Write down a run."""
        self.runs[way][seed] = outcome
        self._write()

    def close(self, summary: Summary, missed: list[str]) -> None:
        """Write down what the runs come to."""
        self._content["summary"] = [dataclasses.asdict(row) for row in summary.rows]
        self._content["missed"] = missed
        self._write()

    def _write(self) -> None:
        times = self.parts.items()
        self._content["parts"] = {kind: {s: dataclasses.asdict(t) for s, t in of.items()} for kind, of in times}
        self._content["runs"] = {w: {s: o.to_dict() for s, o in runs.items()} for w, runs in self.runs.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self._content, indent=1) + "\n")


def _case(args: argparse.Namespace, sizes: Sizes | None) -> Any:
    """Return what is run; sizes that were chosen by an earlier call stay."""
    if args.part == "cpu":
        from benchmarks.async_vla_cpu import RemoteInference

        return RemoteInference(args.rollouts or 12, sizes)
    from benchmarks.async_vla_gpu import CameraVLA
    from benchmarks.async_vla_task import LARGE, SMALL

    return CameraVLA(SMALL if args.small else LARGE, sizes, args.rollouts, args.start)


if __name__ == "__main__":
    sys.exit(main())
