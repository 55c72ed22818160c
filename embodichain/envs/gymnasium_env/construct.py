"""From an id or a function to a vector env that leaves resetting to us, and the exact state of its envs."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
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


class RowwiseSyncVectorEnv(SyncVectorEnv):
    """Resets the rows of ``reset_mask`` alone where observations are plain arrays, and leaves resetting to the caller.

    Gymnasium's own rebuilds all observations at every reset. The next step or reset overwrites what this one returns.
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
        return f"{env_name(self.envs[0])} ({self.num_envs} envs)"  # what its user knows it by

    @contextlib.contextmanager
    def _declared_shapes(self, call: str) -> Iterator[None]:
        """Raise ``EnvContractError`` where an observation that was just returned has another shape than declared."""
        try:
            yield
        except ValueError as error:
            for observation in self._env_obs:
                if problem := _mismatch(self.single_observation_space, observation):
                    raise EnvContractError(
                        f"{env_name(self.envs[0])}: {call}() returned {problem}. Correct the observation or the space"
                    ) from error
            raise


def env_name(env: gym.Env) -> str:
    """Return what the user of an env knows it by: its id, or else its class."""
    return type(env.unwrapped).__name__ if env.spec is None else str(env.spec.id)


def _mismatch(space: gym.Space[Any], observation: Any, path: str = "observation") -> str | None:
    """Return how an observation differs from what its space declares; ``None`` if in nothing that shows."""
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

    It is for envs whose whole state is known: Gymnasium's own classic-control and MuJoCo tasks, bare or in the wrappers
    that ``gymnasium.make`` adds. A row holds the random generator, the step counter and the arrays of the simulation.
    """

    def __init__(self, envs: Sequence[gym.Env], fields: Sequence[str]) -> None:
        """``fields`` are the arrays of a MuJoCo task's ``MjData``; a classic-control task has none."""
        self._envs, self._fields = envs, fields

    @classmethod
    def of(cls, vector_env: VectorEnv) -> SubEnvStates | None:
        """Return the access to a vector env's states, or ``None`` where it could not be exact."""
        if not isinstance(vector_env, SyncVectorEnv) or type(vector_env) not in (SyncVectorEnv, RowwiseSyncVectorEnv):
            return None
        if any(type(wrapper) not in _KNOWN_WRAPPERS for env in vector_env.envs for wrapper in _wrappers(env)):
            return None
        cores: list[Any] = [env.unwrapped for env in vector_env.envs]
        if all(type(core).__module__.startswith("gymnasium.envs.classic_control.") for core in cores):
            return cls(vector_env.envs, ())
        if not all(type(core).__module__.startswith("gymnasium.envs.mujoco.") for core in cores):
            return None
        # All arrays of fixed size: rewards need body positions, which lag by a substep; the arena lives for one step.
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
        """Put the rows of ``states`` into these envs, which were reset at least once."""
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
        if "steps_beyond_terminated" in vars(core):  # CartPole counts steps after the end; we never make one
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
    """Return the registered spec of an id; ``module:Name-v0`` first imports ``module``, if it is trusted."""
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
    if name in _COMPATIBILITY and "shimmy" not in trusted_modules:  # it imports whatever module its kwargs name
        raise UntrustedModuleError(f"{name} can import other modules: add 'shimmy' to the trusted modules to allow it")
    spec = gym.registry.get(name)
    if spec is None:  # a name without a version means its highest
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
    """Make one env of a spec; ``max_episode_steps`` is for wrappers that ask for it."""
    if not spec.additional_wrappers:
        # The adapter keeps the order of calls and the time limit of all envs at once; wrappers would do it env by env.
        spec, max_episode_steps = copy.deepcopy(spec), -1
        spec.order_enforce = False
    # The spec itself is passed, never the id: Gymnasium imports a module that stands in an id.
    return gym.make(spec, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs)


def time_limit(asked: int | None, own: int | None) -> int | None:
    """Return after how many steps episodes are truncated: the smaller of what is asked and what is known, if any."""
    if asked is not None and (type(asked) is not int or asked < 1):
        raise ConfigError(f"max_episode_steps: expected an int of at least 1, got {asked!r}")
    return min((limit for limit in (asked, own) if limit is not None), default=None)


def vector_limit(vector_env: VectorEnv) -> int | None:
    """Return the limit that a vector env states, if any."""
    base = vector_env.unwrapped
    if isinstance(base, TaskGymnasiumVectorEnv):
        return base.max_episode_steps
    return env_limit(base.envs[0]) if isinstance(base, SyncVectorEnv) else _spec_limit(base.spec)


def env_limit(env: gym.Env) -> int | None:
    """Return the smallest limit that an env's spec or its wrappers state, or the task of ours that it is."""
    limits = [_spec_limit(env.spec), *(limit._max_episode_steps for limit in _limits(env))]
    if isinstance(env.unwrapped, TaskGymnasiumEnv):
        limits.append(env.unwrapped.vec_env.max_episode_steps)
    return min((limit for limit in limits if limit not in (None, NO_LIMIT)), default=None)


def _spec_limit(spec: EnvSpec | None) -> int | None:
    if spec is None:
        return None
    steps = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)  # make_vec leaves the limit in kwargs
    return steps if isinstance(steps, int) and steps > 0 else None
