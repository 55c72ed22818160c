"""Generalised advantage estimation as one GPU kernel: each thread walks back through the steps of one env.

It does the CPU's operations in the CPU's order, each rounded on its own, so its numbers are the CPU's to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32
"""Envs of one program: few, because steps follow each other and only envs run side by side."""


@triton.jit
def _walk_back(  # type: ignore[no-untyped-def]  # noqa: ANN202
    reward,  # noqa: ANN001
    value,  # noqa: ANN001
    next_value,  # noqa: ANN001
    terminated,  # noqa: ANN001
    done,  # noqa: ANN001
    gammas,  # noqa: ANN001
    decays,  # noqa: ANN001
    advantage,  # noqa: ANN001
    returns,  # noqa: ANN001
    gamma,  # noqa: ANN001
    decay,  # noqa: ANN001
    num_steps,  # noqa: ANN001
    num_envs,  # noqa: ANN001
    per_step: tl.constexpr,
    block: tl.constexpr,
):
    env = tl.program_id(0) * block + tl.arange(0, block)
    here = env < num_envs
    following = tl.zeros([block], tl.float32)
    for back in range(num_steps):
        at = (num_steps - 1 - back).to(tl.int64) * num_envs + env
        goes_on = 1.0 - tl.load(terminated + at, mask=here, other=0).to(tl.float32)
        keeps = 1.0 - tl.load(done + at, mask=here, other=0).to(tl.float32)
        if per_step:
            goes_on *= tl.load(gammas + at, mask=here, other=0.0)
            keeps *= tl.load(decays + at, mask=here, other=0.0)
        else:
            goes_on *= gamma
            keeps *= decay
        v = tl.load(value + at, mask=here, other=0.0)
        delta = goes_on * tl.load(next_value + at, mask=here, other=0.0)
        delta = delta + tl.load(reward + at, mask=here, other=0.0)
        delta = delta - v
        following = delta + keeps * following
        tl.store(advantage + at, following, mask=here)
        tl.store(returns + at, following + v, mask=here)


def backwards_kernel(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminations: Tensor,
    dones: Tensor,
    gamma: float | Tensor,
    decay: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns for contiguous rows ``[num_steps, num_envs]`` on a GPU."""
    num_steps, num_envs = rewards.shape
    advantage, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    per_step = isinstance(gamma, Tensor)
    numbers: tuple[Any, Any] = (0.0, 0.0) if per_step else (gamma, decay)
    fields: tuple[Any, Any] = (gamma, decay) if per_step else (rewards, rewards)
    with torch.cuda.device(rewards.device):
        _walk_back[(triton.cdiv(num_envs, BLOCK),)](
            rewards,
            values,
            next_values,
            terminations.view(torch.uint8),
            dones.view(torch.uint8),
            *fields,
            advantage,
            returns,
            *numbers,
            num_steps,
            num_envs,
            per_step=per_step,
            block=BLOCK,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return advantage, returns
