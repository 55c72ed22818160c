"""Does a policy that imitates a live stream keep what it has learned when the buffer is replaced?

    python benchmarks/forgetting.py                       # three seeds: about 10 minutes on two cores
    python benchmarks/forgetting.py --no-run              # draw the curves again from what was measured

Every refresh puts new episodes in the place of all old ones (``refill: "threshold"``; with ``--modes continuous``, of
one after the other). The step size stays what it is, as one that falls would hide forgetting. Again and again two
things are measured: success on the same 128 starts, and the error on chunks of the very first buffer, which the policy
never sees again. Another policy, for comparison, is shown the first buffer only. Results go to
``benchmarks/results/forgetting.json`` and ``forgetting_*.png``.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from charts import Series, draw_curves
from tensordict import TensorDict

from embodichain.agents.imitation.config import ImitateCfg, load_imitate_config, override
from embodichain.agents.imitation.imitate import opened_imitation
from embodichain.agents.imitation.sources import StreamSource
from embodichain.agents.imitation.trainer import ImitationTrainer
from embodichain.agents.rl.evaluation import evaluate

RESULTS = Path(__file__).parent / "results"
Mode = Literal["threshold", "continuous", "never"]
NAMES = {"threshold": "the whole buffer at once", "continuous": "one episode after the other", "never": "never"}
CONSTANT_RATE = 10**9
"""Gradient steps over which the step size would fall: it stays constant."""


@dataclass(frozen=True)
class Args:
    """What to measure."""

    task: str = "PushCubeRL"
    """Task whose shipped config is imitated."""
    modes: tuple[Mode, ...] = ("threshold", "never")
    """How the buffer is refilled."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of networks and streams; evaluations are the same for all."""
    refreshes: int = 4
    """How often the buffer is replaced."""
    steps: int = 300
    """Gradient steps between two refreshes."""
    measures: int = 3
    """Measurements between two refreshes."""
    buffer_size: int = 128
    """Episodes in the buffer."""
    batch_size: int = 256
    """Chunks per gradient step."""
    episodes: int = 128
    """Episodes per evaluation."""
    policy: Literal["actor_critic", "gaussian", "flow", "tokens"] = "actor_critic"
    """Policy that imitates."""
    run: bool = True
    """Whether to measure; otherwise the curves are drawn again."""


def configured(args: Args, mode: Mode, seed: int, run_dir: str) -> ImitateCfg:
    """Return the shipped config with a buffer that is replaced every ``args.steps`` gradient steps."""
    samples = args.steps * args.batch_size // args.buffer_size
    settings = {
        "trainer.seed": seed,
        "trainer.run_dir": run_dir,
        "trainer.num_eval_episodes": args.episodes,
        "trainer.num_eval_envs": args.episodes,
        "trainer.eval_video": "false",
        "algorithm.cfg.batch_size": args.batch_size,
        "algorithm.cfg.total_steps": CONSTANT_RATE,
        "source.stream.buffer_size": args.buffer_size,
        "source.stream.refill": "continuous" if mode == "continuous" else "threshold",
        "source.stream.refill_threshold": samples if mode != "never" else CONSTANT_RATE,
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return override(load_imitate_config(args.task), [*flags, "--policy.name", args.policy])


@torch.no_grad()
def error_on(trainer: ImitationTrainer, chunks: TensorDict) -> float:
    """Return the loss on chunks, with the same noise every time."""
    policy, state = trainer.policy, torch.get_rng_state()
    torch.manual_seed(0)
    loss = policy.imitation_loss(chunks["observation"][:, 0], chunks["action"], chunks["mask"]).mean()
    torch.set_rng_state(state)
    return float(loss)


def measure(trainer: ImitationTrainer, kept: TensorDict, step: int, began: float) -> dict[str, float]:
    """Return how well the policy does after so many steps."""
    source, settings = trainer.source, trainer.cfg.trainer
    if not isinstance(source, StreamSource) or trainer.eval_env is None:
        raise TypeError("expected a stream, and evaluations")
    result = evaluate(trainer.policy, trainer.eval_env, settings.num_eval_episodes, settings.eval_seed)
    return {
        "step": step,
        "refills": source.engine.stats().refills,
        "success": float(result.summary.success_rate or 0.0),
        "first_buffer_loss": error_on(trainer, kept),
        "buffer_loss": error_on(trainer, source.sample(len(kept))),
        "seconds": time.monotonic() - began,
    }


def learn(args: Args, mode: Mode, seed: int) -> list[dict[str, float]]:
    """Imitate a stream for some refreshes of its buffer; return what was measured on the way."""
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trainer = stack.enter_context(opened_imitation(configured(args, mode, seed, f"{folder}/run")))
        kept = trainer.source.sample(1024)  # before the first refresh
        every = max(1, args.steps // args.measures)
        for step in range(1, args.steps * (args.refreshes + 1) + 1):
            trainer.learner.update(trainer.source.sample(args.batch_size))
            if step % every == 0:
                rows.append(measure(trainer, kept, step, began))
                print(mode, seed, json.dumps(rows[-1]), flush=True)
    return rows


def summary(args: Args, runs: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Return success before the first refresh, the least and the mean after it, and the largest fall by one."""
    first, least, later, falls, ratios = [], [], [], [], []
    for rows in runs:
        before = [row["success"] for row in rows if row["step"] <= args.steps]
        after = [row for row in rows if row["step"] > args.steps]
        first.append(max(before))
        least.append(min(row["success"] for row in after))
        later.append(float(np.mean([row["success"] for row in after[len(after) // 2 :]])))
        falls.append(max(a["success"] - b["success"] for a, b in zip(rows[args.measures - 1 :], after, strict=False)))
        ratios.append(after[-1]["first_buffer_loss"] / after[-1]["buffer_loss"])
    return {
        "success_before_first_refresh": first,
        "least_success_afterwards": least,
        "mean_success_of_second_half": later,
        "largest_fall_between_measurements": falls,
        "loss_on_first_buffer_over_present_one": ratios,
    }


def draw(found: dict[str, Any]) -> None:
    """Draw success and errors over refreshes."""
    steps = found["settings"]["steps"]
    for key, label in (("success", "success"), ("first_buffer_loss", "loss on chunks of the first buffer")):
        series = [
            Series(
                f"refilled: {NAMES[mode]}",
                [(np.array([r["step"] / steps for r in rows]), np.array([r[key] for r in rows])) for rows in runs],
            )
            for mode, runs in found["runs"].items()
        ]
        title = f"{found['settings']['task']}: a policy that imitates a live stream"
        axes = ("refreshes of the buffer", label)
        draw_curves(RESULTS / f"forgetting_{key}.png", title, axes, series)


def main(args: Args) -> None:
    """Measure, and draw."""
    file = RESULTS / "forgetting.json"
    if args.run:
        torch.set_num_threads(1)
        runs = {mode: [learn(args, mode, seed) for seed in args.seeds] for mode in args.modes}
        machine = {"processor": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
        found = {
            "command": "python benchmarks/forgetting.py",
            "settings": {name: value for name, value in vars(args).items() if name != "run"},
            "machine": machine,
            "summary": {mode: summary(args, rows) for mode, rows in runs.items()},
            "runs": runs,
        }
        file.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(file.read_text())
    print(json.dumps(found["summary"], indent=1))
    draw(found)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
