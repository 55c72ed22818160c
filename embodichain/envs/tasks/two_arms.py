"""Two arms that face each other across a table: lift a bar together, or hand over a stick."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import (
    ActionsCfg,
    ArmCfg,
    EndEffectorTermCfg,
    EnvCfg,
    EventsCfg,
    GoalCfg,
    GymCfg,
    JointRangeCfg,
    ObjectCfg,
    PoseRangeCfg,
    RobotCfg,
    SceneCfg,
    ViewCfg,
)
from embodichain.envs.fixtures import turn
from embodichain.envs.kinematics import dot, length, mean_square
from embodichain.envs.physics import Physics
from embodichain.envs.primitives import DOWN, GAIN, OPEN, ToolArm, either, grasp, hand_over
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene, Task
from embodichain.envs.tasks.kit import climb, coming_to_grasp, letting_go, nearness
from embodichain.errors import ConfigError

_ASIDE = 0.62  # metres from the centre of the table to the base of each arm
# The gripper points down, 0.42 m in front of the base and 0.2 m above the table.
_HOME = [-0.2628, -0.146, 2.0341, -0.3172, -1.5708, -0.2628, 0.04, 0.04]
_HALF_WIDTH = 0.02  # of the held object, in metres
_RELEASED = 0.06  # gap between the fingers at which they hold nothing, in metres
_STILL = 0.15  # speed in m/s below which the object counts as held still
_CLEAR = 0.03  # metres above the table at which an end counts as lifted
_REACH = 0.35  # approximate maximum distance to carry, in metres


def two_arm_cfg(id: str, steps: int, scene: SceneCfg) -> GymCfg:
    """Return a task config of two UR5 with grippers that face each other, with end-effector actions."""
    arms = {
        "left": ArmCfg(pos=(0.5, _ASIDE, 0.0), yaw=-1.5708, init_qpos=_HOME),
        "right": ArmCfg(pos=(0.5, -_ASIDE, 0.0), yaw=1.5708, init_qpos=_HOME),
    }
    env = EnvCfg(
        substeps=5,
        success_threshold=0.03,
        scene=scene,
        events=EventsCfg(randomize_robot=JointRangeCfg(position=0.02)),
        actions=ActionsCfg(ee_delta=EndEffectorTermCfg(scale=0.04)),
    )
    return GymCfg(id=id, max_episode_steps=steps, env=env, robot=RobotCfg(tool="gripper", arms=arms))


def _carried(distance: Tensor) -> Tensor:
    """Return a closeness reward ``[n]``: 1 at the goal, 0 at ``_REACH``, linear far away and steep nearby."""
    return 0.5 * (1.0 - distance / _REACH).clamp_min(0.0) + 0.5 * (1.0 - torch.tanh(10.0 * distance))


class TwoArmTask(Task):
    """Two arms, ``left`` and ``right``, and one long object that each can grasp at its own end."""

    scene_file = "table_scene.xml"
    thing: ClassVar[str]
    """Name of the object."""
    ends: ClassVar[tuple[float, float]]
    """Grasp points of the left and the right arm along the object's y axis, from its centre."""

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        if set(robot.arms) != {"left", "right"} or not all(arm.num_fingers for arm in robot.arms.values()):
            raise ConfigError(f"robot.arms: {cfg.id} needs two arms with grippers, 'left' and 'right'")
        named = {**cfg.env.scene.objects, **cfg.env.scene.goals}
        if named.get(self.thing) is None or named.get("goal") is None:
            raise ConfigError(f"env.scene: {cfg.id} needs the object {self.thing!r} and the goal 'goal'")
        self.tools = {name: ToolArm(robot, cfg.id, name) for name in ("left", "right")}
        self._nq = int(physics.model.nq)
        self._ends = torch.tensor([[0.0, at, 0.0] for at in self.ends], device=physics.device)
        self._long = torch.tensor([0.0, 1.0, 0.0], device=physics.device)

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        return self.start_robot(env_ids, streams)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        """Return both arms, the object and its ends, and which arms hold it."""
        snapshot = self.physics.snapshot(env_ids)
        qpos = snapshot[:, : self._nq][:, self.robot.qpos]
        scene = {"qpos": qpos, "qvel": snapshot[:, self._nq :][:, self.robot.qvel]}
        if self.placed is not None:
            scene.update(self.placed.read(snapshot, env_ids))
        middle, quat = scene[f"{self.thing}_pos"], scene[f"{self.thing}_quat"]
        along = turn(quat, self._long.expand_as(middle))
        scene["along"] = along
        for name, end in zip(("left", "right"), self._ends, strict=True):
            arm = self.robot.arms[name]
            scene[f"{name}_pos"] = self.tools[name].position(qpos)
            scene[f"{name}_end"] = middle + turn(quat, end.expand_as(middle))
            scene[f"to_{name}"] = scene[f"{name}_end"] - scene[f"{name}_pos"]
            scene[f"{name}_gap"] = 2.0 * arm.opening(qpos[:, arm.columns][:, arm.num_joints :])
            scene[f"held_{name}"] = self._held(scene, name).to(torch.float32)
        scene["ee_pos"] = torch.cat((scene["left_pos"], scene["right_pos"]), dim=1)
        scene["to_goal"] = scene["goal_pos"] - middle
        scene["distance"] = length(scene["to_goal"])
        return scene

    def _held(self, scene: Scene, name: str) -> Tensor:
        """Return where an arm holds its end of the object: between the fingers, whose gap matches its width."""
        away = scene[f"{name}_pos"] - scene[f"{self.thing}_pos"]
        on = dot(away, scene["along"])
        end = self._ends[0 if name == "left" else 1, 1]
        aside = away - on.unsqueeze(1) * scene["along"]
        between = ((on - end).abs() < 0.035) & (length(aside) < 0.02)
        gap = scene[f"{name}_gap"]
        return between & (gap < 2.0 * _HALF_WIDTH + 0.008) & (gap > 2.0 * _HALF_WIDTH - 0.02)

    def rising(self, scene: Scene, name: str) -> Tensor:
        """Return how far an end is lifted off the table, in [0, 1]."""
        return ((scene[f"{name}_end"][:, 2] - _HALF_WIDTH) / _CLEAR).clamp(0.0, 1.0)

    def coming(self, scene: Scene, name: str) -> Tensor:
        """Return the progress of an arm towards grasping its end, in [0, 1]."""
        return coming_to_grasp(length(scene[f"to_{name}"]), scene[f"{name}_gap"], 2.0 * _HALF_WIDTH)

    def observe(self, scene: Scene) -> dict[str, Any]:
        name = self.thing
        return {
            "robot": {"qpos": scene["qpos"], "qvel": scene["qvel"], "ee_pos": scene["ee_pos"]},
            "object": {
                "pos": scene[f"{name}_pos"],
                "quat": scene[f"{name}_quat"],
                "linvel": scene[f"{name}_linvel"],
                "left_offset": scene["to_left"],
                "right_offset": scene["to_right"],
                "held": torch.stack((scene["held_left"], scene["held_right"]), dim=1),
            },
            "goal": {"pos": scene["goal_pos"], "offset": scene["to_goal"]},
        }

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {"distance": scene["distance"], "held_left": scene["held_left"], "held_right": scene["held_right"]}


