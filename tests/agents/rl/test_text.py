"""Policies that read instructions: codes of words, and gates."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.text import GatedLinear, TextEncoder, TextEncoderCfg
from embodichain.agents.rl.utils import flatten_dict_observation
from embodichain.envs.observations import encode_instructions
from embodichain.envs.registration import make
from embodichain.errors import ConfigError

LENGTH = 48
TEXT = gym.spaces.Box(0, 255, (LENGTH,), np.uint8)
SPACE = gym.spaces.Dict({"instruction": TEXT, "a": gym.spaces.Box(-9, 9, (3,)), "z": gym.spaces.Box(-9, 9, (2,))})
ACTIONS = gym.spaces.Box(-1, 1, (2,))


def codes(*texts: str, **settings: Any) -> Tensor:
    cfg = TextEncoderCfg(**settings)
    return TextEncoder(cfg)(encode_instructions(texts, LENGTH)).unflatten(-1, (cfg.max_words, cfg.word_dim))


def policy(space: gym.Space[Any] = SPACE, **settings: Any) -> Any:
    torch.manual_seed(0)
    return build_policy({"name": "actor_critic", "text_encoder": {}, **settings}, space, ACTIONS, "cpu")


def observation(*texts: str) -> TensorDict:
    count = len(texts)
    parts = {"instruction": encode_instructions(texts, LENGTH), "a": torch.randn(count, 3), "z": torch.randn(count, 2)}
    return TensorDict(parts, batch_size=[count])


def test_a_word_has_one_code_wherever_it_begins() -> None:
    found = codes("put the red cube on the blue cube", "put the blue cube on the red cube", "  put   the red cube")
    assert torch.equal(found[0, 2], found[1, 6])
    assert torch.equal(found[0, 3], found[0, 7])  # in the middle and at the end
    assert torch.equal(found[2, :4], found[0, :4])
    assert found[0, 2].ne(found[0, 6]).all()
    assert found[0, 8:].abs().max() == 0.0
    assert found[2, 4:].abs().max() == 0.0


def test_a_code_is_the_sum_over_pairs_of_letters() -> None:
    encoder = TextEncoder(TextEncoderCfg(max_words=2, word_dim=3))
    letters, followers = encoder.letters, encoder.followers
    expected = letters[ord("g")] * followers[ord("o")] + letters[ord("o")] * followers[ord(" ")]
    text = torch.zeros(3, 4, 5, dtype=torch.uint8)
    text[..., 1:3] = torch.tensor(list(b"go"))
    assert torch.allclose(encoder(text), torch.cat((expected, torch.zeros(3))).expand(3, 4, 6))


def test_words_beyond_the_last_are_ignored() -> None:
    assert torch.equal(codes("one two three", max_words=2), codes("one two", max_words=2))


def test_texts_of_other_scripts_and_no_text_have_codes() -> None:
    found = codes("würfel 赤い", "wurfel")
    assert found[0, 0].ne(found[1, 0]).any()
    assert found[0, 1].abs().min() > 0.0
    nothing = TextEncoder(TextEncoderCfg())(torch.zeros(2, LENGTH, dtype=torch.uint8))
    assert nothing.abs().max() == 0.0


def test_numbers_that_are_no_bytes_are_read_as_the_nearest_ones() -> None:
    encoder, text = TextEncoder(TextEncoderCfg()), torch.full((1, 4), 65.0)
    for number, byte in ((-3.0, 0), (300.0, 255), (math.nan, 0), (math.inf, 255)):
        text[0, 1] = number
        nearest = text.nan_to_num().clamp(0, 255).byte()
        assert nearest[0, 1] == byte
        assert torch.equal(encoder(text), encoder(nearest))


def test_gates_scale_the_outputs_of_a_layer() -> None:
    layer, x = GatedLinear(4, 2, slice(1, 3)), torch.randn(5, 4)
    scale = 1.0 + x[:, 1:3] @ layer.gates.weight.T
    assert torch.allclose(layer(x), scale * (x @ layer.weight.T + layer.bias), atol=1e-6)


def test_actor_and_critic_are_gated_by_the_codes() -> None:
    made, obs = policy(), observation("push the red cube", "push the blue cube")
    features, _ = made.encoder(obs)
    columns = made.encoder.text_columns
    assert torch.equal(features[:, columns], TextEncoder(TextEncoderCfg())(obs["instruction"]))
    assert torch.equal(features[:, : columns.start], obs["a"])
    assert torch.equal(features[:, columns.stop :], obs["z"])
    for network in (made.actor, made.critic):
        assert isinstance(network[0], GatedLinear)
        assert network[0].text == columns
    assert not isinstance(policy(text_encoder={"gates": False}).actor[0], GatedLinear)
    assert policy(text_encoder=None).encoder.public_dim == 3 + LENGTH + 2


def test_flat_observations_are_read_as_nested_ones_are() -> None:
    made, obs = policy(normalize_obs=True, critic_obs=["a"]), observation("push the red cube", "stop", "lift it")
    made.update_normalizer(obs)
    flat = flatten_dict_observation(obs)
    assert flat.shape == (3, 3 + LENGTH + 2)
    for mine, other in zip(made.encoder(obs), made.encoder(flat), strict=True):
        assert mine is not None
        assert torch.equal(mine, other)


def test_codes_are_kept_with_the_weights() -> None:
    made, other = policy(), policy()
    other.encoder.text_encoder.letters.zero_()
    other.load_state_dict(made.state_dict())
    obs = observation("push the red cube")
    assert torch.equal(made.get_value(obs), other.get_value(obs))


@pytest.mark.parametrize(
    ("space", "settings", "message"),
    [
        (gym.spaces.Dict({"a": gym.spaces.Box(-9, 9, (3,))}), {}, "expected an observation 'instruction'"),
        (gym.spaces.Dict({"instruction": gym.spaces.Box(-9, 9, (3,))}), {}, "a uint8 vector"),
        (gym.spaces.Box(-9, 9, (3,)), {}, "the policy sees none"),
        (SPACE, {"actor_obs": ["a"]}, "the policy sees none"),
        (SPACE, {"critic_obs": ["instruction"]}, "the actor has to read it"),
        (SPACE, {"memory": {"hidden_size": 4}}, "gates: expected false"),
        (SPACE, {"actor": {"type": "mlp", "hidden_sizes": []}}, "without hidden layers"),
        (SPACE, {"text_encoder": {"words": 3}}, "max_words"),
    ],
)
def test_what_cannot_be_read_is_an_error(space: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(space, **settings)


def test_a_memory_takes_codes_without_gates() -> None:
    made = policy(memory={"hidden_size": 4}, text_encoder={"gates": False})
    assert made.get_action(observation("push the red cube"))[0].shape == (1, 2)


def test_a_task_with_language_is_acted_in() -> None:
    env = make("StackCubeLanguageRL", num_envs=3, seed=0)
    block = {"name": "actor_critic", "text_encoder": {}, "normalize_obs": True}
    made = build_policy(block, env.observation_space, env.action_space, "cpu")
    obs, _ = env.reset()
    action, log_prob, value = made.get_action(obs)
    assert action.shape == (3, *env.action_space.shape[-1:])
    assert log_prob.shape == value.shape == (3,)
    env.close()
