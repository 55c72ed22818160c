"""Finding the GPU for MuJoCo Warp, and what to say when it will not do."""

from __future__ import annotations

from typing import Any

import torch

from embodichain.errors import ConfigError, SimulationError

_GIB = 1024**3


def find_device(name: str, warp: Any) -> torch.device:
    """Return the device of a name from a config, ready for Warp, or raise what is to be changed."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == "cuda":
        device = _find_gpu(name, device)
    if warp.config.log_level == warp.LOG_INFO:  # a line for each of some sixty kernels; a user's own choice stays
        warp.config.log_level = warp.LOG_WARNING
    warp.init()
    if device.type == "cuda":
        _check_driver(warp)
    return device


def _find_gpu(name: str, device: torch.device) -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device: {name!r} was asked for, but torch finds no CUDA device; use 'cpu', or install a driver and a "
            "torch built for CUDA"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device: {name!r} does not exist, this machine has {torch.cuda.device_count()} GPU(s)")
    return torch.device("cuda", index)


def _check_driver(warp: Any) -> None:
    if not warp.is_cuda_available():
        raise SimulationError("Warp finds no CUDA driver, though torch does: check that libcuda.so can be loaded")
    # The constraint solver ends when all worlds have converged, which a graph can tell since CUDA 12.4 alone.
    if not warp.is_conditional_graph_supported():
        found = ".".join(map(str, warp.get_cuda_driver_version() or ("no", "version")))
        raise SimulationError(
            f"the driver is too old for simulation on the GPU: it supports CUDA {found}, and 12.4 or newer is needed; "
            "update it, or use device 'cpu'"
        )


_SIGNS = ("alloc", "out of memory", "maximum representable")
"""Words in errors of Warp where worlds are too many: for the memory, or for numbering what is in them."""


def out_of_memory(error: Exception, num_envs: int, device: torch.device) -> Exception:
    """Return the error to raise where worlds were to be made: one that says what to change, if memory ran out."""
    message = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(sign in message for sign in _SIGNS):
        free = f", {torch.cuda.mem_get_info(device)[0] / _GIB:.1f} GiB of it free" if device.type == "cuda" else ""
        return SimulationError(
            f"{num_envs} worlds do not fit into the memory of {device}{free}: use fewer num_envs, or end other "
            f"programs that use it ({message.splitlines()[0]})"
        )
    return error
