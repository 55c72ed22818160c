"""Environment steps per second against raw MuJoCo and Gymnasium's vector environments, all in one run.

    python -m benchmarks.sim
    python -m benchmarks.sim --tasks --no-frames        # only Gymnasium's MuJoCo suite

One step is control, physics (ten substeps in the package's own tasks), observation, reward and reset. The tables, and
``results/sim.json``, give medians over interleaved rounds; what is not measured keeps its figures there. The bars are
checked at the end, and the exit status is 1 if one of them is missed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import sim_candidates as candidates
from benchmarks.sim_frames import frames
from benchmarks.timing import Rounds, cores, interleave, machine
from embodichain.envs import MUJOCO_SUITE
from embodichain.errors import RenderingError

OURS, ROLLOUT, BATCH, LOOP = "embodichain", "mujoco.rollout.Rollout", "mujoco.batch.Batch", "Python loop of mj_step"
SYNC, ASYNC, BARE = "Gymnasium make_vec, sync", "Gymnasium make_vec, async", "Gymnasium sync, bare"
PACKAGES = ("embodichain-agents", "mujoco", "torch", "gymnasium", "numpy", "tensordict")


@dataclass(frozen=True)
class Args:
    """What to measure."""

    tasks: tuple[str, ...] = ("PushCubeRL", "CartPoleRL")
    """Tasks, of those that ``plain_envs.py`` knows."""
    suite: tuple[str, ...] = tuple(MUJOCO_SUITE)
    """Environments of Gymnasium's MuJoCo suite, as they are simulated here and by Gymnasium."""
    num_envs: tuple[int, ...] = (64, 1024)
    """Batch sizes; Gymnasium runs at those up to ``max_gymnasium``."""
    max_gymnasium: int = 64
    """Largest batch for Gymnasium, which needs an MjData of 15 MB, or a process, per env."""
    rounds: int = 7
    """Windows per candidate."""
    window: float = 0.6
    """Seconds per window."""
    patience: float = 60.0
    """Seconds per table that may go into measuring again what other programs disturbed."""
    torch_threads: int = 1
    """Threads of torch; the simulation has its own."""
    frames: bool = True
    """Also measure rendering."""
    output: Path = Path(__file__).parent / "results" / "sim.json"
    """Where the figures go."""


@dataclass(frozen=True)
class Bar:
    """A promise: a ratio that has to be reached."""

    text: str
    wanted: float
    ratio: float
    quiet: bool

    @property
    def holds(self) -> bool:
        return self.ratio >= self.wanted


def measure(task: str, num_envs: int, args: Args, progress: Progress) -> Rounds:
    """Time all candidates for one task and batch size."""
    if task in MUJOCO_SUITE:
        made = suite_candidates(task, num_envs, args)
    else:
        made = task_candidates(task, num_envs, args)
    bar = progress.add_task(f"{task}, {num_envs} envs", total=args.rounds * len(made))
    try:
        return interleave(
            {name: one.step for name, one in made.items()},
            {name: one.num_envs for name, one in made.items()},
            args.rounds,
            args.window,
            args.patience,
            lambda: progress.advance(bar),
        )
    finally:
        for one in made.values():
            one.close()


def task_candidates(task: str, num_envs: int, args: Args) -> dict[str, candidates.Candidate]:
    """Return who simulates a task of this package."""
    env = candidates.make_env(task, num_envs)
    candidates.check_same_task(task, env)
    recording = candidates.record(env)
    made = {OURS: candidates.embodichain_env(env)}
    if num_envs <= args.max_gymnasium:
        made[ASYNC] = candidates.gymnasium_vector(task, env, "async")  # first: it forks
        made[SYNC] = candidates.gymnasium_vector(task, env, "sync")
        made[BARE] = candidates.bare_vector(task, env)
    made[ROLLOUT] = candidates.raw_rollout(recording, cores())
    made[BATCH] = candidates.raw_batch(recording, cores())
    made[LOOP] = candidates.python_loop(recording)
    return made


def suite_candidates(id: str, num_envs: int, args: Args) -> dict[str, candidates.Candidate]:
    """Return who simulates an environment of Gymnasium's suite."""
    env = candidates.make_suite_env(id, num_envs)
    recording = candidates.record(env)
    made = {OURS: candidates.embodichain_env(env), BATCH: candidates.raw_batch(recording, cores())}
    if num_envs <= args.max_gymnasium:
        made[SYNC] = candidates.gymnasium_suite(id, env)
    return made


