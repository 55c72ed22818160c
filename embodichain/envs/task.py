"""What a task adds to a simulated robot. Tasks are written once, in torch, and run on every physics backend."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.curricula import MovingRange
from embodichain.envs.env_cfg import CameraCfg, GymCfg, PoseRangeCfg
from embodichain.envs.physics import Images, Load, Physics, Quality
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.errors import ConfigError

Scene = dict[str, Tensor]
"""Named quantities of the present state, float32 ``[n, ...]``: what all of a task's formulas are written on."""


@dataclass
class ResetState:
    """The state in which episodes begin: positions, velocities, and the task's own variables such as the goal.

    ``poses`` place mocap bodies ``[n, 7]``: fixtures, which stand elsewhere in every episode, and which nothing moves.
    """

    qpos: Tensor
    qvel: Tensor
    variables: dict[str, Tensor] = field(default_factory=dict)
    poses: dict[str, Tensor] = field(default_factory=dict)


Start = ResetState  # former name


class PlacedThings(Protocol):
    """What ``env.scene`` describes, in a compiled model."""

    def sample(self, env_ids: Tensor, streams: RandomStreams, start: ResetState) -> None:
        """Draw where everything is in the next episodes, and write it into their reset states."""

    def read(self, snapshot: Tensor, env_ids: Tensor | None = None) -> Scene:
        """Measure everything; ``snapshot`` ``[n, nq + nv]`` are the positions and velocities of ``env_ids``."""

    def observe(self, scene: Scene) -> dict[str, Any]:
        """Return the observation of everything that is observed, by name."""


class ModelCameras(Protocol):
    """The cameras of a model, rendered env by env on this machine; a backend may have its own for all envs at once."""

    @property
    def cfgs(self) -> Mapping[str, CameraCfg]:
        """Those that observe, by name."""

    @property
    def segmentation_names(self) -> tuple[str, ...]:
        """The name of each id of a segmentation: the background, and then the bodies in the model's order."""

    def bounds(self) -> dict[tuple[str, ...], tuple[float, float]]:
        """Return the least and the largest value of all that is observed, by group and by the camera's name."""

    def render(
        self, load: Load, env_ids: Sequence[int], camera: str | None, size: tuple[int, int] | None, quality: Quality
    ) -> np.ndarray:
        """Return uint8 images ``[len(env_ids), H, W, 3]``; ``size`` (height, width) defaults to the camera's own."""

    def observe(self, load: Load, env_ids: Sequence[int]) -> Images:
        """Return what the cameras that observe see of these envs."""

    def close(self) -> None:
        """Free what they hold; calling it twice is fine."""


class Builder(Protocol):
    """Builds what tasks act in: :attr:`Task.builder` names one."""

    def build_model(self, task: type["Task"], cfg: GymCfg) -> mujoco.MjModel:
        """Compile the model of a task."""

    def find_robot(self, cfg: GymCfg, physics: Physics) -> Robot:
        """Return the robot in a model that was built of this config."""

    def place_scene(self, cfg: GymCfg, physics: Physics) -> PlacedThings:
        """Return the things of ``env.scene`` in such a model."""

    def open_cameras(self, cfg: GymCfg, model: mujoco.MjModel, varied: bool) -> ModelCameras:
        """Return the cameras of a model; ``varied``: envs look different, and a ``load`` writes to the data's model."""


