"""Batched physics: the state of many copies of one MuJoCo model as tensors, advanced together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import mujoco
import torch
from torch import Tensor

from embodichain.errors import SimulationError

if TYPE_CHECKING:
    from embodichain.envs.scene_cfg import CameraCfg

Load: TypeAlias = Callable[[mujoco.MjData, int], None]
"""Copies the state of an env into an ``MjData``."""
Quality: TypeAlias = Literal["lean", "high"]
"""Render quality: fast, or good-looking."""
Images: TypeAlias = dict[str, dict[str, Tensor]]
"""Camera observations ``[n, H, W, channels]``, by group and camera name."""
RenderAll: TypeAlias = Callable[[Mapping[str, Tensor], Tensor | None], Images]
"""Renders the cameras of all envs with mocap bodies at these positions; with a mask ``[num_envs]``, images of other
envs are undefined."""

Poses: TypeAlias = Mapping[str, Tensor]
"""Position and unit quaternion ``[n, 7]`` of mocap bodies, by name."""


DERIVING = frozenset(
    (
        *("body_mass", "body_inertia", "body_ipos", "body_iquat", "body_pos", "body_quat", "qpos0", "dof_armature"),
        *("jnt_pos", "jnt_axis", "geom_pos", "geom_quat", "geom_size"),
        *("actuator_gear", "site_pos", "site_quat"),
    )
)
"""Model fields that other constants of the model depend on: call ``refresh_model`` after writing them."""
VISUAL = frozenset(
    (
        *("geom_rgba", "geom_matid", "mat_rgba", "mat_texid", "mat_texrepeat", "mat_emission", "mat_specular"),
        *(
            "mat_shininess",
            "light_pos",
            "light_dir",
            "light_active",
            "light_ambient",
            "light_diffuse",
            "light_specular",
        ),
        *("cam_pos", "cam_quat", "cam_fovy"),
    )
)
"""Model fields that affect rendering only."""


class Physics(ABC):
    """``num_envs`` copies of one model, with live tensors ``qpos``, ``qvel`` and ``ctrl`` ``[num_envs, ...]``.

    Writing ``ctrl`` drives the robot. ``step`` modifies these tensors in place, so copy what you keep. ``outputs`` are
    the fields of ``MjData`` requested in the constructor, such as ``xpos``. After a step they lag by a substep, as
    after ``mj_step``; after ``set`` they are current. They are part of ``state``.
    """

    model: mujoco.MjModel
    num_envs: int
    device: torch.device
    qpos: Tensor
    qvel: Tensor
    ctrl: Tensor
    motion: Tensor | None = None
    """Positions and velocities side by side, live, ``[num_envs, nq + nv]``; ``None`` if they are stored apart."""
    mocap_pos: Tensor
    """Positions of mocap bodies, live, ``[num_envs, nmocap, 3]``; set at reset."""
    mocap_quat: Tensor
    """Orientations of mocap bodies, live, ``[num_envs, nmocap, 4]``."""
    outputs: dict[str, Tensor]
    diverged: Tensor | None = None
    """Bool ``[num_envs]``: envs that became unstable in the last ``step`` and were reset by MuJoCo; ``None``: none."""

    @abstractmethod
    def step(self, count: int) -> None:
        """Advance all envs by ``count`` substeps with constant ``ctrl``; call :meth:`settle` afterwards."""

    def settle(self) -> None:  # noqa: B027 - most backends do this in ``step``
        """Detect envs that became unstable in the last ``step``; separate so that it can be part of a CUDA graph."""

    @abstractmethod
    def set(self, env_ids: Tensor, qpos: Tensor, qvel: Tensor, poses: Poses | None = None) -> None:
        """Reset these envs to the given positions and velocities, and clear all other state.

        ``poses`` are those of mocap bodies; others return to their default poses.
        """

    def set_where(self, mask: Tensor, qpos: Tensor, qvel: Tensor, poses: Poses | None = None) -> None:
        """Like :meth:`set`, for envs where ``mask`` ``[num_envs]`` is true; on a GPU it does not synchronise."""
        env_ids = torch.nonzero(mask).reshape(-1)
        rows = {name: pose[env_ids] for name, pose in (poses or {}).items()}
        self.set(env_ids, qpos[env_ids], qvel[env_ids], rows)

    def mocap_id(self, body: str) -> int:
        """Return the index of a mocap body in ``mocap_pos`` and ``mocap_quat``."""
        index = int(self.model.body(body).mocapid[0])
        if index < 0:
            raise SimulationError(f"the body {body!r} is no mocap body, so that a reset cannot place it")
        return index

    @abstractmethod
    def state(self) -> Tensor:
        """Return a copy of the full simulation state, ``[num_envs, nstate]``."""

    def state_rows(self, env_ids: Tensor) -> Tensor:
        """Return these rows of :meth:`state`, ``[n, nstate]``."""
        return self.state().index_select(0, env_ids)

    @abstractmethod
    def set_state(self, env_ids: Tensor, state: Tensor) -> None:
        """Restore rows of :meth:`state`."""

    def snapshot(self, env_ids: Tensor | None = None) -> Tensor:
        """Return a float32 copy of positions and velocities, ``[n, nq + nv]``, of these envs (default: all)."""
        parts = (self.qpos, self.qvel) if env_ids is None else (self.qpos[env_ids], self.qvel[env_ids])
        return torch.cat(parts, dim=1).to(torch.float32)

    @property
    @abstractmethod
    def sensordata(self) -> Tensor:
        """Sensor values ``[num_envs, nsensordata]`` of the current state, computed on access."""

    @abstractmethod
    def model_field(self, name: str) -> Tensor:
        """Return a live, writable tensor ``[num_envs, ...]`` of a model field, such as ``geom_friction``."""

    @abstractmethod
    def applied_forces(self) -> Tensor:
        """Return the live external forces and torques on bodies, ``[num_envs, nbody, 6]``; write them before a step."""

    @abstractmethod
    def refresh_model(self, env_ids: Tensor) -> None:
        """Recompute derived constants of the model after writing fields in ``DERIVING`` of these envs."""

    @abstractmethod
    def load(self, data: mujoco.MjData, env: int) -> None:
        """Copy the state of one env into an ``MjData``, for rendering or any MuJoCo function."""

    def open_cameras(self, cfgs: Sequence[CameraCfg]) -> RenderAll | None:
        """Return a batched renderer of these cameras, or ``None`` if envs must be rendered one by one."""
        return None

    def close(self) -> None:  # noqa: B027 - a backend may hold nothing
        """Release threads and memory; may be called more than once."""
