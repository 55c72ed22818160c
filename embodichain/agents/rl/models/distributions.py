"""Action distributions, parametrised by the actor's output ``params`` ``[batch, param_dim]``; computed in float32."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Generator, Tensor, nn

from embodichain.config.classes import Config, Number, configclass
from embodichain.errors import ConfigError

Pair = tuple[Tensor, Tensor]
SDE_EPSILON = 1e-6
"""Added to the variance of gSDE's noise, which is zero if all features are."""
NEVER = -1e9
"""Logit of impossible choices; unlike -inf, it keeps entropies and gradients finite."""
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
SQUASHED_LIMIT = 1.0 - 1e-6
"""Largest magnitude of a tanh-squashed action, limited by the resolution of float32 near 1."""
LOGISTIC_WEIGHTS = (0.3233662693752132, 0.5660496514943436, 0.11058407913044341)
LOGISTIC_SCALES = (0.5763721183120947, 0.9206611782392757, 1.4582501264018108)
"""A mixture of Gaussians around zero, fitted to the logistic distribution of density ``sech(x)^2 / 2``."""


@configclass
class DistributionCfg(Config):
    """Distribution of continuous actions; discrete ones are categorical and need no settings."""

    std: Literal["learnable", "state", "gsde"] = "learnable"
    """One learnable log-std per action dimension; or a log-std that the actor network outputs (state); or generalised
    state-dependent exploration, whose noise is a linear function of the actor's last hidden layer (gsde)."""
    init_log_std: Number = 0.0
    """Initial log-std; added to the network's output for std state. For gsde it is that of each weight of the linear
    function: use smaller values for wide layers, such as -2."""
    sde_sample_freq: Annotated[int, Field(ge=-1)] = -1
    """For gsde: number of steps after which new noise is sampled; -1 or 0: once per rollout."""
    squash: bool = False
    """Whether to squash actions into (-1, 1) by tanh and correct their log-probabilities; needs bounded actions."""
    min_log_std: Number = -5.0
    """Lower bound of a state-dependent log-std."""
    max_log_std: Number = 2.0
    """Upper bound of a state-dependent log-std."""


class ActionHead(nn.Module, ABC):
    """Maps the actor's output ``[batch, param_dim]`` to a distribution over actions."""

    action_dim: int
    """Dimension of an action, or the number of choices of a ``Discrete`` space."""
    param_dim: int

    @abstractmethod
    def sample(self, params: Tensor, deterministic: bool = False, generator: Generator | None = None) -> Pair:
        """Return ``(action, log_prob [batch])``: a sample, or with ``deterministic`` the most likely action."""

    @abstractmethod
    def evaluate(self, params: Tensor, action: Tensor) -> Pair:
        """Return ``(log_prob, entropy)``, each ``[batch]``."""

    def describe(self, params: Tensor) -> Tensor:
        """Return a description ``[batch, n]`` of the distribution, for ``divergence`` of another head of this class."""
        return params.float()

    @abstractmethod
    def divergence(self, described: Tensor, params: Tensor) -> Tensor:
        """Return the KL divergence ``[batch]`` from a distribution given by ``describe`` to that of ``params``."""


