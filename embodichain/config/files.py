"""Config files: JSON and YAML that load to the same thing, saved so that they load to the same thing again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from embodichain.config.classes import to_data
from embodichain.errors import ConfigError

_YAML_SUFFIXES = (".yaml", ".yml")
# Plain scalars mean what they mean in JSON (YAML 1.2's core schema): 1e-4 is a number; on, 010 and 12:30 are strings.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
)


class _Loader(yaml.SafeLoader):
    """Data only; a key that is no string or comes twice is an error."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a dict, looking at every key."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = f"expected a string as key, got {key!r} ({type(key).__name__}); put it in quotes"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} comes twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=True)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that our loader would take for something else."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value out, as JSON does."""
        return True


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a ``.json``, ``.yaml`` or ``.yml`` file that holds one mapping."""
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in (".json", *_YAML_SUFFIXES):
        raise ConfigError(f"expected a .json, .yaml or .yml file, got the suffix {file.suffix!r}", str(file))
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"no such file (looked in {Path.cwd()})", str(file)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", str(file)) from None
    try:
        data = parse_yaml(text) if suffix in _YAML_SUFFIXES else json.loads(text, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise ConfigError("is nested too deeply to be a config", str(file)) from None
    except ValueError as error:
        raise ConfigError(f"cannot be parsed: {error}", str(file)) from None
    if not isinstance(data, dict):
        raise ConfigError(f"expected a mapping at the top, got {type(data).__name__}", str(file))
    return data


def save_config(cfg: Any, path: str | os.PathLike[str]) -> Path:
    """Write a config or a mapping as JSON or YAML, whole or not at all; missing folders are made."""
    file = Path(path)
    data = to_data(cfg)
    if not isinstance(data, dict):
        raise TypeError(f"expected a configclass object or a mapping, got {type(cfg).__name__}")
    if file.suffix.lower() in _YAML_SUFFIXES:
        text = yaml.dump(data, Dumper=_Dumper, sort_keys=False)
    elif file.suffix.lower() == ".json":
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    else:
        raise ConfigError(f"expected a .json, .yaml or .yml file, got the suffix {file.suffix!r}", str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
    return file


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``overrides`` laid over it, mapping by mapping; neither is changed."""
    merged = dict(base)
    for key, value in overrides.items():
        below = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - derived from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ValueError(f"key {', '.join(map(repr, twice))} comes twice in one object")
    return data
