"""Running mean and variance of observations, kept inside the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from embodichain.errors import ObservationError

Moments = tuple[Tensor, Tensor, Tensor]
"""Count ``[]``, mean ``[dim]`` and sum of squared deviations ``[dim]``, in float64."""


class RunningNormalizer(nn.Module):
    """Shifts and scales ``[..., dim]`` to zero mean and unit variance by what it has seen so far.

    The statistics change in ``update`` alone, and only in training mode: while a rollout is collected and trained on
    they stand still, so the same observation means the same input in both. They are buffers: saved, moved, resumed and
    exported with the policy. Before the first update inputs pass as they are.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, dim: int, clip: float = 10.0, eps: float = 1e-8) -> None:
        super().__init__()
        self.dim, self.clip, self.eps = dim, clip, eps
        self.share: Callable[[Moments], Sequence[Moments]] | None = None
        """Under data parallelism: maps this rank's moments to those of all ranks, in the order of ranks."""
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(dim, dtype=torch.float64))
        # What forward needs, in the precision of the network; derived from the three above.
        self.register_buffer("shift", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised observation, clipped to ``[-clip, clip]``."""
        return ((x - self.shift) * self.scale).clamp(-self.clip, self.clip)

    @property
    def variance(self) -> Tensor:
        """Population variance ``[dim]`` of everything seen; ones before the first update."""
        return self.m2 / self.count if self.count > 0 else torch.ones_like(self.m2)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Take in ``[..., dim]`` observations; does nothing in evaluation mode."""
        if self.training:
            own = batch_moments(x, self.dim)
            for moments in (own,) if self.share is None else self.share(own):
                self.merge(moments)

    @torch.no_grad()
    def merge(self, moments: Moments) -> None:
        """Take in the moments of a batch by Chan's formula."""
        self._set(merge_moments((self.count, self.mean, self.m2), moments))

    def _set(self, moments: Moments) -> None:
        self.count.copy_(moments[0])
        self.mean.copy_(moments[1])
        self.m2.copy_(moments[2])
        self.shift.copy_(self.mean)
        # A column that never changed carries no information: it is shifted to zero and not blown up.
        constant = self.variance <= self.eps
        self.scale.copy_(torch.where(constant, 1.0, (self.variance + self.eps).rsqrt()))


def batch_moments(x: Tensor, dim: int) -> Moments:
    """Return count, mean and sum of squared deviations of ``[..., dim]`` in float64."""
    if x.shape[-1] != dim:
        raise ObservationError(f"expected observations [..., {dim}], got {list(x.shape)}")
    rows = x.reshape(-1, dim).to(torch.float64)
    mean = rows.mean(0)
    return torch.tensor(float(rows.shape[0]), dtype=torch.float64, device=x.device), mean, (rows - mean).square().sum(0)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments of two sets of rows together.

    ``n = n_a + n_b``, ``mean = mean_a + d n_b / n``, ``M2 = M2_a + M2_b + d^2 n_a n_b / n`` with ``d = mean_b -
    mean_a``.
    """
    count = a[0] + b[0]
    share = b[0] / count.clamp(min=1.0)
    delta = b[1] - a[1]
    return count, a[1] + delta * share, a[2] + b[2] + delta.square() * a[0] * share
