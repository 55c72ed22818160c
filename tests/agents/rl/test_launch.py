"""How ranks find each other, and what they agree on before a run begins, on machines with files of their own."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from embodichain.agents.rl.config import TrainerCfg
from embodichain.agents.rl.run_lock import RunLock
from embodichain.agents.rl.runs import read_metrics, run_to_resume
from embodichain.agents.rl.train import train_from_config
from embodichain.agents.rl.utils.distributed import Ranks, joined_ranks
from embodichain.errors import ConfigError, RankError
from tests.agents.rl import rank_cases
from tests.agents.rl.rank_cases import run_ranks
from tests.agents.rl.training_cases import train_config, write_config
from tests.programs import ends_soon, run_torchrun, wait_until

PER_RANK = 8 * 16


def write_for_machines(folder: Path, **changes) -> None:
    """Write the config of two ranks whose run folders lie on different machines."""
    for rank in range(2):
        machine = folder / f"machine_{rank}"
        machine.mkdir(exist_ok=True)
        (machine / "config.json").write_text(json.dumps(train_config(machine / "run", **changes)))


# --- restarts -----------------------------------------------------------------------------------------------------


def test_a_restarted_run_goes_on_although_only_rank_0_has_its_folder(tmp_path):
    settings = {"iterations": 2, "save_freq": 1, "enable_eval": False}
    write_for_machines(tmp_path, trainer=settings)
    assert run_ranks(2, rank_cases.train_apart, tmp_path, []) == [0, 0]
    assert not (tmp_path / "machine_1" / "run").exists()

    assert run_ranks(2, rank_cases.train_apart, tmp_path, ["--trainer.iterations", "3"]) == [0, 0]
    said = [json.loads((tmp_path / f"said_{rank}.json").read_text()) for rank in range(2)]
    assert said == [[3, 3 * 2 * PER_RANK]] * 2
    saved = load_checkpoint(find_checkpoint(tmp_path / "machine_0" / "run"))
    assert (saved["trainer"]["iteration"], int(saved["policy"]["version"])) == (3, 3)


def test_ranks_share_one_lock_and_agree_on_what_is_intact(tmp_path):
    run = tmp_path / "run"
    settings = {"iterations": 2, "save_freq": 1, "enable_eval": False}
    assert run_ranks(2, rank_cases.train, write_config(tmp_path / "c.json", run, trainer=settings), []) == [0, 0]
    last, metrics = find_checkpoint(run), (run / "metrics.jsonl").read_text()
    os.truncate(last / "tensors.safetensors", 100)
    lock = RunLock(run)
    lock.acquire()
    assert run_ranks(2, rank_cases.resume_or_tell, run) == [0, 0]
    lock.release()
    first, second = ((tmp_path / f"told_{rank}.txt").read_text() for rank in range(2))
    assert f"is in use by process {os.getpid()} on" in first
    assert second.startswith("RankError: rank 0 failed while locking the folder of the run: TrainingStateError: ")
    assert (run / "metrics.jsonl").read_text() == metrics

    assert run_ranks(2, rank_cases.resume, run, ["--trainer.iterations", "3"]) == [0, 0]
    assert (run / "checkpoints" / f"damaged_{last.name}").is_dir()
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [2 * PER_RANK * n for n in (1, 2, 3)]

    shutil.rmtree(run / "checkpoints")  # as if it had been killed before the first one
    (run / "metrics.jsonl").write_text("")
    assert run_ranks(2, rank_cases.resume, run, ["--trainer.iterations", "1"]) == [0, 0]
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [2 * PER_RANK]


SITUATIONS = {
    "nothing anywhere": ([None, None], False),
    "a checkpoint at rank 0": ([5, None], True),
    "checkpoints at both ranks": ([5, 4], True),
    "ended before the first checkpoint": (["begun", None], False),
    "the checkpoint is on another machine": (["begun", 5], "rank 0 has no checkpoint .* rank 1 has one of step 5"),
}


def test_ranks_agree_on_whether_a_run_is_new(tmp_path):
    facts = {name: known for name, (known, _) in SITUATIONS.items()}
    assert run_ranks(2, rank_cases.agree_on_runs, tmp_path, facts) == [0, 0]
    first, second = (json.loads((tmp_path / f"agreed_{rank}.json").read_text()) for rank in range(2))
    assert first == second
    for name, (_, expected) in SITUATIONS.items():
        if isinstance(expected, str):
            assert re.search(expected, first[name]), (name, first[name])
        else:
            assert first[name] is expected, name


def test_a_run_without_a_checkpoint_begins_anew_with_a_warning(tmp_path, caplog):
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.json", run, trainer={"iterations": 1, "enable_eval": False})
    run.mkdir()
    (run / "train_config.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"ste')  # no whole line: those come after the first checkpoint
    with caplog.at_level(logging.WARNING):
        assert train_from_config(config).iteration == 1
    assert "holds a run without a checkpoint: the run begins anew" in caplog.text
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [128]
    assert len(read_metrics(run / "metrics.jsonl")[0]) > 1


def test_restarts_need_a_folder_that_can_be_found_again(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError, match=r"trainer\.run_dir: expected a folder"):
        run_to_resume(TrainerCfg(gym_config="x"), Ranks())
    assert run_to_resume(TrainerCfg(gym_config="x", run_dir="runs/a"), Ranks()) is None


def test_without_torchrun_no_run_is_continued_unasked(tmp_path):
    save_checkpoint(tmp_path / "checkpoints" / f"step_{5:012d}", {})
    assert run_to_resume(TrainerCfg(gym_config="x", run_dir=str(tmp_path)), Ranks()) is None


JOINS = """
import sys
from pathlib import Path
from torch.distributed import run
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from embodichain.cli.loopback import LoopbackRendezvous
from tests.programs import fork_ranks

