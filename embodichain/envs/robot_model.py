"""Analyses a robot's MJCF: the kinematic chain to its tool, its limits and its gripper.

``read_arm`` takes a compiled model of the robot alone and returns ``ArmParts``. What it cannot infer raises a
``ConfigError`` that lists the options. ``robot_adaptation.py`` changes the model accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import mujoco
import numpy as np

from embodichain.envs.env_cfg import ArmCfg
from embodichain.envs.robots import ArmParts, actuators_of, servo_of, servo_scale
from embodichain.errors import ConfigError, nearest

_JOINT, _SITE, _BODY, _EQUALITY = (
    int(getattr(mujoco.mjtObj, f"mjOBJ_{kind}")) for kind in ("JOINT", "SITE", "BODY", "EQUALITY")
)
HINGE, SLIDE = int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)
FREE, _BALL = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
_TOOL_WORDS = ("tcp", "tool", "pinch", "grasp", "grip", "eef", "end_effector", "ee", "attachment", "flange", "wrist")
_SHORTEST_ARM = 3  # minimum number of joints of a branch to count as an arm, not as a finger
ADDED_SITE = "tool_frame"
_BEHIND_TIPS = 0.01  # metres from the tips of the fingers to the point between them
ROUNDED = 1e-3  # tolerance of postures beyond a limit, as files round both


def names(model: mujoco.MjModel, kind: str) -> list[str]:
    """Return the names of all sites, bodies, joints or actuators of a model."""
    count = {"site": model.nsite, "body": model.nbody, "joint": model.njnt, "actuator": model.nu}[kind]
    return [getattr(model, kind)(i).name for i in range(count)]


def _listed(options: Sequence[str], most: int = 40) -> str:
    rest = f", and {len(options) - most} more" if len(options) > most else ""
    return ", ".join(options[:most]) + rest if options else "(none)"


def path_joints(model: mujoco.MjModel, body: int) -> list[int]:
    """Return the joints between the world and a body, starting at the world."""
    path: list[int] = []
    while body:
        first, count = int(model.body_jntadr[body]), int(model.body_jntnum[body])
        path[:0] = range(first, first + count)
        body = int(model.body_parentid[body])
    return path


def below(model: mujoco.MjModel, body: int) -> Iterator[int]:
    """Yield a body and all its descendants."""
    inside = {body}
    yield body
    for child in range(body + 1, model.nbody):
        if int(model.body_parentid[child]) in inside:
            inside.add(child)
            yield child


def moves(model: mujoco.MjModel, joint: int) -> bool:
    """Return whether a joint has one degree of freedom."""
    return int(model.jnt_type[joint]) in (HINGE, SLIDE)


def free_base(model: mujoco.MjModel) -> str | None:
    """Return the name of a free joint that carries other joints, or ``None`` if the base is fixed."""
    for joint in range(model.njnt):
        body = int(model.jnt_bodyid[joint])
        carried = sum(int(model.body_jntnum[b]) for b in below(model, body))
        if int(model.jnt_type[joint]) == FREE and carried > 1:
            return model.joint(joint).name
    return None


def find_chains(model: mujoco.MjModel) -> list[int]:
    """Return the last link of every arm of a model: one for an arm, two for a robot with two arms.

    Chains are followed from the world. Where one branches, branches of one or two joints are a hand or a head; the
    longest is followed, and branches of similar length are separate arms.
    """
    depth = np.zeros(model.nbody, dtype=int)  # joints on the longest path from a body to a leaf, including its own
    for body in range(model.nbody - 1, 0, -1):
        own = sum(
            moves(model, j) for j in range(model.body_jntadr[body], model.body_jntadr[body] + model.body_jntnum[body])
        )
        depth[body] += own
        parent = int(model.body_parentid[body])
        depth[parent] = max(depth[parent], depth[body])

    def follow(body: int, so_far: int, last: int) -> list[int]:
        if body and model.body_jntnum[body]:
            so_far, last = so_far + int(model.body_jntnum[body]), body
        children = [b for b in range(body + 1, model.nbody) if int(model.body_parentid[b]) == body and depth[b]]
        if not children:
            return [last] if last else []
        longest = max(int(depth[b]) for b in children)
        branches = [b for b in children if 2 * int(depth[b]) > longest]
        if len(branches) > 1 and so_far >= _SHORTEST_ARM and longest <= 5:  # fingers of a hand
            return [last]
        if len(branches) > 1 and longest < _SHORTEST_ARM and last:
            return [last]
        return [end for branch in branches for end in follow(branch, so_far, last)]

    return follow(0, 0, 0)


def read_arm(
    model: mujoco.MjModel, cfg: ArmCfg, key: str = "robot", home: np.ndarray | None = None, place: str = "tool_site"
) -> ArmParts:
    """Find the arm of a config in a model of the robot alone.

    ``key`` is the path of the config, and ``place`` the setting that its ``tool_site`` comes from; ``home`` are the
    joint positions of a keyframe.
    """
    ends = _last_link(model, cfg, key, place)
    chain = path_joints(model, ends)
    balls = [model.joint(j).name for j in chain if int(model.jnt_type[j]) == _BALL]
    if balls:
        raise ConfigError(
            f"{key}: ball joints are not supported: joint {_listed([repr(name) for name in balls])}; replace it in the "
            "model by three hinges, whose axes meet in one point"
        )
    base = next((j for j in chain if not moves(model, j)), None)
    if base is not None:
        raise ConfigError(_floating(key, model.joint(base).name))
    joints = chain if not cfg.joints else [j for j in chain if model.joint(j).name in cfg.joints]
    lower, upper = _limits(model, cfg, key, joints)
    parts = ArmParts([model.joint(j).name for j in joints], lower, upper, model.body(ends).name)
    inside = list(below(model, ends))
    hand = [j for b in inside for j in range(model.body_jntadr[b], model.body_jntadr[b] + model.body_jntnum[b])]
    parts.hand = [model.joint(j).name for j in hand if j not in chain]
    _find_tool(model, cfg, key, parts, ends, place)
    parts.fingers = _find_fingers(model, cfg, key, parts)
    data = mujoco.MjData(model)
    if home is not None:
        data.qpos[:] = home
    _find_axis(model, data, cfg, parts)
    if parts.site_body is not None and cfg.tool_site is None:
        parts.site_pos = _between_fingers(model, data, parts)
    return parts


def has_legs(model: mujoco.MjModel) -> bool:
    """Return whether more than one chain of joints starts at the base of a robot."""
    return len(find_chains(model)) > 1


def _floating(key: str, joint: str) -> str:
    return (
        f"{key}: the base of this robot is free (joint {joint!r}). Set {key}.walks to true for a robot with legs, in a "
        f"task that walks, such as QuadrupedVelocityRL; or {key}.fix_base to true to bolt it down, for a task of an arm"
    )


def _last_link(model: mujoco.MjModel, cfg: ArmCfg, key: str, place: str) -> int:
    """Return the body that the last joint of the arm moves."""
    known = names(model, "joint")
    unknown = [name for name in cfg.joints if name not in known]
    if unknown:
        raise ConfigError([f"{key}.joints: the model has no joint {n!r}.{nearest(n, known)}" for n in unknown])
    if cfg.joints:
        ids = [known.index(name) for name in cfg.joints]
        body = int(model.jnt_bodyid[ids[-1]])
        chain = path_joints(model, body)
        in_order = [known[j] for j in sorted(ids)]
        if all(j in path_joints(model, int(model.jnt_bodyid[max(ids)])) for j in ids) and sorted(ids) != ids:
            raise ConfigError(
                f"{key}.joints: expected the joints in their order from the base to the tool, {in_order}; got "
                f"{list(cfg.joints)}"
            )
        if any(j not in chain for j in ids):
            on_way = [model.joint(j).name for j in chain]
            raise ConfigError(
                f"{key}.joints: expected joints of one chain, from the base to the tool; between the base and "
                f"{cfg.joints[-1]!r} are {_listed(on_way)}; got {list(cfg.joints)}"
            )
        return body
    if cfg.tool_site is not None:
        body = _place(model, cfg.tool_site, f"{key}.{place}")[0]
        while body and not model.body_jntnum[body]:
            body = int(model.body_parentid[body])
        if not body:
            raise ConfigError(f"{key}.{place}: no joint moves {cfg.tool_site!r}; name a site or body of the hand")
        return body
    floating = free_base(model)
    if floating is not None:
        raise ConfigError(_floating(key, floating))
    ends = find_chains(model)
    if not ends:
        raise ConfigError(f"{key}: the model has no joints that could be an arm's; its joints: {_listed(known)}")
    if len(ends) > 1:
        chains = ["; ".join(f"{model.joint(j).name}" for j in path_joints(model, end)[-7:]) for end in ends]
        listed = " | ".join(chains)
        raise ConfigError(
            f"{key}: the model has {len(ends)} chains of joints ({listed}). Name one by {key}.joints or "
            f"{key}.tool_site, or each under {key}.arms, such as "
            + '{"left": {"tool_site": ...}, "right": {"tool_site": ...}}'
        )
    return _before_fingers(model, ends[0])


def _before_fingers(model: mujoco.MjModel, end: int) -> int:
    """Return the link that carries a site named like a tool, if the one or two joints after it belong to a finger."""
    chain = path_joints(model, end)
    for site in range(model.nsite):
        body = int(model.site_bodyid[site])
        before = path_joints(model, body)
        beyond = len(chain) - len(before)
        named = _rank(model.site(site).name)[0] < len(_TOOL_WORDS)
        if named and 0 < beyond <= 2 and len(before) >= _SHORTEST_ARM and chain[: len(before)] == before:
            return int(model.jnt_bodyid[before[-1]])
    return end


def _place(model: mujoco.MjModel, name: str, key: str) -> tuple[int, int | None]:
    """Return the body of a name, and the site if it names one; the prefix ``tool/`` may be omitted."""
    for full in (name, f"tool/{name}"):
        site = mujoco.mj_name2id(model, _SITE, full)
        if site >= 0:
            return int(model.site_bodyid[site]), site
        body = mujoco.mj_name2id(model, _BODY, full)
        if body > 0:
            return body, None
    sites, bodies = names(model, "site"), names(model, "body")[1:]
    close = nearest(name, [*sites, *bodies]).split(" Valid:")[0]
    raise ConfigError(
        f"{key}: no site or body is called {name!r}.{close} Sites: {_listed(sites)}. Bodies: {_listed(bodies)}"
    )


def _limits(model: mujoco.MjModel, cfg: ArmCfg, key: str, joints: list[int]) -> tuple[list[float], list[float]]:
    """Return the limits of joints: from the config, the model, or the servo that drives them."""
    known = names(model, "joint")
    unknown = [name for name in cfg.limits if name not in known]
    if unknown:
        raise ConfigError([f"{key}.limits.{n}: the model has no such joint.{nearest(n, known)}" for n in unknown])
    bounds, without = [], []
    for joint in joints:
        name = model.joint(joint).name
        drive = servo_of(model, joint)
        if name in cfg.limits:
            bounds.append(cfg.limits[name])
        elif model.jnt_limited[joint]:
            bounds.append(tuple(model.jnt_range[joint].tolist()))
        elif drive is not None and model.actuator_ctrllimited[drive]:
            bounds.append(_reach_of_servo(model, drive))
        else:
            without.append(name)
    if without:
        example = ", ".join(f'"{name}": [-6.28, 6.28]' for name in without)
        raise ConfigError(
            f"{key}: these joints have no limits: {_listed(without)}. Give them some, {key}.limits: {{{example}}}, or "
            f"leave them out of {key}.joints, which holds them where they are"
        )
    return [float(low) for low, _ in bounds], [float(high) for _, high in bounds]


def _reach_of_servo(model: mujoco.MjModel, drive: int) -> tuple[float, float]:
    """Return the joint positions at the ends of a servo's control range."""
    scale, offset = servo_scale(model, drive)
    low, high = sorted((float(end) - offset) / scale for end in model.actuator_ctrlrange[drive])
    return low, high


