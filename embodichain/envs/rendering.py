"""Cameras: frames ``[n, H, W, 3]`` of any envs, drawn offscreen from nothing but their state.

``Renderer`` draws one picture size; ``Cameras`` keeps a renderer for every size in use and knows cameras by name.
The state of an env comes from a function ``load(data, env)`` that copies it into an ``MjData``; drawing then computes
no more than the positions of what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import mujoco
import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from embodichain.config import MISSING, Config, configclass
from embodichain.envs.surface import Surface
from embodichain.errors import ConfigError, RenderingError, UnknownNameError, nearest

Load = Callable[[mujoco.MjData, int], None]
Quality = Literal["lean", "high"]
Pixels = Annotated[int, Field(gt=0, le=8192)]
Vector = tuple[float, float, float]

# Rounder shapes are invisible at the size of an observation and cost more than half of the drawing time there; flat
# ones keep MuJoCo's own 4x4 patches, because light is computed at their corners.
_LEAN = {"offsamples": 0, "shadowsize": 0, "numslices": 12, "numstacks": 6, "numquads": 4}
_HIGH = {"offsamples": 4, "shadowsize": 2048, "numslices": 28, "numstacks": 16, "numquads": 4}
_LEAN_OFF = ("SHADOW", "REFLECTION", "SKYBOX", "HAZE", "FOG")
_MAX_GEOMS = 10_000


@configclass
class CameraCfg(Config):
    """One camera: either one of the model (``attach``) or one that stands at ``pos`` and looks at ``lookat``."""

    name: str = MISSING
    """Name of the camera; its frames are observed as ``image/<name>``."""
    width: Pixels = 96
    """Width of the picture in pixels."""
    height: Pixels = 96
    """Height of the picture in pixels."""
    attach: str | None = None
    """Camera of the model to look through; without ``pos``, the one called ``name``."""
    pos: Vector | None = None
    """Where a free camera stands, in metres."""
    lookat: Vector | None = None
    """Point that a free camera has in the middle of its picture."""
    fovy: Annotated[float, Field(gt=0, lt=180)] | None = None
    """Vertical field of view in degrees; default: the camera's own."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.pos is None) != (self.lookat is None):
            raise ValueError("pos and lookat belong together: give both for a free camera, or neither")
        if self.pos is not None and self.attach is not None:
            raise ValueError("expected either attach (a camera of the model) or pos and lookat, got both")
        if self.pos is not None and self.pos == self.lookat:
            raise ValueError(f"lookat must differ from pos, got {self.pos} for both")
        return self


@dataclass(frozen=True)
class _View:
    camera: mujoco.MjvCamera
    fovy: float | None


