"""Grasp a cube, lift it and bring it to a goal in the air."""

from typing import Any

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import EventsCfg, GymCfg, JointRangeCfg, PoseRangeCfg, RobotCfg
from embodichain.envs.kinematics import length, mean_square
from embodichain.envs.physics import Physics
from embodichain.envs.robots import Robot
from embodichain.envs.task import Scene
from embodichain.envs.tasks.arm import HALF_CUBE, ArmTask, arm_cfg, shorten
from embodichain.envs.vec_env import SEGMENTS
from embodichain.errors import ConfigError

_ABOVE = 0.1  # height above the cube at which the expert aligns the tool, in metres
_MAX_STEP = 0.03  # largest displacement of the expert per step, in metres
_REACHING, _GRASPING, _MOVING = (SEGMENTS.index(name) for name in ("reach", "grasp", "move"))
_STILL = 0.25  # speed in m/s below which the cube counts as at rest


class PickCube(ArmTask):
    """Grasp a cube with a two-finger gripper, lift it and place it at a random point above the table."""

    scene_file, object_body = "pick_scene.xml", "cube"
    goal_area = PoseRangeCfg(x=(0.5, 0.5), z=(0.2, 0.2))
    reward_weights = {"reach": -1.0, "grasp": -1.0, "place": -2.0, "effort": -0.01, "success": 20.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        if not robot.num_fingers:
            raise ConfigError(
                f"robot.tool: {cfg.id} needs a tool with fingers, such as 'gripper', got {cfg.robot.tool!r}"
            )
        super().__init__(cfg, physics, robot)
        self._arm = next(iter(robot.arms.values()))

    @staticmethod
    def default_cfg() -> GymCfg:
        events = EventsCfg(
            randomize_robot=JointRangeCfg(position=0.02),
            randomize_object_pose=PoseRangeCfg(x=(0.4, 0.55), y=(-0.15, 0.15), yaw=(-0.6, 0.6)),
            randomize_target=PoseRangeCfg(x=(0.4, 0.55), y=(-0.15, 0.15), z=(0.1, 0.25)),
        )
        qpos = [-0.2449, -0.0699, 1.9673, -0.3266, -1.5708, -0.2449, 0.04, 0.04]
        robot = RobotCfg(tool="gripper", init_qpos=qpos)
        return arm_cfg("PickCubeRL", 150, threshold=0.03, events=events, scale=0.08, robot=robot)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        scene["to_cube"] = scene["cube_pos"] - scene["ee_pos"]
        fingers = scene["qpos"][:, self.robot.num_joints :]
        opening = self._arm.opening(fingers)
        # Held: the cube is between the fingers, and their gap matches its width.
        held = (length(scene["to_cube"]) < 0.02) & (opening < HALF_CUBE + 0.004) & (opening > HALF_CUBE - 0.01)
        scene["held"] = held.to(torch.float32)
        return scene

    def observe(self, scene: Scene) -> dict[str, Any]:
        obs = super().observe(scene)
        obs["object"]["held"] = scene["held"].unsqueeze(1)
        return obs

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        held = scene["held"]
        return {
            "reach": torch.tanh(5.0 * length(scene["to_cube"])),
            "grasp": 1.0 - held,
            "place": 1.0 - held * (1.0 - torch.tanh(5.0 * scene["distance"])),
            "effort": mean_square(action),
            "success": scene["success"],
        }

    def success(self, scene: Scene) -> Tensor:
        return (scene["distance"] < self._threshold) & (length(scene["cube_vel"]) < _STILL)

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {**super().metrics(scene), "held": scene["held"], "height": scene["cube_pos"][:, 2]}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Lower the open gripper over the cube, close it, and carry the cube to the goal."""
        to_cube, held = scene["to_cube"], scene["held"] > 0
        aligned = length(to_cube[:, :2]) < 0.012
        low = to_cube[:, 2].abs() < 0.01
        climb = torch.where(aligned, torch.zeros_like(to_cube[:, 2]), torch.full_like(to_cube[:, 2], _ABOVE))
        approach = torch.cat((to_cube[:, :2], (to_cube[:, 2] + climb).unsqueeze(1)), dim=1)
        by = torch.where(held.unsqueeze(1), scene["to_goal"], approach)
        close = held | (aligned & low)
        actions.segment = torch.where(held, _MOVING, torch.where(close, _GRASPING, _REACHING))
        grip = torch.where(close, -torch.ones_like(scene["held"]), torch.ones_like(scene["held"])).unsqueeze(1)
        return self.move_tool(scene, actions, shorten(by, _MAX_STEP), self._heading(scene), grip)

    def _heading(self, scene: Scene) -> Tensor:
        """Return the cube's yaw modulo 90 degrees, within +-45 degrees: the fingers close flat against its sides.

        The quarter turns are removed first, as only ``atan`` (not ``atan2``) is bit-identical anywhere in a batch.
        """
        w, x, y, z = scene["cube_quat"].unbind(1)
        sine, cosine = 2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z)
        steep = sine.abs() > cosine.abs()
        over, under = torch.where(steep, -cosine, sine), torch.where(steep, sine, cosine)
        return torch.atan(over / torch.where(under == 0.0, torch.ones_like(under), under))
