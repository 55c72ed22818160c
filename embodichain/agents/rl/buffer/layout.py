"""The layout of a rollout, and the one place where it is flattened.

A rollout is a TensorDict ``[num_envs, num_steps]``, stored time-major underneath. Keys:

* ``observation`` (nested or flat), ``action``, ``reward``, ``value``, ``sample_log_prob``;
* ``terminated``, ``truncated`` and ``done`` (either of the two);
* ``next_value``: value of the state that was really reached, of ``final_observation`` where a time limit cut the
  episode; zero where it terminated, for there is no next state;
* ``policy_version``: int64, the number of the weights that chose the action;
* ``hidden``, with memory: the policy's state before each observation;
* ``num_actions`` and ``chunk_reward``, where decisions are chunks of actions (``envs/chunks.py``): how many of the
  chunk were taken, and the reward of each ``[num_envs, num_steps, chunk_size]``. ``reward`` is then their plain sum,
  and ``sample_log_prob`` has one entry per action as well.

Algorithms add ``advantage`` and ``return``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensordict import TensorDict, TensorDictBase

from embodichain.errors import RolloutError, nearest

ROLLOUT_KEYS = (
    "observation",
    "action",
    "reward",
    "terminated",
    "truncated",
    "done",
    "value",
    "next_value",
    "sample_log_prob",
    "policy_version",
)

OPTIONAL_KEYS = ("hidden", "num_actions", "chunk_reward")


def check_rollout(rollout: Any, keys: Iterable[str] = ROLLOUT_KEYS) -> TensorDictBase:
    """Return the rollout if it is a TensorDict ``[num_envs, num_steps]`` with these keys."""
    if not isinstance(rollout, TensorDictBase):
        raise RolloutError(f"expected a TensorDict [num_envs, num_steps], got {type(rollout).__name__}")
    if rollout.batch_dims != 2:
        raise RolloutError(
            f"expected a rollout [num_envs, num_steps], got batch size {list(rollout.batch_size)}: advantages need the "
            "time axis, so pass it unflattened, as buffer.get(flatten=False) and collectors return it"
        )
    present = set(rollout.keys())
    for key in keys:
        if key not in present:
            raise RolloutError(f"the rollout lacks {key!r}.{nearest(key, map(str, present))}")
    return rollout


def count_transitions(rollout: TensorDictBase) -> int:
    """Return how many environment steps a rollout holds: one per decision, or as many as its chunks took."""
    if "num_actions" in rollout.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return int(rollout["num_actions"].sum())
    return rollout.numel()


def flatten_time_major(rollout: TensorDictBase) -> TensorDict:
    """Return the rollout as ``[num_steps * num_envs]`` rows, step by step: a view, as collectors store it so."""
    return rollout.transpose(0, 1).reshape(-1)
