"""Checks of what comes back: spaces, keys, shapes, types, devices and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.actions import ActionManager
from embodichain.envs.checker.probe import SEED, Finding, Probe, leaves

_DTYPES = {np.dtype(t): getattr(torch, t) for t in ("float32", "float64", "float16", "uint8", "int8", "int32", "int64")}
_DTYPES[np.dtype(np.bool_)] = torch.bool


def check_spaces(probe: Probe) -> Iterator[Finding]:
    """The attributes that every environment has, and spaces of one env."""
    env = probe.env
    for name in ("num_envs", "max_episode_steps"):
        value = getattr(env, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Finding(f"{name} is an int of at least 1", repr(value), "set it in __init__")
    if not isinstance(getattr(env, "device", None), torch.device):
        yield Finding("device is a torch.device", repr(getattr(env, "device", None)), "torch.device('cpu'), not 'cpu'")
    if not isinstance(getattr(env, "observation_space", None), gym.spaces.Dict):
        got = repr(getattr(env, "observation_space", None))
        yield Finding("observation_space is a gymnasium Dict", got, "name the observation: Dict({'state': Box(...)})")
    yield from _action_space(env.action_space)
    if not isinstance(getattr(env, "action_manager", None), ActionManager):
        got = type(getattr(env, "action_manager", None)).__name__
        yield Finding(
            "action_manager is an ActionManager", got, "ActionManager('action', action_space, num_envs, device)"
        )
    elif env.action_manager.space != env.action_space:
        yield Finding(
            f"action_manager.space is {env.action_space}", str(env.action_manager.space), "use the same space"
        )


def _action_space(space: Any) -> Iterator[Finding]:
    if isinstance(space, gym.spaces.Discrete):
        if int(space.start) != 0:
            yield Finding("discrete actions count from 0", f"start={space.start}", "shift them inside the environment")
    elif isinstance(space, gym.spaces.Box):
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        if len(space.shape) != 1:
            yield Finding("a Box of shape (action_dim,)", f"shape {space.shape}", "flatten the action")
        if np.any(space.low[bounded] != -1.0) or np.any(space.high[bounded] != 1.0):
            yield Finding("bounds -1 and 1", str(space), "scale actions inside the environment")
    else:
        yield Finding("action_space is Box or Discrete", repr(space), "see ActionManager for what an action can be")


def check_reset(probe: Probe) -> Iterator[Finding]:
    """``reset`` returns an observation that fits its space, and the episodes' seeds."""
    result = probe.env.reset(seed=SEED)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        yield Finding("reset returns (obs, info)", type(result).__name__, "return a TensorDict and a dict")
        return
    yield from _observation(probe, result[0], "obs")
    yield from _episode_seed(probe, result[1])


def check_step(probe: Probe) -> Iterator[Finding]:
    """``step`` returns reward, flags and info of the promised types and shapes."""
    env = probe.env
    env.reset(seed=SEED)
    for action in probe.actions(3):
        result = env.step(action)
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
            got = f"{type(result).__name__} of {len(result) if isinstance(result, tuple) else 1}"
            yield Finding("step returns (obs, reward, terminated, truncated, info)", got, "return all five")
            return
        obs, reward, terminated, truncated, info = result
        problems = [
            *_observation(probe, obs, "obs"),
            *_vector(probe, "reward", reward, torch.float32),
            *_vector(probe, "terminated", terminated, torch.bool),
            *_vector(probe, "truncated", truncated, torch.bool),
            *_info(probe, info, reward),
        ]
        yield from problems
        if problems:
            return


def _info(probe: Probe, info: dict[str, Any], reward: Any) -> Iterator[Finding]:
    if "final_observation" not in info:
        yield Finding("info has final_observation", f"keys {sorted(info)}", "give what was reached, before any reset")
    else:
        yield from _observation(probe, info["final_observation"], "info[final_observation]")
    for group in ("rewards", "metrics"):
        values = info.get(group)
        if not isinstance(values, Mapping):
            yield Finding(f"info[{group}] is a dict of tensors", repr(values), "an empty dict will do")
            continue
        for name, value in values.items():
            yield from _vector(probe, f"info[{group}][{name}]", value, None)
    yield from _episode_seed(probe, info)
    parts = info.get("rewards")
    if isinstance(parts, Mapping) and parts and all(isinstance(p, Tensor) for p in (*parts.values(), reward)):
        total = torch.stack([p.double() for p in parts.values()]).sum(dim=0)
        if total.shape == reward.shape and not torch.allclose(total, reward.double(), rtol=1e-4, atol=1e-5):
            got = f"sum {total.tolist()[:3]}, reward {reward.tolist()[:3]}"
            yield Finding("info[rewards] sum to the reward", got, "report parts after weighting, and all of them")


