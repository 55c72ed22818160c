"""Whole runs with asynchronous collection: without lag the synchronous run, resumed bit by bit, steps counted once."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from embodichain.agents.rl import run_loop
from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint
from embodichain.agents.rl.config import TrainCfg, complete, override, warn_about_config
from embodichain.agents.rl.runs import RunFolder, read_metrics
from embodichain.agents.rl.train import build_trainer, resume_training, train_from_config
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.errors import ConfigError
from tests.agents.rl.test_checkpoint import same
from tests.agents.rl.training_cases import GRPO, train_config, write_config
from tests.programs import run_program, wait_until

ROLLOUT = 8 * 16


pytestmark = pytest.mark.usefixtures("one_thread")


def vla(**collector):
    return {"collector": {"mode": "async", **collector}}


def logged(run_dir):
    """Return what a run logged, without times and without what only asynchronous runs log."""
    left_out = ("time/", "async/")
    lines = read_metrics(run_dir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(left_out)} for line in lines]


@pytest.mark.parametrize("algorithm", [{}, GRPO], ids=["ppo", "grpo"])
def test_without_lag_a_run_is_the_synchronous_run_bit_by_bit(tmp_path, algorithm):
    """Evaluations and checkpoints lie in between; every logged number and every parameter is the same."""
    for name, settings in (("sync", {}), ("async", vla(max_policy_lag=0))):
        path = write_config(tmp_path / f"{name}.json", tmp_path / name, trainer=settings, algorithm=algorithm)
        result = train_from_config(path)
        assert result.global_step == 4 * ROLLOUT
    assert logged(tmp_path / "sync") == logged(tmp_path / "async")
    expected, actual = (load_checkpoint(find_checkpoint(tmp_path / name)) for name in ("sync", "async"))
    for part in ("policy", "algorithm", "env", "random"):
        assert same(actual[part], expected[part]), part


# Trains until some rollout is half collected, and is then killed as nothing inside the process could prevent.
KILLED = """
import os, signal, sys
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.train import main

decide, count = SyncCollector.decide, 0

def decide_or_die(self, *args):
    global count
    count += 1
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return decide(self, *args)

SyncCollector.decide = decide_or_die
main(["--config", sys.argv[1]])
"""


FLOW = {"name": "flow", "flow": {"num_steps": 2}}


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {"max_policy_lag": 2}),
        ({"algorithm": GRPO}, {"max_policy_lag": 1}),
        ({}, {"max_policy_lag": 1, "pipeline_stages": 2}),
        ({"policy": FLOW}, {"max_policy_lag": 1}),
    ],
    ids=["ppo", "grpo", "ppo in two groups", "a policy with decisions"],
)
def test_a_killed_run_goes_on_bit_by_bit(tmp_path, changes, settings):
    trainer = {"iterations": 8, "save_freq": 2 * ROLLOUT, **vla(adopt="lockstep", **settings)}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train_from_config(write_config(tmp_path / "straight.json", straight, trainer=trainer, **changes))
    config = write_config(tmp_path / "killed.json", killed, trainer=trainer, **changes)
    decisions = (5 * 16 + 40) * settings.get("pipeline_stages", 1)  # in the seventh or eighth rollout
    process = run_program("-c", KILLED, config, str(decisions))
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert load_checkpoint(find_checkpoint(killed))["trainer"]["iteration"] in (4, 6)
    result = resume_training(killed)

    expected, actual = (load_checkpoint(find_checkpoint(run)) for run in (straight, killed))
    assert result.iteration == 8 == expected["trainer"]["iteration"]
    for part in ("policy", "algorithm", "random"):  # how far ahead the collector is at the end is left to chance
        assert same(actual[part], expected[part]), part
    assert logged(killed) == logged(straight)
    lags = [line["async/lag_max"] for line in read_metrics(killed / "metrics.jsonl") if "async/lag_max" in line]
    assert lags == [min(i, settings["max_policy_lag"]) for i in range(8)]


@pytest.mark.slow
def test_a_run_in_a_process_is_resumed_and_made_longer(tmp_path):
    trainer = {"iterations": 2, **vla(worker="process", adopt="lockstep", max_policy_lag=1)}
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=trainer))
    result = resume_training(tmp_path / "run", ["--trainer.iterations", "4"])
    assert (result.iteration, result.global_step) == (4, 4 * ROLLOUT)
    train_from_config(write_config(tmp_path / "d.json", tmp_path / "whole", trainer={**trainer, "iterations": 4}))
    longer, whole = (load_checkpoint(find_checkpoint(tmp_path / name)) for name in ("run", "whole"))
    for part in ("policy", "algorithm", "random"):
        assert same(longer[part], whole[part]), part


def test_steps_are_counted_once_and_the_log_tells_the_lag(tmp_path):
    path = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 6, **vla(max_policy_lag=1)})
    result = train_from_config(path)
    assert result.global_step == 6 * ROLLOUT
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "update/policy_loss" in line]
    assert [line["step"] for line in lines] == [ROLLOUT * (i + 1) for i in range(6)]
    for line in lines:
        assert 0 <= line["async/lag_min"] <= line["async/lag_mean"] <= line["async/lag_max"] <= 1
        assert line["async/behaviour_kl"] >= 0.0
        assert line["time/learner_wait_seconds"] >= 0.0
        assert line["time/collector_wait_seconds"] >= 0.0


def made_trainer(run_dir, **changes):
    cfg = override(complete(TrainCfg.from_dict(train_config(run_dir, **changes))), [])
    return build_trainer(cfg, RunFolder.create(cfg))


def test_collection_goes_on_during_an_evaluation(tmp_path, monkeypatch):
    """The evaluated weights are the learner's, which stand still; the collector fills its queue meanwhile."""
    trainer = made_trainer(tmp_path / "run", trainer={"iterations": 2, "eval_freq": ROLLOUT, **vla(max_policy_lag=2)})
    queued, evaluate = [], run_loop.evaluate

    def slow_evaluation(policy, *args, **kwargs):
        before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        deadline = time.monotonic() + 100.0
        while len(trainer.collector.buffer) < 2 * ROLLOUT and time.monotonic() < deadline:
            time.sleep(0.01)
        queued.append(len(trainer.collector.buffer))
        result = evaluate(policy, *args, **kwargs)
        assert all(torch.equal(tensor, policy.state_dict()[name]) for name, tensor in before.items())
        return result

    monkeypatch.setattr(run_loop, "evaluate", slow_evaluation)
    trainer.train()
    assert queued[0] >= 2 * ROLLOUT
    trainer.env.close()


