"""Insert a peg, which the gripper holds, into a hole a few millimetres wider."""

from typing import Any

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import GymCfg, PoseRangeCfg, RobotCfg, SceneCfg, ViewCfg
from embodichain.envs.fixtures import HoleCfg, PegCfg, turn
from embodichain.envs.kinematics import length, mean_square
from embodichain.envs.physics import Physics
from embodichain.envs.primitives import insert
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene
from embodichain.envs.tasks.fixture_task import FixtureTask, fixture_of, fixture_task_cfg
from embodichain.envs.terms import is_held

_BELOW, _SPREAD = 0.015, 0.005  # distance of the peg's centre below the tool, and its random variation, in metres
_DROPPED = 0.08  # distance between peg and tool at which the peg counts as dropped, in metres
_SQUEEZE = 0.0005  # how much closer than the peg's diameter the fingers start, in metres


class InsertPeg(FixtureTask):
    """Insert the peg in the gripper into a hole that is a few millimetres wider."""

    object_body = "peg"
    camera = "side"
    reward_weights = {"hold": 0.1, "align": 0.2, "insert": 0.4, "effort": -0.005, "success": 50.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        self.peg, self.hole = fixture_of(cfg, "peg", PegCfg), fixture_of(cfg, "block", HoleCfg)
        self.parts = ["block_hole"]
        super().__init__(cfg, physics, robot)
        self.depth = 0.75 * self.hole.depth  # required insertion depth, in metres
        self._pose = int(physics.model.joint("peg").qposadr[0])
        down = next(iter(robot.arms.values())).down
        self._points = -down[2].view(1, 1, 3)  # where the tool points, in its own frame
        self._tip = torch.tensor([[0.0, 0.0, -0.5 * self.peg.length]], device=physics.device)

    @staticmethod
    def default_cfg() -> GymCfg:
        area = PoseRangeCfg(x=(0.42, 0.58), y=(-0.15, 0.15), yaw=(-0.4, 0.4))
        view = ViewCfg(pos=(0.95, -0.45, 0.45), lookat=(0.47, 0.0, 0.12), fovy=38.0)
        scene = SceneCfg(fixtures={"block": HoleCfg(pose=area), "peg": PegCfg()}, cameras={"side": view})
        grip = PegCfg().radius - _SQUEEZE
        robot = RobotCfg(tool="gripper", init_qpos=[-0.2449, -0.0699, 1.9673, -0.3266, -1.5708, -0.2449, grip, grip])
        return fixture_task_cfg("InsertPegRL", scene, robot, steps=150, threshold=0.005)

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        """Place the peg between the fingers, aligned with the tool."""
        start = super().sample_start(env_ids, streams)
        tool = self._arm.at(start.qpos[:, self.robot.qpos].to(torch.float32))
        up = -(tool.rotation * self._points).sum(dim=2)
        below = _BELOW + _SPREAD * streams.uniform(env_ids, 1, -1.0, 1.0).to(torch.float32)
        # The shortest rotation from the vertical to ``up``: (1 + z . up, z x up), normalised.
        quat = torch.stack((1.0 + up[:, 2], -up[:, 1], up[:, 0], torch.zeros_like(up[:, 0])), dim=1)
        pose = torch.cat((tool.pos - below * up, quat / length(quat).unsqueeze(1)), dim=1)
        start.qpos[:, self._pose : self._pose + 7] = pose.to(start.qpos.dtype)
        return start

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        scene["tip"] = scene["peg_pos"] + turn(scene["peg_quat"], self._tip.expand_as(scene["peg_pos"]))
        scene["to_hole"] = to_hole = scene["part_pos"] - scene["tip"]
        scene["held"] = is_held(scene, "peg", 2.0 * self.peg.radius, 0.04).to(torch.float32)
        scene["off"] = length(to_hole[:, :2])
        above = (-to_hole[:, 2:]).clamp_min(0.0)
        scene["way"] = length(torch.cat((to_hole[:, :2], above), dim=1))
        scene["depth"] = to_hole[:, 2].clamp_min(0.0) * (scene["off"] < 0.5 * self.hole.width)
        return scene

    def observe(self, scene: Scene) -> dict[str, Any]:
        return {
            "robot": {"qpos": scene["qpos"], "qvel": scene["qvel"], "ee_pos": scene["ee_pos"]},
            "object": {
                "pos": scene["peg_pos"],
                "quat": scene["peg_quat"],
                "linvel": scene["peg_linvel"],
                "offset": scene["peg_pos"] - scene["ee_pos"],
                "held": scene["held"].unsqueeze(1),
            },
            "goal": {"pos": scene["part_pos"], "offset": scene["to_hole"]},
        }

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {
            "hold": scene["held"],
            "align": 1.0 - torch.tanh(8.0 * scene["way"]),
            "insert": (scene["depth"] / self.depth).clamp(0.0, 1.0),
            "effort": mean_square(action),
            "success": scene["success"],
        }

    def success(self, scene: Scene) -> Tensor:
        return self.depth - scene["depth"] < self._threshold

    def failed(self, scene: Scene) -> Tensor:
        """Return where the peg was dropped."""
        return length(scene["peg_pos"] - scene["ee_pos"]) > _DROPPED

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {"depth": scene["depth"], "off_axis": scene["off"], "held": scene["held"]}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Move the peg's tip above the hole, and push it in."""
        tool, done = self.arm(scene), scene["depth"] > self.depth
        return tool.act(actions, insert(tool, scene["tip"], scene["part_pos"], done))
