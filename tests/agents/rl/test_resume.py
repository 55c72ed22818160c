"""A run that was killed goes on as if it had never stopped: every parameter and every logged number, bit by bit."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embodichain.agents.rl.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.config import TrainCfg, complete, override
from embodichain.agents.rl.evaluation import Evaluation
from embodichain.agents.rl.runs import RunFolder, read_metrics
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.agents.rl.trainer import Trainer, resume_message
from embodichain.errors import CheckpointError, TrainingStateError
from tests.agents.rl.test_checkpoint import same
from tests.agents.rl.training_cases import GRPO, train_config, write_config
from tests.programs import run_program

ITERATIONS = 8
MEMORY = {"memory": {"type": "gru", "hidden_size": 8}}
NOISY = {"gym_config": {"env": {"observations": {"noise": {"robot/qpos": 0.01}}}}}
LINEAR = {"cfg": {"lr_schedule": "linear", "target_kl": 0.05}}
TUNED = {
    "value_learning_rate": 3e-3,
    "weight_decay": 0.1,
    "lr_warmup": 6,
    "kl_coef": 0.1,
    "clip_coef_high": 0.3,
    "clip_coef_final": 0.1,
    "ent_coef": 0.01,
    "ent_coef_final": 0.0,
}
CASES = {
    "ppo, fine-tuned": {"algorithm": {"cfg": LINEAR["cfg"] | TUNED}},
    "ppo with memory and noise": {"policy": MEMORY, "trainer": NOISY},
    "ppo with gSDE": {"policy": {"distribution": {"std": "gsde", "sde_sample_freq": 3, "init_log_std": -1.0}}},
    "ppo with an LSTM": {"policy": {"memory": {"type": "lstm", "hidden_size": 8}}},
    "ppo with adaptive rate on Gymnasium": {
        "trainer": {"gym_config": {"id": "CartPole-v1", "max_episode_steps": 30}},
        "algorithm": {"cfg": {"lr_schedule": "adaptive"}},
    },
    "grpo": {"algorithm": GRPO},
}


# Trains until a rollout is half collected, and is then killed as nothing inside the process could prevent.
KILLED = """
import os, signal, sys
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.train import main

record, count = SyncCollector.record, 0

def record_or_die(self, *args):
    global count
    count += 1
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return record(self, *args)

SyncCollector.record = record_or_die
main(["--config", sys.argv[1]])
"""


def train_until_killed(config, num_steps):
    """Train in a process of its own, which is killed without warning in this step of its environments."""
    process = run_program("-c", KILLED, config, str(num_steps))
    assert process.returncode == -signal.SIGKILL, process.stderr


def without_times(lines):
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def events(run_dir):
    """Return what TensorBoard shows of a run, without wall-clock times."""
    shown = EventAccumulator(str(run_dir))
    shown.Reload()
    names = [name for name in shown.Tags()["scalars"] if not name.startswith("time/")]
    return {name: [(event.step, event.value) for event in shown.Scalars(name)] for name in names}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", CASES)
def test_killed_run_goes_on_bit_by_bit(tmp_path, case):
    settings = {"iterations": ITERATIONS, "save_freq": 256, **CASES[case].get("trainer", {})}
    changes = {**CASES[case], "trainer": settings}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train_from_config(write_config(tmp_path / "straight.json", straight, **changes))
    train_until_killed(write_config(tmp_path / "killed.json", killed, **changes), num_steps=5 * 16 + 8)
    assert load_checkpoint(find_checkpoint(killed))["trainer"]["iteration"] == 4
    assert read_metrics(killed / "metrics.jsonl")[-1]["step"] == 5 * 8 * 16  # there is something to be undone
    time.sleep(1.0)  # TensorBoard orders event files by the second in their names
    result = resume_training(killed)

    expected, actual = (load_checkpoint(find_checkpoint(run)) for run in (straight, killed))
    assert result.iteration == ITERATIONS == expected["trainer"]["iteration"]
    for part in ("policy", "algorithm", "collector", "env", "random"):
        assert same(actual[part], expected[part]), part
    expected["trainer"]["seconds"] = actual["trainer"]["seconds"] = 0.0
    assert same(actual["trainer"], expected["trainer"])
    assert without_times(read_metrics(killed / "metrics.jsonl")) == without_times(
        read_metrics(straight / "metrics.jsonl")
    )
    assert events(killed) == events(straight)
    assert len(events(straight)["update/policy_loss"]) == ITERATIONS


def test_the_killed_and_the_straight_run_really_learn(tmp_path):
    """The comparison above would hold for a run that changes nothing."""
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer={"keep_checkpoints": 9}))
    first, *_, last = list_checkpoints(tmp_path / "run" / "checkpoints")
    before, after = load_checkpoint(first)["policy"], load_checkpoint(last)["policy"]
    assert all(not torch.equal(before[name], after[name]) for name in before if "weight" in name)


def test_finished_run_can_be_made_longer(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 2})
    train_from_config(config)
    result = resume_training(tmp_path / "run", ["--trainer.iterations", "3"])
    assert (result.iteration, result.global_step) == (3, 3 * 8 * 16)
    train_from_config(write_config(tmp_path / "d.json", tmp_path / "whole", trainer={"iterations": 3}))
    longer, whole = (load_checkpoint(find_checkpoint(tmp_path / name))["policy"] for name in ("run", "whole"))
    assert same(longer, whole)


@pytest.fixture
def rates(monkeypatch):
    """Adam's rate when a trainer begins, and when it has ended, of every training in this process."""
    seen, train = [], Trainer.train

    def watched(self):
        seen.append(self.algorithm.optimizer.learning_rate)
        result = train(self)
        seen.append(self.algorithm.optimizer.learning_rate)
        return result

    monkeypatch.setattr(Trainer, "train", watched)
    return seen


