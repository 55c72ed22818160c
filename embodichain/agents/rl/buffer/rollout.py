"""Shuffled minibatches of a rollout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.errors import RolloutError, nearest

# MERGED layout: The layout of a rollout, and the one place where it is flattened.
#
# A rollout is a TensorDict ``[num_envs, num_steps]``, stored time-major underneath. Keys:
#
# * ``observation`` (nested or flat), ``action``, ``reward``, ``value``, ``sample_log_prob``;
# * ``terminated``, ``truncated`` and ``done`` (either of the two);
# * ``next_value``: value of the state that was really reached, of ``final_observation`` where a time limit cut the
#   episode; zero where it terminated, for there is no next state;
# * ``policy_version``: int64, the number of the weights that chose the action;
# * ``hidden``, with memory: the policy's state before each observation;
# * ``num_actions`` and ``chunk_reward``, where decisions are chunks of actions (``envs/chunks.py``): how many of the
#   chunk were taken, and the reward of each ``[num_envs, num_steps, chunk_size]``. ``reward`` is then their plain sum,
#   and ``sample_log_prob`` has one entry per action as well.
#
# Algorithms add ``advantage`` and ``return``.


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


class Minibatches:
    """Every iteration is one epoch: a new order, then one gather per minibatch and nothing else.

    Minibatches are ``[rows]``. With a ``sequence_length`` they are ``[sequence_length, rows]``: whole pieces of
    trajectories for policies with memory, with ``start`` marking the observations that begin an episode. Their sizes
    differ by one at most; there is no small remainder. Besides the rollout only one minibatch is in memory.
    """

    def __init__(
        self,
        rollout: TensorDictBase,
        batch_size: int,
        *,
        sequence_length: int | None = None,
        valid: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Cut a rollout ``[num_envs, num_steps]``; ``valid``, of the same shape, tells which transitions to take."""
        self.num_envs, self.num_steps = rollout.batch_size
        self.sequence_length = sequence_length
        self.generator = generator
        if sequence_length is not None:
            if self.num_steps % sequence_length:
                raise RolloutError(f"sequence_length {sequence_length} does not divide the {self.num_steps} steps")
            rollout = rollout.copy()
            rollout["start"] = episode_starts(rollout["done"])
        self.rows = flatten_time_major(rollout)
        self.device = next(iter(self.rows.values(include_nested=True, leaves_only=True))).device
        self.items = self._items(valid)
        self.batch_size = batch_size
        in_one = 1 if sequence_length is None else sequence_length
        self.count = 0
        """Minibatches of an epoch."""
        self.cut_together([self.items.numel()])
        self.largest = min(-(-batch_size // in_one), self.num_envs * self.num_steps // in_one)
        """Items of a minibatch at most, however many are valid."""

    def _items(self, valid: Tensor | None) -> Tensor:
        """Return what is shuffled: row numbers, or the row number of each sequence's first step."""
        total = self.num_envs * self.num_steps
        if self.sequence_length is None:
            if valid is not None:
                return valid.t().reshape(-1).nonzero().squeeze(-1)
            return torch.arange(total, device=self.device)
        first = torch.arange(total, device=self.device).view(-1, self.sequence_length, self.num_envs)[:, 0]
        if valid is not None:  # a sequence without any valid step is left out
            first = first[valid.t().view(-1, self.sequence_length, self.num_envs).any(dim=1)]
        return first.reshape(-1)

    def cut_together(self, items: Sequence[int]) -> None:
        """Cut into as many minibatches as the items of several ranks together; some may be empty on one of them."""
        self._items_of = items
        in_one = 1 if self.sequence_length is None else self.sequence_length
        self.count = min(-(-sum(items) * in_one // (self.batch_size * len(items))), max(items))

    def shares(self, rank: int) -> list[float]:
        """Return which share of the items of each minibatch, those of all ranks together, is one rank's."""
        sizes = [
            [items // self.count + (k < items % self.count) for items in self._items_of] for k in range(self.count)
        ]
        return [of_ranks[rank] / sum(of_ranks) for of_ranks in sizes]

    def num_valid(self, chosen: Tensor, validity_key: str) -> int:
        """Return how many transitions of these items count; this waits for the device."""
        return int(self.rows[validity_key][self.locate(chosen)[0]].sum())

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[TensorDict]:
        for chosen in self.draw():
            yield self.gather(chosen)

    def draw(self) -> Sequence[Tensor]:
        """Return the items of each minibatch of a new epoch."""
        if not self.count:
            return ()
        order = torch.randperm(self.items.numel(), device=self.items.device, generator=self.generator)
        return self.items[order].tensor_split(self.count)

    def gather(self, chosen: Tensor) -> TensorDict:
        """Return the minibatch of these items."""
        index, shape = self.locate(chosen)
        if len(shape) == 1:
            return self.rows.apply(lambda leaf: leaf.index_select(0, index), batch_size=shape)
        return self.rows.apply(lambda leaf: leaf.index_select(0, index).unflatten(0, shape), batch_size=shape)

    def locate(self, chosen: Tensor) -> tuple[Tensor, list[int]]:
        """Return the rows that these items consist of, in a line, and the batch size they have together."""
        if self.sequence_length is None:
            return chosen, [chosen.numel()]
        steps = torch.arange(self.sequence_length, device=chosen.device) * self.num_envs
        return (steps.unsqueeze(1) + chosen).reshape(-1), [self.sequence_length, chosen.numel()]


def episode_starts(done: Tensor) -> Tensor:
    """Return which observations ``[num_envs, num_steps]`` begin an episode: those after a done one.

    The first step needs no mark: the hidden state stored before it is already that of a new episode where one begins.
    """
    start = torch.zeros_like(done.t()).t()
    start[:, 1:] = done[:, :-1]
    return start
