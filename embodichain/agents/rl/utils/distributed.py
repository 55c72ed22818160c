"""Data-parallel training: how the processes (ranks) of a run connect, and what they exchange.

``Ranks`` is a single process, ``ProcessRanks`` uses ``torch.distributed``. Messages are never unpickled. Small sums are
computed on every rank in the order of ranks, so that all ranks get the same bits.
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

_SMALL = 1 << 20  # total number of elements up to which latency, not bandwidth, dominates
_PREFIX = 2048  # bytes of a message in the first round, before its length is known
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(hours=2)
"""How long ranks wait for each other; an evaluation, which only the first rank runs, must not take longer."""

Measures = dict[str, Tensor]
Moments = tuple[Tensor, Tensor, Tensor]
"""Count ``[]``, mean ``[dim]`` and sum of squared deviations ``[dim]``, in float64."""


class SharedStatistics(nn.Module):
    """A module with running statistics; in data-parallel training, over the data of all ranks."""

    share: Callable[[Moments], Sequence[Moments]] | None = None
    """Returns the moments of all ranks, given this rank's: ``Ranks.share_moments``."""


def batch_moments(x: Tensor, dim: int) -> Moments:
    """Return count, mean and sum of squared deviations of ``[..., dim]``, in float64; all are 0 without rows."""
    if x.shape[-1] != dim:
        raise ObservationError(f"expected observations [..., {dim}], got {list(x.shape)}")
    rows = x.reshape(-1, dim).to(torch.float64)
    mean = rows.mean(0) if len(rows) else rows.new_zeros(dim)
    return torch.tensor(float(rows.shape[0]), dtype=torch.float64, device=x.device), mean, (rows - mean).square().sum(0)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments of the union of two sets of rows, by Chan's formula.

    ``n = n_a + n_b``, ``mean = mean_a + d n_b / n``, ``M2 = M2_a + M2_b + d^2 n_a n_b / n``, ``d = mean_b - mean_a``.
    """
    count = a[0] + b[0]
    share = b[0] / count.clamp(min=1.0)
    delta = b[1] - a[1]
    return count, a[1] + delta * share, a[2] + b[2] + delta.square() * a[0] * share


class Ranks:
    """A single process: rank ``rank`` of ``count``."""

    rank = 0
    count = 1

    @property
    def is_first(self) -> bool:
        """Whether this process logs, evaluates and saves."""
        return self.rank == 0

    def seed(self, common: int) -> int:
        """Return the seed of this rank, derived from the common one, which is the first rank's."""
        return common if self.rank == 0 else int(np.random.SeedSequence((common, self.rank)).generate_state(1)[0]) >> 1

    def sum_gradients(self, parameters: Sequence[nn.Parameter], measures: Measures) -> Measures:
        """Replace gradients by their sums over ranks, and return the sums of the metrics, ``[]`` each.

        Parameters that are frozen at the moment have none.

        Losses and metrics are weighted by each rank's share of the minibatch.
        """
        return measures

    def gather(self, values: Tensor) -> Tensor:
        """Return the tensors ``[...]`` of all ranks, which have the same shape, as ``[count, ...]``."""
        return values.unsqueeze(0)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a small tensor over all ranks."""
        return reduce(torch.add, self.gather(values).unbind())

    def mean_and_std(self, *values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the mean and standard deviation ``[]`` of each tensor over all ranks."""
        return [(part.mean(), part.std(correction=0)) for part in values]

    def share_moments(self, own: Moments) -> Sequence[Moments]:
        """Return the moments of all ranks, ordered by rank; see ``SharedStatistics``."""
        dim = own[1].numel()
        rows = self.gather(torch.cat((own[0].reshape(1), own[1], own[2])))
        return [(row[0], row[1 : 1 + dim], row[1 + dim :]) for row in rows]

    def copy_first(self, module: nn.Module) -> None:
        """Copy the first rank's parameters and buffers to a module."""

    def exchange(self, value: Any) -> list[Any]:
        """Return the nested data of all ranks, ordered by rank."""
        return [value]

    def from_first(self, value: Any) -> Any:
        """Return the first rank's nested data, which may contain tensors; the ``value`` of other ranks is ignored."""
        return value

    def to_first(self, value: Any) -> list[Any]:
        """Return the nested data of all ranks on the first rank, and an empty list on the others."""
        return [value]

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Raise on all ranks if the block fails on one; inside it, ranks must not communicate."""
        yield


class ProcessRanks(Ranks):
    """The ranks of ``torch.distributed``'s default group."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def sum_gradients(self, parameters: Sequence[nn.Parameter], measures: Measures) -> Measures:
        # One message for all; missing gradients are zero. Frozen parameters get none: Adam would count steps for them.
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([part.reshape(-1) for part in (*gradients, *measures.values())])
        if flat.device.type == "cpu" and flat.numel() * self.count <= _SMALL:
            flat = self.sum(flat)  # one round of messages instead of several in gloo's all_reduce
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
        """Return the data of all ranks as bytes, ordered by rank; short messages take one round."""
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
        except Exception as error:  # report it to the other ranks, and raise it here
            self.exchange(f"{type(error).__name__}: {error}")
            raise
        failed = [(rank, error) for rank, error in enumerate(self.exchange(None)) if error is not None]
        if failed:
            raise RankError("\n".join(f"rank {rank} failed while {doing}: {error}" for rank, error in failed))


def check_equal(ranks: Ranks, module: nn.Module, when: str) -> None:
    """Raise ``RankError`` if the ranks' copies of a module are not bit-equal."""
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
    """Join the process group of torchrun, if any, for the block; an existing group is used and not destroyed."""
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
        die_with_parent(os.getppid(), signal.SIGTERM)  # otherwise ranks survive if torchrun is killed
    if not is_launched():
        yield Ranks()
        return
    if int(os.environ["WORLD_SIZE"]) == local_count():  # a single machine: use the loopback device
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    store, rank, count = next(rendezvous("env://", timeout=_TIMEOUT))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store when it restarts ranks
    store = PrefixStore(f"embodichain/attempt_{attempt}", store)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        one_each = torch.cuda.device_count() >= local_count() and dist.is_nccl_available()  # NCCL needs a GPU per rank
        backend = f"cpu:gloo,cuda:{'nccl' if one_each else 'gloo'}"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_TIMEOUT)
    yield ProcessRanks()
    dist.destroy_process_group()  # not after an error, as other ranks may still wait for this one


def global_rank() -> int:
    """Return the rank of this process among all."""
    return int(os.environ["RANK"]) if is_launched() else 0


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_count() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_launched() -> bool:
    """Return whether torchrun, or another launcher, started several processes."""
    return all(name in os.environ for name in _LAUNCH_VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1
