"""How old a rollout is when the learner gets it, and how far the policy has moved since."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.buffer.rollout import episode_starts, flatten_time_major
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.ratios import kl_estimate
from embodichain.errors import WeightsError

ROWS = 65_536
"""Decisions evaluated at a time, which bounds the memory for it."""


@dataclass(frozen=True)
class Age:
    """The age of a rollout in updates of the policy."""

    versions: list[int]
    """Versions that its transitions are stamped with, one per step."""
    now: int
    """Version of the learner's policy."""
    kl: float | None
    """``KL(behaviour || current)``, if it was measured."""

    def scalars(self) -> dict[str, float]:
        """Return what is logged."""
        lags = [self.now - version for version in self.versions]
        measured = {} if self.kl is None else {"async/behaviour_kl": self.kl}
        return measured | {
            "async/lag_min": float(min(lags)),
            "async/lag_mean": sum(lags) / len(lags),
            "async/lag_max": float(max(lags)),
        }


class Staleness:
    """Measures the age of rollouts and sees to it that it stays within its bound."""

    def __init__(self, policy: Policy, max_policy_lag: int, kl_rows: int) -> None:
        self.policy, self.max_policy_lag, self.kl_rows = policy, max_policy_lag, kl_rows

    def measure(self, rollout: TensorDictBase) -> Age:
        """Return how old a rollout ``[num_envs, num_steps]`` is; all envs of a step have the same version."""
        versions, now = rollout["policy_version"][0].tolist(), int(self.policy.version)
        if now - min(versions) > self.max_policy_lag:
            raise WeightsError(
                f"a rollout of version {min(versions)} was taken at version {now}, but max_policy_lag is "
                f"{self.max_policy_lag}: the policy is updated more than once per rollout; raise max_policy_lag"
            )
        kl: float | None = None
        if self.kl_rows:
            kl = 0.0 if min(versions) == now else behaviour_kl(self.policy, rollout, self.kl_rows)
        return Age(versions, now, kl)


@torch.no_grad()
def evaluate_rollout(policy: Policy, rollout: TensorDictBase, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return what a policy makes of a rollout's actions: log-probabilities and values, ``[num_envs, num_steps]`` each.

    It does so for ``rows`` transitions at a time. Log-probabilities of chunks have one more dimension, ``chunk_size``,
    as they are stored.
    """
    num_envs, num_steps = rollout.batch_size
    if not policy.is_recurrent:
        data = flatten_time_major(rollout.select("observation", "action"))
        parts = [policy.evaluate(part) for part in data.split(rows)]
        joined = [torch.cat([part[i] for part in parts]).unflatten(0, (num_steps, num_envs)) for i in (0, 2)]
    else:
        data = rollout.select("observation", "action", "hidden")
        data["start"] = episode_starts(rollout["done"])
        parts = [policy.evaluate(part.transpose(0, 1)) for part in data.split(max(1, rows // num_steps))]
        joined = [torch.cat([part[i] for part in parts], dim=1) for i in (0, 2)]
    return joined[0].transpose(0, 1), joined[1].transpose(0, 1)


def log_importance(log_prob: Tensor, rollout: TensorDictBase) -> Tensor:
    """Return ``log pi(a|s) / mu(a|s)`` of every decision ``[num_envs, num_steps]``; mu is what collected them.

    Of a chunk it is the sum over the actions that were really taken.
    """
    difference = log_prob - rollout["sample_log_prob"]
    if difference.ndim == 2:
        return difference
    order = torch.arange(difference.shape[-1], device=difference.device)
    return torch.where(order < rollout["num_actions"].unsqueeze(-1), difference, 0.0).sum(-1)


def behaviour_kl(policy: Policy, rollout: TensorDictBase, rows: int) -> float:
    """Return ``KL(mu || pi) = E[pi/mu - 1 - log pi/mu]`` on the trajectories of as many envs as make up ``rows``."""
    part = rollout[: max(1, rows // rollout.batch_size[1])].to(policy.device)
    return float(kl_estimate(log_importance(evaluate_rollout(policy, part)[0], part)).mean())
