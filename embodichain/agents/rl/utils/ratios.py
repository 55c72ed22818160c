"""Ratios of the probabilities that two policies give the same actions."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Two policies whose ratio is beyond ``e**20`` have nothing in common there, and how much further apart they are says
nothing; but beyond ``e**88`` it is infinite, and times an advantage of zero not a number."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return a logarithm of a ratio that can be exponentiated; beyond the bound it has no gradient."""
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Return ``r - 1 - log r`` of ``log r = log q / p``: on samples of p its mean is ``KL(p || q)``, never negative."""
    log_r = bounded(log_ratio)
    return log_r.exp() - 1.0 - log_r
