"""PPO against other libraries, all in one run: an update, advantages, whole iterations; and what an update allocates.

    pip install -e '.[peers]'
    python -m benchmarks.rl
    python -m benchmarks.rl --parts cart_pole half_cheetah

* ``update``: 65,536 transitions (1024 envs x 64 steps), observations of 48 and actions of 12 numbers, two networks with
  two hidden layers of 256 and tanh, 5 epochs of 4 minibatches.
* ``gae``: advantages of [256, 1024].
* ``cart_pole``: collecting and learning on CartPole-v1, 64 envs x 128 steps, 4 epochs of 4 minibatches, hidden layers
  of 64; and on this package's own ``CartPoleRL`` with the same settings.
* ``half_cheetah``: the same on HalfCheetah-v5, 64 x 64, 10 epochs, hidden layers of 256; this package simulates it
  natively, everybody else through Gymnasium. Matrix products are most of it.
* ``half_cheetah_64``: the same with hidden layers of 64, as in the shipped config.
* ``push_cube``: collecting on ``PushCubeRL``, 256 envs, against its simulation alone.
* ``memory``: what an update allocates besides the rollout.

The tables, and ``results/rl.json``, give medians over interleaved rounds; parts that are not run keep their figures
there. The bars are checked at the end, and the exit status is 1 if one of them is missed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import rl_advantages, rl_end_to_end, rl_end_to_end_peers, rl_updates, rl_updates_peers
from benchmarks.rl_memory import measure_memory
from benchmarks.rl_work import CARTPOLE, HALF_CHEETAH, HALF_CHEETAH_64, Call, Work
from benchmarks.timing import Rounds, interleave, machine
from embodichain.extras import available

OURS, FLOOR, BARE, BARE_ONE = "embodichain", "forward and backward alone", "bare loop", "bare loop, one thread"
OURS_CART_POLE, NUMPY, SIMULATION = "embodichain on CartPoleRL", "numpy loop", "simulation alone"
PEERS = {"Stable-Baselines3": "stable_baselines3", "rsl_rl": "rsl_rl", "skrl": "skrl", "TorchRL": "torchrl"}
DISTRIBUTIONS = {"Stable-Baselines3": "stable-baselines3", "rsl_rl": "rsl-rl-lib", "skrl": "skrl", "TorchRL": "torchrl"}
PACKAGES = ("torch", "numpy", "tensordict", "gymnasium", "mujoco")
Part = Literal["update", "gae", "cart_pole", "half_cheetah", "half_cheetah_64", "push_cube", "memory"]


@dataclass(frozen=True)
class Args:
    """What to measure."""

    parts: tuple[Part, ...] = ("update", "gae", "cart_pole", "half_cheetah", "half_cheetah_64", "push_cube", "memory")
    """Which tables."""
    rounds: int = 5
    """Windows per candidate."""
    patience: float = 120.0
    """Seconds per table that may go into measuring again what other programs disturbed."""
    torch_threads: int = 2
    """Threads of torch, the same for all."""
    output: Path = Path(__file__).parent / "results" / "rl.json"
    """Where the figures go."""


@dataclass(frozen=True)
class Promise:
    """A ratio that has to be reached: of the rate of one candidate to that of another."""

    text: str
    wanted: float
    one: str
    other: str


@dataclass(frozen=True)
class Contest:
    """One table: who does the same work, and what is promised about it."""

    title: str
    makers: dict[str, Callable[[], Call]]
    promises: list[Promise]
    window: float = 1.0
    """Seconds of a window; two calls at least."""
    units: float | None = None
    """Environment steps of a call; without them, times are reported instead of rates."""


def installed() -> list[str]:
    """Return the names of the peers that are installed."""
    return [name for name, module in PEERS.items() if available(module)]


def update_contest() -> Contest:
    """One update by everybody."""
    rows = rl_updates.data()
    makers = {OURS: lambda: rl_updates.ours(rows), FLOOR: lambda: rl_updates.forward_backward(rows)}
    makers |= {BARE: lambda: rl_updates.bare_loop(rows)}
    makers |= {name: partial(getattr(rl_updates_peers, PEERS[name]), rows) for name in installed()}
    promises = [Promise("update: within 10% of forward and backward alone", 1 / 1.1, OURS, FLOOR)]
    promises += [Promise(f"update: faster than {name}", 1.0, OURS, name) for name in (BARE, *installed())]
    return Contest("One PPO update", makers, promises)


def gae_contest() -> Contest:
    """Advantages by everybody."""
    rows = rl_updates.data(rl_advantages.STEPS, rl_advantages.ENVS)
    makers = {OURS: lambda: rl_advantages.ours(rows), NUMPY: lambda: rl_advantages.numpy_loop(rows)}
    makers |= {name: partial(getattr(rl_advantages, PEERS[name]), rows) for name in installed()}
    promise = Promise("advantages: within 1.5 times the numpy loop", 1 / 1.5, OURS, NUMPY)
    return Contest("Advantages of [256, 1024]", makers, [promise], window=0.3)


def training_contest(work: Work) -> Contest:
    """Whole iterations by everybody."""
    makers: dict[str, Callable[[], Call]] = {OURS: lambda: rl_end_to_end.ours(work)}
    makers |= {BARE: lambda: rl_end_to_end.BareLoop(work), BARE_ONE: lambda: rl_end_to_end.BareLoop(work, threads=1)}
    makers |= {name: partial(getattr(rl_end_to_end_peers, PEERS[name]), work) for name in installed()}
    promises = [Promise(f"{work.env}: not below the {name}", 1.0, OURS, name) for name in (BARE, BARE_ONE)]
    if work.env == HALF_CHEETAH.env:
        promises += [
            Promise(f"{work.env}: 1.7 times the rate of {name} on Gymnasium's own", 1.7, OURS, name)
            for name in installed()
        ]
    if work is CARTPOLE:
        makers[OURS_CART_POLE] = lambda: rl_end_to_end.ours_cart_pole(work)
        promises += [
            Promise(f"CartPoleRL: 2.5 times the rate of {name} on {work.env}", 2.5, OURS_CART_POLE, name)
            for name in installed()
        ]
    return Contest(
        f"PPO on {work.env}, layers of {work.width}, steps per second", makers, promises, units=work.transitions
    )


def push_cube_contest() -> Contest:
    """Collection on our own task, with and without a policy."""
    makers = {OURS: rl_end_to_end.push_cube_collection, SIMULATION: rl_end_to_end.push_cube_simulation}
    promise = Promise("PushCubeRL: collection at 80% of simulation alone", 0.8, OURS, SIMULATION)
    size = rl_end_to_end.PUSH_CUBE
    units = size["num_envs"] * size["num_steps"]
    return Contest("Collection on PushCubeRL, steps per second", makers, [promise], units=units)


CONTESTS: dict[str, Callable[[], Contest]] = {
    "update": update_contest,
    "gae": gae_contest,
    "cart_pole": lambda: training_contest(CARTPOLE),
    "half_cheetah": lambda: training_contest(HALF_CHEETAH),
    "half_cheetah_64": lambda: training_contest(HALF_CHEETAH_64),
    "push_cube": push_cube_contest,
}


def measure(contest: Contest, args: Args, progress: Progress) -> Rounds:
    """Time all candidates in turn."""
    torch.set_num_threads(args.torch_threads)
    made = {name: make() for name, make in contest.makers.items()}
    torch.set_num_threads(args.torch_threads)  # some libraries change it
    bar = progress.add_task(contest.title, total=args.rounds * len(made))
    units = dict.fromkeys(made, contest.units or 1.0)
    return interleave(made, units, args.rounds, contest.window, args.patience, lambda: progress.advance(bar))


def table(contest: Contest, rounds: Rounds) -> Table:
    """Lay out milliseconds per call or steps per second, and the ratios to ours."""
    out = Table(title=contest.title, title_justify="left")
    for column in ("", "ms" if contest.units is None else "1/s", "fastest", "slowest", f"{OURS} is"):
        out.add_column(column, justify="left" if not column else "right")
    for name in sorted(rounds.windows, key=rounds.rate, reverse=True):
        row = rounds.summary(name)
        rates = [float(row[key]) for key in ("median", "highest", "lowest")]
        cells = [f"{1e3 / rate:,.1f}" if contest.units is None else f"{rate:,.0f}" for rate in rates]
        ratio = "" if name == OURS else f"{rounds.ratio(OURS, name):.2f}x"
        out.add_row(name if row["quiet"] else f"{name} *", *cells, ratio, style="bold" if name == OURS else "")
    return out


def judge(promises: list[Promise], rounds: Rounds) -> list[dict[str, Any]]:
    """Return the bars: what was wanted, what was reached, and whether it holds."""
    bars = []
    for promise in promises:
        ratio = rounds.ratio(promise.one, promise.other)
        quiet = rounds.is_quiet(promise.one, promise.other)
        bar = {"text": promise.text, "wanted": promise.wanted, "ratio": ratio, "quiet": quiet}
        bars.append(bar | {"holds": ratio >= promise.wanted})
    return bars


def main() -> int:
    """Measure, print, write, and tell whether the bars hold."""
    args, console = tyro.cli(Args, description=__doc__), Console()
    found: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    packages = (*PACKAGES, *(DISTRIBUTIONS[name] for name in installed()))
    settings = {"rounds": args.rounds, "torch_threads": args.torch_threads}
    held = True
    for part in args.parts:
        if part == "memory":
            found[part] = measure_memory()
            console.print("Memory: " + ", ".join(f"{name} {size:.1f} MB" for name, size in found[part].items()))
            continue
        contest = CONTESTS[part]()
        with Progress(console=console, transient=True) as progress:
            rounds = measure(contest, args, progress)
        console.print(table(contest, rounds))
        bars = judge(contest.promises, rounds)
        for bar in bars:
            verdict = "[green]holds[/]" if bar["holds"] else "[red]missed[/]"
            console.print(
                f"{verdict}  {bar['text']}: {bar['ratio']:.2f}{'' if bar['quiet'] else ' *'}", highlight=False
            )
        held &= all(bar["holds"] for bar in bars)
        rates = {name: rounds.summary(name) | {"ours_over_it": rounds.ratio(OURS, name)} for name in rounds.windows}
        found[part] = {"machine": machine(packages), "arguments": settings, "rates": rates, "bars": bars}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(found, indent=2) + "\n")
    missing = [name for name in PEERS if name not in installed()]
    if missing:
        console.print(f"Not installed: {', '.join(missing)}; pip install 'embodichain-agents[peers]'")
    console.print("* other programs used the processor meanwhile")
    args.output.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
