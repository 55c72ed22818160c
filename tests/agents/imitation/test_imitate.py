"""``embodichain imitate``: runs that can be killed, resumed, evaluated, loaded and fine-tuned, of every policy."""

from __future__ import annotations

import json
import os
import signal

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.imitation.config import ImitateCfg, complete, load_imitate_config, override, stream_settings
from embodichain.agents.imitation.imitate import imitate_from_config, opened_imitation, resume_imitation
from embodichain.agents.rl.algo.imitation import Imitation, ImitationCfg
from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint, load_policy
from embodichain.agents.rl.config import load_train_config
from embodichain.agents.rl.models import Policy, build_policy
from embodichain.agents.rl.models.actor_critic import ActorOnly
from embodichain.agents.rl.runs import locked_run, read_metrics, read_saved
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.cli.main import main
from embodichain.errors import CheckpointError, ConfigError, NotFiniteError, RolloutError
from tests.agents.rl.helpers import box
from tests.agents.rl.test_checkpoint import same
from tests.agents.rl.test_resume import without_times
from tests.programs import run_program, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

MLP = {"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}
REACH = {"id": "ReachRL", "max_episode_steps": 10, "num_threads": 1}
FLOW = {"name": "flow", "chunk_size": 3, "actor": MLP, "critic": MLP, "normalize_obs": True}
EXPERT = {"source": "expert", "noise_std": 0.1}
STREAM = {"stream": {"buffer_size": 8, "action_config": EXPERT, "progress": False}}


def config(run_dir, source, policy=FLOW, **trainer):
    settings = {"gym_config": REACH, "total_steps": 12, "log_freq": 2, "eval_freq": 4, "save_freq": 4}
    settings |= {"num_eval_episodes": 2, "num_eval_envs": 2, "eval_video": False, "run_dir": str(run_dir)}
    algorithm = {"cfg": {"batch_size": 8, "warmup_steps": 2, "sequence_length": 4}}
    return {"trainer": settings | trainer, "policy": policy, "algorithm": algorithm, "source": source}


def imitate(*args, **kwargs):
    return imitate_from_config(ImitateCfg.from_dict(config(*args, **kwargs)))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    pytest.importorskip("pyarrow", reason="needs the extra 'data'")
    pytest.importorskip("av", reason="needs the extra 'data'")
    folder = tmp_path_factory.mktemp("data") / "reach"
    settings = [
        "--gym_config.max_episode_steps",
        "10",
        "--gym_config.num_envs",
        "4",
        "--action_config.noise_std",
        "0.1",
    ]
    assert main(["record", "ReachRL", "--out", str(folder), "--episodes", "6", *settings]) == 0
    return folder


# Imitates until it has learned from so many batches, and is then killed as nothing inside the process could prevent.
KILLED = """
import os, signal, sys
from embodichain.agents.rl.algo.imitation import Imitation
from embodichain.cli.main import main

update, count = Imitation.update, 0

def update_or_die(self, *args):
    global count
    count += 1
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, *args)

Imitation.update = update_or_die
main(["imitate", sys.argv[1]])
"""


@pytest.mark.extra("data")
def test_killed_run_goes_on_bit_by_bit(tmp_path, recorded):
    parts = [{"dataset": str(recorded), "weight": 1.0}, {"dataset": str(recorded), "memory": 1e-6, "weight": 2.0}]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config(tmp_path / "killed", {"mixture": parts})))
    process = run_program("-c", KILLED, file, "7")
    assert process.returncode == -signal.SIGKILL, process.stderr
    former = load_checkpoint(find_checkpoint(tmp_path / "killed"))
    assert former["trainer"]["global_step"] == 4
    assert read_metrics(tmp_path / "killed" / "metrics.jsonl")[-1]["step"] == 6  # there is something to be undone

    result = resume_imitation(tmp_path / "killed")
    imitate(tmp_path / "straight", {"mixture": parts})
    expected, actual = (load_checkpoint(find_checkpoint(tmp_path / name)) for name in ("straight", "killed"))
    assert result.global_step == 12 == expected["trainer"]["global_step"]
    for part in ("policy", "algorithm", "source", "random"):
        assert same(actual[part], expected[part]), part
    lines = [without_times(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("killed", "straight")]
    assert lines[0] == lines[1]
    assert lines[0][-1]["eval/return"] < 0.0
    learned = "head.velocity_net.0.weight"
    assert not torch.equal(actual["policy"][learned], former["policy"][learned])


def test_a_stream_is_imitated_evaluated_continued_and_reinforced(tmp_path, capsys, caplog, monkeypatch):
    run = tmp_path / "run"
    result = imitate(run, STREAM, eval_video=True)
    assert (result.reason, result.global_step) == ("total_steps", 12)
    lines = read_metrics(run / "metrics.jsonl")
    assert {"update/action_loss", "update/learning_rate", "stream/episodes"} <= set(lines[0])
    assert [line["step"] for line in lines if "eval/return" in line] == [4, 8, 12]
    assert len(list((run / "videos").iterdir())) == 3
    best = find_checkpoint(run, "best")
    policy, again = load_policy(run), load_policy(best)
    assert same(policy.state_dict(), again.state_dict())
    assert policy.encoder.normalizer.frozen

    assert main(["eval", str(run), "--episodes", "2"]) == 0
    assert main(["play", str(run), "--episodes", "1"]) == 0
    assert "success rate" in capsys.readouterr().out
    assert main(["imitate", "--resume", str(run), "--trainer.total_steps", "14"]) == 0
    assert "continues with new episodes" in capsys.readouterr().err
    assert load_checkpoint(find_checkpoint(run))["trainer"]["global_step"] == 14
    with pytest.raises(CheckpointError, match=r"run of embodichain imitate: continue it with embodichain imitate"):
        resume_training(run)

    settings = {"gym_config": REACH, "num_envs": 2, "buffer_size": 4, "iterations": 1, "enable_eval": False}
    rl = {"trainer": settings, "policy": FLOW, "algorithm": {"name": "ppo", "cfg": {"batch_size": 8, "n_epochs": 1}}}
    (tmp_path / "rl.json").write_text(json.dumps(rl))
    flags = ["--trainer.init_from", str(run), "--trainer.run_dir", str(tmp_path / "tuned")]
    train_from_config(tmp_path / "rl.json", flags)
    untrained = "is untrained, and what it estimates may destroy the policy"
    assert caplog.text.count(untrained) == 1
    resume_training(tmp_path / "tuned", ["--trainer.iterations", "2"])
    assert caplog.text.count(untrained) == 1  # by now it is trained
    policy, tuned = load_policy(run), load_policy(tmp_path / "tuned")
    assert same(tuned.encoder.normalizer.state_dict(), policy.encoder.normalizer.state_dict())  # statistics stay
    assert not torch.equal(tuned.head.velocity_net[0].weight, policy.head.velocity_net[0].weight)
    for begun in (
        run,
        best,
    ):  # by the name of an environment, the policy is built as the run's, and its critic warmed up
        by_name = load_train_config("ReachRL", init_from=str(begun))
        assert by_name.policy == load_train_config(tmp_path / "rl.json").policy
        assert by_name.algorithm.cfg["value_warmup"] == 10
    assert load_train_config("ReachRL", init_from=str(tmp_path / "tuned")).algorithm.cfg["value_warmup"] == 0
    monkeypatch.setattr(type(policy), "critic_parts", ())  # as a policy of one's own may have none
    assert load_train_config("ReachRL", init_from=str(run)).algorithm.cfg["value_warmup"] == 0
    monkeypatch.undo()
    (tmp_path / "rl.json").write_text(json.dumps(rl | {"policy": POLICIES["actor_critic"]}))
    with pytest.raises(CheckpointError, match=r"another architecture.*the block 'policy' has to be that of .*run"):
        train_from_config(tmp_path / "rl.json", [*flags[:2], "--trainer.run_dir", str(tmp_path / "other")])
    with pytest.raises(CheckpointError, match="run of embodichain train"):
        resume_imitation(tmp_path / "tuned")


def test_what_was_learned_stays_when_the_buffer_is_replaced(tmp_path):
    """The buffer is replaced as a whole; chunks of the first one, which are not seen again, are still imitated."""
    stream = {"buffer_size": 8, "refill": "threshold", "refill_threshold": 320, "action_config": EXPERT}
    data = config(
        tmp_path / "run", {"stream": stream | {"progress": False}}, POLICIES["actor_critic"], enable_eval=False
    )
    data["algorithm"]["cfg"] = {"learning_rate": 3e-3, "total_steps": 10**6}
    with opened_imitation(override(complete(ImitateCfg.from_dict(data)), [])) as trainer:
        source, learner = trainer.source, trainer.learner
        kept = source.sample(64)

        def error():
            with torch.no_grad():
                return float(trainer.policy.imitation_loss(kept["observation"][:, 0], kept["action"]).mean())

        at_first = error()
        for _ in range(80):
            learner.update(source.sample(32))
        learned = error()
        wait_until(lambda: source.engine.stats().refills >= 1.0)
        for _ in range(70):
            learner.update(source.sample(32))
        later = error()
        for _ in range(40):  # what forgetting would look like
            chunks = source.sample(32)
            learner.update(chunks.set("action", -chunks["action"]))
        assert learned < 0.7 * at_first
        assert later < 1.2 * learned
        assert error() > 2.0 * later


SPACE = gym.spaces.Dict({"robot": gym.spaces.Dict({"qpos": box(4)})})


def vector_policy(**block):
    return build_policy(block, SPACE, gym.spaces.Box(-1.0, 1.0, (2,)), "cpu")


def toy_chunks(batch, length, seed=0):
    """The action is a fixed linear map of the observation of its own step."""
    drawn = torch.Generator().manual_seed(seed)
    obs, weights = torch.randn(batch, length, 4, generator=drawn), torch.linspace(-0.3, 0.3, 8).view(4, 2)
    robot = TensorDict({"qpos": obs}, [batch, length])
    return TensorDict({"observation": {"robot": robot}, "action": obs @ weights}, [batch, length])


POLICIES = {
    "actor_critic": {"name": "actor_critic", "actor": MLP, "critic": MLP, "normalize_obs": True},
    "squashed": {"name": "actor_only", "actor": MLP, "distribution": {"squash": True}},
    "recurrent": {"name": "actor_critic", "actor": MLP, "critic": MLP, "memory": {"type": "gru", "hidden_size": 16}},
    "flow": {"name": "flow", "actor": MLP, "critic": MLP},
    "tokens": {"name": "tokens", "critic": MLP, "tokens": {"num_bins": 8, "width": 16, "depth": 1}},
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_learns_the_actions_and_leaves_its_critic(name):
    torch.manual_seed(0)
    policy = vector_policy(**POLICIES[name])
    learner = Imitation(ImitationCfg(learning_rate=1e-2, total_steps=60, warmup_steps=5, sequence_length=5), policy)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    losses = [float(learner.update(toy_chunks(64, learner.chunk_size, i))["action_loss"]) for i in range(60)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    changed = {key for key, value in policy.state_dict().items() if not torch.equal(value, before[key])}
    assert not [key for key in changed if policy.in_critic(key) or "log_std" in key]


def test_padding_counts_for_nothing():
    policy = vector_policy(name="actor_critic", actor=MLP, critic=MLP)
    obs, action = torch.randn(6, 4), torch.randn(6, 1, 2)
    valid = torch.tensor([[True], [False]] * 3)
    loss = policy.imitation_loss(obs, action, valid)
    assert torch.equal(loss[1::2], torch.zeros(3))
    mean = policy.get_action(obs, deterministic=True)[0]
    torch.testing.assert_close(loss[::2], (mean - action[:, 0]).abs().sum(-1)[::2])
    with pytest.raises(RolloutError, match=r"expected chunks \[batch, 1 to 1\], got \[6, 2\]"):
        Imitation(ImitationCfg(), policy).update(toy_chunks(6, 2))


@pytest.mark.parametrize(
    "block", [POLICIES["recurrent"], {"name": "gaussian", "actor": MLP, "critic": MLP, "chunk_size": 4}]
)
@pytest.mark.parametrize("key", ["mask", "action_is_pad"])
def test_padded_chunks_of_a_dataset_teach_nothing_behind_the_episode(block, key):
    """Whatever stands there, the policy and its statistics of observations become the same."""
    learned = []
    for rubbish in (0.0, 50.0):
        torch.manual_seed(0)
        policy = vector_policy(**block | {"normalize_obs": True})
        chunks, valid = toy_chunks(8, 4), torch.arange(4) < torch.tensor([4, 2] * 4)[:, None]
        chunks["action"][~valid] += rubbish
        chunks["observation", "robot", "qpos"][~valid] += rubbish
        Imitation(ImitationCfg(sequence_length=4), policy).update(chunks.set(key, valid if key == "mask" else ~valid))
        learned.append(policy.state_dict())
    assert all(torch.equal(value, learned[1][name]) for name, value in learned[0].items())
    past = toy_chunks(8, 4).set("observation_is_pad", torch.zeros(8, 4, dtype=torch.bool))
    with pytest.raises(RolloutError, match="leave out obs_horizon"):
        Imitation(ImitationCfg(sequence_length=4), policy).update(past)


class Silent(ActorOnly):
    """A policy that does not say how it imitates."""

    imitation_loss = Policy.imitation_loss


def test_a_policy_without_a_loss_of_its_own_is_refused():
    policy = Silent.build({"actor": MLP}, SPACE, gym.spaces.Box(-1.0, 1.0, (2,)), torch.device("cpu"))
    with pytest.raises(ConfigError, match="Silent cannot imitate: it has no imitation_loss"):
        Imitation(ImitationCfg(), policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": {}}, "source: expected either a stream or a dataset, or a mixture, got neither"),
        ({"source": {"stream": {}, "dataset": "x"}}, "source: expected either a stream or a dataset, .* got both"),
        ({"source": {"mixture": [{"weight": 2.0}]}}, r"source\.mixture\.0: expected either a stream or a dataset, got"),
        ({"source": {"stream": {"bufer_size": 3}}}, "bufer_size.*buffer_size"),
        ({"source": {"stream": {"action_config": {"source": "exprt"}}}}, "unknown name 'exprt'"),
        ({"source": {"stream": {"trusted_modules": 5}}}, "trusted_modules: expected a list of names, got 5"),
        ({"source": {"stream": {"action_config": 5}}}, "action_config: expected a mapping, got 5"),
        ({"sourc": {}}, "sourc.*source"),
    ],
)
@pytest.mark.parametrize("words", [[], ["--dagger"]])
def test_a_wrong_config_is_one_message(tmp_path, change, message, words):
    data = config(tmp_path / "run", STREAM)
    if words and "stream" not in change.get("source", {}):
        message = f"{message}|--dagger: expected a stream"
    if words and "exprt" in message:
        message = "--dagger: expected a stream of the expert.*'exprt'"
    with pytest.raises(ConfigError, match=message):
        override(complete(ImitateCfg.from_dict(data | change)), words)
    assert not (tmp_path / "run").exists()


@pytest.mark.extra("data")
def test_a_loss_that_is_no_number_ends_the_run_and_is_kept(tmp_path, recorded, monkeypatch):
    update = Imitation.update
    broken = {"action_loss": torch.tensor(torch.nan)}
    monkeypatch.setattr(Imitation, "update", lambda self, chunks: update(self, chunks) | broken)
    with pytest.raises(NotFiniteError, match=r"action_loss became NaN or infinite before step 2"):
        imitate(tmp_path / "run", {"dataset": str(recorded)}, enable_eval=False)
    kept = load_checkpoint(tmp_path / "run" / "failure")
    assert kept["batch"]["action"].shape == (8, 3, 6)
    assert load_checkpoint(find_checkpoint(tmp_path / "run"))["trainer"]["global_step"] == 0


def test_a_stream_may_have_several_tasks(tmp_path):
    (tmp_path / "other.json").write_text(json.dumps(REACH))
    stream = STREAM["stream"] | {"gym_config": [{"id": "ReachRL", "weight": 3.0}, "other.json"]}
    cfg = complete(ImitateCfg.from_dict(config(tmp_path / "run", {"stream": stream})), folder=tmp_path)
    tasks = stream_settings(cfg, cfg.source.parts()[0]).tasks()
    assert [(task.gym_config["id"], task.weight) for task in tasks] == [("ReachRL", 3.0), ("ReachRL", 1.0)]
    assert tasks[1].gym_config["max_episode_steps"] == 10


def test_ids_have_shipped_configs_or_defaults():
    names = {
        "PushCubeRL": "actor_critic",
        "PushAroundRL": "flow",
        "PushCubeLanguageRL": "vla",
        "ReachRL": "actor_critic",
    }
    for name, policy in names.items():
        cfg = override(load_imitate_config(name), ["--trainer.seed", "3"])
        assert (cfg.policy["name"], cfg.trainer.environment["id"]) == (policy, name)
        assert cfg.source.stream["action_config"]["source"] == "expert"
    with pytest.raises(
        ConfigError, match=r"source: CartPole-v1 has no scripted expert to imitate; --source\.dataset F"
    ):
        override(load_imitate_config("CartPole-v1"), [])  # nobody shows how it is done
    cfg = override(load_imitate_config("ReachRL"), ["--source.dataset", "somewhere", "--policy.name", "tokens"])
    assert (cfg.source.stream, cfg.policy["name"]) == (None, "tokens")
    assert cfg.source.dataset.endswith("/somewhere")


@pytest.mark.extra("data")
def test_a_recording_needs_no_environment(tmp_path, recorded):
    data = config(tmp_path / "run", {"dataset": str(recorded)}, total_steps=2)
    del data["trainer"]["gym_config"]
    cfg = override(complete(ImitateCfg.from_dict(data)), [])
    assert not cfg.trainer.enable_eval
    with opened_imitation(cfg) as trainer:
        assert trainer.train().global_step == 2
    assert load_policy(tmp_path / "run").chunk_size == 3


@pytest.mark.extra("data")
def test_several_seeds_are_imitated_and_listed_as_one_line(tmp_path, recorded, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = config("unused", STREAM, total_steps=4)
    del data["trainer"]["run_dir"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    words = ["imitate", "config.json", "--source.dataset", os.path.relpath(recorded), "--seeds", "0,3", "--jobs", "2"]
    words += ["--algorithm.cfg.learning_rate", "0.002", "--trainer.exp_name", "clone", "--trainer.run_dir", "group"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "mean return over 2 seeds" in told.out + told.err
    runs = [tmp_path / "group" / f"clone_seed{seed}" for seed in (0, 3)]
    states = [load_checkpoint(find_checkpoint(run)) for run in runs]
    assert [state["trainer"]["global_step"] for state in states] == [4, 4]
    assert not same(states[0]["policy"], states[1]["policy"])
    alone = ImitateCfg.from_dict(config(tmp_path / "alone", {"dataset": str(recorded)}, total_steps=4, seed=3))
    imitate_from_config(alone, ["--algorithm.cfg.learning_rate", "0.002"])
    assert same(load_checkpoint(find_checkpoint(tmp_path / "alone"))["policy"], states[1]["policy"])

    assert main(words) == 0
    assert "seed 3: finished before" in "".join(capsys.readouterr())
    for every in ([], ["--all"]):
        assert main(["runs", ".", "--json", *every]) == 0
        rows = [row for row in json.loads(capsys.readouterr().out) if "group" in row["run"]]
        assert [row["overrides"]["algorithm.cfg.learning_rate"] for row in rows] == ["0.002"] * len(rows)
        assert len(rows) == (2 if every else 1)
    assert main(["eval", "group"]) == 2
    assert (
        "group holds several runs: name one of them, group/clone_seed0 or another one of 2" in capsys.readouterr().err
    )


def test_dagger_lets_the_policy_act_and_continues_with_it(tmp_path):
    """One flag: the expert's stream becomes one that the policy acts in, by weights that were published last."""
    file = tmp_path / "config.json"
    expert = EXPERT | {"only_success": True}
    source = {"stream": {"buffer_size": 4, "refill_threshold": 1, "action_config": expert, "progress": False}}
    file.write_text(json.dumps(config(tmp_path / "run", source, publish_freq=4, enable_eval=False)))
    share = ["--source.stream.action_config.expert_share", "0.0"]
    cfg = override(load_imitate_config(file), ["--dagger", *share])
    action = cfg.source.stream["action_config"]
    assert action == {"source": "dagger", "noise_std": 0.1, "deterministic": True, "expert_share": 0.0}
    with opened_imitation(cfg) as trainer:
        engine = trainer.source.engine
        assert trainer.train().global_step == 12
        assert {engine.episode_info(row).policy_version for row in range(4)} <= {-1, 4, 8, 12}

        def last_weights_acted() -> bool:  # they act until the next ones come
            trainer.source.sample(8)
            return all(engine.episode_info(row).policy_version == 12 for row in range(4))

        wait_until(last_weights_acted)
        trainer.source.sample(8)
        assert trainer.source.statistics()["stream/expert_acted"] < 1.0
        trainer.restore(load_checkpoint(find_checkpoint(tmp_path / "run")))
        assert engine._published.version == 13  # the restored policy acts, whatever did before
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["stream/expert_acted"] == 1.0
    with locked_run(tmp_path / "run", Ranks()) as folder:
        state = read_saved(tmp_path / "run", folder, "imitate")[2]
        with opened_imitation(cfg, folder, state) as trainer:  # it acts in the first episodes, too
            engine = trainer.source.engine
            assert {engine.episode_info(row).policy_version for row in range(4)} <= {12, 13}


def test_dagger_needs_an_expert(tmp_path):
    recording = ImitateCfg.from_dict(config(tmp_path / "a", {"dataset": "recordings/a"}))
    with pytest.raises(ConfigError, match="--dagger: expected a stream"):
        override(recording, ["--dagger"])
    chance = ImitateCfg.from_dict(config(tmp_path / "b", {"stream": {"action_config": {"source": "random"}}}))
    with pytest.raises(ConfigError, match=r"--dagger.*'random'"):
        override(chance, ["--dagger"])


def test_dagger_needs_a_stream_after_flags_replaced_it(tmp_path):
    cfg = ImitateCfg.from_dict(config(tmp_path / "a", STREAM))
    with pytest.raises(ConfigError, match="--dagger: expected a stream"):
        override(cfg, ["--dagger", "--source.dataset", "recordings/a"])
    mixture = '[{"dataset": "recordings/a"}, {"stream": {"buffer_size": 8}}]'
    parts = override(cfg, ["--dagger", "--source.mixture", mixture]).source.mixture
    assert parts[0].stream is None
    assert parts[1].stream["action_config"]["source"] == "dagger"


def test_a_replaced_source_is_told(tmp_path, caplog):
    mixed = {"mixture": [{"dataset": "recordings/a"}, STREAM]}
    with caplog.at_level("INFO"):
        cfg = override(ImitateCfg.from_dict(config(tmp_path / "a", mixed)), ["--source.dataset", "recordings/b"])
    assert not cfg.source.mixture
    assert "--source.dataset leaves out what the config says for another source: source.mixture" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        override(cfg, ["--source.dataset", "recordings/c"])
    assert "leaves out" not in caplog.text


def test_a_policy_that_does_not_exist_is_told_before_anything_is_simulated(tmp_path):
    cfg = ImitateCfg.from_dict(config(tmp_path / "a", STREAM))
    words = ["--dagger", "--source.stream.action_config.policy", str(tmp_path / "nowhere")]
    with pytest.raises(ConfigError, match=r"policy: expected a run or a checkpoint, but there is no .*nowhere"):
        override(cfg, words)


def test_chunks_longer_than_episodes_are_told_before_anything_is_simulated(tmp_path, monkeypatch):
    monkeypatch.setattr("embodichain.agents.imitation.imitate.open_source", pytest.fail)
    problem = r"chunk_size: expected at most 10 steps, as many as an episode has \(max_episode_steps\), got 11"
    with pytest.raises(ConfigError, match=problem):
        imitate(tmp_path / "a", STREAM, FLOW | {"chunk_size": 11}, enable_eval=False)


def test_a_stream_with_an_environment_of_its_own_has_its_time_limit(tmp_path):
    """The trainer's environment has the same id, and episodes of ten steps."""
    stream = {"stream": STREAM["stream"] | {"gym_config": {"id": "ReachRL", "num_envs": 4, "num_threads": 1}}}
    with opened_imitation(ImitateCfg.from_dict(config(tmp_path / "a", stream, FLOW | {"chunk_size": 11}))) as trainer:
        assert trainer.learner.chunk_size == 11


def test_a_run_without_an_environment_is_evaluated_in_the_one_that_is_given(tmp_path, recorded, capsys):
    run, words = tmp_path / "run", ["--episodes", "2"]
    settings = config(run, {"dataset": str(recorded)})
    del settings["trainer"]["gym_config"]
    imitate_from_config(ImitateCfg.from_dict(settings))
    assert main(["eval", str(run), *words]) == 2
    assert "without an environment: --config gym_config.json says which one to use" in capsys.readouterr().err
    file = tmp_path / "gym_config.json"
    file.write_text(json.dumps(REACH))
    assert main(["eval", str(run), *words, "--config", str(file)]) == 0
