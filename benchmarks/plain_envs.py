"""``PushCubeRL`` and ``CartPoleRL`` as one would write them for Gymnasium: one env, numpy, ``mj_step``.

Same model, same control, same observation, same reward and same starts as the package's own tasks; ``sim.py`` compares
both step by step before it times them. The observation is one flat vector, which is the cheapest form for Gymnasium's
vector environments.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np

SUBSTEPS = 10


class PlainEnv(gym.Env[np.ndarray, np.ndarray]):
    """What both tasks share."""

    size: int
    limit: int

    def __init__(self, model: mujoco.MjModel, home: np.ndarray) -> None:
        self.model, self.data, self.home = model, mujoco.MjData(model), home
        self.steps = 0
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self.size,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (int(model.nu),), np.float32)


class PlainPushCube(PlainEnv):
    """Push a cube to a goal."""

    size, limit = 32, 100

    def __init__(self, model: mujoco.MjModel, home: np.ndarray) -> None:
        super().__init__(model, home)
        self.lower, self.upper = (np.array([model.jnt_range[1 + j, side] for j in range(6)]) for side in (0, 1))
        self.tool = self.data.site("robot/tool/tool").xpos
        self.goal = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        draw, data = self.np_random.uniform, self.data
        mujoco.mj_resetData(self.model, data)
        yaw = draw(-0.6, 0.6)
        data.qpos[:7] = draw(0.42, 0.5), draw(-0.12, 0.12), 0.025, math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)
        data.qpos[7:] = self.home + draw(-0.02, 0.02, 6)
        self.goal[:] = draw(0.6, 0.72), draw(-0.18, 0.18)
        self.steps = 0
        mujoco.mj_kinematics(self.model, data)
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        action, data = np.clip(action, -1.0, 1.0), self.data
        data.ctrl[:] = np.clip(data.qpos[7:] + 0.08 * action, self.lower, self.upper)
        mujoco.mj_step(self.model, data, SUBSTEPS)
        mujoco.mj_kinematics(self.model, data)  # the tool's place in the state just reached
        self.steps += 1
        cube, tool = data.qpos[:3], self.tool
        dx, dy = self.goal - cube[:2]
        distance = math.hypot(dx, dy)
        scale = 0.05 / max(distance, 1e-6)
        reach = math.sqrt(
            (cube[0] - scale * dx - tool[0]) ** 2 + (cube[1] - scale * dy - tool[1]) ** 2 + (0.03 - tool[2]) ** 2
        )
        success = distance < 0.04
        reward = -reach - 4.0 * distance - 0.01 * float(np.dot(action, action)) / 6 + 10.0 * success
        return self.observe(), reward, success, self.steps >= self.limit, {}

    def observe(self) -> np.ndarray:
        """Return joints, speeds, tool, cube and goal in the order of the package's observation."""
        qpos, qvel, tool, goal = self.data.qpos, self.data.qvel, self.tool, self.goal
        parts = (qpos[7:], qvel[6:], tool, qpos[:7], qvel[:3], qpos[:3] - tool, goal, goal - qpos[:2])
        return np.concatenate(parts, dtype=np.float32)


class PlainCartPole(PlainEnv):
    """Balance a pole on a cart."""

    size, limit = 4, 500

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self.np_random.uniform(-0.05, 0.05, 2)
        self.data.qvel[:] = self.np_random.uniform(-0.05, 0.05, 2)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        force, data = min(max(float(action[0]), -1.0), 1.0), self.data
        data.ctrl[0] = force
        mujoco.mj_step(self.model, data, SUBSTEPS)
        self.steps += 1
        position, angle = data.qpos
        reward = 1.0 - 0.02 * position**2 - 0.01 * force**2
        fallen = bool(abs(angle) > math.radians(12.0) or abs(position) > 2.4)
        return self.observe(), reward, fallen, self.steps >= self.limit, {}

    def observe(self) -> np.ndarray:
        """Return positions and speeds."""
        return np.concatenate((self.data.qpos, self.data.qvel), dtype=np.float32)


PLAIN: dict[str, type[PlainEnv]] = {"PushCubeRL": PlainPushCube, "CartPoleRL": PlainCartPole}
