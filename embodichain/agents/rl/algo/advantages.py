"""Advantages and returns: GAE, V-trace, and corrections for rollouts that an older policy collected.

Decoupled PPO centres the trust region on the policy before the update, pi_prox, instead of the policy that collected
the rollout, mu:

    L = -E[ min(w_max, pi_prox/mu) * min(r A, clip(r, 1 - c, 1 + c) A) ],   r = pi/pi_prox.

The importance weight is a positive constant during the update. So this is the loss of plain PPO with pi_prox as the old
policy and the weight multiplied into the advantages. Values are computed again with the current critic: returns that
bootstrap from old values would pull the critic back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.buffer.rollout_buffer import evaluate_rollout
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils import Level
from embodichain.agents.rl.utils.distributed import Ranks, batch_moments, merge_moments
from embodichain.agents.rl.utils.ratios import bounded, count_ratios, kl_estimate, log_ratio
from embodichain.errors import RolloutError
from embodichain.utils.cuda_graphs import kernels_work


class TimeMajor(NamedTuple):
    """Inputs of the GAE recursion: contiguous tensors ``[num_steps, num_envs]``."""

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
    """Return ``(advantage, return_)`` of generalised advantage estimation; all tensors are ``[num_envs, num_steps]``.

    ``next_value`` is the value of the state that the step reached: of ``final_observation`` where ``done``, of the next
    observation elsewhere. A time limit bootstraps from it, a termination does not:

        delta_t = reward_t + gamma * next_value_t * (1 - terminated_t) - value_t
        advantage_t = delta_t + gamma * gae_lambda * (1 - done_t) * advantage_{t+1}
        return_t = advantage_t + value_t

    ``gamma`` is a number, or a tensor ``[num_envs, num_steps]`` if transitions span different numbers of steps.
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
    """Return the fastest implementation for a device: numpy, one Triton kernel, or a torch loop without Triton."""
    if device.type == "cpu":
        return _accumulate_cpu
    if not kernels_work(device):
        return _accumulate
    from embodichain.agents.rl.algo.kernels import accumulate_gae

    return accumulate_gae


def _accumulate(rows: TimeMajor) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, without synchronising with the GPU."""
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
    """Same as ``_accumulate`` in numpy, which takes a third of torch's time on short rows."""
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
    """Return ``(advantage, return_)`` of V-trace for a rollout that a slightly older policy collected.

    All tensors are ``[num_envs, num_steps]``. ``value`` and ``next_value`` of the rollout come from the current policy
    pi (``Proximal.values``). ``log_importance`` is ``log pi / mu`` of its actions, where mu is the policy that
    collected it. With ``(rho_max, c_max) = clip``:

        rho_t = min(rho_max, pi/mu),  c_t = lambda * min(c_max, pi/mu)
        delta_t = rho_t * (reward_t + gamma * next_value_t * (1 - terminated_t) - value_t)
        x_t = delta_t + gamma * c_t * (1 - done_t) * x_{t+1}
        return_t = value_t + x_t
        advantage_t = reward_t + gamma * (next_value_t + lambda * x_{t+1} * (1 - done_t)) * (1 - terminated_t) - value_t

    For ``pi = mu`` this is GAE. The advantage is not weighted by rho, as the loss contains the probability ratio.
    """
    ratio = log_importance.exp()
    rho, trace = ratio.clamp(max=clip[0]), trace_lambda * ratio.clamp(max=clip[1])
    value, terminated, done = rollout["value"], rollout["terminated"], rollout["done"]
    target = reward + gamma * rollout["next_value"] * ~terminated
    zeros = torch.zeros_like(reward)
    # x_t = delta_t + decay_t (1 - done_t) x_{t+1} is GAE with reward delta_t and all values zero.
    x = compute_gae(rho * (target - value), zeros, zeros, terminated, done, gamma * trace, 1.0)[0]
    following = torch.zeros_like(x)
    following[:, :-1] = x[:, 1:]
    return target - value + gamma * trace_lambda * following * ~done, value + x


def reward_and_discount(rollout: TensorDictBase, gamma: float) -> tuple[Tensor, float | Tensor]:
    """Return the reward and the discount of each transition, ``[num_envs, num_steps]``.

    For a chunk of n actions they are ``sum_{i<n} gamma^i r_i`` and ``gamma^n``.
    """
    if "chunk_reward" not in rollout.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return rollout["reward"], gamma
    rewards = rollout["chunk_reward"]
    powers = gamma ** torch.arange(rewards.shape[-1], device=rewards.device, dtype=rewards.dtype)
    return rewards @ powers, gamma ** rollout["num_actions"].to(rewards.dtype)


