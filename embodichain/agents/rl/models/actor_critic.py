"""Actor and critic networks with an action distribution: the policy of PPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import gymnasium as gym
import torch
from torch import Tensor, nn

from embodichain.agents.rl.models.critic import NormalizedCritic
from embodichain.agents.rl.models.distributions import ActionHead
from embodichain.agents.rl.models.memory import GRUMemory
from embodichain.agents.rl.models.mlp import build_mlp_from_cfg
from embodichain.agents.rl.models.network_policy import NetworkPolicy, PolicyCfg, build_parts, init_last_small
from embodichain.agents.rl.models.observation import ObservationEncoder, ObservationSpace
from embodichain.config import configclass


@configclass
class ActorCriticCfg(PolicyCfg):
    """The block of the policy ``actor_critic``."""

    critic: dict[str, Any] = {"type": "mlp"}
    """The critic network, in the same shape as the actor's."""
    normalize_value: bool = False
    """Whether the critic learns returns shifted and scaled by their running mean and standard deviation."""


class ActorCritic(NetworkPolicy):
    """Actor-Critic: Gaussian with learnable log-std for a ``Box`` of actions, categorical for a ``Discrete``.

    ``actor`` maps features to the head's parameters (the means, by default), ``critic`` maps them, with the privileged
    observations appended, to one value. ``build_policy`` makes both from a config.
    """

    def __init__(
        self,
        obs_space: ObservationSpace,
        action_space: gym.Space[Any] | int,
        device: torch.device | str,
        actor: nn.Module,
        critic: nn.Module,
        *,
        encoder: ObservationEncoder | None = None,
        memory: GRUMemory | None = None,
        head: ActionHead | None = None,
    ) -> None:
        super().__init__(obs_space, action_space, device, actor, encoder=encoder, memory=memory, head=head)
        self.critic = critic
        self.to(self.device)

    def value_of(self, features: Tensor, privileged: Tensor | None) -> Tensor:
        """Return the critic's value ``[batch]``."""
        seen = features if privileged is None else torch.cat([features, privileged], dim=-1)
        return self.critic(seen).squeeze(-1).float()

    def update_value_normalizer(self, returns: Tensor) -> None:
        """Let a normalised critic take in the returns of a rollout."""
        if isinstance(self.critic, NormalizedCritic):
            self.critic.update(returns)

    @property
    def value_scale(self) -> Tensor | float:
        """Unit in which errors of the value count."""
        return self.critic.scale if isinstance(self.critic, NormalizedCritic) else 1.0

    @classmethod
    def build(cls, cfg: Mapping[str, Any], obs_space: Any, action_space: Any, device: torch.device) -> Self:
        """Construct the policy from its config block; networks are initialised orthogonally."""
        checked = ActorCriticCfg.from_dict(cfg, source="policy")
        parts = build_parts(checked, obs_space, action_space)
        width = checked.features(parts["encoder"])
        actor = init_last_small(build_mlp_from_cfg(checked.actor, width, parts["head"].param_dim), 0.01)
        critic_width = width + parts["encoder"].privileged_dim
        network = init_last_small(build_mlp_from_cfg(checked.critic, critic_width, 1), 1.0)
        critic = NormalizedCritic(network) if checked.normalize_value else network
        return cls(obs_space, action_space, device, actor, critic, **parts)
