"""The engine from outside: real workers, real environments."""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stream_envs import check_chunks, gym_config, stream_settings

from embodichain.agents.datasets.frames import FrameLayout, Leaf
from embodichain.agents.engine.data import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.shared_buffer import WORK_WORDS, SharedBuffer, Work
from embodichain.agents.engine.sources import check_layout, open_source
from embodichain.agents.engine.supervisor import RefreshWatch, Supervisor
from embodichain.envs.registration import make
from embodichain.errors import ConfigError, EngineStateError, StreamStalledError, UnknownNameError, UntrustedModuleError
from tests.programs import wait_until


def rests(engine: OnlineDataEngine) -> bool:
    """Return whether no worker has anything to do, and none has written since the last look."""
    return engine.stats().episodes_per_second == 0 and all(worker.idle for worker in engine.worker_stats())


@pytest.fixture(scope="module")
def engine() -> Iterator[OnlineDataEngine]:
    settings = stream_settings(num_workers=2, refill_threshold=20, gym_config=gym_config(pixels=8))
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        yield engine


def test_every_row_is_filled_when_start_returns(engine: OnlineDataEngine) -> None:
    assert engine.is_init
    assert engine.buffer_size == 16
    assert engine.device == torch.device("cpu")
    infos = [engine.episode_info(row) for row in range(16)]
    assert all(5 <= info.length <= 20 for info in infos)
    assert [info.worker for info in infos] == [0] * 8 + [1] * 8
    assert len({info.seed for info in infos}) == 16
    with pytest.raises(IndexError):
        engine.episode_info(16)


def test_the_shared_buffer_has_the_documented_shape(engine: OnlineDataEngine) -> None:
    buffer = engine.shared_buffer
    assert buffer.batch_size == torch.Size([16, 20])
    assert buffer.is_shared()
    assert buffer["observation", "image"].dtype == torch.uint8
    assert buffer["observation", "image"].shape == (16, 20, 8, 8, 3)
    assert buffer["action"].shape == (16, 20, 2)


def test_chunks_stay_whole_while_the_buffer_is_rewritten(engine: OnlineDataEngine) -> None:
    before = engine.stats()
    deadline = time.monotonic() + 120
    while engine.stats().refills < before.refills + 3:
        for size in (1, 4, 5):
            check_chunks(engine.sample_batch(64, size))
        assert time.monotonic() < deadline


def test_samples_wake_the_workers_and_silence_lets_them_rest(engine: OnlineDataEngine) -> None:
    wait_until(lambda: rests(engine))
    before = engine.stats().episodes_written
    engine.sample_batch(20 * 16, 2)
    wait_until(lambda: engine.stats().episodes_written >= before + 16)
    rows = {engine.episode_info(row).sequence for row in range(16)}
    assert min(rows) >= 4


def test_a_worker_with_nothing_to_do_is_idle(engine: OnlineDataEngine) -> None:
    wait_until(lambda: all(worker.idle for worker in engine.worker_stats()))
    before = engine.worker_stats()
    assert {worker.state for worker in before} == {"running"}
    assert sum(worker.frames for worker in before) == engine.stats().frames > 0
    engine.sample_batch(20 * 16, 2)
    wait_until(lambda: sum(w.frames for w in engine.worker_stats()) > sum(w.frames for w in before))
    wait_until(lambda: all(worker.idle for worker in engine.worker_stats()))


def test_stats_add_up(engine: OnlineDataEngine) -> None:
    before = engine.stats()
    for _ in range(32):
        engine.sample_batch(10, 3)
    stats = engine.stats()
    assert stats.samples == before.samples + 320
    assert stats.samples_per_second > 0
    assert stats.episodes_written >= 16
    assert stats.restarts == 0
    assert stats.success_rate == pytest.approx(0.5, abs=0.25)
    assert stats.mean_age_seconds > 0
    assert 0 <= stats.mean_age_refills < 2


def test_several_threads_sample_at_once(engine: OnlineDataEngine) -> None:
    errors: list[BaseException] = []
    before = engine.stats().samples

    def sample() -> None:
        try:
            for _ in range(100):
                check_chunks(engine.sample_batch(8, 4, reuse_outputs=True))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=sample) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert engine.stats().samples == before + 4 * 100 * 8


