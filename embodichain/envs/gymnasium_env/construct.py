"""From an id or a function to a vector env that leaves resetting to us, and the exact state of its envs."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from embodichain.envs.gymnasium_env.tasks import TaskGymnasiumEnv, TaskGymnasiumVectorEnv
from embodichain.errors import ConfigError, EnvContractError, UnknownNameError, UntrustedModuleError

_KNOWN_WRAPPERS = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)
_COMPATIBILITY = ("GymV21Environment-v0", "GymV26Environment-v0")
_RESERVED = ("id", "max_episode_steps", "disable_env_checker")
_MASK = (1 << 64) - 1


class RowwiseSyncVectorEnv(SyncVectorEnv):
    """Resets the rows of ``reset_mask`` alone where observations are plain arrays, and leaves resetting to the caller.

    Gymnasium's own goes through all envs and puts all observations together again, at every step that ends an episode.
    What it returns is overwritten by the next step or reset.
    """

    def __init__(self, makers: Sequence[Callable[[], gym.Env]]) -> None:
        super().__init__(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self._is_array = isinstance(self.single_observation_space, gym.spaces.Box)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those of ``options["reset_mask"]``; with a mask, seeds are a list, one per env."""
        if not self._is_array or options is None or "reset_mask" not in options or isinstance(seed, int):
            return super().reset(seed=seed, options=options)
        rest = {name: value for name, value in options.items() if name != "reset_mask"}
        ids = np.flatnonzero(options["reset_mask"])
        infos: dict[str, Any] = {}
        batch: Any = self._observations
        for env in ids.tolist():
            self._env_obs[env], info = self.envs[env].reset(seed=None if seed is None else seed[env], options=rest)
            batch[env] = self._env_obs[env]
            infos = self._add_info(infos, info, env)
        self._terminations[ids] = self._truncations[ids] = self._autoreset_envs[ids] = False
        return batch, infos


class _ClassicControl:
    """The ``state`` of Gymnasium's classic-control tasks: a few numbers, as float64, float32 or in a tuple."""

    def arrays(self, env: Any) -> list[np.ndarray]:
        values = env.state
        kind = 2 if isinstance(values, tuple) else int(values.dtype == np.float32)
        return [np.asarray(values, dtype=np.float64), np.array([kind], dtype=np.int64)]

    def memory(self, env: Any) -> list[np.ndarray]:
        return [_bytes(array) for array in self.arrays(env)]

    def restore(self, env: Any, arrays: list[np.ndarray]) -> None:
        values, kind = arrays[0].copy(), int(arrays[1][0])
        env.state = tuple(values.tolist()) if kind == 2 else values.astype(np.float32 if kind else np.float64)
        if "steps_beyond_terminated" in vars(env):  # CartPole counts steps after the end; we never make one
            env.steps_beyond_terminated = None


class _Mujoco:
    """All arrays of ``MjData`` whose size the model fixes; those in the arena live for one step only.

    Positions and velocities alone would not do: rewards are computed from body positions that lag them by a substep.
    """

    def __init__(self, env: Any) -> None:
        fresh = type(env.data)(env.model)  # in which the sizes that grow with contacts are zero
        named = {name: getattr(fresh, name) for name in dir(fresh) if not name.startswith("_")}
        self._names = [name for name, value in named.items() if isinstance(value, np.ndarray) and value.size]
        self._views: dict[int, tuple[Any, list[np.ndarray]]] = {}

    def arrays(self, env: Any) -> list[np.ndarray]:
        return [np.array([env.data.time]), *(getattr(env.data, name) for name in self._names)]

    def memory(self, env: Any) -> list[np.ndarray]:
        data, views = self._views.get(id(env), (None, []))
        if data is not env.data:  # its arrays stay where they are, so they are looked up once
            data, views = env.data, [_bytes(getattr(env.data, name)) for name in self._names]
            self._views[id(env)] = data, views
        return [_bytes(np.array([data.time])), *views]

    def restore(self, env: Any, arrays: list[np.ndarray]) -> None:
        env.data.time = float(arrays[0][0])
        for name, value in zip(self._names, arrays[1:], strict=True):
            getattr(env.data, name)[...] = value


