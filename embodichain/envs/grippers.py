"""Analyses grippers: their actuators, the controls at which they are open and closed, and the gap of the fingers.

Fingers may be driven individually, by one motor through a tendon, or by one that the others follow through equality
constraints, and either end of the control range may be "open". A short simulation of the robot alone finds out.
"""

import mujoco
import numpy as np

from embodichain.envs.env_cfg import ArmCfg
from embodichain.envs.robot_model import below, site_frame
from embodichain.envs.robots import ArmParts, Grip, actuators_of, drive_kind
from embodichain.errors import ConfigError

_SECONDS = 1.0  # simulated time to open or close a gripper
_NEARLY = 0.9  # cosine of the angle between closing direction and a tool axis above which they count as equal
_HEAVY = 1e6  # inertia of the arm's joints during the trial
_TOWARDS = 0.7  # fraction of its travel by which a finger approaches a fixed jaw
_FAR = 1.0  # metres; larger distances between geoms are not measured


def known_grip(model: mujoco.MjModel, parts: ArmParts) -> Grip:
    """Return the grip of a tool whose fingers have one servo each and close at their lower limits."""
    joints = [model.joint(name) for name in parts.fingers]
    low, high = ([float(joint.range[i]) for joint in joints] for i in (0, 1))
    drives = [model.actuator(actuators_of(model, joint.id)[0]).name for joint in joints]
    return Grip(drives, low, high, low, high, {}, sum(low), sum(high))


def try_grip(model: mujoco.MjModel, parts: ArmParts, cfg: ArmCfg, key: str) -> Grip:
    """Open and close a gripper in a simulation without gravity and contacts, and return the result."""
    trial = _Trial(model, parts)
    if not trial.actuators:
        raise ConfigError(f"{key}.gripper: nothing drives {', '.join(parts.fingers)}; set {key}.servos to true")
    low, high = trial.ranges()
    ends = []
    for i in range(len(low)):
        if cfg.gripper_open is None:
            middle = 0.5 * (low + high)
            spread = [trial.settle(np.where(np.arange(len(low)) == i, end, middle)) for end in (low, high)]
            is_high = spread[1] >= spread[0]
        else:
            is_high = cfg.gripper_open == "high"
        ends.append((low[i], high[i]) if is_high else (high[i], low[i]))
    closed, opened = [float(end[0]) for end in ends], [float(end[1]) for end in ends]
    trial.settle(np.array(opened))
    fingers_open, others, centres = trial.fingers(), trial.others(), trial.centres()
    sides = trial.sides()
    trial.settle(np.array(closed))
    fingers_closed = trial.fingers()
    if np.allclose(fingers_open, fingers_closed, atol=1e-4):
        raise ConfigError(
            f"{key}.gripper: {', '.join(parts.fingers)} did not move when driven from end to end; name others, or "
            f"set {key}.gripper to [] to go without"
        )
    pads = trial.pads(sides)
    if pads is None:  # one finger against a fixed jaw; without a jaw, its travel counts
        travel = float(np.linalg.norm(trial.centres() - centres, axis=1).max())
        near = trial.to_jaws()
        trial.settle(np.array(opened))
        far = trial.to_jaws()
        jaws = [(gap, far[pair]) for pair, gap in near.items() if far[pair] - gap > _TOWARDS * travel]
        gap_closed, gap_open = min(jaws, default=(0.0, travel))
    else:
        gap_closed = trial.apart(*pads)
        trial.settle(np.array(opened))
        gap_open = trial.apart(*pads)
    return Grip(
        [model.actuator(i).name for i in trial.actuators],
        closed,
        opened,
        fingers_closed,
        fingers_open,
        others,
        gap_closed,
        gap_open,
    )


def closing_axis(model: mujoco.MjModel, data: mujoco.MjData, parts: ArmParts) -> np.ndarray | None:
    """Return the direction between the fingers, orthogonal to the tool's axis, in the site's frame."""
    trial = _Trial(model, parts)
    trial.data = data
    position, rotation, _ = site_frame(model, data, parts)
    groups = trial.groups()
    if not groups:
        return None
    apart = groups[0] - (groups[-1] if len(groups) > 1 else position)
    across = rotation.T @ apart
    across -= (across @ parts.axis) * parts.axis
    size = float(np.linalg.norm(across))
    if size < 1e-3:
        return None
    across, largest = across / size, int(np.argmax(np.abs(across)))
    straight = np.sign(across[largest]) * np.eye(3)[largest]
    return straight if across @ straight > _NEARLY else across  # fingers may differ slightly in shape


