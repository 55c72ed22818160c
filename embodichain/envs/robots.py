"""Robots in a compiled model: joints, actuators and kinematics of each arm, and their indices in the state.

``robot_adaptation.py`` analyses robot files, and ``construction.py`` adds robots to a scene.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.kinematics import SerialChain

_ELSEWHERE = {
    "ASSETS": "model_files",
    "ROBOTS": "robot_files",
    "TOOLS": "robot_files",
    "add_robot": "construction",
    "build_model": "construction",
    "describe": "robot_adaptation",
    "read_spec": "model_files",
    "register_robot": "robot_files",
    "register_tool": "robot_files",
}
"""Names that this module re-exports lazily, by the module that defines them; stepping needs none of these."""


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"embodichain.envs.{_ELSEWHERE[name]}"), name)


@dataclass
class ArmParts:
    """The parts of an arm, by their names in the model, and its initial posture."""

    joints: list[str]
    lower: list[float]
    upper: list[float]
    body: str
    """The last link, moved by the last joint."""
    site: str | None = None
    """Site of the tool; ``None`` for a robot without a tool."""
    site_body: str | None = None
    """Body to which the tool site is added, if the model has none."""
    site_pos: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Position of an added site in the frame of its body: between the fingers, if the config names no tool."""
    axis: np.ndarray = field(default_factory=lambda: np.array([0.0, 0.0, 1.0]))
    """Direction of the tool, in the site's frame."""
    fingers: list[str] = field(default_factory=list)
    hand: list[str] = field(default_factory=list)
    """All joints beyond the last link, including the fingers."""
    init: list[float] = field(default_factory=list)
    """Initial joint positions, without the fingers."""
    init_fingers: list[float] = field(default_factory=list)
    """Initial finger positions, if the config sets them; otherwise the gripper is open."""
    init_from: str = ""
    """Source of the initial positions."""


@dataclass
class Grip:
    """Actuation and finger positions of a gripper."""

    actuators: list[str]
    closed: list[float]
    """Controls of the actuators when closed."""
    open: list[float]
    """Controls of the actuators when open."""
    fingers_closed: list[float]
    """Finger positions when closed."""
    fingers_open: list[float]
    others: dict[str, float] = field(default_factory=dict)
    """Positions of the other joints of the hand when open."""
    gap_closed: float = 0.0
    """Distance between the fingers in metres when closed; negative if they overlap."""
    gap_open: float = 0.0


@dataclass(frozen=True)
class ArmSpec:
    """An arm of an adapted robot file; names are without the scene's prefix."""

    name: str
    parts: ArmParts
    grip: Grip | None
    down: tuple[tuple[float, ...], ...]
    """Orientation of the tool when it points straight down."""
    plain_opening: bool
    """Whether the finger positions sum to the distance between the fingers."""


@dataclass(frozen=True)
class RobotSpec:
    """The analysis of one robot file."""

    arms: tuple[ArmSpec, ...]
    held: dict[str, float]
    """Constant controls of the actuators that no arm uses."""
    locked: tuple[str, ...]
    """Joints that were removed."""
    dropped: tuple[str, ...]
    """Bodies of the file that are not part of the robot."""
    nu: int


def actuators_of(model: mujoco.MjModel, joint: int) -> list[int]:
    """Return the actuators that act on a joint, directly or through a tendon."""
    found = []
    for i in range(model.nu):
        kind, target = int(model.actuator_trntype[i]), int(model.actuator_trnid[i, 0])
        if kind in (int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_JOINTINPARENT)):
            acts = target == joint
        elif kind == int(mujoco.mjtTrn.mjTRN_TENDON):
            acts = joint in tendon_joints(model, target)
        else:
            acts = False
        if acts:
            found.append(i)
    return found


def tendon_joints(model: mujoco.MjModel, tendon: int) -> list[int]:
    """Return the joints that a fixed tendon couples."""
    first, count = int(model.tendon_adr[tendon]), int(model.tendon_num[tendon])
    wraps = range(first, first + count)
    return [int(model.wrap_objid[w]) for w in wraps if int(model.wrap_type[w]) == int(mujoco.mjtWrap.mjWRAP_JOINT)]


