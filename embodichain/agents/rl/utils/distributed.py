"""Data parallelism: how the processes (ranks) of one training find each other, and what they exchange.

``Ranks`` is a process that is alone, ``ProcessRanks`` those of ``torch.distributed``. Nothing that another process
sends is unpickled. Every rank adds up small sums in the order of ranks, so that all have the same bits.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn.functional import pad

from embodichain.agents.processes.fork_server import die_with_parent
from embodichain.errors import ObservationError, RankError
from embodichain.utils.tensor_tree import from_bytes, to_bytes

_SMALL = 1 << 20  # numbers of all ranks together up to which latency, not bandwidth, limits a message
_PREFIX = 2048  # bytes of a message that are sent before its length is known
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(hours=2)
"""How long ranks wait for each other: an evaluation, which the first one does alone, has to fit into it."""

Measures = dict[str, Tensor]
Moments = tuple[Tensor, Tensor, Tensor]
"""Count ``[]``, mean ``[dim]`` and sum of squared deviations ``[dim]``, in float64."""


class SharedStatistics(nn.Module):
    """A module that takes in the moments of its data; under data parallelism, of the data of all ranks."""

    share: Callable[[Moments], Sequence[Moments]] | None = None
    """Maps this rank's moments to those of all ranks, in their order: ``Ranks.share_moments``."""


def batch_moments(x: Tensor, dim: int) -> Moments:
    """Return count, mean and sum of squared deviations of ``[..., dim]`` in float64."""
    if x.shape[-1] != dim:
        raise ObservationError(f"expected observations [..., {dim}], got {list(x.shape)}")
    rows = x.reshape(-1, dim).to(torch.float64)
    mean = rows.mean(0)
    return torch.tensor(float(rows.shape[0]), dtype=torch.float64, device=x.device), mean, (rows - mean).square().sum(0)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments of two sets of rows together, by Chan's formula.

    ``n = n_a + n_b``, ``mean = mean_a + d n_b / n``, ``M2 = M2_a + M2_b + d^2 n_a n_b / n``, ``d = mean_b - mean_a``.
    """
    count = a[0] + b[0]
    share = b[0] / count.clamp(min=1.0)
    delta = b[1] - a[1]
    return count, a[1] + delta * share, a[2] + b[2] + delta.square() * a[0] * share


class Ranks:
    """This process alone: number ``rank`` of ``count``."""

    rank = 0
    count = 1

    @property
    def is_first(self) -> bool:
        """Whether this process logs, evaluates and saves."""
        return self.rank == 0

    def seed(self, common: int) -> int:
        """Return the seed of this rank; the first one's is the common one."""
        return common if self.rank == 0 else int(np.random.SeedSequence((common, self.rank)).generate_state(1)[0]) >> 1

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
        return reduce(torch.add, self.gather(values).unbind())

    def mean_and_std(self, *values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return mean and standard deviation ``[]`` of several tensors' values, those of all ranks together."""
        return [(part.mean(), part.std(correction=0)) for part in values]

    def share_moments(self, own: Moments) -> Sequence[Moments]:
        """Return the moments of all ranks, in their order; see ``SharedStatistics``."""
        dim = own[1].numel()
        rows = self.gather(torch.cat((own[0].reshape(1), own[1], own[2])))
        return [(row[0], row[1 : 1 + dim], row[1 + dim :]) for row in rows]

    def copy_first(self, module: nn.Module) -> None:
        """Give a module the first rank's parameters and buffers."""

    def exchange(self, value: Any) -> list[Any]:
        """Return the nested data of all ranks, in their order."""
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
        # One message for all; a missing gradient counts as zero.
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
        own = values.detach().contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.count)]
        _call(dist.all_gather, gathered, own)
        return torch.stack(gathered)

    def mean_and_std(self, *values: Tensor) -> list[tuple[Tensor, Tensor]]:
        columns = torch.stack([part.detach().reshape(-1) for part in values], dim=-1)
        count, mean, m2 = reduce(merge_moments, self.share_moments(batch_moments(columns, len(values))))
        std = (m2 / count).sqrt()
        return list(zip(mean.to(columns.dtype).unbind(), std.to(columns.dtype).unbind(), strict=True))

    def copy_first(self, module: nn.Module) -> None:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                sent = tensor.contiguous()
                _call(dist.broadcast, sent, 0)
                tensor.copy_(sent)

    def exchange(self, value: Any) -> list[Any]:
        return [from_bytes(row) for row in self._gather_bytes(value)]

    def to_first(self, value: Any) -> list[Any]:
        rows = self._gather_bytes(value)
        return [from_bytes(row) for row in rows] if self.is_first else []

    def _gather_bytes(self, value: Any) -> list[Tensor]:
        """Return the data of all ranks as bytes, in their order; short ones take one round of messages."""
        own = to_bytes(value)
        own = torch.cat((torch.tensor([own.numel()]).view(torch.uint8), own))
        rows = self.gather(pad(own, (0, _PREFIX - own.numel())))
        sizes = [8 + size for size in rows[:, :8].contiguous().view(torch.int64).flatten().tolist()]
        if max(sizes) > _PREFIX:
            rest = self.gather(pad(own, (0, max(sizes) - own.numel()))[_PREFIX:])
            rows = torch.cat((rows, rest), dim=1)
        return [row[8:size] for row, size in zip(rows, sizes, strict=True)]

    def from_first(self, value: Any) -> Any:
        message = to_bytes(value if self.is_first else None)
        size = torch.tensor([message.numel()])
        _call(dist.broadcast, size, 0)
        message.resize_(int(size))
        _call(dist.broadcast, message, 0)
        return value if self.is_first else from_bytes(message)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the others learn of it, and it is raised here as it is
            self.exchange(f"{type(error).__name__}: {error}")
            raise
        failed = [(rank, error) for rank, error in enumerate(self.exchange(None)) if error is not None]
        if failed:
            raise RankError("\n".join(f"rank {rank} failed while {doing}: {error}" for rank, error in failed))


