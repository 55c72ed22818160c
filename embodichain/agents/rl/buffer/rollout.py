"""The layout of a rollout, and how it is cut into shuffled minibatches.

A rollout is a TensorDict ``[num_envs, num_steps]``, stored time-major underneath. Keys:

* ``observation`` (nested or flat), ``action``, ``reward``, ``value``, ``sample_log_prob``;
* ``terminated``, ``truncated`` and ``done`` (either of the two);
* ``next_value``: value of the state that was really reached, of ``final_observation`` where a time limit cut the
  episode; zero where it terminated, for there is no next state;
* ``policy_version``: int64, the number of the weights that chose the action;
* ``hidden``, of recurrent policies: the recurrent state before each observation;
* ``num_actions`` and ``chunk_reward``, where decisions are chunks of actions (``ChunkedEnv``): how many of the chunk
  were taken, and the reward of each ``[num_envs, num_steps, chunk_size]``. ``reward`` is then their plain sum, and
  ``sample_log_prob`` has one entry per action as well.

Algorithms add ``advantage`` and ``return``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.tensordicts import sorted_leaves
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
EVALUATED_ROWS = 65_536
"""Transitions evaluated at a time, which bounds the memory for it."""


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


def episode_starts(done: Tensor) -> Tensor:
    """Return which observations ``[num_envs, num_steps]`` begin an episode: those after a done one.

    The first step needs no mark: the recurrent state stored before it is already a new episode's where one begins.
    """
    start = torch.zeros_like(done.t()).t()
    start[:, 1:] = done[:, :-1]
    return start


@torch.no_grad()
def evaluate_rollout(policy: Policy, rollout: TensorDictBase, rows: int = EVALUATED_ROWS) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and values that a policy gives to a rollout, ``[num_envs, num_steps]`` each.

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


class Minibatches:
    """Every iteration is one epoch: a new order, then one gather per minibatch and nothing else.

    Minibatches are ``[rows]``. With a ``sequence_length`` they are ``[sequence_length, rows]``: pieces of trajectories
    for recurrent policies, with ``start`` marking the observations that begin an episode. Their sizes
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
        self.count = 0
        """Minibatches of an epoch."""
        self.cut_together([self.items.numel()])
        length = sequence_length or 1
        self.largest = min(-(-batch_size // length), self.num_envs * self.num_steps // length)
        """Items of a minibatch at most, however many are valid."""
        self.layout = (self.num_envs, self.num_steps, sequence_length, self.largest)
        """What two rollouts have in common whose minibatches look alike."""

    def _items(self, valid: Tensor | None) -> Tensor:
        """Return what is shuffled: row numbers, or the row number of each sequence's first step."""
        total = self.num_envs * self.num_steps
        if self.sequence_length is None:
            rows = torch.arange(total, device=self.device)
            return rows if valid is None else valid.t().reshape(-1).nonzero().squeeze(-1)
        first = torch.arange(total, device=self.device).view(-1, self.sequence_length, self.num_envs)[:, 0]
        if valid is not None:  # a sequence without any valid step is left out
            first = first[valid.t().view(-1, self.sequence_length, self.num_envs).any(dim=1)]
        return first.reshape(-1)

    def cut_together(self, items: Sequence[int]) -> None:
        """Cut into as many minibatches as the items of several ranks together; some may be empty on one of them."""
        self._items_of = items
        length = self.sequence_length or 1
        self.count = min(-(-sum(items) * length // (self.batch_size * len(items))), max(items))

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
        return self.rows.apply(lambda leaf: _shaped(leaf.index_select(0, index), shape), batch_size=shape)

    def locate(self, chosen: Tensor) -> tuple[Tensor, list[int]]:
        """Return the rows that these items consist of, in a line, and the batch size they have together."""
        if self.sequence_length is None:
            return chosen, [chosen.numel()]
        steps = torch.arange(self.sequence_length, device=chosen.device) * self.num_envs
        return (steps.unsqueeze(1) + chosen).reshape(-1), [self.sequence_length, chosen.numel()]


_NARROW = 256  # columns up to which a part of the data is kept in the common table
_SMALL = 1 << 26  # bytes up to which data are copied rather than looked up where they are


class StaticRows:
    """The data of one update at fixed addresses, where a CUDA graph finds them update after update.

    Small parts are copied, large ones stay where they came from. Numbers are kept side by side, one row per transition,
    so that one gather fetches all of them.
    """

    def __init__(self, minibatches: Minibatches, own: bool) -> None:
        """Take the data; with ``own`` large parts are copied too, because they keep moving."""
        self.minibatches = minibatches
        leaves = dict(sorted_leaves(minibatches.rows))
        self._columns = _side_by_side(leaves)
        width = max((columns.stop for columns in self._columns.values()), default=0)
        self._table = torch.empty(minibatches.rows.batch_size[0], width, device=minibatches.device)
        self._parts: dict[tuple[str, ...], Tensor] = {}
        self._owned = set(self._columns)
        for path, leaf in leaves.items():
            if path in self._columns:
                self._parts[path] = self._table[:, self._columns[path]].view(leaf.shape)
                self._parts[path].copy_(leaf)
            elif own or leaf.nbytes <= _SMALL:
                self._owned.add(path)
                self._parts[path] = leaf.clone()
            else:
                self._parts[path] = leaf

    def gather(self, chosen: Tensor) -> TensorDict:
        """Return the minibatch of these items."""
        index, shape = self.minibatches.locate(chosen)
        batch = TensorDict({}, batch_size=shape, device=chosen.device)
        table = self._table.index_select(0, index) if self._columns else None
        for path, part in self._parts.items():
            columns = self._columns.get(path)
            if columns is None or table is None:
                rows = part.index_select(0, index)
            else:
                rows = table[:, columns] if part.ndim > 1 else table[:, columns.start]
            batch.set(path, _shaped(rows, shape))
        return batch

    def take(self, minibatches: Minibatches) -> bool:
        """Take the data of the next update, if they have the same shapes and those that were not copied stay put."""
        leaves = dict(sorted_leaves(minibatches.rows))
        if minibatches.layout != self.minibatches.layout or leaves.keys() != self._parts.keys():
            return False
        for path, part in self._parts.items():
            leaf = leaves[path]
            if (leaf.shape, leaf.dtype) != (part.shape, part.dtype):
                return False
            if path not in self._owned and leaf.data_ptr() != part.data_ptr():
                return False
        for path in self._owned:
            self._parts[path].copy_(leaves[path])
        self.minibatches = minibatches
        return True


def _shaped(rows: Tensor, shape: list[int]) -> Tensor:
    return rows if len(shape) == 1 else rows.unflatten(0, shape)


def _side_by_side(leaves: dict[tuple[str, ...], Tensor]) -> dict[tuple[str, ...], slice]:
    """Return the columns of a table for all narrow parts of numbers, vectors first: those stay aligned."""
    narrow = [p for p, x in leaves.items() if x.dtype == torch.float32 and x.ndim <= 2 and _width(x) <= _NARROW]
    columns, first = {}, 0
    for path in sorted(narrow, key=lambda path: -_width(leaves[path])):
        columns[path] = slice(first, first + _width(leaves[path]))
        first += _width(leaves[path])
    return columns


def _width(leaf: Tensor) -> int:
    return leaf.shape[1] if leaf.ndim > 1 else 1
