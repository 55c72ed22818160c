"""Training on two ranks against training on one, in the same run.

    python -m benchmarks.scale_ranks

``PushCubeRL`` with PPO as its shipped config has it: 256 envs x 32 steps and minibatches of 2048, each rank on one
thread. *Two ranks* do twice the work per iteration, as torchrun starts them; *the same batch on two ranks* halves envs
and minibatches, so that what is learned is the same as on one; *two runs* know nothing of each other, and show what the
processor allows. A window is a few whole iterations of the trainer: collecting, updating, logging, and whatever ranks
tell each other. The exit status is 1 if the bar is missed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Rounds, Window, cores, machine, own_cpu, total_cpu

CONFIG = Path(__file__).parent.parent / "configs" / "agents" / "rl" / "push_cube" / "train_config.json"
ONE, TWO, SAME, APART = "one rank", "two ranks", "the same batch on two ranks", "two runs"
WANTED = 1.6
ITERATIONS = 7  # of a window; the first one warms up and is not timed


@dataclass(frozen=True)
class Args:
    """What to measure."""

    rounds: int = 5
    """Windows per candidate."""
    output: Path | None = None
    """Where the figures go, as JSON."""


@dataclass(frozen=True)
class Candidate:
    """A way to train."""

    runs: int
    ranks: int
    num_envs: int
    batch_size: int


CANDIDATES = {
    ONE: Candidate(1, 1, 256, 2048),
    TWO: Candidate(1, 2, 256, 2048),
    SAME: Candidate(1, 2, 128, 1024),
    APART: Candidate(2, 1, 256, 2048),
}


def rows(rounds: int) -> list[dict[str, Any]]:
    """Return one row per candidate: ``name, rate`` (steps/s), ``ratio`` to one rank, ``bar``, ``holds``, ``quiet``.

    ``bar`` is ``None`` where nothing is promised: for all but two ranks, and on a single core.
    """
    result = measure(rounds)
    made = []
    for name in CANDIDATES:
        bar = WANTED if name == TWO and cores() >= 2 else None
        ratio = result.ratio(name, ONE)
        row = {"name": f"PPO, {name}", "unit": "steps/s", "rate": result.rate(name), "ratio": ratio, "bar": bar}
        made.append(row | {"holds": bar is None or ratio >= bar, "quiet": result.is_quiet(name, ONE)})
    return made


def measure(rounds: int) -> Rounds:
    """Train in short windows, in turn."""
    result = Rounds({name: [] for name in CANDIDATES}, min_quiet=min(5, rounds))
    names = list(CANDIDATES)
    with tempfile.TemporaryDirectory() as folder, _workers(2) as pipes:
        for number in range(rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                run = Path(folder) / f"{number}_{names.index(name)}"
                result.windows[name].append(_window(pipes, CANDIDATES[name], run))
    return result


def _window(pipes: list[Connection], candidate: Candidate, run: Path) -> Window:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [(number, rank) for number in range(candidate.runs) for rank in range(candidate.ranks)]
    own, busy, begin = own_cpu(), total_cpu(), time.perf_counter()
    for pipe, (number, rank) in zip(pipes, places, strict=False):
        pipe.send((rank, candidate.ranks, port, _words(candidate, run / str(number))))
    for pipe, _ in zip(pipes, places, strict=False):
        pipe.recv()
    elapsed = time.perf_counter() - begin
    foreign = max(0.0, (total_cpu() - busy) - (own_cpu() - own)) / (elapsed * cores())
    return Window(sum(_rate(run / str(number)) for number in range(candidate.runs)), foreign)


def _words(candidate: Candidate, run: Path) -> list[str]:
    """Return what is different from the shipped config."""
    changes = {
        "trainer.num_envs": candidate.num_envs,
        "trainer.iterations": ITERATIONS,
        "trainer.enable_eval": False,
        "trainer.save_freq": 0,
        "trainer.run_dir": str(run),
        "trainer.gym_config.num_threads": 1,
        "algorithm.cfg.batch_size": candidate.batch_size,
    }
    return [word for name, value in changes.items() for word in (f"--{name}", str(value))]


def _rate(run: Path) -> float:
    """Return the steps per second of a run, without its first iteration."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    return (last["step"] - first["step"]) / (last["time/total_seconds"] - first["time/total_seconds"])


@contextmanager
def _workers(count: int) -> Iterator[list[Connection]]:
    """Start processes that train on command."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    for _ in range(count):
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there,), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(10)


def _work(pipe: Connection) -> None:
    import torch

    from embodichain.agents.rl.train import train_from_config

    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        rank, count, port, words = task
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        train_from_config(CONFIG, words, console=Console(quiet=True))
        pipe.send(True)


def main() -> int:
    """Measure, print and judge."""
    args = tyro.cli(Args, description=__doc__)
    measured = rows(args.rounds)
    table = Table("training", "steps/s", "to one rank", "bar")
    for row in measured:
        bar = "" if row["bar"] is None else f">= {row['bar']}x: {'yes' if row['holds'] else 'MISSED'}"
        table.add_row(row["name"], f"{row['rate']:,.0f}{'' if row['quiet'] else ' *'}", f"{row['ratio']:.2f}x", bar)
    console = Console()
    console.print(table)
    if not all(row["quiet"] for row in measured):
        console.print("* other programs used the processor meanwhile")
    if args.output is not None:
        about = machine(("torch", "tensordict", "mujoco"))
        args.output.write_text(json.dumps({"machine": about, "rows": measured}, indent=1) + "\n")
    return 0 if all(row["holds"] for row in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
