"""Checkpoints: what goes in comes out, and whatever is damaged is noticed."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from embodichain.agents.rl.checkpoint import (
    checkpoint_step,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_policy,
    load_weights,
    save_checkpoint,
)
from embodichain.agents.rl.config import TrainCfg, complete
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.observation import RunningNormalizer
from embodichain.agents.rl.runs import RunFolder
from embodichain.agents.rl.train import opened_trainer, train_from_config
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.agents.rl.utils.tensordicts import space_from_data, space_to_data
from embodichain.cli.main import main
from embodichain.errors import CheckpointError, EmbodiChainError, OutputError, UntrustedModuleError
from embodichain.utils.tensor_tree import flatten, unflatten
from embodichain.utils.torch_runtime import get_random_state, seed_everything, set_random_state
from tests.agents.rl.training_cases import train_config

OBS = gym.spaces.Dict(
    {
        "robot": gym.spaces.Dict({"qpos": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)}),
        "image": gym.spaces.Dict({"top": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)}),
    }
)
ACTION = gym.spaces.Box(np.array([-1.0, -2.0], np.float32), np.array([1.0, 2.0], np.float32))
POLICY = {"name": "actor_critic", "actor": {"type": "mlp", "hidden_sizes": [8]}, "normalize_obs": True}


def same(a, b) -> bool:
    """Tell whether two trees are equal in values and types, NaN being equal to itself."""
    if isinstance(a, torch.Tensor):
        same_bits = a.dtype == b.dtype and a.shape == b.shape
        return same_bits and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, TensorDict):
        return isinstance(b, TensorDict) and a.batch_size == b.batch_size and same(a.to_dict(), b.to_dict())
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.uint32]
tensors = st.builds(
    lambda shape, dtype: torch.randint(0, 2, shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), tensors, tensors.map(lambda t: t.float().numpy())
)
trees = st.recursive(
    leaves,
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.just("$tensor")), below, max_size=3),
    ),
    max_leaves=10,
)


@given(trees)
@settings(max_examples=300, deadline=None)
def test_any_tree_survives_being_taken_apart(tree):
    data, parts = flatten(tree)
    assert same(unflatten(json.loads(json.dumps(data, allow_nan=False)), parts), tree)


def test_file_gives_back_every_kind_of_tensor(tmp_path):
    shared = torch.arange(6.0)
    state = {
        "dtypes": {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES},
        "shared": [shared, shared[2:], shared.view(2, 3).t()],
        "empty": [torch.zeros(0), torch.zeros(0, 3)],
        "nested": TensorDict({"a": torch.ones(4, 2), "b": {"c": torch.arange(4)}}, batch_size=[4]),
        "numbers": [math.nan, -math.inf, 0.1, 2**130, True, None],
        "a/b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "optimiser": {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.999)},
    }
    assert same(load_checkpoint(save_checkpoint(tmp_path / "x", state)), state)


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path):
    save_checkpoint(tmp_path / "x", {"value": 1})
    save_checkpoint(tmp_path / "x", {"value": 2})
    assert load_checkpoint(tmp_path / "x") == {"value": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match=r"cannot write the checkpoint .*file/x"):
        save_checkpoint(tmp_path / "file" / "x", {"value": 1})


def test_a_full_disk_leaves_the_former_checkpoint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    save_checkpoint(tmp_path / "x", {"value": 1})
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        save_checkpoint(tmp_path / "x", {"value": 2})
    assert load_checkpoint(tmp_path / "x") == {"value": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_overwriting_a_checkpoint_leaves_an_intact_one_at_any_time(tmp_path, monkeypatch, error):
    """A process that is killed between the two renames runs no handler: KeyboardInterrupt stands for that."""
    folder = RunFolder(tmp_path)
    path = folder.save(128, {"value": 1})
    rename = Path.rename

    def fail(self, target):
        if self.name.endswith(".partial"):
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises((KeyboardInterrupt, OutputError)):
        folder.save(128, {"value": 2})
    monkeypatch.undo()
    assert load_checkpoint(find_checkpoint(tmp_path)) == {"value": 1}
    assert [checkpoint_step(found) for found in list_checkpoints(folder.checkpoints)] == [128]
    folder.forget_after(128)
    assert sorted(entry.name for entry in folder.checkpoints.iterdir()) == ["latest", path.name]
    assert load_checkpoint(path) == {"value": 2 if error is KeyboardInterrupt else 1}  # the new one was complete
    assert load_checkpoint(folder.save(128, {"value": 3})) == {"value": 3}


def test_objects_are_refused_with_their_place(tmp_path):
    with pytest.raises(CheckpointError, match=r"policy/thing: expected tensors.*got object"):
        save_checkpoint(tmp_path / "x", {"policy": {"thing": object()}})


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors"])
def test_every_truncation_is_noticed(tmp_path, file):
    path = save_checkpoint(tmp_path / "x", {"weights": torch.arange(50.0), "step": 7}) / file
    whole = path.read_bytes()
    for size in range(0, len(whole) - 1, 5):  # the very last byte of the JSON is its line break
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"truncated|damaged"):
            load_checkpoint(tmp_path / "x")


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors"])
def test_changed_bytes_are_noticed(tmp_path, file):
    state = {"weights": torch.arange(50.0), "step": 7, "rate": 0.125}
    path = save_checkpoint(tmp_path / "x", state) / file
    whole = path.read_bytes()
    generator = random.Random(0)
    for _ in range(200):
        at = generator.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << generator.randrange(8))]) + whole[at + 1 :])
        try:
            assert same(load_checkpoint(tmp_path / "x"), state)  # a blank of the JSON became another one
        except CheckpointError:
            pass


def test_newer_version_says_to_upgrade(tmp_path):
    path = save_checkpoint(tmp_path / "x", {}) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    with pytest.raises(CheckpointError, match=r"format version 2; this version of the package reads up to 1"):
        load_checkpoint(tmp_path / "x")


def test_other_folders_are_no_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint: there is no state\.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no checkpoint of this package"):
        load_checkpoint(tmp_path)


def test_best_and_latest_of_a_run(tmp_path):
    for step in (900, 1000):
        save_checkpoint(tmp_path / "checkpoints" / f"step_{step:012d}", {"step": step})
    assert load_checkpoint(find_checkpoint(tmp_path, "best")) == {"step": 1000}
    (tmp_path / "checkpoints" / "best").symlink_to("step_000000000900")
    assert load_checkpoint(find_checkpoint(tmp_path, "best")) == {"step": 900}
    assert load_checkpoint(find_checkpoint(tmp_path)) == {"step": 1000}
    with pytest.raises(CheckpointError, match="found neither"):
        find_checkpoint(tmp_path / "nowhere")


def test_first_mismatch_of_architecture_is_named():
    small, large = (torch.nn.Sequential(torch.nn.Linear(3, n), torch.nn.Linear(n, 2)) for n in (4, 5))
    with pytest.raises(CheckpointError, match=r"0\.weight is \[5, 3\] there and \[4, 3\] here"):
        load_weights(small, large.state_dict(), "x")
    with pytest.raises(CheckpointError, match=r"it lacks 1\.weight \[2, 4\]"):
        load_weights(small, small[:1].state_dict(), "x")
    with pytest.raises(CheckpointError, match=r"it has 1\.weight, which does not exist here"):
        load_weights(small[:1], small.state_dict(), "x")


def test_spaces_survive():
    for space in (OBS, ACTION, gym.spaces.Discrete(5)):
        data, parts = flatten(space_to_data(space))
        assert space_from_data(unflatten(data, parts)) == space
    with pytest.raises(CheckpointError, match="got Text"):
        space_to_data(gym.spaces.Text(3))


def _save_policy(path, modules=()):
    policy = build_policy(POLICY, OBS, ACTION, "cpu")
    config = {"policy": POLICY, "trainer": {"import_modules": list(modules)}}
    spaces = {"observation": space_to_data(OBS), "action": space_to_data(ACTION)}
    save_checkpoint(path, {"config": config, "spaces": spaces, "policy": policy.state_dict()})
    return policy


def test_policy_is_rebuilt_without_its_environment(tmp_path):
    policy = _save_policy(tmp_path / "x").eval()
    loaded = load_policy(tmp_path / "x")
    obs = TensorDict(
        {
            "robot": {"qpos": torch.randn(5, 3)},
            "image": {"top": torch.randint(0, 256, (5, 8, 8, 3), dtype=torch.uint8)},
        },
        batch_size=[5],
    )
    assert not loaded.training
    assert torch.equal(loaded.get_action(obs, deterministic=True)[0], policy.get_action(obs, deterministic=True)[0])


def test_module_of_a_checkpoint_is_not_imported_unasked(tmp_path):
    _save_policy(tmp_path / "x", modules=["somebodys_module"])
    with pytest.raises(UntrustedModuleError, match="--trust somebodys_module"):
        load_policy(tmp_path / "x")


def test_random_state_is_continued(tmp_path):
    def draw():
        return random.random(), np.random.rand(), torch.rand(2).tolist()  # noqa: NPY002

    seed_everything(3)
    draw()
    save_checkpoint(tmp_path / "x", get_random_state())
    expected = draw()
    seed_everything(4)
    set_random_state(load_checkpoint(tmp_path / "x"))
    assert draw() == expected


ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**70, 1e308, "", "x", "../x", [], {}, [[]], {"a": None}),
    *({"$tensor": 7}, {"$tensor": "x"}, {"$tensor": []}, {"$array": None}, {"$float": "x"}, {"$float": []}, {"$x": 1}),
    *({"$tuple": 3}, {"$items": 3}, {"$items": [[1]]}, {"$items": [[[], 1]]}, {"$batch": [3]}, {"$tensordict": {}}),
    *({"$tensordict": [], "$batch": [1]}, {"$tensordict": {}, "$batch": "x"}, {"$tensordict": {"a": 1}, "$batch": [2]}),
)


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one iteration with one checkpoint."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    trainer = {"iterations": 1, "enable_eval": False, "num_envs": 2, "buffer_size": 8}
    cfg = train_config(folder, trainer=trainer, algorithm={"cfg": {"batch_size": 8}})
    train_from_config(TrainCfg.from_dict(cfg))
    return folder


def signed(checkpoint: Path, document: dict[str, Any]) -> None:
    """Write a document with the checksums that it should have: whoever means harm can calculate, too."""
    tensors = (checkpoint / "tensors.safetensors").read_bytes()
    document["tensors"] = {"bytes": len(tensors), "crc32": zlib.crc32(tensors)}
    document["crc32"] = zlib.crc32(json.dumps(document["state"], separators=(",", ":")).encode())
    (checkpoint / "state.json").write_text(json.dumps(document))


def make_hostile(generator: random.Random, checkpoint: Path) -> str:
    """Change one thing of a checkpoint, and its checksums with it; return what."""
    document = json.loads((checkpoint / "state.json").read_text())
    if generator.random() < 0.2:
        file = checkpoint / "tensors.safetensors"
        tensors = load_file(file)
        name = generator.choice(sorted(tensors))
        new = [torch.zeros(0), torch.zeros(3, 3), tensors[name].to(torch.uint8), tensors[name].flatten()[:1]]
        tensors[name] = generator.choice(new).clone()
        if generator.random() < 0.3:
            del tensors[name]
        save_file(tensors, file)
        signed(checkpoint, document)
        return f"tensor {name}"
    path, node = [], document["state"]
    while True:
        key = generator.choice(list(node) if isinstance(node, dict) else range(len(node)))
        path.append(str(key))
        if isinstance(node[key], dict | list) and node[key] and generator.random() < 0.75:
            node = node[key]
            continue
        if generator.random() < 0.2:
            del node[key]
        else:
            node[key] = generator.choice(ODD)
        signed(checkpoint, document)
        return f"{'/'.join(path)} is {node.get(key, 'gone') if isinstance(node, dict) else 'changed'}"


@pytest.mark.parametrize("seed", range(3))
def test_hostile_checkpoints_are_errors_of_this_package(saved_run: Path, tmp_path: Path, seed: int):
    """Checksums fit, and what they protect does not: reading, rebuilding and resuming end in a message, or succeed."""
    trainer = {"iterations": 1, "enable_eval": False, "num_envs": 2, "buffer_size": 8}
    cfg = complete(TrainCfg.from_dict(train_config(tmp_path / "run", trainer=trainer)), ())
    refused = 0
    with opened_trainer(cfg, None, None, (), None, Ranks()) as resumed:
        for case in range(40):
            generator = random.Random(1000 * seed + case)
            checkpoint = Path(shutil.copytree(find_checkpoint(saved_run).resolve(), tmp_path / str(case)))
            what = make_hostile(generator, checkpoint)
            try:
                state = load_checkpoint(checkpoint)
                load_policy(checkpoint)
                resumed.restore(state)
            except EmbodiChainError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}, case {case}: {what}") from error
    assert refused >= 10


def test_documents_of_any_kind_are_refused(tmp_path: Path):
    checkpoint = save_checkpoint(tmp_path / "x", {"value": 1})
    file = checkpoint / "state.json"
    document = json.loads(file.read_text())
    changes: list[Any] = [{"version": value} for value in (True, 0, -1, 1.0, "1", None)]
    changes += [{"tensors": value} for value in (None, {}, {"bytes": "x"}, {"bytes": 1e308, "crc32": {}})]
    for change in changes:
        file.write_text(json.dumps(document | change))
        with pytest.raises(CheckpointError):
            load_checkpoint(checkpoint)
    for state in ([], "x", 7, None, {"$tuple": [1]}):
        signed(checkpoint, document | {"state": state})
        with pytest.raises(CheckpointError, match="expected"):
            load_checkpoint(checkpoint)
    nested = "[" * 100_000 + "]" * 100_000
    for text in (nested, f'{{"state": {nested}}}', "9" * 5000, "\0", '{"a": NaN', '"\\ud800"'):
        file.write_text(text)
        with pytest.raises(CheckpointError):
            load_checkpoint(checkpoint)
    for name in ("state.json", "tensors.safetensors"):
        other = save_checkpoint(tmp_path / name, {"value": torch.ones(1)})
        (other / name).unlink()
        os.mkfifo(other / name)  # whoever opens it waits for ever
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(other)


def test_spaces_beyond_all_memory_are_refused(tmp_path: Path):
    data = {"type": "box", "shape": [10**7, 10**7], "dtype": "float32", "low": 0.0, "high": 1.0}
    with pytest.raises(CheckpointError, match="numbers"):
        space_from_data(data)


@pytest.mark.parametrize("command", [["eval"], ["export", "--onnx", "x.onnx"], ["train", "--resume"]])
@pytest.mark.parametrize("state", [{}, {"config": 3}, {"config": {}, "spaces": {}, "policy": {}, "trainer": {}}])
def test_commands_say_what_a_checkpoint_lacks(tmp_path, monkeypatch, capsys, command: list[str], state: dict[str, Any]):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "run" / "checkpoints" / "step_000000000128", state)
    assert main([*command, "run"] if command[0] != "export" else ["export", "run", *command[1:]]) == 2
    error = capsys.readouterr().err
    assert "checkpoint" in error or "config" in error
    assert "Traceback" not in error


def test_impossible_weights_are_named():
    layers = torch.nn.Sequential(RunningNormalizer(2), torch.nn.Linear(2, 1))
    state = {name: value.clone() for name, value in layers.state_dict().items()}
    state["0.m2"][1] = -3.0
    with pytest.raises(CheckpointError, match=r"x holds impossible weights: 0\.m2: expected sums .* got -3$"):
        load_weights(layers, state, "x")
    state["1.weight"][0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"1\.weight: expected finite numbers, 1 of 2 are not|0\.m2: .*1 more"):
        load_weights(layers, state, "x")


def test_buffers_may_be_infinite_but_not_statistics_and_nothing_is_nan():
    layers = torch.nn.Sequential(RunningNormalizer(2), torch.nn.Linear(2, 1))
    layers.register_buffer("best_return", torch.tensor(-math.inf))
    state = {name: value.clone() for name, value in layers.state_dict().items()}
    load_weights(layers, state, "x")
    for name, value in (("best_return", math.nan), ("0.mean", math.inf), ("0.shift", math.nan), ("1.bias", math.inf)):
        wrong = {key: torch.full_like(kept, value) if key == name else kept for key, kept in state.items()}
        with pytest.raises(CheckpointError, match=rf"{name}: expected finite numbers, (\d) of \1 are not"):
            load_weights(layers, wrong, "x")
