"""Checkpoints of models: what is written, what is read back, and what is refused."""

from __future__ import annotations

import json
import operator
import os
import pickle
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from embodichain.agents.rl.models import build_policy, load_vla_model
from embodichain.agents.rl.models.vla import TinyVLA, loading, save_vla_model
from embodichain.agents.rl.models.vla.loading import set_weights
from embodichain.agents.rl.models.vla_policy import load_vla_model as documented_loader
from embodichain.errors import CheckpointError, ConfigError, UntrustedModuleError
from tests.agents.rl.vla_cases import TINY, language_env, vla_policy

SETTINGS = {
    **TINY,
    "cameras": {"front": [16, 16, 3]},
    "proprio": {"robot/qpos": 6},
    "instruction_length": 48,
    "action_dim": 3,
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TinyVLA(**SETTINGS)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_folder_says_everything(model, tmp_path):
    folder = save_vla_model(model, tmp_path / "vla")
    assert json.loads((folder / "config.json").read_text())["model_class"] == "tiny_vla"
    loaded = load_vla_model(folder)
    assert isinstance(loaded, TinyVLA)
    assert not loaded.training
    assert same(loaded, model)
    assert documented_loader is load_vla_model


@pytest.mark.parametrize("name", ["vla.safetensors", "vla.pt", "nested.pth"])
def test_single_files_need_class_and_settings(model, tmp_path, name):
    file = tmp_path / name
    if name.endswith(".safetensors"):
        save_file(model.state_dict(), file)
    else:
        torch.save({"model_state_dict": model.state_dict()} if "nested" in name else model.state_dict(), file)
    loaded = load_vla_model(str(file), "tiny_vla", SETTINGS, torch.device("cpu"))
    assert same(loaded, model)
    with pytest.raises(ConfigError, match="model_class: expected the name"):
        load_vla_model(file)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("function", ["save_config", "save_file", "os.rename", "second os.rename", "shutil.rmtree"])
def test_a_save_that_is_killed_leaves_the_old_model_or_the_new_one(model, tmp_path, monkeypatch, function):
    folder, other = save_vla_model(model, tmp_path / "vla"), TinyVLA(**{**SETTINGS, "value_shapes_perception": False})
    name = function.removeprefix("second ")
    real, calls = operator.attrgetter(name)(loading), []

    def kill(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1 + function.startswith("second"):
            raise Killed
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(f"embodichain.agents.rl.models.vla.loading.{name}", kill)
        with pytest.raises(Killed):
            save_vla_model(other, folder)
    loaded = load_vla_model(folder)
    is_new = function == "shutil.rmtree"
    assert loaded.cfg.value_shapes_perception == (not is_new)
    assert same(loaded, other if is_new else model)
    save_vla_model(other, folder)
    assert same(load_vla_model(folder), other)
    assert [entry.name for entry in tmp_path.iterdir()] == ["vla"]


def test_saving_a_model_leaves_other_files_where_they_are(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    for place in (".", "link", "new/deep"):
        torch.manual_seed(1)
        for saved in (model, TinyVLA(**SETTINGS)):
            save_vla_model(saved, place)
            assert same(load_vla_model(place), saved)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir()) == ["config.json", "link", "model.safetensors", "new", "notes.txt", "there"]


def test_without_a_path_the_weights_are_random(model):
    torch.manual_seed(0)
    assert same(load_vla_model(None, "tiny_vla", SETTINGS), model)


def test_a_policy_starts_from_a_folder_and_may_change_nothing_of_it(tmp_path):
    with language_env(2) as env:
        policy = vla_policy(env)
        folder = save_vla_model(policy.model, tmp_path / "vla")
        block = {"name": "vla", "vla_config": {"model_path": str(folder)}}
        again = build_policy(block, env.observation_space, env.action_space, "cpu")
        assert again.training
        assert same(again, policy)
        block["vla_config"]["model_config"] = {"width": 64}
        with pytest.raises(CheckpointError, match="does not fit TinyVLA"):
            build_policy(block, env.observation_space, env.action_space, "cpu")


@pytest.mark.parametrize(
    "change",
    [
        *({"model_class": value} for value in (7, True, [], {"a": 1})),
        *({"model_config": value} for value in (7, [], {"cameras": 3}, {"action_dim": None})),
        *({"lora": value} for value in (7, [], {"rank": "x"}, {"target_modules": []})),
        *({"files": value} for value in (7, [1], {"x": "../x"}, {"x": "/etc"}, {"x": "a\0b"}, {"x": None})),
        *({"version": value} for value in (True, "1", None, 3)),
    ],
)
def test_a_config_of_any_wrong_kind_is_an_error_of_this_package(model, tmp_path, change):
    file = save_vla_model(model, tmp_path / "vla") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises((CheckpointError, ConfigError)):
        load_vla_model(tmp_path / "vla")


def test_a_config_that_is_nested_without_end_is_refused(model, tmp_path):
    file = save_vla_model(model, tmp_path / "vla") / "config.json"
    file.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_vla_model(tmp_path / "vla")


def test_the_first_five_misfits_are_named(model, tmp_path):
    weights = model.state_dict()
    names = list(weights)
    removed = names[:3]
    for name in removed:
        del weights[name]
    weights["stranger"] = torch.zeros(2)
    odd = {name: torch.zeros(7) for name in names[4:9]}
    weights.update(odd)
    file = tmp_path / "vla.safetensors"
    save_file(weights, file)
    with pytest.raises(CheckpointError) as caught:
        load_vla_model(file, "tiny_vla", SETTINGS)
    lines = str(caught.value).splitlines()
    assert "9 of" in lines[0]
    named = [line for line in lines if line.startswith("  - ")]
    assert len(named) == 5
    assert all(f"{name}: missing" in str(caught.value) for name in removed)
    assert "stranger: not in the model" in str(caught.value)
    shape = list(model.state_dict()[names[4]].shape)
    assert f"{names[4]}: expected {shape}, got [7]" in str(caught.value)
    assert lines[-1].strip() == "... and 4 more"


def test_nothing_is_loaded_unless_everything_fits(model, tmp_path):
    weights = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    weights.pop("to_action.4.bias")
    before = model.to_action[-1].weight.clone()
    with pytest.raises(CheckpointError, match=r"to_action\.4\.bias"):
        set_weights(model, weights, "here")
    assert torch.equal(model.to_action[-1].weight, before)


class Bomb:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('exploded').touch()",)


def test_no_code_in_a_torch_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": Bomb()}, "bomb.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Bomb()))
    for name in ("bomb.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match="cannot be read as plain weights"):
            load_vla_model(name, "tiny_vla", SETTINGS)
    assert not (tmp_path / "exploded").exists()


def test_files_that_are_no_checkpoints(model, tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_vla_model(tmp_path / "nowhere", "tiny_vla", SETTINGS)
    (tmp_path / "vla.onnx").touch()
    with pytest.raises(CheckpointError, match=r"one of the endings \.safetensors, \.pt"):
        load_vla_model(tmp_path / "vla.onnx", "tiny_vla", SETTINGS)
    (tmp_path / "vla.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_vla_model(tmp_path / "vla.safetensors", "tiny_vla", SETTINGS)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="expected tensors by name"):
        load_vla_model(tmp_path / "list.pt", "tiny_vla", SETTINGS)
    folder = save_vla_model(model, tmp_path / "newer")
    about = json.loads((folder / "config.json").read_text()) | {"version": 99}
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="version 99"):
        load_vla_model(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no config of a model"):
        load_vla_model(folder)


def test_a_cut_file_is_noticed(model, tmp_path):
    folder = save_vla_model(model, tmp_path / "vla")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_vla_model(folder)


def test_a_module_of_ones_own_is_imported_when_it_is_trusted(tmp_path, monkeypatch):
    lines = ["import torch", "class MyVLAModel(torch.nn.Linear):", "    def __init__(self, size):"]
    (tmp_path / "own_vla_module.py").write_text("\n".join([*lines, "        super().__init__(size, 1)", ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "own_vla_module.MyVLAModel"
    with pytest.raises(UntrustedModuleError, match="--trust own_vla_module"):
        load_vla_model(None, name, {"size": 3})
    assert "own_vla_module" not in sys.modules
    loaded = load_vla_model(None, name, {"size": 3}, trusted_modules=["own_vla_module"])
    assert type(loaded).__name__ == "MyVLAModel"
    with pytest.raises(ConfigError, match=r"expected a subclass of torch\.nn\.Module"):
        load_vla_model(None, "own_vla_module.torch", {}, trusted_modules=["own_vla_module"])


def test_weights_are_copies(model, tmp_path):
    folder = save_vla_model(model, tmp_path / "vla")
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: expected the folder or the file of a model, but there is none"):
        load_vla_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("to_action.4.weight", float("nan"), r"expected finite numbers, 1 of \d+ are not"),
        ("to_action.4.weight", float("inf"), r"expected finite numbers, 1 of \d+ are not"),
        ("normalizer.mean", float("nan"), "expected finite numbers, 1 of 6 are not"),
        ("normalizer.scale", -2.0, "expected scales above 0, got -2"),
        ("normalizer.scale", 0.0, "expected scales above 0, got 0"),
        ("normalizer.m2", -1.0, "expected sums of squares of at least 0, got -1"),
    ],
)
def test_impossible_values_are_listed(model, tmp_path, name, value, problem):
    folder = save_vla_model(model, tmp_path / "vla")
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[0] = value
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"1 of \\d+ entries have impossible values\n  - {name}: {problem}"):
        load_vla_model(folder)


def test_large_finite_values_are_possible(model):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["to_action.4.weight"].fill_(3e38)  # the sum is infinite
    set_weights(model, weights, "here")
    assert float(model.to_action[-1].weight[0, 0]) == pytest.approx(3e38)