def _episode_seed(probe: Probe, info: dict[str, Any]) -> Iterator[Finding]:
    if "episode_seed" not in info:
        yield Finding(
            "info has episode_seed", f"keys {sorted(info)}", "name the episode each env is in; -1 if you cannot"
        )
    else:
        yield from _vector(probe, "info[episode_seed]", info["episode_seed"], torch.int64)


def _vector(probe: Probe, name: str, value: Any, dtype: torch.dtype | None) -> Iterator[Finding]:
    """Check a tensor ``[num_envs]``; without a dtype any will do."""
    env = probe.env
    if not isinstance(value, Tensor):
        yield Finding(f"{name} is a tensor [{env.num_envs}]", type(value).__name__, "return tensors")
        return
    if tuple(value.shape) != (env.num_envs,):
        yield Finding(f"{name} has shape [{env.num_envs}]", str(list(value.shape)), "one value per env")
    if dtype is not None and value.dtype != dtype:
        yield Finding(f"{name} is {dtype}", str(value.dtype), f"convert it: .to({dtype})")
    if value.device.type != env.device.type:
        yield Finding(f"{name} is on {env.device}", str(value.device), "make it on env.device")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        yield Finding(f"{name} is finite", str(value.tolist()[:5]), "find out which term diverges")


def _observation(probe: Probe, obs: Any, name: str) -> Iterator[Finding]:
    env = probe.env
    if not isinstance(obs, TensorDictBase):
        yield Finding(f"{name} is a TensorDict", type(obs).__name__, "TensorDict({...}, batch_size=[num_envs])")
        return
    if tuple(obs.batch_size) != (env.num_envs,):
        yield Finding(f"{name} has batch size [{env.num_envs}]", str(list(obs.batch_size)), "batch_size=[num_envs]")
    spaces, found = _flat(env.observation_space), leaves(obs)
    if spaces.keys() != found.keys():
        yield Finding(f"{name} has the keys {sorted(spaces)}", str(sorted(found)), "match observation_space")
    for key in sorted(spaces.keys() & found.keys()):
        yield from _leaf(probe, f"{name}[{key}]", spaces[key], found[key])


def _leaf(probe: Probe, name: str, space: gym.Space[Any], value: Tensor) -> Iterator[Finding]:
    env = probe.env
    shape, dtype = (env.num_envs, *(space.shape or ())), _DTYPES.get(np.dtype(space.dtype))
    if tuple(value.shape) != shape:
        yield Finding(f"{name} has shape {list(shape)}", str(list(value.shape)), "spaces are those of one env")
        return
    if value.dtype != dtype:
        yield Finding(f"{name} is {dtype}", str(value.dtype), "match the dtype of observation_space")
    if value.device.type != env.device.type:
        yield Finding(f"{name} is on {env.device}", str(value.device), "make it on env.device")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        bad = torch.nonzero(~torch.isfinite(value).reshape(env.num_envs, -1).all(dim=1)).reshape(-1)
        yield Finding(f"{name} is finite", f"env {int(bad[0])} has NaN or infinity", "guard the simulation")
    elif isinstance(space, gym.spaces.Box):
        low, high = (torch.as_tensor(bound, device=value.device).double() for bound in (space.low, space.high))
        slack = 1e-5 * (1.0 + value.double().abs())  # rounding, not a violation
        if bool(((value < low - slack) | (value > high + slack)).any()):
            got = f"values in [{float(value.min()):.6g}, {float(value.max()):.6g}]"
            yield Finding(f"{name} lies within {space}", got, "widen the space, or clip the observation")


def _flat(space: gym.spaces.Dict) -> dict[str, gym.Space[Any]]:
    found: dict[str, gym.Space[Any]] = {}
    for key, value in space.spaces.items():
        nested = _flat(value) if isinstance(value, gym.spaces.Dict) else {"": value}
        found.update({f"{key}/{name}" if name else str(key): leaf for name, leaf in nested.items()})
    return found
