"""Base classes of tasks at a fixture, one part of which is the target to reach, hold and move."""

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from embodichain.envs.env_cfg import ActionsCfg, EndEffectorTermCfg, GymCfg, LanguageCfg, RobotCfg, SceneCfg
from embodichain.envs.kinematics import length, mean_square
from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene
from embodichain.envs.tasks.kit import Instructed, KitTask, kit_cfg, select
from embodichain.envs.terms import is_held
from embodichain.errors import ConfigError

Cfg = TypeVar("Cfg")


def fixture_task_cfg(
    id: str, scene: SceneCfg, robot: RobotCfg, steps: int, threshold: float, language: LanguageCfg | None = None
) -> GymCfg:
    """Return a task config with end-effector actions of up to 2 cm per step, at constant orientation."""
    actions = ActionsCfg(ee_delta=EndEffectorTermCfg(scale=0.02))
    return kit_cfg(id, scene, {}, steps=steps, threshold=threshold, actions=actions, robot=robot, language=language)


class FixtureTask(KitTask):
    """An arm at fixtures; each episode has one target, the ``choice`` of several ``parts``.

    Rewards are for stages that have been achieved. Holding all of them forever is worth less than success, which ends
    the episode. Without any achievement the reward is zero, so that the initial value estimates are nearly right.
    """

    camera = "shoulder"
    needs_fingers: ClassVar[bool] = True
    parts: Sequence[str]
    """Measured names of the parts, such as ``cabinet_drawer_0``; set in the constructor of a task."""
    colors: Sequence[str] = ()
    """Names of the parts in instructions, for tasks with language."""

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        self._instructed: Instructed | None = None
        if self.understands_language:
            language = cfg.env.language or LanguageCfg()
            if missing := [color for color in language.colors if color not in self.colors]:
                known = f"this scene has {', '.join(self.colors)}"
                raise ConfigError(f"env.language.colors: {known}, and no {', '.join(missing)}")
            choices = [{"color": color} for color in language.colors]
            self._instructed = Instructed(language, choices, physics.device)
            named = [self.colors.index(color) for color in language.colors]
            self._named = torch.tensor(named, device=physics.device)

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        start, count = super().sample_start(env_ids, streams), len(self.parts)
        if self._instructed is not None:
            self._instructed.sample(env_ids, streams, start)
        elif count > 1:
            drawn = streams.uniform(env_ids, 1)
            start.variables["choice"] = (drawn[:, 0] * count).long().clamp_(max=count - 1)
        return start

    def target(self, start: ResetState) -> Tensor:
        """Return the index of the target part for these reset states, int64 ``[n]``."""
        choice = start.variables.get("choice")
        if choice is None:
            return torch.zeros(start.qpos.shape[0], dtype=torch.int64, device=start.qpos.device)
        return choice if self._instructed is None else self._named[choice]

    def read(self, env_ids: Tensor | None = None) -> Scene:
        """Measure the target as ``part_pos``, ``part_opening`` and ``part_speed``, and the offset ``to_part``."""
        scene = super().read(env_ids)
        names = ("pos", "opening", "speed") if f"{self.parts[0]}_opening" in scene else ("pos",)
        if len(self.parts) == 1 and self._instructed is None:
            scene |= {f"part_{name}": scene[f"{self.parts[0]}_{name}"] for name in names}
        else:
            choice = self.variable("choice", env_ids)
            scene["target"] = choice if self._instructed is None else self._named[choice]
            for name in names:
                scene[f"parts_{name}"] = values = torch.stack([scene[f"{part}_{name}"] for part in self.parts], dim=1)
                scene[f"part_{name}"] = select(values, scene["target"])
            if self._instructed is not None:
                scene["instruction"] = self._instructed.read(choice, self.variable("phrase", env_ids))
        scene["to_part"] = scene["part_pos"] - scene["ee_pos"]
        return scene

    def observe(self, scene: Scene) -> dict[str, Any]:
        obs: dict[str, Any] = {"robot": {name: scene[name] for name in ("qpos", "qvel", "ee_pos")}}
        if self._instructed is not None:
            # All parts by colour; only the instruction tells which one is the target.
            offsets = scene["parts_pos"] - scene["ee_pos"].unsqueeze(1)
            parts = torch.cat((offsets, scene["parts_opening"].unsqueeze(2)), dim=2)
            obs["object"] = {color: parts[:, i] for i, color in enumerate(self.colors)}
            return {**obs, "instruction": scene["instruction"]}
        obs["object"] = {
            "pos": scene["part_pos"],
            "offset": scene["to_part"],
            "joint": torch.stack((scene["part_opening"], scene["part_speed"]), dim=1),
        }
        return obs

    def held(self, scene: Scene, width: float) -> Tensor:
        """Return 1 where the fingers hold the target, else 0, ``[n]``."""
        return is_held(scene, "part", width).to(torch.float32)

    def others(self, scene: Scene, opening: float) -> Tensor:
        """Return 1 where any other part is open (or pressed) by more than ``opening``, else 0, ``[n]``."""
        index = torch.arange(len(self.parts), device=scene["target"].device)
        wrong = (scene["parts_opening"] > opening) & (index != scene["target"].unsqueeze(1))
        return wrong.any(dim=1).to(torch.float32)


class OpeningTask(FixtureTask):
    """Grasp a part by its handle and open it; ``read`` measures ``held`` and ``left``, the remaining distance."""

    reward_weights = {"reach": 0.1, "grasp": 0.1, "open": 0.4, "effort": -0.005, "success": 50.0}
    wide: float
    """Opening of an open part; set in the constructor of a task."""

    def observe(self, scene: Scene) -> dict[str, Any]:
        return {**super().observe(scene), "task": {"held": scene["held"].unsqueeze(1)}}

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {
            "reach": near(scene["to_part"]),
            "grasp": scene["held"],
            "open": (scene["part_opening"] / self.wide).clamp(0.0, 1.0),
            "effort": mean_square(action),
            "success": scene["success"],
        }

    def success(self, scene: Scene) -> Tensor:
        return scene["left"] < self._threshold


def fixture_of(cfg: GymCfg, name: str, kind: type[Cfg]) -> Cfg:
    """Return the config of a required fixture; ``ConfigError`` if the scene has none of this kind."""
    found = cfg.env.scene.fixtures.get(name)
    if not isinstance(found, kind):
        there = "nothing" if found is None else f"a {found.kind}"
        raise ConfigError(
            f"env.scene.fixtures.{name}: {cfg.id} needs a {kind.__name__.removesuffix('Cfg')}, got {there}"
        )
    return found


def near(offset: Tensor) -> Tensor:
    """Return a closeness reward ``[n]`` of offsets ``[n, 3]``: 1 at zero, 0 far away."""
    return 1.0 - torch.tanh(5.0 * length(offset))
