"""Ratios of the probabilities that two policies give the same decisions.

A decision is one action, or a chunk of them (``ChunkedEnv``). Log-probabilities of chunks are ``[..., chunk_size]``,
one per action, and ``num_actions`` ``[...]`` tells how many were really taken. Single actions are left as they are.
"""

import math

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.utils import Level

MAX_LOG_RATIO = 20.0
"""Bound of the logarithm of a ratio: beyond 88 the ratio is infinite, and times an advantage of zero not a number."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return a logarithm of a ratio that can be exponentiated; beyond the bound it has no gradient."""
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def clipped_gain(log_ratio: Tensor, gain: Tensor, clip: float) -> Tensor:
    """Return ``min(r A, clip(r, 1 - c, 1 + c) A)`` of ``log r`` and advantages A that broadcast against it.

    Bounding the logarithm takes half the operations of the formula, and no ratio becomes infinite.
    """
    (least, most), gains = _log_bounds(clip), gain >= 0.0
    low, high = torch.where(gains, -math.inf, least), torch.where(gains, most, MAX_LOG_RATIO)
    return log_ratio.clamp(low, high).exp() * gain


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Return ``r - 1 - log r`` of ``log r = log q / p``: on samples of p its mean is ``KL(p || q)``, never negative."""
    log_r = bounded(log_ratio)
    return (log_r.expm1() - log_r).clamp(min=0.0)  # r - 1 would be rounding alone where r is close to 1


def is_clipped(log_ratio: Tensor, clip: float) -> Tensor:
    """Tell where a ratio lies outside ``[1 - c, 1 + c]``, as 1 or 0."""
    least, most = _log_bounds(clip)
    return ((log_ratio < least) | (log_ratio > most)).float()


def _log_bounds(clip: float) -> tuple[float, float]:
    return math.log(1.0 - clip) if clip < 1.0 else -math.inf, math.log(1.0 + clip)


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, batch: TensorDictBase, level: Level) -> Tensor:
    """Return ``log pi / pi_old`` ``[...]``, or ``[..., chunk_size]`` per action: 0 for actions that were not taken."""
    difference = log_prob - old_log_prob
    if difference.ndim == batch.batch_dims:
        return difference
    difference = torch.where(_taken(difference, batch), difference, 0.0)
    return difference if level == "action" else difference.sum(-1)


def per_decision(values: Tensor, batch: TensorDictBase) -> Tensor:
    """Return ``[rows]``: the mean over the actions taken, where there is a value for each of them."""
    if values.ndim == batch.batch_dims:
        return values
    taken = _taken(values, batch)
    return torch.where(taken, values, 0.0).sum(-1) / taken.sum(-1)


def decision_entropy(entropy: Tensor, batch: TensorDictBase, level: Level) -> Tensor:
    """Return the entropy ``[rows]`` of decisions: of a chunk the sum over its actions taken, or their mean."""
    if entropy.ndim == batch.batch_dims:
        return entropy
    if level == "action":
        return per_decision(entropy, batch)
    return torch.where(_taken(entropy, batch), entropy, 0.0).sum(-1)


def like(values: Tensor, ratio: Tensor) -> Tensor:
    """Return ``values`` ``[rows]`` so that they broadcast against a ratio ``[rows]`` or ``[rows, chunk_size]``."""
    return values.unsqueeze(-1) if ratio.ndim > values.ndim else values


def _taken(values: Tensor, batch: TensorDictBase) -> Tensor:
    """Tell which actions were taken, ``[rows, chunk_size]``."""
    if "num_actions" not in batch.keys():  # noqa: SIM118
        return torch.ones_like(values, dtype=torch.bool)
    order = torch.arange(values.shape[-1], device=values.device)
    return order < batch["num_actions"].unsqueeze(-1)
