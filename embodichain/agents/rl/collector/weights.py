"""Weights on their way from a learner to a collector: immutable, numbered, checked by their content.

The learner publishes snapshots of its policy between updates; a collector holds a policy of its own and adopts a
snapshot between two environment steps. So no module is ever read while an optimiser writes it. After every adoption
the collector computes the hash of the weights it will really use and acknowledges number and hash: weights that were
torn, mixed up or never arrived are an error, not a bad learning curve.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodichain.agents.processes.shared_memory import Segment
from embodichain.agents.rl.models.policy import Policy
from embodichain.envs.random import mix
from embodichain.errors import WeightsError
from embodichain.utils.cuda_graphs import copy_together

_ALIGNMENT = 64
_STRIDE = -7046029254386353131
"""An odd number: its multiples differ for all indices, so equal words in different places hash differently."""
_PIECE = 1 << 15
"""Words hashed at a time on a CPU: what is computed on the way stays in the cache, and on one thread."""
_PIECE_ON_GPU = 1 << 23
"""The same on a GPU: few launches, beside which a learner launches its own, for 256 MiB meanwhile."""


@dataclass(frozen=True)
class _Place:
    name: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


class WeightLayout:
    """Where every parameter and buffer of a module lies in one flat piece of memory."""

    def __init__(self, module: nn.Module) -> None:
        self.places: list[_Place] = []
        end = 0
        for name, tensor in module.state_dict().items():
            nbytes = tensor.numel() * tensor.element_size()
            self.places.append(_Place(name, end, nbytes, tensor.dtype, tensor.shape))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end

    def views(self, data: Tensor) -> dict[str, Tensor]:
        """Return flat memory, uint8 ``[nbytes]``, as the tensors that lie in it."""
        if data.numel() != self.nbytes:
            raise WeightsError(f"expected {self.nbytes} bytes of weights, got {data.numel()}: the policies differ")
        return {p.name: data[p.offset : p.offset + p.nbytes].view(p.dtype).view(p.shape) for p in self.places}

    @torch.no_grad()
    def pack(self, module: nn.Module, data: Tensor) -> None:
        """Copy a module's parameters and buffers into flat memory."""
        views, present = self.views(data), module.state_dict()
        copy_together(list(views.values()), [present[name] for name in views])

    @torch.no_grad()
    def unpack(self, data: Tensor, module: nn.Module) -> None:
        """Copy flat memory into a module's parameters and buffers, in place."""
        views, present = self.views(data), module.state_dict()
        copy_together([present[name] for name in views], list(views.values()))


def content_hash(data: Tensor) -> int:
    """Return a 64-bit hash of flat memory, uint8 ``[8 * n]``; the same on every device.

    ``sum_i mix(word_i + (i + 1) * stride)`` modulo 2**64, with SplitMix64's finaliser for ``mix``: one changed word
    always changes the sum, and several hide each other once in 2**64 times.
    """
    words = data.view(torch.int64)
    piece = _PIECE if data.device.type == "cpu" else _PIECE_ON_GPU
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, words.numel(), piece):
        part = words[first : first + piece]
        index = torch.arange(first + 1, first + 1 + part.numel(), device=data.device)
        total += mix(part + index * _STRIDE).sum()
    return int(total)


@dataclass(frozen=True)
class WeightSnapshot:
    """The weights of one version; nothing ever writes to it again."""

    version: int
    """``policy.version`` at the time: how many updates shaped these weights."""
    digest: int
    """Hash of ``data``."""
    data: Tensor
    """Flat memory, uint8, laid out by ``WeightLayout``."""
    segment: Segment | None = None
    """The shared memory that ``data`` lies in, where another process is to read it."""
    ready: torch.cuda.Event | None = None
    """On a GPU: when ``data`` is complete."""

    def __str__(self) -> str:
        return f"version {self.version} ({self.digest & 2**64 - 1:016x})"


