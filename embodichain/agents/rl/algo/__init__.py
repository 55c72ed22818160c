"""Algorithms and their names; ``ppo.py`` is the one to read first."""

from collections.abc import Mapping
from typing import Any

import torch

from embodichain.agents.rl.algo.advantages import compute_gae
from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.algo.distillation import Distillation, DistillationCfg
from embodichain.agents.rl.algo.grpo import GRPO, GRPOCfg
from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils import Registry

__all__ = [
    "GRPO",
    "PPO",
    "BaseAlgorithm",
    "Distillation",
    "DistillationCfg",
    "GRPOCfg",
    "PPOCfg",
    "build_algo",
    "compute_gae",
    "get_algo_class",
    "get_registered_algo_names",
    "register_algo",
]

_ALGORITHMS = Registry[BaseAlgorithm]("algorithm", BaseAlgorithm, ppo=PPO, grpo=GRPO, distill=Distillation)
register_algo, get_algo_class, get_registered_algo_names = _ALGORITHMS.register, _ALGORITHMS.get, _ALGORITHMS.names


def build_algo(
    name: str, cfg_kwargs: Mapping[str, Any], policy: Policy, device: torch.device | str | None = None
) -> BaseAlgorithm:
    """Build an algorithm by name from its settings; ``device`` stands in for a setting that is not there."""
    algo_cls = get_algo_class(name)
    settings = dict(cfg_kwargs)
    if device is not None:
        settings.setdefault("device", str(device))
    return algo_cls(algo_cls.cfg_type.from_dict(settings, source="algorithm"), policy)
