"""Python programs that tests start, forked from a process that has imported torch already.

Starting ``python -m embodichain train`` takes four seconds of CPU, nearly all of which goes into importing torch and
tensordict. ``run_program`` and ``start_program`` take what follows ``python`` on a command line, and give a process
of its own, with its own folder, environment, pipes and signals, in a twentieth of that. Nothing of this package is
imported beforehand. What a test says about imports, hash seeds or variables that are read by libraries as they are
loaded still needs ``subprocess``; so do the program whose parent matters and the end of the interpreter itself.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

PRELOADED = ("torch", "tensordict", "torch._dynamo", "torch.distributed", "gymnasium", "pydantic", "tyro", "rich")
_STATUS, _RUNNING = struct.Struct("ii"), 1 << 20
_LISTEN = b"listen"
"""The message that comes with a listening socket, at which other processes send requests."""
_FORKS, _CONTROL = "TESTS_PROGRAMS_FORKS", 3
"""Variable and descriptor through which a program that was forked has others forked by the same process."""


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:  # gone, perhaps while its state was being read
        return False


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    own: list[int] = []
    with contextlib.suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # or this thread of it
                own += map(int, (task / "children").read_text().split())
    return own + [below for child in own for below in descendants(child)]


def ends_soon(pid: int, seconds: float = 60.0) -> bool:
    """Return whether a process ends within ``seconds``."""
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


def wait_until(condition: Callable[[], object], seconds: float = 100.0) -> None:
    """Wait until a condition holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain"
        time.sleep(0.01)


def is_suspended(pid: int) -> bool:
    """Return whether all threads of a process are suspended or have ended."""
    states = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states <= {"T", "t", "Z", "X"}


