"""Bring the tool of an arm to a point in the air."""

from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import EventsCfg, GymCfg, JointRangeCfg, PoseRangeCfg, RobotCfg
from embodichain.envs.kinematics import mean_square
from embodichain.envs.task import Scene
from embodichain.envs.tasks.arm import ArmTask, arm_cfg, shorten

_MAX_STEP = 0.05  # largest displacement of the expert per step, in metres


class Reach(ArmTask):
    """Bring the tool of a 6-DoF arm to a random point."""

    scene_file = "reach_scene.xml"
    goal_area = PoseRangeCfg(x=(0.5, 0.5), z=(0.3, 0.3))
    reward_weights = {"distance": -1.0, "effort": -0.01, "success": 5.0}

    @staticmethod
    def default_cfg() -> GymCfg:
        events = EventsCfg(
            randomize_robot=JointRangeCfg(position=0.1),
            randomize_target=PoseRangeCfg(x=(0.3, 0.65), y=(-0.35, 0.35), z=(0.08, 0.45)),
        )
        robot = RobotCfg(tool="pusher", init_qpos=[-0.22, 0.0103, 1.6931, -0.1326, -1.5708, -0.22])
        return arm_cfg("ReachRL", 100, threshold=0.02, events=events, scale=0.1, robot=robot)

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {"distance": scene["distance"], "effort": mean_square(action), "success": scene["success"]}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        return self.move_tool(scene, actions, shorten(scene["to_goal"], _MAX_STEP))
