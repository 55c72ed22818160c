"""Offscreen rendering of any envs from their state: colour, depth and segmentation images ``[n, H, W, ...]``.

``Renderer`` renders one image size; ``Cameras`` has a renderer for every size in use and finds cameras by name.
``load(data, env)`` copies the state of an env into an ``MjData``.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import importlib
import math
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.gl_backend import choose_backend
from embodichain.envs.physics import Images, Load, Quality
from embodichain.envs.scene_cfg import OBSERVED_AS, CameraCfg, Output
from embodichain.errors import ConfigError, RenderingError, UnknownNameError, nearest

MOUNTED = "observed/"
"""Prefix of configured cameras, and of materials for them, in a model."""
Material = Literal["plain", "checker", "gradient", "noise", "cross"]
MATERIALS: dict[Material, tuple[str, str]] = {
    "plain": ("NONE", "NONE"),
    "checker": ("CHECKER", "NONE"),
    "gradient": ("GRADIENT", "NONE"),
    "noise": ("FLAT", "RANDOM"),
    "cross": ("FLAT", "CROSS"),
}
"""Materials in models with configured cameras: MuJoCo's builtin texture and mark."""
# Rounder shapes look the same in small images and take twice the time; planes keep 4x4 patches, lit at their corners.
_QUALITY = {
    "lean": {"offsamples": 0, "shadowsize": 0, "numslices": 12, "numstacks": 6, "numquads": 4},
    "high": {"offsamples": 4, "shadowsize": 2048, "numslices": 28, "numstacks": 16, "numquads": 4},
}
_ROUND = {"numslices": 28, "numstacks": 16}
"""Facets of round shapes in depth images: they lie up to 0.6% of the radius below the surface, 12 slices up to 3.4%."""
_LEAN_OFF = ("SHADOW", "REFLECTION", "SKYBOX", "HAZE", "FOG")
_MAX_GEOMS = 10_000
_FOVY = 45.0
_INTRINSICS = ("sensor_size", "resolution", "focal_length", "focal_pixel", "principal_length", "principal_pixel")

_renderers: weakref.WeakSet[Renderer] = weakref.WeakSet()
_has_rendered = False
_inherited = False  # set in a child forked from a process that had rendered


