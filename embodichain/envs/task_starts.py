"""The posture in which another robot starts a task: its tool is where the task's own robot has its tool.

The pose of that tool (its position, where it points, along which line its fingers close, and how far they are open)
is found in the task's default config. Of the postures of the other arm that have this pose, which inverse kinematics
finds from many joint positions, one is chosen that touches nothing, keeps away from joint limits, carries its links
high above the table, and from which the arm gets to the things of the scene.
"""

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.construction import add_robot
from embodichain.envs.env_cfg import ArmCfg, GymCfg, RobotCfg
from embodichain.envs.grippers import closing_axis
from embodichain.envs.kinematics import SerialChain, length, rotation_error
from embodichain.envs.robot_adaptation import describe
from embodichain.envs.robot_files import PREFIX, is_ours, split_robot
from embodichain.envs.robots import Arm, ArmParts, ArmSpec, Robot
from embodichain.envs.task import Task
from embodichain.errors import ConfigError, nearest
from embodichain.utils.torch_runtime import torch_threads

_LOG = logging.getLogger(__name__)
_SEARCHES, _STEPS, _TURNS = 40, 100, 8  # joint positions to start from, iterations, rotations about the tool's axis
_MOVES = 60  # iterations from a posture to a place
_CLOSE, _ALIGNED = 0.005, 0.03  # errors of a posture that count as none: metres, and radians
_THERE = 0.02  # metres, with the error of the orientation, at which a place is reached
_SHORTER = (1.0, 0.9, 0.8, 0.7)  # distances of the tool from the base, as fractions of that of the task's own robot
_TESTED = 12  # number of postures whose contacts and places are looked at
_AROUND = ((0.1, 0.0, 0.0), (-0.1, 0.0, 0.0), (0.0, 0.1, 0.0), (0.0, -0.1, 0.0), (0.0, 0.0, 0.1))  # metres
_OVER_TABLE = 0.03  # metres above the table at which a tool takes things
_BACK = (0.0, 0.1, 0.2, 0.3)  # metres that a base may stand behind the origin, for arms that cannot fold so far
_STAY = 1.0  # by how much a posture must be better for the base to stand further back
_MISS, _TOUCH = 20.0, 10.0  # costs of a posture that reaches no place, and of one that touches something
_HIGH = 0.6  # height in metres above which links score no better
_SAME = 0.1  # radians by which joints of different postures differ
_KEPT = 16  # number of searches in the cache
_LONG = 5.0  # seconds after which a search is worth a line in the log


@dataclass(frozen=True)
class ToolPose:
    """A pose of a tool in the world, whatever the axes of its frame."""

    pos: tuple[float, ...]
    points: tuple[float, ...]
    """Direction in which the tool points."""
    closes: tuple[float, ...] | None
    """Direction along which the fingers close, forwards or backwards; ``None`` without fingers."""
    opening: float | None
    """Half the distance between the fingers in metres; ``None`` if they are open."""


@dataclass(frozen=True)
class InitialPosture:
    """Where an arm starts."""

    qpos: list[float]
    """Positions of joints and fingers."""
    back: float
    """How far its base stands behind the origin, in metres."""


@dataclass(frozen=True)
class Posture:
    """A posture of an arm with the pose of the tool."""

    qpos: Tensor
    touched: list[str]
    """Things of the scene that the robot touches."""
    missed: list[tuple[float, ...]]
    """Places that the tool does not reach from here."""
    cost: float


_known: dict[str, dict[str, InitialPosture]] = {}


