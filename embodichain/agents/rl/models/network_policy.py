"""What ``ActorCritic`` and ``ActorOnly`` share: encoder, memory, actor network and action head."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from embodichain.agents.rl.models.distributions import ActionHead, DistributionCfg, build_head
from embodichain.agents.rl.models.image_encoder import ImageEncoderCfg
from embodichain.agents.rl.models.memory import GRUMemory, MemoryCfg
from embodichain.agents.rl.models.mlp import MLP
from embodichain.agents.rl.models.observation import ObservationEncoder, ObservationSpace
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.observations import Observation
from embodichain.config import Config, configclass


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
