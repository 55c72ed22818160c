"""Places the objects, fixtures and goals of ``env.scene`` at reset, and measures them by name.

An object ``cube`` is measured as ``cube_pos``, ``cube_quat``, ``cube_linvel`` and ``cube_angvel``; a fixture
``cabinet`` as ``cabinet_pos`` and ``cabinet_quat``; its part ``drawer_0`` as ``cabinet_drawer_0_opening`` (its joint),
``cabinet_drawer_0_speed`` and ``cabinet_drawer_0_pos`` (its grasp point); a goal ``target`` as ``target_pos``. Objects
are free bodies unless fixed; everything else is a mocap body, which only a reset moves.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.env_cfg import GoalCfg, ObjectCfg, PoseRangeCfg, SceneCfg
from embodichain.envs.fixtures import PartPoint
from embodichain.envs.kinematics import length
from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams
from embodichain.envs.robot_model import reach
from embodichain.envs.task import ResetState, Scene, draw_ranges
from embodichain.errors import ConfigError

TRIES = 24
"""Candidate positions of a thing with a ``min_distance``; the first that is far enough from the others is used."""
_TAKEN = ("robot", "object", "image", "depth", "segmentation", "instruction", "ee")  # reserved
Thing: TypeAlias = ObjectCfg | GoalCfg | Any


def things(cfg: SceneCfg) -> dict[str, Thing]:
    """Return all things of a scene by name, in the order of placement: fixtures, objects, goals."""
    found: dict[str, Thing] = {}
    for section, entries in (("fixtures", cfg.fixtures), ("objects", cfg.objects), ("goals", cfg.goals)):
        for name, thing in entries.items():
            if thing is None:
                continue
            if name in found or name in _TAKEN:
                raise ConfigError(f"env.scene.{section}.{name}: this name is taken; choose another")
            found[name] = thing
    return found


def turned(cfg: ObjectCfg) -> list[float]:
    """Return the orientation of an object before its yaw, as a unit quaternion."""
    norm = math.sqrt(sum(value * value for value in cfg.quat))
    return [value / norm for value in cfg.quat]


def rest_height(model: mujoco.MjModel, body: str) -> float:
    """Return the height of a body's origin above its lowest point, at its default orientation."""
    number = model.body(body).id
    turn = np.empty(9)
    mujoco.mju_quat2Mat(turn, model.body_quat[number])
    found = []
    for geom in range(model.body_geomadr[number], model.body_geomadr[number] + model.body_geomnum[number]):
        rotation = np.empty(9)
        mujoco.mju_quat2Mat(rotation, model.geom_quat[geom])
        up = (turn.reshape(3, 3) @ rotation.reshape(3, 3))[2]  # the vertical in the frame of the geom
        height = float((turn.reshape(3, 3) @ model.geom_pos[geom])[2])
        found.append(reach(model, geom, up) - height)
    return max(found, default=0.0)


@dataclass(frozen=True)
class _Placed:
    """Placement of one thing."""

    name: str
    area: PoseRangeCfg
    rest: float
    """Height of its origin above its lowest point, in metres."""
    quat: tuple[float, ...]
    """Orientation before its yaw."""
    min_distance: float
    qpos: int
    """Address of its free joint in ``qpos``; -1 for a mocap body."""

    @property
    def tries(self) -> int:
        """Number of candidate positions."""
        return TRIES if self.min_distance > 0.0 else 1

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """Ranges of all numbers to sample: x and y of each candidate, height, yaw."""
        return [self.area.x, self.area.y] * self.tries + [self.area.z, self.area.yaw]


