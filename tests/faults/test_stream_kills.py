"""Writers and readers of a stream that are killed at random: no window is torn, no process and no memory is left.

``python -m tests.faults.test_stream_kills 500 200`` does the same for longer: so many writers, so many readers.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing as mp
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_envs import check_chunks, gym_config, stream_settings

from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.reader import StreamReader
from embodichain.agents.engine.shared_buffer import Control, SharedBuffer, State
from embodichain.agents.processes import pool
from embodichain.errors import EngineStateError
from tests.faults.test_stream_torn import BATCH, CHUNK, LAYOUT, ROWS, STEPS, Stamper
from tests.programs import suspend

_CONTEXT = mp.get_context("fork")
_TORN = 3
"""Exit code of a reader that was given a torn window."""
_READ = 1000
"""Windows that are read at least."""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def kill_one(
    processes: list[Any], start: Callable[[], Any], generator: random.Random, when: Callable[[], bool] = lambda: True
) -> None:
    """Kill one of some processes at any time at which something is so, make sure that it had done nothing wrong, and
    start another."""
    time.sleep(generator.uniform(0.0, 0.02))
    victim = processes.pop(generator.randrange(len(processes)))
    suspend(victim.pid)
    while not when():
        os.kill(victim.pid, signal.SIGCONT)
        time.sleep(generator.uniform(0.0, 0.002))
        suspend(victim.pid)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    processes.append(start())


def end(processes: list[Any]) -> None:
    for process in processes:
        process.join(120)
        assert process.exitcode == 0


# --- writers that do nothing but write ------------------------------------------------------------------------------


def _write(buffer: SharedBuffer, first: int) -> None:
    torch.set_num_threads(1)
    stamper = Stamper(buffer)
    stamper.count = first
    while buffer.control[Control.STATE] == State.RUNNING:
        stamper.write(stamper.count % ROWS)


def _read(buffer: SharedBuffer) -> None:
    torch.set_num_threads(1)
    reader = StreamReader(buffer, OnlineDataEngineCfg(max_episode_steps=STEPS))
    try:
        while True:
            batch = reader.sample(BATCH, CHUNK, reuse_outputs=True)
            flat = [batch[key].reshape(BATCH, -1) for key in buffer.frames]
            stamp = flat[0][:, :1]
            if not all(bool((value == stamp.to(value.dtype)).all()) for value in flat) or bool((stamp >= 251).any()):
                os._exit(_TORN)
    except EngineStateError:
        return


def attack_buffer(writer_kills: int, reader_kills: int) -> int:
    """Kill processes that do nothing but write, or read; return how many windows were read meanwhile. One writer at
    least is killed in the middle of a write."""
    generator, torn = random.Random(writer_kills), [0]
    buffer = SharedBuffer(LAYOUT, ROWS, STEPS, 1)
    stamper = Stamper(buffer)
    for row in range(ROWS):
        stamper.write(row)
    buffer.control[Control.STATE] = State.RUNNING

    def start(target: Callable[..., None], *args: Any) -> Any:
        process = _CONTEXT.Process(target=target, args=(buffer, *args))
        process.start()
        return process

    def torn_rows() -> int:
        return int((buffer.sequence % 2 == 1).sum())

    def start_writer() -> Any:
        torn.append(torn_rows())  # nobody writes now: they were left by the one that was killed
        before = buffer.episodes_written
        process = start(_write, generator.randrange(10_000))
        wait_for(lambda: buffer.episodes_written > before + 2)
        return process

    def start_reader() -> Any:
        before = buffer.samples
        process = start(_read)
        wait_for(lambda: buffer.samples > before + BATCH)
        return process

    writers, readers = [start_writer()], [start_reader(), start_reader()]
    victims = ["writer"] * writer_kills + ["reader"] * reader_kills
    generator.shuffle(victims)
    for victim in victims:
        if victim == "writer":
            kill_one(writers, start_writer, generator, when=lambda: any(torn) or torn_rows() > 0)
        else:
            kill_one(readers, start_reader, generator)
    assert any(torn)
    wait_for(lambda: buffer.samples > _READ)
    buffer.control[Control.STATE] = State.STOPPED
    end([*writers, *readers])
    return buffer.samples


# --- a whole engine -------------------------------------------------------------------------------------------------


def _sample(engine: OnlineDataEngine) -> None:
    torch.set_num_threads(1)
    try:
        while True:
            try:
                check_chunks(engine.sample_batch(16, 4))
            except AssertionError:
                os._exit(_TORN)
    except EngineStateError:
        return


def attack_engine(writer_kills: int, reader_kills: int) -> OnlineDataEngine:
    """Kill simulation workers of an engine, and processes that sample from it; return it, stopped."""
    generator = random.Random(reader_kills)
    environment = gym_config(num_envs=4, pixels=32)
    settings = stream_settings(gym_config=environment, refill_threshold=1, num_workers=2, max_restarts=10_000)
    engine = OnlineDataEngine(OnlineDataEngineCfg(**settings))
    pids: set[int] = set()

    def start_reader() -> Any:
        before = engine.stats().samples
        process = _CONTEXT.Process(target=_sample, args=(engine,))
        process.start()
        wait_for(lambda: engine.stats().samples > before + 16)
        return process

    with engine:
        readers = [start_reader(), start_reader()]
        victims = ["writer"] * writer_kills + ["reader"] * reader_kills
        generator.shuffle(victims)
        for victim in victims:
            if victim == "reader":
                kill_one(readers, start_reader, generator)
                continue
            before, restarts = engine.stats().episodes_written, engine.stats().restarts
            time.sleep(generator.uniform(0.0, 0.05))
            wait_for(lambda: len(engine.worker_pids) == 2)
            pid = generator.choice(engine.worker_pids)
            pids.update(engine.worker_pids)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda restarts=restarts: engine.stats().restarts > restarts)  # type: ignore[misc]
            wait_for(lambda before=before: engine.stats().episodes_written > before)  # type: ignore[misc]
        assert engine.stats().restarts == writer_kills
        wait_for(lambda: engine.stats().samples > _READ)
        pids.update(engine.worker_pids)
    end(readers)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    return engine


def attack(writer_kills: int, reader_kills: int) -> dict[str, int]:
    """Do both, and look at what is left; return how many windows were read."""
    names, children, mapped = set(os.listdir("/dev/shm")), len(mp.active_children()), _mapped_segments()
    read = {"buffer": attack_buffer(writer_kills, reader_kills)}
    engine = attack_engine(writer_kills, reader_kills)
    read["engine"] = engine.stats().samples
    assert len(mp.active_children()) == children
    assert not [name for name in set(os.listdir("/dev/shm")) - names if f"_{os.getpid()}_" in name]
    del engine
    assert _mapped_segments() <= mapped  # other tests of this process may have left some
    return read


def _mapped_segments() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:embodichain ")


@pytest.mark.slow
def test_processes_that_are_killed_at_random_leave_nothing_torn_and_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "_FIRST_PAUSE", 0.0)  # a worker that was killed often is replaced after a pause
    with caplog.at_level(logging.ERROR):
        read = attack(6, 3)
    assert min(read.values()) > _READ


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    pool._FIRST_PAUSE = 0.0
    print(attack(int(sys.argv[1]), int(sys.argv[2])))