def with_start(cfg: GymCfg, task: type[Task]) -> GymCfg:
    """Return a config whose robot, if it is another one than the task's and may start anywhere, has ``init_qpos``.

    What an arm does not reach, or touches at the start, is logged.
    """
    own = task.default_cfg().robot
    arms, theirs = _arms(cfg.robot), _arms(own)
    _check_names(cfg, list(arms), list(theirs))
    free = [name for name, arm in arms.items() if name in theirs and _is_open(arm, theirs[name])]
    events = (cfg.env.events.randomize_object_pose, cfg.env.events.randomize_target)
    key = str((task, cfg.robot, own, cfg.env.scene, events))
    if key not in _known:
        if len(_known) >= _KEPT:
            _known.pop(next(iter(_known)))
        began = time.perf_counter()
        with torch_threads(1):  # the tensors are small, and threads would wait for each other
            _known[key] = _find_starts(cfg, task, own, free) if free else _check_reach(cfg, task)
        took = time.perf_counter() - began
        if took > _LONG:
            _LOG.info("%s: searching the posture in which the robot starts took %.0f s", cfg.id, took)
    found = _known[key]
    if not found:
        return cfg
    if not cfg.robot.arms:
        pos = (-found[""].back, 0.0, 0.0) if found[""].back else cfg.robot.pos
        return cfg.replace(robot=cfg.robot.replace(init_qpos=found[""].qpos, pos=pos))
    changed = {
        name: arm.replace(init_qpos=found[name].qpos) if name in found else arm for name, arm in cfg.robot.arms.items()
    }
    return cfg.replace(robot=cfg.robot.replace(arms=changed))


def _check_names(cfg: GymCfg, given: Sequence[str], expected: Sequence[str]) -> None:
    """Raise ``ConfigError`` for an arm that a task of several named arms does not have."""
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if len(given) > 1 and len(expected) > 1 and missing and unknown:
        raise ConfigError(
            f"robot.arms: {cfg.id} needs arms called {' and '.join(map(repr, expected))}, got {unknown[0]!r}."
            f"{nearest(unknown[0], missing)}"
        )


def _arms(robot: RobotCfg) -> dict[str, ArmCfg]:
    return {name: arm for part in split_robot(robot) for name, arm in part.arms.items()}


def _is_open(arm: ArmCfg, own: ArmCfg) -> bool:
    """Return whether an arm is another one than the task's, and its config does not say where it starts."""
    return not (arm.init_qpos or arm.init_tool or arm.walks or own.walks or not own.init_qpos or arm.mjcf == own.mjcf)


def _find_starts(cfg: GymCfg, task: type[Task], own: RobotCfg, names: Sequence[str]) -> dict[str, InitialPosture]:
    """Return the starts of the arms for which a posture is found."""
    poses, specs = _tool_poses(own, names), _specs(cfg.robot)
    model = task.build_model(cfg)
    robot = Robot(model, describe(cfg.robot))
    found = {}
    for name, pose in poses.items():
        arm = robot.arms[name]
        if arm.site is None:
            continue
        key = f"robot.arms.{name}" if name else "robot"
        # of several arms, which one has to reach what is the task's: here, where its own one starts
        things = _places(cfg, model) if len(robot.arms) == 1 else [pose.pos]
        may_stand_back = not cfg.robot.arms and cfg.robot.pos is None
        posture, stand = None, 0.0
        for back in _BACK if may_stand_back else (0.0,):
            tried = _Postures(_shifted(model, back), robot, arm, specs[name].parts, pose).best(things)
            if tried is not None and (posture is None or tried.cost < posture.cost - _STAY):
                posture, stand = tried, back
            if posture is not None and not posture.missed and not posture.touched:
                break
        if posture is None:
            at = ", ".join(f"{value:.2f}" for value in pose.pos)
            _LOG.warning(
                "%s: the arm does not reach the pose in which the tool of %s starts, at (%s): it starts elsewhere, and "
                "the task may be out of its reach; set %s.pos or init_qpos, or move the scene", key, cfg.id, at, key,
            )  # fmt: skip
            continue
        found[name] = InitialPosture([round(float(q), 4) for q in posture.qpos] + _fingers(arm, pose), stand)
        if posture.touched:
            touched = ", ".join(posture.touched)
            _LOG.warning("%s: at the start of %s, the arm touches %s; set init_qpos or pos", key, cfg.id, touched)
        _warn_of_missed(cfg, key, posture.missed)
    return found


def _warn_of_missed(cfg: GymCfg, key: str, missed: Sequence[tuple[float, ...]]) -> None:
    if missed:
        places = " and ".join(f"({', '.join(f'{value:.2f}' for value in place)})" for place in missed[:2])
        _LOG.warning(
            "%s: the arm does not reach all places of %s with its tool turned as at the start, such as %s; move "
            "the base (%s.pos) or the scene", key, cfg.id, places, key,
        )  # fmt: skip