class GaussianHead(ActionHead):
    """Diagonal Gaussian over ``[batch, action_dim]``.

    With gSDE, ``params`` are the mean and ``latent_dim`` features x. The noise is ``x^T (std * E)`` with a standard
    normal matrix E ``[latent_dim, action_dim]``. For a given state it is Gaussian with variance ``(x^2)^T std^2``.
    """

    def __init__(self, action_dim: int, cfg: DistributionCfg | None = None, latent_dim: int = 0) -> None:
        super().__init__()
        self.cfg = cfg or DistributionCfg()
        self.state_dependent = self.cfg.std == "state"
        self.action_dim, self.param_dim = action_dim, action_dim * (1 + self.state_dependent)
        shape: tuple[int, ...] = (action_dim,)
        if self.cfg.std == "gsde":
            if latent_dim < 1:
                raise ConfigError(
                    "distribution.std: gsde needs an actor network that the policy's block describes", "policy"
                )
            self.param_dim, shape = action_dim + latent_dim, (latent_dim, action_dim)
        if not self.state_dependent:
            self.log_std = nn.Parameter(torch.full(shape, float(self.cfg.init_log_std)))
        self.held: Tensor | None = None
        """gSDE's matrices E ``[batch, latent_dim, action_dim]`` while a collector holds them, else ``None``."""

    def moments(self, params: Tensor) -> Pair:
        """Return the mean ``[batch, action_dim]`` and a log-std that broadcasts to it."""
        params = params.float()
        if self.cfg.std == "gsde":
            mean, latent = params.tensor_split([self.action_dim], dim=-1)
            with full_precision(params):
                variance = latent.square() @ (2.0 * self.log_std).exp()
            return mean, 0.5 * (variance + SDE_EPSILON).log()
        if not self.state_dependent:
            return params, self.log_std
        mean, raw = params.chunk(2, dim=-1)
        return mean, (raw + self.cfg.init_log_std).clamp(self.cfg.min_log_std, self.cfg.max_log_std)

    def sample(self, params: Tensor, deterministic: bool = False, generator: Generator | None = None) -> Pair:
        mean, log_std = self.moments(params)
        if deterministic:
            return mean, self._log_prob(torch.zeros_like(mean), log_std)
        noise = self._noise(params, mean, log_std, generator)
        return torch.addcmul(mean, noise, log_std.exp()), self._log_prob(noise, log_std)

    def _noise(self, params: Tensor, mean: Tensor, log_std: Tensor, generator: Generator | None) -> Tensor:
        """Return standardised noise ``[batch, action_dim]``: from gSDE's matrices if they are held, else new noise."""
        if self.held is None:
            return normal_like(mean, generator)
        latent = params.float()[:, self.action_dim :]
        with full_precision(params):
            deviation = torch.bmm(latent.unsqueeze(1), self.held * self.log_std.exp()).squeeze(1)
        return deviation * (-log_std).exp()

    def evaluate(self, params: Tensor, action: Tensor) -> Pair:
        mean, log_std = self.moments(params)
        noise = (action - mean) * (-log_std).exp()
        entropy = log_std.sum(-1) + self.action_dim * (0.5 + HALF_LOG_2PI)
        return self._log_prob(noise, log_std), entropy.expand(mean.shape[:-1])

    def describe(self, params: Tensor) -> Tensor:
        mean, log_std = self.moments(params)
        return torch.cat([mean, log_std.expand_as(mean)], dim=-1)

    def divergence(self, described: Tensor, params: Tensor) -> Tensor:
        # KL(N(m, s^2) || N(mean, std^2)) = log(std / s) + (s^2 + (m - mean)^2) / (2 std^2) - 1/2; invariant under tanh
        (given_mean, given_log_std), (mean, log_std) = described.chunk(2, dim=-1), self.moments(params)
        squares = (2.0 * given_log_std).exp() + (given_mean - mean).square()
        return (log_std - given_log_std + 0.5 * squares * (-2.0 * log_std).exp() - 0.5).sum(-1)

    def _log_prob(self, noise: Tensor, log_std: Tensor) -> Tensor:
        # log N(mean + std * noise) = -noise^2 / 2 - log std - log(2 pi) / 2, summed over the action's dimensions
        peak = torch.rsub(log_std.sum(-1), -self.action_dim * HALF_LOG_2PI)
        return torch.sub(peak, noise.square().sum(-1), alpha=0.5)