class WeightStore:
    """The learner's side: publishes snapshots of its policy and checks what collectors acknowledge."""

    def __init__(self, policy: Policy, shared: bool = False, spare: int = 0) -> None:
        """Publish the weights of ``policy``; ``shared`` ones lie in memory that other processes can map.

        Rollouts come in the order of their versions, but for ``spare`` versions that one may be behind another.
        """
        self.policy, self.shared, self.spare = policy, shared, spare
        self.layout = WeightLayout(policy)
        self.latest: WeightSnapshot | None = None
        self._kept: dict[int, WeightSnapshot] = {}
        self._acknowledged: set[int] = set()
        self._lock = threading.Lock()

    def publish(self) -> WeightSnapshot:
        """Copy the policy's present weights into a snapshot; the learner calls it, between two updates."""
        version = int(self.policy.version)
        snapshot = self._snapshot(version)
        with self._lock:
            latest = self.latest
            if latest is not None and version == latest.version:
                if snapshot.digest != latest.digest:
                    raise WeightsError(
                        f"the weights changed, but policy.version is still {version}: whatever updates a policy has to "
                        "count it with policy.version += 1"
                    )
                return latest
            if latest is not None and version < latest.version:
                raise WeightsError(f"version {version} comes after version {latest.version}: versions only grow")
            self.latest = self._kept[version] = snapshot
        return snapshot

    def is_new(self) -> bool:
        """Tell whether the policy was updated since the last snapshot."""
        return self.latest is None or int(self.policy.version) != self.latest.version

    def at(self, version: int) -> WeightSnapshot:
        """Return the snapshot of a version that was published and not forgotten."""
        with self._lock:
            if version not in self._kept:
                raise WeightsError(f"there is no snapshot of version {version}; kept are {sorted(self._kept)}")
            return self._kept[version]

    def forget_before(self, version: int) -> None:
        """Let go of snapshots that nobody needs any more; the latest one stays."""
        with self._lock:
            for old in [v for v in self._kept if v < version - self.spare and self._kept[v] is not self.latest]:
                del self._kept[old]

    def kept(self) -> list[WeightSnapshot]:
        """Return the snapshots that are still there, oldest first."""
        with self._lock:
            return [self._kept[version] for version in sorted(self._kept)]

    def keep(self, version: int, data: Tensor) -> None:
        """Take back a snapshot of an older version, when a run is resumed."""
        with self._lock:
            self._kept[version] = WeightSnapshot(version, content_hash(data), *self._memory_of(data))

    def acknowledge(self, version: int, digest: int) -> None:
        """Check what a collector says it has adopted."""
        with self._lock:
            published = self._kept.get(version)
            if published is None:
                raise WeightsError(f"a collector adopted version {version}, which is not among {sorted(self._kept)}")
            if digest != published.digest:
                raise WeightsError(
                    f"a collector uses other weights than were published: expected {published}, it has "
                    f"{digest & 2**64 - 1:016x}"
                )
            self._acknowledged.add(version)

    def trust(self, versions: Iterable[int]) -> None:
        """Take versions for acknowledged that were so in a run that is resumed."""
        with self._lock:
            self._acknowledged.update(versions)

    def check_stamps(self, versions: Iterable[int]) -> None:
        """Check that every version that transitions are stamped with was really adopted."""
        stamped = set(versions)
        with self._lock:
            unknown = sorted(stamped - self._acknowledged)
            self._acknowledged = {v for v in self._acknowledged if v >= min(stamped) - self.spare}
        if unknown:
            raise WeightsError(f"transitions are stamped with versions {unknown}, which no collector acknowledged")

    def _snapshot(self, version: int) -> WeightSnapshot:
        device = next(iter(self.policy.state_dict().values())).device
        data = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        self.layout.pack(self.policy, data)
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        return WeightSnapshot(version, content_hash(data), *self._memory_of(data), ready=ready)

    def _memory_of(self, data: Tensor) -> tuple[Tensor, Segment | None]:
        """Return where a snapshot lies: in shared memory, if other processes are to read it."""
        if not self.shared:
            return data, None
        segment = Segment.create(data.numel(), "a snapshot of the weights")
        segment.bytes.copy_(data)
        return segment.bytes, segment


class InferenceCopy:
    """The collector's side: a policy of its own, whose weights change only when it adopts a snapshot."""

    def __init__(self, policy: Policy) -> None:
        self.policy: Policy = copy.deepcopy(policy).requires_grad_(False)
        self.layout = WeightLayout(self.policy)

    @property
    def version(self) -> int:
        """Number of the weights in use."""
        return int(self.policy.version)

    def adopt(self, snapshot: WeightSnapshot) -> int:
        """Use a snapshot from now on; return the hash of what the policy really holds then."""
        if snapshot.ready is not None:
            stream = torch.cuda.current_stream(snapshot.data.device)
            stream.wait_event(snapshot.ready)
            snapshot.data.record_stream(stream)
        self.layout.unpack(snapshot.data, self.policy)
        return self.digest()

    def digest(self) -> int:
        """Return the hash of the weights in use, read from the policy itself."""
        device = next(iter(self.policy.state_dict().values())).device
        data = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        self.layout.pack(self.policy, data)
        return content_hash(data)
