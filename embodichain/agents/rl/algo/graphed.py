"""Gradient steps as CUDA graphs: gather, forward, backward, clip and Adam in one launch.

An ordinary step of a small network is hundreds of launches, and a GPU finishes each before the next arrives. A graph
has fixed shapes and reads and writes fixed memory. So the data of every update are copied to the same place, the order
of rows is an input, and there is one graph for each size of minibatch; where a loss weighs its transitions, minibatches
are filled up with transitions of no weight, and one size does for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.optimizer import PolicyOptimizer
from embodichain.agents.rl.buffer.rollout import Minibatches
from embodichain.agents.rl.utils.observations import sorted_leaves
from embodichain.utils.cuda_graphs import recording, refusing_to_wait

_LOG = logging.getLogger(__name__)
_WARM_UP = 3  # ordinary steps before recording: libraries load and Adam makes its moments in them
_NARROW = 256  # columns up to which a part of the data goes into the common table
_SMALL = 1 << 26  # bytes up to which data are copied rather than looked up where they are

Step = Callable[[TensorDictBase], dict[str, Tensor]]
"""Does one gradient step on a minibatch and returns what was measured, ``[]`` each."""


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    chosen: Tensor
    """Items of the minibatch; -1 stands for none."""


class GraphedSteps:
    """Does an algorithm's gradient steps by replaying graphs; what cannot be recorded runs as before, and is logged."""

    def __init__(self, step: Step, optimizer: PolicyOptimizer, validity_key: str | None = None) -> None:
        """Prepare to replay ``step``; ``validity_key`` names the part of a minibatch that weighs its transitions."""
        self._step, self._optimizer, self._validity_key = step, optimizer, validity_key
        self._store: _Store | None = None
        self._names: list[str] = []
        self._sums: Tensor | None = None
        self._graphs: dict[int, _Recorded] = {}
        self._steps = 0
        self._off = False

    def run_epoch(self, minibatches: Minibatches) -> tuple[dict[str, Tensor], int]:
        """Do one pass over the data; return the sums of all measures and the number of steps."""
        self._load(minibatches)
        if self._sums is not None:
            self._sums.zero_()
        order = minibatches.draw()
        for chosen in order:
            self._steps += 1
            if not self._replay(chosen):
                self._do(chosen)
        if self._sums is None:
            return {}, 0
        return dict(zip(self._names, self._sums.clone().unbind(), strict=True)), len(order)

    def forget(self) -> None:
        """Record anew: parameters or Adam's moments have moved."""
        self._graphs.clear()
        self._steps = 0

    # --- one step -------------------------------------------------------------------------------------------------

    def _do(self, chosen: Tensor) -> None:
        """Do a step as usual; the last one before recording finds out whether the policy waits for the device."""
        if self._off or self._steps != _WARM_UP:
            return self._add(self._step(self._gather(chosen)))
        try:
            with refusing_to_wait():
                self._add(self._step(self._gather(chosen)))
        except RuntimeError as error:
            self._give_up(f"a step waits for the device ({_first_line(error)})")
        if self._off:
            self._optimizer.adam.zero_grad(set_to_none=True)
            self._add(self._step(self._gather(chosen)))

    def _replay(self, chosen: Tensor) -> bool:
        """Do a step by its graph, if it has one or can be given one."""
        if self._off or self._steps <= _WARM_UP:
            return False
        size = chosen.numel() if self._validity_key is None else self._loaded().largest
        if size not in self._graphs and not self._record(size):
            return False
        recorded = self._graphs[size]
        if chosen.numel() < size:
            recorded.chosen.fill_(-1)
        recorded.chosen[: chosen.numel()].copy_(chosen)
        recorded.graph.replay()
        return True

    def _record(self, size: int) -> bool:
        chosen = torch.zeros(size, dtype=torch.int64, device=self._optimizer.parameters[0].device)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        try:
            with recording(graph, pool):
                self._add(self._step(self._gather(chosen)))
        except RuntimeError as error:
            self._give_up(_first_line(error))
            self._optimizer.adam.zero_grad(set_to_none=True)
            return False
        self._graphs[size] = _Recorded(graph, chosen)
        return True

    def _add(self, measures: dict[str, Tensor]) -> None:
        values = torch.stack(list(measures.values()))
        if self._sums is None:
            self._names, self._sums = list(measures), torch.zeros_like(values)
        self._sums.add_(values)

    def _give_up(self, reason: str) -> None:
        self._off = True
        _LOG.warning("the update runs without CUDA graphs, which costs speed: %s", reason)

    # --- the data -------------------------------------------------------------------------------------------------

    def _gather(self, chosen: Tensor) -> TensorDict:
        """Return a minibatch; items that stand for none are there, but do not count."""
        if self._validity_key is None:
            return self._loaded().gather(chosen)
        batch = self._loaded().gather(chosen.clamp(min=0))
        batch[self._validity_key] = batch[self._validity_key] & (chosen >= 0)
        return batch

    def _load(self, minibatches: Minibatches) -> None:
        """Bring the data of an update to where the graphs look for them."""
        if self._off:
            self._store = _Store(minibatches, own=False)
            return
        if self._optimizer.precision == "fp16":
            self._give_up("the loss scale of fp16 depends on what came before; bf16 needs none")
        if self._store is not None and self._store.minibatches is minibatches:
            return
        if self._store is None or not self._store.take(minibatches):
            self._store = _Store(minibatches, own=self._store is not None)
            self._graphs.clear()

    def _loaded(self) -> _Store:
        if self._store is None:
            raise RuntimeError("no data were loaded")
        return self._store