class PlacedScene:
    """The things of a ``SceneCfg`` in a compiled model: places them at reset and measures them."""

    def __init__(self, cfg: SceneCfg, physics: Physics) -> None:
        self._physics, self._cfg = physics, cfg
        model, self._nq = physics.model, int(physics.model.nq)
        found = things(cfg)
        self.observed = {
            name: isinstance(thing, ObjectCfg) and not thing.fixed
            for name, thing in found.items()
            if getattr(thing, "observe", True)
        }
        """Names of observed things, and whether their velocity is observed."""
        self._placed = [_place(model, name, thing) for name, thing in found.items() if _area(thing) is not None]
        places = [model.body(name).pos[:2].tolist() for name, thing in found.items() if _area(thing) is None]
        self._still = [torch.tensor([at], dtype=torch.float64, device=physics.device) for at in places]
        self._ranges = [bounds for placed in self._placed for bounds in placed.ranges]
        self._quats = [torch.tensor([p.quat], dtype=torch.float64, device=physics.device) for p in self._placed]
        self._free = {name: _address(model, name) for name in found if _address(model, name)[0] >= 0}
        self._mocap = {name: int(model.body(name).mocapid[0]) for name in found if name not in self._free}
        self._parts = {
            f"{name}_{site.split('/', 1)[1]}": PartPoint(model, site, physics.device)
            for name in cfg.fixtures
            if name in self._mocap
            for site in (model.site(i).name for i in range(model.nsite))
            if site.startswith(f"{name}/")
        }
        clashes = [name for name in self._parts if name in found]
        if clashes:
            problem = "a part of a fixture has this name; choose another"
            raise ConfigError([f"env.scene: {name}: {problem}" for name in clashes])

    def sample(self, env_ids: Tensor, streams: RandomStreams, start: ResetState) -> None:
        """Sample the poses of everything for the next episodes, and write them into the reset states."""
        if not self._placed:
            return
        drawn = draw_ranges(self._ranges, env_ids, streams)
        parts = drawn.split([len(placed.ranges) for placed in self._placed], dim=1)
        taken = [at.expand(env_ids.numel(), 2) for at in self._still]
        for placed, turned, part in zip(self._placed, self._quats, parts, strict=True):
            spots = part[:, : 2 * placed.tries].view(-1, placed.tries, 2)
            spot = _first_free(spots, taken, placed.min_distance) if placed.tries > 1 else spots[:, 0]
            taken.append(spot)
            height, yaw = part[:, -2:-1] + placed.rest, part[:, -1]
            pose = torch.cat((spot, height, about_vertical(yaw, turned)), dim=1)
            if placed.qpos >= 0:
                start.qpos[:, placed.qpos : placed.qpos + 7] = pose
            else:
                start.poses[placed.name] = pose

    def read(self, snapshot: Tensor, env_ids: Tensor | None = None) -> Scene:
        """Measure everything; ``snapshot`` ``[n, nq + nv]`` holds the positions and velocities of ``env_ids``."""
        scene: Scene = {}
        for name, (first, motion) in self._free.items():
            last = self._nq + motion + 6
            scene[f"{name}_pos"], scene[f"{name}_quat"] = snapshot[:, first : first + 7].split((3, 4), dim=1)
            scene[f"{name}_linvel"], scene[f"{name}_angvel"] = snapshot[:, last - 6 : last].split(3, dim=1)
        if self._mocap:
            pos, quat = self._physics.mocap_pos, self._physics.mocap_quat
            if env_ids is not None:
                pos, quat = pos[env_ids], quat[env_ids]
            pos, quat = pos.to(torch.float32), quat.to(torch.float32)
            for name, index in self._mocap.items():
                scene[f"{name}_pos"], scene[f"{name}_quat"] = pos[:, index], quat[:, index]
        for name, part in self._parts.items():
            opening = snapshot[:, part.qpos] if part.qpos >= 0 else None
            pose = scene[f"{part.fixture}_pos"], scene[f"{part.fixture}_quat"]
            scene[f"{name}_pos"] = part.position(*pose, opening)
            if opening is not None:
                scene[f"{name}_opening"], scene[f"{name}_speed"] = opening, snapshot[:, self._nq + part.qvel]
        return scene

    def observe(self, scene: Scene) -> dict[str, Any]:
        """Return the observations of all observed things, by name."""
        obs: dict[str, Any] = {}
        for name, moves in self.observed.items():
            entry = obs[name] = {"pos": scene[f"{name}_pos"]}
            if name in self._cfg.goals:
                continue
            entry["quat"] = scene[f"{name}_quat"]
            if moves:
                entry["linvel"] = scene[f"{name}_linvel"]
            if "ee_pos" in scene:
                entry["offset"] = scene[f"{name}_pos"] - scene["ee_pos"][:, :3]
        for name, part in self._parts.items():
            if part.fixture in self.observed and part.qpos >= 0:
                joint = torch.stack((scene[f"{name}_opening"], scene[f"{name}_speed"]), dim=1)
                obs[name] = {"joint": joint, "pos": scene[f"{name}_pos"]}
        return obs


def _area(thing: Thing) -> PoseRangeCfg | None:
    """Return the range of a thing's initial pose, if it is sampled."""
    return getattr(thing, "pose", None)


def _place(model: mujoco.MjModel, name: str, thing: Thing) -> _Placed:
    area = _area(thing) or PoseRangeCfg()
    rest = rest_height(model, name) if isinstance(thing, ObjectCfg) or _address(model, name)[0] >= 0 else 0.0
    quat = tuple(turned(thing)) if isinstance(thing, ObjectCfg) else (1.0, 0.0, 0.0, 0.0)
    distance = float(getattr(thing, "min_distance", 0.0))
    return _Placed(name, area, rest, quat, distance, _address(model, name)[0])


def _address(model: mujoco.MjModel, body: str) -> tuple[int, int]:
    """Return the addresses of a body's free joint in ``qpos`` and ``qvel``; -1 if it has none."""
    first = int(model.body(body).jntadr[0])
    if first < 0 or int(model.jnt_type[first]) != int(mujoco.mjtJoint.mjJNT_FREE):
        return -1, -1
    return int(model.jnt_qposadr[first]), int(model.jnt_dofadr[first])


def _first_free(spots: Tensor, taken: list[Tensor], distance: float) -> Tensor:
    """Return the first candidate of ``spots`` ``[n, tries, 2]`` at least ``distance`` from all ``taken`` ``[n, 2]``.

    If there is none, return the farthest one. Shapes do not depend on values.
    """
    if not taken:
        return spots[:, 0]
    gaps = length(spots.unsqueeze(2) - torch.stack(taken, dim=1).unsqueeze(1)).amin(dim=2)  # [n, tries]
    order = torch.arange(spots.shape[1], 0, -1, device=spots.device, dtype=spots.dtype)
    score = torch.where(gaps >= distance, 1e6 * order, gaps)
    chosen = score.argmax(dim=1).view(-1, 1, 1).expand(-1, 1, 2)
    return spots.gather(1, chosen).squeeze(1)


def about_vertical(yaw: Tensor, quat: Tensor) -> Tensor:
    """Rotate orientations ``[n or 1, 4]`` about the vertical by angles ``[n]``."""
    half = 0.5 * yaw
    c, s = torch.cos(half), torch.sin(half)
    w, x, y, z = quat.unbind(1)
    return torch.stack((c * w - s * z, c * x - s * y, c * y + s * x, c * z + s * w), dim=1)
