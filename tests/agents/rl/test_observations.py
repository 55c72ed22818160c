"""Observations in both forms, whatever an environment returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

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