def drive_kind(model: mujoco.MjModel, actuator: int) -> str:
    """Return ``servo`` for position control, ``motor`` for a force or torque, else ``other``."""
    still = int(model.actuator_dyntype[actuator]) in (
        int(mujoco.mjtDyn.mjDYN_NONE),
        int(mujoco.mjtDyn.mjDYN_FILTER),
        int(mujoco.mjtDyn.mjDYN_FILTEREXACT),
    )
    fixed = int(model.actuator_gaintype[actuator]) == int(mujoco.mjtGain.mjGAIN_FIXED)
    bias = int(model.actuator_biastype[actuator])
    if not still or not fixed or not model.actuator_gainprm[actuator, 0]:
        return "other"
    if bias == int(mujoco.mjtBias.mjBIAS_NONE):
        return "motor"
    pulls = bias == int(mujoco.mjtBias.mjBIAS_AFFINE) and model.actuator_biasprm[actuator, 1] != 0
    return "servo" if pulls else "other"


def servo_of(model: mujoco.MjModel, joint: int) -> int | None:
    """Return the one position servo that drives a joint directly, or ``None``."""
    return _only(model, joint, "servo")


def motor_of(model: mujoco.MjModel, joint: int) -> int | None:
    """Return the one motor that drives a joint directly, or ``None``."""
    return _only(model, joint, "motor")


def _only(model: mujoco.MjModel, joint: int, kind: str) -> int | None:
    found = actuators_of(model, joint)
    direct = len(found) == 1 and int(model.actuator_trntype[found[0]]) != int(mujoco.mjtTrn.mjTRN_TENDON)
    return found[0] if direct and drive_kind(model, found[0]) == kind else None


def servo_scale(model: mujoco.MjModel, actuator: int) -> tuple[float, float]:
    """Return factor and offset that turn a joint target into the control of a servo."""
    gain, (offset, slope) = model.actuator_gainprm[actuator, 0], model.actuator_biasprm[actuator, :2]
    return float(-slope * model.actuator_gear[actuator, 0] / gain), float(-offset / gain)


def saturation(model: mujoco.MjModel, joint: int, actuator: int) -> float:
    """Return the displacement of a joint from its target at which its servo gives its maximum torque; may be infinite.

    Torques are limited at the actuator (``forcerange``, times the gear) or at the joint (``actuatorfrcrange``).
    """
    gear, limits = abs(float(model.actuator_gear[actuator, 0])), [math.inf]
    if model.actuator_forcelimited[actuator]:
        limits.append(gear * float(np.abs(model.actuator_forcerange[actuator]).min()))
    if model.jnt_actfrclimited[joint]:
        limits.append(float(np.abs(model.jnt_actfrcrange[joint]).min()))
    stiffness = -(gear**2) * float(model.actuator_biasprm[actuator, 1])
    return min(limits) / max(stiffness, 1e-9)


class Arm:
    """One arm in a compiled model: its joints, fingers, motors and kinematics."""

    def __init__(
        self, model: mujoco.MjModel, spec: ArmSpec, prefix: str, first: int, device: torch.device | str
    ) -> None:
        """``first`` is the arm's first column in the joint vector of the robot."""
        parts, grip = spec.parts, spec.grip
        self.name, self.joints = spec.name, [prefix + name for name in parts.joints]
        self.fingers = [prefix + name for name in parts.fingers]
        self.num_joints, self.num_fingers = len(self.joints), len(self.fingers)
        self.dofs = self.num_joints + self.num_fingers
        self.columns = slice(first, first + self.dofs)
        """Columns of the arm's joints and fingers in the joint vector of the robot."""
        floats = lambda values: torch.tensor(values, dtype=torch.float32, device=device)  # noqa: E731
        self.lower, self.upper = floats(parts.lower), floats(parts.upper)
        self.finger_closed = floats(grip.fingers_closed if grip else [])
        self.finger_open = floats(grip.fingers_open if grip else [])
        self.grip_closed, self.grip_open = floats(grip.closed if grip else []), floats(grip.open if grip else [])
        """Controls of the gripper when closed and when open."""
        ids = [model.joint(name).id for name in self.joints]
        servos, motors = [servo_of(model, j) for j in ids], [motor_of(model, j) for j in ids]
        self.has_servos, self.has_motors = None not in servos, None not in motors
        drives = [one if one is not None else two for one, two in zip(servos, motors, strict=True)]
        self.actuators = [i for i in drives if i is not None] + [
            model.actuator(prefix + name).id for name in (grip.actuators if grip else [])
        ]
        limited = [(i, bool(model.actuator_ctrllimited[i])) for i in drives if i is not None]
        self.max_control = floats([model.actuator_ctrlrange[i, 1] if yes else 1.0 for i, yes in limited])
        self.min_control = floats([model.actuator_ctrlrange[i, 0] if yes else -1.0 for i, yes in limited])
        scales = [servo_scale(model, i) for i in servos if i is not None]
        plain = all(scale == (1.0, 0.0) for scale in scales)
        self.control_scale = None if plain else floats(scales).unbind(1)
        """Factors and offsets that turn joint targets into controls; ``None`` if they are equal."""
        saturations = [saturation(model, joint, i) for joint, i in zip(ids, servos, strict=True) if i is not None]
        self.saturation = min(saturations, default=math.inf)
        """Displacement from its target, in radians, at which the first of the servos gives its maximum torque."""
        self.site = None if parts.site is None else prefix + parts.site
        self.chain: SerialChain | None = None
        if self.site is not None:
            self.chain = SerialChain(model, self.site, self.joints, device, rest=parts.init)
        fingers = grip.fingers_open if grip else []
        start = [*parts.init, *(parts.init_fingers or fingers)]
        self.init_qpos = torch.tensor(start, dtype=torch.float64, device=device)
        self.others = {prefix + name: at for name, at in grip.others.items()} if grip else {}
        """Initial positions of the other joints of the hand."""
        self.down = floats(spec.down)
        """Orientation ``[3, 3]`` of the tool when it points straight down."""
        self._gaps = None if spec.plain_opening or grip is None else (grip.gap_closed, grip.gap_open)

    def opening(self, fingers: Tensor) -> Tensor:
        """Return half the distance between the fingers in metres, ``[n]``, for positions ``[n, num_fingers]``."""
        if self._gaps is None:
            return 0.5 * (fingers[:, 0] + fingers[:, 1])
        share = ((fingers - self.finger_closed) / (self.finger_open - self.finger_closed)).mean(dim=1)
        return 0.5 * (self._gaps[0] + (self._gaps[1] - self._gaps[0]) * share)


