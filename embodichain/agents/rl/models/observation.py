"""Converts observations to network inputs: selects keys, flattens, normalises, encodes images."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from embodichain.agents.rl.models.mlp import ImageEncoder, ImageEncoderCfg
from embodichain.agents.rl.models.text import TextEncoder, TextEncoderCfg
from embodichain.agents.rl.utils.distributed import SharedStatistics, batch_moments, merge_moments
from embodichain.agents.rl.utils.tensordicts import Observation, sorted_leaves
from embodichain.errors import ConfigError, ObservationError, nearest

ObservationSpace = gym.Space[Any] | int
_FROM_CAMERAS = ("image", "depth", "segmentation")
"""Groups of observations that an image encoder processes."""
_MOST_IDS = 256


class RunningNormalizer(SharedStatistics):
    """Normalises ``[..., dim]`` to zero mean and unit variance by running statistics.

    Only ``update`` changes the statistics, in training mode and unless they are ``frozen``. So they are constant while
    a rollout is collected and trained on. They are buffers, saved with the policy. While they are empty, inputs are
    only clipped; algorithms therefore take the first statistics from the first rollout before they train on it.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, dim: int, clip: float = 10.0, eps: float = 1e-8) -> None:
        super().__init__()
        self.dim, self.clip, self.eps = dim, clip, eps
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(dim, dtype=torch.float64))
        # For forward, in the precision of the network; derived from the three above.
        self.register_buffer("shift", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.shift) * self.scale).clamp(-self.clip, self.clip)

    @property
    def variance(self) -> Tensor:
        """Population variance ``[dim]`` of all data so far; ones before the first update."""
        count = self.count.abs()
        return self.m2 / count if count > 0 else torch.ones_like(self.m2)

    @property
    def is_empty(self) -> bool:
        """Whether there are no statistics yet, and ``update`` would add some."""
        return bool(self.count == 0.0) and not self.frozen

    @property
    def frozen(self) -> bool:
        """Whether ``update`` does nothing; stored as the sign of ``count``, so that it is saved, too."""
        return bool(self.count.signbit())

    @frozen.setter
    def frozen(self, value: bool) -> None:
        self.count.copy_(-self.count.abs() if value else self.count.abs())

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Update the statistics with ``[..., dim]`` data; does nothing in evaluation mode or while frozen."""
        if not self.training or self.frozen:
            return
        merged, own = (self.count, self.mean, self.m2), batch_moments(x, self.dim)
        for moments in (own,) if self.share is None else self.share(own):
            merged = merge_moments(merged, moments)
        for buffer, value in zip((self.count, self.mean, self.m2), merged, strict=True):
            buffer.copy_(value)
        self.shift.copy_(self.mean)
        # A constant column is shifted to zero but not scaled.
        self.scale.copy_(torch.where(self.variance <= self.eps, 1.0, (self.variance + self.eps).rsqrt()))

    def impossible(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        """Yield name and problem of those ``values`` of the buffers that no data leads to."""
        for name, value in values.items():
            if not _is_finite(value):
                yield name, _not_finite(~value.isfinite())
        if "m2" in values and bool((values["m2"] < 0.0).any()):
            yield "m2", f"expected sums of squares of at least 0, got {float(values['m2'].min()):g}"
        if "scale" in values and bool((values["scale"] <= 0.0).any()):
            yield "scale", f"expected scales above 0, got {float(values['scale'].min()):g}"


def impossible_values(module: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Return which ``weights`` of a module are not finite, or are statistics that no data leads to, one line each.

    Buffers, such as masks and bounds, may be infinite, but not NaN.
    """
    found = {}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in weights.items():
        if value.is_floating_point() and not _is_finite(value):
            wrong = ~value.isfinite() if name in parameters else value.isnan()
            if bool(wrong.any()):
                found[name] = _not_finite(wrong)
    for prefix, part in module.named_modules():
        if isinstance(part, RunningNormalizer):
            path = f"{prefix}." if prefix else ""
            own = {key: weights[path + key] for key, _ in part.named_buffers() if path + key in weights}
            found = {path + key: problem for key, problem in part.impossible(own)} | found
    return [f"{name}: {problem}" for name, problem in found.items()]


