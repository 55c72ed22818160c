"""``embodichain record CONFIG --out DIR``: write the episodes of a stream as a LeRobotDataset v3 folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import Progress

from embodichain.cli.options import Trust, loading
from embodichain.cli.stream import parse_command
from embodichain.errors import ConfigError
from embodichain.utils.console import check_counts

if TYPE_CHECKING:
    from embodichain.agents.datasets.frames import EpisodeSource
    from embodichain.envs.env_cfg import GymCfg

_DEFAULT_FPS = 30


@dataclass(frozen=True)
class RecordArgs:
    """Record episodes to a folder. Every setting of the engine is a flag, too: --seed 7."""

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """File of engine settings, a gym_config.json, or the name of an environment."""
    out: Path
    """New folder for the dataset."""
    episodes: int = 50
    """Number of episodes."""
    fps: int | None = None
    """Frames per second; None takes the simulation's own rate."""
    task: str | None = None
    """What is to be done, in words; None takes the name of the environment."""
    quality: int = 18
    """Quality of the videos: 0 is lossless, 51 the worst."""
    states: bool = False
    """Record the positions of the simulation, too, so that 'embodichain view' shows the episodes in 3D."""
    trust: Trust = ()
    read: bool = False
    """Read the folder back and compare it with what was written."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args, cfg = parse_command(RecordArgs, "embodichain record", argv)

    with loading():
        from embodichain.agents.datasets.lerobot import LeRobotWriter, read_back, record
        from embodichain.agents.engine.sources import open_source
        from embodichain.viewer.replay import write_scene

    check_counts({"--episodes": args.episodes})
    console = Console()
    with closing(open_source(cfg)) as source:  # the episodes of the stream's first worker
        scene = _keep_states(source) if args.states else None
        name = args.task or str(cfg.gym_config.get("id", args.config))
        writer = LeRobotWriter(args.out, source.layout, args.fps or _rate(source), name, quality=args.quality)
        with writer, Progress(console=console, transient=True) as progress:
            recorded = record(source, writer, args.episodes, cfg.check().only_success)
            traces = list(progress.track(recorded, total=args.episodes, description="recording"))
    if scene is not None:
        write_scene(args.out, scene)
    frames = sum(trace.length for trace in traces)
    console.print(f"{args.out}: {len(traces)} episodes, {frames} frames at {writer.fps} per second")
    if args.read:
        likeness = read_back(args.out, traces)
        images = "" if likeness is None else f"; images alike to {likeness:.1f} dB or better"
        console.print(f"read back: {len(traces)} episodes, {frames} frames, numbers identical{images}")
    return 0


def _keep_states(source: EpisodeSource) -> GymCfg:
    """Let a source keep the positions of its simulation, and return the settings of the environment."""
    from embodichain.agents.engine.sources import SimulatedEpisodes
    from embodichain.envs.task_env import TaskEnv
    from embodichain.viewer.replay import states_of

    env = source.env if isinstance(source, SimulatedEpisodes) else None
    if not isinstance(source, SimulatedEpisodes) or not isinstance(env, TaskEnv):
        raise ConfigError("--states: only tasks that are simulated here have positions to record; leave it out")
    source.also_keep(lambda: states_of(env))
    return env.cfg


def _rate(source: EpisodeSource) -> int:
    """Return the number of steps per simulated second."""
    from embodichain.agents.engine.sources import SimulatedEpisodes
    from embodichain.envs.task_env import TaskEnv

    if isinstance(source, SimulatedEpisodes) and isinstance(source.env, TaskEnv):
        return round(1.0 / (source.env.physics.model.opt.timestep * source.env.cfg.env.substeps))
    return _DEFAULT_FPS
