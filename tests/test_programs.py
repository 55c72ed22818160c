"""Programs that are forked rather than started behave as those of ``python`` do: tests of them rely on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import fork_at, run_program, start_program

TELL = """
import json, os, sys
names = [name for name in sys.modules if name.partition(".")[0] in ("embodichain", "tests", "mujoco")]
print(json.dumps([__name__, sys.argv[1:], os.getcwd(), dict(os.environ), sys.path, names, os.isatty(0), os.getsid(0)]))
print("warned", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_it_has_the_words_folder_environment_and_path_of_a_python(tmp_path, kind):
    (tmp_path / "tell.py").write_text(TELL)
    words = {"-c": ["-c", TELL], "-m": ["-m", "tell"], "script": [str(tmp_path / "tell.py")]}[kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "/nowhere", "ONLY": "here"}
    done = run_program(*words, "a", "b c", cwd=tmp_path, env=environment)
    command = [sys.executable, *words, "a", "b c"]
    expected = subprocess.run(command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == expected.returncode == 7
    assert done.stderr.encode() == expected.stderr
    assert json.loads(done.stdout) == json.loads(expected.stdout)
    assert json.loads(done.stdout)[5] == []  # nothing that is tested was there before


def test_it_ends_as_a_python_does():
    cases = {"pass": 0, "1 / 0": 1, "import sys; sys.exit('no')": 1, "import os, signal; os.kill(os.getpid(), 9)": -9}
    for code, expected in cases.items():
        assert run_program("-c", code).returncode == expected, code
    told = "import atexit, threading; atexit.register(print, 'last'); threading.Timer(0.1, print, ['before']).start()"
    assert run_program("-c", told).stdout == "before\nlast\n"
    with start_program("-c", "print('up', flush=True); import time; time.sleep(60)", start_new_session=True) as program:
        assert program.stdout.readline() == "up\n"
        assert program.poll() is None
        assert os.getsid(program.pid) == program.pid
        with pytest.raises(subprocess.TimeoutExpired):
            program.communicate(timeout=0.05)
        program.send_signal(signal.SIGINT)
        assert program.wait(timeout=100) == -signal.SIGINT


def test_random_numbers_are_its_own():
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    first, second = (run_program("-c", code).stdout.split() for _ in range(2))
    assert not set(first) & set(second)


def test_a_node_of_ray_has_its_workers_forked(tmp_path):
    fork_at(tmp_path / "forks")
    script = Path(__file__).parent / "scale" / "forked_worker.py"
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['ONLY'], os.getpgid(0) == os.getpid()]))"
    environment = {**os.environ, "TESTS_FORKED_AT": str(tmp_path / "forks"), "ONLY": "here"}
    for end, expected in (("", 0), ("; sys.exit(7)", 7)):
        command = [sys.executable, script, "-c", code + end, "a b", "--language=PYTHON"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == expected, done.stderr
        assert json.loads(done.stdout) == [["a b"], "here", True]