def bars(task: str, num_envs: int, rounds: Rounds) -> list[Bar]:
    """Return the promises about this task and batch size."""
    if task in MUJOCO_SUITE:
        wanted, other = (0.85, BATCH) if num_envs >= 1024 else (4.0, SYNC)
        if other not in rounds.windows:
            return []
        text = f"{task}, {num_envs} envs: at least {wanted:g} times {other}"
        return [Bar(text, wanted, rounds.ratio(OURS, other), rounds.is_quiet(OURS, other))]
    if num_envs >= 1024:
        text = f"{task}, {num_envs} envs: at least 85% of {ROLLOUT}"
        return [Bar(text, 0.85, rounds.ratio(OURS, ROLLOUT), rounds.is_quiet(OURS, ROLLOUT))]
    peers = [name for name in (SYNC, ASYNC) if name in rounds.windows]
    if not peers:
        return []
    fastest = max(peers, key=rounds.rate)
    text = f"{task}, {num_envs} envs: at least 2.3 times {fastest}, the faster of the two"
    return [Bar(text, 2.3, rounds.ratio(OURS, fastest), rounds.is_quiet(OURS, fastest))]


def table(title: str, rounds: Rounds, ours: str, unit: str) -> Table:
    """Lay out the medians and the ratios to ours."""
    out = Table(title=title, title_justify="left")
    for column in ("", unit, "lowest", "highest", f"{ours} is"):
        out.add_column(column, justify="left" if not column else "right")
    for name in sorted(rounds.windows, key=rounds.rate, reverse=True):
        row, ratio = rounds.summary(name), rounds.ratio(ours, name)
        label = name if row["quiet"] else f"{name} *"
        values = [f"{row[key]:,.0f}" for key in ("median", "lowest", "highest")]
        out.add_row(label, *values, "" if name == ours else f"{ratio:.2f}x", style="bold" if name == ours else "")
    return out


def results(rounds: Rounds, ours: str) -> dict[str, Any]:
    """Return figures for the file."""
    return {name: {**rounds.summary(name), "ours_over_it": rounds.ratio(ours, name)} for name in rounds.windows}


def write(found: dict[str, Any], file: Path) -> None:
    """Write the figures."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=2) + "\n")


def main() -> int:
    """Measure, print, write, and tell whether the bars hold."""
    args, console = tyro.cli(Args, description=__doc__), Console()
    torch.set_num_threads(args.torch_threads)
    found: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    promises: list[Bar] = []
    for part, names in (("tasks", args.tasks), ("suite", args.suite)):
        if not names:
            continue
        made: dict[str, Any] = {"machine": machine(PACKAGES), "arguments": dataclasses.asdict(args) | {"output": None}}
        kept: list[Bar] = []
        found[part] = made
        with Progress(console=console, transient=True) as progress:
            for num_envs in args.num_envs:
                for task in names:
                    rounds = measure(task, num_envs, args, progress)
                    kept += bars(task, num_envs, rounds)
                    made[f"{task}, {num_envs} envs"] = results(rounds, OURS)
                    made["bars"] = [dataclasses.asdict(bar) | {"holds": bar.holds} for bar in kept]
                    console.print(table(f"{task}, {num_envs} envs", rounds, OURS, "env steps/s"))
                    write(found, args.output)  # whatever ends the benchmark, what was measured is there
        promises += kept
    if args.frames:
        try:
            drawn = frames(args.rounds, args.window, args.patience)
            found["frames of 96x96"] = results(drawn, "lean")
            console.print(table("PushCubeRL, frames of 96x96", drawn, "lean", "frames/s"))
        except RenderingError as error:
            console.print(f"No frames were drawn: {str(error).splitlines()[0]}")
    console.print("* other programs used the processor meanwhile")
    for bar in promises:
        verdict = "[green]holds[/]" if bar.holds else "[red]missed[/]"
        console.print(f"{verdict}  {bar.text}: {bar.ratio:.2f}{'' if bar.quiet else ' *'}", highlight=False)
    write(found, args.output)
    return 0 if all(bar.holds for bar in promises) else 1


if __name__ == "__main__":
    sys.exit(main())
