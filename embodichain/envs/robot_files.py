"""Robot files: registered robots and tools by name, and the files that the config of a robot consists of."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from embodichain.envs.env_cfg import ArmCfg, RobotCfg
from embodichain.envs.model_files import ASSETS, find_file
from embodichain.errors import ConfigError, UnknownNameError, nearest

PREFIX = "robot/"
_OF_ANY_MODEL = ("tool", "servos", "servo_frequency", "gravity_compensation", "fix_base", "collisions")
"""Settings that an arm with a model of its own inherits: those that name no part of a model and no place."""
_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class ToolSpec:
    """The file and the parts of a tool; fingers add one action, from closed (-1) to open (1)."""

    asset: str
    site: str = "tool"
    fingers: tuple[str, ...] = ()
    axis: str = "y"
    """Axis of the tool that is aligned with the flange's."""


_LEGS = [f"{leg}_{joint}" for leg in ("fl", "fr", "rl", "rr") for joint in ("hip", "thigh", "calf")]
_BIPED_JOINTS = [
    f"{side}_{joint}"
    for side in ("left", "right")
    for joint in ("hip_yaw", "hip_roll", "hip_pitch", "knee", "ankle_pitch", "ankle_roll")
]
_UR5_JOINTS = ["shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3"]
ROBOTS: dict[str, RobotCfg] = {
    "ur5": RobotCfg(
        uid="ur5", mjcf=str(ASSETS / "ur5.xml"), joints=_UR5_JOINTS, flange="flange", tool_axis="y", collisions="own"
    ),
    "cart": RobotCfg(uid="cart", mjcf=str(ASSETS / "cart.xml"), joints=["slider"], collisions="own"),
    "quadruped": RobotCfg(uid="quadruped", mjcf=str(ASSETS / "quadruped.xml"), joints=_LEGS, collisions="own"),
    "biped": RobotCfg(uid="biped", mjcf=str(ASSETS / "biped.xml"), joints=_BIPED_JOINTS, collisions="own"),
}
"""Registered robots by name."""
_OURS = frozenset(ROBOTS)
TOOLS = {"pusher": ToolSpec("pusher.xml"), "gripper": ToolSpec("gripper.xml", fingers=("left_finger", "right_finger"))}
"""Registered tools by name."""


def register_robot(name: str, mjcf: str | os.PathLike[str], **settings: Any) -> None:
    """Register a robot under a name for ``robot.uid``; an existing name is replaced.

    ``settings`` are fields of ``RobotCfg``: ``joints``, ``tool_site``, ``gripper``, ``init_qpos``, ``servos``, ...
    """
    if name in _OURS:
        raise ConfigError(f"register_robot: {name!r} is a robot of this package; choose another name")
    path = find_file(str(mjcf))
    ROBOTS[name] = RobotCfg.from_dict({"uid": name, "mjcf": str(path), **settings}, f"register_robot({name!r})")


def register_tool(name: str, mjcf: str | os.PathLike[str], site: str = "tool", fingers: Sequence[str] = ()) -> None:
    """Register a tool under a name for ``robot.tool``; its z axis is aligned with the flange's."""
    TOOLS[name] = ToolSpec(str(find_file(str(mjcf))), site, tuple(fingers), "z")


def from_own_module(kind: str) -> str:
    """Return what to do about an unknown robot or tool that a module of the user's own may register."""
    return f"If a module of your own calls register_{kind}, name it: --trust MODULE, or trusted_modules in Python."


def find_named(kind: str, name: str, known: Mapping[str, _Entry]) -> _Entry:
    if name not in known:
        raise UnknownNameError(f"unknown {kind} {name!r}.{nearest(name, known)} {from_own_module(kind)}")
    return known[name]


# --- splitting a config into robot files ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RobotPart:
    """One robot file of a config, and the arms in it."""

    cfg: ArmCfg
    arms: dict[str, ArmCfg]
    prefix: str
    key: str


def split_robot(robot: RobotCfg) -> list[RobotPart]:
    """Return the robot files of a config, completed with the settings of registered robots."""
    if not robot.arms:
        full = _complete(robot)
        return [RobotPart(full, {"": full}, PREFIX, "robot")]
    mixed = {name: _is_robot(arm) for name, arm in robot.arms.items()}
    if len(set(mixed.values())) > 1:
        raise ConfigError(
            "robot.arms: expected either robots of their own, each with uid, mjcf, pos, yaw or quat, or parts of one "
            f"model, got both: {', '.join(robot.arms)}"
        )
    base = RobotCfg(**{f.name: getattr(robot, f.name) for f in fields(RobotCfg) if f.name != "arms"})
    if any(mixed.values()):
        return [
            RobotPart(full, {name: full}, f"{PREFIX}{name}/", f"robot.arms.{name}")
            for name, arm in robot.arms.items()
            for full in [_complete(arm, base)]
        ]
    whole = _complete(base)
    shared = whole.replace(joints=[], tool_site=None, gripper=None, init_qpos=[], init_tool=None, flange=None)
    return [RobotPart(whole, {name: _over(shared, arm) for name, arm in robot.arms.items()}, PREFIX, "robot")]


def is_ours(robot: RobotCfg) -> bool:
    """Return whether all the arms of a robot are those of this package."""
    return all(Path(str(part.cfg.mjcf)).parent == ASSETS for part in split_robot(robot))


def _is_robot(arm: ArmCfg) -> bool:
    return any(value is not None for value in (arm.uid, arm.mjcf, arm.pos, arm.yaw, arm.quat))


def _complete(cfg: ArmCfg, base: ArmCfg | None = None) -> ArmCfg:
    """Return a config completed from ``base``, the robot that it is an arm of, and from a registered robot."""
    model = cfg.mjcf or cfg.uid
    if base is not None:
        if model is not None and model != (base.mjcf or base.uid):
            base = ArmCfg(**{name: getattr(base, name) for name in _OF_ANY_MODEL})
        cfg = _over(base, cfg)
    if cfg.mjcf is not None:
        return cfg
    return _over(find_named("robot", cfg.uid or "ur5", ROBOTS), cfg)


def _over(base: ArmCfg, cfg: ArmCfg) -> ArmCfg:
    """Return ``base`` with the non-default settings of ``cfg``."""
    plain = ArmCfg()
    given = {f.name: getattr(cfg, f.name) for f in fields(ArmCfg) if getattr(cfg, f.name) != getattr(plain, f.name)}
    kept = {f.name: getattr(base, f.name) for f in fields(ArmCfg)}
    return ArmCfg(**(kept | given))
