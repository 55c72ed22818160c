"""Builds fixtures into a scene: cabinets with drawers or a door, buttons, a block with a hole and its peg, bins.

A fixture is a mocap body: it is static, and a reset may place it anew (``ResetState.poses``). Its moving parts are
bodies with one joint each, named ``<fixture>/<part>``, with a site of the same name at the grasp point;
:class:`PartPoint` computes the position of that site. The front of a fixture faces -x, towards the robot; its origin is
on the table, at the centre of its footprint.
"""

import math
from typing import Any, TypeAlias

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.scene_cfg import BinCfg as BinCfg
from embodichain.envs.scene_cfg import ButtonsCfg as ButtonsCfg
from embodichain.envs.scene_cfg import Color
from embodichain.envs.scene_cfg import DoorCfg as DoorCfg
from embodichain.envs.scene_cfg import DrawersCfg as DrawersCfg
from embodichain.envs.scene_cfg import Fixture as Fixture
from embodichain.envs.scene_cfg import FixtureCfg as FixtureCfg
from embodichain.envs.scene_cfg import HandleCfg as HandleCfg
from embodichain.envs.scene_cfg import HoleCfg as HoleCfg
from embodichain.envs.scene_cfg import PegCfg as PegCfg
from embodichain.envs.scene_cfg import fixture_cfg as fixture_cfg
from embodichain.errors import AssetError

Rgba: TypeAlias = tuple[float, float, float, float]

COLORS: dict[Color, Rgba] = {
    "red": (0.85, 0.16, 0.14, 1.0),
    "green": (0.16, 0.62, 0.26, 1.0),
    "blue": (0.14, 0.36, 0.82, 1.0),
    "yellow": (0.95, 0.77, 0.10, 1.0),
}
_WOOD, _FRONT, _METAL = (0.72, 0.56, 0.40, 1.0), (0.93, 0.91, 0.87, 1.0), (0.62, 0.64, 0.68, 1.0)
_DARK, _INSIDE = (0.22, 0.23, 0.26, 1.0), (0.80, 0.66, 0.50, 1.0)
# Collision bits as in table.xml: tools (1) and objects (2) collide with a fixture; its parts do not with each other.
_TOUCHED = 3
_UNTOUCHED = 0
_GAP = 0.004  # between fronts, in metres
_DEEP = 0.012  # distance of the tool tip behind a handle's axis when grasping, in metres
_HIDDEN = 3  # group of geoms that are not rendered

_GEOM = mujoco.mjtGeom
_BOX, _CAPSULE, _CYLINDER = int(_GEOM.mjGEOM_BOX), int(_GEOM.mjGEOM_CAPSULE), int(_GEOM.mjGEOM_CYLINDER)


def add_fixture(spec: mujoco.MjSpec, name: str, cfg: Fixture) -> None:
    """Add a fixture to a scene, as a body of this name."""
    if isinstance(cfg, PegCfg):
        _add_peg(spec, name, cfg)
        return
    half = 0.5 * cfg.yaw
    quat = [math.cos(half), 0.0, 0.0, math.sin(half)]
    root = spec.worldbody.add_body(name=name, mocap=True, pos=list(cfg.pos), quat=quat)
    part = _Part(spec, root, name)
    if isinstance(cfg, DrawersCfg):
        _add_drawers(part, cfg)
    elif isinstance(cfg, DoorCfg):
        _add_door(part, cfg)
    elif isinstance(cfg, ButtonsCfg):
        _add_buttons(part, cfg)
    elif isinstance(cfg, BinCfg):
        _add_bin(part, cfg)
    else:
        _add_hole(part, cfg)


