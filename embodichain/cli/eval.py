"""``embodichain eval RUN``: evaluate the policy of a run."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from embodichain.agents.rl.run_records import EVALUATIONS_FILE, RunRecord, is_run
from embodichain.cli.options import Trust, loading, parse_options
from embodichain.cli.summary import print_files, print_summary
from embodichain.errors import CheckpointError, UnknownNameError
from embodichain.utils.console import check_counts

if TYPE_CHECKING:
    from embodichain.agents.rl.evaluation import Evaluation
    from embodichain.agents.rl.models.policy import Policy
    from embodichain.envs.vec_env import VecEnv


@dataclass(frozen=True)
class EvalArgs:
    """Evaluate the policy of a run in new environments, with its most likely actions."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or of one of its checkpoints."""
    episodes: int = 100
    """Number of episodes."""
    num_envs: int | None = None
    """Number of envs stepped together (default: as in the run's evaluations)."""
    seed: int = 2_000_003
    """Seed of the episodes; by default not one of the training."""
    checkpoint: Literal["best", "latest"] = "best"
    """Which checkpoint of the run; without evaluations in the run, 'best' is the latest."""
    stochastic: bool = False
    """Sample actions instead of taking the most likely ones."""
    video: bool = False
    """Record one episode to the folder 'videos' of the run."""
    output: Path | None = None
    """File for the results (.json), including every episode."""
    config: Path | None = None
    """File of environment settings (a gym_config.json) that override those of the run."""
    trust: Trust = ()


@dataclass(frozen=True)
class LoadedRun:
    """A trained policy and the environments to evaluate it in."""

    checkpoint: Path
    step: int
    policy: Policy
    env: VecEnv


@contextmanager
def opened_run(
    run: Path,
    which: Literal["best", "latest"],
    trusted_modules: Sequence[str],
    episodes: int,
    num_envs: int | None,
    seed: int,
    video: bool,
    config: Path | None = None,
) -> Iterator[LoadedRun]:
    """Load the policy of a run, and make the environments of its evaluations, with settings overridden by a file."""
    from embodichain.agents.rl.checkpoint import (
        check_parts,
        find_checkpoint,
        load_checkpoint,
        load_policy,
        reading_checkpoint,
    )
    from embodichain.agents.rl.run_config import saved_run_config
    from embodichain.agents.rl.train import make_eval_env
    from embodichain.config import load_config, merge
    from embodichain.config.files import find_shipped

    if not run.exists():
        shown = str(run) if str(run).isprintable() else ascii(str(run))
        raise CheckpointError(f"{shown}: expected a run or a checkpoint, but there is no such folder")
    folder = find_checkpoint(run, which).resolve()
    state = load_checkpoint(folder)
    check_parts(state, folder, "config", "trainer")
    given = None if config is None else load_config(find_shipped(config))
    cfg = saved_run_config(state["config"], trusted_modules, str(folder), given)
    settings = cfg.trainer.replace(num_eval_episodes=episodes, eval_video=video)
    if given is not None:
        if given.get("id", settings.environment["id"]) == settings.environment["id"]:
            settings = settings.replace(eval_gym_config=merge(settings.eval_gym_config, given))
        else:
            settings = settings.replace(gym_config=given, eval_gym_config={})
    with reading_checkpoint(str(folder)):
        step = int(state["trainer"]["global_step"])
    count = min(num_envs or settings.num_eval_envs, episodes)
    with (
        _suggesting_modules(folder.parent.parent, trusted_modules),
        make_eval_env(cfg.replace(trainer=settings), trusted_modules, num_envs=count, seed=seed) as env,
    ):
        policy = load_policy(folder, env, settings.device, trusted_modules=trusted_modules)
        yield LoadedRun(folder, step, policy, env)


@contextmanager
def _suggesting_modules(run: Path, trusted_modules: Sequence[str]) -> Iterator[None]:
    """Add to an unknown-name error which modules the run's command trusted, if none is trusted now."""
    try:
        yield
    except UnknownNameError as error:
        record = RunRecord.read(run)
        if record is not None and record.trusted_modules and not trusted_modules:
            words = " ".join(f"--trust {shlex.quote(module)}" for module in record.trusted_modules)
            error.add_note(f"the run was made with {words}")
        raise


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = parse_options(EvalArgs, argv, "embodichain eval")
    with loading():
        from embodichain.agents.rl.evaluation import evaluate
        from embodichain.config import save_config

    check_counts({"--episodes": args.episodes, "--num-envs": args.num_envs})
    asked = (args.run, args.checkpoint, args.trust, args.episodes, args.num_envs, args.seed, args.video, args.config)
    began = time.perf_counter()
    with opened_run(*asked) as run:
        film = run.checkpoint.parent.parent / "videos" / f"eval_step_{run.step:012d}.mp4" if args.video else None
        result = evaluate(run.policy, run.env, args.episodes, args.seed, film, deterministic=not args.stochastic)
    console = Console()
    title = f"{args.run}, {args.checkpoint} checkpoint (step {run.step:,})"
    print_summary(console, title, result.episodes, time.perf_counter() - began)
    print_files(console, result.files, result.problem)
    _append_result(args, run, result)
    if args.output is not None:
        summary, episodes = asdict(result.summary), [asdict(episode) for episode in result.episodes]
        setting = {} if args.config is None else {"config": str(args.config)}
        figures = {
            "checkpoint": str(run.checkpoint),
            **setting,
            "step": run.step,
            "seed": args.seed,
            **summary,
            "each": episodes,
        }
        console.print(f"wrote {save_config(figures, args.output)}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _append_result(args: EvalArgs, run: LoadedRun, result: Evaluation) -> None:
    """Append the result to the folder of the run, for ``runs`` and ``report``; ignore a folder that is not writable."""
    folder = run.checkpoint.parent.parent
    if not is_run(folder):
        return
    asked = {"checkpoint": args.checkpoint, "seed": args.seed, "stochastic": args.stochastic}
    setting = {} if args.config is None else {"config": str(args.config)}
    line = {"step": run.step, "time": time.time(), **asked, **setting, **asdict(result.summary)}
    with suppress(OSError), (folder / EVALUATIONS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
