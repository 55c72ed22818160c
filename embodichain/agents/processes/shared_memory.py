"""Memory that several processes share: anonymous segments, what fits into them, and the order of accesses to them.

A segment is known by its file descriptor alone, which pickling sends along. Nothing has to be unlinked: the kernel
frees it when the last process that maps it is gone, however that ended.
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
"""Files with the limit and the usage of a group and those below it, and the names of what can be given up."""


class Segment:
    """A shared-memory segment as one flat tensor of bytes."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        try:
            # As torch rebuilds a tensor from a queue: it duplicates the descriptor, so tensors here can be sent on.
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
        """Reserve ``nbytes`` of zeros; ``what`` names them in the error if they do not fit."""
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
        """Return the bytes from ``offset`` on as a tensor."""
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
    """Return how much memory a new segment may take: what the machine has free, or less in a limited container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    there = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    own = {"": "/", "memory": "/"}  # what a container does not tell is the root of what it sees
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
                there = min(there, _room_in_cgroup(folder, names, there))
    return there


def _room_in_cgroup(folder: Path, names: tuple[str, ...], unlimited: int) -> int:
    """Return what a control group leaves; cached pages of files are given up when memory is needed: they are free."""
    limit, usage = _lines(folder / names[0]), _lines(folder / names[1])
    if not limit or not usage or not limit[0].isdigit():
        return unlimited
    statistics = dict(line.split() for line in _lines(folder / "memory.stat"))
    cached = sum(int(statistics.get(name, 0)) for name in names[2:])
    return max(int(limit[0]) - int(usage[0]) + cached, 0)


def _room_in_address_space() -> int:
    """Return how much more memory this process may map."""
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
    """Return a byte count as a person would say it."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**power:.1f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def tensor_of(array: NDArray[np.uint8]) -> Tensor:
    """Return the memory of an array of bytes as a tensor, without a copy; the tensor keeps the array alive.

    The array may be read-only, as those of Ray are: do not write to the tensor then.
    """
    if not array.size:
        return torch.empty(0, dtype=torch.uint8)
    memory: Any = (ctypes.c_uint8 * array.size).from_address(array.ctypes.data)
    memory.owner = array
    return torch.frombuffer(memory, dtype=torch.uint8)


# --- memory order -------------------------------------------------------------------------------------------------
#
# Frames must become visible after the odd sequence counter and before the even one, and be loaded between the two reads
# of it. x86-64 keeps stores in order and loads in order (total store order), and the C library ends its streaming
# copies with a store fence. Elsewhere a full barrier is needed; Python has none, but the kernel does.

_MEMBARRIER = 283
"""The number of the system call in the generic table that arm64 and riscv use."""
_GLOBAL_EXPEDITED = 2
"""A full barrier in the caller; costs interrupts only in processes that registered for them, and nobody does."""


_KEEPS_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i686"}
_libc = ctypes.CDLL(None, use_errno=True)


def fence() -> None:
    """Order all memory accesses before the call against all after it."""
    if not _KEEPS_ORDER and _libc.syscall(_MEMBARRIER, _GLOBAL_EXPEDITED, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"membarrier: {os.strerror(ctypes.get_errno())}")
