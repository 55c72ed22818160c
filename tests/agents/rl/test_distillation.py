"""Distillation: losses against independent formulas, who acts, what a teacher must fit, and whole runs of it."""

from __future__ import annotations

import copy
import json
import pickle
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Bernoulli, Categorical, Independent, Normal, kl_divergence

from embodichain.agents.rl import train
from embodichain.agents.rl.algo import Distillation, DistillationCfg
from embodichain.agents.rl.algo.distillation import Guided, Teacher, mismatches
from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint, load_policy
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.weights import InferenceCopy, WeightStore, without_weights
from embodichain.agents.rl.config import TrainCfg, load_train_config
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.distributions import DistributionCfg, build_head
from embodichain.agents.rl.models.observation import FeatureEncoder
from embodichain.agents.rl.runs import read_metrics
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.agents.rl.utils import flatten_dict_observation
from embodichain.envs.wrappers import GroupedEnv
from embodichain.errors import CheckpointError, ConfigError, ObservationError
from tests.agents.rl.helpers import ScriptedEnv, box, make_policy
from tests.agents.rl.test_checkpoint import same
from tests.agents.rl.training_cases import SMALL, train_config, write_config

pytestmark = pytest.mark.usefixtures("one_thread")
BLIND = {"actor_obs": ["robot/qpos"], "critic_obs": ["object"]}


def teacher_of(env, policy):
    return Teacher(policy.eval(), env.observation_space, env.action_space, "there")


def pair(env, loss, student=None, teacher=None, **cfg):
    """Return a distillation of a student that sees less, and a rollout of it."""
    torch.manual_seed(0)
    other = make_policy(env, **(teacher or {}))
    torch.manual_seed(1)
    policy = make_policy(env, **BLIND, **(student or {}))
    algorithm = Distillation(DistillationCfg(teacher="there", loss=loss, **cfg), policy)
    algorithm.teach(teacher_of(env, other))
    return algorithm, SyncCollector(env, algorithm.acting).collect(6).clone()


# --- the actor's observations -------------------------------------------------------------------------------------


def test_an_actor_sees_the_observations_that_it_is_given_and_no_others():
    env = ScriptedEnv(3)
    obs = env.reset(seed=0)[0]
    encoder = FeatureEncoder(env.observation_space, critic_obs=["object/step"], actor_obs=["robot"])
    public, privileged = encoder(obs)
    assert torch.equal(public, obs["robot", "qpos"])
    assert torch.equal(privileged, obs["object", "step"])
    flat = encoder(flatten_dict_observation(obs))
    assert torch.equal(flat[0], public)
    assert torch.equal(flat[1], privileged)
    changed = obs.clone()
    changed["object", "episode"] += 5.0
    assert torch.equal(encoder(changed)[0], public)
    del changed["object", "episode"]  # it need not even be there
    assert torch.equal(encoder(changed)[0], public)
    with pytest.raises(ObservationError, match="expected observations of 4 numbers"):
        encoder(torch.zeros(3, 2))
    with pytest.raises(ConfigError, match=r"actor_obs: the observations have no 'robot/qpo'. Did you mean"):
        FeatureEncoder(env.observation_space, actor_obs=["robot/qpo"])
    with pytest.raises(ConfigError, match="critic_obs: 'robot/qpos' is in actor_obs, too"):
        FeatureEncoder(env.observation_space, actor_obs=["robot"], critic_obs=["robot/qpos"])


def test_images_are_left_out_like_vectors():
    space = gym.spaces.Dict({"image": gym.spaces.Dict({"a": box(8, 8, 3, dtype=np.uint8)}), "state": box(3)})
    obs = TensorDict({"image": {"a": torch.zeros(2, 8, 8, 3, dtype=torch.uint8)}, "state": torch.ones(2, 3)}, [2])
    assert torch.equal(FeatureEncoder(space, actor_obs=["state"])(obs)[0], obs["state"])
    sees_images = FeatureEncoder(space, normalize=True, actor_obs=["image"], critic_obs=["state"])
    public, privileged = sees_images(obs)
    assert public.shape == (2, sees_images.public_dim) == (2, 128)
    assert privileged is not None
    assert torch.equal(privileged, obs["state"])


