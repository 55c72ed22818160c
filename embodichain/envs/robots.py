"""Robots in a compiled model: where the joints and motors of each arm lie in the state.

``add_robot`` puts the robot of a config into a scene; ``robot_files.py`` finds its file and makes it fit.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import mujoco
import torch
from torch import Tensor

from embodichain.envs.env_cfg import RobotCfg
from embodichain.envs.kinematics import SerialChain
from embodichain.envs.postures import base_pose
from embodichain.envs.rendering import CameraCfg, mount_cameras
from embodichain.envs.robot_adaptation import ArmSpec, adapted, servo_scale
from embodichain.envs.robot_adaptation import describe as describe
from embodichain.envs.robot_files import ASSETS as ASSETS
from embodichain.envs.robot_files import ROBOTS as ROBOTS
from embodichain.envs.robot_files import TOOLS as TOOLS
from embodichain.envs.robot_files import read_spec as read_spec
from embodichain.envs.robot_files import register_robot as register_robot
from embodichain.envs.robot_files import register_tool as register_tool
from embodichain.envs.robot_files import split_robot
from embodichain.envs.robot_model import motor_of, servo_of
from embodichain.errors import AssetError


def build_model(
    scene: str | Path,
    robot: RobotCfg,
    cameras: Sequence[CameraCfg] = (),
    furnish: Callable[[mujoco.MjSpec], None] | None = None,
    finish: Callable[[mujoco.MjSpec], None] | None = None,
) -> mujoco.MjModel:
    """Compile the model of a scene (a file of ``assets/``, or a path), the robot with its tool, and ``cameras``.

    ``furnish`` adds what else is in the scene, and ``finish`` what belongs to all of it, the robot included.
    """
    spec = read_spec(ASSETS / scene)
    if furnish is not None:
        furnish(spec)
    add_robot(spec, robot)
    if finish is not None:
        finish(spec)
    try:
        return mount_cameras(spec, cameras) if cameras else spec.compile()
    except ValueError as error:
        raise AssetError(
            f"{scene} with robot {robot.mjcf or robot.uid!r} and tool {robot.tool!r} does not compile: {error}"
        ) from error


def add_robot(spec: mujoco.MjSpec, robot: RobotCfg) -> None:
    """Put the robot of a config, or its several arms, into the spec of a scene."""
    for part in split_robot(robot):
        child, _ = adapted(part)
        child.option = spec.option  # the scene's, so that there is nothing to disagree about
        pos, quat = base_pose(part.cfg)
        spec.attach(child, frame=spec.worldbody.add_frame(pos=pos, quat=quat), prefix=part.prefix)


class Arm:
    """One arm in a compiled model: its joints, fingers, motors and kinematics."""

    def __init__(
        self, model: mujoco.MjModel, spec: ArmSpec, prefix: str, first: int, device: torch.device | str
    ) -> None:
        """``first`` is the column of the arm's first joint among the robot's."""
        parts, grip = spec.parts, spec.grip
        self.name, self.joints = spec.name, [prefix + name for name in parts.joints]
        self.fingers = [prefix + name for name in parts.fingers]
        self.num_joints, self.num_fingers = len(self.joints), len(self.fingers)
        self.dofs = self.num_joints + self.num_fingers
        self.columns = slice(first, first + self.dofs)
        """Where the arm's joints and fingers are among the robot's."""
        floats = lambda values: torch.tensor(values, dtype=torch.float32, device=device)  # noqa: E731
        self.lower, self.upper = floats(parts.lower), floats(parts.upper)
        self.finger_closed = floats(grip.fingers_closed if grip else [])
        self.finger_open = floats(grip.fingers_open if grip else [])
        self.grip_closed, self.grip_open = floats(grip.closed if grip else []), floats(grip.open if grip else [])
        """Controls at which the gripper is closed, and open."""
        ids = [model.joint(name).id for name in self.joints]
        servos, motors = [servo_of(model, j) for j in ids], [motor_of(model, j) for j in ids]
        self.has_servos, self.has_motors = None not in servos, None not in motors
        drives = [one if one is not None else two for one, two in zip(servos, motors, strict=True)]
        self.actuators = [i for i in drives if i is not None] + [
            model.actuator(prefix + name).id for name in (grip.actuators if grip else [])
        ]
        limited = [(i, bool(model.actuator_ctrllimited[i])) for i in drives if i is not None]
        self.max_control = floats([model.actuator_ctrlrange[i, 1] if yes else 1.0 for i, yes in limited])
        scales = [servo_scale(model, i) for i in servos if i is not None]
        plain = all(scale == (1.0, 0.0) for scale in scales)
        self.control_scale = None if plain else floats(scales).unbind(1)
        """Factor and offset that turn joint positions into controls, where these differ."""
        self.site = None if parts.site is None else prefix + parts.site
        self.chain: SerialChain | None = None
        if self.site is not None:
            self.chain = SerialChain(model, self.site, self.joints, device, rest=parts.init)
        fingers = grip.fingers_open if grip else []
        start = [*parts.init, *(parts.init_fingers or fingers)]
        self.init_qpos = torch.tensor(start, dtype=torch.float64, device=device)
        self.others = {prefix + name: at for name, at in grip.others.items()} if grip else {}
        """Positions of the other joints of the hand at the start."""
        self.down = floats(spec.down)
        """Orientation ``[3, 3]`` of the tool where it points straight down."""
        self._gaps = None if spec.plain_opening or grip is None else (grip.gap_closed, grip.gap_open)

    def opening(self, fingers: Tensor) -> Tensor:
        """Return half the distance between the fingers ``[n]``, in metres, for their positions ``[n, num_fingers]``."""
        if self._gaps is None:
            return 0.5 * (fingers[:, 0] + fingers[:, 1])
        share = ((fingers - self.finger_closed) / (self.finger_open - self.finger_closed)).mean(dim=1)
        return 0.5 * (self._gaps[0] + (self._gaps[1] - self._gaps[0]) * share)


class Robot:
    """The part of a compiled model that is the robot: one arm, whose attributes are the robot's, or several."""

    def __init__(self, model: mujoco.MjModel, cfg: RobotCfg, device: torch.device | str = "cpu") -> None:
        self.arms: dict[str, Arm] = {}
        held: dict[int, float] = {}
        first = 0
        for prefix, spec in describe(cfg):
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
        """Where the joints that are no fingers are among the robot's."""
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
        """Which actuators the arms use; ``None``: all, in their order."""
        idle = [0.0] * int(model.nu)
        for actuator, at in held.items():
            idle[actuator] = at
        self.idle_control = torch.tensor(idle, dtype=torch.float32, device=device)
        """Controls ``[nu]`` of the others."""

    def home(self, qpos: Tensor) -> Tensor:
        """Return positions ``[nq]`` with the robot at ``init_qpos``."""
        qpos[self.qpos] = self.init_qpos
        for address, at in self._others.items():
            qpos[address] = at
        return qpos


def _index(addresses: list[int], device: torch.device | str) -> slice | Tensor:
    """Return a slice if the addresses follow each other, else a tensor."""
    first = addresses[0]
    if addresses == list(range(first, first + len(addresses))):
        return slice(first, first + len(addresses))
    return torch.tensor(addresses, device=device)
