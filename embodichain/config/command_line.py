"""Command-line overrides: every field of a config, at any depth, is a flag such as ``--trainer.num_envs 128``.

Entries of mappings and lists are flags too (``--weights.reach 2``, ``--layers.0.width 64``), and so are the fields of
an optional config that is ``None``, and of a mapping that another class validates later. Tyro parses plain types and
lists of them (``--hidden 64 64``); anything else is YAML (``--events '{push: {force: 3}}'``). The flag of a mapping
adds entries to it: ``--weights reach 2 lift 1``.
"""

import contextlib
import dataclasses
import difflib
import enum
import functools
import io
import itertools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from embodichain.config.classes import (
    MISSING,
    Shorthand,
    entry_type,
    is_config,
    is_config_class,
    shorten,
    strip,
    to_data,
    usual_names,
)
from embodichain.config.files import parse_yaml
from embodichain.errors import ConfigError

_T = TypeVar("_T")
_FLAG = re.compile(r"^--([A-Za-z_][^\s=]*)")
_WORD = re.compile(r"^--?[A-Za-z]")
_VALUE = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?|true|false|null", re.IGNORECASE)
_WRONG_VALUE = re.compile(r"Error parsing (\S+): .*?\b(INT|FLOAT|int|float)\b.*?('[^']*')")
_KINDS = {"INT": "an integer", "int": "an integer", "FLOAT": "a number", "float": "a number"}
_FAR = 10**6
"""Larger bounds only reflect memory or number formats and are not shown."""
_Path = tuple[str | int, ...]


Schemas = Mapping[_Path, Sequence[type[Any]]]
"""By path of a mapping: the config classes that validate it later, whose fields are flags."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """One entry of the config that the command line can set."""

    path: _Path
    annotation: Any
    value: Any
    owner: type[Any] | None
    """The config class of the field; None for entries of mappings and lists."""
    stands_for: str | None = None
    """The field that the flag sets in the config at ``path``; see ``Shorthand``."""
    default: Any = MISSING
    """Default value."""
    limits: str = ""
    """Valid range, in words."""
    is_closed: bool = False
    """Whether it is a mapping with a fixed set of fields."""
    has_terms: bool = False
    """Whether ``{"func": ...}`` under an unknown name becomes one of its ``terms``."""

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def target(self) -> _Path:
        return self.path if self.stands_for is None else (*self.path, self.stands_for)

    @property
    def hint(self) -> str:
        """Range, current value and default, as shown by ``--help``."""
        parts = [] if self.default is MISSING else [f"default: {shorten(to_plain(self.default))}"]
        if self.value is MISSING:
            parts = parts or ["unset"]
        elif self.default is MISSING or to_plain(self.value) != to_plain(self.default):
            parts = [f"now: {shorten(to_plain(self.value))}", *parts]
        return f"({'; '.join([*([self.limits] if self.limits else []), ', '.join(parts)])})"


def to_plain(value: Any) -> Any:
    """Return a value as it is stored in files, or unchanged if it cannot be."""
    try:
        return to_data(value)
    except ConfigError:
        return value


def flags_of(value: Any, declared: Any, path: _Path = (), schemas: Schemas = MappingProxyType({})) -> Iterator[Flag]:
    """Yield the flags of a value and of all nested entries."""
    return _flags(Flag(path, declared, value, None), schemas, ())


def _flags(flag: Flag, schemas: Schemas, above: tuple[type[Any], ...]) -> Iterator[Flag]:
    """Yield a flag and those of all nested entries; ``above`` lists the enclosing config classes."""
    value, path, plain = flag.value, flag.path, strip(flag.annotation)
    cls = type(value) if is_config(value) else _alternative(plain, value)
    classes = schemas.get(path, ())
    if is_config_class(cls) and not classes:
        is_entry = any(path[:count] in schemas for count in range(len(path)))
        if path and (plain is not flag.annotation or is_entry):
            has_terms = is_entry and "terms" in cls.__pydantic_fields__
            # Any: an optional config can be set to null, a mapping to any value.
            yield dataclasses.replace(flag, annotation=Any, has_terms=has_terms)
        if is_config(value) or isinstance(value, Mapping) or cls not in above:
            yield from _fields(cls, value, path, schemas, above)
        return
    yield dataclasses.replace(flag, is_closed=bool(classes))
    known: set[Any] = set()
    for schema in classes:
        yield from _fields(schema, value, path, schemas, above)
        known.update(schema.__pydantic_fields__)
    is_nested = isinstance(value, (list, tuple)) and any(is_config(e) or isinstance(e, Mapping) for e in value)
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if is_nested else ()
    for key, entry in entries:
        if key not in known:
            yield from _flags(Flag((*path, key), entry_type(plain, key), entry, None), schemas, above)


def _fields(cls: Any, value: Any, path: _Path, schemas: Schemas, above: tuple[type[Any], ...]) -> Iterator[Flag]:
    """Yield the flags of a config's fields and of all nested entries; ``value`` is a config or a mapping."""
    for name, field in cls.__pydantic_fields__.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        default = MISSING if default is PydanticUndefined else default
        given = getattr(value, name) if is_config(value) else default
        entry = value.get(name, given) if isinstance(value, Mapping) else given
        flag = Flag((*path, name), field.annotation, entry, cls, None, default, limits_of(field))
        for mark in field.metadata:
            if isinstance(mark, Shorthand):
                kind = entry_type(strip(field.annotation), mark.field)
                now, usual = (getattr(it, mark.field) if is_config(it) else MISSING for it in (entry, default))
                yield Flag(flag.path, kind, now, cls, mark.field, usual)
        yield from _flags(flag, schemas, (*above, cls))


