"""Triangles of geoms: they enclose the volume that MuJoCo computes masses from, and stand where its geoms do."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from embodichain.viewer.geometry import Part, bounds_of, find_parts, ground_height

pytestmark = pytest.mark.extra("viewer")

_MODEL = """
<mujoco>
  <asset>
    <mesh name="wedge" vertex="0 0 0  .3 0 0  0 .2 0  0 0 .4"/>
    <texture name="half" type="2d" builtin="flat" rgb1=".5 .5 .5" rgb2=".5 .5 .5" width="4" height="4"/>
    <material name="dim" texture="half" rgba="1 .4 0 1"/>
  </asset>
  <worldbody>
    <geom type="plane" size="0 0 1" pos="0 0 -.1"/>
    <body pos="0 0 1"><freejoint/><geom type="box" size=".1 .2 .3" euler="10 20 30" rgba="1 0 0 1"/></body>
    <body pos="1 0 1"><freejoint/><geom type="sphere" size=".2" rgba="0 1 0 .5"/></body>
    <body pos="2 0 1"><freejoint/><geom type="cylinder" size=".1 .3" pos=".1 0 0" euler="40 0 0" material="dim"/></body>
    <body pos="3 0 1"><freejoint/><geom type="capsule" fromto="0 0 0 .1 .2 .3" size=".05"/></body>
    <body pos="4 0 1"><freejoint/><geom type="ellipsoid" size=".1 .2 .3"/></body>
    <body pos="5 0 1"><freejoint/><geom type="mesh" mesh="wedge" euler="0 0 50"/></body>
    <body pos="6 0 1"><freejoint/><geom type="box" size=".1 .1 .1" rgba="0 0 1 1"/>
      <geom type="box" size=".1 .1 .1" pos=".5 0 0" rgba="0 0 1 1"/><geom type="sphere" size=".1" pos="1 0 0"/>
      <geom type="sphere" size="2" group="3" mass="0"/></body>
  </worldbody>
</mujoco>
"""


def volume(part: Part) -> float:
    """Return the volume within triangles that are seen from outside, by the divergence theorem."""
    a, b, c = (part.vertices[part.faces[:, corner]] for corner in range(3))
    return float((a * np.cross(b, c)).sum() / 6.0)


def test_triangles_enclose_the_volume_of_their_geoms():
    model = mujoco.MjModel.from_xml_string(_MODEL)
    parts = find_parts(model)
    for body in range(1, model.nbody):
        enclosed = sum(volume(part) for part in parts if part.body == body)
        assert enclosed == pytest.approx(model.body_mass[body] / 1000.0, rel=0.03), f"body {body}"
    assert [part.body for part in parts] == [1, 2, 3, 4, 5, 6, 7, 7], "one mesh for each colour of a body"
    assert parts[0].color == (255, 0, 0)
    assert (parts[1].color, parts[1].opacity) == ((0, 255, 0), pytest.approx(0.5))
    assert parts[2].color == pytest.approx((127, 51, 0), abs=2)
    assert ground_height(model) == pytest.approx(-0.1)


def test_triangles_stand_where_the_geoms_do():
    model = mujoco.MjModel.from_xml_string(_MODEL)
    data = mujoco.MjData(model)
    data.qpos[3:7] = np.array([0.5, 0.5, 0.5, 0.5])
    mujoco.mj_kinematics(model, data)
    parts = find_parts(model)
    for part, geom in zip(parts[:6], range(1, 7), strict=True):
        low, high = bounds_of([part], data.xpos, data.xquat)
        rotation = np.abs(data.geom_xmat[geom].reshape(3, 3))
        center = data.geom_xpos[geom] + data.geom_xmat[geom].reshape(3, 3) @ model.geom_aabb[geom, :3]
        half = rotation @ model.geom_aabb[geom, 3:]  # MuJoCo's own box round the geom, which is no smaller
        assert (low >= center - half - 1e-6).all()
        assert (high <= center + half + 1e-6).all()
        assert (high - low >= 0.55 * half).all()
