"""Worker processes: how they are started, what they inherit, how they end, and what a Ctrl-C does meanwhile."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodichain.agents.processes.channel import Channel
from embodichain.agents.processes.failure import REPORT_BYTES, FailureReport
from embodichain.agents.processes.pool import (
    HangDetector,
    Heartbeat,
    Restarts,
    WorkerPool,
    WorkerProcess,
    restart_delay,
)
from embodichain.errors import ConfigError, WorkerError
from tests.programs import Program, ends_soon, is_alive, start_program

INTERRUPTED = """
import signal, sys
from embodichain.agents.processes.pool import WorkerProcess
from tests.agents.processes.test_pool import blocked_signals

heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
print("begins", flush=True)
child = WorkerProcess(blocked_signals, (sys.argv[1],))
assert child.wait(100.0)
print("ended", child.describe_end(), "after", len(heard), "interruptions", flush=True)
"""

IN_MAIN = """
from embodichain.agents.processes.pool import WorkerProcess
from embodichain.errors import WorkerError

print("main", flush=True)

def work(channel, heartbeat):
    channel.send("done", __name__)

{guard}
    worker = WorkerProcess(work, ())
    message = worker.channel.receive(100.0)
    print(message.kind, message.content(), flush=True)
"""


def run_program(source: str, folder: Path, *arguments: str) -> Program:
    (folder / "program.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    return start_program(folder / "program.py", *arguments, env=environment, start_new_session=True)


# --- what workers do ------------------------------------------------------------------------------------------------


def blocked_signals(channel: Channel, heartbeat: Heartbeat, path: str) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    Path(path).write_text(str(sorted(int(number) for number in blocked)))


def describe(channel: Channel, heartbeat: Heartbeat, name: str) -> None:
    drawn = float(np.random.rand())  # noqa: NPY002 - what an environment may use
    about = {"variable": os.environ.get(name), "group": os.getpgid(0), "pid": os.getpid(), "drawn": drawn}
    about |= {"parent": os.getppid(), "threads": len(os.listdir("/proc/self/task"))}
    channel.send("about", {**about, "folder": os.getcwd()})


def fail(channel: Channel, heartbeat: Heartbeat, how: str, index: int = 0, incarnation: int = 0) -> None:
    if how == "raise":
        raise ValueError("no such robot")
    if how == "exit":
        os._exit(7)
    if how == "hang":
        for _ in range(5):
            heartbeat.beat()
    if how != "build":
        helper = subprocess.Popen(["sleep", "1000"])
        channel.send("helper", helper.pid)
    time.sleep(1000.0)


# --- starting -------------------------------------------------------------------------------------------------------


def test_workers_know_the_present_surroundings_and_are_forked_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has imported torch already, so that they start quickly."""
    drawn, pids, parents = set(), set(), set()
    for value in ("one", "two", "three"):
        monkeypatch.setenv("EMBODICHAIN_TEST", value)
        monkeypatch.chdir(tmp_path)
        worker = WorkerProcess(describe, ("EMBODICHAIN_TEST",))
        message = worker.channel.receive(100.0)
        assert message is not None
        about = message.content()
        assert (about["variable"], about["folder"], about["threads"]) == (value, str(tmp_path), 1)
        assert about["pid"] == about["group"] == worker.pid
        drawn.add(about["drawn"])
        pids.add(worker.pid)
        parents.add(about["parent"])
        assert worker.describe_end() == "ended with exit code 0"
        worker.kill()
    assert len(drawn) == len(pids) == 3
    assert len(parents) == 1
    assert "libtorch" in Path(f"/proc/{parents.pop()}/maps").read_text()


@pytest.mark.parametrize("after", [0.05, 0.4, 1.0])
def test_an_interruption_while_workers_start_is_the_program_s_alone(tmp_path: Path, after: float) -> None:
    """The server that forks them imports torch first, which takes long enough to be interrupted."""
    process = run_program(INTERRUPTED, tmp_path, str(tmp_path / "blocked"))
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, complaints = process.communicate(timeout=120)
    assert "ended ended with exit code 0 after 1 interruptions" in said, complaints
    assert complaints == ""
    assert (tmp_path / "blocked").read_text() == "[]"


@pytest.mark.parametrize("guarded", [True, False])
def test_a_worker_can_use_what_the_main_module_defines(tmp_path: Path, guarded: bool) -> None:
    """It imports the main module again for that, so a main guard is needed; without one that is an error."""
    process = run_program(IN_MAIN.format(guard='if __name__ == "__main__":' if guarded else "if True:"), tmp_path)
    said, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    if guarded:
        assert said.split() == ["main", "main", "done", "__mp_main__"]
    else:
        assert said.count("main\n") == 2
        assert "if __name__ == '__main__'" in said


