"""Episodes and their frames: the layout of a frame, finished episodes, and the ``EpisodeSource`` protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.errors import EnvContractError, SimulationError

Key = tuple[str, ...]
Frames = dict[Key, Tensor]


@dataclass(frozen=True)
class Leaf:
    """One array of a frame: its nested key, element type and shape."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def elements(self) -> int:
        """Number of elements in one frame."""
        return math.prod(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements of a contiguous sequence of frames ``[n, *shape]``."""
        return tuple(math.prod(self.shape[axis:]) for axis in range(len(self.shape) + 1))

    @property
    def nbytes(self) -> int:
        """Bytes in one frame."""
        return self.elements * self.dtype.itemsize


ENDS = (Leaf(("reward",), torch.float32, ()), *(Leaf((name,), torch.bool, ()) for name in ("terminated", "truncated")))
"""The last arrays of every frame."""


@dataclass(frozen=True)
class FrameLayout:
    """All arrays of a frame, in the order in which they are stored."""

    leaves: tuple[Leaf, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in one frame."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def shape_of(self, *key: str) -> tuple[int, ...] | None:
        """Return the shape stored under a key, or None if there is no such key."""
        return next((leaf.shape for leaf in self.leaves if leaf.key == key), None)

    def empty(self, *batch_size: int, **options: Any) -> Frames:
        """Return an uninitialized tensor ``[*batch_size, ...]`` per array; ``options`` go to ``torch.empty``."""
        return {leaf.key: torch.empty(*batch_size, *leaf.shape, dtype=leaf.dtype, **options) for leaf in self.leaves}

    def to_json(self) -> list[list[Any]]:
        """Return the layout as JSON data, for ``from_json``."""
        return [[list(leaf.key), str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] for leaf in self.leaves]

    @classmethod
    def from_json(cls, data: Iterable[Iterable[Any]]) -> FrameLayout:
        """Build a layout from the output of ``to_json``."""
        return cls(tuple(Leaf(tuple(key), getattr(torch, dtype), tuple(shape)) for key, dtype, shape in data))

    @classmethod
    def of_step(
        cls, observation: TensorDictBase, action: Tensor, extra: Mapping[Key, Tensor] | None = None
    ) -> FrameLayout:
        """Derive the layout from one batched step: observation, action and extra tensors, ``[num_envs, ...]``."""
        sample: Frames = {("observation", *key): value for key, value in flatten(observation).items()}
        sample |= {("action",): action, **(extra or {})}
        return cls((*(Leaf(key, value.dtype, tuple(value.shape[1:])) for key, value in sample.items()), *ENDS))


def flatten(nested: TensorDictBase) -> Frames:
    """Return the tensors of a nested TensorDict by full key, sorted."""
    flat: Frames = {}
    for name, value in nested.items(include_nested=True, leaves_only=True):
        key = (name,) if isinstance(name, str) else tuple(name)
        if not isinstance(value, Tensor):
            raise EnvContractError(f"observation {'/'.join(key)} must be a tensor, got {type(value).__name__}")
        flat[key] = value
    return dict(sorted(flat.items()))


def unflatten(flat: Mapping[Key, Any]) -> dict[str, Any]:
    """Return nested dicts from a mapping of full keys; the inverse of ``flatten``."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        inner = nested
        for name in key[:-1]:
            inner = inner.setdefault(name, {})
        inner[key[-1]] = value
    return nested


INSTRUCTION: Key = ("observation", "instruction")
"""Language instruction: UTF-8 bytes, padded with zeros."""


def words_of(instruction: Tensor) -> str | None:
    """Decode an instruction ``[length]``; None if the tensor holds no printable text."""
    if instruction.dtype != torch.uint8 or instruction.dim() != 1:
        return None
    try:
        text = bytes(instruction.tolist()).rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return None
    return text if text.strip() and text.isprintable() else None


def bytes_of(words: str, length: int) -> Tensor:
    """Encode a text as an instruction ``[length]``, padded with zeros; characters that do not fit are dropped."""
    text = words.encode()[:length].decode(errors="ignore").encode()
    return torch.tensor([*text, *[0] * (length - len(text))], dtype=torch.uint8)


@dataclass
class Episode:
    """One finished episode; its frames are views of its source's memory, valid until the source's next step."""

    frames: dict[Key, tuple[Tensor, ...]]
    """For each key the frames in order, as consecutive pieces ``[n, ...]``."""
    length: int
    seed: int = -1
    """Seed with which the environment can repeat the episode; -1 if unknown."""
    success: bool | None = None
    """Whether the task was solved; None if the environment does not report it."""
    policy_version: int = -1
    task: str | None = None
    """Language instruction; None if unknown."""
    task_index: int = 0
    """Index of the task among several."""

    def check_finite(self) -> None:
        """Raise ``SimulationError`` if any value of the episode is NaN or infinite."""
        for key, pieces in self.frames.items():
            # A sum is not finite if any term is not; only then every value is checked.
            if pieces[0].is_floating_point() and not all(math.isfinite(p.sum(dtype=torch.float64)) for p in pieces):
                frames = torch.cat(pieces)
                bad = torch.nonzero(~torch.isfinite(frames).reshape(len(frames), -1).all(dim=1)).reshape(-1)
                if bad.numel():  # else only the sum overflowed
                    raise SimulationError(
                        f"{'/'.join(key)} is not finite at step {int(bad[0])} of the episode with seed {self.seed}: "
                        f"{frames[bad[0]].reshape(-1)[:8].tolist()}"
                    )


class EpisodeSource(Protocol):
    """Produces finished episodes."""

    layout: FrameLayout
    max_steps: int
    """Length of the longest possible episode."""
    step_seconds: float | None
    """Time between two frames; None if unknown."""

    def advance(self) -> list[Episode]:
        """Take one step and return the episodes that ended, valid until the next call."""

    def close(self) -> None:
        """Release the resources of the source."""


@dataclass(frozen=True)
class EpisodeInfo:
    """Metadata of the episode in a row of the buffer."""

    row: int
    length: int
    """Number of frames; 0 if the row is still empty."""
    sequence: int
    """Increases by two with every write to the row: equal numbers mean the same episode."""
    worker: int
    seed: int
    """Episode seed: ``env.reset(seed=torch.tensor([seed]))`` starts the same episode; -1 if unknown."""
    policy_version: int
    """Number of updates of the policy that acted; -1 for experts and random actions."""
    success: bool | None
    time: float
    """Unix time at which the episode was written."""
    task_index: int = 0
    """Index into the engine's ``tasks``."""
