"""Worker processes on this machine: starting, monitoring, stopping and replacing them.

They are forked by ``fork_server.py``, which takes 0.1 s instead of the 4 s of a new interpreter. The fork server of
``multiprocessing`` is not used because it reimports the main module.
"""

import contextlib
import json
import logging
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import FileIO
from multiprocessing import current_process, spawn
from multiprocessing.connection import wait
from typing import Any, BinaryIO

import numpy as np
import torch

from embodichain.agents.processes import fork_server
from embodichain.agents.processes.channel import SUSPENDED_SECONDS, Channel
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.shared_memory import Segment
from embodichain.errors import ConfigError, WorkerError

log = logging.getLogger("embodichain.workers")

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_END_SECONDS = 5.0
_PID_SECONDS = 0.02
"""Longest time for which a thread that waits for a pid keeps others from killing the worker."""
_HEARTBEAT_BYTES = 24
_OFFSET = struct.Struct("q")
_WAITING_SECONDS = 5.0
"""Minimum time without a heartbeat after which an idle worker counts as hung."""
FIRST_STEPS = 2
"""Number of first steps that ``start_timeout`` applies to, as they may load or compile something."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_HEALTHY_SECONDS = 600.0
"""Time without a fault after which a worker's count of faults is reset."""


class Heartbeat:
    """Time of a worker's last heartbeat, its number of steps, and whether it is busy; in shared memory if given."""

    def __init__(self, segment: Segment | None = None) -> None:
        self._words = np.zeros(3, np.int64) if segment is None else segment.view(0, torch.int64, (3,)).numpy()

    def beat(self, busy: bool = True) -> None:
        """Record the start of a step, or, repeatedly while there is no work, that the worker is idle."""
        self._words[1] += busy
        self._words[0] = time.monotonic_ns()
        self._words[2] = busy

    def begin_again(self) -> None:
        """Record a step and restart the count, so that ``start_timeout`` applies to the next steps again."""
        self._words[1] = 0
        self.beat()

    def copy(self, seconds_ago: float, steps: int, busy: bool) -> None:
        """Copy the ``status`` of a heartbeat on another machine."""
        self._words[:] = (time.monotonic_ns() - int(1e9 * seconds_ago), steps, busy)

    @property
    def is_busy(self) -> bool:
        """Whether a step is in progress."""
        return bool(self._words[2])

    @property
    def last(self) -> float:
        """Monotonic time of the last heartbeat; 0 if there was none."""
        return float(self._words[0]) / 1e9

    def status(self) -> dict[str, Any]:
        """Return the age of the last heartbeat, the number of steps, and whether one is in progress."""
        seconds_ago = time.monotonic() - self.last
        return {"seconds_ago": seconds_ago, "steps": int(self._words[1]), "busy": self.is_busy}

    def overdue(self, start_timeout: float, step_timeout: float, since: float = 0.0) -> float | None:
        """Return the time limit of the current step if it has exceeded it, else None. The step counts from ``since`` at
        the earliest."""
        limit = step_timeout if self._words[1] > FIRST_STEPS else start_timeout
        return limit if self.is_busy and time.monotonic() - max(self.last, since) > limit else None


class WorkerHandle(ABC):
    """The owner's handle of one worker, local or remote."""

    def __init__(self, index: int, incarnation: int, heartbeat: Heartbeat, node: str, started: float) -> None:
        self.index, self.incarnation, self.heartbeat = index, incarnation, heartbeat
        """``incarnation`` is the number of previous workers with this index."""
        self.node = node
        """Host name of its node; empty until it is placed on one."""
        self.started = started
        """Monotonic time at which it began to build its environment; infinite while it waits for a node."""
        self.joined = 0.0
        """Monotonic time at which its owner gave it work; 0 while it is building its environment."""
        self.unreachable = False
        """Whether its state is currently unknown, because it does not respond."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id on its node; 0 while there is no process."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the worker and its child processes; may be called repeatedly."""


