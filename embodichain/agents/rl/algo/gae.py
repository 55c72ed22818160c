"""Generalised advantage estimation, always along the time axis."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from embodichain.agents.utils.kernels import kernels_work
from embodichain.errors import RolloutError


class Backwards(Protocol):
    """Accumulates over rows of ``[num_steps, num_envs]``, from the last step to the first."""

    def __call__(
        self,
        rewards: Tensor,
        values: Tensor,
        next_values: Tensor,
        terminations: Tensor,
        dones: Tensor,
        gamma: float | Tensor,
        decay: float | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns."""


def compute_gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float | Tensor,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return ``(advantage, return_)``; everything is ``[num_envs, num_steps]``.

    ``next_value`` is the value of the state that was really reached: of ``final_observation`` where ``done``, of the
    next observation elsewhere. So a time limit bootstraps and a termination does not:

        delta_t = reward_t + gamma * next_value_t * (1 - terminated_t) - value_t
        advantage_t = delta_t + gamma * gae_lambda * (1 - done_t) * advantage_{t+1}
        return_t = advantage_t + value_t

    ``gamma`` is one number, or one for each transition ``[num_envs, num_steps]`` where they last differently long.
    """
    inputs = {"reward": reward, "value": value, "next_value": next_value, "terminated": terminated, "done": done}
    for name, tensor in inputs.items():
        if tensor.ndim != 2 or tensor.shape != reward.shape:
            expected = f"[num_envs, num_steps] = {list(reward.shape)}" if reward.ndim == 2 else "[num_envs, num_steps]"
            raise RolloutError(f"{name}: expected {expected}, got {list(tensor.shape)}")
    rewards, values, next_values = (x.detach().t().float().contiguous() for x in (reward, value, next_value))
    terminations, dones = (x.t().bool().contiguous() for x in (terminated, done))
    discount = gamma.t().float().contiguous() if isinstance(gamma, Tensor) else gamma
    advantage, returns = _backwards_on(reward.device)(
        rewards, values, next_values, terminations, dones, discount, discount * gae_lambda
    )
    return advantage.t(), returns.t()


@cache
def _backwards_on(device: torch.device) -> Backwards:
    """Return the fastest way for a device: numpy, one kernel, or a loop of kernels where that cannot be compiled."""
    if device.type == "cpu":
        return _backwards_cpu
    if not kernels_work(device):
        return _backwards
    from embodichain.agents.rl.algo.gae_kernel import backwards_kernel

    return backwards_kernel


def _backwards(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminations: Tensor,
    dones: Tensor,
    gamma: float | Tensor,
    decay: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Accumulate over rows of ``[num_steps, num_envs]``, two kernels per step and none that waits."""
    if isinstance(gamma, Tensor):
        advantage = (rewards - values).addcmul_(next_values, (~terminations) * gamma)
    else:
        advantage = (rewards - values).addcmul_(next_values, (~terminations).float(), value=gamma)
    keep = (~dones).float().mul_(decay)
    rows, weights = advantage.unbind(0), keep.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(weights[t], rows[t + 1])
    return advantage, advantage + values


def _backwards_cpu(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminations: Tensor,
    dones: Tensor,
    gamma: float | Tensor,
    decay: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Do the same with numpy, whose calls on short rows and on booleans cost a third of torch's."""
    r, v, next_v, terminated, done = (x.numpy() for x in (rewards, values, next_values, terminations, dones))
    discount, keep = (x.numpy() if isinstance(x, Tensor) else np.float32(x) for x in (gamma, decay))
    advantage = np.multiply(~terminated, discount)
    advantage *= next_v
    advantage += r
    advantage -= v
    rows, weights = list(advantage), list(np.multiply(~done, keep))
    scratch = np.empty_like(rows[-1])
    for t in range(len(rows) - 2, -1, -1):
        np.multiply(weights[t], rows[t + 1], out=scratch)
        np.add(rows[t], scratch, out=rows[t])
    return torch.from_numpy(advantage), torch.from_numpy(advantage + v)