class LiftBar(TwoArmTask):
    """Lift a bar with two arms, level, to a point above the table."""

    thing, ends = "bar", (0.18, -0.18)
    reward_weights = {"remaining": -2.0, "tilt": -1.0, "effort": -0.01, "success": 20.0}
    max_tilt: ClassVar[float] = 0.1
    """Maximum slope of a level bar."""

    @staticmethod
    def default_cfg() -> GymCfg:
        bar = ObjectCfg(
            size=(_HALF_WIDTH, 0.24, _HALF_WIDTH),
            mass=0.4,
            color=(0.75, 0.45, 0.2),
            pose=PoseRangeCfg(x=(0.44, 0.56), y=(-0.04, 0.04), yaw=(-0.12, 0.12)),
            observe=False,
        )
        goal = GoalCfg(pose=PoseRangeCfg(x=(0.46, 0.54), y=(-0.03, 0.03), z=(0.18, 0.28)), observe=False)
        view = ViewCfg(pos=(1.55, -0.45, 0.8), lookat=(0.45, 0.0, 0.12), fovy=46.0)
        scene = SceneCfg(objects={"bar": bar}, goals={"goal": goal}, cameras={"side": view})
        return two_arm_cfg("LiftBarRL", 120, scene)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        scene["tilt"] = scene["along"][:, 2].abs()
        scene["held"] = scene["held_left"] * scene["held_right"]
        return scene

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        held, arms = scene["held"] > 0, ("left", "right")
        grasped = [0.5 * self.coming(scene, name) + 0.5 * scene[f"held_{name}"] for name in arms]
        risen = [self.rising(scene, name) for name in arms]
        progress = climb(
            (held, 0.5 * (grasped[0] + grasped[1])),
            (held, 0.5 * (risen[0] + risen[1])),
            (held & (risen[0] >= 1.0) & (risen[1] >= 1.0), _carried(scene["distance"])),
        )
        return {
            "remaining": 1.0 - progress,
            # One arm may lift slightly before the other: only a slope beyond the limit is penalised.
            "tilt": (scene["tilt"] - self.max_tilt).clamp_min(0.0),
            "effort": mean_square(action),
            "success": scene["success"],
        }

    def success(self, scene: Scene) -> Tensor:
        """Return where both arms hold the bar level and still, within ``success_threshold`` of the goal."""
        level = (scene["tilt"] < self.max_tilt) & (length(scene["bar_linvel"]) < _STILL)
        return (scene["held"] > 0) & level & (scene["distance"] < self._threshold)

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {**super().metrics(scene), "tilt": scene["tilt"], "height": scene["bar_pos"][:, 2]}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Grasp both ends from above, then move both ends to their goal positions, slowly and level."""
        parts, both = [], scene["held"] > 0
        for name in ("left", "right"):
            tool, own = self.tools[name].at(scene["qpos"]), scene[f"held_{name}"] > 0
            take = grasp(tool, scene[f"{name}_end"], DOWN, own)
            wait = tool.stage(both, tool.pos)
            level = torch.zeros_like(tool.pos)
            level[:, 2] = scene["bar_pos"][:, 2] - scene[f"{name}_end"][:, 2]  # levels the bar
            lift = tool.stage(both & ~both, tool.pos + scene["to_goal"] + level, speed=0.02)
            parts.append(tool.act(actions, either(both, lift, either(own, wait, take))))
        return torch.cat(parts, dim=1)


class HandOver(TwoArmTask):
    """Hand a stick over from the left arm to the right one, which brings it to a goal."""

    thing, ends = "stick", (0.04, -0.04)
    reward_weights = {"remaining": -2.0, "effort": -0.01, "success": 20.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        self._meet = torch.tensor([[0.5, -0.04, 0.2]], device=physics.device)
        home = robot.init_qpos.to(torch.float32).unsqueeze(0)
        self._rest = {name: tool.position(home) for name, tool in self.tools.items()}

    @staticmethod
    def default_cfg() -> GymCfg:
        stick = ObjectCfg(
            size=(_HALF_WIDTH, 0.08, _HALF_WIDTH),
            mass=0.06,
            color=(0.75, 0.45, 0.2),
            pose=PoseRangeCfg(x=(0.42, 0.58), y=(0.14, 0.26), yaw=(-0.12, 0.12)),
            observe=False,
        )
        goal = GoalCfg(pose=PoseRangeCfg(x=(0.42, 0.58), y=(-0.26, -0.18), z=(0.12, 0.24)), observe=False)
        view = ViewCfg(pos=(1.55, -0.45, 0.8), lookat=(0.45, 0.0, 0.12), fovy=46.0)
        scene = SceneCfg(objects={"stick": stick}, goals={"goal": goal}, cameras={"side": view})
        return two_arm_cfg("HandOverRL", 150, scene)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        scene["to_meet"] = self._meet - scene["right_end"]
        # Alone: the giving arm has released the stick and moved away from it.
        scene["alone"] = (scene["held_right"] > 0) & (scene["held_left"] == 0) & (length(scene["to_left"]) > 0.06)
        scene["alone"] = scene["alone"].to(torch.float32)
        return scene

    def observe(self, scene: Scene) -> dict[str, Any]:
        obs = super().observe(scene)
        obs["object"]["meet_offset"] = scene["to_meet"]
        return obs

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        given, taken, alone = (scene[name] > 0 for name in ("held_left", "held_right", "alone"))
        risen = self.rising(scene, "left")
        met = _carried(length(scene["to_meet"]))
        waits = nearness(length(self._meet - scene["right_pos"]))  # near the handover point, from the start
        opens = letting_go(scene["left_gap"], 2.0 * _HALF_WIDTH, _RELEASED)
        leaves = 0.5 * opens + 0.5 * (length(scene["to_left"]) / 0.06)
        progress = climb(
            (given, 0.8 * self.coming(scene, "left") + 0.2 * waits),
            (given, 0.8 * risen + 0.2 * waits),
            (given & (risen >= 1.0), 0.4 * met + 0.2 * waits + 0.4 * self.coming(scene, "right")),
            (taken & (scene["stick_pos"][:, 2] > 0.06), leaves),
            (alone, _carried(scene["distance"])),
        )
        return {"remaining": 1.0 - progress, "effort": mean_square(action), "success": scene["success"]}

    def success(self, scene: Scene) -> Tensor:
        """Return where only the receiving arm holds the stick, still and within ``success_threshold`` of the goal."""
        return (scene["alone"] > 0) & (scene["distance"] < self._threshold) & (length(scene["stick_linvel"]) < _STILL)

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {**super().metrics(scene), "alone": scene["alone"], "height": scene["stick_pos"][:, 2]}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """The left arm brings the stick to the middle; the right one takes its other end and carries it to the goal."""
        # The stages of ``hand_over`` halve displacements themselves, so that no arm needs a smaller gain.
        left, right = (replace(self.tools[name].at(scene["qpos"]), gain=GAIN) for name in ("left", "right"))
        held, alone = (scene["held_left"] > 0, scene["held_right"] > 0), scene["alone"] > 0
        ends = scene["left_end"], scene["right_end"]
        giving, taking = hand_over(left, right, ends, self._meet.expand_as(ends[0]), held, (DOWN, DOWN))
        rest = left.stage(~alone, self._rest["left"].expand_as(left.pos), OPEN)
        carry = right.stage(~alone, right.pos + scene["to_goal"], speed=0.025)
        stages = (left, either(alone, rest, giving)), (right, either(alone, carry, taking))
        return torch.cat([tool.act(actions, stage) for tool, stage in stages], dim=1)