def has_limits(model: mujoco.MjModel, joint: int) -> bool:
    """Return whether a joint is limited, by itself or by its servo's control range."""
    drive = servo_of(model, joint)
    return bool(model.jnt_limited[joint] or (drive is not None and model.actuator_ctrllimited[drive]))


def _find_tool(model: mujoco.MjModel, cfg: ArmCfg, key: str, parts: ArmParts, last: int, place: str) -> None:
    """Find the site of the tool, or the body to which it is added."""
    rigid = [b for b in below(model, last) if b == last or path_joints(model, b) == path_joints(model, last)]
    if cfg.tool_site is not None:
        body, site = _place(model, cfg.tool_site, f"{key}.{place}")
        if body not in rigid:
            on_hand = [model.site(s).name for s in range(model.nsite) if int(model.site_bodyid[s]) in rigid]
            options = on_hand or [model.body(b).name for b in rigid]
            raise ConfigError(
                f"{key}.{place}: {cfg.tool_site!r} is not fixed to the last link {parts.body!r}; "
                f"choose one of {_listed(options)}, or other {key}.joints"
            )
        parts.site, parts.site_body = _site_name(model, body, site)
        return
    sites = [s for s in range(model.nsite) if int(model.site_bodyid[s]) in rigid]
    if cfg.tool is not None:
        sites = [s for s in sites if model.site(s).name.startswith("tool/")] or sites
    if sites:
        parts.site = model.site(min(sites, key=lambda s: _rank(model.site(s).name))).name
        return
    leaves = [b for b in rigid if not any(int(model.body_parentid[c]) == b for c in rigid)]
    leaves.sort(key=lambda b: _rank(model.body(b).name))
    if len(leaves) > 1 and _rank(model.body(leaves[0]).name)[0] == len(_TOOL_WORDS):
        raise ConfigError(
            f"{key}.tool_site: the model has no site at the end of the arm. Name the site or body that is the tool: "
            f"bodies there are {_listed([model.body(b).name for b in rigid])}; sites of the model: "
            f"{_listed(names(model, 'site'))}"
        )
    parts.site, parts.site_body = _site_name(model, leaves[0], None)