class SquashedGaussianHead(GaussianHead):
    """Gaussian squashed by tanh: actions in (-1, 1), density corrected by ``log |d tanh(u) / du| = log(1 - a^2)``."""

    weights: Tensor
    variances: Tensor

    def __init__(self, action_dim: int, cfg: DistributionCfg | None = None, latent_dim: int = 0) -> None:
        super().__init__(action_dim, cfg, latent_dim)
        self.register_buffer("weights", torch.tensor(LOGISTIC_WEIGHTS), persistent=False)
        self.register_buffer("variances", torch.tensor(LOGISTIC_SCALES).square(), persistent=False)

    def sample(self, params: Tensor, deterministic: bool = False, generator: Generator | None = None) -> Pair:
        mean, log_std = self.moments(params)
        raw = mean
        if not deterministic:
            raw = torch.addcmul(mean, self._noise(params, mean, log_std, generator), log_std.exp())
        action = raw.tanh().clamp(-SQUASHED_LIMIT, SQUASHED_LIMIT)
        return action, self._log_prob_of(action, mean, log_std)

    def evaluate(self, params: Tensor, action: Tensor) -> Pair:
        mean, log_std = self.moments(params)
        # H[tanh(u)] = H[u] + E log(1 - tanh(u)^2), and log(1 - tanh(u)^2) = 2 (log 2 - log 2 cosh(u))
        entropy = log_std + 0.5 + HALF_LOG_2PI + 2.0 * (math.log(2.0) - self._mean_log_2cosh(mean, log_std))
        return self._log_prob_of(action, mean, log_std), entropy.sum(-1)

    def _mean_log_2cosh(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """Return ``E log(2 cosh(u))``, ``[batch, action_dim]``, accurate to 4e-5 for every mean and standard deviation.

        ``log(2 cosh(u)) = E |u + x|`` for a logistic x, because both have the second derivative ``sech(u)^2``. If x is
        approximated by a mixture of Gaussians, ``u + x`` is one too, and the mean magnitude of a Gaussian is known:

            E |N(m, s^2)| = s sqrt(2 / pi) exp(-m^2 / 2 s^2) + m erf(m / (s sqrt(2)))
        """
        mean, std = mean.unsqueeze(-1), ((2.0 * log_std).exp().unsqueeze(-1) + self.variances).sqrt()
        distance = mean / (math.sqrt(2.0) * std)
        magnitude = math.sqrt(2.0 / math.pi) * std * (-distance.square()).exp() + mean * distance.erf()
        with full_precision(magnitude):
            return magnitude @ self.weights

    def _log_prob_of(self, action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        # sample() uses this, too, so that the ratio of unchanged weights is exactly 1.
        # u = atanh(a) = (log(1 + a) - log(1 - a)) / 2;  log |da/du| = log(1 + a) + log(1 - a)
        above, below = torch.log1p(action), torch.log1p(-action)
        noise = (0.5 * (above - below) - mean) * (-log_std).exp()
        return self._log_prob(noise, log_std) - (above + below).sum(-1)


class CategoricalHead(ActionHead):
    """Categorical over ``action_dim`` choices; actions are int64 ``[batch]``, ``params`` are logits."""

    def __init__(self, action_dim: int) -> None:
        super().__init__()
        self.action_dim = self.param_dim = action_dim

    def sample(self, params: Tensor, deterministic: bool = False, generator: Generator | None = None) -> Pair:
        log_probs = scores = params.float().log_softmax(-1)
        if not deterministic:  # argmax of p_i / e_i with e_i ~ Exp(1) is distributed as p
            scores = log_probs.exp() / torch.empty_like(log_probs).exponential_(generator=generator)
        action = scores.argmax(-1)
        return action, log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def evaluate(self, params: Tensor, action: Tensor) -> Pair:
        log_probs = params.float().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy

    def divergence(self, described: Tensor, params: Tensor) -> Tensor:
        given = described.log_softmax(-1)
        return (given.exp() * (given - params.float().log_softmax(-1))).sum(-1)


class MultiCategoricalHead(ActionHead):
    """Independent categoricals; actions are int64 ``[batch, action_dim]``, ``params`` are the logits of all."""

    columns: Tensor

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__()
        self.action_dim, self.param_dim = len(counts), sum(counts)
        # Choice k has the logits columns[k], padded with the index of an impossible choice.
        columns = torch.full((len(counts), max(counts)), self.param_dim)
        for row, part in zip(columns, torch.arange(self.param_dim).split(list(counts)), strict=True):
            row[: len(part)] = part
        self.register_buffer("columns", columns, persistent=False)

    def sample(self, params: Tensor, deterministic: bool = False, generator: Generator | None = None) -> Pair:
        log_probs = scores = self._log_probs(params)
        if not deterministic:  # as in CategoricalHead
            scores = log_probs.exp() / torch.empty_like(log_probs).exponential_(generator=generator)
        action = scores.argmax(-1)
        return action, log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1).sum(-1)

    def evaluate(self, params: Tensor, action: Tensor) -> Pair:
        log_probs = self._log_probs(params)
        entropy = -(log_probs.exp() * log_probs).sum((-2, -1))
        return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1).sum(-1), entropy

    def divergence(self, described: Tensor, params: Tensor) -> Tensor:
        given = self._log_probs(described)
        return (given.exp() * (given - self._log_probs(params))).sum((-2, -1))

    def _log_probs(self, params: Tensor) -> Tensor:
        """Return log-probabilities ``[batch, action_dim, choices]``."""
        return F.pad(params.float(), (0, 1), value=NEVER)[..., self.columns].log_softmax(-1)


