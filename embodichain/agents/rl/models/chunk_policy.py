"""Policies that choose chunks of actions: ``gaussian``, ``flow`` and ``tokens``.

The last two have a decision, as their log-probability cannot be computed from the action: the denoising chain, or the
tokens.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import gymnasium as gym
import torch
from pydantic import AfterValidator
from tensordict import TensorDictBase
from torch import Generator, Tensor, nn

from embodichain.agents.rl.models.actor_critic import CriticPolicy, NormalizedCritic, build_network
from embodichain.agents.rl.models.distributions import DistributionCfg, GaussianHead
from embodichain.agents.rl.models.flow import FlowCfg, FlowHead
from embodichain.agents.rl.models.mlp import ImageEncoderCfg, NetworkSettings, check_network
from embodichain.agents.rl.models.observation import FeatureEncoder, ObservationSpace
from embodichain.agents.rl.models.policy import Evaluation
from embodichain.agents.rl.models.tokens import TokenCfg, TokenHead, make_token_head
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.config.classes import Number, Size, configclass
from embodichain.errors import ConfigError, RolloutError


@configclass
class ChunkPolicyCfg(NetworkSettings):
    """Common settings of these policies, without ``name`` and ``action_dim``."""

    chunk_size: Size = 1
    """Actions per decision."""
    critic: Annotated[dict[str, Any], AfterValidator(check_network)] = {"type": "mlp"}
    """The critic network: ``{"type": "mlp", "network_cfg": {"hidden_sizes": [256, 256], "activation": "relu"}}``."""
    normalize_obs: bool = False
    """Whether vector observations are normalised by their running mean and variance."""
    normalize_value: bool = False
    """Whether the critic learns returns that are normalised by their running mean and standard deviation."""
    critic_obs: tuple[str, ...] = ()
    """Keys (``object/pos``) or groups of keys (``object``) that only the critic uses."""
    image_encoder: ImageEncoderCfg = ImageEncoderCfg()
    """Encoder of images, the keys below ``image``."""


@configclass
class GaussianPolicyCfg(ChunkPolicyCfg):
    """The block of the policy ``gaussian``."""

    init_log_std: Number = -1.5
    """Initial value of the learnable log-std of each action dimension."""
    actor: Annotated[dict[str, Any], AfterValidator(check_network)] = {"type": "mlp"}
    """The network of the chunk's mean, in the same format as the critic."""


@configclass
class FlowPolicyCfg(ChunkPolicyCfg):
    """The block of the policy ``flow``."""

    flow: FlowCfg = FlowCfg()
    """Settings of denoising."""
    actor: Annotated[dict[str, Any], AfterValidator(check_network)] = {"type": "mlp"}
    """The velocity network, in the same format as the critic."""


@configclass
class TokenPolicyCfg(ChunkPolicyCfg):
    """The block of the policy ``tokens``."""

    tokens: TokenCfg = TokenCfg()
    """Settings of tokens and their decoder."""


