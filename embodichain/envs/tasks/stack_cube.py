"""Put one cube on top of another: always the same two, or those that an instruction names."""

from itertools import permutations
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import GymCfg, LanguageCfg, ObjectCfg, PoseRangeCfg, SceneCfg, ViewCfg
from embodichain.envs.kinematics import length, mean_square
from embodichain.envs.physics import Physics
from embodichain.envs.primitives import DOWN, grasp, place, sequence, unless
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene
from embodichain.envs.tasks.kit import (
    Instructed,
    KitTask,
    climb,
    coming_to_grasp,
    kit_cfg,
    letting_go,
    nearness,
    pick,
    raised,
)
from embodichain.envs.terms import is_held
from embodichain.errors import ConfigError, nearest

_WIDTH = 0.05  # of a cube, in metres
_RELEASED = 0.062  # gap between the fingers at which a cube is released, in metres
_STILL = 0.1  # speed in m/s below which a cube counts as at rest
_AREA = PoseRangeCfg(x=(0.42, 0.56), y=(-0.16, 0.16), yaw=(-0.3, 0.3))
_VIEW = ViewCfg(pos=(1.0, -0.55, 0.5), lookat=(0.5, 0.0, 0.05), fovy=42.0)


def _cubes(*colors: Any) -> SceneCfg:
    cubes: dict[str, ObjectCfg | None] = {
        color: ObjectCfg(color=color, mass=0.1, pose=_AREA, min_distance=0.09) for color in colors
    }
    return SceneCfg(objects=cubes, cameras={"side": _VIEW})


class StackCube(KitTask):
    """Put the red cube on top of the green one, and let go of it."""

    needs: ClassVar[tuple[str, ...]] = ("red", "green")
    needs_fingers = True
    reward_weights = {"remaining": -0.5, "effort": -0.005, "success": 5.0}

    @staticmethod
    def default_cfg() -> GymCfg:
        return kit_cfg("StackCubeRL", _cubes("red", "green"), {}, steps=150, threshold=0.02)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        for role, name in (("top", "red"), ("base", "green")):
            for quantity in ("pos", "linvel"):
                scene[f"{role}_{quantity}"] = scene[f"{name}_{quantity}"]
        return self._measure(scene)

    def _measure(self, scene: Scene) -> Scene:
        """Add the quantities derived from the two cubes."""
        to_top = scene["top_pos"] - scene["ee_pos"]
        scene["to_top"] = to_top
        scene["place_pos"] = raised(scene["base_pos"], _WIDTH)
        scene["to_place"] = scene["place_pos"] - scene["top_pos"]
        scene["held"] = is_held(scene, "top", _WIDTH).to(torch.float32)
        aside, above = length(scene["to_place"][:, :2]), scene["to_place"][:, 2].abs()
        scene["stacked"] = ((aside < self._threshold) & (above < 0.012)).to(torch.float32)
        return scene

    def observe(self, scene: Scene) -> dict[str, Any]:
        obs = super().observe(scene)
        return {**obs, "task": {"place_offset": scene["to_place"], "held": scene["held"].unsqueeze(1)}}

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        near, held, stacked = length(scene["to_top"]), scene["held"] > 0, scene["stacked"] > 0
        gap = scene["gripper"]
        progress = climb(
            (held, coming_to_grasp(near, gap, _WIDTH)),
            (held, nearness(length(scene["to_place"]))),
            (stacked, letting_go(gap, _WIDTH, _RELEASED)),
        )
        return {"remaining": 1.0 - progress, "effort": mean_square(action), "success": scene["success"]}

    def success(self, scene: Scene) -> Tensor:
        still = length(scene["top_linvel"]) < _STILL
        return (scene["stacked"] > 0) & (scene["gripper"] > _RELEASED) & still

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {"held": scene["held"], "stacked": scene["stacked"], "distance": length(scene["to_place"])}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Grasp the cube from above, carry it over the other one, place it and release it."""
        tool, held, stacked = self.arm(scene), scene["held"] > 0, scene["stacked"] > 0
        released = scene["gripper"] > _RELEASED
        take = grasp(tool, scene["top_pos"], DOWN, held, tolerance=0.006)
        put = place(tool, scene["top_pos"], scene["place_pos"], released)
        return tool.act(actions, sequence(unless(stacked, take), put))


class StackCubeLanguage(StackCube):
    """Put the cube that an instruction names on top of the other one that it names.

    The bytes of ``instruction`` alone tell which two of the coloured cubes are meant.
    """

    understands_language = True
    needs = ()

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        language, cubes = cfg.env.language or LanguageCfg(), list(cfg.env.scene.objects)
        self.colors = language.colors
        unknown = [color for color in self.colors if color not in cubes]
        if unknown or len(self.colors) < 2:
            problem = f"expected at least two of the cubes in env.scene.objects, got {list(self.colors)}"
            raise ConfigError(f"env.language.colors: {problem}.{nearest(unknown[0], cubes) if unknown else ''}")
        pairs = list(permutations(range(len(self.colors)), 2))
        choices = [{"color": self.colors[i], "other": self.colors[j]} for i, j in pairs]
        self.instructed = Instructed(language, choices, physics.device)
        self._pairs = torch.tensor(pairs, device=physics.device)

    @staticmethod
    def default_cfg() -> GymCfg:
        phrases = ("put the {color} cube on the {other} cube",)
        language = LanguageCfg(colors=("red", "green", "blue"), phrases=phrases)
        return kit_cfg(
            "StackCubeLanguageRL", _cubes("red", "green", "blue"), {}, steps=150, threshold=0.02, language=language
        )

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        start = super().sample_start(env_ids, streams)
        self.instructed.sample(env_ids, streams, start)
        return start

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = KitTask.read(self, env_ids)
        choice, phrase = self.variable("choice", env_ids), self.variable("phrase", env_ids)
        scene["instruction"] = self.instructed.read(choice, phrase)
        pair = self._pairs[choice]
        for number, role in enumerate(("top", "base")):
            for quantity in ("pos", "linvel"):
                scene[f"{role}_{quantity}"] = pick(scene, self.colors, pair[:, number], quantity)
        return self._measure(scene)

    def observe(self, scene: Scene) -> dict[str, Any]:
        return {**KitTask.observe(self, scene), "instruction": scene["instruction"]}
