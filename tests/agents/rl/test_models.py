"""Networks and policies: documented construction, both forms of observations, privileged keys, images, names."""

from __future__ import annotations

import inspect
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from embodichain.agents.rl.models import (
    ActorCritic,
    ActorOnly,
    Policy,
    build_mlp_from_cfg,
    build_policy,
    get_registered_policy_names,
    register_policy,
)
from embodichain.agents.rl.models import mlp as mlp_module
from embodichain.agents.rl.models.mlp import MLP, Linear, Tanh
from embodichain.agents.rl.utils import flatten_dict_observation
from embodichain.errors import ConfigError, ObservationError, UnknownNameError
from tests.agents.rl.helpers import LinearPolicy, ScriptedEnv, box, make_policy, network

SPACE = gym.spaces.Dict(
    {
        "robot": gym.spaces.Dict({"qpos": box(3), "qvel": box(2)}),
        "object": gym.spaces.Dict({"pos": box(3), "mass": box()}),
    }
)
ACTIONS = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


def observation(*batch: int, seed: int = 0) -> TensorDict:
    g = torch.Generator().manual_seed(seed)
    robot = {"qpos": torch.randn(*batch, 3, generator=g), "qvel": torch.randn(*batch, 2, generator=g)}
    thing = {"pos": torch.randn(*batch, 3, generator=g), "mass": torch.randn(*batch, generator=g)}
    return TensorDict({"robot": TensorDict(robot, batch), "object": TensorDict(thing, batch)}, batch)


def block(name: str = "actor_critic", **settings):
    base = {"name": name, "actor": network((8,))} | ({"critic": network((8,))} if name == "actor_critic" else {})
    return base | settings


# --- MLP ---


def test_mlp_layers_and_options() -> None:
    mlp = MLP(3, 2, [5, 7], activation="elu", last_activation="tanh", use_layernorm=True, dropout_p=0.1)
    kinds = [type(layer) for layer in mlp]
    hidden = [Linear, nn.LayerNorm, nn.ELU, nn.Dropout]
    assert kinds == [*hidden, *hidden, Linear, Tanh]
    assert mlp(torch.randn(4, 3)).shape == (4, 2)
    assert mlp(torch.randn(4, 3)).abs().max() <= 1.0
    assert [type(layer) for layer in MLP(3, 2, [4])] == [Linear, nn.ELU, Linear]


def test_mlp_output_may_have_a_shape() -> None:
    assert MLP(3, (2, 5), [4])(torch.randn(6, 3)).shape == (6, 2, 5)


def test_mlp_orthogonal_initialisation() -> None:
    mlp = MLP(8, 2, [8, 8], activation="relu")
    mlp.init_orthogonal([1.0, 2.0, 0.01])
    first, second, last = (layer for layer in mlp if isinstance(layer, nn.Linear))
    assert torch.allclose(first.weight @ first.weight.t(), torch.eye(8), atol=1e-5)
    assert torch.allclose(second.weight @ second.weight.t(), 4.0 * torch.eye(8), atol=1e-4)
    assert torch.allclose(last.weight @ last.weight.t(), 1e-4 * torch.eye(2), atol=1e-7)
    assert all(layer.bias.abs().max() == 0 for layer in (first, second, last))
    with pytest.raises(ConfigError, match="one scale or 3"):
        mlp.init_orthogonal([1.0])


def test_mlp_from_config_in_both_shapes() -> None:
    flat = build_mlp_from_cfg({"type": "mlp", "hidden_sizes": [6, 4], "activation": "silu"}, 3, 2)
    nested = build_mlp_from_cfg({"type": "mlp", "network_cfg": {"hidden_sizes": [6, 4], "activation": "silu"}}, 3, 2)
    assert repr(flat) == repr(nested)
    with pytest.raises(UnknownNameError, match="Did you mean 'tanh'"):
        build_mlp_from_cfg({"activation": "tahn"}, 3, 2)
    with pytest.raises(UnknownNameError, match="network type 'cnn'"):
        build_mlp_from_cfg({"type": "cnn"}, 3, 2)
    with pytest.raises(ConfigError, match="hidden_sizes"):
        build_mlp_from_cfg({"hidden_size": [6]}, 3, 2)
    with pytest.raises(ConfigError, match="both beside and inside"):
        build_mlp_from_cfg({"hidden_sizes": [6], "network_cfg": {"hidden_sizes": [6]}}, 3, 2)


