"""How fast the data stream is, every number beside the limit or the peer it is measured against.

    python -m benchmarks.stream                      # everything; TorchRL too if it is installed (extra "peers")
    python -m benchmarks.stream --only sampling --out results.json

Buffer: 256 episodes x 300 steps of float32 state 14, action 14, obs 32; with images also one uint8 3x96x96 camera. The
limit is ``memcpy``: as many bytes as a batch has, copied from a random place of the same shared segment into the same
destination. Contenders take turns in short windows, and a ratio is the median over the turns. What runs in one process
is timed by the CPU time of that process, so that other programs on the machine count as little as they can; loaders
with workers are timed by the clock on the wall. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from benchmarks.stream_contenders import ROWS, STEPS, gather, indexing, make_buffer, make_reader, memcpy, torchrl
from benchmarks.timing import machine
from embodichain.agents.datasets import OnlineDataset
from embodichain.agents.datasets.frames import Episode, EpisodeSource
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.shared_buffer import Control, Read, SharedBuffer, State, Work
from embodichain.agents.engine.sources import open_source
from embodichain.agents.engine.worker import Worker
from embodichain.envs.registration import make
from embodichain.extras import available

CASES = [("vector", 32, 64), ("vector", 256, 16), ("image", 32, 64)]
TARGETS = {("vector", 32): 0.35, ("vector", 256): 0.35, ("image", 32): 0.90}

Contenders = dict[str, Callable[[], Any]]
results: list[dict[str, Any]] = []


def turns(
    contenders: Contenders, rounds: int = 9, seconds: float = 0.12, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Return calls per second of every contender in every round."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for name, call in contenders.items():
            count, started = 0, clock()
            while (spent := clock() - started) < seconds or count < 2:
                call()
                count += 1
            rates[name].append(count / spent)
    return rates


def ratio(rates: dict[str, list[float]], name: str, base: str) -> float:
    """Return the median over the rounds of ``name``'s rate as a multiple of ``base``'s."""
    return statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True))


def report(
    what: str, rates: dict[str, list[float]], base: str, unit: str, targets: dict[str, float] | None = None
) -> None:
    """Print one line per contender, and remember it."""
    print(f"\n{what}")
    for name, values in rates.items():
        times, goal = ratio(rates, name, base), (targets or {}).get(name)
        verdict = "" if goal is None else f"   target {goal:g}: {'reached' if times >= goal else 'MISSED'}"
        print(f"  {name:34s} {statistics.median(values):12,.1f} {unit}   {times:8.3f} x {base}{verdict}")
        entry = {
            "what": what,
            "name": name,
            "unit": unit,
            "rate": statistics.median(values),
            "ratio": times,
            "target": goal,
        }
        results.append(entry)


def bench_sampling() -> None:
    """Time ``sample_batch``, safety check and counting included, against memcpy and peers."""
    for kind, batch, chunk in CASES:
        buffer = make_buffer(kind)
        reader = make_reader(buffer)
        contenders: Contenders = {
            "memcpy": memcpy(buffer, batch, chunk),
            "sample_batch(reuse_outputs=True)": lambda r=reader, b=batch, c=chunk: r.sample(b, c, reuse_outputs=True),
            "sample_batch": lambda r=reader, b=batch, c=chunk: r.sample(b, c),
            "TensorDict indexing": indexing(buffer, batch, chunk),
        }
        if available("torchrl"):
            contenders["TorchRL SliceSampler"] = torchrl(buffer, batch, chunk)
        rates = turns(contenders)
        goal = {"sample_batch(reuse_outputs=True)": TARGETS[(kind, batch)]}
        report(f"{kind} {batch} x {chunk}", rates, "memcpy", "batches/s", goal)
        if "TorchRL SliceSampler" in rates:
            ours = {
                name: rates[name]
                for name in ("TorchRL SliceSampler", "sample_batch", "sample_batch(reuse_outputs=True)")
            }
            goals = {"sample_batch(reuse_outputs=True)": 10.0}
            report(f"{kind} {batch} x {chunk}, against the peer", ours, "TorchRL SliceSampler", "batches/s", goals)


def write_for_ever(buffer: SharedBuffer) -> None:
    """Overwrite rows as fast as possible; every number of an episode is its stamp."""
    torch.set_num_threads(1)
    count = 0
    while buffer.control[Control.STATE] == State.RUNNING:
        count += 1
        pieces = {
            leaf.key: (torch.full((STEPS, *leaf.shape), count % 251, dtype=leaf.dtype),)
            for leaf in buffer.layout.leaves
        }
        buffer.write(count % ROWS, 0, Episode(pieces, STEPS))
        buffer.workers[0, Work.WRITTEN] += 1


def count_torn(batch: TensorDict) -> int:
    """Return how many chunks hold more than one stamp."""
    flat = torch.cat([value.reshape(value.shape[0], -1).float() for value in batch.values()], dim=1)
    return int((flat != flat[:, :1]).any(dim=1).sum())


@contextlib.contextmanager
def full_speed_writer(buffer: SharedBuffer) -> Iterator[None]:
    """Have a process overwrite rows without a pause; entered when every row holds stamps."""
    writer = mp.get_context("fork").Process(target=write_for_ever, args=(buffer,))
    writer.start()
    before = buffer.episodes_written
    while buffer.episodes_written < before + 2 * ROWS:
        time.sleep(0.01)
    yield
    buffer.control[Control.STATE] = State.STOPPED
    writer.join()
    buffer.control[Control.STATE] = State.RUNNING


def bench_beside_writer() -> None:
    """Compare sampling alone with sampling beside a writer at full speed.

    What a bare copy of windows loses, without any check, is what the writer takes of the memory and the caches.
    """
    for kind, batch, chunk in CASES:
        buffer = make_buffer(kind)
        reader = make_reader(buffer)
        sample = lambda r=reader, b=batch, c=chunk: r.sample(b, c, reuse_outputs=True)  # noqa: E731
        bare = {"copy of the windows": gather(buffer, batch, chunk), "memcpy": memcpy(buffer, batch, chunk)}
        contenders: Contenders = {"sample_batch": sample, **bare}
        rates: dict[str, dict[str, list[float]]] = {name: {"alone": [], "beside a writer": []} for name in contenders}
        torn = windows = 0
        for _ in range(9):
            for name, values in turns(contenders, rounds=3, seconds=0.05).items():
                rates[name]["alone"] += values
            with full_speed_writer(buffer):
                for name, values in turns(contenders, rounds=3, seconds=0.05).items():
                    rates[name]["beside a writer"] += values
                for _ in range(12 if kind == "image" else 120):
                    torn, windows = torn + count_torn(sample()), windows + batch
        what = f"{kind} {batch} x {chunk}, writer at full speed"
        report(what, rates["sample_batch"], "alone", "batches/s", {"beside a writer": 0.85})
        for name in bare:
            report(f"{what}: {name} without a check, for comparison", rates[name], "alone", "copies/s")
        redrawn = int(buffer.readers[:, Read.REDRAWN].sum())
        print(f"  torn chunks: {torn} of {windows}; drawn again: {redrawn} of {buffer.samples}")
        results.append({"what": f"torn {kind} {batch} x {chunk}", "torn": torn, "windows": windows})


def stream_config(**changes: Any) -> OnlineDataEngineCfg:
    """Return the config of a PushCubeRL stream."""
    settings: dict[str, Any] = {
        "buffer_size": 64,
        "max_episode_steps": 100,
        "gym_config": {"id": "PushCubeRL", "num_envs": 32},
    }
    return OnlineDataEngineCfg(**{**settings, **changes})


def bench_loader() -> None:
    """Compare batch mode with item mode, through a DataLoader on a live engine."""
    with OnlineDataEngine(stream_config(refill_threshold=10**9)) as engine:
        for workers in (0, 2):
            item = DataLoader(OnlineDataset(engine, 16), batch_size=32, num_workers=workers)
            ready = DataLoader(OnlineDataset(engine, 16, batch_size=32), batch_size=None, num_workers=workers)
            items: Iterator[Any] = iter(item)
            batches: Iterator[Any] = iter(ready)
            contenders: Contenders = {"item mode": lambda i=items: next(i), "batch mode": lambda b=batches: next(b)}
            clock = time.perf_counter if workers else time.process_time
            rates = turns(contenders, rounds=5, seconds=0.4, clock=clock)
            goals = {"batch mode": 15.0} if workers == 0 else None
            report(f"DataLoader 32 x 16, {workers} workers", rates, "item mode", "batches/s", goals)
            del items, batches


def bench_workers() -> None:
    """Compare what a worker writes with the same environment and expert stepped without the engine.

    By the clock on the wall: with several threads, time in which all but one of them wait would count as work.
    """
    for threads in (1, 0):
        task = {"id": "PushCubeRL", "num_envs": 32, "num_threads": threads}
        cfg = stream_config(refill="continuous", gym_config=task)
        env = make(cfg.gym_config, seed=0)
        source = open_source(cfg)
        buffer = SharedBuffer(source.layout, cfg.buffer_size, cfg.max_episode_steps, 1)
        worker = Worker(cfg, 0, source, buffer)

        def with_engine(source: EpisodeSource = source, worker: Worker = worker) -> None:
            for episode in source.advance():
                worker.take(episode)

        contenders: Contenders = {
            "env and expert alone": lambda env=env: env.step(env.expert_action()),
            "worker": with_engine,
        }
        rates = turns(contenders, rounds=9, seconds=0.4, clock=time.perf_counter)
        what = "simulation, 32 envs, one thread" if threads else "simulation, 32 envs, a thread per core"
        report(what, rates, "env and expert alone", "steps/s", {"worker": 0.9})


BENCHES = {"sampling": bench_sampling, "writer": bench_beside_writer, "loader": bench_loader, "workers": bench_workers}


def main() -> int:
    """Run the benchmarks that were asked for; return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(BENCHES), nargs="+", default=list(BENCHES))
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the sampling process")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    peers = ["torchrl"] if available("torchrl") else []
    where = {**machine(["torch", "tensordict", "numpy", "mujoco", *peers]), "torch threads": arguments.threads}
    print(where)
    for name in arguments.only:
        BENCHES[name]()
        if arguments.out:
            arguments.out.write_text(json.dumps({"machine": where, "results": results}, indent=2) + "\n")
    missed = [entry for entry in results if entry.get("target") is not None and entry["ratio"] < entry["target"]]
    for entry in missed:
        print(f"MISSED: {entry['what']}, {entry['name']}: {entry['ratio']:.3f} < {entry['target']:g}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