def _alternative(plain: Any, value: Any) -> Any:
    """Return, of a union of config classes, the one whose fixed fields, such as ``kind``, a mapping has."""
    if not isinstance(plain, tuple) or not isinstance(value, Mapping):
        return plain
    for option in filter(is_config_class, plain):
        kinds = {name: field.annotation for name, field in option.__pydantic_fields__.items()}
        fixed = {name: typing.get_args(kind) for name, kind in kinds.items() if typing.get_origin(kind) is Literal}
        tags = {name: choices[0] for name, choices in fixed.items() if len(choices) == 1}
        if tags and all(value.get(name) == tag for name, tag in tags.items()):
            return option
    return plain


def limits_of(field: FieldInfo) -> str:
    """Return the range of a number field in words, such as ``at least 1``; very large bounds are omitted."""
    low, high = "", ""
    for mark in _marks(field.annotation, field.metadata):
        low = f"at least {mark.ge:g}" if isinstance(mark, Ge) and _is_near(mark.ge) else low
        low = f"above {mark.gt:g}" if isinstance(mark, Gt) and _is_near(mark.gt) else low
        high = f"at most {mark.le:g}" if isinstance(mark, Le) and _is_near(mark.le) else high
        high = f"below {mark.lt:g}" if isinstance(mark, Lt) and _is_near(mark.lt) else high
    if low.startswith("at least") and high.startswith("at most"):
        return f"{low.removeprefix('at least ')} to {high.removeprefix('at most ')}"
    return ", ".join(filter(None, (low, high)))


def _is_near(bound: Any) -> bool:
    return isinstance(bound, int | float) and abs(bound) < _FAR


def _marks(annotation: Any, metadata: Sequence[Any]) -> Iterator[Any]:
    """Yield the ``Annotated`` metadata of a type, of the alternatives of a union and of the entries of a list."""
    for mark in metadata:
        yield from mark.metadata if isinstance(mark, FieldInfo) else (mark,)
    if typing.get_origin(annotation) is typing.Annotated:
        plain, *marks = typing.get_args(annotation)
        yield from _marks(plain, marks)
    elif typing.get_origin(annotation) not in (dict, typing.Literal):
        for option in typing.get_args(annotation):
            yield from _marks(option, ())


@dataclasses.dataclass(frozen=True)
class _Leaf:
    value: Any


