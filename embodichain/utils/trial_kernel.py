"""The smallest kernel, to find out whether Triton can compile for a GPU at all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_one(out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    tl.store(out, 1.0)


def try_kernel(device: torch.device) -> bool:
    """Run it, and tell whether it did what it should."""
    out = torch.zeros(1, device=device)
    with torch.cuda.device(device):
        _write_one[(1,)](out)
    return bool(out == 1.0)