class Renderer:
    """Draws frames of one size; any camera of the model, any envs, from any one thread at a time."""

    def __init__(self, model: mujoco.MjModel, size: tuple[int, int] = (96, 96), quality: Quality = "lean") -> None:
        self.model = model
        self.height, self.width = size
        if min(size) < 1 or max(size) > 8192:
            raise RenderingError(f"size must be (height, width) within 1 to 8192 pixels, got {size}")
        if quality not in ("lean", "high"):
            raise RenderingError(f"quality must be 'lean' or 'high', got {quality!r}")
        self._surface = _make_surface(model, size, quality)
        self._data = mujoco.MjData(model)
        self._scene = mujoco.MjvScene(model, _MAX_GEOMS)
        self._option = mujoco.MjvOption()
        if quality == "lean":
            for flag in _LEAN_OFF:
                self._scene.flags[int(getattr(mujoco.mjtRndFlag, f"mjRND_{flag}"))] = 0

    def render(
        self,
        load: Load,
        env_ids: Sequence[int] | np.ndarray | Tensor,
        camera: str | CameraCfg | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return uint8 frames ``[len(env_ids), height, width, 3]`` in the order of ``env_ids``.

        ``camera`` is a name from the model, a config (whose size is not looked at), or ``None`` for the model's first
        camera. ``out`` receives the frames if given; otherwise every call returns a new array.
        """
        ids = np.asarray(env_ids).reshape(-1).tolist()
        shape = (len(ids), self.height, self.width, 3)
        if out is None:
            out = np.empty(shape, dtype=np.uint8)
        elif out.shape != shape or out.dtype != np.uint8:
            raise RenderingError(f"out must be uint8 of shape {shape}, got {out.dtype} of shape {out.shape}")
        view = _find_view(self.model, camera)
        with self._surface.current():
            for frame, env in zip(out, ids, strict=True):
                load(self._data, env)
                self._update_scene(view)
                self._surface.draw(self._scene, frame)
        return out

    def _update_scene(self, view: _View) -> None:
        """Bring the scene up to date with the loaded positions."""
        model, data = self.model, self._data
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)  # for cameras and lights that follow a centre of mass
        mujoco.mj_camlight(model, data)
        if model.nflex:
            mujoco.mj_flex(model, data)
        if model.ntendon:
            mujoco.mj_tendon(model, data)
        everything = int(mujoco.mjtCatBit.mjCAT_ALL)
        mujoco.mjv_updateScene(model, data, self._option, None, view.camera, everything, self._scene)
        if view.fovy is not None:
            for eye in self._scene.camera:
                # MuJoCo reads fovy as an angle in degrees, or as a length for an orthographic camera.
                half = view.fovy / 2 if eye.orthographic else eye.frustum_near * math.tan(math.radians(view.fovy) / 2)
                eye.frustum_top, eye.frustum_bottom = half, -half
                eye.frustum_center = eye.frustum_width = 0.0  # the width follows from the picture's shape

    def close(self) -> None:
        """Free the GL context; calling it twice is fine."""
        self._surface.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Cameras:
    """The cameras of one model by name, configured ones first; one renderer per size and quality, made when needed."""

    def __init__(self, model: mujoco.MjModel, cfgs: Iterable[CameraCfg] = ()) -> None:
        self.model = model
        self.cfgs: dict[str, CameraCfg] = {}
        for cfg in cfgs:
            if cfg.name in self.cfgs:
                raise ConfigError(f"two cameras are called {cfg.name!r}: names must differ", "cameras")
            _find_view(model, cfg)
            self.cfgs[cfg.name] = cfg
        self._renderers: dict[tuple[tuple[int, int], Quality], Renderer] = {}

    @property
    def names(self) -> list[str]:
        """Names that ``render`` knows: configured cameras and those of the model."""
        return [*self.cfgs, *(name for name in camera_names(self.model) if name not in self.cfgs)]

    def render(
        self,
        load: Load,
        env_ids: Sequence[int] | np.ndarray | Tensor,
        camera: str | None = None,
        size: tuple[int, int] | None = None,
        quality: Quality = "lean",
    ) -> np.ndarray:
        """Return uint8 frames ``[len(env_ids), H, W, 3]``; ``size`` (height, width) defaults to the camera's own."""
        cfg = self.cfgs.get(camera) if camera is not None else next(iter(self.cfgs.values()), None)
        if size is None:
            size = (cfg.height, cfg.width) if cfg is not None else (CameraCfg.height, CameraCfg.width)
        if cfg is None and camera is not None and camera not in camera_names(self.model):
            raise UnknownNameError(f"no camera is called {camera!r}.{nearest(camera, self.names)}")
        key = (size, quality)
        if key not in self._renderers:
            self._renderers[key] = Renderer(self.model, size, quality)
        return self._renderers[key].render(load, env_ids, cfg or camera)

    def close(self) -> None:
        """Free all GL contexts; calling it twice is fine."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()


def camera_names(model: mujoco.MjModel) -> list[str]:
    """Return the names of the model's cameras, in its order."""
    return [model.camera(i).name for i in range(model.ncam)]


def _make_surface(model: mujoco.MjModel, size: tuple[int, int], quality: Quality) -> Surface:
    """Open a surface whose cost fits its use; a model that asks for less than ``high`` gets what it asks for."""
    asked = model.vis.quality
    settings = {"lean": _LEAN, "high": _HIGH}[quality]
    return Surface(model, *size, quality={name: min(value, getattr(asked, name)) for name, value in settings.items()})


def _find_view(model: mujoco.MjModel, camera: str | CameraCfg | None) -> _View:
    """Resolve a camera to what MuJoCo draws from."""
    view = mujoco.MjvCamera()
    cfg = camera if isinstance(camera, CameraCfg) else None
    fovy = cfg.fovy if cfg is not None else None
    if cfg is not None and cfg.pos is not None and cfg.lookat is not None:
        ahead = np.subtract(cfg.lookat, cfg.pos)
        view.type = int(mujoco.mjtCamera.mjCAMERA_FREE)
        view.lookat[:] = cfg.lookat
        view.distance = float(np.linalg.norm(ahead))
        view.azimuth = math.degrees(math.atan2(ahead[1], ahead[0]))
        view.elevation = math.degrees(math.asin(ahead[2] / view.distance))
        return _View(view, fovy)
    name = (cfg.attach or cfg.name) if cfg is not None else camera
    if name is None and model.ncam == 0:
        mujoco.mjv_defaultFreeCamera(model, view)
        return _View(view, fovy)
    names = camera_names(model)
    if name is not None and name not in names:
        raise UnknownNameError(f"the model has no camera {name!r}.{nearest(str(name), names)}")
    view.type = int(mujoco.mjtCamera.mjCAMERA_FIXED)
    view.fixedcamid = 0 if name is None else names.index(str(name))
    return _View(view, fovy)
