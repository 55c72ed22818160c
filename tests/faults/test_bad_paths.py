"""Paths that no file system takes: every command ends with one message and exit code 2, and leaves nothing behind."""

import os
import random

import pytest
import torch

from embodichain.cli.main import main
from embodichain.errors import OutputError, writing
from tests.agents.rl.training_cases import write_config

CASES = {
    "train CONFIG": ["train", "{}.json"],
    "train in a folder": ["train", "{}/c.json"],
    "train --resume": ["train", "--resume", "{}"],
    "train --resume CHECKPOINT": ["train", "--resume", "RUN/checkpoints/{}"],
    "train run_dir": ["train", "CONFIG", "--trainer.run_dir", "{}"],
    "train output_dir": ["train", "CONFIG", "--trainer.run_dir", "null", "--trainer.output_dir", "{}"],
    "train gym_config": ["train", "CONFIG", "--trainer.gym_config", "{}.json"],
    "train --trust": ["train", "CONFIG", "--trust", "{}.py"],
    "eval": ["eval", "{}"],
    "eval --output": ["eval", "RUN", "--episodes", "1", "--output", "{}.json"],
    "export": ["export", "{}", "--onnx", "p.onnx"],
    "export --onnx": ["export", "RUN", "--onnx", "{}.onnx"],
    "play --config": ["play", "CartPoleRL", "--config", "{}.json"],
    "play --video": ["play", "CartPoleRL", "--episodes", "1", "--video", "{}.mp4"],
    "record CONFIG": ["record", "{}.json", "--out", "dataset"],
    "record --out": ["record", "CartPoleRL", "--out", "{}", "--episodes", "1"],
    "stream CONFIG": ["stream", "{}.json"],
    "stream --tensorboard": ["stream", "CartPoleRL", "--tensorboard", "{}", "--duration", "0.1"],
    "envs check": ["envs", "check", "{}"],
}
EXTRAS = {"export --onnx": "export", "record --out": "data"}
PATHS = {
    "NUL": "a\0b",
    "300 characters": "x" * 300,
    "6,000 characters": "/".join(["d" * 200] * 30),
    "below a file": "FILE/below",
    "no place for files": "/proc/nobody/x",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, threads = tmp_path_factory.mktemp("paths"), torch.get_num_threads()
    config = write_config(folder / "c.json", folder / "run", trainer={"iterations": 1, "enable_eval": False})
    assert main(["train", str(config)]) == 0
    torch.set_num_threads(threads)
    return folder / "run"


MARKED = [pytest.param(name, marks=[pytest.mark.extra(EXTRAS[name])] if name in EXTRAS else []) for name in CASES]


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("case", MARKED)
def test_a_bad_path_is_one_message(run, tmp_path, monkeypatch, capsys, case, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EMBODICHAIN_TRACEBACK", raising=False)
    places = {"RUN": str(run), "CONFIG": str(run.parent / "c.json"), "FILE": str(run.parent / "c.json")}
    words = [word.replace("{}", PATHS[kind]) for word in CASES[case]]
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("embodichain: ")
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["FILE/below", "/proc/nobody", "/sys/kernel/nobody"])
@pytest.mark.extra("data")
def test_record_into_an_unwritable_folder_names_it_before_anything_is_simulated(run, capsys, monkeypatch, folder):
    from embodichain.agents.engine.sources import SimulatedEpisodes

    monkeypatch.setattr(SimulatedEpisodes, "advance", lambda _: pytest.fail("it was simulated"))
    target = folder.replace("FILE", str(run.parent / "c.json"))
    assert main(["record", "CartPoleRL", "--out", target, "--episodes", "1"]) == 2
    assert f"cannot write to {target}: " in capsys.readouterr().err


def test_a_file_system_that_fails_later_is_one_message_as_well(capsys, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device", "/data/x")

    monkeypatch.setattr("embodichain.cli.envs.main", fail)
    assert main(["envs", "list"]) == 2
    assert capsys.readouterr().err.startswith("embodichain: /data/x: No space left on device\n")
    with pytest.raises(OSError, match="No space left"):
        main(["envs", "list", "--traceback"])


def test_names_are_checked_before_anything_is_written(tmp_path):
    generator = random.Random(0)
    letters = [chr(code) for code in (0, 9, 32, 97, 228, 0xDCFF, 0x1F980)]
    for _ in range(300):
        name = "".join(generator.choices(letters, k=generator.randrange(1, 6)))
        if "\0" in name or "\udcff" in name:
            with pytest.raises(OutputError, match="expected a name in UTF-8 without NUL"), writing(tmp_path / name):
                pytest.fail("it was begun")
        else:
            with writing(tmp_path / name):
                (tmp_path / name).write_text("")
    with pytest.raises(OutputError, match=f"cannot write to {tmp_path}: Is a directory"), writing(tmp_path):
        os.open(tmp_path, os.O_WRONLY)
