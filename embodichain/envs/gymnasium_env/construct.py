"""From an id or a function to a Gymnasium vector env, in the mode that suits the contract best."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from embodichain.envs.gymnasium_env.sync import RowwiseSyncVectorEnv
from embodichain.envs.gymnasium_env.tasks import TaskGymnasiumEnv, TaskGymnasiumVectorEnv
from embodichain.errors import ConfigError, EnvContractError, UnknownNameError, UntrustedModuleError

_COMPATIBILITY = ("GymV21Environment-v0", "GymV26Environment-v0")
_RESERVED = ("id", "max_episode_steps", "disable_env_checker")


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


def factory_of(
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
    # Nobody resets but us, by mask, each episode from its own seed; and the encoder copies anyway.
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
    limits = [_spec_limit(env.spec)]
    if isinstance(env.unwrapped, TaskGymnasiumEnv):
        limits.append(env.unwrapped.vec_env.max_episode_steps)
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.TimeLimit):
            limits.append(env._max_episode_steps)
        env = env.env
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
            f"max_episode_steps: {what} has no time limit of its own; say after how many steps an episode is truncated"
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
