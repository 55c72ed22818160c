"""Events that act on bodies and the robot: poses, pushes, forces, delays, noise, calibration."""

from typing import Any, Literal

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.config.classes import Config, NotNegative, Number, Positive, configclass
from embodichain.envs.curricula import Range
from embodichain.envs.env_cfg import DelaySteps
from embodichain.envs.event_terms import FREE, Mass, Names, find_names, ids_of, names_of, quaternion_product, select
from embodichain.envs.randomization import Calibration, Draw, EventTerm, Rows, World
from embodichain.envs.robots import servo_scale
from embodichain.errors import ConfigError

_AXES = ("x", "y", "z", "roll", "pitch", "yaw")

Directions = dict[Literal["x", "y", "z", "roll", "pitch", "yaw"], Range]
"""Ranges by direction; omitted ones are 0."""


def free_body(world: World, chosen: str | None) -> int:
    """Return the id of the named body, which must have a free joint; default: the only one that has."""
    model = world.model
    free = np.isin(np.arange(model.nbody), model.jnt_bodyid[model.jnt_type == FREE])
    names = names_of(model, "bodies")
    has = ", ".join(name for name, ok in zip(names, free, strict=True) if ok)
    if not has and (chosen is None or chosen in names):
        problem = "no body of the model has a free joint; use push_joints, or apply_force"
        raise ConfigError(f"{world.key}.params.body: {problem}")
    found = find_names(world, "body", chosen, names, free, f"with a free joint: {has}")
    if len(found) > 1:
        raise ConfigError(f"{world.key}.params.body: several bodies have a free joint, name one of {has}")
    return found[0]


class BodyPose(EventTerm):
    """Initial pose of a body with a free joint: relative to the pose of the task, or absolute."""

    modes = ("reset",)
    fields = ("qpos",)

    def __init__(self, world: World, pose_range: Directions, body: str | None = None, relative: bool = True) -> None:
        super().__init__(world)
        given: dict[Any, Any] = pose_range
        self._first = int(world.model.jnt_qposadr[world.model.body_jntadr[free_body(world, body)]])
        self._ranges, self._relative = [given.get(axis, (0.0, 0.0)) for axis in _AXES], relative

    def apply(self, rows: Rows, draw: Draw) -> None:
        drawn = torch.cat([draw.values(bounds, 1) for bounds in self._ranges], dim=1)
        qpos, turn = rows["qpos"], _quaternion(drawn[:, 3:])
        place, facing = (slice(self._first + begin, self._first + end) for begin, end in ((0, 3), (3, 7)))
        if self._relative:
            drawn, turn = qpos[:, place] + drawn[:, :3], quaternion_product(turn, qpos[:, facing])
        qpos[:, place], qpos[:, facing] = drawn[:, :3].to(qpos.dtype), turn.to(qpos.dtype)


def _quaternion(angles: Tensor) -> Tensor:
    """Return rotations ``[n, 4]`` by roll, pitch and yaw ``[n, 3]`` about fixed axes, in this order."""
    (cr, cp, cy), (sr, sp, sy) = torch.cos(0.5 * angles).unbind(1), torch.sin(0.5 * angles).unbind(1)
    parts = (cr * cp * cy + sr * sp * sy, sr * cp * cy - cr * sp * sy)
    return torch.stack((*parts, cr * sp * cy + sr * cp * sy, cr * cp * sy - sr * sp * cy), dim=1)


@configclass
class EntityCfg(Config):
    """Reference to a body, in configs of DexForce's EmbodiChain."""

    uid: str
    """Name of the body."""


Corners = tuple[tuple[Number, Number, Number], tuple[Number, Number, Number]]
"""Minimum and maximum coordinates."""


class RigidObjectPose(BodyPose):
    """``body_pose`` in the format of DexForce's EmbodiChain; angles are in degrees."""

    def __init__(
        self,
        world: World,
        entity_cfg: EntityCfg,
        position_range: Corners = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
        rotation_range: Corners = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
        relative_position: bool = True,
    ) -> None:
        low, high = ([*position_range[i], *np.deg2rad(rotation_range[i]).tolist()] for i in (0, 1))
        pairs: Any = {axis: pair for axis, *pair in zip(_AXES, low, high, strict=True)}
        super().__init__(world, pairs, entity_cfg.uid, relative_position)