class Renderer:
    """Renders images of one size: any camera of the model and any envs, from one thread at a time.

    Its GL context is current only while it renders. A forked child cannot render, as GL drivers do not support it.
    """

    def __init__(self, model: mujoco.MjModel, size: tuple[int, int] = (96, 96), quality: Quality = "lean") -> None:
        self._context: Any = None
        self._drawing: Any = None
        self._depth_drawing: Any = None
        self._turn = threading.RLock()
        if min(size) < 1 or max(size) > 8192:
            raise RenderingError(f"size must be (height, width) within 1 to 8192 pixels, got {size}")
        if quality not in _QUALITY:
            raise RenderingError(f"quality must be 'lean' or 'high', got {quality!r}")
        self.model = model
        self.height, self.width = size
        self._quality = quality
        self._open(quality)
        self._rectangle = mujoco.MjrRect(0, 0, self.width, self.height)
        self._pixels = np.empty((self.height, self.width, 3), dtype=np.uint8)
        self._depth = np.empty((self.height, self.width), dtype=np.float32)
        self._bodies = {
            int(mujoco.mjtObj.mjOBJ_GEOM): model.geom_bodyid,
            int(mujoco.mjtObj.mjOBJ_SITE): model.site_bodyid,
        }
        self._data = mujoco.MjData(model)
        self._scene = mujoco.MjvScene(model, _MAX_GEOMS)
        self._option = mujoco.MjvOption()
        for flag in _LEAN_OFF if quality == "lean" else ():
            self._scene.flags[int(getattr(mujoco.mjtRndFlag, f"mjRND_{flag}"))] = 0

    def _open(self, quality: Quality) -> None:
        """Create the GL context."""
        global _has_rendered
        _refuse_inherited()
        backend = choose_backend()
        module: Any = importlib.import_module(f"mujoco.{backend}")
        try:
            self._context = module.GLContext(self.width, self.height)
            if not _has_rendered:  # after the driver has registered its clean-up, so that ours runs first
                atexit.register(_close_all)
                _has_rendered = True
            with _current(self._context):
                self._drawing = self._new_drawing(_QUALITY[quality])
        except (RuntimeError, ImportError, mujoco.FatalError) as error:
            raise RenderingError(f"{backend} cannot make an image of {self.height}x{self.width}: {error}") from error
        _renderers.add(self)

    def _new_drawing(self, quality: Mapping[str, int]) -> Any:
        """Return a new MuJoCo context in the current GL context; lower settings of the model are kept."""
        shaped = copy.copy(self.model)  # a context reads size and quality from the model; the caller's stays unchanged
        shaped.vis.global_.offwidth, shaped.vis.global_.offheight = self.width, self.height
        for name, value in quality.items():
            setattr(shaped.vis.quality, name, min(value, getattr(shaped.vis.quality, name)))
        drawing = mujoco.MjrContext(shaped, int(mujoco.mjtFontScale.mjFONTSCALE_50))
        drawing.readDepthMap = int(mujoco.mjtDepthMap.mjDEPTH_ZEROFAR)  # precision at large distances
        return drawing

    def render(
        self, load: Load, env_ids: Sequence[int] | np.ndarray | Tensor, camera: str | CameraCfg | None = None
    ) -> np.ndarray:
        """Return uint8 images ``[len(env_ids), height, width, 3]`` in the order of ``env_ids``.

        ``camera`` is a name from the model, a config (whose size is ignored), or ``None`` for the model's first camera.
        """
        return self.render_outputs(load, env_ids, camera)["rgb"]

    def render_outputs(
        self,
        load: Load,
        env_ids: Sequence[int] | np.ndarray | Tensor,
        camera: str | CameraCfg | None = None,
        outputs: Sequence[Output] = ("rgb",),
    ) -> dict[Output, np.ndarray]:
        """Return the images of :meth:`render`, ``depth`` (float32) and ``segmentation`` (int32), ``[n, H, W, 1]`` each.

        Depth is in metres along the view direction, infinite for the background. Segmentation ids index
        :func:`segmentation_names`. Both come from a second pass in which everything is opaque; with depth, round shapes
        have more facets in it.
        """
        if "segmentation" in outputs and self._quality != "lean":
            raise RenderingError("segmentation needs quality 'lean': the average of several samples is no id")
        ids = np.asarray(env_ids).reshape(-1).tolist()
        shapes = {"rgb": (3, np.uint8), "depth": (1, np.float32), "segmentation": (1, np.int32)}
        out: dict[Output, np.ndarray] = {
            name: np.empty((len(ids), self.height, self.width, shapes[name][0]), shapes[name][1]) for name in outputs
        }
        view, fovy = _find_view(self.model, camera)
        _refuse_inherited()
        with self._turn:
            if self._context is None:
                raise RenderingError("this renderer was closed: make a new one")
            with _current(self._context):  # afterwards no context is current, so that another thread may render
                if "depth" in out and self._depth_drawing is None:
                    try:
                        self._depth_drawing = self._new_drawing(_QUALITY[self._quality] | _ROUND)
                    except (RuntimeError, mujoco.FatalError) as error:
                        problem = f"cannot make a depth image of {self.height}x{self.width}: {error}"
                        raise RenderingError(problem) from error
                for row, env in enumerate(ids):
                    load(self._data, env)
                    self._update_scene(view, fovy)
                    self._draw({name: images[row] for name, images in out.items()})
        if "depth" in out:
            out["depth"] = self._metres(out["depth"])
        return out

    def _draw(self, images: dict[Output, np.ndarray]) -> None:
        """Render the scene into the images of one env; depth keeps OpenGL's values."""
        if "rgb" in images:
            self._draw_with(self._drawing, self._pixels, None)
            images["rgb"][...] = self._pixels[::-1]  # OpenGL's first row is at the bottom
        if images.keys() == {"rgb"}:
            return
        before = self._scene.flags.copy()
        self._scene.flags[[int(mujoco.mjtRndFlag.mjRND_SEGMENT), int(mujoco.mjtRndFlag.mjRND_IDCOLOR)]] = 1
        pixels = self._pixels if "segmentation" in images else None
        if "depth" in images:
            self._draw_with(self._depth_drawing, pixels, self._depth)
        else:
            self._draw_with(self._drawing, pixels, None)
        self._scene.flags[:] = before
        if "depth" in images:
            images["depth"][..., 0] = self._depth[::-1]
        if "segmentation" in images:
            numbers = self._pixels[::-1].astype(np.int32) @ np.array([1, 256, 65536], np.int32)
            images["segmentation"][..., 0] = self._ids()[numbers]

    def _draw_with(self, drawing: Any, pixels: np.ndarray | None, depth: np.ndarray | None) -> None:
        """Render the scene with one of the MuJoCo contexts, which draw into buffers of their own."""
        mujoco.mjr_setBuffer(int(mujoco.mjtFramebuffer.mjFB_OFFSCREEN), drawing)
        mujoco.mjr_render(self._rectangle, self._scene, drawing)
        mujoco.mjr_readPixels(pixels, depth, self._rectangle, drawing)

    def _ids(self) -> np.ndarray:
        """Return the body id of each number in a segmentation render; 0 is the background."""
        table = np.zeros(self._scene.ngeom + 1, np.int32)
        for shape in self._scene.geoms[: self._scene.ngeom]:
            bodies = self._bodies.get(shape.objtype)
            if bodies is not None and shape.segid >= 0:
                table[shape.segid + 1] = bodies[shape.objid] + 1
        return table

    def _metres(self, depth: np.ndarray) -> np.ndarray:
        """Convert OpenGL's depth, 1 at the near plane and 0 at the far plane and beyond, to metres."""
        extent, planes = self.model.stat.extent, self.model.vis.map
        near, far = planes.znear * extent, planes.zfar * extent
        exact = depth.astype(np.float64)
        with np.errstate(divide="ignore"):
            if self._scene.camera[0].orthographic:
                metres = far - exact * (far - near)
            else:
                metres = near * far / (near + exact * (far - near))
        return np.where(depth > 0.0, metres, np.inf).astype(np.float32)

    def _update_scene(self, view: mujoco.MjvCamera, fovy: float | None) -> None:
        """Update the scene with the loaded positions."""
        model, data = self.model, self._data
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)  # for cameras and lights that track a centre of mass
        mujoco.mj_camlight(model, data)
        if model.nflex:
            mujoco.mj_flex(model, data)
        if model.ntendon:
            mujoco.mj_tendon(model, data)
        everything = int(mujoco.mjtCatBit.mjCAT_ALL)
        mujoco.mjv_updateScene(model, data, self._option, None, view, everything, self._scene)
        if fovy is not None:
            for eye in self._scene.camera:
                # MuJoCo reads fovy in degrees, or as a length for an orthographic camera.
                half = fovy / 2 if eye.orthographic else eye.frustum_near * math.tan(math.radians(fovy) / 2)
                eye.frustum_top, eye.frustum_bottom = half, -half
                eye.frustum_center = eye.frustum_width = 0.0  # derived from the aspect ratio

    def close(self) -> None:
        """Release the GL context; may be called more than once."""
        if _inherited:
            return
        with self._turn:
            if self._context is None:
                return
            drawings = [drawing for drawing in (self._drawing, self._depth_drawing) if drawing is not None]
            if drawings:
                with _current(self._context):
                    for drawing in drawings:
                        drawing.free()
            self._context.free()
            self._context = self._drawing = self._depth_drawing = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def _current(context: Any) -> Iterator[None]:
    """Make a GL context current in this thread, and none afterwards, so that another thread may render."""
    if hasattr(context, "as_current"):  # since MuJoCo 4
        with context.as_current():
            yield
        return
    module: Any = sys.modules[type(context).__module__]
    context.make_current()
    try:
        yield
    finally:
        if module.__name__ == "mujoco.egl":
            none = module.EGL.EGL_NO_SURFACE
            module.EGL.eglMakeCurrent(module.EGL_DISPLAY, none, none, module.EGL.EGL_NO_CONTEXT)
        elif module.__name__ == "mujoco.osmesa":
            module.osmesa.OSMesaMakeCurrent(None, None, module.GL.GL_FLOAT, 0, 0)
        elif module.__name__ == "mujoco.glfw":
            module.glfw.make_context_current(None)