class Task(ABC):
    """One task: how episodes begin, what is observed and rewarded, when it is solved, and perhaps an expert."""

    builder: ClassVar[str] = "embodichain.envs.construction:SceneBuilder"
    """Entry point of what builds the task's model and finds robot and things in it: imported when it is built."""
    scene_file: ClassVar[str]
    """MJCF file of the scene: beside the module of the task, in the package's ``assets``, or an absolute path."""
    reward_weights: ClassVar[dict[str, float]]
    """The dense reward's terms and their default weights."""
    object_body: ClassVar[str | None] = None
    """Body whose friction and mass can be randomised."""
    camera: str | None = "side"
    """The default camera of ``render``; ``None``: a view of the whole model."""
    outputs: ClassVar[tuple[str, ...]] = ()
    """Fields of ``MjData`` that the task reads from ``physics.outputs``."""
    observes_afresh: ClassVar[bool] = False
    """Whether ``observe`` returns memory that nobody else has, so that a single vector is not copied again."""
    understands_language: ClassVar[bool] = False
    """Whether ``env.language`` means something to the task."""
    understands_commands: ClassVar[bool] = False
    """Whether ``env.command`` means something to the task."""

    robot: Robot
    """The robot, of a task that has one."""

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot | None) -> None:
        if cfg.env.language is not None and not self.understands_language:
            raise ConfigError(f"env.language: {cfg.id} takes no instructions; leave it out")
        if cfg.env.command is not None and not self.understands_commands:
            raise ConfigError(f"env.command: {cfg.id} takes no commanded velocities; leave it out")
        self.cfg, self.physics = cfg, physics
        self._threshold = torch.tensor(cfg.env.success_threshold, device=physics.device)
        self._home = torch.tensor(physics.model.qpos0, dtype=torch.float64, device=physics.device)
        if robot is not None:
            self.robot = robot
            self._home = robot.home(self._home)
        if robot is None and not cfg.env.scene.empty:
            raise ConfigError(f"env.scene: {cfg.id} has a scene of its own, which a config cannot add to; leave it out")
        self.placed = None if cfg.env.scene.empty else self._builder().place_scene(cfg, physics)
        """What ``env.scene`` describes, if anything: places and measures it."""
        self.variables: dict[str, Tensor] = {}
        """Per-env values ``[num_envs, ...]`` that are drawn at reset and saved with the state."""

    @property
    def substeps(self) -> int:
        """Physics steps per environment step."""
        return self.cfg.env.substeps

    @staticmethod
    @abstractmethod
    def default_cfg() -> GymCfg:
        """Return the default configuration of the task."""

    @classmethod
    def understands(cls, kwargs: Mapping[str, Any]) -> bool:
        """Tell whether the task takes these arguments of an environment of Gymnasium that it stands for."""
        return not kwargs

    @classmethod
    def build_model(cls, cfg: GymCfg) -> mujoco.MjModel:
        """Compile the scene with the configured robot in it."""
        return cls._builder().build_model(cls, cfg)

    @classmethod
    def make_robot(cls, cfg: GymCfg, physics: Physics) -> Robot | None:
        """Return the robot in the model, or ``None`` for a task that drives all motors of its model by itself."""
        return cls._builder().find_robot(cfg, physics)

    def open_cameras(self, varied: bool) -> ModelCameras:
        """Return the cameras of the model; ``varied``: looks differ from env to env."""
        return self._builder().open_cameras(self.cfg, self.physics.model, varied)

    @classmethod
    def _builder(cls) -> Builder:
        builder: Builder = pkgutil.resolve_name(cls.builder)
        return builder

    @abstractmethod
    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        """Draw how one episode begins in each of ``env_ids``, from the streams alone: reset states are drawn ahead."""

    @abstractmethod
    def read(self, env_ids: Tensor | None = None) -> Scene:
        """Measure the present state of ``env_ids`` (default: all), from the state itself."""

    @abstractmethod
    def observe(self, scene: Scene) -> dict[str, Any]:
        """Return the nested observation, float32."""

    def before_step(self) -> None:  # noqa: B027 - most rewards are of the state reached alone
        """Remember what the state reached is compared with; called before every step."""

    def take_action(self, action: Tensor) -> None:  # noqa: B027 - most tasks need no memory of actions
        """Keep what later steps need of an action ``[num_envs, action_dim]``; called before every step."""

    @abstractmethod
    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        """Return the unweighted terms named in ``reward_weights``; ``scene["success"]`` is 1 where it is solved."""

    @abstractmethod
    def success(self, scene: Scene) -> Tensor | None:
        """Return where the task is solved, bool ``[n]``, or ``None`` if it has no end to reach."""

    def failed(self, scene: Scene) -> Tensor | None:
        """Return where an episode has to end without success, bool ``[n]``, or ``None`` if that cannot happen."""
        return None

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        """Return measures worth logging, ``[n]`` each; the environment adds ``success`` and ``diverged``."""
        return {}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Return what a scripted expert does in this state, ``[n, action_dim]``, of a task that has one."""
        raise ConfigError(f"{self.cfg.id} has no expert: write expert_action in its class, or use a trained policy")

    @classmethod
    def has_expert(cls) -> bool:
        """Tell whether the task defines ``expert_action``."""
        return cls.expert_action is not Task.expert_action

    def markers(self) -> dict[str, Tensor]:
        """Return positions ``[num_envs, 3]`` of mocap bodies, such as the goal, for rendering."""
        return {}

    def start_robot(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        """Return the model's own pose with the robot at ``init_qpos``, randomised as configured, and a placed scene."""
        count, joints = env_ids.numel(), self.robot.num_joints
        qpos = self._home.repeat(count, 1)
        qvel = qpos.new_zeros(count, int(self.physics.model.nv))
        spread = self.cfg.env.events.randomize_robot
        if spread is not None:
            drawn = streams.uniform(env_ids, 2 * joints, -1.0, 1.0)
            add_columns(qpos, self.robot.qpos, self.robot.joint_columns, spread.position * drawn[:, :joints])
            add_columns(qvel, self.robot.qvel, self.robot.joint_columns, spread.velocity * drawn[:, joints:])
        start = ResetState(qpos, qvel)
        if self.placed is not None:
            self.placed.sample(env_ids, streams, start)
        return start