class BernoulliHead(ActionHead):
    """Independent Bernoullis; actions are int64 0 or 1 ``[batch, action_dim]``, ``params`` are logits."""

    def __init__(self, action_dim: int) -> None:
        super().__init__()
        self.action_dim = self.param_dim = action_dim

    def sample(self, params: Tensor, deterministic: bool = False, generator: Generator | None = None) -> Pair:
        logits = params.float()
        if deterministic:
            action = (logits > 0).long()
        else:
            action = (torch.empty_like(logits).uniform_(generator=generator) < logits.sigmoid()).long()
        return action, self._log_prob(logits, action)

    def evaluate(self, params: Tensor, action: Tensor) -> Pair:
        logits = params.float()
        # H = -p log p - (1 - p) log(1 - p) with p = sigmoid(l), log(1 - p) = -softplus(l), log p = l - softplus(l)
        entropy = (F.softplus(logits) - logits * logits.sigmoid()).sum(-1)
        return self._log_prob(logits, action), entropy

    def divergence(self, described: Tensor, params: Tensor) -> Tensor:
        # p log(p / q) + (1 - p) log((1 - p) / (1 - q)), with log p = -softplus(-l) and log(1 - p) = -softplus(l)
        logits, p = params.float(), described.sigmoid()
        ones, zeros = F.softplus(-logits) - F.softplus(-described), F.softplus(logits) - F.softplus(described)
        return (p * ones + (1.0 - p) * zeros).sum(-1)

    def _log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        return (logits * action - F.softplus(logits)).sum(-1)


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context that disables autocast on the device of ``like``."""
    device_type = like.device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def normal_like(like: Tensor, generator: Generator | None = None) -> Tensor:
    """Return standard normal noise with the shape of a tensor; ``None`` uses torch's default generator."""
    return torch.randn_like(like) if generator is None else torch.empty_like(like).normal_(generator=generator)


def build_head(
    action_space: gym.Space[Any] | int, cfg: DistributionCfg | None = None, latent_dim: int = 0
) -> ActionHead:
    """Return the head for an action space: Gaussian for a ``Box`` or an int, categorical for discrete spaces.

    ``latent_dim`` is the number of features for gSDE's noise.
    """
    size = action_dimension(action_space)
    if isinstance(action_space, gym.spaces.Discrete):
        if action_space.start != 0:
            raise ConfigError(f"expected choices that count from 0, got {action_space}", "action_space")
        return CategoricalHead(size)
    if isinstance(action_space, gym.spaces.MultiDiscrete):
        if action_space.start.any():
            raise ConfigError(f"expected choices that count from 0, got {action_space}", "action_space")
        return MultiCategoricalHead(action_space.nvec.tolist())
    if isinstance(action_space, gym.spaces.MultiBinary):
        return BernoulliHead(size)
    if cfg is None or not cfg.squash:
        return GaussianHead(size, cfg, latent_dim)
    if isinstance(action_space, gym.spaces.Box):
        free = int((~np.isfinite(action_space.low) | ~np.isfinite(action_space.high)).sum())
        if free:
            problem = f"expected false, as tanh cannot reach beyond 1 and {free} of {size} actions have no bounds there"
            raise ConfigError(f"distribution.squash: {problem}; got true", "policy")
    return SquashedGaussianHead(size, cfg, latent_dim)


def action_dimension(action_space: gym.Space[Any] | int) -> int:
    """Return the dimension of an action, or the number of choices of a ``Discrete`` space."""
    if isinstance(action_space, int):
        return action_space
    if isinstance(action_space, gym.spaces.Discrete):
        return int(action_space.n)
    several = (gym.spaces.Box, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
    if isinstance(action_space, several) and len(action_space.shape) == 1:
        return int(action_space.shape[0])
    expected = "a Box, MultiDiscrete or MultiBinary of shape [action_dim], a Discrete or an int"
    raise ConfigError(f"expected {expected}, got {action_space}", "action_space")
