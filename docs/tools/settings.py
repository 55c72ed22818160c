"""Tables of settings, made from the config classes: name, default, range and the docstring line under each field."""

import dataclasses
import json
import pkgutil
import typing
from typing import Any

from embodichain.config.classes import MISSING, is_config, strip
from embodichain.config.command_line import field_docs, limits_of, to_plain


def table(path: str) -> str:
    """Return the table of a config class, ``embodichain.agents.rl.algo.ppo.PPOCfg``, as Markdown."""
    return "\n".join(rows(pkgutil.resolve_name(path)))


def rows(cls: Any) -> list[str]:
    """Return the rows of a config class's table, its head first."""
    docs, found = field_docs(cls), ["| setting | default | meaning |", "|---|---|---|"]
    for field in fields(cls):
        doc = docs.get(field.name, "")
        if not doc:
            raise LookupError(f"{cls.__qualname__}.{field.name} has no docstring line")
        note = "; ".join(filter(None, (_choices(cls, field.name), limits_of(cls.__pydantic_fields__[field.name]))))
        found.append(f"| `{field.name}` | {_default(field)} | {_cell(doc)}{f' *({_cell(note)})*' if note else ''} |")
    return found


def fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a config class that a config can set."""
    return [field for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")]


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if hasattr(value, "default_factory"):  # pydantic's own
        value = value.get_default(call_default_factory=True)
    if value is MISSING or value is dataclasses.MISSING:
        return "required"
    if is_config(value):
        return "see below"
    return f"`{_literal(to_plain(value))}`"


def _literal(value: Any) -> str:
    """Return a value as a config file has it."""
    return json.dumps(value).replace("|", "\\|")


def _choices(cls: Any, name: str) -> str:
    annotation = strip(typing.get_type_hints(cls)[name])
    options = [annotation, *typing.get_args(annotation)]
    words = [
        str(word)
        for option in options
        if typing.get_origin(option) is typing.Literal
        for word in typing.get_args(option)
    ]
    return f"one of {', '.join(words)}" if words else ""


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")
