"""A vision-language-action model with a flow head on a GPU: asynchronous against synchronous PPO, and one of a billion.

::

    python -m benchmarks.flow_vla                          # all parts, on a GPU; about fourteen minutes
    python -m benchmarks.flow_vla --parts billion
    python -m benchmarks.flow_vla --parts rate --rollouts 50 --start FOLDER    # seeds that are there are not run again
    python -m benchmarks.flow_vla --parts parity --rollouts 75 --jobs 2 --budget 560 --start FOLDER
    python -m benchmarks.flow_vla --small                  # in small and on the CPU, to see that it runs

``rate`` and ``parity``: ``PushCubeLanguageRL`` from camera pictures, as in ``benchmarks.async_vla``, with a flow head
on 129 M parameters. It imitates the expert, once for all runs; then PPO trains the head and the value, with the same
simulation processes for both ways. ``rate``: one run after the other, seed by seed; the bar is 1.3 times the
synchronous rate. ``parity``: longer runs, ``--jobs`` at a time (``flow_vla_parity.py``); the bar is a final success
within the spread of the synchronous runs.
``billion``: a model of the transformers library with more than a billion parameters (random, bfloat16, frozen) and a
flow head: how long one iteration takes, rollout and update, and how much memory it needs.

Results are written after every run, and runs that are there are not made again. The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import flow_vla_parity
from benchmarks.async_vla_gpu import CameraVLA
from benchmarks.async_vla_runs import run
from benchmarks.async_vla_task import CHUNK, LARGE, SMALL, Scale, make_chunked
from benchmarks.flow_vla_parity import ASYNC, JUDGED, SYNC, VARIANTS, write_whole
from benchmarks.timing import machine
from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models import build_policy

RESULTS = Path(__file__).parent / "results"
PARTS = ("rate", "parity", "billion")
ROLLOUTS = {"rate": 50, "parity": 75}
"""Rollouts per run, unless it is small."""
BAR = 1.3
VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TEXT = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
FEW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    others = [name for name in VARIANTS if name not in JUDGED]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--rollouts", type=int, help="rollouts per run")
    parser.add_argument("--start", type=Path, help="folder that keeps the imitated policy, or has it")
    parser.add_argument("--jobs", type=int, default=2, help="parity: runs at a time, each on its own part of the cores")
    parser.add_argument("--variants", nargs="*", choices=others, default=others, help="parity: what is run in addition")
    parser.add_argument("--budget", type=float, default=math.inf, help="parity: seconds, the imitation included")
    parser.add_argument("--again", action="store_true", help="run seeds that are in the results already, too")
    parser.add_argument("--small", action="store_true", help="in small, on the CPU; nothing is judged")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a bar is missed."""
    args = parse_args(argv)
    scale = SMALL if args.small else LARGE
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"flow_vla{'_small' if args.small else ''}.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    name = torch.cuda.get_device_name() if scale.device == "cuda" else "none"
    content["machine"] = machine(("torch", "mujoco", "tensordict")) | {"gpu": name}
    holds = True
    with tempfile.TemporaryDirectory() as home:
        start = args.start or Path(home) / "flow_vla"  # made once, for all parts
        for part in args.parts:
            for figures in measure(part, scale, args, start, {} if args.again else content.get(part, {})):
                content[part] = figures  # so far: what was measured is there, whatever ends the benchmark
                write_whole(path, content)
            holds = holds and (args.small or content[part]["holds"])
    return 0 if holds else 1