class WorkerProcess(WorkerHandle):
    """A process that runs ``target(channel, heartbeat, *args)``; it is killed with this object, or with the program.
    It leads its own process group: Ctrl-C does not reach it, and its child processes are killed with it."""

    is_closed = True
    """Whether it was killed by its owner, or never started."""

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...], index: int = 0, incarnation: int = 0
    ) -> None:
        segment = Segment.create(_HEARTBEAT_BYTES, "a heartbeat")
        super().__init__(index, incarnation, Heartbeat(segment), socket.gethostname(), time.monotonic())
        self._owner = os.getpid()
        self._pid: int | None = None
        self._code: int | None = None
        self._lock = threading.RLock()
        """Held while the status pipe is read or closed: a thread may kill the worker while another asks for its pid."""
        with os.fdopen(os.memfd_create("embodichain-job"), "w+b") as job:
            _write_job(job, target, args)
            self.channel, other = Channel.pair()
            read, write = os.pipe()
            self._status = FileIO(read)
            with os.fdopen(write), other.socket:
                _request_fork(target.__module__, [job.fileno(), other.socket.fileno(), segment.fd, write])
        self.is_closed = False

    @property
    def pid(self) -> int:
        """The process id; blocks until the process has been forked."""
        while self._pid is None and not self.is_closed:
            self._read_status(_PID_SECONDS)
            time.sleep(0.001)  # lets others take the lock
        return self._pid or 0

    def wait(self, seconds: float) -> bool:
        """Wait for the process to exit; return whether it did."""
        if self.is_closed:
            return True
        if self.pid and self._code is None:
            self._read_status(max(seconds, 0.0))
        return self._code is not None

    def describe_end(self) -> str:
        """Wait for a process that closed its channel to exit, and return how it ended."""
        self.wait(_END_SECONDS)
        code = self._code
        if code is None:
            return "closed its connection without ending"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        with self._lock:
            if self.is_closed:
                return
            if self._pid is None and not wait([self._status.fileno()], 0.0):
                self.channel.shut_down()  # not forked yet, as the server still imports modules: it will exit at once
            elif not self.wait(0.0):
                with contextlib.suppress(ProcessLookupError):  # it has just exited
                    os.killpg(self.pid, signal.SIGKILL)
                self.wait(_END_SECONDS)
            self.is_closed = True
            self._status.close()

    def __del__(self) -> None:
        if not self.is_closed and self._owner == os.getpid():
            self.kill()

    def _read_status(self, seconds: float) -> None:
        """Read the process id, or later the exit code, from the fork server, if it sends one within ``seconds``."""
        with self._lock:
            if self.is_closed or self._code is not None or not wait([self._status.fileno()], seconds):
                return
            data = self._status.read(fork_server.STATUS.size)
            if data:
                self._pid, code = fork_server.STATUS.unpack(data)
                self._code = None if code == fork_server.RUNNING else code
            else:  # the fork server was killed, and all workers with it
                self._pid, self._code = self._pid or 0, -signal.SIGKILL


class HangDetector:
    """Detects workers without a heartbeat, except those that were suspended together with this process."""

    def __init__(self, start_timeout: float, step_timeout: float) -> None:
        self._start, self._step = start_timeout, step_timeout
        self._last_look = time.monotonic()
        self.awake_since = 0.0
        """Monotonic time at which this process last resumed from a suspension; timeouts count from there."""

    def look(self) -> None:
        """Detect suspensions of this process; call it before workers are checked."""
        now = time.monotonic()
        if now - self._last_look > SUSPENDED_SECONDS:
            self.awake_since = now
        self._last_look = now

    def check(self, worker: WorkerHandle) -> FailureReport | None:
        """Return a report if a worker has hung."""
        heartbeat, what = worker.heartbeat, None
        since, idle_limit = max(worker.joined, self.awake_since), max(self._step, _WAITING_SECONDS)
        if not heartbeat.last:
            if time.monotonic() - max(worker.started, self.awake_since) > self._start:
                what = f"did not build its environment within start_timeout ({self._start:g} s)"
        elif limit := heartbeat.overdue(self._start, self._step, since):
            what = f"hung: it has not come back from a step for {limit:g} s"
        elif not heartbeat.is_busy and time.monotonic() - max(heartbeat.last, since) > idle_limit:
            what = f"hung: it has sent no heartbeat for {idle_limit:g} s while it waited for work"
        return None if what is None else FailureReport(worker.index, what, hung=True)


