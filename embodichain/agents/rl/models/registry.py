"""The registry of policies, and functions that check and build a policy from its config block."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from embodichain.agents.rl.models.distributions import action_dimension
from embodichain.agents.rl.models.mlp import NetworkBlock, NetworkCfg, NetworkSettings, free_memory
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils import Registry
from embodichain.config.classes import Config, Count, configclass
from embodichain.errors import ConfigError, fits_memory, nearest

POLICIES = Registry[Policy](
    "policy",
    Policy,
    actor_critic="embodichain.agents.rl.models.actor_critic:ActorCritic",
    actor_only="embodichain.agents.rl.models.actor_critic:ActorOnly",
    gaussian="embodichain.agents.rl.models.chunk_policy:GaussianPolicy",
    flow="embodichain.agents.rl.models.chunk_policy:FlowPolicy",
    tokens="embodichain.agents.rl.models.chunk_policy:TokenPolicy",
    vla="embodichain.agents.rl.models.vla_policy:VLAPolicy",
)
register_policy, get_policy_class, get_registered_policy_names = POLICIES.register, POLICIES.get, POLICIES.names


def build_policy(
    policy_block: Mapping[str, Any],
    obs_space: Any,
    action_space: Any,
    device: torch.device | str,
    actor: nn.Module | None = None,
    critic: nn.Module | None = None,
) -> Policy:
    """Build a policy from its block ``{"name": "actor_critic", "action_dim": 6, "actor": {...}, ...}`` of a config.

    The settings may also be nested under ``"cfg"``. ``action_dim`` is optional and checked against the action space.
    ``actor`` and ``critic`` replace the networks of the block.
    """
    policy_cls, settings, action_dim = _read_block(policy_block)
    is_chunked = isinstance(action_space, gym.spaces.Box) and len(action_space.shape) == 2
    actual = int(action_space.shape[-1]) if is_chunked else action_dimension(action_space)
    if action_dim not in (None, actual):
        problem = f"action_dim is {action_dim!r}, but the environment's action space {action_space} has {actual}"
        raise ConfigError(f"{problem}; correct the number or leave it out", "policy")
    if actor is None and critic is None:
        with networks_fit():
            return policy_cls.build(settings, obs_space, action_space, torch.device(device))
    networks = {"actor": actor, "critic": critic}
    settings = {key: value for key, value in settings.items() if key not in networks}
    settings |= {key: module for key, module in networks.items() if module is not None}
    return policy_cls(obs_space, action_space, torch.device(device), **settings)  # type: ignore[call-arg]


def _read_block(policy_block: Mapping[str, Any]) -> tuple[type[Policy], dict[str, Any], Any]:
    """Return the class of a policy block, its settings and its ``action_dim``."""
    block = dict(policy_block)
    name, action_dim, nested = block.pop("name", None), block.pop("action_dim", None), block.pop("cfg", {})
    if not isinstance(name, str):
        raise ConfigError(f"name: expected the name of a policy, got {name!r}", "policy")
    if not isinstance(nested, Mapping):
        raise ConfigError(f"cfg: expected a mapping, got {nested!r:.60} ({type(nested).__name__})", "policy")
    return get_policy_class(name), {**nested, **block}, action_dim


def check_policy(policy_block: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for all problems of a policy block that can be found without an environment."""
    policy_cls, settings, _ = _read_block(policy_block)
    cfg_type = policy_cls.settings_type()
    if cfg_type is not None:
        cfg_type.from_dict(settings, source="policy")
    elif (taken := arguments_of(policy_cls)) is not None:
        others = [name for name in settings if name not in taken]
        if others:
            problems = [f"{name}: {policy_cls.__name__} has no such argument.{nearest(name, taken)}" for name in others]
            raise ConfigError(problems, "policy")


def arguments_of(policy_cls: type[Policy]) -> list[str] | None:
    """Return the settings that a class without a ``cfg_type`` takes as keyword arguments; ``None`` if any may be."""
    own_build = next(base for base in policy_cls.__mro__ if "build" in vars(base)) is not Policy
    parameters = list(inspect.signature(policy_cls).parameters.values())
    if own_build or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    spaces_and_device = 3
    return [
        parameter.name for i, parameter in enumerate(parameters) if i >= spaces_and_device and parameter.kind in named
    ]


@configclass
class PolicyBlock(Config):
    """Settings that every policy block has, besides those of its class."""

    name: str = "actor_critic"
    """Registered name: actor_critic, actor_only, gaussian, flow, tokens, vla, or one that your own module registers."""
    action_dim: Count | None = None
    """Dimension of actions; optional, checked against the environment's."""


def policy_schemas(policy_block: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[type[Config], ...]]:
    """Return, by path, the config classes of a policy block and of the blocks of its networks."""
    policy_cls, settings, _ = _read_block(policy_block)
    cfg_type = policy_cls.settings_type()
    if cfg_type is None:
        return {}
    prefix = ("cfg",) if "cfg" in policy_block else ()
    schemas: dict[tuple[str, ...], tuple[type[Config], ...]] = {
        (): (PolicyBlock,) if prefix else (PolicyBlock, cfg_type)
    }
    schemas |= {prefix: (cfg_type,)} if prefix else {}
    for name in ("actor", "critic"):
        block = settings.get(name, {})
        if (
            issubclass(cfg_type, NetworkSettings)
            and name in cfg_type.__dataclass_fields__
            and isinstance(block, Mapping)
        ):
            is_direct = "network_cfg" not in block or block.keys() & NetworkCfg.__dataclass_fields__.keys()
            schemas[(*prefix, name)] = (NetworkBlock, NetworkCfg) if is_direct else (NetworkBlock,)
    return schemas | {(*prefix, *path): (kind,) for path, kind in policy_cls.settings_below(settings).items()}


@contextmanager
def networks_fit() -> Iterator[None]:
    """Raise ``ConfigError`` if networks built inside the block exceed the free memory, before it is used."""
    room, taken = free_memory(), 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal taken
        taken += 0 if parameter is None or parameter.is_meta else parameter.nbytes
        if taken > room:
            raise MemoryError

    registration = register_module_parameter_registration_hook(count)
    try:
        with fits_memory("hidden_sizes and the like", "a network of these sizes", "policy"):
            yield
    finally:
        registration.remove()