def _site_name(model: mujoco.MjModel, body: int, site: int | None) -> tuple[str, str | None]:
    if site is not None:
        return model.site(site).name, None
    name = model.body(body).name
    return free_name(f"{name}_{ADDED_SITE}", names(model, "site")), name


def free_name(wanted: str, taken: Collection[str]) -> str:
    """Return the wanted name, with a number appended if it is taken."""
    numbered = (f"{wanted}_{i}" for i in range(2, len(taken) + 3))
    return next(name for name in (wanted, *numbered) if name not in taken)


def check_start(key: str, joints: Sequence[str], at: Sequence[float], bounds: Sequence[tuple[float, float]]) -> None:
    """Raise ``ConfigError`` for joints that start outside their limits."""
    outside = [
        f"{name} at {value:.4g}, outside its limits [{low:.4g}, {high:.4g}]"
        for name, value, (low, high) in zip(joints, at, bounds, strict=True)
        if not low - ROUNDED <= value <= high + ROUNDED
    ]
    if outside:
        raise ConfigError(f"{key} has {_listed(outside)}; give positions within them, in radians or metres")


def _rank(site: str) -> tuple[int, int]:
    """Return a sort key: sites with a tool-like name first, then shorter names."""
    name = site.rpartition("/")[2].lower()
    words = [i for i, word in enumerate(_TOOL_WORDS) if word in name]
    return (min(words) if words else len(_TOOL_WORDS), len(name))