class WorkerPool:
    """Worker processes on this machine that run the same function: starts them and receives their messages."""

    def __init__(
        self,
        target: Callable[..., None],
        args: Callable[[int, int], tuple[Any, ...]],
        start_timeout: float,
        step_timeout: float,
    ) -> None:
        """Prepare workers that run ``target(channel, heartbeat, *args(index, incarnation))``."""
        self._target, self._args = target, args
        self._hangs = HangDetector(start_timeout, step_timeout)
        self._workers: list[WorkerProcess] = []

    @property
    def awake_since(self) -> float:
        """Monotonic time at which this process last resumed from a suspension."""
        return self._hangs.awake_since

    def start(self, index: int = 0, incarnation: int = 0) -> WorkerProcess:
        """Start a worker."""
        worker = WorkerProcess(self._target, self._args(index, incarnation), index, incarnation)
        self._workers.append(worker)
        return worker

    def poll(self, seconds: float) -> Iterator[tuple[WorkerProcess, str, Any]]:
        """Wait up to ``seconds`` for messages; yield each as ``(worker, kind, content)``.
        The content of ``failed`` is a ``FailureReport``: the worker has exited, or it hung and was killed."""
        self._drop_closed()
        wait([worker.channel.socket for worker in self._workers], seconds)
        self._hangs.look()
        for worker in list(self._workers):
            if worker.is_closed:
                continue
            try:
                message = worker.channel.receive(0.0)  # also sends queued messages
                report = self._hangs.check(worker) if message is None else None
            except EOFError:
                message, report = None, FailureReport(worker.index, worker.describe_end())
            if message is not None and message.kind == "failed":
                report = replace(FailureReport.from_json(message.content()), worker=worker.index)
            if report is not None:
                worker.kill()
                yield worker, "failed", report
            elif message is not None:
                yield worker, message.kind, message.content(copy=False)

    def stop(self, seconds: float = 0.0) -> None:
        """Wait up to ``seconds`` for the workers to exit, then kill them."""
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            if worker.joined:
                worker.wait(deadline - time.monotonic())
            worker.kill()
        self._drop_closed()

    def _drop_closed(self) -> None:
        for worker in [worker for worker in self._workers if worker.is_closed]:
            worker.channel.close()
            self._workers.remove(worker)


def restart_delay(faults: int) -> float:
    """Return the seconds to wait before a restart: 0 after the first fault, then with exponential backoff."""
    return 0.0 if faults <= 1 else min(_FIRST_PAUSE * 2.0 ** (faults - 2), _LONGEST_PAUSE)


class Restarts:
    """Schedules the start of all workers, and the restart of failed ones, up to ``max_restarts`` times each.

    Old faults do not count, so that only a worker that keeps failing exhausts its restarts, not a long run.
    """

    def __init__(self, name: str, num_workers: int, max_restarts: int, silence: float = 0.0) -> None:
        """Schedule the first start of all workers; ``silence`` is the timeout after which a worker counts as hung."""
        self._name, self._max = name, max_restarts
        self._healthy = _HEALTHY_SECONDS + silence
        self._last_fault = [0.0] * num_workers
        self.faults = [0] * num_workers
        """Number of recent faults by worker."""
        self.replaced = [0] * num_workers
        """Number of replacements by worker, for any reason."""
        self.planned: dict[int, tuple[float, int]] = dict.fromkeys(range(num_workers), (0.0, 0))
        """By index of a missing worker: the monotonic time of its start, and its incarnation."""

    def due(self) -> list[tuple[int, int]]:
        """Return index and incarnation of the workers to start now."""
        now = time.monotonic()
        due = [(index, incarnation) for index, (at, incarnation) in self.planned.items() if now >= at]
        for index, _ in due:
            del self.planned[index]
        return due

    def plan(self, index: int, incarnation: int, pause: float = 0.0) -> None:
        """Schedule the start of a worker in ``pause`` seconds."""
        self.planned[index] = (time.monotonic() + pause, incarnation)

    def replace(self, report: FailureReport, incarnation: int) -> bool:
        """Schedule the replacement of a failed worker; return False if it has no restarts left."""
        index, count, pause = report.worker, "", 0.0
        if not report.lost:  # the loss of a node is not a fault of the worker
            now = time.monotonic()
            if now - self._last_fault[index] > self._healthy:
                self.faults[index] = 0
            self._last_fault[index] = now
            if self.faults[index] >= self._max:
                return False
            self.faults[index] += 1
            count, pause = f" ({self.faults[index]} of {self._max})", restart_delay(self.faults[index])
        self.replaced[index] += 1
        details = f"\n{report.traceback}" if report.traceback else ""
        log.warning("%s %s; replacing it%s%s", self._name.format(index), report.describe(), count, details)
        self.plan(index, incarnation + 1, pause)
        return True


