"""Between Gymnasium's spaces and the tensors of ``VecEnv``: observations one way, actions the other.

Observations (a batch as ``gymnasium.vector`` gives it, numpy, rows first) become a TensorDict ``[num_envs]``:

* ``Dict`` keeps its keys, ``Tuple`` gets the keys ``"0"``, ``"1"``, ...; anything else becomes ``obs["state"]``.
* ``Box`` and ``MultiBinary``: float32, whatever the precision was; uint8 (images, RAM) of a ``Box`` stays uint8.
* ``Discrete(n)``: one-hot float32 ``[num_envs, n]``; ``MultiDiscrete``: its one-hot parts side by side.

Actions: a bounded ``Box`` is [-1, 1] for the policy and mapped affinely to its bounds (values beyond are clipped); a
coordinate without both bounds is passed through, and our space says so. ``Discrete`` is ``[num_envs]`` int64 from zero;
``MultiDiscrete`` and ``MultiBinary`` of any shape are ``[num_envs, action_dim]`` int64 from zero.
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
"""Turns one batch of a space into a CPU tensor, or into a dict of them."""
Decode = Callable[[np.ndarray], np.ndarray]
"""Turns one action of all envs into what a Gymnasium vector env expects, rows first."""
_CPU = torch.device("cpu")
_HUGE = 1e30
"""Bounds beyond it are none: some environments write the largest number there is for infinity."""


def choose(mask: Tensor, yes: Rows, no: Rows) -> Rows:
    """Return new rows: those of ``yes`` where ``mask`` ``[num_envs]`` is true, those of ``no`` elsewhere."""
    return {
        name: choose(mask, yes[name], value)
        if isinstance(value, dict)
        else torch.where(mask.view(-1, *[1] * (value.ndim - 1)), yes[name], value)
        for name, value in no.items()
    }


def observation_encoder(source: gym.Space[Any]) -> tuple[spaces.Dict, Callable[[Any], Rows]]:
    """Return the observation space as we offer it, and the function that turns its batches into rows."""
    space, encode = _encoder(source, "observation")
    if isinstance(space, spaces.Dict):
        return space, encode
    return spaces.Dict({"state": space}), lambda batch: {"state": encode(batch)}


def to_tensordict(rows: Rows, size: torch.Size) -> TensorDict:
    """Build nested TensorDicts; the shapes are ours, so the costly checks of the public constructor are skipped."""
    source = {key: to_tensordict(value, size) if isinstance(value, dict) else value for key, value in rows.items()}
    return TensorDict._new_unsafe(source, batch_size=size, device=_CPU)


def action_decoder(source: gym.Space[Any], num_envs: int) -> tuple[gym.Space[Any], Decode]:
    """Return the action space as we offer it, and the function that turns a checked action into Gymnasium's batch."""
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
    with np.errstate(invalid="ignore"):  # inf - inf, where there is no bound to map to
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
    """Return the space as we offer it and the function that turns one of its batches into tensors."""
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
    # np.array copies, so that the observation outlives the vector env's own buffer.
    return lambda batch: torch.from_numpy(np.array(batch, dtype=dtype))


def _box(source: spaces.Box) -> tuple[spaces.Box, Encode]:
    if source.dtype == np.uint8:
        return source, _cast(np.uint8)
    with np.errstate(over="ignore"):  # float64 bounds beyond the range of float32 are infinite
        low, high = source.low.astype(np.float32), source.high.astype(np.float32)
    return spaces.Box(low, high, dtype=np.float32), _cast(np.float32)


def _one_hot(counts: np.ndarray, starts: np.ndarray) -> tuple[spaces.Box, Encode]:
    """One-hot parts of sizes ``counts`` side by side; values of part i begin at ``starts[i]``."""
    total = int(counts.sum())
    columns = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) - starts.astype(np.int64)

    def encode(batch: Any) -> Tensor:
        values = np.asarray(batch, dtype=np.int64)
        values = values.reshape(len(values), -1)
        hot = np.zeros((len(values), total), dtype=np.float32)
        np.put_along_axis(hot, values + columns, 1.0, axis=1)
        return torch.from_numpy(hot)

    return spaces.Box(0.0, 1.0, (total,), np.float32), encode
