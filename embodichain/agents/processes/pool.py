"""Worker processes of this machine: how they are started, watched, ended and replaced.

They are forked by ``fork_server.py``, in 0.1 s instead of 4 s; ``multiprocessing``'s server reimports the main module.
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
_HEARTBEAT_BYTES = 24
_OFFSET = struct.Struct("q")
_WAITING_SECONDS = 5.0
"""The least time without a sign of life after which a worker that waits for work counts as hung."""
FIRST_STEPS = 2
"""Steps that may take as long as a start, because something is loaded or compiled in them."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_HEALTHY_SECONDS = 600.0
"""A worker that has done its work for so long has its former faults forgotten."""


class Heartbeat:
    """Signs of life, in shared memory where they come from another process."""

    def __init__(self, segment: Segment | None = None) -> None:
        self._words = np.zeros(3, np.int64) if segment is None else segment.view(0, torch.int64, (3,)).numpy()

    def beat(self, busy: bool = True) -> None:
        """Tell that a step begins, or that there is nothing to do, every now and then as long as there is nothing."""
        self._words[1] += busy
        self._words[0] = time.monotonic_ns()
        self._words[2] = busy

    def begin_again(self) -> None:
        """Tell that something is built again, so that this and the next steps may take as long as a start."""
        self._words[1] = 0
        self.beat()

    def copy(self, seconds_ago: float, steps: int, busy: bool) -> None:
        """Take over the last sign of a worker on another machine."""
        self._words[:] = (time.monotonic_ns() - int(1e9 * seconds_ago), steps, busy)

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return bool(self._words[2])

    @property
    def last(self) -> float:
        """When the last sign came (monotonic); 0 if none did."""
        return float(self._words[0]) / 1e9

    def status(self) -> dict[str, Any]:
        """Return when the last sign came, how many steps were begun, and whether one is under way."""
        seconds_ago = time.monotonic() - self.last
        return {"seconds_ago": seconds_ago, "steps": int(self._words[1]), "busy": self.is_busy}

    def overdue(self, start_timeout: float, step_timeout: float, since: float = 0.0) -> float | None:
        """Return how long the present step may take, from ``since`` on at the earliest, if it takes longer."""
        limit = step_timeout if self._words[1] > FIRST_STEPS else start_timeout
        return limit if self.is_busy and time.monotonic() - max(self.last, since) > limit else None


class WorkerHandle(ABC):
    """One worker, wherever it runs, seen from its owner."""

    def __init__(self, index: int, incarnation: int, heartbeat: Heartbeat, node: str, started: float) -> None:
        self.index, self.incarnation, self.heartbeat = index, incarnation, heartbeat
        """``incarnation`` is how many workers it replaces."""
        self.node = node
        """Name of the machine it is on; empty as long as it is on none."""
        self.started = started
        """When it began to build its environment (monotonic); infinite while it waits for a node."""
        self.joined = 0.0
        """When its owner took it into service; 0 while it is still building its environment."""
        self.unreachable = False
        """Whether nobody knows at present what has become of it."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process id, on its machine; 0 while there is none."""

    @abstractmethod
    def kill(self) -> None:
        """End it and whatever it started, now; calling it twice is fine."""


class WorkerProcess(WorkerHandle):
    """A process that runs ``target(channel, heartbeat, *args)``; it ends with this object, or with the program.
    It leads its own process group: Ctrl-C does not reach it, and whatever it starts ends with it."""

    is_closed = True
    """Whether it was killed from here, or never started."""

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...], index: int = 0, incarnation: int = 0
    ) -> None:
        segment = Segment.create(_HEARTBEAT_BYTES, "a heartbeat")
        super().__init__(index, incarnation, Heartbeat(segment), socket.gethostname(), time.monotonic())
        self._owner = os.getpid()
        self._pid: int | None = None
        self._code: int | None = None
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
        """The process id; waits until the process is there."""
        if self._pid is None and not self._status.closed:
            self._read_status()
        return self._pid or 0

    def wait(self, seconds: float) -> bool:
        """Wait for the process to end; tell whether it did."""
        if self.is_closed:
            return True
        if self.pid and self._code is None and wait([self._status.fileno()], max(seconds, 0.0)):
            self._read_status()
        return self._code is not None

    def describe_end(self) -> str:
        """Wait for a process that hung up to end, and tell how it did."""
        self.wait(_END_SECONDS)
        code = self._code
        if code is None:
            return "closed its connection without ending"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        if self.is_closed:
            return
        if self._pid is None and not wait([self._status.fileno()], 0.0):
            self.channel.shut_down()  # it ends as soon as the server, which still imports modules, has forked it
        elif not self.wait(0.0):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(_END_SECONDS)
        self.is_closed = True
        self._status.close()

    def __del__(self) -> None:
        if not self.is_closed and self._owner == os.getpid():
            self.kill()

    def _read_status(self) -> None:
        """Hear from the server which process id the worker has, and later its exit code."""
        data = self._status.read(fork_server.STATUS.size)
        if data:
            self._pid, code = fork_server.STATUS.unpack(data)
            self._code = None if code == fork_server.RUNNING else code
        else:  # the server was killed, and all workers with it
            self._pid, self._code = self._pid or 0, -signal.SIGKILL


