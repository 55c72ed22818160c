"""Command-line overrides: every field of a config, at any depth, is a flag such as ``--trainer.num_envs 128``.

The flags are those of the config at hand: entries of mappings and lists have theirs too (``--weights.reach 2``,
``--layers.0.width 64``), and so have the fields of an optional config that is ``None``. Tyro parses plain types and
lists of them (``--hidden 64 64``); anything else is written as YAML (``--events '{push: {force: 3}}'``). A flag that
holds a mapping adds to it: ``--weights reach 2 lift 1``. Where nothing may be set, ``null`` and ``None`` set nothing.
A config with a ``Shorthand`` has a flag of its own for that field: ``--collector ray`` is ``--collector.worker ray``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import io
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

from pydantic.fields import FieldInfo

from embodichain.config.classes import MISSING, Shorthand, entry_type, is_config, is_config_class, shorten, strip
from embodichain.config.files import parse_yaml
from embodichain.errors import ConfigError

# MERGED flags: The flags that a config has on the command line: one for each entry of it, at any depth.


@dataclasses.dataclass(frozen=True)
class Flag:
    """One entry of the config that the command line may set."""

    path: tuple[str | int, ...]
    annotation: Any
    value: Any
    owner: type[Any] | None
    """The config that has it as a field; entries of mappings and lists have none."""
    stands_for: str | None = None
    """The field that it sets of the config at the path; see ``Shorthand``."""

    @property
    def name(self) -> str:
        """What it is called on the command line, without the dashes."""
        return ".".join(map(str, self.path))

    @property
    def target(self) -> tuple[str | int, ...]:
        """The path of what it sets."""
        return self.path if self.stands_for is None else (*self.path, self.stands_for)


def flags_of(
    value: Any,
    declared: Any,
    path: tuple[str | int, ...] = (),
    owner: type[Any] | None = None,
    above: tuple[type[Any], ...] = (),
) -> Iterator[Flag]:
    """Yield the entries of a value and of everything below it, by what it is and by what it is declared to be.

    The rest says where the value is: its path, the config whose field it is, and all configs around it.
    """
    plain = strip(declared)
    cls = type(value) if is_config(value) else plain
    if is_config_class(cls) and path and plain is not declared:
        yield Flag(path, Any, value, owner)  # an optional config can be set to null
    if is_config_class(cls):
        if is_config(value) or cls not in above:
            for name, field in cls.__pydantic_fields__.items():
                entry = getattr(value, name) if is_config(value) else MISSING
                yield from _shorthands(entry, field, (*path, name), cls)
                yield from flags_of(entry, field.annotation, (*path, name), cls, (*above, cls))
        return
    yield Flag(path, declared, value, owner)
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if _is_nested_list(value) else ()
    for key, entry in entries:
        yield from flags_of(entry, entry_type(plain, key), (*path, key), None, above)


def _shorthands(value: Any, field: FieldInfo, path: tuple[str | int, ...], owner: type[Any]) -> Iterator[Flag]:
    """Yield the flag that sets one field of a config under the config's own name, if there is one."""
    for mark in field.metadata:
        if isinstance(mark, Shorthand):
            now = getattr(value, mark.field) if is_config(value) else MISSING
            yield Flag(path, entry_type(strip(field.annotation), mark.field), now, owner, mark.field)


def _is_nested_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(is_config(entry) or isinstance(entry, Mapping) for entry in value)


def value_now(flag: Flag) -> str:
    """Return what the entry is without the flag."""
    return "(unset)" if flag.value is MISSING else f"(now: {shorten(flag.value)})"


def docs_of(flags: Collection[Flag]) -> dict[str, str]:
    """Return the line under each field, read from the source of its class."""
    import docstring_parser

    lines: dict[type[Any] | None, dict[str, str]] = {None: {}}
    for owner in {flag.owner for flag in flags if flag.owner is not None}:
        parsed = [docstring_parser.parse_from_object(base).params for base in reversed(owner.__mro__[:-1])]
        # What takes several lines in the source is broken anew by whoever prints it.
        lines[owner] = {doc.arg_name: " ".join((doc.description or "").split()) for params in parsed for doc in params}
    return {flag.name: lines[flag.owner].get(str(flag.path[-1]), "") for flag in flags}


