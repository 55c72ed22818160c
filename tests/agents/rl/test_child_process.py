"""Processes that simulate: how they are started, and what a Ctrl-C does meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from embodichain.agents.rl.collector.background.child_process import ChildProcess
from embodichain.errors import ConfigError

PROGRAM = """
import signal, sys
from embodichain.agents.rl.collector.background.child_process import ChildProcess
from tests.agents.rl.test_child_process import blocked_signals

if __name__ == "__main__":
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    print("begins", flush=True)
    child = ChildProcess(blocked_signals, (sys.argv[1],))
    assert child.wait(60.0)
    print("ended", child.exit_words(), "after", len(heard), "interruptions", flush=True)
"""


def blocked_signals(path: str) -> None:
    """Write down which signals are blocked in a child."""
    from embodichain.agents.rl.collector.background.child_process import begin_as_child

    begin_as_child()
    with open(path, "w") as file:
        file.write(str(sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))))


@pytest.mark.parametrize("after", [0.05, 0.4, 1.0])
def test_an_interruption_while_processes_start_is_the_parents_alone(tmp_path, after):
    """The server that starts them imports torch first, which takes long enough to be interrupted."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "blocked")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, complaints = process.communicate(timeout=60)
    assert "ended ended with exit code 0 after 1 interruptions" in said, complaints
    assert complaints == ""
    assert (tmp_path / "blocked").read_text() == "[]"


def test_what_cannot_be_sent_is_told():
    with pytest.raises(ConfigError, match=r"cannot be sent .*lambda.*functools\.partial"):
        ChildProcess(blocked_signals, (lambda: None,))
