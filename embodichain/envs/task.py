"""The interface of a task: reset, observation, reward, success, expert. Tasks are in torch and run on any backend."""

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
from embodichain.errors import ConfigError, UnknownNameError, nearest

Scene = dict[str, Tensor]
"""Named quantities of the current state, float32 ``[n, ...]``; rewards and observations are computed from them."""


class UnknownQuantityError(UnknownNameError, KeyError):
    """A quantity that the task does not measure was requested; the message lists the measured ones."""

    __str__ = Exception.__str__  # a KeyError shows the repr of its message


class Measurements(dict[str, Tensor]):
    """A scene whose missing keys raise an error that lists the measured quantities."""

    def __missing__(self, name: str) -> Tensor:
        problem = f"scene[{name!r}]: nothing of that name is measured.{nearest(str(name), self)}"
        hint = "is_held(scene, 'cube', width) of embodichain.envs.terms tells whether the fingers hold a thing"
        raise UnknownQuantityError(f"{problem} A task measures more in its method read; {hint}")


@dataclass
class ResetState:
    """The state in which episodes start: positions, velocities, and task variables such as the goal.

    ``poses`` are the poses ``[n, 7]`` of mocap bodies: fixtures, which are placed anew in every episode.
    """

    qpos: Tensor
    qvel: Tensor
    variables: dict[str, Tensor] = field(default_factory=dict)
    poses: dict[str, Tensor] = field(default_factory=dict)
    demonstrated: Tensor | None = None
    """Bool ``[n]``: states of demonstrations, in which reset events move nothing."""


Start = ResetState  # former name


class PlacedThings(Protocol):
    """The objects, fixtures and goals of ``env.scene`` in a compiled model."""

    def sample(self, env_ids: Tensor, streams: RandomStreams, start: ResetState) -> None:
        """Sample the poses of everything for the next episodes, and write them into the reset states."""

    def read(self, snapshot: Tensor, env_ids: Tensor | None = None) -> Scene:
        """Measure everything; ``snapshot`` ``[n, nq + nv]`` holds the positions and velocities of ``env_ids``."""

    def observe(self, scene: Scene) -> dict[str, Any]:
        """Return the observations of all observed things, by name."""


class ModelCameras(Protocol):
    """The cameras of a model, rendered env by env on the host; a backend may render all envs at once instead."""

    @property
    def cfgs(self) -> Mapping[str, CameraCfg]:
        """Cameras that are part of the observation, by name."""

    @property
    def segmentation_names(self) -> tuple[str, ...]:
        """The name of each segmentation id: the background, then the bodies in model order."""

    def bounds(self) -> dict[tuple[str, ...], tuple[float, float]]:
        """Return the minimum and maximum of every camera observation, by ``(group, camera)``."""

    def render(
        self, load: Load, env_ids: Sequence[int], camera: str | None, size: tuple[int, int] | None, quality: Quality
    ) -> np.ndarray:
        """Return uint8 images ``[len(env_ids), H, W, 3]``; ``size`` (height, width) defaults to the camera's own."""

    def observe(self, load: Load, env_ids: Sequence[int]) -> Images:
        """Return the camera observations of these envs."""

    def close(self) -> None:
        """Release renderers; may be called more than once."""


class Builder(Protocol):
    """Builds the model of a task and finds its parts; see :attr:`Task.builder`."""

    def build_model(self, task: type["Task"], cfg: GymCfg) -> mujoco.MjModel:
        """Compile the model of a task."""

    def find_robot(self, cfg: GymCfg, physics: Physics) -> Robot:
        """Return the robot in a model built from this config."""

    def place_scene(self, cfg: GymCfg, physics: Physics) -> PlacedThings:
        """Return the things of ``env.scene`` in a model built from this config."""

    def open_cameras(self, cfg: GymCfg, model: mujoco.MjModel, varied: bool) -> ModelCameras:
        """Return the cameras of a model; ``varied``: envs look different, and ``load`` changes the renderer's model."""


