"""What the tasks of a robot arm share: reading the arm, and moving its tool as an expert does."""

from __future__ import annotations

import torch
from torch import Tensor

from embodichain.envs.action_terms import RobotActionManager, chain_of
from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.kinematics import rotation_error
from embodichain.envs.physics import Physics
from embodichain.envs.robot import Robot
from embodichain.envs.task import Scene, Task

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
        """Return the robot's joints and the pose of its tool, for full states ``[n, nq]`` and ``[n, nv]``."""
        joints = qpos[:, self.robot.qpos].to(torch.float32)
        pos, rotation = self.chain.pose(joints[:, : self.robot.num_joints])
        speeds = qvel[:, self.robot.qvel].to(torch.float32)
        return {"qpos": joints, "qvel": speeds, "ee_pos": pos.contiguous(), "ee_rot": rotation}

    def state_of(self, env_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return positions and velocities of these envs (default: all)."""
        qpos, qvel = self.physics.qpos, self.physics.qvel
        return (qpos, qvel) if env_ids is None else (qpos[env_ids], qvel[env_ids])

    def variable(self, name: str, env_ids: Tensor | None) -> Tensor:
        """Return a task variable of these envs (default: all)."""
        value = self.variables[name]
        return value.clone() if env_ids is None else value[env_ids]

    def move_tool(
        self, scene: Scene, actions: RobotActionManager, by: Tensor, grip: Tensor | None = None
    ) -> Tensor:
        """Return the action that moves the tool by ``by`` ``[n, 3]`` while it is turned to point down."""
        turn = rotation_error(self._down, scene["ee_rot"]).clamp(-_MAX_TURN, _MAX_TURN)
        return actions.encode(scene["qpos"], torch.cat((_GAIN * by, turn), dim=-1), grip)
