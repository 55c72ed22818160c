"""What a learner has to know of action chunks: the reward, the discount and the probability of a decision.

A decision is one action, or a chunk of them (``envs/chunks.py``). Rollouts of chunks have two more keys:
``num_actions`` ``[num_envs, num_steps]``, the actions really taken, and ``chunk_reward`` ``[num_envs, num_steps,
chunk_size]``, the reward of each. Log-probabilities of chunks are ``[..., chunk_size]``, one per action. Everything
here leaves rollouts of single actions exactly as they are.
"""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

Level = Literal["chunk", "action"]
"""Whether the probability ratio is that of a whole chunk, or one for each action in it."""


def reward_and_discount(rollout: TensorDictBase, gamma: float) -> tuple[Tensor, float | Tensor]:
    """Return the reward of every decision ``[num_envs, num_steps]`` and the discount of what follows it.

    For a chunk of which n actions were taken: ``r = sum_{i < n} gamma^i r_i``, and what follows counts ``gamma^n``.
    """
    if "chunk_reward" not in rollout.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return rollout["reward"], gamma
    rewards = rollout["chunk_reward"]
    powers = gamma ** torch.arange(rewards.shape[-1], device=rewards.device, dtype=rewards.dtype)
    return rewards @ powers, gamma ** rollout["num_actions"].to(rewards.dtype)


def loss_keys(rollout: TensorDictBase) -> tuple[str, ...]:
    """Return the keys of a rollout that a loss needs besides the usual ones."""
    return ("num_actions",) if "num_actions" in rollout.keys() else ()  # noqa: SIM118


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, batch: TensorDictBase, level: Level) -> Tensor:
    """Return ``log pi / pi_old`` ``[rows]`` of a minibatch, or ``[rows, chunk_size]`` at the level of actions.

    Actions of a chunk that were never taken do not count: their ratio is 1.
    """
    difference = log_prob - old_log_prob
    if difference.ndim == batch.batch_dims:
        return difference
    difference = torch.where(_taken(difference, batch), difference, 0.0)
    return difference if level == "action" else difference.sum(-1)


def per_decision(values: Tensor, batch: TensorDictBase) -> Tensor:
    """Return ``[rows]``: the mean over the actions taken, where there is a value for each of them."""
    if values.ndim == batch.batch_dims:
        return values
    taken = _taken(values, batch)
    return torch.where(taken, values, 0.0).sum(-1) / taken.sum(-1)


def decision_entropy(entropy: Tensor, batch: TensorDictBase, level: Level) -> Tensor:
    """Return the entropy ``[rows]`` of decisions: of a chunk the sum over its actions taken, or their mean."""
    if entropy.ndim == batch.batch_dims:
        return entropy
    if level == "action":
        return per_decision(entropy, batch)
    return torch.where(_taken(entropy, batch), entropy, 0.0).sum(-1)


def like(values: Tensor, ratio: Tensor) -> Tensor:
    """Return ``values`` ``[rows]`` so that they broadcast against a ratio ``[rows]`` or ``[rows, chunk_size]``."""
    return values.unsqueeze(-1) if ratio.ndim > values.ndim else values


def _taken(values: Tensor, batch: TensorDictBase) -> Tensor:
    """Tell which actions were taken, ``[rows, chunk_size]``."""
    if "num_actions" not in batch.keys():  # noqa: SIM118
        return torch.ones_like(values, dtype=torch.bool)
    order = torch.arange(values.shape[-1], device=values.device)
    return order < batch["num_actions"].unsqueeze(-1)