class RigidObjectMass(Mass):
    """``mass`` in the format of DexForce's EmbodiChain, in kg."""

    def __init__(self, world: World, entity_cfg: EntityCfg, mass_range: Range, relative: bool = False) -> None:
        super().__init__(world, mass_range, bodies=entity_cfg.uid, operation="add" if relative else "abs")


class Push(EventTerm):
    """A sudden velocity change of a body with a free joint, like an impact."""

    modes = ("interval", "reset", "step")
    fields = ("qvel",)

    def __init__(self, world: World, velocity_range: Directions, body: str | None = None) -> None:
        super().__init__(world)
        self._dof = int(world.model.body_dofadr[free_body(world, body)])
        given: dict[Any, Any] = velocity_range
        if not given:
            raise ConfigError(
                f"{world.key}.params.velocity_range: expected a range of at least one of {', '.join(_AXES)}"
            )
        self._ranges = [given.get(axis, (0.0, 0.0)) for axis in _AXES]

    def apply(self, rows: Rows, draw: Draw) -> None:
        hit = torch.cat([draw.values(bounds, 1) for bounds in self._ranges], dim=1)
        qvel = rows["qvel"]
        qvel[:, self._dof : self._dof + 6] += hit.to(qvel.dtype)


class PushJoints(EventTerm):
    """A sudden velocity change of joints."""

    modes = ("interval", "reset", "step")
    fields = ("qvel",)

    def __init__(self, world: World, range: Range, joints: Names | None = None) -> None:
        super().__init__(world)
        model = world.model
        found = select(world, "joints", joints, model.jnt_type != FREE, "that are not free")
        dofs = [dof for dof in np.arange(model.nv).tolist() if model.dof_jntid[dof] in found]
        self._index, self._size, self._range = (slice(None), ids_of(world, dofs)), len(dofs), range

    def apply(self, rows: Rows, draw: Draw) -> None:
        qvel = rows["qvel"]
        qvel[self._index] += draw.values(self._range, self._size).to(qvel.dtype)


class ApplyForce(EventTerm):
    """A force and a torque on the centre of mass of bodies for some time, in the world frame; several add up."""

    modes = ("interval", "reset")

    def __init__(
        self,
        world: World,
        bodies: Names,
        force_range: dict[Literal["x", "y", "z"], Range] = {},  # noqa: B006 - never modified
        torque_range: dict[Literal["x", "y", "z"], Range] = {},  # noqa: B006
        duration_s: Positive = 0.2,
    ) -> None:
        super().__init__(world)
        found = select(world, "bodies", bodies, world.model.body_mass > 0, "with mass")
        self._index, self._count = (slice(None), ids_of(world, found)), len(found)
        given: list[dict[Any, Any]] = [force_range, torque_range]
        self._ranges = [parts.get(axis, (0.0, 0.0)) for parts in given for axis in _AXES[:3]]
        self._steps = max(1, round(duration_s / world.step_seconds))
        self._applied = world.physics.applied_forces()
        self.variables["force"] = world.zeros(len(found), 6, dtype=self._applied.dtype)
        self.variables["until"] = world.zeros(dtype=torch.int64)

    def begin(self, rows: Rows, draw: Draw) -> None:
        rows["until"] = torch.zeros_like(rows["until"])

    def apply(self, rows: Rows, draw: Draw) -> None:
        force = torch.stack([draw.values(bounds, self._count) for bounds in self._ranges], dim=-1)
        rows["force"] = force.to(self._applied.dtype)
        rows["until"] = torch.zeros_like(rows["until"]) + self._steps if draw.step is None else draw.step + self._steps

    def clear(self) -> None:
        self._applied[self._index] = 0.0

    def every_step(self, step: Tensor) -> None:
        lasts = (step < self.variables["until"]).view(-1, 1, 1)
        self._applied[self._index] += torch.where(lasts, self.variables["force"], 0.0)


