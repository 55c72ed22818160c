"""``embodichain record CONFIG --out DIR``: write the episodes of a stream as a LeRobotDataset v3 folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
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
    from embodichain.agents.datasets.frames import EpisodeSource, Key
    from embodichain.agents.datasets.lerobot import Trace
    from embodichain.envs.env_cfg import GymCfg

_DEFAULT_FPS = 30
_INSTRUCTIONS = 8
"""Instructions whose episodes are counted in the output."""


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
    """Frames per second; None uses the rate of the simulation."""
    task: str | None = None
    """Task description; None uses the instruction of every episode, or the name of the environment."""
    robot_type: str | None = None
    """Name of the robot; None uses that of the simulation."""
    quality: int = 18
    """Quality of the videos: 0 is lossless, 51 the worst."""
    states: bool = False
    """Also record simulation states, so that 'embodichain view' shows the episodes in 3D."""
    trust: Trust = ()
    read: bool = False
    """Read the folder back and compare it with what was written."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args, cfg = parse_command(RecordArgs, "embodichain record", argv)

    with loading():
        from embodichain.agents.datasets.lerobot import LeRobotWriter, read_back, record
        from embodichain.agents.engine.sources import MixedEpisodes, open_source
        from embodichain.viewer.replay import write_scene

    check_counts({"--episodes": args.episodes})
    console = Console()
    with closing(open_source(cfg, numbered=False)) as source:  # the same episodes as the stream's first worker
        scene = _keep_states(source) if args.states else None
        about = describe(source)
        tasks = cfg.tasks() if isinstance(source, MixedEpisodes) else []  # a folder of episodes has its own
        if isinstance(source, MixedEpisodes):
            source.quotas = quotas_of([task.weight for task in tasks], args.episodes)
        name = str(args.config if isinstance(cfg.gym_config, list) else cfg.gym_config.get("id", args.config))
        if cfg.check().source == "random" and not _has_expert(source):
            console.print(
                f"{name} has no scripted expert, so random actions are recorded; --action_config.source policy "
                "--action_config.path RUN records a policy"
            )
        writer = LeRobotWriter(
            args.out,
            source.layout,
            args.fps or about.fps,
            args.task or name,
            args.robot_type or about.robot_type,
            args.quality,
            about.names,
        )
        with writer, Progress(console=console, transient=True) as progress:
            recorded = record(source, writer, args.episodes, cfg.check().only_success, args.task)
            traces = list(progress.track(recorded, total=args.episodes, description="recording"))
    if scene is not None:
        write_scene(args.out, scene)
    frames = sum(trace.length for trace in traces)
    console.print(f"{args.out}: {len(traces)} episodes, {frames} frames at {writer.fps} per second")
    for line in _counted(traces, [task.name for task in tasks], args.task or name):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    if args.read:
        likeness = read_back(args.out, traces)
        images = "" if likeness is None else f"; images alike to {likeness:.1f} dB or better"
        console.print(f"read back: {len(traces)} episodes, {frames} frames, numbers identical{images}")
    return 0


def quotas_of(weights: Sequence[float], episodes: int) -> list[int]:
    """Return the number of episodes of each task, in proportion to weights and at least one each; with fewer episodes
    than tasks, one of each of the heaviest tasks."""
    from embodichain.envs.multi_task import shares_of

    if len(weights) <= episodes:
        return shares_of(weights, episodes) if weights else []
    chosen = sorted(range(len(weights)), key=lambda i: -weights[i])[:episodes]
    return [int(i in chosen) for i in range(len(weights))]


def _counted(traces: Sequence[Trace], tasks: Sequence[str], default: str) -> list[str]:
    """Return how many episodes there are of each of several tasks, and of each of several instructions."""
    words = Counter((trace.task_index, trace.task or default) for trace in traces)
    if not tasks:
        return _shortened([f"{text}: {number}" for (_, text), number in words.most_common()]) if len(words) > 1 else []
    lines = []
    for index, task in enumerate(tasks):
        own = [(text, number) for (of, text), number in words.most_common() if of == index]
        inner = ", ".join(_shortened([f"{text} {number}" for text, number in own]))
        lines.append(f"{task}: {sum(number for _, number in own)}" + (f" ({inner})" if inner else ""))
    return lines


def _shortened(parts: list[str]) -> list[str]:
    """Return the first parts, and the number of those left out."""
    more = len(parts) - _INSTRUCTIONS
    return [*parts[:_INSTRUCTIONS], f"and {more} more instructions"] if more > 0 else parts


def _has_expert(source: EpisodeSource) -> bool:
    """Return whether a simulated source has a scripted expert; of others that is not asked."""
    from embodichain.agents.engine.sources import SimulatedEpisodes
    from embodichain.envs.vec_env import HasExpert

    env = source.env if isinstance(source, SimulatedEpisodes) else None
    return env is None or (isinstance(env, HasExpert) and env.has_expert)


def _keep_states(source: EpisodeSource) -> GymCfg:
    """Make a source record simulation states, and return the settings of the environment."""
    from embodichain.agents.engine.sources import SimulatedEpisodes
    from embodichain.envs.task_env import TaskEnv
    from embodichain.viewer.replay import states_of

    env = source.env if isinstance(source, SimulatedEpisodes) else None
    if not isinstance(source, SimulatedEpisodes) or not isinstance(env, TaskEnv):
        raise ConfigError("--states: only tasks that are simulated here have positions to record; leave it out")
    source.also_keep(lambda: states_of(env))
    return env.cfg


@dataclass(frozen=True)
class SourceDescription:
    """Metadata of a dataset about the source of its frames."""

    fps: int = _DEFAULT_FPS
    robot_type: str | None = None
    names: Mapping[Key, Sequence[str]] = field(default_factory=dict)
    """Names of the components of an array, or of the ids in it, by its key."""


def describe(source: EpisodeSource) -> SourceDescription:
    """Return the frame rate, the robot and its joint names, as far as the source knows them."""
    from embodichain.agents.datasets.lerobot import RecordedEpisodes
    from embodichain.agents.datasets.lerobot.format import is_segmentation
    from embodichain.agents.engine.sources import MixedEpisodes, SimulatedEpisodes
    from embodichain.envs.multi_task import TaskView
    from embodichain.envs.task_env import TaskEnv
    from embodichain.viewer.replay import number_names, robot_name

    if isinstance(source, RecordedEpisodes):
        return SourceDescription(round(source.reader.fps), source.reader.info.robot_type, source.reader.names)
    if isinstance(source, MixedEpisodes):
        parts = [describe(one) for one in source.sources]
        names = {
            key: known
            for key, known in parts[0].names.items()
            if not is_segmentation(key) or all(part.names.get(key) == known for part in parts)
        }  # the ids of several tasks have names only if they mean the same bodies in all of them
        return replace(parts[0], names=names)
    env = source.env if isinstance(source, SimulatedEpisodes) else None
    env = env.env if isinstance(env, TaskView) else env
    if not isinstance(env, TaskEnv):
        return SourceDescription()
    fps = round(1.0 / (env.physics.model.opt.timestep * env.cfg.env.substeps))
    return SourceDescription(fps, robot_name(env), number_names(env))
