"""Memory order between processes, as far as the sequence counters of the buffer need it.

A writer must not let its frames become visible before the counter is odd, nor the even counter before the frames; a
reader must not load frames before it has read the counter the first time, nor after it has read it the second time.
x86-64 keeps stores in order and loads in order (total store order), and the C library ends its streaming copies with a
store fence, so there nothing has to be done. Elsewhere a full barrier is needed; Python has none, but the kernel does.
"""

from __future__ import annotations

import ctypes
import os
import platform

_MEMBARRIER = 283
"""The number of the system call in the generic table that arm64 and riscv use."""
_GLOBAL_EXPEDITED = 2
"""A full barrier in the caller; costs interrupts only in processes that registered for them, and nobody does."""

STRONGLY_ORDERED = platform.machine().lower() in {"x86_64", "amd64", "i686"}


def _no_fence() -> None:
    """Do nothing: this machine keeps the order by itself."""


def _kernel_fence() -> None:
    """Order all memory accesses before the call against all after it."""
    if _libc.syscall(_MEMBARRIER, _GLOBAL_EXPEDITED, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"membarrier: {os.strerror(ctypes.get_errno())}")


_libc = ctypes.CDLL(None, use_errno=True)
fence = _no_fence if STRONGLY_ORDERED else _kernel_fence