def check_equal(ranks: Ranks, module: nn.Module, when: str) -> None:
    """Raise ``RankError`` if the ranks' copies of a module are not the same, to the last bit."""
    if ranks.count == 1:
        return
    tensors = [tensor.detach().contiguous() for tensor in (*module.parameters(), *module.buffers())]
    bits = torch.stack([t.view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64) for t in tensors])
    sums = ranks.gather((bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()).tolist()
    differing = [str(rank) for rank, own in enumerate(sums) if own != sums[0]]
    if differing:
        raise RankError(
            f"the weights of rank {', '.join(differing)} are not those of rank 0 {when}: every rank needs "
            "the same kind of processor or GPU, and an algorithm has to add up its gradients over ranks"
        )


def _call(collective: Callable[..., Any], *arguments: Any) -> None:
    """Run a collective operation; a broken connection becomes a ``RankError``."""
    try:
        collective(*arguments)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RankError(
            f"the ranks cannot talk to each other any more ({reason}). Mostly one of them has ended or hangs: look for "
            "the first error in the output of all ranks. The run can be continued from its latest checkpoint with "
            "--resume"
        ) from error


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join torchrun's processes, if any, for the block; an existing process group for CPU tensors is used and kept."""
    if dist.is_available() and dist.is_initialized():
        alone, backends = dist.get_world_size() == 1, dist.get_backend_config()
        if not alone and "cpu:" not in backends:
            raise RankError(
                f"expected a process group that carries tensors of the CPU, got one of {backends}: start it with "
                'init_process_group("cpu:gloo,cuda:nccl"), or leave that to torchrun and this package'
            )
        yield Ranks() if alone else ProcessRanks()
        return
    if is_torchrun():
        die_with_parent(os.getppid(), signal.SIGTERM)  # torchrun that is killed leaves its ranks running
    if not is_launched():
        yield Ranks()
        return
    if int(os.environ["WORLD_SIZE"]) == local_count():  # no other machine takes part: use the loopback device
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    store, rank, count = next(rendezvous("env://", timeout=_TIMEOUT))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store when it restarts ranks
    store = PrefixStore(f"embodichain/attempt_{attempt}", store)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        one_each = torch.cuda.device_count() >= local_count() and dist.is_nccl_available()  # as NCCL needs it
        backend = f"cpu:gloo,cuda:{'nccl' if one_each else 'gloo'}"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_TIMEOUT)
    yield ProcessRanks()
    dist.destroy_process_group()  # not after an error: others may still be waiting for this one


def global_rank() -> int:
    """Return the number of this process among all; 0 speaks for all of them."""
    return int(os.environ["RANK"]) if is_launched() else 0


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_count() -> int:
    """Return how many ranks run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_torchrun() -> bool:
    """Tell whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_launched() -> bool:
    """Tell whether torchrun, or something like it, started several processes."""
    return all(name in os.environ for name in _LAUNCH_VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1
