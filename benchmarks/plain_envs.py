"""``PushCubeRL`` and ``CartPoleRL`` as one would write them for Gymnasium: one env, numpy, ``mj_step``.

Same model, same control, same observation, same reward and same starts as the package's own tasks; ``sim.py`` compares
both step by step before it times them. With ``flat=True`` the observation is one vector and the env counts its own
steps, which is the cheapest an env can be for Gymnasium's vector environments.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np

SUBSTEPS = 10
Result = tuple[Any, float, bool, bool, dict[str, Any]]


class PlainEnv(gym.Env[Any, np.ndarray]):
    """What both tasks share."""

    layout: dict[str, dict[str, int]]
    """Names and sizes of what is observed."""
    limit: int
    """Steps of an episode."""

    def __init__(self, model: mujoco.MjModel, home: np.ndarray, flat: bool = False) -> None:
        self.model, self.data, self.home, self.flat = model, mujoco.MjData(model), home, flat
        self.steps = 0
        sizes = [size for group in self.layout.values() for size in group.values()]
        nested = {
            group: gym.spaces.Dict({name: _box(size) for name, size in names.items()})
            for group, names in self.layout.items()
        }
        self.observation_space = _box(sum(sizes)) if flat else gym.spaces.Dict(nested)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (int(model.nu),), np.float32)

    def parts(self) -> tuple[np.ndarray, ...]:
        """Return what is observed, in the order of the layout."""
        raise NotImplementedError

    def observe(self) -> Any:
        """Return the observation."""
        if self.flat:
            return np.concatenate(self.parts(), dtype=np.float32)
        parts = iter(self.parts())
        return {g: {name: next(parts).astype(np.float32) for name in names} for g, names in self.layout.items()}


class PlainPushCube(PlainEnv):
    """Push a cube to a goal."""

    layout = {
        "robot": {"qpos": 6, "qvel": 6, "ee_pos": 3},
        "object": {"pos": 3, "quat": 4, "linvel": 3, "offset": 3},
        "goal": {"pos": 2, "offset": 2},
    }
    limit = 100

    def __init__(self, model: mujoco.MjModel, home: np.ndarray, flat: bool = False) -> None:
        super().__init__(model, home, flat)
        self.lower, self.upper = (np.array([model.jnt_range[1 + j, side] for j in range(6)]) for side in (0, 1))
        self.tool = self.data.site("robot/tool/tool").xpos
        self.goal = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
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

    def step(self, action: np.ndarray) -> Result:
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
        return self.observe(), reward, success, self.flat and self.steps >= self.limit, {}

    def parts(self) -> tuple[np.ndarray, ...]:
        qpos, qvel, tool, goal = self.data.qpos, self.data.qvel, self.tool, self.goal
        return (
            qpos[7:],
            qvel[6:],
            tool,
            qpos[:3],
            qpos[3:7],
            qvel[:3],
            qpos[:3] - tool,
            goal,
            goal - qpos[:2],
        )


class PlainCartPole(PlainEnv):
    """Balance a pole on a cart."""

    layout = {"robot": {"qpos": 2, "qvel": 2}}
    limit = 500

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self.np_random.uniform(-0.05, 0.05, 2)
        self.data.qvel[:] = self.np_random.uniform(-0.05, 0.05, 2)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: np.ndarray) -> Result:
        force, data = min(max(float(action[0]), -1.0), 1.0), self.data
        data.ctrl[0] = force
        mujoco.mj_step(self.model, data, SUBSTEPS)
        self.steps += 1
        position, angle = data.qpos
        reward = 1.0 - 0.02 * position**2 - 0.01 * force**2
        fallen = bool(abs(angle) > math.radians(12.0) or abs(position) > 2.4)
        return self.observe(), float(reward), fallen, self.flat and self.steps >= self.limit, {}

    def parts(self) -> tuple[np.ndarray, ...]:
        return self.data.qpos, self.data.qvel


def _box(size: int) -> gym.spaces.Box:
    return gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)


PLAIN: dict[str, type[PlainEnv]] = {"PushCubeRL": PlainPushCube, "CartPoleRL": PlainCartPole}
