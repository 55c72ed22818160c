"""Experience of parallel environments: a rollout buffer, and minibatches of dictionaries of tensors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from embodichain.errors import ExperienceError, nearest


@overload
def swap_and_flatten01(arr: Tensor) -> Tensor: ...
@overload
def swap_and_flatten01(arr: None) -> None: ...
def swap_and_flatten01(arr: Tensor | None) -> Tensor | None:
    """Reshape ``[num_steps, num_envs, ...]`` to ``[num_envs * num_steps, ...]``; None is returned unchanged.
    Row ``env * num_steps + step`` of the result is ``arr[step, env]``."""
    if arr is None:
        return None
    if arr.ndim < 2:
        raise ExperienceError(f"expected a tensor [num_steps, num_envs, ...], got shape {list(arr.shape)}")
    return arr.transpose(0, 1).reshape(arr.shape[0] * arr.shape[1], *arr.shape[2:])


class ExperienceBuffer(nn.Module):
    """Rollout storage for parallel environments, one ``[num_steps, num_envs, ...]`` tensor per key.

    Keys are torch buffers, so ``buffer.to(device)`` moves them all and ``buffer.obs`` reads one. ``store_dict`` maps
    each key to the sum of ``i + 1`` over the written steps ``i``, which is ``total_sum()`` once all are written.
    Writing a step again replaces it.

    >>> buffer = ExperienceBuffer(num_envs=1024, num_steps=16)
    >>> buffer.register_key("obs", shape=(128,))
    >>> buffer.update_data("obs", step=0, data=torch.zeros(1024, 128))
    >>> data_dict = buffer.get_dict()
    """

    def __init__(self, num_envs: int, num_steps: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        if num_envs < 1 or num_steps < 1:
            raise ExperienceError(f"num_envs and num_steps must be at least 1, got {num_envs} and {num_steps}")
        self.num_envs = num_envs
        self.num_steps = num_steps
        self.device = torch.device("cpu" if device is None else device)
        self.store_dict: dict[str, int] = {}
        self._written: dict[str, np.ndarray] = {}

    def register_key(self, key: str, shape: Sequence[int] = (), dtype: torch.dtype = torch.float) -> None:
        """Allocate ``[num_steps, num_envs, *shape]`` under a new name."""
        if key in self.store_dict:
            raise ExperienceError(f"key {key!r} is registered already")
        storage = torch.zeros((self.num_steps, self.num_envs, *shape), dtype=dtype, device=self.device)
        try:
            self.register_buffer(key, storage, persistent=False)
        except KeyError as error:  # a dot, an empty name, or the name of a method
            raise ExperienceError(f"key {key!r} cannot name an attribute of the buffer: {error.args[0]}") from None
        self.store_dict[key] = 0
        self._written[key] = np.zeros(self.num_steps, dtype=bool)

    def update_data(
        self, key: str, index: int | None = None, data: Tensor | None = None, *, step: int | None = None
    ) -> None:
        """Write ``data`` ``[num_envs, ...]`` as one step of a key; ``step`` is another name for ``index``."""
        at = index if index is not None else step
        if at is None or (index is not None and step is not None):
            raise ExperienceError(f"key {key!r}: give the step as either `index` or `step`")
        if not 0 <= at < self.num_steps:
            raise ExperienceError(f"key {key!r}: step {at} lies outside [0, {self.num_steps})")
        self._write(key, at, data)

    def batch_update_data(self, key: str, data: Tensor) -> None:
        """Write all steps of a key at once, ``[num_steps, num_envs, ...]``."""
        self._write(key, slice(None), data)

    def _write(self, key: str, steps: int | slice, data: Tensor | None) -> None:
        if key not in self.store_dict:
            raise ExperienceError(f"key {key!r} is not registered.{nearest(key, self.store_dict)}")
        target, written = self.get_buffer(key)[steps], self._written[key]
        if data is None:
            raise ExperienceError(f"key {key!r}: no data was given")
        if data.shape != target.shape:
            raise ExperienceError(f"key {key!r}: expected data of shape {list(target.shape)}, got {list(data.shape)}")
        if data.requires_grad:
            raise ExperienceError(f"key {key!r}: the buffer stores no gradients; detach() the data first")
        target.copy_(data)
        written[steps] = True
        self.store_dict[key] = int(written @ np.arange(1, self.num_steps + 1))

    def total_sum(self) -> float:
        """Return the value of a complete key in ``store_dict``: 1 + 2 + ... + num_steps."""
        return self.num_steps * (self.num_steps + 1) / 2

    def get_dict(self) -> dict[str, Tensor]:
        """Return the storage of every key, ``[num_steps, num_envs, ...]``, without copy or check."""
        return get_dict(self)

    def make_dict(self) -> dict[str, Tensor]:
        """Return copies ``[num_envs * num_steps, ...]`` of a complete rollout and start the next one.
        Raises ``ExperienceError`` if a step of a key was not written."""
        for key, written in self._written.items():
            if not written.all():
                count = f"{written.sum()} of {self.num_steps} steps are there"
                raise ExperienceError(f"Problem with {key!r}: step {written.argmin()} was not written ({count})")
        # With a single step or env, swapping returns a view, which the next rollout would overwrite.
        is_view = self.num_steps == 1 or self.num_envs == 1
        flat = {key: swap_and_flatten01(storage) for key, storage in get_dict(self).items()}
        for key in self.store_dict:
            self.store_dict[key] = 0
            self._written[key][:] = False
        return {key: value.clone() if is_view else value for key, value in flat.items()}


def get_dict(buffer: ExperienceBuffer) -> dict[str, Tensor]:
    """Return the storage of every key of a buffer, ``[num_steps, num_envs, ...]``, without copy or check."""
    return {key: buffer.get_buffer(key) for key in buffer.store_dict}


class DictDataset(Dataset[dict[str, Tensor]]):
    """Minibatches ``[batch_size, ...]`` of a dictionary of tensors.

    The longest tensor sets the number of rows, ``num_tensors``; shorter ones are repeated cyclically. ``shuffle=True``
    draws a new order for every pass. ``dataset[i]`` is a minibatch, so iteration and ``len`` are in minibatches. Row
    ``j`` of a pass is row ``shuffled_to_original[j]`` of the tensors.

    >>> dataset = DictDataset(batch_size=2, tensor_dict={"obs": torch.arange(4)}, shuffle=True)
    >>> for batch in dataset:
    ...     assert batch["obs"].shape == (2,)
    """

    def __init__(self, batch_size: int, tensor_dict: Mapping[str, Tensor], shuffle: bool = False) -> None:
        lengths = {key: value.shape[0] if value.ndim else 0 for key, value in tensor_dict.items()}
        if not lengths or min(lengths.values()) < 1:
            raise ExperienceError(f"expected at least one tensor with at least one row each, got {lengths}")
        self.num_tensors = max(lengths.values())
        if batch_size < 1 or self.num_tensors % batch_size:
            raise ExperienceError(
                f"batch_size {batch_size} does not divide the {self.num_tensors} rows; choose a divisor or drop rows"
            )
        self.batch_size = batch_size
        self.tensor_dict = dict(tensor_dict)
        self.do_shuffle = shuffle
        self.shuffled_to_original: NDArray[np.int64] = np.arange(self.num_tensors)
        self._is_fresh = False
        if shuffle:
            self.shuffle()

    def shuffle(self) -> None:
        """Draw a new order of the rows with torch's global generator."""
        self.shuffled_to_original = torch.randperm(self.num_tensors).numpy()
        self._is_fresh = True

    def num_batches(self) -> int:
        """Return the number of minibatches in one pass."""
        return self.num_tensors // self.batch_size

    def __len__(self) -> int:
        return self.num_batches()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"minibatch {index} of {len(self)}")
        begin = (index % len(self)) * self.batch_size
        return {key: self._rows(value, begin) for key, value in self.tensor_dict.items()}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self.do_shuffle and not self._is_fresh:
            self.shuffle()
        self._is_fresh = False
        for index in range(len(self)):
            yield self[index]

    def _rows(self, value: Tensor, begin: int) -> Tensor:
        end = begin + self.batch_size
        wanted = self.shuffled_to_original[begin:end]
        if value.shape[0] == self.num_tensors and np.array_equal(wanted, np.arange(begin, end)):
            return value[begin:end]  # a view: nothing to gather
        return value.index_select(0, torch.from_numpy(wanted % value.shape[0]).to(value.device))
