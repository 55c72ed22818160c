"""Initial postures: from the config, from a keyframe, or one with the tool pointing down.

The latter is found by damped least squares from many starts: in front of the base, above the table, away from joint
limits and singularities.
"""

from collections.abc import Sequence

import mujoco
import numpy as np

from embodichain.envs.env_cfg import ArmCfg
from embodichain.envs.robot_model import HINGE, check_start, site_frame
from embodichain.envs.robots import ArmParts
from embodichain.errors import ConfigError

_ABOVE_TABLE, _HIGH = 0.25, 0.6  # metres: minimum height of the target, and height above which joints score no better
_PLACES = ((0.6, 0.35), (0.5, 0.35), (0.5, 0.25), (0.4, 0.3), (0.3, 0.3))  # out and up, as fractions of the arm's reach
_AGILE, _LEVER = 0.08, 0.3  # minimum singular value in metres per radian; metres per radian of the tool's own rotation
_SEARCHES, _STEPS = 24, 150  # random starts, and iterations per start


def base_pose(cfg: ArmCfg) -> tuple[np.ndarray, np.ndarray]:
    """Return the pose of a robot's base: position and quaternion."""
    pos = np.array(cfg.pos if cfg.pos is not None else (0.0, 0.0, 0.0))
    if cfg.quat is not None:
        quat = np.array(cfg.quat) / np.linalg.norm(cfg.quat)
    else:
        half = 0.5 * (cfg.yaw or 0.0)
        quat = np.array([np.cos(half), 0.0, 0.0, np.sin(half)])
    return pos, quat


def find_start(model: mujoco.MjModel, cfg: ArmCfg, key: str, parts: ArmParts, home: np.ndarray | None) -> None:
    """Find the initial joint positions; ``home`` are those of a keyframe."""
    data = mujoco.MjData(model)
    if home is not None:
        data.qpos[:] = home
    count, fingers = len(parts.joints), len(parts.fingers)
    bounds = list(zip(parts.lower, parts.upper, strict=True))
    if cfg.init_qpos:
        if len(cfg.init_qpos) not in (count, count + fingers):
            raise ConfigError(
                f"{key}.init_qpos: expected {count} joints and {fingers} fingers, got {len(cfg.init_qpos)} numbers"
            )
        parts.init, parts.init_from = [float(q) for q in cfg.init_qpos[:count]], "init_qpos"
        parts.init_fingers = [float(q) for q in cfg.init_qpos[count:]]
        check_start(f"{key}.init_qpos", parts.joints, parts.init, bounds)
        if parts.init_fingers:
            limited = {
                name: model.joint(name).range for name in parts.fingers if model.jnt_limited[model.joint(name).id]
            }
            ends = [cfg.limits.get(name, limited.get(name, (-np.inf, np.inf))) for name in parts.fingers]
            check_start(f"{key}.init_qpos", parts.fingers, parts.init_fingers, ends)
        return
    addresses = [int(model.joint(name).qposadr[0]) for name in parts.joints]
    if home is not None and cfg.init_tool is None:
        parts.init, parts.init_from = [float(home[a]) for a in addresses], "a keyframe of the model"
        check_start(f"{key}.init_qpos is left to a keyframe of the model, which", parts.joints, parts.init, bounds)
        return
    if parts.site is None or count < 2:
        reference = np.clip(model.qpos0[addresses], parts.lower, parts.upper)
        parts.init, parts.init_from = reference.tolist(), "the model's own posture"
        return
    pos, quat = base_pose(cfg)
    found = find_posture(model, data, parts, cfg.init_tool, pos, quat)
    if found is not None:
        parts.init, parts.init_from = [round(float(q), 4) for q in found], "a search: the tool points down"
        return
    if cfg.init_tool is not None:
        raise ConfigError(f"{key}.init_tool: the arm does not reach {list(cfg.init_tool)} with the tool pointing down")
    middle = 0.5 * (np.array(parts.lower) + np.array(parts.upper))
    parts.init, parts.init_from = [round(float(q), 4) for q in middle], "the middle of the limits"


def find_posture(
    model: mujoco.MjModel,
    data: mujoco.MjData,
    parts: ArmParts,
    target: Sequence[float] | None,
    pos: np.ndarray,
    quat: np.ndarray,
) -> np.ndarray | None:
    """Return joint positions with the tool at a world position, pointing down, or ``None``.

    The default target is in front of the first hinge and above the table, as far out as possible.
    """
    rotation = np.empty(9)
    mujoco.mju_quat2Mat(rotation, quat)
    base = rotation.reshape(3, 3)
    search = _Search(model, data, parts, base.T @ np.array([0.0, 0.0, -1.0]))
    if target is not None:
        return search.run(base.T @ (np.array(target) - pos))
    foot, reach = search.reach()
    for min_agility in (_AGILE, 0.0):
        for out, up in _PLACES:
            world = pos + base @ (foot + reach * np.array([out, 0.0, up]))
            world[2] = max(world[2], _ABOVE_TABLE)  # for a base below the table
            found = search.run(base.T @ (world - pos), min_agility)
            if found is not None:
                return found
    return None


