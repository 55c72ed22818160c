"""Command-line overrides: every field of a config, at any depth, is a flag such as ``--trainer.num_envs 128``.

Entries of mappings and lists have flags too (``--weights.reach 2``, ``--layers.0.width 64``), and so have the fields of
an optional config that is ``None``. Tyro parses plain types and lists of them (``--hidden 64 64``); anything else is
YAML (``--events '{push: {force: 3}}'``). A flag that holds a mapping adds to it: ``--weights reach 2 lift 1``.
"""

import contextlib
import dataclasses
import difflib
import enum
import functools
import io
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from embodichain.config.classes import MISSING, Shorthand, entry_type, is_config, is_config_class, shorten, strip
from embodichain.config.files import parse_yaml
from embodichain.errors import ConfigError

_T = TypeVar("_T")
_FLAG = re.compile(r"^--([A-Za-z_][\w.-]*)")
_WORD = re.compile(r"^--?[A-Za-z]")
_VALUE = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?|true|false|null", re.IGNORECASE)
_Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Flag:
    """One entry of the config that the command line may set."""

    path: _Path
    annotation: Any
    value: Any
    owner: type[Any] | None
    """The config that has it as a field; entries of mappings and lists have none."""
    stands_for: str | None = None
    """The field that it sets of the config at the path; see ``Shorthand``."""

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def target(self) -> _Path:
        return self.path if self.stands_for is None else (*self.path, self.stands_for)


def flags_of(
    value: Any, declared: Any, path: _Path = (), owner: type[Any] | None = None, above: tuple[type[Any], ...] = ()
) -> Iterator[Flag]:
    """Yield the entries of a value and of all below it; ``owner`` has it as a field, ``above`` holds configs around."""
    plain = strip(declared)
    cls = type(value) if is_config(value) else plain
    if not is_config_class(cls):
        yield Flag(path, declared, value, owner)
        is_nested = isinstance(value, (list, tuple)) and any(is_config(e) or isinstance(e, Mapping) for e in value)
        entries = value.items() if isinstance(value, Mapping) else enumerate(value) if is_nested else ()
        for key, entry in entries:
            yield from flags_of(entry, entry_type(plain, key), (*path, key), None, above)
        return
    if path and plain is not declared:
        yield Flag(path, Any, value, owner)  # an optional config can be set to null
    if not is_config(value) and cls in above:
        return
    for name, field in cls.__pydantic_fields__.items():
        entry = getattr(value, name) if is_config(value) else MISSING
        for mark in field.metadata:
            if isinstance(mark, Shorthand):
                now = getattr(entry, mark.field) if is_config(entry) else MISSING
                yield Flag((*path, name), entry_type(strip(field.annotation), mark.field), now, cls, mark.field)
        yield from flags_of(entry, field.annotation, (*path, name), cls, (*above, cls))


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

    needs_help = {"-h", "--help"} & set(argv)
    docs = {owner: _field_docs(owner) for owner in {flag.owner for flag in flags.values() if needs_help}}
    named = {found.group(1).replace("-", "_") for word in argv if (found := _FLAG.match(word))}
    types: dict[str, Any] = {}
    for name, flag in flags.items():
        if not needs_help and name.replace("-", "_") not in named:
            continue  # each one costs time
        hint = "(unset)" if flag.value is MISSING else f"(now: {shorten(flag.value)})"
        doc = docs.get(flag.owner, {}).get(str(flag.path[-1]), "")
        types[name] = Annotated[_cli_type(flag.annotation), tyro.conf.arg(help=doc, help_behavior_hint=hint)]
    schema = TypedDict("Overrides", types, total=False)  # type: ignore[misc] # the names are only known here
    settings: Any = {"prog": prog, "description": description, "return_unknown_args": True, "use_underscores": True}
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            values, unknown = tyro.cli(schema, args=list(argv), **settings)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(plain_text(output.getvalue()), "command line") from None
    if unknown:  # values of unknown flags need no message of their own
        words = [word for word in unknown if _FLAG.match(word)] or unknown
        raise ConfigError([_unknown(word, flags) for word in words], "command line")
    optional = {name for name, flag in flags.items() if type(None) in typing.get_args(flag.annotation)}
    return {name: None if value == "null" and name in optional else value for name, value in values.items()}


