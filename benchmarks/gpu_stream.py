"""The stream on a GPU: chunks drawn from a mirrored buffer, against a plain copy of as many bytes on the device."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gpu_turns import Row, Turn, nothing, report, take_turns
from embodichain.agents.datasets.frames import Episode, FrameLayout, Leaf
from embodichain.agents.engine.gpu_mirror import DeviceMirror
from embodichain.agents.engine.shared_buffer import Control, SharedBuffer, State

EPISODES, LENGTH, CHUNK = 64, 300, 64
WAYS = {"chunks with pictures, outputs reused": True, "chunks with pictures": False}
LAYOUT = FrameLayout(
    (
        Leaf(("observation", "image", "front"), torch.uint8, (96, 96, 3)),
        Leaf(("observation", "state"), torch.float32, (14,)),
        Leaf(("action",), torch.float32, (14,)),
    )
)


def stream(rounds: int) -> list[Row]:
    """Measure batches of several sizes; both sides count the bytes they write."""
    buffer = SharedBuffer(LAYOUT, EPISODES, LENGTH, 1)
    for row in range(EPISODES):
        frames = {leaf.key: (_random(leaf),) for leaf in LAYOUT.leaves}
        buffer.write(row, 0, Episode(frames, LENGTH))
    buffer.control[Control.STATE] = State.RUNNING
    mirror, generator, rows = DeviceMirror(buffer, torch.device("cuda")), np.random.default_rng(0), []
    try:
        for batch_size in (32, 128, 512):
            nbytes = batch_size * CHUNK * LAYOUT.nbytes
            sources = [torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda") for _ in range(2)]
            target = torch.empty_like(sources[0])
            copy: Turn = (nothing, lambda s=sources, t=target: [t.copy_(source) for source in s * 5])
            turns = {name: _draw(mirror, generator, batch_size, reuse) for name, reuse in WAYS.items()}
            times = take_turns({"copy": copy, **turns}, rounds)
            rows.append(report("stream", f"copy on the device, {nbytes / 1e6:.0f} MB", times["copy"] / 10, nbytes))
            for name in WAYS:
                bar = f"{100 * times['copy'] / times[name]:.0f}% of a copy (bar: 50%)"
                size = f"{batch_size} x {CHUNK} steps, {nbytes / 1e6:.0f} MB"
                rows.append(report("stream", f"{name}, {size}", times[name] / 10, nbytes, bar))
    finally:
        mirror.close()
    return rows


def _draw(mirror: DeviceMirror, generator: np.random.Generator, batch_size: int, reuse_outputs: bool) -> Turn:
    return nothing, lambda: [mirror.sample(generator, batch_size, CHUNK, reuse_outputs) for _ in range(10)]


def _random(leaf: Leaf) -> torch.Tensor:
    if leaf.dtype == torch.uint8:
        return torch.randint(0, 255, (LENGTH, *leaf.shape), dtype=torch.uint8)
    return torch.randn(LENGTH, *leaf.shape)
