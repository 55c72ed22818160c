"""Push a cube to the goal that an instruction names."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.env_cfg import GymCfg, LanguageCfg, PoseRangeCfg
from embodichain.envs.kinematics import length
from embodichain.envs.observations import encode_instructions
from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene
from embodichain.envs.tasks.push_cube import PushCube
from embodichain.errors import ConfigError

_APART = 2.5  # least distance of two goals, in success thresholds: no cube lies on two of them


class PushCubeLanguage(PushCube):
    """Push a cube to the coloured goal that an instruction names.

    The goals lie side by side in an order drawn anew for every episode; only the bytes of ``instruction`` name the one
    that counts.
    """

    scene_file = "push_language_scene.xml"
    understands_language = True

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        language = cfg.env.language or LanguageCfg()
        self.colors = language.colors
        self.area = cfg.env.events.randomize_target or PoseRangeCfg(x=(0.66, 0.66), y=(-0.2, 0.2))
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
        start, count = self.draw_cube(env_ids, streams)[0], len(self.colors)
        drawn = streams.uniform(env_ids, 3 * count + 2)
        # Each goal has a lane of its own; the order of one set of random numbers says which colour has which.
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
        # The goals by colour, not by which one is meant: only the instruction names it.
        obs["goal"] = {color: scene["goals"][:, i] for i, color in enumerate(self.colors)}
        return {**obs, "instruction": scene["instruction"]}

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        """Return the distance to the goal that is meant, and whether the cube lies on another one."""
        to_all = scene["goals"] - scene["cube_pos"][:, None, :2]
        on = length(to_all.reshape(-1, 2)).view(to_all.shape[:2]) < self.cfg.env.success_threshold
        other = torch.arange(len(self.colors), device=on.device) != scene["target"].unsqueeze(1)
        return {**super().metrics(scene), "wrong_goal": (on & other).any(dim=1).to(torch.float32)}

    def markers(self) -> dict[str, Tensor]:
        goals = self.variables["goals"]
        height = torch.full_like(goals[:, 0, :1], 0.001)
        return {color: torch.cat((goals[:, i], height), dim=1) for i, color in enumerate(self.colors)}


def named_goal(obs: TensorDictBase, language: LanguageCfg) -> Tensor:
    """Return where the goal lies that the instruction names, ``[n, 2]``: a label for learning to understand it."""
    table = _instructions(language).to(obs["instruction"].device)
    named = (obs["instruction"][:, None, None] == table).all(-1).any(1)  # [n, colors]
    goals = torch.stack([obs["goal", color] for color in language.colors], dim=1)
    return (goals * named.unsqueeze(-1)).sum(1)


def _instructions(cfg: LanguageCfg) -> Tensor:
    """Return the bytes of every phrase for every colour, uint8 ``[phrases, colors, length]``."""
    wrong = [phrase for phrase in cfg.phrases if phrase.count("{color}") != 1]
    if wrong:
        raise ConfigError([f"env.language.phrases: expected '{{color}}' once, got {phrase!r}" for phrase in wrong])
    texts = [phrase.replace("{color}", color) for phrase in cfg.phrases for color in cfg.colors]
    return encode_instructions(texts, cfg.length).view(len(cfg.phrases), len(cfg.colors), cfg.length)