def _refuse_inherited() -> None:
    if _inherited:
        raise RenderingError(
            "this process was forked from one that had already drawn, and OpenGL does not survive a fork: "
            "start worker processes with the 'spawn' method, or draw nothing before they start"
        )


def _close_all() -> None:
    for renderer in list(_renderers):
        renderer.close()


def _disown() -> None:
    """Ignore a parent's contexts in a forked child: even freeing them could wait for threads that do not exist."""
    global _inherited
    if not _has_rendered:
        return
    _inherited = True
    for renderer in list(_renderers):
        for owned in (renderer._context, renderer._drawing, renderer._depth_drawing):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))  # never freed in this process
    egl = sys.modules.get("mujoco.egl")
    if egl is not None:
        setattr(egl, "EGL_DISPLAY", None)  # noqa: B010 - disables its clean-up at exit
        atexit.unregister(egl.EGL.eglTerminate)  # registered by MuJoCo 3 with the display


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_disown)


class Cameras:
    """The cameras of a model by name, configured ones first; one renderer per size and quality, created on demand."""

    def __init__(self, model: mujoco.MjModel, cfgs: Iterable[CameraCfg] = (), varied: bool = False) -> None:
        """``varied``: ``load`` also writes to the model of its data, so renderers use copies of the model."""
        self.model, self._varied = model, varied
        self.cfgs: dict[str, CameraCfg] = {}
        for cfg in cfgs:
            if cfg.name in self.cfgs:
                raise ConfigError(f"two cameras are called {cfg.name!r}: names must differ", "cameras")
            _find_view(model, cfg)
            self.cfgs[cfg.name] = cfg
        self._renderers: dict[tuple[tuple[int, int], Quality], Renderer] = {}

    @property
    def names(self) -> list[str]:
        """Names of configured cameras and of those of the model."""
        return [*self.cfgs, *(name for name in camera_names(self.model) if name not in self.cfgs)]

    def render(
        self,
        load: Load,
        env_ids: Sequence[int] | np.ndarray | Tensor,
        camera: str | None = None,
        size: tuple[int, int] | None = None,
        quality: Quality = "lean",
    ) -> np.ndarray:
        """Return uint8 images ``[len(env_ids), H, W, 3]``; ``size`` (height, width) defaults to the camera's own."""
        renderer, cfg = self._find(camera, size, quality)
        return renderer.render(load, env_ids, cfg or camera)

    def observe(self, load: Load, env_ids: Sequence[int] | np.ndarray | Tensor) -> Images:
        """Return the observations of the configured cameras for these envs, at quality ``lean``."""
        images: Images = {}
        for name, cfg in self.cfgs.items():
            renderer, _ = self._find(name, None, "lean")
            for output, values in renderer.render_outputs(load, env_ids, cfg, cfg.outputs).items():
                shown = np.clip(values, cfg.near, cfg.far) if output == "depth" else values
                images.setdefault(OBSERVED_AS[output], {})[name] = torch.from_numpy(shown)
        return images

    def _find(
        self, camera: str | None, size: tuple[int, int] | None, quality: Quality
    ) -> tuple[Renderer, CameraCfg | None]:
        """Return a renderer for a camera, and its config if it has one."""
        cfg = self.cfgs.get(camera) if camera is not None else next(iter(self.cfgs.values()), None)
        if size is None:
            size = (cfg.height, cfg.width) if cfg is not None else (CameraCfg.height, CameraCfg.width)
        if cfg is None and camera is not None and camera not in camera_names(self.model):
            raise UnknownNameError(f"no camera is called {camera!r}.{nearest(camera, self.names)}")
        renderer = self._renderers.get((size, quality))
        if renderer is None:
            model = copy.copy(self.model) if self._varied else self.model
            renderer = self._renderers[size, quality] = Renderer(model, size, quality)
        return renderer, cfg

    @property
    def segmentation_names(self) -> tuple[str, ...]:
        """The name of each segmentation id."""
        return segmentation_names(self.model)

    def bounds(self) -> dict[tuple[str, ...], tuple[float, float]]:
        """Return the minimum and maximum of every camera observation, by ``(group, camera)``."""
        cameras = self.cfgs.values()
        return {(OBSERVED_AS[o], cfg.name): bounds_of(cfg, o, self.model) for cfg in cameras for o in cfg.outputs}

    def close(self) -> None:
        """Release all GL contexts; may be called more than once."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()


def segmentation_names(model: mujoco.MjModel) -> tuple[str, ...]:
    """Return the name of each segmentation id: the background, then the bodies in model order."""
    return ("background", *(model.body(i).name or f"body {i}" for i in range(model.nbody)))


def bounds_of(cfg: CameraCfg, output: Output, model: mujoco.MjModel) -> tuple[float, float]:
    """Return the minimum and maximum of an output of a camera."""
    return {"rgb": (0, 255), "depth": (cfg.near, cfg.far), "segmentation": (0, model.nbody)}[output]


def camera_names(model: mujoco.MjModel) -> list[str]:
    """Return the names of the model's cameras, in order."""
    return [model.camera(i).name for i in range(model.ncam)]