def _check_reach(cfg: GymCfg, task: type[Task]) -> dict[str, InitialPosture]:
    """Warn of places that an arm, which starts where its config says, does not reach; return no start."""
    robot = describe(cfg.robot)
    if len(robot) != 1 or len(robot[0][1].arms) != 1 or is_ours(cfg.robot) or cfg.robot.walks:
        return {}
    model = task.build_model(cfg)
    things, built = _places(cfg, model), Robot(model, robot)
    arm = built.only_arm
    if not things or arm is None or arm.site is None:
        return {}
    parts = _specs(cfg.robot)[""].parts
    pose = _tool_poses(cfg.robot, [""])[""]
    postures = _Postures(model, built, arm, parts, pose)
    start = arm.init_qpos[: arm.num_joints].float().unsqueeze(0)
    missed = postures.missed(start, torch.tensor(things))[0].tolist()
    _warn_of_missed(cfg, "robot", [place for place, miss in zip(things, missed, strict=True) if miss])
    return {}


def _tool_poses(own: RobotCfg, names: Sequence[str]) -> dict[str, ToolPose]:
    """Return where the arms of a task's own robot have their tools at the start."""
    spec = mujoco.MjSpec()
    add_robot(spec, own)
    model = spec.compile()
    robot, specs, data = Robot(model, describe(own)), _specs(own), mujoco.MjData(model)
    data.qpos[:] = robot.home(torch.tensor(model.qpos0)).numpy()
    mujoco.mj_kinematics(model, data)
    poses = {}
    for name in names:
        arm, parts = robot.arms[name], specs[name].parts
        if arm.site is None:
            continue
        rotation = data.site(arm.site).xmat.reshape(3, 3)
        across = closing_axis(model, data, parts) if arm.num_fingers else None
        fingers = arm.init_qpos[arm.num_joints :].float()
        poses[name] = ToolPose(
            tuple(data.site(arm.site).xpos.tolist()),
            tuple((rotation @ parts.axis).tolist()),
            None if across is None else tuple((rotation @ across).tolist()),
            float(arm.opening(fingers.unsqueeze(0)))
            if not torch.allclose(fingers, arm.finger_open, atol=1e-4)
            else None,
        )
    return poses


def _specs(robot: RobotCfg) -> dict[str, ArmSpec]:
    """Return the analysis of each arm, with the names that its parts have in the scene."""
    specs = {}
    for prefix, spec in describe(robot):
        for arm in spec.arms:
            parts = arm.parts
            parts = replace(
                parts,
                joints=[prefix + name for name in parts.joints],
                fingers=[prefix + name for name in parts.fingers],
                hand=[prefix + name for name in parts.hand],
                body=prefix + parts.body,
                site=None if parts.site is None else prefix + parts.site,
                site_body=None,  # the site has been added
            )
            specs[arm.name] = replace(arm, parts=parts)
    return specs


def _fingers(arm: Arm, pose: ToolPose) -> list[float]:
    """Return the positions of the fingers at which they are as far open as those of the task's own robot."""
    if pose.opening is None or not arm.num_fingers:
        return []
    closed, opened = (float(arm.opening(at.unsqueeze(0))) for at in (arm.finger_closed, arm.finger_open))
    share = min(max((pose.opening - closed) / (opened - closed), 0.0), 1.0)
    return [round(q, 5) for q in torch.lerp(arm.finger_closed, arm.finger_open, share).tolist()]


def _places(cfg: GymCfg, model: mujoco.MjModel) -> list[tuple[float, ...]]:
    """Return points that the tool has to reach: the corners of where things are placed, and parts of fixtures."""
    data, places = mujoco.MjData(model), []
    events, scene = cfg.env.events, cfg.env.scene
    areas = [area for area in (events.randomize_object_pose, events.randomize_target) if area is not None]
    areas += [thing.pose for thing in (*scene.objects.values(), *scene.goals.values()) if thing is not None]
    for area in areas:
        places += [(x, y, max(z, _OVER_TABLE)) for x in area.x for y in area.y for z in area.z]
    for name, fixture in scene.fixtures.items():
        if fixture is None or fixture.pose is None:  # a peg is in the hand
            continue
        stands = model.body(name).pos * np.array([1.0, 1.0, 0.0])
        sites = [i for i in range(model.nsite) if model.site(i).name.startswith(f"{name}/")]
        corners = [np.array([x, y, 0.0]) - stands for x in fixture.pose.x for y in fixture.pose.y]
        for end in (0, 1):  # drawers and doors closed, and open
            for joint in range(model.njnt):
                if model.joint(joint).name.startswith(f"{name}/"):
                    data.qpos[model.jnt_qposadr[joint]] = model.jnt_range[joint, end]
            mujoco.mj_kinematics(model, data)
            places += [tuple((data.site_xpos[i] + corner).tolist()) for i in sites for corner in corners]
    return list(dict.fromkeys(places))


