"""Versioned snapshots of the policy's weights, which a learner publishes and its collectors adopt.

The learner publishes a snapshot between two updates. A collector loads it into its own policy between two environment
steps. So no module is read while an optimiser writes it.

Publishing copies the policy into a free slot. Adopting leases a slot, and a leased slot is not written to, so weights
are never torn. On a CPU, the parameters of the collector's policy are views of the leased slot, so there are two slots.
On a GPU, parameters keep their addresses for CUDA graphs and are copied from a single slot. Newer weights overwrite
those that are not leased. In lockstep, the versions that requests need are kept, up to ``max_policy_lag + 1`` more
slots. Workers of a Ray cluster get snapshots through the object store, which are never overwritten.

With ``verify_weights``, a collector compares the hash of the weights it uses with that of the snapshot.
"""

import copy
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodichain.agents.processes.shared_memory import Segment
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.models.policy import Policy
from embodichain.errors import WeightsError
from embodichain.utils.cuda_graphs import copy_together
from embodichain.utils.tensor_tree import BlockLayout

_HEADER = 64
"""Bytes of a shared slot before the weights; the first are the version."""
_INCOMPLETE = -1
_WAIT_SECONDS = 0.001


class WeightLayout:
    """Offsets of a module's parameters and buffers in one flat block of memory."""

    def __init__(self, module: nn.Module) -> None:
        self._block = BlockLayout.of(module.state_dict())
        self.nbytes = self._block.nbytes

    def views(self, data: Tensor) -> dict[str, Tensor]:
        """Return the tensors in flat memory (uint8 ``[nbytes]``) as views, by name."""
        if data.numel() != self.nbytes:
            raise WeightsError(f"expected {self.nbytes} bytes of weights, got {data.numel()}: the policies differ")
        return self._block.views(data)

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

    @torch.no_grad()
    def assign(self, data: Tensor, module: nn.Module) -> None:
        """Make a module's parameters views of flat memory; buffers are copied, as the module may write to them."""
        present = module.state_dict(keep_vars=True)
        for name, view in self.views(data).items():
            tensor = present[name]
            if isinstance(tensor, nn.Parameter) and tensor.is_contiguous():
                tensor.data = view
            else:
                tensor.copy_(view)


def content_digest(module: nn.Module) -> str:
    """Return a hash of all parameters and buffers of a module, independent of the device."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in module.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class SharedSlot:
    """Shared memory for one snapshot; it is written to only while it is not leased.

    A lease is a shared ``flock`` on the memory's file, which the kernel releases if the process is killed.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment, self.data = segment, segment.bytes[_HEADER:]
        self.inode = os.fstat(segment.fd).st_ino
        self.version = segment.view(0, torch.int64, ())
        """Version of the weights in the slot, a tensor ``[]``."""
        self._file = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR | os.O_CLOEXEC)

    def acquire(self, wait: bool) -> bool:
        """Lock the slot for writing; if it is leased, wait or return ``False``."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def lease(self) -> None:
        """Lock the slot for reading; wait while it is written to."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        """Unlock the slot after reading or writing."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def __del__(self) -> None:
        file, self._file = getattr(self, "_file", -1), -1
        if file >= 0:
            os.close(file)


class LocalSlot:
    """A slot for threads of one process; accesses on a GPU are ordered by events, without synchronising."""

    def __init__(self, data: Tensor, version: int = _INCOMPLETE) -> None:
        self.data, self.version = data, torch.tensor(version)
        self._lock = threading.Lock()
        self._last: torch.cuda.Event | None = None
        """Recorded after the last access."""

    def acquire(self, wait: bool) -> bool:
        acquired = self._lock.acquire(blocking=wait)
        if acquired and self.data.is_cuda:
            stream = torch.cuda.current_stream(self.data.device)
            if self._last is not None:
                stream.wait_event(self._last)
            self.data.record_stream(stream)
        return acquired

    def lease(self) -> None:
        self.acquire(wait=True)

    def release(self) -> None:
        if self.data.is_cuda:
            self._last = torch.cuda.current_stream(self.data.device).record_event()
        self._lock.release()


Slot = SharedSlot | LocalSlot


