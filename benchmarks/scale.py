"""Ray against local processes at the same number of workers, and two ranks against one, in the same run.

    python -m benchmarks.scale [--parts vector camera rl ingest ranks] [--rounds 5]

*Streaming*: workers write episodes of ``PushCubeRL`` as fast as they can, 32 envs of numbers or 4 with a 96 x 96 camera
each, one thread per worker; simulated steps per second of all workers. *Rollouts*: a learner takes rollouts of 64 envs
x 32 steps and publishes new weights after each, without learning anything in between; two local workers are two
collectors whose rollouts it takes in turn. Both sides are there all the time and take turns at working: who is not
asked for anything stands still. *Ingest* (no bar): see ``scale_ingest.py``. *Ranks*: see ``scale_ranks.py``. The exit
status is 1 if a bar is missed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.scale_family import family_cpu
from benchmarks.timing import Rounds, Window, cores, machine, total_cpu
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.shared_buffer import Work
from embodichain.agents.processes.ray_backend import PlacementCfg, RayCluster
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.train import EnvMaker

RESULTS = Path(__file__).parent / "results" / "scale.json"
LOCAL, RAY = "local processes", "Ray"
CAMERA = {"name": "front", "height": 96, "width": 96, "pos": [1.3, 0.0, 0.6], "lookat": [0.55, 0.0, 0.05]}
WITH_CAMERA = {"num_envs": 4, "env": {"observations": {"cameras": [CAMERA]}}}
BARS = {"vector": 0.85, "camera": 0.70, "rl": 0.85}
NUM_ENVS, NUM_STEPS = 64, 32
Row = dict[str, Any]


@dataclass(frozen=True)
class Args:
    """What to measure."""

    parts: tuple[str, ...] = ("vector", "camera", "rl", "ingest", "ranks")
    """Which parts: vector, camera, rl, ingest, ranks."""
    rounds: int = 5
    """Windows per candidate."""
    seconds: float = 3.0
    """Length of a window."""
    output: Path | None = RESULTS
    """Where the figures go, as JSON; parts that were not measured keep theirs."""


# --- streaming ------------------------------------------------------------------------------------------------------


def stream_settings(camera: bool, workers: int, kind: str) -> OnlineDataEngineCfg:
    """Return the settings of an engine whose workers are never done while somebody samples."""
    gym_config = {"id": "PushCubeRL", "num_envs": 32, "num_threads": 1} | (WITH_CAMERA if camera else {})
    return OnlineDataEngineCfg(
        buffer_size=64,
        max_episode_steps=100,
        gym_config=gym_config,
        refill="continuous",
        refill_threshold=1,
        num_workers=workers,
        workers="ray" if kind == RAY else "local",
        progress=False,
    )


def stream_window(engine: OnlineDataEngine, seconds: float) -> float:
    """Sample so much that workers never rest, for a while; return the steps per second they simulated."""
    work = engine._sampling().buffer.workers

    def sample_for(duration: float) -> float:
        begin = time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < duration:
            engine.sample_batch(64, 1, reuse_outputs=True)
            time.sleep(0.01)
        return elapsed

    sample_for(0.5)
    before = int(work[:, Work.FRAMES].sum())
    elapsed = sample_for(seconds)
    rate = (int(work[:, Work.FRAMES].sum()) - before) / elapsed
    _wait_until_still(lambda: int(work[:, Work.FRAMES].sum()))
    return rate


@contextmanager
def streams(camera: bool, workers: int) -> Iterator[dict[str, Callable[[float], float]]]:
    """Start both kinds of workers; return how each is measured."""
    with ExitStack() as stack:
        engines = {kind: OnlineDataEngine(stream_settings(camera, workers, kind)) for kind in (LOCAL, RAY)}
        for engine in engines.values():
            stack.enter_context(engine)
        yield {kind: partial(stream_window, engine) for kind, engine in engines.items()}


# --- rollouts -------------------------------------------------------------------------------------------------------


def rollout_window(collectors: list[AsyncCollector], seconds: float) -> float:
    """Take rollouts for a while; return steps per second."""

    def take(number: int) -> None:
        collector = collectors[number % len(collectors)]
        collector.collect(NUM_STEPS)
        collector.policy.version += 1
        collector.publish()

    ahead = sum(collector.cfg.max_policy_lag + 1 for collector in collectors)
    for number in range(ahead + 2):  # what lay ready, and what is under way
        take(number)
    begin, number = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        take(number)
        number += 1
    rate = number * NUM_ENVS * NUM_STEPS / (time.perf_counter() - begin)
    time.sleep(0.5)  # for what is under way
    return rate


@contextmanager
def rollouts(workers: int) -> Iterator[dict[str, Callable[[float], float]]]:
    """Start both kinds of collectors; return how each is measured."""
    maker = EnvMaker({"id": "PushCubeRL", "num_envs": NUM_ENVS, "num_threads": 1, "seed": 0})
    env = maker()

    def collector(**settings: Any) -> AsyncCollector:
        policy = build_policy({"name": "actor_critic"}, env.observation_space, env.action_space, torch.device("cpu"))
        cfg = AsyncCfg(num_steps=NUM_STEPS, kl_rows=0, num_threads=1, **settings)
        buffer = VLABuffer((cfg.max_policy_lag + 1) * NUM_ENVS * NUM_STEPS)
        made = AsyncCollector(maker, policy, buffer, cfg=cfg)
        made.reset(seed=0)
        return made

    with ExitStack() as stack:
        local = [collector(worker="process", max_policy_lag=2) for _ in range(workers)]
        cluster = collector(worker="ray", num_workers=workers, max_policy_lag=3 * workers - 1)
        for each in (*local, cluster):
            stack.enter_context(each)
        yield {LOCAL: partial(rollout_window, local), RAY: partial(rollout_window, [cluster])}
    env.close()


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(candidates: dict[str, Callable[[float], float]], rounds: int, seconds: float) -> Rounds:
    """Let both sides work in turn."""
    result = Rounds({name: [] for name in candidates}, min_quiet=min(5, rounds))
    names = list(candidates)
    for number in range(rounds):
        for name in names[number % 2 :] + names[: number % 2]:
            own, busy, begin = family_cpu(), total_cpu(), time.perf_counter()
            rate = candidates[name](seconds)
            elapsed = time.perf_counter() - begin
            foreign = max(0.0, (total_cpu() - busy) - (family_cpu() - own)) / (elapsed * cores())
            result.windows[name].append(Window(rate, foreign))
    return result


def rows_of(part: str, args: Args) -> list[Row]:
    """Measure one part with one and with two workers."""
    made = []
    for workers in (1, 2):
        both = rollouts(workers) if part == "rl" else streams(part == "camera", workers)
        with both as candidates:
            result = measure(candidates, args.rounds, args.seconds)
        name = {"vector": "streaming, numbers", "camera": "streaming, a camera", "rl": "rollouts"}[part]
        label = f"{name}, {workers} worker" + "s" * (workers > 1)
        quiet = result.is_quiet(LOCAL, RAY)
        common = {"unit": "steps/s", "quiet": quiet}
        made.append({"name": f"{label}, {LOCAL}", "rate": result.rate(LOCAL), "ratio": 1.0, "bar": None, "holds": True})
        made[-1] |= common
        ratio = result.ratio(RAY, LOCAL)
        row = {"name": f"{label}, {RAY}", "rate": result.rate(RAY), "ratio": ratio, "bar": BARS[part]}
        made.append(row | {"holds": ratio >= BARS[part]} | common)
    return made


def ingest_rows(args: Args) -> list[Row]:
    """Measure how much one engine can take in."""
    from benchmarks.scale_ingest import ingest

    made = []
    for name, camera, episodes in (("numbers", False, 256), ("a camera", True, 8)):
        figures = ingest(stream_settings(camera, 1, RAY), episodes, args.seconds)
        common = {"unit": "episodes/s", "ratio": 1.0, "bar": None, "holds": True, "quiet": True}
        made.append({"name": f"ingest, {name}", "rate": figures["episodes_per_second"], **common, **figures})
    return made


def _wait_until_still(count: Callable[[], int]) -> None:
    """Wait until nothing is written any more, so that the next one has the machine to itself."""
    before, deadline = -1, time.perf_counter() + 10
    while count() != before and time.perf_counter() < deadline:
        before = count()
        time.sleep(0.6)


def show(rows: list[Row]) -> Table:
    """Return the rows as a table."""
    table = Table(title="scale")
    for column in ("", "rate", "ratio", "bar", "quiet"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        bar = "" if row["bar"] is None else f"{'met' if row['holds'] else 'MISSED'} ({row['bar']:.2f})"
        rate = f"{row['rate']:,.0f} {row['unit']}"
        table.add_row(row["name"], rate, f"{row['ratio']:.2f}", bar, "yes" if row["quiet"] else "no")
    return table


def main(args: Args) -> int:
    """Measure, print, write down; return the exit status."""
    torch.set_num_threads(1)
    measured: dict[str, list[Row]] = {}
    ours = [part for part in args.parts if part != "ranks"]
    if ours:
        cluster = RayCluster(None, 2, PlacementCfg())  # one Ray for all of them
        for part in ours:
            measured[part] = ingest_rows(args) if part == "ingest" else rows_of(part, args)
        cluster.close()
    if "ranks" in args.parts:
        from benchmarks.scale_ranks import rows as rank_rows

        measured["ranks"] = rank_rows(args.rounds)
    rows = [row for part in measured.values() for row in part]
    Console(width=120).print(show(rows))
    if args.output is not None:
        kept = json.loads(args.output.read_text())["parts"] if args.output.exists() else {}
        parts = kept | {
            name: {"machine": machine(("torch", "ray", "mujoco")), "rows": part} for name, part in measured.items()
        }
        args.output.write_text(json.dumps({"parts": parts}, indent=1) + "\n")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
