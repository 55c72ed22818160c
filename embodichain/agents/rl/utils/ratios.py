"""Ratios of the probabilities that two policies give the same actions."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDictBase
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Two policies whose ratio is beyond ``e**20`` have nothing in common there, and how much further apart they are says
nothing; but beyond ``e**88`` it is infinite, and times an advantage of zero not a number."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return a logarithm of a ratio that can be exponentiated; beyond the bound it has no gradient."""
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def clipped_gain(log_ratio: Tensor, gain: Tensor, clip: float) -> Tensor:
    """Return ``min(r A, clip(r, 1 - c, 1 + c) A)`` of ``log r`` and advantages A that broadcast against it.

    A ratio counts up to ``1 + c`` where more of it gains something, and down to ``1 - c`` where less of it does. To
    bound its logarithm accordingly takes half the operations of the formula, and no ratio becomes infinite.
    """
    (least, most), gains = _edges(clip), gain >= 0.0
    low, high = torch.where(gains, -math.inf, least), torch.where(gains, most, MAX_LOG_RATIO)
    return log_ratio.clamp(low, high).exp() * gain


def log_importance(log_prob: Tensor, rollout: TensorDictBase) -> Tensor:
    """Return ``log pi(a|s) / mu(a|s)`` of every decision ``[num_envs, num_steps]``; mu is what collected them.

    Of a chunk it is the sum over the actions that were really taken.
    """
    difference = log_prob - rollout["sample_log_prob"]
    if difference.ndim == 2:
        return difference
    order = torch.arange(difference.shape[-1], device=difference.device)
    return torch.where(order < rollout["num_actions"].unsqueeze(-1), difference, 0.0).sum(-1)


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Return ``r - 1 - log r`` of ``log r = log q / p``: on samples of p its mean is ``KL(p || q)``, never negative."""
    log_r = bounded(log_ratio)
    return log_r.exp() - 1.0 - log_r


def is_clipped(log_ratio: Tensor, clip: float) -> Tensor:
    """Tell where a ratio lies outside ``[1 - c, 1 + c]``, as 1 or 0."""
    least, most = _edges(clip)
    return ((log_ratio < least) | (log_ratio > most)).float()


def _edges(clip: float) -> tuple[float, float]:
    """Return the logarithms of ``1 - c`` and ``1 + c``."""
    return math.log(1.0 - clip) if clip < 1.0 else -math.inf, math.log(1.0 + clip)
