"""V-trace: advantages of a policy from what another, slightly older one did."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.gae import compute_gae


def compute_vtrace(
    rollout: TensorDictBase,
    value: Tensor,
    log_importance: Tensor,
    reward: Tensor,
    gamma: float | Tensor,
    trace_lambda: float,
    clip: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    """Return ``(advantage, return_)``; everything is ``[num_envs, num_steps]``.

    ``value`` is what the present policy makes of the rollout's observations, ``log_importance`` is ``log pi / mu`` of
    its actions, mu being the policy that collected it. With ``(rho_max, c_max) = clip``:

        rho_t = min(rho_max, pi/mu),  c_t = lambda * min(c_max, pi/mu)
        delta_t = rho_t * (reward_t + gamma * next_value_t * (1 - terminated_t) - value_t)
        x_t = delta_t + gamma * c_t * (1 - done_t) * x_{t+1}
        return_t = value_t + x_t
        advantage_t = reward_t + gamma * (next_value_t + lambda * x_{t+1} * (1 - done_t)) * (1 - terminated_t) - value_t

    For ``pi = mu`` this is GAE. The advantage is not weighted by rho: the loss, with its probability ratio, does that.
    """
    ratio = log_importance.exp()
    rho, trace = ratio.clamp(max=clip[0]), trace_lambda * ratio.clamp(max=clip[1])
    terminated, done = rollout["terminated"], rollout["done"]
    target = reward + gamma * next_values(rollout, value) * ~terminated
    nothing = torch.zeros_like(reward)
    # x_t = delta_t + decay_t (1 - done_t) x_{t+1} is what GAE computes of a reward delta_t without any values.
    x = compute_gae(rho * (target - value), nothing, nothing, terminated, done, gamma * trace, 1.0)[0]
    following = torch.zeros_like(x)
    following[:, :-1] = x[:, 1:]
    return target - value + gamma * trace_lambda * following * ~done, value + x


def next_values(rollout: TensorDictBase, value: Tensor) -> Tensor:
    """Return the values of the states that were reached, ``[num_envs, num_steps]``.

    They are the present policy's wherever the state is an observation of the rollout. What lies at its edge, or where a
    time limit cut an episode, is not stored: there the value of the time of collection stands, plus what the state
    before it has gained since, as neighbours gain about the same. An old value beside new ones would look like a
    reward, or a penalty, for getting there. Where new weights were adopted later in the rollout nothing is added: it is
    not known then which of them valued the state.
    """
    version = rollout["policy_version"]
    gained = torch.where(version == version[:, -1:], value - rollout["value"], 0.0)
    reached = rollout["next_value"] + gained * ~rollout["terminated"]
    inside = ~rollout["done"][:, :-1]
    reached[:, :-1] = torch.where(inside, value[:, 1:], reached[:, :-1])
    return reached
