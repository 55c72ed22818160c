"""The search space of a sweep, as given on the command line: ``lr=log(1e-4,1e-2),ent=[0,0.01],n_epochs={3,5,10}``.

``[a,b]`` is an interval, ``log(a,b)`` a log-uniform interval, and ``{a,b,c}`` a choice. Integer fields get integers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from embodichain.agents.rl.config import TrainCfg, override, schemas_of
from embodichain.config.classes import strip
from embodichain.config.command_line import Flag, find_flag, flags_of
from embodichain.config.files import parse_yaml
from embodichain.errors import ConfigError

_EXAMPLE = "such as 'lr=log(1e-4,1e-2),ent=[0,0.01],n_epochs={3,5,10}'"
_ENTRY = re.compile(r"([\w.\-]+)\s*=\s*(\w*)\s*([\[({])(.*)[\])}]", re.DOTALL)
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_NOT_SEARCHED = ("trainer.seed", "trainer.gym_config.seed", "trainer.run_dir", "trainer.output_dir")
_KINDS = {"": "interval", "log": "log", "uniform": "interval", "int": "interval", "choice": "choice"}


@dataclass(frozen=True)
class Domain:
    """The values of one field in the search space."""

    field: str
    """Dotted name of the field."""
    low: float | int | None = None
    high: float | int | None = None
    log: bool = False
    """Whether values are sampled log-uniformly."""
    is_integer: bool = False
    choices: tuple[Any, ...] = ()
    """The values, if they are not an interval."""

    def words(self, value: Any) -> list[str]:
        """Return the flag that sets the field to a value; floats keep all digits."""
        text = value if isinstance(value, str) else json.dumps(value)
        return [f"--{self.field}", text] if not text.startswith("-") else [f"--{self.field}={text}"]

    def __contains__(self, value: object) -> bool:
        """Return whether a value is in the domain."""
        if self.choices:
            return value in self.choices
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and self.low is not None and self.high is not None and self.low <= value <= self.high  # type: ignore[operator] # it is a number

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        kind = "magnitudes" if self.log else "integers" if self.is_integer else "values"
        return f"{kind} from {self.low:g} to {self.high:g}"

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        if self.choices:
            return {"field": self.field, "choices": list(self.choices)}
        return {"field": self.field, "low": self.low, "high": self.high, "log": self.log, "integer": self.is_integer}


def parse_space(texts: Sequence[str], cfg: TrainCfg) -> dict[str, Domain]:
    """Return the domains by the given names; raise ``ConfigError`` with all problems.

    Names are looked up among the fields of the config, and the bounds of each domain are tried on it.
    """
    flags = list(flags_of(cfg, TrainCfg, (), schemas_of(cfg)))
    space: dict[str, Domain] = {}
    problems: list[str] = []
    for text in texts:
        for entry in _entries(text):
            try:
                name, domain = _parse(entry, flags)
                _try(domain, cfg)
            except ConfigError as error:
                problems += [f"--space {entry}: {problem}" for problem in error.problems]
                continue
            if any(domain.field == other.field for other in space.values()):
                problems.append(f"--space {entry}: expected every field once, got {domain.field} twice")
            space[name] = domain
    if not space and not problems:
        problems.append(f"--space: expected at least one field, {_EXAMPLE}")
    if problems:
        raise ConfigError(problems, "command line")
    return space


def _entries(text: str) -> Iterator[str]:
    """Yield the entries of a space: the parts between commas outside of brackets."""
    depth, begin = 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            yield text[begin:index].strip()
            begin = index + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _parse(entry: str, flags: Sequence[Flag]) -> tuple[str, Domain]:
    found = _ENTRY.fullmatch(entry)
    if found is None or entry[-1] != _CLOSING[found[3]] or found[2] not in _KINDS:
        raise ConfigError(f"expected a field and its values, {_EXAMPLE}; quotes keep the shell from reading it")
    flag = find_flag(found[1], flags)
    if flag.name in _NOT_SEARCHED:
        raise ConfigError(f"expected a setting, got {flag.name}: --seeds and --trainer.run_dir choose those")
    kind = "choice" if found[3] == "{" else _KINDS[found[2]]
    values = [_value(part) for part in _entries(found[4])]
    if kind == "choice" or (found[3] == "[" and len(values) > 2 and not found[2]):
        if not values:
            raise ConfigError("expected at least one value, got none")
        return found[1], Domain(flag.name, choices=tuple(dict.fromkeys(values)))
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(values) != 2 or len(numbers) != 2 or not all(map(math.isfinite, numbers)) or numbers[0] >= numbers[1]:
        raise ConfigError(f"expected two numbers, the lower one first, got {found[4]!r}; choices are {{a,b,c}}")
    if kind == "log" and numbers[0] <= 0:
        raise ConfigError(f"expected numbers above 0, as magnitudes are drawn, got {numbers[0]:g}")
    is_integer = found[2] == "int" or _takes_integers(flag)
    if is_integer and not all(float(number).is_integer() for number in numbers):
        raise ConfigError(f"expected whole numbers, as {flag.name} is one, got {found[4]!r}")
    low, high = (int(number) if is_integer else float(number) for number in numbers)
    return found[1], Domain(flag.name, low, high, kind == "log", is_integer)


def _value(text: str) -> Any:
    """Parse a value as YAML; lists stay text, as flags take them."""
    try:
        value = parse_yaml(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool | str) else text


def _takes_integers(flag: Flag) -> bool:
    """Return whether a field takes integers, but no floats."""
    kinds = strip(flag.annotation)
    options = kinds if isinstance(kinds, tuple) else (kinds,)
    return any(strip(option) is int for option in options) and all(strip(option) is not float for option in options)


def _try(domain: Domain, cfg: TrainCfg) -> None:
    """Raise ``ConfigError`` if the config does not accept the bounds of a domain, or one of its choices."""
    for value in domain.choices or (domain.low, domain.high):
        override(cfg, domain.words(value))


def current_values(space: dict[str, Domain], cfg: TrainCfg) -> dict[str, Any] | None:
    """Return the values of the config itself, ``None`` if one is outside the space."""
    flags = {flag.name: flag.value for flag in flags_of(cfg, TrainCfg, (), schemas_of(cfg))}
    values = {name: flags[domain.field] for name, domain in space.items()}
    for name, domain in space.items():
        if isinstance(values[name], list | tuple):
            values[name] = next((c for c in domain.choices if _as_list(c) == list(values[name])), values[name])
    return values if all(values[name] in domain for name, domain in space.items()) else None


def _as_list(value: Any) -> Any:
    try:
        return parse_yaml(value) if isinstance(value, str) else value
    except ValueError:
        return value
