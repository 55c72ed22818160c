"""Ratios of the probabilities that two policies give the same decisions.

A decision is one action, or a chunk of them (``ChunkedEnv``). Log-probabilities are ``[...]``, or ``[..., chunk_size]``
with one per action, or ``[..., chunk_size, factors]`` with one per token of every action; 1 stands in the place of
``chunk_size`` where factors, such as the steps of a denoising chain, choose the chunk as a whole. ``num_actions``
``[...]`` tells how many actions of a chunk were really taken: the others do not count. Where decisions differ in their
number of factors, as sequences with an end do, ``num_factors`` ``[...]`` of the decision tells it.
"""

import math

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.utils import Level

MAX_LOG_RATIO = 20.0
"""Bound of the logarithm of a ratio: beyond 88 the ratio is infinite, and times an advantage of zero not a number."""
Number = float | Tensor
"""A number that stays, or one on the device, ``[]``, that changes."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return a logarithm of a ratio that can be exponentiated; beyond the bound it has no gradient."""
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def clipped_gain(log_ratio: Tensor, gain: Tensor, clip: Number, high: Number | None = None) -> Tensor:
    """Return ``min(r A, clip(r, 1 - c, 1 + h) A)`` of ``log r`` and advantages A that broadcast against it.

    ``h`` is ``c`` unless ``high`` is given; tensors ``[]`` stand for bounds that change while a CUDA graph is replayed.
    Bounding the logarithm takes half the operations of the formula, and no ratio becomes infinite.
    """
    (least, most), gains = _log_bounds(clip, high), gain >= 0.0
    low, high = torch.where(gains, -math.inf, least), torch.where(gains, most, MAX_LOG_RATIO)
    return log_ratio.clamp(low, high).exp() * gain


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Return ``r - 1 - log r`` of ``log r = log q / p``: on samples of p its mean is ``KL(p || q)``, never negative."""
    log_r = bounded(log_ratio)
    return (log_r.expm1() - log_r).clamp(min=0.0)  # r - 1 would be rounding alone where r is close to 1


def is_clipped(log_ratio: Tensor, clip: Number, high: Number | None = None) -> Tensor:
    """Tell where a ratio lies outside ``[1 - c, 1 + h]``, as 1 or 0; ``h`` is ``c`` unless ``high`` is given."""
    least, most = _log_bounds(clip, high)
    return ((log_ratio < least) | (log_ratio > most)).float()


def _log_bounds(clip: Number, high: Number | None) -> tuple[Number, Number]:
    high = clip if high is None else high
    if isinstance(clip, Tensor):
        least: Number = torch.log1p(-clip.clamp(max=1.0))
    else:
        least = math.log(1.0 - clip) if clip < 1.0 else -math.inf
    return least, torch.log1p(high) if isinstance(high, Tensor) else math.log(1.0 + high)


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, batch: TensorDictBase, level: Level) -> Tensor:
    """Return ``log pi / pi_old`` ``[...]``, or one per action or factor: 0 for actions that were not taken."""
    difference = log_prob - old_log_prob
    if difference.ndim == batch.batch_dims:
        return difference
    return _summed(torch.where(_taken(difference, batch), difference, 0.0), batch, level)


def per_decision(values: Tensor, batch: TensorDictBase) -> Tensor:
    """Return ``[rows]``: the mean over the actions taken, or their factors, where there is a value for each of them."""
    if values.ndim == batch.batch_dims:
        return values
    taken, inner = _taken(values, batch), _inner(values, batch)
    return torch.where(taken, values, 0.0).sum(inner) / taken.expand_as(values).sum(inner)


def decision_entropy(entropy: Tensor, batch: TensorDictBase, level: Level) -> Tensor:
    """Return the entropy ``[rows]`` of decisions: of a chunk the sum over what was taken, else the mean per ratio."""
    if entropy.ndim == batch.batch_dims:
        return entropy
    return per_decision(_summed(torch.where(_taken(entropy, batch), entropy, 0.0), batch, level), batch)


def count_ratios(log_prob: Tensor, batch: TensorDictBase, level: Level) -> Tensor | float:
    """Return how many ratios ``[rows]`` a decision has."""
    if log_prob.ndim == batch.batch_dims or level == "chunk":
        return 1.0
    ratios = _summed(torch.zeros_like(log_prob), batch, level)
    return _taken(ratios, batch).expand_as(ratios).sum(_inner(ratios, batch))


def like(values: Tensor, ratio: Tensor) -> Tensor:
    """Return ``values`` ``[rows]`` so that they broadcast against ratios ``[rows, ...]``."""
    return values.view(*values.shape, *[1] * (ratio.ndim - values.ndim)) if ratio.ndim > values.ndim else values


def _taken(values: Tensor, batch: TensorDictBase) -> Tensor:
    """Tell which actions were taken, so that it broadcasts against ``values`` ``[rows, chunk_size, ...]``."""
    if values.ndim == batch.batch_dims + 2 and (factors := batch.get(("decision", "num_factors"), None)) is not None:
        return torch.arange(values.shape[-1], device=values.device) < factors.view(*factors.shape, 1, 1)
    if "num_actions" not in batch.keys():  # noqa: SIM118
        return torch.ones_like(values, dtype=torch.bool)
    order = torch.arange(values.shape[batch.batch_dims], device=values.device)
    taken = order < batch["num_actions"].unsqueeze(-1)
    return taken.unsqueeze(-1) if values.ndim > taken.ndim else taken


def _inner(values: Tensor, batch: TensorDictBase) -> tuple[int, ...]:
    """Return the dimensions of actions and factors."""
    return tuple(range(batch.batch_dims, values.ndim))


def _summed(values: Tensor, batch: TensorDictBase, level: Level) -> Tensor:
    """Return the sums that a level asks for: over all of a chunk, over the factors of an action, or none."""
    if level == "chunk":
        return values.sum(_inner(values, batch))
    return values.sum(-1) if level == "action" and values.ndim == batch.batch_dims + 2 else values