def parse_overrides(
    cfg: _T,
    argv: Sequence[str],
    prog: str | None = None,
    description: str = "",
    schemas: Schemas = MappingProxyType({}),
) -> _T:
    """Return a validated copy of ``cfg`` with the flags of ``argv`` applied; ``--help`` lists all flags and exits.

    ``schemas`` has the classes of mappings that are validated later, whose fields are flags as well.
    """
    if not is_config(cfg):
        raise TypeError(f"expected a configclass object, got {type(cfg).__name__}")
    flags = {flag.name: flag for flag in flags_of(cfg, type(cfg), (), schemas) if _FLAG.match(f"--{flag.name}")}
    for name, text in _given(argv):
        flags |= _new_entry(name, text, flags)
        known = flags.get(name) or flags.get(name.replace("-", "_"))
        if known is None or not _holds_entries(known.annotation):
            continue
        # A mapping is given as YAML, or as words in turn: key value key value.
        is_key = typing.get_origin(strip(known.annotation)) is not dict or isinstance(_yaml(text), str)
        if not is_key or _mapping(text) is not None:
            flags[known.name] = dataclasses.replace(known, annotation=Any)  # parse the value as YAML
    tree: dict[Any, Any] = {}
    for name, value in _parse(flags, argv, prog, description).items():
        _plant(tree, flags[name], value)
    problems: list[str] = []
    changed: _T = _apply(cfg, type(cfg), tree, "", problems)
    if problems:
        raise ConfigError(problems, "command line")
    return changed


def _parse(flags: Mapping[str, Flag], argv: Sequence[str], prog: str | None, description: str) -> dict[str, Any]:
    """Parse the flags with tyro; unknown flags and invalid values raise ``ConfigError``."""
    import tyro  # slow to import, so only commands with overrides do

    needs_help = {"-h", "--help"} & set(argv)
    docs = {owner: field_docs(owner) for owner in {flag.owner for flag in flags.values() if needs_help}}
    named = {found.group(1).replace("-", "_") for word in argv if (found := _FLAG.match(word))}
    types: dict[str, Any] = {}
    for name, flag in flags.items():
        if not needs_help and name.replace("-", "_") not in named:
            continue  # tyro takes time for each one
        doc = _doc(flag, flags, docs).replace("``", "")
        types[name] = Annotated[_cli_type(flag.annotation), tyro.conf.arg(help=doc, help_behavior_hint=flag.hint)]
    schema = TypedDict("Overrides", types, total=False)  # type: ignore[misc] # built at run time
    settings: Any = {"prog": prog, "description": description, "return_unknown_args": True, "use_underscores": True}
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            values, unknown = tyro.cli(schema, args=_spread(argv, flags), **settings)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(plain_text(output.getvalue()), "command line") from None
    if unknown:  # values of unknown flags need no message of their own
        words = [word for word in unknown if _FLAG.match(word)] or unknown
        raise ConfigError([_unknown(word, flags) for word in words], "command line")
    optional = {name for name, flag in flags.items() if type(None) in typing.get_args(flag.annotation)}
    return {name: None if value == "null" and name in optional else value for name, value in values.items()}


def _doc(flag: Flag, flags: Mapping[str, Flag], docs: Mapping[type[Any] | None, Mapping[str, str]]) -> str:
    """Return what a flag means: the line under the field, and for an entry that of the field that holds it."""
    if flag.owner is not None:
        return docs.get(flag.owner, {}).get(str(flag.path[-1]), "")
    for count in range(len(flag.path) - 1, 0, -1):
        holder = flags.get(".".join(map(str, flag.path[:count])))
        if holder is not None and holder.owner is not None:
            return f"Entry of {holder.path[-1]}: {_doc(holder, flags, docs)}"
    return ""


def _spread(argv: Sequence[str], flags: Mapping[str, Flag]) -> list[str]:
    """Expand lists given as YAML, such as ``--hidden '[64, 64]'``, to the separate words that tyro expects."""
    words: list[str] = []
    for word in argv:
        flag, joint, rest = word.partition("=")
        name, text = (flag, rest) if joint else (words[-1] if words else "", word)
        known = flags.get(name.removeprefix("--")) or flags.get(name.removeprefix("--").replace("-", "_"))
        kind = None if known is None else strip(known.annotation)
        if typing.get_origin(kind) in (list, tuple) and _is_plain(kind) and text.startswith("["):
            with contextlib.suppress(ValueError):
                entries = parse_yaml(text)
                words += [*([flag] if joint else []), *map(str, entries if isinstance(entries, list) else [text])]
                continue
        words.append(word)
    return words


