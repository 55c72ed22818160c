"""Algorithms, imported lazily; read ``ppo.py`` first."""

from typing import TYPE_CHECKING

from embodichain import reach_submodules
from embodichain.agents.rl.algo.base import (
    BaseAlgorithm,
    build_algo,
    get_algo_class,
    get_registered_algo_names,
    register_algo,
)

if TYPE_CHECKING:
    from embodichain.agents.rl.algo.advantages import compute_gae
    from embodichain.agents.rl.algo.distillation import Distillation, DistillationCfg
    from embodichain.agents.rl.algo.grpo import GRPO, GRPOCfg
    from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
else:
    __getattr__ = reach_submodules(
        __name__,
        advantages=("compute_gae",),
        distillation=("Distillation", "DistillationCfg"),
        grpo=("GRPO", "GRPOCfg"),
        ppo=("PPO", "PPOCfg"),
    )

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
