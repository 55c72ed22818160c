"""What the tasks of a robot arm share: reading the arm, and moving its tool as an expert does."""

from __future__ import annotations

import torch
from torch import Tensor

from embodichain.envs.action_terms import RobotActionManager, chain_of
from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.kinematics import length, rotation_error
from embodichain.envs.physics import Physics
from embodichain.envs.robot import Robot
from embodichain.envs.task import Scene, Task, own

HALF_CUBE = 0.025
# Tool pointing straight down, its x axis along -y of the world.
_DOWN = torch.tensor([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
_MAX_TURN = 0.15  # rotation the expert asks for in one step, in radians
_GAIN = 2.0  # the servos reach part of a displacement in one step, so the expert asks for more


class ArmTask(Task):
    """A task of an arm with a tool; ``qpos`` and ``qvel`` of its scene are the robot's own."""

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        self.chain = chain_of(robot, cfg.id)
        self._down = _DOWN.to(physics.device)

    def read_arm(self, qpos: Tensor, qvel: Tensor) -> Scene:
        """Return the robot's joints and the place of its tool, for full states ``[n, nq]`` and ``[n, nv]``."""
        joints = qpos[:, self.robot.qpos]
        place = self.chain.position(joints[:, : self.robot.num_joints])
        return {"qpos": joints, "qvel": qvel[:, self.robot.qvel], "ee_pos": place}

    def state_of(self, env_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return float32 copies of the positions and velocities of these envs (default: all)."""
        qpos, qvel = self.physics.qpos, self.physics.qvel
        return (own(qpos), own(qvel)) if env_ids is None else (own(qpos[env_ids]), own(qvel[env_ids]))

    def variable(self, name: str, env_ids: Tensor | None) -> Tensor:
        """Return a task variable of these envs (default: all)."""
        value = self.variables[name]
        return value.clone() if env_ids is None else value[env_ids]

    def move_tool(
        self,
        scene: Scene,
        actions: RobotActionManager,
        by: Tensor,
        yaw: Tensor | None = None,
        grip: Tensor | None = None,
    ) -> Tensor:
        """Return the action that moves the tool by ``by`` ``[n, 3]``, pointing down with a heading."""
        target = self._down if yaw is None else torch.bmm(_about_z(yaw), self._down.expand(yaw.shape[0], 3, 3))
        rotation = self.chain.pose(scene["qpos"][:, : self.robot.num_joints])[1]
        turn = rotation_error(target, rotation).clamp(-_MAX_TURN, _MAX_TURN)
        return actions.encode(scene["qpos"], torch.cat((_GAIN * by, turn), dim=-1), grip)


def read_cube(qpos: Tensor, qvel: Tensor) -> Scene:
    """Return the pose and velocity of the free cube, which comes first in the state."""
    return {"cube_pos": qpos[:, :3], "cube_quat": qpos[:, 3:7], "cube_vel": qvel[:, :3]}


def place_cube(qpos: Tensor, pose: Tensor) -> None:
    """Write the cube's pose (x, y, -, yaw) ``[n, 4]`` into start positions ``[n, nq]``, resting on the table."""
    qpos[:, 0:2], qpos[:, 2] = pose[:, :2], HALF_CUBE
    qpos[:, 3:7] = 0.0
    qpos[:, 3], qpos[:, 6] = torch.cos(0.5 * pose[:, 3]), torch.sin(0.5 * pose[:, 3])


def shorten(by: Tensor, limit: float) -> Tensor:
    """Scale displacements ``[n, 3]`` to at most ``limit``."""
    return by * (limit / length(by).clamp_min(limit)).unsqueeze(1)


def _about_z(angle: Tensor) -> Tensor:
    """Return rotation matrices ``[n, 3, 3]`` about the vertical."""
    sine, cosine, zero = torch.sin(angle), torch.cos(angle), torch.zeros_like(angle)
    rows = (cosine, -sine, zero, sine, cosine, zero, zero, zero, torch.ones_like(angle))
    return torch.stack(rows, dim=1).view(-1, 3, 3)
