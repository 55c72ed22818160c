"""From observations to network inputs: choose keys, flatten, normalise, look at pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from embodichain.agents.rl.models.image_encoder import ImageEncoder, ImageEncoderCfg
from embodichain.agents.rl.models.normalizer import RunningNormalizer
from embodichain.agents.rl.utils.observations import Observation, sorted_leaves
from embodichain.errors import ConfigError, ObservationError, nearest

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
