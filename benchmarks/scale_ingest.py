"""How much one engine can take in: batches of episodes from a Ray worker's memory to the rows of the shared buffer.

A worker that does nothing but send the same batch again and again, on the same machine: what is measured is the object
store, Ray's messages and the engine's writing, without any simulation.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from benchmarks.timing import cores
from embodichain.agents.datasets.frames import FrameLayout
from embodichain.agents.engine import OnlineDataEngineCfg
from embodichain.agents.engine.shared_buffer import SharedBuffer
from embodichain.agents.engine.worker import EpisodeBatch, StreamWorker
from embodichain.agents.processes.ray_backend import load_ray

_DEPTH = 2


class Sender:
    """Simulates one batch and sends it whenever it is asked."""

    def __init__(self, cfg: dict[str, Any], episodes: int) -> None:
        worker = StreamWorker({"sys_path": [], "worker": 0, "incarnation": 0, "cfg": cfg})
        self._layout = worker.open()["layout"]
        self._batch: EpisodeBatch = worker.work(episodes, 600.0)["batch"]

    def layout(self) -> Any:
        """Return what frames look like."""
        return self._layout

    def batch(self) -> EpisodeBatch:
        """Return the batch."""
        return self._batch


def ingest(cfg: OnlineDataEngineCfg, episodes: int, seconds: float) -> dict[str, Any]:
    """Take in batches of so many episodes; return bytes per episode, and episodes and megabytes per second."""
    ray = load_ray()
    sender = ray.remote(Sender).options(num_cpus=1).remote(cfg.replace(workers="local").to_dict(), episodes)
    layout = FrameLayout.from_json(ray.get(sender.layout.remote()))
    buffer = SharedBuffer(layout, cfg.buffer_size, cfg.max_episode_steps, 1)
    awaited = deque(sender.batch.remote() for _ in range(_DEPTH))
    row = count = size = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or not count:
        batch: EpisodeBatch = ray.get(awaited.popleft())
        awaited.append(sender.batch.remote())
        for episode in batch.episodes(layout):
            buffer.write(row, 0, episode)
            row = (row + 1) % buffer.num_rows
        count += len(batch.headers)
        size += batch.data.size
    elapsed = time.perf_counter() - begin
    ray.kill(sender)
    return {
        "bytes_per_step": layout.nbytes,
        "bytes_per_episode": size // count,
        "episodes_per_second": count / elapsed,
        "megabytes_per_second": size / elapsed / 1e6,
        "cores": cores(),
    }
