"""The process that worker processes are forked from; ``pool.py`` runs it as a script, by path.

It imports what workers need and runs nothing of the user's program, so workers inherit no thread, lock or GL context.
"""

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys

_PR_SET_PDEATHSIG = 1
_POOL = "embodichain.agents.processes.pool"
STATUS, RUNNING = struct.Struct("ii"), 1 << 20
"""What is written to a worker's status pipe: process id and exit code, which is ``RUNNING`` when it starts."""


def die_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


class ForkServer:
    """Forks a worker for every request, reports how it ended, and ends all workers with the program."""

    def __init__(self, control: socket.socket, program: int) -> None:
        self._control = control
        self._statuses: dict[int, int] = {}
        """Write ends of the status pipes, by process id."""
        self._program = os.pidfd_open(program)  # tells of its end however many of its children hold our socket
        self._wake, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._inherited = [self._program, self._wake, write, control.fileno()]

    def serve(self) -> None:
        """Fork workers until the program ends; return in every worker, with its descriptors in ``self.job``."""
        signal.signal(signal.SIGTERM, lambda *_: self._end_all())
        events = select.poll()
        for descriptor in (self._control.fileno(), self._wake, self._program):
            events.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in events.poll()}
            if self._program in ready:
                self._end_all()
            if self._wake in ready:
                os.read(self._wake, 1 << 16)
                self._reap()
            if self._control.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(self._control, 64, 4)
                if not message:
                    self._end_all()
                if self._fork(*descriptors):
                    self.job = descriptors[:3]
                    return

    def _fork(self, job: int, connection: int, heartbeat: int, status: int) -> bool:
        """Start a worker; tell whether this is it."""
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setpgid(0, 0)  # whatever it starts can be ended together with it
            die_with_parent(server)
            for descriptor in (*self._inherited, *self._statuses.values(), status):
                os.close(descriptor)
            self._control.detach()
            return True
        with contextlib.suppress(OSError):  # it was quicker
            os.setpgid(pid, pid)
        self._statuses[pid] = status
        self._report(status, pid, RUNNING)
        for descriptor in (job, connection, heartbeat):
            os.close(descriptor)
        return False

    def _reap(self) -> None:
        """End what workers that ended have started, and report their exit codes."""
        while self._statuses and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            _kill_group(ended.si_pid)  # before it is reaped: until then its number is its own
            _, code = os.waitpid(ended.si_pid, 0)
            status = self._statuses.pop(ended.si_pid)
            self._report(status, ended.si_pid, os.waitstatus_to_exitcode(code))
            os.close(status)

    def _report(self, status: int, pid: int, code: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
            os.write(status, STATUS.pack(pid, code))

    def _end_all(self) -> None:
        for pid in self._statuses:
            _kill_group(pid)
        for pid in self._statuses:
            with contextlib.suppress(ChildProcessError):  # it was reaped just now
                os.waitpid(pid, 0)
        os._exit(0)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Serve; in a worker, do its job and end the process."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # Ctrl-C and the like are the program's to handle
        signal.signal(number, signal.SIG_IGN)
    program, control, modules, sys.path[:] = json.loads(sys.argv[1])
    server = ForkServer(socket.socket(fileno=control), program)
    for name in (_POOL, *modules):
        with contextlib.suppress(ImportError):  # the worker that needs it reports it
            importlib.import_module(name)
    server.serve()
    code: int = importlib.import_module(_POOL).run_worker(*server.job)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking every imported module apart first would take a second


if __name__ == "__main__":
    main()
