"""The flow head: a learned velocity field denoises a chunk of actions; the denoising chain is the decision.

Time ``tau`` runs from 0, where ``x`` is Gaussian noise, to 1, where it is the chunk ``[chunk_size, action_dim]``.
Imitation fits the velocity of straight lines, ``x_tau = tau a + (1 - tau) noise`` (rectified flow):

    L = E |v(x_tau, tau, obs) - (a - noise)|^2

Evaluation integrates ``dx = v dtau`` in ``num_steps`` Euler steps. For reinforcement learning every step is Gaussian,
so that the chain has a log-probability with one factor per step:

* ``exploration: "noise"`` adds noise of a learned scale, ``x' = x + v dtau + std(obs, tau) N(0, I)``, as in ReinFlow;
* ``exploration: "sde"`` integrates the stochastic differential equation with the marginals of the flow, as in
  Flow-GRPO: ``dx = (v - s^2 (x - tau v) / (2 (1 - tau))) dtau + s dW`` with ``s = sde_level sqrt((1 - tau) / tau)``.

The initial noise has the same distribution for every policy, so it cancels in ratios.
"""

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict, TensorDictBase
from torch import Generator, Tensor, nn

from embodichain.agents.rl.models.distributions import HALF_LOG_2PI, normal_like
from embodichain.config.classes import Config, Positive, configclass
from embodichain.errors import ConfigError, RolloutError

TIME_WAVES = 16
"""Number of sines, and of cosines, that encode the time."""
LATEST = 0.999
"""The largest time that imitation samples: at 1 nothing is left to denoise."""


@configclass
class FlowCfg(Config):
    """Denoising of action chunks, and exploration."""

    num_steps: Annotated[int, Field(ge=1, le=100)] = 4
    """Number of Euler steps from noise to actions."""
    exploration: Literal["noise", "sde"] = "noise"
    """Exploration in reinforcement learning: noise of a learned scale, or a stochastic differential equation."""
    noise_at: Literal["all", "one"] = "all"
    """Whether all steps are noisy, or one random step per decision, while the others follow the flow."""
    std_range: tuple[Positive, Positive] = (0.05, 0.2)
    """For noise: bounds of the learned standard deviation."""
    sde_level: Positive = 0.5
    """For sde: scale of the noise."""
    start: Literal["zero", "drawn"] = "zero"
    """Initial noise of deterministic chunks: zero, the most likely one, or a new sample. With multimodal
    demonstrations, zero may lie between the modes."""
    timestep_alpha: Positive = 1.5
    """Imitation samples times with density ``alpha (1 - tau)^(alpha - 1)``: above 1, early and noisy times are more
    frequent."""
    imitation_samples: Annotated[int, Field(ge=1, le=256)] = 1
    """Times and noises sampled per chunk in imitation. More reduce the variance of the gradient at little cost, as they
    share the features of the observation."""

    def __post_init__(self) -> None:
        if self.std_range[0] > self.std_range[1]:
            raise ConfigError(f"std_range: expected [low, high], got {list(self.std_range)}", "flow")


