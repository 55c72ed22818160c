"""Events that change camera images: colours, textures, lights, camera poses and fields of view.

With such events, the cameras of a config are compiled into the model, so that each env has its own. Textures are
selected from materials that are part of every such model.
"""

from typing import Annotated, Any, Literal

import mujoco
import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from embodichain.config.classes import Fraction
from embodichain.envs.curricula import Range
from embodichain.envs.event_terms import Names, Operation, find_names, operate, quaternion_product, select
from embodichain.envs.randomization import Draw, EventTerm, Rows, World
from embodichain.envs.rendering import MATERIALS, MOUNTED, Material
from embodichain.errors import ConfigError

Color = dict[Literal["r", "g", "b"], Range]
"""Ranges of red, green and blue; omitted ones stay unchanged."""
Offsets = dict[Literal["x", "y", "z"], Range]
"""Ranges in metres by axis; omitted ones are 0."""
Angles = dict[Literal["roll", "pitch", "yaw"], Range]
"""Ranges in radians; omitted ones are 0."""
_GREY = np.array([0.5, 0.5, 0.5, 1.0], np.float32)  # MuJoCo's default, which means the colour of the material


def _index(world: World, found: list[int]) -> Tensor:
    return torch.tensor(found, device=world.physics.device)


def _check(world: World, key: str, low: float, high: float, least: float, most: float, what: str) -> None:
    """Raise ``ConfigError`` for values that make the model invalid."""
    if low < least or high > most:
        raise ConfigError(f"{world.key}.params.{key}: {what}, and these give {low:.4g} to {high:.4g}")


def _geoms(world: World, geoms: Names | None, bodies: Names | None) -> list[int]:
    """Return the ids of the named geoms and of all geoms of the named bodies; default: all visible ones."""
    model = world.model
    visible = model.geom_group < 3
    if geoms is None and bodies is None:
        return [int(geom) for geom in np.nonzero(visible)[0]]
    found = set() if geoms is None else set(select(world, "geoms", geoms, visible, "that are seen"))
    if bodies is not None:
        shown = np.isin(np.arange(model.nbody), model.geom_bodyid[visible])
        chosen = select(world, "bodies", bodies, shown, "with geoms that are seen")
        found |= {int(geom) for geom in np.nonzero(visible & np.isin(model.geom_bodyid, chosen))[0]}
    return sorted(found)


def _own_colors(model: mujoco.MjModel, found: list[int]) -> np.ndarray:
    """Return the colours of geoms, or of their materials if they have none, ``[n, 4]``."""
    colors = model.geom_rgba[found].copy()
    for row, geom in enumerate(found):
        if model.geom_matid[geom] >= 0 and np.array_equal(colors[row], _GREY):
            colors[row] = model.mat_rgba[model.geom_matid[geom]]
    return colors


class GeomColor(EventTerm):
    """Colours of geoms. A texture keeps its pattern and is tinted."""

    fields = ("geom_rgba",)

    def __init__(
        self,
        world: World,
        color: Color,
        geoms: Names | None = None,
        bodies: Names | None = None,
        operation: Operation = "abs",
        shared: bool = False,
    ) -> None:
        """Sample ``color`` for ``geoms`` and all geoms of ``bodies`` (default: all), one each or one ``shared``."""
        super().__init__(world)
        given: dict[Any, tuple[float, float]] = color
        if not given:
            raise ConfigError(f"{world.key}.params.color: expected a range for r, g or b")
        found = _geoms(world, geoms, bodies)
        nominal = _own_colors(world.model, found)
        self._geoms, self._count, self._operation = _index(world, found), 1 if shared else len(found), operation
        self._nominal = world.tensor(nominal)
        self._ranges = [(i, given[name]) for i, name in enumerate("rgb") if name in given]
        for channel, bounds in self._ranges:
            ends = np.array([operate(nominal[:, channel].astype(float), end, operation) for end in bounds])
            key = f"color.{'rgb'[channel]}"
            # Scaled and shifted colours are clipped at white; those always below black are a mistake.
            _check(world, key, float(ends.min()), float(bounds[1]), -1.0, 10.0, "expected colours in [0, 1]")
            if operation == "abs":
                _check(world, key, float(ends.min()), float(ends.max()), 0.0, 1.0, "expected colours in [0, 1]")

    def apply(self, rows: Rows, draw: Draw) -> None:
        colors = self._nominal.repeat(draw.count, 1, 1)
        for channel, bounds in self._ranges:
            drawn = draw.values(bounds, self._count)
            colors[..., channel] = operate(colors[..., channel], drawn, self._operation).clamp(0.0, 1.0)
        rows["geom_rgba"][:, self._geoms] = colors.to(rows["geom_rgba"].dtype)


