"""Nested Python data with tensors in it, taken apart into JSON and named tensors, and put together again.

Understood are dicts (any scalar as key), lists, tuples, TensorDicts, tensors, numpy arrays and scalars, strings,
numbers, booleans and ``None``. What JSON has no word for is an object with one key that begins with ``$``::

    {"$tensor": "policy/actor.0.weight"}    {"$array": "random/numpy/1"}    {"$tuple": [0.9, 0.999]}
    {"$tensordict": {...}, "$batch": [64]}  {"$items": [[0, {...}]]}        {"$float": "nan"}

No code runs when it is read back: there is nothing in it but data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.errors import CheckpointError


def take_apart(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return ``(JSON data, tensors by name)``; the tensors are contiguous, on the CPU and share no memory."""
    store = _Store()
    return _encode(value, "", store), store.tensors


def put_together(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what ``take_apart`` was given; ``KeyError`` or ``ValueError`` if the parts do not fit together."""
    if isinstance(data, list):
        return [put_together(entry, tensors) for entry in data]
    if not isinstance(data, dict):
        return data
    mark = next((key for key in data if key.startswith("$")), None)
    if mark is None:
        return {key: put_together(entry, tensors) for key, entry in data.items()}
    return _decode(mark, data, tensors)


def pack(value: Any) -> Tensor:
    """Return nested data as bytes: how long its JSON part is, that part, and its tensors as safetensors."""
    data, tensors = take_apart(value)
    words = json.dumps(data).encode()
    content = len(words).to_bytes(8, "little") + words + save_tensors(tensors)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def unpack(message: Tensor) -> Any:
    """Return what ``pack`` was given."""
    content = message.numpy().tobytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return put_together(json.loads(content[8:end]), load_tensors(content[end:]))


class _Store:
    """Tensors by name; no two of them share memory, which safetensors would refuse."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memory: set[int] = set()

    def keep(self, tensor: Tensor, path: str) -> str:
        """Keep a tensor and return its name, which is its path."""
        name = path.strip("/") or "value"
        if name in self.tensors:  # keys may contain slashes themselves
            name = f"{name}#{len(self.tensors)}"
        kept = tensor.to("cpu").contiguous()
        if kept.untyped_storage().data_ptr() in self._memory:
            kept = kept.clone()
        self._memory.add(kept.untyped_storage().data_ptr())
        self.tensors[name] = kept
        return name


def _encode(value: Any, path: str, store: _Store) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return {"$tensor": store.keep(value.detach(), path)}
    if isinstance(value, np.ndarray):
        return {"$array": store.keep(torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape)), path)}
    if isinstance(value, np.generic):
        return _encode(value.item(), path, store)
    if isinstance(value, TensorDictBase):
        entries = {key: _encode(value.get(key), f"{path}/{key}", store) for key in value.keys()}  # noqa: SIM118
        return {"$tensordict": entries, "$batch": list(value.batch_size)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, store)
    if isinstance(value, (list, tuple)):
        items = [_encode(entry, f"{path}/{i}", store) for i, entry in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise CheckpointError(
        f"{path.strip('/') or 'the state'}: expected tensors, numbers, strings, lists and dicts of them, got "
        f"{type(value).__name__}; a state_dict() has to turn it into those"
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, store: _Store) -> Any:
    entries = [(key, _encode(entry, f"{path}/{key}", store)) for key, entry in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in entries):
        return dict(entries)
    return {"$items": [[_encode(key, path, store), entry] for key, entry in entries]}


def _decode(mark: str, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    content = data[mark]
    if mark == "$tensor":
        return tensors[content]
    if mark == "$array":
        return tensors[content].numpy()
    if mark == "$float":
        return float(content)
    if mark == "$tuple":
        return tuple(put_together(entry, tensors) for entry in content)
    if mark == "$items":
        return {put_together(key, tensors): put_together(entry, tensors) for key, entry in content}
    if mark in ("$tensordict", "$batch"):
        entries = {key: put_together(entry, tensors) for key, entry in data["$tensordict"].items()}
        return TensorDict(entries, batch_size=data["$batch"])
    raise ValueError(f"unknown mark {mark!r}")