class _Store:
    """The data of one update at fixed addresses: small parts in memory of its own, large ones where they came from.

    Numbers are kept side by side, one row per transition, so that one gather fetches all of them.
    """

    def __init__(self, minibatches: Minibatches, own: bool) -> None:
        """Take the data; with ``own`` large parts are copied too, because they keep moving."""
        self.minibatches = minibatches
        leaves = dict(sorted_leaves(minibatches.rows))
        self._columns = _side_by_side(leaves)
        width = max((columns.stop for columns in self._columns.values()), default=0)
        self._table = torch.empty(minibatches.rows.batch_size[0], width, device=minibatches.device)
        self._parts: dict[tuple[str, ...], Tensor] = {}
        self._owned = set(self._columns)
        for path, leaf in leaves.items():
            if path in self._columns:
                self._parts[path] = self._table[:, self._columns[path]].view(leaf.shape)
                self._parts[path].copy_(leaf)
            elif own or _nbytes(leaf) <= _SMALL:
                self._owned.add(path)
                self._parts[path] = leaf.clone()
            else:
                self._parts[path] = leaf

    @property
    def largest(self) -> int:
        """Items of a minibatch at most."""
        return self.minibatches.largest

    def gather(self, chosen: Tensor) -> TensorDict:
        """Return the minibatch of these items."""
        index, shape = self.minibatches.locate(chosen)
        batch = TensorDict({}, batch_size=shape, device=chosen.device)
        table = self._table.index_select(0, index) if self._columns else None
        for path, part in self._parts.items():
            columns = self._columns.get(path)
            if columns is None or table is None:
                rows = part.index_select(0, index)
            else:
                rows = table[:, columns] if part.ndim > 1 else table[:, columns.start]
            batch.set(path, rows if len(shape) == 1 else rows.unflatten(0, shape))
        return batch

    def take(self, minibatches: Minibatches) -> bool:
        """Take the data of the next update, if they have the same shapes and those that were not copied stay put."""
        leaves = dict(sorted_leaves(minibatches.rows))
        if _layout(minibatches) != _layout(self.minibatches) or leaves.keys() != self._parts.keys():
            return False
        for path, part in self._parts.items():
            leaf = leaves[path]
            if (leaf.shape, leaf.dtype) != (part.shape, part.dtype):
                return False
            if path not in self._owned and leaf.data_ptr() != part.data_ptr():
                return False
        for path in self._owned:
            self._parts[path].copy_(leaves[path])
        self.minibatches = minibatches
        return True


def _side_by_side(leaves: dict[tuple[str, ...], Tensor]) -> dict[tuple[str, ...], slice]:
    """Return the columns of a table for all narrow parts of numbers, vectors first: those stay aligned."""
    narrow = [p for p, x in leaves.items() if x.dtype == torch.float32 and x.ndim <= 2 and _width(x) <= _NARROW]
    columns, first = {}, 0
    for path in sorted(narrow, key=lambda path: -_width(leaves[path])):
        columns[path] = slice(first, first + _width(leaves[path]))
        first += _width(leaves[path])
    return columns


def _width(leaf: Tensor) -> int:
    return leaf.shape[1] if leaf.ndim > 1 else 1


def _nbytes(leaf: Tensor) -> int:
    return leaf.numel() * leaf.element_size()


def _layout(minibatches: Minibatches) -> tuple[int, int, int | None, int]:
    return minibatches.num_envs, minibatches.num_steps, minibatches.sequence_length, minibatches.largest


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
