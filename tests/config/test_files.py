"""Config files: both formats mean the same, and all problems of a file are reported."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from embodichain.config import load_config, merge, save_config
from embodichain.errors import ConfigError
from tests.config.samples import EngineCfg, NetCfg, RunCfg

text = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
words = st.sampled_from(
    ["on", "no", "null", "~", "1e-4", "010", "12:30", "2024-01-01", "", "1_000", ".5", "0x1f", "<<", "="]
)
trees = st.recursive(
    scalars | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | words, inner, max_size=3),
    max_leaves=12,
)
mappings = st.dictionaries(text | words, trees, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@given(data=mappings)
@settings(deadline=None)
def test_both_formats_hold_the_same(folder, data):
    for name in ("a.json", "a.yaml"):
        assert load_config(save_config(data, folder / name)) == data


@given(data=mappings)
@settings(deadline=None)
def test_yaml_reads_json(folder, data):
    path = folder / "b.yml"
    path.write_text(json.dumps(data))
    assert load_config(path) == data


def test_a_saved_config_comes_back(tmp_path):
    cfg = RunCfg(critic=NetCfg(), steps=[1])
    for name in ("deep/er/run.json", "deep/er/run.yaml"):
        assert RunCfg.from_dict(load_config(save_config(cfg, tmp_path / name))) == cfg
    assert sorted(path.name for path in (tmp_path / "deep/er").iterdir()) == ["run.json", "run.yaml"]
    assert EngineCfg.from_dict(load_config(save_config(EngineCfg(), tmp_path / "e.json"))) == EngineCfg()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("12", 12),
        ("true", True),
        ("on", "on"),
        ("no", "no"),
        ("010", "010"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("~", None),
        ("", None),
    ],
)
def test_plain_yaml_scalars_mean_what_json_means(tmp_path, text, value):
    (tmp_path / "a.yaml").write_text(f"key: {text}\n")
    assert load_config(tmp_path / "a.yaml") == {"key": value}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"a": 1,\n "b": }', "cannot be parsed: .*line 2"),
        ("a.yaml", "a: 1\nb: [1\n", "cannot be parsed: line 3"),
        ("a.yaml", "a: 1\nb: 2\na: 3\n", "line 3 column 1: key 'a' comes twice"),
        ("a.json", '{"x": {"a": 1, "a": 1}}', "key 'a' comes twice"),
        ("a.json", "[1]", "expected a mapping at the top, got list"),
        ("a.yaml", "", "expected a mapping at the top, got NoneType"),
        ("a.yaml", "1: a", r"line 1 column 1: expected a string as key, got 1 \(int\)"),
        ("a.yaml", "? [1]\n: 2", "expected a string as key"),
        ("a.yaml", "a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a.yaml", "a: &x [*x]", "cannot be parsed: .*recursive"),
        ("a.yaml", "a: 1\n---\nb: 2", "expected a single document|but found another document"),
        ("a.yaml", "a: \x00", "cannot be parsed"),
        ("a.json", '{"a": ' + "1" * 5000 + "}", "cannot be parsed"),
        ("a.json", '{"a": ' + "[" * 100_000, "nested too deeply|cannot be parsed"),
        ("a.yaml", "a: " + "[" * 1_500, "nested too deeply|cannot be parsed"),
        ("a.toml", "", r"expected a \.json, \.yaml or \.yml file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(tmp_path / name)
    assert name in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "nowhere.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "folder.json")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "latin.json")
    (tmp_path / "bom.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert load_config(tmp_path / "bom.json") == {"a": 1}


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = save_config({"a": 1}, tmp_path / "a.json")
    with pytest.raises(ConfigError, match="a: expected data"):
        save_config({"a": object()}, path)
    with pytest.raises(TypeError, match="expected a configclass object or a mapping"):
        save_config([1], path)
    with pytest.raises(ConfigError, match="suffix"):
        save_config({"a": 1}, tmp_path / "a.txt")
    assert load_config(path) == {"a": 1}


def test_anchors_are_written_out(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &x {b: 1}\nc: *x\n")
    data = load_config(tmp_path / "a.yaml")
    assert data == {"a": {"b": 1}, "c": {"b": 1}}
    assert "&" not in save_config(data, tmp_path / "b.yaml").read_text()


def test_the_default_loader_is_left_alone():
    assert yaml.safe_load("a: on") == {"a": True}


def test_merge_goes_deep_and_changes_nothing():
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    over = {"a": {"c": [3], "e": {"f": 1}}, "d": {"g": 1}}
    assert merge(base, over) == {"a": {"b": 1, "c": [3], "e": {"f": 1}}, "d": {"g": 1}}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert merge(base, {}) == base
    merge(base, {"a": {}})["a"]["b"] = 9
    assert base["a"]["b"] == 1


LAUGHS = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}' if i else 'ha'] * 10)}]\n" for i in range(10))
CHAIN = "c0: &c0 [x]\n" + "".join(f"c{i}: &c{i} [*c{i - 1}]\n" for i in range(1, 900))
TOO_MANY, TOO_DEEP = "more than 20000 keys and values", "nested more than 64 levels"


def nested(opening: str, closing: str, levels: int) -> str:
    return opening * levels + "1" + closing * levels


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("laughs.yaml", LAUGHS, TOO_MANY),
        ("chain.yaml", CHAIN, TOO_DEEP),
        ("itself.yaml", "a: &a\n  b: *a\n", "line 2 column 6: a recursive alias"),
        ("keys.json", json.dumps(dict.fromkeys(map(str, range(60_000)))), TOO_MANY),
        ("keys.yaml", "\n".join(f"k{i}: 1" for i in range(12_000)), TOO_MANY),
        ("twice.json", '{"a": 1, ' + ", ".join(f'"k{i}": 1' for i in range(60_000)) + ', "a": 1}', "'a' comes twice"),
        ("large.json", json.dumps({"a": "x" * (1 << 20)}), "at most 1048576 bytes"),
        ("large.yaml", "# x\n" * (1 << 19), "at most 1048576 bytes"),
        *((f"{n}.json", nested('{"a":', "}", n), TOO_DEEP) for n in (65, 400, 900, 100_000)),
        *((f"{n}.yaml", nested("{a: ", "}", n), TOO_DEEP) for n in (65, 400, 900, 100_000)),
        *((f"list{n}.yaml", "a: " + nested("[", "]", n), TOO_DEEP) for n in (64, 400, 900)),
        ("blocks.yaml", "\n".join(" " * i + "a:" for i in range(900)), TOO_DEEP),
    ],
)
def test_a_file_that_is_too_large_or_too_deep_for_a_config_is_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}: 1 problem\n.*{said}"):
        load_config(tmp_path / name)


def test_what_is_neither_too_large_nor_too_deep_is_read(tmp_path):
    for name in ("a.json", "a.yaml"):
        (tmp_path / name).write_text(nested('{"a":', "}", 64))
        data, levels = load_config(tmp_path / name), 0
        while isinstance(data, dict):
            data, levels = data["a"], levels + 1
        assert (data, levels) == (1, 64)
    many = {"numbers": list(range(19_000))}
    assert load_config(save_config(many, tmp_path / "b.json")) == many
    (tmp_path / "c.yaml").write_text("base: &base {width: 3}\nleft: *base\nright: *base\n")
    assert load_config(tmp_path / "c.yaml") == {name: {"width": 3} for name in ("base", "left", "right")}


@pytest.mark.parametrize(
    ("name", "told"), [("a\0b.json", "expected a name without NUL"), ("x" * 300 + ".yaml", "cannot be read")]
)
def test_a_name_that_no_file_has_is_told(tmp_path, name, told):
    with pytest.raises(ConfigError, match=told):
        load_config(tmp_path / name)
