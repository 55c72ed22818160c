"""``OnlineDataEngine``: simulation processes fill a shared buffer, training processes draw chunks from it.

The way of a frame: ``sources`` (an environment and an actor) -> ``worker`` -> ``shared_buffer`` -> ``sampling``. Around
it: ``supervisor`` keeps the workers alive, ``refill`` decides when they write, ``reader`` is all that a process needs
that only samples, ``gpu_mirror`` follows the buffer on a GPU.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tensordict import TensorDict

from embodichain.agents.datasets.frames import EpisodeInfo
from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.gpu_mirror import DeviceMirror
from embodichain.agents.engine.reader import Generator, StreamReader
from embodichain.agents.engine.shared_buffer import Control
from embodichain.agents.engine.stats import StatsCounter, StreamStats, WorkersCounter, WorkerStats
from embodichain.agents.engine.supervisor import Supervisor
from embodichain.errors import ConfigError, EngineStateError

__all__ = ["OnlineDataEngine", "OnlineDataEngineCfg"]


class OnlineDataEngine:
    """A live buffer of episodes, filled by simulation processes and sampled by any number of others.

    ``start`` and ``stop`` belong to the process that made the engine. Hand the engine to other processes as it is (by
    fork, as an argument, through a queue, inside an ``OnlineDataset``): there it can only sample.
    """

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        cfg.check()
        self.cfg = cfg
        self.buffer_size = cfg.buffer_size
        """Number of episodes in the shared buffer."""
        self.device = _usable_device(cfg.buffer_device)
        """Where batches come from in this process; in others they always come from the shared memory."""
        self._creator: int | None = os.getpid()
        self._supervisor: Supervisor | None = None
        self._reader: StreamReader | None = None
        self._stats: StatsCounter | None = None
        self._worker_stats: WorkersCounter | None = None
        self._mirror: DeviceMirror | None = None

    def start(self) -> None:
        """Start the simulation workers and return when every row of the buffer holds an episode."""
        self._check_creator("start")
        if self._supervisor is not None and self._supervisor.is_alive():
            raise EngineStateError("the engine is already running")
        self.stop()  # what a failed run may have left
        self._reader = self._stats = self._worker_stats = None
        supervisor = self._supervisor = Supervisor(self.cfg)
        weakref.finalize(self, _stop_in, os.getpid(), supervisor)  # also at the end of the program
        supervisor.start()
        try:
            self._wait_for_first_fill(supervisor)
            if self.device.type != "cpu" and supervisor.buffer is not None:
                self._mirror = DeviceMirror(supervisor.buffer, self.device)
        except BaseException:  # Ctrl-C included: nothing may be left running
            supervisor.stop()
            raise

    def stop(self) -> None:
        """Stop the workers: gracefully, then firmly. Calling it again, or without a start, does nothing."""
        self._check_creator("stop")
        try:
            if self._supervisor is not None:
                self._supervisor.stop()
        finally:
            if self._mirror is not None:
                self._mirror.close()
                self._mirror = None

    def __enter__(self) -> Self:
        if self._supervisor is None or not self._supervisor.is_alive():
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_for_first_fill(self, supervisor: Supervisor) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        silent = not self.cfg.progress or not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=silent) as progress:
            task = progress.add_task("starting simulation", total=self.buffer_size)
            while not supervisor.is_ready and supervisor.error is None and supervisor.is_alive():
                supervisor.changed.wait(0.1)
                supervisor.changed.clear()
                buffer = supervisor.buffer
                if buffer is not None:
                    if self._reader is None:
                        self._reader = StreamReader(buffer, self.cfg)
                        self._stats = StatsCounter(buffer)
                    written = min(buffer.episodes_written, self.buffer_size)
                    progress.update(task, completed=written, description="filling the buffer")
        if supervisor.error is not None:
            supervisor.stop()
            raise supervisor.error
        if not supervisor.is_ready:
            raise EngineStateError("the engine was stopped before its buffer was filled")

    def sample_batch(
        self, batch_size: int, chunk_size: int, *, generator: Generator | None = None, reuse_outputs: bool = False
    ) -> TensorDict:
        """Draw ``batch_size`` chunks of ``chunk_size`` consecutive steps: a TensorDict ``[batch_size, chunk_size]``.

        Each chunk is from an episode drawn uniformly among those that are long enough, at a uniform start; never with a
        padded or half-overwritten frame. ``generator`` (numpy's or torch's) makes the draws reproducible for the same
        content of the buffer. The batch is yours. With ``reuse_outputs=True`` the same few TensorDicts are filled in
        turn, which is faster for small batches: the second draw of the same shape after it, by the same thread,
        overwrites such a batch.

        Raises ``ChunkSizeError`` (a ``ValueError``) if ``chunk_size`` exceeds ``max_episode_steps`` or the longest
        stored episode, and ``WorkerError`` once a worker has failed for good.
        """
        try:
            return self._sample(batch_size, chunk_size, generator, reuse_outputs)
        except EngineStateError:
            if self._supervisor is not None and self._supervisor.error is not None:
                raise self._supervisor.error from None  # why it was stopped; other processes cannot know
            raise

    def _sample(self, batch_size: int, chunk_size: int, generator: Generator | None, reuse_outputs: bool) -> TensorDict:
        reader, mirror = self._sampling(), self._mirror
        if mirror is None or os.getpid() != self._creator:
            return reader.sample(batch_size, chunk_size, generator, reuse_outputs)
        reader.prepare(batch_size, chunk_size)
        batch, rows = mirror.sample(reader.generator(generator), batch_size, chunk_size, reuse_outputs)
        reader.count(batch_size, 0, rows)
        return batch

    def episode_info(self, row: int) -> EpisodeInfo:
        """Return where the episode in a row of the buffer came from."""
        if not 0 <= row < self.buffer_size:
            raise IndexError(f"row must lie in [0, {self.buffer_size}), got {row}")
        return self._sampling().buffer.info(row)

    def stats(self) -> StreamStats:
        """Return what is going on; rates are since the last call in this process."""
        reader = self._sampling()
        if self._stats is None:
            self._stats = StatsCounter(reader.buffer)
        return self._stats.snapshot()

    def worker_stats(self) -> list[WorkerStats]:
        """Return what each worker does; rates are since the last call. For the process that started them."""
        self._check_creator("watch")
        buffer = self._sampling().buffer
        if self._worker_stats is None:
            self._worker_stats = WorkersCounter(buffer)
        supervisor = self._supervisor
        return [] if supervisor is None else self._worker_stats.snapshot(supervisor.workers, supervisor.replaced)

    @property
    def is_init(self) -> bool:
        """Whether every row of the buffer has been written at least once."""
        return self._reader is not None and bool(self._reader.buffer.control[Control.READY])

    @property
    def shared_buffer(self) -> TensorDict:
        """The shared memory itself ``[buffer_size, max_episode_steps]``, on the CPU: rows change as you look at them.

        Frames beyond an episode's length (``episode_info(row).length``) mean nothing. ``sample_batch`` reads safely.
        """
        return self._sampling().buffer.tensordict

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the simulation workers (in the process that started them)."""
        return [] if self._supervisor is None else self._supervisor.pids

    def _sampling(self) -> StreamReader:
        if self._reader is None:
            raise EngineStateError("the engine has no buffer yet: call start() first")
        return self._reader

    def _check_creator(self, verb: str) -> None:
        if os.getpid() != self._creator:
            raise EngineStateError(f"only the process that made the engine can {verb} it; here it can only sample")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what sampling needs: another process attaches to the same memory."""
        self._sampling()
        own = ("_creator", "_supervisor", "_stats", "_worker_stats", "_mirror")
        return {**self.__dict__, **dict.fromkeys(own)}


def _usable_device(name: str) -> torch.device:
    """Return the device of this name; ConfigError if batches cannot come from there."""
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        problem = f"buffer_device: expected 'cpu', or 'cuda' on a machine with a CUDA device and torch, got {name!r}"
        raise ConfigError(problem, "OnlineDataEngineCfg")
    return torch.device(name)


def _stop_in(pid: int, supervisor: Supervisor) -> None:
    """Stop the workers, unless this is a forked child of the process that started them."""
    if os.getpid() == pid:
        supervisor.stop()
