"""Memory of arrays as tensors, without a copy."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def tensor_on(data: NDArray[np.uint8]) -> Tensor:
    """Return bytes as a tensor, without a copy; it is not written to, so read-only memory will do."""
    if not data.size:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_uint8 * data.size).from_address(data.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)