def add_columns(rows: Tensor, robot: slice | Tensor, columns: slice | Tensor, values: Tensor) -> None:
    """Add values ``[n, k]`` to some columns of those of a robot, in place."""
    if isinstance(robot, slice) and isinstance(columns, slice):
        rows[:, robot][:, columns].add_(values)
    else:
        every = torch.arange(rows.shape[1], device=rows.device)
        rows.index_add_(1, every[robot][columns], values.to(rows.dtype))


def draw_poses(areas: Sequence[PoseRangeCfg], env_ids: Tensor, streams: RandomStreams) -> tuple[Tensor, ...]:
    """Draw x, y, z and yaw ``[n, 4]`` from each of several boxes at once."""
    ranges = [r for area in areas for r in (area.x, area.y, area.z, area.yaw)]
    return draw_ranges(ranges, env_ids, streams).split(4, dim=1)


def draw_ranges(ranges: Sequence[tuple[float, float]], env_ids: Tensor, streams: RandomStreams) -> Tensor:
    """Draw one number from each of several ranges, ``[n, len(ranges)]``; ranges may follow a curriculum."""
    return streams.uniform(env_ids, len(ranges), *present_bounds(ranges, env_ids, streams))


def present_bounds(
    ranges: Sequence[tuple[float, float]], env_ids: Tensor, streams: RandomStreams
) -> tuple[Tensor, Tensor]:
    """Return where several ranges begin and end in these envs, ``[1 or n, len(ranges)]`` each."""
    low, high = _bounds(tuple(tuple(bounds) for bounds in ranges), env_ids.device)
    if streams.curricula is None or not any(isinstance(bounds, MovingRange) for bounds in ranges):
        return low.unsqueeze(0), high.unsqueeze(0)
    ends = [streams.curricula.bounds(bounds, env_ids) for bounds in ranges]
    zeros = torch.zeros(env_ids.numel(), 1, dtype=torch.float64, device=env_ids.device)
    first, last = (torch.cat([zeros + end[i] for end in ends], dim=1) for i in (0, 1))
    return first, last


@lru_cache(maxsize=64)
def _bounds(ranges: tuple[tuple[float, float], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lower and upper bounds on a device, where they stay: a copy from the host would wait for it."""
    bounds = torch.tensor(ranges, dtype=torch.float64, device=device)
    return bounds[:, 0], bounds[:, 1]
