"""Running minimum, maximum, mean and standard deviation of the features of a dataset."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_PICTURE_EVERY = 10
"""Every tenth picture is enough for the statistics of a camera."""


class RunningStatistics:
    """Statistics of one feature, element by element; of a camera, channel by channel in [0, 1]."""

    def __init__(self, is_camera: bool) -> None:
        self._is_camera = is_camera
        self._count = 0
        self._weight = 0
        self._sum: NDArray[Any] | float = 0.0
        self._squares: NDArray[Any] | float = 0.0
        self._min: NDArray[Any] | float = np.inf
        self._max: NDArray[Any] | float = -np.inf

    def add(self, values: NDArray[Any]) -> None:
        """Take in the frames ``[n, ...]`` of an episode; those of a camera are ``[n, height, width, 3]``."""
        self._count += len(values)
        if self._is_camera:
            values = values[::_PICTURE_EVERY].reshape(-1, values.shape[-1]) / 255.0
        values = values.astype(np.float64)
        self._weight += len(values)
        self._sum = self._sum + values.sum(axis=0)
        self._squares = self._squares + (values**2).sum(axis=0)
        self._min = np.minimum(self._min, values.min(axis=0))
        self._max = np.maximum(self._max, values.max(axis=0))

    def result(self) -> dict[str, Any]:
        """Return the entry of ``stats.json``."""
        mean = self._sum / self._weight
        # E[x^2] - E[x]^2, which rounding may push below zero
        std = np.sqrt(np.maximum(self._squares / self._weight - mean**2, 0.0))
        values = {"min": self._min, "max": self._max, "mean": mean, "std": std}
        shape = (-1, 1, 1) if self._is_camera else (-1,)
        return {**{name: np.reshape(value, shape).tolist() for name, value in values.items()}, "count": [self._count]}
