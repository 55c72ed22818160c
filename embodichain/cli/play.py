"""``embodichain play ID``: roll out an expert, a trained policy or random actions, and show what happens."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from embodichain.cli.eval import opened_run
from embodichain.cli.options import Trust, loading, parse_options
from embodichain.cli.summary import print_files, print_summary
from embodichain.cli.view import ViewArgs, explaining_paths, view
from embodichain.errors import ConfigError, EnvContractError
from embodichain.utils.console import check_counts

if TYPE_CHECKING:
    from embodichain.agents.rl.evaluation import PolicyActor
    from embodichain.envs.recording import ActionSource, EpisodeRecorder, EpisodeResult
    from embodichain.envs.vec_env import VecEnv

PolicyName = Literal["expert", "random", "zero"]
_DEFAULT_NUM_ENVS = 20


@dataclass(frozen=True)
class PlayArgs:
    """Roll out a policy in an environment; print the results and optionally record a video."""

    id: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID|RUN")]
    """Name of the environment (a task of this package or any Gymnasium id), its file (a gym_config.json), or the folder
    of a run, whose policy acts."""
    episodes: int = 20
    """Number of episodes."""
    num_envs: int | None = None
    """Number of envs stepped together (default: 20, or fewer for few episodes)."""
    video: Path | None = None
    """Video of the first episodes (.mp4); without OpenGL, a trajectory plot (.png)."""
    video_episodes: int = 3
    """Number of episodes in the video, all in the first env."""
    camera: str | None = None
    """Camera of the video (default: the task's own)."""
    size: tuple[int, int] = (480, 640)
    """Height and width of the video in pixels."""
    speed: float = 1.0
    """Speed of the video; 0.5 is slow motion."""
    seed: int = 0
    """Seed of the episodes and of random actions."""
    policy: PolicyName | None = None
    """Source of actions: the task's scripted expert (default), uniformly random actions, or zeros."""
    checkpoint: Literal["best", "latest"] = "best"
    """For a run: which checkpoint."""
    config: Path | None = None
    """File of environment settings (a gym_config.json); they override those of a run."""
    viewer: bool = False
    """Show it in the browser until Ctrl-C, as 'embodichain view' does."""
    trust: Trust = ()


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = parse_options(PlayArgs, argv, "embodichain play")
    if args.viewer:
        return view(_as_view(args))

    with loading():
        from embodichain.envs.recording import EpisodeRecorder
        from embodichain.envs.registration import make_to_watch

    counts = {"--episodes": args.episodes, "--num-envs": args.num_envs, "--video-episodes": args.video_episodes}
    check_counts(counts, *([] if args.speed > 0 else [f"--speed: expected a number above 0, got {args.speed}"]))
    console = Console()
    num_envs = args.num_envs
    if num_envs is None:  # the recorded env should run all the episodes of the video
        filmed = 1 if args.video is None else args.video_episodes
        num_envs = max(1, min(args.episodes // filmed, _DEFAULT_NUM_ENVS))
    with contextlib.ExitStack() as stack:
        act: ActionSource
        if os.path.isdir(args.id):
            env, act = stack.enter_context(_acting_run(args, num_envs))
        else:
            source = args.id if args.config is None else args.config
            overrides: dict[str, Any] = {"num_envs": num_envs, "seed": args.seed}
            if not args.id.endswith((".json", ".yaml", ".yml")):
                overrides["id"] = args.id
            elif args.config is not None:
                raise ConfigError(f"--config: expected the name of an environment before it, got the file {args.id}")
            with explaining_paths(args.id):
                env = stack.enter_context(make_to_watch(source, args.trust, video=args.video is not None, **overrides))
            act = choose_policy(env, args.policy or "expert", args.seed)
        recorder = None
        if args.video is not None:
            recorder = EpisodeRecorder(env, args.video, args.video_episodes, args.camera, args.size, args.speed)
            stack.callback(recorder.close)
        episodes, seconds = watch_episodes(env, act, args.episodes, args.seed, console, recorder)
        files = recorder.finish() if recorder is not None else []
    actor = f"{args.checkpoint} checkpoint" if os.path.isdir(args.id) else args.policy or "expert"
    print_summary(console, f"{args.id}, {actor}", episodes, seconds)
    if recorder is not None:
        print_files(console, files, recorder.problem)
    return 0


def _as_view(args: PlayArgs) -> ViewArgs:
    """Return the equivalent options of ``embodichain view``."""
    actor = args.checkpoint if args.policy is None and os.path.isdir(args.id) else args.policy
    shown = ViewArgs(args.id, actor, seed=args.seed, config=args.config, trust=args.trust)
    return shown if args.num_envs is None else replace(shown, num_envs=args.num_envs)


@contextlib.contextmanager
def _acting_run(args: PlayArgs, num_envs: int) -> Iterator[tuple[VecEnv, PolicyActor]]:
    """Return the environments of a run and its policy; ``ConfigError`` for ``--policy``."""
    from embodichain.agents.rl.evaluation import PolicyActor
    from embodichain.envs.wrappers import chunked

    if args.policy is not None:
        raise ConfigError("--policy: expected none, as the policy of the run acts")
    asked = (Path(args.id), args.checkpoint, args.trust, args.episodes, num_envs, args.seed, args.video is not None)
    with opened_run(*asked, args.config) as run:
        env = chunked(run.env, run.policy.chunk_size)
        yield env, PolicyActor(run.policy, env)


def choose_policy(env: VecEnv, name: PolicyName, seed: int) -> ActionSource:
    """Return a function that selects actions; ``EnvContractError`` if the env has no expert."""
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
    """Run ``count`` episodes with a progress bar; return their results and the wall time in seconds."""
    from embodichain.agents.rl.evaluation import PolicyActor
    from embodichain.envs.recording import roll

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    episodes: list[EpisodeResult] = []
    start = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("episodes", total=count)
        for step in roll(env, act, count, seed):
            episodes += step.ended
            progress.update(bar, advance=len(step.ended))
            if isinstance(act, PolicyActor):
                act.reset([episode.env for episode in step.ended])  # clears the recurrent state
            if recorder is not None:
                recorder.watch(step)
    return episodes, time.perf_counter() - start
