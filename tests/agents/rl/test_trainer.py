"""The training loop: schedules, checkpoints, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.config import TrainCfg, complete, override
from embodichain.agents.rl.run_loop import Counters, crossed
from embodichain.agents.rl.runs import RunFolder, RunLog, StopSignals, read_metrics
from embodichain.agents.rl.train import build_trainer, resume_training, train_from_config
from embodichain.agents.rl.trainer import Trainer
from embodichain.envs.registration import load_gym_config, make
from embodichain.errors import ConfigError, MissingExtraError, NotFiniteError, OutputError, WorkerError
from embodichain.extras import available
from embodichain.utils.console import ProgressView
from embodichain.utils.torch_runtime import torch_threads, update_threads
from tests.agents.rl.test_checkpoint import same
from tests.agents.rl.training_cases import GRPO, train_config, write_config
from tests.programs import start_program, wait_until

PER_ROLLOUT = 8 * 16


def trainer_for(run_dir, **changes) -> Trainer:
    cfg = override(complete(TrainCfg.from_dict(train_config(run_dir, **changes))), [])
    return build_trainer(cfg, RunFolder.create(cfg))


def steps_with(run_dir, name):
    return [line["step"] for line in read_metrics(run_dir / "metrics.jsonl") if name in line]


# --- schedules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("frequency", "jump"), [(200, 65_536), (1000, 300), (300, 300), (7, 3)])
def test_schedule_fires_at_the_first_step_past_each_multiple(frequency, jump):
    steps = range(jump, 20 * jump + 1, jump)
    fired = [step for step in steps if crossed(frequency, step - jump, step)]
    # Oracle: an interval (step - jump, step] contains a multiple of the frequency.
    assert fired == [s for s in steps if any(k % frequency == 0 for k in range(s - jump + 1, s + 1))]


def test_schedule_of_zero_never_fires():
    assert not any(crossed(0, step, step + 10) for step in range(0, 1000, 10))


def test_evaluations_and_checkpoints_happen_on_crossing(tmp_path):
    settings = {"iterations": 6, "eval_freq": 300, "save_freq": 200, "keep_checkpoints": 99}
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings))
    # Rollouts end at 128, 256, ... 768: 300 is crossed at 384, 600 at 640, and the end is evaluated as well.
    assert steps_with(tmp_path / "run", "eval/return") == [384, 640, 768]
    assert steps_with(tmp_path / "run", "update/policy_loss") == [PER_ROLLOUT * i for i in range(1, 7)]
    saved = [int(path.name[5:]) for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert {0, 256, 512, 640, 768} <= set(saved)  # 200, 400, 600 and the end; best ones come on top


def test_global_step_counts_transitions_of_all_envs(tmp_path):
    result = train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 3}))
    assert (result.iteration, result.global_step, result.reason) == (3, 3 * PER_ROLLOUT, "iterations")


def test_total_steps_are_reached_and_not_passed_by_more_than_a_rollout(tmp_path):
    settings = {"iterations": None, "total_steps": 2 * PER_ROLLOUT + 1}
    assert train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings)).iteration == 3


# --- what is kept -------------------------------------------------------------------------------------------------


def test_latest_and_best_checkpoints_are_kept_and_others_pruned(tmp_path):
    trainer = trainer_for(tmp_path / "run")
    folder = trainer.folder
    for step in range(1, 7):
        trainer.counters.global_step = step
        trainer.save_checkpoint(best=step == 2)
    assert [int(path.name[5:]) for path in list_checkpoints(folder.checkpoints)] == [2, 5, 6]
    assert find_checkpoint(folder.path, "best").resolve().name == f"step_{2:012d}"
    assert (folder.checkpoints / "latest").resolve() == find_checkpoint(folder.path, "latest").resolve()


def test_resolved_config_starts_the_same_run_again(tmp_path):
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run"))
    resolved = json.loads((tmp_path / "run" / "train_config.json").read_text())
    assert resolved["algorithm"]["cfg"]["gamma"] == 0.99  # a default is written out
    assert resolved["trainer"]["gym_config"]["env"]["substeps"] == load_gym_config("CartPoleRL").env.substeps
    again = tmp_path / "again.json"
    again.write_text(json.dumps(resolved))
    train_from_config(again, ["--trainer.run_dir", str(tmp_path / "again")])
    first, second = (load_checkpoint(find_checkpoint(tmp_path / name))["policy"] for name in ("run", "again"))
    assert same(first, second)


def test_runs_without_a_given_folder_get_new_ones(tmp_path):
    config = write_config(
        tmp_path / "c.json", tmp_path, trainer={"run_dir": None, "output_dir": str(tmp_path / "runs"), "iterations": 1}
    )
    folders = [train_from_config(config).run_dir for _ in range(2)]
    assert folders[0] != folders[1]
    assert all(folder.parent == tmp_path / "runs" and folder.name.startswith("test_") for folder in folders)


def test_everything_worth_knowing_is_logged(tmp_path):
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run"))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = {name for line in lines for name in line}
    assert {
        "rewards/alive",
        "metrics/success",
        "episode/return",
        "episode/length",
        "update/approx_kl",
        "update/learning_rate",
        "time/steps_per_second",
        "eval/return",
        "eval/success",
    } <= names
    parts = [
        line["rewards/alive"] + line["rewards/position"] + line["rewards/effort"]
        for line in lines
        if "update/epochs" in line
    ]
    assert all(0.9 < part <= 1.0 for part in parts)


def test_a_run_that_fails_before_it_logs_opens_no_log(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise WorkerError("nobody is there")

    trainer = trainer_for(tmp_path / "run")
    monkeypatch.setattr(SyncCollector, "reset", fail)
    with pytest.raises(WorkerError):
        trainer.train()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not list((tmp_path / "run").glob("events*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_with_what_to_do(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    log = RunLog(RunFolder(tmp_path / "run"), TrainCfg.from_dict(train_config(tmp_path)))
    with pytest.raises(OutputError, match=r"No space left.*--resume"):
        log.write(1, {"x": 1.0})
    with pytest.raises(OutputError, match="No space left"):
        log.close()


def test_wandb_is_asked_for_only_by_flag(tmp_path):
    if available("wandb"):
        pytest.skip("wandb is installed")
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"use_wandb": True})
    with pytest.raises(MissingExtraError, match=r"wandb is not installed.*\[track\]"):
        train_from_config(config)


WANDB = """
import json, types
from pathlib import Path
told = Path(__file__).with_name("told.jsonl")
util = types.SimpleNamespace(generate_id=lambda: f"id{len(told.read_text()) if told.exists() else 0}")