@pytest.mark.parametrize("schedule", ["constant", "linear", "adaptive", "grpo"])
def test_another_learning_rate_takes_effect(tmp_path, rates, schedule):
    """In Adam, in the log, and in what is saved; a second resume keeps what came of it."""
    algorithm = GRPO if schedule == "grpo" else {"cfg": {"learning_rate": 1e-3, "lr_schedule": schedule}}
    run = tmp_path / "run"
    train_from_config(write_config(tmp_path / "c.json", run, algorithm=algorithm, trainer={"iterations": 3}))
    changed = ["--algorithm.cfg.learning_rate", "2e-5"]
    resume_training(run, [*changed, "--trainer.iterations", "4"])
    before, after = rates[2:]
    assert before == 2e-5  # linear: until the first update
    saved = load_checkpoint(find_checkpoint(run))
    assert saved["config"]["algorithm"]["cfg"]["learning_rate"] == 2e-5
    assert saved["algorithm"]["optimizer"]["adam"]["param_groups"][0]["lr"] == after
    logged = [line.get("update/learning_rate") for line in read_metrics(run / "metrics.jsonl")]
    assert [rate for rate in logged if rate is not None][-1] == after
    if schedule == "linear":
        assert after == pytest.approx(2e-5 * (1 - 3 / 4))
    elif schedule == "adaptive":
        assert 2e-5 / 1.5**2 * 0.999 <= after <= 2e-5 * 1.5**2 * 1.001  # two epochs
    else:
        assert after == 2e-5
    resume_training(run)
    resume_training(run, changed)  # the same value again changes nothing
    assert rates[4:] == [after] * 4


def test_the_adapted_rate_is_kept_unless_another_schedule_is_chosen(tmp_path, rates):
    adaptive = {"cfg": {"learning_rate": 1e-3, "lr_schedule": "adaptive", "desired_kl": 1e-9, "n_epochs": 2}}
    run = tmp_path / "run"
    train_from_config(write_config(tmp_path / "c.json", run, algorithm=adaptive, trainer={"iterations": 3}))
    resume_training(run)
    assert rates[1] == rates[2] == pytest.approx(1e-3 / 1.5**6)
    resume_training(run, ["--algorithm.cfg.lr_schedule", "constant", "--trainer.iterations", "4"])
    assert rates[4:] == [1e-3, 1e-3]  # the rate that the config names


