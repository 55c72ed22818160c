"""Chunks of recorded folders: every frame once per epoch, padded ends, the same order again; what does not fit."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.datasets.frames import ENDS, Episode, FrameLayout, Leaf
from embodichain.errors import ConfigError

pytest.importorskip("pyarrow", reason="needs the extra 'data'")
pytest.importorskip("av", reason="needs the extra 'data'")

from embodichain.agents.datasets.lerobot import LeRobotWriter
from embodichain.agents.imitation.sources import FolderSource, MixedSource, Wanted, spaces_of_folder
from embodichain.agents.rl.models import build_policy

pytestmark = pytest.mark.extra("data")

LAYOUT = FrameLayout(
    (
        Leaf(("observation", "robot", "qpos"), torch.float32, (2,)),
        Leaf(("action",), torch.float32, (1,)),
        *ENDS,
    )
)
LENGTHS = (5, 3, 7, 1, 4)


def recorded(root, words=("",), action_shape=(1,)):
    """Episode ``e`` has positions ``[e, step]`` and actions ``100 e + step``; ``words`` say what is to be done."""
    layout = FrameLayout((LAYOUT.leaves[0], Leaf(("action",), torch.float32, action_shape), *ENDS))
    with LeRobotWriter(root, layout, 10, "ReachRL") as writer:
        for episode, length in enumerate(LENGTHS):
            step = torch.arange(length, dtype=torch.float32)
            frames = {
                ("observation", "robot", "qpos"): torch.stack([torch.full_like(step, episode), step], 1),
                ("action",): (100.0 * episode + step).reshape(length, *action_shape),
                ("reward",): step,
                ("terminated",): step == length - 1,
                ("truncated",): torch.zeros(length, dtype=torch.bool),
            }
            told = words[episode % len(words)] or None
            writer.add(Episode({key: (value,) for key, value in frames.items()}, length, task=told))
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("data") / "recorded")


def wanted(**changes):
    shapes = changes.pop("shapes", {("robot", "qpos"): (2,)})
    settings = {"observations": tuple(shapes), "shapes": shapes, "action_shape": (1,), "chunk_size": 3}
    return Wanted(**settings | changes)


MEMORIES = (4.0, 24 * 8 / 2**30)  # all at once, and eight frames at a time (half of the memory is for the next part)


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_epoch_has_every_frame_once_and_pads_no_action_with_another(folder, memory):
    source = FolderSource(folder, wanted(), seed=3, memory=memory)
    total, orders = sum(LENGTHS), []
    for _ in range(2):
        chunks = torch.cat([source.sample(total // 2), source.sample(total - total // 2)])
        place = chunks["observation", "robot", "qpos"][:, 0]
        orders.append([tuple(row) for row in place.int().tolist()])
        assert sorted(orders[-1]) == [(e, s) for e, length in enumerate(LENGTHS) for s in range(length)]
        step = place[:, 1:] + torch.arange(3)
        length = torch.tensor(LENGTHS)[place[:, 0].long(), None]
        assert torch.equal(chunks["mask"], step < length)
        expected = 100.0 * place[:, :1] + torch.minimum(step, length - 1.0)
        assert torch.equal(chunks["action"].squeeze(-1), expected)
    assert orders[0] != orders[1]
    assert source.statistics() == {"source/epoch": 2.0}
    source.close()


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_source_that_is_continued_gives_the_chunks_that_it_would_have_given(folder, memory):
    def opened():
        parts = [FolderSource(folder, wanted(), seed, memory=memory) for seed in (1, 2)]
        return MixedSource(parts, [1.0, 3.0], seed=5)

    straight, stopped, continued = opened(), opened(), opened()
    for _ in range(7):
        straight.sample(6), stopped.sample(6)
    continued.load_state_dict(stopped.state_dict())
    for _ in range(9):
        assert torch.equal(straight.sample(6)["action"], continued.sample(6)["action"])
    first, second = (part.drawn for part in straight.sources)
    assert first + second == 16 * 6
    assert 2.0 < second / first < 4.5  # by their weights
    for source in (straight, stopped, continued):
        source.close()


def test_a_folder_with_other_episodes_begins_anew(folder, caplog):
    source = FolderSource(folder, wanted(), seed=0)
    source.load_state_dict(source.state_dict() | {"drawn": 9, "frames": 21})
    assert source.drawn == 0
    assert "other episodes" in caplog.text
    source.close()


def test_a_recurrent_policy_gets_the_observations_of_all_steps(folder):
    source = FolderSource(folder, wanted(all_steps=True), seed=0)
    chunks = source.sample(20)
    seen = chunks["observation", "robot", "qpos"]
    assert torch.equal(chunks["action"].squeeze(-1), 100.0 * seen[..., 0] + seen[..., 1])
    assert (seen[:, 1, 1] != seen[:, 0, 1]).any()
    source.close()


def test_actions_that_are_one_number_have_the_shape_that_the_policy_learns(folder, tmp_path):
    """A difference of ``[batch, 1]`` and ``[batch]`` would compare every action with every other."""
    scalars = recorded(tmp_path / "scalars", action_shape=())
    mixed = MixedSource([FolderSource(path, wanted(), seed=0) for path in (folder, scalars)], [1.0, 1.0], seed=0)
    chunks = mixed.sample(20)
    assert chunks["action"].shape == (20, 3, 1)
    place = chunks["observation", "robot", "qpos"][:, 0]
    assert torch.equal(chunks["action"][:, 0, 0], 100.0 * place[:, 0] + place[:, 1])
    single = TensorDict({"observation": {"speed": torch.ones(4, 3)}, "action": torch.ones(4, 3)}, [4, 3])
    fitted = wanted(shapes={("speed",): (1,)}).select(single)
    assert fitted["action"].shape == fitted["observation", "speed"].shape == (4, 3, 1)
    mixed.close()


def test_what_a_folder_lacks_is_told_in_one_message(folder):
    shapes = {("robot", "qpos"): (3,), ("robot", "qvel"): (2,), ("instruction",): (48,)}
    with pytest.raises(ConfigError) as caught:
        FolderSource(folder, wanted(shapes=shapes, action_shape=(7,)), seed=0)
    text = str(caught.value)
    assert "observation robot/qpos: expected [3], got [2]" in text
    assert "observation robot/qvel [2]: it is missing" in text
    assert "source.keys" in text
    assert "the policy reads an instruction, and there is none: record a task that has one" in text
    assert "action: expected [7], as the environment takes, got [1]" in text
    assert str(folder) in text


def test_words_of_tasks_are_instructions(tmp_path):
    folder = recorded(tmp_path / "told", ["count up", "count on"])
    shapes = {("robot", "qpos"): (2,), ("instruction",): (10,)}
    source = FolderSource(folder, wanted(shapes=shapes), seed=0)
    obs = source.sample(20)["observation"][:, 0]
    assert obs["instruction"].shape == (20, 10)
    for episode, text in zip(obs["robot", "qpos"][:, 0].int().tolist(), obs["instruction"].tolist(), strict=True):
        assert bytes(text).rstrip(b"\0") == (b"count on" if episode % 2 else b"count up")
    source.close()
    with pytest.raises(ConfigError, match=r"instruction: 'count up' has more than 6 bytes"):
        FolderSource(folder, wanted(shapes=shapes | {("instruction",): (6,)}), seed=0)


def test_tasks_of_a_folder_from_elsewhere_are_instructions_of_any_length(tmp_path):
    shapes, keys = {("robot", "qpos"): (2,), ("instruction",): (10,)}, {"robot/qpos": "state"}
    for words in ("count up", ""):  # an id of ours, which is written where there are no words, is no instruction
        folder = recorded(tmp_path / f"told {words}", [words])
        (folder / "meta" / "embodichain.json").unlink()
        if words:
            source = FolderSource(folder, wanted(shapes=shapes), seed=0, keys=keys)
            said = source.sample(4)["observation", "instruction"]
            assert {bytes(row).rstrip(b"\0") for row in said[:, 0].tolist()} == {b"count up"}
            assert said.shape == (4, 3, 10)
            source.close()
            assert spaces_of_folder(folder, {})[0]["instruction"].shape == (48,)
        else:
            with pytest.raises(ConfigError, match="reads an instruction, and there is none"):
                FolderSource(folder, wanted(shapes=shapes), seed=0, keys=keys)
            assert set(spaces_of_folder(folder, {})[0].spaces) == {"state"}


def test_keys_rename_what_a_folder_holds(folder):
    shapes = {("joints",): (2,)}
    source = FolderSource(folder, wanted(shapes=shapes), seed=0, keys={"joints": "robot/qpos"})
    chunks = source.sample(4)
    assert set(chunks["observation"].keys()) == {"joints"}
    source.close()
    with pytest.raises(ConfigError, match=r"keys: the folder has no 'robot/qpo'. Did you mean 'robot/qpos'"):
        FolderSource(folder, wanted(), seed=0, keys={"joints": "robot/qpo"})


def test_without_an_environment_a_policy_is_built_for_what_the_folder_holds(folder):
    observation, action = spaces_of_folder(folder, {})
    assert observation["robot"]["qpos"].shape == (2,)
    assert action == gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    policy = build_policy({"name": "flow", "chunk_size": 3}, observation, action, "cpu")
    needs = Wanted.by(policy, observation, action, 3, ())
    assert (needs.observations, needs.action_shape) == ((("robot", "qpos"),), (1,))
