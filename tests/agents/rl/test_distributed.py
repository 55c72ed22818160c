"""Data parallelism with real processes: the same weights on every rank, and those of one process on all the data."""

from __future__ import annotations

import json
import os

import pytest
import torch

from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.buffer.rollout_buffer import Minibatches
from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint
from embodichain.agents.rl.config import TrainerCfg, num_iterations
from embodichain.agents.rl.runs import read_metrics
from embodichain.agents.rl.train import resume_training
from embodichain.agents.rl.trainer import merge_statistics
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.errors import ConfigError
from tests.agents.rl import rank_cases
from tests.agents.rl.helpers import ScriptedEnv, make_policy
from tests.agents.rl.rank_cases import CASES, ENVS, UPDATES, joint_rollout, make_algorithm, run_ranks
from tests.agents.rl.test_checkpoint import same
from tests.agents.rl.training_cases import GRPO, write_config
from tests.programs import run_torchrun

RANKS = 2
PER_RANK = 8 * 16


pytestmark = pytest.mark.usefixtures("one_thread")


# --- updates ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    """Return, by case, what each rank had after every update."""
    folder = tmp_path_factory.mktemp("updates")
    assert run_ranks(RANKS, rank_cases.update_together, folder) == [0, 0]
    return {
        case: [load_checkpoint(folder / f"case_{number}_rank_{rank}")["updates"] for rank in range(RANKS)]
        for number, case in enumerate(CASES)
    }


class JointOrder:
    """Draws the minibatches that the ranks draw, each from its own generator, put side by side."""

    def __init__(self):
        self.generators = [torch.Generator().manual_seed(100 + rank) for rank in range(RANKS)]

    def __call__(self, minibatches):
        items = minibatches.items
        owner = items % minibatches.num_envs // ENVS
        parts = []
        for rank, generator in enumerate(self.generators):
            own = items[owner == rank]
            order = torch.randperm(own.numel(), generator=generator)
            parts.append(own[order].tensor_split(len(minibatches)))
        return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_have_the_same_weights_after_every_update(updated, case):
    first, second = updated[case]
    assert len(first) == len(second) == UPDATES
    for here, there in zip(first, second, strict=True):
        assert same(here["weights"], there["weights"])
        assert here["measures"] == there["measures"]
        assert not same(here["advantage"], there["advantage"])  # their data were not the same
    assert not same(first[0]["weights"], first[-1]["weights"])


@pytest.mark.parametrize("case", CASES)
def test_ranks_learn_what_one_process_learns_from_all_their_data(updated, case, monkeypatch):
    order = JointOrder()
    monkeypatch.setattr(Minibatches, "draw", lambda self: order(self))
    per_rank = make_algorithm(case).cfg.batch_size
    alone = make_algorithm(case, batch_size=RANKS * per_rank)
    for update, theirs in enumerate(updated[case][0]):
        rollout = joint_rollout(case, alone, update, RANKS)
        measures = alone.update(rollout)
        for name, value in alone.policy.state_dict().items():
            assert torch.allclose(theirs["weights"][name], value, rtol=1e-5, atol=1e-5), (update, name)
        assert theirs["measures"].keys() == measures.keys()
        for name, value in measures.items():
            assert theirs["measures"][name] == pytest.approx(value, rel=1e-3, abs=2e-5), (update, name)


def test_the_cases_show_what_they_are_meant_to(updated):
    adaptive = [entry["measures"]["learning_rate"] for entry in updated["ppo with an adaptive rate"][0]]
    assert len({3e-4, *adaptive}) > 1
    stopped = [entry["measures"]["epochs"] for entry in updated["ppo that stops early"][0]]
    assert min(stopped) < 8
    idle = updated["grpo without anything to learn on rank 1"][1][0]
    assert float(idle["advantage"].abs().max()) == 0.0
    assert 0 < idle["measures"]["transitions_used"] <= ENVS * rank_cases.STEPS
    seen = updated["ppo"][0][-1]["weights"]["encoder.normalizer.count"]
    assert float(seen) == UPDATES * RANKS * ENVS * rank_cases.STEPS


