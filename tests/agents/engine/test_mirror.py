"""The mirror on a device: rows that follow the buffer, and no torn batch. On the CPU, and on a GPU if there is one."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from stream_envs import check_chunks, gym_config, stream_settings

from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.episode import Episode
from embodichain.agents.engine.layout import FrameLayout, Leaf
from embodichain.agents.engine.mirror import DeviceMirror
from embodichain.agents.engine.shared_buffer import Control, SharedBuffer, State
from embodichain.errors import ChunkSizeError, ConfigError

LAYOUT = FrameLayout((Leaf(("observation", "id"), torch.float32, (3,)), Leaf(("action",), torch.int64, ())))
ROWS, STEPS = 8, 12
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]


def write(buffer: SharedBuffer, row: int, stamp: int, length: int) -> None:
    steps = torch.arange(length) + 100 * stamp
    frames = {("action",): (steps,), ("observation", "id"): (steps.float()[:, None].expand(-1, 3),)}
    buffer.write(row, 0, Episode(frames, length))


@pytest.fixture
def buffer() -> SharedBuffer:
    buffer = SharedBuffer.create(LAYOUT, ROWS, STEPS, 1)
    for row in range(ROWS):
        write(buffer, row, row, 5 + row % 7)
    buffer.control[Control.STATE] = State.RUNNING
    return buffer


def check(batch: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Assert that every chunk is consecutive frames of one episode; return the stamps."""
    action = batch["action"].cpu()
    assert (action[:, 1:] - action[:, :-1] == 1).all()
    assert torch.equal(batch["observation", "id"].cpu(), action.float()[..., None].expand(-1, -1, 3))
    stamps = action[:, 0] // 100
    assert (action[:, -1] // 100 == stamps).all()
    assert action.shape[1] == chunk_size
    return stamps


@pytest.mark.parametrize("device", DEVICES)
def test_the_mirror_holds_what_the_buffer_holds(buffer: SharedBuffer, device: str) -> None:
    mirror = DeviceMirror(buffer, torch.device(device))
    batch, rows = mirror.sample(np.random.default_rng(0), 500, 5)
    assert batch.device.type == device
    assert set(check(batch, 5).tolist()) == set(rows.tolist()) == set(range(ROWS))
    with pytest.raises(ChunkSizeError, match="has 11 steps"):
        mirror.sample(np.random.default_rng(0), 4, 12)
    mirror.close()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_follow_and_are_never_torn(buffer: SharedBuffer, device: str) -> None:
    mirror, stop = DeviceMirror(buffer, torch.device(device)), threading.Event()

    def rewrite() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            write(buffer, count % ROWS, 1000 + count, 5 + count % 8)
            time.sleep(0.0005)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        generator, newest, deadline = np.random.default_rng(0), 0, time.monotonic() + 30
        while newest < 1000 + 4 * ROWS:
            newest = int(check(mirror.sample(generator, 64, 5)[0], 5).max())
            assert time.monotonic() < deadline
    finally:
        stop.set()
        writer.join()
        mirror.close()


def test_a_mirror_that_nobody_samples_from_can_be_closed(buffer: SharedBuffer) -> None:
    mirror = DeviceMirror(buffer, torch.device("cpu"))
    for stamp in range(50):
        write(buffer, stamp % ROWS, stamp, 6)
    mirror.close()
    assert not mirror._thread.is_alive()


@pytest.mark.parametrize("device", ["tpu", "cuda:x" if torch.cuda.is_available() else "cuda"])
def test_a_device_that_does_not_exist_is_refused(device: str) -> None:
    with pytest.raises((ConfigError, RuntimeError), match="device"):
        OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(buffer_device=device)))


@pytest.mark.gpu
@needs_cuda
def test_an_engine_samples_on_the_gpu() -> None:
    settings = stream_settings(buffer_device="cuda", refill_threshold=10, gym_config=gym_config(pixels=16))
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        deadline = time.monotonic() + 60
        while engine.stats().refills < 3:
            batch = engine.sample_batch(64, 4)
            assert batch.device.type == "cuda"
            check_chunks(batch.cpu())
            assert time.monotonic() < deadline
