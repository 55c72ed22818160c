"""From a list of chunks to one batch, padded and masked where their lengths differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, pad_sequence
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torch_collate

MASK = "mask"
"""The key that tells frames (True) from padding (False), ``[batch_size, chunk_size]``."""


def collate_chunks(batch: Sequence[TensorDictBase]) -> TensorDictBase:
    """Stack chunks ``[chunk_size]`` into ``[len(batch), chunk_size]``; shorter ones are padded and masked."""
    if len({chunk.batch_size[:1] for chunk in batch}) <= 1:
        return ready_to_send(torch.stack(list(batch)))
    masked = [chunk if MASK in chunk else with_mask(chunk) for chunk in batch]
    return ready_to_send(pad_sequence(masked, pad_dim=0, padding_value=0.0))


def ready_to_send(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch as a DataLoader worker should send it: in one piece of shared memory instead of one per key.

    Outside of a worker, and for what is no TensorDict (a transform may return anything), nothing is done.
    """
    if get_worker_info() is None or not isinstance(batch, TensorDictBase):
        return batch
    return batch.consolidate(share_memory=True)


def with_mask(chunk: TensorDictBase) -> TensorDictBase:
    """Return the chunk with a mask of ones: padding it later leaves False wherever there is no frame."""
    frames = chunk.batch_size[0]
    return chunk.copy().set(MASK, torch.ones(frames, dtype=torch.bool, device=chunk.device))


def register_default_collation() -> None:
    """Teach torch's default collation what a TensorDict is, so that a DataLoader needs no ``collate_fn``.

    Items are collated through the map that torch keeps for this. Ready batches (``batch_size=None``) go through
    ``default_convert``, which has no such map and takes a TensorDict for a dict it can iterate over by key; there the
    function itself is wrapped, once.
    """
    torch_collate.default_collate_fn_map.setdefault(TensorDict, _collate_by_default)
    if torch_collate.default_convert is not default_convert:
        torch_collate.default_convert = default_convert


_torch_convert: Callable[[Any], Any] = torch_collate.default_convert


def default_convert(data: Any) -> Any:
    """Do what torch's ``default_convert`` does, and leave TensorDicts as they are."""
    return data if isinstance(data, TensorDictBase) else _torch_convert(data)


def _collate_by_default(
    batch: Sequence[TensorDictBase],
    *,
    collate_fn_map: Mapping[type | tuple[type, ...], Callable[..., Any]] | None = None,
) -> TensorDictBase:
    return collate_chunks(batch)