class _Part:
    """A body of a fixture; adds geoms and moving parts, and shares materials within the fixture."""

    def __init__(self, spec: mujoco.MjSpec, body: mujoco.MjsBody, fixture: str) -> None:
        self._spec, self.body, self._fixture = spec, body, fixture

    def geom(
        self, kind: int, size: list[float], pos: list[float], rgba: Rgba, touched: int = _TOUCHED, **rest: Any
    ) -> None:
        """Add a geom; ``touched`` are the collision bits of what it collides with."""
        self.body.add_geom(
            type=kind, size=size, pos=pos, material=self._material(rgba), contype=0, conaffinity=touched, mass=0, **rest
        )

    def box(self, low: list[float], high: list[float], rgba: Rgba, touched: int = _TOUCHED, **rest: Any) -> None:
        """Add a box between two corners."""
        size = [0.5 * (b - a) for a, b in zip(low, high, strict=True)]
        self.geom(_BOX, size, [0.5 * (a + b) for a, b in zip(low, high, strict=True)], rgba, touched, **rest)

    def bar(self, cfg: HandleCfg, at: list[float], vertical: bool, rgba: Rgba) -> None:
        """Add a handle with the centre of its bar ``at`` this point, held by posts along +x."""
        along = [0.0, 0.0, 1.0] if vertical else [0.0, 1.0, 0.0]
        reach = 0.5 * cfg.length - cfg.radius
        ends = [[p + sign * reach * a for p, a in zip(at, along, strict=True)] for sign in (-1.0, 1.0)]
        self.geom(_CAPSULE, [cfg.radius, 0, 0], [0, 0, 0], rgba, fromto=ends[0] + ends[1], friction=[1.0, 0.02, 0.001])
        for end in ends:
            root = [end[0] + cfg.standoff, end[1], end[2]]
            self.geom(_CAPSULE, [0.75 * cfg.radius, 0, 0], [0, 0, 0], rgba, _UNTOUCHED, fromto=end + root)

    def moving(self, part: str, pos: list[float], mass: float, half: list[float], center: list[float]) -> "_Part":
        """Add a moving part with the mass and inertia of a box of half sizes ``half`` about ``center``."""
        x, y, z = (h * h for h in half)
        inertia = [mass / 3.0 * (y + z), mass / 3.0 * (x + z), mass / 3.0 * (x + y)]
        body = self.body.add_body(
            name=f"{self._fixture}/{part}",
            pos=pos,
            mass=mass,
            ipos=center,
            inertia=inertia,
            explicitinertial=True,
            gravcomp=1,  # supported by its slides or hinges
        )
        return _Part(self._spec, body, self._fixture)

    def joint(self, part: str, kind: int, axis: list[float], limit: float, **rest: Any) -> None:
        """Add the joint of the part, from 0 to ``limit``, in metres or radians."""
        if kind == int(mujoco.mjtJoint.mjJNT_HINGE) and self._spec.compiler.degree:  # the angle unit of the scene
            limit = math.degrees(limit)
        stiff = {"solref_limit": [0.01, 1.0], "limited": int(mujoco.mjtLimited.mjLIMITED_TRUE)}
        self.body.add_joint(
            name=f"{self._fixture}/{part}", type=kind, axis=axis, range=[0.0, limit], **{**stiff, **rest}
        )

    def site(self, part: str, pos: list[float]) -> None:
        """Mark the grasp point of the part."""
        self.body.add_site(name=f"{self._fixture}/{part}", pos=pos, size=[0.006, 0.006, 0.006], group=4)

    def _material(self, rgba: Rgba) -> str:
        name = f"{self._fixture}/" + "".join(f"{round(255 * value):02x}" for value in rgba)
        if self._spec.material(name) is None:
            shiny = rgba == _METAL
            self._spec.add_material(
                name=name, rgba=list(rgba), specular=0.7 if shiny else 0.25, shininess=0.7 if shiny else 0.3
            )
        return name


