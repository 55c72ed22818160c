"""Checks a robot file: its actuators, whether its joints follow, and whether kinematics agree with MuJoCo's.

``suggest`` completes a config with what a model lacks; ``check_robot`` builds that robot, moves every joint and
compares the kinematics. ``embodichain robots check`` prints the result.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mujoco
import numpy as np
import torch

from embodichain.envs.construction import add_robot
from embodichain.envs.env_cfg import ArmCfg, RobotCfg
from embodichain.envs.model_files import compile_spec, find_file, read_spec
from embodichain.envs.robot_adaptation import describe
from embodichain.envs.robot_files import ROBOTS, from_own_module, split_robot
from embodichain.envs.robot_model import (
    HINGE,
    ROUNDED,
    below,
    find_chains,
    free_base,
    has_legs,
    has_limits,
    moves,
    path_joints,
)
from embodichain.envs.robots import Arm, Robot, actuators_of, drive_kind, servo_of
from embodichain.envs.scene_cfg import CameraCfg
from embodichain.errors import ConfigError, UnknownNameError, nearest

TURN = 6.2832
"""Suggested limit of a hinge that has none, in radians."""
_MOVE, _SLIDE = 0.2, 0.02  # displacements of the test motion, in radians and metres
_SECONDS = 1.0
_GOOD = 0.1  # maximum remaining error, as a fraction of the displacement
_DIVERGED = (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)
_BENT = 0.35  # distance of a suggested posture from the limits, as a fraction of a joint's range
_FILE_KINDS = ("urdf", "mjcf", "xml")  # folders that are named by what they contain, not by the robot
_POSES = 64  # number of postures in which kinematics are compared

_GROUND = """<mujoco><option timestep="0.004" integrator="implicitfast"/>
  <visual><headlight ambient="0.4 0.4 0.4" diffuse="0.35 0.35 0.35" specular="0 0 0"/></visual><asset>
  <texture name="sky" type="skybox" builtin="gradient" rgb1="0.78 0.85 0.92" rgb2="0.45 0.55 0.68"
  width="8" height="48"/></asset><worldbody><light pos="1 -2 3" dir="-0.3 0.6 -1" diffuse="0.5 0.5 0.5"/>
  <geom type="plane" size="3 3 0.1" contype="0" conaffinity="0" rgba="0.82 0.80 0.76 1"/></worldbody></mujoco>"""
Frame = Callable[[mujoco.MjModel, mujoco.MjData], None]


@dataclass
class JointReport:
    """One joint: its type, its actuator, and whether it follows."""

    name: str
    kind: str
    lower: float
    upper: float
    drive: str
    start: float
    follows: bool | None = None
    """Whether the joint reached its target; ``None`` if nothing drives it."""
    outside: bool = False
    """Whether the model has it outside its limits; ``start`` is inside."""
    note: str = ""


@dataclass
class RobotReport:
    """The analysis of a robot file and the results of the test motion."""

    cfg: RobotCfg
    floating: str | None
    """Name of the free joint of a robot without a fixed base; its config, if there is one, lets it walk."""
    joints: list[JointReport]
    arms: dict[str, Arm]
    needs: list[str]
    """Additions that the config needed."""
    left_out: list[str] = field(default_factory=list)
    unfit: str = ""
    """Why a robot with a free base cannot walk as it is."""
    kinematics_error: float = 0.0
    """Maximum difference of the tool's pose to MuJoCo's, in metres and radians."""
    places: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Positions of base and tool of each arm with a tool at the start, rounded to millimetres."""
    model: mujoco.MjModel | None = None
    home: np.ndarray | None = None

    @property
    def works(self) -> bool:
        """Whether all joints follow and the kinematics agree with MuJoCo's."""
        return all(joint.follows is not False for joint in self.joints) and self.kinematics_error < 1e-4


