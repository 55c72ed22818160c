"""Converts a MuJoCo model to triangle meshes: one mesh per body and colour."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodichain.extras import require

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_SHOWN_GROUPS = 3
"""Only geoms of the first groups are visible, as in MuJoCo's viewer; others are usually collision geoms."""
_SEGMENTS = 32
_PLANE_SIZE = 5.0  # half size in metres of an infinite plane


@dataclass(frozen=True)
class Part:
    """Triangles of one colour, fixed to a body."""

    body: int
    color: tuple[int, int, int]
    opacity: float
    vertices: Floats
    """``[n, 3]``, in the frame of the body; faces at a visible edge do not share vertices."""
    faces: Ints
    """``[m, 3]``."""


def find_parts(model: mujoco.MjModel) -> list[Part]:
    """Return the visible parts of a model, except the ground, see :func:`ground_height`."""
    found: dict[tuple[int, tuple[float, ...]], list[tuple[Floats, Ints]]] = defaultdict(list)
    for geom in range(model.ngeom):
        rgba = geom_color(model, geom)
        if model.geom_group[geom] >= _SHOWN_GROUPS or rgba[3] <= 0.01 or is_ground(model, geom):
            continue
        triangles = _triangles(model, geom)
        if triangles is None:
            continue
        vertices, faces = triangles
        rotation = np.empty(9)
        mujoco.mju_quat2Mat(rotation, model.geom_quat[geom])
        placed = vertices @ rotation.reshape(3, 3).T + model.geom_pos[geom]
        found[int(model.geom_bodyid[geom]), tuple(np.round(rgba, 3))].append((placed, faces))
    return [_joined(body, rgba, pieces) for (body, rgba), pieces in found.items()]


def _joined(body: int, rgba: tuple[float, ...], pieces: list[tuple[Floats, Ints]]) -> Part:
    first = np.cumsum([0, *(len(vertices) for vertices, _ in pieces)])
    faces = np.concatenate([piece[1] + at for piece, at in zip(pieces, first, strict=False)])
    red, green, blue = (round(255 * min(max(value, 0.0), 1.0)) for value in rgba[:3])
    return Part(body, (red, green, blue), float(rgba[3]), np.concatenate([piece[0] for piece in pieces]), faces)


def is_ground(model: mujoco.MjModel, geom: int) -> bool:
    """Return whether a geom is a horizontal plane of the world."""
    if int(model.geom_type[geom]) != int(mujoco.mjtGeom.mjGEOM_PLANE) or int(model.geom_bodyid[geom]) != 0:
        return False
    rotation = np.empty(9)
    mujoco.mju_quat2Mat(rotation, model.geom_quat[geom])
    return bool(rotation[8] > 0.999)


def ground_height(model: mujoco.MjModel) -> float | None:
    """Return the height of the ground, if there is one."""
    heights = [float(model.geom_pos[geom][2]) for geom in range(model.ngeom) if is_ground(model, geom)]
    return min(heights) if heights else None


def geom_color(model: mujoco.MjModel, geom: int) -> Floats:
    """Return red, green, blue and opacity of a geom, in [0, 1]; for a texture, the mean."""
    material = int(model.geom_matid[geom])
    if material < 0:
        return model.geom_rgba[geom].astype(np.float64)
    rgba = model.mat_rgba[material].astype(np.float64)
    textures = [int(index) for index in np.atleast_1d(model.mat_texid[material]) if index >= 0]
    if textures:
        rgba[:3] *= _mean_color(model, textures[0])
    return rgba


def _mean_color(model: mujoco.MjModel, texture: int) -> Floats:
    channels = int(model.tex_nchannel[texture])
    count = int(model.tex_width[texture]) * int(model.tex_height[texture]) * channels
    begin = int(model.tex_adr[texture])
    pixels = model.tex_data[begin : begin + count].reshape(-1, channels)
    return np.broadcast_to(pixels[:, :3].mean(axis=0) / 255.0, 3).astype(np.float64)