@dataclass(frozen=True)
class WeightSnapshot:
    """The weights of one version; unchanged while the store keeps them or a collector leases them."""

    version: int
    """``policy.version`` of these weights: the number of updates."""
    digest: str | None
    """Hash of the weights, if they are verified."""
    data: Tensor
    """Flat memory, uint8, laid out by ``WeightLayout``."""
    segment: Segment | None = None
    """Shared memory that contains ``data``, if any."""
    slot: Slot | None = None
    """Slot that contains ``data``, in the learner's process."""


class WeightStore:
    """The learner's side: publishes snapshots of its policy and checks what collectors acknowledge."""

    def __init__(self, policy: Policy, cfg: AsyncCfg | None = None) -> None:
        self.policy, self.cfg = policy, cfg or AsyncCfg()
        self.layout = WeightLayout(policy)
        self.latest: WeightSnapshot | None = None
        # With several workers, rollouts may arrive out of the order of their versions.
        self._spare = self.cfg.max_policy_lag if self.cfg.num_workers > 1 else 0
        self._slots: list[Slot] = []
        self._kept: dict[int, WeightSnapshot] = {}
        self._digests: dict[int, str | None] = {}
        """Hash of each published version, ``None`` if weights are not verified."""
        self.acknowledged: set[int] = set()
        """Versions that collectors have adopted."""
        self._lock = threading.Lock()

    def publish(self) -> WeightSnapshot:
        """Copy the policy's weights into a snapshot; the learner calls it between two updates."""
        version, latest = int(self.policy.version), self.latest
        if latest is not None and version == latest.version:
            if latest.digest is not None and content_digest(self.policy) != latest.digest:
                raise WeightsError(
                    f"the weights changed, but policy.version is still {version}: whatever updates a policy has to "
                    "count it with policy.version += 1"
                )
            return latest
        if latest is not None and version < latest.version:
            raise WeightsError(f"version {version} comes after version {latest.version}: versions only grow")
        self.latest = self.keep(version)
        return self.latest

    def is_new(self) -> bool:
        """Return whether the policy was updated since the last snapshot."""
        return self.latest is None or int(self.policy.version) != self.latest.version

    def at(self, version: int) -> WeightSnapshot:
        """Return the snapshot of a version; ``WeightsError`` if it is not kept."""
        with self._lock:
            if version not in self._kept:
                raise WeightsError(f"there is no snapshot of version {version}; kept are {sorted(self._kept)}")
            return self._kept[version]

    def forget_before(self, version: int) -> None:
        """Drop snapshots older than ``version``, except the latest."""
        with self._lock:
            for old in [v for v in self._kept if v < version - self._spare and self._kept[v] is not self.latest]:
                del self._kept[old]

    def kept(self) -> list[WeightSnapshot]:
        """Return the kept snapshots, oldest first."""
        with self._lock:
            return [self._kept[version] for version in sorted(self._kept)]

    def acknowledge(self, version: int, digest: str | None) -> None:
        """Check and register the version that a collector has adopted."""
        with self._lock:
            if version not in self._digests:
                raise WeightsError(f"a collector adopted version {version}, which is not among {sorted(self._digests)}")
            published = self._digests[version]
            if published is not None and digest != published:
                raise WeightsError(
                    f"a collector uses other weights than were published: expected {published} for version {version}, "
                    f"it has {digest}"
                )
            self.acknowledged.add(version)

    def check_stamps(self, versions: Iterable[int]) -> None:
        """Check that collectors have adopted every version that transitions are stamped with."""
        stamped = set(versions)
        with self._lock:
            unknown = sorted(stamped - self.acknowledged)
            oldest = min(stamped) - self._spare
            self.acknowledged = {v for v in self.acknowledged if v >= oldest}
            self._digests = {v: digest for v, digest in self._digests.items() if v >= oldest or v in self._kept}
        if unknown:
            raise WeightsError(f"transitions are stamped with versions {unknown}, which no collector acknowledged")

    def keep(self, version: int, data: Tensor | None = None) -> WeightSnapshot:
        """Copy the policy into a slot; on resume, ``data`` is the flat memory of an older version instead."""
        slot = self._free_slot()
        try:
            slot.version.fill_(_INCOMPLETE)
            if data is None:
                self.layout.pack(self.policy, slot.data)
            else:
                slot.data.copy_(data)
            digest = content_digest(self.policy) if self.cfg.verify_weights and data is None else None
            segment = slot.segment if isinstance(slot, SharedSlot) else None
            snapshot = WeightSnapshot(version, digest, slot.data, segment, slot)
            with self._lock:
                if self.cfg.adopt != "lockstep":  # older versions are not needed
                    self._kept.clear()
                self._kept[version], self._digests[version] = snapshot, digest
            slot.version.fill_(version)
        finally:
            slot.release()
        return snapshot

    def _free_slot(self) -> Slot:
        """Return a slot locked for writing: a free one, or a new one up to the limit; else wait."""
        on_ray, on_cpu = self.cfg.worker == "ray", self.policy.version.device.type == "cpu"
        while True:
            with self._lock:
                kept = {id(snapshot.slot) for snapshot in self._kept.values() if self.cfg.adopt == "lockstep"}
            for slot in self._slots:
                if id(slot) not in kept and slot.acquire(wait=False):
                    return slot
            if on_ray or len(self._slots) < len(kept) + (2 if on_cpu else 1):
                break
            time.sleep(_WAIT_SECONDS)
        if not on_ray and (on_cpu or self.cfg.worker == "process"):
            new: Slot = SharedSlot(Segment.create(_HEADER + self.layout.nbytes, "a snapshot of the weights"))
        else:
            new = LocalSlot(torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=self.policy.version.device))
        if not on_ray:  # slots are not reused with Ray
            self._slots.append(new)
        new.acquire(wait=True)
        return new