def measure(
    part: str, scale: Scale, args: argparse.Namespace, start: Path, before: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of a part, as they come."""
    if part == "billion":
        yield billion(scale, args.small)
        return
    rollouts = args.rollouts or (scale.sizes.rollouts if args.small else ROLLOUTS[part])
    if part == "rate":
        yield from compare(scale, args.seeds, rollouts, start, before)
    else:
        yield from flow_vla_parity.compare(args, rollouts, start, before)


def compare(scale: Scale, seeds: int, rollouts: int, start: Path, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train with both ways from the same policy, seed by seed; yield the runs so far and what follows.

    Runs of earlier calls that are as long are kept. Where their policy is gone, another one was imitated for the seeds
    that follow, which is the same for both ways.
    """
    done = finished_seeds(before, rollouts)
    runs: dict[str, list[dict[str, Any]]] = {way: before["runs"][way] if done else [] for way in (SYNC, ASYNC)}
    starts = before["starts"] if done else []
    if done >= seeds:
        yield before | {"holds": statistics.mean(before["ratios"]) >= BAR}
        return
    case = CameraVLA(scale, rollouts=rollouts, start=start, head="flow")
    for line in case.words():
        print(line, flush=True)
    for seed in range(done, seeds):
        for way in runs:
            outcome = run(case, way, seed)
            print(f"  seed {seed}, {way}: {outcome.line()}", flush=True)
            runs[way].append(outcome.to_dict())
        starts.append(case.start_success)
        yield _summary(case, runs, starts)


def finished_seeds(figures: dict[str, Any], rollouts: int) -> int:
    """Return for how many seeds both ways are there, with so many rollouts."""
    runs = figures.get("runs", {}).get(ASYNC, []) if "starts" in figures else []
    return len(runs) if all(len(run["curve"]) == rollouts for run in runs) else 0


def _summary(case: CameraVLA, runs: dict[str, list[dict[str, Any]]], starts: list[float]) -> dict[str, Any]:
    """Print and return what follows from as many runs of both ways."""
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(runs[SYNC], runs[ASYNC], strict=True)]
    finals = {way: [one["final"] for one in made] for way, made in runs.items()}
    means = {way: statistics.mean(values) for way, values in finals.items()}
    rate = statistics.mean(ratios)
    print(f"asynchronous: {rate:.2f} times the rate (bar {BAR}), seed by seed {[round(r, 2) for r in ratios]}")
    print(f"final success: {SYNC} {means[SYNC]:.1%}, {ASYNC} {means[ASYNC]:.1%}; before: {case.start_success:.0%}")
    shown = {"what": case.words(), "ratios": ratios, "final": finals, "starts": starts}
    return {**shown, "holds": rate >= BAR, "runs": runs}


def billion(scale: Scale, small: bool) -> dict[str, Any]:
    """Time one iteration of PPO with a frozen backbone of a billion parameters."""
    env = make_chunked(scale, scale.sizes.num_envs)
    is_cuda = scale.device == "cuda"
    backbone = {
        "model_type": "smolvlm",
        "scale_factor": 2,
        "image_token_id": 257,
        "vision_config": {**(FEW if small else VISION), "image_size": scale.pixels, "patch_size": 8 if small else 16},
        "text_config": {
            "model_type": "llama",
            **(FEW if small else TEXT),
            "num_key_value_heads": 2 if small else 8,
            "vocab_size": 512,
            "pad_token_id": 0,
            "bos_token_id": 256,
            "eos_token_id": 258,
        },
    }
    settings = {"chunk_size": CHUNK, "head": "flow", "freeze": ["vision", "language"], "dtype": "bfloat16"}
    block = {"name": "vla", "vla_config": {"model_class": "hf_vlm", "model_config": {**settings, "backbone": backbone}}}
    began = time.monotonic()
    policy = build_policy(block, env.observation_space, env.action_space, scale.device)
    made = time.monotonic() - began
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in policy.parameters()]
    steps = scale.sizes.num_steps
    batch = max(1, scale.sizes.num_envs * steps // 8)
    cfg = PPOCfg(batch_size=batch, n_epochs=1, learning_rate=1e-4, device=scale.device, cuda_graphs=False)
    learner, collector = PPO(cfg, policy), SyncCollector(env, policy, scale.device)
    collector.reset(seed=0)
    rows = []
    for _ in range(2):  # the first one warms up
        marks = [_now(is_cuda)]
        rollout = collector.collect(steps)
        marks.append(_now(is_cuda))
        losses = learner.update(rollout)
        marks.append(_now(is_cuda))
        rows.append({"rollout_seconds": marks[1] - marks[0], "update_seconds": marks[2] - marks[1]})
    env.close()
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None
    every, trained = sum(n for n, _ in sizes), sum(n for n, is_trained in sizes if is_trained)
    last = rows[-1]
    print(
        f"{every / 1e6:.0f} M parameters, {trained / 1e6:.0f} M trained, made in {made:.0f} s: a rollout of "
        f"{scale.sizes.num_envs} x {steps} decisions {last['rollout_seconds']:.1f} s, its update "
        f"{last['update_seconds']:.1f} s" + (f", {peak:.1f} GiB at most" if peak is not None else "")
    )
    finite = all(torch.isfinite(torch.tensor(value)) for value in losses.values())
    return {"parameters": every, "trained": trained, "iterations": rows, "peak_gib": peak, "holds": finite}


def _now(is_cuda: bool) -> float:
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended, too
    sys.exit(main())
