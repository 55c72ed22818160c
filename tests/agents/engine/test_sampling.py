"""Sampling: which windows are drawn, what they hold, and whose memory they are in."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.datasets.frames import Episode, FrameLayout, Leaf
from embodichain.agents.engine import OnlineDataEngineCfg
from embodichain.agents.engine.reader import StreamReader
from embodichain.agents.engine.sampling import RING_SIZE, OutputPool, WindowSampler
from embodichain.agents.engine.shared_buffer import Control, SharedBuffer, State
from embodichain.agents.processes.failure import FailureReport
from embodichain.errors import ChunkSizeError, EngineStateError, StreamStalledError, WorkerError

LAYOUT = FrameLayout((Leaf(("observation", "id"), torch.float32, (2,)), Leaf(("action",), torch.int64, ())))
LENGTHS = [5, 12, 3, 20, 8, 20]


def episode(row: int, length: int) -> Episode:
    steps = torch.arange(length)
    frames = {
        ("observation", "id"): (torch.stack([torch.full((length,), row), steps], 1),),
        ("action",): (steps + 100 * row,),
    }
    return Episode(frames, length)


@pytest.fixture
def buffer() -> SharedBuffer:
    buffer = SharedBuffer(LAYOUT, len(LENGTHS), 20, 1)
    buffer.frames[("action",)].fill_(-7)  # what must never be seen
    for row, length in enumerate(LENGTHS):
        buffer.write(row, 0, episode(row, length))
    buffer.control[Control.STATE] = State.RUNNING
    return buffer


@pytest.fixture
def reader(buffer: SharedBuffer) -> StreamReader:
    return StreamReader(buffer, OnlineDataEngineCfg(max_episode_steps=20))


def chunks(batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and first step of every chunk, having checked every number in it."""
    rows, starts = batch["action"][:, 0] // 100, batch["action"][:, 0] % 100
    steps = starts[:, None] + torch.arange(batch.batch_size[1])
    assert torch.equal(batch["action"], rows[:, None] * 100 + steps)
    assert torch.equal(batch["observation", "id"], torch.stack([rows[:, None].expand_as(steps), steps], -1).float())
    return rows, starts


@pytest.mark.parametrize("reuse", [False, True])
def test_chunks_are_consecutive_frames_of_one_episode(reader: StreamReader, reuse: bool) -> None:
    for size in (1, 3, 5, 12, 20):
        batch = reader.sample(64, size, reuse_outputs=reuse)
        assert batch.batch_size == torch.Size([64, size])
        rows, starts = chunks(batch)
        assert (starts + size <= torch.tensor(LENGTHS)[rows]).all()


def test_episodes_and_starts_are_uniform(reader: StreamReader) -> None:
    draws, size = 60_000, 4
    rows, starts = chunks(reader.sample(draws, size))
    windows = {row: length - size + 1 for row, length in enumerate(LENGTHS) if length >= size}
    chi2, cells = 0.0, 0
    for row, count in windows.items():
        for start in range(count):
            expected = draws / len(windows) / count
            chi2 += (int(((rows == row) & (starts == start)).sum()) - expected) ** 2 / expected
            cells += 1
    # The chi-square statistic has mean cells - 1 and variance 2 (cells - 1).
    assert abs(chi2 - (cells - 1)) < 4.5 * (2 * (cells - 1)) ** 0.5


def test_draws_are_reproducible(reader: StreamReader) -> None:
    for make in (np.random.default_rng, lambda seed: torch.Generator().manual_seed(seed)):
        first, second, other = (reader.sample(50, 3, generator=make(seed)) for seed in (1, 1, 2))
        assert torch.equal(first["action"], second["action"])
        assert not torch.equal(first["action"], other["action"])


def test_a_generator_goes_on(reader: StreamReader) -> None:
    for generator in (np.random.default_rng(0), torch.Generator().manual_seed(0)):
        first, second = reader.sample(50, 3, generator=generator), reader.sample(50, 3, generator=generator)
        assert not torch.equal(first["action"], second["action"])


def test_a_chunk_longer_than_a_row_is_a_value_error(reader: StreamReader) -> None:
    with pytest.raises(ValueError, match="chunk_size is 21, but max_episode_steps is 20"):
        reader.sample(4, 21)


def test_a_chunk_longer_than_any_episode_says_how_long_they_are(buffer: SharedBuffer, reader: StreamReader) -> None:
    for row in (3, 5):
        buffer.write(row, 0, episode(row, 10))
    with pytest.raises(ChunkSizeError, match="the longest of the 6 stored episodes has 12 steps"):
        reader.sample(4, 13)


@pytest.mark.parametrize(("batch", "size"), [(0, 3), (3, 0), (-1, 3), (2.0, 3), ("2", 3), (2, True), (2, None)])
def test_sizes_must_be_positive_integers(reader: StreamReader, batch: Any, size: Any) -> None:
    with pytest.raises(ChunkSizeError, match=">= 1"):
        reader.sample(batch, size)


def test_numpy_integers_are_integers(reader: StreamReader) -> None:
    assert reader.sample(np.int64(4), np.int32(3)).batch_size == torch.Size([4, 3])


@pytest.mark.parametrize("generator", [0, "seed", np.random.RandomState(0)])
def test_a_seed_is_not_a_generator(reader: StreamReader, generator: Any) -> None:
    with pytest.raises(TypeError, match="default_rng"):
        reader.sample(4, 3, generator=generator)