def suspend(pid: int) -> None:
    """Suspend a process, and wait until all its threads have stopped: its state can be inspected before a kill."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_suspended(pid))


class Program:
    """A process that can be used as one of ``subprocess.Popen``, with text in its pipes."""

    def __init__(
        self, words: tuple[str, ...], cwd: Any, env: Mapping[str, str] | None, new_session: bool, forks: bool = False
    ) -> None:
        reads, writes = zip(*(os.pipe() for _ in range(3)), strict=True)
        self.args, self.returncode = ["python", *words], None
        self.stdout, self.stderr = (os.fdopen(read, "r") for read in reads[:2])
        self._status: IO[bytes] = os.fdopen(reads[2], "rb", buffering=0)
        environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
        environment |= {_FORKS: str(_CONTROL)} if forks else {}
        request = [*words], os.fspath(cwd or os.getcwd()), environment, new_session
        try:
            _request(json.dumps(request).encode(), list(writes))
        finally:
            for write in writes:
                os.close(write)
        self.pid, _ = _STATUS.unpack(self._status.read(_STATUS.size))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            _, self.returncode = _STATUS.unpack(self._status.read(_STATUS.size))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both pipes to their ends, and wait."""
        ends = None if timeout is None else time.monotonic() + timeout
        texts: dict[str, str] = {}
        readers = [
            threading.Thread(target=lambda name=name, pipe=pipe: texts.update({name: pipe.read()}), daemon=True)
            for name, pipe in (("stdout", self.stdout), ("stderr", self.stderr))
            if not pipe.closed
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if ends is None else max(0.0, ends - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if ends is None else max(0.1, ends - time.monotonic()))
        return texts.get("stdout", ""), texts.get("stderr", "")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


def start_program(
    *words: str | Path, cwd: Any = None, env: Mapping[str, str] | None = None, start_new_session: bool = False
) -> Program:
    """Start ``python WORDS``: ``-m MODULE``, ``-c CODE`` or a script, and its arguments."""
    return Program(tuple(map(str, words)), cwd, env, start_new_session)


def run_program(
    *words: str | Path, cwd: Any = None, env: Mapping[str, str] | None = None, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` to its end, and return what it printed."""
    return _finish(start_program(*words, cwd=cwd, env=env), timeout)


def run_torchrun(
    *words: str | Path, env: Mapping[str, str] | None = None, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS``, which calls ``fork_ranks`` and torchrun, to its end, and return what it printed."""
    return _finish(Program(tuple(map(str, words)), None, env, False, forks=True), timeout)


def fork_ranks() -> None:
    """Let torchrun, in this program, start ranks that are forked as well; they print where it prints."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Program:
        rank = Program(args[1:], None, {name: value for name, value in env.items() if name != _FORKS}, True)
        for pipe, out in ((rank.stdout, 1), (rank.stderr, 2)):
            threading.Thread(target=_copy, args=(pipe, out), daemon=True).start()
        return rank

    SubprocessHandler._popen = popen


def fork_at(path: Path) -> None:
    """Accept requests at a socket ``path``, too, such as those of ``tests/scale/forked_worker.py``.

    The forking process answers them itself: while Ray connects to a cluster, no thread of this process can run.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(16)
        _request(_LISTEN, [listener.fileno()])


def _copy(pipe: IO[str], out: int) -> None:
    for line in pipe:
        os.write(out, line.encode())


def _finish(program: Program, timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        stdout, stderr = program.communicate(timeout)
    except BaseException:
        program.kill()
        raise
    with program:
        return subprocess.CompletedProcess(program.args, program.wait(), stdout, stderr)


# --- the process that forks them ------------------------------------------------------------------------------------

_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def _request(message: bytes, descriptors: list[int]) -> None:
    global _server
    if _FORKS in os.environ:
        with socket.socket(fileno=os.dup(int(os.environ[_FORKS]))) as control:
            socket.send_fds(control, [message], [*descriptors, control.fileno()])
        return
    if _server is None or _server[0].poll() is not None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        _server = process, ours
    socket.send_fds(_server[1], [message], [*descriptors, _server[1].fileno()])


def _serve(control: socket.socket) -> tuple[list[str], str, dict[str, str], bool]:
    """Fork for every request, and tell how what was forked ended; return the request in the process that is for it."""
    wake, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    listeners: dict[int, socket.socket] = {}
    events = select.poll()
    for descriptor in (control.fileno(), wake):
        events.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in events.poll()}
        if wake in ready:
            os.read(wake, 1 << 16)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = running.pop(ended[0])
                with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                    os.write(status, _STATUS.pack(ended[0], os.waitstatus_to_exitcode(ended[1])))
                os.close(status)
        if not (asking := ready - {wake}):
            continue
        connection = listeners[asked].accept()[0] if (asked := asking.pop()) in listeners else control.dup()
        with connection:
            message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 4)
        if not message and asked not in listeners:
            os._exit(0)
        if message == _LISTEN:
            listener, requests = descriptors
            listeners[listener] = socket.socket(fileno=listener)
            events.register(listener, select.POLLIN)
            os.close(requests)
        if message in (b"", _LISTEN):
            continue
        stdout, stderr, status, *requests = descriptors
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            for inherited in (control, *listeners.values()):
                inherited.detach()
            words, cwd, env, new_session = json.loads(message)
            kept = _CONTROL if _FORKS in env else _CONTROL - 1
            if _FORKS in env:
                os.dup2(requests[0], _CONTROL, inheritable=False)
            os.closerange(kept + 1, 1 << 12)
            return words, cwd, env, new_session
        os.write(status, _STATUS.pack(pid, _RUNNING))
        running[pid] = status
        for descriptor in (stdout, stderr, *requests):
            os.close(descriptor)


def _become(words: list[str], cwd: str, env: dict[str, str], new_session: bool) -> None:
    """Be a Python that was just started with these words."""
    import numpy as np

    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if new_session:
        os.setsid()
    np.random.seed()  # noqa: NPY002 - else all of them would draw the same numbers
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.orig_argv = [sys.executable, *words]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        words = words[1:]
    kind, name, *arguments = words if words[0] in ("-m", "-c") else ("", *words)
    if kind == "-m":
        sys.path.insert(0, cwd)
        sys.argv = ["-m", *arguments]
        runpy._run_module_as_main(name)
        return
    sys.path.insert(0, "" if kind == "-c" else os.path.dirname(os.path.abspath(name)))
    sys.argv = [kind or name, *arguments]
    if not kind:
        main.__dict__["__file__"] = name
    source = name if kind else Path(name).read_text()
    exec(compile(source, "<string>" if kind else name, "exec"), main.__dict__)


def _end(run: Callable[..., None], *args: Any) -> None:
    """Run something and end as Python does, without taking every imported module apart, which takes a second."""
    code: Any = 0
    try:
        run(*args)
    except SystemExit as error:
        code = error.code
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, signal.SIG_IGN)  # the end of the program that starts it is its end
    for _name in PRELOADED:
        importlib.import_module(_name)
    gc.freeze()
    _end(_become, *_serve(socket.socket(fileno=int(sys.argv[1]))))
