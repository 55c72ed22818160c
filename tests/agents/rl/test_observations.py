"""Observations in both forms, whatever an environment returns."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.registry import build_policy
from embodichain.agents.rl.utils import AlgorithmCfg, dict_to_tensordict, flatten_dict_observation, torch_threads
from embodichain.errors import ObservationError


def nested() -> TensorDict:
    robot = TensorDict({"qvel": torch.full((2, 1), 3.0), "qpos": torch.full((2, 2), 2.0)}, [2])
    thing = TensorDict({"pose": torch.ones(2, 2, 2), "seen": torch.tensor([True, False])}, [2])
    return TensorDict({"robot": robot, "object": thing}, [2])


def test_flattens_in_sorted_key_order() -> None:
    flat = flatten_dict_observation(nested())
    # object/pose (4), object/seen (1), robot/qpos (2), robot/qvel (1)
    assert flat.tolist() == [[1, 1, 1, 1, 1, 2, 2, 3], [1, 1, 1, 1, 0, 2, 2, 3]]
    assert flat.dtype == torch.float32
    assert torch.equal(flatten_dict_observation(nested().to_dict()), flat)
    assert flatten_dict_observation(torch.arange(6).view(2, 3)).dtype == torch.float32
    with pytest.raises(ObservationError, match="no tensor"):
        flatten_dict_observation(TensorDict({}, [2]))


@pytest.mark.parametrize("kind", ["tensordict", "dict", "mixed", "arrays"])
def test_every_form_becomes_the_same_tensordict(kind: str) -> None:
    obs = nested()
    given = {
        "tensordict": obs,
        "dict": obs.to_dict(),
        "mixed": {"robot": obs["robot"], "object": {"pose": obs["object", "pose"], "seen": [True, False]}},
        "arrays": {"robot": {k: v.numpy() for k, v in obs["robot"].items()}, "object": obs["object"].to_dict()},
    }[kind]
    out = dict_to_tensordict(given, torch.device("cpu"))
    assert out.batch_size == (2,)
    assert out["observation", "robot"].batch_size == (2,)
    assert torch.equal(flatten_dict_observation(out["observation"]), flatten_dict_observation(obs))
    assert out["observation", "object", "seen"].dtype == torch.bool


def test_flat_tensors_and_arrays_pass() -> None:
    x = torch.randn(3, 4)
    assert dict_to_tensordict(x)["observation"].data_ptr() == x.data_ptr()
    assert dict_to_tensordict({"a": np.zeros((3, 2), np.uint8)})["observation", "a"].dtype == torch.uint8


def test_parts_must_agree_on_num_envs() -> None:
    with pytest.raises(ObservationError, match="share their first dimension"):
        dict_to_tensordict({"a": torch.zeros(3, 1), "b": torch.zeros(2, 1)})


def test_threads_are_restored_even_after_an_error() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    with pytest.raises(KeyError), torch_threads(before + 1):
        raise KeyError
    assert torch.get_num_threads() == before


def test_algorithm_config() -> None:
    cfg = AlgorithmCfg("cpu", 1e-3, 128, 0.9, 0.8, 1.0)  # in the documented order
    assert (cfg.learning_rate, cfg.batch_size, cfg.gamma, cfg.gae_lambda, cfg.max_grad_norm) == (
        1e-3,
        128,
        0.9,
        0.8,
        1.0,
    )
    assert cfg.replace(gamma=0.5).gamma == 0.5
    assert cfg.copy().to_dict() == cfg.to_dict()
    assert cfg.validate() == []


def test_policies_take_dicts_of_tensors_or_arrays() -> None:
    room = gym.spaces.Dict(heater=gym.spaces.Box(0, 1, (3,)), air=gym.spaces.Dict(temp=gym.spaces.Box(-5, 5, (1,))))
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    for name in ("actor_critic", "flow"):
        settings = {"name": name, "actor": network, "critic": network}
        policy = build_policy(settings, room, gym.spaces.Box(-1, 1, (2,)), "cpu").eval()
        heater, temp = torch.eye(3)[:2], torch.tensor([[0.5], [-2.0]])
        obs = TensorDict({"heater": heater, "air": {"temp": temp}}, batch_size=[2])
        expected = policy.get_action(obs, deterministic=True)
        arrays = {"heater": heater.numpy(), "air": {"temp": temp.numpy().astype("float64")}}
        for given in (obs.to_dict(), arrays):
            for actual, value in zip(policy.get_action(given, deterministic=True), expected, strict=True):
                assert torch.equal(actual, value), name
        assert torch.equal(policy.get_value(arrays), expected[2])
    with pytest.raises(ObservationError, match="the observation lacks 'heater'"):
        policy.get_action({"air": {"temp": temp}})


def test_recurrent_policies_take_dicts_with_their_state() -> None:
    room = gym.spaces.Dict(heater=gym.spaces.Box(0, 1, (3,)))
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    settings = {"name": "actor_critic", "actor": network, "critic": network, "memory": {"hidden_size": 8}}
    policy = build_policy(settings, room, gym.spaces.Box(-1, 1, (2,)), "cpu").eval()
    arrays, state = {"heater": np.eye(3)[:2]}, policy.initial_state(2)
    obs = TensorDict({"heater": torch.eye(3)[:2]}, batch_size=[2])
    for given, expected in zip(policy.act(arrays, state, True), policy.act(obs, state, True), strict=True):
        assert torch.equal(given, expected)
    assert torch.equal(policy.state_value(arrays, state), policy.state_value(obs, state))


def test_policies_of_ones_own_get_single_precision() -> None:
    class Own(Policy):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(3, 3)

        def get_action(self, obs, deterministic=False):
            return self.net(obs["a"])[:, :2], *2 * (self.get_value(obs),)

        def get_value(self, obs):
            return self.net(obs["a"])[:, 2]

        def evaluate_actions(self, obs, actions, decision=None):
            raise AssertionError

    policy, array = Own(), np.ones((2, 3))
    assert torch.equal(policy.get_action({"a": array})[1], policy.get_value({"a": torch.ones(2, 3)}))
