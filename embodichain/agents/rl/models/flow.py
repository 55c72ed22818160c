"""Flow policies: a chunk of actions is denoised by a learned velocity field, and the chain of that is the decision.

Time ``tau`` runs from 0, where ``x`` is Gaussian noise, to 1, where it is the chunk ``[chunk_size, action_dim]``.
Imitation fits the velocity of straight lines, ``x_tau = tau a + (1 - tau) noise`` (rectified flow):

    L = E |v(x_tau, tau, obs) - (a - noise)|^2

Evaluation follows ``dx = v dtau`` in ``num_steps`` Euler steps. For reinforcement every step becomes Gaussian, so that
the chain has a log-probability, one factor per step:

* ``exploration: "noise"`` adds noise of a learned size, ``x' = x + v dtau + std(obs, tau) N(0, I)``, as ReinFlow does;
* ``exploration: "sde"`` follows the stochastic equation with the marginals of the flow, as Flow-GRPO does:
  ``dx = (v - s^2 (x - tau v) / (2 (1 - tau))) dtau + s dW`` with ``s = sde_level sqrt((1 - tau) / tau)``.

The first noise is drawn from the same distribution by every policy: it is part of the chain, and of no ratio.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import gymnasium as gym
import torch
from pydantic import Field
from tensordict import TensorDict, TensorDictBase
from torch import Generator, Tensor, nn

from embodichain.agents.rl.models.actor_critic import NormalizedCritic, build_network
from embodichain.agents.rl.models.distributions import HALF_LOG_2PI, normal_like
from embodichain.agents.rl.models.mlp import ImageEncoderCfg
from embodichain.agents.rl.models.observation import FeatureEncoder, ObservationSpace
from embodichain.agents.rl.models.policy import Evaluation, Policy
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.config.classes import Config, Positive, Size, configclass
from embodichain.errors import ConfigError, RolloutError

TIME_WAVES = 16
"""Sines and cosines of the time that a velocity network is given, of each as many."""
LATEST = 0.999
"""The largest time that imitation draws: at 1 nothing is left to denoise."""


@configclass
class FlowCfg(Config):
    """How chunks of actions are denoised, and explored."""

    num_steps: Annotated[int, Field(ge=1, le=100)] = 4
    """Euler steps from noise to actions."""
    exploration: Literal["noise", "sde"] = "noise"
    """Where chance comes in for reinforcement: noise of a learned size in every step, or the stochastic equation."""
    noise_at: Literal["all", "one"] = "all"
    """Whether all steps are noisy, or one of them, drawn for every decision; the others then follow the flow."""
    std_range: tuple[Positive, Positive] = (0.05, 0.2)
    """For noise: bounds of its learned standard deviation."""
    sde_level: Positive = 0.5
    """For sde: factor on the noise of the stochastic equation."""
    timestep_alpha: Positive = 1.5
    """Imitation draws times of density ``alpha (1 - tau)^(alpha - 1)``: above 1, more often early, noisy ones."""

    def __post_init__(self) -> None:
        if self.std_range[0] > self.std_range[1]:
            raise ConfigError(f"std_range: expected [low, high], got {list(self.std_range)}", "flow")


class FlowHead(nn.Module):
    """Denoises chunks ``[batch, chunk_size, action_dim]``, given features ``[batch, width]`` of the observation."""

    start: Tensor
    """The noise that deterministic chunks begin with, ``[chunk_size, action_dim]``: one draw, kept with the weights."""

    def __init__(self, velocity: nn.Module, width: int, chunk_size: int, action_dim: int, cfg: FlowCfg) -> None:
        """``velocity`` maps ``velocity_inputs(width, ...)`` numbers, ``[..., n]``, to ``chunk_size * action_dim``."""
        super().__init__()
        self.cfg, self.shape = cfg, (chunk_size, action_dim)
        self.velocity_net = velocity
        self.std_net: nn.Module | None = None
        if cfg.exploration == "noise":
            last = nn.Linear(64, chunk_size * action_dim)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.std_net = nn.Sequential(nn.Linear(width + 2 * TIME_WAVES, 64), nn.Tanh(), last)
        self.register_buffer("start", torch.randn(self.shape))

    @staticmethod
    def velocity_inputs(width: int, chunk_size: int, action_dim: int) -> int:
        """Return how many numbers the velocity network is given."""
        return width + chunk_size * action_dim + 2 * TIME_WAVES

    def velocity(self, features: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Return the velocity ``[..., chunk_size, action_dim]`` at ``x`` of that shape and ``time`` ``[...]``."""
        inputs = torch.cat([features, x.flatten(-2).to(features.dtype), time_waves(time).to(features.dtype)], dim=-1)
        return self.velocity_net(inputs).float().view_as(x)

    def transition(self, features: Tensor, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what follows ``x`` ``[..., chunk_size, action_dim]`` in a step: by the flow, and mean and log-std with
        noise; ``step`` ``[...]``, its number, tells the time."""
        dt = 1.0 / self.cfg.num_steps
        time = step.float() * dt
        velocity = self.velocity(features, x, time)
        smooth = torch.add(x, velocity, alpha=dt)
        if self.std_net is not None:
            low, high = (math.log(bound) for bound in self.cfg.std_range)
            raw = self.std_net(torch.cat([features.float(), time_waves(time)], dim=-1)).float().view_as(x)
            return smooth, smooth, low + (high - low) * raw.sigmoid()
        tau = time.view(*time.shape, 1, 1)
        scale = self.cfg.sde_level * ((1.0 - tau) / tau.clamp(min=dt)).sqrt()  # at the first step it would be infinite
        drift = velocity - scale.square() * (x - tau * velocity) / (2.0 * (1.0 - tau))
        return smooth, torch.add(x, drift, alpha=dt), (scale * dt**0.5).log().expand_as(x)

    def sample(
        self, features: Tensor, deterministic: bool = False, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor, TensorDict]:
        """Return ``(chunk, log_prob [batch, 1, factors], decision)``; without noise on the way if ``deterministic``."""
        cfg, batch = self.cfg, features.shape[0]
        first = self.start.expand(batch, *self.shape)
        x = first if deterministic else normal_like(first, generator)
        one: Tensor | None = None
        if cfg.noise_at == "one":
            one = torch.randint(cfg.num_steps, (batch,), device=features.device, generator=generator)
        chain, log_probs = [x], []
        for k in range(cfg.num_steps):
            smooth, mean, log_std = self.transition(features, x, torch.full((batch,), k, device=features.device))
            noisy = mean if deterministic else torch.addcmul(mean, log_std.exp(), normal_like(mean, generator))
            is_noisy = torch.ones_like(noisy[:, :1, :1], dtype=torch.bool) if one is None else (one == k).view(-1, 1, 1)
            x = smooth if deterministic else torch.where(is_noisy, noisy, smooth)
            chain.append(x)
            log_probs.append(log_density(x, mean, log_std))
        log_prob = torch.stack(log_probs, dim=1)
        if one is not None:
            log_prob = log_prob.gather(1, one.unsqueeze(1))
        return x, log_prob.unsqueeze(1), self._decision(torch.stack(chain, dim=1), one)

    def _decision(self, chain: Tensor, one: Tensor | None) -> TensorDict:
        """Return what the log-probability depends on: all states of the chain, or those around the one noisy step."""
        batch = chain.shape[0]
        if one is None:
            return TensorDict({"chain": chain}, [batch])
        rows = torch.arange(batch, device=chain.device)
        around = torch.stack([chain[rows, one], chain[rows, one + 1]], dim=1)
        return TensorDict({"chain": around, "step": one}, [batch])

    def evaluate(self, features: Tensor, decision: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return ``(log_prob, entropy)``, each ``[batch, 1, factors]``, one factor per noisy step."""
        chain = self._checked(decision)
        batch, factors = chain.shape[0], chain.shape[1] - 1
        if self.cfg.noise_at == "one":
            step = decision["step"].view(batch, 1)
        else:
            step = torch.arange(factors, device=chain.device).expand(batch, factors)
        given = features.unsqueeze(1).expand(batch, factors, features.shape[-1])
        _, mean, log_std = self.transition(given, chain[:, :-1], step)
        entropy = (log_std + 0.5 + HALF_LOG_2PI).sum((-1, -2))
        return log_density(chain[:, 1:], mean, log_std).unsqueeze(1), entropy.unsqueeze(1)

    def _checked(self, decision: TensorDictBase) -> Tensor:
        count = 2 if self.cfg.noise_at == "one" else self.cfg.num_steps + 1
        chain = decision.get("chain", None)
        if chain is None or tuple(chain.shape[1:]) != (count, *self.shape):
            got = "none" if chain is None else list(chain.shape)
            raise RolloutError(
                f"decision: expected a chain [batch, {count}, {self.shape[0]}, {self.shape[1]}] of this policy, got "
                f"{got}: rollouts of another num_steps, noise_at or chunk_size cannot be learned from"
            )
        return chain

    def imitation_loss(
        self, features: Tensor, actions: Tensor, valid: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Return ``[batch]`` the error of the velocity on the way to ``actions`` ``[batch, n, action_dim]``.

        ``n`` may be less than ``chunk_size``; ``valid`` ``[batch, n]`` tells which of them count.
        """
        batch, length = actions.shape[:2]
        target = torch.zeros(batch, *self.shape, device=actions.device)
        target[:, :length] = actions
        counts = torch.zeros(batch, self.shape[0], device=actions.device)
        counts[:, :length] = 1.0 if valid is None else valid.float()
        drawn = torch.rand(batch, device=actions.device, generator=generator)
        time = LATEST * (1.0 - drawn.pow(1.0 / self.cfg.timestep_alpha))
        noise = normal_like(target, generator)
        tau = time.view(-1, 1, 1)
        error = self.velocity(features, tau * target + (1.0 - tau) * noise, time) - (target - noise)
        return (error.square().mean(-1) * counts).sum(-1) / counts.sum(-1).clamp(min=1.0)


def log_density(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the logarithm ``[...]`` of a Gaussian's density at chunks ``[..., chunk_size, action_dim]``."""
    noise = (x - mean) * (-log_std).exp()
    return -(0.5 * noise.square() + log_std + HALF_LOG_2PI).sum((-1, -2))


def time_waves(time: Tensor) -> Tensor:
    """Return sines and cosines ``[..., 2 * TIME_WAVES]`` of a time in [0, 1], of periods from 4 to 0.1."""
    periods = torch.logspace(math.log10(4.0), math.log10(0.1), TIME_WAVES, device=time.device)
    angle = 2.0 * math.pi * time.unsqueeze(-1) / periods
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


@configclass
class FlowPolicyCfg(Config):
    """The block of the policy ``flow``, without ``name`` and ``action_dim``."""

    chunk_size: Size = 1
    """Actions per decision."""
    flow: FlowCfg = FlowCfg()
    """How chunks are denoised."""
    actor: dict[str, Any] = {"type": "mlp"}
    """The velocity network: ``{"type": "mlp", "network_cfg": {"hidden_sizes": [256, 256], "activation": "relu"}}``."""
    critic: dict[str, Any] = {"type": "mlp"}
    """The critic network, in the same shape as the actor's."""
    normalize_obs: bool = False
    """Whether vector observations are normalised by their running mean and variance."""
    normalize_value: bool = False
    """Whether the critic learns returns shifted and scaled by their running mean and standard deviation."""
    critic_obs: tuple[str, ...] = ()
    """Keys (``object/pos``) or groups of keys (``object``) that only the critic sees."""
    image_encoder: ImageEncoderCfg = ImageEncoderCfg()
    """How images, the keys below ``image``, become features."""


class FlowPolicy(Policy):
    """A flow over chunks of actions, and a critic: observation -> encoder -> ``FlowHead``."""

    has_decision = True

    def __init__(
        self, obs_space: ObservationSpace, action_space: gym.Space[Any], device: torch.device | str, **settings: Any
    ) -> None:
        super().__init__()
        cfg = FlowPolicyCfg.from_dict(settings, source="policy")
        if not isinstance(action_space, gym.spaces.Box):
            raise ConfigError(f"flow: expected continuous actions, a Box, got {action_space}", "policy")
        self.chunk_size, action_dim = cfg.chunk_size, int(action_space.shape[-1])
        self.encoder = FeatureEncoder(obs_space, cfg.normalize_obs, cfg.critic_obs, cfg.image_encoder)
        width = self.encoder.public_dim
        inputs = FlowHead.velocity_inputs(width, self.chunk_size, action_dim)
        velocity = build_network(cfg.actor, inputs, self.chunk_size * action_dim, last_gain=0.01)
        self.head = FlowHead(velocity, width, self.chunk_size, action_dim, cfg.flow)
        network = build_network(cfg.critic, width + self.encoder.privileged_dim, 1, last_gain=1.0)
        self.critic = NormalizedCritic(network) if cfg.normalize_value else network
        self.device = torch.device(device)
        self.to(self.device)

    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        return self.decide(obs, deterministic)[:3]

    def decide(
        self, obs: Observation, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, TensorDictBase | None]:
        features, privileged = self.encoder(obs)
        chunk, log_prob, decision = self.head.sample(features, deterministic, self.generator)
        action = chunk.squeeze(1) if self.chunk_size == 1 else chunk
        return action, log_prob, self._value(features, privileged), decision

    def get_value(self, obs: Observation) -> Tensor:
        return self._value(*self.encoder(obs))

    def evaluate_actions(self, obs: Observation, actions: Tensor, decision: TensorDictBase | None = None) -> Evaluation:
        if decision is None:
            raise RolloutError("a flow values chains: pass the decision that came with the actions")
        features, privileged = self.encoder(obs)
        return (*self.head.evaluate(features, decision), self._value(features, privileged))

    def imitation_loss(self, obs: Observation, actions: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.head.imitation_loss(self.encoder(obs)[0], actions, valid, self.generator)

    def update_normalizer(self, obs: Observation) -> None:
        self.encoder.update_normalizer(obs)

    def update_value_normalizer(self, returns: Tensor) -> None:
        if isinstance(self.critic, NormalizedCritic):
            self.critic.update(returns)

    @property
    def value_scale(self) -> Tensor | float:
        return self.critic.scale if isinstance(self.critic, NormalizedCritic) else 1.0

    def _value(self, features: Tensor, privileged: Tensor | None) -> Tensor:
        inputs = features if privileged is None else torch.cat([features, privileged], dim=-1)
        return self.critic(inputs).squeeze(-1).float()

    @classmethod
    def build(cls, cfg: Mapping[str, Any], obs_space: Any, action_space: Any, device: torch.device) -> Self:
        return cls(obs_space, action_space, device, **cfg)