def _find_fingers(model: mujoco.MjModel, cfg: ArmCfg, key: str, parts: ArmParts) -> list[str]:
    """Return the finger joints: those that are driven, and those coupled to them by an equality."""
    known = parts.hand
    if cfg.gripper is not None:
        full = [name if name in known else f"tool/{name}" for name in cfg.gripper]
        unknown = [given for given, name in zip(cfg.gripper, full, strict=True) if name not in known]
        if unknown:
            raise ConfigError(
                [f"{key}.gripper: no joint of the hand is called {n!r}.{nearest(n, known)}" for n in unknown]
            )
        return full
    ids = [model.joint(name).id for name in known if moves(model, model.joint(name).id)]
    driven = {j for j in ids if actuators_of(model, j)}
    followers = {one: two for one, two in coupled_joints(model).items() if one in ids and two in ids}
    if driven:
        fingers = driven | {one for one, two in followers.items() if two in driven}
        fingers |= {two for one, two in followers.items() if one in driven}
    else:  # not driven: coupled pairs, or up to two joints
        fingers = set(followers) | set(followers.values()) or (set(ids) if len(ids) <= 2 else set())
    return [model.joint(j).name for j in sorted(fingers)]


def coupled_joints(model: mujoco.MjModel) -> dict[int, int]:
    """Return joints coupled by equality constraints, as follower to leader."""
    out = {}
    for i in range(model.neq):
        if int(model.eq_type[i]) == int(mujoco.mjtEq.mjEQ_JOINT) and int(model.eq_obj2id[i]) >= 0:
            out[int(model.eq_obj1id[i])] = int(model.eq_obj2id[i])
    return out


