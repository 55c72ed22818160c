"""Batched physics: the state of many copies of one MuJoCo model as tensors, and a way to advance it."""

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
"""Of what is rendered: fast, or good to look at."""
Images: TypeAlias = dict[str, dict[str, Tensor]]
"""What cameras observe, ``[n, H, W, channels]``, by group and by the camera's name."""
RenderAll: TypeAlias = Callable[[Mapping[str, Tensor], Tensor | None], Images]
"""Renders the cameras of all envs, with mocap bodies at these positions; with a mask ``[num_envs]`` of those that are
needed, the others may have images of nothing."""

Poses: TypeAlias = Mapping[str, Tensor]
"""Position and unit quaternion ``[n, 7]`` of mocap bodies, by name."""


DERIVING = frozenset(
    (
        *("body_mass", "body_inertia", "body_ipos", "body_iquat", "body_pos", "body_quat", "qpos0", "dof_armature"),
        *("jnt_pos", "jnt_axis", "geom_pos", "geom_quat", "geom_size"),
        *("actuator_gear", "site_pos", "site_quat"),
    )
)
"""Fields of a model from which constants of it follow: ``refresh_model`` after writing them."""
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
"""Fields of a model that cameras alone notice."""


class Physics(ABC):
    """``num_envs`` copies of one model, with live tensors ``qpos``, ``qvel`` and ``ctrl`` ``[num_envs, ...]``.

    Writing ``ctrl`` drives the robot. The next ``step`` changes them in place, so copy what is to be kept.
    ``outputs`` are the fields of ``MjData`` that the constructor was asked for, such as ``xpos``. After a step they lag
    by a substep, as they do after ``mj_step``; after ``set`` they are current. They are part of ``state``.
    """

    model: mujoco.MjModel
    num_envs: int
    device: torch.device
    qpos: Tensor
    qvel: Tensor
    ctrl: Tensor
    mocap_pos: Tensor
    """Positions of mocap bodies, live, ``[num_envs, nmocap, 3]``; they stand where a reset put them."""
    mocap_quat: Tensor
    """Their orientations, ``[num_envs, nmocap, 4]``."""
    outputs: dict[str, Tensor]
    diverged: Tensor | None = None
    """Which envs ``[num_envs]`` became unstable in the last ``step`` and were reset by MuJoCo; ``None``: none did."""

    @abstractmethod
    def step(self, count: int) -> None:
        """Advance all envs by ``count`` substeps with ``ctrl`` held; :meth:`settle` completes it."""

    def settle(self) -> None:  # noqa: B027 - most backends do all of it in ``step``
        """Find out what became unstable in the last ``step``; a call of its own, so that a CUDA graph can hold it."""

    @abstractmethod
    def set(self, env_ids: Tensor, qpos: Tensor, qvel: Tensor, poses: Poses | None = None) -> None:
        """Reset these envs to the given positions and velocities; nothing is left of their past.

        ``poses`` are of mocap bodies; those that are not named go where the model has them.
        """

    def set_where(self, mask: Tensor, qpos: Tensor, qvel: Tensor, poses: Poses | None = None) -> None:
        """Do what :meth:`set` does where ``mask`` ``[num_envs]`` holds; on a GPU without waiting for the device."""
        env_ids = torch.nonzero(mask).reshape(-1)
        rows = {name: pose[env_ids] for name, pose in (poses or {}).items()}
        self.set(env_ids, qpos[env_ids], qvel[env_ids], rows)

    def mocap_id(self, body: str) -> int:
        """Return where a mocap body stands in ``mocap_pos`` and ``mocap_quat``."""
        index = int(self.model.body(body).mocapid[0])
        if index < 0:
            raise SimulationError(f"the body {body!r} is no mocap body, so that a reset cannot place it")
        return index

    @abstractmethod
    def state(self) -> Tensor:
        """Return a copy of the whole simulation state, ``[num_envs, nstate]``."""

    @abstractmethod
    def set_state(self, env_ids: Tensor, state: Tensor) -> None:
        """Restore rows of :meth:`state`."""

    def snapshot(self, env_ids: Tensor | None = None) -> Tensor:
        """Return positions and velocities side by side, a float32 copy ``[n, nq + nv]``, of these envs or of all."""
        parts = (self.qpos, self.qvel) if env_ids is None else (self.qpos[env_ids], self.qvel[env_ids])
        return torch.cat(parts, dim=1).to(torch.float32)

    @property
    @abstractmethod
    def sensordata(self) -> Tensor:
        """Sensor values ``[num_envs, nsensordata]`` of the state as it is now (computed when asked for)."""

    @abstractmethod
    def model_field(self, name: str) -> Tensor:
        """Return per-env values ``[num_envs, ...]`` of a model field, such as ``geom_friction``, to be written to."""

    @abstractmethod
    def applied_forces(self) -> Tensor:
        """Return forces and torques on the bodies, ``[num_envs, nbody, 6]``, to be written to before a step."""

    @abstractmethod
    def refresh_model(self, env_ids: Tensor) -> None:
        """Bring constants derived from masses and sizes up to date after writes to model fields of these envs."""

    @abstractmethod
    def load(self, data: mujoco.MjData, env: int) -> None:
        """Copy the state of one env into an ``MjData`` (for rendering, or for any function of MuJoCo)."""

    def open_cameras(self, cfgs: Sequence[CameraCfg]) -> RenderAll | None:
        """Return a renderer of these cameras; ``None`` if this backend has none, and envs are rendered one by one."""
        return None

    def close(self) -> None:  # noqa: B027 - a backend may hold nothing
        """Release threads and memory; calling it twice is fine."""
