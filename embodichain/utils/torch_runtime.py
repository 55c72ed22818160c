"""Process-wide state that results and speed depend on: the random generators, and the number of torch's threads."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

WORK_PER_THREAD = 8_000_000
"""Multiplications of one forward pass over a minibatch that make another thread worth waiting for."""


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators (torch's on every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code may draw from the global generator
    torch.manual_seed(seed)


def get_random_state() -> dict[str, Any]:
    """Return the state of all generators as data."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    state = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if has_cuda else {})


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what ``get_random_state`` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"].clone())  # a view would be read from the beginning of its memory
    for index, generator in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, index)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use ``count`` threads inside the block; ``None`` leaves the number as it is."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def update_threads(policy: nn.Module, batch_size: int) -> int | None:
    """Return how many of torch's threads a minibatch is enough work for; ``None`` for all of them.

    Threads wait for each other after every operation, which on small networks costs many times the work itself.
    """
    if any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in policy.modules()):
        return None
    work = batch_size * sum(parameter.numel() for parameter in policy.parameters())
    return max(1, min(torch.get_num_threads(), work // WORK_PER_THREAD))