def test_rows_that_are_being_written_are_left_alone(buffer: SharedBuffer, reader: StreamReader) -> None:
    rows, _ = chunks(reader.sample(300, 20))
    assert set(rows.tolist()) == {3, 5}
    buffer.sequence[3] += 1
    for _ in range(3):
        rows, _ = chunks(reader.sample(300, 20))
        assert set(rows.tolist()) == {5}
    buffer.sequence[3] += 1  # the write has ended, with an episode of the same length
    rows, _ = chunks(reader.sample(300, 20))
    assert set(rows.tolist()) == {3, 5}


def test_what_is_written_is_drawn_from_then_on(buffer: SharedBuffer, reader: StreamReader) -> None:
    for row, length, expected in ((0, 20, {0, 3, 5}), (3, 19, {0, 5}), (3, 20, {0, 3, 5})):
        buffer.write(row, 0, episode(row, length))
        for _ in range(2):
            rows, _ = chunks(reader.sample(300, 20))
            assert set(rows.tolist()) == expected
            chunks(reader.sample(300, 2))  # another size in between


def test_waiting_for_a_writer_that_never_ends_is_an_error(
    buffer: SharedBuffer, reader: StreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embodichain.agents.engine.sampling.STALL_SECONDS", 0.05)
    buffer.sequence[[3, 5]] += 1
    with pytest.raises(StreamStalledError, match="being written"):
        reader.sample(4, 20)


def test_waiting_for_a_writer_ends_when_the_engine_does(buffer: SharedBuffer, reader: StreamReader) -> None:
    buffer.sequence[[3, 5]] += 1
    threading.Timer(0.3, buffer.fail, [FailureReport(0, "was killed by SIGKILL").to_json()]).start()
    with pytest.raises(WorkerError, match="worker 0 was killed by SIGKILL"):
        reader.sample(4, 20)


def test_only_windows_whose_row_changed_are_drawn_again(buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite a row between the copy and the check: its windows are replaced, all others stay as they were."""
    sampler, original = WindowSampler(buffer), WindowSampler.changed
    drawn: list[Any] = []

    def overwrite_then_check(self: WindowSampler, known: Any, chosen: Any) -> Any:
        if not drawn:
            buffer.write(3, 0, episode(3, 6))
        drawn.append(known.rows[chosen])
        return original(self, known, chosen)

    monkeypatch.setattr(WindowSampler, "changed", overwrite_then_check)
    target = OutputPool(LAYOUT).get(200, 8)
    windows, redrawn = sampler.draw(np.random.default_rng(0), target, 200, 8)
    assert redrawn == int((drawn[0] == 3).sum()) > 0
    got, starts = chunks(target.batch)
    assert 3 not in got.tolist()  # its new episode is too short
    assert torch.equal(got * buffer.max_steps + starts, torch.from_numpy(windows))
    kept = torch.from_numpy(drawn[0] != 3)
    assert torch.equal(got[kept], torch.from_numpy(drawn[0])[kept])


def test_samples_are_counted_and_aged(buffer: SharedBuffer, reader: StreamReader) -> None:
    for _ in range(5):
        reader.sample(10, 3)
    assert buffer.samples == 50


@pytest.mark.parametrize(("state", "words"), [(State.STARTING, "is_init"), (State.STOPPED, "stopped")])
def test_sampling_needs_a_running_engine(buffer: SharedBuffer, reader: StreamReader, state: State, words: str) -> None:
    buffer.control[Control.STATE] = state
    with pytest.raises(EngineStateError, match=words):
        reader.sample(2, 2)


def test_a_batch_is_the_callers_for_as_long_as_anything_of_it_is_kept(reader: StreamReader) -> None:
    weight = torch.ones(2, requires_grad=True)
    whole = reader.sample(32, 4)
    leaf = reader.sample(32, 4)["action"]
    view = reader.sample(32, 4)["observation", "id"][3:5, 1]
    array = reader.sample(32, 4)["action"].numpy()
    saved = (reader.sample(32, 4)["observation", "id"] * weight).sum()  # only the graph holds the batch
    copies = (whole.clone(), leaf.clone(), view.clone(), array.copy())
    for _ in range(50):
        reader.sample(32, 4)
    assert (whole == copies[0]).all()
    assert torch.equal(leaf, copies[1])
    assert torch.equal(view, copies[2])
    assert np.array_equal(array, copies[3])
    saved.backward()
    assert torch.allclose(weight.grad.sum(), saved.detach())


def test_memory_nobody_holds_is_used_again(reader: StreamReader) -> None:
    addresses = {reader.sample(32, 4)["action"].data_ptr() for _ in range(20)}
    assert len(addresses) == 1


def test_memory_that_went_to_another_process_is_not_used_again(reader: StreamReader) -> None:
    first = reader.sample(32, 4)["action"]
    first.share_memory_()  # what a DataLoader worker does to everything it sends
    address, content = first.data_ptr(), first.clone()
    del first
    later = [reader.sample(32, 4)["action"] for _ in range(10)]
    assert address not in {batch.data_ptr() for batch in later}
    assert content.shape == later[0].shape


def test_reused_outputs_live_for_the_documented_number_of_draws(reader: StreamReader) -> None:
    batches = [reader.sample(8, 4, reuse_outputs=True) for _ in range(2 * RING_SIZE)]
    assert len({id(batch) for batch in batches}) == RING_SIZE
    first = reader.sample(8, 4, reuse_outputs=True)
    copy = first.clone()
    for _ in range(RING_SIZE - 1):
        assert reader.sample(8, 4, reuse_outputs=True) is not first
    assert (first == copy).all()
    assert reader.sample(8, 4, reuse_outputs=True) is first
