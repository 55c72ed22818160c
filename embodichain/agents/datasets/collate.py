"""From a list of chunks to one batch, padded and masked where their lengths differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, pad_sequence
from torch.utils.data._utils.collate import default_collate_fn_map

MASK = "mask"
"""The key that tells frames (True) from padding (False), ``[batch_size, chunk_size]``."""


def collate_chunks(batch: Sequence[TensorDictBase]) -> TensorDictBase:
    """Stack chunks ``[chunk_size]`` into ``[len(batch), chunk_size]``; shorter ones are padded with zeros and masked."""
    if len({chunk.batch_size[:1] for chunk in batch}) <= 1:
        return torch.stack(list(batch))
    masked = [chunk if MASK in chunk else with_mask(chunk) for chunk in batch]
    return pad_sequence(masked, pad_dim=0, padding_value=0.0)


def with_mask(chunk: TensorDictBase) -> TensorDictBase:
    """Return the chunk with a mask of ones: padding it later leaves False wherever there is no frame."""
    frames = chunk.batch_size[0]
    return chunk.copy().set(MASK, torch.ones(frames, dtype=torch.bool, device=chunk.device))


def register_default_collation() -> None:
    """Teach torch's ``default_collate`` what a TensorDict is, so that a DataLoader needs no ``collate_fn``."""
    default_collate_fn_map.setdefault(TensorDict, _collate_by_default)


def _collate_by_default(
    batch: Sequence[TensorDictBase],
    *,
    collate_fn_map: Mapping[type | tuple[type, ...], Callable[..., Any]] | None = None,
) -> TensorDictBase:
    return collate_chunks(batch)
