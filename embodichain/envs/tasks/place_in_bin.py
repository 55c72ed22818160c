"""Put a cube into a bin: always the same, or the one into the other that an instruction names."""

from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import GymCfg, LanguageCfg, ObjectCfg, PoseRangeCfg, SceneCfg, ViewCfg
from embodichain.envs.fixtures import BinCfg, turn
from embodichain.envs.kinematics import length, mean_square
from embodichain.envs.physics import Physics
from embodichain.envs.primitives import DOWN, OPEN, grasp, move, part, sequence, unless
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
from embodichain.errors import ConfigError

_WIDTH = 0.05  # of a cube, in metres
_OVER = 0.13  # height above the floor of the bin at which the cube is released, in metres
_RELEASED = 0.062  # gap between the fingers at which a cube is released, in metres
_SLOW = 0.25  # speed in m/s below which the expert releases a cube
_STILL = 0.1  # speed in m/s below which a cube counts as at rest
_CUBES = PoseRangeCfg(x=(0.42, 0.54), y=(-0.2, -0.04), yaw=(-0.3, 0.3))
_VIEW = ViewCfg(pos=(1.05, -0.6, 0.6), lookat=(0.52, 0.02, 0.03), fovy=44.0)


class PlaceInBin(KitTask):
    """Put a cube into a bin, and let go of it."""

    needs: ClassVar[tuple[str, ...]] = ("cube", "bin")
    needs_fingers = True
    reward_weights = {"remaining": -0.5, "effort": -0.005, "success": 5.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        self._conjugate = torch.tensor([[1.0, -1.0, -1.0, -1.0]], device=physics.device)
        bins = [fixture for fixture in cfg.env.scene.fixtures.values() if isinstance(fixture, BinCfg)]
        if not bins:
            raise ConfigError(f"env.scene.fixtures: {cfg.id} needs a bin")
        # Inside: the centre of the cube is between the walls and below the rim.
        inside = [min(bin.size[i] for bin in bins) * 0.5 - bins[0].wall for i in (0, 1)]
        self._inside = torch.tensor([inside], device=physics.device)
        self._rim = torch.tensor(min(bin.size[2] for bin in bins), device=physics.device)

    @staticmethod
    def default_cfg() -> GymCfg:
        scene = SceneCfg(
            objects={"cube": ObjectCfg(color="red", mass=0.1, pose=_CUBES, min_distance=0.14)},
            fixtures={"bin": BinCfg(pose=PoseRangeCfg(x=(0.46, 0.6), y=(0.14, 0.22), yaw=(-0.3, 0.3)))},
            cameras={"side": _VIEW},
        )
        return kit_cfg("PlaceInBinRL", scene, {}, steps=150)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        return self._measure(super().read(env_ids))

    def _measure(self, scene: Scene) -> Scene:
        """Add the quantities derived from the cube and the bin."""
        scene["to_cube"] = scene["cube_pos"] - scene["ee_pos"]
        scene["drop_pos"] = raised(scene["bin_pos"], _OVER)
        scene["to_drop"] = scene["drop_pos"] - scene["cube_pos"]
        scene["held"] = is_held(scene, "cube", _WIDTH).to(torch.float32)
        local = turn(scene["bin_quat"] * self._conjugate, scene["cube_pos"] - scene["bin_pos"])
        over = (local[:, :2].abs() < self._inside).all(dim=1)
        scene["over_bin"] = over.to(torch.float32)
        scene["in_bin"] = (over & (local[:, 2] < self._rim)).to(torch.float32)
        return scene

    def observe(self, scene: Scene) -> dict[str, Any]:
        obs = super().observe(scene)
        return {**obs, "task": {"drop_offset": scene["to_drop"], "held": scene["held"].unsqueeze(1)}}

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        near, held = length(scene["to_cube"]), scene["held"] > 0
        gap, in_bin = scene["gripper"], scene["in_bin"] > 0
        over = (scene["over_bin"] > 0) & ((scene["to_drop"][:, 2].abs() < 0.075) | in_bin)
        progress = climb(
            (held, coming_to_grasp(near, gap, _WIDTH)),
            (held, nearness(length(scene["to_drop"]))),
            (over, letting_go(gap, _WIDTH, _RELEASED)),
        )
        return {"remaining": 1.0 - progress, "effort": mean_square(action), "success": scene["success"]}

    def success(self, scene: Scene) -> Tensor:
        still = length(scene["cube_linvel"]) < _STILL
        return (scene["in_bin"] > 0) & (scene["gripper"] > _RELEASED) & still

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {"held": scene["held"], "in_bin": scene["in_bin"], "distance": length(scene["to_drop"])}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Grasp the cube from above, carry it over the bin, and release it."""
        tool, held = self.arm(scene), scene["held"] > 0
        there = (length(scene["to_drop"][:, :2]) < 0.02) & (scene["to_drop"][:, 2] < 0.03)
        let_go = there & (length(scene["cube_linvel"]) < _SLOW)
        done = (scene["in_bin"] > 0) | (there & ~held)
        take = unless(done, grasp(tool, scene["cube_pos"], DOWN, held, tolerance=0.006))
        lift = tool.stage(done | (scene["to_drop"][:, 2] < 0.05), raised(tool.pos, _OVER), speed=0.03)
        carry = tool.stage(done | let_go, tool.pos + scene["to_drop"], speed=0.03)
        drop = part("place", move(tool, scene["drop_pos"], grip=OPEN))
        return tool.act(actions, sequence(take, lift, carry, drop))


class PlaceInBinLanguage(PlaceInBin):
    """Put the cube that an instruction names into the bin that it names.

    The bytes of ``instruction`` alone tell which of the coloured cubes goes into which of the coloured bins.
    """

    understands_language = True
    needs = ()

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        language, scene = cfg.env.language or LanguageCfg(), cfg.env.scene
        self.colors = language.colors
        self.bins = [name for name, fixture in scene.fixtures.items() if isinstance(fixture, BinCfg)]
        if not set(self.colors) <= set(scene.objects):
            known = list(scene.objects)
            raise ConfigError(f"env.language.colors: expected cubes of env.scene.objects ({', '.join(known)})")
        pairs = list(product(range(len(self.colors)), range(len(self.bins))))
        choices = [{"color": self.colors[i], "other": self.bins[j].removesuffix("_bin")} for i, j in pairs]
        self.instructed = Instructed(language, choices, physics.device)
        self._pairs = torch.tensor(pairs, device=physics.device)

    @staticmethod
    def default_cfg() -> GymCfg:
        cubes = _CUBES.replace(x=(0.4, 0.56), y=(-0.06, 0.06))
        areas = {"green": (-0.26, -0.23), "yellow": (0.23, 0.26)}
        scene = SceneCfg(
            objects={
                color: ObjectCfg(color=color, mass=0.1, pose=cubes, min_distance=0.11) for color in ("red", "blue")
            },
            fixtures={
                f"{color}_bin": BinCfg(color=color, pose=PoseRangeCfg(x=(0.46, 0.56), y=y, yaw=(-0.2, 0.2)))  # type: ignore[arg-type]
                for color, y in areas.items()
            },
            cameras={"side": _VIEW.replace(pos=(1.15, -0.35, 0.8), lookat=(0.5, 0.0, 0.0))},
        )
        language = LanguageCfg(colors=("red", "blue"), phrases=("put the {color} cube into the {other} bin",))
        return kit_cfg("PlaceInBinLanguageRL", scene, {}, steps=150, language=language)

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        start = super().sample_start(env_ids, streams)
        self.instructed.sample(env_ids, streams, start)
        return start

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = KitTask.read(self, env_ids)
        choice, phrase = self.variable("choice", env_ids), self.variable("phrase", env_ids)
        scene["instruction"] = self.instructed.read(choice, phrase)
        pair = self._pairs[choice]
        for quantity in ("pos", "linvel"):
            scene[f"cube_{quantity}"] = pick(scene, self.colors, pair[:, 0], quantity)
        for quantity in ("pos", "quat"):
            scene[f"bin_{quantity}"] = pick(scene, self.bins, pair[:, 1], quantity)
        return self._measure(scene)

    def observe(self, scene: Scene) -> dict[str, Any]:
        return {**KitTask.observe(self, scene), "instruction": scene["instruction"]}
