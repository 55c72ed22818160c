"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import gymnasium as gym
import torch
from torch import nn

from embodichain.agents.rl.models.actor_critic import ActorCritic, ActorOnly
from embodichain.agents.rl.models.distributions import action_dimension
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.vla_policy import VLAPolicy
from embodichain.errors import ConfigError, UnknownNameError, nearest

P = TypeVar("P", bound=type[Policy])

_POLICIES: dict[str, type[Policy]] = {"actor_critic": ActorCritic, "actor_only": ActorOnly, "vla": VLAPolicy}


def register_policy(name: str, policy_cls: P | None = None) -> P | Callable[[P], P]:
    """Make a policy class available to configs: ``register_policy("mine", Mine)`` or ``@register_policy("mine")``."""
    if policy_cls is None:
        return lambda cls: register_policy(name, cls)  # type: ignore[return-value]
    if not issubclass(policy_cls, Policy):
        raise TypeError(f"{policy_cls.__name__} must derive from Policy")
    if _POLICIES.get(name, policy_cls) is not policy_cls:
        raise ConfigError(f"the policy name {name!r} is taken by {_POLICIES[name].__name__}", "register_policy")
    _POLICIES[name] = policy_cls
    return policy_cls


def get_registered_policy_names() -> list[str]:
    """Return the names that a config may use, sorted."""
    return sorted(_POLICIES)


def get_policy_class(name: str) -> type[Policy]:
    """Return the class registered under a name."""
    if name not in _POLICIES:
        raise UnknownNameError(f"unknown policy {name!r}.{nearest(name, _POLICIES)}")
    return _POLICIES[name]


def build_policy(
    policy_block: Mapping[str, Any],
    obs_space: Any,
    action_space: Any,
    device: torch.device | str,
    actor: nn.Module | None = None,
    critic: nn.Module | None = None,
) -> Policy:
    """Build a policy from its block of a training config.

    The block is ``{"name": "actor_critic", "action_dim": 6, "actor": {...}, "critic": {...}, ...}``; the settings may
    also stand under ``"cfg"``. ``action_dim`` is optional and checked against the action space. ``actor`` and
    ``critic`` replace the networks that the block would describe.
    """
    block = dict(policy_block)
    name = block.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"name: expected the name of a policy, got {name!r}", "policy")
    policy_cls = get_policy_class(name)
    _check_action_dim(block.pop("action_dim", None), action_space)
    settings = {**block.pop("cfg", {}), **block}
    networks = {key: module for key, module in (("actor", actor), ("critic", critic)) if module is not None}
    if not networks:
        return policy_cls.build(settings, obs_space, action_space, torch.device(device))
    rest = {key: value for key, value in settings.items() if key not in ("actor", "critic")}
    return policy_cls(obs_space, action_space, torch.device(device), **rest, **networks)  # type: ignore[call-arg]


def _check_action_dim(given: object, action_space: Any) -> None:
    is_chunked = isinstance(action_space, gym.spaces.Box) and len(action_space.shape) == 2
    actual = int(action_space.shape[-1]) if is_chunked else action_dimension(action_space)
    if given is not None and given != actual:
        problem = f"action_dim is {given!r}, but the environment's action space {action_space} has {actual}"
        raise ConfigError(f"{problem}; correct the number or leave it out", "policy")
