"""Samplers of chunk sizes, which use torch's global random generator.
``torch.manual_seed`` makes the sizes reproducible, and a DataLoader seeds each of its workers differently."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from embodichain.errors import ChunkSizeError

_TAIL = 7.0
"""Standard deviations above the mean that a normal variable exceeds once in 10^12 draws."""


class ChunkSizeSampler(ABC):
    """Returns a positive chunk size when called: once per chunk in item mode, once per batch in batch mode."""

    @property
    def max_size(self) -> int | None:
        """Largest possible size; None if unknown."""
        return None

    @abstractmethod
    def __call__(self) -> int:
        """Return the next chunk size, at least 1."""


@dataclass(eq=False)
class UniformChunkSampler(ChunkSizeSampler):
    """Draws uniformly from the integers ``low, low + 1, ..., high``."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    @property
    def max_size(self) -> int:
        return self.high

    def __call__(self) -> int:
        return int(torch.randint(self.low, self.high + 1, ()))


@dataclass(eq=False)
class GMMChunkSampler(ChunkSizeSampler):
    """Draws from a mixture of normal distributions, rounded to integers and clamped to ``[low, high]``.
    ``weights`` need not sum to one and default to uniform; ``low`` defaults to 1."""

    means: Sequence[float]
    stds: Sequence[float]
    weights: Sequence[float] | None = None
    low: int | None = None
    high: int | None = None

    def __post_init__(self) -> None:
        means, stds, weights = self.means, self.stds, [1.0] * len(self.means) if self.weights is None else self.weights
        if not means:
            raise ChunkSizeError("a mixture needs at least one component: means is empty")
        for name, values in (("stds", stds), ("weights", weights)):
            if len(values) != len(means):
                raise ChunkSizeError(f"{name} must have one entry per mean ({len(means)}), got {len(values)}")
        if not all(math.isfinite(mean) for mean in means):
            raise ChunkSizeError(f"means must be finite, got {list(means)}")
        if not all(math.isfinite(std) and std > 0 for std in stds):
            raise ChunkSizeError(f"every std must be > 0 and finite, got {list(stds)}")
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
            raise ChunkSizeError(f"weights must be >= 0, finite and not all zero, got {list(weights)}")
        _check_bounds(self.low, self.high)
        self._weights = torch.tensor([float(weight) for weight in weights], dtype=torch.float64)

    @property
    def max_size(self) -> int:
        """``high`` if given, else a size that is exceeded about once in 10^12 draws."""
        if self.high is not None:
            return self.high
        parts = zip(self.means, self.stds, self._weights.tolist(), strict=True)
        return max(self.low or 1, *(round(mean + _TAIL * std) for mean, std, weight in parts if weight > 0))

    def __call__(self) -> int:
        component = int(torch.multinomial(self._weights, 1))
        size = round(self.means[component] + self.stds[component] * float(torch.randn((), dtype=torch.float64)))
        size = max(size, self.low or 1)
        return size if self.high is None else min(size, self.high)


def check_size(name: str, value: object) -> None:
    """Raise ``ChunkSizeError`` unless the value is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ChunkSizeError(f"{name} must be an integer >= 1, got {value!r}")


def _check_bounds(low: int | None, high: int | None) -> None:
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            check_size(name, bound)
    if low is not None and high is not None and high < low:
        raise ChunkSizeError(f"high must be >= low, got low={low} and high={high}")