def _camera_id(model: mujoco.MjModel, name: str, key: str = "") -> int:
    names = camera_names(model)
    if name not in names:
        raise UnknownNameError(f"{key}the model has no camera {name!r}.{nearest(name, names)}")
    return names.index(name)


def _find_view(model: mujoco.MjModel, camera: str | CameraCfg | None) -> tuple[mujoco.MjvCamera, float | None]:
    """Resolve a camera to a MuJoCo camera, and its vertical field of view if it overrides the default."""
    view, fovy = mujoco.MjvCamera(), None
    if isinstance(camera, CameraCfg) and mounted_name(camera) in camera_names(model):
        camera = mounted_name(camera)
    if isinstance(camera, CameraCfg):
        fovy = camera.fovy
        if camera.pos is not None and camera.lookat is not None:
            ahead = np.subtract(camera.lookat, camera.pos)
            view.type = int(mujoco.mjtCamera.mjCAMERA_FREE)
            view.lookat[:] = camera.lookat
            view.distance = float(np.linalg.norm(ahead))
            view.azimuth = math.degrees(math.atan2(ahead[1], ahead[0]))
            view.elevation = math.degrees(math.asin(ahead[2] / view.distance))
            return view, fovy
        camera = camera.attach or camera.name
    if camera is None and model.ncam == 0:
        mujoco.mjv_defaultFreeCamera(model, view)
    else:
        view.type = int(mujoco.mjtCamera.mjCAMERA_FIXED)
        view.fixedcamid = 0 if camera is None else _camera_id(model, camera)
    return view, fovy


