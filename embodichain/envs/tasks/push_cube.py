"""Push a cube across the table to a goal; in the language variant, to the coloured goal named by an instruction."""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import EventsCfg, GymCfg, JointRangeCfg, LanguageCfg, PoseRangeCfg, RobotCfg
from embodichain.envs.kinematics import dot, length, mean_square
from embodichain.envs.observations import instruction_table
from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene
from embodichain.envs.tasks.arm import ArmTask, arm_cfg, shorten
from embodichain.envs.vec_env import SEGMENTS
from embodichain.errors import ConfigError

_REACH = 0.05  # distance between the centres of cube and tool at contact, in metres
_LOW, _HIGH = 0.03, 0.1  # heights of the tool tip when pushing and when passing over the cube, in metres
_MAX_STEP = 0.04  # largest displacement of the expert per step, in metres
_PUSH_STEP = 0.012  # the same while pushing: the cube slides along with the tool
_REACHING, _PUSHING, _LEAVING = (SEGMENTS.index(name) for name in ("reach", "push", "leave"))
_APART = 2.5  # minimum distance of two goals, in success thresholds: a cube cannot be on both


class PushCube(ArmTask):
    """Push a cube to a random goal with a 6-DoF arm."""

    scene_file, object_body = "push_scene.xml", "cube"
    goal_area, goal_dim = PoseRangeCfg(x=(0.66, 0.66)), 2
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

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        direction = scene["to_goal"] / scene["distance"].unsqueeze(1).clamp_min(1e-6)
        # The position from which to push: behind the cube as seen from the goal, close to the table.
        behind = torch.sub(scene["cube_pos"][:, :2], direction, alpha=_REACH)
        scene["behind"] = torch.cat((behind, self._low.expand(behind.shape[0], 1)), dim=1)
        scene["direction"] = direction
        return scene

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {
            "reach": length(scene["behind"] - scene["ee_pos"]),
            "place": scene["distance"],
            "effort": mean_square(action),
            "success": scene["success"],
        }

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Move over the cube to the position behind it, lower the tool and push towards the goal, correcting for drift.
        Once the cube is at the goal, raise the tool."""
        tip, direction = scene["ee_pos"], scene["direction"]
        from_cube = tip[:, :2] - scene["cube_pos"][:, :2]
        along = dot(from_cube, direction)
        aside = from_cube - along.unsqueeze(1) * direction
        off_line = length(aside)
        # Push when behind the cube and on the line through cube and goal. The cone widens with the distance.
        ready = (along < -0.6 * _REACH) & (off_line < 0.012 + 0.3 * (-along - _REACH).clamp_min(0.0))
        low = tip[:, 2] < _LOW + 0.02
        clear = length(from_cube) > 1.6 * _REACH  # far enough from the cube to move and lower freely
        at_behind = length(scene["behind"][:, :2] - tip[:, :2]) < 0.015

        push = torch.cat((_PUSH_STEP * direction - 0.5 * aside, (_LOW - tip[:, 2:])), dim=1)
        over = scene["behind"] - tip
        sink = ready | at_behind | (clear & (along < 0))
        height = torch.where(sink, torch.full_like(off_line, _LOW), torch.full_like(off_line, _HIGH))
        over = torch.cat((over[:, :2], (height - tip[:, 2]).unsqueeze(1)), dim=1)
        must_rise = (~sink) & (tip[:, 2] < _HIGH - 0.03) & ~clear
        over[:, :2] = torch.where(must_rise.unsqueeze(1), torch.zeros_like(over[:, :2]), over[:, :2])
        by = torch.where((ready & low).unsqueeze(1), push, over)
        rise = torch.cat((torch.zeros_like(over[:, :2]), _HIGH - tip[:, 2:]), dim=1)
        solved = self.success(scene)
        by = torch.where(solved.unsqueeze(1), rise, by)
        doing = torch.where(ready & low, _PUSHING, _REACHING)
        actions.segment = torch.where(solved, _LEAVING, doing)
        return self.move_tool(scene, actions, shorten(by, _MAX_STEP))

    def markers(self) -> dict[str, Tensor]:
        goal = self.variables["goal"]
        return {"goal": torch.cat((goal, torch.full_like(goal[:, :1], 0.001)), dim=1)}


class PushCubeLanguage(PushCube):
    """Push a cube to the coloured goal that an instruction names.

    The order of the goals is drawn anew for every episode; only the bytes of ``instruction`` name the one that counts.
    """

    scene_file = "push_language_scene.xml"
    goal_area, goal_dim = PoseRangeCfg(x=(0.66, 0.66), y=(-0.2, 0.2)), 0
    understands_language = True

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        language = cfg.env.language or LanguageCfg()
        self.colors = language.colors
        self.area = cfg.env.events.randomize_target or self.goal_area
        lane = (self.area.y[1] - self.area.y[0]) / len(self.colors)
        apart = _APART * cfg.env.success_threshold
        if len(self.colors) > 1 and lane < apart:
            raise ConfigError(
                f"env.events.randomize_target.y: {len(self.colors)} goals that are {apart:.2f} m apart need a range of "
                f"{len(self.colors) * apart:.2f} m, got {self.area.y[1] - self.area.y[0]:.2f}"
            )
        self._lane = lane
        self._spread = lane - apart if len(self.colors) > 1 else lane
        self._instructions = _instructions(language).to(physics.device)

    @staticmethod
    def default_cfg() -> GymCfg:
        cfg = PushCube.default_cfg()
        events = cfg.env.events.replace(randomize_target=PoseRangeCfg(x=(0.6, 0.7), y=(-0.2, 0.2)))
        return cfg.replace(id="PushCubeLanguageRL", env=cfg.env.replace(events=events, language=LanguageCfg()))

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        start, count = super().sample_start(env_ids, streams), len(self.colors)
        drawn = streams.uniform(env_ids, 3 * count + 2)
        # Each goal has its own lane; a random permutation assigns lanes to colours.
        lanes = drawn[:, :count].argsort(dim=1)
        x = self.area.x[0] + (self.area.x[1] - self.area.x[0]) * drawn[:, count : 2 * count]
        aside = self._spread * (drawn[:, 2 * count : 3 * count] - 0.5)
        y = self.area.y[0] + self._lane * (lanes + 0.5) + aside
        start.variables["goals"] = torch.stack((x, y), dim=2).to(torch.float32)
        start.variables["target"] = (drawn[:, -2] * count).long().clamp_(max=count - 1)
        phrases = self._instructions.shape[0]
        start.variables["phrase"] = (drawn[:, -1] * phrases).long().clamp_(max=phrases - 1)
        return start

    def goal(self, env_ids: Tensor | None = None) -> Tensor:
        goals, target = self.variable("goals", env_ids), self.variable("target", env_ids)
        return goals.gather(1, target.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        scene["goals"] = self.variable("goals", env_ids)
        scene["target"] = self.variable("target", env_ids)
        scene["instruction"] = self._instructions[self.variable("phrase", env_ids), scene["target"]]
        return scene

    def observe(self, scene: Scene) -> dict[str, Any]:
        obs = super().observe(scene)
        # Goals are keyed by colour; only the instruction tells which one is the target.
        obs["goal"] = {color: scene["goals"][:, i] for i, color in enumerate(self.colors)}
        return {**obs, "instruction": scene["instruction"]}

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        """Return the distance to the target goal, and whether the cube is at a wrong one."""
        to_all = scene["goals"] - scene["cube_pos"][:, None, :2]
        on = length(to_all.reshape(-1, 2)).view(to_all.shape[:2]) < self.cfg.env.success_threshold
        other = torch.arange(len(self.colors), device=on.device) != scene["target"].unsqueeze(1)
        return {**super().metrics(scene), "wrong_goal": (on & other).any(dim=1).to(torch.float32)}

    def markers(self) -> dict[str, Tensor]:
        goals = self.variables["goals"]
        height = torch.full_like(goals[:, 0, :1], 0.001)
        return {color: torch.cat((goals[:, i], height), dim=1) for i, color in enumerate(self.colors)}


def named_goal(obs: TensorDictBase, language: LanguageCfg) -> Tensor:
    """Return the position of the goal named by the instruction, ``[n, 2]``: a label for auxiliary losses."""
    table = _instructions(language).to(obs["instruction"].device)
    named = (obs["instruction"][:, None, None] == table).all(-1).any(1)  # [n, colors]
    goals = torch.stack([obs["goal", color] for color in language.colors], dim=1)
    return (goals * named.unsqueeze(-1)).sum(1)


def _instructions(cfg: LanguageCfg) -> Tensor:
    """Return the encoded phrases for every colour, uint8 ``[phrases, colors, length]``."""
    return instruction_table(cfg, [{"color": color} for color in cfg.colors])
