"""One hash for all that determines what a worker does, so that one that was left behind can be known again."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import types
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_IGNORED = ("_parameters", "_buffers", "_modules", "training", "generator")
"""Attributes of modules that are looked at otherwise, or are set where the module is used."""


def fingerprint(value: Any) -> str:
    """Return a hash of settings, functions and modules: equal in every process that was given equal ones.

    Of a module it is the structure and every setting, not the weights: these change all the time, and travel
    separately. What cannot be looked into differs rather than being taken for equal by mistake.
    """
    return hashlib.sha256(json.dumps(_describe(value, ())).encode()).hexdigest()


def _describe(value: Any, above: tuple[int, ...]) -> Any:
    """Return nested lists of strings; ``above`` are the objects that this one is part of, which may contain itself."""
    if id(value) in above:
        return ["above", len(above) - above.index(id(value))]
    inside = (*above, id(value))
    if isinstance(value, Mapping):
        pairs = [[_describe(key, inside), _describe(part, inside)] for key, part in value.items()]
        return ["mapping", sorted(pairs, key=json.dumps)]
    if isinstance(value, list | tuple):
        return ["sequence", [_describe(part, inside) for part in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted((_describe(part, inside) for part in value), key=json.dumps)]
    if isinstance(value, Tensor):
        return [*_form(value), value.detach().cpu().flatten().tolist()]
    if isinstance(value, nn.Module):
        return _describe_module(value, inside)
    if isinstance(value, functools.partial):
        return ["partial", _describe((value.func, value.args, value.keywords), inside)]
    if isinstance(value, types.MethodType):
        return ["method", _describe((value.__func__, value.__self__), inside)]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [*_name(value), _describe((value.__code__, value.__defaults__, value.__kwdefaults__, cells), inside)]
    if isinstance(value, types.CodeType):
        return ["code", value.co_code.hex(), list(value.co_names), _describe(value.co_consts, inside)]
    if isinstance(value, type | types.BuiltinFunctionType):
        return _name(value)
    state = getattr(value, "__dict__", None)
    return [*_name(type(value)), _ADDRESS.sub("", repr(value)) if state is None else _describe(state, inside)]


def _describe_module(module: nn.Module, inside: tuple[int, ...]) -> Any:
    weights = {name: _form(tensor) for name, tensor in module.state_dict().items()}
    parts = dict(module.named_children())
    settings = {name: part for name, part in vars(module).items() if name not in _IGNORED}
    return [*_name(type(module)), _describe((weights, parts, settings), inside)]


def _form(tensor: Tensor) -> list[str]:
    return ["tensor", str(tensor.dtype), str(list(tensor.shape))]


def _name(thing: Any) -> list[str]:
    return [str(thing.__module__), str(thing.__qualname__)]
