"""One offscreen picture to draw on: a GL context that is safe to use from threads, at exit and around ``fork``."""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import mujoco
import numpy as np

from embodichain.envs.gl import choose_backend
from embodichain.errors import RenderingError

_surfaces: weakref.WeakSet[Surface] = weakref.WeakSet()
_has_drawn = False
_inherited = False  # set in a process forked from one that had drawn


class Surface:
    """A GL context with its own framebuffer and the model's meshes and textures; current only while it draws.

    ``quality`` overrides fields of the model's ``<visual><quality>``, such as ``shadowsize``. Any thread may draw, one
    at a time. A child made by ``fork`` cannot: GL drivers do not survive it.
    """

    def __init__(self, model: mujoco.MjModel, height: int, width: int, quality: Mapping[str, int]) -> None:
        global _has_drawn
        self._context: Any = None
        self._drawing: Any = None
        self._turn = threading.RLock()
        _refuse_inherited()
        backend = choose_backend()
        module: Any = importlib.import_module(f"mujoco.{backend}")
        self._rectangle = mujoco.MjrRect(0, 0, width, height)
        self._rows = np.empty((height, width, 3), dtype=np.uint8)
        shaped = copy.copy(model)  # a context takes its size and quality from the model; the caller's stays as it is
        shaped.vis.global_.offwidth, shaped.vis.global_.offheight = width, height
        for name, value in quality.items():
            setattr(shaped.vis.quality, name, value)
        try:
            self._context = module.GLContext(width, height)
            if not _has_drawn:  # after the driver registered its own clean-up, so that ours comes first
                atexit.register(_close_all)
                _has_drawn = True
            with self._context.as_current():
                self._drawing = mujoco.MjrContext(shaped, int(mujoco.mjtFontScale.mjFONTSCALE_50))
                mujoco.mjr_setBuffer(int(mujoco.mjtFramebuffer.mjFB_OFFSCREEN), self._drawing)
        except (RuntimeError, ImportError, mujoco.FatalError) as error:
            raise RenderingError(f"{backend} cannot make a picture of {height}x{width} pixels: {error}") from error
        _surfaces.add(self)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Let this thread draw; at the end no context is current, so that another thread may."""
        _refuse_inherited()
        with self._turn:
            if self._context is None:
                raise RenderingError("this renderer was closed: make a new one")
            with self._context.as_current():
                yield

    def draw(self, scene: mujoco.MjvScene, out: np.ndarray) -> None:
        """Draw a scene, while ``current``, into uint8 ``out`` ``[height, width, 3]``, top row first."""
        mujoco.mjr_render(self._rectangle, scene, self._drawing)
        mujoco.mjr_readPixels(self._rows, None, self._rectangle, self._drawing)
        out[...] = self._rows[::-1]  # GL counts rows from the bottom

    def close(self) -> None:
        """Free the context; calling it twice is fine."""
        if _inherited:
            return
        with self._turn:
            if self._context is None:
                return
            if self._drawing is not None:
                with self._context.as_current():
                    self._drawing.free()
            self._context.free()
            self._context = self._drawing = None

    def __del__(self) -> None:
        self.close()


def _refuse_inherited() -> None:
    if _inherited:
        raise RenderingError(
            "this process was forked from one that had already drawn, and OpenGL does not survive a fork: "
            "start worker processes with the 'spawn' method, or draw nothing before they start"
        )


def _close_all() -> None:
    for surface in list(_surfaces):
        surface.close()


def _disown() -> None:
    """Leave a parent's contexts alone in the child: even freeing them could wait for threads that are not there."""
    global _inherited
    if not _has_drawn:
        return
    _inherited = True
    for surface in list(_surfaces):
        for owned in (surface._context, surface._drawing):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))  # never destroyed in this process
    egl = sys.modules.get("mujoco.egl")
    if egl is not None:
        setattr(egl, "EGL_DISPLAY", None)  # noqa: B010 - its clean-up at exit then has nothing to do


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_disown)