class _Search:
    """Searches joint positions by damped least squares, from the middle of the limits and from random starts."""

    def __init__(self, model: mujoco.MjModel, data: mujoco.MjData, parts: ArmParts, down: np.ndarray) -> None:
        self.model, self.data, self.parts, self.down = model, data, parts, down
        self.lower, self.upper = np.array(parts.lower), np.array(parts.upper)
        self.ids = [model.joint(name).id for name in parts.joints]
        self.addresses = [int(model.jnt_qposadr[j]) for j in self.ids]
        self.dofs = [int(model.jnt_dofadr[j]) for j in self.ids]
        narrow = np.clip(self.lower, -np.pi, None), np.clip(self.upper, None, np.pi)
        drawn = np.random.default_rng(0).uniform(*narrow, size=(_SEARCHES, len(self.ids)))
        self.starts = [0.5 * (narrow[0] + narrow[1]), *drawn]

    def reach(self) -> tuple[np.ndarray, float]:
        """Return the base point of the first hinge, and the tool's maximum distance from it."""
        first = next((j for j in self.ids if int(self.model.jnt_type[j]) == HINGE), self.ids[0])
        far = max(float(np.linalg.norm(self._tool(start)[0] - self.data.xanchor[first])) for start in self.starts)
        self._tool(self.starts[0])
        return self.data.xanchor[first] * np.array([1.0, 1.0, 0.0]), far

    def run(self, goal: np.ndarray, min_agility: float = 0.0) -> np.ndarray | None:
        """Return the best posture found for a point in the frame of the base.

        ``min_agility`` is the minimum singular value of the Jacobian, in metres per radian.
        """
        best: tuple[float, np.ndarray] | None = None
        for start in self.starts:
            qpos = self._descend(start.copy(), goal)
            straight = np.append(qpos[:-1], self.starts[0][-1])  # the last joint often only rotates the hand
            qpos = straight if self._is_there(straight, goal) else qpos
            if not self._is_there(qpos, goal):
                continue
            if min_agility and self._agility(qpos) < min_agility:
                continue
            score = self._score(qpos)
            if best is None or score < best[0] - 1e-6:
                best = score, qpos
        return None if best is None else best[1]

    def _is_there(self, qpos: np.ndarray, goal: np.ndarray) -> bool:
        position, frame, _ = self._tool(qpos)
        return bool(np.linalg.norm(goal - position) < 0.005 and frame @ self.parts.axis @ self.down > 0.999)

    def _descend(self, qpos: np.ndarray, goal: np.ndarray) -> np.ndarray:
        jacobian = np.zeros((6, self.model.nv))
        for _ in range(_STEPS):
            position, frame, body = self._tool(qpos)
            points = frame @ self.parts.axis
            error = np.concatenate((goal - position, np.cross(points, self.down)))
            if np.abs(error).max() < 1e-4 and points @ self.down > 0:
                break
            if points @ self.down < 0:  # upside down, where the cross product vanishes
                error[3:] *= 2.0 / max(0.1, float(np.linalg.norm(error[3:])))
            mujoco.mj_jac(self.model, self.data, jacobian[:3], jacobian[3:], position, body)
            part = jacobian[:, self.dofs]
            step = part.T @ np.linalg.solve(part @ part.T + 0.003 * np.eye(6), np.clip(error, -0.2, 0.2))
            before, qpos = qpos, np.clip(qpos + step, self.lower, self.upper)
            if np.abs(qpos - before).max() < 1e-4:  # converged, possibly at a limit
                break
        return qpos

    def _tool(self, qpos: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        self.data.qpos[self.addresses] = qpos
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_comPos(self.model, self.data)
        return site_frame(self.model, self.data, self.parts)

    def _agility(self, qpos: np.ndarray) -> float:
        """Return the smallest singular value of the tool's Jacobian, which vanishes at singularities."""
        position, _, body = self._tool(qpos)
        jacobian = np.zeros((6, self.model.nv))
        mujoco.mj_jac(self.model, self.data, jacobian[:3], jacobian[3:], position, body)
        jacobian[3:] *= _LEVER
        return float(np.linalg.svd(jacobian[:, self.dofs], compute_uv=False)[-1])

    def _score(self, qpos: np.ndarray) -> float:
        """Return the cost of a posture: near limits, far from the middle of the ranges, or low above the table."""
        margin = float(np.min(np.minimum(qpos - self.lower, self.upper - qpos) / (self.upper - self.lower)))
        height = float(np.min(-(self.data.xanchor[self.ids[2:] or self.ids] @ self.down)))
        deviation = float((np.abs(qpos - self.starts[0]) / (self.upper - self.lower)).sum())
        return deviation - 20.0 * min(margin, 0.1) - 5.0 * min(height, _HIGH)
