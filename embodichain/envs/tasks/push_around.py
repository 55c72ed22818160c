"""Push a cube round an obstacle to a goal behind it: to the left or to the right, both equally good."""

from typing import Any

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import GoalCfg, GymCfg, ObjectCfg, PoseRangeCfg, SceneCfg, ViewCfg
from embodichain.envs.kinematics import length, mean_square
from embodichain.envs.physics import Physics
from embodichain.envs.primitives import push
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene
from embodichain.envs.tasks.kit import KitTask, kit_cfg, select, ur5
from embodichain.errors import ConfigError

_REACH = 0.05  # distance between the centres of cube and tool at contact, in metres
_LOW, _HIGH = 0.03, 0.11  # heights of the tool tip when pushing and when passing over cube and obstacle, in metres
_CLEAR = 0.075  # distance at which the cube passes the obstacle, in metres
_COMMITTED = 0.05  # lateral offset in metres beyond which the cube stays on its side
_VIEW = ViewCfg(pos=(1.15, -0.35, 0.85), lookat=(0.57, 0.0, 0.0), fovy=40.0)


class PushAround(KitTask):
    """Push a cube round an obstacle to a goal behind it; left and right are equally good."""

    needs = ("cube", "obstacle", "goal")
    reward_weights = {"reach": -1.0, "remaining": -4.0, "effort": -0.01, "success": 10.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        obstacle = cfg.env.scene.objects.get("obstacle")
        if obstacle is None or obstacle.shape != "box" or not obstacle.fixed:
            raise ConfigError("env.scene.objects.obstacle: expected a box that is fixed")
        half = [*obstacle.size, *obstacle.size[:1] * 2][:3]
        # Waypoints in front of and behind the obstacle, as offsets from its centre: [2, 2, 2] (side, corner, xy); the
        # first side is positive y.
        x, y = half[0] + _CLEAR, half[1] + _CLEAR
        corners = [[[-x, sign * y], [x, sign * y]] for sign in (1.0, -1.0)]
        self._corners = torch.tensor(corners, device=physics.device)
        self._signs = self._corners[:, 0, 1].sign()
        self._low = torch.full((1, 1), _LOW, device=physics.device)

    @staticmethod
    def default_cfg() -> GymCfg:
        scene = SceneCfg(
            objects={
                "cube": ObjectCfg(color="red", pose=PoseRangeCfg(x=(0.4, 0.44), y=(-0.03, 0.03), yaw=(-0.5, 0.5))),
                "obstacle": ObjectCfg(
                    size=(0.015, 0.07, 0.03),
                    color=(0.3, 0.32, 0.36),
                    fixed=True,
                    pose=PoseRangeCfg(x=(0.56, 0.58), y=(-0.02, 0.02)),
                ),
            },
            goals={"goal": GoalCfg(shape="disc", size=0.04, pose=PoseRangeCfg(x=(0.7, 0.72), y=(-0.04, 0.04)))},
            cameras={"side": _VIEW},
        )
        return kit_cfg("PushAroundRL", scene, {}, steps=200, threshold=0.04, robot=ur5("pusher"))

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        start = super().sample_start(env_ids, streams)
        # The side that the expert takes if both are equally good; not observable.
        start.variables["side"] = (streams.uniform(env_ids, 1)[:, 0] < 0.5).long()
        return start

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        scene["to_goal"] = scene["goal_pos"][:, :2] - scene["cube_pos"][:, :2]
        scene["distance"] = length(scene["to_goal"])
        scene["side"] = self.variable("side", env_ids)
        ways, targets = self._ways(scene)
        scene["way"] = ways.amin(dim=1)
        chosen = (ways[:, 1] < ways[:, 0]).long()
        target = select(targets, chosen)
        by = target - scene["cube_pos"][:, :2]
        direction = by / length(by).unsqueeze(1).clamp_min(1e-6)
        behind = torch.sub(scene["cube_pos"][:, :2], direction, alpha=_REACH)
        scene["behind"] = torch.cat((behind, self._low.expand(behind.shape[0], 1)), dim=1)
        scene["targets"] = targets
        return scene

    def _ways(self, scene: Scene) -> tuple[Tensor, Tensor]:
        """Return the path length to the goal around either side ``[n, 2]``, and the next waypoints ``[n, 2, 2]``."""
        cube, goal = scene["cube_pos"][:, None, :2], scene["goal_pos"][:, None, :2]
        corners = scene["obstacle_pos"][:, None, None, :2] + self._corners  # [n, side, corner, xy]
        first, second = corners[:, :, 0], corners[:, :, 1]
        outside = (cube[..., 1] - scene["obstacle_pos"][:, None, 1]) * self._signs
        # Far enough to the side to pass; once beside the obstacle, the cube moves straight ahead.
        lane, width = self._corners[0, 0, 1], self._corners[0, 0, 1] - _CLEAR
        within = (outside > width + 0.03) & (cube[..., 0] > first[..., 0] + _CLEAR - 0.05)
        beside = (outside > lane - 0.02) | within
        straight = scene["obstacle_pos"][:, None, 1] + self._signs * torch.minimum(
            outside.clamp_min(width + 0.045), lane
        )
        second = torch.stack((second[..., 0], straight), dim=2)
        # In front of the obstacle the cube moves sideways, never back: there may be no room for the tool behind it.
        first = torch.stack((torch.maximum(first[..., 0], cube[..., 0]), first[..., 1]), dim=2)
        past_first = beside | (cube[..., 0] > second[..., 0] - 0.03)
        past_second = cube[..., 0] > second[..., 0] - 0.02
        to_goal = length(goal - second)
        from_first = length(second - first) + to_goal
        ways = torch.where(
            past_second,
            length(goal - cube),
            torch.where(past_first, length(second - cube) + to_goal, length(first - cube) + from_first),
        )
        target = torch.where(past_first.unsqueeze(2), second, first)
        return ways, torch.where(past_second.unsqueeze(2), goal.expand_as(target), target)

    def observe(self, scene: Scene) -> dict[str, Any]:
        obs = super().observe(scene)
        offsets = {
            "goal_offset": scene["to_goal"],
            "obstacle_offset": (scene["obstacle_pos"] - scene["cube_pos"])[:, :2],
        }
        return {**obs, "task": offsets}

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {
            "reach": length(scene["behind"] - scene["ee_pos"]),
            "remaining": scene["way"],
            "effort": mean_square(action),
            "success": scene["success"],
        }

    def success(self, scene: Scene) -> Tensor:
        return scene["distance"] < self._threshold

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        left = (scene["cube_pos"][:, 1] > scene["obstacle_pos"][:, 1]).to(torch.float32)
        return {"distance": scene["distance"], "left": left}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Push the cube past the waypoints of one side, a random one unless the cube has left the middle."""
        tool = self.arm(scene)
        aside = scene["cube_pos"][:, 1] - scene["obstacle_pos"][:, 1]
        side = torch.where(aside.abs() > _COMMITTED, (aside < 0.0).long(), scene["side"])
        target = select(scene["targets"], side)
        return tool.act(actions, push(tool, scene["cube_pos"], target, _REACH, _LOW, _HIGH, tolerance=0.005))