def _sample_elsewhere(engine: OnlineDataEngine, pipe: Any) -> None:
    batch = engine.sample_batch(64, 5)
    check_chunks(batch)
    refused = 0
    for verb in (engine.start, engine.stop):
        try:
            verb()
        except EngineStateError:
            refused += 1
    pipe.send((engine.is_init, refused, batch["action"].sum().item()))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_other_processes_sample_but_only_the_creator_stops(engine: OnlineDataEngine, method: str) -> None:
    context = mp.get_context(method)
    before = engine.stats().samples
    ours, theirs = context.Pipe()
    count = 2 if method == "fork" else 1  # the others take seconds to import torch
    processes = [context.Process(target=_sample_elsewhere, args=(engine, theirs)) for _ in range(count)]
    for process in processes:
        process.start()
    sums = set()
    for _ in processes:
        assert ours.poll(180)
        is_init, refused, total = ours.recv()
        assert (is_init, refused) == (True, 2)
        sums.add(total)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(sums) == count  # they draw different chunks
    assert engine.stats().samples == before + 64 * count
    assert all(Path(f"/proc/{pid}").exists() for pid in engine.worker_pids)


def test_an_episode_can_be_traced_and_played_again() -> None:
    """The header's seed starts the same episode in a fresh environment, and its actions lead through it."""
    task = {"id": "PushCubeRL", "num_envs": 4}
    cfg = OnlineDataEngineCfg(buffer_size=4, max_episode_steps=100, state_dim=6, gym_config=task, progress=False)
    cfg = cfg.replace(action_config={"terminate_on_success": True})
    with OnlineDataEngine(cfg) as engine:
        row = max(range(4), key=lambda row: engine.episode_info(row).length)
        info, frames = engine.episode_info(row), engine.shared_buffer[row]
        assert info.success is True
        env = make(task, num_envs=1)
        obs, _ = env.reset(seed=torch.tensor([info.seed]))
        for step in range(info.length):
            for key in (("robot", "qpos"), ("object", "pos")):
                assert torch.equal(obs[key][0], frames["observation", *key][step]), (step, key)
            obs, reward, terminated, _, _ = env.step(frames["action"][step][None])
            assert torch.allclose(reward[0], frames["reward"][step], rtol=1e-5)
        assert bool(terminated[0])
        assert bool(frames["terminated"][info.length - 1])


def test_only_successful_episodes_when_asked() -> None:
    """And, by the way, a config of several hundred kilobytes reaches the worker."""
    environment = gym_config(after=10**9, kinds=["x" * 400_000], folder="")
    settings = stream_settings(gym_config=environment, action_config={"source": "random", "only_success": True})
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        assert all(engine.episode_info(row).success for row in range(16))
        stamps = engine.sample_batch(200, 1)["observation", "state"][:, 0, 0]
        assert (stamps % 2 == 0).all()
        assert engine.stats().success_rate < 1