class ActionDelay(EventTerm):
    """Delays actions by some steps; during the first steps of an episode, its first action is applied."""

    modes = ("reset",)

    def __init__(self, world: World, steps: DelaySteps) -> None:
        super().__init__(world)
        self._steps, self._slots = steps, steps[1] + 1
        self._rows = torch.arange(world.physics.num_envs, device=world.physics.device)
        self.variables["delay"] = world.zeros(dtype=torch.int64)
        self.variables["sent"] = world.zeros(self._slots, world.action_dim)

    def apply(self, rows: Rows, draw: Draw) -> None:
        rows["delay"] = draw.steps(self._steps)

    def act(self, action: Tensor, step: Tensor, draw: Draw) -> Tensor:
        sent = self.variables["sent"]
        sent[self._rows, step % self._slots] = action.to(sent.dtype)
        return sent[self._rows, (step - self.variables["delay"]).clamp_min(0) % self._slots]


class ActionNoise(EventTerm):
    """Noise on actions in every step, and a bias per action dimension that is constant in an episode."""

    modes = ("step", "reset")

    def __init__(
        self, world: World, std: NotNegative = 0.0, uniform: Range = (0.0, 0.0), bias: Range = (0.0, 0.0)
    ) -> None:
        super().__init__(world)
        if not std and uniform == bias == (0.0, 0.0):
            raise ConfigError(f"{world.key}.params: nothing varies; give std, or a range of uniform or bias")
        self._std, self._uniform, self._bias = std, uniform, bias
        self._size = world.action_dim
        self.variables["bias"] = world.zeros(world.action_dim)

    def begin(self, rows: Rows, draw: Draw) -> None:
        rows["bias"] = draw.values(self._bias, self._size).to(torch.float32)

    def act(self, action: Tensor, step: Tensor, draw: Draw) -> Tensor:
        size = action.shape[1]
        noise = draw.values(self._uniform, size) + self._std * draw.normal(size) + self.variables["bias"]
        return (action + noise).to(action.dtype).clamp(-1.0, 1.0)


class JointOffset(Calibration):
    """Calibration error of the robot's joints: a constant offset of measured and commanded positions."""

    modes = ("reset",)

    def __init__(self, world: World, range: Range, distribution: Literal["uniform", "gaussian"] = "uniform") -> None:
        super().__init__(world)
        if world.robot is None:
            raise ConfigError(f"{world.key}.func: joint_offset needs a task with a robot, whose joints are observed")
        model, device = world.model, world.physics.device
        columns = torch.arange(model.nq, device=device)[world.robot.qpos].tolist()
        driven = model.jnt_qposadr[np.clip(model.actuator_trnid[:, 0], 0, model.njnt - 1)].tolist()
        is_servo = (model.actuator_trntype == int(mujoco.mjtTrn.mjTRN_JOINT)) & (model.actuator_biasprm[:, 1] != 0)
        is_servo &= model.actuator_gainprm[:, 0] != 0
        pairs = [(i, columns.index(at)) for i, at in enumerate(driven) if is_servo[i] and at in columns]
        self._servos, self._joints = (torch.tensor([p[i] for p in pairs], device=device).long() for i in (0, 1))
        scales = [servo_scale(model, i)[0] for i, _ in pairs]
        self._scale = None if all(scale == 1.0 for scale in scales) else world.tensor(scales)
        self._range, self._distribution, self._size = range, distribution, len(columns)
        self.variables["offset"] = world.zeros(self._size)

    def apply(self, rows: Rows, draw: Draw) -> None:
        rows["offset"] = draw.values(self._range, self._size, self._distribution).to(torch.float32)

    @property
    def offset(self) -> Tensor:
        return self.variables["offset"]

    def correct(self, control: Tensor) -> Tensor:
        offset = self.offset[:, self._joints].to(control.dtype)
        if self._scale is not None:  # a servo whose control is not the joint position
            offset = offset * self._scale.to(control.dtype)
        return control.index_add(1, self._servos, offset, alpha=-1)