class Task(ABC):
    """A task: reset states, observations, rewards, success, and optionally an expert."""

    builder: ClassVar[str] = "embodichain.envs.construction:SceneBuilder"
    """Entry point of the ``Builder``, imported when a model is built."""
    scene_file: ClassVar[str]
    """MJCF file of the scene: next to the task's module, in the package's ``assets``, or an absolute path."""
    reward_weights: ClassVar[dict[str, float]]
    """Terms of the dense reward and their default weights."""
    object_body: ClassVar[str | None] = None
    """Body whose friction and mass can be randomised."""
    camera: str | None = "side"
    """Default camera of ``render``; ``None`` is a view of the whole model."""
    outputs: ClassVar[tuple[str, ...]] = ()
    """Fields of ``MjData`` that the task reads through ``physics.outputs``."""
    observes_afresh: ClassVar[bool] = False
    """Whether ``observe`` returns newly allocated tensors, so that a single vector need not be copied."""
    understands_language: ClassVar[bool] = False
    """Whether the task supports ``env.language``."""
    understands_commands: ClassVar[bool] = False
    """Whether the task supports ``env.command``."""
    needs_success: ClassVar[bool] = False
    """Whether ``success`` must not return ``None``."""

    robot: Robot
    """The robot, if the task has one."""

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
            start = self._home[robot.qpos][robot.joint_columns]
            lower, upper = robot.lower.to(start), robot.upper.to(start)
            endless = lower >= upper  # a joint without limits
            low, high = (
                (lower - start).masked_fill(endless, -torch.inf),
                (upper - start).masked_fill(endless, torch.inf),
            )
            self._room = low.clamp_max(0.0), high.clamp_min(0.0)
            """How far each joint can be moved from where it starts, within its limits."""
        if robot is None and not cfg.env.scene.empty:
            raise ConfigError(f"env.scene: {cfg.id} has a scene of its own, which a config cannot add to; leave it out")
        self.placed = None if cfg.env.scene.empty else self._builder().place_scene(cfg, physics)
        """The things of ``env.scene``, if there are any."""
        self.variables: dict[str, Tensor] = {}
        """Per-env values ``[num_envs, ...]`` that are sampled at reset and saved with the state."""

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
        """Return whether the task supports these keyword arguments of the Gymnasium environment that it replaces."""
        return not kwargs

    @classmethod
    def build_model(cls, cfg: GymCfg) -> mujoco.MjModel:
        """Compile the scene with the configured robot in it."""
        return cls._builder().build_model(cls, cfg)

    @classmethod
    def make_robot(cls, cfg: GymCfg, physics: Physics) -> Robot | None:
        """Return the robot in the model, or ``None`` if the actions drive all motors of the model."""
        return cls._builder().find_robot(cfg, physics)

    def open_cameras(self, varied: bool) -> ModelCameras:
        """Return the cameras of the model; ``varied``: the visual appearance differs between envs."""
        return self._builder().open_cameras(self.cfg, self.physics.model, varied)

    @classmethod
    def _builder(cls) -> Builder:
        builder: Builder = pkgutil.resolve_name(cls.builder)
        return builder

    @abstractmethod
    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        """Sample a reset state for each of ``env_ids``, from ``streams`` only: they are sampled ahead of time."""

    @abstractmethod
    def read(self, env_ids: Tensor | None = None) -> Scene:
        """Measure the current state of ``env_ids`` (default: all)."""

    @abstractmethod
    def observe(self, scene: Scene) -> dict[str, Any]:
        """Return the observation as a nested dict of float32 tensors ``[n, ...]``."""

    def before_step(self) -> None:  # noqa: B027 - most rewards depend on the new state only
        """Store quantities that the new state is compared with; called before every step."""

    def take_action(self, action: Tensor) -> None:  # noqa: B027 - most tasks do not depend on past actions
        """Store what later steps need of an action ``[num_envs, action_dim]``; called before every step."""

    def after_step(self, scene: Scene) -> None:  # noqa: B027 - most tasks do not depend on past states
        """Store what later steps need of the state that a step has reached; called before it is scored."""

    @abstractmethod
    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        """Return the unweighted terms of ``reward_weights``; ``scene["success"]`` is 1 where the task is solved."""

    @abstractmethod
    def success(self, scene: Scene) -> Tensor | None:
        """Return where the task is solved, bool ``[n]``, or ``None`` if it has no success condition."""

    def failed(self, scene: Scene) -> Tensor | None:
        """Return where the episode terminates in failure, bool ``[n]``, or ``None`` if the task cannot fail."""
        return None

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        """Return metrics to log, ``[n]`` each; the environment adds ``success`` and ``diverged``."""
        return {}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Return the scripted expert's action for this state, ``[n, action_dim]``."""
        raise ConfigError(f"{self.cfg.id} has no expert: write expert_action in its class, or use a trained policy")

    @classmethod
    def has_expert(cls) -> bool:
        """Return whether the task defines ``expert_action``."""
        return cls.expert_action is not Task.expert_action

    def markers(self) -> dict[str, Tensor]:
        """Return positions ``[num_envs, 3]`` of mocap bodies, such as the goal, for rendering."""
        return {}

    def start_robot(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        """Return the default state with the robot at ``init_qpos``, randomised as configured, and the scene placed."""
        count, joints = env_ids.numel(), self.robot.num_joints
        qpos = self._home.repeat(count, 1)
        qvel = qpos.new_zeros(count, int(self.physics.model.nv))
        spread = self.cfg.env.events.randomize_robot
        if spread is not None:
            drawn = streams.uniform(env_ids, 2 * joints, -1.0, 1.0)
            moved = (spread.position * drawn[:, :joints]).clamp(*self._room)
            add_columns(qpos, self.robot.qpos, self.robot.joint_columns, moved)
            add_columns(qvel, self.robot.qvel, self.robot.joint_columns, spread.velocity * drawn[:, joints:])
        start = ResetState(qpos, qvel)
        if self.placed is not None:
            self.placed.sample(env_ids, streams, start)
        return start


def add_columns(rows: Tensor, robot: slice | Tensor, columns: slice | Tensor, values: Tensor) -> None:
    """Add values ``[n, k]`` in place to ``columns`` of the robot's part of ``rows``."""
    if isinstance(robot, slice) and isinstance(columns, slice):
        rows[:, robot][:, columns].add_(values)
    else:
        every = torch.arange(rows.shape[1], device=rows.device)
        rows.index_add_(1, every[robot][columns], values.to(rows.dtype))


def draw_poses(areas: Sequence[PoseRangeCfg], env_ids: Tensor, streams: RandomStreams) -> tuple[Tensor, ...]:
    """Sample x, y, z and yaw ``[n, 4]`` from each pose range in a single draw."""
    ranges = [r for area in areas for r in (area.x, area.y, area.z, area.yaw)]
    return draw_ranges(ranges, env_ids, streams).split(4, dim=1)


def draw_ranges(ranges: Sequence[tuple[float, float]], env_ids: Tensor, streams: RandomStreams) -> Tensor:
    """Sample one number from each range, ``[n, len(ranges)]``; ranges may follow a curriculum."""
    return streams.uniform(env_ids, len(ranges), *present_bounds(ranges, env_ids, streams))


def present_bounds(
    ranges: Sequence[tuple[float, float]], env_ids: Tensor, streams: RandomStreams
) -> tuple[Tensor, Tensor]:
    """Return the current lower and upper bounds of the ranges in these envs, ``[1 or n, len(ranges)]`` each."""
    low, high = _bounds(tuple(tuple(bounds) for bounds in ranges), env_ids.device)
    if streams.curricula is None or not any(isinstance(bounds, MovingRange) for bounds in ranges):
        return low.unsqueeze(0), high.unsqueeze(0)
    ends = [streams.curricula.bounds(bounds, env_ids) for bounds in ranges]
    zeros = torch.zeros(env_ids.numel(), 1, dtype=torch.float64, device=env_ids.device)
    first, last = (torch.cat([zeros + end[i] for end in ends], dim=1) for i in (0, 1))
    return first, last


@lru_cache(maxsize=64)
def _bounds(ranges: tuple[tuple[float, float], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lower and upper bounds on a device, cached because a copy from the host would synchronise."""
    bounds = torch.tensor(ranges, dtype=torch.float64, device=device)
    return bounds[:, 0], bounds[:, 1]
