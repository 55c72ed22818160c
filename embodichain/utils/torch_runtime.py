"""Process-wide state that affects results and speed: random generators and torch's threads."""

import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WORK_PER_THREAD = 8_000_000
"""Multiplications in the forward pass of a minibatch that justify one more thread."""


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch (on every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code may draw from the global generator
    torch.manual_seed(seed)


def get_random_state() -> dict[str, Any]:
    """Return the state of all random generators."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    state = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if has_cuda else {})


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state returned by ``get_random_state``."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"].clone())  # torch ignores the storage offset of a view
    for index, generator in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, index)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use ``count`` threads inside the block; None leaves the number unchanged."""
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
    """Return the number of torch threads that a minibatch can make use of; None for all of them.

    Threads synchronize after every operation, which takes many times longer than the work itself on small networks.
    """
    if any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in policy.modules()):
        return None
    work = batch_size * sum(parameter.numel() for parameter in policy.parameters())
    return max(1, min(torch.get_num_threads(), work // WORK_PER_THREAD))


class SideBySide:
    """Runs the forward and backward passes of two independent networks concurrently, the second in another thread.

    Threads that share one operation synchronize at its end, and small operations use one thread only. Threads that run
    one network each synchronize once. Results are the same as in sequence.
    """

    def __init__(self, other_thread: Executor) -> None:
        self._other_thread = other_thread

    def __call__(self, first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Return both results. Their ``backward`` accumulates gradients in the functions' parameters only, not in other
        inputs."""
        outputs: tuple[Tensor, Tensor] = _Both.apply(_NEEDS_GRAD, self._other_thread, first, second)
        return outputs


_NEEDS_GRAD = torch.zeros((), requires_grad=True)  # a dummy input that makes torch call ``backward``


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _: Tensor, other_thread: Executor, first: Callable[[], Tensor], second: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            other = other_thread.submit(second)  # gradients are enabled in every new thread
            ctx.other_thread, ctx.outputs = other_thread, (first(), other.result())
        return ctx.outputs[0].detach(), ctx.outputs[1].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        first, second = ctx.outputs
        other = ctx.other_thread.submit(_backward, second, grads[1])
        _backward(first, grads[0])
        other.result()
        return None, None, None, None


def _backward(output: Tensor, grad: Tensor) -> None:
    if output.requires_grad:  # False for a frozen network
        output.backward(grad)


@contextmanager
def side_by_side(policy: nn.Module, batch_size: int) -> Iterator[SideBySide | None]:
    """Divide torch's threads between two networks inside the block; yields None if there is too little work."""
    threads = torch.get_num_threads()
    if threads < 2 or (update_threads(policy, batch_size) or 1) < 2:
        yield None
        return
    own, others = threads - threads // 2, threads // 2
    with torch_threads(own), ThreadPoolExecutor(1, "beside", torch.set_num_threads, (others,)) as thread:
        yield SideBySide(thread)
