"""``VLAPolicy`` and ``TinyVLA``: shapes, what they look at, and what they refuse."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from embodichain.agents.rl.algo.imitation import Imitation, ImitationCfg
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.vla import TinyVLA, register_vla_model, save_vla_model
from embodichain.agents.rl.models.vla.model import Decoded, VLAModel, VLAModelCfg
from embodichain.agents.rl.models.vla.tiny_vla import ByteTokenizer
from embodichain.agents.rl.models.vla_policy import VLAPolicy
from embodichain.config.classes import configclass
from embodichain.envs.observations import encode_instructions
from embodichain.envs.wrappers import ChunkedEnv
from embodichain.errors import ConfigError, ObservationError, RolloutError, UnknownNameError, UntrustedModuleError
from tests.agents.rl.vla_cases import CAMERA, language_env, vla_block, vla_policy


@pytest.fixture(scope="module")
def env():
    with language_env() as env:
        yield env


@pytest.fixture(scope="module")
def obs(env):
    return env.reset(seed=0)[0]


def test_a_chunk_is_chosen_and_judged_alike(env, obs):
    policy = vla_policy(env)
    action, log_prob, value = policy.get_action(obs)
    assert (action.shape, log_prob.shape, value.shape) == ((4, 3, 3), (4, 3), (4,))
    again, entropy, same = policy.evaluate_actions(obs, action)
    assert torch.allclose(again, log_prob, atol=1e-5)
    assert torch.allclose(same, value)
    assert torch.allclose(same, policy.get_value(obs))
    mean = policy.get_action(obs, deterministic=True)[0]
    expected = torch.distributions.Normal(mean, policy.model.head.log_std.exp())
    assert torch.allclose(log_prob, expected.log_prob(action).sum(-1), atol=1e-4)
    assert torch.allclose(entropy, expected.entropy().sum(-1), atol=1e-5)


@pytest.mark.parametrize(("head", "factors"), [("flow", (1, 2)), ("tokens", (3, 3))], ids=["flow", "tokens"])
def test_other_heads_choose_judge_and_imitate(env, obs, tmp_path, head, factors):
    settings = {
        "flow": {"num_steps": 2},
        "velocity_sizes": [64],
        "tokens": {"width": 16, "num_heads": 2, "num_bins": 8},
    }
    torch.manual_seed(0)
    policy = vla_policy(env, head=head, **settings)
    action, log_prob, value, decision = policy.decide(obs)
    assert (action.shape, log_prob.shape, value.shape) == ((4, 3, 3), (4, *factors), (4,))
    again, entropy, same = policy.evaluate_actions(obs, action, decision)
    assert torch.allclose(again, log_prob, atol=1e-4)
    assert entropy.shape == log_prob.shape
    assert torch.allclose(same, value)
    assert policy.get_action(obs)[0].shape == (4, 3, 3)
    steps = 240 if head == "flow" else 120
    algorithm = Imitation(ImitationCfg(learning_rate=3e-3, total_steps=steps, warmup_steps=1), policy)
    seen = obs[torch.arange(32) % 4].unsqueeze(1).expand(32, 3)
    chunks = TensorDict({"observation": seen, "action": 0.8 * torch.ones(32, 3, 3)}, [32, 3])
    losses = [float(algorithm.update(chunks)["action_loss"]) for _ in range(steps)]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    chosen = policy.get_action(obs, deterministic=True)[0]
    assert float((chosen - 0.8).abs().mean().detach()) < 0.3
    save_vla_model(policy.model, tmp_path / "model")
    loaded = build_policy(
        {"name": "vla", "vla_config": {"model_path": str(tmp_path / "model")}},
        env.observation_space, env.action_space, "cpu",
    )  # fmt: skip
    assert torch.equal(loaded.get_action(obs, deterministic=True)[0], chosen)


def test_a_head_that_the_model_does_not_make_is_named(env, obs):
    with pytest.raises(ConfigError, match=r"head: .*'gaussian', 'flow' or 'tokens'"):
        vla_policy(env, head="diffusion")
    with pytest.raises(RolloutError, match="pass the decision that came with the actions"):
        vla_policy(env, head="flow").evaluate_actions(obs, torch.zeros(4, 3, 3))


def test_one_action_at_a_time_is_an_ordinary_policy(env, obs):
    policy = vla_policy(env, chunk_size=1)
    action, log_prob, value = policy.get_action(obs)
    assert (action.shape, log_prob.shape, value.shape) == ((4, 3), (4,), (4,))
    assert policy.evaluate_actions(obs, action)[0].shape == (4,)


def test_the_default_model_has_one_to_five_million_parameters(env):
    policy = build_policy({"name": "vla", "action_dim": 3}, env.observation_space, env.action_space, "cpu")
    assert isinstance(policy.model, TinyVLA)
    assert 1e6 <= sum(p.numel() for p in policy.parameters()) <= 5e6


@pytest.mark.parametrize("part", [("image", "front"), "instruction", ("robot", "qpos")])
def test_pictures_words_and_the_body_all_count(env, obs, part):
    policy = vla_policy(env)
    nn.init.normal_(policy.model.to_action[-1].weight)
    changed = obs.clone()
    value = changed[part]
    changed[part] = value.flip(1) if value.dtype == torch.uint8 else value + 0.5
    if part == "instruction":
        changed[part] = encode_instructions(["push the cube to the violet target"], 48).expand(4, -1)
    before, after = (policy.get_action(o, deterministic=True)[0] for o in (obs, changed))
    assert (before - after).abs().amax(dim=(1, 2)).min() > 1e-4


def test_goals_and_object_are_not_looked_at(env, obs):
    policy = vla_policy(env)
    hidden = obs.exclude("goal", "object")
    assert torch.equal(policy.get_value(hidden), policy.get_value(obs))
    assert list(policy.model.cfg.proprio) == ["robot/ee_pos", "robot/qpos", "robot/qvel"]


def test_proprioception_is_normalised_by_what_was_seen(env, obs):
    policy = vla_policy(env)
    policy.update_normalizer(obs)
    vector = policy.model.proprioception(obs)
    assert torch.allclose(policy.model.normalizer.mean.float(), vector.mean(0), atol=1e-5)
    policy.eval()
    policy.update_normalizer(obs)
    assert int(policy.model.normalizer.count) == 4


def test_the_generator_of_a_collector_leaves_torch_alone(env, obs):
    policy = vla_policy(env)
    policy.generator = torch.Generator().manual_seed(1)
    state = torch.get_rng_state()
    first = policy.get_action(obs)[0]
    assert torch.equal(torch.get_rng_state(), state)
    policy.generator = torch.Generator().manual_seed(1)
    assert torch.equal(policy.get_action(obs)[0], first)


def test_copies_are_independent(env, obs):
    policy = vla_policy(env)
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    assert not torch.equal(twin.get_value(obs), policy.get_value(obs))


def test_bytes_become_tokens_and_padding_is_known():
    tokenizer = ByteTokenizer(10, 8, stride=4)
    tokens, is_text = tokenizer(encode_instructions(["push", "pull it"], 10).long())
    assert tokens.shape == (2, 3, 8)
    assert is_text.tolist() == [[True, False, False], [True, True, False]]


def test_what_comes_after_the_text_changes_nothing(env, obs):
    policy = vla_policy(env)
    nn.init.normal_(policy.model.to_action[-1].weight)
    short = obs.clone()
    short["instruction"] = encode_instructions(["push"], 48).expand(4, -1)
    before = policy.get_action(short, deterministic=True)[0]
    with torch.no_grad():
        policy.model.words.place[1:] += 5.0  # tokens without text
    assert torch.equal(policy.get_action(short, deterministic=True)[0], before)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_camera_missing_from_the_observations(env, obs):
    with pytest.raises(ObservationError, match=r"no camera 'wrist'.*Valid: front.*env.observations.cameras"):
        vla_policy(env, cameras=["wrist"])
    with (
        language_env(1, env={"observations": {"cameras": []}}) as blind,
        pytest.raises(ObservationError, match="no cam"),
    ):
        vla_policy(blind)
    policy = vla_policy(env)
    with pytest.raises(ObservationError, match=r"lacks 'image/front'.*env.observations.cameras"):
        policy.get_action(obs.exclude("image"))
    larger = {**CAMERA, "width": 24, "height": 24}
    with language_env(1, env={"observations": {"cameras": [larger]}}) as other:
        seen = other.reset(seed=0)[0]
    with pytest.raises(
        ObservationError, match=r"image/front: expected \[batch, \*\[16, 16, 3\]\], got \[1, 24, 24, 3\]"
    ):
        policy.get_action(seen)


def test_model_class_that_is_not_registered_and_not_trusted(env):
    with pytest.raises(UnknownNameError, match=r"unknown model class 'tiny_vlaa'. Did you mean 'tiny_vla'"):
        vla_policy(env, model_class="tiny_vlaa")
    with pytest.raises(UntrustedModuleError, match=r"names the module 'subprocess'.*--trust subprocess"):
        vla_policy(env, model_class="subprocess.Popen")


def test_chunk_longer_than_the_episode(env):
    policy = vla_policy(env, chunk_size=11)
    with pytest.raises(ValueError, match=r"chunk_size must lie in \[1, 10\]"):
        ChunkedEnv(env, policy.chunk_size)


def test_settings_that_do_not_fit(env):
    cases = [
        ({"proprio": ["robot/qpso"]}, "no 'robot/qpso'.*Did you mean 'robot/qpos'"),
        ({"patch_size": 32}, "32 does not divide an image of 16x16"),
        ({"width": 30}, "multiple of 2 \\* num_heads = 4"),
        ({"widht": 32}, "widht"),
        ({"cameras": {"front": [8, 8, 3]}}, "as the environment has them"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            vla_policy(env, **settings)
    with pytest.raises(ConfigError, match="chunks of 5 actions, got 3"):
        vla_policy(ChunkedEnv(env, 5))
    with pytest.raises(ConfigError, match="action_dim is 7"):
        build_policy({**vla_block(), "action_dim": 7}, env.observation_space, env.action_space, "cpu")
    with pytest.raises(ConfigError, match="cameras: expected a value"):
        TinyVLA(chunk_size=2)


# --- models of one's own ------------------------------------------------------------------------------------------


class OwnModel(nn.Module):
    """Written as the guide says: three methods and nothing else."""

    def __init__(self, bias: float = 0.0):
        super().__init__()
        self.mean = nn.Parameter(torch.full((3,), bias))

    def forward(self, obs, deterministic=False):
        action = self.mean.expand(obs.shape[0], 3)
        return action, torch.zeros(obs.shape[0]), self.get_value(obs)

    def get_value(self, obs):
        return obs["robot", "ee_pos"].sum(-1)

    def evaluate_actions(self, obs, actions):
        zero = torch.zeros(obs.shape[0])
        return zero + self.mean.sum() * 0.0, zero, self.get_value(obs)


def test_a_registered_model_of_ones_own(env, obs):
    register_vla_model("own", OwnModel)
    policy = build_policy(vla_block("own", bias=0.5), env.observation_space, env.action_space, "cpu")
    assert policy.chunk_size == 1
    assert policy.get_action(obs)[0].unique().tolist() == [0.5]
    with pytest.raises(ConfigError, match="OwnModel cannot be built from these settings"):
        build_policy(vla_block("own", size=0.5), env.observation_space, env.action_space, "cpu")
    with pytest.raises(ConfigError, match="the model name 'own' is taken by OwnModel"):
        register_vla_model("own", nn.Linear)


@configclass
class OwnHeadCfg(VLAModelCfg):
    """Settings of a model with a head of its own."""

    head: Literal["mixture"] = "mixture"


class OwnHead(VLAModel):
    """A model whose head the package does not know."""

    cfg_type = OwnHeadCfg

    def decode(self, obs):
        return Decoded(None, obs["robot", "ee_pos"].sum(-1))


class OwnFactors(OwnHead):
    """The same, and it says what its probabilities are made of."""

    factors = ("token",)


@pytest.mark.parametrize(("model", "factors"), [(OwnHead, None), (OwnFactors, ("token",)), (TinyVLA, ())])
def test_factors_of_models_are_those_of_their_heads(env, model, factors):
    built = model(**model.complete_config({}, env.observation_space, env.action_space))
    assert VLAPolicy(env.observation_space, env.action_space, "cpu", built).factors == factors


def test_a_module_without_the_three_methods(env):
    with pytest.raises(ConfigError, match="Linear lacks get_value"):
        VLAPolicy(env.observation_space, env.action_space, "cpu", nn.Linear(2, 2))


def test_parts_that_are_not_trainable_are_frozen(env):
    block = vla_block()
    block["vla_config"]["trainable"] = ["to_action", "head"]
    policy = build_policy(block, env.observation_space, env.action_space, "cpu")
    trained = {name.split(".")[1] for name, p in policy.named_parameters() if p.requires_grad}
    assert trained == {"to_action", "head"}
    block["vla_config"]["trainable"] = ["to_acton"]
    with pytest.raises(ConfigError, match=r"trainable: .*'to_acton'.*to_action"):
        build_policy(block, env.observation_space, env.action_space, "cpu")
