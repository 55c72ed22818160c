"""OnlineDataset in real DataLoaders: modes, shapes, masks, seeds, start methods."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stream_envs import check_chunks, stream_settings
from tensordict import TensorDict
from torch.utils.data import DataLoader, default_convert
from torch.utils.data._utils import collate

from embodichain.agents.datasets import ChunkSizeSampler, GMMChunkSampler, OnlineDataset, UniformChunkSampler
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.errors import ChunkSizeError


@pytest.fixture(scope="module")
def engine() -> Iterator[OnlineDataEngine]:
    settings = stream_settings(refill_threshold=100_000)  # the content stays as it is
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        yield engine


def take(loader: Any, count: int = 3) -> list[TensorDict]:
    return list(itertools.islice(loader, count))


def test_item_mode_yields_chunks(engine: OnlineDataEngine) -> None:
    for chunk in take(OnlineDataset(engine, chunk_size=4)):
        assert chunk.batch_size == torch.Size([4])
        assert "mask" not in chunk
        check_chunks(chunk[None])


@pytest.mark.parametrize("collate", [OnlineDataset.collate_fn, None])
@pytest.mark.parametrize("workers", [0, 2])
def test_item_mode_in_a_data_loader(engine: OnlineDataEngine, collate: Any, workers: int) -> None:
    loader = DataLoader(OnlineDataset(engine, 4), batch_size=32, num_workers=workers, collate_fn=collate)
    for batch in take(loader):
        assert isinstance(batch, TensorDict)
        assert batch.batch_size == torch.Size([32, 4])
        check_chunks(batch)


@pytest.mark.parametrize("collate", [OnlineDataset.passthrough_collate_fn, None])
@pytest.mark.parametrize("workers", [0, 2])
def test_batch_mode_in_a_data_loader(engine: OnlineDataEngine, collate: Any, workers: int) -> None:
    dataset = OnlineDataset(engine, chunk_size=4, batch_size=32)
    kept = take(DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=collate), 20)
    kept[0]["extra"] = torch.zeros(32, 4)  # the batch is the caller's to change
    for batch in kept:  # all twenty at once: none was overwritten by a later one
        assert isinstance(batch, TensorDict)
        assert batch.batch_size == torch.Size([32, 4])
        check_chunks(batch)


def test_torch_treats_other_tensordicts_as_ever(engine: OnlineDataEngine) -> None:
    """What makes a ``collate_fn`` unnecessary concerns the chunks of the stream alone."""
    batch = next(iter(OnlineDataset(engine, 4, batch_size=3)))
    assert [row.batch_size for row in batch] == [torch.Size([4])] * 3  # iterating over one goes over its batch
    assert type(default_convert(batch)) is TensorDict
    plain = TensorDict({"x": torch.ones(2)}, batch_size=[2])
    assert TensorDict not in collate.default_collate_fn_map
    assert collate.default_convert.__module__ == "torch.utils.data._utils.collate"
    with pytest.raises((RuntimeError, TypeError, KeyError, IndexError)):
        default_convert(plain)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(engine: OnlineDataEngine, method: str) -> None:
    dataset = OnlineDataset(engine, chunk_size=UniformChunkSampler(2, 5))
    loader = DataLoader(dataset, batch_size=16, num_workers=1, multiprocessing_context=method)
    for batch in take(loader):
        assert batch.batch_size[0] == 16
        assert batch["mask"].any(dim=1).all()


def test_mixed_lengths_are_padded_and_masked(engine: OnlineDataEngine) -> None:
    torch.manual_seed(0)
    dataset = OnlineDataset(engine, chunk_size=UniformChunkSampler(1, 5))
    chunks = take(dataset, 40)
    assert all(chunk["mask"].all() for chunk in chunks)
    batch = OnlineDataset.collate_fn(chunks)
    assert batch.batch_size == torch.Size([40, 5])
    assert batch["mask"].sum(dim=1).tolist() == [len(chunk) for chunk in chunks]
    for row, chunk in zip(batch, chunks, strict=True):
        length = len(chunk)
        assert (row["observation", "state"][:length] == chunk["observation", "state"]).all()
        assert (row["observation", "state"][length:] == 0).all()
        assert row["mask"].tolist() == [True] * length + [False] * (5 - length)


def test_lengths_that_happen_to_agree_have_the_same_keys(engine: OnlineDataEngine) -> None:
    batch = OnlineDataset.collate_fn(take(OnlineDataset(engine, chunk_size=UniformChunkSampler(3, 3)), 4))
    assert batch["mask"].all()


def test_chunks_of_mixed_length_without_a_mask_get_one() -> None:
    chunks = [TensorDict({"x": torch.ones(n)}, batch_size=[n]) for n in (2, 4)]
    batch = OnlineDataset.collate_fn(chunks)
    assert batch["mask"].tolist() == [[True, True, False, False], [True] * 4]


@pytest.mark.parametrize("sampler", [UniformChunkSampler(1, 5), GMMChunkSampler([2.0, 5.0], [0.5, 0.5], low=1, high=5)])
def test_one_size_per_batch_in_batch_mode(engine: OnlineDataEngine, sampler: ChunkSizeSampler) -> None:
    batches = take(DataLoader(OnlineDataset(engine, chunk_size=sampler, batch_size=8), batch_size=None), 30)
    assert len({batch.batch_size[1] for batch in batches}) > 1
    for batch in batches:
        assert "mask" not in batch
        check_chunks(batch)


def test_transform_sees_every_item_or_batch(engine: OnlineDataEngine) -> None:
    def scale(chunk: TensorDict) -> TensorDict:
        return chunk.set("scaled", chunk["reward"] * 2)

    for dataset in (OnlineDataset(engine, 3, transform=scale), OnlineDataset(engine, 3, batch_size=4, transform=scale)):
        for chunk in take(dataset):
            assert torch.equal(chunk["scaled"], chunk["reward"] * 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_one_seed_makes_everything_reproducible(engine: OnlineDataEngine, workers: int) -> None:
    dataset = OnlineDataset(engine, chunk_size=UniformChunkSampler(1, 5), batch_size=16)

    def draw(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [
            batch["action"].flatten() for batch in take(DataLoader(dataset, batch_size=None, num_workers=workers), 6)
        ]

    first, again, other = draw(0), draw(0), draw(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_workers_of_one_loader_draw_different_chunks(engine: OnlineDataEngine) -> None:
    loader = DataLoader(OnlineDataset(engine, 4, batch_size=16), batch_size=None, num_workers=2)
    one, two = take(loader, 2)  # the first from each worker
    assert not torch.equal(one["action"], two["action"])


def test_two_iterators_draw_different_chunks(engine: OnlineDataEngine) -> None:
    dataset = OnlineDataset(engine, 4, batch_size=16)
    assert not torch.equal(take(dataset, 1)[0]["action"], take(dataset, 1)[0]["action"])


class _Broken(ChunkSizeSampler):
    def __call__(self) -> int:
        return 0


def test_sizes_are_checked(engine: OnlineDataEngine) -> None:
    for size in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="chunk_size"):
            OnlineDataset(engine, chunk_size=size)
    with pytest.raises(ValueError, match="batch_size"):
        OnlineDataset(engine, chunk_size=2, batch_size=0)
    with pytest.raises(ChunkSizeError, match="_Broken"):
        next(iter(OnlineDataset(engine, chunk_size=_Broken())))
    with pytest.raises(ValueError, match="max_episode_steps is 20"):
        next(iter(DataLoader(OnlineDataset(engine, chunk_size=21), batch_size=2)))
    with pytest.raises(TypeError):
        len(OnlineDataset(engine, chunk_size=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_pinned_for_cuda(engine: OnlineDataEngine) -> None:
    loader = DataLoader(OnlineDataset(engine, 4, batch_size=8), batch_size=None, num_workers=1, pin_memory=True)
    batch = take(loader, 1)[0]
    assert batch["action"].is_pinned()
    check_chunks(batch.to("cuda", non_blocking=True).cpu())