_T = TypeVar("_T")
_FLAG = re.compile(r"^--([A-Za-z_][\w.-]*)")


@dataclasses.dataclass(frozen=True)
class _Leaf:
    value: Any


def parse_overrides(cfg: _T, argv: Sequence[str], prog: str | None = None, description: str = "") -> _T:
    """Return a checked copy of ``cfg`` with the flags of ``argv`` applied; ``--help`` lists them all and exits."""
    if not is_config(cfg):
        raise TypeError(f"expected a configclass object, got {type(cfg).__name__}")
    flags = {flag.name: flag for flag in flags_of(cfg, type(cfg)) if _FLAG.match(f"--{flag.name}")}
    tree: dict[Any, Any] = {}
    for name, value in _parse(flags, argv, prog, description).items():
        _plant(tree, flags[name], value)
    problems: list[str] = []
    changed: _T = _apply(cfg, type(cfg), tree, "", problems)
    if problems:
        raise ConfigError(problems, "command line")
    return changed


def _parse(flags: Mapping[str, Flag], argv: Sequence[str], prog: str | None, description: str) -> dict[str, Any]:
    """Let tyro read the flags; what it does not know or cannot read becomes a ``ConfigError``."""
    import tyro  # only commands that take overrides pay for it

    helps = docs_of(flags.values()) if {"-h", "--help"} & set(argv) else {}
    types: dict[str, Any] = {}
    for name, flag in flags.items():
        text = tyro.conf.arg(help=helps.get(name, ""), help_behavior_hint=value_now(flag))
        types[name] = Annotated[_cli_type(flag.annotation), text]
    schema = TypedDict("Overrides", types, total=False)  # type: ignore[misc] # the names are only known here
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            values, unknown = tyro.cli(
                schema,
                args=_with_none(flags, argv),
                prog=prog,
                description=description,
                return_unknown_args=True,
                use_underscores=True,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_plain_text(said.getvalue()), "command line") from None
    if unknown:
        raise ConfigError([_unknown(word, flags) for word in _first_words(unknown)], "command line")
    return dict(values)


def _with_none(flags: Mapping[str, Flag], argv: Sequence[str]) -> list[str]:
    """Return the words with ``null``, as JSON and YAML have it, written as tyro knows it where nothing may be set."""
    words = list(argv)
    for i, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        flag = flags.get(name.replace("-", "_")) if word.startswith("--") else None
        if flag is None or type(None) not in typing.get_args(flag.annotation) or not _is_plain(flag.annotation):
            continue
        if equals and value == "null":
            words[i] = f"--{name}=None"
        elif not equals and words[i + 1 : i + 2] == ["null"]:
            words[i + 1] = "None"
    return words


def _plain_text(boxed: str) -> str:
    """Return the first paragraph of the box in which tyro draws an error."""
    lines = [line.strip(" │╭╮╰╯") for line in boxed.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and set(line[-3:]) <= set("-─")]
    first, last = (rules[0] + 1, rules[1]) if len(rules) > 1 else (0, len(lines))
    return " ".join(" ".join(lines[first:last]).split())


def _first_words(unknown: Sequence[str]) -> list[str]:
    """Return the flags among the words nobody knows; their values say nothing. Without a flag, return the words."""
    return [word for word in unknown if _FLAG.match(word)] or list(unknown)


def _unknown(word: str, flags: Mapping[str, Flag]) -> str:
    found = _FLAG.match(word)
    if not found:
        return f"{word!r}: expected a flag such as --{next(iter(flags), 'name')}"
    name = found.group(1).replace("-", "_")
    last = {flag.rpartition(".")[2]: flag for flag in flags}
    close = difflib.get_close_matches(name, flags, cutoff=0.6) or [
        last[match] for match in difflib.get_close_matches(name.rpartition(".")[2], last, cutoff=0.6)
    ]
    hint = f" Did you mean {' or '.join(f'--{match}' for match in close)}?" if close else ""
    return f"{found.group(1)}: unknown flag.{hint} --help lists all."


