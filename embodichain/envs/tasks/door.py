"""Open a hinged door by its handle, along an arc."""

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import GymCfg, PoseRangeCfg, RobotCfg, SceneCfg
from embodichain.envs.fixtures import DoorCfg, turn
from embodichain.envs.physics import Physics
from embodichain.envs.primitives import DOWN, FORWARD, UP, grasp, pull_arc, sequence
from embodichain.envs.robots import Robot
from embodichain.envs.task import Scene
from embodichain.envs.tasks.fixture_task import OpeningTask, fixture_of, fixture_task_cfg

_GOAL = 1.1  # opening angle for success, in radians


class OpenDoor(OpeningTask):
    """Take the handle of a cabinet's door and pull the door open, along an arc about its hinges."""

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        self.cabinet, self.parts = fixture_of(cfg, "cabinet", DoorCfg), ["cabinet_door"]
        super().__init__(cfg, physics, robot)
        self.wide = min(_GOAL, self.cabinet.angle)
        body, site = physics.model.body("cabinet/door").pos, physics.model.site("cabinet/door").pos
        self._hinge = torch.tensor(body, dtype=torch.float32, device=physics.device)
        self._radius = float((site[0] ** 2 + site[1] ** 2) ** 0.5)  # of the handle's arc
        self._axis = DOWN if self.cabinet.hinge == "left" else UP

    @staticmethod
    def default_cfg() -> GymCfg:
        area = PoseRangeCfg(x=(0.8, 0.86), y=(-0.05, 0.1), yaw=(-0.1, 0.1))
        # The gripper points at the door, with its fingers side by side.
        robot = RobotCfg(tool="gripper", init_qpos=[-0.488, -0.3514, 2.3804, 1.1126, 1.0828, 3.1416, 0.04, 0.04])
        scene = SceneCfg(fixtures={"cabinet": DoorCfg(pose=area)})
        return fixture_task_cfg("OpenDoorRL", scene, robot, steps=120, threshold=0.03)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        scene["held"] = self.held(scene, 2.0 * self.cabinet.handle.radius)
        scene["left"] = self._radius * (self.wide - scene["part_opening"])  # remaining path of the handle, in metres
        return scene

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {"angle": scene["part_opening"], "held": scene["held"]}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Grasp the handle from the front, and pull it along its arc."""
        tool, held, at = self.arm(scene), scene["held"] > 0, scene["part_pos"]
        hinge = scene["cabinet_pos"] + turn(scene["cabinet_quat"], self._hinge.expand_as(at))
        take = grasp(tool, at, FORWARD, held, clearance=0.06, tolerance=0.02)
        return tool.act(actions, sequence(take, pull_arc(tool, scene["left"] < 0.0, at, hinge, self._axis)))
