"""The wording of what is wrong with a config: dotted path, what was expected, what came, the nearest valid name."""

from __future__ import annotations

import re
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from pydantic.dataclasses import is_pydantic_dataclass

from embodichain.errors import ConfigError, nearest


def describe(cls: type[Any], error: pydantic.ValidationError) -> list[str]:
    """Return one line per problem, in the order of the fields; alternatives of a union share a line."""
    expected: dict[str, list[str]] = {}
    ending: dict[str, str] = {}
    for entry in error.errors(include_url=False):
        path, owner = _locate(cls, entry["loc"])
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            for problem in cause.problems:
                expected.setdefault(f"{path}.{problem}" if path else problem, [])
            continue
        wanted, tail = _explain(entry, owner)
        label = path or cls.__name__
        others = expected.setdefault(label, [])
        if wanted not in others:
            others.append(wanted.removeprefix("expected ") if others else wanted)
        ending[label] = tail
    return [f"{path}: {' or '.join(wanted)}{ending[path]}" if wanted else path for path, wanted in expected.items()]


def _explain(entry: Any, owner: Any) -> tuple[str, str]:
    """Return what was expected, and what came with the nearest valid name."""
    kind, value = entry["type"], entry["input"]
    came = f", got {shorten(value)} ({type(value).__name__})"
    if kind in ("unexpected_keyword_argument", "no_such_attribute"):
        name = str(entry["loc"][-1])
        return f"unknown key{came}", "." + nearest(name, owner.__pydantic_fields__) if is_config_type(owner) else ""
    if kind == "missing":
        return "expected a value, got none", ""
    if kind in ("dataclass_type", "dataclass_exact_type"):
        return f"expected a mapping of {entry['ctx']['class_name']} fields", came
    if kind in ("literal_error", "enum"):
        wanted = entry["ctx"]["expected"]
        hint = "." + nearest(value, _options(wanted)) if isinstance(value, str) else ""
        return f"expected {wanted}", came + hint
    if kind in ("value_error", "assertion_error"):
        return str(entry["ctx"]["error"]), came
    message = entry["msg"].replace("Input should be", "expected").replace("a valid dictionary", "a mapping")
    message = re.sub(r"\ba valid (\w)", lambda found: f"a{'n' * (found[1] in 'aeiou')} {found[1]}", message)
    return message[0].lower() + message[1:], came


def shorten(value: object) -> str:
    """Return a ``repr`` that fits a line."""
    short = reprlib.Repr()
    short.maxlevel, short.maxdict, short.maxstring, short.maxother = 2, 3, 60, 60
    return short.repr(value)


def is_config_type(cls: object) -> bool:
    """Tell whether a type is a pydantic dataclass, as every configclass is."""
    return isinstance(cls, type) and is_pydantic_dataclass(cls)


def _options(expected: str) -> list[str]:
    return [part.strip().strip("'") for part in expected.replace(" or ", ", ").split(",")]


def _locate(cls: Any, location: Sequence[int | str]) -> tuple[str, Any]:
    """Follow pydantic's location through the types; return the dotted path and the type that holds its last key.

    Pydantic also writes which alternative of a union it tried, and ``[key]`` for the key of a mapping; neither is a key
    of the config, so neither belongs to the path.
    """
    path: list[str] = []
    here: Any = cls
    owner: Any = cls
    for key in location:
        here = strip(here)
        if isinstance(here, tuple):
            here = next((option for option in here if is_config_type(option) and option.__name__ == key), Any)
            continue
        if key == "[key]":
            continue
        path.append(str(key))
        owner, here = here, entry_type(here, key)
    return ".".join(path), owner


def strip(annotation: Any) -> Any:
    """Return a type without ``Annotated`` and ``None``; what remains of a union is a tuple of its alternatives."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = tuple(option for option in typing.get_args(annotation) if option is not type(None))
        return strip(options[0]) if len(options) == 1 else options
    return annotation


def entry_type(holder: Any, key: object) -> Any:
    """Return the declared type of one entry of a config, mapping or sequence; ``Any`` where none is declared."""
    if is_config_type(holder):
        declared = holder.__pydantic_fields__.get(key)
        return Any if declared is None else declared.annotation
    origin, args = typing.get_origin(holder), typing.get_args(holder)
    if not isinstance(origin, type) or not args:
        return Any
    if issubclass(origin, Mapping):
        return args[1]
    if issubclass(origin, tuple) and Ellipsis not in args:
        return args[key] if isinstance(key, int) and key < len(args) else Any
    return args[0] if issubclass(origin, (Sequence, set, frozenset)) else Any
