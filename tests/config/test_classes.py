"""``configclass``: construction, checking, copying and the fields still missing."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AllowInfNan, model_validator

from embodichain.config import MISSING, Config, Field, configclass, is_config, missing_fields
from embodichain.errors import ConfigError, nearest
from tests.config.samples import AlgorithmCfg, Backend, EngineCfg, NetCfg, PointCfg, PpoCfg, RunCfg


@configclass
class BareCfg:
    """Without the base class: the decorator alone brings the methods."""

    sizes: list[int] = [1, 2]
    table: dict[str, list[int]] = {"a": [1]}


@configclass
class IntervalCfg(Config):
    low: float = 0.0
    high: float = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> IntervalCfg:
        if self.low > self.high:
            raise ValueError(f"low must not exceed high, got {self.low} and {self.high}")
        return self


@configclass
class HolderCfg(Config):
    interval: IntervalCfg = IntervalCfg()
    limit: Annotated[float, AllowInfNan(True)] = float("inf")


def problems_of(action: Any, *args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        action(*args, **kwargs)
    return caught.value.problems


def test_mutable_defaults_belong_to_one_instance():
    first, second = RunCfg(), RunCfg()
    first.algorithm.net.layers.append(7)
    first.weights["lift"] = 2.0
    first.extra["env"]["noise"] = False
    assert second == RunCfg()
    bare = BareCfg()
    bare.table["a"].append(3)
    assert BareCfg().table == {"a": [1]}


def test_methods_come_with_the_decorator_alone():
    cfg = BareCfg().replace(sizes=[3])
    assert cfg.to_dict() == {"sizes": [3], "table": {"a": [1]}}
    assert BareCfg.from_dict(cfg.to_dict()) == cfg
    assert cfg.validate() == []


def test_copy_is_independent_and_checked():
    cfg = RunCfg()
    changed = cfg.copy(num_envs=9)
    assert (changed.num_envs, cfg.num_envs) == (9, 4)
    changed.algorithm.net.layers.append(1)
    assert cfg.algorithm.net.layers == [64, 64]
    assert problems_of(cfg.replace, num_envs=0) == ["num_envs: expected greater than or equal to 1, got 0 (int)"]
    assert problems_of(cfg.copy, num_env=3)[0].startswith("num_env: unknown key, got 3 (int). Did you mean 'num_envs'")


def test_frozen():
    point = PointCfg(1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 3  # type: ignore[misc]
    assert point.replace(x=3) == PointCfg(3, 2)
    assert len({point, PointCfg(1, 2)}) == 1


def test_subclasses_inherit_fields_and_are_told_apart():
    cfg = PpoCfg(lr=0.1)
    assert (cfg.lr, cfg.clip) == (0.1, 0.2)
    assert isinstance(cfg, AlgorithmCfg)
    assert problems_of(AlgorithmCfg, clip=0.1) == ["clip: unknown key, got 0.1 (float). Valid: lr."]


def test_missing_is_allowed_until_validate():
    cfg = EngineCfg()
    assert cfg.buffer_size is MISSING
    assert cfg.validate() == ["buffer_size", "gym_config"]
    assert cfg.validate(prefix="engine") == ["engine.buffer_size", "engine.gym_config"]
    assert cfg.replace(buffer_size=3).validate() == ["gym_config"]
    assert EngineCfg(buffer_size=1, gym_config={"env": {"a": [MISSING]}}).validate() == ["gym_config.env.a.0"]
    assert EngineCfg(buffer_size=MISSING) == cfg
    assert EngineCfg.from_dict(cfg.to_dict()) == cfg
    for twin in (copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg)), cfg.copy()):  # noqa: S301 - our own bytes
        assert twin.buffer_size is MISSING
    cfg.run = RunCfg(heads={"a": NetCfg(width=MISSING)}, stages=[NetCfg(), NetCfg(layers=MISSING)])
    assert cfg.validate()[2:] == ["run.heads.a.width", "run.stages.1.layers"]


@pytest.mark.parametrize("value", [3, {"a": MISSING}, None, RunCfg, object()])
def test_validate_refuses_what_is_no_config(value):
    with pytest.raises(TypeError, match="expected a configclass object"):
        missing_fields(value)
    with pytest.raises(TypeError, match="expected a configclass object"):
        Config.validate(value)
    assert not is_config(value)


def test_to_dict_is_json_and_comes_back_equal():
    cfg = RunCfg(critic=NetCfg(), folder=Path("a/b"), backend=Backend.GPU, steps=[1, 2])
    data = cfg.to_dict()
    assert data["folder"] == "a/b"
    assert data["backend"] == "gpu"
    assert data["bounds"] == [-1.0, 1.0]
    assert RunCfg.from_dict(json.loads(json.dumps(data))) == cfg


def test_to_dict_names_the_entry_that_is_no_data():
    with pytest.raises(ConfigError, match=r"extra\.model: expected data that a file can hold, got object"):
        RunCfg(extra={"model": object()}).to_dict()


def test_every_problem_is_in_one_error():
    data = {
        "nam": "x",
        "num_envs": "3",
        "resume": 1,
        "bounds": [0.0, float("nan")],
        "algorithm": {"lr": -1, "net": {"width": True, "activation": "tan", "layer": [1]}},
        "critic": {"widht": 3},
        "heads": {"left": {"width": 2.5}},
        "stages": [{}, 3],
        "weights": {"reach": "much"},
        "steps": "many",
        "backend": "tpu",
        "extra": [1],
    }
    assert problems_of(RunCfg.from_dict, data) == [
        "num_envs: expected an integer, got '3' (str)",
        "resume: expected a boolean, got 1 (int)",
        "bounds.1: expected a finite number, got nan (float)",
        "algorithm.lr: expected greater than 0, got -1 (int)",
        "algorithm.net.width: expected an integer, got True (bool)",
        "algorithm.net.activation: expected 'tanh' or 'relu', got 'tan' (str). Did you mean 'tanh'? Valid: relu, tanh.",
        "algorithm.net.layer: unknown key, got [1] (list). Did you mean 'layers'? Valid: activation, layers, width.",
        "critic.widht: unknown key, got 3 (int). Did you mean 'width'? Valid: activation, layers, width.",
        "heads.left.width: expected an integer, got 2.5 (float)",
        "stages.1: expected a mapping of NetCfg fields, got 3 (int)",
        "weights.reach: expected a number, got 'much' (str)",
        "steps: expected an integer or a list, got 'many' (str)",
        "backend: expected 'cpu' or 'gpu', got 'tpu' (str). Did you mean 'gpu' or 'cpu'? Valid: cpu, gpu.",
        "extra: expected a mapping, got [1] (list)",
        "nam: unknown key, got 'x' (str). Did you mean 'name'? Valid: " + ", ".join(sorted(RunCfg().to_dict())) + ".",
    ]


@configclass
class SizesCfg(Config):
    place: str | tuple[float, float, float] = "here"
    pos: tuple[float, float, float] | None = None
    size: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1, max_length=3)] = (1.0,)
    noise: dict[str, float | NetCfg] = {}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"place": [0, 1]}, "place: expected a string or 3 numbers, got 2: [0, 1]"),
        ({"place": [0, 1, "a"]}, "place.2: expected a number, got 'a' (str)"),
        ({"place": 3}, "place: expected a string or 3 numbers, got 3 (int)"),
        ({"pos": [0]}, "pos: expected 3 numbers, got 1: [0]"),
        ({"pos": [0, 1, 2, 3]}, "pos: expected 3 numbers, got 4: [0, 1, 2, 3]"),
        ({"pos": 1.0}, "pos: expected 3 numbers, got 1.0 (float)"),
        ({"size": [-0.1]}, "size.0: expected greater than 0, got -0.1 (float)"),
        ({"size": []}, "size: expected at least 1 entry, got 0: []"),
        ({"size": [1, 2, 3, 4]}, "size: expected at most 3 entries, got 4: [1, 2, 3, 4]"),
        ({"size": 1}, "size: expected a list, got 1 (int)"),
        ({"noise": {"x": {"width": "a"}}}, "noise.x.width: expected an integer, got 'a' (str)"),
    ],
)
def test_lists_of_numbers_are_one_problem_in_plain_words(data, told):
    assert problems_of(SizesCfg.from_dict, data) == [told]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("enviroment", "'env'"), ("event", "'events'"), ("num", "'num_envs' or 'num_threads'"), ("sed", "'seed'")],
)
def test_the_nearest_name_may_be_the_beginning_of_one(name, meant):
    known = ["device", "env", "events", "native", "num_envs", "num_threads", "seed"]
    assert nearest(name, known).startswith(f" Did you mean {meant}?")


@pytest.mark.parametrize("value", [True, "3", 3.0, 3.5, None, [3], float("inf"), {"a": 1}])
def test_an_int_is_an_int(value):
    assert problems_of(NetCfg, width=value)[0].startswith("width: expected an integer, got ")


@pytest.mark.parametrize("value", [True, "0.1", None, float("nan"), float("inf"), -float("inf"), 10**400, [0.1]])
def test_a_float_is_finite(value):
    assert problems_of(AlgorithmCfg, lr=value)[0].startswith("lr: expected a ")


def test_what_files_cannot_say_is_converted():
    cfg = RunCfg.from_dict({"bounds": [0, 1], "backend": "gpu", "folder": "x", "algorithm": {"lr": 1}, "critic": {}})
    assert cfg.bounds == (0.0, 1.0)
    assert isinstance(cfg.algorithm.lr, float)
    assert cfg.backend is Backend.GPU
    assert cfg.folder == Path("x")
    assert cfg.critic == NetCfg()


def test_infinity_has_to_be_asked_for():
    assert HolderCfg().limit == float("inf")
    assert HolderCfg.from_dict(HolderCfg().to_dict()) == HolderCfg()


def test_required_fields():
    assert problems_of(PointCfg) == ["x: expected a value, got none"]
    assert problems_of(PointCfg.from_dict, {"y": 1}) == ["x: expected a value, got none"]


def test_checks_across_fields_carry_the_path():
    message = "low must not exceed high, got 2.0 and 1.0"
    assert problems_of(IntervalCfg, low=2.0)[0].startswith(f"IntervalCfg: {message}")
    assert problems_of(HolderCfg.from_dict, {"interval": {"low": 2.0}})[0].startswith(f"interval: {message}")


def test_assignment_is_checked():
    cfg = NetCfg()
    cfg.width = 3
    with pytest.raises(ConfigError, match="width: expected an integer, got '3'"):
        cfg.width = "3"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"widht: unknown key.*Did you mean 'width'"):
        cfg.widht = 3  # type: ignore[attr-defined]
    assert cfg == NetCfg(width=3)


@pytest.mark.parametrize("data", [None, 3, "x", [1], [("width", 3)]])
def test_from_dict_wants_a_mapping(data):
    with pytest.raises(ConfigError, match="expected a mapping of NetCfg fields"):
        NetCfg.from_dict(data)


def test_keys_are_strings():
    assert problems_of(RunCfg.from_dict, {"heads": {3: {}}}) == ["heads.3: expected a string, got 3 (int)"]
    assert problems_of(RunCfg.from_dict, {3: 1})[0].startswith("3: ")


def test_the_source_opens_the_message():
    with pytest.raises(ConfigError, match=r"^train\.json: 1 problem\n  - width: "):
        NetCfg.from_dict({"width": 0}, source="train.json")


def test_a_field_called_type_is_left_alone():
    @configclass
    class KindCfg(Config):
        type: str = "int"
        options: dict[str, Any] = Field(default_factory=lambda: {"type": "int"})

    assert KindCfg().to_dict() == {"type": "int", "options": {"type": "int"}}


def test_a_message_shows_the_first_hundred_problems():
    with pytest.raises(ConfigError) as caught:
        RunCfg.from_dict({f"key{i}": 1 for i in range(250)})
    assert len(caught.value.problems) == 250
    lines = str(caught.value).splitlines()
    assert len(lines) == 102
    assert lines[-1] == "  ... and 150 more"