def test_what_ranks_tell_each_other(tmp_path):
    assert run_ranks(RANKS, rank_cases.talk, tmp_path) == [0, 0]
    first, second = (load_checkpoint(tmp_path / f"talk_{rank}") for rank in range(RANKS))
    assert first["exchange"] == second["exchange"]
    assert [entry["rank"] for entry in first["exchange"]] == [0, 1]
    assert same(first["from_first"], second["from_first"])
    assert first["from_first"]["words"] == [0, None, "ä", float("inf")]
    assert [entry["tensor"].tolist() for entry in first["to_first"]] == [[0, 1, 2], [1, 2, 3]]
    assert second["to_first"] == []
    assert torch.equal(first["sum"], second["sum"])
    assert torch.allclose(first["sum"], torch.tensor([0.3, 3.0]))
    values = torch.cat([torch.arange(10.0), torch.arange(10.0) + 5])
    assert torch.allclose(torch.stack(first["spread"]), torch.stack([values.mean(), values.std(correction=0)]))
    assert (first["seed"], first["seed"] != second["seed"]) == (7, True)
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    for heard in (first, second):
        assert heard["listening"]
        assert set(heard["listening"]) <= loopback


def test_an_algorithm_that_cannot_share_gradients_is_refused(monkeypatch):
    class Own(BaseAlgorithm):
        def update(self, rollout=None):
            return {}

    several = Ranks()
    several.count = 2
    own = Own(make_algorithm("ppo").cfg, make_policy(ScriptedEnv(2)))
    own.join(Ranks())
    with pytest.raises(ConfigError, match="Own cannot train on several ranks"):
        own.join(several)


# --- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_of_two_ranks_resumes_on_one_and_on_four(tmp_path):
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.json", run, algorithm=GRPO, trainer={"iterations": 2, "save_freq": 1})
    assert run_ranks(2, rank_cases.train, config, []) == [0, 0]
    saved = load_checkpoint(find_checkpoint(run))
    assert saved["trainer"]["global_step"] == 2 * 2 * PER_RANK
    assert len(saved["other_ranks"]) == 1
    here, there = saved, saved["other_ranks"][0]
    assert not same(here["env"], there["env"])
    assert not same(here["random"], there["random"])
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines if "update/policy_loss" in line] == [2 * PER_RANK, 4 * PER_RANK]
    assert json.loads((run / "train_config.json").read_text())["trainer"]["seed"] == 0
    assert len(list(run.glob("events*"))) == 1

    result = resume_training(run, ["--trainer.iterations", "3"])
    assert (result.iteration, result.global_step) == (3, 5 * PER_RANK)
    assert "other_ranks" not in saved["config"]
    assert load_checkpoint(find_checkpoint(run))["other_ranks"] == []
    assert run_ranks(4, rank_cases.resume, run, ["--trainer.iterations", "4"]) == [0] * 4
    last = load_checkpoint(find_checkpoint(run))
    assert (last["trainer"]["iteration"], last["trainer"]["global_step"]) == (4, 9 * PER_RANK)
    assert len(last["other_ranks"]) == 3
    steps = [entry["step"] for entry in last["algorithm"]["optimizer"]["adam"]["state"].values()]
    before = [entry["step"] for entry in saved["algorithm"]["optimizer"]["adam"]["state"].values()]
    assert steps[0] > before[0] > 0  # Adam went on, it did not start anew
    assert int(last["policy"]["version"]) == 4


