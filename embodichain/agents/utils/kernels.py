"""Whether our own GPU kernels can be used; whoever has one also has a way without it."""

from __future__ import annotations

import logging
from functools import cache

import torch

from embodichain.extras import available

_LOG = logging.getLogger(__name__)


@cache
def kernels_work(device: torch.device) -> bool:
    """Tell whether Triton compiles and runs on a device; the log says why not, once."""
    if device.type != "cuda" or not available("triton"):
        return False
    from embodichain.agents.utils.trial_kernel import try_kernel

    try:
        return try_kernel(device)
    except (RuntimeError, OSError) as error:  # no compiler on this machine, or a GPU that Triton does not know
        _LOG.warning("our own GPU kernels are not used, which costs speed: %s", error)
        return False
