"""Chunk-size samplers: bounds, distribution, validation."""

from __future__ import annotations

import math

import pytest
import torch

from embodichain.agents.datasets.sampler import ChunkSizeSampler, GMMChunkSampler, UniformChunkSampler


def draw(sampler: ChunkSizeSampler, count: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.tensor([sampler() for _ in range(count)], dtype=torch.float64)


def test_uniform_covers_the_closed_interval_evenly() -> None:
    sizes = draw(UniformChunkSampler(low=3, high=7), 5000)
    counts = torch.bincount(sizes.long(), minlength=8)[3:]
    assert sizes.min() == 3
    assert sizes.max() == 7
    # chi-square with 4 degrees of freedom: 18.5 is the 0.1% tail
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 18.5


def test_uniform_with_equal_bounds_is_constant() -> None:
    assert set(draw(UniformChunkSampler(5, 5), 20).tolist()) == {5}


def test_mixture_has_the_moments_of_its_components() -> None:
    sizes = draw(GMMChunkSampler(means=[20.0, 200.0], stds=[2.0, 5.0], weights=[3.0, 1.0]), 4000)
    short = sizes[sizes < 100]
    assert short.numel() / 4000 == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / 4000))
    assert float(short.mean()) == pytest.approx(20, abs=0.2)
    # rounding to integers adds 1/12 to the variance
    assert float(short.std()) == pytest.approx(math.sqrt(4 + 1 / 12), rel=0.1)
    assert float(sizes[sizes > 100].mean()) == pytest.approx(200, abs=0.8)


def test_mixture_is_clamped() -> None:
    sizes = draw(GMMChunkSampler(means=[16.0, 64.0], stds=[40.0, 40.0], low=8, high=96), 2000)
    assert sizes.min() == 8
    assert sizes.max() == 96


def test_mixture_without_a_lower_bound_stays_positive() -> None:
    assert draw(GMMChunkSampler(means=[0.0], stds=[5.0]), 200).min() == 1


def test_draws_follow_the_torch_seed() -> None:
    for sampler in (UniformChunkSampler(1, 1000), GMMChunkSampler([500.0], [100.0])):
        assert torch.equal(draw(sampler, 20), draw(sampler, 20))


@pytest.mark.parametrize(
    ("low", "high", "words"), [(0, 4, "low"), (-1, 4, "low"), (5, 4, "high"), (True, 4, "low"), (1.5, 4, "low")]
)
def test_uniform_refuses(low: int, high: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        UniformChunkSampler(low, high)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"means": [], "stds": []}, "empty"),
        ({"means": [1.0, 2.0], "stds": [1.0]}, "stds"),
        ({"means": [1.0], "stds": [0.0]}, "std"),
        ({"means": [1.0], "stds": [-1.0]}, "std"),
        ({"means": [math.nan], "stds": [1.0]}, "means"),
        ({"means": [1.0], "stds": [1.0], "weights": [1.0, 2.0]}, "weights"),
        ({"means": [1.0], "stds": [1.0], "weights": [-1.0]}, "weights"),
        ({"means": [1.0, 2.0], "stds": [1.0, 1.0], "weights": [0.0, 0.0]}, "weights"),
        ({"means": [1.0], "stds": [1.0], "low": 0}, "low"),
        ({"means": [1.0], "stds": [1.0], "low": 9, "high": 8}, "high"),
    ],
)
def test_mixture_refuses(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GMMChunkSampler(**arguments)


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError):
        ChunkSizeSampler()