class Joins(LoopbackRendezvous):
    def get_backend(self):
        return "joins"

    def num_nodes_waiting(self):
        joined = Path(sys.argv[5])
        if joined.exists() or not list(Path(sys.argv[2]).glob("checkpoints/step_*")):
            return 0
        joined.touch()
        return 1

rendezvous_handler_registry.register("joins", lambda parameters: Joins(parameters.run_id))
fork_ranks()
words = ["--rdzv-backend=joins", "--nnodes=1", f"--nproc-per-node={sys.argv[3]}", "--monitor-interval=0.1"]
run.main([*words, sys.argv[4], *sys.argv[1:3], sys.argv[5]])
"""
# Trains as the command does, but takes its time for as long as nobody has joined.
WAITS = """
import sys, time
from pathlib import Path
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.cli.main import main

collect, is_joined = SyncCollector.collect, Path(sys.argv[3]).exists()

def collect_slowly(self, *args):
    time.sleep(0.0 if is_joined else 0.5)
    return collect(self, *args)

SyncCollector.collect = collect_slowly
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_machine_that_joins_makes_torchrun_start_a_run_again_which_goes_on(tmp_path, count):
    """torchrun (``--nnodes=1:2``) ends all ranks then and starts them anew, but does not count that as a restart."""
    settings = {"iterations": 40, "save_freq": 1, "enable_eval": False}
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    (tmp_path / "waits.py").write_text(WAITS)
    places = (tmp_path / "waits.py", tmp_path / "joined")
    done = run_torchrun("-c", JOINS, config, tmp_path / "run", str(count), *places, env=environment)
    assert done.returncode == 0, done.stderr
    steps = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [count * PER_RANK * number for number in range(1, 41)]
    assert "steps/s), interrupted" in done.stderr
    assert "ended by iterations" in done.stderr


# --- configs ------------------------------------------------------------------------------------------------------


def test_ranks_with_different_configs_are_told_the_first_field(tmp_path):
    write_for_machines(tmp_path)
    assert run_ranks(2, rank_cases.train_with_other_settings, tmp_path) == [0, 0]
    told = [(tmp_path / f"told_{rank}.txt").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert "algorithm.cfg.learning_rate: rank 0 has 0.001, rank 1 0.01 (and 1 more)" in told[0]
    assert not (tmp_path / "machine_0" / "run").exists()  # nothing was begun


# --- connections --------------------------------------------------------------------------------------------------


LAUNCHER = """
import os, subprocess, sys, time
rank = "from embodichain.agents.rl.utils.distributed import joined_ranks\\nwith joined_ranks(): pass"
place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1], "TORCHELASTIC_USE_AGENT_STORE": "True"}
print(subprocess.Popen([sys.executable, "-c", rank], env={**os.environ, **place}).pid, flush=True)
time.sleep(600)
"""


def test_a_rank_does_not_outlive_its_torchrun():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", LAUNCHER, str(store.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            pid = int(launcher.stdout.readline())
            wait_until(lambda: store.num_keys() >= 2, 200)  # it has joined; one is the store's own
        finally:
            launcher.kill()
    assert ends_soon(pid), "the rank has outlived its launcher"


def test_a_group_without_the_cpu_is_refused():
    dist.init_process_group("cuda:fake", store=FakeStore(), rank=0, world_size=2)
    try:
        expected = r"tensors of the CPU, got one of cuda:fake.*cpu:gloo,cuda:nccl"
        with pytest.raises(RankError, match=expected), joined_ranks():
            pass
    finally:
        dist.destroy_process_group()


def test_a_rank_that_is_gone_is_an_error_with_advice(tmp_path):
    assert run_ranks(2, rank_cases.leave, tmp_path) == [0, 0]
    told = (tmp_path / "left_0.txt").read_text()
    assert told.startswith("RankError: the ranks cannot talk to each other any more (")
    assert "--resume" in told