def positional_first(argv: Sequence[str], values: Mapping[str, int]) -> list[str]:
    """Put the one positional argument before the flags, which may be those of a config besides the command's own.

    ``values`` says how many words a flag of the command takes; one of a config takes any number, but at least one.
    """
    words = list(argv)
    flags = [index for index, word in enumerate(words) if _WORD.match(word)]
    if not flags or flags[0] > 0:
        return words
    for begin, end in reversed(list(zip(flags, [*flags[1:], len(words)], strict=True))):
        name, is_joined, _ = words[begin].lstrip("-").replace("-", "_").partition("=")
        others = range(begin + 1 + (0 if is_joined else values.get(name, 1)), end)
        for index in reversed(others):
            if not _VALUE.fullmatch(words[index]):
                return [words[index], *words[:index], *words[index + 1 :]]
    return words


def _field_docs(owner: type[Any] | None) -> dict[str, str]:
    """Return the lines under the fields of a config, read from the source of its class."""
    import docstring_parser

    bases = owner.__mro__[-2::-1] if owner is not None else ()
    parsed = [docstring_parser.parse_from_object(base).params for base in bases]
    return {doc.arg_name: " ".join((doc.description or "").split()) for params in parsed for doc in params}


def plain_text(boxed: str) -> str:
    """Return the first paragraph of the box in which tyro draws an error."""
    lines = [line.strip(" │╭╮╰╯") for line in boxed.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and set(line[-3:]) <= set("-─")]
    first, last = (rules[0] + 1, rules[1]) if len(rules) > 1 else (0, len(lines))
    return " ".join(" ".join(lines[first:last]).split())


def _unknown(word: str, flags: Mapping[str, Flag]) -> str:
    found = _FLAG.match(word)
    if not found:
        return f"{word!r}: expected a flag such as --{next(iter(flags), 'name')}"
    name = found.group(1).replace("-", "_")
    last = {flag.rpartition(".")[2]: flag for flag in flags}
    close = difflib.get_close_matches(name, flags)
    close = close or [last[match] for match in difflib.get_close_matches(name.rpartition(".")[2], last)]
    hint = f" Did you mean {' or '.join(f'--{match}' for match in close)}?" if close else ""
    return f"{found.group(1)}: unknown flag.{hint} --help lists all."


def _cli_type(annotation: Any) -> Any:
    """Return the type tyro is to parse: the declared one where it is plain, else YAML."""
    import tyro

    spec = functools.partial(
        tyro.constructors.PrimitiveConstructorSpec,
        is_instance=lambda _: True,
        str_from_instance=lambda value: [shorten(value)],
    )
    plain = strip(annotation)
    if plain is bool and type(None) not in typing.get_args(annotation):
        from_words = spec(nargs=(0, 1), metavar="[true|false]", instance_from_str=_bool)
        return Annotated[bool, tyro.conf.FlagConversionOff, from_words]
    if typing.get_origin(plain) is dict and _is_plain(typing.get_args(plain)[1]):
        return list[tuple[str, typing.get_args(plain)[1]]]  # type: ignore[misc] # built at run time
    if _is_plain(annotation):  # null is None, as in JSON and YAML
        return Literal["null"] | annotation if type(None) in typing.get_args(annotation) else annotation
    return Annotated[Any, spec(nargs=1, metavar="YAML", instance_from_str=lambda words: parse_yaml(words[0]))]


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


def _plant(tree: dict[Any, Any], flag: Flag, value: Any) -> None:
    """Put a value into the tree of changes; a mapping becomes one change per entry."""
    *parents, last = flag.target
    for depth, key in enumerate(parents, start=1):
        tree = tree.setdefault(key, {})
        if isinstance(tree, _Leaf):
            raise _given_twice(flag, depth)
    if typing.get_origin(strip(flag.annotation)) is dict and isinstance(value, list):
        value = dict(value) if all(isinstance(entry, tuple) for entry in value) else value  # YAML has no tuples
    if isinstance(value, Mapping) and value:
        below = tree.setdefault(last, {})
        below.update({key: _Leaf(entry) for key, entry in value.items() if key not in below})
    elif isinstance(tree.get(last), _Leaf):  # set by its short form already
        raise _given_twice(flag, len(parents))
    else:
        tree[last] = _Leaf(value)


def _given_twice(flag: Flag, depth: int) -> ConfigError:
    name, whole = (".".join(map(str, part)) for part in (flag.target, flag.target[:depth]))
    return ConfigError(f"{name}: expected either --{whole} or --{name}, got both", "command line")


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