def site_frame(model: mujoco.MjModel, data: mujoco.MjData, parts: ArmParts) -> tuple[np.ndarray, np.ndarray, int]:
    """Return position and rotation of the tool in the world of ``data``, and its body."""
    if parts.site_body is not None or parts.site is None:
        body = model.body(parts.site_body or parts.body).id
        rotation = data.xmat[body].reshape(3, 3).copy()
        return data.xpos[body] + rotation @ np.array(parts.site_pos), rotation, body
    site = model.site(parts.site).id
    return data.site_xpos[site].copy(), data.site_xmat[site].reshape(3, 3).copy(), int(model.site_bodyid[site])


def _find_axis(model: mujoco.MjModel, data: mujoco.MjData, cfg: ArmCfg, parts: ArmParts) -> None:
    """Find the axis of the tool's frame that points away from the last joint."""
    mujoco.mj_kinematics(model, data)
    position, rotation, _ = site_frame(model, data, parts)
    last = model.joint(parts.joints[-1]).id
    away = rotation.T @ (position - data.xanchor[last])
    if np.linalg.norm(away) < 0.01:  # the tool is at the joint: use the joint axis, away from the previous joint
        before = data.xanchor[model.joint(parts.joints[max(0, len(parts.joints) - 2)]).id]
        along = data.xaxis[last]
        away = rotation.T @ (along * (1.0 if along @ (position - before) >= 0 else -1.0))
    if cfg.tool_axis is not None:
        away = np.eye(3)["xyz".index(cfg.tool_axis[-1])] * (-1.0 if cfg.tool_axis[0] == "-" else 1.0)
    largest = int(np.argmax(np.abs(away)))
    parts.axis = np.eye(3)[largest] * (1.0 if away[largest] >= 0 else -1.0)


def _between_fingers(model: mujoco.MjModel, data: mujoco.MjData, parts: ArmParts) -> tuple[float, float, float]:
    """Return the point between the tips of the fingers, in the frame of the hand.

    Without two fingers, and in a frame that carries no finger, which is one of the tool itself, it is the origin.
    """
    position, rotation, hand = site_frame(model, data, parts)
    if not all(int(model.joint(name).bodyid[0]) in below(model, hand) for name in parts.fingers):
        return parts.site_pos
    axis = rotation @ parts.axis
    tips, middles = [], []
    for joint in parts.fingers:
        geoms = [
            geom
            for body in below(model, int(model.joint(joint).bodyid[0]))
            for geom in range(model.body_geomadr[body], model.body_geomadr[body] + model.body_geomnum[body])
            if model.geom_contype[geom] or model.geom_conaffinity[geom]
        ]
        if not geoms:
            return parts.site_pos
        ahead = [
            (data.geom_xpos[geom] - position) @ axis + reach(model, geom, -data.geom_xmat[geom].reshape(3, 3).T @ axis)
            for geom in geoms
        ]
        tips.append(max(ahead))
        middles.append(data.geom_xpos[geoms[int(np.argmax(ahead))]] - position)
    if len(tips) < 2 or min(tips) <= _BEHIND_TIPS:
        return parts.site_pos
    across = np.mean(middles, axis=0)
    across -= (across @ axis) * axis
    x, y, z = (rotation.T @ (across + (min(tips) - _BEHIND_TIPS) * axis)).tolist()
    return x, y, z


def reach(model: mujoco.MjModel, geom: int, up: np.ndarray) -> float:
    """Return the extent of a geom below its origin, against the direction ``up`` in its frame."""
    size, kind = model.geom_size[geom], model.geom_type[geom]
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        mesh = int(model.geom_dataid[geom])
        first = int(model.mesh_vertadr[mesh])
        return float(-(model.mesh_vert[first : first + int(model.mesh_vertnum[mesh])] @ up).min())
    if kind == mujoco.mjtGeom.mjGEOM_BOX:
        return float(np.abs(up) @ size)
    if kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
        return float(size[1] * abs(up[2]) + size[0] * math.sqrt(max(0.0, 1.0 - up[2] ** 2)))
    if kind == mujoco.mjtGeom.mjGEOM_ELLIPSOID:
        return float(np.linalg.norm(size * up))
    return float(size[0] + (size[1] * abs(up[2]) if kind == mujoco.mjtGeom.mjGEOM_CAPSULE else 0.0))
