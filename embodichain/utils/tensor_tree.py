"""Codec for nested data with tensors: JSON data and named tensors, or JSON data and one block of bytes.

Supported are dicts (with scalar keys), lists, tuples, TensorDicts, tensors, NumPy arrays and scalars, strings, numbers,
booleans and ``None``. Types that JSON lacks are objects with a key that begins with ``$``::

    {"$tensor": "policy/actor.0.weight"}    {"$array": "random/numpy/1"}    {"$tuple": [0.9, 0.999]}
    {"$tensordict": {...}, "$batch": [64]}  {"$items": [[0, {...}]]}        {"$float": "nan"}

Checkpoints use ``flatten``, channels and Ray use ``encode``, and ranks use ``to_bytes``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.errors import CheckpointError

_ALIGNMENT = 64
_NUMPY_TYPES = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}
"""Dtypes of both NumPy and torch. NumPy has bfloat16 only if another package registers it."""

Name = TypeVar("Name", bound=Hashable)


def flatten(value: Any, separate: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Return ``(JSON data, tensors by name)``; with ``separate``, tensors are contiguous, on the CPU and share no
    memory, as safetensors requires."""
    tensors: dict[str, Tensor] = {}
    data, memory = _encode(value, "", tensors), set[int]()
    for name, tensor in tensors.items() if separate else ():
        own = tensor.to("cpu").contiguous()
        tensors[name] = own.clone() if own.untyped_storage().data_ptr() in memory else own
        memory.add(tensors[name].untyped_storage().data_ptr())
    return data, tensors


def unflatten(data: Any, tensors: Mapping[str, Tensor], device: str | None = None) -> Any:
    """Invert ``flatten``, with TensorDicts on ``device``; ``KeyError`` or ``ValueError`` if the parts do not match."""
    if isinstance(data, list):
        return [unflatten(entry, tensors, device) for entry in data]
    if not isinstance(data, dict):
        return data
    mark = next((key for key in data if key.startswith("$")), None)
    if mark is None:
        return {key: unflatten(entry, tensors, device) for key, entry in data.items()}
    content = data[mark]
    if mark == "$tensor":
        return tensors[content]
    if mark == "$array":
        return tensors[content].numpy()
    if mark == "$float":
        return float(content)
    if mark == "$tuple":
        return tuple(unflatten(content, tensors, device))
    if mark == "$items":
        return {unflatten(key, tensors, device): unflatten(entry, tensors, device) for key, entry in content}
    if mark in ("$tensordict", "$batch"):
        entries = {key: unflatten(entry, tensors, device) for key, entry in data["$tensordict"].items()}
        return TensorDict(entries, batch_size=data["$batch"], device=device)
    raise ValueError(f"unknown mark {mark!r}")


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return {"$tensor": _keep(value.detach(), path, tensors)}
    if isinstance(value, np.ndarray):
        return {"$array": _keep(torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape)), path, tensors)}
    if isinstance(value, np.generic):
        return _encode(value.item(), path, tensors)
    if isinstance(value, TensorDictBase):
        entries = {key: _encode(value.get(key), f"{path}/{key}", tensors) for key in value.keys()}  # noqa: SIM118
        return {"$tensordict": entries, "$batch": list(value.batch_size)}
    if isinstance(value, Mapping):
        items = [[key, _encode(entry, f"{path}/{key}", tensors)] for key, entry in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$items": [[_encode(key, path, tensors), entry] for key, entry in items]}
    if isinstance(value, (list, tuple)):
        items = [_encode(entry, f"{path}/{i}", tensors) for i, entry in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise CheckpointError(
        f"{path.strip('/') or 'the state'}: expected tensors, numbers, strings, lists and dicts of them, got "
        f"{type(value).__name__}; a state_dict() has to turn it into those"
    )


def _keep(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Store a tensor under its path and return that name."""
    name = path.strip("/") or "value"
    if name in tensors:  # keys may contain slashes themselves
        name = f"{name}#{len(tensors)}"
    tensors[name] = tensor
    return name


class BlockLayout(Generic[Name]):
    """Layout of named tensors in one block of bytes: consecutive, each aligned to a cache line."""

    def __init__(self, tensors: Iterable[tuple[Name, torch.dtype, Sequence[int]]] = ()) -> None:
        self.entries: list[tuple[Name, torch.dtype, list[int], int]] = []
        """Name, type, shape and offset of each tensor."""
        self.nbytes = 0
        for name, dtype, shape in tensors:
            self.entries.append((name, dtype, list(shape), self.nbytes))
            self.nbytes += _aligned(math.prod(shape) * dtype.itemsize)

    @classmethod
    def of(cls, tensors: Mapping[Name, Tensor]) -> BlockLayout[Name]:
        """Return the layout of these tensors."""
        return cls((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())

    def views(self, block: Tensor) -> dict[Name, Tensor]:
        """Return views of the tensors in a block of uint8, which has at least ``nbytes`` elements."""
        return {
            name: block[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, dtype, shape, offset in self.entries
        }

    def write(self, block: Tensor, tensors: Mapping[Name, Tensor]) -> None:
        """Copy tensors from any device into a block."""
        for name, view in self.views(block).items():
            view.copy_(tensors[name])


def encode(value: Any, allocate: Callable[[int], Tensor] | None = None) -> tuple[dict[str, Any], Tensor]:
    """Copy the tensors of nested data into one block of bytes; return a description as JSON data, and the block.

    ``allocate(nbytes)`` returns a uint8 tensor of at least ``nbytes``; it is called only if there are tensors.
    """
    data, tensors = flatten(value)
    layout = BlockLayout.of(tensors)
    entries = [[name, str(dtype).removeprefix("torch."), shape, at] for name, dtype, shape, at in layout.entries]
    block = allocate(layout.nbytes) if allocate and tensors else torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.write(block, tensors)
    return {"data": data, "layout": entries}, block


def decode(description: Mapping[str, Any], block: Tensor | None, copy: bool = True, device: str | None = None) -> Any:
    """Invert ``encode``, with TensorDicts on ``device``; without ``copy``, tensors are views of the block.

    NumPy makes the copies because torch would release the GIL for every tensor, however small.
    """
    entries = description["layout"]
    if not entries or block is None:
        return unflatten(description["data"], {}, device)
    if copy:
        memory = block.numpy()
        tensors = {name: _copied(memory, dtype, shape, offset) for name, dtype, shape, offset in entries}
    else:
        tensors = BlockLayout((name, getattr(torch, dtype), shape) for name, dtype, shape, _ in entries).views(block)
    return unflatten(description["data"], tensors, device)


def _copied(memory: np.ndarray[Any, Any], dtype: str, shape: list[int], offset: int) -> Tensor:
    if dtype in _NUMPY_TYPES:
        return torch.from_numpy(np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape).copy())
    kind = getattr(torch, dtype)
    copied = torch.empty(shape, dtype=kind)
    if copied.nbytes:
        copied = torch.from_numpy(memory[offset : offset + copied.nbytes].copy()).view(kind).view(shape)
    return copied


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def to_bytes(value: Any) -> Tensor:
    """Encode nested data as one block of bytes: the length of its description, the description, and the tensors."""
    description, tensors = encode(value)
    text = json.dumps(description).encode()
    head = (len(text).to_bytes(8, "little") + text).ljust(_aligned(8 + len(text)))
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), tensors])


def from_bytes(message: Tensor) -> Any:
    """Invert ``to_bytes``."""
    end = 8 + int.from_bytes(message[:8].numpy().tobytes(), "little")
    return decode(json.loads(message[8:end].numpy().tobytes()), message[_aligned(end) :])
