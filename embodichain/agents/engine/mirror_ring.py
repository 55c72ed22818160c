"""Batches on a device that are filled again and again: the draws and copies of each are one CUDA graph."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.engine.layout import Key, unflatten
from embodichain.agents.engine.mirror_draw import Table, WindowCopier
from embodichain.agents.engine.outputs import RING_SIZE
from embodichain.envs.graphed import recording

_LOG = logging.getLogger(__name__)
_RING_SHAPES = 8
"""Shapes of batches that are kept; a new one takes the place of the oldest, as each may be large."""


@dataclass
class _Entry:
    out: dict[Key, Tensor]
    batch: TensorDict
    is_used: bool = False
    graph: torch.cuda.CUDAGraph | None = None


class BatchRing:
    """The same ``RING_SIZE`` batches per shape, in turn; one ring per thread."""

    def __init__(self, copier: WindowCopier, device: torch.device) -> None:
        self._copier, self._device = copier, device
        self._records = copier.in_kernels
        self._rings: dict[tuple[int, int], list[_Entry]] = {}

    def fill(self, key: int, batch_size: int, table: Table) -> TensorDict:
        """Draw into the batch of this shape that was given out longest ago."""
        shape = (batch_size, table.chunk_size)
        ring = self._rings.get(shape)
        if ring is None:
            if len(self._rings) == _RING_SHAPES:
                self._rings.pop(next(iter(self._rings)))
            ring = self._rings[shape] = [self._new(*shape) for _ in range(RING_SIZE)]
        entry = ring.pop(0)
        ring.append(entry)
        if entry.graph is not None:
            self._copier.set_key(key)
            entry.graph.replay()
        else:
            self._copier.fill(key, table, entry.out)
            if entry.is_used and self._records:
                self._record(entry, table)
            entry.is_used = True
        return entry.batch

    def _new(self, batch_size: int, chunk_size: int) -> _Entry:
        out = self._copier.room(batch_size, chunk_size)
        return _Entry(out, nested(unflatten(out), torch.Size([batch_size, chunk_size]), self._device))

    def _record(self, entry: _Entry, table: Table) -> None:
        """Record what was just done for the second time, and will be done again; its kernels are compiled by now."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self._device), recording(graph):
                self._copier.launch(table, entry.out)
        except RuntimeError as error:
            self._records = False
            _LOG.warning("batches are drawn without CUDA graphs, which costs speed: %s", str(error).splitlines()[0])
        else:
            entry.graph = graph


def nested(tree: dict[str, Any], batch_size: torch.Size, device: torch.device) -> TensorDict:
    """Build nested TensorDicts; the shapes are ours, and the public constructor's checks take longer than the rest."""
    source = {
        key: nested(value, batch_size, device) if isinstance(value, dict) else value for key, value in tree.items()
    }
    return TensorDict._new_unsafe(source, batch_size=batch_size, device=device)
