"""The processes of a data-parallel training, and all that they tell each other.

``Ranks`` is the object for a process that is alone: what it hears from everybody is what it said. ``ProcessRanks`` does
the same over ``torch.distributed``. Code that uses them need not know which of the two it has.

Numbers of the training travel as tensors, on the device they are on. Everything else is JSON and safetensors, read as
data: nothing that comes from another process is ever unpickled. Small sums are added up in the order of ranks by
everybody, so that all ranks have the same bits and take the same decisions.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from embodichain.agents.rl.models.observation import Moments, batch_moments, merge_moments
from embodichain.errors import RankError
from embodichain.utils.tensor_tree import from_bytes, to_bytes

# MERGED notes: Notes that a rank leaves for those that torchrun starts after it, in the store that torchrun keeps
# meanwhile.


_PROCESS = uuid.uuid4().hex


class Notes:
    """What ranks of this torchrun have noted; nothing outlasts a process that no torchrun has started.

    torchrun counts restarts after a failure, but not those after a machine has joined or left (``--nnodes=1:4``).
    """

    def __init__(self, store: Store | None = None, rank: int = 0) -> None:
        self._store, self._rank = store, rank

    def leave(self, words: str) -> None:
        """Leave a note for the next process of this rank."""
        if self._store is not None:
            self._store.set(self._key(words), _PROCESS)

    def found(self, words: str) -> bool:
        """Tell whether a process before this one has left the note."""
        key = self._key(words)
        return self._store is not None and self._store.check([key]) and self._store.get(key).decode() != _PROCESS

    def _key(self, words: str) -> str:
        return f"embodichain/note/{self._rank}/{words}"


_PART = 1 << 30  # bytes sent at a time
_SMALL = 1 << 20  # numbers of all ranks together up to which the rounds of messages, not their size, take the time
_LETTER = 2048  # bytes of a message that are sent before everybody knows how long it is
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Measures = dict[str, Tensor]


class Ranks:
    """This process alone."""

    rank = 0
    """Number of this process."""
    count = 1
    """Number of processes."""
    notes = Notes()
    """What outlasts this process, if torchrun starts it again."""

    @property
    def is_first(self) -> bool:
        """Whether this process logs, evaluates and saves."""
        return self.rank == 0

    def seed(self, common: int) -> int:
        """Return the seed of this rank: the first one's is the common one."""
        return common if self.rank == 0 else int(np.random.SeedSequence((common, self.rank)).generate_state(1)[0]) >> 1

    # --- numbers of the training ----------------------------------------------------------------------------------

    def sum_gradients(self, parameters: Sequence[nn.Parameter], measures: Measures) -> Measures:
        """Replace every gradient by its sum over all ranks, and return the sums of what was measured, ``[]`` each.

        Loss and measures carry each rank's share of the minibatch.
        """
        return measures

    def gather(self, values: Tensor) -> Tensor:
        """Return the tensors ``[...]`` of all ranks as ``[count, ...]``; they have the same shape."""
        return values.unsqueeze(0)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a small tensor over all ranks."""
        return values

    def mean_and_std(self, *values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return mean and standard deviation ``[]`` of several tensors' values, those of all ranks together."""
        return [(part.mean(), part.std(correction=0)) for part in values]

    def share_moments(self, own: Moments) -> Sequence[Moments]:
        """Return the moments of all ranks, for a ``RunningNormalizer``."""
        return (own,)

    def copy_first(self, module: nn.Module) -> None:
        """Give a module the first rank's parameters and buffers."""

    # --- everything else ------------------------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """Return the JSON data of all ranks, in their order."""
        return [value]

    def from_first(self, value: Any) -> Any:
        """Return the first rank's nested data, tensors included; what the others pass does not matter."""
        return value

    def to_first(self, value: Any) -> list[Any]:
        """Return the nested data of all ranks to the first one, and nothing to the others."""
        return [value]

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Fail on all ranks if what is done inside fails on one; inside, ranks must not talk to each other."""
        yield


class ProcessRanks(Ranks):
    """The ranks of ``torch.distributed``'s default group."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def sum_gradients(self, parameters: Sequence[nn.Parameter], measures: Measures) -> Measures:
        """Do so in one message; a missing gradient counts as zero."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([part.reshape(-1) for part in (*gradients, *measures.values())])
        if flat.device.type == "cpu" and flat.numel() * self.count <= _SMALL:
            flat = self.sum(flat)  # one round of messages, where gloo's all_reduce takes several
        else:
            _call(dist.all_reduce, flat)
        *parts, measured = flat.split([*(parameter.numel() for parameter in parameters), len(measures)])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        return dict(zip(measures, measured.unbind(), strict=True))

    def gather(self, values: Tensor) -> Tensor:
        """Return the tensors ``[...]`` of all ranks as ``[count, ...]``; they have the same shape."""
        own = values.detach().contiguous()
        everybody = [torch.empty_like(own) for _ in range(self.count)]
        _call(dist.all_gather, everybody, own)
        return torch.stack(everybody)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a small tensor over all ranks, the same bits on each."""
        first, *others = self.gather(values).unbind()
        for other in others:
            first = first + other
        return first

    def mean_and_std(self, *values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return mean and standard deviation ``[]`` of several tensors' values, those of all ranks together."""
        columns = torch.stack([part.detach().reshape(-1) for part in values], dim=-1)
        count, mean, m2 = reduce(merge_moments, self.share_moments(batch_moments(columns, len(values))))
        std = (m2 / count).sqrt()
        return list(zip(mean.to(columns.dtype).unbind(), std.to(columns.dtype).unbind(), strict=True))

    def share_moments(self, own: Moments) -> Sequence[Moments]:
        """Return the moments of all ranks, for a ``RunningNormalizer``."""
        dim = own[1].numel()
        rows = self.gather(torch.cat((own[0].reshape(1), own[1], own[2])))
        return [(row[0], row[1 : 1 + dim], row[1 + dim :]) for row in rows]

    def copy_first(self, module: nn.Module) -> None:
        """Give a module the first rank's parameters and buffers."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                sent = tensor.contiguous()
                _call(dist.broadcast, sent, 0)
                tensor.copy_(sent)

    def exchange(self, value: Any) -> list[Any]:
        """Return the JSON data of all ranks, in their order."""
        words = json.dumps(value).encode()
        own = len(words).to_bytes(8, "little") + words
        heard = [row.numpy().tobytes() for row in self.gather(_to_bytes(own[:_LETTER].ljust(_LETTER, b"\0")))]
        sizes = [8 + int.from_bytes(row[:8], "little") for row in heard]
        if max(sizes) > _LETTER:
            rest = own[_LETTER:].ljust(max(sizes) - _LETTER, b"\0")
            tails = self.gather(_to_bytes(rest))
            heard = [row + tail.numpy().tobytes() for row, tail in zip(heard, tails, strict=True)]
        return [json.loads(row[8:size]) for row, size in zip(heard, sizes, strict=True)]

    def from_first(self, value: Any) -> Any:
        """Return the first rank's nested data, tensors included; what the others pass does not matter."""
        message = to_bytes(value) if self.is_first else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([message.numel()])
        _call(dist.broadcast, size, 0)
        if not self.is_first:
            message = torch.empty(int(size), dtype=torch.uint8)
        for part in message.split(_PART):
            _call(dist.broadcast, part, 0)
        return value if self.is_first else from_bytes(message)

    def to_first(self, value: Any) -> list[Any]:
        """Return the nested data of all ranks to the first one, and nothing to the others."""
        own = torch.empty(0, dtype=torch.uint8) if self.is_first else to_bytes(value)
        sizes = self.gather(torch.tensor([own.numel()])).flatten().tolist()
        if not self.is_first:
            for part in own.split(_PART):
                _call(dist.send, part, 0)
            return []
        received = [value]
        for rank, size in enumerate(sizes[1:], start=1):
            message = torch.empty(size, dtype=torch.uint8)
            for part in message.split(_PART):
                _call(dist.recv, part, rank)
            received.append(from_bytes(message))
        return received

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Fail on all ranks if what is done inside fails on one; inside, ranks must not talk to each other."""
        try:
            yield
        except Exception as error:  # told to the others, and raised here as it came
            self.exchange(f"{type(error).__name__}: {error}")
            raise
        said = self.exchange(None)
        failed = [f"rank {rank} failed while {doing}: {words}" for rank, words in enumerate(said) if words is not None]
        if failed:
            raise RankError("\n".join(failed))


def check_equal(ranks: Ranks, module: nn.Module, when: str) -> None:
    """Raise ``RankError`` if the ranks' copies of a module are not the same, to the last bit."""
    if ranks.count == 1:
        return
    sums = ranks.gather(fingerprint(module))
    if bool((sums != sums[0]).any()):
        differing = [rank for rank, own in enumerate(sums.tolist()) if own != sums[0].item()]
        raise RankError(
            f"the weights of rank {', '.join(map(str, differing))} are not those of rank 0 {when}: every rank needs "
            "the same kind of processor or GPU, and an algorithm has to add up its gradients over ranks"
        )


def fingerprint(module: nn.Module) -> Tensor:
    """Return a sum ``[]`` over the bits of all parameters and buffers."""
    tensors = [tensor.detach().contiguous() for tensor in (*module.parameters(), *module.buffers())]
    sums = [tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return (torch.stack(sums) * torch.arange(1, len(sums) + 1, device=sums[0].device)).sum()


def _to_bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _call(collective: Callable[..., Any], *arguments: Any) -> None:
    """Talk to the other ranks; what keeps them from hearing each other is an error with a name."""
    try:
        collective(*arguments)
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankError(
            f"the ranks cannot talk to each other any more ({reason}). Mostly one of them has ended or hangs: look for "
            "the first error in the output of all ranks. The run can be continued from its latest checkpoint with "
            "--resume"
        ) from error
