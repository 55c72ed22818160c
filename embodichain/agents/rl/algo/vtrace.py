"""V-trace: advantages of a policy from what another, slightly older one did."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.gae import compute_gae


def compute_vtrace(
    rollout: TensorDictBase,
    log_importance: Tensor,
    reward: Tensor,
    gamma: float | Tensor,
    trace_lambda: float,
    clip: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    """Return ``(advantage, return_)``; everything is ``[num_envs, num_steps]``.

    ``value`` and ``next_value`` of the rollout are the present policy's (``Proximal.values``), ``log_importance`` is
    ``log pi / mu`` of its actions, mu being the policy that collected it. With ``(rho_max, c_max) = clip``:

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