def test_an_interrupted_run_saves_its_queue_and_leaves_no_thread(tmp_path):
    trainer = made_trainer(tmp_path / "run", trainer={"iterations": 10**6, "eval_freq": 0, **vla(max_policy_lag=1)})
    before = set(threading.enumerate())

    def interrupt() -> None:
        wait_until(lambda: trainer.counters.iteration > 1)
        os.kill(os.getpid(), signal.SIGINT)

    person = threading.Thread(target=interrupt, daemon=True)
    person.start()
    result = trainer.train()
    person.join()
    assert result.reason == "interrupted"
    assert set(threading.enumerate()) - before == set()
    saved = load_checkpoint(find_checkpoint(tmp_path / "run"))
    assert saved["trainer"]["global_step"] == result.global_step > 0
    waiting = len(saved["collector"]["queue"]["entries"]) + len(saved["collector"]["requests"])
    assert waiting == 2  # with a lag of 1, one rollout is waiting or under way, and one more may be begun
    trainer.env.close()


def test_two_groups_of_envs_without_a_background(tmp_path):
    trainer = {"collector": {"pipeline_stages": 2}}
    result = train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=trainer))
    assert result.global_step == 4 * ROLLOUT


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (vla(max_policy_lag=-1), r"trainer\.collector\.max_policy_lag"),
        (vla(adopt="sometimes"), r"trainer\.collector\.adopt"),
        ({"model_type": "vlaa"}, r"trainer\.model_type"),
        ({"collector": {"mode": "asynk"}}, r"trainer\.collector\.mode"),
        ({"collector": {"pipeline_stages": 3}}, r"multiple of the 3 pipeline_stages, got 8"),
        (
            {"collector": {"env_processes": 2}, "gym_config": {"id": "CartPoleRL", "device": "cuda"}},
            r"env_processes: expected 0, .* gym_config.device is 'cuda'",
        ),
    ],
)
def test_bad_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings))