class FlowHead(nn.Module):
    """Denoises chunks ``[batch, chunk_size, action_dim]``, given features ``[batch, width]`` of the observation.

    A subclass whose velocity depends on more than a vector overrides ``velocity``, ``std_inputs`` and ``each_step``;
    its features are then a TensorDict ``[batch]``.
    """

    start: Tensor
    """Initial noise of deterministic chunks with ``start: "zero"``: zeros ``[chunk_size, action_dim]``."""

    def __init__(self, velocity: nn.Module, width: int, chunk_size: int, action_dim: int, cfg: FlowCfg) -> None:
        """``velocity`` maps ``[..., velocity_inputs(width, ...)]`` to ``[..., chunk_size * action_dim]``."""
        super().__init__()
        self.cfg, self.shape = cfg, (chunk_size, action_dim)
        self.velocity_net = velocity
        self.std_net: nn.Module | None = None
        if cfg.exploration == "noise":
            last = nn.Linear(64, chunk_size * action_dim)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.std_net = nn.Sequential(nn.Linear(width + 2 * TIME_WAVES, 64), nn.Tanh(), last)
        self.register_buffer("start", torch.zeros(self.shape))

    @staticmethod
    def velocity_inputs(width: int, chunk_size: int, action_dim: int) -> int:
        """Return the input width of the velocity network."""
        return width + chunk_size * action_dim + 2 * TIME_WAVES

    def velocity(self, features: Any, x: Tensor, time: Tensor) -> Tensor:
        """Return the velocity ``[..., chunk_size, action_dim]`` at ``x`` of that shape and ``time`` ``[...]``."""
        inputs = torch.cat([features, x.flatten(-2).to(features.dtype), time_waves(time).to(features.dtype)], dim=-1)
        return self.velocity_net(inputs).float().view_as(x)

    def std_inputs(self, features: Any, time: Tensor) -> Tensor:
        """Return the inputs ``[..., n]`` of the network for the scale of the noise."""
        return torch.cat([features.float(), time_waves(time)], dim=-1)

    def each_step(self, features: Any, count: int) -> Any:
        """Expand features ``[batch, ...]`` to match ``count`` states of a chain, ``[batch, count, ...]``."""
        return features.unsqueeze(1).expand(features.shape[0], count, features.shape[-1])

    def transition(self, features: Any, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next state without noise, and the mean and log-std of the next state with noise.

        ``x`` and all results are ``[..., chunk_size, action_dim]``; ``step`` ``[...]`` is the number of the step.
        """
        dt = 1.0 / self.cfg.num_steps
        time = step.float() * dt
        velocity = self.velocity(features, x, time)
        smooth = torch.add(x, velocity, alpha=dt)
        if self.std_net is not None:
            low, high = (math.log(bound) for bound in self.cfg.std_range)
            raw = self.std_net(self.std_inputs(features, time)).float().view_as(x)
            return smooth, smooth, low + (high - low) * raw.sigmoid()
        tau = time.view(*time.shape, 1, 1)
        scale = self.cfg.sde_level * ((1.0 - tau) / tau.clamp(min=dt)).sqrt()  # clamped, as it is infinite at tau = 0
        drift = velocity - scale.square() * (x - tau * velocity) / (2.0 * (1.0 - tau))
        return smooth, torch.add(x, drift, alpha=dt), (scale * dt**0.5).log().expand_as(x)

    def sample(
        self, features: Any, deterministic: bool = False, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor, TensorDict]:
        """Return ``(chunk, log_prob [batch, 1, factors], decision)``; ``deterministic`` adds no noise in the steps."""
        cfg, batch = self.cfg, features.shape[0]
        first = self.start.expand(batch, *self.shape)
        x = first if deterministic and cfg.start == "zero" else normal_like(first, generator)
        one: Tensor | None = None
        if cfg.noise_at == "one":
            if deterministic:  # no step is noisy
                one = torch.zeros(batch, dtype=torch.int64, device=features.device)
            else:
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
        """Return the inputs of the log-probability: all states of the chain, or the two around the one noisy step."""
        batch = chain.shape[0]
        if one is None:
            return TensorDict({"chain": chain}, [batch])
        rows = torch.arange(batch, device=chain.device)
        around = torch.stack([chain[rows, one], chain[rows, one + 1]], dim=1)
        return TensorDict({"chain": around, "step": one}, [batch])

    def evaluate(self, features: Any, decision: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return ``(log_prob, entropy)``, each ``[batch, 1, factors]``, one factor per noisy step."""
        chain = self._checked(decision)
        batch, factors = chain.shape[0], chain.shape[1] - 1
        if self.cfg.noise_at == "one":
            step = decision["step"].view(batch, 1)
        else:
            step = torch.arange(factors, device=chain.device).expand(batch, factors)
        _, mean, log_std = self.transition(self.each_step(features, factors), chain[:, :-1], step)
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
        self, features: Any, actions: Tensor, valid: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Return the flow matching loss ``[batch]`` of ``actions`` ``[batch, n, action_dim]``.

        ``n`` may be less than ``chunk_size``. ``valid`` ``[batch, n]`` masks the actions that count.
        """
        batch, length = actions.shape[:2]
        target = torch.zeros(batch, *self.shape, device=actions.device)
        target[:, :length] = actions
        counts = torch.zeros(batch, self.shape[0], device=actions.device)
        counts[:, :length] = 1.0 if valid is None else valid.float()
        samples = () if self.cfg.imitation_samples == 1 else (self.cfg.imitation_samples,)
        if samples:
            features = self.each_step(features, *samples)
            target = target.unsqueeze(1).expand(batch, *samples, *self.shape)
            counts = counts.unsqueeze(1)
        drawn = torch.rand(batch, *samples, device=actions.device, generator=generator)
        time = LATEST * (1.0 - drawn.pow(1.0 / self.cfg.timestep_alpha))
        noise = normal_like(target, generator)
        tau = time[..., None, None]
        # Actions that do not count are plain noise, so that the model does not see their labels.
        noisy = torch.where(counts.unsqueeze(-1) > 0.0, tau * target + (1.0 - tau) * noise, noise)
        error = self.velocity(features, noisy, time) - (target - noise)
        loss = (error.square().mean(-1) * counts).sum(-1) / counts.sum(-1).clamp(min=1.0)
        return loss.mean(1) if samples else loss


def log_density(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the Gaussian log-density ``[...]`` of chunks ``[..., chunk_size, action_dim]``."""
    noise = (x - mean) * (-log_std).exp()
    return -(0.5 * noise.square() + log_std + HALF_LOG_2PI).sum((-1, -2))


def time_waves(time: Tensor) -> Tensor:
    """Return a sinusoidal embedding ``[..., 2 * TIME_WAVES]`` of a time in [0, 1], with periods from 4 to 0.1."""
    periods = torch.logspace(math.log10(4.0), math.log10(0.1), TIME_WAVES, device=time.device)
    angle = 2.0 * math.pi * time.unsqueeze(-1) / periods
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