# --- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", ["learnable", "state"])
@pytest.mark.parametrize("squash", [False, True])
def test_divergence_of_gaussians(std, squash):
    torch.manual_seed(0)
    space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    one, other = (build_head(space, DistributionCfg(std=std, squash=squash, init_log_std=x)) for x in (-0.3, 0.4))
    p, q = torch.randn(2, 5, one.param_dim)
    (m, s), (n, t) = one.moments(p), other.moments(q)
    expected = kl_divergence(
        Independent(Normal(m, s.exp().expand_as(m)), 1), Independent(Normal(n, t.exp().expand_as(n)), 1)
    )
    torch.testing.assert_close(other.divergence(one.describe(p), q), expected)
    torch.testing.assert_close(one.divergence(one.describe(p), p), torch.zeros(5), atol=1e-6, rtol=0.0)


def test_divergence_of_choices():
    torch.manual_seed(0)
    head = build_head(gym.spaces.Discrete(4))
    p, q = torch.randn(2, 5, 4)
    expected = kl_divergence(Categorical(logits=p), Categorical(logits=q))
    torch.testing.assert_close(head.divergence(head.describe(p), q), expected)
    head = build_head(gym.spaces.MultiDiscrete([2, 3]))
    p, q = torch.randn(2, 5, 5)
    expected = sum(
        kl_divergence(Categorical(logits=p[:, part]), Categorical(logits=q[:, part]))
        for part in (slice(0, 2), slice(2, 5))
    )
    torch.testing.assert_close(head.divergence(head.describe(p), q), expected)
    head = build_head(gym.spaces.MultiBinary(3))
    p, q = torch.randn(2, 5, 3)
    expected = kl_divergence(Bernoulli(logits=p), Bernoulli(logits=q)).sum(-1)
    torch.testing.assert_close(head.divergence(head.describe(p), q), expected)


