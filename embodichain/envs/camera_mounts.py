"""Configured cameras as cameras of the model, for renderers that know no others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mujoco
import numpy as np

from embodichain.envs.rendering import CameraCfg, camera_names
from embodichain.errors import UnknownNameError, nearest

_FOVY = 45.0


def mounted_name(cfg: CameraCfg) -> str:
    """Return the name under which a configured camera stands in the model."""
    return f"observed/{cfg.name}"


def mount_cameras(spec: mujoco.MjSpec, cfgs: Sequence[CameraCfg]) -> mujoco.MjModel:
    """Add a camera to the model for every configured one, so that each can have its own size and angle; compile it."""
    model = spec.compile()
    for cfg in cfgs:
        if cfg.pos is not None and cfg.lookat is not None:
            body, pos, quat, fovy = spec.worldbody, np.array(cfg.pos), _looking(cfg.pos, cfg.lookat), _FOVY
        else:
            name = cfg.attach or cfg.name
            if name not in camera_names(model):
                raise UnknownNameError(f"the model has no camera {name!r}.{nearest(name, camera_names(model))}")
            camera = model.camera(name)
            body = spec.body(model.body(int(camera.bodyid[0])).name)
            pos, quat, fovy = camera.pos.copy(), camera.quat.copy(), float(camera.fovy[0])
        body.add_camera(name=mounted_name(cfg), pos=pos, quat=quat, fovy=cfg.fovy or fovy)
    return spec.compile()


def _looking(pos: Sequence[float], lookat: Sequence[float]) -> np.ndarray:
    """Return the orientation of an upright camera; it looks along its negative z axis, x is to its right."""
    ahead = np.subtract(lookat, pos)
    ahead = ahead / np.linalg.norm(ahead)
    heading = math.atan2(ahead[1], ahead[0])
    right = np.array([math.sin(heading), -math.cos(heading), 0.0])
    axes = np.stack((right, np.cross(-ahead, right), -ahead), axis=1)
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, axes.flatten())
    return quat
