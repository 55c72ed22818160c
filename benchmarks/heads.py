"""Heads compared: demonstrations that go two ways, and clones that PPO and GRPO improve, with curves and figures.

::

    python -m benchmarks.heads                                        # everything, one run at a time
    python -m benchmarks.heads --parts two_way --jobs 15              # fifteen runs at a time, one core each
    python -m benchmarks.heads --parts reinforce --jobs 12 --output DIR
    python -m benchmarks.heads --merge OTHER/heads.json               # add the runs of another machine, and draw

``two_way``: the scripted expert of ``PushAroundRL`` pushes a cube round an obstacle, to the left or to the right, which
nothing observed tells. Each head imitates the same demonstrations in the same number of gradient steps.

``reinforce``: a clone of a few demonstrations of ``PushCubeRL`` is improved by PPO and by GRPO, with
``configs/agents/rl/push_cube/train_config_flow.json`` and ``train_config_flow_grpo.json``; beside the flow, a Gaussian
of the same size at equal samples.

``heads.json`` is written after every run; what is in it already is not run again. The exit code is 1 if a claim does
not hold, or if some of its runs are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.heads_report import summarize, write_report
from benchmarks.heads_runs import PARTS, Outcome
from benchmarks.timing import machine

ROOT = Path(__file__).parents[1]
SEEDS = {"two_way": 5, "reinforce": 3}
PACKAGES = ("torch", "mujoco", "gymnasium", "tensordict", "numpy")
Job = tuple[str, str, int]
"""Part, what is run in it, and the seed."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--names", nargs="+", help="only these of a part, such as flow or ppo_flow")
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds; default: 0 to 4 for two_way, 0 to 2 for reinforce")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--share", type=float, default=1.0, help="part of the training, for a trial")
    parser.add_argument("--again", action="store_true", help="run what is in the results already, too")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], help="only add the runs of these results")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    return parser.parse_args(argv)


class Results:
    """``heads.json``: ``runs``, the ``commands`` that made them, and figures by part."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: dict[Job, Outcome] = {}
        self.commands: list[dict[str, Any]] = []
        if file.exists():
            self.merge(file)

    def merge(self, file: Path) -> None:
        """Add the runs of a file."""
        data = json.loads(file.read_text())
        self.runs |= {(run["part"], run["name"], run["seed"]): Outcome(**run) for run in data["runs"]}
        self.commands += [command for command in data["commands"] if command not in self.commands]

    def add(self, outcome: Outcome, command: str) -> None:
        """Take in a run and write the file."""
        made = {"command": command, **machine(PACKAGES)}
        self.commands += [] if made in self.commands else [made]
        self.runs[outcome.part, outcome.name, outcome.seed] = outcome
        self.write({})

    def of_part(self, part: str) -> list[Outcome]:
        """Return the runs of a part, in the order in which it names them."""
        names = PARTS[part]
        return sorted(
            (run for run in self.runs.values() if run.part == part), key=lambda r: (names.index(r.name), r.seed)
        )

    def write(self, figures: dict[str, Any]) -> None:
        """Write everything, whole or not at all."""
        runs = [asdict(run) for part in PARTS for run in self.of_part(part)]
        head = json.dumps({"parts": figures, "commands": self.commands}, indent=1)
        lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        partial.write_text(f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n')
        partial.replace(self.file)


def run_all(jobs: Sequence[Job], at_once: int, share: float) -> Iterator[Outcome]:
    """Run all jobs, so many at a time, each in a process with a core of its own; yield what each gave."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    waiting, free = list(jobs), list(range(at_once))
    running: list[tuple[Job, int, Path, subprocess.Popen[bytes]]] = []
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as home:
        try:
            while waiting or running:
                while waiting and free:
                    job, slot = waiting.pop(0), free.pop(0)
                    folder = Path(home) / "_".join(map(str, job))
                    folder.mkdir()
                    words = ["-m", "benchmarks.heads_runs", *map(str, job), str(folder), "--share", str(share)]
                    with (folder / "log").open("wb") as log:
                        process = subprocess.Popen(
                            [sys.executable, *words], cwd=ROOT, env=variables, stdout=log, stderr=log
                        )
                    if cores:
                        os.sched_setaffinity(process.pid, [cores[slot % len(cores)]])
                    running.append((job, slot, folder, process))
                for entry in [entry for entry in running if entry[3].poll() is not None]:
                    running.remove(entry)
                    job, slot, folder, process = entry
                    free.append(slot)
                    if process.returncode == 0:
                        outcome = Outcome(**json.loads((folder / "outcome.json").read_text()))
                        print(f"{' '.join(map(str, job))}: {outcome.success}, {outcome.seconds[-1]:.0f} s", flush=True)
                        yield outcome
                    else:
                        tail = (folder / "log").read_text(errors="replace")[-2000:]
                        print(f"{job} failed with status {process.returncode}:\n{tail}", file=sys.stderr, flush=True)
                time.sleep(0.2)
        finally:
            for *_, process in running:
                process.kill()
                process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a claim does not hold."""
    args = parse_args(argv)
    results = Results(args.output / "heads.json")
    for file in args.merge:
        results.merge(file)
    if not args.merge:
        wanted = [
            (part, name, seed)
            for part in args.parts
            for seed in args.seeds or range(SEEDS[part])
            for name in reversed(PARTS[part])  # tokens take longest
            if args.names is None or name in args.names
        ]
        todo = [job for job in wanted if args.again or job not in results.runs]
        command = shlex.join(["python", "-m", "benchmarks.heads", *(sys.argv[1:] if argv is None else argv)])
        for outcome in run_all(todo, args.jobs, args.share):
            results.add(outcome, command)
    figures = {part: summarize(part, results.of_part(part), SEEDS[part]) for part in PARTS if results.of_part(part)}
    results.write(figures)
    write_report(args.output, figures, {part: results.of_part(part) for part in figures})
    return 0 if all(figures[part]["holds"] for part in args.parts if part in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
