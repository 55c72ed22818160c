"""Saving and restoring Gymnasium envs exactly, where that is possible.

It is for envs in this process whose whole state is known: Gymnasium's own classic-control and MuJoCo tasks, bare or in
the wrappers that ``gymnasium.make`` adds. Every env is saved as one row of bytes of fixed length: the random generator,
the step counter, and the arrays of the simulation. For MuJoCo these are all arrays of ``MjData`` that outlive a step,
not only positions and velocities: rewards are computed from body positions that lag the state by a substep.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from embodichain.envs.gymnasium_env.sync import RowwiseSyncVectorEnv

_WRAPPERS = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)
_MASK = (1 << 64) - 1


class _ClassicControl:
    """The ``state`` of Gymnasium's classic-control tasks: a few numbers, as float64, float32 or in a tuple."""

    @staticmethod
    def arrays(env: Any) -> list[np.ndarray]:
        values = env.state
        kind = 2 if isinstance(values, tuple) else int(values.dtype == np.float32)
        return [np.asarray(values, dtype=np.float64), np.array([kind], dtype=np.int64)]

    def memory(self, env: Any) -> list[np.ndarray]:
        """Return the bytes of these arrays."""
        return [_bytes(array) for array in self.arrays(env)]

    @staticmethod
    def restore(env: Any, arrays: list[np.ndarray]) -> None:
        values, kind = arrays[0].copy(), int(arrays[1][0])
        env.state = tuple(values.tolist()) if kind == 2 else values.astype(np.float32 if kind else np.float64)
        if "steps_beyond_terminated" in vars(env):  # CartPole counts steps after the end; we never make one
            env.steps_beyond_terminated = None


class _Mujoco:
    """All arrays of ``MjData`` whose size the model fixes (those in the arena live for one step only)."""

    def __init__(self, env: Any) -> None:
        fresh = type(env.data)(env.model)
        named = {name: getattr(fresh, name) for name in dir(fresh) if not name.startswith("_")}
        self._names = [name for name, value in named.items() if isinstance(value, np.ndarray) and value.size]
        self._views: dict[int, tuple[Any, list[np.ndarray]]] = {}

    def arrays(self, env: Any) -> list[np.ndarray]:
        # Sizes that grow with contacts are zero in fresh data, so they are not among the names.
        return [np.array([env.data.time]), *(getattr(env.data, name) for name in self._names)]

    def memory(self, env: Any) -> list[np.ndarray]:
        """Return the bytes of these arrays; those of ``MjData`` stay where they are, so they are looked up once."""
        data, views = self._views.get(id(env), (None, []))
        if data is not env.data:
            data, views = env.data, [_bytes(getattr(env.data, name)) for name in self._names]
            self._views[id(env)] = data, views
        return [np.array([data.time]).view(np.uint8), *views]

    def restore(self, env: Any, arrays: list[np.ndarray]) -> None:
        env.data.time = float(arrays[0][0])
        for name, value in zip(self._names, arrays[1:], strict=True):
            getattr(env.data, name)[...] = value


class SubEnvStates:
    """Reads and writes the states of the envs of a ``SyncVectorEnv`` as uint8 ``[num_envs, num_bytes]``."""

    def __init__(self, envs: list[gym.Env], kind: _ClassicControl | _Mujoco) -> None:
        self._envs = envs
        self._kind = kind

    @classmethod
    def of(cls, vector_env: VectorEnv) -> SubEnvStates | None:
        """Return the access to a vector env's states, or ``None`` where it could not be exact."""
        if not isinstance(vector_env, SyncVectorEnv) or type(vector_env) not in (SyncVectorEnv, RowwiseSyncVectorEnv):
            return None
        cores = [_core(env) for env in vector_env.envs]
        modules = {type(core).__module__ for core in cores}
        if all(module.startswith("gymnasium.envs.classic_control.") for module in modules):
            return cls(vector_env.envs, _ClassicControl())
        if all(module.startswith("gymnasium.envs.mujoco.") for module in modules):
            return cls(vector_env.envs, _Mujoco(cores[0]))
        return None

    def read(self) -> np.ndarray:
        """Return the states of all envs."""
        return np.stack([np.concatenate([*_bookkeeping(env), *self._kind.memory(env.unwrapped)]) for env in self._envs])

    def write(self, env_ids: np.ndarray, states: np.ndarray) -> None:
        """Put the rows of ``states`` into these envs, which were reset at least once."""
        for i, row in zip(env_ids.tolist(), states, strict=True):
            env, offset, parts = self._envs[i], 0, []
            for like in (_generator(env.unwrapped), np.array([_elapsed(env)]), *self._kind.arrays(env.unwrapped)):
                parts.append(row[offset : offset + like.nbytes].copy().view(like.dtype).reshape(like.shape))
                offset += like.nbytes
            _set_generator(env.unwrapped, parts[0])
            _set_elapsed(env, int(parts[1][0]))
            self._kind.restore(env.unwrapped, parts[2:])


def _bookkeeping(env: gym.Env) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of an env's random generator and step counter."""
    return _bytes(_generator(env.unwrapped)), _bytes(np.array([_elapsed(env)]))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _core(env: gym.Env) -> gym.Env | None:
    """Return the innermost env, or ``None`` if it stands in a wrapper whose state we do not know."""
    while isinstance(env, gym.Wrapper):
        if type(env) not in _WRAPPERS:
            return None
        env = env.env
    return env


def _limits(env: gym.Env) -> list[Any]:
    """Return the ``TimeLimit`` wrappers around an env."""
    found = []
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.TimeLimit):
            found.append(env)
        env = env.env
    return found


def _elapsed(env: gym.Env) -> int:
    return max((limit._elapsed_steps or 0 for limit in _limits(env)), default=0)


def _set_elapsed(env: gym.Env, steps: int) -> None:
    for limit in _limits(env):
        limit._elapsed_steps = steps


def _generator(env: gym.Env) -> np.ndarray:
    """Return the PCG64 generator of an env as uint64 ``[6]``."""
    state = env.np_random.bit_generator.state
    words = [(state["state"][key] >> shift) & _MASK for key in ("state", "inc") for shift in (64, 0)]
    return np.array([*words, state["has_uint32"], state["uinteger"]], dtype=np.uint64)


def _set_generator(env: gym.Env, words: np.ndarray) -> None:
    high, low, inc_high, inc_low, has_uint32, uinteger = (int(word) for word in words)
    generator = env.np_random.bit_generator
    generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": inc_high << 64 | inc_low},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