class GeomTexture(EventTerm):
    """Textures of geoms, sampled per episode, one each or one ``shared``."""

    fields = ("geom_matid",)

    def __init__(
        self,
        world: World,
        geoms: Names | None = None,
        bodies: Names | None = None,
        textures: Annotated[tuple[Material, ...], Field(min_length=1)] = tuple(MATERIALS),
        keep: bool = True,
        shared: bool = False,
    ) -> None:
        """Sample from ``textures``, and from the geom's own if ``keep``."""
        super().__init__(world)
        model = world.model
        found = _geoms(world, geoms, bodies)
        materials = [_material(model, name) for name in dict.fromkeys(textures)]
        if -1 in materials:
            raise ConfigError(f"{world.key}.func: textures are seen by cameras: add one to env.observations.cameras")
        choices = [[int(model.geom_matid[geom]), *materials] if keep else materials for geom in found]
        self._choices = torch.tensor(choices, device=world.physics.device)
        self._geoms, self._count = _index(world, found), 1 if shared else len(found)

    def apply(self, rows: Rows, draw: Draw) -> None:
        count = self._choices.shape[1]
        chosen = (draw.unit(self._count) * count).long().clamp_(max=count - 1).expand(-1, self._choices.shape[0])
        material = self._choices.expand(draw.count, -1, -1).gather(2, chosen.unsqueeze(2)).squeeze(2)
        rows["geom_matid"][:, self._geoms] = material.to(rows["geom_matid"].dtype)


def _material(model: mujoco.MjModel, name: str) -> int:
    return int(mujoco.mj_name2id(model, int(mujoco.mjtObj.mjOBJ_MATERIAL), f"{MOUNTED}{name}"))


class Lights(EventTerm):
    """Lights of the model: position, direction, brightness, and whether they are on."""

    def __init__(
        self,
        world: World,
        lights: Names | None = None,
        pos: Offsets | None = None,
        tilt: Range = (0.0, 0.0),
        diffuse: Range = (1.0, 1.0),
        ambient: Range = (0.0, 0.0),
        off: Fraction = 0.0,
    ) -> None:
        """``pos`` is an offset, ``tilt`` an angle of the direction towards a random side (radians), ``diffuse`` a
        factor on the brightness, ``ambient`` an offset of the ambient light, ``off`` the probability that it is off.
        """
        super().__init__(world)
        model = world.model
        names = [model.light(i).name for i in range(model.nlight)]
        fixed = model.light_mode == int(mujoco.mjtCamLight.mjCAMLIGHT_FIXED)
        found = find_names(world, "lights", lights, names, fixed, "that follow nothing")
        self._lights, self._count = _index(world, found), len(found)
        given: dict[Any, Any] = pos or {}
        self._pos = [given.get(axis, (0.0, 0.0)) for axis in "xyz"]
        self._tilt, self._diffuse, self._ambient, self._off = tilt, diffuse, ambient, off
        _check(world, "tilt", *tilt, 0.0, np.pi, "expected angles in [0, pi]")
        _check(world, "diffuse", *diffuse, 0.0, 100.0, "expected factors from 0 on")
        brightest = float(model.light_ambient[found].max()) + ambient[1]
        _check(world, "ambient", ambient[0], brightest, 0.0, 1.0, "expected light in [0, 1]")
        parts = {"light_pos": pos, "light_dir": tilt[1], "light_diffuse": diffuse != (1.0, 1.0)}
        parts |= {"light_ambient": ambient[1], "light_active": off}
        self.fields = tuple(field for field, wanted in parts.items() if wanted)
        if not self.fields:
            raise ConfigError(f"{world.key}.params: expected pos, tilt, diffuse, ambient or off")
        self._nominal = {field: world.tensor(np.array(getattr(model, field)[found])) for field in self.fields}

    def apply(self, rows: Rows, draw: Draw) -> None:
        for field in self.fields:
            new = self._drawn(field, draw)
            rows[field][:, self._lights] = new.to(rows[field].dtype)

    def _drawn(self, field: str, draw: Draw) -> Tensor:
        """Return sampled values of a field, ``[n, lights, ...]``."""
        nominal = self._nominal[field]
        if field == "light_pos":
            return nominal + torch.stack([draw.values(bounds, self._count) for bounds in self._pos], dim=-1)
        if field == "light_dir":
            return _leaning(nominal, draw.values(self._tilt, self._count), 2.0 * torch.pi * draw.unit(self._count))
        if field == "light_diffuse":
            return nominal * draw.values(self._diffuse, self._count).unsqueeze(-1)
        if field == "light_ambient":
            return nominal + draw.values(self._ambient, self._count).unsqueeze(-1)
        return (nominal != 0) & (draw.unit(self._count) >= self._off)