def _not_finite(wrong: Tensor) -> str:
    return f"expected finite numbers, {int(wrong.sum())} of {wrong.numel()} are not"


def _is_finite(values: Tensor) -> bool:
    """Return whether all values are finite, mostly without memory of their size: a sum reveals any that is not."""
    return math.isfinite(float(values.sum(dtype=torch.float32))) or bool(values.isfinite().all())


@dataclass(frozen=True)
class ObservationEntry:
    """One tensor of an observation: its key path, and its shape without batch dimensions."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    is_image: bool
    """Whether an image encoder processes it."""
    is_bytes: bool = False
    """Whether it is uint8."""
    largest: float = 1.0
    """For images: the largest value of the space, usually 255 for uint8 and 1 for floats; for depth, ``far``."""
    num_ids: int = 0
    """For segmentations: number of ids, which are one-hot encoded."""

    @property
    def name(self) -> str:
        # as in configs: robot/qpos
        return "/".join(self.path)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def space_entries(space: ObservationSpace, path: tuple[str, ...] = ()) -> list[ObservationEntry]:
    """Return the entries of a space in sorted key order; an int is a flat observation of that width."""
    if isinstance(space, int):
        return [ObservationEntry(path, (space,), False)]
    if isinstance(space, gym.spaces.Dict):
        return [entry for key in sorted(space.spaces) for entry in space_entries(space.spaces[key], (*path, key))]
    if not isinstance(space, gym.spaces.Box):
        raise ConfigError(f"{'/'.join(path) or 'observation_space'}: expected a Box, a Dict or an int, got {space}")
    is_image = (len(path) > 1 and path[0] in _FROM_CAMERAS) or looks_like_image(space)
    highest = float(space.high.max(initial=1.0)) if is_image else 1.0
    if not math.isfinite(highest):
        highest = 1.0
    num_ids = int(highest) + 1 if len(path) > 1 and path[0] == "segmentation" else 0
    if num_ids > _MOST_IDS:
        raise ConfigError(
            f"{'/'.join(path)}: a policy sees segmentations of at most {_MOST_IDS} ids, and here are {num_ids}; leave "
            "it out of the camera's outputs, or map the ids to fewer in an environment of your own",
            "policy",
        )
    return [ObservationEntry(path, tuple(space.shape), is_image, space.dtype == np.uint8, highest, num_ids)]


def is_from_camera(name: str) -> bool:
    """Return whether an observation is an output of a camera in ``env.observations.cameras``, such as ``image/top``."""
    return name.startswith(tuple(f"{group}/" for group in _FROM_CAMERAS))


def looks_like_image(space: gym.spaces.Box) -> bool:
    """Return whether a box holds images: uint8 ``[H, W]`` up to 255, or uint8 or floats of three or four dimensions.

    Floats must be in [0, 1] or [0, 255], with two sides of at least 8. A uint8 matrix with a smaller range, such as a
    board, is a vector.
    """
    rank, highest = len(space.shape), float(space.high.max(initial=0.0))
    if space.dtype == np.uint8:
        return rank > 2 or (rank == 2 and highest == 255)
    ranges = bool((space.low == 0).all()) and highest in (1.0, 255.0) and bool((space.high == highest).all())
    return rank in (3, 4) and ranges and sorted(space.shape)[-2] >= 8


def select_entries(
    entries: list[ObservationEntry], names: Iterable[str], setting: str, source: str
) -> list[ObservationEntry]:
    """Return the entries whose name or parent group is in ``names``; raise ``ConfigError`` if a name has no match."""
    chosen: list[ObservationEntry] = []
    for name in names:
        found = [entry for entry in entries if entry.name == name or entry.name.startswith(f"{name}/")]
        if not found:
            known = {entry.name for entry in entries} | {entry.path[0] for entry in entries if entry.path}
            raise ConfigError(f"{setting}: the observations have no {name!r}.{nearest(name, known)}", source)
        chosen += found
    return chosen


def entry_of(obs: Observation, path: tuple[str, ...], remedy: str = "") -> Tensor:
    """Return one tensor of a nested observation; ``ObservationError`` if it is missing, followed by ``remedy``."""
    name = "/".join(path)
    if isinstance(obs, Tensor):
        raise ObservationError(f"{name!r} cannot be found in a flat tensor: pass the nested TensorDict")
    value = obs.get(path, None)
    if not isinstance(value, Tensor):
        names = ["/".join(keys) for keys, _ in sorted_leaves(obs)]
        raise ObservationError(f"the observation lacks {name!r}.{nearest(name, names)}{remedy}")
    return value


class FeatureEncoder(nn.Module):
    """Encodes an observation as public features ``[..., public_dim]`` and privileged ones, which only the critic uses.

    Vectors are flattened and concatenated in sorted key order; those in ``critic_obs`` are privileged. Each image has
    its own encoder. With ``actor_obs``, entries in neither of the two are ignored. ``obs_space`` is a Gymnasium space
    or the width of a flat observation. Flat tensors work for every space without images, with the columns of
    ``flatten_dict_observation``.
    """

    def __init__(
        self,
        obs_space: ObservationSpace,
        normalize: bool = False,
        critic_obs: Sequence[str] = (),
        image_encoder: ImageEncoderCfg | None = None,
        actor_obs: Sequence[str] | None = None,
        text_encoder: TextEncoderCfg | None = None,
    ) -> None:
        super().__init__()
        self.is_flat = not isinstance(obs_space, gym.spaces.Dict)
        given = entries = space_entries(obs_space)
        hidden = select_entries(given, critic_obs, "critic_obs", "policy")
        if actor_obs is not None:
            entries = _used_entries(given, actor_obs, hidden)
        if images := [entry.name for entry in hidden if entry.is_image]:
            raise ConfigError(f"critic_obs: {images[0]!r} is an image; only vectors can be privileged", "policy")
        vectors = [entry for entry in entries if not entry.is_image]
        privileged = [entry for entry in vectors if entry in hidden]
        self.vectors = [entry for entry in vectors if entry not in hidden] + privileged
        self.images = [entry for entry in entries if entry.is_image]
        self.text_encoder = None if text_encoder is None else TextEncoder(text_encoder)
        self._raw_dim = self.vector_dim = sum(entry.size for entry in vectors)
        self._raw_text = self.text_columns = slice(0)
        """Columns of the instruction: its bytes, and its codes in the encoded vectors."""
        if self.text_encoder is not None:
            self._raw_text = _text_columns(self.vectors, privileged)
            begin = self._raw_text.start
            self.text_columns = slice(begin, begin + self.text_encoder.dim)
            self.vector_dim += self.text_columns.stop - self._raw_text.stop
        self.privileged_dim = sum(entry.size for entry in privileged)
        self.normalizer = RunningNormalizer(self.vector_dim) if normalize and self.vector_dim else None
        cfg = image_encoder or ImageEncoderCfg()
        self.image_encoders = nn.ModuleList(
            ImageEncoder(entry.shape, cfg, entry.largest, entry.name or "observation", entry.num_ids)
            for entry in self.images
        )
        self.public_dim = self.vector_dim - self.privileged_dim + cfg.feature_dim * len(self.images)
        if not self.public_dim:
            hidden_too = ", as all of it is in critic_obs" if self.privileged_dim else f": its space is {obs_space}"
            raise ConfigError(f"the observation holds no numbers for the policy to see{hidden_too}", "policy")
        self._order: Tensor | None = None  # permutation of a flat tensor's columns, if needed
        flat = [entry for entry in given if not entry.is_image]
        self._flat_dim = sum(entry.size for entry in flat)
        if self.vectors != flat and self.vectors:
            columns = torch.arange(self._flat_dim).split([entry.size for entry in flat])
            self._order = torch.cat([columns[flat.index(entry)] for entry in self.vectors])

    def forward(self, obs: Observation, images: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return ``(public [..., public_dim], privileged [..., privileged_dim] or None)``.

        In ``public``, vectors come first; ``images=False`` leaves out the features of images.
        """
        parts, privileged = list[Tensor](), None
        if self.vector_dim:
            vector = self.vector(obs)
            if self.normalizer is not None:
                vector = self.normalizer(vector)
            if self.privileged_dim:
                vector, privileged = vector.split([self.vector_dim - self.privileged_dim, self.privileged_dim], dim=-1)
            parts.append(vector)
        for entry, encoder in zip(self.images, self.image_encoders, strict=True) if images else ():
            image = entry_of(obs, entry.path) if not self.is_flat else obs
            parts.append(encoder(image if isinstance(image, Tensor) else next(sorted_leaves(image))[1]))
        return _join(parts), privileged

    def vector(self, obs: Observation) -> Tensor:
        """Return all vectors, float32 ``[..., vector_dim]``: the public, then the privileged ones, each sorted."""
        raw = self._raw_vector(obs)
        if self.text_encoder is None:
            return raw
        text = self._raw_text
        return torch.cat((raw[..., : text.start], self.text_encoder(raw[..., text]), raw[..., text.stop :]), dim=-1)

    def _raw_vector(self, obs: Observation) -> Tensor:
        if isinstance(obs, Tensor):
            if self.images:
                raise ObservationError("a flat tensor holds no images: pass the nested TensorDict")
            if obs.shape[-1] != self._flat_dim:
                wanted = f"expected observations of {self._flat_dim} numbers"
                raise ObservationError(f"{wanted}, got shape {list(obs.shape)}")
            flat = obs if self._order is None else obs.index_select(-1, self._order.to(obs.device))
        elif self.is_flat:
            flat = _join([_columns(value, value.ndim - obs.batch_dims) for _, value in sorted_leaves(obs)])
        else:
            flat = _join([_columns(entry_of(obs, entry.path), len(entry.shape)) for entry in self.vectors])
        if flat.shape[-1] != self._raw_dim:
            raise ObservationError(f"expected observations of {self._raw_dim} numbers, got shape {list(flat.shape)}")
        return flat if flat.dtype == torch.float32 else flat.float()

    def update_normalizer(self, obs: Observation) -> None:
        """Update the running statistics, if any, with observations ``[...]``."""
        if self.normalizer is not None and self.training:
            self.normalizer.update(self.vector(obs))


