"""The flags that a config has on the command line: one for each entry of it, at any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from embodichain.config.classes import MISSING, is_config, is_config_class
from embodichain.config.problems import entry_type, shorten, strip
from embodichain.config.shorthand import Shorthand


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