UNWANTED = """
import sys
from multiprocessing.connection import wait
from pathlib import Path
from embodichain.agents.processes.pool import WorkerProcess
from tests.agents.processes.test_pool import blocked_signals

workers = [WorkerProcess(blocked_signals, (sys.argv[1] + str(number),)) for number in range(2)]
workers[0].kill()
assert not wait([workers[1]._status.fileno()], 0.0), "it waited for the server to import torch"
assert workers[0].pid == 0
assert workers[1].wait(100.0)
print([Path(sys.argv[1] + str(number)).exists() for number in range(2)])
"""


def test_a_worker_that_is_not_wanted_any_more_does_not_begin(tmp_path: Path) -> None:
    process = run_program(UNWANTED, tmp_path, str(tmp_path / "begun"))
    said, complaints = process.communicate(timeout=120)
    assert said == "[False, True]\n", complaints


def test_what_cannot_be_sent_is_told() -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent .*lambda.*functools\.partial"):
        WorkerProcess(blocked_signals, (lambda: None,))


# --- ending ---------------------------------------------------------------------------------------------------------


def first_event(pool: WorkerPool, kind: str) -> Any:
    deadline = time.monotonic() + 120.0  # a new server imports torch
    while time.monotonic() < deadline:
        for worker, said, content in pool.poll(0.05):
            if said == kind:
                return worker, content
    raise AssertionError(f"no {kind}")


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("raise", "raised ValueError: no such robot"),
        ("exit", "ended with exit code 7"),
        ("hang", "hung: it has not come back from a step for 0.5 s"),
        ("build", "did not build its environment within start_timeout (1 s)"),
    ],
)
def test_a_pool_tells_how_workers_failed(how: str, what: str) -> None:
    start_timeout = 1.0 if how == "build" else 100.0  # it includes what the server imports
    pool = WorkerPool(fail, lambda *worker: (how, *worker), start_timeout, step_timeout=0.5)
    started = pool.start(3, 1)
    worker, report = first_event(pool, "failed")
    assert worker is started
    assert (report.worker, report.describe()) == (3, what)
    assert report.hung == (how in ("hang", "build"))
    assert worker.is_closed
    assert ends_soon(worker.pid)
    assert list(pool.poll(0.0)) == []
    assert ("In the worker" in str(report.as_error())) == (how == "raise")


@pytest.mark.parametrize("way", ["killed", "dropped", "stopped", "its process"])
def test_whatever_a_worker_started_ends_with_it(way: str) -> None:
    pool = WorkerPool(fail, lambda *_: ("run",), start_timeout=100.0, step_timeout=100.0)
    worker = pool.start()
    helper = first_event(pool, "helper")[1]
    pid = worker.pid
    assert is_alive(helper)
    if way == "its process":
        os.kill(pid, signal.SIGKILL)
        assert first_event(pool, "failed")[1].what == "was killed by SIGKILL"
    elif way == "killed":
        worker.kill()
        worker.kill()
    elif way == "stopped":
        pool.stop()
    else:
        del worker, pool
        gc.collect()
    assert ends_soon(pid)
    assert ends_soon(helper)


def test_without_its_server_workers_end_and_new_ones_can_be_started() -> None:
    pool = WorkerPool(fail, lambda *_: ("run",), start_timeout=100.0, step_timeout=100.0)
    first = pool.start()
    first_event(pool, "helper")
    parent = int(Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    assert first_event(pool, "failed")[1].what == "was killed by SIGKILL"
    second = pool.start()
    first_event(pool, "helper")
    assert is_alive(second.pid)
    pool.stop()
    assert ends_soon(second.pid)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_signals_that_make_a_program_save_end_no_worker(number: signal.Signals) -> None:
    """A scheduler sends them to all processes of a job."""
    pool = WorkerPool(fail, lambda *_: ("run",), start_timeout=100.0, step_timeout=100.0)
    worker = pool.start()
    first_event(pool, "helper")
    server = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (worker.pid, server):
        ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        assert ignored is not None
        assert int(ignored[1], 16) & (1 << (number - 1))
        os.kill(pid, number)
    assert list(pool.poll(0.1)) == []
    assert is_alive(worker.pid)
    pool.stop()


# --- watching -------------------------------------------------------------------------------------------------------


def test_a_worker_that_was_suspended_together_with_the_program_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(now * 1e9))
    worker: Any = SimpleNamespace(index=0, started=now, joined=now, heartbeat=Heartbeat())
    hangs = HangDetector(start_timeout=60.0, step_timeout=5.0)
    for _ in range(3):
        worker.heartbeat.beat()
    now += 100.0  # nobody looked for so long
    hangs.look()
    assert hangs.check(worker) is None
    for _ in range(6):
        now += 1.0
        hangs.look()
    report = hangs.check(worker)
    assert report is not None
    assert report.hung
    worker.heartbeat.beat(busy=False)
    now += 100.0
    hangs.look()
    assert hangs.check(worker) is None
    for _ in range(3):  # one that waits gives signs of life as well
        for _ in range(4):
            now += 1.0
            hangs.look()
            assert hangs.check(worker) is None
        worker.heartbeat.beat(busy=False)
    for _ in range(6):
        now += 1.0
        hangs.look()
    report = hangs.check(worker)
    assert report is not None
    assert report.what == "hung: it has sent no heartbeat for 5 s while it waited for work"


