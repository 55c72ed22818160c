"""An actor without a critic: the policy of algorithms that need no value function, such as GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import gymnasium as gym
import torch
from torch import Tensor, nn

from embodichain.agents.rl.models.distributions import ActionHead
from embodichain.agents.rl.models.memory import GRUMemory
from embodichain.agents.rl.models.mlp import build_mlp_from_cfg
from embodichain.agents.rl.models.network_policy import NetworkPolicy, PolicyCfg, build_parts, init_last_small
from embodichain.agents.rl.models.observation import ObservationEncoder, ObservationSpace


class ActorOnly(NetworkPolicy):
    """Same interface as ``ActorCritic``, but the value is always zero since no critic is used."""

    has_critic = False

    def __init__(
        self,
        obs_space: ObservationSpace,
        action_space: gym.Space[Any] | int,
        device: torch.device | str,
        actor: nn.Module,
        *,
        encoder: ObservationEncoder | None = None,
        memory: GRUMemory | None = None,
        head: ActionHead | None = None,
    ) -> None:
        super().__init__(obs_space, action_space, device, actor, encoder=encoder, memory=memory, head=head)
        self.to(self.device)

    def value_of(self, features: Tensor, privileged: Tensor | None) -> Tensor:
        """Return zeros ``[batch]``."""
        return torch.zeros(features.shape[:-1], device=features.device)

    @classmethod
    def build(cls, cfg: Mapping[str, Any], obs_space: Any, action_space: Any, device: torch.device) -> Self:
        """Construct the policy from its config block; the network is initialised orthogonally."""
        checked = PolicyCfg.from_dict(cfg, source="policy")
        parts = build_parts(checked, obs_space, action_space)
        width = checked.features(parts["encoder"])
        actor = init_last_small(build_mlp_from_cfg(checked.actor, width, parts["head"].param_dim), 0.01)
        return cls(obs_space, action_space, device, actor, **parts)
