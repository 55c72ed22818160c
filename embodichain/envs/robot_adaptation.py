"""Adapts a robot file to our scenes: removes its ground, lights and props, locks joints that no arm uses, adds servos,
and sets collision bits.

``robot_model.py``, ``grippers.py`` and ``postures.py`` analyse the file.
"""

from pathlib import Path

import mujoco
import numpy as np

from embodichain.envs.env_cfg import ArmCfg, RobotCfg
from embodichain.envs.grippers import closing_axis, known_grip, try_grip
from embodichain.envs.model_files import ASSETS, compile_spec, find_file, read_spec, read_tool, take_settings
from embodichain.envs.postures import base_pose, find_start
from embodichain.envs.rendering import looking
from embodichain.envs.robot_files import TOOLS, RobotPart, find_named, split_robot
from embodichain.envs.robot_model import (
    HINGE,
    SLIDE,
    below,
    check_start,
    coupled_joints,
    free_base,
    free_name,
    path_joints,
    reach,
    read_arm,
    site_frame,
)
from embodichain.envs.robots import (
    ArmParts,
    ArmSpec,
    Grip,
    RobotSpec,
    actuators_of,
    drive_kind,
    motor_of,
    servo_of,
    servo_scale,
    tendon_joints,
)
from embodichain.errors import AssetError, ConfigError, nearest

_KEPT = 8  # number of adapted files in the cache
_FOOT_LEVEL = 0.1  # metres above the lowest limb end; higher ends are hands
_FASTEST_FINGER = 125.0  # maximum natural frequency of a finger's servo, for steps of 4 ms
_EYE = (-0.9, -1.9, 0.9)  # from a walking robot to the camera that follows it, in radii of the robot
_STUCK = 5.0  # times the critical damping, above which a joint hardly moves
# Our tools pointing straight down: their x axis, along which fingers move, is -y of the world.
_DOWN = ((0.0, 0.0, 1.0), (-1.0, 0.0, 0.0), (0.0, -1.0, 0.0))


def describe(robot: RobotCfg) -> list[tuple[str, RobotSpec]]:
    """Return the analysis of every robot file of a config, with its prefix in the scene."""
    return [(part.prefix, adapted(part)[1]) for part in split_robot(robot)]


_known: dict[tuple[str, ...], tuple[mujoco.MjSpec, RobotSpec]] = {}


def adapted(part: RobotPart) -> tuple[mujoco.MjSpec, RobotSpec]:
    """Return an adapted robot file and its analysis; the last few are cached, as this is slow."""
    file = find_file(str(part.cfg.mjcf))
    tool = part.cfg.tool
    stamp = file.stat()
    tools = str(TOOLS.get(tool)) if tool else ""
    key = (str(part), str(file), str(stamp.st_mtime_ns), str(stamp.st_size), tools)
    if key not in _known:
        if len(_known) >= _KEPT:
            _known.pop(next(iter(_known)))
        _known[key] = _Adaptation(part, file).run()
    spec, found = _known[key]
    return spec.copy(), found


