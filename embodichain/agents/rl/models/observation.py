"""From observations to network inputs: choose keys, flatten, normalise, look at pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from embodichain.agents.rl.models.mlp import ImageEncoder, ImageEncoderCfg
from embodichain.agents.rl.utils.observations import Observation, sorted_leaves
from embodichain.errors import ConfigError, ObservationError, nearest

# MERGED normalizer: Running mean and variance of observations, kept inside the policy.


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


ObservationSpace = gym.Space[Any] | int


@dataclass(frozen=True)
class Leaf:
    """One tensor of an observation: where it is and what it looks like, without batch dimensions."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    is_image: bool

    @property
    def name(self) -> str:
        """The path as it is written in configs: ``robot/qpos``."""
        return "/".join(self.path)

    @property
    def size(self) -> int:
        """Numbers in the flattened leaf."""
        return math.prod(self.shape)


class ObservationEncoder(nn.Module):
    """Turns an observation into what the actor may see, ``[..., public_dim]``, and what the critic sees besides.

    Vector leaves are flattened and concatenated in sorted key order, those named in ``critic_obs`` apart; pictures go
    through one convolutional encoder each. ``obs_space`` is a Gymnasium space or the width of a flat observation. Flat
    tensors are understood for every space without pictures: their columns are those of ``flatten_dict_observation``.
    """

    def __init__(
        self,
        obs_space: ObservationSpace,
        normalize: bool = False,
        critic_obs: Sequence[str] = (),
        image_encoder: ImageEncoderCfg | None = None,
    ) -> None:
        super().__init__()
        self.is_flat = not isinstance(obs_space, gym.spaces.Dict)
        leaves = list(space_leaves(obs_space))
        hidden = _select(leaves, critic_obs)
        vectors = [leaf for leaf in leaves if not leaf.is_image]
        self.public = [leaf for leaf in vectors if leaf not in hidden]
        self.privileged = [leaf for leaf in vectors if leaf in hidden]
        self.images = [leaf for leaf in leaves if leaf.is_image]
        self.vector_dim = sum(leaf.size for leaf in vectors)
        self.privileged_dim = sum(leaf.size for leaf in self.privileged)
        self.normalizer = RunningNormalizer(self.vector_dim) if normalize and self.vector_dim else None
        cfg = image_encoder or ImageEncoderCfg()
        self.image_encoders = nn.ModuleList(ImageEncoder(leaf.shape, cfg) for leaf in self.images)
        self.public_dim = self.vector_dim - self.privileged_dim + cfg.feature_dim * len(self.images)
        self._order = _column_order(vectors, self.public + self.privileged)

    def forward(self, obs: Observation) -> tuple[Tensor, Tensor | None]:
        """Return ``(public [..., public_dim], privileged [..., privileged_dim] or None)``."""
        parts: list[Tensor] = []
        privileged: Tensor | None = None
        if self.vector_dim:
            vector = self.vector(obs)
            if self.normalizer is not None:
                vector = self.normalizer(vector)
            if self.privileged_dim:
                vector, privileged = vector.split([self.vector_dim - self.privileged_dim, self.privileged_dim], dim=-1)
            parts.append(vector)
        for leaf, encoder in zip(self.images, self.image_encoders, strict=True):
            parts.append(encoder(self._leaf(obs, leaf)))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)), privileged

    def vector(self, obs: Observation) -> Tensor:
        """Return all vector leaves as float32 ``[..., vector_dim]``: the public ones first, each part sorted."""
        if isinstance(obs, Tensor):
            if self.images:
                raise ObservationError("a flat tensor holds no pictures: pass the nested TensorDict")
            flat = obs if self._order is None else obs.index_select(-1, self._order.to(obs.device))
        elif self.is_flat:
            batch = obs.batch_dims
            flat = _join(
                [value.flatten(batch) if value.ndim > batch else value.unsqueeze(-1) for _, value in sorted_leaves(obs)]
            )
        else:
            flat = _join([_columns(self._leaf(obs, leaf), leaf) for leaf in (*self.public, *self.privileged)])
        if flat.shape[-1] != self.vector_dim:
            raise ObservationError(f"expected observations of {self.vector_dim} numbers, got shape {list(flat.shape)}")
        return flat if flat.dtype == torch.float32 else flat.float()

    def update_normalizer(self, obs: Observation) -> None:
        """Let the running statistics take in observations ``[..., ]``; nothing happens without them."""
        if self.normalizer is not None and self.training:
            self.normalizer.update(self.vector(obs))

    def _leaf(self, obs: Observation, leaf: Leaf) -> Tensor:
        if isinstance(obs, Tensor):
            if self.is_flat:
                return obs
            raise ObservationError(f"{leaf.name!r} cannot be found in a flat tensor: pass the nested TensorDict")
        if self.is_flat:
            return next(value for _, value in sorted_leaves(obs))
        value = obs.get(leaf.path, None)
        if value is None:
            names = ["/".join(path) for path, _ in sorted_leaves(obs)]
            raise ObservationError(f"the observation lacks {leaf.name!r}.{nearest(leaf.name, names)}")
        return value


def space_leaves(space: ObservationSpace, path: tuple[str, ...] = ()) -> list[Leaf]:
    """List the leaves of a space in sorted key order; an int is one flat leaf of that width."""
    if isinstance(space, int):
        return [Leaf(path, (space,), False)]
    if isinstance(space, gym.spaces.Dict):
        return [leaf for key in sorted(space.spaces) for leaf in space_leaves(space.spaces[key], (*path, key))]
    if not isinstance(space, gym.spaces.Box):
        raise ConfigError(f"{'/'.join(path) or 'observation_space'}: expected a Box, a Dict or an int, got {space}")
    looks_like_image = len(space.shape) == 3 and space.dtype == np.uint8
    return [Leaf(path, tuple(space.shape), looks_like_image or (len(path) > 1 and path[0] == "image"))]


def _select(leaves: list[Leaf], names: Sequence[str]) -> list[Leaf]:
    """Return the leaves that are, or lie below, one of the names; each name must match something."""
    chosen: list[Leaf] = []
    for name in names:
        found = [leaf for leaf in leaves if leaf.name == name or leaf.name.startswith(name + "/")]
        if not found:
            known = {leaf.name for leaf in leaves} | {leaf.path[0] for leaf in leaves if leaf.path}
            raise ConfigError(f"critic_obs: the observation has no {name!r}.{nearest(name, known)}", "policy")
        if any(leaf.is_image for leaf in found):
            raise ConfigError(f"critic_obs: {name!r} is a picture; only vectors can be privileged", "policy")
        chosen += found
    return chosen


def _column_order(given: list[Leaf], wanted: list[Leaf]) -> Tensor | None:
    """Return the columns of a flat tensor with leaves ``given`` in the order ``wanted``; None if they agree."""
    if given == wanted:
        return None
    begin = {}
    offset = 0
    for leaf in given:
        begin[leaf.path] = offset
        offset += leaf.size
    return torch.cat([torch.arange(begin[leaf.path], begin[leaf.path] + leaf.size) for leaf in wanted])


def _columns(value: Tensor, leaf: Leaf) -> Tensor:
    rank = len(leaf.shape)
    if rank == 1:
        return value
    return value.unsqueeze(-1) if rank == 0 else value.flatten(value.ndim - rank)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
