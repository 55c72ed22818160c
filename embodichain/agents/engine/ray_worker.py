"""A simulation worker in a Ray cluster: it is asked for episodes and answers with batches of them."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import torch

from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.ray_batch import BatchWriter, EpisodeBatch
from embodichain.agents.engine.sources import EpisodeSource, open_source
from embodichain.agents.engine.worker import Selection
from embodichain.agents.processes.failure import FailureReport
from embodichain.errors import EngineStateError
from embodichain.extras import require

MAX_BATCH_BYTES = 64 << 20
"""A batch is sent when it is as large as this, however many episodes were asked for."""


class StreamWorker:
    """What a worker does, as a Ray actor.

    Answers are plain data. An exception becomes a report, because the engine's process cannot be trusted to have what
    it takes to rebuild exceptions of user code.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        """Take the job; nothing heavy happens before ``open``."""
        sys.path += [entry for entry in job["sys_path"] if entry not in sys.path]
        self._job = job
        self._index = int(job["worker"])
        self._source: EpisodeSource | None = None
        self._batch: BatchWriter | None = None
        self._wanted: Selection | None = None

    def place(self) -> dict[str, Any]:
        """Say where the worker is."""
        node = require("ray", extra="ray").get_runtime_context().get_node_id()
        return {"event": "placed", "node_id": node, "node": socket.gethostname(), "pid": os.getpid()}

    def open(self) -> dict[str, Any]:
        """Build the environment and say what its frames look like."""
        if self._source is not None:  # its answer got lost
            return self._opened(self._source)
        try:
            torch.set_num_threads(1)
            cfg = OnlineDataEngineCfg.from_dict(self._job["cfg"])
            source = self._source = open_source(cfg, self._index, int(self._job["incarnation"]))
            self._batch = BatchWriter(source.layout)
            self._wanted = Selection(cfg.check().only_success, self._batch.counts)
            return self._opened(source)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must hear of it
            return self._failed(error)

    def work(self, episodes: int, seconds: float) -> EpisodeBatch | dict[str, Any]:
        """Simulate until there are so many episodes to send, or for so long; answer with those that are finished."""
        source, batch, wanted = self._source, self._batch, self._wanted
        if source is None or batch is None or wanted is None:
            return self._failed(EngineStateError("open() comes before work()"))
        try:
            until = time.monotonic() + seconds
            while len(batch) < episodes and batch.nbytes < MAX_BATCH_BYTES and time.monotonic() < until:
                for episode in source.advance():
                    if wanted.takes(episode):
                        batch.add(episode)
            return batch.take()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must hear of it
            return self._failed(error)

    def _opened(self, source: EpisodeSource) -> dict[str, Any]:
        return {"event": "layout", "layout": source.layout.to_json(), "max_steps": source.max_steps}

    def _failed(self, error: Exception) -> dict[str, Any]:
        return {"event": "failed", "report": FailureReport.of_exception(self._index, error).to_json()}
