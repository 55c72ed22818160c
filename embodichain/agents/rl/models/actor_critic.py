"""Actor and critic networks with an action distribution: the policy of PPO."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import gymnasium as gym
import torch
from torch import Tensor, nn

from embodichain.agents.rl.models.distributions import ActionHead, DistributionCfg, build_head
from embodichain.agents.rl.models.mlp import MLP, ImageEncoderCfg, build_mlp_from_cfg
from embodichain.agents.rl.models.observation import ObservationEncoder, ObservationSpace, RunningNormalizer
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.recurrent import GRUMemory, MemoryCfg
from embodichain.agents.rl.utils.observations import Observation
from embodichain.config import Config, configclass
from embodichain.errors import ConfigError

# MERGED critic: A critic that learns in units of the returns' own spread.


class NormalizedCritic(nn.Module):
    """A network whose output is shifted and scaled by the running mean and standard deviation of returns.

    ``value = mean + std * network(features)``. Whatever the rewards' scale is, the network learns numbers of size one.
    When the statistics change, its last layer is changed along, so that no value does.
    """

    def __init__(self, network: MLP) -> None:
        super().__init__()
        last = network[-1]
        if not isinstance(last, nn.Linear) or last.out_features != 1:
            raise ConfigError("normalize_value needs a critic that ends in one linear output", "policy")
        self.network = network
        self.returns = RunningNormalizer(1)

    def forward(self, features: Tensor) -> Tensor:
        """Return values ``[..., 1]`` in the units of rewards."""
        return torch.addcdiv(self.returns.shift, self.network(features).float(), self.returns.scale)

    @property
    def scale(self) -> Tensor:
        """The returns' standard deviation ``[]``; 1 before any were seen."""
        return self.returns.scale.reciprocal().squeeze()

    @torch.no_grad()
    def update(self, returns: Tensor) -> None:
        """Take in the returns of a rollout; values stay as they are, except before the first ones were seen."""
        is_first = self.returns.count == 0
        shift, scale = self.returns.shift.clone(), self.returns.scale.clone()
        self.returns.update(returns.reshape(-1, 1))
        last = self.network[-1]
        if is_first or not isinstance(last, nn.Linear):
            return
        # mean' + std' (w' x + b') = mean + std (w x + b), with std = 1 / scale
        ratio = self.returns.scale / scale
        last.weight.mul_(ratio)
        last.bias.mul_(ratio).add_((shift - self.returns.shift) * self.returns.scale)


# MERGED network_policy: What ``ActorCritic`` and ``ActorOnly`` share: encoder, memory, actor network and action head.


@configclass
class PolicyCfg(Config):
    """A policy block of a training config, without ``name`` and ``action_dim``."""

    actor: dict[str, Any] = {"type": "mlp"}
    """The actor network: ``{"type": "mlp", "network_cfg": {"hidden_sizes": [256, 256], "activation": "relu"}}``."""
    distribution: DistributionCfg = DistributionCfg()
    """How continuous actions are distributed."""
    normalize_obs: bool = False
    """Whether vector observations are normalised by their running mean and variance."""
    critic_obs: tuple[str, ...] = ()
    """Keys (``object/pos``) or groups of keys (``object``) that only the critic sees."""
    image_encoder: ImageEncoderCfg = ImageEncoderCfg()
    """How pictures, the keys below ``image``, become features."""
    memory: MemoryCfg | None = None
    """A recurrent layer for tasks in which the present observation does not tell everything."""

    def encoder(self, obs_space: ObservationSpace) -> ObservationEncoder:
        """Build the observation encoder."""
        return ObservationEncoder(obs_space, self.normalize_obs, self.critic_obs, self.image_encoder)

    def features(self, encoder: ObservationEncoder) -> int:
        """Return the width of what the actor network sees."""
        return encoder.public_dim if self.memory is None else self.memory.hidden_size