class Robot:
    """The robot in a compiled model: one or several arms."""

    def __init__(
        self, model: mujoco.MjModel, parts: Sequence[tuple[str, RobotSpec]], device: torch.device | str = "cpu"
    ) -> None:
        """``parts`` are the robot files in the model, each with its prefix."""
        self.arms: dict[str, Arm] = {}
        held: dict[int, float] = {}
        first = 0
        for prefix, spec in parts:
            for found in spec.arms:
                arm = self.arms[found.name] = Arm(model, found, prefix, first, device)
                first += arm.dofs
            held |= {model.actuator(prefix + name).id: at for name, at in spec.held.items()}
        arms = list(self.arms.values())
        joints = [model.joint(name) for arm in arms for name in (*arm.joints, *arm.fingers)]
        self.dofs = first
        self.qpos = _index([int(joint.qposadr[0]) for joint in joints], device)
        self.qvel = _index([int(joint.dofadr[0]) for joint in joints], device)
        columns = [column for arm in arms for column in range(arm.columns.start, arm.columns.start + arm.num_joints)]
        self.joint_columns = _index(columns, device)
        """Columns of the joints that are not fingers in the joint vector of the robot."""
        self.num_joints, self.num_fingers = len(columns), sum(arm.num_fingers for arm in arms)
        self.lower, self.upper = torch.cat([arm.lower for arm in arms]), torch.cat([arm.upper for arm in arms])
        self.has_servos = all(arm.has_servos for arm in arms)
        self.init_qpos = torch.cat([arm.init_qpos for arm in arms])
        self.only_arm = arms[0] if len(arms) == 1 else None
        self.chain = self.only_arm.chain if self.only_arm else None
        self.finger_closed = torch.cat([arm.finger_closed for arm in arms])
        self.finger_open = torch.cat([arm.finger_open for arm in arms])
        self.max_control = torch.cat([arm.max_control for arm in arms])
        self._others = {int(model.joint(n).qposadr[0]): at for arm in arms for n, at in arm.others.items()}
        actuators = [i for arm in arms for i in arm.actuators]
        self.controls = None if actuators == list(range(model.nu)) else torch.tensor(actuators, device=device)
        """Actuators that the arms use; ``None`` means all, in order."""
        idle = [0.0] * int(model.nu)
        for actuator, at in held.items():
            idle[actuator] = at
        self.idle_control = torch.tensor(idle, dtype=torch.float32, device=device)
        """Controls ``[nu]`` of the other actuators."""

    def home(self, qpos: Tensor) -> Tensor:
        """Set the robot's entries of ``qpos`` ``[nq]`` to ``init_qpos`` in place, and return it."""
        qpos[self.qpos] = self.init_qpos
        for address, at in self._others.items():
            qpos[address] = at
        return qpos


def _index(addresses: list[int], device: torch.device | str) -> slice | Tensor:
    """Return a slice if the addresses are consecutive, else a tensor."""
    first = addresses[0]
    if addresses == list(range(first, first + len(addresses))):
        return slice(first, first + len(addresses))
    return torch.tensor(addresses, device=device)