def find_flag(name: str, flags: Iterable[Flag]) -> Flag:
    """Return the flag for a name: its full name, its last part, its name in other libraries, or a prefix.

    Of several matches, the least nested one is returned. ``ConfigError`` if there is no match or no unique one.
    """
    known = {flag.name: flag for flag in flags if flag.name}
    if name in known:
        return known[name]
    last: dict[str, list[Flag]] = {}
    for flag in known.values():
        last.setdefault(str(flag.path[-1]), []).append(flag)
    prefixed = sorted((own for own in last if own.startswith(name)), key=len)
    for names in ((name, *usual_names(name, last)), prefixed[:1]):
        matches = sorted((flag for own in names for flag in last.get(own, [])), key=lambda flag: len(flag.path))
        if len(matches) > 1 and len(matches[0].path) == len(matches[1].path):
            both = " or ".join(flag.name for flag in matches[:3])
            raise ConfigError(f"{name}: expected a name that means one field, got one for {both}", "command line")
        if matches:
            return matches[0]
    raise ConfigError(_unknown(f"--{name}", known).replace("unknown flag", "unknown field"), "command line")


def _given(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each flag with the first word of its value."""
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if found := _FLAG.match(word):
            _, joint, rest = word.partition("=")
            yield found.group(1), rest if joint else after


def _mapping(text: str) -> Mapping[str, Any] | None:
    """Parse a YAML or JSON mapping in braces; None for anything else."""
    value = _yaml(text) if text.lstrip().startswith("{") else None
    return value if isinstance(value, Mapping) else None


def _yaml(text: str) -> Any:
    """Parse YAML; return the text if it is invalid."""
    with contextlib.suppress(ValueError):
        return parse_yaml(text)
    return text


def _holds_entries(annotation: Any) -> bool:
    """Return whether a type, or one alternative of a union, is a list, tuple or mapping."""
    plain = strip(annotation)
    options: tuple[Any, ...] = plain if isinstance(plain, tuple) else (plain,)
    return any(typing.get_origin(option) in (list, tuple, dict) for option in options)


def _new_entry(name: str, text: str, flags: Mapping[str, Flag]) -> dict[str, Flag]:
    """Return a flag for a new entry of a mapping with arbitrary keys, if ``name`` is one; ``text`` is its value."""
    parts = name.split(".")
    for count in range(len(parts) - 1 if name not in flags else 0, 0, -1):
        holder = flags.get(".".join(parts[:count])) or flags.get(".".join(parts[:count]).replace("-", "_"))
        if holder is not None:
            kind = strip(holder.annotation)
            if holder.has_terms and count == len(parts) - 1 and "func" in (_mapping(text) or ()):
                return {name: Flag((*holder.path, parts[-1]), Any, MISSING, None)}
            if holder.is_closed or typing.get_origin(kind) is not dict:
                return {}
            for key in parts[count:]:
                kind = strip(entry_type(kind, key))
            return {name: Flag((*holder.path, *parts[count:]), kind, MISSING, None)}
    return {}


def positional_first(argv: Sequence[str], values: Mapping[str, int], looks: str = "") -> list[str]:
    """Move the one positional argument before the flags, which are the command's own or those of a config.

    ``values`` is the number of words that each flag of the command takes; a flag of a config takes one or more. Of
    several candidates, the last one that matches the regular expression ``looks`` is chosen, or else the last one.
    """
    words = list(argv)
    flags = [index for index, word in enumerate(words) if _WORD.match(word)]
    if not flags or flags[0] > 0:
        return words
    candidates: list[int] = []
    for begin, end in zip(flags, [*flags[1:], len(words)], strict=True):
        name, is_joined, _ = words[begin].lstrip("-").replace("-", "_").partition("=")
        others = range(begin + 1 + (0 if is_joined else values.get(name, 1)), end)
        candidates += [index for index in others if not _VALUE.fullmatch(words[index])]
    if not candidates:
        return words
    matching = [index for index in candidates if looks and re.search(looks, words[index])]
    index = (matching or candidates)[-1]
    return [words[index], *words[:index], *words[index + 1 :]]


def field_docs(owner: type[Any] | None) -> dict[str, str]:
    """Return the docstrings below the fields of a config, read from the source of its class."""
    import docstring_parser

    bases = owner.__mro__[-2::-1] if owner is not None else ()
    parsed = [docstring_parser.parse_from_object(base).params for base in bases]
    return {doc.arg_name: " ".join((doc.description or "").split()) for params in parsed for doc in params}


def plain_text(boxed: str) -> str:
    """Return the first paragraph of tyro's boxed error message."""
    lines = [line.strip(" │╭╮╰╯") for line in boxed.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and set(line[-3:]) <= set("-─")]
    first, last = (rules[0] + 1, rules[1]) if len(rules) > 1 else (0, len(lines))
    text = " ".join(" ".join(lines[first:last]).split())
    wrong = _WRONG_VALUE.match(text)
    if wrong:
        return f"{wrong[1]}: expected {_KINDS[wrong[2]]}, got {wrong[3]}"
    return text + _advice_of(lines[last:]) if text.startswith("Unrecognized") else text


def _advice_of(lines: Sequence[str]) -> str:
    """Return what tyro suggests below an error, in a sentence: the nearest options, or the subcommands."""
    meant = [found.group() for line in lines if (found := re.match(r"--[\w.-]+", line))]
    if meant:
        return f". Did you mean {' or '.join(meant[:3])}?"
    known = next((line.partition(":")[2].strip() for line in lines if line.startswith("Available subcommands:")), "")
    return f". Expected one of {known}." if known else ". --help lists all."


def _unknown(word: str, flags: Mapping[str, Flag]) -> str:
    found = _FLAG.match(word)
    if not found:
        return f"{word!r}: expected a flag such as --{next(iter(flags), 'name')}"
    name = found.group(1).replace("-", "_")
    nearest_last = sorted(flags, key=lambda flag: flag.count("."), reverse=True)
    last = {flag.rpartition(".")[2]: flag for flag in nearest_last}  # of several, the one nearest to the top
    own = name.rpartition(".")[2]
    close = [last[name]] if name in last else [last[match] for match in usual_names(own, last)]
    close = close or difflib.get_close_matches(name, flags)
    close = close or [last[match] for match in difflib.get_close_matches(own, last)]
    close = close or [last[match] for match in usual_names(own, last, is_near=True)]
    hint = f" Did you mean {' or '.join(f'--{match}' for match in close)}?" if close else ""
    return f"{found.group(1)}: unknown flag.{hint} --help lists all."


def _cli_type(annotation: Any) -> Any:
    """Return the type for tyro to parse: the declared type if it is plain, else YAML."""
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
    """Return whether tyro can parse a type by itself: scalars, choices, and lists of them."""
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
    """Insert a value into the tree of changes; a mapping becomes one change per entry."""
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
    elif isinstance(tree.get(last), _Leaf):  # already set by its shorthand
        raise _given_twice(flag, len(parents))
    else:
        tree[last] = _Leaf(value)


def _given_twice(flag: Flag, depth: int) -> ConfigError:
    name, whole = (".".join(map(str, part)) for part in (flag.target, flag.target[:depth]))
    return ConfigError(f"{name}: expected either --{whole} or --{name}, got both", "command line")


def _apply(value: Any, declared: Any, tree: Any, path: str, problems: list[str]) -> Any:
    """Return a value with a tree of changes applied; configs keep their class, and all problems are collected."""
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
    if isinstance(value, (list, tuple)) and all(isinstance(key, int) for key in tree):
        return [below(i, entry, entry_type(plain, i)) if i in tree else entry for i, entry in enumerate(value)]
    base = dict(value) if isinstance(value, Mapping) else {}
    changes = {key: below(key, base.get(key), entry_type(plain, key)) for key in tree}
    return base | {key: list(entry) if isinstance(entry, tuple) else entry for key, entry in changes.items()}