def test_life_of_an_engine() -> None:
    engine = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings()))
    assert not engine.is_init
    engine.stop()
    for use in (lambda: engine.sample_batch(2, 2), lambda: engine.shared_buffer, engine.stats):
        with pytest.raises(EngineStateError, match="start"):
            use()
    for _ in range(2):  # it can be started again
        engine.start()
        with pytest.raises(EngineStateError, match="already running"):
            engine.start()
        pids = engine.worker_pids
        check_chunks(engine.sample_batch(16, 4))
        engine.stop()
        engine.stop()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        with pytest.raises(EngineStateError, match="stopped"):
            engine.sample_batch(2, 2)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"gym_config": {"id": "PushCubRL"}}, UnknownNameError, "PushCubeRL"),
        ({"state_dim": 7}, ConfigError, r"state_dim: expected 7, but the environment's state has shape \[3\]"),
    ],
)
def test_mistakes_are_told_by_start(changes: dict, error: type[Exception], words: str) -> None:
    engine = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(**changes)))
    with pytest.raises(error, match=words):
        engine.start()
    assert engine.worker_pids == []


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"trusted_modules": []}, UntrustedModuleError, "stream_envs"),
        ({"action_config": {"source": "expert"}}, ConfigError, "has no expert"),
    ],
)
def test_mistakes_are_told_when_a_source_is_opened(changes: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        open_source(OnlineDataEngineCfg(**stream_settings(**changes)))


def test_an_environment_must_fit_the_buffer() -> None:
    layout = FrameLayout((Leaf(("observation", "robot", "qpos"), torch.float32, (6,)),))
    check_layout(OnlineDataEngineCfg(max_episode_steps=20, state_dim=6), layout, max_steps=20)
    with pytest.raises(ConfigError, match=r"(?s)set it to at least 20.*robot/qpos has shape"):
        check_layout(OnlineDataEngineCfg(max_episode_steps=19, state_dim=7), layout, max_steps=20)
    with pytest.raises(ConfigError, match="neither robot/qpos nor state"):
        check_layout(OnlineDataEngineCfg(state_dim=6), FrameLayout(()), max_steps=20)


def test_staging_cuts_episodes_out_of_a_ring() -> None:
    """Episodes of uneven length, across the end of the ring, against the frames as the environment returned them."""
    source = open_source(OnlineDataEngineCfg(**stream_settings(gym_config=gym_config(num_envs=3))))
    seen, seeds = 0, set()
    for _ in range(200):
        for episode in source.advance():
            frames = {key: torch.cat(pieces) for key, pieces in episode.frames.items()}
            stamp, at, length = frames[("observation", "state")].unbind(-1)
            assert episode.length == len(at) == length[0]
            assert at.tolist() == list(range(episode.length))
            assert (stamp == stamp[0]).all()
            assert (frames[("reward",)] == stamp).all()
            assert episode.success == (stamp[0] % 2 == 0)
            assert frames[("terminated",)].tolist() == [False] * (episode.length - 1) + [True]
            seen, seeds = seen + 1, seeds | {episode.seed}
    assert seen == len(seeds) > 30
    source.close()


def test_demonstrations_that_never_succeed_do_not_block_for_ever() -> None:
    supervisor = Supervisor(OnlineDataEngineCfg(start_timeout=0.05))
    buffer = supervisor.buffer = SharedBuffer(FrameLayout(()), 16, 20, 1)
    buffer.workers[0, [Work.WRITTEN, Work.FINISHED, Work.JUDGED, Work.SUCCEEDED]] = (3, 40, 30, 3)
    supervisor._check_first_fill(buffer)
    time.sleep(0.1)
    with pytest.raises(StreamStalledError, match=r"3 of 16 rows .* 40 episodes finished, 3 of 30 with a known"):
        supervisor._check_first_fill(buffer)


@pytest.mark.parametrize(
    ("done", "is_stalled"),
    [
        ({Work.STEPS: 19}, False),  # slow: the first episode cannot have ended yet
        ({Work.STEPS: 61}, True),  # three episodes should have ended
        ({Work.STEPS: 25, Work.FINISHED: 1}, True),  # one has ended, and was not written
    ],
)
def test_who_steps_slowly_does_not_stall(done: dict[Work, int], is_stalled: bool) -> None:
    start = 1000.0
    watch, record = RefreshWatch(4.0, clock=lambda: start), np.zeros(WORK_WORDS, np.int64)
    assert watch.check("worker 0", record, start, 0.0, 20) == ("", False)
    for word, count in done.items():
        record[word] += count
    told, for_good = watch.check("worker 0", record, start + 3.0, 0.0, 20)
    assert "worker 0 wrote no episode for 3 s" in told
    assert not for_good
    told, for_good = watch.check("worker 0", record, start + 6.0, 0.0, 20)
    assert (bool(told), for_good) == (is_stalled, is_stalled)  # one warning is enough


def test_who_does_not_write_while_others_do_is_not_a_stall() -> None:
    now = 1000.0
    watch = RefreshWatch(0.2, clock=lambda: now)
    idle, busy = np.zeros(WORK_WORDS, np.int64), np.zeros(WORK_WORDS, np.int64)
    warnings = []
    for _ in range(100):
        now += 0.01
        idle[Work.FINISHED] += 1
        busy[Work.WRITTEN] += 1
        for who, record in (("worker 1", busy), ("worker 0", idle)):
            told, for_good = watch.check(who, record, now, 0.0, 20)
            assert not for_good
            warnings += [told] if told else []
    assert len(warnings) == 1
    assert warnings[0].startswith("worker 0 wrote no episode")
    told, for_good = watch.check("worker 0", idle, now + 1.0, 0.0, 20)
    assert for_good  # nobody writes any more


def test_continuous_refill_keeps_to_the_ratio() -> None:
    settings = stream_settings(refill="continuous", refill_threshold=10, max_samples_per_episode=20.0)
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        for _ in range(200):
            check_chunks(engine.sample_batch(32, 3))
            stats = engine.stats()
            assert stats.samples <= 20 * stats.episodes_written
        wait_until(lambda: rests(engine))
        # One episode per 10 to 20 samples; the envs that end in the same step as the last one wanted come on top.
        assert 200 * 32 / 20 <= engine.stats().episodes_written <= 16 + 200 * 32 / 10 + 4
        with pytest.raises(StreamStalledError, match="never"):
            engine.sample_batch(321, 3)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from stream_envs import stream_settings
from embodichain.agents.engine.data import OnlineDataEngine, OnlineDataEngineCfg
engine = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings()))
engine.start()
print(*engine.worker_pids, tuple(engine.sample_batch(4, 2).batch_size))
"""


def test_a_script_needs_no_main_guard_and_no_stop() -> None:
    tests = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(tests).parent), os.environ.get("PYTHONPATH", "")]),
    }
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(tests=tests)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert run.returncode == 0, run.stderr
    pid, _, shape = run.stdout.partition(" ")
    assert shape.strip() == "(4, 2)"
    assert not Path(f"/proc/{pid}").exists()
