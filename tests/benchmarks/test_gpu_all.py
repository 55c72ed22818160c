"""The planner of ``benchmarks.gpu_all``, with processes that are really killed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import tyro

from benchmarks import gpu_all
from benchmarks.gpu_all import main
from benchmarks.gpu_jobs import ALL, Job, all_jobs
from embodichain.cli import envs
from embodichain.cli.options import parse_options
from tests.benchmarks.fake_jobs import sleeper
from tests.programs import ends_soon, is_alive, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(gpu_all, "_GRACE", 1.0)


@pytest.fixture
def folders(tmp_path):
    return ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]


def records(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "out" / "gpu_all.json").read_text())


def span(tmp_path: Path, name: str) -> tuple[float, float]:
    began = (tmp_path / "work" / f"{name}.began").read_text().split()[0]
    return float(began), float((tmp_path / "work" / f"{name}.ended").read_text())


def overlap(tmp_path: Path, one: str, other: str) -> bool:
    a, b = span(tmp_path, one), span(tmp_path, other)
    return a[0] < b[1] and b[0] < a[1]


def test_jobs_end_as_they_end(tmp_path, folders):
    crash = Job("crash", "fake", ("-c", "raise ValueError('so it is')"), 1.0)
    jobs = [sleeper("good"), sleeper("misses", code=1), sleeper("odd", code=7), crash]
    assert main([*folders, "--minutes", "1"], jobs) == 1
    seen = {
        name: record["status"]
        for name, record in records(tmp_path).items()
        if name in ("good", "misses", "odd", "crash")
    }
    assert seen == {"good": "done", "misses": "done", "odd": "failed", "crash": "failed"}
    assert "ValueError: so it is" in records(tmp_path)["crash"]["log"]
    assert "good has spoken" in records(tmp_path)["good"]["log"]


def test_what_hangs_is_killed_with_all_that_it_started(tmp_path, folders):
    program = """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        open(r"{work}/pids", "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(100)
    """
    hangs = Job("hangs", "fake", ("-c", textwrap.dedent(program)), -8.0)  # a limit of six seconds
    began = time.monotonic()
    assert main([*folders, "--minutes", "1"], [hangs, sleeper("good")]) == 1
    assert 5.0 < time.monotonic() - began < 90.0  # it would sleep for longer
    assert records(tmp_path)["hangs"]["status"] == "out of time"
    assert records(tmp_path)["good"]["status"] == "done"
    for pid in (tmp_path / "work" / "pids").read_text().split():
        assert ends_soon(int(pid))


def test_all_of_it_ends_in_time_and_goes_on_later(tmp_path, folders):
    jobs = [sleeper("quick"), sleeper("slow", 100.0, least=0.1), sleeper("long", told=1000.0)]
    began = time.monotonic()
    assert main([*folders, "--minutes", "0.15"], jobs) == 1
    assert time.monotonic() - began < 60.0  # it would sleep for longer
    seen = records(tmp_path)
    assert (seen["quick"]["status"], seen["slow"]["status"]) == ("done", "out of time")
    assert "long" not in seen  # there was no time for it
    first = span(tmp_path, "quick")
    jobs[1] = sleeper("slow")
    assert main([*folders, "--minutes", "1"], jobs[:2]) == 0
    assert span(tmp_path, "quick") == first  # it was not run again


def test_the_gpu_is_shared_by_some_and_given_to_one(tmp_path, folders):
    several = len(os.sched_getaffinity(0)) > 1
    jobs = [
        sleeper("quiet", 0.5, cores=ALL),
        sleeper("left", 0.5, gpu="shared", beside=["processor"] if several else []),
        sleeper("alone", 0.5, gpu="alone"),
        sleeper("late", 0.5, gpu="shared"),
        sleeper("processor", 0.5),
    ]
    assert main([*folders, "--minutes", "1"], jobs) == 0
    assert not any(overlap(tmp_path, "quiet", job.name) for job in jobs[1:])
    assert not overlap(tmp_path, "left", "alone")
    assert not overlap(tmp_path, "alone", "late")
    assert span(tmp_path, "alone")[0] < span(tmp_path, "late")[0]  # nobody overtakes what waits
    if several:
        assert overlap(tmp_path, "left", "processor")
        assert (tmp_path / "work" / "left.began").read_text().split()[1] == "1"


def test_two_that_write_one_file_take_turns(tmp_path, folders):
    def left(name):
        return lambda work: int(not (work / f"{name}.ended").exists())

    jobs = [sleeper(name, 0.5, gpu="shared", left=left(name)) for name in ("one", "two")]
    assert main([*folders, "--minutes", "1"], jobs) == 0
    assert not overlap(tmp_path, "one", "two")


def test_killed_and_called_again(tmp_path, folders):
    """Whatever a killed call has left running is ended, and what it did is not done again."""

    def call(seconds: float) -> subprocess.Popen:
        words = ["-m", "tests.benchmarks.fake_jobs", str(seconds), *folders, "--minutes", "1"]
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    first = call(100.0)
    wait_until((tmp_path / "work" / "two.began").exists)
    wait_until(lambda: "pid" in recorded(tmp_path).get("two", {}))
    again = call(0.0)
    assert again.wait(120) not in (0, None)  # another call is under way
    first.send_signal(signal.SIGKILL)
    first.wait()
    orphan = recorded(tmp_path)["two"]["pid"]
    assert is_alive(orphan)
    one = span(tmp_path, "one")
    assert call(0.0).wait(120) == 0
    assert ends_soon(orphan)
    assert span(tmp_path, "one") == one
    assert records(tmp_path)["two"]["status"] == "done"


def test_results_are_copied_while_a_job_writes_them(tmp_path, folders):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gpu_envs.json").write_text('{"rows": [1]}')
    program = """
        import json
        found = json.load(open(r"{work}/gpu_envs.json"))
        json.dump({"rows": [*found["rows"], 2]}, open(r"{work}/gpu_envs.json", "w"))
    """
    left = lambda work: 2 - len(json.loads((work / "gpu_envs.json").read_text())["rows"])  # noqa: E731
    assert (
        main([*folders, "--minutes", "1"], [Job("rows", "fake", ("-c", textwrap.dedent(program)), 1.0, left=left)]) == 0
    )
    assert json.loads((tmp_path / "out" / "gpu_envs.json").read_text()) == {"rows": [1, 2]}
    assert len(list((tmp_path / "out").iterdir())) <= 8


@pytest.mark.slow
def test_the_real_list(tmp_path, folders, capsys):
    """Every measurement has a name of its own, and fits into one call or can go on in the next."""
    jobs = list(all_jobs())
    assert len({job.name for job in jobs}) == len(jobs)
    assert all(job.needed < 9.0 * 60 for job in jobs)
    assert main([*folders, "--list"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == len(jobs)
    assert not any((tmp_path / "work" / "logs").iterdir())


@pytest.mark.slow
def test_the_commands_of_the_list_are_understood():
    """Nothing would be worse than a typo that is found when the GPU is there."""
    for job in all_jobs():
        flag, module, *words = (word.replace("{seconds}", "60").replace("{work}", "folder") for word in job.words)
        assert flag == "-m"
        if module == "pytest":
            assert (ROOT / words[-1]).is_file()
        elif module == "embodichain":
            assert isinstance(parse_options(envs.Args, words[1:], "embodichain envs"), envs.CheckArgs)
        else:
            benchmark = importlib.import_module(module)
            parsed = (
                benchmark.parse_args(words)
                if hasattr(benchmark, "parse_args")
                else tyro.cli(benchmark.Args, args=words)
            )
            told = parsed.out if hasattr(parsed, "out") else parsed.output
            assert told.parts[0] == "folder"


def recorded(tmp_path: Path) -> dict:
    """Return what a call has written down so far."""
    return json.loads((tmp_path / "work" / "gpu_all.json").read_text())
