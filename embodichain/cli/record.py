"""``embodichain record CONFIG --out DIR``: write the episodes of a stream as a LeRobotDataset v3 folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
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
    from embodichain.envs.env_cfg import GymCfg
    from embodichain.envs.task_env import TaskEnv

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
    """What is to be done, in words; None takes the instruction of every episode, or the name of the environment."""
    robot_type: str | None = None
    """Name of the robot; None takes that of the simulation."""
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
    with closing(open_source(cfg, numbered=False)) as source:  # the episodes of the stream's first worker
        scene = _keep_states(source) if args.states else None
        about = describe(source)
        name = str(args.config if isinstance(cfg.gym_config, list) else cfg.gym_config.get("id", args.config))
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


@dataclass(frozen=True)
class SourceDescription:
    """What a dataset says of where its frames come from."""

    fps: int = _DEFAULT_FPS
    robot_type: str | None = None
    names: Mapping[Key, Sequence[str]] = field(default_factory=dict)
    """Names of the numbers of an array, by its key."""


def describe(source: EpisodeSource) -> SourceDescription:
    """Return the frame rate, the robot and the names of its joints, as far as the source knows them."""
    from embodichain.agents.datasets.lerobot import RecordedEpisodes
    from embodichain.agents.engine.sources import MixedEpisodes, SimulatedEpisodes
    from embodichain.envs.multi_task import TaskView
    from embodichain.envs.task_env import TaskEnv

    if isinstance(source, RecordedEpisodes):
        return SourceDescription(round(source.reader.fps), source.reader.info.robot_type, source.reader.names)
    if isinstance(source, MixedEpisodes):
        source = source.sources[0]
    env = source.env if isinstance(source, SimulatedEpisodes) else None
    env = env.env if isinstance(env, TaskView) else env
    if not isinstance(env, TaskEnv):
        return SourceDescription()
    fps = round(1.0 / (env.physics.model.opt.timestep * env.cfg.env.substeps))
    return SourceDescription(fps, robot_name(env), number_names(env))


def robot_name(env: TaskEnv) -> str | None:
    """Return the name of a simulation's robot, or the names of its robots."""
    if env.robot is None:
        return bytes(env.physics.model.names).split(b"\0")[0].decode() or None  # of the model
    robot = env.cfg.robot
    files = [Path(arm.mjcf).stem if arm.mjcf else getattr(arm, "uid", None) for arm in (robot, *robot.arms.values())]
    named = [name for name in dict.fromkeys(files[1:]) if name]
    return "+".join(named) or files[0]


def number_names(env: TaskEnv) -> dict[Key, list[str]]:
    """Return the names of joints, and of what an action is made of, without the prefix that the scene gives them."""
    from embodichain.envs.actions import RobotActionManager

    if env.robot is None or not isinstance(manager := env.action_manager, RobotActionManager):
        motors = [env.physics.model.actuator(i).name for i in range(env.physics.model.nu)]
        return {("action",): motors} if all(motors) else {}
    joints: list[str] = []
    actions: list[str] = []
    for key, arm in env.robot.arms.items():
        prefix = f"{key}_" if len(env.robot.arms) > 1 else ""
        own, fingers = ([name.rpartition("/")[2] for name in names] for names in (arm.joints, arm.fingers))
        joints += [prefix + name for name in (*own, *fingers)]
        moves = own if manager.action_type != "ee_delta" else ["x", "y", "z", "rx", "ry", "rz"]
        moves = moves[: manager.arms[key].term.dim]
        actions += [prefix + name for name in (*moves, *(["gripper"] if fingers else []))]
    return {("observation", "robot", "qpos"): joints, ("observation", "robot", "qvel"): joints, ("action",): actions}
