"""Probability ratios of two policies, for single actions and for chunks.

A decision is one action or a chunk of actions (``ChunkedEnv``). Log-probabilities have the shape ``[...]``,
``[..., chunk_size]`` with one per action, or ``[..., chunk_size, factors]`` with one per token of each action. If the
factors determine the chunk as a whole, such as the steps of a denoising chain, the shape is ``[..., 1, factors]``.
``num_actions`` ``[...]`` is the number of actions of a chunk that were executed; the others are ignored. If decisions
differ in their number of factors, ``num_factors`` ``[...]`` of the decision holds it.
"""

import math

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.utils import Level

MAX_LOG_RATIO = 20.0
"""Upper bound of log-ratios: above 88 the ratio is infinite, and its product with an advantage of 0 is NaN."""
Number = float | Tensor
"""A constant, or a tensor ``[]`` that changes."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio so that its exponential is finite; beyond the bound the gradient is zero."""
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def clipped_gain(log_ratio: Tensor, gain: Tensor, clip: Number, high: Number | None = None) -> Tensor:
    """Return ``min(r A, clip(r, 1 - c, 1 + h) A)`` for ``log r`` and advantages A that broadcast against it.

    ``h`` is ``c`` unless ``high`` is given. Bounds that change while a CUDA graph is replayed are tensors ``[]``.
    Clamping the logarithm takes half the operations, and no ratio becomes infinite.
    """
    (least, most), gains = _log_bounds(clip, high), gain >= 0.0
    low, high = torch.where(gains, -math.inf, least), torch.where(gains, most, MAX_LOG_RATIO)
    return log_ratio.clamp(low, high).exp() * gain


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Return ``r - 1 - log r >= 0`` for ``log r = log q / p``; its mean over samples of p is ``KL(p || q)``."""
    log_r = bounded(log_ratio)
    return (log_r.expm1() - log_r).clamp(min=0.0)  # expm1: r - 1 loses precision for r near 1


def is_clipped(log_ratio: Tensor, clip: Number, high: Number | None = None) -> Tensor:
    """Return 1 where a ratio is outside ``[1 - c, 1 + h]``, else 0; ``h`` is ``c`` unless ``high`` is given."""
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
    """Return ``log pi / pi_old`` per decision ``[...]``, action or factor; 0 for actions that were not executed."""
    difference = log_prob - old_log_prob
    if difference.ndim == batch.batch_dims:
        return difference
    return _summed(torch.where(_taken(difference, batch), difference, 0.0), batch, level)


def per_decision(values: Tensor, batch: TensorDictBase) -> Tensor:
    """Return ``[rows]``: the mean over the executed actions or their factors, if there is a value for each."""
    if values.ndim == batch.batch_dims:
        return values
    taken, inner = _taken(values, batch), _inner(values, batch)
    return torch.where(taken, values, 0.0).sum(inner) / taken.expand_as(values).sum(inner)


def decision_entropy(entropy: Tensor, batch: TensorDictBase, level: Level) -> Tensor:
    """Return the entropy ``[rows]`` of decisions: for level ``chunk`` the sum over executed actions, else the mean."""
    if entropy.ndim == batch.batch_dims:
        return entropy
    return per_decision(_summed(torch.where(_taken(entropy, batch), entropy, 0.0), batch, level), batch)


def count_ratios(log_prob: Tensor, batch: TensorDictBase, level: Level) -> Tensor | float:
    """Return the number of ratios ``[rows]`` of each decision."""
    if log_prob.ndim == batch.batch_dims or level == "chunk":
        return 1.0
    ratios = _summed(torch.zeros_like(log_prob), batch, level)
    return _taken(ratios, batch).expand_as(ratios).sum(_inner(ratios, batch))


def like(values: Tensor, ratio: Tensor) -> Tensor:
    """Reshape ``values`` ``[rows]`` to broadcast against ratios ``[rows, ...]``."""
    return values.view(*values.shape, *[1] * (ratio.ndim - values.ndim)) if ratio.ndim > values.ndim else values


def _taken(values: Tensor, batch: TensorDictBase) -> Tensor:
    """Return a mask of executed actions, or of used factors, that broadcasts against ``[rows, chunk_size, ...]``."""
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
    """Sum values over the whole chunk, over the factors of each action, or not at all, according to ``level``."""
    if level == "chunk":
        return values.sum(_inner(values, batch))
    return values.sum(-1) if level == "action" and values.ndim == batch.batch_dims + 2 else values
