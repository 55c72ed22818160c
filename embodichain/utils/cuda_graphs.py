"""Whether our own GPU kernels can be used; whoever has one also has a way without it."""

from __future__ import annotations

import gc
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.extras import available

# MERGED graphed: One environment step as CUDA graphs: recorded after a few ordinary steps, replayed from then on.
#
# A step has four parts. ``before`` writes the controls, ``simulate`` advances the physics (which has a graph of its
# own),
# ``beside`` draws the starts that may be needed, for which it does not wait for the physics, and ``after`` measures,
# rewards and restarts.


_LOG = logging.getLogger(__name__)
_WARM_UP = 3  # ordinary steps before recording: kernels are compiled and memory is pooled by then


@dataclass(frozen=True)
class StepParts:
    """The parts of a step. They keep their state in tensors that they update in place: a graph's memory is fixed."""

    before: Callable[[Tensor], None]
    """Takes the action."""
    simulate: Callable[[], None]
    """Advances the physics; is called every time, not recorded."""
    beside: Callable[[], Any]
    """Does what needs neither the action nor the physics."""
    after: Callable[[Tensor, Any], Any]
    """Takes the action and what ``beside`` returned, and returns the result of the step."""

    def __call__(self, action: Tensor) -> Any:
        """Do an ordinary step."""
        self.before(action)
        self.simulate()
        return self.after(action, self.beside())


class GraphedStep:
    """Replays a step; what cannot be recorded runs as before, and the log says why.

    What the step returns is copied before it is handed out, because the next replay writes to the same memory.
    ``adopt`` is called after recording and returns what is to be done after every replay.
    """

    def __init__(self, parts: StepParts, adopt: Callable[[], Callable[[], None]]) -> None:
        self._parts, self._adopt = parts, adopt
        self._replay: _Replay | None = None
        self._steps = 0
        self._impossible = False

    def __call__(self, action: Tensor) -> Any:
        """Return what the step returns, in memory of its own."""
        if self._replay is None and not self._impossible and self._steps >= _WARM_UP:
            self._record(action)
        self._steps += 1
        return self._parts(action) if self._replay is None else self._replay(action)

    def _record(self, action: Tensor) -> None:
        try:
            self._replay = _Replay(self._parts, action, self._adopt)
        except RuntimeError as error:
            self._impossible = True
            _LOG.warning("the step runs without CUDA graphs, which costs speed: %s", str(error).splitlines()[0])


class _Replay:
    """The recorded parts and the memory between them."""

    def __init__(self, parts: StepParts, action: Tensor, adopt: Callable[[], Callable[[], None]]) -> None:
        self._simulate = parts.simulate
        self._action = action.clone()
        self._side = torch.cuda.Stream(action.device)
        self._before, self._beside, self._after = (torch.cuda.CUDAGraph() for _ in range(3))
        with recording(self._before):
            parts.before(self._action)
        with recording(self._beside):
            drawn = parts.beside()
        with recording(self._after):
            self._result = parts.after(self._action, drawn)
        self._restore = adopt()

    def __call__(self, action: Tensor) -> Any:
        self._action.copy_(action)
        self._before.replay()
        current = torch.cuda.current_stream(action.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._beside.replay()
        self._simulate()
        current.wait_stream(self._side)
        self._after.replay()
        self._restore()
        return _copy(self._result)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Record a graph while no garbage is collected: freeing a GPU object would break the recording off.

    Graphs that were recorded on the same stream share working memory of cuBLAS; those that may be replayed at the same
    time need a ``stream`` of their own.
    """
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Raise ``RuntimeError`` where the host waits for the device: such a thing cannot be recorded."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is called a prototype, once
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _copy(tree: Any) -> Any:
    """Copy all tensors of a nested structure in a few kernels."""
    leaves: list[Tensor] = []
    twins: dict[int, Tensor] = {}

    def visit(node: Any) -> Any:
        if isinstance(node, Tensor):
            if id(node) not in twins:
                twins[id(node)] = torch.empty_like(node)
                leaves.append(node)
            return twins[id(node)]
        if isinstance(node, TensorDictBase):
            source = {key: visit(value) for key, value in node.items()}
            return TensorDict._new_unsafe(source, batch_size=node.batch_size, device=node.device)
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if isinstance(node, tuple):
            return tuple(visit(value) for value in node)
        return node

    copied = visit(tree)
    copy_together([twins[id(leaf)] for leaf in leaves], leaves)
    return copied


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others of the same shapes, all of a type in one kernel."""
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        group = groups[target.dtype, source.dtype]
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)


_LOG_KERNELS = logging.getLogger(__name__)


@cache
def kernels_work(device: torch.device) -> bool:
    """Tell whether Triton compiles and runs on a device; the log says why not, once."""
    if device.type != "cuda" or not available("triton"):
        return False
    from embodichain.utils.trial_kernel import try_kernel

    try:
        return try_kernel(device)
    except (RuntimeError, OSError) as error:  # no compiler on this machine, or a GPU that Triton does not know
        _LOG_KERNELS.warning("our own GPU kernels are not used, which costs speed: %s", error)
        return False