class ChunkPolicy(CriticPolicy):
    """Observation -> encoder -> head, and a critic on the encoder's features."""

    cfg_type: ClassVar[type[ChunkPolicyCfg]]
    """Class of the policy's block."""

    def __init__(
        self, obs_space: ObservationSpace, action_space: gym.Space[Any], device: torch.device | str, **settings: Any
    ) -> None:
        super().__init__()
        cfg = self.cfg_type.from_dict(settings, source="policy")
        if not isinstance(action_space, gym.spaces.Box):
            raise ConfigError(f"expected continuous actions, a Box, got {action_space}", "policy")
        self.chunk_size = cfg.chunk_size
        self.encoder = FeatureEncoder(obs_space, cfg.normalize_obs, cfg.critic_obs, cfg.image_encoder)
        self.head: Any = self.make_head(cfg, self.encoder.public_dim, int(action_space.shape[-1]))
        network = build_network(cfg.critic, self.encoder.public_dim + self.encoder.privileged_dim, 1, last_gain=1.0)
        self.critic = NormalizedCritic(network) if cfg.normalize_value else network
        self.device = torch.device(device)
        self.to(self.device)

    @abstractmethod
    def make_head(self, cfg: Any, width: int, action_dim: int) -> nn.Module:
        """Return the head for features ``[batch, width]``."""

    def get_value(self, obs: Observation) -> Tensor:
        return self._value(*self.encoder(obs))

    def imitation_loss(self, obs: Observation, actions: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.head.imitation_loss(self.encoder(obs)[0], actions, valid, self.generator)

    def update_normalizer(self, obs: Observation) -> None:
        self.encoder.update_normalizer(obs)

    @property
    def lacks_statistics(self) -> bool:
        return self.encoder.normalizer is not None and self.encoder.normalizer.is_empty

    def _value(self, features: Tensor, privileged: Tensor | None) -> Tensor:
        inputs = features if privileged is None else torch.cat([features, privileged], dim=-1)
        return self.critic(inputs).squeeze(-1).float()

    def _one(self, chunk: Tensor) -> Tensor:
        """Remove the chunk dimension if ``chunk_size`` is 1."""
        return chunk.squeeze(1) if self.chunk_size == 1 else chunk

    @classmethod
    def build(cls, cfg: Mapping[str, Any], obs_space: Any, action_space: Any, device: torch.device) -> Self:
        return cls(obs_space, action_space, device, **cfg)


class GaussianChunkHead(nn.Module):
    """A Gaussian over chunks ``[batch, chunk_size, action_dim]``, with a learnable log-std per action dimension."""

    def __init__(self, mean_net: nn.Module, chunk_size: int, action_dim: int, init_log_std: float) -> None:
        """``mean_net`` maps features to the mean ``[batch, chunk_size * action_dim]``."""
        super().__init__()
        self.mean_net, self.shape = mean_net, (chunk_size, action_dim)
        self.distribution = GaussianHead(action_dim, DistributionCfg(init_log_std=init_log_std))

    def mean(self, features: Tensor) -> Tensor:
        """Return the mean ``[batch, chunk_size, action_dim]``."""
        return self.mean_net(features).float().unflatten(-1, self.shape)

    def imitation_loss(
        self, features: Tensor, actions: Tensor, valid: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Return the mean squared error ``[batch]`` of the mean.

        ``actions`` are ``[batch, n, action_dim]``; ``n`` may be less than ``chunk_size``. ``valid`` ``[batch, n]``
        masks the actions that count.
        """
        error = (self.mean(features)[:, : actions.shape[1]] - actions).square().mean(-1)
        if valid is None:
            return error.mean(-1)
        return (error * valid).sum(-1) / valid.sum(-1).clamp(min=1)


class GaussianPolicy(ChunkPolicy):
    """Samples chunks of actions from a Gaussian; log-probabilities are ``[batch, chunk_size]``, one per action."""

    cfg_type = GaussianPolicyCfg
    factors = ()

    def make_head(self, cfg: GaussianPolicyCfg, width: int, action_dim: int) -> GaussianChunkHead:
        mean_net = build_network(cfg.actor, width, self.chunk_size * action_dim, last_gain=0.01)
        return GaussianChunkHead(mean_net, self.chunk_size, action_dim, cfg.init_log_std)

    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        features, privileged = self.encoder(obs)
        mean = self._one(self.head.mean(features))
        return *self.head.distribution.sample(mean, deterministic, self.generator), self._value(features, privileged)

    def evaluate_actions(self, obs: Observation, actions: Tensor, decision: TensorDictBase | None = None) -> Evaluation:
        features, privileged = self.encoder(obs)
        mean = self._one(self.head.mean(features))
        return *self.head.distribution.evaluate(mean, actions), self._value(features, privileged)


class DecisionPolicy(ChunkPolicy):
    """Base class of policies whose head has a decision: ``sample`` returns it, ``evaluate`` takes it."""

    has_decision = True

    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        return self.decide(obs, deterministic)[:3]

    def decide(
        self, obs: Observation, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, TensorDictBase | None]:
        features, privileged = self.encoder(obs)
        chunk, log_prob, decision = self.head.sample(features, deterministic, self.generator)
        return self._one(chunk), log_prob, self._value(features, privileged), decision

    def evaluate_actions(self, obs: Observation, actions: Tensor, decision: TensorDictBase | None = None) -> Evaluation:
        if decision is None:
            raise RolloutError(f"{type(self).__name__} values decisions: pass the one that came with the actions")
        features, privileged = self.encoder(obs)
        return (*self.head.evaluate(features, decision), self._value(features, privileged))


class FlowPolicy(DecisionPolicy):
    """Denoises chunks of actions; see ``flow.py``."""

    cfg_type = FlowPolicyCfg
    factors = ("denoising_step",)

    def make_head(self, cfg: FlowPolicyCfg, width: int, action_dim: int) -> FlowHead:
        inputs = FlowHead.velocity_inputs(width, self.chunk_size, action_dim)
        velocity = build_network(cfg.actor, inputs, self.chunk_size * action_dim, last_gain=0.01)
        return FlowHead(velocity, width, self.chunk_size, action_dim, cfg.flow)


class TokenPolicy(DecisionPolicy):
    """Decodes chunks of actions from tokens; see ``tokens.py``."""

    cfg_type = TokenPolicyCfg
    factors = ("token",)

    def make_head(self, cfg: TokenPolicyCfg, width: int, action_dim: int) -> TokenHead:
        return make_token_head(width, self.chunk_size, action_dim, cfg.tokens)
