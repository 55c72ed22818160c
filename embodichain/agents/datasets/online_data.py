"""``OnlineDataset``: the live buffer of an engine as an infinite PyTorch ``IterableDataset``."""

from __future__ import annotations

import copy
import copyreg
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, pad_sequence
from torch.utils.data import IterableDataset, default_collate, default_convert, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from embodichain.agents.datasets.sampler import ChunkSizeSampler, check_size
from embodichain.errors import ChunkSizeError, ConfigError

if TYPE_CHECKING:
    from embodichain.agents.engine import OnlineDataEngine
    from embodichain.agents.engine.offsets import Offsets

Transform = Callable[[TensorDictBase], TensorDictBase]

PADDED = "action_is_pad"
"""Key that is True for frames repeated beyond the end of an episode, as in LeRobot."""
MASK = "mask"
"""Key that is True for frames and False for padding, ``[batch_size, chunk_size]``."""


class StreamTensorDict(TensorDict):
    """A TensorDict that a DataLoader can handle without a ``collate_fn``; copies and pickles are plain TensorDicts.
    Chunks are collated through torch's collate map. ``default_convert``, used for batches, has no such map."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batch dimension; empty for ``default_convert``, which would copy key by key."""
        return iter(()) if sys._getframe(1).f_code is default_convert.__code__ else super().__iter__()

    def __copy__(self) -> TensorDict:
        names = self.names if self._has_names() else None
        new = TensorDict._new_unsafe(dict(self._tensordict), self.batch_size, self.device, names)
        if self.is_consolidated():
            new._consolidated = self._consolidated  # keep the single storage, which is sent as one piece
        return new

    def __reduce__(self) -> Any:
        return copyreg.dispatch_table[TensorDict](copy.copy(self))


def collate_chunks(batch: Sequence[TensorDictBase], **_: Any) -> TensorDictBase:
    """Stack chunks ``[chunk_size]`` into ``[len(batch), chunk_size]``; shorter chunks are padded and masked."""
    if len({chunk.batch_size[:1] for chunk in batch}) > 1:
        masked = [chunk if MASK in chunk else with_mask(chunk) for chunk in batch]
        stacked = pad_sequence(masked, pad_dim=0, padding_value=0.0)
        if PADDED in stacked.keys():  # noqa: SIM118 - iterating a TensorDict yields rows
            stacked[PADDED] |= ~stacked[MASK]
    else:
        stacked = torch.stack(list(batch))
    return ready_to_send(copy.copy(stacked))


default_collate_fn_map[StreamTensorDict] = collate_chunks


def ready_to_send(batch: TensorDictBase) -> TensorDictBase:
    """In a DataLoader worker, move a batch into one piece of shared memory instead of one per key."""
    if get_worker_info() is None or not isinstance(batch, TensorDictBase):
        return batch
    return batch.consolidate(share_memory=True)


def with_mask(chunk: TensorDictBase) -> TensorDictBase:
    """Return the chunk with an all-True mask, which padding later extends with False."""
    frames = chunk.batch_size[0]
    return chunk.copy().set(MASK, torch.ones(frames, dtype=torch.bool, device=chunk.device))


def _check_loader(frame: FrameType, batch_size: int) -> None:
    """Raise if the DataLoader that called from this stack frame would collate several batches into one."""
    fetcher = frame.f_locals.get("self")
    if not isinstance(fetcher, _IterableDatasetFetcher) or not fetcher.auto_collation:
        return
    if fetcher.collate_fn in (default_collate, OnlineDataset.collate_fn):
        raise ChunkSizeError(
            f"the dataset makes batches of {batch_size} itself, but the DataLoader makes batches, too: give it "
            "batch_size=None, as in DataLoader(dataset, batch_size=None)"
        )


