"""Conversion of observations between nested TensorDicts and flat tensors, and of spaces to and from plain data."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector.utils import create_empty_array
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.errors import CheckpointError, ObservationError

Observation = Tensor | TensorDictBase
"""A flat tensor ``[batch, dim]`` or a nested TensorDict of batch size ``[batch]``."""
_MAX_NUMBERS = 1 << 28
"""Maximum size of a saved space, as its bounds are allocated in full."""


def sorted_leaves(
    obs: TensorDictBase | Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield ``(key path, tensor)`` of a nested observation, with the keys of each level sorted."""
    for key in sorted(obs.keys()):
        value = obs[key]
        if isinstance(value, (TensorDictBase, Mapping)):
            yield from sorted_leaves(value, (*path, key))
        else:
            yield (*path, key), value


def flatten_dict_observation(obs: TensorDictBase | Mapping[str, Any] | Tensor) -> Tensor:
    """Flatten a nested observation of batch size ``[num_envs]`` to one tensor ``[num_envs, total_dim]``.

    Leaves are flattened to ``[num_envs, -1]`` and concatenated in sorted key order, level by level: ``object/pos``,
    then ``robot/qpos``, then ``robot/qvel``. Integers and booleans become float32. A tensor is a single leaf.
    """
    parts = [obs] if isinstance(obs, Tensor) else [value for _, value in sorted_leaves(obs)]
    if not parts:
        raise ObservationError("the observation holds no tensor")
    flat = [part.reshape(part.shape[0], -1) for part in parts]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)
    return joined if joined.is_floating_point() else joined.float()


def dict_to_tensordict(
    obs: TensorDictBase | Mapping[str, Any] | Tensor, device: torch.device | str | None = None
) -> TensorDict:
    """Wrap a tensor, or nested dicts of tensors, arrays and lists, as ``TensorDict({"observation": obs}, [num_envs])``.

    The first dimension of every leaf is ``num_envs``. Tensors that are already on the device are not copied.
    """
    converted = _convert(obs, device)
    leaves = [converted] if isinstance(converted, Tensor) else [leaf for _, leaf in sorted_leaves(converted)]
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        raise ObservationError(f"all parts of an observation must share their first dimension num_envs, got {sizes}")
    return TensorDict({"observation": converted}, batch_size=[leaves[0].shape[0]], device=device)


def _convert(value: Any, device: torch.device | str | None) -> Any:
    if isinstance(value, (TensorDictBase, Mapping)):
        return {key: _convert(value[key], device) for key in value.keys()}  # noqa: SIM118 - TensorDicts iterate rows
    if isinstance(value, Tensor):
        return value if device is None else value.to(device)
    return torch.as_tensor(np.asarray(value), device=device)


def space_to_data(space: gym.Space[Any]) -> dict[str, Any]:
    """Convert a space to nested dicts of numbers, strings and arrays."""
    if isinstance(space, gym.spaces.Dict):
        return {"type": "dict", "spaces": {name: space_to_data(part) for name, part in space.spaces.items()}}
    if isinstance(space, gym.spaces.Discrete):
        return {"type": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gym.spaces.MultiDiscrete) and space.start.ndim == 1 and not space.start.any():
        return {"type": "multi_discrete", "nvec": space.nvec.tolist()}
    if isinstance(space, gym.spaces.MultiBinary) and len(space.shape) == 1:
        return {"type": "multi_binary", "n": space.shape[0]}
    if isinstance(space, gym.spaces.Box):
        bounds = {"low": _bound(space.low), "high": _bound(space.high)}
        return {"type": "box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    raise CheckpointError(
        "expected a Dict, Box or Discrete space, or a MultiDiscrete or MultiBinary of one dimension that counts from 0,"
        f" got {type(space).__name__}: {space}"
    )


def space_from_data(data: Mapping[str, Any]) -> gym.Space[Any]:
    """Convert the result of ``space_to_data`` back to a space."""
    kind = data["type"]
    if kind == "dict":
        return gym.spaces.Dict({name: space_from_data(part) for name, part in data["spaces"].items()})
    if kind == "discrete":
        return gym.spaces.Discrete(data["n"], start=data["start"])
    if kind == "multi_discrete":
        return gym.spaces.MultiDiscrete(data["nvec"])
    if kind == "multi_binary":
        return gym.spaces.MultiBinary(data["n"])
    if kind == "box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        if math.prod(shape) > _MAX_NUMBERS:
            raise CheckpointError(f"a space of shape {list(shape)} has more than {_MAX_NUMBERS} numbers")
        low, high = (np.broadcast_to(data[name], shape).astype(dtype) for name in ("low", "high"))
        return gym.spaces.Box(low, high, shape, dtype.type)
    raise CheckpointError(f"unknown kind of space {kind!r}")


def zeros_in(space: gym.spaces.Dict, rows: int, device: torch.device) -> TensorDict:
    """Return ``rows`` observations of zeros."""
    return dict_to_tensordict(create_empty_array(space, rows), device)["observation"]


def space_bytes(space: gym.Space[Any]) -> int:
    """Return the approximate size of one element of a space in bytes."""
    if isinstance(space, gym.spaces.Dict):
        return sum(map(space_bytes, space.spaces.values()))
    return math.prod(space.shape or (1,)) * (space.dtype or np.dtype(np.int64)).itemsize


def _bound(values: np.ndarray) -> float | int | np.ndarray:
    """Return a single number if all values are equal, as for images and most actions."""
    is_constant = values.size > 0 and bool((values == values.flat[0]).all())
    return values.flat[0].item() if is_constant else values
