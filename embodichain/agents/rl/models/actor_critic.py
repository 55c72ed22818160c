"""``ActorCritic``, the default policy of PPO, and ``ActorOnly`` for algorithms without a critic."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Self

import gymnasium as gym
import torch
from pydantic import AfterValidator
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.distributions import (
    ActionHead,
    DistributionCfg,
    GaussianHead,
    action_dimension,
    build_head,
    normal_like,
)
from embodichain.agents.rl.models.mlp import (
    MLP,
    ImageEncoderCfg,
    NetworkSettings,
    RecurrentCfg,
    RecurrentLayer,
    build_mlp_from_cfg,
    check_network,
)
from embodichain.agents.rl.models.observation import FeatureEncoder, ObservationSpace, RunningNormalizer
from embodichain.agents.rl.models.policy import Evaluation, Policy
from embodichain.agents.rl.models.text import TextEncoderCfg, add_gates
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.config.classes import Config, NotNegative, configclass
from embodichain.errors import ConfigError
from embodichain.utils.torch_runtime import SideBySide, side_by_side


class NormalizedCritic(nn.Module):
    """A critic that learns returns normalised by their running statistics: ``value = mean + std * network(features)``.

    When the statistics change, the last layer is rescaled so that values stay the same (PopArt).
    """

    def __init__(self, network: MLP) -> None:
        super().__init__()
        last = network[-1]
        if not isinstance(last, nn.Linear) or last.out_features != 1:
            raise ConfigError("normalize_value needs a critic that ends in one linear output", "policy")
        self.network = network
        self.returns = RunningNormalizer(1)

    def forward(self, features: Tensor) -> Tensor:
        return torch.addcdiv(self.returns.shift, self.network(features).float(), self.returns.scale)

    @property
    def scale(self) -> Tensor:
        """Standard deviation ``[]`` of the returns; 1 before the first update."""
        return self.returns.scale.reciprocal().squeeze()

    @torch.no_grad()
    def update(self, returns: Tensor) -> None:
        """Update the statistics with the returns of a rollout; values stay the same, except in the first update."""
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


class CriticPolicy(Policy):
    """A policy with a separate ``critic`` network, which may learn normalised returns."""

    critic: nn.Module
    critic_parts = ("critic",)

    def update_value_normalizer(self, returns: Tensor) -> None:
        if isinstance(self.critic, NormalizedCritic):
            self.critic.update(returns)

    @property
    def value_scale(self) -> Tensor | float:
        return self.critic.scale if isinstance(self.critic, NormalizedCritic) else 1.0


@configclass
class PolicyCfg(NetworkSettings):
    """A policy block of a training config, without ``name`` and ``action_dim``."""

    actor: Annotated[dict[str, Any], AfterValidator(check_network)] = {"type": "mlp"}
    """The actor network: ``{"type": "mlp", "network_cfg": {"hidden_sizes": [256, 256], "activation": "relu"}}``."""
    distribution: DistributionCfg = DistributionCfg()
    """How continuous actions are distributed."""
    normalize_obs: bool = False
    """Whether vector observations are normalised by their running mean and variance."""
    actor_obs: tuple[str, ...] | None = None
    """Keys (``robot/qpos``) or groups of keys (``image``) that actor and critic use; default: all but ``critic_obs``.
    All other keys are ignored."""
    critic_obs: tuple[str, ...] = ()
    """Keys (``object/pos``) or groups of keys (``object``) that only the critic uses."""
    image_encoder: ImageEncoderCfg = ImageEncoderCfg()
    """Encoder of images, the keys below ``image``."""
    text_encoder: TextEncoderCfg | None = None
    """Encoder of the key ``instruction``; without it, the bytes of the text are numbers like all others."""
    memory: RecurrentCfg | None = None
    """A recurrent layer, for partially observable tasks."""


class NetworkPolicy(Policy):
    """Observation -> encoder -> (recurrent layer) -> actor network -> action head; subclasses define the value.

    If a recurrent policy gets no state, it treats the observation as the first of its episode.
    """

    critic_images: bool = True
    """Whether values depend on images."""

    def __init__(
        self,
        obs_space: ObservationSpace,
        action_space: gym.Space[Any] | int,
        device: torch.device | str,
        actor: nn.Module,
        *,
        encoder: FeatureEncoder | None = None,
        memory: RecurrentLayer | None = None,
        head: ActionHead | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder or FeatureEncoder(obs_space)
        self.memory = memory
        self.is_recurrent = memory is not None
        self.actor = actor
        self.head = head or build_head(action_space)
        self.device = torch.device(device)
        self.to(self.device)

    @abstractmethod
    def value_of(self, features: Tensor, privileged: Tensor | None) -> Tensor:
        """Return the value ``[batch]`` of features and privileged observations."""

    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        return self.act(obs, None, deterministic)[:3]

    def get_value(self, obs: Observation) -> Tensor:
        return self.state_value(obs)

    def evaluate_actions(self, obs: Observation, actions: Tensor, decision: TensorDictBase | None = None) -> Evaluation:
        return self._evaluate(*self._encode(obs, None)[:2], actions)

    @property
    def values_apart(self) -> bool:  # type: ignore[override]
        # Actor and critic share neither a recurrent layer nor an image encoder, and no subclass overrides act().
        shares_images = self.critic_images and bool(self.encoder.images)
        return self.memory is None and not shares_images and type(self).act is NetworkPolicy.act

    def initial_state(self, batch_size: int) -> Tensor | None:
        return None if self.memory is None else self.memory.initial_state(batch_size)

    def act(
        self, obs: Observation, state: Tensor | None = None, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        features, privileged, state = self._encode(obs, state)
        action, log_prob = self.head.sample(self.actor(features), deterministic, self.generator)
        return action, log_prob, self.value_of(features, privileged), state

    @property
    def noise_steps(self) -> int | None:  # type: ignore[override]
        head = self.head
        if not isinstance(head, GaussianHead) or head.cfg.std != "gsde":
            return None
        return max(0, head.cfg.sde_sample_freq)

    def draw_noise(self, num_envs: int) -> Tensor | None:
        if self.noise_steps is None or not isinstance(self.head, GaussianHead):
            return None
        return normal_like(self.head.log_std.expand(num_envs, -1, -1), self.generator)

    def hold_noise(self, noise: Tensor | None) -> None:
        if isinstance(self.head, GaussianHead):
            self.head.held = noise

    def choose(self, obs: Observation) -> tuple[Tensor, Tensor]:
        return self.head.sample(self.actor(self._encode(obs, None)[0]), False, self.generator)

    def state_value(self, obs: Observation, state: Tensor | None = None) -> Tensor:
        if not self.critic_images:
            return self.value_of(*self.encoder(obs, images=False))
        features, privileged, _ = self._encode(obs, state)
        return self.value_of(features, privileged)

    def seen_by_critic(self, obs: Observation) -> Observation:
        if self.critic_images or isinstance(obs, Tensor):
            return obs
        return obs.exclude(*(entry.path for entry in self.encoder.images))

    def evaluate_sequences(self, obs: Observation, actions: Tensor, state: Tensor, start: Tensor) -> Evaluation:
        public, privileged = self.encoder(obs)
        features = public if self.memory is None else self.memory.sequence(public, state, start)
        return self._evaluate(features, privileged, actions)

    def action_params(self, batch: TensorDictBase) -> Tensor:
        """Return the parameters ``[..., param_dim]`` of the action distribution for a minibatch.

        Without ``hidden``, a recurrent policy treats observations as the first of their episodes.
        """
        if self.memory is None or "hidden" not in batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            features, privileged, _ = self._encode(batch["observation"], None)
        else:
            public, privileged = self.encoder(batch["observation"])
            features = self.memory.sequence(public, batch["hidden"][0], batch["start"])
        self._compute_auxiliary_loss(features, privileged)
        return self.actor(features)

    def imitation_loss(self, obs: Observation, actions: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the imitation loss ``[batch]``: ``sum_d |mean - action|``, or ``-log pi(action)`` if discrete.

        The standard deviation of a Gaussian is not trained. A recurrent policy takes sequences of observations and
        actions ``[batch, n]``, and starts each with the initial state.
        """
        if self.memory is None:
            features, privileged, _ = self._encode(obs, None)
            actions = actions[:, 0]
        else:
            public, privileged = self.encoder(obs)  # [batch, n, ...]
            start = torch.zeros(public.shape[1::-1], dtype=torch.bool, device=public.device)
            start[0] = True
            state = self.memory.initial_state(public.shape[0])
            features = self.memory.sequence(public.transpose(0, 1), state, start).transpose(0, 1)
        self._compute_auxiliary_loss(features, privileged)
        params = self.actor(features)
        if isinstance(self.head, GaussianHead):
            error = (self.head.sample(params, deterministic=True)[0] - actions).abs().sum(-1)
        else:
            error = -self.head.evaluate(params, actions)[0]
        if self.memory is None:
            return error if valid is None else error * valid[:, 0]
        counts = torch.ones_like(error) if valid is None else valid.to(error)
        return (error * counts).sum(-1) / counts.sum(-1).clamp(min=1.0)

    def _compute_auxiliary_loss(self, features: Tensor, privileged: Tensor | None) -> None:
        """Compute the loss that ``take_auxiliary_loss`` returns, if there is one."""

    def update_normalizer(self, obs: Observation) -> None:
        self.encoder.update_normalizer(obs)

    @property
    def lacks_statistics(self) -> bool:
        return self.encoder.normalizer is not None and self.encoder.normalizer.is_empty

    def _evaluate(self, features: Tensor, privileged: Tensor | None, actions: Tensor) -> Evaluation:
        self._compute_auxiliary_loss(features, privileged)
        params, value = self._actor_and_value(features, privileged)
        return (*self.head.evaluate(params, actions), value)

    def _actor_and_value(self, features: Tensor, privileged: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the parameters of the action distribution, and the value ``[batch]``."""
        return self.actor(features), self.value_of(features, privileged)

    def _encode(self, obs: Observation, state: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        public, privileged = self.encoder(obs)
        if self.memory is None:
            return public, privileged, None
        if state is None:
            state = self.memory.initial_state(public.shape[0])
        features, state = self.memory.step(public, state)
        return features, privileged, state


class LatentActor(nn.Module):
    """The actor for gSDE: returns its output, concatenated with the input of its last layer, which scales the noise.

    That input is detached, so that the noise does not train the features.
    """

    def __init__(self, network: MLP) -> None:
        super().__init__()
        self.network = network
        self._last, last = [(i, layer) for i, layer in enumerate(network) if isinstance(layer, nn.Linear)][-1]
        self.latent_dim = last.in_features

    def forward(self, features: Tensor) -> Tensor:
        latent = output = features
        for i, layer in enumerate(self.network):
            latent = output if i == self._last else latent
            output = layer(output)
        return torch.cat([output, latent.detach()], dim=-1)


def _build_parts(cfg: PolicyCfg, obs_space: ObservationSpace, action_space: Any) -> tuple[int, dict[str, Any]]:
    """Return the width of features, and keyword arguments of the constructor: actor, encoder, memory and head."""
    settings = (cfg.critic_obs, cfg.image_encoder, cfg.actor_obs, cfg.text_encoder)
    encoder = FeatureEncoder(obs_space, cfg.normalize_obs, *settings)
    memory = None if cfg.memory is None else RecurrentLayer(encoder.public_dim, cfg.memory)
    width = encoder.public_dim if cfg.memory is None else cfg.memory.hidden_size
    text = _gating_columns(cfg, encoder)
    is_continuous = isinstance(action_space, int | gym.spaces.Box)
    actor: MLP | LatentActor
    if cfg.distribution.std == "gsde" and is_continuous:
        actor = LatentActor(build_network(cfg.actor, width, action_dimension(action_space), 0.01, text))
        head = build_head(action_space, cfg.distribution, actor.latent_dim)
    else:
        head = build_head(action_space, cfg.distribution)
        actor = build_network(cfg.actor, width, head.param_dim, 0.01, text)
    return width, {"actor": actor, "encoder": encoder, "memory": memory, "head": head}


def _gating_columns(cfg: PolicyCfg, encoder: FeatureEncoder) -> slice | None:
    """Return the inputs of the networks that gate their first layer, if any."""
    if cfg.text_encoder is None or not cfg.text_encoder.gates:
        return None
    if cfg.memory is not None:
        problem = "gates: expected false, as a recurrent layer joins the text and all else before the networks"
        raise ConfigError(problem, "policy.text_encoder")
    return encoder.text_columns


def build_network(cfg: Mapping[str, Any], width: int, out: int, last_gain: float, gated_by: slice | None = None) -> MLP:
    """Return a network with orthogonal weights: gain sqrt(2) for hidden layers, ``last_gain`` for the output.

    The inputs ``gated_by`` scale the first hidden layer.
    """
    network = build_mlp_from_cfg(cfg, width, out)
    count = sum(isinstance(layer, nn.Linear) for layer in network)
    network.init_orthogonal([2.0**0.5] * (count - 1) + [last_gain])
    if gated_by is not None:
        add_gates(network, gated_by)
    return network


@configclass
class ActorCriticCfg(PolicyCfg):
    """The block of the policy ``actor_critic``."""

    critic: Annotated[dict[str, Any], AfterValidator(check_network)] = {"type": "mlp"}
    """The critic network, in the same format as the actor."""
    normalize_value: bool = False
    """Whether the critic learns returns that are normalised by their running mean and standard deviation."""
    critic_images: bool = True
    """Whether the critic uses images; without them it uses only vectors, including ``critic_obs``, and is much
    faster."""
    auxiliary_coef: NotNegative = 0.0
    """Weight of an auxiliary loss that trains the actor's features to predict ``critic_obs``, which speeds up learning
    from images; the actor itself does not need ``critic_obs``."""


class ActorCritic(NetworkPolicy, CriticPolicy):
    """Actor-critic policy: Gaussian actions for a ``Box``, categorical actions for discrete spaces.

    ``actor`` maps features to the parameters of the action head, by default the means. ``critic`` maps features, with
    the privileged observations appended, to one value. ``build_policy`` builds both from a config.
    """

    cfg_type: ClassVar[type[Config] | None] = ActorCriticCfg

    def __init__(
        self,
        obs_space: ObservationSpace,
        action_space: gym.Space[Any] | int,
        device: torch.device | str,
        actor: nn.Module,
        critic: nn.Module,
        auxiliary: nn.Module | None = None,
        auxiliary_coef: float = 1.0,
        critic_images: bool = True,
        **parts: Any,
    ) -> None:
        """``auxiliary`` predicts the privileged observations from features; ``auxiliary_coef`` weights its loss."""
        super().__init__(obs_space, action_space, device, actor, **parts)
        self.critic_images = critic_images
        self.critic = critic.to(self.device)
        self.auxiliary = None if auxiliary is None else auxiliary.to(self.device)
        self._auxiliary_coef = auxiliary_coef
        self._auxiliary_loss: Tensor | None = None
        self._side_by_side: SideBySide | None = None

    def value_of(self, features: Tensor, privileged: Tensor | None) -> Tensor:
        if not self.critic_images:  # image features come after the vectors
            features = features[..., : self.encoder.vector_dim - self.encoder.privileged_dim]
        inputs = features if privileged is None else torch.cat([features, privileged], dim=-1)
        return self.critic(inputs).squeeze(-1).float()

    @contextmanager
    def in_gradient_steps(self, batch_size: int) -> Iterator[None]:
        is_known = isinstance(self.actor, MLP) and isinstance(self.critic, MLP | NormalizedCritic)
        if self.device.type != "cpu" or not is_known or self.memory is not None:  # a memory is trained by both
            yield
            return
        with side_by_side(self, batch_size) as self._side_by_side:
            try:
                yield
            finally:
                self._side_by_side = None

    def _actor_and_value(self, features: Tensor, privileged: Tensor | None) -> tuple[Tensor, Tensor]:
        both = self._side_by_side
        is_shared = features.requires_grad or (privileged is not None and privileged.requires_grad)
        if both is None or is_shared or not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super()._actor_and_value(features, privileged)
        return both(lambda: self.actor(features), lambda: self.value_of(features, privileged))

    def _compute_auxiliary_loss(self, features: Tensor, privileged: Tensor | None) -> None:
        self._auxiliary_loss = None
        if self.auxiliary is not None and privileged is not None and torch.is_grad_enabled():
            error = self.auxiliary(features).float() - privileged
            self._auxiliary_loss = self._auxiliary_coef * error.square().mean()

    def take_auxiliary_loss(self) -> Tensor | None:
        loss, self._auxiliary_loss = self._auxiliary_loss, None
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # Autograd graphs and threads cannot be copied.
        return self.__dict__ | {"_auxiliary_loss": None, "_side_by_side": None}

    @classmethod
    def build(cls, cfg: Mapping[str, Any], obs_space: Any, action_space: Any, device: torch.device) -> Self:
        checked = ActorCriticCfg.from_dict(cfg, source="policy")
        width, parts = _build_parts(checked, obs_space, action_space)
        critic_dim = width + parts["encoder"].privileged_dim
        if not checked.critic_images:
            critic_dim, parts["critic_images"] = parts["encoder"].vector_dim, False
            if checked.memory is not None or not critic_dim:
                reason = "a recurrent layer joins images and vectors" if critic_dim else "there is nothing else to see"
                raise ConfigError(f"critic_images: expected true, as {reason}", "policy")
        network = build_network(checked.critic, critic_dim, 1, 1.0, _gating_columns(checked, parts["encoder"]))
        critic = NormalizedCritic(network) if checked.normalize_value else network
        hidden = parts["encoder"].privileged_dim
        if checked.auxiliary_coef and not hidden:
            raise ConfigError("auxiliary_coef: there is nothing to predict: name it in critic_obs", "policy")
        if checked.auxiliary_coef:
            parts |= {"auxiliary": nn.Linear(width, hidden), "auxiliary_coef": checked.auxiliary_coef}
        return cls(obs_space, action_space, device, critic=critic, **parts)


class ActorOnly(NetworkPolicy):
    """Same as ``ActorCritic`` without a critic: the value is always zero."""

    cfg_type: ClassVar[type[Config] | None] = PolicyCfg

    has_critic = False

    def value_of(self, features: Tensor, privileged: Tensor | None) -> Tensor:
        return torch.zeros(features.shape[:-1], device=features.device)

    @classmethod
    def build(cls, cfg: Mapping[str, Any], obs_space: Any, action_space: Any, device: torch.device) -> Self:
        _, parts = _build_parts(PolicyCfg.from_dict(cfg, source="policy"), obs_space, action_space)
        return cls(obs_space, action_space, device, **parts)
