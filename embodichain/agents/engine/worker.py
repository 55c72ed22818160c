"""A simulation worker: open the source, tell its layout, then write episodes into the rows it owns."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

import torch

from embodichain.agents.datasets.frames import Episode, EpisodeSource, FrameLayout
from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.refill import RefillPolicy, make_refill
from embodichain.agents.engine.shared_buffer import Control, Ints, SharedBuffer, State, Work
from embodichain.agents.engine.sources import open_source
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.shared_memory import Segment
from embodichain.errors import ConfigError

_IDLE_SECONDS = 0.002


def run(connection: socket.socket, parent: int, job: dict[str, Any]) -> int:
    """Do a worker's job until the engine stops; report what went wrong and return 1 if anything did."""
    torch.set_num_threads(1)
    worker = int(job["worker"])
    try:
        cfg = OnlineDataEngineCfg.from_dict(job["cfg"])
        source = open_source(cfg, worker, int(job["incarnation"]))
        try:
            buffer = _join(connection, source)
            Worker(cfg, worker, source, buffer, parent).loop()
        finally:
            source.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine must hear of it
        _send(connection, {"event": "failed", "report": FailureReport.of_exception(worker, error).to_json()})
        return 1
    return 0


class Worker:
    """Writes the episodes of a source into the rows of one worker, as fast as the refill policy wants them."""

    def __init__(
        self, cfg: OnlineDataEngineCfg, worker: int, source: EpisodeSource, buffer: SharedBuffer, parent: int
    ) -> None:
        self._index = worker
        self._source = source
        self._buffer = buffer
        self._parent = parent
        self._rows = buffer.rows_of(worker)
        self._record: Ints = buffer.workers[worker]
        self._wanted = Selection(cfg.check().only_success, self._record)
        self._refill: RefillPolicy = make_refill(cfg, buffer, worker)

    def loop(self) -> None:
        """Simulate while episodes are wanted, sleep while they are not, until the engine stops."""
        while self._engine_lives():
            self._record[Work.HEARTBEAT] = time.monotonic_ns()
            wanted = self._refill.wants_episode()
            self._record[Work.IDLE] = not wanted
            if not wanted:
                time.sleep(_IDLE_SECONDS)
                continue
            for episode in self._source.advance():
                self.take(episode)

    def _engine_lives(self) -> bool:
        state = self._buffer.control[Control.STATE]
        # The kernel kills us with our parent; asking as well costs nothing and covers machines where it cannot.
        return state in (State.STARTING, State.RUNNING) and os.getppid() == self._parent

    def take(self, episode: Episode) -> None:
        """Count a finished episode and store it if it is wanted."""
        if self._wanted.takes(episode):
            row = self._rows[int(self._record[Work.WRITTEN]) % len(self._rows)]
            self._buffer.write(row, self._index, episode)
            self._record[Work.WRITTEN] += 1


class Selection:
    """Counts finished episodes and tells which of them are to be stored."""

    def __init__(self, only_success: bool, record: Ints) -> None:
        self._only_success, self._record = only_success, record

    def takes(self, episode: Episode) -> bool:
        """Count an episode, after a look at its numbers; tell whether it is wanted."""
        episode.check_finite()
        record = self._record
        record[Work.FINISHED] += 1
        record[Work.FRAMES] += episode.length
        if episode.success is not None:
            record[Work.JUDGED] += 1
            record[Work.SUCCEEDED] += int(episode.success)
        elif self._only_success:
            raise ConfigError("only_success: the episodes do not say whether they succeeded", "action_config")
        return not self._only_success or bool(episode.success)


def _join(connection: socket.socket, source: EpisodeSource) -> SharedBuffer:
    """Tell the engine what frames look like, and map the buffer it answers with."""
    _send(connection, {"event": "layout", "layout": source.layout.to_json(), "max_steps": source.max_steps})
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
    if not descriptors:
        raise ConnectionAbortedError("the engine hung up before it sent its buffer")
    terms = json.loads(message)
    segment = Segment(descriptors[0], int(terms["nbytes"]))
    return SharedBuffer(
        segment, FrameLayout.from_json(terms["layout"]), terms["num_rows"], terms["max_steps"], terms["num_workers"]
    )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):
        pass  # nobody listens any more: the engine is gone, and so are we in a moment
