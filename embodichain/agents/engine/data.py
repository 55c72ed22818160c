"""``OnlineDataEngine``: simulation processes fill a shared buffer, and training processes sample chunks from it.

Data flow: ``sources`` (an environment and an actor) -> ``worker`` -> ``shared_buffer`` -> ``sampling``.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal, NoReturn, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tensordict import TensorDict
from torch import nn

from embodichain.agents.datasets.frames import EpisodeInfo
from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.gpu_mirror import DeviceMirror
from embodichain.agents.engine.offsets import Offsets
from embodichain.agents.engine.reader import Generator, StreamReader
from embodichain.agents.engine.shared_buffer import Control, Ints, Read, SharedBuffer, Work
from embodichain.agents.engine.supervisor import Supervisor
from embodichain.agents.processes.channel import PublishedWeights
from embodichain.agents.processes.pool import WorkerHandle
from embodichain.errors import ConfigError, EngineStateError
from embodichain.extras import config_folders, locate_trusted

__all__ = ["OnlineDataEngine", "OnlineDataEngineCfg"]

_LEARNED_SOURCES = ("dagger", "policy")
_PUBLISHER = "embodichain.agents.rl.published:PolicyPublisher"  # an entry point, as actors are


class OnlineDataEngine:
    """A live buffer of episodes, filled by simulation processes and sampled by any number of training processes.

    Only the process that created the engine can ``start`` and ``stop`` it. Any process that inherits or unpickles it
    can sample.
    """

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        cfg.check()
        cfg.check_policy_exists()
        self.cfg = cfg
        self.buffer_size = cfg.buffer_size
        """Number of episodes in the shared buffer."""
        kind = cfg.buffer_device.partition(":")[0]
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            expected = "expected 'cpu', or 'cuda' on a machine with a CUDA device and torch"
            raise ConfigError(f"buffer_device: {expected}, got {cfg.buffer_device!r}", "OnlineDataEngineCfg")
        self.tasks = [entry.name for entry in cfg.tasks()]
        """Task names, indexed by ``task_index`` in batches; empty if there is a single environment."""
        self.device = torch.device(cfg.buffer_device)
        """Device of the batches in this process; other processes always sample on the CPU."""
        self._creator: int | None = os.getpid()
        self._supervisor: Supervisor | None = None
        self._reader: StreamReader | None = None
        self._stats: StatsCounter | None = None
        self._mirror: DeviceMirror | None = None
        self._publisher: Any = None
        self._published: PublishedWeights | None = None

    def start(self) -> None:
        """Start the simulation workers and block until every row of the buffer holds an episode."""
        self._check_creator("start")
        if self._supervisor is not None and self._supervisor.is_alive():
            raise EngineStateError("the engine is already running")
        self.stop()  # clean up after a failed run
        self._reader = self._stats = None
        supervisor = self._supervisor = Supervisor(self._cfg_for_workers())
        if self._published is not None:
            supervisor.publish(self._published)
        weakref.finalize(self, supervisor.stop)  # also at interpreter exit; has no effect in a forked child
        supervisor.start()
        try:
            self._wait_for_first_fill(supervisor)
            if self.device.type != "cpu" and supervisor.buffer is not None:
                self._mirror = DeviceMirror(supervisor.buffer, self.device)
        except BaseException:  # including Ctrl-C: leave no worker running
            supervisor.stop()
            raise

    def _cfg_for_workers(self) -> OnlineDataEngineCfg:
        """Return the settings with absolute paths of trusted modules, as workers may run in another folder."""
        trusted = locate_trusted(self.cfg.trusted_modules, config_folders())
        return self.cfg.replace(trusted_modules=list(trusted)) if trusted else self.cfg

    def stop(self) -> None:
        """Stop the workers, and kill those that do not stop in time. Does nothing if the engine is not running."""
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

    def publish(self, policy: nn.Module) -> int:
        """Send the current weights of a policy (``Policy``) to the workers and return their version.

        Requires the source ``dagger`` or ``policy``. Workers load the weights between two steps; a replacement worker
        gets the newest. Weights published before ``start`` are used from the first step. The version is
        ``policy.version``, or the previous version plus one if the policy does not count its updates.
        """
        self._check_creator("publish to")
        source = self.cfg.check().source
        if source not in _LEARNED_SOURCES:
            expected = " or ".join(map(repr, _LEARNED_SOURCES))
            raise ConfigError(f"source: no policy acts with {source!r}, so none can be published; use {expected}")
        publisher = self._publisher
        if publisher is None or publisher.policy is not policy:
            publisher = self._publisher = resolve_name(_PUBLISHER)(policy, on_ray=self.cfg.workers == "ray")
        self._published = publisher.publish(after=-1 if self._published is None else self._published.version)
        if self._supervisor is not None:
            self._supervisor.publish(self._published)
        return self._published.version

    def sample_batch(
        self, batch_size: int, chunk_size: int, *, generator: Generator | None = None, reuse_outputs: bool = False
    ) -> TensorDict:
        """Sample ``batch_size`` chunks of ``chunk_size`` consecutive steps: a TensorDict ``[batch_size, chunk_size]``.

        Each chunk comes from an episode drawn uniformly among those that are long enough, at a uniformly drawn start.
        No frame is padded or partially overwritten. A NumPy or torch ``generator`` makes the draws reproducible for the
        same buffer contents. ``reuse_outputs=True`` is faster for small batches, but the batch is overwritten by the
        second later call for the same shape in the same thread.

        Raises ``ChunkSizeError`` (a ``ValueError``) if ``chunk_size`` exceeds ``max_episode_steps`` or the longest
        stored episode, and ``WorkerError`` if a worker has failed permanently.
        """
        try:
            reader, mirror = self._sampling(), self._mirror
            if mirror is None or os.getpid() != self._creator:
                return reader.sample(batch_size, chunk_size, generator, reuse_outputs)
            reader.prepare(batch_size, chunk_size)
            batch, rows = mirror.sample(reader.generator(generator), batch_size, chunk_size, reuse_outputs)
            reader.count(batch_size, 0, rows)
            return batch
        except EngineStateError as error:
            self._raise_cause(error)

    def sample_frames(self, batch_size: int, offsets: Offsets, *, generator: Generator | None = None) -> TensorDict:
        """Sample ``batch_size`` frames, each with the frames at the given offsets: a TensorDict ``[batch_size]``.

        First an episode that is long enough is drawn uniformly, then a frame in it. Offsets beyond the episode repeat
        its first or last frame, and ``NAME_is_pad`` marks them. Batches are copied from shared memory even if the
        buffer is mirrored on a GPU.
        """
        try:
            batch = self._sampling().sample_frames(batch_size, offsets, generator)
        except EngineStateError as error:
            self._raise_cause(error)
        mirrored = self._mirror is not None and os.getpid() == self._creator
        return batch.to(self.device) if mirrored else batch

    def check_chunk_size(self, chunk_size: int) -> None:
        """Raise the error that ``sample_batch`` would raise for this chunk size, without sampling."""
        try:
            self._sampling().check_chunk_size(chunk_size)
        except EngineStateError as error:
            self._raise_cause(error)

    def _raise_cause(self, stopped: EngineStateError) -> NoReturn:
        """Raise the error that stopped the engine if this process knows it, else ``stopped``."""
        known = None if self._supervisor is None else self._supervisor.error
        cause = stopped if known is None else known
        raise cause from cause.__cause__

    def episode_info(self, row: int) -> EpisodeInfo:
        """Return the metadata of the episode in a row of the buffer."""
        if not 0 <= row < self.buffer_size:
            raise IndexError(f"row must lie in [0, {self.buffer_size}), got {row}")
        return self._sampling().buffer.info(row)

    def stats(self) -> StreamStats:
        """Return the statistics of the stream; rates are averages since the last call in this process."""
        return self._counter().stream()

    def task_stats(self) -> dict[str, TaskStats]:
        """Return the statistics of each task by name; empty if there is a single environment."""
        records = self._sampling().buffer.tasks.sum(axis=0)
        return {name: TaskStats.of(record) for name, record in zip(self.tasks, records, strict=False)}

    def worker_stats(self) -> list[WorkerStats]:
        """Return the statistics of each worker, in the creating process only; rates are since the last call."""
        self._check_creator("watch")
        supervisor, counter = self._supervisor, self._counter()
        return [] if supervisor is None else counter.workers(supervisor.workers, supervisor.restarts.replaced)

    def _counter(self) -> StatsCounter:
        if self._stats is None:
            self._stats = StatsCounter(self._sampling().buffer)
        return self._stats

    @property
    def is_init(self) -> bool:
        """Whether every row of the buffer has been written at least once."""
        return self._reader is not None and bool(self._reader.buffer.control[Control.READY])

    @property
    def fps(self) -> float | None:
        """Frames per simulated second; None if the environment does not report it."""
        nanoseconds = int(self._sampling().buffer.control[Control.STEP_NANOSECONDS])
        return round(1e9 / nanoseconds, 6) if nanoseconds else None

    @property
    def shared_buffer(self) -> TensorDict:
        """The raw shared memory ``[buffer_size, max_episode_steps]``, on the CPU, not synchronized with writers.
        Frames beyond ``episode_info(row).length`` are undefined. Use ``sample_batch`` for safe reads."""
        return self._sampling().buffer.tensordict

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the simulation workers, in the creating process."""
        workers = {} if self._supervisor is None else self._supervisor.workers
        return [worker.pid for _, worker in sorted(workers.items())]

    def _sampling(self) -> StreamReader:
        if self._reader is None:
            raise EngineStateError("the engine has no buffer yet: call start() first")
        return self._reader

    def _check_creator(self, verb: str) -> None:
        if os.getpid() != self._creator:
            raise EngineStateError(f"only the process that made the engine can {verb} it; here it can only sample")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the sampling state: the receiving process attaches to the same shared memory."""
        self._sampling()
        return {
            **self.__dict__,
            **dict.fromkeys(("_creator", "_supervisor", "_stats", "_mirror", "_publisher", "_published")),
        }


@dataclass(frozen=True)
class StreamStats:
    """A snapshot of a stream: totals since the start, rates since the previous snapshot."""

    episodes_written: int
    episodes_per_second: float
    frames_per_second: float
    """Simulated environment steps per second, in finished episodes."""
    samples: int
    """Chunks sampled by all processes."""
    samples_per_second: float
    refills: float
    """Number of times the buffer was rewritten after the first fill; may be fractional."""
    mean_age_refills: float
    """Mean age of a sampled episode, in refills of the buffer."""
    mean_age_seconds: float
    success_rate: float | None
    """Success rate of all finished episodes, stored or not; None if the environment does not report success."""
    restarts: int
    rejected_reads: int
    """Chunks drawn again because their row was overwritten while they were copied."""
    frames: int
    """Simulated environment steps, in finished episodes."""


@dataclass(frozen=True)
class TaskStats:
    """Statistics of one of several tasks since the start."""

    episodes_written: int
    success_rate: float | None
    """Success rate of all finished episodes (with Ray: of the stored ones); None if the environment does not report
    success."""

    @classmethod
    def of(cls, record: Ints) -> TaskStats:
        """Build the statistics from a ``Work`` record."""
        judged = int(record[Work.JUDGED])
        return cls(int(record[Work.WRITTEN]), int(record[Work.SUCCEEDED]) / judged if judged else None)


WorkerState = Literal["waiting", "building", "running", "unreachable"]


@dataclass(frozen=True)
class WorkerStats:
    """A snapshot of one worker; rates are since the previous snapshot."""

    worker: int
    node: str
    """Host name of the node; empty until the worker is placed on one."""
    pid: int
    """Process id on that node."""
    state: WorkerState
    """``waiting`` for a node, ``building`` its environment, ``running``, or ``unreachable`` (it may still be alive)."""
    episodes_written: int
    episodes_per_second: float
    frames_per_second: float
    silent_seconds: float
    """Time since the last heartbeat; 0 unless the worker is running."""
    mean_age_seconds: float
    """Mean age of its episodes in the buffer; 0 if there are none."""
    restarts: int
    """Number of times this worker was replaced."""
    frames: int
    """Simulated environment steps, in finished episodes."""
    idle: bool
    """Whether it is running but waiting, because no refill is due."""


class StatsCounter:
    """Turns the shared counters into statistics; keeps the previous snapshots to compute rates."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._last = self._last_workers = self._counts()

    def _counts(self) -> tuple[float, Ints, int]:
        return time.monotonic(), self._buffer.workers.copy(), self._buffer.samples

    def stream(self) -> StreamStats:
        """Return the current statistics of the stream."""
        buffer, (then, before, samples_before) = self._buffer, self._last
        self._last = (now, records, samples) = self._counts()
        seconds, work, read = max(now - then, 1e-9), records.sum(axis=0), buffer.readers.sum(axis=0)
        rates = (work - before.sum(axis=0)) / seconds
        aged, judged = max(read[Read.AGED], 1.0), int(work[Work.JUDGED])
        return StreamStats(
            episodes_written=int(work[Work.WRITTEN]),
            episodes_per_second=float(rates[Work.WRITTEN]),
            frames_per_second=float(rates[Work.FRAMES]),
            samples=samples,
            samples_per_second=(samples - samples_before) / seconds,
            refills=max(int(work[Work.WRITTEN]) / buffer.num_rows - 1.0, 0.0),
            mean_age_refills=float(read[Read.AGE_EPISODES] / aged / buffer.num_rows),
            mean_age_seconds=float(read[Read.AGE_SECONDS] / aged),
            success_rate=int(work[Work.SUCCEEDED]) / judged if judged else None,
            restarts=int(buffer.control[Control.RESTARTS]),
            rejected_reads=int(read[Read.REDRAWN]),
            frames=int(work[Work.FRAMES]),
        )

    def workers(self, handles: Mapping[int, WorkerHandle], replaced: Sequence[int]) -> list[WorkerStats]:
        """Return the current statistics of all workers, including those that are being replaced."""
        then, before, _ = self._last_workers
        self._last_workers = (now, records, _) = self._counts()
        rates = (records - before) / max(now - then, 1e-9)
        buffer, clock = self._buffer, time.time()
        stats = []
        for index, restarts in enumerate(replaced):
            handle, own = handles.get(index), (buffer.length > 0) & (buffer.origins[:, 0] == index)
            state: WorkerState = "waiting"
            if handle is not None and math.isfinite(handle.started):
                state = "unreachable" if handle.unreachable else "running" if handle.joined else "building"
            running = state == "running"
            stats.append(
                WorkerStats(
                    worker=index,
                    node="" if handle is None else handle.node,
                    pid=0 if handle is None else handle.pid,
                    state=state,
                    episodes_written=int(records[index, Work.WRITTEN]),
                    episodes_per_second=float(rates[index, Work.WRITTEN]),
                    frames_per_second=float(rates[index, Work.FRAMES]),
                    silent_seconds=max(now - handle.heartbeat.last, 0.0) if handle is not None and running else 0.0,
                    mean_age_seconds=float(clock - buffer.stamps[own, 0].mean()) if own.any() else 0.0,
                    restarts=restarts,
                    frames=int(records[index, Work.FRAMES]),
                    idle=running and bool(records[index, Work.IDLE]),
                )
            )
        return stats
