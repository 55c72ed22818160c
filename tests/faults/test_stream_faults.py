"""Workers that break, hang, lie and are killed; parents that die; all with real processes."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stream_envs import check_chunks, gym_config, stream_settings
from torch.utils.data import DataLoader

from embodichain.agents.datasets import OnlineDataset
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.errors import ClusterError, EngineStateError, SimulationError, StreamStalledError, WorkerError
from tests.programs import Program, descendants, ends_soon, is_alive, start_program, suspend, wait_until

TESTS = Path(__file__).parents[1]


def faulty(folder: Path, kinds: list[str], after: int = 120) -> dict[str, Any]:
    return gym_config(num_envs=4, kinds=kinds, after=after, folder=str(folder))


def sample_until(engine: OnlineDataEngine, condition: Callable[[], bool], seconds: float = 120.0) -> int:
    """Sample without a break until something has happened; return how many batches that took."""
    deadline, batches = time.monotonic() + seconds, 0
    while not condition():
        check_chunks(engine.sample_batch(32, 4))
        batches += 1
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)  # the workers need the processor more
    return batches


def test_workers_that_raise_hang_lie_or_exit_are_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = [
        "the simulation broke on purpose",
        "hung: it has not come back from a step for 4 s",
        "observation/state is not finite at step",
        "ended with exit code 7",
    ]
    environment = faulty(tmp_path, ["raise", "hang", "nan", "exit"])
    settings = stream_settings(
        gym_config=environment, refill_threshold=1, num_workers=2, max_restarts=20, worker_timeout=4.0
    )
    with caplog.at_level(logging.WARNING), OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        sample_until(engine, (tmp_path / "fault1").exists)  # one hangs
        before_that = caplog.text.count(told[1])
        meanwhile = sample_until(engine, lambda: caplog.text.count(told[1]) > before_that)
        assert meanwhile > 3  # nobody waits for it
        sample_until(engine, lambda: all(words in caplog.text for words in told) and engine.stats().samples > 100 * 32)
        assert engine.stats().restarts >= 4
        # Every worker writes again, and all rows hold whole episodes.
        before = [engine.episode_info(row).sequence for row in range(16)]
        sample_until(engine, lambda: all(engine.episode_info(row).sequence > before[row] for row in range(16)))


def test_a_killed_worker_is_replaced_and_its_rows_stay(caplog: pytest.LogCaptureFixture) -> None:
    settings = stream_settings(refill_threshold=1, max_restarts=1)
    with caplog.at_level(logging.WARNING), OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        sample_until(engine, lambda: engine.stats().refills > 2)
        (pid,) = engine.worker_pids
        suspend(pid)
        torn = [row for row in range(16) if engine._sampling().buffer.sequence[row] % 2 == 1]
        assert len(torn) <= 1  # the one it may have been writing
        os.kill(pid, signal.SIGKILL)
        sample_until(engine, lambda: engine.stats().restarts == 1)
        rows = [engine.shared_buffer["reward"][row, 0].item() for row in range(16)]
        assert all(engine.episode_info(row).length >= 5 for row in range(16) if row not in torn)
        written = engine.stats().episodes_written
        sample_until(engine, lambda: engine.stats().episodes_written > written + 32)
        assert engine.worker_pids != [pid]
        assert len({engine.episode_info(row).seed for row in range(16)}) == 16
        assert rows != [engine.shared_buffer["reward"][row, 0].item() for row in range(16)]
    assert "was killed by SIGKILL" in caplog.text


def test_a_worker_that_was_stopped_together_with_the_engine_is_not_held_to_hang(tmp_path: Path) -> None:
    """What a paused container or a suspended machine does to both, for longer than worker_timeout."""
    awake = tmp_path / "awake"
    parent = run_script(
        "import time\nfrom pathlib import Path\n"
        "engine = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(refill_threshold=1, worker_timeout=5.0)))\n"
        "engine.start()\nprint(*engine.worker_pids, flush=True)\n"
        "def sample(): check_chunks(engine.sample_batch(32, 4)), time.sleep(0.01)\n"
        f"while not Path({str(awake)!r}).exists(): sample()\n"
        "before = engine.stats().refills\n"
        "while engine.stats().refills < before + 3: sample()\n"
        "print(engine.stats().restarts, flush=True)\n"
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    for pid in (parent.pid, worker):
        suspend(pid)
    time.sleep(7.0)
    os.kill(parent.pid, signal.SIGCONT)
    time.sleep(0.5)  # the engine wakes first, and sees a worker that has not moved for seven seconds
    os.kill(worker, signal.SIGCONT)
    awake.touch()
    words, errors = parent.communicate(timeout=120)
    assert words.split() == ["0"], errors


def _sample_until_failure(engine: OnlineDataEngine, pipe: Any) -> None:
    try:
        while True:
            engine.sample_batch(8, 3)
            time.sleep(0.001)
    except WorkerError as error:
        pipe.send((str(error), type(error.__cause__).__name__))


def test_a_worker_that_keeps_failing_is_reported_to_every_process(tmp_path: Path) -> None:
    """In a program of its own: this one may have threads that hang, and a fork could keep a lock of theirs."""
    parent = run_script(
        "from pathlib import Path\n"
        "from tests.faults.test_stream_faults import report_to_every_process\n"
        f"report_to_every_process(Path({str(tmp_path)!r}))\n"
    )
    _, errors = parent.communicate(timeout=240)
    assert parent.returncode == 0, errors


def report_to_every_process(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    settings = stream_settings(gym_config=faulty(tmp_path, ["raise"] * 9), refill_threshold=1, max_restarts=1)
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        ours, theirs = context.Pipe()
        reader = context.Process(target=_sample_until_failure, args=(engine, theirs))
        reader.start()
        loader = DataLoader(OnlineDataset(engine, 4, batch_size=8), batch_size=None, num_workers=1)
        with pytest.raises(WorkerError, match=r"(?s)In the worker:.*ZeroDivisionError: the simulation broke"):
            list(loader)
        assert ours.poll(100)  # the engine was not stopped yet: the other process was informed, too
        words, cause = ours.recv()
        assert "stream_envs.py" in words
        assert "worker 0 raised ZeroDivisionError" in words
        assert cause == "ZeroDivisionError"
        reader.join()
        with pytest.raises(WorkerError) as caught:
            engine.sample_batch(8, 3)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert engine.worker_pids == []
        assert engine._sampling().buffer.episodes_written >= 16


def test_a_worker_that_cannot_start_is_replaced_while_another_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = {**gym_config(num_envs=1, folder=str(tmp_path)), "id": "stream_envs:Late-v0"}
    settings = stream_settings(gym_config=late, num_workers=2, max_restarts=1, refill_threshold=1)
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        sample_until(engine, lambda: all(worker.episodes_written for worker in engine.worker_stats()))
        assert engine.stats().restarts == 1
    assert "there is no simulator for a second process" in caplog.text


def test_a_stream_that_is_not_refreshed_any_more_warns_and_then_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The worker lives, but the episodes that are due never come, because none succeeds. Nothing is wrong before."""
    settings = stream_settings(
        gym_config=gym_config(num_envs=4, solves=30),
        action_config={"source": "random", "only_success": True},
        refill_threshold=20,
        worker_timeout=5.0,
    )
    with caplog.at_level(logging.WARNING), OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        time.sleep(6.0)  # nobody samples, so no episode is due
        loader = iter(DataLoader(OnlineDataset(engine, 4, batch_size=8), batch_size=None, num_workers=1))
        check_chunks(next(loader))
        assert not caplog.records
        words = r"worker 0 wrote no episode for \d+ s, although some are due: \d+ episodes finished, 0 of \d\d"
        with pytest.raises(StreamStalledError, match=words):
            sample_until(engine, lambda: False)
        with pytest.raises(StreamStalledError, match=words):
            list(loader)
        assert engine.stats().restarts == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(words, caplog.text)