def _add_shell(part: _Part, depth: float, width: float, base: float, height: float) -> None:
    """Add the walls of a cabinet, open at the front, on a plinth."""
    back, side, wall, top = 0.5 * depth, 0.5 * width, 0.012, base + height
    part.box([-back + 0.03, -side + 0.015, 0], [back - 0.01, side - 0.015, base], _DARK)
    part.box([-back, -side, top], [back, side, top + wall], _WOOD)
    part.box([-back, -side, base], [back, side, base + wall], _WOOD)
    part.box([-back, side - wall, base + wall], [back, side, top], _WOOD)
    part.box([-back, -side, base + wall], [back, -side + wall, top], _WOOD)
    part.box([back - wall, -side + wall, base + wall], [back, side - wall, top], _INSIDE)


def _add_drawers(cabinet: _Part, cfg: DrawersCfg) -> None:
    depth, width, height = cfg.size
    if cfg.travel > depth - 0.02:
        raise AssetError(f"a drawer of travel {cfg.travel} falls out of a cabinet of depth {depth}: shorten its travel")
    _add_shell(cabinet, depth, width, cfg.base, cfg.drawers * height + 0.012)
    side, wall, thick = 0.5 * width - 0.016, 0.006, 0.016  # of the drawer boxes
    for i in range(cfg.drawers):
        name, bottom, top = f"drawer_{i}", 0.5 * _GAP, height - 0.5 * _GAP
        middle = 0.5 * height
        origin = [-0.5 * depth, 0.0, cfg.base + 0.012 + i * height]
        inside, box_top = depth - 0.03, 0.7 * height
        drawer = cabinet.moving(
            name, origin, cfg.mass, [0.5 * inside, side, 0.5 * box_top], [0.4 * inside, 0, 0.5 * box_top]
        )
        drawer.joint(
            name, int(mujoco.mjtJoint.mjJNT_SLIDE), [-1, 0, 0], cfg.travel, damping=cfg.damping,
            frictionloss=cfg.friction, armature=0.1,
        )  # fmt: skip
        drawer.box([-thick, -0.5 * width, bottom], [0, 0.5 * width, top], _FRONT)
        drawer.box([0, -side, bottom], [inside, side, bottom + wall], _INSIDE)
        drawer.box([0, side - wall, bottom + wall], [inside, side, box_top], _INSIDE)
        drawer.box([0, -side, bottom + wall], [inside, -side + wall, box_top], _INSIDE)
        drawer.box([inside - wall, -side + wall, bottom + wall], [inside, side - wall, box_top], _INSIDE)
        grip = [-thick - cfg.handle.standoff, 0.0, middle]
        drawer.bar(cfg.handle, grip, False, COLORS[cfg.colors[i]] if i < len(cfg.colors) else _METAL)
        drawer.site(name, [grip[0] + _DEEP, grip[1], grip[2]])


def _add_door(cabinet: _Part, cfg: DoorCfg) -> None:
    depth, width, height = cfg.size
    _add_shell(cabinet, depth, width, cfg.base, height)
    shelf = cfg.base + 0.5 * height
    cabinet.box(
        [-0.5 * depth + 0.03, -0.5 * width + 0.012, shelf],
        [0.5 * depth - 0.012, 0.5 * width - 0.012, shelf + 0.01],
        _INSIDE,
    )
    sign, thick = (1.0 if cfg.hinge == "left" else -1.0), 0.016
    origin = [-0.5 * depth, sign * 0.5 * width, cfg.base]
    door = cabinet.moving(
        "door", origin, cfg.mass, [0.5 * thick, 0.5 * width, 0.5 * height],
        [-0.5 * thick, -sign * 0.5 * width, 0.5 * height],
    )  # fmt: skip
    # A door with hinges at +y opens its free edge from -y towards -x: clockwise, seen from above.
    door.joint(
        "door", int(mujoco.mjtJoint.mjJNT_HINGE), [0, 0, -sign], cfg.angle, damping=cfg.damping,
        frictionloss=cfg.friction, armature=0.01,
    )  # fmt: skip
    edge = sorted((-sign * width, 0.0))
    door.box([-thick, edge[0] + 0.5 * _GAP, 0.5 * _GAP], [0, edge[1] - 0.5 * _GAP, height + 0.01], _FRONT)
    grip = [-thick - cfg.handle.standoff, -sign * (width - 0.05), 0.5 * height]
    door.bar(cfg.handle, grip, True, _METAL)
    door.site("door", [grip[0] + _DEEP, grip[1], grip[2]])


