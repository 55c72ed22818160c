"""The thread that owns an engine's workers: starts them, hands them the buffer, replaces those that fail, ends all."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from embodichain.agents.datasets.frames import FrameLayout
from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.shared_buffer import Control, SharedBuffer, State, Work
from embodichain.agents.processes.failure import FailureReport, drop_locals
from embodichain.agents.processes.pool import Restarts, WorkerHandle, WorkerPool, WorkerProcess
from embodichain.errors import ConfigError, EmbodiChainError, StreamStalledError

_POLL_SECONDS = 0.05
STOP_SECONDS = 3.0
"""How long workers may take to stop by themselves before they are killed."""


class SimulationPool(Protocol):
    """Starts simulation workers and tells what they say: processes of this machine, or of a Ray cluster."""

    def start(self, index: int, incarnation: int) -> WorkerHandle:
        """Start a worker."""

    def poll(self, seconds: float) -> Iterator[tuple[WorkerHandle, str, Any]]:
        """Wait for something to happen; return ``layout`` of workers that are built, and why others ``failed``."""

    def share(self, worker: WorkerHandle, buffer: SharedBuffer) -> None:
        """Let a worker begin to fill the buffer."""

    def stop(self, seconds: float) -> None:
        """Let the workers end by themselves for some time, then end them."""


class LocalPool(WorkerPool):
    """Processes of this machine, which write into the buffer themselves."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        from embodichain.agents.engine.worker import simulate  # needed in the workers, not by who samples

        settings = cfg.to_dict()
        super().__init__(simulate, lambda *worker: (settings, *worker), cfg.start_timeout, cfg.worker_timeout)

    def share(self, worker: WorkerHandle, buffer: SharedBuffer) -> None:
        """Hand over the buffer."""
        terms = {
            "layout": buffer.layout.to_json(),
            "num_rows": buffer.num_rows,
            "max_steps": buffer.max_steps,
            "num_workers": buffer.num_workers,
        }
        worker.joined = time.monotonic()
        if isinstance(worker, WorkerProcess):  # if it died meanwhile, the next poll tells
            worker.channel.send("buffer", terms, buffer.segment, wait=False)


def make_pool(cfg: OnlineDataEngineCfg) -> SimulationPool:
    """Return the pool that the config asks for."""
    if cfg.workers == "ray":
        from embodichain.agents.engine.ray_workers import RayPool  # it needs an extra

        return RayPool(cfg)
    return LocalPool(cfg)