def test_a_reference_policy_that_was_not_saved_is_named(tmp_path):
    without = {"name": "grpo", "cfg": GRPO["cfg"] | {"kl_coef": 0.0}}
    config = write_config(tmp_path / "c.json", tmp_path / "run", algorithm=without, trainer={"iterations": 1})
    train_from_config(config)
    with pytest.raises(CheckpointError, match=r"kl_coef.*without a reference policy.*--algorithm\.cfg\.kl_coef 0"):
        resume_training(tmp_path / "run", ["--algorithm.cfg.kl_coef", "0.1", "--trainer.iterations", "2"])


def test_resuming_an_older_checkpoint_undoes_what_came_after(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"keep_checkpoints": 9})
    train_from_config(config)
    before = without_times(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    older = list_checkpoints(tmp_path / "run" / "checkpoints")[1]
    resume_training(older)
    assert without_times(read_metrics(tmp_path / "run" / "metrics.jsonl")) == before


def test_unfinished_checkpoints_and_lines_are_cleared_away(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 2})
    train_from_config(config)
    partial = tmp_path / "run" / "checkpoints" / ".step_000000000512.77.partial"
    partial.mkdir()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 256, "upda')
    resume_training(tmp_path / "run", ["--trainer.iterations", "3"])
    assert not partial.exists()
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [128, 256, 256, 384, 384]


@pytest.mark.parametrize(
    ("collector", "others", "words"),
    [
        (AsyncCfg(), 0, "cannot be saved"),
        (AsyncCfg(worker="ray"), 0, "continues with new episodes"),
        (AsyncCfg(worker="ray", address="auto"), 1, "all environments begin new episodes"),
    ],
)
def test_what_becomes_of_the_episodes_is_told(collector, others, words):
    state = {"env": None, "other_ranks": [{}] * others}
    assert words in resume_message(state, collector, ranks=1)
    assert resume_message({"env": "saved"}, collector, ranks=1) is None


def test_environment_without_a_state_goes_on_with_new_episodes(tmp_path):
    environment = {"id": "Acrobot-v1", "kwargs": {"render_mode": "rgb_array"}, "max_episode_steps": 30}
    config = train_config(tmp_path / "run", trainer={"gym_config": environment, "iterations": 2})
    from embodichain.agents.rl.config import TrainCfg, complete, override
    from embodichain.agents.rl.runs import RunFolder
    from embodichain.agents.rl.train import build_trainer  # the pieces, so that the env can be made to forget

    cfg = override(complete(TrainCfg.from_dict(config)), [])
    trainer = build_trainer(cfg, RunFolder.create(cfg))
    trainer.env.supports_state = False
    trainer.train()
    assert load_checkpoint(find_checkpoint(tmp_path / "run"))["env"] is None
    result = resume_training(tmp_path / "run", ["--trainer.iterations", "3"])
    assert result.iteration == 3


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--trainer.num_envs", "16"], CheckpointError, "holds 8 environments, this run has 16"),
        (["--policy.actor.hidden_sizes", "[17]"], CheckpointError, r"another architecture: actor\.0\.weight is \[16"),
    ],
)
def test_a_run_that_changed_its_shape_is_refused(tmp_path, words, error, message):
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 1}))
    with pytest.raises(error, match=message):
        resume_training(tmp_path / "run", words)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 1})
    train_from_config(config)
    with pytest.raises(TrainingStateError, match="holds a run already: continue it with --resume"):
        train_from_config(config)


# --- restarts without a person ------------------------------------------------------------------------------------


