"""A viewer beside a real training, in processes of their own: attached and detached twenty times, nothing changes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from embodichain.agents.rl.checkpoint import load_checkpoint
from embodichain.agents.rl.train import train_from_config
from embodichain.envs.publishing import PublishedStates
from tests.envs.test_publishing import config, opened, weights

pytestmark = [pytest.mark.extra("viewer"), pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]
_SECONDS = 120.0


def wait(condition: Callable[[], Any], what: str) -> Any:
    """Return what a condition returns once it is true."""
    end = time.monotonic() + _SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {_SECONDS:.0f} s for {what}"
        time.sleep(0.02)
    return found


@contextmanager
def client(address: str) -> Iterator[None]:
    """Watch as a browser does: connect, and tell from where one looks."""
    from viser import _messages
    from viser.infra._messages import msgspec
    from websockets.sync.client import connect

    camera = _messages.ViewerCameraMessage((1, 0, 0, 0), (0, 0, 1), 0.8, 0.1, 9.0, 100, 100, (0, 0, 0), (0, 0, 1))
    version = __import__("viser").__version__
    with connect(address.replace("http", "ws"), subprotocols=[f"viser-v{version}"], max_size=None) as socket:
        socket.send(msgspec.msgpack.encode(camera.as_serializable_dict()))
        yield


def train_on(states: PublishedStates, steps: int = 2) -> None:
    """Wait until the training has made so many steps."""
    before = states.steps
    wait(lambda: states.steps >= before + steps, "steps of the training")


def watched(states: PublishedStates) -> bool:
    return bool(states.header[0])


def size_of(pid: int) -> tuple[int, int]:
    """Return how many files a process has open, and its memory in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE")


def test_a_training_that_was_watched_twenty_times_ends_with_the_same_bits(tmp_path: Path):
    cfg = config(tmp_path / "watched")
    cfg = cfg.replace(trainer=cfg.trainer.replace(iterations=None, max_seconds=300.0))
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    (tmp_path / "tmp").mkdir()
    job = subprocess.Popen(
        [sys.executable, "-m", "embodichain", "train", str(tmp_path / "config.json"), "--viewer"],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"},
        stderr=(tmp_path / "log").open("w"),
        stdout=subprocess.DEVNULL,
    )
    try:
        log = tmp_path / "log"
        address = wait(lambda: re.search(r"viewer: (http://localhost:\d+)", log.read_text()), "the address").group(1)
        folder = wait(lambda: list((tmp_path / "tmp").glob("embodichain_viewer_*/*_*.json")), "states")[0].parent
        (states,) = opened(folder)
        wait(lambda: states.steps > 0, "the training")
        assert states.sequence == 0, "states were copied before anybody watched"
        sizes, failed = [], ""
        for number in range(20):
            before = states.sequence
            try:
                with client(address) if number else wait(lambda: tried(address), "the viewer"):
                    wait(lambda before=before: states.sequence > before + 2, f"states, the {number}. time")
            except OSError as error:
                failed = str(error)
            wait(lambda: not watched(states), f"the viewer to let go, the {number}. time")
            sizes.append(size_of(job.pid))
        assert not failed
        train_on(states)  # it writes what it copied before it learnt that nobody watches
        quiet = states.sequence
        train_on(states, steps=100)
        assert states.sequence == quiet, "states are copied while nobody watches"
        (files, memory), (last_files, last_memory) = sizes[4], sizes[-1]
        assert last_files <= files
        assert last_memory < memory + (4 << 20)
        job.send_signal(signal.SIGINT)
        assert job.wait(_SECONDS) == 130
    finally:
        job.kill()
        job.wait()
    assert not folder.exists()
    (newest,) = sorted((tmp_path / "watched").glob("checkpoints/step_*"))[-1:]
    iterations = load_checkpoint(newest)["trainer"]["iteration"]
    alone = config(tmp_path / "alone")
    train_from_config(alone.replace(trainer=alone.trainer.replace(iterations=iterations)))
    assert weights(tmp_path / "alone") == weights(tmp_path / "watched")


def tried(address: str) -> Any:
    """Return a connection if the viewer serves already."""
    import socket

    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return client(address) if probe.connect_ex((host, int(port))) == 0 else None