class _Adaptation:
    """Analyses a robot file and changes its spec for our scenes."""

    def __init__(self, part: RobotPart, file: Path) -> None:
        self.part, self.file, self.cfg, self.key = part, file, part.cfg, part.key
        self.ours = file.parent == ASSETS
        self.spec = read_spec(file)
        self.locked: list[str] = []
        self.dropped: list[str] = []
        self.our_fingers: dict[str, tuple[str, ...]] = {}  # fingers of our tools, by arm

    def run(self) -> tuple[mujoco.MjSpec, RobotSpec]:
        """Return the adapted spec and its analysis."""
        for name, arm in self.part.arms.items():
            twice = sorted({joint for joint in arm.joints if arm.joints.count(joint) > 1})
            if twice:
                raise ConfigError(f"{self._key(name)}.joints: {', '.join(twice)} is given twice; name each joint once")
        _name_parts(self.spec)
        given = {key.name: len(key.qpos) for key in self.spec.keys}
        model = self._compile()
        home = self._home(model, given)
        if any(arm.tool for arm in self.part.arms.values()):
            self._mount_tools(model)
            model = self._compile()
        if self.cfg.fix_base:
            model = self._fix_base(model)
        if self.cfg.walks and not self.ours:
            arms = [(name, self._walker(model, cfg, home)) for name, cfg in self.part.arms.items()]
        elif self.ours and self.cfg.tool is None and self.cfg.tool_site is None:
            arms = [(name, self._machine(model, cfg)) for name, cfg in self.part.arms.items()]
        else:
            arms = [(name, self._read(model, name, cfg, home)) for name, cfg in self.part.arms.items()]
            if self._move_root(model, [parts for _, parts in arms]):
                model = self._compile()
            for name, parts in arms:
                cfg = self._with_tool(name, self.part.arms[name])
                find_start(model, cfg, self._key(name), parts, _positions(model, home))
        self._check_apart(arms)
        if self.cfg.walks and not self.ours:
            for name, parts in arms:
                self._drive(model, parts, self.part.arms[name].replace(gravity_compensation=False))
                self._add_feet(model, parts)
                self._add_camera(model, parts)
            self._strip_world()
            model = self._compile()
        elif not self.ours:
            self._strip(model, [parts for _, parts in arms])
            for name, parts in arms:
                self._drive(model, parts, self.part.arms[name])
            self._collide(model, [parts for _, parts in arms])
            self._hide(model)
            self._add_sites([parts for _, parts in arms])
            model = self._compile()
        specs = tuple(self._finish(model, name, parts) for name, parts in arms)
        used = {n for spec in specs for n in self._drives(model, spec)}
        held = {model.actuator(i).name: _hold(model, i) for i in range(model.nu) if model.actuator(i).name not in used}
        return self.spec, RobotSpec(specs, held, tuple(self.locked), tuple(self.dropped), int(model.nu))

    def _compile(self) -> mujoco.MjModel:
        return compile_spec(self.spec, self.file)

    def _check_apart(self, arms: list[tuple[str, ArmParts]]) -> None:
        """Raise ``ConfigError`` for arms of one file that share joints."""
        for i, (name, parts) in enumerate(arms):
            for other, others in arms[:i]:
                shared = [joint for joint in parts.joints if joint in others.joints]
                if shared:
                    raise ConfigError(
                        f"{self._key(name)}: it moves the same joints as {self._key(other)} ({', '.join(shared)}); "
                        "name the joints or the tool_site of each arm, or give each a pos to be a robot of its own"
                    )

    def _home(self, model: mujoco.MjModel, given: dict[str, int]) -> dict[str, float]:
        """Return the joint positions of the keyframe ``home``, or of the first one; all keyframes are deleted.

        ``given`` is the number of positions that the file gives for each keyframe.
        """
        keys = [model.key(i).name for i in range(model.nkey)]
        for key in list(self.spec.keys):
            self.spec.delete(key)
        if not keys:
            return {}
        index = keys.index("home") if "home" in keys else 0
        if given.get(keys[index], 0) not in (0, model.nq):
            raise AssetError(
                f"{self.file}: the keyframe {keys[index]!r} has {given[keys[index]]} positions (qpos), and the model "
                f"{model.nq}; correct or delete it"
            )
        qpos = model.key_qpos[index]
        joints = [model.joint(j) for j in range(model.njnt) if int(model.jnt_type[j]) in (HINGE, SLIDE)]
        return {joint.name: float(qpos[joint.qposadr[0]]) for joint in joints}

    def _machine(self, model: mujoco.MjModel, cfg: ArmCfg) -> ArmParts:
        """Return the parts of one of our robots without a tool."""
        ranges = [model.joint(name).range for name in cfg.joints]
        count = len(cfg.joints)
        if cfg.init_qpos and len(cfg.init_qpos) != count:
            raise ConfigError(
                f"{self.key}.init_qpos: expected {count} joints and 0 fingers, got {len(cfg.init_qpos)} numbers"
            )
        low, high = ([float(r[i]) for r in ranges] for i in (0, 1))
        if cfg.init_qpos:
            check_start(f"{self.key}.init_qpos", cfg.joints, cfg.init_qpos, list(zip(low, high, strict=True)))
        return ArmParts(list(cfg.joints), low, high, "", init=list(cfg.init_qpos or [0.0] * count))

    def _walker(self, model: mujoco.MjModel, cfg: ArmCfg, home: dict[str, float]) -> ArmParts:
        """Return the parts of a walking robot: its joints, their limits, and its standing posture."""
        if free_base(model) is None:
            raise ConfigError(f"{self.key}.walks: expected a robot with a free base, and {self.file.name} has none")
        turning = [model.joint(j).name for j in range(model.njnt) if int(model.jnt_type[j]) in (HINGE, SLIDE)]
        joints = cfg.joints or [name for name in turning if model.jnt_limited[model.joint(name).id]]
        unknown = [name for name in joints if name not in turning]
        if unknown or not joints:
            problem = f"no joint {unknown[0]!r}.{nearest(unknown[0], turning)}" if unknown else "expected some joints"
            raise ConfigError(f"{self.key}.joints: {problem}")
        free = [n for n in joints if not model.jnt_limited[model.joint(n).id] and n not in cfg.limits]
        if free:
            raise ConfigError(f"{self.key}.limits: expected those of {', '.join(free)}, which the model leaves out")
        if cfg.init_qpos and len(cfg.init_qpos) != len(joints):
            raise ConfigError(
                f"{self.key}.init_qpos: expected {len(joints)} joints and 0 fingers, got {len(cfg.init_qpos)} numbers"
            )
        ranges = [cfg.limits.get(name, tuple(model.joint(name).range.tolist())) for name in joints]
        low, high = ([float(r[i]) for r in ranges] for i in (0, 1))
        start = [home.get(name, float(model.qpos0[model.joint(name).qposadr[0]])) for name in joints]
        source = "" if cfg.init_qpos else " is left to the model, which"
        check_start(f"{self.key}.init_qpos{source}", joints, cfg.init_qpos or start, list(zip(low, high, strict=True)))
        return ArmParts(joints, low, high, "", init=list(cfg.init_qpos or start))

    def _add_feet(self, model: mujoco.MjModel, parts: ArmParts) -> None:
        """Add a site ``foot_N`` of the size of the foot where each leg touches the ground in the standing posture."""
        data = mujoco.MjData(model)
        for name, at in zip(parts.joints, parts.init, strict=True):
            data.qpos[model.joint(name).qposadr[0]] = at
        mujoco.mj_kinematics(model, data)
        moved = {int(model.joint(name).bodyid[0]) for name in parts.joints}
        ends = [b for b in moved if not any(other in moved for other in below(model, b) if other != b)]
        lowest: dict[int, tuple[float, int]] = {}
        for end in ends:
            for body in below(model, end):
                first, count = int(model.body_geomadr[body]), int(model.body_geomnum[body])
                for geom in range(first, first + count):
                    if model.geom_contype[geom] or model.geom_conaffinity[geom]:
                        up = data.geom_xmat[geom].reshape(3, 3)[2]
                        bottom = float(data.geom_xpos[geom, 2]) - reach(model, geom, up)
                        lowest[end] = min(lowest.get(end, (np.inf, geom)), (bottom, geom))
        if not lowest:
            raise ConfigError(f"{self.key}.walks: no leg of {self.file.name} can touch the ground")
        ground = min(bottom for bottom, _ in lowest.values())
        feet = [geom for bottom, geom in lowest.values() if bottom < ground + _FOOT_LEVEL]
        for number, geom in enumerate(sorted(feet)):
            body = self.spec.body(model.body(int(model.geom_bodyid[geom])).name)
            pos, up = model.geom_pos[geom].copy(), data.geom_xmat[geom].reshape(3, 3)[2]
            radius = reach(model, geom, up)
            if int(model.geom_type[geom]) == int(mujoco.mjtGeom.mjGEOM_CAPSULE):  # the lower end
                rotation, radius = np.empty(9), float(model.geom_size[geom, 0])
                mujoco.mju_quat2Mat(rotation, model.geom_quat[geom])
                pos -= np.sign(up[2]) * model.geom_size[geom, 1] * rotation.reshape(3, 3)[:, 2]
            body.add_site(name=f"foot_{number}", pos=pos, size=[radius] * 3)

    def _add_camera(self, model: mujoco.MjModel, parts: ArmParts) -> None:
        """Add a camera ``track`` that follows a robot without cameras, at a distance that shows all of it."""
        if self.spec.cameras:
            return
        data = mujoco.MjData(model)
        for name, at in zip(parts.joints, parts.init, strict=True):
            data.qpos[model.joint(name).qposadr[0]] = at
        mujoco.mj_forward(model, data)
        base = model.joint(str(free_base(model))).bodyid[0]
        geoms = [g for g in range(model.ngeom) if model.geom_bodyid[g]]
        middle = data.subtree_com[base]
        size = max(float(np.linalg.norm(data.geom_xpos[g] - middle) + model.geom_rbound[g]) for g in geoms)
        eye, rotation, quat = size * np.array(_EYE), data.xmat[base].reshape(3, 3), np.empty(4)
        turned = np.empty(4)
        mujoco.mju_negQuat(quat, data.xquat[base])
        mujoco.mju_mulQuat(turned, quat, looking(eye.tolist(), (0.0, 0.0, 0.0)))
        self.spec.body(model.body(base).name).add_camera(
            name="track",
            mode=mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM,
            pos=rotation.T @ (middle + eye - data.xpos[base]),
            quat=turned,
        )

    def _strip_world(self) -> None:
        """Delete the ground and the lights of the robot's own scene."""
        for geom in list(self.spec.worldbody.geoms):
            self.spec.delete(geom)
        for light in list(self.spec.worldbody.lights):
            self.spec.delete(light)

    def _read(self, model: mujoco.MjModel, name: str, cfg: ArmCfg, home: dict[str, float]) -> ArmParts:
        return read_arm(model, self._with_tool(name, cfg), self._key(name), _positions(model, home))

    def _with_tool(self, name: str, cfg: ArmCfg) -> ArmCfg:
        """Return the config of an arm with what is known of our robots and tools."""
        if self.ours and not cfg.init_qpos and cfg.init_tool is None:
            cfg = cfg.replace(init_qpos=[0.0] * (len(cfg.joints) + len(self.our_fingers.get(name, ()))))
        return cfg.replace(gripper=list(self.our_fingers[name])) if self.our_fingers.get(name) else cfg

    def _move_root(self, model: mujoco.MjModel, arms: list[ArmParts]) -> bool:
        """Move what the file has in its world so that the body that carries the arms is at the origin.

        Return whether that changes anything. A base that was free keeps its height, and several bodies their places.
        """
        roots = {int(model.body_rootid[int(model.joint(parts.joints[0]).bodyid[0])]) for parts in arms}
        offset = model.body_pos[min(roots)].copy()
        if self.cfg.fix_base:
            offset[2] = 0.0
        if self.ours or len(roots) > 1 or not offset.any():
            return False
        world = self.spec.worldbody
        for thing in (*world.bodies, *world.geoms, *world.sites, *world.cameras):
            ends = getattr(thing, "fromto", None)  # MuJoCo takes either this or a position
            if thing.frame is None and ends is not None and np.isfinite(ends).all():
                thing.fromto = ends - np.tile(offset, 2)
            elif thing.frame is None:
                thing.pos = thing.pos - offset
        for tie in self.spec.equalities:
            anchored = tie.type == mujoco.mjtEq.mjEQ_CONNECT and tie.objtype == mujoco.mjtObj.mjOBJ_BODY
            if anchored and tie.name1 == "world":
                tie.data[:3] -= offset
        for frame in (one for one in world.frames if one.frame is None):
            frame.pos = frame.pos - offset
        return True

    def _key(self, name: str) -> str:
        return f"robot.arms.{name}" if len(self.part.arms) > 1 else self.key

    def _fix_base(self, model: mujoco.MjModel) -> mujoco.MjModel:
        name = free_base(model)
        if name is not None:
            self._lock(model, {name})
        return self._compile()

    def _mount_tools(self, model: mujoco.MjModel) -> None:
        """Mount each arm's tool on its flange."""
        for name, cfg in self.part.arms.items():
            if cfg.tool is None:
                continue
            key = self._key(name)
            if cfg.flange is None and self.ours:
                raise ConfigError(f"{key}.tool: the robot {cfg.uid!r} cannot hold a tool, set it to null")
            known = TOOLS.get(cfg.tool)
            if known is None and not cfg.tool.endswith(".xml"):
                find_named("tool", cfg.tool, TOOLS)
            tool = read_tool(ASSETS / known.asset if known else find_file(cfg.tool))
            _name_parts(tool)
            prefix = f"{name}/tool/" if len(self.part.arms) > 1 else "tool/"
            if known is not None:
                self.our_fingers[name] = tuple(prefix + finger for finger in known.fingers)
            if self.ours:
                self.spec.attach(tool, site=cfg.flange, prefix=prefix)
                continue
            own = {joint.name for joint in self.spec.joints}
            limits = {joint: ends for joint, ends in cfg.limits.items() if joint in own}
            place = cfg.flange or cfg.tool_site
            bare = cfg.replace(tool=None, gripper=[], init_qpos=[], init_tool=None, tool_site=place, limits=limits)
            parts = read_arm(model, bare, key, place="flange" if cfg.flange else "tool_site")
            take_settings(tool, self.spec)
            quat = _turn(known.axis if known else "z", parts.axis)
            if parts.site_body is not None:
                frame = self.spec.body(parts.site_body).add_frame(quat=quat)
            else:
                site = model.site(parts.site)
                mujoco.mju_mulQuat(quat, site.quat, quat.copy())
                frame = self.spec.body(model.body(int(site.bodyid[0])).name).add_frame(pos=site.pos, quat=quat)
            self.spec.attach(tool, frame=frame, prefix=prefix)

    def _strip(self, model: mujoco.MjModel, arms: list[ArmParts]) -> None:
        """Delete what is not part of the robot (ground, lights, props), and lock joints that nothing moves."""
        used = {name for parts in arms for name in (*parts.joints, *parts.hand)}
        roots = {int(model.body_rootid[int(model.joint(name).bodyid[0])]) for name in used}
        for geom in list(self.spec.worldbody.geoms):
            if geom.type in (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_HFIELD):
                self.spec.delete(geom)
        for light in list(self.spec.worldbody.lights):
            self.spec.delete(light)
        keep = {model.body(root).name for root in roots}
        props = [body for body in self.spec.worldbody.bodies if body.name not in keep]
        gone: set[str] = set()
        left_out: set[str] = set()
        for body in props:
            inside = [model.body(b) for b in below(model, model.body(body.name).id)]
            self.dropped.append(body.name)
            left_out |= {b.name for b in inside}
            gone |= {model.joint(j).name for b in inside for j in range(b.jntadr[0], b.jntadr[0] + b.jntnum[0])}
        unused = [model.joint(j).name for j in range(model.njnt) if model.joint(j).name not in used | gone]
        on_way = {model.joint(j).name for parts in arms for j in path_joints(model, model.body(parts.body).id)}
        locked = {n for n in unused if n in on_way or servo_of(model, model.joint(n).id) is None}
        self.locked = [name for name in unused if name in locked]
        self._lock(model, locked | gone)
        for body in props:
            self.spec.delete(self.spec.body(body.name))
        for view in [one for one in (*self.spec.cameras, *self.spec.lights) if one.targetbody in left_out]:
            self.spec.delete(view)

    def _lock(self, model: mujoco.MjModel, joints: set[str]) -> None:
        """Delete joints from the spec, with their motors, tendons, equalities and sensors."""
        ids = {model.joint(name).id for name in joints}
        tendons = {model.tendon(t).name for t in range(model.ntendon) if ids.intersection(tendon_joints(model, t))}
        gone = joints | tendons
        drives = {a.name for a in self.spec.actuators if a.target in gone}
        for sensor in [s for s in self.spec.sensors if s.objname in gone | drives or s.refname in gone]:
            self.spec.delete(sensor)
        for actuator in [a for a in self.spec.actuators if a.name in drives]:
            self.spec.delete(actuator)
        for equality in [e for e in self.spec.equalities if e.name1 in gone or e.name2 in gone]:
            if equality.type in (mujoco.mjtEq.mjEQ_JOINT, mujoco.mjtEq.mjEQ_TENDON):
                self.spec.delete(equality)
        for tendon in [t for t in self.spec.tendons if t.name in tendons]:
            self.spec.delete(tendon)
        for joint in [j for j in self.spec.joints if j.name in joints]:
            self.spec.delete(joint)

    def _drive(self, model: mujoco.MjModel, parts: ArmParts, cfg: ArmCfg) -> None:
        """Write the limits into the spec, and add position servos as configured."""
        for name, low, high in zip(parts.joints, parts.lower, parts.upper, strict=True):
            if not model.jnt_limited[model.joint(name).id] or name in cfg.limits:
                self._limit(model, name, low, high)
        for name in parts.hand:
            if name in cfg.limits:
                self._limit(model, name, *cfg.limits[name])
        inertia = _inertia(model, parts)
        bounds = dict(zip(parts.joints, zip(parts.lower, parts.upper, strict=True), strict=True))
        adds_servos = False
        for name in parts.joints:
            joint = model.joint(name).id
            bare = not actuators_of(model, joint)
            if bare if cfg.servos is None else cfg.servos and servo_of(model, joint) is None:
                adds_servos = True
                self._add_servo(model, name, inertia[joint], bounds[name], cfg)
        for name in _undriven_fingers(model, parts):
            joint = model.joint(name).id
            if name not in cfg.limits and not model.jnt_limited[joint]:
                raise ConfigError(f"{self.key}.limits: the finger {name!r} has no limits; give it some here")
            ends = cfg.limits.get(name, tuple(model.jnt_range[joint].tolist()))
            self._add_servo(model, name, inertia[joint], ends, cfg, is_finger=True)
        has_servos = adds_servos or all(servo_of(model, model.joint(name).id) is not None for name in parts.joints)
        weightless = has_servos if cfg.gravity_compensation is None else cfg.gravity_compensation
        if weightless or cfg.gravity_compensation is False:
            for body in below(model, int(model.joint(parts.joints[0]).bodyid[0])):
                self.spec.body(model.body(body).name).gravcomp = 1.0 if weightless else 0.0

    def _limit(self, model: mujoco.MjModel, name: str, low: float, high: float) -> None:
        """Write the limits of a joint into the spec."""
        joint = self.spec.joint(name)
        in_degrees = joint.compiler.degree and int(model.jnt_type[model.joint(name).id]) == HINGE
        joint.range = np.degrees([low, high]) if in_degrees else [low, high]
        joint.limited = mujoco.mjtLimited.mjLIMITED_TRUE

    def _add_servo(
        self,
        model: mujoco.MjModel,
        name: str,
        inertia: float,
        bounds: tuple[float, float],
        cfg: ArmCfg,
        is_finger: bool = False,
    ) -> None:
        """Replace the actuators of a joint by a position servo, with gains computed from the inertia that it moves."""
        joint = model.joint(name)
        strongest = _strongest(model, joint.id, motor_of(model, joint.id))
        stiffness = inertia * cfg.servo_frequency**2
        if is_finger:  # full force at an error of a quarter of its range
            strongest = strongest or (30.0 if int(model.jnt_type[joint.id]) == SLIDE else 3.0)
            stiffness = min(4.0 * strongest / max(bounds[1] - bounds[0], 1e-3), inertia * _FASTEST_FINGER**2)
        stiffness = max(stiffness, 100.0 * float(model.dof_frictionloss[joint.dofadr[0]]))
        own = float(np.ravel(model.dof_damping[joint.dofadr[0]])[0])
        critical = 2.0 * float(np.sqrt(stiffness * inertia))
        damping = max(0.0, critical - own)
        if own > _STUCK * critical:  # damping that was meant to lock the joint
            value = np.zeros(np.shape(self.spec.joint(name).damping))  # a scalar, or a polynomial since MuJoCo 4
            value.flat[0] = critical
            self.spec.joint(name).damping = value
        found = [self.spec.actuator(model.actuator(i).name) for i in actuators_of(model, joint.id)]
        for actuator in [one for one in found if one is not None]:  # a tendon's is gone with the first of its joints
            for sensor in [s for s in self.spec.sensors if s.objname == actuator.name]:
                self.spec.delete(sensor)
            self.spec.delete(actuator)
        called = free_name(f"{name}_servo", [actuator.name for actuator in self.spec.actuators])
        servo = self.spec.add_actuator(name=called, target=name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        servo.gaintype, servo.biastype = mujoco.mjtGain.mjGAIN_FIXED, mujoco.mjtBias.mjBIAS_AFFINE
        servo.gainprm[0], servo.biasprm[1], servo.biasprm[2] = stiffness, -stiffness, -damping
        servo.ctrllimited, servo.ctrlrange = int(mujoco.mjtLimited.mjLIMITED_TRUE), list(bounds)
        if strongest:
            servo.forcelimited, servo.forcerange = int(mujoco.mjtLimited.mjLIMITED_TRUE), [-strongest, strongest]

    def _collide(self, model: mujoco.MjModel, arms: list[ArmParts]) -> None:
        """Set the collision bits of our scenes: 1 tool, 2 object, 4 table."""
        if self.cfg.collisions == "own":
            return
        hand: set[str] = set()
        for parts in arms:
            last = model.body(parts.body).id
            hand |= {model.body(b).name for b in below(model, last)}
        for geom in self.spec.geoms:
            if geom.contype or geom.conaffinity:
                in_hand = geom.parent.name in hand
                geom.contype, geom.conaffinity = (1, 6) if in_hand else (0, 4)

    def _hide(self, model: mujoco.MjModel) -> None:
        """Hide sites, and collision geoms of bodies that have visual ones."""
        visual = {int(model.geom_bodyid[g]) for g in range(model.ngeom) if _is_visual(model, g)}
        shown = {model.body(body).name for body in visual}
        for geom in self.spec.geoms:
            if (geom.contype or geom.conaffinity) and geom.parent.name in shown:
                geom.group = 3
        for site in self.spec.sites:
            site.group = 4

    def _add_sites(self, arms: list[ArmParts]) -> None:
        for parts in arms:
            if parts.site_body is not None:
                self.spec.body(parts.site_body).add_site(
                    name=parts.site, pos=parts.site_pos, size=[0.006, 0, 0], group=4
                )

    def _drives(self, model: mujoco.MjModel, spec: ArmSpec) -> list[str]:
        grip = spec.grip.actuators if spec.grip else []
        direct = [actuators_of(model, model.joint(name).id) for name in spec.parts.joints]
        return [model.actuator(i).name for found in direct for i in found] + list(grip)

    def _finish(self, model: mujoco.MjModel, name: str, parts: ArmParts) -> ArmSpec:
        """Analyse the gripper, and find the orientation in which the tool points down."""
        key, cfg = self._key(name), self.part.arms[name]
        ours = self.our_fingers.get(name, ())
        plain = bool(ours) and set(parts.fingers) <= set(ours)
        grip = None
        if parts.fingers:
            grip = known_grip(model, parts) if plain else try_grip(model, parts, cfg, key)
        down = (
            _our_down(cfg)
            if self.ours or self.cfg.walks
            else tuple(map(tuple, _point_down(model, parts, cfg, grip).tolist()))
        )
        return ArmSpec(name, parts, grip, down, plain)


def _name_parts(spec: mujoco.MjSpec) -> None:
    """Name all unnamed joints, bodies, actuators and sites."""
    taken = {joint.name for joint in spec.joints}
    for i, joint in enumerate(spec.joints):
        if not joint.name:
            name = f"{joint.parent.name or 'body'}_joint"
            joint.name = name if name not in taken else f"{name}_{i}"
            taken.add(joint.name)
    for i, body in enumerate(spec.bodies):
        if not body.name:
            body.name = f"body_{i}"
    taken = {actuator.name for actuator in spec.actuators}
    for i, actuator in enumerate(spec.actuators):
        if not actuator.name:
            name = f"{actuator.target}_drive"
            actuator.name = name if name not in taken else f"{name}_{i}"
            taken.add(actuator.name)
    taken = {site.name for site in spec.sites}
    for site in spec.sites:
        if not site.name:
            site.name = free_name("unnamed_site", taken)
            taken.add(site.name)


def _positions(model: mujoco.MjModel, home: dict[str, float]) -> np.ndarray | None:
    """Return the positions of all joints in a keyframe; ``None`` if there is none."""
    qpos = model.qpos0.copy()
    for joint, at in home.items():
        qpos[model.joint(joint).qposadr[0]] = at
    return qpos if home else None


def _undriven_fingers(model: mujoco.MjModel, parts: ArmParts) -> list[str]:
    """Return the fingers that are driven neither by an actuator or tendon nor through another finger."""
    leader = coupled_joints(model)
    ids = {model.joint(name).id: name for name in parts.fingers}
    driven = {j for j in ids if actuators_of(model, j)}
    out = []
    for joint, name in ids.items():
        leads = [one for one, two in leader.items() if two == joint]
        if joint not in driven and leader.get(joint) not in ids and not driven.intersection(leads):
            out.append(name)
    return out


def _is_visual(model: mujoco.MjModel, geom: int) -> bool:
    is_mesh = int(model.geom_type[geom]) == int(mujoco.mjtGeom.mjGEOM_MESH)
    return is_mesh and not model.geom_contype[geom] and not model.geom_conaffinity[geom]


def _our_down(cfg: ArmCfg) -> tuple[tuple[float, ...], ...]:
    """Return the orientation of our tools pointing down, rotated with the base of their arm."""
    if cfg.yaw is None and cfg.quat is None:
        return _DOWN
    base = np.empty(9)
    mujoco.mju_quat2Mat(base, base_pose(cfg)[1])
    return tuple(map(tuple, (base.reshape(3, 3) @ np.array(_DOWN)).tolist()))


def _hold(model: mujoco.MjModel, actuator: int) -> float:
    """Return the control that holds a servo's joint at its default position; 0 for a motor."""
    joint = int(model.actuator_trnid[actuator, 0])
    on_joint = int(model.actuator_trntype[actuator]) == int(mujoco.mjtTrn.mjTRN_JOINT)
    if drive_kind(model, actuator) != "servo" or not on_joint:
        return 0.0
    scale, offset = servo_scale(model, actuator)
    return float(scale * model.qpos0[model.jnt_qposadr[joint]] + offset)


def _turn(axis: str, onto: np.ndarray) -> np.ndarray:
    """Return the quaternion of the shortest rotation from an axis of a tool to one of the flange."""
    start, quat = np.eye(3)["xyz".index(axis)], np.array([1.0, 0.0, 0.0, 0.0])
    if start @ onto < -0.5:
        mujoco.mju_axisAngle2Quat(quat, np.roll(start, 1), np.pi)
    elif start @ onto < 0.5:
        mujoco.mju_axisAngle2Quat(quat, np.cross(start, onto), np.pi / 2)
    return quat


def _inertia(model: mujoco.MjModel, parts: ArmParts) -> np.ndarray:
    """Return the inertia that each joint moves in the initial posture, including armature, ``[njnt]``."""
    data = mujoco.MjData(model)
    for name, at in zip(parts.joints, parts.init, strict=True):
        data.qpos[model.joint(name).qposadr[0]] = at
    mujoco.mj_forward(model, data)
    column, out = np.zeros(model.nv), np.zeros(model.njnt)
    for joint in range(model.njnt):
        dof = int(model.jnt_dofadr[joint])
        mujoco.mj_mulM(model, data, column, np.eye(model.nv)[dof])
        out[joint] = column[dof]
    return out


def _strongest(model: mujoco.MjModel, joint: int, motor: int | None) -> float | None:
    """Return the maximum force or torque that the model allows for a joint, or ``None``."""
    limits = []
    if model.jnt_actfrclimited[joint]:
        limits.append(float(np.abs(model.jnt_actfrcrange[joint]).max()))
    if motor is not None:
        lever = abs(float(model.actuator_gear[motor, 0]))
        if model.actuator_forcelimited[motor]:
            limits.append(lever * float(np.abs(model.actuator_forcerange[motor]).max()))
        if model.actuator_ctrllimited[motor]:
            gain = abs(float(model.actuator_gainprm[motor, 0]))
            limits.append(lever * gain * float(np.abs(model.actuator_ctrlrange[motor]).max()))
    return min(limits) if limits else None


def _point_down(model: mujoco.MjModel, parts: ArmParts, cfg: ArmCfg, grip: Grip | None) -> np.ndarray:
    """Return the orientation closest to the initial one with the tool down and the fingers closing along x or y."""
    data, base = mujoco.MjData(model), np.empty(9)
    for name, at in zip(parts.joints, parts.init, strict=True):
        data.qpos[model.joint(name).qposadr[0]] = at
    if grip is not None:
        for name, at in [*zip(parts.fingers, grip.fingers_open, strict=True), *grip.others.items()]:
            data.qpos[model.joint(name).qposadr[0]] = at
    mujoco.mj_kinematics(model, data)
    mujoco.mju_quat2Mat(base, base_pose(cfg)[1])
    start = base.reshape(3, 3) @ site_frame(model, data, parts)[1]
    across = closing_axis(model, data, parts) if grip is not None else None
    if across is None:
        sideways = np.roll(np.abs(parts.axis), 1)
        level = start @ sideways * np.array([1.0, 1.0, 0.0])
        ways = [level / np.linalg.norm(level)] if np.linalg.norm(level) > 0.1 else [np.array([1.0, 0.0, 0.0])]
    else:
        sideways, ways = across, [np.array(way, dtype=float) for way in ((1, 0, 0), (0, 1, 0), (-1, 0, 0), (0, -1, 0))]
    own = np.stack((sideways, parts.axis, np.cross(sideways, parts.axis)), axis=1)
    down = np.array([0.0, 0.0, -1.0])
    turns = [np.stack((way, down, np.cross(way, down)), axis=1) @ own.T for way in ways]
    return max(turns, key=lambda turn: float(np.trace(turn.T @ start)))