def _cli_type(annotation: Any) -> Any:
    """Return the type tyro is to parse: the declared one where it is plain, else YAML."""
    import tyro

    plain = strip(annotation)
    if plain is bool and type(None) not in typing.get_args(annotation):
        spec = tyro.constructors.PrimitiveConstructorSpec(
            nargs=(0, 1), metavar="[true|false]", instance_from_str=_bool, is_instance=_any, str_from_instance=_text
        )
        return Annotated[bool, tyro.conf.FlagConversionOff, spec]
    if typing.get_origin(plain) is dict and _is_plain(typing.get_args(plain)[1]):
        return list[tuple[str, typing.get_args(plain)[1]]]  # type: ignore[misc] # built at run time
    if _is_plain(annotation):
        return annotation
    spec = tyro.constructors.PrimitiveConstructorSpec(
        nargs=1, metavar="YAML", instance_from_str=_yaml, is_instance=_any, str_from_instance=_text
    )
    return Annotated[Any, spec]


def _is_plain(annotation: Any) -> bool:
    """Tell whether tyro parses a type from words without asking how: scalars, choices, and lists of them."""
    plain = strip(annotation)
    if isinstance(plain, tuple):
        return all(_is_plain(option) for option in plain)
    origin: Any = typing.get_origin(plain)
    if origin in (list, tuple, set, frozenset):
        args = [strip(arg) for arg in typing.get_args(plain) if arg is not Ellipsis]
        return all(_is_plain(arg) and typing.get_origin(arg) in (None, typing.Literal) for arg in args)
    is_enum = isinstance(plain, type) and issubclass(plain, enum.Enum)
    return origin is typing.Literal or is_enum or plain in (int, float, str, Path)


def _bool(words: list[str]) -> bool:
    text = words[0].lower() if words else "true"
    if text not in ("true", "false"):
        raise ValueError(f"expected true or false, got {words[0]!r}")
    return text == "true"


def _yaml(words: list[str]) -> Any:
    return parse_yaml(words[0])


def _any(_: Any) -> bool:
    return True


def _text(value: Any) -> list[str]:
    return [shorten(value)]


def _plant(tree: dict[Any, Any], flag: Flag, value: Any) -> None:
    """Put a value into the tree of changes; a mapping becomes one change per entry."""
    target = flag.target
    for depth, key in enumerate(target[:-1], start=1):
        tree = tree.setdefault(key, {})
        if isinstance(tree, _Leaf):
            whole = ".".join(map(str, target[:depth]))
            raise ConfigError(f"{flag.name}: expected either --{whole} or --{flag.name}, got both", "command line")
    if typing.get_origin(strip(flag.annotation)) is dict and isinstance(value, list):
        value = dict(value)
    if isinstance(value, Mapping) and value:
        below = tree.setdefault(target[-1], {})
        below.update({key: _Leaf(entry) for key, entry in value.items() if key not in below})
    elif isinstance(tree.get(target[-1]), _Leaf):  # by its short form
        whole = ".".join(map(str, target))
        raise ConfigError(
            f"{whole}: expected either --{whole} or --{'.'.join(map(str, target[:-1]))}, got both", "command line"
        )
    else:
        tree[target[-1]] = _Leaf(value)


def _apply(value: Any, declared: Any, tree: Any, path: str, problems: list[str]) -> Any:
    """Return a value with a tree of changes applied; a config keeps its class, and all problems are collected."""
    if isinstance(tree, _Leaf):
        return tree.value
    plain = strip(declared)
    cls = type(value) if is_config(value) else plain

    def below(key: Any, entry: Any, kind: Any) -> Any:
        return _apply(entry, kind, tree[key], f"{path}.{key}" if path else str(key), problems)

    if is_config_class(cls):
        changes = {key: below(key, getattr(value, key, None), entry_type(cls, key)) for key in tree}
        try:
            return value.copy(**changes) if is_config(value) else cls.from_dict(changes)
        except ConfigError as error:
            problems.extend(f"{path}.{problem}" if path else problem for problem in error.problems)
            return value
    if isinstance(value, (list, tuple)):
        return [below(i, entry, entry_type(plain, i)) if i in tree else entry for i, entry in enumerate(value)]
    base = dict(value) if isinstance(value, Mapping) else {}
    return base | {key: below(key, base.get(key), entry_type(plain, key)) for key in tree}
