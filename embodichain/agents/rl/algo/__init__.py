"""Algorithms and their names; ``ppo.py`` is the one to read first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from embodichain.agents.rl.algo.advantages import compute_gae
from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.algo.grpo import GRPO, GRPOCfg
from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.models.policy import Policy
from embodichain.errors import ConfigError, UnknownNameError, nearest

__all__ = [
    "GRPO",
    "PPO",
    "BaseAlgorithm",
    "GRPOCfg",
    "PPOCfg",
    "build_algo",
    "compute_gae",
    "get_algo_class",
    "get_registered_algo_names",
    "register_algo",
]

_ALGORITHMS: dict[str, type[BaseAlgorithm]] = {"ppo": PPO, "grpo": GRPO}


def register_algo(name: str, algo_cls: type[BaseAlgorithm]) -> type[BaseAlgorithm]:
    """Make an algorithm class available to configs; its ``cfg_type`` says which settings it has."""
    if not issubclass(algo_cls, BaseAlgorithm):
        raise TypeError(f"{algo_cls.__name__} must derive from BaseAlgorithm")
    if _ALGORITHMS.get(name, algo_cls) is not algo_cls:
        raise ConfigError(f"the algorithm name {name!r} is taken by {_ALGORITHMS[name].__name__}", "register_algo")
    _ALGORITHMS[name] = algo_cls
    return algo_cls


def get_registered_algo_names() -> list[str]:
    """Return the names that a config may use, sorted."""
    return sorted(_ALGORITHMS)


def get_algo_class(name: str) -> type[BaseAlgorithm]:
    """Return the class registered under a name."""
    if name not in _ALGORITHMS:
        raise UnknownNameError(f"unknown algorithm {name!r}.{nearest(name, _ALGORITHMS)}")
    return _ALGORITHMS[name]


def build_algo(
    name: str, cfg_kwargs: Mapping[str, Any], policy: Policy, device: torch.device | str | None = None
) -> BaseAlgorithm:
    """Build an algorithm by name from its settings; ``device`` stands in for a setting that is not there."""
    algo_cls = get_algo_class(name)
    settings = dict(cfg_kwargs)
    if device is not None:
        settings.setdefault("device", str(device))
    return algo_cls(algo_cls.cfg_type.from_dict(settings, source="algorithm"), policy)
