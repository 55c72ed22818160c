"""One simulation worker process, seen from the engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.shared_buffer import SharedBuffer
from embodichain.agents.processes import boot
from embodichain.agents.processes.failure import FailureReport

_WORK = "embodichain.agents.engine.worker"
"""The module whose ``run`` is what a worker does."""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerProcess:
    """A child process with a socket to it; it runs in its own process group and out of reach of Ctrl-C."""

    def __init__(self, cfg: OnlineDataEngineCfg, index: int, incarnation: int) -> None:
        self.index = index
        self.incarnation = incarnation
        self.started = time.monotonic()
        self.joined = 0.0
        """When the worker was given the buffer; 0 while it is still building its environment."""
        self.node = socket.gethostname()
        self.lost = self.unreachable = False
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The job is handed over as a nameless file: a packet could not hold a config of any size.
        with other, os.fdopen(os.memfd_create("embodichain-job"), "w+") as document:
            job = {"sys_path": sys.path, "worker": index, "incarnation": incarnation, "cfg": cfg.to_dict()}
            document.write(json.dumps(job))
            document.seek(0)
            descriptors = [other.fileno(), document.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-P", boot.__file__, *map(str, (os.getpid(), *descriptors)), _WORK],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**dict.fromkeys(_ONE_THREAD, "1"), **os.environ},
                process_group=0,
            )
        self.socket.setblocking(False)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None if the worker has hung up."""
        try:
            message = self.socket.recv(1 << 20)
        except ConnectionResetError:
            return None
        return json.loads(message) if message else None

    def share(self, buffer: SharedBuffer) -> None:
        """Hand over the buffer."""
        terms = {
            "nbytes": buffer.segment.nbytes,
            "layout": buffer.layout.to_json(),
            "num_rows": buffer.num_rows,
            "max_steps": buffer.max_steps,
            "num_workers": buffer.num_workers,
        }
        self.joined = time.monotonic()
        try:
            socket.send_fds(self.socket, [json.dumps(terms).encode()], [buffer.segment.fd])
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died; the next receive() tells

    def last_words(self) -> FailureReport:
        """Wait for a worker that has hung up to end, and say how it did."""
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return FailureReport(self.index, "closed its connection without ending")
        killed = code < 0
        words = f"was killed by {signal.Signals(-code).name}" if killed else f"ended with exit code {code}"
        return FailureReport(self.index, words)

    def wait(self, seconds: float) -> bool:
        """Wait for the process to end; tell whether it did."""
        try:
            self._process.wait(timeout=max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End the process and whatever it started, now, and reap it."""
        if self._process.poll() is None:  # once reaped, its number may be somebody else's
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(5.0)
        self.socket.close()