def _add_buttons(console: _Part, cfg: ButtonsCfg) -> None:
    count = len(cfg.colors)
    margin = cfg.radius + 0.022
    wide = margin + 0.5 * (count - 1) * cfg.spacing
    console.box([-margin, -wide, 0], [margin, wide, cfg.height], _DARK)
    cap = cfg.travel + 0.008  # height above the console; a pressed button still protrudes
    for i, color in enumerate(cfg.colors):
        name, y = f"button_{i}", (0.5 * (count - 1) - i) * cfg.spacing
        console.geom(_CYLINDER, [cfg.radius + 0.007, 0.003, 0], [0, y, cfg.height + 0.002], _METAL, _UNTOUCHED)
        button = console.moving(name, [0, y, cfg.height], 0.05, [cfg.radius, cfg.radius, 0.5 * cap], [0, 0, 0.5 * cap])
        button.joint(
            name, int(mujoco.mjtJoint.mjJNT_SLIDE), [0, 0, -1], cfg.travel, damping=cfg.damping,
            stiffness=cfg.stiffness, armature=0.02,
        )  # fmt: skip
        button.geom(_CYLINDER, [cfg.radius, 0.5 * cap, 0], [0, 0, 0.5 * cap], COLORS[color], _UNTOUCHED)
        # Rendered as a cylinder, but collides as a box of the same area, which has simpler contacts.
        side = 0.5 * math.sqrt(math.pi) * cfg.radius
        button.geom(_BOX, [side, side, 0.5 * cap], [0, 0, 0.5 * cap], COLORS[color], group=_HIDDEN)
        button.site(name, [0, 0, cap])


def _add_hole(block: _Part, cfg: HoleCfg) -> None:
    hole, out = 0.5 * cfg.width, 0.5 * cfg.size
    if hole >= out:
        raise AssetError(f"a hole of width {cfg.width} does not fit into a block of width {cfg.size}")
    friction: dict[str, Any] = {"friction": [cfg.friction, 0.005, 0.0001]}
    block.box([hole, -out, 0], [out, out, cfg.depth], _METAL, **friction)
    block.box([-out, -out, 0], [-hole, out, cfg.depth], _METAL, **friction)
    block.box([-hole, hole, 0], [hole, out, cfg.depth], _METAL, **friction)
    block.box([-hole, -out, 0], [hole, -hole, cfg.depth], _METAL, **friction)
    rim = 0.006  # a dark frame around the hole, visual only
    for low, high in (
        ([hole, -hole - rim], [hole + rim, hole + rim]),
        ([-hole - rim, -hole - rim], [-hole, hole + rim]),
        ([-hole, hole], [hole, hole + rim]),
        ([-hole, -hole - rim], [hole, -hole]),
    ):
        block.box([*low, cfg.depth], [*high, cfg.depth + 0.0006], _DARK, _UNTOUCHED)
    block.site("hole", [0, 0, cfg.depth])


def _add_bin(box: _Part, cfg: BinCfg) -> None:
    x, y, z = 0.5 * cfg.size[0], 0.5 * cfg.size[1], cfg.size[2]
    if 2.0 * cfg.wall >= min(2.0 * x, 2.0 * y):
        raise AssetError(f"a bin of {cfg.size} with walls of {cfg.wall} has no inside")
    rgba, wall = _WOOD if cfg.color is None else COLORS[cfg.color], cfg.wall
    box.box([-x, -y, 0], [x, y, wall], rgba)
    box.box([-x, -y, wall], [-x + wall, y, z], rgba)
    box.box([x - wall, -y, wall], [x, y, z], rgba)
    box.box([-x + wall, -y, wall], [x - wall, -y + wall, z], rgba)
    box.box([-x + wall, y - wall, wall], [x - wall, y, z], rgba)


