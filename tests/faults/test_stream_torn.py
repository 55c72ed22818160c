"""A hundred thousand windows, drawn by two processes beside a writer at full speed: not one of them is torn."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

import torch

from embodichain.agents.datasets.frames import Episode, FrameLayout, Leaf
from embodichain.agents.engine import OnlineDataEngineCfg
from embodichain.agents.engine.reader import StreamReader
from embodichain.agents.engine.shared_buffer import Control, Read, SharedBuffer, State, Work

ROWS, STEPS, CHUNK, BATCH = 24, 96, 32, 64
READERS = 2
WINDOWS = 100_000
LAYOUT = FrameLayout(
    (
        Leaf(("observation", "state"), torch.float32, (14,)),
        Leaf(("observation", "image"), torch.uint8, (3, 16, 16)),
        Leaf(("action",), torch.int64, (2,)),
    )
)


class Stamper:
    """Writes episodes in which every number is the stamp of the episode, and every length another."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self.buffer = buffer
        self.frames = {leaf.key: torch.empty((STEPS, *leaf.shape), dtype=leaf.dtype) for leaf in LAYOUT.leaves}
        self.count = 0

    def write(self, row: int) -> None:
        self.count += 1
        stamp, length = self.count % 251, CHUNK + self.count * 7 % (STEPS - CHUNK + 1)
        for value in self.frames.values():
            value[:length].fill_(stamp)
            value[length:].fill_(255)  # what lies beyond the end must never be seen
        pieces = {key: (value,) for key, value in self.frames.items()}
        self.buffer.write(row, 0, Episode(pieces, length))
        self.buffer.workers[0, Work.WRITTEN] += 1


def _write(buffer: SharedBuffer) -> None:
    torch.set_num_threads(1)
    stamper = Stamper(buffer)
    while buffer.control[Control.STATE] == State.RUNNING:
        stamper.write(stamper.count % ROWS)


def _read(buffer: SharedBuffer, windows: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    reader = StreamReader(buffer, OnlineDataEngineCfg(max_episode_steps=STEPS))
    torn = 0
    for _ in range(windows // BATCH):
        batch = reader.sample(BATCH, CHUNK, reuse_outputs=True)
        flat = [batch[key].reshape(BATCH, -1) for key in buffer.frames]
        stamp = flat[0][:, 0]
        ok = (stamp >= 0) & (stamp < 251)
        for value in flat:
            ok &= (value == stamp.to(value.dtype)[:, None]).all(dim=1)
        torn += int((~ok).sum())
    pipe.send(torn)


def test_no_window_is_torn() -> None:
    context = mp.get_context("fork")
    buffer = SharedBuffer(LAYOUT, ROWS, STEPS, 1)
    first = Stamper(buffer)
    for row in range(ROWS):
        first.write(row)
    buffer.control[Control.STATE] = State.RUNNING
    writer = context.Process(target=_write, args=(buffer,))
    ours, theirs = context.Pipe()
    processes = [context.Process(target=_read, args=(buffer, WINDOWS // READERS, theirs)) for _ in range(READERS)]
    for process in (writer, *processes):
        process.start()
    torn = []
    for _ in processes:
        assert ours.poll(250)
        torn.append(ours.recv())
    buffer.control[Control.STATE] = State.STOPPED
    for process in (writer, *processes):
        process.join()
    assert torn == [0] * READERS
    assert buffer.samples >= WINDOWS - READERS * BATCH
    # The test means something only if rows did change under the readers' hands.
    assert buffer.episodes_written > 10 * ROWS
    assert buffer.readers[:, Read.REDRAWN].sum() > 0
