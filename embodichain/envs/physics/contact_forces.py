"""Contact forces, ``cfrc_ext``, for a batch; MuJoCo does not compute them by default.

Preferably, the model has an engine plugin whose ``advance``, which MuJoCo calls at the end of every step, is
``mj_rnePostConstraint``. Then ``mujoco.batch`` provides them like any other field, on its own threads. A model without
the plugin is stepped env by env on Python threads. Both are bit-identical to ``mj_step`` and ``mj_rnePostConstraint``.
"""

import copy
import ctypes
import logging
import re
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

_LOG = logging.getLogger(__name__)
_PLUGIN = "embodichain.contact_forces"
_CALLBACKS = ("nstate", "nsensordata", "init", "destroy", "copy", "reset", "compute", "advance", "visualize")


class _Plugin(ctypes.Structure):
    """``mjpPlugin`` up to the callbacks needed here, with padding for the others."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("nattribute", ctypes.c_int),
        ("attributes", ctypes.c_void_p),
        ("capabilityflags", ctypes.c_int),
        ("needstage", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in _CALLBACKS),
        ("others", ctypes.c_void_p * 32),
    ]


@cache
def _register() -> bool:
    """Register the plugin with MuJoCo, once; return whether that succeeded."""
    files = sorted(Path(mujoco.__file__).parent.iterdir())
    names = [path for path in files if re.match(r"(lib)?mujoco\.(.*\.)?(so|dylib|dll)(\.|$)", path.name)]
    try:
        library = ctypes.CDLL(str(names[0]))  # already loaded
        plugin = _Plugin()
        library.mjp_defaultPlugin(ctypes.byref(plugin))
        plugin.name = _PLUGIN.encode()
        # MuJoCo's own functions as callbacks, so that no thread waits for the interpreter. As ``nstate`` of instance 0,
        # ``mj_stateSize(model, 0)`` returns 0: the plugin has no state.
        plugin.nstate = ctypes.cast(library.mj_stateSize, ctypes.c_void_p)
        plugin.advance = ctypes.cast(library.mj_rnePostConstraint, ctypes.c_void_p)
        library.mjp_registerPlugin(ctypes.byref(plugin))
    except (IndexError, OSError, AttributeError) as error:
        _LOG.info("contact forces are computed on Python's threads: %s", error or "MuJoCo's library was not found")
        return False
    return True


def ask_for_contact_forces(spec: mujoco.MjSpec) -> None:
    """Make a model compute contact forces in every step; models with other plugins are left unchanged."""
    if not list(spec.plugins) and _register():
        spec.activate_plugin(_PLUGIN)
        spec.add_plugin(name=_PLUGIN, plugin_name=_PLUGIN, active=True)


def computes_contact_forces(model: mujoco.MjModel) -> bool:
    """Return whether a model was compiled after :func:`ask_for_contact_forces`."""
    return mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_PLUGIN, _PLUGIN) >= 0


class ContactForces:
    """Steps the envs of a batch and computes ``cfrc_ext``, for models without the plugin; one ``MjData`` per thread.

    MuJoCo releases the interpreter lock, so Python threads run in parallel.
    """

    def __init__(self, model: mujoco.MjModel, batch: Any, outputs: dict[str, np.ndarray], num_threads: int) -> None:
        self._batch, self._outputs = batch, outputs
        self._models = [model] * num_threads
        self._data = [mujoco.MjData(model) for _ in range(num_threads)]
        self._pool = ThreadPoolExecutor(num_threads) if num_threads > 1 else None
        self._differ = False

    def let_models_differ(self) -> None:
        """Use a separate model per env from now on, as model fields differ between envs."""
        if not self._differ:
            self._models, self._differ = [copy.copy(model) for model in self._models], True

    def step(self, count: int) -> None:
        """Advance all envs by ``count`` substeps, and write their states, outputs and warnings."""
        shares = np.array_split(np.arange(len(self._batch.state)), len(self._data))
        work = list(zip(self._models, self._data, shares, strict=True))
        if self._pool is None:
            self._step_some(*work[0], count)
            return
        futures = [self._pool.submit(self._step_some, *share, count) for share in work]
        wait(futures)  # wait for all, so that no thread still writes after a failure
        for future in futures:
            future.result()

    def _step_some(self, model: mujoco.MjModel, data: mujoco.MjData, envs: np.ndarray, count: int) -> None:
        rows, warnings = self._batch.state, data.warning.number
        whole = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        fields = [(getattr(data, name), array) for name, array in self._outputs.items()]
        for env in envs.tolist():
            if self._differ:
                self._batch.get_model(env, model)
            mujoco.mj_setState(model, data, rows[env], whole)
            mujoco.mj_step(model, data, count)
            mujoco.mj_rnePostConstraint(model, data)
            mujoco.mj_getState(model, data, rows[env], whole)
            for field, array in fields:
                array[env] = field
            if warnings.any():
                self._batch.warning[env, :, 1] += warnings
                warnings[:] = 0

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()
