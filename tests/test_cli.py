"""The ``embodichain`` command: help without heavy imports, exit codes, and messages instead of tracebacks."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import types

import pytest

from embodichain import __version__
from embodichain.cli import main as cli
from embodichain.errors import ConfigError

HEAVY = ("torch", "tensordict", "mujoco", "gymnasium", "pydantic", "tyro", "numpy", "rich", "yaml")


def run_python(code: str, *args: str, **kwargs):
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120, **kwargs)


@pytest.fixture
def command(monkeypatch):
    """Return a function that makes ``embodichain fake`` do something."""

    def install(action):
        module = types.ModuleType("embodichain.cli.fake")
        module.main = action
        monkeypatch.setitem(sys.modules, "embodichain.cli.fake", module)
        monkeypatch.setattr(cli, "COMMANDS", {"fake": "does something"})

    monkeypatch.delenv(cli.TRACEBACK_VARIABLE, raising=False)
    return install


def fail(argv):
    raise ConfigError(["a: expected b", "c: expected d"], "x.json")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"], ["nonsense"], []])
def test_nothing_heavy_is_imported_before_a_command_runs(words):
    code = (
        "import sys; from embodichain.cli.main import main; main(sys.argv[1:]); "
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    assert run_python(code, *words).stdout.splitlines()[-1] == "HEAVY []"


def test_commands_read_their_options_before_they_import_what_takes_seconds():
    """What is wrong with options, the help and the first line of a training come at once."""
    modules = [f"embodichain.cli.{name}" for name in cli.COMMANDS] + ["embodichain.agents.rl.arguments"]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {modules}]"
    slow = ("torch", "tensordict", "mujoco", "pyarrow", "ray")
    done = run_python(f"{code}; print([name for name in {slow} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, summary in cli.COMMANDS.items():
        assert f"  {name}" in shown
        assert summary in shown


def test_the_module_of_every_command_is_there():
    assert [name for name in cli.COMMANDS if importlib.util.find_spec(f"embodichain.cli.{name}") is None] == []


def test_no_command_is_a_usage_error(capsys):
    assert cli.main([]) == 2
    assert "usage: embodichain" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"embodichain {__version__}\n"


def test_a_command_of_another_name_is_the_same(monkeypatch):
    """``embodichain train-rl``, as the guides of the framework have it."""
    given = []
    module = types.ModuleType("embodichain.cli.train")
    module.main = lambda argv: given.append(argv) or 0
    monkeypatch.setitem(sys.modules, "embodichain.cli.train", module)
    assert cli.main(["train-rl", "--config", "c.json"]) == 0
    assert given == [["--config", "c.json"]]


def test_an_unknown_command_gets_the_nearest(capsys):
    assert cli.main(["plya"]) == 2
    assert "unknown command 'plya'. Did you mean 'play'?" in capsys.readouterr().err


def test_arguments_and_exit_code_pass_through(command):
    seen = []
    command(lambda argv: seen.append(argv) or 7)
    assert cli.main(["fake", "a", "--b"]) == 7
    assert seen == [["a", "--b"]]


def test_our_errors_are_messages(command, capsys):
    command(fail)
    assert cli.main(["fake"]) == 2
    shown = capsys.readouterr().err
    assert "x.json: 2 problems\n  - a: expected b\n  - c: expected d" in shown
    assert "Traceback" not in shown


def test_a_traceback_on_request(command, capsys, monkeypatch):
    command(fail)
    assert cli.main(["fake", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    assert cli.main(["fake"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_other_errors_are_not_hidden(command):
    def fail_otherwise(argv):
        raise ZeroDivisionError

    command(fail_otherwise)
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


RUN_FAKE = """
import sys, time, types
from embodichain.cli import main as cli
module = types.ModuleType("embodichain.cli.fake")
module.main = {action}
sys.modules["embodichain.cli.fake"] = module
cli.COMMANDS = {{"fake": ""}}
sys.exit(cli.main(["fake"]))
"""


def test_ctrl_c_ends_without_a_traceback():
    code = RUN_FAKE.format(action="lambda argv: (print('ready', flush=True), time.sleep(60))")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == 130
    assert shown == "interrupted\n"


def test_a_closed_pipe_ends_without_a_traceback():
    code = RUN_FAKE.format(action="lambda argv: [print('x' * 1000) for _ in range(10_000)] and 0")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_python_m_embodichain_is_the_same():
    shown = subprocess.run(
        [sys.executable, "-m", "embodichain", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout == f"embodichain {__version__}\n"