class Supervisor(threading.Thread):
    """Owns the workers from the first to the last one."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        super().__init__(name="embodichain-stream-supervisor", daemon=True)
        self.buffer: SharedBuffer | None = None
        self.error: Exception | None = None
        """Why the engine could not start, or gave up."""
        self.changed = threading.Event()
        """Set when there is something new to see: the buffer, its first fill, or an error."""
        self._cfg = cfg
        self._workers: dict[int, WorkerHandle] = {}
        self._restarts = Restarts("simulation worker {}", cfg.num_workers, cfg.max_restarts)
        self._pool = make_pool(cfg)
        self._stopping = threading.Event()
        self._progress = (0, 0.0)
        """Episodes written before the first fill, and the seconds since there was a new one."""
        self._last_look = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether every row was written at least once."""
        return self.buffer is not None and bool(self.buffer.control[Control.READY])

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by index."""
        return [self._workers[index].pid for index in sorted(self._workers)]

    @property
    def replaced(self) -> list[int]:
        """How often each worker was replaced, for whatever reason."""
        return self._restarts.replaced

    @property
    def workers(self) -> dict[int, WorkerHandle]:
        """The workers by index; one that is being replaced is missing."""
        return dict(self._workers)

    def stop(self) -> None:
        """Stop the workers, gracefully, then firmly, and wait until they are gone."""
        self._stopping.set()
        # The garbage collector may call this from any thread, this one included.
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        """Start the workers and watch over them until told to stop or until they fail for good."""
        try:
            while not self._stopping.is_set():
                self._watch()
        except (EmbodiChainError, OSError) as error:
            drop_locals(error)
            self.error = error
        finally:
            if self.buffer is not None and self.buffer.control[Control.STATE] != State.FAILED:
                self.buffer.control[Control.STATE] = State.STOPPED
            self._pool.stop(STOP_SECONDS)
            self._workers.clear()
            self.changed.set()

    def _watch(self) -> None:
        for index, incarnation in self._restarts.due():
            try:
                self._workers[index] = self._pool.start(index, incarnation)
            except OSError as error:
                self._give_up(FailureReport(index, f"could not be started ({error})"))
        for worker, kind, content in self._pool.poll(_POLL_SECONDS):
            if kind == "failed":
                self._replace(worker, content)
            else:
                self._admit(worker, **content)
        if self.buffer is not None and not self.is_ready:
            self._check_first_fill(self.buffer)

    def _admit(self, worker: WorkerHandle, layout: list[list[Any]], max_steps: int) -> None:
        """Give a worker that has built its environment the buffer, made to measure for the first one."""
        frames = FrameLayout.from_json(layout)
        if self.buffer is None:
            check_layout(self._cfg, frames, max_steps)
            cfg = self._cfg
            self.buffer = SharedBuffer(frames, cfg.buffer_size, cfg.max_episode_steps, cfg.num_workers)
            self._last_look = time.monotonic()
            self.changed.set()
        elif frames != self.buffer.layout:
            what = "built an environment with other observations or actions than the first worker"
            return self._replace(worker, FailureReport(worker.index, what))
        self._pool.share(worker, self.buffer)

    def _check_first_fill(self, buffer: SharedBuffer) -> None:
        if (buffer.sequence >= 2).all():
            buffer.control[Control.READY] = 1
            buffer.control[Control.STATE] = State.RUNNING
            self.changed.set()
            return
        now, count = time.monotonic(), buffer.episodes_written
        passed, self._last_look = min(now - self._last_look, 1.0), now  # longer: this process was suspended
        self._progress = (count, 0.0 if count > self._progress[0] else self._progress[1] + passed)
        if self._progress[1] > self._cfg.start_timeout and self._nobody_builds():
            total = buffer.workers.sum(axis=0)
            raise StreamStalledError(
                f"no episode was written in start_timeout ({self._cfg.start_timeout:g} s): "
                f"{count} of {buffer.num_rows} rows are filled; {total[Work.FINISHED]} episodes finished, "
                f"and {total[Work.SUCCEEDED]} of the {total[Work.JUDGED]} that say so succeeded. "
                "Raise start_timeout, or check only_success"
            )

    def _nobody_builds(self) -> bool:
        """Tell whether every worker that has a place has built its environment; not if all still wait for a place."""
        workers = self._workers.values()
        placed = [worker for worker in workers if math.isfinite(worker.started)]
        return (not workers or bool(placed)) and all(worker.joined for worker in placed)

    def _replace(self, worker: WorkerHandle, report: FailureReport) -> None:
        """Have another worker come in place of a failed one, or give up."""
        worker.kill()
        del self._workers[worker.index]
        if self._stopping.is_set():
            return
        if report.lost and math.isinf(worker.started):  # it waited for that machine: nothing is lost
            return self._restarts.plan(worker.index, worker.incarnation)
        if self.buffer is None and not report.lost:
            raise report.as_user_error()  # nothing has ever worked: trying again would not help
        if not self._restarts.replace(report, worker.incarnation):
            self._give_up(report)
        if self.buffer is not None:
            self.buffer.control[Control.RESTARTS] += 1

    def _give_up(self, report: FailureReport) -> None:
        if self.buffer is not None:
            self.buffer.fail(report.to_json())
        raise report.as_error()


def check_layout(cfg: OnlineDataEngineCfg, layout: FrameLayout, max_steps: int) -> None:
    """Raise if the environment does not fit the config."""
    problems = []
    if max_steps > cfg.max_episode_steps:
        problems.append(
            f"max_episode_steps: episodes may take {max_steps} steps, but a row has room for {cfg.max_episode_steps}; "
            f"set it to at least {max_steps}"
        )
    if cfg.state_dim is not None:
        name = "robot/qpos" if layout.shape_of("observation", "robot", "qpos") is not None else "state"
        shape = layout.shape_of("observation", *name.split("/"))
        if shape is None:
            problems.append(f"state_dim: expected {cfg.state_dim}, but there is neither robot/qpos nor state")
        elif shape != (cfg.state_dim,):
            problems.append(
                f"state_dim: expected {cfg.state_dim}, but the environment's {name} has shape {list(shape)}"
            )
    if problems:
        raise ConfigError(problems, "OnlineDataEngineCfg")