class Run:
    def log(self, values, step): tell(log=sorted(values), step=step)
    def finish(self): tell(finish=True)

def tell(**what):
    with told.open("a") as lines: lines.write(json.dumps(what) + "\\n")

def init(id, resume, project, config, **rest):
    tell(init=id, resume=resume, project=project, seed=config["trainer"]["seed"])
    return Run()
"""


def test_wandb_gets_every_scalar_and_the_same_run_again(tmp_path, monkeypatch):
    stand_in = tmp_path / "stand_in"
    stand_in.mkdir()
    (stand_in / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(stand_in))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    settings = {"use_wandb": True, "iterations": 2, "seed": 5, "wandb_project": "mine"}
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings))
    resume_training(tmp_path / "run", ["--trainer.iterations", "3"])
    sys.modules.pop("wandb", None)
    told = [json.loads(line) for line in (stand_in / "told.jsonl").read_text().splitlines()]
    opened = [entry for entry in told if "init" in entry]
    assert opened == [{"init": "id0", "resume": "allow", "project": "mine", "seed": 5}] * 2
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    expected = [{"log": sorted(set(line) - {"step"}), "step": line["step"]} for line in lines]
    assert [entry for entry in told if "log" in entry] == expected
    assert sum("finish" in entry for entry in told) == 2


# --- how it ends --------------------------------------------------------------------------------------------------


def test_training_stops_at_the_target(tmp_path):
    settings = {"iterations": 50, "target_return": 1.0, "eval_freq": 1}
    result = train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings))
    assert (result.reason, result.iteration) == ("target", 1)


def test_a_target_beyond_reach_does_not_stop(tmp_path):
    settings = {"target_return": 1e9, "eval_freq": 1}
    assert (
        train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings)).reason == "iterations"
    )


def test_training_stops_after_so_many_steps(tmp_path):
    settings = {"iterations": None, "total_steps": 200}
    result = train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings))
    assert (result.reason, result.global_step) == ("total_steps", 256)


def test_training_stops_when_the_time_is_over(tmp_path):
    settings = {"iterations": None, "max_seconds": 0.3}
    result = train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings))
    assert result.reason == "max_seconds"
    assert result.seconds >= 0.3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(("device", "said"), [("cuda", "torch finds 0 GPUs"), ("gpu", "such as 'cpu' or 'cuda'")])
def test_a_device_that_is_not_there_is_told_before_anything_is_made(tmp_path, device, said):
    config = write_config(tmp_path / "c.json", tmp_path / "run")
    with pytest.raises(ConfigError, match=f"trainer.device: .*{device}.*") as told:
        train_from_config(config, ["--trainer.device", device])
    assert said in str(told.value)
    assert not (tmp_path / "run").exists()


def test_an_error_says_how_to_continue(tmp_path, monkeypatch):
    def fail(*_):
        raise WorkerError("nobody is there")

    monkeypatch.setattr(Trainer, "_collect", fail)
    with pytest.raises(WorkerError, match="nobody") as told:
        train_from_config(write_config(tmp_path / "c.json", tmp_path / "run"))
    assert told.value.__notes__ == [f"continue with: embodichain train --resume {tmp_path / 'run'}"]


def test_a_config_that_is_wrong_is_not_continued_and_leaves_no_folder(tmp_path):
    term = {"func": "near", "params": {"of": "ee", "to": "cub"}}
    config = write_config(tmp_path / "c.json", tmp_path / "run")
    given = {"id": "PushCubeRL", "num_envs": 2, "env": {"rewards": {"terms": {"x": term}}}}
    (tmp_path / "env.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=r"env\.rewards\.terms\.x\.params\.to: .*'cube'") as told:
        train_from_config(config, ["--trainer.gym_config", str(tmp_path / "env.json")])
    assert not hasattr(told.value, "__notes__")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_interruption_saves_and_ends_cleanly(tmp_path, number):
    settings = {"iterations": 100_000, "save_freq": 0, "eval_freq": 0}
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings)
    process = start_program("-m", "embodichain.agents.rl.train", "--config", config)
    wait_until(lambda: len(read_metrics(tmp_path / "run" / "metrics.jsonl")) >= 3)
    process.send_signal(number)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130
    assert f"continue with: embodichain train --resume {tmp_path / 'run'}" in said
    assert "stopping after this iteration" in said
    assert "Traceback" not in said
    state, lines = load_checkpoint(find_checkpoint(tmp_path / "run")), read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert state["trainer"]["iteration"] == len(lines) >= 3
    result = resume_training(tmp_path / "run", ["--trainer.iterations", str(len(lines) + 1)])
    assert result.iteration == len(lines) + 1


def test_signals_that_come_again_leave_the_saving_alone_but_for_ctrl_c():
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    with StopSignals(announce=False) as signals:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)  # as Slurm and torchrun may do, one after the other
        assert signals.received == signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)] == before


def test_nohup_still_holds():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(announce=False) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_handlers_of_the_program_are_left_alone(number):
    calls = []
    before = signal.signal(number, lambda *_: calls.append(number))
    try:
        with StopSignals(announce=False) as signals:
            os.kill(os.getpid(), number)
        assert (calls, signals.received) == ([number], None)
    finally:
        signal.signal(number, before)


def test_evaluation_does_not_change_training(tmp_path):
    for name, settings in (("with", {"eval_freq": 1}), ("without", {"enable_eval": False})):
        train_from_config(write_config(tmp_path / f"{name}.json", tmp_path / name, trainer=settings))
    a, b = (load_checkpoint(find_checkpoint(tmp_path / name)) for name in ("with", "without"))
    assert all(same(a[part], b[part]) for part in ("policy", "algorithm", "env", "random"))


def test_seed_decides_the_run(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train_from_config(write_config(tmp_path / f"{name}.json", tmp_path / name, trainer={"seed": seed}))
    a, b, c = (load_checkpoint(find_checkpoint(tmp_path / name))["policy"] for name in "abc")
    assert same(a, b)
    assert not same(a, c)


# --- the guard against NaN ----------------------------------------------------------------------------------------


def test_nan_in_a_rollout_stops_and_can_be_repeated(tmp_path, monkeypatch):
    trainer = trainer_for(tmp_path / "run")
    collect = SyncCollector.collect

    def spoilt(self, num_steps):
        rollout = collect(self, num_steps)
        if trainer.counters.iteration == 1:
            rollout["observation", "robot", "qvel"][5, 3, 1] = torch.inf
        return rollout

    monkeypatch.setattr(SyncCollector, "collect", spoilt)
    where = r"observation/robot/qvel of env 5 in step 3 of the rollout that began at step 128 is \[.*inf\]"
    with pytest.raises(NotFiniteError, match=where):
        trainer.train()
    saved = load_checkpoint(tmp_path / "run" / "failure")
    assert saved["rollout"].batch_size == (8, 16)
    # The simulation before the rollout and the rollout's actions give its rewards again.
    with make(trainer.cfg.trainer.gym_config) as env:
        env.set_state(saved["env_before"])
        rewards = [env.step(saved["rollout"]["action"][:, t].clamp(-1, 1))[1] for t in range(16)]
    assert torch.equal(torch.stack(rewards, dim=1), saved["rollout"]["reward"])


def test_nan_in_an_update_stops(tmp_path, monkeypatch):
    trainer = trainer_for(tmp_path / "run", algorithm=GRPO)
    update = BaseAlgorithm._finish_update

    def spoilt(self, rollout):
        update(self, rollout)
        with torch.no_grad():
            self.policy.actor[0].bias[2] = torch.nan

    monkeypatch.setattr(BaseAlgorithm, "_finish_update", spoilt)
    with pytest.raises(NotFiniteError, match=r"the parameter actor\.0\.bias is not finite after the update at step 0"):
        trainer.train()
    assert torch.isnan(load_checkpoint(tmp_path / "run" / "failure")["policy"]["actor.0.bias"][2])


def test_reward_that_is_not_finite_is_blamed_on_the_environment(tmp_path):
    trainer = trainer_for(tmp_path / "run")
    rollout = trainer.collector.collect(4)
    rollout["value"][3, 2] = torch.nan
    with pytest.raises(NotFiniteError, match=r"^value of env 3 .*lower the learning rate"):
        trainer.guard.check_rollout(rollout, 0)
    rollout["reward"][5, 1] = torch.nan
    with pytest.raises(NotFiniteError, match=r"^reward of env 5 in step 1 .*check how the environment comp") as raised:
        trainer.guard.check_rollout(rollout, 0)
    assert "learning rate" not in str(raised.value)


def test_large_but_finite_numbers_are_let_through(tmp_path):
    trainer = trainer_for(tmp_path / "run")
    rollout = trainer.collector.collect(4)
    rollout["reward"].fill_(3e38)  # their sum is not a float32
    trainer.guard.check_rollout(rollout, 0)


def test_steps_that_fp16_leaves_out_are_no_failure(tmp_path):
    trainer = trainer_for(tmp_path / "run", algorithm={"cfg": {"mixed_precision": "fp16"}})
    trainer.train()
    assert trainer.algorithm.optimizer.scaler.get_scale() < 2**16  # some were


def test_guard_can_be_turned_off(tmp_path):
    assert trainer_for(tmp_path / "run", trainer={"nan_guard": False}).guard is None


# --- what is refused ----------------------------------------------------------------------------------------------


def test_groups_must_fit_the_number_of_envs(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run", algorithm=GRPO, trainer={"num_envs": 6})
    with pytest.raises(ConfigError, match="num_envs 6 is no multiple of group_size 4"):
        train_from_config(config)


def test_action_dim_must_be_that_of_the_environment(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run", policy={"action_dim": 3})
    with pytest.raises(ConfigError, match=r"action_dim is 3, but .* has 1"):
        train_from_config(config)


# --- small things -------------------------------------------------------------------------------------------------


def test_progress_line_tells_speed_and_time_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    page = io.StringIO()
    with ProgressView("push", Console(file=page, width=200)) as view:
        view.show(step=0, done=0.0, mean_return=None, success=None)
        now[0] += 50.0
        view.show(step=100_000, done=0.25, mean_return=-3.5, success=0.5)
    assert page.getvalue().splitlines()[-1] == "push: 100k steps | return -3.50 | success 50% | 2k steps/s | 2:30 left"


def test_recent_episodes_are_weighted_by_their_number():
    counters = Counters()
    counters.add_episodes({"episode/count": 0.0})
    assert counters.mean_return is None
    counters.add_episodes({"episode/count": 80.0, "episode/return": 1.0, "episode/success": 0.0})
    counters.add_episodes({"episode/count": 20.0, "episode/return": 6.0, "episode/success": 1.0})
    assert counters.mean_return == pytest.approx(2.0)
    assert counters.success_rate == pytest.approx(0.2)
    counters.add_episodes({"episode/count": 90.0, "episode/return": 5.0})  # the first 80 are no longer recent
    assert counters.mean_return == pytest.approx((20 * 6.0 + 90 * 5.0) / 110)
    assert counters.success_rate == pytest.approx(1.0)
    assert Counters.from_data(counters.to_data()) == counters


def test_success_is_shown_when_not_only_successes_have_ended():
    counters = Counters()
    counters.add_episodes({"episode/count": 2.0, "episode/return": 1.0, "episode/success": 1.0})
    assert counters.shown_success(num_envs=8) is None
    counters.add_episodes({"episode/count": 8.0, "episode/return": 1.0, "episode/success": 0.0})
    assert counters.shown_success(num_envs=8) == pytest.approx(0.2)


def test_every_thread_of_an_update_has_enough_to_do():
    small, middle, wide = nn.Linear(10, 10), nn.Linear(100, 100), nn.Linear(1000, 1000)
    with torch_threads(4):
        assert update_threads(small, 4096) == 1
        assert update_threads(middle, 2048) == 2
        assert update_threads(wide, 4096) == 4
        assert update_threads(nn.Conv2d(3, 8, 3), 4) is None
