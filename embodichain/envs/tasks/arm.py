"""Base class for single-arm tasks: measures the arm and a cube, and turns tool motions of the expert into actions."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager, chain_of
from embodichain.envs.env_cfg import ActionsCfg, EnvCfg, EventsCfg, GymCfg, JointTermCfg, PoseRangeCfg, RobotCfg
from embodichain.envs.kinematics import length, rotation_error
from embodichain.envs.physics import Physics
from embodichain.envs.primitives import GAIN
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene, Task, draw_poses

HALF_CUBE = 0.025
_MAX_TURN = 0.15  # largest rotation of the expert per step, in radians


def arm_cfg(id: str, steps: int, threshold: float, events: EventsCfg, scale: float, robot: RobotCfg) -> GymCfg:
    """Return the config of an arm task with ``delta_qpos`` actions of this scale."""
    env = EnvCfg(
        substeps=5,  # of 4 ms: accurate enough for these contacts, see docs/environments.md
        success_threshold=threshold,
        events=events,
        actions=ActionsCfg(delta_qpos=JointTermCfg(scale=scale)),
    )
    return GymCfg(id=id, max_episode_steps=steps, env=env, robot=robot)


class ArmTask(Task):
    """Move the tool, or the cube ``object_body``, to a goal; ``qpos`` and ``qvel`` contain the robot's joints only."""

    goal_area: ClassVar[PoseRangeCfg]
    """Default range of goals, overridden by ``env.events.randomize_target``."""
    goal_dim: ClassVar[int] = 3
    """Number of goal coordinates; 0 if the task samples its own goals."""

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        self.chain = chain_of(robot, cfg.id)
        self._down = robot.arms[next(iter(robot.arms))].down
        events, self._areas = cfg.env.events, []
        if self.object_body:
            self._areas.append(events.randomize_object_pose or PoseRangeCfg(x=(0.46, 0.46)))
        if self.goal_dim:
            self._areas.append(events.randomize_target or self.goal_area)
        # A free cube comes first in both positions and velocities.
        pose, motion = (
            ({"cube_pos": 3, "cube_quat": 4}, {"cube_vel": 3, "cube_spin": 3}) if self.object_body else ({}, {})
        )
        columns = {**pose, "qpos": robot.dofs, **motion, "qvel": robot.dofs}
        self._names, self._sizes = tuple(columns), tuple(columns.values())
        self._columns: Tensor | None = None
        if sum(self._sizes) != int(physics.model.nq) + int(physics.model.nv):  # the model has other joints, too
            self._columns = _columns(physics, robot, len(pose) > 0)

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        start = self.start_robot(env_ids, streams)
        poses, qpos = draw_poses(self._areas, env_ids, streams), start.qpos
        if self.object_body:  # a cube at rest on the table
            qpos[:, 0:2], qpos[:, 2], qpos[:, 3:7] = poses[0][:, :2], HALF_CUBE, 0.0
            qpos[:, 3], qpos[:, 6] = torch.cos(0.5 * poses[0][:, 3]), torch.sin(0.5 * poses[0][:, 3])
        if self.goal_dim:
            start.variables["goal"] = poses[-1][:, : self.goal_dim].to(torch.float32)
        return start

    def read(self, env_ids: Tensor | None = None) -> Scene:
        """Return the robot's joints and tool position, the cube if any, and the offset to the goal."""
        snapshot = self.physics.snapshot(env_ids)
        rows = snapshot if self._columns is None else snapshot[:, self._columns]
        parts = rows.split_with_sizes(self._sizes, dim=1)
        scene = dict(zip(self._names, parts, strict=True))
        joints, scene["goal"] = scene["qpos"], self.goal(env_ids)
        scene["ee_pos"] = self.chain.position(joints[:, : self.robot.num_joints] if self.robot.num_fingers else joints)
        moved = scene["cube_pos" if self.object_body else "ee_pos"]
        scene["to_goal"] = scene["goal"] - moved[:, : scene["goal"].shape[1]]
        scene["distance"] = length(scene["to_goal"])
        if self.placed is not None:
            scene.update(self.placed.read(snapshot, env_ids))
        return scene

    def goal(self, env_ids: Tensor | None = None) -> Tensor:
        """Return the goal of the cube or the tool in these envs (default: all), ``[n, 2 or 3]``."""
        return self.variable("goal", env_ids)

    def observe(self, scene: Scene) -> dict[str, Any]:
        obs = {"robot": {"qpos": scene["qpos"], "qvel": scene["qvel"], "ee_pos": scene["ee_pos"]}}
        if self.object_body:
            obs["object"] = {
                "pos": scene["cube_pos"],
                "quat": scene["cube_quat"],
                "linvel": scene["cube_vel"],
                "offset": scene["cube_pos"] - scene["ee_pos"],
            }
        others = {} if self.placed is None else self.placed.observe(scene)
        return {**obs, "goal": {"pos": scene["goal"], "offset": scene["to_goal"]}, **others}

    def success(self, scene: Scene) -> Tensor:
        return scene["distance"] < self._threshold

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {"distance": scene["distance"]}

    def markers(self) -> dict[str, Tensor]:
        return {"goal": self.variables["goal"]}

    def variable(self, name: str, env_ids: Tensor | None) -> Tensor:
        """Return a task variable of these envs (default: all)."""
        value = self.variables[name]
        return value if env_ids is None else value[env_ids]

    def move_tool(
        self,
        scene: Scene,
        actions: RobotActionManager,
        by: Tensor,
        yaw: Tensor | None = None,
        grip: Tensor | None = None,
    ) -> Tensor:
        """Return the action that displaces the tool by ``by`` ``[n, 3]``, pointing down at heading ``yaw`` ``[n]``."""
        target = self._down if yaw is None else torch.bmm(_about_z(yaw), self._down.expand(yaw.shape[0], 3, 3))
        rotation = self.chain.pose(scene["qpos"][:, : self.robot.num_joints])[1]
        turn = rotation_error(target, rotation).clamp(-_MAX_TURN, _MAX_TURN)
        return actions.encode(scene["qpos"], torch.cat((GAIN * by, turn), dim=-1), grip)


def _columns(physics: Physics, robot: Robot, has_cube: bool) -> Tensor:
    """Return the indices of the cube's and the robot's columns in a snapshot, positions before velocities."""
    positions = torch.arange(int(physics.model.nq), device=physics.device)
    speeds = int(physics.model.nq) + torch.arange(int(physics.model.nv), device=physics.device)
    parts = (positions[: 7 * has_cube], positions[robot.qpos], speeds[: 6 * has_cube], speeds[robot.qvel])
    return torch.cat(parts)


def shorten(by: Tensor, limit: float) -> Tensor:
    """Scale displacements ``[n, 3]`` to a length of at most ``limit``."""
    return by * (limit / length(by).clamp_min(limit)).unsqueeze(1)


def _about_z(angle: Tensor) -> Tensor:
    """Return rotation matrices ``[n, 3, 3]`` about the z axis."""
    sine, cosine, zero = torch.sin(angle), torch.cos(angle), torch.zeros_like(angle)
    rows = (cosine, -sine, zero, sine, cosine, zero, zero, zero, torch.ones_like(angle))
    return torch.stack(rows, dim=1).view(-1, 3, 3)
