"""The mirror on a device: rows that follow the buffer, and no torn batch. On the CPU, and on a GPU if there is one."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from stream_envs import check_chunks, gym_config, stream_settings

from embodichain.agents.datasets.frames import Episode, FrameLayout, Leaf
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.gpu_mirror import DeviceMirror, draw_key, pick
from embodichain.agents.engine.sampling import RING_SIZE
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
    buffer = SharedBuffer(LAYOUT, ROWS, STEPS, 1)
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
    assert check(batch, 5).tolist() == rows().tolist()
    assert set(rows().tolist()) == set(range(ROWS))
    with pytest.raises(ChunkSizeError, match="has 11 steps"):
        mirror.sample(np.random.default_rng(0), 4, 12)
    mirror.close()


def test_draws_are_uniform_and_the_same_for_the_same_key() -> None:
    """Rows that are long enough, each as often, and every start in them as often: within 5 standard deviations."""
    length = np.array([3, 12, 5, 20, 7])
    rows = np.flatnonzero(length >= 5)
    chosen, starts = pick(-5, 200_000, rows, length, 5)
    assert set(chosen.tolist()) == {1, 2, 3, 4}
    for row in rows:
        mine = starts[chosen == row]
        places = length[row] - 4
        counts = np.bincount(mine, minlength=places)
        assert len(counts) == places
        assert abs(len(mine) - 50_000) < 5 * (200_000 * 0.25 * 0.75) ** 0.5
        assert np.abs(counts - len(mine) / places).max() < 5 * (len(mine) / places) ** 0.5
    again, _ = pick(-5, 100, rows, length, 5)
    assert np.array_equal(again, chosen[:100])  # whatever the size of the batch
    other, _ = pick(-6, 100, rows, length, 5)
    assert not np.array_equal(again, other)


@pytest.mark.parametrize("reuse_outputs", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_generator_decides_what_is_drawn(buffer: SharedBuffer, device: str, reuse_outputs: bool) -> None:
    """The same on every device and in both ways, for as long as rows stay the same."""
    mirror = DeviceMirror(buffer, torch.device(device))
    generator, twin = np.random.default_rng(7), np.random.default_rng(7)
    length = np.array([5 + row % 7 for row in range(ROWS)])
    for _ in range(12):  # a ring is filled, recorded and replayed
        batch, rows = mirror.sample(generator, 16, 4, reuse_outputs)
        expected, starts = pick(draw_key(twin), 16, np.arange(ROWS), length, 4)
        assert np.array_equal(rows(), expected)
        assert torch.equal(batch["action"][:, 0].cpu(), torch.from_numpy(100 * expected + starts))
        check(batch, 4)
    mirror.close()


@pytest.mark.parametrize("device", DEVICES)
def test_batches_of_a_ring_come_again_and_others_are_the_callers(buffer: SharedBuffer, device: str) -> None:
    mirror, generator = DeviceMirror(buffer, torch.device(device)), np.random.default_rng(0)
    ring = [mirror.sample(generator, 4, 3, reuse_outputs=True)[0] for _ in range(2 * RING_SIZE)]
    assert len({batch["action"].data_ptr() for batch in ring}) == RING_SIZE
    assert all(a is b for a, b in zip(ring[:RING_SIZE], ring[RING_SIZE:], strict=True))
    kept = [mirror.sample(generator, 4, 3)[0] for _ in range(8)]
    assert len({batch["action"].data_ptr() for batch in kept}) == 8
    mirror.close()


@pytest.mark.parametrize("reuse_outputs", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_follow_and_are_never_torn(buffer: SharedBuffer, device: str, reuse_outputs: bool) -> None:
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
        generator, newest, deadline = np.random.default_rng(0), 0, time.monotonic() + 120
        while newest < 1000 + 4 * ROWS:
            newest = int(check(mirror.sample(generator, 64, 5, reuse_outputs)[0], 5).max())
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
            batch = engine.sample_batch(64, 4, reuse_outputs=True)
            assert batch.device.type == "cuda"
            check_chunks(batch.cpu())
            assert time.monotonic() < deadline
