"""What algorithms, collectors and policies share: the base config, observations, thread counts."""

from __future__ import annotations

from embodichain.agents.rl.utils.config import AlgorithmCfg
from embodichain.agents.rl.utils.observations import dict_to_tensordict, flatten_dict_observation, sorted_leaves
from embodichain.utils.threads import torch_threads

__all__ = ["AlgorithmCfg", "dict_to_tensordict", "flatten_dict_observation", "sorted_leaves", "torch_threads"]
