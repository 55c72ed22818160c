"""A frozen copy of a policy, to measure how far the trained one has moved."""

from __future__ import annotations

import copy

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.buffer.layout import flatten_time_major
from embodichain.agents.rl.buffer.minibatches import episode_starts
from embodichain.agents.rl.models.policy import Policy

ROWS = 65_536
"""Transitions evaluated at a time, which bounds the memory for it."""


class FrozenReference:
    """The policy as it was when this object was made."""

    def __init__(self, policy: Policy) -> None:
        self.policy = copy.deepcopy(policy).eval().requires_grad_(False)

    @torch.no_grad()
    def log_prob(self, rollout: TensorDictBase) -> Tensor:
        """Return the log-probability ``[num_envs, num_steps]`` of a rollout's actions; of chunks one per action."""
        num_envs, num_steps = rollout.batch_size
        if not self.policy.is_recurrent:
            rows = flatten_time_major(rollout.select("observation", "action"))
            parts = [self.policy.evaluate(part)[0] for part in rows.split(ROWS)]
            return torch.cat(parts).unflatten(0, (num_steps, num_envs)).transpose(0, 1)
        data = rollout.select("observation", "action", "hidden")
        data["start"] = episode_starts(rollout["done"])
        sequences = data.split(max(1, ROWS // num_steps))
        return torch.cat([self.policy.evaluate(part.transpose(0, 1))[0].t() for part in sequences])
