"""Batched kinematics of a serial arm in torch: forward kinematics, Jacobian, differential inverse kinematics.

Only element-wise operations on columns are used (no matmul, no reductions), so that a row's result does not depend on
how many rows are computed with it: env i sees the same bits whatever ``num_envs`` is.
"""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.errors import AssetError


def cross(a: Tensor, b: Tensor) -> Tensor:
    """Cross product over the last dimension."""
    return torch.linalg.cross(a, b)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over a last dimension of 2 or 3, added in a fixed order."""
    total = a[..., 0] * b[..., 0] + a[..., 1] * b[..., 1]
    return total + a[..., 2] * b[..., 2] if a.shape[-1] == 3 else total


def length(a: Tensor) -> Tensor:
    """Euclidean length over a last dimension of 2 or 3."""
    return torch.sqrt(dot(a, a))


def quat_multiply(a: Tensor, b: Tensor) -> Tensor:
    """Hamilton product of quaternions ``[..., 4]``, scalar first."""
    aw, ax, ay, az = a.unbind(-1)
    bw, bx, by, bz = b.unbind(-1)
    return torch.stack(
        (
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ),
        dim=-1,
    )


def quat_rotate(q: Tensor, v: Tensor) -> Tensor:
    """Rotate vectors ``[..., 3]`` by unit quaternions ``[..., 4]``."""
    w, u = q[..., :1], q[..., 1:]
    t = 2.0 * cross(u, v.expand_as(u) if v.dim() < u.dim() else v)
    return v + w * t + cross(u, t)


def quat_error(target: Tensor, current: Tensor) -> Tensor:
    """Return the rotation vector ``[..., 3]`` in world axes that turns ``current`` into ``target``."""
    conjugate = current * current.new_tensor([1.0, -1.0, -1.0, -1.0])
    q = quat_multiply(target, conjugate)
    q = torch.where(q[..., :1] < 0, -q, q)  # the shorter way round
    axis_length = length(q[..., 1:]).unsqueeze(-1)
    angle = 2.0 * torch.atan2(axis_length, q[..., :1])
    return q[..., 1:] * (angle / axis_length.clamp_min(1e-9))


class SerialChain:
    """The joints from the world to one site, all hinges: ``pose`` and ``jacobian`` of the site for batches of joints."""

    def __init__(self, model: mujoco.MjModel, site: str, joints: Sequence[str], device: torch.device | str = "cpu") -> None:
        site_id = mujoco.mj_name2id(model, int(mujoco.mjtObj.mjOBJ_SITE), site)
        if site_id < 0:
            raise AssetError(f"the model has no site {site!r}; its sites: {[model.site(i).name for i in range(model.nsite)]}")
        self.num_joints = len(joints)
        segments = _segments(model, int(model.site_bodyid[site_id]), list(joints))
        self._offset = [torch.tensor(p, dtype=torch.float32, device=device) for p, _, _ in segments]
        self._turn = [torch.tensor(q, dtype=torch.float32, device=device) for _, q, _ in segments]
        self._axis = [torch.tensor(a, dtype=torch.float32, device=device) for _, _, a in segments]
        self._tip_offset = torch.tensor(model.site_pos[site_id], dtype=torch.float32, device=device)
        self._tip_turn = torch.tensor(model.site_quat[site_id], dtype=torch.float32, device=device)

    def pose(self, qpos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the site's position ``[n, 3]`` and orientation ``[n, 4]`` (quaternion) in the world."""
        pos, quat, _, _ = self._walk(qpos)
        return pos, quat

    def pose_and_jacobian(self, qpos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return position ``[n, 3]``, orientation ``[n, 4]`` and Jacobian ``[n, 6, num_joints]`` (linear, angular)."""
        pos, quat, anchors, axes = self._walk(qpos)
        columns = [torch.cat((cross(a, pos - p), a), dim=-1) for p, a in zip(anchors, axes, strict=True)]
        return pos, quat, torch.stack(columns, dim=-1)

    def inverse_step(self, qpos: Tensor, twist: Tensor, damping: float = 0.05) -> Tensor:
        """Return joint displacements ``[n, num_joints]`` that move the site by ``twist`` ``[n, 6]`` (damped least squares)."""
        _, _, jacobian = self.pose_and_jacobian(qpos)
        transposed = jacobian.transpose(1, 2)
        gram = transposed @ jacobian + damping**2 * torch.eye(self.num_joints, device=qpos.device, dtype=qpos.dtype)
        # dq = (J^T J + d^2 I)^-1 J^T x
        return torch.linalg.solve_ex(gram, transposed @ twist.unsqueeze(-1))[0].squeeze(-1)

    def _walk(self, qpos: Tensor) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        half = 0.5 * qpos
        sines, cosines = torch.sin(half).unsqueeze(-1), torch.cos(half).unsqueeze(-1)
        pos = qpos.new_zeros(qpos.shape[0], 3)
        quat = qpos.new_tensor([1.0, 0.0, 0.0, 0.0]).expand(qpos.shape[0], 4)
        anchors, axes = [], []
        for i in range(self.num_joints):
            pos = pos + quat_rotate(quat, self._offset[i])
            quat = quat_multiply(quat, self._turn[i])
            anchors.append(pos)
            axes.append(quat_rotate(quat, self._axis[i]))
            quat = quat_multiply(quat, torch.cat((cosines[:, i], sines[:, i] * self._axis[i]), dim=-1))
        tip = pos + quat_rotate(quat, self._tip_offset)
        return tip, quat_multiply(quat, self._tip_turn), anchors, axes


def _segments(model: mujoco.MjModel, body: int, joints: list[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return per joint its offset and turn from the joint before, and its axis; fixed bodies are folded in."""
    path = []
    while body:
        path.append(body)
        body = int(model.body_parentid[body])
    segments, pos, quat, found = [], np.zeros(3), np.array([1.0, 0.0, 0.0, 0.0]), []
    for body in reversed(path):
        pos, quat = _compose(pos, quat, model.body_pos[body], model.body_quat[body])
        for joint in range(int(model.body_jntadr[body]), int(model.body_jntadr[body]) + int(model.body_jntnum[body])):
            name = model.joint(joint).name
            if int(model.jnt_type[joint]) != int(mujoco.mjtJoint.mjJNT_HINGE) or np.any(model.jnt_pos[joint]):
                raise AssetError(f"joint {name!r}: a serial chain needs hinges at their body's origin")
            segments.append((pos, quat, model.jnt_axis[joint].copy()))
            found.append(name)
            pos, quat = np.zeros(3), np.array([1.0, 0.0, 0.0, 0.0])
    if found != joints:
        raise AssetError(f"expected the joints {joints} between the world and the tool, found {found}")
    return segments


def _compose(pos: np.ndarray, quat: np.ndarray, by: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    moved, turned = np.empty(3), np.empty(4)
    mujoco.mju_rotVecQuat(moved, by, quat)
    mujoco.mju_mulQuat(turned, quat, turn)
    return pos + moved, turned
