"""One piece of anonymous shared memory, known by a file descriptor and by nothing else.

The segment has no name: it is in no directory, nothing has to be unlinked, and the kernel frees it when the last
process that maps it is gone, however that process ended. Forked children inherit the mapping; spawned ones, forkserver
ones and queues get the descriptor when the segment is pickled.
"""

from __future__ import annotations

import os
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodichain.errors import SharedMemoryError

_CGROUP_ROOT = Path("/sys/fs/cgroup")


class Segment:
    """A shared-memory segment as one flat tensor of bytes."""

    def __init__(self, fd: int, nbytes: int) -> None:
        # The same call with which torch rebuilds a tensor that came through a queue. It keeps a duplicate of the
        # descriptor, so tensors on this memory can themselves be sent to other processes.
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, nbytes)  # type: ignore[attr-defined]
        self.fd = fd
        self.nbytes = nbytes
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))

    @classmethod
    def create(cls, nbytes: int, what: str) -> Segment:
        """Reserve ``nbytes`` of zeros; ``what`` names them in the error if they do not fit."""
        there = available_bytes()
        if nbytes > there:
            raise SharedMemoryError(
                f"{what} needs {format_bytes(nbytes)} of shared memory, but {format_bytes(there)} are available: "
                "lower buffer_size or max_episode_steps, use smaller or fewer cameras, or free memory"
            )
        fd = os.memfd_create("embodichain-stream", os.MFD_CLOEXEC)
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
    own = next((line[3:] for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::")), "/")
    group = _CGROUP_ROOT / own.lstrip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(_CGROUP_ROOT):
            there = min(there, _room_in_cgroup(folder, there))
    return there


def _room_in_cgroup(folder: Path, unlimited: int) -> int:
    """Return what a control group leaves; file pages nobody uses are given up for us, so they count as free."""
    limit, usage = _lines(folder / "memory.max"), _lines(folder / "memory.current")
    if not limit or not usage or not limit[0].isdigit():
        return unlimited
    statistics = dict(line.split() for line in _lines(folder / "memory.stat"))
    return max(int(limit[0]) - int(usage[0]) + int(statistics.get("inactive_file", 0)), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def format_bytes(count: int) -> str:
    """Return a byte count as a person would say it."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
