"""Policies and the networks they are made of; ``policy.py`` says what a policy is."""

from __future__ import annotations

from embodichain.agents.rl.models.actor_critic import ActorCritic, ActorCriticCfg, ActorOnly, PolicyCfg
from embodichain.agents.rl.models.distributions import DistributionCfg
from embodichain.agents.rl.models.mlp import MLP, ImageEncoderCfg, NetworkCfg, build_mlp_from_cfg
from embodichain.agents.rl.models.observation import RunningNormalizer
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.recurrent import MemoryCfg
from embodichain.agents.rl.models.registry import (
    build_policy,
    get_policy_class,
    get_registered_policy_names,
    register_policy,
)
from embodichain.agents.rl.models.vla import load_vla_model, register_vla_model
from embodichain.agents.rl.models.vla_policy import VLAPolicy

__all__ = [
    "MLP",
    "ActorCritic",
    "ActorCriticCfg",
    "ActorOnly",
    "DistributionCfg",
    "ImageEncoderCfg",
    "MemoryCfg",
    "NetworkCfg",
    "Policy",
    "PolicyCfg",
    "RunningNormalizer",
    "VLAPolicy",
    "build_mlp_from_cfg",
    "build_policy",
    "get_policy_class",
    "get_registered_policy_names",
    "load_vla_model",
    "register_policy",
    "register_vla_model",
]
