"""Refill policies: how many episodes the samples of all readers ask for."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from embodichain.agents.datasets.frames import FrameLayout, Leaf
from embodichain.agents.engine import OnlineDataEngineCfg
from embodichain.agents.engine.reader import ReaderSlot, StreamReader
from embodichain.agents.engine.shared_buffer import Control, SharedBuffer, State, Work
from embodichain.agents.engine.worker import RefillPolicy
from embodichain.agents.processes.failure import FailureReport
from embodichain.errors import ConfigError, StreamStalledError, WorkerError


def make_buffer(rows: int = 8, workers: int = 2) -> SharedBuffer:
    return SharedBuffer(FrameLayout((Leaf(("action",), torch.float32, (1,)),)), rows, 4, workers)


def threshold(buffer: SharedBuffer, worker: int) -> RefillPolicy:
    """Return a policy that fills the buffer again after 100 samples."""
    return RefillPolicy(OnlineDataEngineCfg(refill_threshold=10, buffer_size=10), buffer, worker)


def continuous(buffer: SharedBuffer, worker: int) -> RefillPolicy:
    """Return a policy that writes an episode for every 10 samples."""
    cfg = OnlineDataEngineCfg(refill="continuous", refill_threshold=10, buffer_size=buffer.num_rows)
    return RefillPolicy(cfg, buffer, worker)


def limited(buffer: SharedBuffer, timeout: float) -> StreamReader:
    """Return a reader that may draw 2 samples per written episode."""
    buffer.control[Control.STATE] = State.RUNNING
    settings = {"refill": "continuous", "refill_threshold": 1, "max_samples_per_episode": 2.0}
    return StreamReader(buffer, OnlineDataEngineCfg.from_dict({**settings, "worker_timeout": timeout}))


def run(policy: RefillPolicy, buffer: SharedBuffer, worker: int = 0) -> int:
    """Write as many episodes as the policy wants at this moment and return their number."""
    written = 0
    while policy.episodes_due() and written < 1000:
        buffer.workers[worker, Work.WRITTEN] += 1
        written += 1
    return written


def test_threshold_fills_once_then_at_every_threshold() -> None:
    buffer = make_buffer()
    reader, policy = ReaderSlot(buffer), threshold(buffer, 0)
    assert run(policy, buffer) == 4
    reader.add(99, 0)
    assert run(policy, buffer) == 0
    reader.add(1, 0)
    assert run(policy, buffer) == 4
    reader.add(100, 0)
    assert run(policy, buffer) == 4


def test_threshold_requests_during_a_fill_collapse_into_one() -> None:
    buffer = make_buffer()
    reader, policy = ReaderSlot(buffer), threshold(buffer, 0)
    run(policy, buffer)
    reader.add(150, 0)
    assert policy.episodes_due()
    reader.add(1000, 0)  # while the fill is under way
    assert run(policy, buffer) == 4 + 4
    assert run(policy, buffer) == 0


def test_a_replacement_finishes_the_fill_that_was_under_way() -> None:
    buffer = make_buffer()
    threshold(buffer, 1)
    buffer.workers[1, Work.WRITTEN] = 3
    assert run(threshold(buffer, 1), buffer, worker=1) == 1


def test_continuous_writes_one_episode_per_so_many_samples() -> None:
    buffer = make_buffer()
    reader = ReaderSlot(buffer)
    policies = [continuous(buffer, worker) for worker in range(2)]
    assert [run(policy, buffer, worker) for worker, policy in enumerate(policies)] == [4, 4]
    total = 0
    for _ in range(30):
        reader.add(7, 0)
        total += sum(run(policy, buffer, worker) for worker, policy in enumerate(policies))
    assert total == pytest.approx(30 * 7 / 10, abs=2)


def test_continuous_forgets_debts_beyond_one_buffer() -> None:
    buffer = make_buffer()
    reader, policy = ReaderSlot(buffer), continuous(buffer, 0)
    run(policy, buffer)
    reader.add(100_000, 0)
    assert run(policy, buffer) == 4
    reader.add(20, 0)
    assert run(policy, buffer) == 1


def test_a_limited_reader_waits_for_the_episode_it_needs() -> None:
    buffer = make_buffer()
    buffer.workers[0, Work.WRITTEN] = 8
    reader, limiter = ReaderSlot(buffer), limited(buffer, timeout=30)
    limiter.prepare(16, 1)
    reader.add(16, 0)
    writer = threading.Timer(0.2, lambda: buffer.workers[0].__setitem__(Work.WRITTEN, 9))
    writer.start()
    limiter.prepare(2, 1)
    assert buffer.episodes_written == 9
    writer.join()


def test_a_limit_that_can_never_be_satisfied_says_so_at_once() -> None:
    buffer = make_buffer()
    started = time.monotonic()
    with pytest.raises(StreamStalledError, match=r"a batch of 17 can never be drawn: .* allow 16 at a time"):
        limited(buffer, timeout=60).prepare(17, 1)
    assert time.monotonic() - started < 30


def test_a_limited_reader_gives_up_with_the_numbers_when_nobody_writes() -> None:
    buffer = make_buffer()
    with pytest.raises(StreamStalledError, match="the workers wrote 0 in that time"):
        limited(buffer, timeout=0.1).prepare(2, 1)


def test_a_waiting_reader_hears_of_a_failure() -> None:
    buffer = make_buffer()
    reader = limited(buffer, timeout=60)
    failure = threading.Timer(0.2, buffer.fail, [FailureReport(0, "it failed").to_json()])
    failure.start()
    with pytest.raises(WorkerError, match="it failed"):
        reader.prepare(2, 1)
    failure.join()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"refill": "continuous", "max_samples_per_episode": 20.0}, "below refill_threshold"),
        ({"max_samples_per_episode": 100.0}, "continuous"),
        ({"num_workers": 20}, "buffer_size"),
        ({"gym_config": {}}, "gym_config"),
        ({"action_config": {"source": "policy"}}, "checkpoint"),
        ({"action_config": {"source": "experts"}}, "source"),
        ({"action_config": {"only_sucess": True}}, "only_success"),
        ({"buffer_size": 0}, "buffer_size"),
        ({"refill_threshold": 0}, "refill_threshold"),
    ],
)
def test_contradicting_settings_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OnlineDataEngineCfg.from_dict({"gym_config": {"id": "PushCubeRL"}, **changes}).check()
