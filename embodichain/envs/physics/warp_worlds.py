"""Some of the worlds of a simulation: MuJoCo Warp's model and data of them, and their substeps as a CUDA graph.

A substep is some hundred small kernels one after the other, and a GPU is far from busy with any of them. So a large
simulation is split: its parts are independent of each other, and their graphs run side by side.
"""

from __future__ import annotations

from typing import Any

import mujoco
import torch
from torch import Tensor

from embodichain.envs.physics.warp_capacity import capacity
from embodichain.envs.physics.warp_memory import Workspace

LEAST_WORLDS = 1024
"""Worlds of a part at least: fewer take as long."""
MOST_PARTS = 4


def choose_parts(num_envs: int) -> int:
    """Return into how many equal parts to split a simulation."""
    return next(parts for parts in (MOST_PARTS, 2, 1) if parts == 1 or not num_envs % (parts * LEAST_WORLDS))


class Worlds:
    """One part."""

    def __init__(self, warp: Any, mjw: Any, model: mujoco.MjModel, rows: slice, device: torch.device) -> None:
        self._wp, self._mjw, self.rows = warp, mjw, rows
        count = rows.stop - rows.start
        room = capacity(model, count)
        with warp.ScopedDevice(warp.device_from_torch(device)):
            self.model = mjw.put_model(model)
            self.data = mjw.make_data(model, nworld=count, naconmax=room.contacts, njmax=room.rows)
            warp.synchronize()  # torch, on a stream of its own, may look at it now
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._workspace = Workspace(device)
        self._graphs: dict[int, Any] = {}

    def share(self, name: str, values: Tensor) -> None:
        """Let a field of the data be this part's rows of a tensor ``[num_envs, ...]``."""
        own = getattr(self.data, name)
        setattr(self.data, name, self._wp.from_torch(values[self.rows], dtype=own.dtype))

    def give(self, name: str, values: Tensor) -> None:
        """Let a field of the model be this part's rows of a tensor ``[num_envs, ...]``, one per world."""
        shared = getattr(self.model, name)
        setattr(self.model, name, self._wp.from_torch(values[self.rows], dtype=shared.dtype))
        self._graphs.clear()

    def advance(self, count: int, derive: bool) -> None:
        """Do substeps; with ``derive`` constants that follow from masses come first, for whatever was written there."""
        if derive:
            self._mjw.set_const(self.model, self.data, restore=False)
        for _ in range(count):
            self._mjw.step(self.model, self.data)

    def is_recorded(self, count: int) -> bool:
        """Tell whether there is a graph of so many substeps."""
        return count in self._graphs

    def record(self, count: int, derive: bool) -> None:
        """Make a graph of substeps, done once before to compile and load their kernels: the state has moved then."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)  # torch's default stream cannot be recorded
        stream = self._wp.stream_from_torch(self.stream)
        with (
            self._wp.ScopedStream(stream, sync_enter=False, sync_exit=False),
            self._wp.ScopedAllocator(stream.device, self._workspace),
        ):
            self.advance(count, derive)
            with self._wp.ScopedCapture(stream=stream) as capture:
                self.advance(count, derive)
        current.wait_stream(self.stream)
        self._graphs[count] = capture.graph

    def replay(self, count: int, stream: torch.cuda.Stream) -> None:
        """Do recorded substeps on a stream."""
        self._wp.capture_launch(self._graphs[count], stream=self._wp.stream_from_torch(stream))
