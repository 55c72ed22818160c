"""Push a cube over the table to a goal."""

from __future__ import annotations

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import EventsCfg, GymCfg, JointRangeCfg, PoseRangeCfg, RobotCfg
from embodichain.envs.kinematics import dot, length, mean_square
from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene
from embodichain.envs.tasks.arm import CubeTask, arm_cfg, shorten

_REACH = 0.05  # distance from the cube's centre at which the tool's centre touches or nearly touches it
_LOW, _HIGH = 0.03, 0.1  # heights of the tool's tip for pushing and for passing over the cube
_MAX_STEP = 0.04  # metres the expert asks for in one step on its way
_PUSH_STEP = 0.012  # and while it pushes, so that the cube slides along with the tool


class PushCube(CubeTask):
    """Push a cube to a random goal with a 6-DoF arm."""

    scene_file = "push_scene.xml"
    reward_weights = {"reach": -1.0, "place": -4.0, "effort": -0.01, "success": 10.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        self._low = torch.full((1, 1), _LOW, device=physics.device)

    @staticmethod
    def default_cfg() -> GymCfg:
        events = EventsCfg(
            randomize_robot=JointRangeCfg(position=0.02),
            randomize_object_pose=PoseRangeCfg(x=(0.42, 0.5), y=(-0.12, 0.12), yaw=(-0.6, 0.6)),
            randomize_target=PoseRangeCfg(x=(0.6, 0.72), y=(-0.18, 0.18)),
        )
        robot = RobotCfg(tool="pusher", init_qpos=[-0.3267, -0.21, 2.4154, -0.6345, -1.5708, -0.3267])
        return arm_cfg("PushCubeRL", 100, threshold=0.04, events=events, scale=0.08, robot=robot)

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        goals = self.cfg.env.events.randomize_target or PoseRangeCfg(x=(0.66, 0.66))
        start, goal = self.draw_cube(env_ids, streams, goals)
        start.variables["goal"] = goal[:, :2].to(torch.float32)
        return start

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene, goal = self.read_arm(env_ids), self.goal(env_ids)
        cube = scene["cube_pos"][:, :2]
        to_goal = goal - cube
        distance = torch.linalg.vector_norm(to_goal, dim=1, keepdim=True)
        direction = to_goal / distance.clamp_min(1e-6)
        # Where the tool has to be to push: behind the cube as seen from the goal, near the table.
        behind = torch.sub(cube, direction, alpha=_REACH)
        scene["behind"] = torch.cat((behind, self._low.expand(behind.shape[0], 1)), dim=1)
        return {**scene, "goal": goal, "to_goal": to_goal, "distance": distance.squeeze(1), "direction": direction}

    def goal(self, env_ids: Tensor | None = None) -> Tensor:
        """Return where the cube has to go in these envs (default: all), ``[n, 2]``."""
        return self.variable("goal", env_ids)

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {
            "reach": length(scene["behind"] - scene["ee_pos"]),
            "place": scene["distance"],
            "effort": mean_square(action),
            "success": scene["success"],
        }

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Pass over the cube to behind it, come down, and push towards the goal, steering as the cube drifts."""
        tip, direction = scene["ee_pos"], scene["direction"]
        from_cube = tip[:, :2] - scene["cube_pos"][:, :2]
        along = dot(from_cube, direction)
        aside = from_cube - along.unsqueeze(1) * direction
        off_line = length(aside)
        # Behind the cube and on the line through cube and goal: push. The cone widens with the distance behind.
        ready = (along < -0.6 * _REACH) & (off_line < 0.012 + 0.3 * (-along - _REACH).clamp_min(0.0))
        low = tip[:, 2] < _LOW + 0.02
        clear = length(from_cube) > 1.6 * _REACH  # far enough to the side to move and sink freely
        at_behind = length(scene["behind"][:, :2] - tip[:, :2]) < 0.015

        push = torch.cat((_PUSH_STEP * direction - 0.5 * aside, (_LOW - tip[:, 2:])), dim=1)
        over = scene["behind"] - tip
        sink = ready | at_behind | (clear & (along < 0))
        height = torch.where(sink, torch.full_like(off_line, _LOW), torch.full_like(off_line, _HIGH))
        over = torch.cat((over[:, :2], (height - tip[:, 2]).unsqueeze(1)), dim=1)
        must_rise = (~sink) & (tip[:, 2] < _HIGH - 0.03) & ~clear
        over[:, :2] = torch.where(must_rise.unsqueeze(1), torch.zeros_like(over[:, :2]), over[:, :2])
        by = torch.where((ready & low).unsqueeze(1), push, over)
        return self.move_tool(scene, actions, shorten(by, _MAX_STEP))

    def markers(self) -> dict[str, Tensor]:
        goal = self.variables["goal"]
        return {"goal": torch.cat((goal, torch.full_like(goal[:, :1], 0.001)), dim=1)}
