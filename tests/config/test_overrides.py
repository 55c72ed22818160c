"""Overrides from the command line reach every field, and nothing unknown slips through."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest

from embodichain.config import MISSING, Config, Shorthand, configclass, parse_overrides
from embodichain.errors import ConfigError
from tests.config.samples import AlgorithmCfg, Backend, EngineCfg, NetCfg, PpoCfg, RunCfg


@configclass
class AnyAlgorithmCfg(Config):
    algorithm: AlgorithmCfg = PpoCfg()


@configclass
class ShortCfg(Config):
    net: Annotated[NetCfg, Shorthand("activation")] = NetCfg()
    """The network."""
    extra: dict[str, int] = {"net": 3}
    """Anything, in
    two lines."""


@configclass
class NodeCfg(Config):
    value: int = 0
    child: NodeCfg | None = None


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--num_envs", "128"], "num_envs", 128),
        (["--num-envs", "128"], "num_envs", 128),
        (["--num_envs=128"], "num_envs", 128),
        (["--name", "a b"], "name", "a b"),
        (["--resume"], "resume", True),
        (["--resume", "true"], "resume", True),
        (["--resume", "false"], "resume", False),
        (["--bounds", "-2", "1e-3"], "bounds", (-2.0, 1e-3)),
        (["--algorithm.lr", "1e-3"], "algorithm.lr", 1e-3),
        (["--algorithm.net.layers", "1", "2", "3"], "algorithm.net.layers", [1, 2, 3]),
        (["--algorithm.net.layers", "[1, 2, 3]"], "algorithm.net.layers", [1, 2, 3]),
        (["--algorithm.net.layers=[]"], "algorithm.net.layers", []),
        (["--weights.lift", "3"], "weights", {"reach": 1.0, "lift": 3.0}),
        (["--extra.new.deep", "{a: 1}"], "extra.new", {"deep": {"a": 1}}),
        (["--algorithm.net.layers"], "algorithm.net.layers", []),
        (["--algorithm.net.activation", "relu"], "algorithm.net.activation", "relu"),
        (["--critic.width", "7"], "critic", NetCfg(width=7)),
        (["--critic", "{width: 7}"], "critic", NetCfg(width=7)),
        (["--critic", "null"], "critic", None),
        (["--heads.left.width", "7"], "heads.left", NetCfg(width=7)),
        (["--heads", "{right: {width: 7}}"], "heads", {"left": NetCfg(), "right": NetCfg(width=7)}),
        (["--stages.0.width", "7"], "stages", [NetCfg(width=7)]),
        (["--stages", "[{width: 7}, {}]"], "stages", [NetCfg(width=7), NetCfg()]),
        (["--weights.reach", "3"], "weights", {"reach": 3.0}),
        (["--weights", "lift", "2", "reach", "4"], "weights", {"reach": 4.0, "lift": 2.0}),
        (["--steps", "5"], "steps", 5),
        (["--steps", "5", "6"], "steps", [5, 6]),
        (["--backend", "GPU"], "backend", Backend.GPU),
        (["--folder", "a/b"], "folder", Path("a/b")),
        (["--folder", "None"], "folder", None),
        (["--folder", "null"], "folder", None),
        (["--folder=null"], "folder", None),
        (["--name", "null"], "name", "null"),
        (["--extra.seed", "4"], "extra.seed", 4),
        (["--extra.env.noise", "[1, x]"], "extra.env.noise", [1, "x"]),
        (["--extra", "{new: {a: 1e-4}}"], "extra", {"seed": 3, "env": {"noise": True}, "new": {"a": 1e-4}}),
    ],
)
def test_any_field_can_be_overridden(argv, path, value):
    base = RunCfg()
    changed = parse_overrides(base, argv)
    found = changed
    for key in path.split("."):
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    assert found == value
    assert base == RunCfg()


@pytest.mark.parametrize("turn", [1, -1])
def test_a_field_is_set_by_one_of_its_names(turn):
    pairs = [("--net", "relu"), ("--net.activation", "tanh")][::turn]
    with pytest.raises(ConfigError, match=r"either --net or --net\.activation, got both"):
        parse_overrides(ShortCfg(), [word for pair in pairs for word in pair])


def test_a_config_can_be_set_by_one_of_its_fields_alone():
    assert ShortCfg.from_dict({"net": "relu"}).net == NetCfg(activation="relu")
    assert parse_overrides(ShortCfg(), ["--net", "relu"]).net == NetCfg(activation="relu")
    both = ["--net.width", "7", "--net", "relu"]
    assert parse_overrides(ShortCfg(), both).net == NetCfg(width=7, activation="relu")
    with pytest.raises(ConfigError, match="'sine'"):
        parse_overrides(ShortCfg(), ["--net", "sine"])


def test_help_tells_of_an_entry_what_its_own_config_says(capsys):
    with pytest.raises(SystemExit):
        parse_overrides(ShortCfg(), ["--help"])
    words = capsys.readouterr().out
    assert "--net {tanh,relu}" in words
    assert words.count("The network.") == 1  # the entry net of extra is something else
    assert "Anything, in two lines." in words


def test_no_flags_change_nothing():
    cfg = EngineCfg()
    assert parse_overrides(cfg, []) == cfg


def test_missing_fields_can_be_filled_in():
    cfg = parse_overrides(EngineCfg(), ["--buffer_size", "8", "--gym_config", "{id: PushCubeRL}"])
    assert (cfg.buffer_size, cfg.gym_config, cfg.validate()) == (8, {"id": "PushCubeRL"}, [])
    assert parse_overrides(EngineCfg(), ["--run.num_envs", "2"]).buffer_size is MISSING


def test_a_config_keeps_its_own_class():
    cfg = parse_overrides(AnyAlgorithmCfg(), ["--algorithm.clip", "0.1"])
    assert cfg.algorithm == PpoCfg(clip=0.1)


def test_recursive_classes_have_a_finite_number_of_flags():
    assert parse_overrides(NodeCfg(child=NodeCfg(1)), ["--child.value", "2"]).child == NodeCfg(2)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num_env", "3"], r"num_env: unknown flag\. Did you mean --num_envs"),
        (
            ["--algorithm.nett.width", "3"],
            r"algorithm\.nett\.width: unknown flag\. Did you mean --algorithm\.net\.width",
        ),
        (["--clip", "3"], r"clip: unknown flag\. Did you mean --algorithm\.clip"),
        (["--qqqqqq"], r"qqqqqq: unknown flag\. --help lists all"),
        (["stray"], "'stray': expected a flag such as --name"),
        (["--num_envs", "3", "4"], "'4': expected a flag"),
        (["--num_envs", "many"], "--num_envs.*'many'"),
        (["--num_envs"], "Missing value for argument '--num_envs'"),
        (["--num_envs", "0"], "num_envs: expected greater than or equal to 1, got 0"),
        (["--resume", "maybe"], "--resume: expected true or false, got 'maybe'"),
        (["--algorithm.lr", "nan"], r"algorithm\.lr: expected"),
        (["--algorithm.net.activation", "tan"], r"'tan'.*--algorithm\.net\.activation"),
        (["--heads.left.width", "0"], r"heads\.left\.width: expected greater than or equal to 1"),
        (["--critic.width", "0"], r"critic\.width: expected greater"),
        (["--critic", "{widht: 1}"], r"critic\.widht: unknown key"),
        (["--extra.env", "[1"], r"--extra\.env: line 1"),
        (["--critic", "null", "--critic.width", "3"], r"expected either --critic or --critic\.width, got both"),
        (["--stages", "[]", "--stages.0.width", "3"], r"expected either --stages or --stages\.0\.width, got both"),
    ],
)
def test_wrong_flags_are_config_errors(argv, said, capsys):
    with pytest.raises(ConfigError, match=said) as caught:
        parse_overrides(RunCfg(), argv)
    assert str(caught.value).startswith("command line: ")
    assert capsys.readouterr().err == ""


def test_all_values_out_of_range_are_in_one_error():
    with pytest.raises(ConfigError) as caught:
        parse_overrides(RunCfg(), ["--num_envs", "0", "--heads.left.width", "0", "--stages.0.width", "-1"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "heads.left.width",
        "stages.0.width",
        "num_envs",
    ]


def test_help_shows_fields_docs_and_present_values(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_overrides(RunCfg(num_envs=77), ["--help"], prog="embodichain train", description="Train a policy.")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert stop.value.code in (0, None)
    for part in (
        "embodichain train",
        "Train a policy.",
        "--num_envs INT",
        "Number of environments. (at least 1; now: 77, default: 4)",
        "--critic.width INT Units of each layer. (1 to 4096; default: 64)",
        "--algorithm.lr FLOAT Step size. (above 0; default: 0.0003)",
        "--critic.width",
    ):
        assert part in shown


def test_only_configs_have_flags():
    with pytest.raises(TypeError, match="expected a configclass object"):
        parse_overrides({"a": 1}, [])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[1, 2]", "expected a mapping"),
        ("[[a, 1]]", "expected a mapping"),
        ("3", "expected a mapping"),
        ("{a: " * 400 + "1" + "}" * 400, "nested more than 64 levels"),
        ("{a: &a {b: *a}}", "a recursive alias"),
        ("{a: &a [x,x,x,x,x,x,x,x], b: &b [*a,*a,*a,*a,*a,*a,*a,*a], c: &c [*b,*b,*b,*b,*b,*b,*b,*b], "
         "d: &d [*c,*c,*c,*c,*c,*c,*c,*c], e: [*d,*d,*d,*d,*d,*d,*d,*d]}", "more than 20000 keys"),
    ],
)  # fmt: skip
def test_a_value_that_is_no_mapping_or_no_config_is_explained(value, said):
    for words in ([f"--extra={value}"], ["--extra", value]):
        with pytest.raises(ConfigError, match=f"(?s)command line.*extra.*{said}"):
            parse_overrides(RunCfg(), words)


@configclass
class RangesCfg(Config):
    y: tuple[float, float] | dict[str, float] = (0.0, 1.0)
    free: dict[str, Any] = {"pose": {"y": [0.0, 1.0]}}
    delay: dict[str, tuple[int, int]] = {}


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (
            ["--free.pose.y", '{"curriculum": {"by": "steps"}}'],
            "free",
            {"pose": {"y": {"curriculum": {"by": "steps"}}}},
        ),
        (["--free.pose.y=[2, 3]"], "free", {"pose": {"y": [2, 3]}}),
        (["--y", "{low: 2.0}"], "y", {"low": 2.0}),
        (["--delay.button_0/pos", "[1, 3]"], "delay", {"button_0/pos": (1, 3)}),
        (["--delay.button_0/pos", "1", "3"], "delay", {"button_0/pos": (1, 3)}),
        (["--delay", '{"a/b": [1, 3]}'], "delay", {"a/b": (1, 3)}),
    ],
)
def test_mappings_take_the_place_of_lists_and_keys_may_have_slashes(words, name, value):
    assert getattr(parse_overrides(RangesCfg(), words), name) == value


def test_a_mapping_in_the_place_of_a_list_is_checked():
    with pytest.raises(ConfigError, match=r"delay\.a: "):
        parse_overrides(RangesCfg(), ["--delay.a", "{from: 1}"])