class _Trial:
    """A simulation of the robot alone, without gravity and contacts."""

    def __init__(self, model: mujoco.MjModel, parts: ArmParts) -> None:
        self.model, self.parts, self.data = model, parts, mujoco.MjData(model)
        self.joints = [model.joint(name).id for name in parts.fingers]
        self.actuators = sorted({i for joint in self.joints for i in actuators_of(model, joint)})
        bodies = [below(model, int(model.joint(name).bodyid[0])) for name in parts.hand]
        moving = {body for group in bodies for body in group}
        self.geoms = [g for g in range(model.ngeom) if int(model.geom_bodyid[g]) in moving]
        self._branches = [self._branch(int(model.geom_bodyid[g])) for g in self.geoms]
        self._held = [int(model.joint(name).qposadr[0]) for name in parts.joints]
        self._still = [int(model.joint(name).dofadr[0]) for name in parts.joints]

    def _branch(self, body: int) -> int:
        """Return the finger that a body belongs to: its topmost ancestor moved by a joint of the hand."""
        found, last = body, self.model.body(self.parts.body).id
        while body != last and body:
            found = body if self.model.body_jntnum[body] else found
            body = int(self.model.body_parentid[body])
        return found

    def ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper control limits of the actuators."""
        low, high = [], []
        for i in self.actuators:
            model, joint = self.model, int(self.model.actuator_trnid[i, 0])
            if model.actuator_ctrllimited[i]:
                ends = model.actuator_ctrlrange[i]
            elif drive_kind(model, i) == "servo" and int(model.actuator_trntype[i]) == int(mujoco.mjtTrn.mjTRN_JOINT):
                ends = model.jnt_range[joint] * model.actuator_gear[i, 0]
            else:
                ends = np.array([-1.0, 1.0])
            low.append(float(ends[0]))
            high.append(float(ends[1]))
        return np.array(low), np.array(high)

    def settle(self, controls: np.ndarray) -> float:
        """Hold these controls until the gripper is at rest; return the summed distance of its geoms to the axis."""
        model, data = self.model, self.data
        flags, gravity = int(model.opt.disableflags), model.opt.gravity.copy()
        model.opt.disableflags = flags | int(mujoco.mjtDisableBit.mjDSBL_CONTACT)
        model.opt.gravity[:] = 0.0
        inertia = model.dof_armature.copy()
        model.dof_armature[self._still] = _HEAVY  # keep the arm still
        mujoco.mj_resetData(model, data)
        for _ in range(round(_SECONDS / model.opt.timestep)):
            data.qpos[self._held], data.qvel[self._still] = self.parts.init, 0.0
            data.ctrl[self.actuators] = controls
            mujoco.mj_step(model, data)
        data.qpos[self._held] = self.parts.init
        for joint in (
            model.joint(name).id for name in self.parts.hand
        ):  # limits are soft, and a motor presses past them
            if model.jnt_limited[joint]:
                address = int(model.jnt_qposadr[joint])
                data.qpos[address] = np.clip(data.qpos[address], *model.jnt_range[joint])
        mujoco.mj_kinematics(model, data)
        model.opt.disableflags, model.opt.gravity[:], model.dof_armature[:] = flags, gravity, inertia
        position, rotation, _ = site_frame(model, data, self.parts)
        away = self.centres() - position
        axis = rotation @ self.parts.axis
        return float(np.linalg.norm(away - np.outer(away @ axis, axis), axis=1).sum())

    def centres(self) -> np.ndarray:
        """Return the positions of the hand's moving geoms, ``[geoms, 3]``."""
        return self.data.geom_xpos[self.geoms].reshape(-1, 3).copy()

    def groups(self) -> list[np.ndarray]:
        """Return the centre of each finger's geoms."""
        centres, branches = self.centres(), np.array(self._branches)
        return [centres[branches == branch].mean(axis=0) for branch in dict.fromkeys(self._branches)]

    def fingers(self) -> list[float]:
        return [float(self.data.qpos[self.model.jnt_qposadr[j]]) for j in self.joints]

    def others(self) -> dict[str, float]:
        """Return the positions of the hand's joints that are not fingers."""
        rest = [name for name in self.parts.hand if name not in self.parts.fingers]
        return {name: float(self.data.qpos[self.model.joint(name).qposadr[0]]) for name in rest}

    def sides(self) -> np.ndarray:
        """Return the side of the tool's axis that each geom is on: 1, -1, or 0 in the middle."""
        across = closing_axis(self.model, self.data, self.parts)
        if across is None:
            return np.zeros(len(self.geoms))
        position, rotation, _ = site_frame(self.model, self.data, self.parts)
        away = (self.centres() - position) @ (rotation @ across)
        return np.sign(np.where(np.abs(away) < 1e-3, 0.0, away))

    def pads(self, sides: np.ndarray) -> tuple[int, int] | None:
        """Return the colliding geom nearest to the tool on each side; ``None`` if a side has none."""
        position = site_frame(self.model, self.data, self.parts)[0]
        far = np.linalg.norm(self.centres() - position, axis=1)
        solid = np.array([bool(self.model.geom_contype[g] or self.model.geom_conaffinity[g]) for g in self.geoms])
        found = []
        for side in (1.0, -1.0):
            there = np.flatnonzero(solid & (sides == side))
            if there.size == 0:
                return None
            found.append(self.geoms[int(there[np.argmin(far[there])])])
        return found[0], found[1]

    def to_jaws(self) -> dict[tuple[int, int], float]:
        """Return the distance of each pair of a moving and a fixed colliding geom of the hand."""
        model, hand = self.model, self.model.body(self.parts.body).id
        solid = [g for g in range(model.ngeom) if model.geom_contype[g] or model.geom_conaffinity[g]]
        weld = model.body_weldid[model.geom_bodyid]
        still = [g for g in solid if g not in self.geoms and weld[g] == model.body_weldid[hand]]
        return {(one, two): self.apart(one, two) for one in self.geoms if one in solid for two in still}

    def apart(self, one: int, two: int) -> float:
        """Return the distance between two geoms, negative if they overlap."""
        return float(mujoco.mj_geomDistance(self.model, self.data, one, two, _FAR, None))