class SubEnvStates:
    """Reads and writes the states of the envs of a ``SyncVectorEnv`` as uint8 ``[num_envs, num_bytes]``.

    It is for envs whose whole state is known: Gymnasium's own classic-control and MuJoCo tasks, bare or in the wrappers
    that ``gymnasium.make`` adds. A row holds the random generator, the step counter and the arrays of the simulation.
    """

    def __init__(self, envs: list[gym.Env], kind: _ClassicControl | _Mujoco) -> None:
        self._envs, self._kind = envs, kind

    @classmethod
    def of(cls, vector_env: VectorEnv) -> SubEnvStates | None:
        """Return the access to a vector env's states, or ``None`` where it could not be exact."""
        if not isinstance(vector_env, SyncVectorEnv) or type(vector_env) not in (SyncVectorEnv, RowwiseSyncVectorEnv):
            return None
        if any(type(wrapper) not in _KNOWN_WRAPPERS for env in vector_env.envs for wrapper in _wrappers(env)):
            return None
        cores = [env.unwrapped for env in vector_env.envs]
        modules = {type(core).__module__ for core in cores}
        if all(module.startswith("gymnasium.envs.classic_control.") for module in modules):
            return cls(vector_env.envs, _ClassicControl())
        if all(module.startswith("gymnasium.envs.mujoco.") for module in modules):
            return cls(vector_env.envs, _Mujoco(cores[0]))
        return None

    def read(self) -> np.ndarray:
        """Return the states of all envs."""
        kept = [[_bytes(array) for array in _bookkeeping(env)] + self._kind.memory(env.unwrapped) for env in self._envs]
        return np.stack([np.concatenate(row) for row in kept])

    def write(self, env_ids: np.ndarray, states: np.ndarray) -> None:
        """Put the rows of ``states`` into these envs, which were reset at least once."""
        for i, row in zip(env_ids.tolist(), states, strict=True):
            env, offset, parts = self._envs[i], 0, []
            for like in [*_bookkeeping(env), *self._kind.arrays(env.unwrapped)]:
                parts.append(row[offset : offset + like.nbytes].copy().view(like.dtype).reshape(like.shape))
                offset += like.nbytes
            _set_generator(env.unwrapped, parts[0])
            for limit in _limits(env):
                limit._elapsed_steps = int(parts[1][0])
            self._kind.restore(env.unwrapped, parts[2:])


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _bookkeeping(env: gym.Env) -> list[np.ndarray]:
    """Return the random generator and the step counter of an env."""
    elapsed = max((limit._elapsed_steps or 0 for limit in _limits(env)), default=0)
    return [_generator(env.unwrapped), np.array([elapsed])]


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
    generator = env.np_random.bit_generator
    generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": inc_high << 64 | inc_low},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }


def resolve_spec(id: str, trusted_modules: Collection[str] = ()) -> EnvSpec:
    """Return the registered spec of an id; ``module:Name-v0`` first imports ``module``, if it is trusted."""
    module, _, name = id.rpartition(":")
    if module:
        _import_trusted(module, id, trusted_modules)
    if name in _COMPATIBILITY and "shimmy" not in trusted_modules:  # it imports whatever module its kwargs name
        raise UntrustedModuleError(f"{name} can import other modules: add 'shimmy' to the trusted modules to allow it")
    spec = gym.registry.get(name)
    if spec is None:
        spec = gym.registry.get(_latest(name))
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
    """Make one env of a spec; ``max_episode_steps`` is for wrappers that ask for it."""
    if not spec.additional_wrappers:
        # The adapter keeps the order of calls and the time limit of all envs at once; wrappers would do it env by env.
        spec, max_episode_steps = copy.deepcopy(spec), -1
        spec.order_enforce = False
    # The spec itself is passed, never the id: Gymnasium imports a module that stands in an id.
    return gym.make(spec, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs)


