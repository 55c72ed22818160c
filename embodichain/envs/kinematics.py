"""Batched kinematics of a serial arm in torch: forward kinematics, Jacobian, differential inverse kinematics.

Results are bit-identical for any ``num_envs``: short sums and ``torch.bmm`` of small matrices treat rows independently.
"""

from collections.abc import Sequence
from typing import TypeAlias

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.errors import AssetError

Links: TypeAlias = tuple[Tensor, ...]
"""The constant part of each link's transform, and the factors of the sine and cosine, ``[num_joints, 4, 4]`` each.

For a sliding joint, the second is the factor of the position and the third is zero.
"""
_ROTATION_WEIGHT = 0.1  # metres per radian; arms with fewer than six joints give up orientation first
_NULL_DAMPING = 0.01  # damping of the null space, where float32 allows no less
_REST_GAIN = 0.1  # fraction of the way to the rest posture per step, for redundant arms


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last dimension."""
    return (a * b).sum(dim=-1)


def length(a: Tensor) -> Tensor:
    """Euclidean norm over the last dimension."""
    return torch.linalg.vector_norm(a, dim=-1)


def mean_square(a: Tensor) -> Tensor:
    """Mean square over the last dimension, in a third of the time of ``torch.mean`` for batches."""
    return a.square().sum(dim=-1) / a.shape[-1]


def rotation_error(target: Tensor, current: Tensor) -> Tensor:
    """Return ``sin(angle) * axis`` ``[n, 3]`` (world axes) of the rotation from ``current`` to ``target``."""
    crossed = torch.linalg.cross(current, target.expand_as(current), dim=-2)
    return 0.5 * (crossed[..., 0] + crossed[..., 1] + crossed[..., 2])


class SerialChain:
    """The joints from the world to a site: forward kinematics and Jacobian for batches of joint positions.

    ``rest`` is the posture towards which :meth:`inverse_step` moves an arm with more than six joints.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        site: str,
        joints: Sequence[str],
        device: torch.device | str = "cpu",
        rest: Sequence[float] | None = None,
    ) -> None:
        site_id = mujoco.mj_name2id(model, int(mujoco.mjtObj.mjOBJ_SITE), site)
        if site_id < 0:
            raise AssetError(
                f"the model has no site {site!r}; its sites: {[model.site(i).name for i in range(model.nsite)]}"
            )
        fixed, axes, tip, slides = _segments(model, int(model.site_bodyid[site_id]), list(joints))
        tip = tip @ _transform(model.site_pos[site_id], model.site_quat[site_id])
        self.num_joints = len(joints)
        skew = np.zeros((self.num_joints, 4, 4))
        skew[:, :3, :3] = np.cross(np.eye(3)[None], axes[:, None, :])
        # Rodrigues: L(q) = F (I + sin q K + (1 - cos q) K^2) = (F + F K^2) + sin q F K - cos q F K^2
        parts = np.stack((fixed + fixed @ skew @ skew, fixed @ skew, -fixed @ skew @ skew))
        if slides.any():  # L(q) = F (I + q A), with the axis as the last column of A
            along = np.zeros((self.num_joints, 4, 4))
            along[:, :3, 3] = axes
            parts[:, slides] = np.stack((fixed, fixed @ along, 0.0 * fixed))[:, slides]
        with_tip = parts.copy()
        with_tip[:, -1] = parts[:, -1] @ tip
        as_tensor = lambda x: torch.tensor(np.asarray(x), dtype=torch.float32, device=device)  # noqa: E731
        self._links, self._links_with_tip = as_tensor(parts).unbind(0), as_tensor(with_tip).unbind(0)
        self._axes = as_tensor(axes)
        self._tip = as_tensor(tip[:, 3:])
        reference = np.array([model.qpos0[model.joint(name).qposadr[0]] for name in joints])
        self._reference = as_tensor(reference) if reference.any() else None
        self._slides = torch.tensor(slides, device=device) if slides.any() else None
        self._rest = as_tensor(rest) if rest is not None and self.num_joints > 6 else None
        weights = [1.0] * 3 + [_ROTATION_WEIGHT] * 3
        self._weights = as_tensor(weights) if self.num_joints < 6 else None

    def position(self, qpos: Tensor) -> Tensor:
        """Return the site's position ``[n, 3]`` in the world, faster than ``pose``."""
        *links, last = self._transforms(self._links_with_tip, qpos)
        point = last[:, :, 3:]
        for link in reversed(links):
            point = torch.bmm(link, point)
        return point[:, :3, 0]

    def pose(self, qpos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the site's position ``[n, 3]`` and rotation matrix ``[n, 3, 3]`` in the world."""
        tip = self._walk(self._links_with_tip, qpos)[-1]
        return tip[:, :3, 3], tip[:, :3, :3]

    def jacobian(self, qpos: Tensor) -> Tensor:
        """Return the site's Jacobian ``[n, 6, num_joints]``: three linear rows, then three angular."""
        frames = self._walk(self._links, qpos)
        tip = torch.bmm(frames[-1], self._tip.expand(qpos.shape[0], 4, 1))
        joints = torch.stack(frames, dim=1)  # [n, num_joints, 4, 4]
        rotation = joints[..., :3, :3]
        axis = self._axes.unsqueeze(-1)
        axes = rotation[..., 0] * axis[:, 0] + rotation[..., 1] * axis[:, 1] + rotation[..., 2] * axis[:, 2]
        arm = tip[:, None, :3, 0] - joints[..., :3, 3]
        linear, angular = torch.linalg.cross(axes, arm), axes
        if self._slides is not None:
            slides = self._slides.unsqueeze(-1)
            linear, angular = torch.where(slides, axes, linear), angular.masked_fill(slides, 0.0)
        return torch.cat((linear, angular), dim=-1).transpose(1, 2)

    def inverse_step(self, qpos: Tensor, twist: Tensor, damping: float = 0.05, rest: Tensor | None = None) -> Tensor:
        """Return ``dq = J^T (J J^T + damping^2 I)^-1 twist`` ``[n, num_joints]`` for a site twist ``[n, 6]``.

        Redundant joints move towards the ``rest`` posture (default: the chain's) in the null space. With fewer than six
        joints, position takes precedence over orientation.
        """
        jacobian = self.jacobian(qpos)
        if self._weights is not None:
            jacobian, twist = jacobian * self._weights.unsqueeze(-1), twist * self._weights
        gram = torch.bmm(jacobian, jacobian.transpose(1, 2))
        one = torch.eye(6, device=qpos.device)
        step = _times(jacobian.transpose(1, 2), solve_spd(gram + damping**2 * one, twist))
        rest = self._rest if rest is None else rest
        if rest is None or self.num_joints <= 6:
            return step
        # dq += (I - J^# J) z, z towards the rest posture. With the damping of the twist, z would hold the tool off.
        spare = _REST_GAIN * (rest - qpos)
        moved = solve_spd(gram + _NULL_DAMPING**2 * one, _times(jacobian, spare))
        return step + spare - _times(jacobian.transpose(1, 2), moved)

    def _transforms(self, links: Links, qpos: Tensor) -> tuple[Tensor, ...]:
        """Return the transform ``[n, 4, 4]`` of every link, for joint positions ``[n, num_joints]``."""
        constant, sine, cosine = links
        if self._reference is not None:
            qpos = qpos - self._reference
        angle = qpos.view(*qpos.shape, 1, 1)
        first = torch.sin(angle)
        if self._slides is not None:
            first = torch.where(self._slides.view(-1, 1, 1), angle, first)
        return torch.addcmul(constant, first, sine).addcmul_(torch.cos(angle), cosine).unbind(1)

    def _walk(self, links: Links, qpos: Tensor) -> list[Tensor]:
        """Return the frames ``[n, 4, 4]`` at the end of every link, in the world."""
        first, *others = self._transforms(links, qpos)
        frames = [first]
        for link in others:
            frames.append(torch.bmm(frames[-1], link))
        return frames


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Multiply matrices ``[n, k, m]`` with vectors ``[n, m]``."""
    return torch.bmm(matrix, vector.unsqueeze(-1)).squeeze(-1)


def solve_spd(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve ``matrix @ x = right`` for small symmetric positive definite matrices ``[n, k, k]``, right ``[n, k]``.

    Batched Gaussian elimination: LAPACK is called once per row, which is slower at these sizes.
    """
    size = right.shape[-1]
    a = torch.cat((matrix, right.unsqueeze(-1)), dim=-1).permute(1, 2, 0).contiguous()  # [k, k + 1, n]
    for i in range(size):
        row = a[i] / a[i, i]
        a = a - a[:, i : i + 1] * row
        a[i] = row
    return a[:, size].transpose(0, 1)


def _segments(model: mujoco.MjModel, body: int, joints: list[str]) -> tuple[np.ndarray, ...]:
    """Return the fixed transform before each joint, the joint axes, the fixed transform after the last joint, and which
    joints slide."""
    path = []
    while body:
        path.append(body)
        body = int(model.body_parentid[body])
    fixed, axes, slides, found, frame = [], [], [], [], np.eye(4)
    for body in reversed(path):
        frame = frame @ _transform(model.body_pos[body], model.body_quat[body])
        for joint in range(int(model.body_jntadr[body]), int(model.body_jntadr[body]) + int(model.body_jntnum[body])):
            name, kind = model.joint(joint).name, int(model.jnt_type[joint])
            if kind not in (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)):
                raise AssetError(f"joint {name!r}: a serial chain needs hinges and slides, and this one is neither")
            fixed.append(frame @ _shift(model.jnt_pos[joint]))
            axes.append(model.jnt_axis[joint].copy())
            slides.append(kind == int(mujoco.mjtJoint.mjJNT_SLIDE))
            found.append(name)
            frame = _shift(-model.jnt_pos[joint])
    if found != joints:
        raise AssetError(f"expected the joints {joints} between the world and the tool, found {found}")
    return np.stack(fixed), np.stack(axes), frame, np.array(slides)


def _shift(by: np.ndarray) -> np.ndarray:
    out = np.eye(4)
    out[:3, 3] = by
    return out


def _transform(pos: np.ndarray, quat: np.ndarray) -> np.ndarray:
    """Return the homogeneous matrix ``[4, 4]`` of a position and a unit quaternion."""
    rotation, out = np.empty(9), np.eye(4)
    mujoco.mju_quat2Mat(rotation, quat)
    out[:3, :3], out[:3, 3] = rotation.reshape(3, 3), pos
    return out
