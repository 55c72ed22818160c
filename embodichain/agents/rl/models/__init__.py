"""Policies and their networks; ``policy.py`` has the base class, ``registry.py`` finds policies by name."""

from typing import TYPE_CHECKING

from embodichain import reach_submodules
from embodichain.agents.rl.models.actor_critic import ActorCritic, ActorCriticCfg, ActorOnly, PolicyCfg
from embodichain.agents.rl.models.distributions import DistributionCfg
from embodichain.agents.rl.models.mlp import MLP, ImageEncoderCfg, NetworkCfg, RecurrentCfg, build_mlp_from_cfg
from embodichain.agents.rl.models.observation import RunningNormalizer
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.registry import (
    build_policy,
    check_policy,
    get_policy_class,
    get_registered_policy_names,
    policy_schemas,
    register_policy,
)

if TYPE_CHECKING:
    from embodichain.agents.rl.models.chunk_policy import FlowPolicy, TokenPolicy
    from embodichain.agents.rl.models.vla import load_vla_model, register_vla_model
    from embodichain.agents.rl.models.vla_policy import VLAPolicy
else:
    __getattr__ = reach_submodules(
        __name__,
        chunk_policy=("FlowPolicy", "TokenPolicy"),
        vla=("load_vla_model", "register_vla_model"),
        vla_policy=("VLAPolicy",),
    )

__all__ = [
    "MLP",
    "ActorCritic",
    "ActorCriticCfg",
    "ActorOnly",
    "DistributionCfg",
    "FlowPolicy",
    "ImageEncoderCfg",
    "NetworkCfg",
    "Policy",
    "PolicyCfg",
    "RecurrentCfg",
    "RunningNormalizer",
    "TokenPolicy",
    "VLAPolicy",
    "build_mlp_from_cfg",
    "build_policy",
    "check_policy",
    "get_policy_class",
    "get_registered_policy_names",
    "load_vla_model",
    "policy_schemas",
    "register_policy",
    "register_vla_model",
]