def test_a_stream_of_slow_episodes_is_not_held_to_stall() -> None:
    """An episode takes longer than worker_timeout, which is about steps."""
    slow = gym_config(num_envs=4, min_steps=12, max_steps=14, step_seconds=0.07)  # 3.4 s and more
    settings = stream_settings(gym_config=slow, buffer_size=4, refill_threshold=1, worker_timeout=3.0)
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        sample_until(engine, lambda: engine.stats().refills > 1)
        assert engine.stats().restarts == 0


def test_a_stream_that_becomes_slow_is_not_held_to_stall() -> None:
    """Episodes were quick, and then take longer than worker_timeout: the worker steps, so it does not stall."""
    slow = gym_config(num_envs=1, min_steps=6, max_steps=6, slow_seconds=0.6, slow_after=48)
    settings = stream_settings(gym_config=slow, buffer_size=4, refill_threshold=1, worker_timeout=3.0)
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        sample_until(engine, lambda: engine.stats().episodes_written >= 8)
        sample_until(engine, lambda: engine.stats().episodes_written >= 10)
        assert engine.stats().restarts == 0


def test_who_samples_is_told_why_the_engine_ended() -> None:
    def cut_off(seconds: float) -> None:
        raise ClusterError("the connection is lost")

    with OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(gym_config=gym_config(num_envs=1)))) as engine:
        engine._supervisor._pool.poll = cut_off  # type: ignore[union-attr,method-assign,assignment]
        with pytest.raises(ClusterError, match="the connection is lost"):
            sample_until(engine, lambda: False)


