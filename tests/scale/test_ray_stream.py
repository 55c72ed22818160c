"""Streaming from a Ray cluster: the same episodes as from local workers, and nodes that are killed and come back."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_envs import check_chunks, gym_config, stream_settings

from embodichain.agents.datasets.frames import Episode, FrameLayout, Leaf
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.sources import open_source
from embodichain.agents.engine.worker import BatchWriter
from embodichain.errors import ClusterError, ConfigError, SimulationError

SETTINGS = {"start_timeout": 150.0, "worker_timeout": 60.0, "refill_threshold": 4}


def stream(cluster: Any, **changes: Any) -> OnlineDataEngine:
    settings = stream_settings(workers="ray", address=cluster.address, **{**SETTINGS, **changes})
    return OnlineDataEngine(OnlineDataEngineCfg(**settings))


def sample_until(engine: OnlineDataEngine, condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        check_chunks(engine.sample_batch(32, 4))
        assert time.monotonic() < deadline, f"waited in vain: {engine.worker_stats()}"
        time.sleep(0.01)


def content(engine: OnlineDataEngine) -> list[tuple[Any, ...]]:
    infos = [engine.episode_info(row) for row in range(engine.buffer_size)]
    rows = engine.shared_buffer.clone()
    return [
        (i.seed, i.worker, i.length, i.success, i.policy_version, {k: rows[k][i.row, : i.length] for k in _keys(rows)})
        for i in infos
    ]


def _keys(rows: Any) -> list[Any]:
    return sorted(rows.keys(include_nested=True, leaves_only=True), key=str)


def test_a_batch_carries_episodes_as_they_are() -> None:
    layout = FrameLayout(
        (
            Leaf(("observation", "image"), torch.uint8, (3, 5)),
            Leaf(("action",), torch.bfloat16, (2,)),
            Leaf(("reward",), torch.float32, ()),
            Leaf(("terminated",), torch.bool, ()),
        )
    )
    generator, writer = torch.Generator().manual_seed(1), BatchWriter(layout)

    def episode(pieces: list[int], seed: int, success: bool | None) -> Episode:
        frames = {
            leaf.key: tuple((torch.rand((n, *leaf.shape), generator=generator) * 2).to(leaf.dtype) for n in pieces)
            for leaf in layout.leaves
        }
        return Episode(frames, sum(pieces), seed, success, policy_version=7)

    given = [episode([3], 5, True), episode([2, 4], 2**61, None), episode([1], -1, False)]
    for one in given:
        writer.add(one)
    writer.counts[2] = 9
    batch = writer.take()
    assert len(writer) == 0
    assert writer.counts.sum() == 0
    assert batch.counts[2] == 9
    batch.data.flags.writeable = False  # as it comes out of the object store
    for before, after in zip(given, batch.episodes(layout), strict=True):
        assert (before.length, before.seed, before.success) == (after.length, after.seed, after.success)
        assert after.policy_version == 7
        for key, pieces in before.frames.items():
            assert torch.equal(torch.cat(pieces), after.frames[key][0])


def test_a_local_engine_has_no_address() -> None:
    with pytest.raises(ConfigError, match="address"):
        OnlineDataEngineCfg(**stream_settings(address="auto")).check()


def test_one_worker_writes_what_a_local_one_writes(cluster: Any) -> None:
    same = {"gym_config": gym_config(pixels=4), "seed": 3, "refill_threshold": 10**6}
    with stream(cluster, **same) as engine:
        there, stats = content(engine), engine.stats()
    with OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(**same))) as engine:
        here, local_stats = content(engine), engine.stats()
    for a, b in zip(there, here, strict=True):
        assert a[:5] == b[:5]
        assert all(torch.equal(a[5][key], b[5][key]) for key in b[5])
    assert stats.episodes_written == local_stats.episodes_written
    assert stats.success_rate == local_stats.success_rate


def test_a_killed_node_costs_what_is_in_flight_and_is_taken_back(cluster: Any) -> None:
    with stream(cluster, num_workers=2, max_restarts=0) as engine:
        sample_until(engine, lambda: all(w.episodes_written > 16 for w in engine.worker_stats()))
        before = {w.worker: w for w in engine.worker_stats()}
        assert {w.state for w in before.values()} == {"running"}
        cluster.kill()
        sample_until(engine, lambda: engine.stats().restarts >= 1)
        waiting = [w.worker for w in engine.worker_stats() if w.restarts]
        assert len(waiting) == 1
        lonely = 1 - waiting[0]

        written = engine.stats().episodes_written
        sample_until(engine, lambda: engine.stats().episodes_written > written + 3 * engine.buffer_size)
        assert {engine.episode_info(row).worker for row in range(engine.buffer_size)} == {lonely}

        cluster.add()
        back = engine.worker_stats()[waiting[0]].episodes_written
        sample_until(engine, lambda: engine.worker_stats()[waiting[0]].episodes_written > back + 16)
        after = engine.worker_stats()
        assert [w.state for w in after] == ["running", "running"]
        assert after[lonely].restarts == 0
        assert after[lonely].pid == before[lonely].pid
        replayed(engine)


def replayed(engine: OnlineDataEngine) -> None:
    """Assert that an episode can be made again from what its row says about it."""
    env = open_source(engine.cfg.replace(workers="local", address=None)).env  # type: ignore[attr-defined]
    rows = engine.shared_buffer
    for row in range(3):
        info, first = engine.episode_info(row), rows["observation", "state"][row, 0].clone()
        if engine.episode_info(row) == info:
            seeds = torch.full((env.num_envs,), info.seed)
            assert torch.equal(env.reset(seed=seeds)[0]["state"][0], first)
    env.close()


def test_crashed_workers_are_replaced_and_then_given_up(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = gym_config(kinds=["exit", "nan"], after=200, folder=str(tmp_path))
    with stream(cluster, gym_config=faulty, max_restarts=1) as engine:
        with pytest.raises(Exception, match="not finite") as raised:
            sample_until(engine, lambda: False)
        assert isinstance(raised.value.__cause__, SimulationError)
        assert engine.stats().restarts == 1
    assert "replacing it (1 of 1)" in caplog.text
    nothing_of_ray_is_left()


def nothing_of_ray_is_left() -> None:
    """Assert that Ray is shut down and none of its objects is there: a forked process that collects one is aborted."""
    import ray

    assert not ray.is_initialized()
    assert not [thing for thing in gc.get_objects() if type(thing) is ray.actor.ActorHandle]
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_slow_worker_does_not_hold_up_the_other(cluster: Any, tmp_path: Path) -> None:
    slow = {**gym_config(num_envs=4, folder=str(tmp_path)), "id": "ray_envs:OneSlow-v0"}
    changes: dict[str, Any] = {"gym_config": slow, "trusted_modules": ["ray_envs"], "num_workers": 2}
    with stream(cluster, **changes) as engine:
        sample_until(engine, lambda: all(w.state == "running" for w in engine.worker_stats()))
        before = [w.episodes_written for w in engine.worker_stats()]

        def since() -> list[int]:
            return sorted(w.episodes_written - b for w, b in zip(engine.worker_stats(), before, strict=True))

        sample_until(engine, lambda: since()[1] >= 50)
        assert since()[0] < 10


def test_a_cluster_without_room_is_an_error(cluster: Any) -> None:
    impossible = stream(cluster, placement={"num_cpus": 64}, start_timeout=1.0)
    with pytest.raises(ClusterError, match="no node of the cluster had room"):
        impossible.start()