def _leaning(direction: Tensor, angle: Tensor, around: Tensor) -> Tensor:
    """Return unit vectors ``[n, k, 3]`` tilted by ``angle`` from ``direction`` ``[k, 3]``, at azimuth ``around``."""
    helper = torch.eye(3, dtype=direction.dtype, device=direction.device)
    upright = (direction[:, 2:].abs() > 0.9).to(direction.dtype)
    side = torch.linalg.cross(direction, upright * helper[0] + (1.0 - upright) * helper[2], dim=-1)
    side = side / side.norm(dim=-1, keepdim=True)
    other = torch.linalg.cross(direction, side, dim=-1)
    aside = around.cos().unsqueeze(-1) * side + around.sin().unsqueeze(-1) * other
    return angle.cos().unsqueeze(-1) * direction + angle.sin().unsqueeze(-1) * aside


def _mounted(world: World, chosen: Names | None) -> list[int]:
    """Return the ids of the configured cameras."""
    model = world.model
    all_names = [model.camera(i).name for i in range(model.ncam)]
    if not any(name.startswith(MOUNTED) for name in all_names):
        raise ConfigError(f"{world.key}.func: there is no camera in env.observations.cameras")
    names = [name.removeprefix(MOUNTED) if name.startswith(MOUNTED) else "" for name in all_names]
    still = model.cam_mode == int(mujoco.mjtCamLight.mjCAMLIGHT_FIXED)
    where = [bool(name) and bool(fixed) for name, fixed in zip(names, still, strict=True)]
    return find_names(world, "cameras", chosen, names, where, "of env.observations.cameras that follow nothing")


class CameraPose(EventTerm):
    """Poses of configured cameras: offsets along the axes of the parent frame, and rotations.

    ``roll`` rotates about the view direction, ``pitch`` upwards and ``yaw`` to the left.
    """

    fields = ("cam_pos", "cam_quat")

    def __init__(
        self, world: World, cameras: Names | None = None, pos: Offsets | None = None, rot: Angles | None = None
    ) -> None:
        super().__init__(world)
        found = _mounted(world, cameras)
        if not pos and not rot:
            raise ConfigError(f"{world.key}.params: expected pos or rot")
        offsets: dict[Any, Any] = pos or {}
        angles: dict[Any, Any] = rot or {}
        self._cameras, self._count = _index(world, found), len(found)
        self._pos = [offsets.get(axis, (0.0, 0.0)) for axis in "xyz"]
        self._rot = [angles.get(axis, (0.0, 0.0)) for axis in ("pitch", "yaw", "roll")]  # about its x, y and z axes
        self._nominal = [world.tensor(np.array(getattr(world.model, field)[found])) for field in self.fields]

    def apply(self, rows: Rows, draw: Draw) -> None:
        by = torch.stack([draw.values(bounds, self._count) for bounds in self._pos], dim=-1)
        vector = torch.stack([draw.values(bounds, self._count) for bounds in self._rot], dim=-1)
        # The rotation by |v| about v, which for small angles combines all three.
        angle = vector.norm(dim=-1, keepdim=True)
        turn = torch.cat(((0.5 * angle).cos(), 0.5 * torch.sinc(angle / (2.0 * torch.pi)) * vector), dim=-1)
        pos, quat = self._nominal
        turned = quaternion_product(quat.expand_as(turn), turn)
        for field, new in (("cam_pos", pos + by), ("cam_quat", turned)):
            rows[field][:, self._cameras] = new.to(rows[field].dtype)


class CameraFov(EventTerm):
    """Vertical field of view of configured cameras, in degrees."""

    fields = ("cam_fovy",)

    def __init__(self, world: World, range: Range, cameras: Names | None = None, operation: Operation = "add") -> None:
        super().__init__(world)
        found = _mounted(world, cameras)
        nominal = np.array(world.model.cam_fovy[found])
        ends = np.array([operate(nominal, end, operation) for end in range])
        _check(world, "range", float(ends.min()), float(ends.max()), 1.0, 179.0, "expected angles in [1, 179] degrees")
        self._cameras, self._range, self._operation = _index(world, found), range, operation
        self._nominal = world.tensor(nominal)

    def apply(self, rows: Rows, draw: Draw) -> None:
        drawn = draw.values(self._range, self._nominal.shape[0])
        new = operate(self._nominal, drawn, self._operation)
        rows["cam_fovy"][:, self._cameras] = new.to(rows["cam_fovy"].dtype)