def _triangles(model: mujoco.MjModel, geom: int) -> tuple[Floats, Ints] | None:
    """Return vertices and faces of a geom in its own frame; ``None`` for unsupported shapes."""
    shapes: Any = require("trimesh", extra="viewer").creation
    kind, size, types = int(model.geom_type[geom]), model.geom_size[geom], mujoco.mjtGeom
    if kind == int(types.mjGEOM_BOX):
        return _faceted(shapes.box(extents=2.0 * size))
    if kind == int(types.mjGEOM_CYLINDER):
        return _cylinder(float(size[0]), float(size[1]))
    if kind == int(types.mjGEOM_CAPSULE):
        mesh = shapes.capsule(height=2.0 * size[1], radius=size[0], count=[_SEGMENTS, _SEGMENTS // 2])
        return np.asarray(mesh.vertices), np.asarray(mesh.faces)
    if kind in (int(types.mjGEOM_SPHERE), int(types.mjGEOM_ELLIPSOID)):
        mesh = shapes.icosphere(subdivisions=3, radius=1.0)
        radii = size if kind == int(types.mjGEOM_ELLIPSOID) else size[0]
        return np.asarray(mesh.vertices) * radii, np.asarray(mesh.faces)
    if kind == int(types.mjGEOM_MESH):
        return _mesh(model, int(model.geom_dataid[geom]))
    if kind == int(types.mjGEOM_PLANE):
        half = [float(value) if value > 0 else _PLANE_SIZE for value in size[:2]]
        return _faceted(shapes.box(extents=(2 * half[0], 2 * half[1], 1e-3)))
    if kind == int(types.mjGEOM_HFIELD):
        return _height_field(model, int(model.geom_dataid[geom]))
    return None


def _faceted(mesh: Any) -> tuple[Floats, Ints]:
    """Return triangles without shared vertices, for flat shading."""
    vertices = np.asarray(mesh.vertices)[np.asarray(mesh.faces)].reshape(-1, 3)
    return vertices, np.arange(len(vertices)).reshape(-1, 3)


def _cylinder(radius: float, half: float) -> tuple[Floats, Ints]:
    angle = np.linspace(0.0, 2.0 * np.pi, _SEGMENTS, endpoint=False)
    ring = np.stack((radius * np.cos(angle), radius * np.sin(angle), np.zeros(_SEGMENTS)), axis=1)
    up = np.array([0.0, 0.0, half])
    low, high = ring - up, ring + up
    ends = np.stack((-up, up))
    i, j = np.arange(_SEGMENTS), np.roll(np.arange(_SEGMENTS), -1)
    n = _SEGMENTS
    side = np.concatenate((np.stack((i, j, n + j), 1), np.stack((i, n + j, n + i), 1)))
    caps = np.concatenate(
        (
            np.stack((2 * n + j, 2 * n + i, np.full(n, 4 * n)), 1),
            np.stack((3 * n + i, 3 * n + j, np.full(n, 4 * n + 1)), 1),
        )
    )
    return np.concatenate((low, high, low, high, ends)), np.concatenate((side, caps))


def _mesh(model: mujoco.MjModel, mesh: int) -> tuple[Floats, Ints]:
    """Return the triangles of a mesh; vertices are duplicated where faces meet at an angle."""
    begin, count = int(model.mesh_vertadr[mesh]), int(model.mesh_vertnum[mesh])
    vertices = model.mesh_vert[begin : begin + count].astype(np.float64)
    begin, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
    faces = model.mesh_face[begin : begin + count].astype(np.int64)
    corners = vertices[faces].reshape(-1, 3)
    return corners, np.arange(len(corners)).reshape(-1, 3)


def _height_field(model: mujoco.MjModel, field: int) -> tuple[Floats, Ints]:
    rows, columns = int(model.hfield_nrow[field]), int(model.hfield_ncol[field])
    begin = int(model.hfield_adr[field])
    heights = model.hfield_data[begin : begin + rows * columns].reshape(rows, columns)
    width, depth, top, _ = model.hfield_size[field]
    x, y = np.meshgrid(np.linspace(-width, width, columns), np.linspace(-depth, depth, rows))
    vertices = np.stack((x, y, top * heights), axis=-1).reshape(-1, 3)
    corner = (np.arange(rows - 1)[:, None] * columns + np.arange(columns - 1)).reshape(-1)
    right, above = corner + 1, corner + columns
    faces = np.concatenate((np.stack((corner, right, above), 1), np.stack((right, above + 1, above), 1)))
    return vertices.astype(np.float64), faces


def bounds_of(parts: list[Part], positions: Floats, quaternions: Floats) -> tuple[Floats, Floats]:
    """Return the corners of the bounding box of all parts, for body poses ``[nbody, 3]`` and ``[nbody, 4]``."""
    boxes = list(_boxes(parts, positions, quaternions))
    if not boxes:
        return np.full(3, -0.5), np.full(3, 0.5)
    return np.min([low for low, _ in boxes], axis=0), np.max([high for _, high in boxes], axis=0)


def _boxes(parts: list[Part], positions: Floats, quaternions: Floats) -> Iterator[tuple[Floats, Floats]]:
    for part in parts:
        rotation = np.empty(9)
        mujoco.mju_quat2Mat(rotation, quaternions[part.body])
        points = part.vertices @ rotation.reshape(3, 3).T + positions[part.body]
        yield points.min(axis=0), points.max(axis=0)