@pytest.mark.parametrize("count", [5001, 50_001])
def test_tanh_equals_torch_in_values_and_gradients(count: int) -> None:
    ours, theirs = (torch.linspace(-12, 12, count, requires_grad=True) for _ in range(2))
    a, b = Tanh()(ours), torch.tanh(theirs)
    (a * a).sum().backward()
    (b * b).sum().backward()
    assert (a - b).abs().max() < 3e-7
    assert (ours.grad - theirs.grad).abs().max() < 1e-6
    with torch.no_grad():
        assert (Tanh()(ours) - b).abs().max() < 3e-7
    assert torch.equal(Tanh()(ours.double()), torch.tanh(theirs.double()))


@pytest.mark.parametrize("shape", [(1024, 256), (1003, 256), (1000, 256), (64, 16, 256)], ids=str)
def test_products_by_convolution_are_those_of_a_linear_layer(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp_module, "_convolves_faster", lambda: True)
    convolutions = []
    convolve = torch.nn.functional.conv2d
    monkeypatch.setattr(torch.nn.functional, "conv2d", lambda *args: convolutions.append(args) or convolve(*args))
    layer, expected = Linear(256, 96), nn.Linear(256, 96).double()
    expected.load_state_dict(layer.state_dict())
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    output, wanted = layer(inputs), expected(doubled := inputs.detach().double().requires_grad_())
    output.square().sum().backward()
    wanted.square().sum().backward()
    assert len(convolutions) == 1
    assert output.shape == wanted.shape
    assert output.is_contiguous()
    pairs = [(output, wanted), (inputs.grad, doubled.grad)]
    pairs += [(ours.grad, theirs.grad) for ours, theirs in zip(layer.parameters(), expected.parameters(), strict=True)]
    for ours, theirs in pairs:
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(16, 256, torch.float32), (1031, 256, torch.float32), (1024, 256, torch.float64)]
)
def test_products_that_convolutions_do_not_speed_up_are_those_of_torch(
    rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp_module, "_convolves_faster", lambda: True)
    monkeypatch.delattr(torch.nn.functional, "conv2d")
    layer, inputs = Linear(width, 96, dtype=dtype), torch.randn(rows, width, dtype=dtype)  # 1031 is a prime number
    assert torch.equal(layer(inputs), torch.nn.functional.linear(inputs, layer.weight, layer.bias))


