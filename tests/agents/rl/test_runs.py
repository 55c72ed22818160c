"""The folder of a run belongs to one process at a time, and whatever is missing or strange in it ends in one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import shutil
import signal
import socket
import time

import pytest
import torch

from embodichain.agents.rl.checkpoint import list_checkpoints, save_checkpoint
from embodichain.agents.rl.run_lock import LOCK_FILE
from embodichain.agents.rl.runs import RunFolder, read_metrics
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.cli.main import main
from embodichain.errors import CheckpointError, OutputError, TrainingStateError
from embodichain.utils.console import MessageConsole, ProgressView
from tests.agents.rl.training_cases import write_config
from tests.programs import start_program

pytestmark = pytest.mark.usefixtures("one_thread")

# Trains as the command does, but waits in its third rollout for a file.
PAUSES = """
import os, sys, time
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.cli.main import main

collect, count = SyncCollector.collect, 0

def collect_or_wait(self, *args):
    global count
    count += 1
    if count == 3:
        open(sys.argv[1] + ".waits", "w").close()
    while count == 3 and not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    return collect(self, *args)

SyncCollector.collect = collect_or_wait
sys.exit(main(["train", *sys.argv[2:]]))
"""


@contextlib.contextmanager
def paused_training(go, *words):
    """Yield a training process that has done two iterations and waits for a file before it does the third."""
    deadline = time.monotonic() + 100
    with start_program("-c", PAUSES, go, *words) as process:
        try:
            while not go.with_name(f"{go.name}.waits").exists():
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline, "the training does not get that far"
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("command", ["resume", "begin"])
def test_a_second_process_leaves_a_live_run_alone(tmp_path, capsys, command):
    run, go = tmp_path / "run", tmp_path / "go"
    config = write_config(tmp_path / "c.json", run, trainer={"iterations": 5, "eval_freq": 0, "enable_eval": False})
    words = ["--resume", str(run)] if command == "resume" else [str(config)]
    with paused_training(go, config) as first:
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        assert main(["train", *words]) == 2
        said = capsys.readouterr().err
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
        go.touch()
        assert first.wait(100) == 0, first.stderr.read()
    assert f"{run} is in use by process {first.pid} on {socket.gethostname()}" in said
    assert "wait until it has ended, or stop it" in said
    assert len(said.splitlines()) == 2  # the other line tells of --traceback
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [128 * n for n in range(1, 6)]


def test_a_killed_process_leaves_no_lock(tmp_path):
    run, go = tmp_path / "run", tmp_path / "go"
    config = write_config(tmp_path / "c.json", run, trainer={"iterations": 5, "eval_freq": 0, "enable_eval": False})
    with paused_training(go, config) as first:
        with pytest.raises(TrainingStateError, match="is in use by process"):
            resume_training(run)
        first.send_signal(signal.SIGKILL)
        assert first.wait(100) == -signal.SIGKILL
        assert resume_training(run).iteration == 5
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [128 * n for n in range(1, 6)]


@pytest.mark.parametrize("number", [None, signal.SIGHUP])
def test_a_closed_terminal_ends_no_run(tmp_path, number):
    """Whoever read the messages is gone; nothing is lost, and the exit code says how the run ended."""
    run, go = tmp_path / "run", tmp_path / "go"
    settings = {"iterations": 5, "save_freq": 10_000, "eval_freq": 128, "num_eval_episodes": 1}
    with paused_training(go, write_config(tmp_path / "c.json", run, trainer=settings)) as process:
        process.stderr.close()
        if number is not None:
            process.send_signal(number)
        go.touch()
        assert process.wait(100) == (0 if number is None else 130)
    steps = 128 * (5 if number is None else 3)
    assert list_checkpoints(run / "checkpoints")[-1].name == f"step_{steps:012d}"
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == steps


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("code", [errno.EPIPE, errno.EIO])
def test_progress_goes_quiet_when_its_stream_is_gone(terminal, code):
    stream, error = io.StringIO(), OSError(code, os.strerror(code))
    tries = []

    def fail(text=""):
        tries.append(text)
        raise error

    view = ProgressView("test", MessageConsole(file=stream, force_terminal=terminal))
    with view:
        view.print("before")
        stream.write = stream.flush = fail
        view.print("first")
        seen = len(tries)
        view.print("second")
        view.show(1, 0.5, None, None)
    assert "before" in stream.getvalue()
    assert len(tries) == seen >= 1


def test_a_lock_that_is_taken_and_released_in_turn(tmp_path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.lock.acquire()
    first.lock.acquire()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    with pytest.raises(TrainingStateError, match=rf"process {os.getpid()} on .* \(this one\), since"):
        second.lock.acquire()
    first.lock.release()
    first.lock.release()
    assert (tmp_path / LOCK_FILE).read_text() == ""
    second.lock.acquire()
    second.lock.release()


def test_a_lock_dies_with_its_process_and_not_with_its_children(tmp_path):
    folder = RunFolder(tmp_path)
    folder.lock.acquire()
    (up, is_up), (end, is_over) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # it outlives the parent's lock, and must not keep it
        os.close(is_over)
        os.write(is_up, b"x")
        os.read(end, 1)
        os._exit(0)
    try:
        os.read(up, 1)
        with pytest.raises(TrainingStateError, match="is in use"):
            RunFolder(tmp_path).lock.acquire()
        folder.lock.forget()  # as if this process had been killed
        RunFolder(tmp_path).lock.acquire()
    finally:
        os.close(is_over)
        os.waitpid(child, 0)
        for descriptor in (up, is_up, end):
            os.close(descriptor)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "x"}', "\0" * 10_000])
def test_a_lock_file_that_says_nothing_is_held_all_the_same(tmp_path, text):
    with (tmp_path / LOCK_FILE).open("w") as file:
        file.write(text)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TrainingStateError, match="is in use by another process: wait"):
            RunFolder(tmp_path).lock.acquire()
    RunFolder(tmp_path).lock.acquire()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 1, "enable_eval": False})
    with caplog.at_level(logging.WARNING):
        assert train_from_config(config).iteration == 1
    said = [record.message for record in caplog.records if "has no locks" in record.message]
    assert len(said) == 1
    assert "make sure that no other process trains in this folder" in said[0]


def test_a_process_of_another_machine_that_left_no_word_is_mentioned(tmp_path, caplog):
    (tmp_path / LOCK_FILE).write_text('{"host": "elsewhere", "pid": 7, "since": "2026-01-01 00:00:00 +0000"}\n')
    with caplog.at_level(logging.WARNING):
        RunFolder(tmp_path).lock.acquire()
    assert "was left by process 7 on elsewhere" in caplog.text


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(OutputError, match=r"cannot write to .*: Is a directory"):
        RunFolder(tmp_path).lock.acquire()


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_a_lock_file_that_is_no_file_is_left_alone(tmp_path, kind):
    notes, lock = tmp_path / "notes.txt", tmp_path / "run" / LOCK_FILE
    lock.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to(notes)
    if kind == "link":
        notes.write_text("mine")
    with pytest.raises(OutputError, match=r"run\.lock is no file: .*remove it"):
        RunFolder(lock.parent).lock.acquire()
    assert notes.exists() == (kind == "link")
    assert kind != "link" or notes.read_text() == "mine"


def test_a_lock_file_of_nested_brackets_is_read_over(tmp_path):
    (tmp_path / LOCK_FILE).write_text("[" * 4096)
    RunFolder(tmp_path).lock.acquire()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_failed_start_leaves_no_lock(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 1, "enable_eval": False})
    train_from_config(config)
    with pytest.raises(TrainingStateError, match="holds a run already"):
        train_from_config(config)
    with pytest.raises(ValueError, match="hidden_size"):
        resume_training(tmp_path / "run", ["--policy.actor.hidden_size", "[17]"])
    RunFolder(tmp_path / "run").lock.acquire()


def test_pruning_and_forgetting_tolerate_what_is_gone(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path, keep=1)
    for step in (1, 2, 3):
        save_checkpoint(folder.checkpoints / f"step_{step:012d}", {})
    listed = list_checkpoints(folder.checkpoints)
    monkeypatch.setattr("embodichain.agents.rl.runs.list_checkpoints", lambda _: listed)  # another process removes two
    for gone in listed[:2]:
        (gone / "tensors.safetensors").unlink()
        (gone / "state.json").unlink()
        gone.rmdir()
    folder.forget_after(0)
    assert not listed[2].exists()
    folder.save(4, {})
    folder.save(5, {}, best=True)


def test_two_runs_of_one_name_and_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    settings = {"iterations": 1, "enable_eval": False, "run_dir": None, "output_dir": str(tmp_path / "runs")}
    config = write_config(tmp_path / "c.json", tmp_path, trainer=settings)
    names = [train_from_config(config).run_dir.name for _ in range(2)]
    assert names == ["test_20260101-000000", "test_20260101-000000-2"]


# --- what else may lie among checkpoints --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder, threads = tmp_path_factory.mktemp("finished"), torch.get_num_threads()
    torch.set_num_threads(1)
    settings = {"iterations": 2, "enable_eval": False}
    train_from_config(write_config(folder / "c.json", folder / "run", trainer=settings))
    torch.set_num_threads(threads)
    return folder / "run"


def litter(checkpoints):
    """Put things among checkpoints that people and their tools put there."""
    newest = list_checkpoints(checkpoints)[-1]
    shutil.copytree(newest, checkpoints / "step_abc")
    shutil.copytree(newest, checkpoints / "step_")
    shutil.copytree(newest, checkpoints / ".step_abc.former")
    (checkpoints / "step_9x").mkdir()
    (checkpoints / "step_000000000999").write_text("no folder")
    (checkpoints / "step_latest").symlink_to(newest.name)
    (checkpoints / "step_000000777777").symlink_to("nowhere")
    (checkpoints / "step_000000888888").symlink_to("step_000000888888")  # points at itself
    (checkpoints / "notes.txt").write_text("mine")


@pytest.mark.parametrize("command", ["resume", "eval", "export"])
def test_other_things_among_checkpoints_are_left_alone(tmp_path, finished, capsys, command):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    litter(run / "checkpoints")
    words = {
        "resume": ["train", "--resume", str(run), "--trainer.iterations", "4", "--trainer.keep_checkpoints", "1"],
        "eval": ["eval", str(run), "--episodes", "1"],
        "export": ["export", str(run), "--onnx", str(tmp_path / "file" / "p.txt")],
    }
    code = main(words[command])
    said = capsys.readouterr().err
    assert (code, "Traceback" in said) == (2 if command == "export" else 0, False), said
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert {"step_abc", "step_", "step_9x", "step_000000000999", "step_latest", "notes.txt"} <= names
    if command == "resume":
        assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step_000000000512"]


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE}


@pytest.mark.parametrize("command", ["resume", "begin"])
@pytest.mark.parametrize("how", ["gone", "empty", "dangling link", "dangling link and no log", "file", "damaged"])
def test_a_run_whose_checkpoints_cannot_be_seen_is_left_alone(tmp_path, finished, how, command):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    checkpoints = run / "checkpoints"
    if how == "damaged":
        for checkpoint in list_checkpoints(checkpoints):
            (checkpoint / "state.json").unlink()
    else:
        checkpoints.rename(tmp_path / "elsewhere")
    if how == "empty":
        checkpoints.mkdir()
    elif how == "file":
        checkpoints.write_text("")
    elif how.startswith("dangling"):
        checkpoints.symlink_to(tmp_path / "unmounted")
    if how.endswith("no log"):
        (run / "metrics.jsonl").unlink()
    before = content(run)
    config = write_config(tmp_path / "c.json", run)
    with pytest.raises((TrainingStateError, CheckpointError), match=str(run)) as caught:
        resume_training(run) if command == "resume" else train_from_config(config)
    assert "checkpoint" in str(caught.value) or "--resume" in str(caught.value)
    assert content(run) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.out.tfevents.1700.host.other"])
def test_logs_of_something_else_are_not_removed(tmp_path, name):
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text("precious")
    with pytest.raises(TrainingStateError, match=rf"holds {name} .*choose another --trainer\.run_dir"):
        train_from_config(write_config(tmp_path / "c.json", run))
    assert content(run) == {run / name: b"precious"}


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale handle"), PermissionError(13, "no"), MemoryError()])
@pytest.mark.parametrize("reader", ["_file_crc", "_read_text"])
def test_an_error_of_the_moment_demotes_no_checkpoint(tmp_path, finished, monkeypatch, error, reader):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    before = content(run)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        if reader == "_file_crc":
            patch.setattr("embodichain.agents.rl.checkpoint._file_crc", fail)
        else:
            patch.setattr("pathlib.Path.read_text", fail)
        with pytest.raises(CheckpointError, match=r"step_000000000256.*cannot be read.* [Tt]ry again"):
            RunFolder(run).load_latest()
    assert content(run) == before
    newest, _ = RunFolder(run).load_latest()
    assert newest.name == "step_000000000256"


def test_checkpoints_behind_links_are_used_and_only_the_links_removed(tmp_path, finished):
    run, archive = tmp_path / "run", tmp_path / "archive"
    shutil.copytree(finished, run, symlinks=True)
    archive.mkdir()
    for checkpoint in list_checkpoints(run / "checkpoints"):
        checkpoint.rename(archive / checkpoint.name)
        checkpoint.symlink_to(archive / checkpoint.name)
    result = resume_training(run, ["--trainer.iterations", "4", "--trainer.keep_checkpoints", "1"])
    assert (result.iteration, result.run_dir) == (4, run)
    assert len(list(archive.glob("step_*/state.json"))) == 2
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step_000000000512"]
    again = resume_training(run / "checkpoints" / "step_000000000512", ["--trainer.iterations", "5"])
    assert again.iteration == 5


def test_a_copy_of_a_run_without_links_goes_on(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "run", symlinks=False)  # `latest` is a folder now
    result = resume_training(tmp_path / "run", ["--trainer.iterations", "3"])
    assert result.iteration == 3
    latest = tmp_path / "run" / "checkpoints" / "latest"
    assert latest.is_symlink()
    assert latest.resolve().name == "step_000000000384"


def test_steps_are_compared_as_numbers(tmp_path):
    for name in ("step_9", "step_10", "step_000000000011", "step_1000000000000"):
        save_checkpoint(tmp_path / name, {})
    assert [path.name for path in list_checkpoints(tmp_path)][-2:] == ["step_000000000011", "step_1000000000000"]