def test_a_supervisor_that_fails_says_why_wherever_somebody_samples() -> None:
    """Whatever its cause is: here, something that nobody has thought of."""

    def break_down(seconds: float) -> None:
        raise ArithmeticError("nobody has thought of this")

    settings = stream_settings(gym_config=gym_config(num_envs=1))
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        loader = iter(DataLoader(OnlineDataset(engine, 4, batch_size=8), batch_size=None, num_workers=1))
        check_chunks(next(loader))
        engine._supervisor._pool.poll = break_down  # type: ignore[union-attr,method-assign,assignment]
        with pytest.raises(EngineStateError, match="the engine raised ArithmeticError: nobody has thought") as caught:
            sample_until(engine, lambda: False)
        assert isinstance(caught.value.__cause__, ArithmeticError)
        with pytest.raises(EngineStateError, match=r"(?s)raised ArithmeticError: nobody.*In the engine:.*break_down"):
            list(loader)


@pytest.mark.parametrize("rows", [60_000, 2**52])
def test_who_starts_an_engine_without_enough_address_space_is_told_so(rows: int) -> None:
    parent = run_script(
        "import resource, sys\n"
        "size = 4096 * int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (400 << 20),) * 2)\n"
        f"settings = stream_settings(buffer_size={rows}, max_episode_steps=1000)\n"
        "OnlineDataEngine(OnlineDataEngineCfg(**settings)).start()\n"
    )
    _, errors = parent.communicate(timeout=240)
    told = errors.strip().splitlines()[-1]
    assert told.startswith(f"embodichain.errors.SharedMemoryError: a buffer of {rows} episodes x 1000 steps"), errors
    assert ("ulimit -v" in told) == (rows == 60_000)
    assert "Exception in thread" not in errors


def test_a_failure_before_the_first_fill_ends_start(tmp_path: Path) -> None:
    settings = stream_settings(gym_config=faulty(tmp_path, ["nan"] * 9, after=2), max_restarts=0)
    engine = OnlineDataEngine(OnlineDataEngineCfg(**settings))
    with pytest.raises(WorkerError, match="is not finite") as caught:
        engine.start()
    assert isinstance(caught.value.__cause__, SimulationError)


def run_script(body: str) -> Program:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    modules = ("stream_envs", "embodichain.agents.engine", "embodichain.agents.datasets")
    head = "".join(f"from {module} import *\n" for module in modules)
    return start_program("-c", head + body, env={**os.environ, "PYTHONPATH": path})


STREAM = """
from torch.utils.data import DataLoader
engine = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(num_workers=2, refill_threshold=1)))
engine.start()
batches = iter(DataLoader(OnlineDataset(engine, 4, batch_size=32), batch_size=None, num_workers=1))
next(batches)
print(*engine.worker_pids, flush=True)
for batch in batches:
    pass
"""


def test_nothing_is_left_when_the_parent_is_killed() -> None:
    parent = run_script(STREAM)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    everybody = {parent.pid, *descendants(parent.pid)}  # the DataLoader's worker and its helpers, too
    assert len(workers) == 2
    assert everybody > set(workers)
    assert all(is_alive(pid) for pid in workers)
    parent.kill()
    parent.wait()
    outliving = [pid for pid in everybody if not ends_soon(pid)]
    assert not outliving, "a process outlived its parent"
    # torch names its files torch_PID_...; ours have no names at all.
    names = [name for name in os.listdir("/dev/shm") if "embodichain" in name or name.startswith("torch_")]
    assert not [name for name in names if any(f"_{pid}_" in name for pid in everybody)]
    parent.stdout.close()


def test_ctrl_c_during_start_ends_everything_quietly() -> None:
    parent = run_script(
        "engine = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(gym_config=gym_config(step_seconds=0.2))))\n"
        "print('starting', flush=True)\nengine.start()\n"
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    wait_until(lambda: descendants(parent.pid))
    workers = descendants(parent.pid)
    time.sleep(1.0)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=100)
    assert "KeyboardInterrupt" in errors
    assert "fork_server.py" not in errors
    assert all(ends_soon(pid) for pid in workers)