@pytest.mark.filterwarnings("ignore:.*jit.trace:DeprecationWarning", "ignore:.*zero-element:UserWarning")
def test_products_that_cannot_be_convolutions_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of another width, layers without inputs, and a traced layer, which has to take any number of rows."""
    monkeypatch.setattr(mlp_module, "_convolves_faster", lambda: True)
    layer, inputs = Linear(256, 96), torch.randn(1024, 256)
    with pytest.raises(RuntimeError, match="1024x512 and 256x96"):
        layer(torch.randn(1024, 512))
    assert torch.equal(Linear(0, 96, bias=False)(torch.empty(1024, 0)), torch.zeros(1024, 96))
    traced = torch.jit.trace(layer, inputs)
    assert torch.equal(traced(inputs[:7]), torch.nn.functional.linear(inputs[:7], layer.weight, layer.bias))


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_products_can_be_traced_scripted_and_computed_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_module, "_convolves_faster", lambda: True)
    network, inputs = MLP(256, 4, [64], activation="relu"), torch.randn(1024, 256)
    traced = torch.fx.symbolic_trace(network)
    assert torch.equal(traced(inputs), network(inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(network)
    assert torch.equal(scripted(inputs), network(inputs))
    monkeypatch.delattr(torch.nn.functional, "conv2d")
    with torch.backends.mkldnn.flags(enabled=False):
        assert network(inputs).shape == (1024, 4)


# --- policies ---


def test_documented_construction() -> None:
    actor, critic = build_mlp_from_cfg(network((8,)), 4, 2), build_mlp_from_cfg(network((8,)), 4, 1)
    policy = ActorCritic(4, 2, torch.device("cpu"), actor, critic)
    obs = torch.randn(5, 4)
    action, log_prob, value = policy.get_action(obs)
    assert (action.shape, log_prob.shape, value.shape) == ((5, 2), (5,), (5,))
    again, entropy, same_value = policy.evaluate_actions(obs, action)
    assert torch.allclose(again, log_prob, atol=1e-5)
    assert entropy.shape == (5,)
    assert torch.equal(same_value, value)
    assert torch.equal(policy.get_value(obs), value)
    assert policy.head.log_std.requires_grad
    assert policy.device == torch.device("cpu")
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    only = ActorOnly(space, ACTIONS, "cpu", actor)
    assert only.get_value(obs).tolist() == [0.0] * 5
    assert only.get_action(obs, deterministic=True)[0].shape == (5, 2)


def test_forward_writes_in_place_and_is_deterministic_on_request() -> None:
    policy = build_policy(block(), SPACE, ACTIONS, "cpu")
    tensordict = TensorDict({"observation": observation(6)}, [6])
    assert policy(tensordict) is tensordict
    assert {"action", "sample_log_prob", "value"} <= set(tensordict.keys())
    first = policy(tensordict.clone(), deterministic=True)["action"]
    assert torch.equal(first, policy(tensordict.clone(), deterministic=True)["action"])
    assert not torch.equal(first, tensordict["action"])


def test_every_forward_takes_deterministic() -> None:
    for cls in (Policy, ActorCritic, ActorOnly, LinearPolicy):
        assert inspect.signature(cls.forward).parameters["deterministic"].default is False


def test_nested_and_flat_observations_mean_the_same() -> None:
    obs = observation(6)
    flat = flatten_dict_observation(obs)
    for settings in ({}, {"critic_obs": ["object"]}, {"critic_obs": ["robot/qvel", "object/mass"]}):
        policy = build_policy(block(**settings), SPACE, ACTIONS, "cpu")
        assert torch.allclose(policy.get_value(obs), policy.get_value(flat), atol=1e-6)
        nested, from_flat = (policy.get_action(o, deterministic=True)[0] for o in (obs, flat))
        assert torch.allclose(nested, from_flat, atol=1e-6)
    # a policy made for a flat width understands nested observations
    policy = build_policy(block(), 9, ACTIONS, "cpu")
    assert torch.allclose(policy.get_value(obs), policy.get_value(flat))


def test_privileged_keys_reach_the_critic_alone() -> None:
    policy = build_policy(block(critic_obs=["object"]), SPACE, ACTIONS, "cpu")
    assert policy.encoder.public_dim == 5
    obs, other = observation(6), observation(6)
    other["object", "pos"] += 1.0
    action, _, value = policy.get_action(obs, deterministic=True)
    other_action, _, other_value = policy.get_action(other, deterministic=True)
    assert torch.equal(action, other_action)
    assert not torch.allclose(value, other_value)
    with pytest.raises(ConfigError, match=r"no 'objects'.*Did you mean 'object'"):
        build_policy(block(critic_obs=["objects"]), SPACE, ACTIONS, "cpu")


def test_pictures_go_through_the_encoder_and_stay_bytes() -> None:
    space = gym.spaces.Dict(
        {
            "robot": gym.spaces.Dict({"qpos": box(3)}),
            "image": gym.spaces.Dict({"wrist": box(24, 32, 3, dtype=np.uint8)}),
        }
    )
    policy = build_policy(block(image_encoder={"channels": [4, 4], "feature_dim": 10}), space, ACTIONS, "cpu")
    assert policy.encoder.public_dim == 13
    image = torch.randint(0, 256, (5, 24, 32, 3), dtype=torch.uint8)
    obs = TensorDict(
        {"robot": TensorDict({"qpos": torch.randn(5, 3)}, [5]), "image": TensorDict({"wrist": image}, [5])}, [5]
    )
    action, _log_prob, value = policy.get_action(obs)
    assert action.shape == (5, 2)
    policy.evaluate_actions(obs, action)[2].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.encoder.parameters())
    darker = obs.clone()
    darker["image", "wrist"] = torch.zeros_like(image)
    assert not torch.allclose(policy.get_value(darker), value)
    with pytest.raises(ObservationError, match="nested TensorDict"):
        policy.get_value(torch.randn(5, 3))


def test_wrong_observations_name_what_is_missing() -> None:
    policy = build_policy(block(), SPACE, ACTIONS, "cpu")
    with pytest.raises(ObservationError, match="lacks 'object/mass'"):
        policy.get_value(observation(2).exclude(("object", "mass")))
    with pytest.raises(ObservationError, match="expected observations of 9 numbers"):
        policy.get_value(torch.randn(2, 8))


def test_normalisation_is_part_of_the_policy() -> None:
    policy = build_policy(block(normalize_obs=True), SPACE, ACTIONS, "cpu")
    obs = observation(50)
    before = policy.get_value(obs)
    policy.update_normalizer(obs)
    assert not torch.allclose(policy.get_value(obs), before)
    other = build_policy(block(normalize_obs=True), SPACE, ACTIONS, "cpu")
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.get_value(obs), policy.get_value(obs))
    policy.eval()
    policy.update_normalizer(obs + 3.0)
    assert torch.equal(other.get_value(obs), policy.get_value(obs))


def test_discrete_actions() -> None:
    policy = build_policy(block(action_dim=3), 9, gym.spaces.Discrete(3), "cpu")
    action, log_prob, _ = policy.get_action(torch.randn(7, 9))
    assert action.dtype == torch.int64
    assert action.shape == log_prob.shape == (7,)


def test_an_authors_policy_on_tensors_alone_serves_components() -> None:
    env = ScriptedEnv()
    policy = LinearPolicy()
    out = policy(TensorDict({"observation": env.reset()[0]}, [3]))
    assert out["action"].tolist() == [[0.5]] * 3
    assert out["sample_log_prob"].tolist() == [-0.25] * 3
    assert policy.initial_state(3) is None
    assert policy.version == 0


# --- by name ---


def test_names_and_registration() -> None:
    assert {"actor_critic", "actor_only"} <= set(get_registered_policy_names())

    @register_policy("test_constant")
    class Constant(LinearPolicy):
        def __init__(self, obs_space, action_space, device, gain=1.0):
            super().__init__()
            self.gain = gain

    built = build_policy({"name": "test_constant", "cfg": {"gain": 2.5}}, SPACE, ACTIONS, "cpu")
    assert isinstance(built, Constant)
    assert built.gain == 2.5
    assert "test_constant" in get_registered_policy_names()
    assert isinstance(build_policy({"name": "Test_Constant", "cfg": {"gain": 2.5}}, SPACE, ACTIONS, "cpu"), Constant)
    with pytest.raises(ConfigError, match="taken by Constant"):
        register_policy("test_constant", LinearPolicy)
    with pytest.raises(TypeError, match="must derive from Policy"):
        register_policy("test_linear", nn.Linear)


def test_given_networks_replace_those_of_the_block() -> None:
    actor, critic = MLP(9, 2, [4]), MLP(9, 1, [4])
    policy = build_policy({"name": "actor_critic", "action_dim": 2}, SPACE, ACTIONS, "cpu", actor, critic)
    assert policy.actor is actor
    assert policy.critic is critic


@pytest.mark.parametrize(
    ("policy_block", "error", "message"),
    [
        ({"name": "actor_citric"}, UnknownNameError, "Did you mean 'actor_critic'"),
        ({"actor": {}}, ConfigError, "expected the name of a policy"),
        (block(action_dim=6), ConfigError, "action_dim is 6, but .* has 2"),
        (block(normalise_obs=True), ConfigError, "normalize_obs"),
        (block("actor_only", critic=network()), ConfigError, "critic"),
        (block(distribution={"std": "learned"}), ConfigError, "learnable"),
        (block(memory={"type": "lstmm"}), ConfigError, "lstm"),
        (block(actor={"network_cfg": {"activation": "rellu"}}), ConfigError, "Did you mean 'relu'"),
    ],
)
def test_wrong_blocks(policy_block, error, message: str) -> None:
    with pytest.raises(error, match=message):
        build_policy(policy_block, SPACE, ACTIONS, "cpu")


def test_weights_start_orthogonal_with_small_actions() -> None:
    torch.manual_seed(0)
    policy = make_policy(ScriptedEnv())
    mean, _, _ = policy.get_action(ScriptedEnv().reset()[0], deterministic=True)
    assert mean.abs().max() < 0.05