def _add_peg(spec: mujoco.MjSpec, name: str, cfg: PegCfg) -> None:
    reach = 0.5 * cfg.length - cfg.radius
    if reach <= 0.0:
        raise AssetError(f"a peg of length {cfg.length} is shorter than it is thick (radius {cfg.radius})")
    body = spec.worldbody.add_body(name=name, pos=list(cfg.pos))
    body.add_freejoint(name=name)
    body.add_geom(
        name=name,
        type=_CAPSULE,
        size=[cfg.radius, reach, 0],
        mass=cfg.mass,
        contype=2,
        conaffinity=4,
        condim=4,
        friction=[0.8, 0.01, 0.0005],
        rgba=list(COLORS[cfg.color]),
    )


def turn(quat: Tensor, vector: Tensor) -> Tensor:
    """Rotate vectors ``[n, 3]`` by unit quaternions ``[n, 4]``."""
    axis = quat[:, 1:]
    twice = 2.0 * torch.linalg.cross(axis, vector.expand_as(axis), dim=1)
    return vector + quat[:, :1] * twice + torch.linalg.cross(axis, twice, dim=1)


class PartPoint:
    """A site of a fixture: computes its position from batched fixture poses and joint positions.

    The site belongs to the fixture itself, or to a part attached to it by one slide or hinge.
    """

    def __init__(self, model: mujoco.MjModel, site: str, device: torch.device | str = "cpu") -> None:
        body = model.body(int(model.site(site).bodyid[0]))
        root = body if model.body_mocapid[body.id] >= 0 else model.body(int(body.parentid[0]))
        moves = body.id != root.id
        if model.body_mocapid[root.id] < 0 or (moves and (int(body.jntnum[0]) != 1 or body.quat[0] != 1.0)):
            raise AssetError(f"site {site!r}: expected one of a fixture, or of an unturned part of one with one joint")
        self.fixture = root.name
        """The mocap body of the fixture."""
        self.qpos: int = -1
        """Address of the joint in ``qpos``; -1 for a static point."""
        self.qvel: int = -1
        """Address of the joint in ``qvel``."""
        self.limit = 0.0
        """Upper limit of the joint."""
        self._hinged = False
        base, slide, lever, across = np.array(model.site(site).pos), np.zeros(3), np.zeros(3), np.zeros(3)
        if moves:
            joint = model.joint(int(body.jntadr[0]))
            self.qpos, self.qvel = int(joint.qposadr[0]), int(joint.dofadr[0])
            self.limit, axis = float(joint.range[1]), np.array(joint.axis)
            self._hinged = int(joint.type[0]) == int(mujoco.mjtJoint.mjJNT_HINGE)
            if self._hinged:  # the component of the lever along the axis is constant, the rest rotates
                lever = base - joint.pos
                lever -= axis * (lever @ axis)
                base, across = base - lever, np.cross(axis, lever)
            else:
                slide = axis
            base = base + body.pos
        vectors = np.stack((base, slide, lever, across))
        self._base, self._slide, self._lever, self._across = torch.tensor(vectors, dtype=torch.float32, device=device)

    def position(self, pos: Tensor, quat: Tensor, joint: Tensor | None = None) -> Tensor:
        """Return the site's positions ``[n, 3]`` in the world.

        ``pos`` ``[n, 3]``, ``quat`` ``[n, 4]`` are fixture poses, ``joint`` ``[n]`` the part's positions (default: 0).
        """
        point = self._base + self._lever
        if joint is not None:
            way = joint.unsqueeze(1)
            point = self._base + way * self._slide
            if self._hinged:
                point = self._base + torch.cos(way) * self._lever + torch.sin(way) * self._across
        return pos + turn(quat, point.expand_as(pos))
