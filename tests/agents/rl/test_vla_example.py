"""The example that imitates and reinforces, in tiny; and what it needs besides the trainer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from embodichain.agents.rl.algo.imitation import Imitation, ImitationCfg, warm_up_value
from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.checkpoint import load_policy
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.vla import save_vla_model
from embodichain.agents.rl.models.vla.loading import only_trained
from embodichain.agents.rl.runs import read_metrics
from embodichain.errors import ConfigError
from tests.agents.rl.helpers import ScriptedEnv, make_policy
from tests.agents.rl.vla_cases import chunked_pair, language_env, vla_block

EXAMPLE = Path(__file__).parents[3] / "examples" / "agents" / "rl" / "vla_sft_then_rl.py"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("vla_sft_then_rl", EXAMPLE)
    module = sys.modules["vla_sft_then_rl"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["vla_sft_then_rl"]


MODEL = ("--policy.vla_config.model_config.width", "16")
IMITATE = (*MODEL, "--trainer.total_steps", "3", "--algorithm.cfg.batch_size", "8", "--source.stream.buffer_size", "8")
TRAIN = (*MODEL, "--trainer.num_envs", "8", "--trainer.buffer_size", "2", "--algorithm.cfg.batch_size", "16")
FEW = ("--trainer.num_eval_episodes", "2", "--trainer.num_eval_envs", "2", "--trainer.eval_video", "false")


def changed_parts(clone, tuned):
    """Return the parts of the model in which the latest policies of two runs differ."""
    kept, after = (load_policy(run, which="latest").model.state_dict() for run in (clone, tuned))
    return {name.split(".")[0] for name, value in after.items() if not torch.equal(value, kept[name])}


@pytest.mark.timeout(300)
def test_it_imitates_and_reinforces_by_either_algorithm(tmp_path, capsys, example):
    args = example.Args(episodes=4, output=tmp_path)
    few = ("--algorithm.cfg.n_epochs", "1", "--trainer.enable_eval", "false")
    warm = ("--trainer.iterations", "2", "--algorithm.cfg.value_warmup", "1")
    before, after = example.main(args, (*IMITATE, *FEW), (*TRAIN, *few, *warm))
    assert before.summary.episodes == after.summary.episodes == 4
    clone, tuned = tmp_path / "imitated", tmp_path / "reinforced"
    steps = [line for line in read_metrics(tuned / "metrics.jsonl") if "update/policy_loss" in line]
    assert len(steps) == 2
    assert all("async/lag_max" in line for line in steps)
    printed = capsys.readouterr().out
    assert f"success {before.summary.success_rate:.0%} -> {after.summary.success_rate:.0%} over 4 episodes" in printed
    assert changed_parts(clone, tuned) == {"to_action", "to_value"}  # what is seen stays as it was

    one = ("--trainer.iterations", "1", "--trainer.buffer_size", "4")
    example.reinforce(example.Args(algorithm="grpo"), clone, tmp_path / "grpo", (*TRAIN, *few, *one))
    (step,) = [line for line in read_metrics(tmp_path / "grpo" / "metrics.jsonl") if "update/policy_loss" in line]
    assert step["episode/count"] >= 8  # each env ended its episode
    assert changed_parts(clone, tmp_path / "grpo") == {"to_action"}  # GRPO has no value


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 100


def test_the_value_catches_up_while_the_policy_stays():
    env, policy = chunked_pair(8, value_shapes_perception=False)
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    obs, _ = env.reset(seed=1)
    assert policy.get_value(obs).abs().max() < 0.5
    cfg = PPOCfg(learning_rate=1e-2, n_epochs=8, batch_size=32, gamma=0.9)
    explained = warm_up_value(policy, env, cfg, num_steps=4, rollouts=4)
    assert len(explained) == 4
    assert policy.get_value(obs).mean() < -2.0  # about 1 is lost per step, for reaching and placing
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.startswith("model.to_value.")}
    assert all(parameter.requires_grad for parameter in policy.parameters())
    env.close()


def demonstrations(env, seed: int = 0):
    """Return chunks ``[num_envs, 3]`` of a robot that never moves and is far from where the env has it."""
    obs, _ = env.reset(seed=seed)
    obs = obs.clone()
    obs["robot"].apply_(lambda leaf: leaf.add_(5.0))
    action = torch.rand(len(obs), 3, 3, generator=torch.Generator().manual_seed(seed)) - 0.5
    return type(obs)({"observation": torch.stack([obs] * 3, dim=1), "action": action}, batch_size=[len(obs), 3])


def means(policy, obs):
    with torch.no_grad():
        return policy.get_action(obs, deterministic=True)[0]


@pytest.mark.parametrize("statistics", ["none", "other", "imitated"])
def test_a_policy_acts_to_the_last_bit_as_before_its_value_was_warmed_up(statistics):
    env, policy = chunked_pair(8)
    obs, _ = env.reset(seed=1)
    if statistics == "other":  # of a model that was trained elsewhere
        policy.model.normalizer.update(torch.randn(3, policy.model.normalizer.dim))
    elif statistics == "imitated":
        Imitation(ImitationCfg(total_steps=4), policy).update(demonstrations(env))
    before = means(policy, obs)
    warm_up_value(policy, env, PPOCfg(learning_rate=1e-2, n_epochs=2, batch_size=32), num_steps=4, rollouts=3)
    assert torch.equal(means(policy, obs), before)
    env.close()


def test_settings_of_a_resumed_imitation_are_those_of_its_config():
    env, policy = chunked_pair(4)
    first = Imitation(ImitationCfg(total_steps=4, weight_decay=0.1), policy)
    first.update(demonstrations(env))
    resumed = Imitation(ImitationCfg(total_steps=4, weight_decay=0.5), policy)
    resumed.load_state_dict(first.state_dict())
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.5]
    env.close()


def test_a_network_acts_to_the_last_bit_as_before_its_critic_was_warmed_up():
    env = ScriptedEnv(6, ends=7)
    policy = make_policy(env, normalize_obs=True, normalize_value=True)
    policy.update_normalizer(env.reset(seed=1)[0])
    obs, _ = env.reset(seed=2)
    before, value = means(policy, obs), policy.get_value(obs)
    warm_up_value(policy, env, PPOCfg(n_epochs=2, batch_size=16), num_steps=8, rollouts=3, head="critic")
    assert torch.equal(means(policy, obs), before)
    assert not torch.equal(policy.get_value(obs), value)
    assert policy.version == 3


@pytest.mark.parametrize("freeze", [None, True, False])
def test_updates_leave_the_statistics_of_demonstrations_alone(tmp_path, freeze):
    """The clone is saved, loaded by its folder, trained, resumed from its weights, and trained again."""
    env, clone = chunked_pair(4)
    learner = Imitation(ImitationCfg(total_steps=4), clone)
    chunks = demonstrations(env)
    for _ in range(3):
        learner.update(chunks)
    normalizer = clone.model.normalizer
    seen = torch.cat([clone.model.proprioception(chunks["observation"][:, 0]).double()] * 3)
    torch.testing.assert_close(normalizer.mean, seen.mean(0))
    torch.testing.assert_close(normalizer.variance, seen.var(0, correction=0))
    block = vla_block(model_path=str(save_vla_model(clone.model, tmp_path / "clone")))
    block["vla_config"]["freeze_normalizer"] = freeze
    inner = language_env(4)
    policy = build_policy(block, inner.observation_space, inner.action_space, "cpu")
    for _ in range(2):
        PPO(PPOCfg(n_epochs=1, batch_size=8), policy).update(SyncCollector(env, policy).collect(2))
        resumed = build_policy(block, inner.observation_space, inner.action_space, "cpu")
        resumed.load_state_dict(policy.state_dict())
        policy = resumed
    after = policy.model.normalizer
    unmoved = all(torch.equal(getattr(after, name), getattr(normalizer, name)) for name in ("mean", "shift", "scale"))
    assert unmoved is (freeze is not False)
    assert abs(int(after.count)) == (12 + 2 * 8 if freeze is False else 12)
    inner.close()
    env.close()


def test_what_is_frozen_is_named_rightly():
    env, policy = chunked_pair(2)
    with pytest.raises(ConfigError, match=r"'model\.value'.*model\.to_value"), only_trained(policy, "model.value"):
        pass
    env.close()


@pytest.mark.parametrize("shapes", [True, False])
def test_whether_the_value_shapes_what_is_perceived(shapes):
    env, policy = chunked_pair(2, value_shapes_perception=shapes)
    policy.get_value(env.reset(seed=0)[0]).square().sum().backward()
    gradient = policy.model.readouts.grad
    assert (gradient is not None and bool(gradient.abs().sum() > 0)) is shapes
    assert policy.model.to_value[0].weight.grad.abs().sum() > 0
    env.close()


def test_imitation_learns_to_point_and_to_act():
    env, policy = chunked_pair(8, num_points=2)
    obs, _ = env.reset(seed=0)
    stacked = torch.stack([obs] * 3, dim=1)
    generator = torch.Generator().manual_seed(0)
    action = torch.rand(8, 1, 3, generator=generator).expand(-1, 3, -1) - 0.5
    chunks = type(obs)({"observation": stacked, "action": action}, batch_size=[8, 3])
    learner = Imitation(ImitationCfg(total_steps=150, learning_rate=3e-3, warmup_steps=5), policy)
    losses = [learner.update(chunks, obs["object", "pos"][:, :2]) for _ in range(150)]
    for name in ("action_loss", "point_loss"):
        assert float(losses[-1][name]) < 0.5 * float(losses[0][name]), name
    env.close()
