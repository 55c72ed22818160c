"""Draws a MuJoCo model in the browser: many envs side by side, and a mouse that drags bodies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodichain.viewer.geometry import Floats, bounds_of, find_parts, ground_height

MAX_ENVS = 64
"""Maximum number of envs that a browser shows smoothly."""
_GAP, _LEAST_SPACING = 0.35, 0.8  # metres between envs, and between their centres
_VIEW = np.array([0.62, -0.66, 0.42])
_GROUND, _LINES = (236, 239, 244), (205, 211, 222)
_PULL_COLOR = (255, 120, 30)


@dataclass(frozen=True)
class Pose:
    """Joint positions and mocap poses of all envs."""

    qpos: NDArray[np.float64]
    """``[num_envs, nq]``."""
    mocap: NDArray[np.float64]
    """Positions and quaternions of mocap bodies, ``[num_envs, nmocap, 7]``."""


@dataclass(frozen=True)
class Pull:
    """A mouse drag at a point of a body."""

    env: int
    body: int
    point: Floats
    """Point on the body, ``[3]``, in its frame."""
    target: Floats
    """Position of the mouse, ``[3]``, in the frame of the env."""


class SceneView:
    """Draws one model for ``num_envs`` envs; every part is one mesh with an instance per env."""

    def __init__(
        self,
        server: Any,
        model: mujoco.MjModel,
        num_envs: int,
        camera: str | None = None,
        pose: Pose | None = None,
    ) -> None:
        """Draw the model; the layout leaves room for ``pose``."""
        self.model, self.num_envs = model, num_envs
        self.pull: Pull | None = None
        self._server, self._data = server, mujoco.MjData(model)
        self._parts = find_parts(model)
        if pose is None:
            mujoco.mj_kinematics(model, self._data)
        else:
            self.load(pose, 0)
        self.low, self.high = bounds_of(self._parts, self._data.xpos, self._data.xquat)
        self.offsets = self._arrange()
        self._moving = [
            model.body_weldid[part.body] != 0 or model.body_mocapid[model.body_rootid[part.body]] >= 0
            for part in self._parts
        ]
        self._positions = np.repeat(self._data.xpos[None], num_envs, axis=0) + self.offsets[:, None]
        self._quaternions = np.repeat(self._data.xquat[None], num_envs, axis=0)
        """Shown poses of all bodies, ``[num_envs, nbody, 3]`` and ``[num_envs, nbody, 4]``."""
        self._handles = [self._add(number) for number in range(len(self._parts))]
        self._line = server.scene.add_line_segments(
            "/pull",
            np.zeros((1, 2, 3), np.float32),
            np.array(_PULL_COLOR, np.uint8),
            thickness=4.0,
            thickness_units="screen",
            visible=False,
        )
        self._labels = [
            server.scene.add_label(f"/names/{env}", f"env {env}", position=self._name_place(env), visible=num_envs > 1)
            for env in range(num_envs)
        ]
        self._add_ground()
        self._place_camera(camera)

    def _arrange(self) -> Floats:
        """Return the positions of the envs, ``[num_envs, 3]``: in rows, centred at the origin."""
        size = np.maximum(self.high - self.low + _GAP, _LEAST_SPACING)[:2]
        columns = max(1, math.ceil(math.sqrt(self.num_envs * size[1] / size[0])))
        rows = math.ceil(self.num_envs / columns)
        index = np.arange(self.num_envs)
        x = (index % columns - (min(columns, self.num_envs) - 1) / 2) * size[0]
        y = (index // columns - (rows - 1) / 2) * size[1]
        return np.stack((x, y, np.zeros(self.num_envs)), axis=1)

    def _name_place(self, env: int) -> Floats:
        middle = 0.5 * (self.low + self.high)
        return self.offsets[env] + np.array([middle[0], middle[1], self.high[2] + 0.08])

    def _add(self, number: int) -> Any:
        part = self._parts[number]
        handle = self._server.scene.add_batched_meshes_simple(
            f"/scene/{number}",
            part.vertices,
            part.faces,
            self._quaternions[:, part.body],
            self._positions[:, part.body],
            batched_colors=part.color,
            opacity=None if part.opacity > 0.99 else part.opacity,
            cast_shadow=part.opacity > 0.9,
            lod="off",
        )
        if not self._moving[number]:
            return handle

        async def dragged(event: Any) -> None:
            env = event.instance_index
            if event.phase == "end" or env is None:
                self.pull = None
                return
            if self.pull is None or event.phase == "start":
                way = np.asarray(event.start_position) - self._positions[env, part.body]
                point = _rotation(self._quaternions[env, part.body]).T @ way
            else:  # keep the point on the moving body
                point = self.pull.point
            self.pull = Pull(env, part.body, point, np.asarray(event.end_position) - self.offsets[env])

        handle.on_drag("left", modifier="cmd/ctrl")(dragged)
        return handle

    def _add_ground(self) -> None:
        height = ground_height(self.model)
        if height is None:
            height = float(self.low[2])
        self._server.scene.add_grid(
            "/ground",
            infinite_grid=True,
            cell_size=0.25,
            section_size=1.0,
            cell_color=_LINES,
            section_color=(176, 184, 198),
            fade_distance=25.0,
            plane_color=_GROUND,
            plane_opacity=1.0,
            shadow_opacity=0.35,
            position=(0.0, 0.0, height - 2e-3),
        )

    def _place_camera(self, camera: str | None) -> None:
        """Look at all envs from the direction of the task's camera, or from a corner."""
        low, high = self.low + self.offsets.min(axis=0), self.high + self.offsets.max(axis=0)
        view = _VIEW / np.linalg.norm(_VIEW)
        index = -1 if camera is None else mujoco.mj_name2id(self.model, int(mujoco.mjtObj.mjOBJ_CAMERA), camera)
        if index >= 0 and self.model.cam_bodyid[index] == 0:
            mujoco.mj_camlight(self.model, self._data)
            view = self._data.cam_xmat[index].reshape(3, 3)[:, 2]
            if self.num_envs > 1 and view[2] < 0.35:  # look down, so that rear envs are visible
                view = np.array([*(view[:2] / (np.linalg.norm(view[:2]) + 1e-9)), 0.55])
                view /= np.linalg.norm(view)
        middle, radius = 0.5 * (low + high), 0.5 * float(np.linalg.norm(high - low))
        start = self._server.initial_camera
        start.fov = math.radians(45.0)
        start.look_at = tuple(middle)
        start.position = tuple(middle + view * max(radius, 0.3) * 2.3)
        start.up = (0.0, 0.0, 1.0)
        start.near = 0.01

    def show(self, pose: Pose) -> None:
        """Show a pose of all envs."""
        positions = np.empty((self.num_envs, self.model.nbody, 3))
        quaternions = np.empty((self.num_envs, self.model.nbody, 4))
        for env in range(self.num_envs):
            self.load(pose, env)
            positions[env], quaternions[env] = self._data.xpos + self.offsets[env], self._data.xquat
        self._positions, self._quaternions = positions, quaternions
        with self._server.atomic():
            for part, handle, moves in zip(self._parts, self._handles, self._moving, strict=True):
                if moves:
                    handle.batched_positions = positions[:, part.body].astype(np.float32)
                    handle.batched_wxyzs = quaternions[:, part.body].astype(np.float32)
            self._show_pull()

    def load(self, pose: Pose, env: int) -> mujoco.MjData:
        """Return the model's data with the kinematics of one env."""
        self._data.qpos[:] = pose.qpos[env]
        if self.model.nmocap:
            self._data.mocap_pos[:], self._data.mocap_quat[:] = pose.mocap[env, :, :3], pose.mocap[env, :, 3:]
        mujoco.mj_kinematics(self.model, self._data)
        return self._data

    def _show_pull(self) -> None:
        pull = self.pull
        self._line.visible = pull is not None
        if pull is not None:
            turned = _rotation(self._quaternions[pull.env, pull.body]) @ pull.point
            ends = self._positions[pull.env, pull.body] + turned, pull.target + self.offsets[pull.env]
            self._line.points = np.stack(ends)[None].astype(np.float32)

    def remove(self) -> None:
        """Remove everything from the scene."""
        for handle in (*self._handles, *self._labels, self._line):
            handle.remove()


def pull_force(model: mujoco.MjModel, data: mujoco.MjData, pull: Pull, strength: float) -> NDArray[np.float64]:
    """Return force and torque ``[6]`` on a body, as in ``xfrc_applied``: a damped spring to the mouse.

    ``data`` holds the current state of the env, including body velocities. With ``strength`` 1, the spring accelerates
    the body and its descendants by 4 m/s² per centimetre.
    """
    mass = float(model.body_subtreemass[pull.body])
    velocity = np.zeros(6)
    mujoco.mj_objectVelocity(model, data, int(mujoco.mjtObj.mjOBJ_BODY), pull.body, velocity, 0)
    stiffness = 400.0 * strength
    point = data.xpos[pull.body] + data.xmat[pull.body].reshape(3, 3) @ pull.point
    force = mass * (stiffness * (pull.target - point) - 2.0 * math.sqrt(stiffness) * velocity[3:])
    return np.concatenate((force, np.cross(point - data.xipos[pull.body], force)))


def _rotation(quaternion: Floats) -> Floats:
    matrix = np.empty(9)
    mujoco.mju_quat2Mat(matrix, quaternion)
    return matrix.reshape(3, 3)