def test_workers_are_replaced_after_longer_and_longer_pauses_until_the_budget_is_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    restarts = Restarts("worker {}", num_workers=2, max_restarts=3)
    assert restarts.due() == [(0, 0), (1, 0)]
    pauses = []
    for incarnation in range(3):
        assert restarts.replace(FailureReport(1, "died"), incarnation)
        pauses.append(restarts.planned[1][0] - now)
        assert (restarts.due() == []) == (pauses[-1] > 0.0)
        now += pauses[-1]
        assert incarnation == 0 or restarts.due() == [(1, incarnation + 1)]
    assert pauses == [0.0, 0.5, 1.0] == [restart_delay(count) for count in (1, 2, 3)]
    assert not restarts.replace(FailureReport(1, "died"), 3)
    assert restarts.replace(FailureReport(1, "is gone with its node", lost=True), 3)  # nobody's fault
    assert restarts.replaced == [0, 4]


def test_budget_and_pauses_recover_while_workers_do_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    restarts = Restarts("worker {}", num_workers=2, max_restarts=2, silence=100.0)
    restarts.due()
    for day in range(50):  # a fault every day ends no run, and is answered at once
        now = 86_400.0 * (day + 1)
        assert restarts.replace(FailureReport(0, "died"), day)
        assert restarts.planned[0] == (now, day + 1)
    assert restarts.replaced == [50, 0]
    now += 90_000.0
    pauses = []
    for _ in range(2):
        assert restarts.replace(FailureReport(0, "hung", hung=True), 50)
        pauses.append(restarts.planned[0][0] - now)
        now += 699.0  # of which it was silent for 100 seconds: it has not worked for long
    assert pauses == [0.0, 0.5]
    assert not restarts.replace(FailureReport(0, "hung", hung=True), 52)
    assert restarts.replace(FailureReport(1, "died"), 0)  # the budget of another worker is its own


def test_an_error_tells_what_the_worker_did() -> None:
    try:
        raise KeyError("gripper")
    except KeyError as caught:
        report = FailureReport.from_json(FailureReport.of_exception(2, caught).to_json())
    error = report.as_error("the collecting process", replacements=2)
    assert isinstance(error, WorkerError)
    assert isinstance(error.__cause__, KeyError)
    assert str(error).startswith("the collecting process raised KeyError: 'gripper', after 2 replacements\n\nIn the w")


LONG = {"ascii": "x", "umlauts": "\u00fc", "emoji": "\U0001f980", "control": "\x07", "half a pair": "\ud83d"}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("problems", [0, 40])
def test_a_report_of_any_text_fits_and_can_be_read_again(kind: str, problems: int) -> None:
    """It begins and ends as the text does, and no character is cut in two."""
    text = f"begins {LONG[kind] * 50_000} ends"
    try:
        raise ConfigError([text] * problems) if problems else ValueError(text)
    except ValueError as caught:
        report = FailureReport.of_exception(2, caught)
    words = report.to_json().encode()
    assert len(words) <= REPORT_BYTES
    again = FailureReport.from_json(words.decode())
    assert again == report
    assert again.message.rstrip().endswith(" ends")
    assert "begins " in again.message
    assert "(cut)" in again.message
    shown = LONG[kind].encode(errors="backslashreplace").decode()
    assert set(again.message.replace("(cut)", "")) <= set(shown) | set(str(ConfigError(["begins  ends."] * 40)))
    assert len(again.message.encode()) > 2000
    assert isinstance(again.original(), ValueError)


def speak(channel: Channel, heartbeat: Heartbeat, *worker: int) -> None:
    raise RuntimeError("\U0001f980" * 100_000)


def test_a_long_report_arrives() -> None:
    pool = WorkerPool(speak, lambda *worker: worker, start_timeout=100.0, step_timeout=100.0)
    pool.start()
    _, report = first_event(pool, "failed")
    assert report.describe().startswith("raised RuntimeError: \U0001f980\U0001f980")


def wait_for_work(channel: Channel, heartbeat: Heartbeat) -> None:
    channel.receive(1000.0)


def test_threads_may_ask_for_the_pid_of_a_worker_that_is_being_killed() -> None:
    for pause in np.linspace(0.0, 0.01, 40):
        worker, pids = WorkerProcess(wait_for_work, ()), list[int]()
        threads = [threading.Thread(target=lambda w, p: p.append(w.pid), args=(worker, pids)) for _ in range(3)]
        threads += [threading.Thread(target=worker.kill)]
        for thread in threads:
            thread.daemon = True
            time.sleep(pause)
            thread.start()
        for thread in threads:
            thread.join(100.0)
            assert not thread.is_alive()
        assert len(pids) == 3
        assert len(set(pids) - {0}) <= 1
        assert all(ends_soon(pid) for pid in set(pids) - {0})
