"""How many threads torch uses: small networks are several times faster on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

WORK_PER_THREAD = 8_000_000
"""Multiplications of one forward pass over a minibatch that make another thread worth waiting for."""


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
    """Return how many of torch's threads a minibatch is enough work for, ``None`` for all of them.

    Threads wait for each other after every operation: on small networks, and on busy machines, that costs many times
    the work itself.
    """
    if any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in policy.modules()):
        return None
    work = batch_size * sum(parameter.numel() for parameter in policy.parameters())
    return max(1, min(torch.get_num_threads(), work // WORK_PER_THREAD))