def mounted_name(cfg: CameraCfg) -> str:
    """Return the name of a configured camera in the model."""
    return f"{MOUNTED}{cfg.name}"


def mount_cameras(spec: mujoco.MjSpec, cfgs: Sequence[CameraCfg]) -> mujoco.MjModel:
    """Compile a model with all configured cameras, so that they may differ between envs, and with materials."""
    model = spec.compile()
    for cfg in cfgs:
        if cfg.pos is not None and cfg.lookat is not None:
            own = {"pos": cfg.pos, "quat": looking(cfg.pos, cfg.lookat), "fovy": cfg.fovy or _FOVY}
            spec.worldbody.add_camera(name=mounted_name(cfg), **own)
            continue
        camera = model.camera(_camera_id(model, cfg.attach or cfg.name, "env.observations.cameras: "))
        source = next(view for view in spec.cameras if view.name == camera.name)
        own = {"pos": camera.pos.copy(), "quat": camera.quat.copy(), "fovy": cfg.fovy or float(camera.fovy[0])}
        copied = ("mode", "targetbody", "proj") if cfg.fovy else ("mode", "targetbody", "proj", *_INTRINSICS)
        own |= {name: getattr(source, name) for name in copied}
        source.parent.add_camera(name=mounted_name(cfg), **own)
    for name, (pattern, marks) in MATERIALS.items():
        material = spec.add_material(name=f"{MOUNTED}{name}", texrepeat=[3, 3])
        if pattern == "NONE":
            continue
        spec.add_texture(
            name=f"{MOUNTED}{name}",
            type=mujoco.mjtTexture.mjTEXTURE_2D,
            builtin=getattr(mujoco.mjtBuiltin, f"mjBUILTIN_{pattern}"),
            mark=getattr(mujoco.mjtMark, f"mjMARK_{marks}"),
            rgb1=[1.0, 1.0, 1.0],
            rgb2=[0.4, 0.4, 0.4],
            markrgb=[0.3, 0.3, 0.3],
            random=0.3,
            width=64,
            height=64,
        )
        material.textures[int(mujoco.mjtTextureRole.mjTEXROLE_RGB)] = f"{MOUNTED}{name}"
    return spec.compile()


def looking(pos: Sequence[float], lookat: Sequence[float]) -> np.ndarray:
    """Return the orientation of an upright camera, which looks along its -z axis with x to the right."""
    ahead = np.subtract(lookat, pos)
    ahead = ahead / np.linalg.norm(ahead)
    heading = math.atan2(ahead[1], ahead[0])
    right = np.array([math.sin(heading), -math.cos(heading), 0.0])
    axes = np.stack((right, np.cross(-ahead, right), -ahead), axis=1)
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, axes.flatten())
    return quat
