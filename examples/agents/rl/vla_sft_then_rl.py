"""Fine-tune a vision-language-action model on demonstrations, then improve it with reinforcement learning.

    python examples/agents/rl/vla_sft_then_rl.py                     # in small, on two CPU cores: under 10 minutes
    python examples/agents/rl/vla_sft_then_rl.py --algorithm grpo
    python examples/agents/rl/vla_sft_then_rl.py --size gpu          # on a GPU, with as many cores as there are

These are two commands, with an evaluation after each:

    embodichain imitate configs/agents/rl/push_cube_language/imitate_config_small.json --trainer.run_dir runs/clone
    embodichain train configs/agents/rl/push_cube_language/train_config_vla_small.json --trainer.init_from runs/clone

A robot arm sees an image, reads "push the cube to the red target" and pushes the cube there. First the model imitates
a scripted expert, whose demonstrations another process generates meanwhile. Then the model acts itself: a thread
collects rollouts while the learner improves it.

The small version is easier: two colours, success within 5 cm, images of 48 x 48. Its episodes have only 16 steps, in
which the careful expert succeeds in three of ten. Only reinforcement learning can teach the policy to be faster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from embodichain.agents.imitation.imitate import imitate_from_config
from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint, load_policy
from embodichain.agents.rl.evaluation import Evaluation, evaluate
from embodichain.agents.rl.train import train_from_config
from embodichain.envs.registration import make

CONFIGS = Path("configs/agents/rl/push_cube_language")  # shipped with this package, found from any folder
GRPO = {"group_size": 8, "n_epochs": 3, "learning_rate": 3e-4}


@dataclass
class Args:
    """Settings of the example."""

    algorithm: Literal["ppo", "grpo"] = "ppo"
    """The algorithm that improves the imitated policy."""
    size: Literal["small", "gpu"] = "small"
    """Which of the shipped configs."""
    seed: int = 0
    """Seed of everything except the evaluations."""
    episodes: int = 256
    """Episodes of each evaluation; the same before and after."""
    output: Path | None = None
    """Folder for the two runs; default: a new one in runs."""


def judge(run: Path, episodes: int) -> Evaluation:
    """Evaluate the latest policy of a run."""
    gym_config = load_checkpoint(find_checkpoint(run))["config"]["trainer"]["gym_config"]
    with make(gym_config | {"num_envs": min(64, episodes)}) as env:
        return evaluate(load_policy(run, env, which="latest"), env, episodes, seed=2_000_003)


def reinforce(args: Args, clone: Path, tuned: Path, more: Sequence[str] = ()) -> None:
    """Continue to train the policy of one run in another."""
    flags = ["--trainer.seed", str(args.seed), "--trainer.init_from", str(clone), "--trainer.run_dir", str(tuned)]
    if args.algorithm == "grpo":  # its rollouts are whole episodes from equal reset states
        flags += ["--algorithm.name", "grpo", "--trainer.buffer_size", "4" if args.size == "small" else "15"]
        flags += [word for name, value in GRPO.items() for word in (f"--algorithm.cfg.{name}", str(value))]
    train_from_config(CONFIGS / f"train_config_vla_{args.size}.json", [*flags, *more])


def main(args: Args, imitate_flags: Sequence[str] = (), train_flags: Sequence[str] = ()) -> list[Evaluation]:
    """Imitate, reinforce, and return the evaluations after each."""
    console, began = Console(), time.monotonic()
    output = args.output or Path("runs") / f"vla_{args.algorithm}_{time.strftime('%Y%m%d-%H%M%S')}"
    clone, tuned = output / "imitated", output / "reinforced"

    flags = ["--trainer.seed", str(args.seed), "--trainer.run_dir", str(clone)]
    imitate_from_config(CONFIGS / f"imitate_config_{args.size}.json", [*flags, *imitate_flags])
    before = judge(clone, args.episodes)
    console.print(f"imitated: success {before.summary.success_rate:.0%} ({time.monotonic() - began:.0f} s)")

    reinforce(args, clone, tuned, train_flags)
    after = judge(tuned, args.episodes)
    rates = [f"{evaluation.summary.success_rate:.0%}" for evaluation in (before, after)]
    console.print(f"success {' -> '.join(rates)} over {args.episodes} episodes each ({time.monotonic() - began:.0f} s)")
    return [before, after]


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
