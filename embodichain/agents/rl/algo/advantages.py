"""Advantages and returns: generalised advantage estimation, V-trace, and the reward and discount of action chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.errors import RolloutError
from embodichain.utils.cuda_graphs import kernels_work


class TimeMajor(NamedTuple):
    """What GAE accumulates over, contiguous rows ``[num_steps, num_envs]``, from the last step to the first."""

    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    done: Tensor
    gamma: float | Tensor
    """Discount of the next value."""
    decay: float | Tensor
    """Discount of the next advantage."""


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
    numbers = [x.detach().t().float().contiguous() for x in (reward, value, next_value)]
    flags = [x.t().bool().contiguous() for x in (terminated, done)]
    discount = gamma.t().float().contiguous() if isinstance(gamma, Tensor) else gamma
    time_major = TimeMajor._make([*numbers, *flags, discount, discount * gae_lambda])
    advantage, returns = _accumulate_on(reward.device)(time_major)
    return advantage.t(), returns.t()


@cache
def _accumulate_on(device: torch.device) -> Callable[[TimeMajor], tuple[Tensor, Tensor]]:
    """Return the fastest way for a device: numpy, one kernel, or a loop of kernels where that cannot be compiled."""
    if device.type == "cpu":
        return _accumulate_cpu
    if not kernels_work(device):
        return _accumulate
    from embodichain.agents.rl.algo.kernels import accumulate_gae

    return accumulate_gae


def _accumulate(rows: TimeMajor) -> tuple[Tensor, Tensor]:
    """Return advantages and returns with two kernels per step and none that waits."""
    bootstraps = ~rows.terminated
    if isinstance(rows.gamma, Tensor):
        advantage = (rows.reward - rows.value).addcmul_(rows.next_value, bootstraps * rows.gamma)
    else:
        advantage = (rows.reward - rows.value).addcmul_(rows.next_value, bootstraps.float(), value=rows.gamma)
    steps, weights = advantage.unbind(0), (~rows.done).float().mul_(rows.decay).unbind(0)
    for t in range(len(steps) - 2, -1, -1):
        steps[t].addcmul_(weights[t], steps[t + 1])
    return advantage, advantage + rows.value


def _accumulate_cpu(rows: TimeMajor) -> tuple[Tensor, Tensor]:
    """Do the same with numpy, whose calls on short rows and on booleans cost a third of torch's."""
    reward, value, next_value, terminated, done = (x.numpy() for x in rows[:5])
    gamma, decay = (x.numpy() if isinstance(x, Tensor) else np.float32(x) for x in rows[5:])
    advantage = np.multiply(~terminated, gamma)
    advantage *= next_value
    advantage += reward
    advantage -= value
    steps, weights = list(advantage), list(np.multiply(~done, decay))
    scratch = np.empty_like(steps[-1])
    for t in range(len(steps) - 2, -1, -1):
        np.multiply(weights[t], steps[t + 1], out=scratch)
        np.add(steps[t], scratch, out=steps[t])
    return torch.from_numpy(advantage), torch.from_numpy(advantage + value)


def compute_vtrace(
    rollout: TensorDictBase,
    log_importance: Tensor,
    reward: Tensor,
    gamma: float | Tensor,
    trace_lambda: float,
    clip: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    """Return ``(advantage, return_)`` of a policy from what another, slightly older one did.

    Everything is ``[num_envs, num_steps]``. ``value`` and ``next_value`` of the rollout are the present policy's
    (``Proximal.values``), ``log_importance`` is ``log pi / mu`` of its actions, mu being the policy that collected it.
    With ``(rho_max, c_max) = clip``:

        rho_t = min(rho_max, pi/mu),  c_t = lambda * min(c_max, pi/mu)
        delta_t = rho_t * (reward_t + gamma * next_value_t * (1 - terminated_t) - value_t)
        x_t = delta_t + gamma * c_t * (1 - done_t) * x_{t+1}
        return_t = value_t + x_t
        advantage_t = reward_t + gamma * (next_value_t + lambda * x_{t+1} * (1 - done_t)) * (1 - terminated_t) - value_t

    For ``pi = mu`` this is GAE. The advantage is not weighted by rho: the loss, with its probability ratio, does that.
    """
    ratio = log_importance.exp()
    rho, trace = ratio.clamp(max=clip[0]), trace_lambda * ratio.clamp(max=clip[1])
    value, terminated, done = rollout["value"], rollout["terminated"], rollout["done"]
    target = reward + gamma * rollout["next_value"] * ~terminated
    nothing = torch.zeros_like(reward)
    # x_t = delta_t + decay_t (1 - done_t) x_{t+1} is what GAE computes of a reward delta_t without any values.
    x = compute_gae(rho * (target - value), nothing, nothing, terminated, done, gamma * trace, 1.0)[0]
    following = torch.zeros_like(x)
    following[:, :-1] = x[:, 1:]
    return target - value + gamma * trace_lambda * following * ~done, value + x


def reward_and_discount(rollout: TensorDictBase, gamma: float) -> tuple[Tensor, float | Tensor]:
    """Return the reward of every decision ``[num_envs, num_steps]`` and the discount of what follows it.

    For a chunk of which n actions were taken: ``r = sum_{i < n} gamma^i r_i``, and what follows counts ``gamma^n``.
    """
    if "chunk_reward" not in rollout.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return rollout["reward"], gamma
    rewards = rollout["chunk_reward"]
    powers = gamma ** torch.arange(rewards.shape[-1], device=rewards.device, dtype=rewards.dtype)
    return rewards @ powers, gamma ** rollout["num_actions"].to(rewards.dtype)