def compare(run, straight):
    """Check that two runs ended in the same state and have logged the same."""
    expected, actual = (load_checkpoint(find_checkpoint(path)) for path in (straight, run))
    for part in ("policy", "algorithm", "collector", "env", "random"):
        assert same(actual[part], expected[part]), part
    expected["trainer"]["seconds"] = actual["trainer"]["seconds"] = 0.0
    assert same(actual["trainer"], expected["trainer"])
    assert without_times(read_metrics(run / "metrics.jsonl")) == without_times(read_metrics(straight / "metrics.jsonl"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of four iterations with all its checkpoints."""
    folder, threads = tmp_path_factory.mktemp("finished"), torch.get_num_threads()
    torch.set_num_threads(1)
    train_from_config(write_config(folder / "c.json", folder / "run", trainer={"keep_checkpoints": 9}))
    torch.set_num_threads(threads)
    return folder / "run"


@pytest.mark.parametrize("logged", [False, True])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path, finished, caplog, logged):
    run = tmp_path / "run"
    cfg = override(complete(TrainCfg.from_dict(train_config(run, trainer={"keep_checkpoints": 9}))), [])
    RunFolder.create(cfg)  # what a new run does first
    if logged:
        (run / "metrics.jsonl").write_text('{"step": 1, "update/policy_loss": 0.5}\n{"step": 2, "upd')
        (run / "checkpoints" / ".step_000000000000.77.partial").mkdir(parents=True)
        (run / ".train_config.json.77").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert resume_training(run).iteration == 4
    assert f"{run} holds a run without a checkpoint: the run begins anew" in caplog.text
    compare(run, finished)
    assert not list(run.rglob(".*"))


def test_options_hold_for_a_run_that_begins_anew(tmp_path):
    run = tmp_path / "run"
    cfg = override(complete(TrainCfg.from_dict(train_config(run, trainer={"run_dir": None}))), [])
    RunFolder(run).configure(cfg)
    result = resume_training(run, ["--trainer.iterations", "1", "--trainer.enable_eval", "false"])
    assert (result.run_dir, result.iteration) == (run, 1)


def test_a_folder_without_config_and_checkpoint_cannot_be_resumed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"neither a checkpoint nor train_config\.json.*embodichain train CONFIG"):
        resume_training(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) in (["checkpoints"], ["checkpoints", "run.lock"])


def flip_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES = {
    "tensors cut": lambda folder: os.truncate(folder / "tensors.safetensors", 100),
    "a bit of the tensors": lambda folder: flip_bit(folder / "tensors.safetensors"),
    "a bit of the state": lambda folder: flip_bit(folder / "state.json"),
    "empty state": lambda folder: os.truncate(folder / "state.json", 0),
    "no tensors": lambda folder: (folder / "tensors.safetensors").unlink(),
    "no state": lambda folder: (folder / "state.json").unlink(),
    "nothing": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(tmp_path, finished, caplog, damage):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    *_, third, fourth, last = list_checkpoints(run / "checkpoints")
    for broken in (fourth, last):
        DAMAGES[damage](broken)
    with caplog.at_level(logging.WARNING):
        assert resume_training(run).iteration == 4
    for broken in (fourth, last):
        kept = broken.with_name(f"damaged_{broken.name}")
        assert kept.is_dir()
        message = next(record.getMessage() for record in caplog.records if str(broken) in record.getMessage())
        assert f"kept as {kept}" in message
        assert f"the run continues from {third}" in message
    compare(run, finished)
    assert (run / "checkpoints" / "latest").resolve() == last


def test_a_run_whose_checkpoints_are_all_damaged_is_left_alone(tmp_path, finished):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    for checkpoint in list_checkpoints(run / "checkpoints"):
        flip_bit(checkpoint / "tensors.safetensors")
    before = (run / "metrics.jsonl").read_text()
    expected = r"none of the 5 checkpoints of .*/run can be read: .*step_000000000512.* does not match its checksum"
    with pytest.raises(CheckpointError, match=expected):
        resume_training(run)
    assert len(list_checkpoints(run / "checkpoints")) == 5
    assert (run / "metrics.jsonl").read_text() == before


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(tmp_path, finished):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    file = list_checkpoints(run / "checkpoints")[-1] / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 99}))
    with pytest.raises(CheckpointError, match="Upgrade it"):
        resume_training(run)
    assert file.exists()


@pytest.mark.parametrize("former", [False, True])
@pytest.mark.parametrize("complete_copy", [False, True])
def test_a_complete_copy_is_adopted_after_a_crash_between_renames(tmp_path, finished, former, complete_copy):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    last = list_checkpoints(run / "checkpoints")[-1]
    copy = last.with_name(f".{last.name}.4711.partial")
    shutil.copytree(last, copy)
    if not complete_copy:
        os.truncate(copy / "tensors.safetensors", 50)
    if former:
        last.rename(last.with_name(f".{last.name}.former"))
    else:
        shutil.rmtree(last)
    resume_training(run)
    compare(run, finished)
    assert not list((run / "checkpoints").glob(".*"))


def test_a_copy_is_adopted_and_not_made_again(tmp_path, finished):
    """The last iteration is in the copy alone."""
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    last = list_checkpoints(run / "checkpoints")[-1]
    inode = (last / "state.json").stat().st_ino
    last.rename(last.with_name(f".{last.name}.4711.partial"))
    resume_training(run)
    assert (last / "state.json").stat().st_ino == inode


def test_a_checkpoint_that_was_being_overwritten_can_be_named(tmp_path, finished):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    second = list_checkpoints(run / "checkpoints")[2]
    second.rename(second.with_name(f".{second.name}.former"))
    resume_training(second)
    compare(run, finished)


def test_a_checkpoint_that_is_named_is_the_one_or_none(tmp_path, finished):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    for name in ("step_000000000999", "nothing"):
        with pytest.raises(CheckpointError, match=f"{name} is no checkpoint"):
            resume_training(run / "checkpoints" / name)
    flip_bit(run / "checkpoints" / "latest" / "tensors.safetensors")
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        resume_training(run / "checkpoints" / "latest")


def test_a_finished_run_that_is_resumed_logs_and_changes_nothing(tmp_path, monkeypatch):
    """Its last evaluation was not the best one, and came after the last checkpoint in the loop."""
    scores = iter(range(0, -100, -1))
    monkeypatch.setattr(Evaluation, "score", property(lambda _: (0.0, next(scores))))
    run = tmp_path / "run"
    train_from_config(write_config(tmp_path / "c.json", run, trainer={"iterations": 3, "eval_freq": 256}))
    before = (run / "metrics.jsonl").read_text()
    assert sum("eval/return" in line for line in before.splitlines()) == 2
    result = resume_training(run)
    assert (result.iteration, result.reason) == (3, "iterations")
    assert (run / "metrics.jsonl").read_text() == before


def test_an_evaluation_that_was_logged_and_not_saved_is_logged_once(tmp_path, finished):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    last = list_checkpoints(run / "checkpoints")[-1]
    state = load_checkpoint(last)
    state["trainer"]["evaluated_at"] = 256  # as it was saved before the evaluation
    save_checkpoint(last, state)
    resume_training(run)
    assert without_times(read_metrics(run / "metrics.jsonl")) == without_times(read_metrics(finished / "metrics.jsonl"))


def test_a_run_that_has_reached_its_target_stays_ended(tmp_path):
    settings = {"iterations": 9, "eval_freq": 128, "target_return": 1.0}
    run = tmp_path / "run"
    first = train_from_config(write_config(tmp_path / "c.json", run, trainer=settings))
    again = resume_training(run)
    assert (first.reason, first.iteration) == (again.reason, again.iteration) == ("target", 1)
    further = resume_training(run, ["--trainer.target_return", "1e9", "--trainer.iterations", "3"])
    assert (further.reason, further.iteration) == ("iterations", 3)


# Forks a training that goes on from whatever is in the folder, as often as it is killed; imports are shared.
KILLED_OFTEN = """
import os, random, shutil, signal, sys, time
import torch
from torch.utils.tensorboard import SummaryWriter
from embodichain.cli.main import main

torch.set_num_threads(1)
config, run, kills, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
random.seed(seed)


def train(words, seconds):
    child = os.fork()
    if child == 0:
        os._exit(main(["train", *words]))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


began = time.monotonic()
assert train([config, "--trainer.run_dir", run + "_timed"], 600)
whole, killed = time.monotonic() - began, 0
while killed < kills:
    known = os.path.exists(os.path.join(run, "train_config.json"))
    words = ["--resume", run] if known else [config]
    if not train(words, random.uniform(0.0, whole / 2)):
        killed += 1
    elif killed >= 2:
        break
    else:  # the machine was busier when it was timed
        shutil.rmtree(run)
        whole, killed = whole / 2, 0
else:
    assert train(["--resume", run] if os.path.exists(run + "/train_config.json") else [config], 600)
print("killed", killed)
"""


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path):
    settings = {"iterations": ITERATIONS, "save_freq": 128, "eval_freq": 256}
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings)
    done = run_program("-c", KILLED_OFTEN, config, tmp_path / "run", "8", "3", timeout=290)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 2  # it may be done before it was killed so often
    compare(tmp_path / "run", tmp_path / "run_timed")
