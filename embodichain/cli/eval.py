"""``embodichain eval RUN``: let the policy of a run act and measure how well it does."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from embodichain.cli.options import Trust, loading, parse_options
from embodichain.utils.console import check_counts


@dataclass(frozen=True)
class EvalArgs:
    """Evaluate the policy of a run in new environments, with its most likely actions."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or of one of its checkpoints."""
    episodes: int = 100
    """Number of episodes."""
    num_envs: int | None = None
    """Number of envs stepped together (default: as many as the run's evaluations use)."""
    seed: int = 2_000_003
    """Seed of the episodes; different from those of the training."""
    checkpoint: Literal["best", "latest"] = "best"
    """Which checkpoint of the run; without evaluations in the run, it is the latest."""
    stochastic: bool = False
    """Sample actions instead of taking the most likely ones."""
    video: bool = False
    """Film one episode; the file goes to the folder 'videos' of the run."""
    output: Path | None = None
    """File for the figures (.json), every episode included."""
    trust: Trust = ()


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = parse_options(EvalArgs, argv, "embodichain eval")

    with loading():
        from embodichain.agents.rl.checkpoint import (
            check_parts,
            find_checkpoint,
            load_checkpoint,
            load_policy,
            reading_checkpoint,
        )
        from embodichain.agents.rl.config import TrainCfg, complete
        from embodichain.agents.rl.evaluation import evaluate
        from embodichain.agents.rl.train import make_eval_env
        from embodichain.config import save_config

    check_counts({"--episodes": args.episodes, "--num-envs": args.num_envs})
    folder = find_checkpoint(args.run, args.checkpoint).resolve()
    state = load_checkpoint(folder)
    check_parts(state, folder, "config", "trainer")
    cfg = complete(TrainCfg.from_dict(state["config"], source=str(folder)), args.trust, str(folder))
    settings = cfg.trainer.replace(num_eval_episodes=args.episodes, eval_video=args.video)
    num_envs = min(args.num_envs or settings.num_eval_envs, args.episodes)
    with reading_checkpoint(str(folder)):
        step = int(state["trainer"]["global_step"])
    film = folder.parent.parent / "videos" / f"eval_step_{step:012d}.mp4" if args.video else None
    with make_eval_env(cfg.replace(trainer=settings), args.trust, num_envs=num_envs, seed=args.seed) as env:
        policy = load_policy(folder, env, settings.device, trusted_modules=args.trust)
        result = evaluate(policy, env, args.episodes, args.seed, film, deterministic=not args.stochastic)
    summary = asdict(result.summary)
    print(f"{folder}: {result}")
    print(json.dumps(summary))
    for file in result.files:
        print(file)
    if result.problem is not None:
        print(f"no video: {result.problem}")
    if args.output is not None:
        episodes = [asdict(episode) for episode in result.episodes]
        figures = {"checkpoint": str(folder), "step": step, "seed": args.seed, **summary, "each": episodes}
        print(save_config(figures, args.output))
    return 0
