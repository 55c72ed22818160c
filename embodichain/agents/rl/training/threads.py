"""How many threads torch gets for learning; collecting has a number of its own."""

from __future__ import annotations

from torch import nn

LARGE_MINIBATCH = 200_000_000
"""Multiplications of one forward pass over a minibatch above which several threads are faster than one."""


def update_threads(policy: nn.Module, batch_size: int) -> int | None:
    """Return 1 if a minibatch is too little work to be shared, ``None`` for torch's own choice.

    Threads wait for each other after every operation: on small networks, and on machines that do something else
    besides, that costs many times the work itself.
    """
    if any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in policy.modules()):
        return None
    size = sum(parameter.numel() for parameter in policy.parameters())
    return 1 if size * batch_size < LARGE_MINIBATCH else None