class HangDetector:
    """Finds workers that show no sign of life, but not those that were suspended together with this process."""

    def __init__(self, start_timeout: float, step_timeout: float) -> None:
        self._start, self._step = start_timeout, step_timeout
        self._last_look = time.monotonic()
        self.awake_since = 0.0
        """When this process was last suspended; what workers did not do before then is not held against them."""

    def look(self) -> None:
        """Take note of the time, before workers are checked."""
        now = time.monotonic()
        if now - self._last_look > SUSPENDED_SECONDS:  # and so were the workers
            self.awake_since = now
        self._last_look = now

    def check(self, worker: WorkerHandle) -> FailureReport | None:
        """Return what is wrong with a worker that has not moved for too long."""
        beats, what = worker.heartbeat, None
        since, waits = max(worker.joined, self.awake_since), max(self._step, _WAITING_SECONDS)
        if not beats.last:
            if time.monotonic() - max(worker.started, self.awake_since) > self._start:
                what = f"did not build its environment within start_timeout ({self._start:g} s)"
        elif limit := beats.overdue(self._start, self._step, since):
            what = f"hung: it has not come back from a step for {limit:g} s"
        elif not beats.is_busy and time.monotonic() - max(beats.last, since) > waits:
            what = f"hung: it has shown no sign of life for {waits:g} s, while it waited for work"
        return None if what is None else FailureReport(worker.index, what, hung=True)


class WorkerPool:
    """Workers in processes of this machine that all do the same: starts them and tells what they say."""

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
        """When this process was last suspended, and the workers perhaps with it."""
        return self._hangs.awake_since

    def start(self, index: int = 0, incarnation: int = 0) -> WorkerProcess:
        """Start a worker."""
        worker = WorkerProcess(self._target, self._args(index, incarnation), index, incarnation)
        self._workers.append(worker)
        return worker

    def poll(self, seconds: float) -> Iterator[tuple[WorkerProcess, str, Any]]:
        """Wait for something to happen; return kinds and contents of the messages that came.
        ``failed`` comes with a ``FailureReport``: the worker has ended, or hung and was killed."""
        self._drop_closed()
        wait([worker.channel.socket for worker in self._workers], seconds)
        self._hangs.look()
        for worker in list(self._workers):
            if worker.is_closed:
                continue
            try:
                message = worker.channel.receive(0.0)  # it also sends what had to wait
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
        """Let the workers end by themselves for some time, then end them."""
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
    """Return the seconds to wait after so many faults: none after the first one, then twice as long each time."""
    return 0.0 if faults <= 1 else min(_FIRST_PAUSE * 2.0 ** (faults - 2), _LONGEST_PAUSE)


