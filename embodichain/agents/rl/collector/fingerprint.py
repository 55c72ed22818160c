"""One hash for all that a worker is sent, so that one that was left behind can be known again.

What is sent is what pickle sends. Functions and classes of modules travel by name, and whether their code is still the
same the worker itself finds out (``processes/loaded_code.py``). Those of a script or a function travel as they are,
with the globals that they use, and everything else as its ``__reduce_ex__`` says.
"""

from __future__ import annotations

import copyreg
import hashlib
import json
import logging
import math
import os
import sys
import types
import uuid
from collections.abc import Collection, Iterable
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("embodichain.collector")

_ATOMS = (type(None), bool, int, float, complex, bytes, type(...), type(NotImplemented))
_NOT_OF_A_CLASS = ("__dict__", "__weakref__", "__doc__", "_abc_impl")
"""What Python gives every class anew."""


class _UnknownError(Exception):
    """Something cannot be described."""


def fingerprint(value: Any, apart: Iterable[nn.Module] = (), by_value: Collection[str] = ()) -> str:
    """Return a hash of settings, functions and modules; it is equal in two processes only if what they send is.

    What cannot be described with certainty gets a hash that never comes again. Of the modules ``apart`` it is the
    structure and every setting, not the weights: these change all the time, and travel separately. ``by_value`` are
    names of Python modules whose functions travel as they are.
    """
    try:
        return _Description(apart, by_value).of(value)
    except (_UnknownError, RecursionError) as error:
        log.info("workers of this run will not be known again when it is resumed: %s", error)
        return uuid.uuid4().hex


class _Description:
    """The hashes of an object and of all its parts."""

    def __init__(self, apart: Iterable[nn.Module], by_value: Collection[str]) -> None:
        self._apart = list(apart)
        self._by_value = by_value
        tensors = (tensor for module in self._apart for tensor in module.state_dict(keep_vars=True).values())
        self._weights = {id(tensor): tensor for tensor in tensors}
        self._known: dict[int, tuple[Any, str]] = {}
        """By identity; the objects themselves keep their identities from being given to others."""
        self._above: dict[int, int] = {}
        """Those that the present one is part of, and how deep they lie."""
        self._reach = math.inf
        """How high above the present one lies what its parts refer to."""

    def of(self, value: Any) -> str:
        """Return the hash of an object."""
        key, depth = id(value), len(self._above)
        if key in self._known:
            return self._known[key][1]
        if key in self._above:
            self._reach = min(self._reach, self._above[key])
            return f"above {depth - self._above[key]}"
        outer, self._reach, self._above[key] = self._reach, math.inf, depth
        found = hashlib.sha256(json.dumps(self._parts(value)).encode()).hexdigest()
        del self._above[key]
        if self._reach >= depth:  # it would be the same anywhere else
            self._known[key] = (value, found)
            self._reach = math.inf
        self._reach = min(outer, self._reach)
        return found

    def _parts(self, value: Any) -> list[str]:
        """Return what tells an object from others."""
        if type(value) in _ATOMS:
            return [type(value).__name__, repr(value)]
        if type(value) is str or isinstance(value, PurePath):
            return [type(value).__name__, str(value), *_state_of_file(str(value))]
        if type(value) in (list, tuple):
            return [type(value).__name__, *map(self.of, value)]
        if type(value) in (dict, types.MappingProxyType):
            return [type(value).__name__, *(self.of(part) for pair in value.items() for part in pair)]
        if type(value) in (set, frozenset):
            return [type(value).__name__, *sorted(map(self.of, value))]
        if isinstance(value, Tensor):
            return self._parts_of_tensor(value)
        if isinstance(value, types.ModuleType):
            return self._parts_of_module(value)
        if isinstance(value, type | types.FunctionType) and self._is_importable(value):
            return ["by name", value.__module__, value.__qualname__]
        return self._parts_by_value(value)

    def _parts_by_value(self, value: Any) -> list[str]:
        if any(value is module for module in self._apart):
            settings = {name: part for name, part in vars(value).items() if not isinstance(part, torch.Generator)}
            return ["apart", *map(self.of, (type(value), settings))]
        if isinstance(value, types.FunctionType):
            cells = list(value.__closure__ or ())
            used = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
            call = (value.__code__, value.__defaults__, value.__kwdefaults__)
            return ["function", value.__qualname__, *map(self.of, (*call, vars(value), cells, used))]
        if isinstance(value, types.CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars, value.co_consts)
            numbers = (value.co_argcount, value.co_kwonlyargcount, value.co_flags)
            return ["code", *map(self.of, (value.co_code, value.co_exceptiontable, *names, *numbers))]
        if isinstance(value, type):
            content = {name: part for name, part in vars(value).items() if name not in _NOT_OF_A_CLASS}
            return ["class", value.__qualname__, *map(self.of, (type(value), value.__bases__, content))]
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__, self.of(value.__func__)]
        if isinstance(value, property):
            return ["property", *map(self.of, (value.fget, value.fset, value.fdel))]
        if isinstance(value, types.CellType):
            return ["cell", self.of(_content(value))]
        return self._parts_as_pickled(value)

    def _parts_as_pickled(self, value: Any) -> list[str]:
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            reduced: str | tuple[Any, ...] = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:
            raise _UnknownError(f"{type(value).__name__}: {error}") from error
        if isinstance(reduced, str):
            return ["by name", type(value).__name__, str(getattr(value, "__module__", "")), reduced]
        # What makes it, with what, its state, its items, its pairs, what sets its state.
        parts = dict(enumerate(reduced))
        contents: list[list[Any]] = [list(parts.pop(place, None) or ()) for place in (3, 4)]
        return ["made by", *map(self.of, (parts, contents))]

    def _parts_of_tensor(self, tensor: Tensor) -> list[str]:
        form = [type(tensor).__name__, str(tensor.dtype), str(list(tensor.shape))]
        if id(tensor) in self._weights:
            return form
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            raise _UnknownError(f"a tensor of the kind {type(tensor).__name__}, {tensor.layout}")
        flat = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
        return [*form, str(tensor.device), hashlib.sha256(flat.numpy().tobytes()).hexdigest()]

    def _parts_of_module(self, module: types.ModuleType) -> list[str]:
        name = module.__name__
        if self._travels_by_value(name) or sys.modules.get(name) is not module:
            raise _UnknownError(f"the module {name} travels as it is")
        return ["module", name]

    def _is_importable(self, thing: type | types.FunctionType) -> bool:
        if self._travels_by_value(thing.__module__):
            return False
        found: Any = sys.modules.get(thing.__module__)
        for part in thing.__qualname__.split("."):
            found = getattr(found, part, None)
        return found is thing

    def _travels_by_value(self, name: str | None) -> bool:
        if name is None or name == "__main__":
            return True
        return any(name == one or name.startswith(f"{one}.") for one in self._by_value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError as error:
        raise _UnknownError("a function of which a variable has no value yet") from error


def _names(code: types.CodeType) -> list[str]:
    """Return all names that code and the functions inside it use, in the order of their use."""
    inside = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return list(dict.fromkeys((*code.co_names, *inside)))


def _state_of_file(path: str) -> list[str]:
    """Return what shows whether the file of this name, if there is one, has been changed."""
    if not os.path.isfile(path):
        return []
    found = os.stat(path)
    return [str(found.st_size), str(found.st_mtime_ns)]
