"""Observation and action spaces as plain data, so that a policy can be built again without its environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from embodichain.errors import CheckpointError


def space_to_data(space: gym.Space[Any]) -> dict[str, Any]:
    """Return nested dicts of numbers, strings and arrays for a ``Box``, ``Discrete`` or ``Dict`` space."""
    if isinstance(space, gym.spaces.Dict):
        return {"type": "dict", "spaces": {name: space_to_data(part) for name, part in space.spaces.items()}}
    if isinstance(space, gym.spaces.Discrete):
        return {"type": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gym.spaces.Box):
        bounds = {"low": _bound(space.low), "high": _bound(space.high)}
        return {"type": "box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    raise CheckpointError(f"expected a Box, Discrete or Dict space, got {type(space).__name__}: {space}")


def space_from_data(data: Mapping[str, Any]) -> gym.Space[Any]:
    """Return the space that ``space_to_data`` was given."""
    kind = data["type"]
    if kind == "dict":
        return gym.spaces.Dict({name: space_from_data(part) for name, part in data["spaces"].items()})
    if kind == "discrete":
        return gym.spaces.Discrete(data["n"], start=data["start"])
    if kind == "box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        low, high = (np.broadcast_to(data[name], shape).astype(dtype) for name in ("low", "high"))
        return gym.spaces.Box(low, high, shape, dtype.type)
    raise CheckpointError(f"unknown kind of space {kind!r}")


def zeros_in(space: gym.spaces.Dict, rows: int, device: torch.device) -> TensorDict:
    """Return so many observations that are zero everywhere, as an environment gives them."""
    leaves = {
        name: zeros_in(part, rows, device)
        if isinstance(part, gym.spaces.Dict)
        else torch.from_numpy(np.zeros((rows, *(part.shape or ())), part.dtype)).to(device)
        for name, part in space.spaces.items()
    }
    return TensorDict(leaves, batch_size=[rows], device=device)


def _bound(values: np.ndarray) -> float | int | np.ndarray:
    """Return one number where all are equal, as they are for pictures and actions."""
    if not values.size:
        return 0.0
    first = values.reshape(-1)[0]
    same: float | int = first.item()
    return same if bool((values == first).all()) else values