@pytest.mark.parametrize(
    ("lag", "changes", "is_warned"),
    [
        (1, {"lr_schedule": "adaptive"}, True),
        (2, {"target_kl": 0.02}, True),
        (1, {}, True),
        (1, {"advantage_estimator": "vtrace"}, False),
        (0, {"lr_schedule": "adaptive"}, False),
        (1, {"lr_schedule": "adaptive", "correction": "decoupled"}, False),
    ],
)
def test_learning_from_old_rollouts_without_correction_is_warned_of(tmp_path, caplog, lag, changes, is_warned):
    config = train_config(tmp_path, trainer=vla(max_policy_lag=lag), algorithm={"cfg": changes})
    warn_about_config(override(complete(TrainCfg.from_dict(config)), []))
    assert ("--algorithm.cfg.correction decoupled" in caplog.text) is is_warned


def test_distillation_has_no_ratios_to_warn_of(tmp_path, caplog):
    config = train_config(tmp_path, trainer=vla(max_policy_lag=1))
    config["algorithm"] = {"name": "distill", "cfg": {"teacher": str(tmp_path)}}
    warn_about_config(override(complete(TrainCfg.from_dict(config)), []))
    assert "decoupled" not in caplog.text


@pytest.mark.parametrize(("level", "is_warned"), [("token", True), ("denoising_step", True), ("action", False)])
def test_factors_that_a_policy_lacks_are_warned_of(tmp_path, caplog, level, is_warned):
    config = train_config(tmp_path, algorithm={"cfg": {"log_prob_per": level}})
    warn_about_config(override(complete(TrainCfg.from_dict(config)), []))
    assert (f"log_prob_per: {level} has no effect, as actions of actor_critic" in caplog.text) is is_warned


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (
            {"collector": {"max_policy_lag": 2, "worker": "process"}},
            "ignores trainer.collector.worker, max_policy_lag",
        ),
        ({"collector": {"pipeline_stages": 2, "env_processes": 2}}, ""),
        (
            {"model_type": "vla", "collector": "process"},
            "collecting in a process of its own, by weights that are at most 1",
        ),
    ],
)
def test_how_a_run_collects_is_told(tmp_path, caplog, trainer, said):
    caplog.set_level("INFO")
    config = train_config(tmp_path, trainer=trainer, algorithm={"cfg": {"correction": "decoupled"}})
    warn_about_config(override(complete(TrainCfg.from_dict(config)), []))
    assert said in caplog.text
    assert bool(said) is bool(caplog.text)


def test_one_rank_warns_for_all(tmp_path, caplog):
    config = train_config(tmp_path, trainer=vla(), algorithm={"cfg": {"lr_schedule": "adaptive"}})
    cfg = override(complete(TrainCfg.from_dict(config)), [])
    for rank, count in ((1, 0), (0, 1)):
        ranks = Ranks()
        ranks.rank = rank
        build_trainer(cfg, RunFolder(tmp_path), ranks=ranks).env.close()
        assert caplog.text.count("correction decoupled") == count


# --- resumed with another collector -------------------------------------------------------------------------------

MODES = {
    "sync": {},
    "thread": {"mode": "async", "worker": "thread", "max_policy_lag": 1},
    "process": {"mode": "async", "worker": "process", "max_policy_lag": 1},
}
CHANGES = {
    "sync to thread": ("sync", ["--trainer.collector.mode", "async"], "collecting synchronously, resumed async"),
    "thread to sync": ("thread", ["--trainer.collector.mode", "sync"], "collecting asynchronously, resumed sync"),
    "shorter rollouts": ("thread", ["--trainer.buffer_size", "8"], "rollouts of 16 steps, resumed with 8"),
    "less lag": ("thread", ["--trainer.collector.max_policy_lag", "0"], "saved with a larger max_policy_lag"),
    "thread to process": ("thread", ["--trainer.collector.worker", "process"], None),
    "process to thread": ("process", ["--trainer.collector.worker", "thread"], None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_can_go_on_with_another_collector(tmp_path, capsys, change):
    mode, words, message = CHANGES[change]
    settings = {"iterations": 2, "enable_eval": False, "collector": MODES[mode]}
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings))
    capsys.readouterr()
    result = resume_training(tmp_path / "run", [*words, "--trainer.iterations", "4"])
    assert result.iteration == 4
    said = capsys.readouterr().err
    assert ("begin new episodes" in said) == (message is not None)
    assert message is None or message in said
    saved = load_checkpoint(find_checkpoint(tmp_path / "run"))
    assert int(saved["policy"]["version"]) == 4
    assert ("queue" in saved["collector"]) == ("sync" not in change.split()[-1])
