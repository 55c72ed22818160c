"""The shared buffer: what is written is what is read, in every kind of process, and nothing is left behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodichain.agents.datasets.frames import Episode, FrameLayout, Leaf
from embodichain.agents.engine.reader import ReaderSlot
from embodichain.agents.engine.shared_buffer import SharedBuffer
from embodichain.agents.processes import shared_memory
from embodichain.agents.processes.shared_memory import Segment
from embodichain.errors import SharedMemoryError, SimulationError

LAYOUT = FrameLayout(
    (
        Leaf(("observation", "state"), torch.float32, (3,)),
        Leaf(("observation", "image"), torch.uint8, (4, 4, 3)),
        Leaf(("action",), torch.int64, ()),
        Leaf(("terminated",), torch.bool, ()),
    )
)


def make_buffer(rows: int = 6, steps: int = 10, workers: int = 2) -> SharedBuffer:
    return SharedBuffer(LAYOUT, rows, steps, workers)


def make_episode(length: int, seed: int = 0, cut: int | None = None, **changes: Any) -> Episode:
    generator = torch.Generator().manual_seed(seed)
    frames = {
        ("observation", "state"): torch.randn(length, 3, generator=generator),
        ("observation", "image"): torch.randint(256, (length, 4, 4, 3), generator=generator, dtype=torch.uint8),
        ("action",): torch.randint(5, (length,), generator=generator),
        ("terminated",): torch.arange(length) == length - 1,
    }
    pieces = {key: (value,) if cut is None else (value[:cut], value[cut:]) for key, value in frames.items()}
    return Episode(pieces, length, **{"seed": seed, **changes})


def whole(episode: Episode) -> dict:
    return {key: torch.cat(pieces) for key, pieces in episode.frames.items()}


@pytest.mark.parametrize("cut", [None, 3])
def test_an_episode_is_read_as_it_was_written(cut: int | None) -> None:
    buffer = make_buffer()
    episode = make_episode(7, seed=5, cut=cut, success=True, policy_version=12)
    before = time.time()
    buffer.write(4, 1, episode)
    for key, value in whole(episode).items():
        assert torch.equal(buffer.tensordict[key][4, :7], value)
    info = buffer.info(4)
    assert (info.length, info.sequence, info.worker, info.seed, info.policy_version) == (7, 2, 1, 5, 12)
    assert info.success is True
    assert before <= info.time <= time.time()
    assert buffer.info(3).length == 0


def test_the_sequence_is_odd_exactly_while_a_row_is_written() -> None:
    buffer, seen = make_buffer(), []

    class Spy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(int(buffer.sequence[2]))
            return super().__torch_function__(function, types, args, kwargs or {})

    episode = make_episode(5)
    state = episode.frames[("observation", "state")][0].as_subclass(Spy)
    episode.frames[("observation", "state")] = (state,)
    buffer.write(2, 0, episode)
    assert set(seen) == {1}
    assert buffer.sequence.tolist() == [0, 0, 2, 0, 0, 0]


def test_a_row_left_half_written_is_repaired_by_the_next_write() -> None:
    buffer = make_buffer()
    buffer.write(0, 0, make_episode(5))
    buffer.sequence[0] += 1  # what a killed worker leaves behind
    buffer.write(0, 0, make_episode(6))
    assert buffer.sequence[0] == 4
    assert buffer.info(0).length == 6


def test_rows_are_split_between_workers_without_gaps() -> None:
    for rows, workers in ((6, 2), (7, 3), (5, 5), (16, 3)):
        buffer = make_buffer(rows, 2, workers)
        owned = [row for worker in range(workers) for row in buffer.rows_of(worker)]
        assert owned == list(range(rows))
        sizes = [len(buffer.rows_of(worker)) for worker in range(workers)]
        assert max(sizes) - min(sizes) <= 1


def test_too_little_memory_is_said_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 5 << 20)
    with pytest.raises(SharedMemoryError, match=r"needs .*GiB of shared memory, but 5.0 MiB are available"):
        SharedBuffer(LAYOUT, 100_000, 1000, 1)


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < shared_memory.available_bytes() <= total


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["own", "parent"])
def test_the_limit_of_a_control_group_is_heeded(
    version: int, limited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred MiB are allowed, eighty in use, thirty of them pages of files and caches of the kernel, which the
    kernel gives up when memory is needed: fifty are left."""
    names = {
        1: ("memory/jobs/mine", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("jobs/mine", "memory.max", "memory.current"),
    }
    own, limit, usage = names[version]
    statistics = {
        1: {"inactive_file": 1, "active_file": 1, "total_inactive_file": 10, "total_active_file": 20},
        2: {"file": 70, "inactive_file": 5, "active_file": 20, "slab_reclaimable": 5, "slab_unreclaimable": 9},
    }[version]
    unlimited = {1: str(2**63 - 4096), 2: "max"}[version]
    group = tmp_path / own
    group.mkdir(parents=True)
    for folder in (group, group.parent):
        is_limited = (folder == group) == (limited == "own")
        (folder / limit).write_text(f"{100 << 20 if is_limited else unlimited}\n")
        (folder / usage).write_text(f"{80 << 20}\n")
        (folder / "memory.stat").write_text("".join(f"{name} {size << 20}\n" for name, size in statistics.items()))
    (tmp_path / "cgroup").write_text(
        {1: "11:cpu,cpuacct:/jobs/mine\n4:memory:/jobs/mine\n", 2: "0::/jobs/mine\n"}[version]
    )
    monkeypatch.setattr(shared_memory, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(shared_memory, "_OWN_CGROUPS", tmp_path / "cgroup", raising=False)
    assert shared_memory.available_bytes() == 50 << 20
    with pytest.raises(SharedMemoryError, match=r"50\.0 MiB are available"):
        Segment.create(51 << 20, "this")


def test_nothing_appears_in_dev_shm() -> None:
    def own_files() -> set[str]:
        """Return the files there that this process has mapped or opened; those of others come and go."""
        mapped = Path("/proc/self/maps").read_text().split()
        opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return {name for name in (*mapped, *opened) if name.startswith("/dev/shm/")}

    before = own_files()
    buffer = make_buffer(64, 100)
    buffer.write(0, 0, make_episode(5))
    assert own_files() <= before


def _double(buffer: SharedBuffer, pipe: Any) -> None:
    buffer.tensordict["observation", "state"].mul_(2)
    pipe.send(buffer.info(1).seed)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_another_process_sees_the_same_memory(method: str) -> None:
    context = mp.get_context(method)
    buffer = make_buffer()
    buffer.write(1, 0, make_episode(5, seed=9))
    expected = buffer.tensordict["observation", "state"].clone() * 2
    ours, theirs = context.Pipe()
    process = context.Process(target=_double, args=(buffer, theirs))
    process.start()
    assert ours.poll(180)
    assert ours.recv() == 9
    process.join()
    assert torch.equal(buffer.tensordict["observation", "state"], expected)


def test_a_plain_pickle_attaches_too() -> None:
    buffer = make_buffer()
    other = pickle.loads(pickle.dumps(buffer))  # noqa: S301 - our own bytes
    other.write(2, 0, make_episode(4, seed=3))
    assert buffer.info(2).seed == 3


def test_numbers_that_are_not_finite_are_found_and_placed() -> None:
    episode = make_episode(6, seed=11, cut=2)
    episode.check_finite()
    episode.frames[("observation", "state")][1][1, 2] = torch.inf
    with pytest.raises(SimulationError, match="observation/state is not finite at step 3 of the episode with seed 11"):
        episode.check_finite()


def _count(buffer: SharedBuffer, batches: int, barrier: Any) -> None:
    slot = ReaderSlot(buffer)
    barrier.wait()
    for _ in range(batches):
        slot.add(3, 0)


def test_no_sample_is_lost_or_counted_twice_between_processes() -> None:
    buffer, context = make_buffer(), mp.get_context("fork")
    own = ReaderSlot(buffer)
    for _ in range(3):  # processes that come and go: later ones take over the slots of ended ones
        barrier = context.Barrier(4)
        processes = [context.Process(target=_count, args=(buffer, 2000, barrier)) for _ in range(4)]
        for process in processes:
            process.start()
        for _ in range(500):
            own.add(7, 0)
        for process in processes:
            process.join()
    assert buffer.samples == 3 * (4 * 2000 * 3 + 500 * 7)
    assert np.count_nonzero(buffer.owners) <= 5


class _Slow(np.ndarray):
    """An array from which other threads get their turn whenever a number is read."""

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        time.sleep(1e-4)
        return value


def test_readers_of_one_process_share_a_slot_and_lose_nothing() -> None:
    buffer = make_buffer()
    buffer.readers = buffer.readers.view(_Slow)
    slots, keys = [ReaderSlot(buffer) for _ in range(4)], []

    def count(slot: ReaderSlot) -> None:
        for _ in range(50):
            slot.add(3, 0)
            keys.append(slot.new_stream(0).spawn_key)

    threads = [threading.Thread(target=count, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.count_nonzero(buffer.owners) == 1
    assert buffer.samples == 4 * 50 * 3
    assert len(set(keys)) == 4 * 50


def test_random_streams_of_readers_differ() -> None:
    buffer = make_buffer()
    slot = ReaderSlot(buffer)
    keys = {slot.new_stream(0).spawn_key for _ in range(5)}
    assert len(keys) == 5
