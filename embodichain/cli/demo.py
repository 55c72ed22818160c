"""``embodichain demo``: a small demonstration: a robot arm pushes a cube, on the CPU, in under three minutes."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from embodichain.cli.options import loading, parse_options
from embodichain.cli.play import choose_policy, watch_episodes
from embodichain.cli.summary import print_files, print_summary

_TASK = "PushCubeRL"


@dataclass(frozen=True)
class DemoArgs:
    """Run the scripted expert that pushes a cube to random goals; print its success rate and record a video."""

    output: Path = Path("outputs/demo")
    """Folder for the video and the images."""
    episodes: int = 100
    """Number of episodes."""
    num_envs: int = 25
    """Number of envs stepped together."""
    seed: int = 0
    """Seed of all random numbers."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = parse_options(DemoArgs, argv, "embodichain demo")

    with loading():
        from embodichain.envs.recording import EpisodeRecorder, write_image
        from embodichain.envs.registration import make

    console = Console()
    console.print(f"The scripted expert of {_TASK} pushes a cube to a random goal, {args.num_envs} robots at a time.")
    video = args.output / "push_cube.mp4"
    with (
        make(_TASK, num_envs=args.num_envs, seed=args.seed) as env,
        closing(EpisodeRecorder(env, video, episodes=4, speed=0.5)) as recorder,
    ):
        act = choose_policy(env, "expert", args.seed)
        episodes, seconds = watch_episodes(env, act, args.episodes, args.seed, console, recorder)
        files = recorder.finish()
    for name, image in (("push_cube", recorder.still), ("push_cube_from_above", recorder.plot)):
        if recorder.problem is None and image is not None:
            files.append(write_image(args.output / f"{name}.png", image))
    print_summary(console, f"{_TASK}, expert", episodes, seconds)
    print_files(console, files, recorder.problem)
    return 0
