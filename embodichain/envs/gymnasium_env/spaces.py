"""Converts observations and actions between Gymnasium spaces and the tensors of ``VecEnv``.

Batched numpy observations of ``gymnasium.vector`` become a TensorDict ``[num_envs]``:

* ``Dict`` keeps its keys, a ``Tuple`` has the keys ``"0"``, ``"1"``, ...; anything else becomes ``obs["state"]``.
* ``Box`` and ``MultiBinary`` become float32; a uint8 ``Box`` (images, RAM) stays uint8.
* ``Discrete(n)`` becomes one-hot float32 ``[num_envs, n]``; ``MultiDiscrete``: its one-hot vectors, concatenated.

Actions: bounded coordinates of a ``Box`` are rescaled from [-1, 1] to their bounds, and clipped; others are passed
unchanged. ``Discrete`` is int64 ``[num_envs]``; ``MultiDiscrete`` and ``MultiBinary`` of any shape are int64
``[num_envs, action_dim]``. Discrete actions start at 0.
"""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from embodichain.errors import EnvContractError

Rows = dict[str, Any]
"""Encoded observations of all envs: nested dicts of CPU tensors ``[num_envs, ...]``."""
Encode = Callable[[Any], Any]
"""Converts a batch of a space to a CPU tensor or a nested dict of CPU tensors."""
Decode = Callable[[np.ndarray], np.ndarray]
"""Converts the actions of all envs to the format of a Gymnasium vector env."""
_CPU = torch.device("cpu")
_HUGE = 1e30
"""Larger bounds count as infinite: some environments use the largest float instead of infinity."""


def choose(mask: Tensor, yes: Rows, no: Rows) -> Rows:
    """Return new rows: ``yes`` where ``mask`` ``[num_envs]`` is true, ``no`` elsewhere."""
    return {
        name: choose(mask, yes[name], value)
        if isinstance(value, dict)
        else torch.where(mask.view(-1, *[1] * (value.ndim - 1)), yes[name], value)
        for name, value in no.items()
    }


def observation_encoder(source: gym.Space[Any]) -> tuple[spaces.Dict, Callable[[Any], Rows]]:
    """Return the observation space of the ``VecEnv``, and the function that encodes batches of ``source``."""
    space, encode = _encoder(source, "observation")
    if isinstance(space, spaces.Dict):
        return space, encode
    return spaces.Dict({"state": space}), lambda batch: {"state": encode(batch)}


def to_tensordict(rows: Rows, size: torch.Size) -> TensorDict:
    """Build nested TensorDicts; the shapes are known, so the costly checks of the public constructor are skipped."""
    source = {key: to_tensordict(value, size) if isinstance(value, dict) else value for key, value in rows.items()}
    return TensorDict._new_unsafe(source, batch_size=size, device=_CPU)


def action_decoder(source: gym.Space[Any], num_envs: int) -> tuple[gym.Space[Any], Decode]:
    """Return the action space of the ``VecEnv``, and the function that converts validated actions for Gymnasium."""
    if isinstance(source, spaces.Discrete):
        start, kind = int(source.start), source.dtype
        return spaces.Discrete(int(source.n)), lambda action: (action + start).astype(kind)
    if isinstance(source, spaces.MultiDiscrete | spaces.MultiBinary):
        shape, kind = (num_envs, *source.shape), source.dtype
        if isinstance(source, spaces.MultiBinary):
            return spaces.MultiBinary(int(np.prod(shape[1:]))), lambda action: action.astype(kind).reshape(shape)
        starts = source.start.reshape(-1)
        return spaces.MultiDiscrete(
            source.nvec.reshape(-1)
        ), lambda action: (action + starts).astype(kind).reshape(shape)
    if not isinstance(source, spaces.Box):
        raise EnvContractError(
            f"actions must be Box, Discrete, MultiDiscrete or MultiBinary, got {source}. Wrap the environment so that "
            "it takes one of these (gymnasium.wrappers.TransformAction)."
        )
    low, high = source.low.astype(np.float64).reshape(-1), source.high.astype(np.float64).reshape(-1)
    low, high = np.where(low < -_HUGE, -np.inf, low), np.where(high > _HUGE, np.inf, high)
    bounded = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):  # inf - inf where a bound is missing
        scale = np.where(bounded, 0.5 * (high - low), 1.0)
        offset = np.where(bounded, 0.5 * (high + low), 0.0)
    space = spaces.Box(
        np.where(bounded, -1.0, low).astype(np.float32),
        np.where(bounded, 1.0, high).astype(np.float32),
        dtype=np.float32,
    )
    shape, dtype = (num_envs, *source.shape), source.dtype
    integer = np.issubdtype(dtype, np.integer)

    def decode(action: np.ndarray) -> np.ndarray:
        native = np.clip(action * scale + offset, low, high)
        return (np.rint(native) if integer else native).astype(dtype).reshape(shape)

    return space, decode


