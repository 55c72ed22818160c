"""The thread that starts the workers, watches over them, replaces those that fail and ends them all."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from embodichain.agents.datasets.frames import FrameLayout
from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.fleet import WorkerHandle, make_fleet
from embodichain.agents.engine.shared_buffer import Control, SharedBuffer, State, Work
from embodichain.agents.processes.backoff import restart_delay
from embodichain.agents.processes.failure import FailureReport, drop_locals
from embodichain.errors import ConfigError, EmbodiChainError, StreamStalledError

log = logging.getLogger("embodichain.stream")

_POLL_SECONDS = 0.05
_NAP_SECONDS = 2.0
"""A longer gap between two looks at the workers means that this process was stopped (a paused container, a suspended
machine), and the workers with it."""
STOP_SECONDS = 3.0
"""How long workers may take to stop by themselves before they are killed."""


class Supervisor(threading.Thread):
    """Owns the workers from the first to the last moment.

    They are started from this thread and from no other, because the kernel ends them when the thread that started them
    ends: whatever happens to it, no worker is left behind.
    """

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        super().__init__(name="embodichain-stream-supervisor", daemon=True)
        self.buffer: SharedBuffer | None = None
        self.error: Exception | None = None
        """Why the engine could not start, or gave up."""
        self.changed = threading.Event()
        """Set when there is something new to see: the buffer, its first fill, or an error."""
        self._cfg = cfg
        self._workers: dict[int, WorkerHandle] = {}
        self._vacancies = dict.fromkeys(range(cfg.num_workers), (0.0, 0))
        """Places without a worker: when the next one is started, and how many there were before it."""
        self.replaced = [0] * cfg.num_workers
        """How often each worker was replaced, for whatever reason."""
        self._restarts = [0] * cfg.num_workers
        self._fleet = make_fleet(cfg)
        self._stopping = threading.Event()
        self._last_progress = (0, time.monotonic())
        self._last_watch = time.monotonic()
        self._awake_since = 0.0
        """When this process was last woken after it had been stopped for a while; what workers did not do before then
        is not held against them."""

    @property
    def is_ready(self) -> bool:
        """Whether every row was written at least once."""
        return self.buffer is not None and bool(self.buffer.control[Control.READY])

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by index."""
        return [self._workers[index].pid for index in sorted(self._workers)]

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
            self._end_workers()
            self._fleet.close()
            self.changed.set()

    def _watch(self) -> None:
        self._fill_vacancies()
        for worker, message in self._fleet.hear(_POLL_SECONDS):
            if message is None:
                self._replace(worker, worker.last_words())
            elif message["event"] == "layout":
                self._admit(worker, message)
            else:
                self._replace(worker, FailureReport.from_json(message["report"]))
        now = time.monotonic()
        if now - self._last_watch > _NAP_SECONDS:
            self._awake_since = now
        self._last_watch = now
        for worker in list(self._workers.values()):
            self._check_pulse(worker)
        if self.buffer is not None and not self.is_ready:
            self._check_first_fill(self.buffer)

    def _fill_vacancies(self) -> None:
        """Start the workers that are missing, each when its time has come."""
        for index, (due, incarnation) in list(self._vacancies.items()):
            if time.monotonic() >= due:
                del self._vacancies[index]
                try:
                    self._workers[index] = self._fleet.start(index, incarnation)
                except OSError as error:
                    self._give_up(FailureReport(index, f"could not be started ({error})"))

    def _admit(self, worker: WorkerHandle, message: dict[str, Any]) -> None:
        """Give a worker that has built its environment the buffer, made to measure for the first one."""
        layout = FrameLayout.from_json(message["layout"])
        if self.buffer is None:
            check_layout(self._cfg, layout, int(message["max_steps"]))
            cfg = self._cfg
            self.buffer = SharedBuffer.create(layout, cfg.buffer_size, cfg.max_episode_steps, cfg.num_workers)
            self._last_progress = (0, time.monotonic())
            self.changed.set()
        elif layout != self.buffer.layout:
            words = "built an environment with other observations or actions than the first worker"
            return self._replace(worker, FailureReport(worker.index, words))
        worker.share(self.buffer)

    def _check_pulse(self, worker: WorkerHandle) -> None:
        """Replace a worker that has shown no sign of life for too long."""
        now = time.monotonic()
        if self.buffer is None or not worker.joined:
            if now - max(worker.started, self._awake_since) > self._cfg.start_timeout:
                words = f"did not build its environment within start_timeout ({self._cfg.start_timeout:g} s)"
                self._replace(worker, FailureReport(worker.index, words))
            return
        beat = int(self.buffer.workers[worker.index, Work.HEARTBEAT]) / 1e9
        # The first step may compile or load things; from the second on the beat must be regular.
        limit = self._cfg.worker_timeout if beat > worker.joined + 1e-3 else self._cfg.start_timeout
        if now - max(beat, worker.joined, self._awake_since) > limit:
            self._replace(worker, FailureReport(worker.index, f"hung: no sign of life for {limit:g} s"))

    def _check_first_fill(self, buffer: SharedBuffer) -> None:
        if (buffer.sequence >= 2).all():
            buffer.control[Control.READY] = 1
            buffer.control[Control.STATE] = State.RUNNING
            self.changed.set()
            return
        now, count = time.monotonic(), buffer.episodes_written
        if count > self._last_progress[0]:
            self._last_progress = (count, now)
        elif now - max(self._last_progress[1], self._awake_since) > self._cfg.start_timeout and self._nobody_builds():
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
        """Put a new worker in the place of a failed one, or give up."""
        self._fleet.forget(worker)
        worker.kill()
        del self._workers[worker.index]
        if self._stopping.is_set():
            return
        if worker.lost and math.isinf(worker.started):  # it waited for that machine: nothing is lost
            self._vacancies[worker.index] = (time.monotonic(), worker.incarnation)
            return
        faults = self._restarts[worker.index]
        if not worker.lost:  # a machine that is gone is nobody's fault
            if self.buffer is None:
                raise report.as_user_error()  # nothing has ever worked: trying again would not help
            if faults >= self._cfg.max_restarts:
                self._give_up(report)
            self._restarts[worker.index] = faults = faults + 1
        self.replaced[worker.index] += 1
        if self.buffer is not None:
            self.buffer.control[Control.RESTARTS] += 1
        count = "" if worker.lost else f" ({faults} of {self._cfg.max_restarts})"
        told = f"\n{report.traceback}" if report.traceback else ""
        log.warning("simulation worker %d %s; replacing it%s%s", worker.index, report.what, count, told)
        pause = 0.0 if worker.lost else restart_delay(faults)
        self._vacancies[worker.index] = (time.monotonic() + pause, worker.incarnation + 1)

    def _give_up(self, report: FailureReport) -> None:
        if self.buffer is not None:
            self.buffer.fail(report.to_json())
        raise report.as_error()

    def _end_workers(self) -> None:
        """Let the workers stop by themselves for a moment, then end them."""
        if self.buffer is not None and self.buffer.control[Control.STATE] != State.FAILED:
            self.buffer.control[Control.STATE] = State.STOPPED
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers.values():
            if worker.joined:
                worker.wait(deadline - time.monotonic())
            worker.kill()
        self._workers.clear()


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
