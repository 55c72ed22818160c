"""Feature statistics in LeRobot's format: minimum, maximum, mean, standard deviation, count and quantiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_MAX_IMAGES = 100
"""Images per episode, evenly spaced, that statistics are computed from."""
_KEPT_NUMBERS = 1 << 20
"""Values of a feature that are kept for the quantiles over all episodes."""

Numbers = NDArray[np.float64]


class FeatureStatistics:
    """Statistics of one feature, per episode and over all episodes.

    They are elementwise for vectors, and per channel in [0, 1] for cameras. Arrays with several axes keep only the last
    one, as in LeRobot. Quantiles over all episodes use every frame, or evenly spaced ones beyond about a million
    values.
    """

    def __init__(self, is_camera: bool) -> None:
        self._is_camera = is_camera
        self._count = self._rows = 0
        self._min, self._max, self._mean, self._squares = (
            np.array(np.inf),
            np.array(-np.inf),
            np.zeros(()),
            np.zeros(()),
        )
        self._kept: list[Numbers] = []
        self._stride, self._phase = 1, 0
        self._histogram = np.zeros((3, 256), np.int64)

    def add(self, values: NDArray[Any]) -> dict[str, Any]:
        """Add an episode, ``[n, ...]`` or ``[n, height, width, 3]`` for a camera; return its statistics."""
        if self._is_camera:
            picked = values[np.linspace(0, len(values) - 1, min(len(values), _MAX_IMAGES)).round().astype(int)]
            self._count += len(picked)
            counts = [np.bincount(picked[..., channel].reshape(-1), minlength=256) for channel in range(3)]
            self._histogram += np.stack(counts)
            return _of_histogram(np.stack(counts), len(picked))
        rows = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1).astype(np.float64)
        mean, squares = rows.mean(axis=0), ((rows - rows.mean(axis=0)) ** 2).sum(axis=0)
        low, high = rows.min(axis=0), rows.max(axis=0)
        self._merge(len(rows), mean, squares)
        self._count += len(values)
        self._min, self._max = np.minimum(self._min, low), np.maximum(self._max, high)
        self._keep(rows)
        std = np.sqrt(squares / len(rows))
        return _entry(low, high, mean, std, len(values), _quantiles(rows))

    def result(self) -> dict[str, Any]:
        """Return the statistics over all episodes, as in ``stats.json``."""
        if self._is_camera:
            return _of_histogram(self._histogram, self._count)
        std, kept = np.sqrt(self._squares / self._rows), np.concatenate(self._kept)
        return _entry(self._min, self._max, self._mean, std, self._count, _quantiles(kept))

    def _merge(self, rows: int, mean: Numbers, squares: Numbers) -> None:
        """Merge mean and sum of squared deviations with those of more rows, numerically stable (Chan et al.)."""
        total, delta = self._rows + rows, mean - self._mean
        self._squares = self._squares + squares + delta**2 * (self._rows * rows / total)
        self._mean = self._mean + delta * (rows / total)
        self._rows = total

    def _keep(self, rows: Numbers) -> None:
        """Keep every ``stride``-th row; double the stride when too many rows are kept."""
        self._kept.append(rows[self._phase :: self._stride])
        self._phase = (self._phase - len(rows)) % self._stride
        if sum(part.size for part in self._kept) > _KEPT_NUMBERS:
            whole = np.concatenate(self._kept)
            self._kept = [whole[::2].copy()]
            # The next kept row is an even multiple of the old stride after the first.
            self._phase += self._stride if len(whole) % 2 else 0
            self._stride *= 2


def _of_histogram(counts: NDArray[np.int64], images: int) -> dict[str, Any]:
    """Return the statistics of pixels, given their histogram ``[channel, value]``."""
    total, value = counts.sum(axis=1), np.arange(256) / 255
    mean = counts @ value / total
    std = np.sqrt((counts * (value - mean[:, None]) ** 2).sum(axis=1) / total)
    low, high = value[(counts > 0).argmax(axis=1)], value[255 - (counts[:, ::-1] > 0).argmax(axis=1)]
    wanted = [[np.searchsorted(row, q * row[-1]) for row in counts.cumsum(axis=1)] for q in QUANTILES.values()]
    entry = _entry(low, high, mean, std, images, value[np.array(wanted)])
    return {name: [[[x]] for x in values] if name != "count" else values for name, values in entry.items()}


def _quantiles(rows: Numbers) -> Numbers:
    """Return the quantiles ``[num_quantiles, n]`` of rows, each an actual value."""
    return np.quantile(rows, list(QUANTILES.values()), axis=0, method="inverted_cdf")


def _entry(low: Numbers, high: Numbers, mean: Numbers, std: Numbers, count: int, quantiles: Numbers) -> dict[str, Any]:
    values = {"min": low, "max": high, "mean": mean, "std": std, **dict(zip(QUANTILES, quantiles, strict=True))}
    return {**{name: value.tolist() for name, value in values.items()}, "count": [count]}
