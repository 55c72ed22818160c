"""One PPO update and advantages alone, against other libraries, all in one run.

    pip install -e '.[peers]'
    python -m benchmarks.rl

The update is that of 65,536 transitions (1024 envs x 64 steps), observations of 48 and actions of 12 numbers, two
networks with two hidden layers of 256 and tanh, 5 epochs of 4 minibatches. Advantages are those of [256, 1024]. The
tables, and ``results/rl.json``, give medians over interleaved rounds; the bars are checked at the end, and the exit
status is 1 if one of them is missed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks import rl_candidates as candidates
from benchmarks.timing import Rounds, interleave, machine
from embodichain.extras import available

OURS, FLOOR, BARE = "embodichain", "forward and backward alone", "bare loop"
SB3, RSL_RL, SKRL, TORCHRL = "Stable-Baselines3", "rsl_rl", "skrl", "TorchRL"
PEERS = {SB3: "stable_baselines3", RSL_RL: "rsl_rl", SKRL: "skrl", TORCHRL: "torchrl"}
DISTRIBUTIONS = {SB3: "stable-baselines3", RSL_RL: "rsl-rl-lib", SKRL: "skrl", TORCHRL: "torchrl"}
PACKAGES = ("torch", "numpy", "tensordict")


@dataclass(frozen=True)
class Args:
    """What to measure."""

    parts: tuple[Literal["update", "gae", "memory"], ...] = ("update", "gae", "memory")
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
class Bar:
    """A promise: a ratio that has to be reached."""

    text: str
    wanted: float
    ratio: float
    quiet: bool

    @property
    def holds(self) -> bool:
        return self.ratio >= self.wanted


def installed() -> list[str]:
    """Return the names of the peers that are installed."""
    return [name for name, module in PEERS.items() if available(module)]


def measure(made: dict[str, Callable[[], object]], window: float, args: Args, progress: Progress, title: str) -> Rounds:
    """Time all candidates in turn; a unit of work is one call."""
    torch.set_num_threads(args.torch_threads)
    bar = progress.add_task(title, total=args.rounds * len(made))
    units = dict.fromkeys(made, 1.0)
    return interleave(made, units, args.rounds, window, args.patience, lambda: progress.advance(bar))


def measure_update(args: Args, progress: Progress) -> tuple[Rounds, list[Bar]]:
    """Time one update by everybody."""
    rows = candidates.data()
    makers = {OURS: candidates.ours, FLOOR: candidates.forward_backward, BARE: candidates.bare_loop}
    makers |= {name: getattr(candidates, PEERS[name]) for name in installed()}
    rounds = measure({name: make(rows) for name, make in makers.items()}, 1.0, args, progress, "update")
    promises = [
        Bar(
            "update: within 10% of forward and backward alone",
            1 / 1.1,
            rounds.ratio(OURS, FLOOR),
            rounds.is_quiet(OURS, FLOOR),
        )
    ]
    for name in (BARE, *installed()):
        promises.append(Bar(f"update: faster than {name}", 1.0, rounds.ratio(OURS, name), rounds.is_quiet(OURS, name)))
    return rounds, promises


def measure_gae(args: Args, progress: Progress) -> tuple[Rounds, list[Bar]]:
    """Time advantages by everybody."""
    rows = candidates.data(candidates.GAE_STEPS, candidates.GAE_ENVS)
    makers = {OURS: candidates.gae_ours, "numpy loop": candidates.gae_numpy}
    makers |= {name: getattr(candidates, f"gae_{PEERS[name]}") for name in installed()}
    rounds = measure({name: make(rows) for name, make in makers.items()}, 0.3, args, progress, "advantages")
    ratio, quiet = rounds.ratio(OURS, "numpy loop"), rounds.is_quiet(OURS, "numpy loop")
    return rounds, [Bar("advantages: within 1.5 times the numpy loop", 1 / 1.5, ratio, quiet)]


def measure_memory() -> dict[str, float]:
    """Return, in MB, a rollout, one minibatch of it, and the most that an update has allocated besides the rollout."""
    rows = candidates.data()
    call = candidates.ours(rows)
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    rollout = sum(leaf.nbytes for leaf in candidates.rollout(rows).values())
    per_row = sum(
        _row(rows[key]) for key in ("observation", "action", "sample_log_prob", "value", "advantage", "return")
    )
    return {
        "rollout": rollout / 2**20,
        "minibatch": per_row * candidates.ROWS / candidates.MINIBATCHES / 2**20,
        "peak of an update besides the rollout": peak / 2**20,
    }


def _row(tensor: Tensor) -> int:
    return tensor[0, 0].nbytes


def table(title: str, rounds: Rounds) -> Table:
    """Lay out milliseconds per call and the ratios to ours."""
    out = Table(title=title, title_justify="left")
    for column in ("", "ms", "fastest", "slowest", f"{OURS} is"):
        out.add_column(column, justify="left" if not column else "right")
    for name in sorted(rounds.windows, key=rounds.rate, reverse=True):
        row = rounds.summary(name)
        times = [f"{1e3 / float(row[key]):,.1f}" for key in ("median", "highest", "lowest")]
        ratio = "" if name == OURS else f"{rounds.ratio(OURS, name):.2f}x"
        out.add_row(name if row["quiet"] else f"{name} *", *times, ratio, style="bold" if name == OURS else "")
    return out


def main() -> int:
    """Measure, print, write, and tell whether the bars hold."""
    args, console = tyro.cli(Args, description=__doc__), Console()
    packages = (*PACKAGES, *(DISTRIBUTIONS[name] for name in installed()))
    found: dict[str, Any] = {"machine": machine(packages), "arguments": dataclasses.asdict(args) | {"output": None}}
    promises: list[Bar] = []
    with Progress(console=console, transient=True) as progress:
        for part, title in (("update", "One PPO update"), ("gae", "Advantages of [256, 1024]")):
            if part not in args.parts:
                continue
            rounds, bars = (measure_update if part == "update" else measure_gae)(args, progress)
            promises += bars
            found[part] = {
                name: {**rounds.summary(name), "ours_over_it": rounds.ratio(OURS, name)} for name in rounds.windows
            }
            console.print(table(title, rounds))
    if "memory" in args.parts:
        found["memory"] = measure_memory()
        console.print("Memory: " + ", ".join(f"{name} {size:.1f} MB" for name, size in found["memory"].items()))
    missing = [name for name in PEERS if name not in installed()]
    if missing:
        console.print(f"Not installed: {', '.join(missing)}; pip install 'embodichain-agents[peers]'")
    console.print("* other programs used the processor meanwhile")
    for bar in promises:
        verdict = "[green]holds[/]" if bar.holds else "[red]missed[/]"
        console.print(f"{verdict}  {bar.text}: {bar.ratio:.2f}{'' if bar.quiet else ' *'}", highlight=False)
    found["bars"] = [dataclasses.asdict(bar) | {"holds": bar.holds} for bar in promises]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(bar.holds for bar in promises) else 1


if __name__ == "__main__":
    sys.exit(main())
