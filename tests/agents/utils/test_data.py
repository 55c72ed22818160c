"""The experience buffer, its minibatches, and their order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodichain.agents.utils.data import DictDataset, ExperienceBuffer, get_dict, swap_and_flatten01
from embodichain.errors import ExperienceError


def filled(num_envs: int = 3, num_steps: int = 4) -> ExperienceBuffer:
    buffer = ExperienceBuffer(num_envs, num_steps)
    buffer.register_key("obs", shape=(2,))
    buffer.register_key("action", dtype=torch.int64)
    for step in range(num_steps):
        envs = torch.arange(num_envs)
        buffer.update_data("obs", step, torch.stack([envs, torch.full((num_envs,), step)], -1).float())
        buffer.update_data("action", step, 10 * envs + step)
    return buffer


def test_documented_example_runs_as_printed() -> None:
    observations = torch.randn(1024, 128)
    buffer = ExperienceBuffer(num_envs=1024, num_steps=16)
    buffer.register_key("obs", shape=(128,))
    buffer.update_data("obs", step=0, data=observations)
    data_dict = buffer.get_dict()
    assert torch.equal(data_dict["obs"][0], observations)
    assert buffer.store_dict == {"obs": 1}


def test_swap_and_flatten_is_env_major_and_lets_none_pass() -> None:
    arr = torch.arange(6).reshape(3, 2)  # [num_steps, num_envs]
    assert swap_and_flatten01(arr).tolist() == [0, 2, 4, 1, 3, 5]
    assert swap_and_flatten01(torch.zeros(3, 2, 5, 7)).shape == (6, 5, 7)
    assert swap_and_flatten01(None) is None
    with pytest.raises(ExperienceError, match=r"got shape \[3\]"):
        swap_and_flatten01(torch.zeros(3))


def test_make_dict_is_env_major_keeps_dtype_and_starts_again() -> None:
    buffer = filled()
    data = buffer.make_dict()
    assert data["action"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    assert data["action"].dtype == torch.int64
    assert data["obs"].shape == (12, 2)
    assert buffer.store_dict == {"obs": 0, "action": 0}
    buffer.update_data("action", 0, torch.full((3,), 99))  # the next rollout may write step 0 again
    assert data["action"][0] == 0


@pytest.mark.parametrize(("num_envs", "num_steps"), [(1, 4), (4, 1)])
def test_make_dict_never_shares_memory_with_the_next_rollout(num_envs: int, num_steps: int) -> None:
    buffer = filled(num_envs, num_steps)
    data = buffer.make_dict()
    before = data["action"].clone()
    buffer.batch_update_data("action", torch.full((num_steps, num_envs), 7))
    assert torch.equal(data["action"], before)


def test_an_incomplete_rollout_names_key_and_step() -> None:
    buffer = ExperienceBuffer(num_envs=2, num_steps=3)
    buffer.register_key("reward")
    buffer.update_data("reward", 0, torch.ones(2))
    buffer.update_data("reward", 2, torch.ones(2))
    with pytest.raises(ExperienceError, match=r"Problem with 'reward': step 1 was not written \(2 of 3"):
        buffer.make_dict()
    with pytest.raises(AssertionError):  # what code written for ProtoMotions catches
        buffer.make_dict()


def test_rewards_are_normalised_in_place_after_the_rollout() -> None:
    """As agents with reward normalisation do: keep the rewards under another key, then write all steps again."""
    buffer = ExperienceBuffer(num_envs=2, num_steps=3)
    for key in ("reward", "raw_reward"):
        buffer.register_key(key)
    for step in range(3):
        buffer.update_data("reward", step, torch.full((2,), float(step)))
    buffer.batch_update_data("raw_reward", buffer.reward.clone())
    buffer.batch_update_data("reward", (buffer.reward - 1.0) / 2.0)
    assert buffer.store_dict == {"reward": buffer.total_sum(), "raw_reward": buffer.total_sum()}
    data = buffer.make_dict()
    assert data["reward"].tolist() == [-0.5, 0.0, 0.5] * 2
    assert data["raw_reward"].tolist() == [0.0, 1.0, 2.0] * 2


def test_a_step_that_is_written_twice_counts_once() -> None:
    buffer = ExperienceBuffer(num_envs=1, num_steps=3)
    buffer.register_key("reward")
    for step in (0, 1, 1, 1):
        buffer.update_data("reward", step, torch.tensor([10.0 * step]))
    assert buffer.store_dict == {"reward": 1 + 2}
    with pytest.raises(ExperienceError, match="step 2 was not written"):
        buffer.make_dict()
    buffer.update_data("reward", 2, torch.tensor([20.0]))
    assert buffer.make_dict()["reward"].tolist() == [0.0, 10.0, 20.0]


@pytest.mark.parametrize(("num_steps", "expected"), [(1, 1.0), (2, 3.0), (3, 6.0), (16, 136.0)])
def test_total_sum_is_the_count_of_a_complete_key(num_steps: int, expected: float) -> None:
    """Step ``i`` adds ``i + 1`` to the count of its key, so 1 + 2 + ... + num_steps is a whole rollout."""
    buffer = ExperienceBuffer(num_envs=2, num_steps=num_steps)
    buffer.register_key("reward")
    assert buffer.total_sum() == expected
    for step in reversed(range(num_steps)):
        assert buffer.store_dict["reward"] < buffer.total_sum()
        buffer.update_data("reward", step, torch.zeros(2))
    assert buffer.store_dict["reward"] == buffer.total_sum()
    buffer.make_dict()
    assert buffer.store_dict["reward"] == 0


def test_batch_update_and_views() -> None:
    buffer = ExperienceBuffer(num_envs=2, num_steps=3, device="cpu")
    buffer.register_key("reward")
    buffer.register_key("done", dtype=torch.bool)
    buffer.batch_update_data("reward", torch.arange(6.0).reshape(3, 2))
    buffer.update_data("done", 1, torch.tensor([True, False]))
    assert buffer.store_dict == {"reward": 6, "done": 2}
    view = get_dict(buffer)
    assert view["reward"].data_ptr() == buffer.reward.data_ptr()
    assert list(view) == ["reward", "done"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.register_key("reward"), "registered already"),
        (lambda b: b.register_key("a.b"), "cannot name an attribute"),
        (lambda b: b.register_key("make_dict"), "cannot name an attribute"),
        (lambda b: b.update_data("rewards", 0, torch.ones(2)), "Did you mean 'reward'"),
        (lambda b: b.update_data("reward", 3, torch.ones(2)), r"outside \[0, 3\)"),
        (lambda b: b.update_data("reward", 0, torch.ones(3)), r"expected data of shape \[2\], got \[3\]"),
        (lambda b: b.update_data("reward", data=torch.ones(2)), "either `index` or `step`"),
        (lambda b: b.update_data("reward", 0), "no data"),
        (lambda b: b.batch_update_data("reward", torch.ones(2, 3)), r"expected data of shape \[3, 2\]"),
        (lambda b: b.batch_update_data("reward", torch.ones(3, 2, requires_grad=True)), r"gradients.*detach\(\)"),
    ],
)
def test_wrong_use_says_what_was_expected(call, message: str) -> None:
    buffer = ExperienceBuffer(num_envs=2, num_steps=3)
    buffer.register_key("reward")
    with pytest.raises(ExperienceError, match=message):
        call(buffer)


def test_dataset_covers_every_row_once_and_ends() -> None:
    data = {"x": torch.arange(12), "y": 2 * torch.arange(12)}
    dataset = DictDataset(batch_size=4, tensor_dict=data, shuffle=True)
    batches = list(dataset)
    assert len(batches) == dataset.num_batches() == len(dataset) == 3
    rows = torch.cat([b["x"] for b in batches])
    assert rows.sort().values.tolist() == list(range(12))
    assert all(torch.equal(b["y"], 2 * b["x"]) for b in batches)
    with pytest.raises(IndexError):
        dataset[3]


def test_dataset_without_shuffle_keeps_the_order_and_copies_nothing() -> None:
    x = torch.arange(6)
    dataset = DictDataset(2, {"x": x})
    assert [b["x"].tolist() for b in dataset] == [[0, 1], [2, 3], [4, 5]]
    assert dataset[1]["x"].data_ptr() == x[2:].data_ptr()
    assert dataset[-1]["x"].tolist() == [4, 5]


def test_every_pass_is_shuffled_anew() -> None:
    torch.manual_seed(0)
    dataset = DictDataset(50, {"x": torch.arange(100)}, shuffle=True)
    first, second = ([b["x"].tolist() for b in dataset] for _ in range(2))
    assert first != second


def test_the_order_tells_which_row_is_where() -> None:
    torch.manual_seed(0)
    dataset = DictDataset(3, {"x": torch.arange(12)}, shuffle=True)
    assert dataset.num_tensors == 12
    for _ in range(3):
        order = dataset.shuffled_to_original
        assert isinstance(order, np.ndarray)
        assert sorted(order) == list(range(12))
        assert torch.cat([dataset[index]["x"] for index in range(4)]).tolist() == order.tolist()
        assert torch.cat([batch["x"] for batch in dataset]).tolist() == order.tolist()  # drawn, and not yet used
        dataset.shuffle()
        assert dataset.shuffled_to_original.tolist() != order.tolist()
    dataset.shuffled_to_original = np.arange(12)[::-1]  # an order of one's own
    assert dataset[0]["x"].tolist() == [11, 10, 9]


def test_the_order_without_shuffle_is_the_given_one() -> None:
    assert DictDataset(2, {"x": torch.arange(6)}).shuffled_to_original.tolist() == [0, 1, 2, 3, 4, 5]


def test_shorter_tensors_wrap() -> None:
    data = {"x": torch.arange(6), "short": torch.arange(4)}
    assert [b["short"].tolist() for b in DictDataset(3, data)] == [[0, 1, 2], [3, 0, 1]]
    for batch in DictDataset(3, data, shuffle=True):
        assert torch.equal(batch["short"], batch["x"] % 4)


@pytest.mark.parametrize("batch_size", [0, 5, 24])
def test_batch_size_must_divide_the_rows(batch_size: int) -> None:
    with pytest.raises(ExperienceError, match=f"batch_size {batch_size} does not divide the 12 rows"):
        DictDataset(batch_size, {"x": torch.arange(12)})


def test_dataset_needs_rows() -> None:
    with pytest.raises(ExperienceError, match="at least one"):
        DictDataset(2, {})
    with pytest.raises(ExperienceError, match="'x': 0"):
        DictDataset(2, {"x": torch.zeros(0, 3)})
