"""Actions as tokens: what bins stand for, probabilities of sequences, imitation of two ways at once, reinforcement."""

from __future__ import annotations

import math
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg
from embodichain.agents.rl.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.config import TrainCfg
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.tokens import TokenCfg, TokenHead
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.config import merge
from embodichain.envs.registration import make
from embodichain.envs.wrappers import chunked
from embodichain.errors import ConfigError, RolloutError
from tests.agents.rl.test_checkpoint import same
from tests.agents.rl.training_cases import GRPO as GRPO_RUN
from tests.agents.rl.training_cases import PPO as PPO_RUN
from tests.agents.rl.training_cases import train_config

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, CHUNK, DIM = 3, 2, 2
SMALL = {"width": 16, "depth": 2, "num_heads": 2, "num_bins": 5}


def make_head(**settings) -> TokenHead:
    torch.manual_seed(0)
    head = TokenHead(WIDTH, CHUNK, DIM, TokenCfg(**{**SMALL, **settings}))
    torch.nn.init.normal_(head.out.weight)  # bins of very different probability
    torch.nn.init.normal_(head.embedding.weight)
    return head


def test_bins_are_equal_parts_of_the_range():
    head = make_head(num_bins=4, range=(-1.0, 3.0))
    assert head.centers.tolist() == [-0.5, 0.5, 1.5, 2.5]
    assert head.encode(torch.tensor([-9.0, -1.0, -0.01, 0.0, 2.99, 3.0, 9.0])).tolist() == [0, 0, 0, 1, 3, 3, 3]
    assert torch.equal(head.encode(head.centers), torch.arange(4))
    actions = torch.rand(1000) * 4.0 - 1.0
    assert float((head.decode(head.encode(actions)) - actions).abs().max()) <= 0.5


@pytest.mark.parametrize("decoding", ["autoregressive", "parallel"])
def test_probabilities_of_all_sequences_add_up_to_one(decoding):
    head = make_head(decoding=decoding, num_bins=3)
    sequences = torch.cartesian_prod(*[torch.arange(3)] * 4)
    features = torch.randn(1, WIDTH).expand(81, WIDTH)
    log_prob, entropy = head.evaluate(features, TensorDict({"tokens": sequences}, [81]))
    assert log_prob.shape == entropy.shape == (81, CHUNK, DIM)
    assert float(log_prob.double().sum((1, 2)).exp().sum().detach()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("decoding", ["autoregressive", "parallel"])
def test_the_cache_gives_the_probabilities_of_the_whole_sequence(decoding):
    head, features = make_head(decoding=decoding), torch.randn(64, WIDTH)
    chunk, log_prob, decision = head.sample(features)
    torch.testing.assert_close(head.evaluate(features, decision)[0], log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.decode(decision["tokens"]).view(64, CHUNK, DIM), chunk)
    first = head.sample(features, deterministic=True)
    assert torch.equal(first[0], head.sample(features, deterministic=True)[0])


def test_samples_have_the_probabilities_they_are_said_to_have():
    head = make_head(num_bins=3)
    features = torch.randn(1, WIDTH).expand(30000, WIDTH)
    tokens = head.sample(features)[2]["tokens"]
    sequences = torch.cartesian_prod(*[torch.arange(3)] * 4)
    expected = head.evaluate(features[:81], TensorDict({"tokens": sequences}, [81]))[0].sum((1, 2)).exp()
    number = (tokens * torch.tensor([27, 9, 3, 1])).sum(1)
    counted = torch.bincount(number, minlength=81) / 30000
    assert float((counted - expected.detach()).abs().max()) < 0.012


def test_a_token_depends_on_those_before_it_only_where_it_is_to():
    for decoding, depends in (("autoregressive", True), ("parallel", False)):
        head, features = make_head(decoding=decoding), torch.randn(1, WIDTH)
        one, other = torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[0, 3, 0, 0]])
        change = (head.logits(features, one) - head.logits(features, other)).abs().amax(-1)[0]
        assert torch.equal(change[:2], torch.zeros(2))  # never on itself or what comes later
        assert bool((change[2:] > 1e-4).all()) == depends


def test_imitation_is_cross_entropy_of_what_counts():
    head, features = make_head(), torch.randn(6, WIDTH)
    actions, valid = torch.rand(6, CHUNK, DIM) * 2 - 1, torch.tensor([[True, False]] * 6)
    tokens = head.encode(actions).flatten(1)
    log_probs = head.logits(features, tokens).log_softmax(-1)
    expected = torch.nn.functional.nll_loss(log_probs.transpose(1, 2), tokens, reduction="none").view(6, CHUNK, DIM)
    torch.testing.assert_close(head.imitation_loss(features, actions), expected.mean((1, 2)))
    torch.testing.assert_close(head.imitation_loss(features, actions, valid), expected[:, 0].mean(1))
    torch.testing.assert_close(head.imitation_loss(features, actions[:, :1]), expected[:, 0].mean(1))