def test_nan_on_one_rank_ends_all_with_a_message(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run")
    assert run_ranks(RANKS, rank_cases.train_with, "nan", config) == [0, 0]
    assert (tmp_path / "nan_1.txt").read_text().startswith("NotFiniteError: reward of env 2 in step 5")
    told = (tmp_path / "nan_0.txt").read_text()
    assert told.startswith("RankError: rank 1 failed while collecting: NotFiniteError: reward of env 2 in step 5")
    assert load_checkpoint(tmp_path / "run" / "failure_rank_1")["rollout"].batch_size == (8, 16)


def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"save_freq": 0, "eval_freq": 0})
    assert run_ranks(RANKS, rank_cases.train_with, "signal", config) == [0, 0]
    assert [(tmp_path / f"signal_{rank}.txt").read_text() for rank in range(RANKS)] == ["interrupted"] * RANKS
    assert load_checkpoint(find_checkpoint(tmp_path / "run"))["trainer"]["iteration"] == 3


def test_weights_that_drift_apart_are_an_error(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run")
    assert run_ranks(RANKS, rank_cases.train_with, "drift", config) == [0, 0]
    for rank in range(RANKS):
        assert (
            "RankError: the weights of rank 1 are not those of rank 0" in (tmp_path / f"drift_{rank}.txt").read_text()
        )


def test_steps_that_are_left_are_shared_by_the_ranks_there_are():
    trainer = TrainerCfg(gym_config="x", num_envs=8, buffer_size=16, total_steps=1000)
    assert num_iterations(trainer) == 8
    assert num_iterations(trainer, ranks=2) == 4
    # 512 steps were made by 2 ranks; 4 ranks make the other 488 in one rollout.
    assert num_iterations(trainer, ranks=4, iteration=2, global_step=512) == 3
    assert num_iterations(trainer.replace(iterations=2), ranks=4, iteration=2, global_step=512) == 2


def test_statistics_of_ranks_are_weighted_by_their_episodes():
    merged = merge_statistics(
        [
            {"episode/count": 3.0, "episode/return": 1.0, "rewards/x": 1.0, "async/lag_max": 1.0},
            {"episode/count": 1.0, "episode/return": 5.0, "rewards/x": 3.0, "async/lag_max": 2.0},
            {"episode/count": 0.0, "rewards/x": 2.0, "async/lag_max": 0.0},
        ]
    )
    assert merged == {"episode/count": 4.0, "episode/return": 2.0, "rewards/x": 2.0, "async/lag_max": 2.0}


# --- torchrun -----------------------------------------------------------------------------------------------------

MORTAL = """
import os, sys
from embodichain.cli.main import main
from tests.agents.rl import rank_cases

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    rank_cases.train_with("death", __import__("pathlib").Path(sys.argv[1]))
else:
    sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_replaces_a_killed_rank_and_the_run_goes_on_bit_by_bit(tmp_path):
    settings = {"iterations": 5, "save_freq": 1, "enable_eval": False}
    straight = write_config(tmp_path / "straight.json", tmp_path / "straight", trainer=settings)
    assert run_ranks(RANKS, rank_cases.train, straight, []) == [0, 0]

    killed = write_config(tmp_path / "killed.json", tmp_path / "killed", trainer=settings)
    script = tmp_path / "mortal.py"
    script.write_text(MORTAL)
    words = ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", str(script), str(killed)]
    forked = "from tests.programs import fork_ranks; fork_ranks(); from torch.distributed import run; run.main()"
    done = run_torchrun("-c", forked, *words, env=_environment(), timeout=280)
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr, done.stderr

    expected, actual = (load_checkpoint(find_checkpoint(tmp_path / name)) for name in ("straight", "killed"))
    for part in ("policy", "algorithm", "collector", "env", "random", "other_ranks"):
        assert same(actual[part], expected[part]), part
    assert actual["trainer"]["global_step"] == 5 * RANKS * PER_RANK
    steps = [line["step"] for line in read_metrics(tmp_path / "killed" / "metrics.jsonl")]
    assert steps == [RANKS * PER_RANK * i for i in range(1, 6)]


def _environment():
    """Return the environment for a process that is to find these tests and use one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
