"""Checkpoints: what goes in comes out, and whatever is damaged is noticed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.runs import RunFolder
from embodichain.agents.rl.utils.tensordicts import space_from_data, space_to_data
from embodichain.errors import CheckpointError, OutputError, UntrustedModuleError
from embodichain.utils.tensor_tree import flatten, unflatten
from embodichain.utils.torch_runtime import get_random_state, seed_everything, set_random_state

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
