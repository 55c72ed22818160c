"""What the data stream is compared with: the same frames copied and sampled in other ways."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from embodichain.agents.datasets.frames import FrameLayout, Leaf
from embodichain.agents.engine import OnlineDataEngineCfg
from embodichain.agents.engine.reader import StreamReader
from embodichain.agents.engine.sampling import RING_SIZE
from embodichain.agents.engine.shared_buffer import Control, SharedBuffer, State

ROWS, STEPS = 256, 300
VECTORS = {"state": 14, "action": 14, "obs": 32}


def make_buffer(kind: str) -> SharedBuffer:
    """Return a full buffer of random numbers and random lengths."""
    leaves = [Leaf((name,), torch.float32, (size,)) for name, size in VECTORS.items()]
    if kind == "image":
        leaves.append(Leaf(("image",), torch.uint8, (3, 96, 96)))
    buffer = SharedBuffer(FrameLayout(tuple(leaves)), ROWS, STEPS, 1)
    for leaf in leaves:
        frames = buffer.frames[leaf.key]
        frames.uniform_() if leaf.dtype == torch.float32 else frames.view(-1).view(torch.int64).random_()
    buffer.length[:] = np.random.default_rng(0).integers(100, STEPS + 1, ROWS)
    buffer.control[Control.STATE] = State.RUNNING
    return buffer


def make_reader(buffer: SharedBuffer) -> StreamReader:
    """Return what an engine samples with."""
    return StreamReader(buffer, OnlineDataEngineCfg(buffer_size=ROWS, max_episode_steps=STEPS))


def memcpy(buffer: SharedBuffer, batch: int, chunk: int) -> Callable[[], Any]:
    """Return the limit: one copy of a batch's bytes from a random place of the frames."""
    size = buffer.layout.nbytes * batch * chunk
    frames = buffer.segment.bytes[-buffer.layout.nbytes * ROWS * STEPS :]
    destination = torch.empty(size, dtype=torch.uint8)
    places = (frames.numel() - size) // 64

    def copy() -> None:
        start = int(torch.randint(places, ())) * 64
        destination.copy_(frames[start : start + size])

    return copy


def indexing(buffer: SharedBuffer, batch: int, chunk: int) -> Callable[[], Any]:
    """Return a plain advanced index into the TensorDict."""
    steps = torch.arange(chunk)

    def sample() -> TensorDict:
        rows, starts = torch.randint(ROWS, (batch, 1)), torch.randint(STEPS - chunk + 1, (batch, 1))
        return buffer.tensordict[rows, starts + steps]

    return sample


def gather(buffer: SharedBuffer, batch: int, chunk: int) -> Callable[[], Any]:
    """Return the copy of random windows alone: nothing is picked, checked or counted."""
    count = ROWS * STEPS - chunk + 1
    views = [
        buffer.frames[leaf.key].as_strided((count, chunk * leaf.elements), (leaf.elements, 1))
        for leaf in buffer.layout.leaves
    ]
    outputs = [[torch.empty(batch, view.shape[1], dtype=view.dtype) for view in views] for _ in range(RING_SIZE)]
    turn = itertools.cycle(zip([torch.randint(count, (batch,)) for _ in range(512)], itertools.cycle(outputs)))

    def copy() -> None:
        index, output = next(turn)
        for view, out in zip(views, output, strict=True):
            torch.index_select(view, 0, index, out=out)

    return copy


def torchrl(buffer: SharedBuffer, batch: int, chunk: int) -> Callable[[], Any]:
    """Return TorchRL's replay buffer with a slice sampler on the same frames."""
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SliceSampler

    flat = TensorDict(dict(buffer.tensordict.items()), batch_size=[ROWS, STEPS]).reshape(-1)
    flat["episode"] = torch.arange(ROWS).repeat_interleave(STEPS)
    sampler = SliceSampler(slice_len=chunk, traj_key="episode", cache_values=True)
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS * STEPS), sampler=sampler, batch_size=batch * chunk)
    replay.extend(flat)
    return replay.sample
