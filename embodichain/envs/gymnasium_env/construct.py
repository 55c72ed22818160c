"""Builds vector envs without autoreset from an id or a function, and saves and restores the state of their envs."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from embodichain.envs.gymnasium_env.tasks import NO_LIMIT, TaskGymnasiumEnv, TaskGymnasiumVectorEnv
from embodichain.errors import ConfigError, EnvContractError, UnknownNameError, UntrustedModuleError
from embodichain.extras import module_name

_KNOWN_WRAPPERS = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)
_COMPATIBILITY = ("GymV21Environment-v0", "GymV26Environment-v0")
_MASK = (1 << 64) - 1
_UNPACK = "values to unpack \\(expected {}|cannot unpack|has no attribute '(items|keys)'"
_OLD = {
    "step": re.compile(_UNPACK.format(5)),
    "reset": re.compile(_UNPACK.format(2) + "|string indices must be|unexpected keyword argument '(seed|options)'"),
}
"""Messages of the errors that results or arguments of the old interface cause in Gymnasium."""


class RowwiseSyncVectorEnv(SyncVectorEnv):
    """A ``SyncVectorEnv`` without autoreset that updates only the rows of ``reset_mask`` if observations are arrays.

    Gymnasium's own rebuilds all observations at every reset. Returned observations are overwritten by the next call.
    """

    def __init__(self, makers: Sequence[Callable[[], gym.Env]]) -> None:
        super().__init__(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self._is_array = isinstance(self.single_observation_space, gym.spaces.Box)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if not self._is_array or options is None or "reset_mask" not in options or isinstance(seed, int):
            with self._declared_shapes("reset"):
                return super().reset(seed=seed, options=options)
        rest = {name: value for name, value in options.items() if name != "reset_mask"}
        ids = np.flatnonzero(options["reset_mask"])
        infos: dict[str, Any] = {}
        batch: Any = self._observations
        for env in ids.tolist():
            self._env_obs[env], info = self.envs[env].reset(seed=None if seed is None else seed[env], options=rest)
            with self._declared_shapes("reset"):
                batch[env] = self._env_obs[env]
            infos = self._add_info(infos, info, env)
        self._terminations[ids] = self._truncations[ids] = self._autoreset_envs[ids] = False
        return batch, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        with self._declared_shapes("step"):
            return super().step(actions)

    def __repr__(self) -> str:
        return f"{env_name(self.envs[0])} ({self.num_envs} envs)"

    @contextlib.contextmanager
    def _declared_shapes(self, call: str) -> Iterator[None]:
        """Raise ``EnvContractError`` if an observation just returned does not have its declared shape."""
        try:
            yield
        except ValueError as error:
            for observation in self._env_obs:
                if observation is not None and (problem := _mismatch(self.single_observation_space, observation)):
                    raise EnvContractError(
                        f"{env_name(self.envs[0])}: {call}() returned {problem}. Correct the observation or the space"
                    ) from error
            raise


def explain_old_interface(error: Exception, name: str, call: str) -> None:
    """Raise ``EnvContractError`` if ``step`` or ``reset`` failed because of the interface of old Gym environments.

    That is the case if the caller in Gymnasium, rather than the environment, could not use what it got. Gymnasium does
    not tell where an error of an asynchronous environment was raised.
    """
    module = str([frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)][-1])
    if not module.startswith(("gymnasium.", "embodichain.envs.gymnasium_env")) or not _OLD[call].search(str(error)):
        return
    expected, remedy = {
        "step": (
            "step must return (obs, reward, terminated, truncated, info)",
            "Return terminated and truncated apart",
        ),
        "reset": ("reset must take seed and options and return (obs, info)", "Return the info beside the observation"),
    }[call]
    wrap = "wrap an environment of old Gym by shimmy.GymV21CompatibilityV0 (pip install shimmy)"
    if module == "gymnasium.vector.async_vector_env":
        raise EnvContractError(
            f"{name}: {call} failed in another process: {error} (asynchronous: false shows where). If it has the "
            f"interface of old Gym: {expected}. {remedy}, or {wrap}"
        ) from error
    raise EnvContractError(f"{name}: {expected}, but: {error}. {remedy}, or {wrap}") from error


def env_name(env: gym.Env) -> str:
    """Return the id of an env, or its class name if it has none."""
    return type(env.unwrapped).__name__ if env.spec is None else str(env.spec.id)


def _mismatch(space: gym.Space[Any], observation: Any, path: str = "observation") -> str | None:
    """Return how an observation differs from its space, or ``None`` if keys and shapes match."""
    if isinstance(space, gym.spaces.Dict):
        missing = [key for key in space.spaces if not isinstance(observation, Mapping) or key not in observation]
        if missing:
            return f"{path} without the key {missing[0]!r}, but observation_space has it"
        below = (_mismatch(part, observation[key], f"{path}[{key!r}]") for key, part in space.spaces.items())
        return next((problem for problem in below if problem), None)
    got = np.shape(observation)
    if isinstance(space, gym.spaces.Box) and observation is not None and got != space.shape:
        return f"{path} of shape {got}, but observation_space declares {space.shape}"
    return None


class SubEnvStates:
    """Reads and writes the states of the envs of a ``SyncVectorEnv`` as uint8 ``[num_envs, num_bytes]``.

    Supported are Gymnasium's own classic-control and MuJoCo tasks, with the wrappers of ``gymnasium.make`` at most. A
    row holds the random generator, the step counter and the arrays of the simulation.
    """

    def __init__(self, envs: Sequence[gym.Env], fields: Sequence[str]) -> None:
        """``fields`` are the arrays of ``MjData`` to save; empty for classic control."""
        self._envs, self._fields = envs, fields

    @classmethod
    def of(cls, vector_env: VectorEnv) -> SubEnvStates | None:
        """Return the states of a vector env, or ``None`` if they could not be restored exactly."""
        if not isinstance(vector_env, SyncVectorEnv) or type(vector_env) not in (SyncVectorEnv, RowwiseSyncVectorEnv):
            return None
        if any(type(wrapper) not in _KNOWN_WRAPPERS for env in vector_env.envs for wrapper in _wrappers(env)):
            return None
        cores: list[Any] = [env.unwrapped for env in vector_env.envs]
        if all(type(core).__module__.startswith("gymnasium.envs.classic_control.") for core in cores):
            return cls(vector_env.envs, ())
        if not all(type(core).__module__.startswith("gymnasium.envs.mujoco.") for core in cores):
            return None
        # All arrays of fixed size, as rewards use body positions, which lag by a substep. The arena lives for one step.
        fresh = type(cores[0].data)(cores[0].model)
        named = {name: getattr(fresh, name) for name in dir(fresh) if not name.startswith("_")}
        return cls(vector_env.envs, [n for n, array in named.items() if isinstance(array, np.ndarray) and array.size])

    def read(self) -> np.ndarray:
        """Return the states of all envs."""
        rows = [
            [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in self._arrays(e)] for e in self._envs
        ]
        return np.stack([np.concatenate(row) for row in rows])

    def write(self, env_ids: np.ndarray, states: np.ndarray) -> None:
        """Write the rows of ``states`` into these envs, which must have been reset before."""
        for i, row in zip(env_ids.tolist(), states, strict=True):
            env, core, offset, parts = self._envs[i], self._envs[i].unwrapped, 0, []
            for like in self._arrays(env):
                parts.append(row[offset : offset + like.nbytes].copy().view(like.dtype).reshape(like.shape))
                offset += like.nbytes
            _set_generator(core, parts[0])
            for limit in _limits(env):
                limit._elapsed_steps = int(parts[1][0])
            self._restore(core, *parts[2:])

    def _arrays(self, env: gym.Env) -> list[np.ndarray]:
        core: Any = env.unwrapped
        elapsed = max((limit._elapsed_steps or 0 for limit in _limits(env)), default=0)
        kept = [_generator(core), np.array([elapsed])]
        if self._fields:
            return [*kept, np.array([core.data.time]), *(getattr(core.data, name) for name in self._fields)]
        state = np.asarray(core.state)
        return [*kept, state.astype(np.float64), np.array([state.dtype == np.float32], dtype=np.int64)]

    def _restore(self, core: Any, first: np.ndarray, *others: np.ndarray) -> None:
        if self._fields:
            core.data.time = float(first[0])
            for name, value in zip(self._fields, others, strict=True):
                getattr(core.data, name)[...] = value
            return
        core.state = first.astype(np.float32) if others[0][0] == 1 else first
        if "steps_beyond_terminated" in vars(core):  # CartPole counts steps after termination, which never happen here
            core.steps_beyond_terminated = None


def _wrappers(env: gym.Env) -> list[Any]:
    """Return the wrappers around an env, outermost first."""
    found = []
    while isinstance(env, gym.Wrapper):
        found.append(env)
        env = env.env
    return found


def _limits(env: gym.Env) -> list[Any]:
    return [wrapper for wrapper in _wrappers(env) if isinstance(wrapper, gym.wrappers.TimeLimit)]


def _generator(env: gym.Env) -> np.ndarray:
    """Return the PCG64 generator of an env as uint64 ``[6]``."""
    state = env.np_random.bit_generator.state
    words = [(state["state"][key] >> shift) & _MASK for key in ("state", "inc") for shift in (64, 0)]
    return np.array([*words, state["has_uint32"], state["uinteger"]], dtype=np.uint64)


def _set_generator(env: gym.Env, words: np.ndarray) -> None:
    high, low, inc_high, inc_low, has_uint32, uinteger = (int(word) for word in words)
    numbers = {"state": high << 64 | low, "inc": inc_high << 64 | inc_low}
    changed = {"state": numbers, "has_uint32": has_uint32, "uinteger": uinteger}
    env.np_random.bit_generator.state = {**env.np_random.bit_generator.state, **changed}


def resolve_spec(id: str, trusted_modules: Collection[str] = ()) -> EnvSpec:
    """Return the registered spec of an id; ``module:Name-v0`` imports ``module`` first, which must be trusted."""
    module, _, name = id.rpartition(":")
    if module and module not in map(module_name, trusted_modules):
        raise UntrustedModuleError(
            f"{id!r} would import the module {module!r}, which is not trusted. If you know what it runs, allow it by "
            f"name: trusted_modules=[{module!r}], or --trust {module} on the command line"
        )
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UnknownNameError(f"the module {module!r} of {id!r} cannot be imported: {error}") from error
    if name in _COMPATIBILITY and "shimmy" not in trusted_modules:  # it can import any module named in its kwargs
        raise UntrustedModuleError(f"{name} can import other modules: add 'shimmy' to the trusted modules to allow it")
    spec = gym.registry.get(name)
    if spec is None:  # without a version, the highest one
        with contextlib.suppress(gym.error.Error):
            namespace, bare, version = parse_env_id(name)
            latest = find_highest_version(namespace, bare) if version is None else version
            spec = gym.registry.get(get_env_id(namespace, bare, latest))
    if spec is None:
        close = difflib.get_close_matches(name, gym.registry, n=4, cutoff=0.5)
        hint = f"Did you mean {' or '.join(repr(c) for c in close)}?" if close else "No registered name is near."
        raise UnknownNameError(
            f"unknown Gymnasium environment {name!r}. {hint} An environment of another package is named "
            "'module:Name-v0', where importing module registers it."
        )
    if spec.entry_point is None:
        raise EnvContractError(
            f"{spec.id} is registered as a vector env only: wrap gymnasium.make_vec({spec.id!r}) instead"
        )
    return spec


def single_env(spec: EnvSpec, kwargs: Mapping[str, Any], max_episode_steps: int | None) -> gym.Env:
    """Make one env of a spec; ``max_episode_steps`` is for additional wrappers that need it."""
    if not spec.additional_wrappers:
        # The adapter enforces call order and time limit for all envs at once, faster than per-env wrappers.
        spec, max_episode_steps = copy.deepcopy(spec), -1
        spec.order_enforce = False
    # Pass the spec, never the id: Gymnasium would import a module named in the id.
    return gym.make(spec, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs)


def time_limit(asked: int | None, own: int | None) -> int | None:
    """Return the time limit in steps: the smaller of the requested and the env's own, or ``None``."""
    if asked is not None and (type(asked) is not int or asked < 1):
        raise ConfigError(f"max_episode_steps: expected an int of at least 1, got {asked!r}")
    return min((limit for limit in (asked, own) if limit is not None), default=None)


def vector_limit(vector_env: VectorEnv) -> int | None:
    """Return the time limit that a vector env declares, if any."""
    base = vector_env.unwrapped
    if isinstance(base, TaskGymnasiumVectorEnv):
        return base.max_episode_steps
    return env_limit(base.envs[0]) if isinstance(base, SyncVectorEnv) else _spec_limit(base.spec)


def env_limit(env: gym.Env) -> int | None:
    """Return the smallest time limit of an env's spec, its wrappers, or the task of this package that it wraps."""
    limits = [_spec_limit(env.spec), *(limit._max_episode_steps for limit in _limits(env))]
    if isinstance(env.unwrapped, TaskGymnasiumEnv):
        limits.append(env.unwrapped.vec_env.max_episode_steps)
    return min((limit for limit in limits if limit not in (None, NO_LIMIT)), default=None)


def _spec_limit(spec: EnvSpec | None) -> int | None:
    if spec is None:
        return None
    steps = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)  # make_vec keeps the limit in kwargs
    return steps if isinstance(steps, int) and steps > 0 else None