class OnlineDataset(IterableDataset[TensorDictBase]):
    """Random chunks from the shared buffer of a running engine, without end.

    * Item mode (``batch_size=None``) yields chunks ``[chunk_size]``, for ``DataLoader(dataset, batch_size=B)``. With a
      :class:`ChunkSizeSampler` each chunk has a boolean ``mask``, and a batch is padded to its longest chunk.
    * Batch mode (``batch_size=N``) yields ``[N, chunk_size]``, for ``DataLoader(dataset, batch_size=None)``. It is much
      faster: one gather per batch.

    Options:

    * ``pad=True``: a chunk may start at any frame. Beyond the end of its episode the last frame is repeated, and
      ``action_is_pad`` ``[batch_size, chunk_size]`` is True.
    * ``obs_horizon=n``: ``observation`` holds the last ``n`` frames up to the first action ``[batch_size, n, ...]``
      instead of those of the chunk. Before the start of the episode the first frame is repeated, and
      ``observation_is_pad`` is True.
    * ``delta_timestamps={"observation": [-0.04, 0.0], "action": [0.0, 0.02, 0.04]}`` instead of ``chunk_size``: these
      keys hold the frames at the given offsets in seconds, as in LeRobot, and each has a ``NAME_is_pad``. Other keys
      hold the sampled frame only. ``fps`` is required if the engine does not know it.
    * ``segment_weights={"grasp": 4.0}``: within an episode, chunks start four times as often at frames where the expert
      grasps. The stream must store segments: ``"segments": true`` in its ``action_config``.

    ``torch.manual_seed`` (or the DataLoader's ``generator``) makes sampling reproducible; DataLoader workers sample
    different chunks. The stream is infinite, so there is no ``__len__``.
    """

    def __init__(
        self,
        engine: OnlineDataEngine,
        chunk_size: int | ChunkSizeSampler | None = None,
        batch_size: int | None = None,
        transform: Transform | None = None,
        *,
        pad: bool = False,
        obs_horizon: int = 1,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        fps: float | None = None,
        segment_weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        if (chunk_size is None) == (delta_timestamps is None):
            got = "neither" if chunk_size is None else "both"
            raise ChunkSizeError(f"expected either chunk_size or delta_timestamps, got {got}")
        if delta_timestamps is not None and (pad or obs_horizon != 1):
            raise ChunkSizeError("delta_timestamps already say which frames there are: leave out pad and obs_horizon")
        if chunk_size is not None and not isinstance(chunk_size, ChunkSizeSampler):
            check_size("chunk_size", chunk_size)
        if batch_size is not None:
            check_size("batch_size", batch_size)
        check_size("obs_horizon", obs_horizon)
        if obs_horizon > 1 and batch_size is None and isinstance(chunk_size, ChunkSizeSampler):
            problem = "chunks of different sizes cannot be stacked beside as many past observations each"
            raise ChunkSizeError(f"obs_horizon: {problem}; give batch_size=N, which draws one size per batch")
        self.pad, self.obs_horizon = pad, obs_horizon
        self.delta_timestamps, self.fps = delta_timestamps, fps
        self.segment_weights = segment_weights
        self.engine = engine
        self.chunk_size = chunk_size
        self.batch_size = batch_size
        self.transform = transform

    def _check_longest_chunk(self) -> None:
        """Raise ``ChunkSizeError`` if no stored episode is as long as the largest possible chunk."""
        size = self.chunk_size.max_size if isinstance(self.chunk_size, ChunkSizeSampler) else self.chunk_size
        if size is not None and not self.pad:
            try:
                self.engine.check_chunk_size(size)
            except ChunkSizeError as error:
                if not isinstance(self.chunk_size, ChunkSizeSampler):
                    raise
                name = type(self.chunk_size).__name__
                raise ChunkSizeError(f"{name} draws chunks of up to {size} steps, which is too long: {error}") from None

    def __iter__(self) -> Iterator[TensorDictBase]:
        self._check_longest_chunk()  # fail early, not at the first large chunk
        worker = get_worker_info()
        seed = int(torch.empty((), dtype=torch.int64).random_() if worker is None else worker.seed & (2**63 - 1))
        generator = np.random.default_rng(seed)
        while True:
            if self.batch_size is not None:
                _check_loader(sys._getframe(1), self.batch_size)
            sample = self._draw(generator)
            if isinstance(sample, TensorDictBase):  # a transform may return anything
                sample = sample if type(sample) is TensorDict else sample.to_tensordict()
                sample.__class__ = StreamTensorDict
            yield sample

    def _draw(self, generator: np.random.Generator) -> TensorDictBase:
        size = self.chunk_size
        if isinstance(size, ChunkSizeSampler):
            size = size()
            check_size(f"the size drawn by {type(self.chunk_size).__name__}", size)
        if self.batch_size is not None:
            # A DataLoader worker copies the batch to send it, so the batch's memory can be reused.
            reuse = self.transform is None and get_worker_info() is not None
            batch = self._sample(self.batch_size, size, generator, reuse)
            return ready_to_send(batch if self.transform is None else self.transform(batch))
        chunk: TensorDictBase = self._sample(1, size, generator)[0]
        if self.transform is not None:
            chunk = self.transform(chunk)
        # Every chunk of variable size gets a mask, so that all batches have the same keys.
        varies = isinstance(self.chunk_size, ChunkSizeSampler) and isinstance(chunk, TensorDictBase)
        return with_mask(chunk) if varies else chunk

    def _sample(
        self, count: int, size: int | None, generator: np.random.Generator, reuse: bool = False
    ) -> TensorDictBase:
        """Sample chunks of this size, or the frames of ``delta_timestamps`` if it is None."""
        if size is not None and not self.pad and self.obs_horizon == 1 and self.segment_weights is None:
            return self.engine.sample_batch(count, size, generator=generator, reuse_outputs=reuse)
        return self.engine.sample_frames(count, self._offsets(size), generator=generator)

    def _offsets(self, size: int | None) -> Offsets:
        from embodichain.agents.engine.offsets import Offsets

        if size is not None:
            chunk = Offsets.of_chunk(size, self.pad, self.obs_horizon)
            return chunk if self.segment_weights is None else chunk.weighted(self.segment_weights)
        fps = self.engine.fps if self.fps is None else self.fps
        if fps is None:
            raise ConfigError(
                "fps: the environment does not report the duration of a step; give fps=", "delta_timestamps"
            )
        frames = Offsets.of_timestamps(self.delta_timestamps or {}, fps)
        return frames if self.segment_weights is None else frames.weighted(self.segment_weights)

    @staticmethod
    def collate_fn(batch: list[TensorDict]) -> TensorDictBase:
        """Stack chunks ``[chunk_size]`` into a batch ``[len(batch), chunk_size]``; pad and mask mixed sizes."""
        return collate_chunks(batch)

    @staticmethod
    def passthrough_collate_fn(batch: TensorDict) -> TensorDict:
        """Return the batch unchanged: batch mode needs no collation."""
        return batch