def test_two_ways_are_both_learned_and_never_mixed():
    """Both actions of a chunk are -1, or both are 1."""
    torch.manual_seed(0)
    space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    block = {"name": "tokens", "chunk_size": 2, "tokens": {**SMALL, "num_bins": 16}}
    policy = build_policy(block, 2, space, "cpu")
    adam = torch.optim.Adam(policy.head.parameters(), 1e-2)
    for _ in range(150):
        actions = (torch.randint(0, 2, (128, 1, 1)).float() * 2.0 - 1.0).expand(128, 2, 1)
        loss = policy.imitation_loss(torch.randn(128, 2), actions).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        chosen = policy.get_action(torch.randn(1000, 2))[0].squeeze(-1)
    same_side = (chosen[:, 0] * chosen[:, 1] > 0) & (chosen.abs() > 0.8).all(1)
    assert float(same_side.float().mean()) > 0.95
    assert 0.35 < float((chosen[:, 0] > 0).float().mean()) < 0.65


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_it_is_learned_with(name, level):
    torch.manual_seed(0)
    env = make("CartPoleRL", num_envs=4, seed=0, num_threads=1, max_episode_steps=12)
    block = {"name": "tokens", "chunk_size": 3, "tokens": SMALL, "normalize_obs": True}
    policy = build_policy(block, env.observation_space, env.action_space, "cpu")
    common = {"batch_size": 10**6, "n_epochs": 1, "learning_rate": 1e-3, "log_prob_per": level}
    algorithm = PPO(PPOCfg(**common, ent_coef=0.01), policy)
    if name == "grpo":
        algorithm = GRPO(GRPOCfg(**common, group_size=2, kl_coef=0.01), policy)
    collector = SyncCollector(chunked(env, 3), policy, start_rollout=algorithm.start_rollout)
    before = policy.head.out.weight.clone()
    first = algorithm.update(collector.collect(8))
    assert first["approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert first["clip_fraction"] == 0.0
    if name == "ppo":  # an untrained head chooses all bins alike; chunks cut short count what was taken
        factors = {"token": 1, "action": 1, "chunk": 3}[level]
        assert 0.5 * factors * math.log(5) < first["entropy"] <= factors * math.log(5) + 1e-4
    assert not torch.equal(policy.head.out.weight, before)
    assert math.isfinite(algorithm.update(collector.collect(8))["policy_loss"])


@pytest.mark.parametrize(("name", "cfg"), [(PPO, PPOCfg), (GRPO, GRPOCfg)])
@pytest.mark.parametrize(
    ("policy", "level", "levels"),
    [
        ("tokens", "denoising_step", "chunk, action, token"),
        ("flow", "token", "chunk, action, denoising_step"),
        ("gaussian", "token", "chunk, action"),
    ],
)
def test_ratios_of_factors_that_a_policy_does_not_have_are_refused(name, cfg, policy, level, levels):
    space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    built = build_policy({"name": policy, "chunk_size": 3}, 4, space, "cpu")
    with pytest.raises(ConfigError, match=rf"log_prob_per: expected one of {levels}, which .*, got {level}"):
        name(cfg(log_prob_per=level), built)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
@pytest.mark.parametrize("policy", ["flow", "tokens"])
def test_a_run_resumes_bit_by_bit(policy, name, tmp_path):
    trainer = {"iterations": 2, "enable_eval": False, "keep_checkpoints": 9, "save_freq": 1, "buffer_size": 6}
    data = train_config(tmp_path / "whole", trainer=trainer)
    level = {"flow": "denoising_step", "tokens": "token"}[policy]
    own = {"flow": {"num_steps": 2, "noise_at": "one"}, "tokens": SMALL}[policy]
    data["policy"] = {"name": policy, "chunk_size": 3, "normalize_obs": True, policy: own}
    data["algorithm"] = merge({"ppo": PPO_RUN, "grpo": GRPO_RUN}[name], {"cfg": {"log_prob_per": level}})
    train_from_config(TrainCfg.from_dict(data))
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    steps = list_checkpoints(tmp_path / "again" / "checkpoints")
    assert len(steps) == 3
    resume_training(steps[1])
    whole, again = (load_checkpoint(find_checkpoint(tmp_path / run)) for run in ("whole", "again"))
    for part in ("policy", "algorithm", "env", "collector", "random"):
        assert same(whole[part], again[part]), part
    assert not same(whole["policy"], load_checkpoint(steps[1])["policy"])


def test_wrong_settings_and_tokens_are_named():
    with pytest.raises(
        ConfigError, match=r"range: expected \[low, high\][\s\S]*width: expected a multiple of num_heads, 3"
    ):
        TokenCfg(range=(1.0, -1.0), num_heads=3)
    with pytest.raises(ConfigError, match="expected continuous actions"):
        build_policy({"name": "tokens"}, 2, gym.spaces.Discrete(3), "cpu")
    with pytest.raises(RolloutError, match=r"expected tokens \[batch, 4\].*got \[2, 3\]"):
        make_head().evaluate(torch.zeros(2, WIDTH), TensorDict({"tokens": torch.zeros(2, 3).long()}, [2]))