def robot_config(name: str) -> RobotCfg:
    """Return the config of a registered robot or of a model file."""
    if name in ROBOTS:
        return RobotCfg(uid=name)
    is_path = name.endswith((".xml", ".mjcf", ".urdf")) or "/" in name or Path(name).exists()
    if not is_path:
        raise UnknownNameError(
            f"expected the path of an MJCF or URDF file or a registered robot, got {name!r}.{nearest(name, ROBOTS)} "
            + from_own_module("robot")
        )
    folder = Path(name).parent.name
    uid = Path(name).stem if folder.lower() in _FILE_KINDS else folder
    return RobotCfg(uid=uid or "robot", mjcf=as_written(name))


def as_written(name: str) -> str:
    """Return the absolute path of a file, for use in a config; ``package://`` paths stay unchanged."""
    path = find_file(name)
    return name if name.startswith("package://") else str(path)


def suggest(cfg: RobotCfg) -> tuple[RobotCfg, list[str]]:
    """Return the config completed with guesses for what its model lacks, and a sentence for each addition."""
    if cfg.mjcf is None or cfg.arms:
        return cfg, []
    spec, needs = read_spec(find_file(cfg.mjcf)), []
    for i, body in enumerate(spec.bodies):
        body.name = body.name or f"body_{i}"
    for joint in spec.joints:
        joint.name = joint.name or f"{joint.parent.name}_joint"
    model = compile_spec(spec, Path(cfg.mjcf))
    if free_base(model) is not None and not cfg.fix_base:
        return cfg, []
    ends = find_chains(model)
    if len(ends) > 1 and not cfg.joints and cfg.tool_site is None:
        needs.append(f"the model has {len(ends)} arms: each is named under arms")
        chains = [path_joints(model, end) for end in ends]
        named = {_arm_name(model, end, i): _arm_cfg(model, end, chains[i]) for i, end in enumerate(ends)}
        cfg = cfg.replace(arms=named)
    elif cfg.joints:
        chains = [[model.joint(name).id for name in cfg.joints if name in _joint_names(model)]]
    else:
        chains = [path_joints(model, end) for end in ends]
    joints = [j for chain in chains for j in chain if moves(model, j)]
    endless = [j for j in joints if model.joint(j).name not in cfg.limits and not has_limits(model, j)]
    hinges = {model.joint(j).name: (-TURN, TURN) for j in endless if int(model.jnt_type[j]) == HINGE}
    slides = [model.joint(j).name for j in endless if int(model.jnt_type[j]) != HINGE]
    if hinges:
        needs.append(f"without limits: {', '.join(hinges)}; limits are required, a turn to either side is assumed")
        cfg = cfg.replace(limits={**cfg.limits, **hinges})
    if slides and not cfg.arms:
        needs.append(f"slides without limits: {', '.join(slides)}; they are held where they are")
        cfg = cfg.replace(joints=[model.joint(j).name for j in joints if model.joint(j).name not in slides])
    torque = [j for j in joints if actuators_of(model, j) and servo_of(model, j) is None]
    if torque and cfg.servos is None:
        kinds = sorted({drive_kind(model, i) for j in torque for i in actuators_of(model, j)})
        needs.append(f"driven by {' and '.join(kinds)}: servos take their place, for all actions but effort")
        cfg = cfg.replace(servos=True)
    return cfg, needs


def _joint_names(model: mujoco.MjModel) -> list[str]:
    return [model.joint(j).name for j in range(model.njnt)]


def _arm_name(model: mujoco.MjModel, end: int, index: int) -> str:
    text = model.body(end).name.lower()
    return next((side for side in ("left", "right") if side in text), f"arm_{index + 1}")


def _arm_cfg(model: mujoco.MjModel, end: int, chain: list[int]) -> ArmCfg:
    """Return the config of an arm: by its joints if it has a hand, else by the last body fixed to its last link."""
    rigid = [b for b in below(model, end) if path_joints(model, b) == chain]
    if len(rigid) < len(list(below(model, end))):
        return ArmCfg(joints=[model.joint(joint).name for joint in chain if moves(model, joint)])
    return ArmCfg(tool_site=model.body(rigid[-1]).name)


