"""What the GPU tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from embodichain.envs.gl_backend import choose_backend
from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv
from embodichain.errors import RenderingError
from embodichain.extras import available
from embodichain.utils.cuda_graphs import refusing_to_wait

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
simulates = [*on_gpu, pytest.mark.skipif(not available("mujoco_warp"), reason="needs the extra 'gpu'")]


def needs_opengl() -> None:
    """Skip the test where the CPU's images, which it compares with, cannot be drawn."""
    try:
        choose_backend()
    except RenderingError as error:
        pytest.skip(f"needs OpenGL: {error}")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the host waits for the device."""
    torch.cuda.synchronize()
    with refusing_to_wait():
        yield


def make_task(id: str = "PushCubeRL", device: str = "cuda", num_envs: int = 64, **changes: object) -> TaskEnv:
    """Return one of our own environments."""
    env = make(id, num_envs=num_envs, device=device, seed=3, **changes)
    assert isinstance(env, TaskEnv)
    return env