def _shifted(model: mujoco.MjModel, back: float) -> mujoco.MjModel:
    """Return the model with the robot's base further back."""
    model = copy.copy(model)
    for body in range(1, model.nbody):
        if model.body(body).name.startswith(PREFIX) and not model.body_parentid[body]:
            model.body_pos[body, 0] -= back
    return model


class _Postures:
    """The postures of an arm with a given pose of its tool."""

    def __init__(self, model: mujoco.MjModel, robot: Robot, arm: Arm, parts: ArmParts, pose: ToolPose) -> None:
        self.model, self.robot, self.arm, self.parts, self.pose = model, robot, arm, parts, pose
        self.lower, self.upper = arm.lower.clamp_min(-np.pi), arm.upper.clamp_max(np.pi)
        self.chain = SerialChain(model, str(arm.site), arm.joints)  # without a rest posture, so that many are found
        self.data = mujoco.MjData(model)
        self.data.qpos[:] = robot.home(torch.tensor(model.qpos0)).numpy()
        mujoco.mj_kinematics(model, self.data)
        self.addresses = [int(model.joint(name).qposadr[0]) for name in arm.joints]
        self.rotations = self._rotations()

    def best(self, things: Sequence[tuple[float, ...]]) -> Posture | None:
        """Return the best posture, or ``None`` if none has the pose."""
        base = torch.tensor(self.data.xanchor[self.model.joint(self.arm.joints[0]).id], dtype=torch.float32)
        full = torch.tensor(self.pose.pos)
        for share in _SHORTER:  # an arm with a shorter reach starts closer to its base
            pos = full.clone()
            pos[:2] = base[:2] + share * (full[:2] - base[:2])
            found = self._solve(pos)
            if found:
                break
        else:
            return None
        around = [tuple((pos + torch.tensor(by)).tolist()) for by in _AROUND]
        places = torch.tensor([*things, *around])
        ranked = sorted(found, key=self._cost)[:_TESTED]
        missed = self.missed(torch.stack(ranked), places)
        touched = [self._touched(qpos) for qpos in ranked]
        costs = [
            self._cost(qpos) + _MISS * float(miss.float().mean()) + _TOUCH * bool(names)
            for qpos, miss, names in zip(ranked, missed, touched, strict=True)
        ]
        index = int(np.argmin(costs))
        out = [place for place, miss in zip(things, missed[index].tolist(), strict=False) if miss]
        return Posture(ranked[index], touched[index], out, costs[index])

    def _rotations(self) -> Tensor:
        """Return the orientations of the tool's frame that have the pose, ``[k, 3, 3]``."""
        points = np.array(self.pose.points)
        across = closing_axis(self.model, self.data, self.parts) if self.arm.num_fingers else None
        if across is None or self.pose.closes is None:
            own = np.roll(self.parts.axis, 1) if across is None else across
            level = np.cross(points, np.eye(3)[int(np.argmin(np.abs(points)))])
            level /= np.linalg.norm(level)
            angles = 2.0 * np.pi * np.arange(_TURNS) / _TURNS
            ways = [np.cos(angle) * level + np.sin(angle) * np.cross(points, level) for angle in angles]
        else:
            own, ways = across, [np.array(self.pose.closes), -np.array(self.pose.closes)]
        axes = np.stack((own, self.parts.axis, np.cross(own, self.parts.axis)), axis=1)
        turned = [np.stack((way, points, np.cross(way, points)), axis=1) @ axes.T for way in ways]
        return torch.tensor(np.stack(turned), dtype=torch.float32)

    def _solve(self, pos: Tensor) -> list[Tensor]:
        """Return the different postures that are found with the tool at a point."""
        drawn = torch.rand(_SEARCHES, self.arm.num_joints, generator=torch.Generator().manual_seed(0))
        starts = torch.lerp(self.lower, self.upper, drawn)
        starts[0] = self.arm.init_qpos[: self.arm.num_joints].float()
        starts[1] = 0.5 * (self.lower + self.upper)
        count = self.rotations.shape[0]
        qpos, targets = starts.repeat_interleave(count, dim=0), self.rotations.repeat(_SEARCHES, 1, 1)
        qpos, far, turned = self._follow(qpos, pos.expand(qpos.shape[0], 3), targets, _STEPS)
        there = (far < _CLOSE) & ((turned < _ALIGNED) | (self.arm.num_joints < 6))
        left, distinct = qpos[there], []
        while len(left):
            distinct.append(left[0])
            left = left[(left - left[0]).abs().amax(dim=1) > _SAME]
        return distinct

    def _follow(
        self, qpos: Tensor, pos: Tensor, rotation: Tensor, steps: int, rest: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Move the tool to poses; return the joint positions, the remaining distances and the remaining angles."""
        for step in range(steps + 1):
            at, now = self.chain.pose(qpos)
            way, turn = pos - at, _rotation_vector(rotation, now)
            if step == steps:
                break
            way = way * (0.1 / length(way).clamp_min(0.1)).unsqueeze(1)
            turn = turn * (0.3 / length(turn).clamp_min(0.3)).unsqueeze(1)
            by = self.chain.inverse_step(qpos, torch.cat((way, turn), dim=1), damping=0.02, rest=rest)
            qpos = torch.clamp(qpos + by.clamp(-0.3, 0.3), self.lower, self.upper)
        return qpos, length(way), length(turn)

    def missed(self, qpos: Tensor, places: Tensor) -> Tensor:
        """Return which places the tool does not reach from postures, with its orientation, bool ``[n, places]``."""
        count, number = qpos.shape[0], places.shape[0]
        rotation = self.chain.pose(qpos)[1].repeat_interleave(number, dim=0)
        starts, targets = qpos.repeat_interleave(number, dim=0), places.repeat(count, 1)
        _, far, turned = self._follow(starts, targets, rotation, _MOVES, rest=starts)
        return (far + 0.1 * turned > _THERE).view(count, number)

    def _touched(self, qpos: Tensor) -> list[str]:
        """Return the things of the scene that the robot touches, apart from those that lie loose."""
        model, data = self.model, self.data
        data.qpos[self.addresses] = qpos.numpy()
        mujoco.mj_kinematics(model, data)
        mujoco.mj_collision(model, data)
        names = []
        for one, two in data.contact.geom:
            bodies = [int(model.geom_bodyid[geom]) for geom in (one, two)]
            own = [model.body(body).name.startswith(PREFIX) for body in bodies]
            other = bodies[own.index(False)] if own[0] != own[1] else 0
            if own[0] != own[1] and not _is_loose(model, other):
                names.append(model.body(other).name if other else "the table")
        return list(dict.fromkeys(names))

    def _cost(self, qpos: Tensor) -> float:
        """Return the cost of a posture: near limits, far from the middle of the ranges, or low above the table."""
        data, span = self.data, self.upper - self.lower
        data.qpos[self.addresses] = qpos.numpy()
        mujoco.mj_kinematics(self.model, data)
        ids = [self.model.joint(name).id for name in self.arm.joints]
        margin = float((torch.minimum(qpos - self.lower, self.upper - qpos) / span).min())
        height = float(np.min(data.xanchor[ids[2:] or ids, 2]))
        deviation = float(((qpos - 0.5 * (self.lower + self.upper)).abs() / span).sum())
        return deviation - 20.0 * min(margin, 0.1) - 5.0 * min(height, _HIGH)


def _is_loose(model: mujoco.MjModel, body: int) -> bool:
    """Return whether a body, or one that carries it, floats."""
    joint = int(model.body_jntadr[model.body_rootid[body]])
    return joint >= 0 and int(model.jnt_type[joint]) == int(mujoco.mjtJoint.mjJNT_FREE)


def _rotation_vector(target: Tensor, current: Tensor) -> Tensor:
    """Return ``angle * axis`` ``[n, 3]`` of the rotation from ``current`` to ``target``."""
    sine = rotation_error(target, current)
    cosine = 0.5 * ((target * current).sum(dim=(1, 2)) - 1.0)
    size = length(sine)
    return sine * (torch.atan2(size, cosine) / size.clamp_min(1e-6)).unsqueeze(1)