class NetworkPolicy(Policy):
    """Observation -> encoder -> (memory) -> actor network -> action head; subclasses say what the value is."""

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
        super().__init__()
        self.encoder = encoder if encoder is not None else ObservationEncoder(obs_space)
        self.memory = memory
        self.is_recurrent = memory is not None
        self.actor = actor
        self.head = head if head is not None else build_head(action_space)
        self.device = torch.device(device)

    @abstractmethod
    def value_of(self, features: Tensor, privileged: Tensor | None) -> Tensor:
        """Return the value ``[batch]`` from features and what only the critic sees."""

    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Sample an action at an episode's start (anywhere, without memory): ``(action, log_prob, value)``."""
        return self.act(obs, None, deterministic)[:3]

    def get_value(self, obs: Observation) -> Tensor:
        """Return the value estimate ``[batch]`` at an episode's start (anywhere, without memory)."""
        return self.state_value(obs)

    def evaluate_actions(self, obs: Observation, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(log_prob, entropy, value)``, each ``[batch]``, at an episode's start (anywhere, without memory)."""
        features, privileged, _ = self._perceive(obs, None)
        return (*self.head.evaluate(self.actor(features), actions), self.value_of(features, privileged))

    @property
    def values_apart(self) -> bool:  # type: ignore[override]
        """Whether actor and critic share neither memory nor an encoder of pictures, so that each can run alone.

        A subclass with an ``act`` of its own is asked for values by that, unless it says otherwise.
        """
        return self.memory is None and not self.encoder.images and type(self).act is NetworkPolicy.act

    def initial_state(self, batch_size: int) -> Tensor | None:
        """Return the state of memory ``[batch, num_layers, hidden_size]`` at an episode's start."""
        return None if self.memory is None else self.memory.initial_state(batch_size)

    def act(
        self, obs: Observation, state: Tensor | None = None, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return ``(action, log_prob, value, state after this observation)``."""
        features, privileged, state = self._perceive(obs, state)
        action, log_prob = self.head.sample(self.actor(features), deterministic, self.generator)
        return action, log_prob, self.value_of(features, privileged), state

    def choose(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Return ``(action, log_prob)`` at an episode's start (anywhere, without memory)."""
        return self.head.sample(self.actor(self._perceive(obs, None)[0]), False, self.generator)

    def state_value(self, obs: Observation, state: Tensor | None = None) -> Tensor:
        """Return the value ``[batch]`` of an observation seen in a state of memory."""
        features, privileged, _ = self._perceive(obs, state)
        return self.value_of(features, privileged)

    def evaluate_sequences(
        self, obs: Observation, actions: Tensor, state: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(log_prob, entropy, value)``, each ``[num_steps, batch]``, running the memory over the sequences."""
        public, privileged = self.encoder(obs)
        features = public if self.memory is None else self.memory.sequence(public, state, start)
        return (*self.head.evaluate(self.actor(features), actions), self.value_of(features, privileged))

    def update_normalizer(self, obs: Observation) -> None:
        """Let the running statistics take in the observations of a rollout."""
        self.encoder.update_normalizer(obs)

    def _perceive(self, obs: Observation, state: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        public, privileged = self.encoder(obs)
        if self.memory is None:
            return public, privileged, None
        if state is None:
            state = self.memory.initial_state(public.shape[0])
        features, state = self.memory.step(public, state)
        return features, privileged, state


def build_parts(cfg: PolicyCfg, obs_space: ObservationSpace, action_space: Any) -> dict[str, Any]:
    """Build encoder, memory and head as the constructors of policies take them."""
    encoder = cfg.encoder(obs_space)
    memory = None if cfg.memory is None else GRUMemory(encoder.public_dim, cfg.memory)
    return {"encoder": encoder, "memory": memory, "head": build_head(action_space, cfg.distribution)}


def init_last_small(network: MLP, last: float) -> MLP:
    """Initialise orthogonally: gain sqrt(2) for hidden layers, ``last`` for the output."""
    count = sum(isinstance(layer, nn.Linear) for layer in network)
    network.init_orthogonal([2.0**0.5] * (count - 1) + [last])
    return network


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


# MERGED actor_only: An actor without a critic: the policy of algorithms that need no value function, such as GRPO.


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
