"""Algorithms; ``ppo.py`` is the one to read first."""

from __future__ import annotations

from embodichain.agents.rl.algo.advantages import compute_gae
from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.algo.grpo import GRPO, GRPOCfg
from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.algo.registry import build_algo, get_algo_class, get_registered_algo_names, register_algo

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
