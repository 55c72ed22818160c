"""Configs damaged at random always give a ``ConfigError`` that names the key, never a traceback from inside."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from embodichain.config import Config, is_config, is_config_class, load_config, parse_overrides
from embodichain.config.classes import entry_type, strip
from embodichain.errors import ConfigError
from tests.config.samples import EngineCfg, NetCfg, RunCfg

ROOT = Path(__file__).parents[2]
Load = Callable[[Any], Config]
Place = tuple[str | int, ...]

garbage = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
# Nothing declared as a type of its own accepts one of these.
never_right = st.sampled_from([object(), {"no such key": object()}, [[object()]], b"\xff", {3: 3}])


def _sample(cls: type[Config], **changes: Any) -> Any:
    return pytest.param(cls.from_dict, cls(**changes).to_dict(), id=cls.__name__)


def _shipped() -> list[Any]:
    """Return every config file of the repository, with the function that reads its kind."""
    if importlib.util.find_spec("embodichain.envs.registration") is None:
        return []
    from embodichain.envs.registration import load_gym_config

    files = sorted((ROOT / "configs").glob("**/gym_config.*"))
    return [pytest.param(load_gym_config, load_config(file), id=file.parent.name) for file in files]


CONFIGS = [
    _sample(RunCfg, critic=NetCfg(), folder="x"),
    _sample(EngineCfg, buffer_size=3),
    *_shipped(),
]


TRIES = 600 // len(CONFIGS)
"""Damages of one kind per config: as many for all together however many are shipped."""


def _places(data: Any, cfg: Any, declared: Any = None, place: Place = ()) -> Iterator[tuple[Place, Any, Any]]:
    """Yield the place, value and declared type of every entry below ``data``, as read into ``cfg``."""
    entries = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    holder = type(cfg) if is_config(cfg) else strip(declared)
    for key, value in entries:
        kind = entry_type(holder, key)
        yield (*place, key), cfg, kind
        below = getattr(cfg, str(key)) if is_config(cfg) else cfg[key]
        yield from _places(value, below, kind, (*place, key))


def _holder(data: Any, place: Place) -> Any:
    for key in place[:-1]:
        data = data[key]
    return data


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


@pytest.mark.parametrize(("load", "data"), CONFIGS)
def test_undamaged_configs_load(load: Load, data: dict[str, Any]):
    assert load(data).validate() in ([], ["gym_config"])
    assert load(load(data).to_dict()) == load(data)


@pytest.mark.parametrize(("load", "data"), CONFIGS)
@given(draw=st.data())
@settings(max_examples=TRIES, deadline=None)
def test_renamed_keys_are_named_with_the_nearest(load: Load, data: dict[str, Any], draw: st.DataObject):
    closed = [place for place, holder, _ in _places(data, load(data)) if is_config(holder)]
    place = draw.draw(st.sampled_from(closed))
    broken = copy.deepcopy(data)
    holder = _holder(broken, place)
    name = str(place[-1]) + draw.draw(st.sampled_from(["_", "s", "x", "-1"]))
    assume(name not in holder)
    holder[name] = holder.pop(place[-1])
    with pytest.raises(ConfigError) as caught:
        load(broken)
    if place != ("id",):
        (problem,) = [line for line in caught.value.problems if line.startswith(f"{_dotted((*place[:-1], name))}: ")]
        assert "unknown key" in problem
        assert f"{place[-1]!r}" in problem


@pytest.mark.parametrize(("load", "data"), CONFIGS)
@given(draw=st.data())
@settings(max_examples=TRIES, deadline=None)
def test_values_of_a_wrong_type_are_named(load: Load, data: dict[str, Any], draw: st.DataObject):
    typed = [place for place, _, kind in _places(data, load(data)) if kind is not Any and not _is_free(kind)]
    place = draw.draw(st.sampled_from(typed))
    broken = copy.deepcopy(data)
    _holder(broken, place)[place[-1]] = draw.draw(never_right)
    with pytest.raises(ConfigError) as caught:
        load(broken)
    assert any(problem.startswith(_dotted(place)) for problem in caught.value.problems)


@pytest.mark.parametrize(("load", "data"), CONFIGS)
@given(draw=st.data())
@settings(max_examples=TRIES, deadline=None)
def test_numbers_that_are_none_are_named(load: Load, data: dict[str, Any], draw: st.DataObject):
    numbers = [place for place, _, kind in _places(data, load(data)) if strip(kind) in (int, float)]
    place = draw.draw(st.sampled_from(numbers))
    broken = copy.deepcopy(data)
    values = [float("nan"), float("inf"), -float("inf"), "1", "", True, [1], {}]
    _holder(broken, place)[place[-1]] = draw.draw(st.sampled_from(values))
    with pytest.raises(ConfigError) as caught:
        load(broken)
    assert any(problem.startswith(f"{_dotted(place)}: ") for problem in caught.value.problems)


@pytest.mark.parametrize(("load", "data"), CONFIGS)
@given(draw=st.data())
@settings(max_examples=2 * TRIES, deadline=None)
def test_any_damage_is_a_config_or_a_config_error(load: Load, data: dict[str, Any], draw: st.DataObject):
    broken = copy.deepcopy(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        places = list(_all_places(broken))
        if not places:
            break
        place = draw.draw(st.sampled_from(places))
        holder = _holder(broken, place)
        action = draw.draw(st.sampled_from(["replace", "drop", "add", "nest"]))
        if action == "drop":
            del holder[place[-1]]
        elif action == "add" and isinstance(holder, dict):
            holder[draw.draw(st.text(max_size=5) | st.integers())] = draw.draw(garbage)
        elif action == "nest":
            holder[place[-1]] = {place[-1]: holder[place[-1]]}
        else:
            holder[place[-1]] = draw.draw(garbage)
    check_read_or_explained(load, broken)


@given(data=garbage)
@settings(deadline=None)
def test_anything_at_all_is_a_config_or_a_config_error(data: Any):
    check_read_or_explained(RunCfg.from_dict, data)


flags = st.sampled_from(
    [
        "--num_envs",
        "--resume",
        "--critic",
        "--critic.width",
        "--heads.left.layers",
        "--extra.env",
        "--weights",
        "--other",
    ]
)
words = st.sampled_from(["1", "-1", "1e400", "nan", "{a: 1}", "[", "--"])


@given(argv=st.lists(flags | words | st.text(max_size=5), max_size=6))
@settings(deadline=None)
def test_any_command_line_is_a_config_or_a_config_error(argv: list[str]):
    assume(not {"-h", "--help"} & set(argv))
    check_read_or_explained(lambda words: parse_overrides(RunCfg(), words), argv)


def test_the_damage_is_done_to_a_copy():
    for parameter in CONFIGS:
        data = parameter.values[1]
        assert json.loads(json.dumps(data)) == data


def check_read_or_explained(load: Load, data: Any) -> None:
    """Fail on every outcome but a config or the problems of a ``ConfigError``."""
    problems = ["read"]
    try:
        assert is_config(load(data))
    except ConfigError as error:
        problems = error.problems
    assert problems
    assert all(problem.strip() for problem in problems)


def _all_places(data: Any, place: Place = ()) -> Iterator[Place]:
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield (*place, key)
        yield from _all_places(value, (*place, key))


def _is_free(kind: Any) -> bool:
    """Tell whether a type says nothing about the entries below it."""
    plain = strip(kind)
    return not is_config_class(plain) and "Any" in str(plain)
