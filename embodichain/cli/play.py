"""``embodichain play ID``: roll the expert (or no skill at all) in an environment and show what happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from embodichain.cli.options import Trust, loading, parse_options
from embodichain.errors import EnvContractError
from embodichain.utils.console import check_counts

if TYPE_CHECKING:
    from embodichain.envs.recording import ActionSource, EpisodeRecorder, EpisodeResult
    from embodichain.envs.vec_env import VecEnv

PolicyName = Literal["expert", "random", "zero"]
_DEFAULT_NUM_ENVS = 20


@dataclass(frozen=True)
class PlayArgs:
    """Roll a policy in an environment; print how it did and, if asked, film it."""

    id: Annotated[str, tyro.conf.Positional]
    """Name of the environment: a task of this package or any Gymnasium id."""
    episodes: int = 20
    """Number of episodes."""
    num_envs: int | None = None
    """Number of envs stepped together (default: 20, or fewer for few episodes)."""
    video: Path | None = None
    """Video of the first episodes (.mp4); without OpenGL, a trajectory plot takes its place (.png)."""
    video_episodes: int = 3
    """Number of episodes in the video, all of the first env."""
    camera: str | None = None
    """Camera of the video (default: the task's own)."""
    size: tuple[int, int] = (480, 640)
    """Height and width of the video in pixels."""
    speed: float = 1.0
    """Speed of the video; 0.5 is slow motion."""
    seed: int = 0
    """Seed of the episodes and of random actions."""
    policy: PolicyName = "expert"
    """Who acts: the task's scripted expert, uniformly random actions, or none at all."""
    config: Path | None = None
    """File with settings of the environment (a gym_config.json)."""
    trust: Trust = ()


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = parse_options(PlayArgs, argv, "embodichain play")

    with loading():
        from embodichain.envs.recording import EpisodeRecorder
        from embodichain.envs.registration import make_to_watch

    counts = {"--episodes": args.episodes, "--num-envs": args.num_envs, "--video-episodes": args.video_episodes}
    check_counts(counts, *([] if args.speed > 0 else [f"--speed: expected a number above 0, got {args.speed}"]))
    console = Console()
    num_envs = args.num_envs
    if num_envs is None:  # one env is filmed, so it should run all the episodes of the video
        filmed = 1 if args.video is None else args.video_episodes
        num_envs = max(1, min(args.episodes // filmed, _DEFAULT_NUM_ENVS))
    source = args.id if args.config is None else args.config
    overrides: dict[str, Any] = {"id": args.id, "num_envs": num_envs, "seed": args.seed}
    with (
        make_to_watch(source, args.trust, video=args.video is not None, **overrides) as env,
        contextlib.ExitStack() as stack,
    ):
        act = choose_policy(env, args.policy, args.seed)
        recorder = None
        if args.video is not None:
            recorder = EpisodeRecorder(env, args.video, args.video_episodes, args.camera, args.size, args.speed)
            stack.callback(recorder.close)
        episodes, seconds = watch_episodes(env, act, args.episodes, args.seed, console, recorder)
        files = recorder.finish() if recorder is not None else []
    print_summary(console, f"{args.id}, {args.policy}", episodes, seconds)
    if recorder is not None:
        print_files(console, files, recorder.problem)
    return 0


def choose_policy(env: VecEnv, name: PolicyName, seed: int) -> ActionSource:
    """Return the function that acts; ``EnvContractError`` if the env cannot be played like this."""
    import torch

    from embodichain.agents.engine.sources import RandomActor
    from embodichain.envs.vec_env import HasExpert

    if name == "expert":
        if not isinstance(env, HasExpert) or not env.has_expert:
            raise EnvContractError(f"{env.name} has no expert: use --policy random or --policy zero")
        return lambda obs: env.expert_action()
    act = RandomActor(env, seed)
    return act if name == "random" else lambda obs: torch.zeros_like(act(obs))


def watch_episodes(
    env: VecEnv, act: ActionSource, count: int, seed: int, console: Console, recorder: EpisodeRecorder | None
) -> tuple[list[EpisodeResult], float]:
    """Roll ``count`` episodes under a progress bar; return them and the seconds they took."""
    from embodichain.envs.recording import roll

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    episodes: list[EpisodeResult] = []
    start = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("episodes", total=count)
        for step in roll(env, act, count, seed):
            episodes += step.ended
            progress.update(bar, advance=len(step.ended))
            if recorder is not None:
                recorder.watch(step)
    return episodes, time.perf_counter() - start


def print_summary(console: Console, title: str, episodes: Sequence[EpisodeResult], seconds: float) -> None:
    """Print the averages as a small table."""
    from embodichain.envs.recording import Summary

    summary = Summary.of(episodes)
    rate = "not reported" if summary.success_rate is None else f"{summary.success_rate:.1%}"
    table = Table("", Column(justify="right"), title=title, title_justify="left", show_header=False)
    table.add_row("episodes", str(summary.episodes))
    table.add_row("success rate", rate, style="bold")
    table.add_row("mean return", f"{summary.mean_return:.2f} ± {summary.std_return:.2f}")
    table.add_row("mean length", f"{summary.mean_length:.1f} steps")
    table.add_row("wall time", f"{seconds:.1f} s")
    console.print(table)


def print_files(console: Console, files: Sequence[Path], problem: str | None) -> None:
    """Say where the files are, and what would give a video if there is none."""
    if problem is not None:
        console.print(f"No video: {problem}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        if not files:
            console.print("There is no trajectory plot either: the observations hold no positions.", style="yellow")
    for file in files:
        console.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)