@pytest.mark.parametrize("loss", ["mse", "kl", "nll"])
def test_an_update_is_one_step_of_adam_on_the_loss_by_hand(loss):
    """Networks are called directly, by columns of the observation; nothing of the algorithm is used."""
    env = ScriptedEnv(4, ends=[3, 50, 5, 50])
    algorithm, rollout = pair(env, loss, n_epochs=1, batch_size=1000, learning_rate=1e-2, max_grad_norm=1e6)
    student, teacher = copy.deepcopy(algorithm.policy), algorithm.teacher.policy
    obs = rollout["observation"]
    seen = obs["robot", "qpos"]
    everything = torch.cat([obs["object", "episode"].unsqueeze(-1), obs["object", "step"], seen], dim=-1)
    mean, wanted = student.actor(seen), teacher.actor(everything).detach()
    std, wanted_std = student.head.log_std.exp(), teacher.head.log_std.exp().detach()
    if loss == "mse":
        by_hand = ((mean - wanted.clamp(-1.0, 1.0)) ** 2).mean()
    elif loss == "nll":
        by_hand = -Normal(mean, std).log_prob(wanted.clamp(-1.0, 1.0)).sum(-1).mean()
    else:
        by_hand = kl_divergence(Normal(wanted, wanted_std), Normal(mean, std)).sum(-1).mean()
    adam = torch.optim.Adam(student.parameters(), lr=1e-2, eps=1e-5)
    by_hand.backward()
    adam.step()
    assert algorithm.update(rollout)["imitation_loss"] == pytest.approx(by_hand.item(), rel=1e-5)
    for (name, ours), theirs in zip(algorithm.policy.named_parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_recurrent_student_is_trained_on_its_sequences():
    """The loss is that of running the student along every episode from an empty state."""
    env = ScriptedEnv(3, ends=[2, 50, 4])
    memory = {"memory": {"hidden_size": 8}}
    algorithm, rollout = pair(env, "mse", student=memory, n_epochs=1, batch_size=1000, sequence_length=3)
    student, teacher, obs = copy.deepcopy(algorithm.policy), algorithm.teacher.policy, rollout["observation"]
    errors, state = [], student.initial_state(3)
    for step in range(6):
        action, _, _, state = student.act(obs[:, step], state, deterministic=True)
        wanted = teacher.get_action(obs[:, step], deterministic=True)[0].clamp(-1.0, 1.0)
        errors.append((action - wanted).square())
        state = torch.where(rollout["done"][:, step].view(-1, 1, 1), student.initial_state(1), state)
    expected = torch.stack(errors).mean().item()
    assert algorithm.update(rollout)["imitation_loss"] == pytest.approx(expected, rel=1e-4)


def test_a_divergence_between_distributions_of_two_kinds_is_refused():
    with pytest.raises(ConfigError, match=r"kl compares.*SquashedGaussianHead and GaussianHead; choose mse or nll"):
        pair(ScriptedEnv(2), "kl", student={"distribution": {"squash": True}})


def test_mse_of_choices_is_refused_and_their_divergence_learned():
    env = ScriptedEnv(4)
    env.action_space = gym.spaces.Discrete(3)
    torch.manual_seed(0)
    student, other = make_policy(env, **BLIND), make_policy(env)
    with pytest.raises(ConfigError, match=r"loss: mse compares continuous actions.*choose nll"):
        Distillation(DistillationCfg(teacher="there", loss="mse"), student).teach(teacher_of(env, other))
    for loss in ("kl", "nll"):
        algorithm = Distillation(DistillationCfg(teacher="there", loss=loss, batch_size=8), copy.deepcopy(student))
        algorithm.teach(teacher_of(env, other))
        rollout = TensorDict({"observation": env.reset(seed=0)[0].unsqueeze(1), "reward": torch.zeros(4, 1)}, [4, 1])
        rollout["done"] = torch.zeros(4, 1, dtype=torch.bool)
        losses = [algorithm.update(rollout.clone())["imitation_loss"] for _ in range(20)]
        assert losses[-1] < losses[0]


def test_a_squashed_student_can_imitate_a_teacher_beyond_the_bounds():
    env = ScriptedEnv(4)
    squashed = {"distribution": {"squash": True}}
    algorithm, rollout = pair(env, "nll", student=squashed, n_epochs=1, batch_size=1000)
    algorithm.teacher.policy.actor[-1].bias.data.fill_(7.0)  # the environment makes 1 of it
    measures = [algorithm.update(rollout.clone()) for _ in range(3)]
    assert all(np.isfinite(value) for one in measures for value in one.values())


def test_the_loss_of_the_policys_own_is_added():
    env = ScriptedEnv(4)
    algorithm, rollout = pair(env, "mse", student={"auxiliary_coef": 0.5}, n_epochs=1, batch_size=1000)
    plain, _ = pair(env, "mse", n_epochs=1, batch_size=1000)
    student = copy.deepcopy(algorithm.policy)
    seen, hidden = student.encoder(rollout["observation"])
    expected = 0.5 * (student.auxiliary(seen) - hidden).square().mean()
    measures = algorithm.update(rollout.clone())
    assert measures["auxiliary_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert "auxiliary_loss" not in plain.update(rollout)
    assert not torch.equal(next(algorithm.policy.auxiliary.parameters()), next(student.auxiliary.parameters()))


# --- who acts -----------------------------------------------------------------------------------------------------


def test_the_teacher_acts_in_its_share_of_the_envs():
    env = ScriptedEnv(8)
    algorithm, _ = pair(env, "kl", teacher_share=(0.5, 0.0), teacher_until=0.5)
    acting, obs = algorithm.acting, env.reset(seed=0)[0]
    own = algorithm.teacher.policy.get_action(obs, deterministic=True)[0]
    for progress, guided in ((0.0, 4), (0.25, 2), (0.5, 0), (1.0, 0)):
        algorithm.progress = progress
        algorithm.update(SyncCollector(env, acting).collect(2).clone())
        torch.manual_seed(3)
        action = acting.act(obs)[0]
        torch.manual_seed(3)
        students = algorithm.policy.act(obs)[0]
        assert torch.equal(action, torch.cat([own[:guided], students[guided:]])), progress


def test_groups_that_take_turns_have_the_share_of_all():
    """Of two envs in two groups 0.4 is one, which neither group has by itself."""
    groups = [ScriptedEnv(1), ScriptedEnv(1)]
    for group in groups:
        group.action_manager = None
    env = GroupedEnv(groups)
    algorithm, _ = pair(ScriptedEnv(2), "kl", teacher_share=(0.4, 0.4))
    rollout = SyncCollector(env, algorithm.acting, pipeline_stages=2).collect(3)
    for row, guided in ((0, True), (1, False)):
        own = algorithm.teacher.policy.get_action(rollout["observation"][row], deterministic=True)[0]
        assert torch.allclose(rollout["action"][row], own, atol=1e-6) is guided


def test_the_share_that_is_logged_is_the_one_that_collected():
    env = ScriptedEnv(8)
    algorithm, _ = pair(env, "kl", teacher_share=(1.0, 0.0))
    collector, used, logged = SyncCollector(env, algorithm.acting), [], []
    for k in range(5):
        rollout = collector.collect(2).clone()
        used.append(float(algorithm.acting.share))
        algorithm.progress, algorithm.next_progress = k / 5, (k + 1) / 5
        logged.append(algorithm.update(rollout)["teacher_share"])
        if k == 2:  # of a run that is resumed
            share = float(algorithm.acting.share)
            algorithm.load_state_dict(copy.deepcopy(algorithm.state_dict()))
            assert float(algorithm.acting.share) == share
    assert logged == pytest.approx(used)
    assert logged == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    algorithm, rollout = pair(env, "kl", teacher_share=(1.0, 0.0))
    algorithm.next_progress = 0.5
    assert [algorithm.update(rollout)["teacher_share"] for _ in range(2)] == [1.0, 1.0]  # an old one, too
    assert float(algorithm.acting.share) == 0.0


def test_values_are_neither_computed_nor_learned():
    env = ScriptedEnv(3)
    algorithm, rollout = pair(env, "kl", n_epochs=1)
    critic = copy.deepcopy(algorithm.policy.critic.state_dict())
    assert not rollout["value"].any()
    algorithm.update(rollout)
    assert same(algorithm.policy.critic.state_dict(), critic)
    assert isinstance(algorithm.acting, Guided)
    assert algorithm.acting.version is algorithm.policy.version


def test_collectors_elsewhere_get_student_teacher_and_share_with_the_weights():
    """As a collecting process gets them: a policy without weights first, and then snapshots of these."""
    env = ScriptedEnv(8)
    algorithm, _ = pair(env, "kl", student={"memory": {"hidden_size": 4}}, teacher_share=(0.5, 0.5))
    there = InferenceCopy(pickle.loads(pickle.dumps(without_weights(algorithm.acting))))  # noqa: S301
    store = WeightStore(algorithm.acting, AsyncCfg())
    assert there.adopt(store.publish())[0] == 0
    obs = env.reset(seed=0)[0]
    torch.manual_seed(3)
    expected = algorithm.acting.act(obs)[0]
    torch.manual_seed(3)
    assert torch.equal(there.policy.act(obs)[0], expected)
    algorithm.update(SyncCollector(env, algorithm.acting).collect(2).clone())
    assert there.adopt(store.publish())[0] == 1 == int(there.policy.version)


# --- what a teacher must fit --------------------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_listed():
    env, other = ScriptedEnv(2), ScriptedEnv(2)
    space = {"robot": gym.spaces.Dict({"qpos": box(3)}), "goal": box(2), "object": env.observation_space["object"]}
    other.observation_space = gym.spaces.Dict(space)
    other.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    policy = make_policy(other, memory={"hidden_size": 4})
    teacher = Teacher(policy, other.observation_space, other.action_space, "there", {"qpos": {}})
    found = mismatches(teacher, env.observation_space, env.action_space, {"ee_delta": {}})
    assert [problem.partition(":")[0] for problem in found] == [
        "observation goal [2]",
        "observation robot/qpos",
        "action space",
        "env.actions",
        "it is recurrent",
    ]
    # what the teacher itself leaves out need not be there
    seeing = make_policy(other, actor_obs=["object"])
    assert (
        mismatches(
            Teacher(seeing, other.observation_space, env.action_space, ""), env.observation_space, env.action_space
        )
        == []
    )


# --- whole runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """Return the run of a teacher of CartPoleRL, and what a config of distillation is to change."""
    folder = tmp_path_factory.mktemp("taught")
    rate = {"cfg": {"learning_rate": 0.03}}  # so that its actions are not those of a new student
    data = {"trainer": {"iterations": 4}, "algorithm": rate}
    train_from_config(write_config(folder / "teacher.json", folder / "teacher", **data))
    return folder / "teacher"


def student_config(teacher, **trainer):
    cfg = {"teacher": str(teacher), "batch_size": 64, "n_epochs": 2, "learning_rate": 3e-3, "teacher_share": [0.5, 0.0]}
    policy = {"actor_obs": ["robot/qpos"], "memory": {"hidden_size": 8}}
    return {"trainer": trainer, "policy": policy, "algorithm": {"name": "distill", "cfg": cfg}}


def distill(folder, name, teacher, **trainer):
    data = train_config(folder / name, **student_config(teacher, **trainer))
    data["algorithm"] = student_config(teacher)["algorithm"]  # in the place of PPO's
    path = folder / f"{name}.json"
    path.write_text(json.dumps(data))
    return train_from_config(path)


def test_a_run_resumes_bit_by_bit_and_is_the_same_without_lag(taught, tmp_path):
    distill(tmp_path, "whole", taught, save_freq=128, keep_checkpoints=9)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    resume_training(tmp_path / "again" / "checkpoints" / "step_000000000256")
    distill(tmp_path, "async", taught, save_freq=128, collector={"mode": "async", "max_policy_lag": 0})
    whole, again, other = (load_checkpoint(find_checkpoint(tmp_path / name)) for name in ("whole", "again", "async"))
    for part in ("policy", "algorithm", "env", "collector", "random"):
        assert same(whole[part], again[part]), part
    for part in ("policy", "algorithm", "env", "random"):
        assert same(whole[part], other[part]), part
    lines = [line for line in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "update/imitation_loss" in line]
    assert lines[-1]["update/imitation_loss"] < lines[0]["update/imitation_loss"]
    shares = [line["update/teacher_share"] for line in lines]
    assert shares == pytest.approx([0.5, 1 / 3, 1 / 6, 0.0])  # from the first rollout to the last


def test_another_teacher_is_noticed_when_a_run_is_resumed(taught, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(taught, teacher)
    distill(tmp_path, "run", teacher, iterations=1)
    shutil.rmtree(teacher)
    with pytest.raises(ConfigError, match=r"teacher: .*expected a checkpoint or a run.*Train one first"):
        resume_training(tmp_path / "run", ["--trainer.iterations", "2"])
    assert (
        resume_training(
            tmp_path / "run", ["--trainer.iterations", "2", "--algorithm.cfg.teacher", str(taught)]
        ).iteration
        == 2
    )
    train_from_config(write_config(tmp_path / "t.json", teacher, trainer={"iterations": 1, "seed": 7}))
    with pytest.raises(CheckpointError, match="holds another policy than the one this run learns from"):
        resume_training(tmp_path / "run", ["--trainer.iterations", "3", "--algorithm.cfg.teacher", str(teacher)])


def test_a_run_resumes_although_its_teacher_trained_on(taught, tmp_path):
    """From the checkpoint of that teacher, wherever it is in its run; without one, a message says what to do."""
    teacher = tmp_path / "teacher"
    shutil.copytree(taught, teacher)
    distill(tmp_path, "run", teacher, iterations=1)
    known = load_checkpoint(find_checkpoint(tmp_path / "run"))["algorithm"]["teacher"]
    resume_training(teacher, ["--trainer.iterations", "2"])
    best, last = teacher / "checkpoints" / "best", find_checkpoint(teacher)
    shutil.rmtree(best)
    shutil.copytree(last, best)
    assert known["source"] == str(best)
    assert resume_training(tmp_path / "run", ["--trainer.iterations", "2"]).iteration == 2
    assert load_checkpoint(find_checkpoint(tmp_path / "run"))["algorithm"]["teacher"]["digest"] == known["digest"]
    for folder in (teacher / "checkpoints").glob("step_*"):
        if folder != last:
            shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"--resume RUN --algorithm\.cfg\.teacher CHECKPOINT") as caught:
        resume_training(tmp_path / "run", ["--trainer.iterations", "3"])
    assert not getattr(caught.value, "__notes__", [])  # the same command would fail again


def test_a_teacher_of_another_environment_is_one_message(taught, tmp_path):
    with pytest.raises(ConfigError) as caught:
        distill(tmp_path, "run", taught, gym_config={"id": "ReachRL", "max_episode_steps": 20, "num_threads": 1})
    message = str(caught.value)
    assert "observation robot/qpos: [2] there, [6] in the environment" in message
    assert "action space" in message
    assert "env.actions" in message
    data = train_config(tmp_path / "none")
    data["algorithm"] = {"name": "distill", "cfg": {}}
    with pytest.raises(ConfigError, match="teacher: expected the folder of a run or of a checkpoint, got none"):
        train_from_config(TrainCfg.from_dict(data))


def test_ppo_continues_from_a_distilled_policy_and_first_learns_values(taught, tmp_path):
    distill(tmp_path, "student", taught, iterations=1)
    policy = student_config(taught)["policy"]
    begun = {"init_from": str(tmp_path / "student"), "enable_eval": False, "keep_checkpoints": 9}
    ppo = {"cfg": {"value_warmup": 2}}
    config = write_config(tmp_path / "p.json", tmp_path / "ppo", trainer=begun, policy=policy, algorithm=ppo)
    train_from_config(config)
    student = load_policy(tmp_path / "student", which="latest").state_dict()
    folder = tmp_path / "ppo" / "checkpoints"
    after = [load_checkpoint(folder / f"step_{step:012d}")["policy"] for step in (0, 256, 384)]
    learned = [name for name in student if name.split(".")[0] in ("actor", "head", "memory", "critic")]
    for name in learned:
        assert torch.equal(after[0][name], student[name]), name
        warm = torch.equal(after[1][name], student[name])
        assert warm != name.startswith("critic"), name
        assert not torch.equal(after[2][name], after[1][name]), name
    with pytest.raises(ConfigError, match=r"trainer.init_from: .*nowhere"):
        train_from_config(
            config, ["--trainer.init_from", str(tmp_path / "nowhere"), "--trainer.run_dir", str(tmp_path / "x")]
        )


def test_a_critic_that_the_given_policy_lacks_begins_anew(taught, tmp_path):
    alone = {"name": "actor_only"}
    data = train_config(tmp_path / "alone", policy=student_config(taught)["policy"] | alone, trainer={"iterations": 1})
    data["algorithm"], data["policy"] = (
        student_config(taught)["algorithm"],
        {k: v for k, v in data["policy"].items() if k != "critic"},
    )
    train_from_config(TrainCfg.from_dict(data))
    begun = {"init_from": str(tmp_path / "alone"), "iterations": 1, "enable_eval": False}
    policy = student_config(taught)["policy"]
    train_from_config(write_config(tmp_path / "p.json", tmp_path / "ppo", trainer=begun, policy=policy))
    student = load_policy(tmp_path / "alone", which="latest").state_dict()
    first = load_checkpoint(tmp_path / "ppo" / "checkpoints" / "step_000000000000")["policy"]
    assert all(torch.equal(first[name], value) for name, value in student.items() if name != "version")


def test_a_policy_begins_from_one_with_a_critic_and_an_auxiliary_loss_beside_the_config(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    env = ScriptedEnv(2)
    torch.manual_seed(0)
    source = make_policy(env, **BLIND, auxiliary_coef=0.5)
    monkeypatch.setattr(train, "find_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(train, "load_checkpoint", lambda _: {"policy": source.state_dict()})
    for policy in (make_policy(env, "actor_only", **BLIND), make_policy(env, **BLIND)):
        train.load_initial_weights("source", policy)
        held = source.state_dict()
        assert all(torch.equal(value, held[name]) for name, value in policy.state_dict().items())
    source = make_policy(env, **BLIND)
    policy = make_policy(env, **BLIND, auxiliary_coef=0.5)
    before = policy.auxiliary.weight.clone()
    train.load_initial_weights("source", policy)
    assert torch.equal(policy.auxiliary.weight, before)
    assert torch.equal(policy.actor[0].weight, source.actor[0].weight)
    (tmp_path / "source").mkdir()
    path = write_config(tmp_path / "p.json", tmp_path / "run", trainer={"init_from": "source"})
    assert load_train_config(path).trainer.init_from == str(tmp_path / "source")


def test_a_blind_student_learns_what_its_memory_can_tell(tmp_path):
    """The teacher pushes back by the velocity, which the student has to find out from two positions."""
    env = ScriptedEnv(32, ends=6)
    torch.manual_seed(0)
    teacher = make_policy(env, actor=SMALL)
    teacher.actor = torch.nn.Sequential(torch.nn.Linear(4, 1))  # columns: episode, step, position, env
    with torch.no_grad():
        teacher.actor[0].weight.copy_(torch.tensor([[0.0, 0.2, -0.1, 0.0]]))
        teacher.actor[0].bias.fill_(-0.4)
    torch.manual_seed(1)
    student = build_policy(
        {
            "name": "actor_critic",
            "actor_obs": ["robot"],
            "memory": {"hidden_size": 16},
            "actor": SMALL,
            "critic": SMALL,
        },
        env.observation_space,
        env.action_space,
        "cpu",
    )
    cfg = DistillationCfg(teacher="there", loss="mse", learning_rate=2e-2, n_epochs=4, batch_size=96)
    algorithm = Distillation(cfg, student)
    algorithm.teach(teacher_of(env, teacher))
    collector = SyncCollector(env, algorithm.acting)
    losses = [algorithm.update(collector.collect(12))["imitation_loss"] for _ in range(12)]
    assert losses[-1] < 0.03 * losses[0]