def _encoder(source: gym.Space[Any], where: str) -> tuple[gym.Space[Any], Encode]:
    """Return the converted space, and the function that converts a batch of ``source`` to tensors."""
    if isinstance(source, spaces.Dict):
        return _children(source.spaces, where)
    if isinstance(source, spaces.Tuple):
        return _children(dict(enumerate(source.spaces)), where)
    if isinstance(source, spaces.Box):
        return _box(source)
    if isinstance(source, spaces.Discrete):
        return _one_hot(np.array([source.n]), np.array([source.start]))
    if isinstance(source, spaces.MultiDiscrete):
        return _one_hot(source.nvec.reshape(-1), source.start.reshape(-1))
    if isinstance(source, spaces.MultiBinary):
        return spaces.Box(0.0, 1.0, source.shape, np.float32), _cast(np.float32)
    raise EnvContractError(
        f"{where} is a {type(source).__name__} space; supported are Box, Discrete, MultiDiscrete, MultiBinary, and "
        "Dict or Tuple of them. Wrap the env so that it gives one of these (gymnasium.wrappers.TransformObservation)."
    )


def _children(sources: Mapping[Any, gym.Space[Any]], where: str) -> tuple[spaces.Dict, Encode]:
    parts = {key: _encoder(source, f"{where}/{key}") for key, source in sources.items()}
    encoders = [(str(key), key, encode) for key, (_, encode) in parts.items()]
    space = spaces.Dict({str(key): part for key, (part, _) in parts.items()})
    return space, lambda batch: {name: encode(batch[key]) for name, key, encode in encoders}


def _cast(dtype: Any) -> Encode:
    # np.array copies, as the vector env reuses its buffer.
    return lambda batch: torch.from_numpy(np.array(batch, dtype=dtype))


def _box(source: spaces.Box) -> tuple[spaces.Box, Encode]:
    if source.dtype == np.uint8:
        return source, _cast(np.uint8)
    with np.errstate(over="ignore"):  # float64 bounds beyond the range of float32 are infinite
        low, high = source.low.astype(np.float32), source.high.astype(np.float32)
    return spaces.Box(low, high, dtype=np.float32), _cast(np.float32)


def _one_hot(counts: np.ndarray, starts: np.ndarray) -> tuple[spaces.Box, Encode]:
    """Concatenated one-hot vectors of sizes ``counts``; the values of part i start at ``starts[i]``."""
    total = int(counts.sum())
    columns = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) - starts.astype(np.int64)

    def encode(batch: Any) -> Tensor:
        values = np.asarray(batch, dtype=np.int64)
        values = values.reshape(len(values), -1)
        hot = np.zeros((len(values), total), dtype=np.float32)
        np.put_along_axis(hot, values + columns, 1.0, axis=1)
        return torch.from_numpy(hot)

    return spaces.Box(0.0, 1.0, (total,), np.float32), encode