def env_factory(
    id: str, kwargs: Mapping[str, Any] | None, max_episode_steps: int | None, trusted_modules: Collection[str]
) -> tuple[Callable[[], gym.Env], int | None]:
    """Return the function that makes one env of an id, and the time limit that was asked for or registered."""
    reserved = [name for name in _RESERVED if name in (kwargs or {})]
    if reserved:
        raise ConfigError(
            [f"kwargs.{name}: not an argument of the environment itself; give it beside kwargs" for name in reserved]
        )
    spec = resolve_spec(id, trusted_modules)
    limit = spec.max_episode_steps if max_episode_steps is None else _checked(max_episode_steps, None, spec.id)
    return functools.partial(single_env, spec, dict(kwargs or {}), limit), limit


def vectorize(
    make_env: Callable[[], gym.Env], num_envs: int, asynchronous: bool, max_episode_steps: int | None
) -> tuple[VectorEnv, int]:
    """Return a vector env of ``num_envs`` envs, and the number of steps after which episodes are truncated."""
    if num_envs < 1:
        raise ConfigError(f"num_envs: expected at least 1, got {num_envs}")
    makers = [make_env] * num_envs
    # Only the adapter resets, by mask, each episode from its own seed; and its encoder copies anyway.
    if not asynchronous:
        env = RowwiseSyncVectorEnv(makers)
        return env, time_limit(env, max_episode_steps)
    if max_episode_steps is None:
        probe = make_env()
        max_episode_steps = _checked(None, _env_limit(probe), str(probe))
        probe.close()
    return AsyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED), max_episode_steps


def time_limit(vector_env: VectorEnv, asked: int | None) -> int:
    """Return after how many steps episodes are truncated: the smaller one of what is asked and what is known."""
    base = vector_env.unwrapped
    if isinstance(base, TaskGymnasiumVectorEnv):
        own: int | None = base.vec_env.max_episode_steps
    else:
        own = _env_limit(base.envs[0]) if isinstance(base, SyncVectorEnv) else _spec_limit(base.spec)
    limit = _checked(asked, own, str(vector_env))
    return limit if own is None else min(limit, own)


def _env_limit(env: gym.Env) -> int | None:
    """Return the smallest limit that an env's spec or its wrappers state, or the task of ours that it is."""
    limits = [_spec_limit(env.spec), *(limit._max_episode_steps for limit in _limits(env))]
    if isinstance(env.unwrapped, TaskGymnasiumEnv):
        limits.append(env.unwrapped.vec_env.max_episode_steps)
    return min((limit for limit in limits if limit is not None), default=None)


def _spec_limit(spec: EnvSpec | None) -> int | None:
    if spec is None:
        return None
    steps = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)  # make_vec leaves the limit in kwargs
    return steps if isinstance(steps, int) and steps > 0 else None


def _checked(asked: int | None, own: int | None, what: str) -> int:
    if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
        raise ConfigError(f"max_episode_steps: expected an int of at least 1, got {asked!r}")
    limit = own if asked is None else asked
    if limit is None:
        raise ConfigError(
            f"max_episode_steps: {what} has no time limit of its own; give the number of steps of an episode"
        )
    return limit


def _latest(name: str) -> str:
    """Return the id with its highest version, for a name without one."""
    try:
        namespace, bare, version = parse_env_id(name)
    except gym.error.Error:
        return name
    return get_env_id(namespace, bare, find_highest_version(namespace, bare)) if version is None else name


def _import_trusted(module: str, id: str, trusted_modules: Collection[str]) -> None:
    if module not in trusted_modules:
        raise UntrustedModuleError(
            f"{id!r} would import the module {module!r}, which is not trusted. If you know what it runs, allow it by "
            f"name: trusted_modules=[{module!r}], or --trust {module} on the command line"
        )
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnknownNameError(f"the module {module!r} of {id!r} cannot be imported: {error}") from error
