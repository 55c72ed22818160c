"""Loads and saves config files; JSON and YAML are equivalent, and a saved file loads to the same data."""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from embodichain.config.classes import to_data
from embodichain.errors import ConfigError, writing

_LOG = logging.getLogger(__name__)

MAX_BYTES, MAX_ENTRIES, MAX_LEVELS = 1 << 20, 20_000, 64
"""Limits of a config: file size, number of keys and values (with YAML aliases expanded), and nesting depth."""
_TOO_MANY = f"has more than {MAX_ENTRIES} keys and values, too many for a config"
_TOO_DEEP = f"is nested more than {MAX_LEVELS} levels deep, too deeply for a config"

# Plain scalars are parsed as in JSON (core schema of YAML 1.2): 1e-4 is a number; on, 010 and 12:30 are strings.
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
    """A safe YAML loader with limits on size and depth; duplicate keys and keys that are not strings are errors."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node and measure its size and depth; an alias counts as much as its target, recursively."""
        if self.level > MAX_LEVELS:
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, self.peek_event().start_mark)
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        self.level += 1
        node: Any = super().compose_node(parent, index)
        self.level -= 1
        if is_alias and not hasattr(node, "measure"):
            raise yaml.composer.ComposerError(None, None, "a recursive alias: it stands for what it is a part of", mark)
        if not is_alias:
            below = node.value if isinstance(node.value, list) else []
            parts = [part.measure for entry in below for part in (entry if isinstance(entry, tuple) else (entry,))]
            node.measure = 1 + sum(size for size, _ in parts), 1 + max((levels for _, levels in parts), default=0)
        size, levels = node.measure
        if size > MAX_ENTRIES or self.level + levels > MAX_LEVELS + 1:
            problem = _TOO_MANY if size > MAX_ENTRIES else _TOO_DEEP
            raise yaml.composer.ComposerError(None, None, problem, mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known: set[Any] = set()
        for key_node, _ in node.value:
            key, problem = self.construct_object(key_node, deep=True), None
            if not isinstance(key, str):
                problem = f"expected a string as key, got {key!r} ({type(key).__name__}); put it in quotes"
            elif key in known:
                problem = f"key {key!r} comes twice"
            if problem is not None:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            known.add(key)
        return super().construct_mapping(node, deep=True)


class _Dumper(yaml.SafeDumper):
    """A safe YAML dumper that quotes the strings that our loader would not read as strings."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True  # write every value out, as in JSON


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a ``.json``, ``.yaml`` or ``.yml`` file that holds one mapping."""
    file, is_yaml = _format(path)
    if "\0" in str(file):
        raise ConfigError("expected a name without NUL", ascii(str(file)))
    try:
        size = file.stat().st_size
        text = file.read_text(encoding="utf-8-sig") if size <= MAX_BYTES else ""
    except FileNotFoundError:
        raise ConfigError(f"no such file (looked in {Path.cwd()})", str(file)) from None
    except (OSError, ValueError) as error:  # invalid UTF-8, or a NUL in the name, is a ValueError
        raise ConfigError(f"cannot be read: {error}", str(file)) from None
    if size > MAX_BYTES:
        raise ConfigError(f"expected at most {MAX_BYTES} bytes, got {size}", str(file))
    try:
        data = parse_yaml(text) if is_yaml else _parse_json(text)
    except ValueError as error:
        raise ConfigError(f"cannot be parsed: {error}", str(file)) from None
    if not isinstance(data, dict):
        raise ConfigError(f"expected a mapping at the top, got {type(data).__name__}", str(file))
    return data


def shipped_configs() -> Path:
    """Return the folder of the shipped configs: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def find_shipped(path: str | os.PathLike[str]) -> Path:
    """Return the path of a config; if ``configs/...`` does not exist, that of the shipped config of this name."""
    file = Path(path)
    if file.parts[:1] == ("configs",) and "\0" not in str(file) and not file.exists():
        shipped = shipped_configs().joinpath(*file.parts[1:])
        return shipped if shipped.is_file() else file
    return file


def find_config(name: str, folder: Path) -> Path:
    """Return the file that a config in ``folder`` refers to: relative to ``folder``, else to the working directory,
    else the one of this package (``configs/...``), else, with a warning, a file of that name in ``folder``. An absolute
    path is used as it is."""
    given, beside = Path(name), folder / Path(name).name
    relative = (folder / name, Path.cwd() / name, find_shipped(given), beside)
    candidates = dict.fromkeys((given,) if given.is_absolute() else relative)
    for file in candidates:
        if file.is_file():
            if file == beside and beside != folder / name:
                _LOG.warning("%s: no such file, taking %s", name, file.absolute())
            return file
    looked = dict.fromkeys(str(file.absolute()) for file in candidates)
    raise ConfigError(f"no such file (looked for {', '.join(looked)})", name)


def save_config(cfg: Any, path: str | os.PathLike[str]) -> Path:
    """Write a config or a mapping as JSON or YAML, atomically; missing folders are created."""
    file, is_yaml = _format(path)
    data = to_data(cfg)
    if not isinstance(data, dict):
        raise TypeError(f"expected a configclass object or a mapping, got {type(cfg).__name__}")
    as_json = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False) if is_yaml else as_json
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    return file


def _format(path: str | os.PathLike[str]) -> tuple[Path, bool]:
    file = Path(path)
    if file.suffix.lower() not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"expected a .json, .yaml or .yml file, got the suffix {file.suffix!r}", str(file))
    return file, file.suffix.lower() != ".json"


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings recursively; ``overrides`` take precedence. Neither argument is modified."""
    merged = dict(base)
    for key, value in overrides.items():
        below = merged.get(key)
        merged[key] = merge(below if isinstance(below, Mapping) else {}, value) if isinstance(value, Mapping) else value
    return merged


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        below = dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else None
        leaves |= {f"{prefix}{key}": value} if below is None else below
    return leaves


def _parse_json(text: str) -> Any:
    """Parse JSON within the limits of size and depth; ``ValueError`` says what is wrong."""
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    count, here = 0, [data]
    for _ in range(MAX_LEVELS + 1):  # level by level
        count += len(here)
        if count > MAX_ENTRIES:
            raise ValueError(_TOO_MANY)
        below = (
            value.values() if isinstance(value, dict) else value for value in here if isinstance(value, dict | list)
        )
        here = [entry for entries in below for entry in entries]
        if not here:
            return data
    raise ValueError(_TOO_DEEP)


def parse_yaml(text: str) -> Any:
    """Parse YAML within the limits of size and depth; ``ValueError`` says what is wrong, and where."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - derived from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1):
        raise ValueError(f"key {', '.join(map(repr, twice))} comes twice in one object")
    return dict(pairs)


def find_beside(given: str, folder: Path) -> str:
    """Return the absolute path of a file or folder that a config in ``folder`` refers to, relative to ``folder`` or to
    the working directory."""
    path = Path(given).expanduser()
    found = next((base / path for base in (folder, Path.cwd()) if (base / path).exists()), Path.cwd() / path)
    return str(found.absolute())
