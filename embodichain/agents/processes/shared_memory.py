"""Shared memory between processes: anonymous segments, available memory, and memory barriers.

A segment is identified by its file descriptor, which pickling sends along. Nothing has to be unlinked: the kernel frees
the memory when the last process that maps it has exited, even if it was killed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodichain.errors import SharedMemoryError

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_V2 = ("memory.max", "memory.current", "active_file", "inactive_file", "slab_reclaimable")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")
"""Files with a group's memory limit and usage, and the fields of ``memory.stat`` that count reclaimable memory."""


class Segment:
    """A shared-memory segment as one flat tensor of bytes."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        try:
            # As torch rebuilds a tensor from a queue. It duplicates the descriptor, so views can be sent on.
            storage = torch.UntypedStorage._new_shared_fd_cpu(fd, nbytes)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise SharedMemoryError(
                f"{format_bytes(nbytes)} of shared memory cannot be mapped into process {os.getpid()} ({error}): see "
                "ulimit -v and ulimit -n"
            ) from error
        self.nbytes = nbytes
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))

    @classmethod
    def create(cls, nbytes: int, what: str) -> Segment:
        """Allocate ``nbytes`` of zeros; ``what`` names their purpose in the error if they do not fit."""
        available = available_bytes()
        if nbytes > available:
            raise SharedMemoryError(
                f"{what} needs {format_bytes(nbytes)} of shared memory, but {format_bytes(available)} are available: "
                "lower buffer_size or max_episode_steps, use smaller or fewer cameras, or free memory"
            )
        room = _room_in_address_space()
        if nbytes > room:
            raise SharedMemoryError(
                f"{what} needs {format_bytes(nbytes)} of shared memory, but the address space of this process is "
                f"limited, and has room for {format_bytes(room)}: raise the limit (ulimit -v), or lower buffer_size or "
                "max_episode_steps"
            )
        fd = os.memfd_create("embodichain", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return cls(fd, nbytes)

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a view of the bytes from ``offset`` on as a tensor."""
        count = int(torch.Size(shape).numel())
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype).view(shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self.fd), self.nbytes)

    def __del__(self) -> None:
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)


def _attach(duplicate: Any, nbytes: int) -> Segment:
    return Segment(duplicate.detach(), nbytes)


def available_bytes() -> int:
    """Return the bytes available for a new segment, within the limits of the container (cgroup)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    own = {"": "/", "memory": "/"}  # by default, the root that a container sees
    for line in _lines(_OWN_CGROUPS):
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    for root, path, names in (
        (_CGROUP_ROOT, own[""], _CGROUP_V2),
        (_CGROUP_ROOT / "memory", own["memory"], _CGROUP_V1),
    ):
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                available = min(available, _room_in_cgroup(folder, names, available))
    return available


def _room_in_cgroup(folder: Path, names: tuple[str, ...], unlimited: int) -> int:
    """Return the bytes that a cgroup has left, counting reclaimable page cache as free."""
    limit, usage = _lines(folder / names[0]), _lines(folder / names[1])
    if not limit or not usage or not limit[0].isdigit():
        return unlimited
    statistics = dict(line.split() for line in _lines(folder / "memory.stat"))
    cached = sum(int(statistics.get(name, 0)) for name in names[2:])
    return max(int(limit[0]) - int(usage[0]) + cached, 0)


def _room_in_address_space() -> int:
    """Return the bytes that this process may still map (``ulimit -v``)."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(limit - pages * resource.getpagesize(), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def format_bytes(count: int) -> str:
    """Format a byte count with a unit, such as ``1.5 GiB``."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**power:.1f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def tensor_of(array: NDArray[np.uint8]) -> Tensor:
    """Return a tensor that shares the memory of a byte array and keeps the array alive.

    The array may be read-only, as Ray's are; then do not write to the tensor.
    """
    if not array.size:
        return torch.empty(0, dtype=torch.uint8)
    memory: Any = (ctypes.c_uint8 * array.size).from_address(array.ctypes.data)
    memory.owner = array
    return torch.frombuffer(memory, dtype=torch.uint8)


# --- memory order -------------------------------------------------------------------------------------------------
#
# Frames must become visible after the odd sequence number and before the even one, and be loaded between the two reads
# of it. x86-64 keeps stores in order and loads in order (total store order), and the C library ends its streaming
# copies with a store fence. Other architectures need a full barrier, for which Python has to call the kernel.

_MEMBARRIER = 283
"""System call number in the generic table, which arm64 and riscv use."""
_GLOBAL_EXPEDITED = 2
"""Full barrier in the caller; interrupts only processes that registered for it, and none does."""


_KEEPS_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i686"}
_libc = ctypes.CDLL(None, use_errno=True)


def fence() -> None:
    """Order all memory accesses before the call against all after it."""
    if not _KEEPS_ORDER and _libc.syscall(_MEMBARRIER, _GLOBAL_EXPEDITED, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"membarrier: {os.strerror(ctypes.get_errno())}")