def _text_columns(vectors: Sequence[ObservationEntry], privileged: Sequence[ObservationEntry]) -> slice:
    """Return the columns of the instruction in the concatenated vectors; raise ``ConfigError`` if there is none."""
    begin = 0
    for entry in vectors:
        if entry.is_bytes and len(entry.shape) == 1 and entry.path[-1:] == ("instruction",):
            if entry in privileged:
                problem = f"{entry.name!r} is in critic_obs, and the actor has to read it"
                raise ConfigError(f"text_encoder: {problem}; leave one of them out", "policy")
            return slice(begin, begin + entry.size)
        begin += entry.size
    problem = "expected an observation 'instruction', a uint8 vector, and the policy sees none"
    raise ConfigError(f"text_encoder: {problem}; leave it out, or use a task with language", "policy")


def _used_entries(
    entries: list[ObservationEntry], actor_obs: Sequence[str], hidden: list[ObservationEntry]
) -> list[ObservationEntry]:
    """Return the entries that the actor or the critic uses, in their order."""
    public = select_entries(entries, actor_obs, "actor_obs", "policy")
    if both := [entry.name for entry in public if entry in hidden]:
        raise ConfigError(f"critic_obs: {both[0]!r} is in actor_obs, too; only the critic sees critic_obs", "policy")
    if not public:
        raise ConfigError("actor_obs: expected at least one key, got none; leave it out to see everything", "policy")
    return [entry for entry in entries if entry in public or entry in hidden]


def _columns(value: Tensor, rank: int) -> Tensor:
    """Flatten the last ``rank`` dimensions to one."""
    return value.unsqueeze(-1) if rank == 0 else value.flatten(value.ndim - rank)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
