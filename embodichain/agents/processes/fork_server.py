"""The fork server, from which worker processes are forked; ``pool.py`` runs it as a script.

It imports the modules that workers need but runs no user code, so workers inherit no thread, lock or GL context.
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
"""Record in a worker's status pipe: process id and exit code, which is ``RUNNING`` in the first record."""


def die_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent exits for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:  # the parent exited before the call above
        os._exit(1)


class ForkServer:
    """Forks a worker per request, reports exit codes, and kills all workers when the program exits."""

    def __init__(self, control: socket.socket, program: int) -> None:
        self._control = control
        self._statuses: dict[int, int] = {}
        """Write ends of the status pipes by process id."""
        self._program = os.pidfd_open(program)  # the socket may stay open in the program's children
        self._wake, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._inherited = [self._program, self._wake, write, control.fileno()]

    def serve(self) -> None:
        """Fork workers until the program exits. Returns only in a worker, with its descriptors in ``self.job``."""
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
        """Fork a worker; return True in the worker, False in the server."""
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setpgid(0, 0)  # so that its child processes can be killed with it
            die_with_parent(server)
            for descriptor in (*self._inherited, *self._statuses.values(), status):
                os.close(descriptor)
            self._control.detach()
            return True
        with contextlib.suppress(OSError):  # the worker has already done so
            os.setpgid(pid, pid)
        self._statuses[pid] = status
        self._report(status, pid, RUNNING)
        for descriptor in (job, connection, heartbeat):
            os.close(descriptor)
        return False

    def _reap(self) -> None:
        """Kill the child processes of workers that have exited, and report their exit codes."""
        while self._statuses and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            _kill_group(ended.si_pid)  # before it is reaped, as its id may be reused afterwards
            _, code = os.waitpid(ended.si_pid, 0)
            status = self._statuses.pop(ended.si_pid)
            self._report(status, ended.si_pid, os.waitstatus_to_exitcode(code))
            os.close(status)

    def _report(self, status: int, pid: int, code: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # the owner has closed its end
            os.write(status, STATUS.pack(pid, code))

    def _end_all(self) -> None:
        for pid in self._statuses:
            _kill_group(pid)
        for pid in self._statuses:
            with contextlib.suppress(ChildProcessError):  # already reaped
                os.waitpid(pid, 0)
        os._exit(0)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Run the fork server; in a forked worker, run its job and exit."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # the program handles Ctrl-C and the like
        signal.signal(number, signal.SIG_IGN)
    program, control, modules, sys.path[:] = json.loads(sys.argv[1])
    server = ForkServer(socket.socket(fileno=control), program)
    for name in (_POOL, *modules):
        with contextlib.suppress(ImportError):  # reported by the worker that needs the module
            importlib.import_module(name)
    server.serve()
    code: int = importlib.import_module(_POOL).run_worker(*server.job)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # interpreter shutdown with all these modules would take a second


if __name__ == "__main__":
    main()