class InferenceCopy:
    """The collector's side: its own policy, whose weights change only when it adopts a snapshot."""

    def __init__(self, policy: Policy) -> None:
        """Copy a policy; on a CPU, parameters take no memory until the first snapshot is adopted."""
        device = policy.version.device
        self._in_place = device.type == "cpu"
        self.has_weights = not self._in_place and not any(parameter.is_meta for parameter in policy.parameters())
        """Whether the policy has weights and can act."""
        own = copy.deepcopy(policy) if self.has_weights else _copy_without_weights(policy, device)
        self.policy: Policy = own.requires_grad_(False)
        self.layout = WeightLayout(self.policy)
        self._leased: Slot | None = None
        self._shared: list[SharedSlot] = []
        """Cache of the last slots, as mapping memory takes time."""

    def adopt(self, snapshot: WeightSnapshot) -> tuple[int, str | None]:
        """Load a snapshot, or the newer one that has overwritten it; return its version and, if verified, its hash."""
        slot = self._slot_of(snapshot)
        slot.lease()
        version, unused = int(slot.version), slot
        try:
            if version < snapshot.version:
                raise WeightsError(f"version {snapshot.version} is wanted, but its memory holds version {version}")
            if self._in_place:
                self.layout.assign(slot.data, self.policy)
                unused, self._leased = self._leased or slot, slot
            else:
                self.layout.unpack(slot.data, self.policy)
        finally:
            if unused is not self._leased:
                unused.release()
        self.has_weights = True
        return version, None if snapshot.digest is None else content_digest(self.policy)

    def _slot_of(self, snapshot: WeightSnapshot) -> Slot:
        if snapshot.segment is None:
            return snapshot.slot or LocalSlot(snapshot.data, snapshot.version)
        inode = os.fstat(snapshot.segment.fd).st_ino
        slot = next((known for known in self._shared if known.inode == inode), None) or SharedSlot(snapshot.segment)
        self._shared = [*(known for known in self._shared if known is not slot), slot][-2:]
        return slot


def without_weights(policy: Policy) -> Policy:
    """Return a copy of a policy for another process: its buffers on the CPU, its parameters on the meta device."""
    return move(_copy_without_weights(policy, torch.device("meta")), torch.device("cpu"))


def move(policy: Policy, device: torch.device) -> Policy:
    """Move a policy to a device, except parameters on the meta device; return it."""
    policy._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    policy.device = device
    return policy


def _copy_without_weights(policy: Policy, device: torch.device) -> Policy:
    """Copy a policy with uninitialised parameters, which take no memory on a CPU until they are written to."""
    own = {id(p): nn.Parameter(torch.empty_like(p, device=device), requires_grad=False) for p in policy.parameters()}
    return copy.deepcopy(policy, own)
