"""A task of your own in one file: bring the tool of an arm to a button and press it.

embodichain play PressTask --trust examples/envs/press_task.py --video press.mp4        # watch the expert
embodichain envs check PressTask --trust examples/envs/press_task.py                    # does it keep the contract?
embodichain stream PressTask --trust examples/envs/press_task.py --duration 20          # its demonstrations
embodichain train examples/envs/press_task.json --trust examples/envs/press_task.py     # PPO
"""

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import GymCfg, ObjectCfg, PoseRangeCfg, SceneCfg
from embodichain.envs.fixtures import ButtonsCfg
from embodichain.envs.kinematics import length
from embodichain.envs.primitives import DOWN, press
from embodichain.envs.registration import register_task
from embodichain.envs.task import Scene, Task
from embodichain.envs.tasks.kit import KitTask, kit_cfg, observation, reward, ur5
from embodichain.envs.terms import position, register_reward

PRESSED = 0.01  # metres of the button's travel that count as pressed
BUTTON = "panel_button_0"  # the part "button_0" of the fixture "panel", as it is measured


@register_reward("above")
def above(task: Task, scene: Scene, action: Tensor, of: str, height: float = 0.1) -> Tensor:
    """1 where the tool is right above something, falling off with the distance: a reward term of your own."""
    offset = scene["ee_pos"] - position(scene, of)
    return 1.0 - torch.tanh(8.0 * length(offset[:, :2]) + 2.0 * (offset[:, 2] - height).clamp_min(0.0))


class PressTask(KitTask):
    """Press a button that stands somewhere on the table."""

    @staticmethod
    def default_cfg() -> GymCfg:
        scene = SceneCfg(
            fixtures={"panel": ButtonsCfg(pose=PoseRangeCfg(x=(0.4, 0.6), y=(-0.25, 0.25), yaw=(-0.8, 0.8)))},
            objects={"ball": ObjectCfg(shape="sphere", pose=PoseRangeCfg(x=(0.4, 0.6), y=(-0.25, 0.25)),
                                       color="blue", min_distance=0.12, observe=False)},
        )  # fmt: skip
        rewards = {
            "above": reward("above", 0.5, of=BUTTON),
            "reach": reward("near", 0.5, of="ee", to=BUTTON),
            "press": reward("opened", 1.0, of=BUTTON, target=PRESSED),
            "time": reward("alive", -2.0),  # nothing on the way pays as much as being done
            "success": reward("success", 10.0),
        }
        observations = {f"{BUTTON}/offset": observation("offset", of="ee", to=BUTTON)}
        return kit_cfg("PressTask", scene, rewards, steps=100, observations=observations, robot=ur5("pusher"))

    def success(self, scene: Scene) -> Tensor:
        return scene[f"{BUTTON}_opening"] > PRESSED

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Come over the button, then go down until it is pressed."""
        tool, button = self.arm(scene), scene[f"{BUTTON}_pos"]
        return tool.act(actions, press(tool, button, DOWN, self.success(scene), clearance=0.06))


register_task("PressTask", PressTask)