class _Server:
    """The fork server process, and the socket to it."""

    def __init__(self, module: str) -> None:
        self.program = os.getpid()
        self.control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            settings = json.dumps([self.program, other.fileno(), [module], sys.path])
            self.process = subprocess.Popen(
                [sys.executable, "-P", fork_server.__file__, settings],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={**dict.fromkeys(_ONE_THREAD, "1"), **os.environ},
                process_group=0,
            )

    def is_alive(self) -> bool:
        """Return whether the server is running and was started by this process, not by its parent."""
        return self.program == os.getpid() and self.process.poll() is None


_server: _Server | None = None
_server_lock = threading.Lock()


def _end_server() -> None:
    """Terminate the fork server, and all workers with it."""
    if _server is not None and _server.is_alive():
        _server.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            _server.process.wait(_END_SECONDS)


weakref.finalize(log, _end_server)  # finalizers run in reverse order: users of workers, created later, stop first


def _request_fork(module: str, descriptors: list[int]) -> None:
    """Ask the fork server for a worker; if this starts the server, it imports ``module`` in advance."""
    global _server
    if getattr(current_process(), "_inheriting", False):
        raise WorkerError(
            "a worker imports the main module, as its job uses something defined there, and this starts workers again: "
            "put the main program below `if __name__ == '__main__':`"
        )
    with _server_lock:
        if _server is None or not _server.is_alive():
            _server = _Server(module)
        try:
            socket.send_fds(_server.control, [b"fork"], descriptors)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerError(f"no worker could be started: the process that forks them has ended ({error})") from error


def _write_job(file: BinaryIO, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Write the worker's job to a file: the offset of the environment, then target and arguments, then the
    environment (variables, path, main module)."""
    file.seek(_OFFSET.size)
    try:
        pickle.dump((target, args), file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the job of a worker process cannot be sent to it ({error}): use functions of a module, or "
            "functools.partial of one",
            "collector",
        ) from error
    file.flush()
    preparation: dict[str, Any] = {"sys_path": sys.path, "sys_argv": sys.argv, "dir": os.getcwd()}
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pickled:
        if pickled.find(b"__main__") >= 0:  # it references the main module
            main = sys.modules["__main__"]
            if name := getattr(main.__spec__, "name", None):
                preparation["init_main_from_name"] = name
            elif path := getattr(main, "__file__", None):
                preparation["init_main_from_path"] = os.path.abspath(path)
    offset = file.tell()
    pickle.dump((dict(os.environ), preparation), file)
    file.seek(0)
    file.write(_OFFSET.pack(offset))
    file.seek(0)


def run_worker(job: int, connection: int, heartbeat: int) -> int:
    """Run a worker's job in its process; send exceptions to the owner and return the exit code."""
    channel = Channel(socket.socket(fileno=connection))
    if channel.is_shut_down():  # killed before it was forked
        return 0
    try:
        with open(job, "rb") as file:
            file.seek(*_OFFSET.unpack(file.read(_OFFSET.size)))
            environ, preparation = pickle.load(file)  # noqa: S301 - written by the program that started this process
            os.environ.clear()
            os.environ.update(dict.fromkeys(_ONE_THREAD, "1") | environ)
            current_process()._inheriting = True  # type: ignore[attr-defined]
            spawn.prepare(preparation)
            file.seek(_OFFSET.size)
            target, args = pickle.load(file)  # noqa: S301
            del current_process()._inheriting  # type: ignore[attr-defined]
        np.random.seed()  # noqa: NPY002 - else all workers inherit the same state
        torch.set_num_threads(1)
        target(channel, Heartbeat(Segment(heartbeat, _HEARTBEAT_BYTES)), *args)
    except EOFError:
        return 0  # the owner has closed the channel
    except Exception as error:  # noqa: BLE001 - any error is reported to the owner
        channel.send("failed", FailureReport.of_exception(os.getpid(), error).to_json())
        return 1
    return 0
