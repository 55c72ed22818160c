"""Robots: the joints and motors of one in a model, and how scene, arm and tool become one model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import mujoco
import torch

from embodichain.envs.env_cfg import RobotCfg
from embodichain.envs.kinematics import SerialChain
from embodichain.envs.rendering import CameraCfg, mount_cameras
from embodichain.errors import AssetError, ConfigError, UnknownNameError, nearest

ASSETS = Path(__file__).parent / "assets"
_PREFIX, _TOOL_PREFIX = "robot/", "robot/tool/"
Spec = TypeVar("Spec")


@dataclass(frozen=True)
class RobotSpec:
    """The file and the parts of one kind of robot."""

    asset: str
    joints: tuple[str, ...]
    flange: str | None = None


@dataclass(frozen=True)
class ToolSpec:
    """The file and the parts of one kind of tool; a tool with fingers adds one action, open (1) to closed (-1)."""

    asset: str
    site: str = "tool"
    fingers: tuple[str, ...] = ()


ROBOTS = {
    "ur5": RobotSpec(
        "ur5.xml", ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3"), flange="flange"
    ),
    "cart": RobotSpec("cart.xml", ("slider",)),
    "quadruped": RobotSpec(
        "quadruped.xml",
        tuple(f"{leg}_{joint}" for leg in ("fl", "fr", "rl", "rr") for joint in ("hip", "thigh", "calf")),
    ),
}
TOOLS = {"pusher": ToolSpec("pusher.xml"), "gripper": ToolSpec("gripper.xml", fingers=("left_finger", "right_finger"))}


def read_spec(path: Path) -> mujoco.MjSpec:
    """Parse an MJCF file; ``AssetError`` if it is not valid.

    What it includes lies beside it, or is a part of this package, such as ``table.xml``.
    """
    folder, parts = path.parent, {}
    if folder != ASSETS:
        parts = {part.name: part.read_bytes() for part in ASSETS.glob("*.xml") if not (folder / part.name).exists()}
    try:
        return mujoco.MjSpec.from_file(str(path), include=parts)
    except (ValueError, OSError) as error:
        raise AssetError(f"{path.name} is no valid MJCF model: {error}") from error


def build_model(
    scene: str | Path,
    robot: RobotCfg,
    cameras: Sequence[CameraCfg] = (),
    furnish: Callable[[mujoco.MjSpec], None] | None = None,
) -> mujoco.MjModel:
    """Compile the model of a scene (a file of ``assets/``, or a path), the robot with its tool, and ``cameras``.

    ``furnish`` adds what else is in the scene.
    """
    kind = _find("robot", robot.uid, ROBOTS)
    spec, arm = read_spec(ASSETS / scene), read_spec(ASSETS / kind.asset)
    if furnish is not None:
        furnish(spec)
    if robot.tool is not None:
        if kind.flange is None:
            raise ConfigError(f"robot.tool: the robot {robot.uid!r} cannot hold a tool, set it to null")
        arm.attach(read_spec(ASSETS / _find("tool", robot.tool, TOOLS).asset), site=kind.flange, prefix="tool/")
    spec.attach(arm, frame=spec.worldbody.add_frame(), prefix=_PREFIX)
    try:
        return mount_cameras(spec, cameras) if cameras else spec.compile()
    except ValueError as error:
        raise AssetError(
            f"{scene} with robot {robot.uid!r} and tool {robot.tool!r} does not compile: {error}"
        ) from error


def _find(kind: str, name: str, known: Mapping[str, Spec]) -> Spec:
    if name not in known:
        raise UnknownNameError(f"unknown {kind} {name!r}.{nearest(name, known)}")
    return known[name]


class Robot:
    """The part of a compiled model that is the robot: where its joints and motors lie in the state."""

    def __init__(self, model: mujoco.MjModel, cfg: RobotCfg, device: torch.device | str = "cpu") -> None:
        spec = _find("robot", cfg.uid, ROBOTS)
        tool = _find("tool", cfg.tool, TOOLS) if cfg.tool else None
        joints = [_PREFIX + name for name in spec.joints]
        fingers = [_TOOL_PREFIX + name for name in tool.fingers] if tool else []
        self.num_joints, self.num_fingers = len(joints), len(fingers)
        self.dofs = self.num_joints + self.num_fingers
        first = model.joint(joints[0])
        # An attached robot's joints follow each other in the model, arm first, so both ranges are slices.
        self.qpos = slice(int(first.qposadr[0]), int(first.qposadr[0]) + self.dofs)
        self.qvel = slice(int(first.dofadr[0]), int(first.dofadr[0]) + self.dofs)
        floats = lambda values: torch.tensor(values, dtype=torch.float32, device=device)  # noqa: E731
        self.lower, self.upper = (floats([model.joint(j).range[i] for j in joints]) for i in (0, 1))
        self.finger_closed, self.finger_open = (floats([model.joint(f).range[i] for f in fingers]) for i in (0, 1))
        # A position servo pulls towards its command (an affine bias); a motor takes the command for a force.
        driven = {model.joint(j).id for j in joints}
        motors = [i for i in range(model.nu) if int(model.actuator_trnid[i, 0]) in driven]
        self.has_servos = all(int(model.actuator_biastype[i]) == int(mujoco.mjtBias.mjBIAS_AFFINE) for i in motors)
        limits = [model.actuator_ctrlrange[i, 1] if model.actuator_ctrllimited[i] else 1.0 for i in motors]
        self.max_control = floats(limits)
        self.chain = SerialChain(model, _TOOL_PREFIX + tool.site, joints, device) if tool else None
        if cfg.init_qpos and len(cfg.init_qpos) != self.dofs:
            raise ConfigError(
                f"robot.init_qpos: expected {self.num_joints} joints and {self.num_fingers} fingers, "
                f"got {len(cfg.init_qpos)} numbers"
            )
        self.init_qpos = torch.tensor(cfg.init_qpos or [0.0] * self.dofs, dtype=torch.float64, device=device)