def check_robot(cfg: RobotCfg, frame: Frame | None = None) -> RobotReport:
    """Build a robot in an empty scene, move every joint, and compare its kinematics with MuJoCo's.

    ``frame`` is called every few steps, to record a video.
    """
    cfg, needs = suggest(cfg)
    raw = _floating_model(cfg)
    if raw is not None:
        return _check_floating(cfg, raw, frame)
    spec = mujoco.MjSpec.from_string(_GROUND)
    add_robot(spec, cfg)
    model = spec.compile()
    robot = Robot(model, describe(cfg))
    home = robot.home(torch.tensor(model.qpos0)).numpy()
    held, joints = _rest_controls(model, robot, home), []
    for arm in robot.arms.values():
        joints += _try_arm(model, arm, home, held, frame)
    errors = [_kinematics_error(model, arm, home) for arm in robot.arms.values()]
    return RobotReport(
        cfg,
        None,
        joints,
        robot.arms,
        needs,
        kinematics_error=max(errors),
        places=_places(model, robot, home),
        model=model,
        home=home,
    )


def _places(model: mujoco.MjModel, robot: Robot, home: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the positions of base and tool of each arm with a tool."""
    data = mujoco.MjData(model)
    data.qpos[:] = home
    mujoco.mj_kinematics(model, data)
    roots = {name: model.body_rootid[model.joint(arm.joints[0]).bodyid[0]] for name, arm in robot.arms.items()}
    return {
        name: (data.xpos[roots[name]].round(3), data.site(arm.site).xpos.round(3))
        for name, arm in robot.arms.items()
        if arm.site is not None
    }


def _rest_controls(model: mujoco.MjModel, robot: Robot, home: np.ndarray) -> np.ndarray:
    """Return controls that hold the initial posture with open grippers."""
    controls = robot.idle_control.numpy().astype(float)
    for arm in robot.arms.values():
        at = home[[int(model.joint(name).qposadr[0]) for name in arm.joints]]
        if arm.has_servos:
            scale, offset = (1.0, 0.0) if arm.control_scale is None else (part.numpy() for part in arm.control_scale)
            controls[arm.actuators[: arm.num_joints]] = scale * at + offset
        controls[arm.actuators[len(arm.actuators) - len(arm.grip_open) :]] = arm.grip_open.numpy()
    return controls


def _try_arm(
    model: mujoco.MjModel, arm: Arm, home: np.ndarray, held: np.ndarray, frame: Frame | None
) -> list[JointReport]:
    out = []
    for i, name in enumerate(arm.joints):
        joint = model.joint(name)
        slides = int(joint.type[0]) != HINGE
        start, lower, upper = float(home[joint.qposadr[0]]), float(arm.lower[i]), float(arm.upper[i])
        by = min(_SLIDE if slides else _MOVE, 0.5 * (upper - lower)) * (1.0 if upper - start > start - lower else -1.0)
        drive = "servo" if arm.has_servos else "motor" if arm.has_motors else "none"
        report = JointReport(name, "slide" if slides else "hinge", lower, upper, drive, start)
        if arm.has_servos:
            scale = 1.0 if arm.control_scale is None else float(arm.control_scale[0][i])
            changed = held.copy()
            changed[arm.actuators[i]] += scale * by
            reached = _simulate(model, home, changed, frame)[joint.qposadr[0]] - start
            report.follows = bool(abs(reached - by) < _GOOD * abs(by) + 1e-3)
            went = "the simulation diverges" if np.isnan(reached) else f"went {reached:+.3f} of {by:+.3f}"
            report.note = "" if report.follows else went
        elif arm.has_motors:
            report.follows = _turns(model, joint.id, arm.actuators[i], float(arm.max_control[i]), home)
        out.append(report)
    for i, name in enumerate(arm.fingers):
        joint = model.joint(name)
        closed, opened = float(arm.finger_closed[i]), float(arm.finger_open[i])
        kind = "slide" if int(joint.type[0]) != HINGE else "hinge"
        low, high = joint.range if model.jnt_limited[joint.id] else sorted((closed, opened))
        out.append(JointReport(name, kind, float(low), float(high), "gripper", float(home[joint.qposadr[0]])))
    if arm.fingers:
        changed = held.copy()
        changed[arm.actuators[len(arm.actuators) - len(arm.grip_open) :]] = arm.grip_closed.numpy()
        at = _simulate(model, home, changed, frame)
        for i, report in enumerate(out[len(arm.joints) :]):
            reached, way = at[model.joint(report.name).qposadr[0]], float(arm.finger_closed[i] - arm.finger_open[i])
            report.follows = bool(abs(reached - float(arm.finger_closed[i])) < 0.25 * abs(way) + 1e-3)
            report.note = "closed, open" if report.follows else f"closes to {reached:.3f} only"
    return out


def _simulate(model: mujoco.MjModel, home: np.ndarray, controls: np.ndarray, frame: Frame | None) -> np.ndarray:
    """Hold controls for a while from the initial posture, and return the final positions; NaN if it diverges."""
    data = mujoco.MjData(model)
    data.qpos[:] = home
    steps = round(_SECONDS / model.opt.timestep)
    for step in range(steps):
        data.ctrl[:] = controls
        mujoco.mj_step(model, data)
        if any(data.warning[int(kind)].number for kind in _DIVERGED):
            return np.full_like(data.qpos, np.nan)
        if frame is not None and step % 10 == 0:
            frame(model, data)
    return data.qpos.copy()


def _turns(model: mujoco.MjModel, joint: int, actuator: int, most: float, home: np.ndarray) -> bool:
    """Return whether a motor moves its joint: the acceleration changes sign with the control."""
    data, found = mujoco.MjData(model), []
    for sign in (1.0, -1.0):
        mujoco.mj_resetData(model, data)
        data.qpos[:] = home
        data.ctrl[actuator] = sign * most
        mujoco.mj_forward(model, data)
        found.append(float(data.qacc[model.jnt_dofadr[joint]]))
    return found[0] > found[1]


def _kinematics_error(model: mujoco.MjModel, arm: Arm, home: np.ndarray) -> float:
    """Return the maximum difference of the tool's pose between the batched kinematics and MuJoCo's."""
    if arm.chain is None or arm.site is None:
        return 0.0
    low, high = arm.lower.clamp_min(-np.pi), arm.upper.clamp_max(np.pi)
    drawn = torch.rand(_POSES, arm.num_joints, generator=torch.Generator().manual_seed(0))
    qpos = low + (high - low) * drawn
    positions, rotations = arm.chain.pose(qpos)
    data, site, worst = mujoco.MjData(model), model.site(arm.site).id, 0.0
    addresses = [int(model.joint(name).qposadr[0]) for name in arm.joints]
    for i in range(_POSES):
        data.qpos[:] = home
        data.qpos[addresses] = qpos[i].numpy()
        mujoco.mj_kinematics(model, data)
        off = np.abs(positions[i].numpy() - data.site_xpos[site]).max()
        turned = np.abs(rotations[i].numpy() - data.site_xmat[site].reshape(3, 3)).max()
        worst = max(worst, float(off), float(turned))
    return worst


def _floating_model(cfg: RobotCfg) -> mujoco.MjModel | None:
    """Return the model of a robot with a free base, in the light, or ``None``."""
    if cfg.fix_base or cfg.arms:
        return None
    file = find_file(str(split_robot(cfg)[0].cfg.mjcf))
    spec = read_spec(file)
    if free_base(compile_spec(spec, file)) is None:
        return None
    scene = mujoco.MjSpec.from_string(_GROUND)
    spec.visual.headlight = scene.visual.headlight
    if not any(texture.type == mujoco.mjtTexture.mjTEXTURE_SKYBOX for texture in spec.textures):
        light, dark = scene.textures[0].rgb1, scene.textures[0].rgb2
        sky = {"type": mujoco.mjtTexture.mjTEXTURE_SKYBOX, "builtin": mujoco.mjtBuiltin.mjBUILTIN_GRADIENT}
        spec.add_texture(name="check/sky", **sky, rgb1=light, rgb2=dark, width=8, height=48)
    if not spec.worldbody.lights:
        spec.worldbody.add_light(pos=[1, -2, 3], dir=[-0.3, 0.6, -1], diffuse=[0.5] * 3)
    return compile_spec(spec, file)


def _check_floating(cfg: RobotCfg, model: mujoco.MjModel, frame: Frame | None) -> RobotReport:
    """List the joints of a robot with a free base, move each while the base is fixed, and suggest how it walks."""
    base = next(j for j in range(model.njnt) if model.joint(j).name == free_base(model))
    root = model.joint(base).name or "(without a name)"
    if not has_legs(model):
        raise ConfigError(
            f"robot: the base of this arm is free (joint {root!r}), and it has no legs to walk on; bolt it down with "
            "--fix-base, which is robot.fix_base: true in a config, or delete the joint in the model"
        )
    named = [j for j in range(model.njnt) if moves(model, j)]
    own, home = _own_posture(model), _standing(model, cfg, named, base)
    model.opt.gravity[:] = 0.0
    model.opt.disableflags = int(model.opt.disableflags) | int(mujoco.mjtDisableBit.mjDSBL_CONTACT)
    joints = []
    for j in named:
        drives, address = actuators_of(model, j), int(model.jnt_qposadr[j])
        direct = [i for i in drives if int(model.actuator_trntype[i]) == int(mujoco.mjtTrn.mjTRN_JOINT)]
        limited = bool(model.jnt_limited[j])
        low, high = (float(q) for q in model.jnt_range[j]) if limited else (-np.inf, np.inf)
        kind = drive_kind(model, direct[0]) if direct else "tendon" if drives else "none"
        name = "hinge" if int(model.jnt_type[j]) == HINGE else "slide"
        report = JointReport(model.joint(j).name, name, low, high, kind, float(home[address]))
        if kind == "none":
            report.note = "nothing drives it"
        elif direct:
            by = _MOVE if high - home[address] > home[address] - low else -_MOVE
            report.follows = _follows_free(model, base, j, direct[0], home, by, kind, frame)
        if not low - ROUNDED <= own[address] <= high + ROUNDED:
            report.outside = True
            report.note = f"{report.note} outside in the model ({own[address]:.3g})".strip()
        joints.append(report)
    walking, needs, unfit = _suggest_walking(cfg, joints)
    return RobotReport(walking, root, joints, {}, needs, unfit=unfit, model=model, home=home)


def _own_posture(model: mujoco.MjModel) -> np.ndarray:
    """Return the keyframe ``home``, the first one, or the model's default positions."""
    keys = [model.key(i).name for i in range(model.nkey)]
    return model.key_qpos[keys.index("home") if "home" in keys else 0].copy() if keys else model.qpos0.copy()


def _standing(model: mujoco.MjModel, cfg: RobotCfg, joints: list[int], base: int) -> np.ndarray:
    """Return the model's posture, with joints outside their limits inside, and the feet below where they were."""
    home = _own_posture(model)
    if cfg.init_qpos and len(cfg.init_qpos) == len(joints):
        home[model.jnt_qposadr[joints]] = cfg.init_qpos
        return home
    at: np.ndarray = model.jnt_qposadr[joints]
    low, high = model.jnt_range[joints, 0].copy(), model.jnt_range[joints, 1].copy()
    free = ~model.jnt_limited[joints].astype(bool)
    low[free], high[free] = -np.inf, np.inf
    outside = (home[at] < low - ROUNDED) | (home[at] > high + ROUNDED)
    if not outside.any():
        return home
    data, dofs = mujoco.MjData(model), model.jnt_dofadr[joints]
    moved = {int(model.jnt_bodyid[j]) for j in joints}
    ends = [b for b in moved if not any(other in moved for other in below(model, b) if other != b)]
    feet = [max(below(model, end)) for end in ends]

    def tips() -> np.ndarray:
        mujoco.mj_forward(model, data)
        return data.xipos[feet].copy()

    data.qpos[:] = home
    wanted = tips()[:, :2]
    margin = np.where(free, 0.0, _BENT * (model.jnt_range[joints, 1] - model.jnt_range[joints, 0]))
    data.qpos[at[outside]] = np.clip(home[at], low + margin, high - margin)[outside]
    jacobian = np.zeros((3, model.nv))
    for _ in range(20):
        error = (wanted - tips()[:, :2]).ravel()
        rows = []
        for foot in feet:
            mujoco.mj_jacBodyCom(model, data, jacobian, None, foot)
            rows.append(np.where(outside, 0.0, jacobian[:2][:, dofs]))
        j = np.concatenate(rows)
        step = j.T @ np.linalg.solve(j @ j.T + 1e-4 * np.eye(len(error)), error)
        data.qpos[at] = np.where(outside, data.qpos[at], np.clip(data.qpos[at] + step, low, high))
    tips()
    home[at] = data.qpos[at]
    return home


def _suggest_walking(cfg: RobotCfg, joints: list[JointReport]) -> tuple[RobotCfg, list[str], str]:
    """Return the config with which a robot walks, what was added to it, and why it cannot if it cannot."""
    needs = ["walks: a robot with legs and a free base, for tasks that walk; arm tasks need --fix-base"]
    used = [j for j in joints if j.name in cfg.joints or (not cfg.joints and np.isfinite([j.lower, j.upper]).all())]
    servos = cfg.servos
    torque = sorted({j.drive for j in used if j.drive not in ("servo", "none")})
    if torque and servos is None:
        servos = True
        needs.append(f"driven by {' and '.join(torque)}: servos take their place, for all actions but effort")
    start = [round(j.start, 4) + 0.0 for j in used]
    if any(j.outside for j in used):
        needs.append("init_qpos: the model has joints outside their limits")
    walking = cfg.replace(walks=True, servos=servos, init_qpos=start)
    try:
        describe(walking)
    except ConfigError as error:
        return cfg, [], "; ".join(error.problems)
    return walking, needs, ""


def _follows_free(
    model: mujoco.MjModel,
    base: int,
    joint: int,
    drive: int,
    home: np.ndarray,
    by: float,
    kind: str,
    frame: Frame | None,
) -> bool:
    """Drive one joint while the base is fixed, and return whether it moved in the right direction."""
    data, address = mujoco.MjData(model), int(model.jnt_qposadr[joint])
    first, dof = int(model.jnt_qposadr[base]), int(model.jnt_dofadr[base])
    data.qpos[:] = home
    for other in range(model.njnt):
        servo = servo_of(model, other)
        if servo is not None:
            data.ctrl[servo] = home[model.jnt_qposadr[other]]
    most = float(model.actuator_ctrlrange[drive, 1]) if model.actuator_ctrllimited[drive] else 1.0
    data.ctrl[drive] = home[address] + by if kind == "servo" else np.sign(by) * most
    for step in range(round((_SECONDS if kind == "servo" else 0.1) / model.opt.timestep)):
        mujoco.mj_step(model, data)
        data.qpos[first : first + 7], data.qvel[dof : dof + 6] = home[first : first + 7], 0.0
        if frame is not None and step % 10 == 0:
            frame(model, data)
    return bool((data.qpos[address] - home[address]) * np.sign(by) > 0.2 * abs(by))


def overview(model: mujoco.MjModel, home: np.ndarray) -> CameraCfg:
    """Return a camera that shows the whole robot."""
    data = mujoco.MjData(model)
    data.qpos[:] = home
    mujoco.mj_forward(model, data)
    points = np.concatenate((data.xpos[1:], data.geom_xpos[model.geom_bodyid > 0]))
    points = points if len(points) else data.xpos
    middle = 0.5 * (points.min(axis=0) + points.max(axis=0))
    size = max(0.5, float(np.linalg.norm(points.max(axis=0) - points.min(axis=0))))
    eye = middle + size * np.array([1.1, -1.3, 0.7])
    return CameraCfg(name="robot", pos=tuple(eye.tolist()), lookat=tuple(middle.tolist()))
