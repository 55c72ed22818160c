"""One environment step as one CUDA graph: recorded after a few ordinary steps, replayed from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

_LOG = logging.getLogger(__name__)
_WARM_UP = 3  # ordinary steps before recording: kernels are compiled and memory is pooled by then


class GraphedStep:
    """Replays ``advance(action)``; what cannot be recorded runs as before, and the log says why.

    A graph reads and writes fixed memory, so ``advance`` must keep its state in tensors that it updates in place, and
    what it returns is copied before it is handed out.
    """

    def __init__(self, advance: Callable[[Tensor], Any], adopt: Callable[[], Callable[[], None]]) -> None:
        self._advance, self._adopt = advance, adopt
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0
        self._action: Tensor | None = None
        self._result: Any = None
        self._restore: Callable[[], None] = lambda: None

    def __call__(self, action: Tensor) -> Any:
        """Return what ``advance(action)`` returns, in memory of its own."""
        if self._graph is None or self._action is None:
            if self._steps >= 0:
                self._steps += 1
                if self._steps > _WARM_UP:
                    self._record(action)
            if self._graph is None or self._action is None:
                return self._advance(action)
        self._action.copy_(action)
        self._graph.replay()
        self._restore()
        return _copy(self._result)

    def _record(self, action: Tensor) -> None:
        self._action = action.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._result = self._advance(self._action)
        except RuntimeError as error:
            _LOG.warning("the step runs without a CUDA graph, which costs speed: %s", str(error).splitlines()[0])
            self._steps = -1
            return
        self._restore = self._adopt()
        self._graph = graph


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
    torch._foreach_copy_([twins[id(leaf)] for leaf in leaves], leaves)
    return copied