class Restarts:
    """Decides when workers are started: all of them at first, and those that failed again, as often as allowed.

    Faults that are long past do not count: a budget is spent by a worker that keeps failing, not by a long run.
    """

    def __init__(self, name: str, num_workers: int, max_restarts: int, silence: float = 0.0) -> None:
        """Plan the first start of all workers; ``silence`` is for how long one may show no sign before it has hung."""
        self._name, self._max = name, max_restarts
        self._healthy = _HEALTHY_SECONDS + silence
        self._last_fault = [0.0] * num_workers
        self.faults = [0] * num_workers
        """How often each worker failed without working well for long in between."""
        self.replaced = [0] * num_workers
        """How often each worker was replaced, for whatever reason."""
        self.planned: dict[int, tuple[float, int]] = dict.fromkeys(range(num_workers), (0.0, 0))
        """When a missing worker is started, and how many there were before it, by index."""

    def due(self) -> list[tuple[int, int]]:
        """Return index and incarnation of the workers to start now."""
        now = time.monotonic()
        due = [(index, incarnation) for index, (at, incarnation) in self.planned.items() if now >= at]
        for index, _ in due:
            del self.planned[index]
        return due

    def plan(self, index: int, incarnation: int, pause: float = 0.0) -> None:
        """Start a worker later."""
        self.planned[index] = (time.monotonic() + pause, incarnation)

    def replace(self, report: FailureReport, incarnation: int) -> bool:
        """Plan another worker in place of one that failed; tell whether it may be."""
        index, count, pause = report.worker, "", 0.0
        if not report.lost:  # a machine that is gone is nobody's fault
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
    """The program's connection with the process that forks workers."""

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
        """Tell whether it is there, and is this process's own."""
        return self.program == os.getpid() and self.process.poll() is None


_server: _Server | None = None
_server_lock = threading.Lock()


def _end_server() -> None:
    """End the server and all workers with the program."""
    if _server is not None and _server.is_alive():
        _server.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            _server.process.wait(_END_SECONDS)


weakref.finalize(log, _end_server)  # the first one of this package: at exit, whatever uses workers ends before them


def _request_fork(module: str, descriptors: list[int]) -> None:
    """Have a worker forked; ``module`` is imported by the server if this starts it."""
    global _server
    if getattr(current_process(), "_inheriting", False):
        raise WorkerError(
            "a worker imports the main module again, for something that is defined there, and that starts workers: "
            "begin below `if __name__ == '__main__':`"
        )
    with _server_lock:
        if _server is None or not _server.is_alive():
            _server = _Server(module)
        try:
            socket.send_fds(_server.control, [b"fork"], descriptors)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerError(f"no worker could be started: the process that forks them has ended ({error})") from error


def _write_job(file: BinaryIO, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Write what a worker is to do, then its surroundings, and before both where these begin."""
    file.seek(_OFFSET.size)
    try:
        pickle.dump((target, args), file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"what a process is to do cannot be sent to it ({error}): give functions of a module, or "
            "functools.partial of one",
            "collector",
        ) from error
    file.flush()
    surroundings: dict[str, Any] = {"sys_path": sys.path, "sys_argv": sys.argv, "dir": os.getcwd()}
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as work:
        if work.find(b"__main__") >= 0:  # something in it is defined in the main module
            main = sys.modules["__main__"]
            if name := getattr(main.__spec__, "name", None):
                surroundings["init_main_from_name"] = name
            elif path := getattr(main, "__file__", None):
                surroundings["init_main_from_path"] = os.path.abspath(path)
    offset = file.tell()
    pickle.dump((dict(os.environ), surroundings), file)
    file.seek(0)
    file.write(_OFFSET.pack(offset))
    file.seek(0)


def run_worker(job: int, connection: int, heartbeat: int) -> int:
    """Do a worker's job, in its process; report what goes wrong and return the exit code."""
    channel = Channel(socket.socket(fileno=connection))
    if channel.is_shut_down():  # it is not wanted any more
        return 0
    try:
        with open(job, "rb") as file:
            file.seek(*_OFFSET.unpack(file.read(_OFFSET.size)))
            environ, surroundings = pickle.load(file)  # noqa: S301 - written by the program that started this process
            os.environ.clear()
            os.environ.update(dict.fromkeys(_ONE_THREAD, "1") | environ)
            current_process()._inheriting = True  # type: ignore[attr-defined]
            spawn.prepare(surroundings)
            file.seek(_OFFSET.size)
            target, args = pickle.load(file)  # noqa: S301
            del current_process()._inheriting  # type: ignore[attr-defined]
        np.random.seed()  # noqa: NPY002 - or all workers would draw the same numbers
        torch.set_num_threads(1)
        target(channel, Heartbeat(Segment(heartbeat, _HEARTBEAT_BYTES)), *args)
    except EOFError:
        return 0  # the program has hung up
    except Exception as error:  # noqa: BLE001 - whatever it is, the program must hear of it
        channel.send("failed", FailureReport.of_exception(os.getpid(), error).to_json())
        return 1
    return 0