class RewardNormalizer:
    """Divides rewards by the running standard deviation of discounted returns, and clips them to +-``clip``.

    The statistics cover all ranks and are updated with each rollout before its rewards are normalised.
    """

    def __init__(self, clip: float, device: torch.device | str = "cpu") -> None:
        self.clip = clip
        # A prior of 1e-4 samples with variance 1, which the first rollout outweighs.
        self.count = torch.tensor(1e-4, dtype=torch.float64, device=device)
        self.mean = torch.zeros(1, dtype=torch.float64, device=device)
        self.m2 = torch.full((1,), 1e-4, dtype=torch.float64, device=device)

    @property
    def variance(self) -> Tensor:
        """Variance ``[1]`` of all discounted returns so far."""
        return self.m2 / self.count

    @property
    def std(self) -> Tensor:
        """The divisor of rewards, ``[1]``."""
        return (self.variance + 1e-8).sqrt()

    def update(self, returns: Tensor, ranks: Ranks) -> None:
        """Update the statistics with the discounted returns ``[...]`` of all ranks."""
        merged = (self.count, self.mean, self.m2)
        for moments in ranks.share_moments(batch_moments(returns.reshape(-1, 1), 1)):
            merged = merge_moments(merged, moments)
        self.count, self.mean, self.m2 = merged

    def __call__(self, reward: Tensor) -> Tensor:
        """Return normalised and clipped rewards ``[...]``."""
        return (reward / self.std.to(reward.dtype)).clamp(-self.clip, self.clip)

    def normalize(self, reward: Tensor, rollout: TensorDictBase, ranks: Ranks) -> Tensor:
        """Update the statistics with ``discounted_return`` of a rollout, and return its rewards normalised."""
        if "discounted_return" not in rollout.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            raise RolloutError(
                "normalize_reward needs rollouts with a 'discounted_return': make the collector with "
                "return_discount=algorithm.return_discount"
            )
        self.update(rollout["discounted_return"], ranks)
        return self(reward)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the statistics."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the statistics from ``state_dict``."""
        self.count, self.mean, self.m2 = (state[name].to(self.mean.device) for name in ("count", "mean", "m2"))


@dataclass(frozen=True)
class Proximal:
    """Log-probabilities and values of a rollout under the proximal policy, that is, the policy before the update."""

    log_prob: Tensor
    """Log-probabilities of the actions, with the shape of ``sample_log_prob``."""
    value: Tensor
    """Values of the observations, ``[num_envs, num_steps]``."""
    log_importance: Tensor
    """``log pi_prox / mu`` of the decisions, ``[num_envs, num_steps]``."""

    @classmethod
    def of(cls, policy: Policy, rollout: TensorDictBase, rows: int) -> Self:
        """Evaluate a rollout in batches of ``rows`` transitions."""
        log_prob, value = evaluate_rollout(policy, rollout, rows)
        log_importance = log_ratio(log_prob.float(), rollout["sample_log_prob"], rollout, "chunk")
        return cls(log_prob.float(), value.float(), log_importance)

    def values(self, rollout: TensorDictBase, version: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``value`` and ``next_value`` of the current critic; transitions of its own ``version`` keep theirs."""
        value = torch.where(rollout["policy_version"] == version, rollout["value"], self.value)
        return value, next_values(rollout, value)

    def decouple(self, data: TensorDictBase, max_weight: float, level: Level) -> Tensor:
        """Make pi_prox the old policy of ``data``, and return the importance weights ``min(max_weight, pi_prox/mu)``.

        They are ``[num_envs, num_steps]``; normalised advantages are to be multiplied by them. If a decision has
        several probability ratios, the weight is their geometric mean.
        """
        log_weight = self.log_importance / count_ratios(self.log_prob, data, level)
        data["sample_log_prob"] = self.log_prob
        return log_weight.exp().clamp(max=max_weight)

    def measures(self, ranks: Ranks) -> dict[str, float]:
        """Return metrics: ``behaviour_kl``, which is ``KL(mu || pi_prox)``, and the largest importance weight."""
        kl = ranks.gather(kl_estimate(self.log_importance).mean()).mean()
        largest = bounded(ranks.gather(self.log_importance.max()).max()).exp()
        return dict(zip(("behaviour_kl", "importance_max"), torch.stack([kl, largest]).tolist(), strict=True))


def next_values(rollout: TensorDictBase, value: Tensor) -> Tensor:
    """Return the values of the next states ``[num_envs, num_steps]``, given the current critic's ``value``.

    Where the next state is an observation of the rollout, this is its current value. The states after the last step and
    at time limits are not stored. There, the old value is shifted by the change of the preceding state's value, as a
    mismatch of old and new values would act as a reward. No shift is applied if the rollout contains newer weights than
    the transition's, because it is unknown which of them computed the old value.
    """
    version = rollout["policy_version"]
    shift = torch.where(version == version[:, -1:], value - rollout["value"], 0.0)
    next_value = rollout["next_value"] + shift * ~rollout["terminated"]
    inside = ~rollout["done"][:, :-1]
    next_value[:, :-1] = torch.where(inside, value[:, 1:], next_value[:, :-1])
    return next_value
