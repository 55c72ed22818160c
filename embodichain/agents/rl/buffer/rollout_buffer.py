"""The layout of rollouts, the buffer that stores one, and shuffled minibatches.

A rollout is a TensorDict ``[num_envs, num_steps]``, stored time-major in memory. Its keys:

* ``observation`` (nested or flat), ``action``, ``reward``, ``value``, ``sample_log_prob``;
* ``terminated``, ``truncated`` and ``done``, which is true if either of them is;
* ``next_value``: value of the state that the step reached. At a time limit this is the state of ``final_observation``;
  at a termination the value is zero;
* ``policy_version``: int64, the version of the weights that chose the action;
* ``hidden``, for recurrent policies: the recurrent state before each observation;
* ``decision``, for policies with ``has_decision``: a nested TensorDict that the policy defines;
* ``num_actions`` and ``chunk_reward``, for chunks of actions (``ChunkedEnv``): the number of actions that were
  executed, and the reward of each ``[num_envs, num_steps, chunk_size]``. ``reward`` is then their undiscounted sum, and
  ``sample_log_prob`` has one entry per action;
* ``discounted_return``, if the algorithm normalises rewards: ``x_t = reward_t + gamma x_{t-1}`` within the episode;
  for a chunk, that of its last action.

Algorithms add ``advantage`` and ``return``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.tensordicts import Observation, flatten_dict_observation, sorted_leaves
from embodichain.errors import RolloutError, nearest
from embodichain.utils.cuda_graphs import copy_together

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
"""Maximum number of transitions per forward pass, which bounds memory."""


def check_rollout(rollout: Any, keys: Iterable[str] = ROLLOUT_KEYS) -> TensorDictBase:
    """Return the rollout; raise ``RolloutError`` if it is no TensorDict ``[num_envs, num_steps]`` with these keys."""
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
    """Return the number of environment steps in a rollout: one per transition, or one per action of its chunks."""
    if "num_actions" in rollout.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return int(rollout["num_actions"].sum())
    return rollout.numel()


def flatten_time_major(rollout: TensorDictBase) -> TensorDict:
    """Return the rollout as ``[num_steps * num_envs]`` rows in time-major order; a view if it is stored time-major."""
    return rollout.transpose(0, 1).reshape(-1)


def episode_starts(done: Tensor) -> Tensor:
    """Return a mask ``[num_envs, num_steps]`` of the observations after a ``done``, where an episode starts."""
    start = torch.zeros_like(done.t()).t()  # false in the first step, whose stored recurrent state is valid
    start[:, 1:] = done[:, :-1]
    return start


@torch.no_grad()
def recurrent_states(policy: Policy, rollout: TensorDictBase) -> Tensor:
    """Return the recurrent state ``[num_envs, num_steps, ...]`` before each step of a rollout, computed anew."""
    obs, start, states = rollout["observation"], episode_starts(rollout["done"]), []
    state: Any = rollout["hidden"][:, 0]
    with policy.without_dropout():
        for step in range(rollout.batch_size[1]):
            starts, initial = start[:, step].view(-1, *[1] * (state.ndim - 1)), policy.initial_state(len(state))
            states.append(state if initial is None else torch.where(starts, initial, state))
            state = policy.act(obs[:, step], states[-1], deterministic=True)[3]
    return torch.stack(states, dim=1)


@torch.no_grad()
def evaluate_rollout(policy: Policy, rollout: TensorDictBase, rows: int = EVALUATED_ROWS) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (for chunks: one per action) and values ``[num_envs, num_steps]`` under a policy.

    At most ``rows`` transitions are evaluated at a time.
    """
    num_envs, num_steps = rollout.batch_size
    with policy.without_dropout():
        if not policy.is_recurrent:
            data = flatten_time_major(rollout.select("observation", "action", *["decision"] * policy.has_decision))
            parts = [policy.evaluate(part) for part in data.split(rows)]
            joined = [torch.cat([part[i] for part in parts]).unflatten(0, (num_steps, num_envs)) for i in (0, 2)]
        else:
            data = rollout.select("observation", "action", "hidden")
            data["start"] = episode_starts(rollout["done"])
            parts = [policy.evaluate(part.transpose(0, 1)) for part in data.split(max(1, rows // num_steps))]
            joined = [torch.cat([part[i] for part in parts], dim=1) for i in (0, 2)]
    return joined[0].transpose(0, 1), joined[1].transpose(0, 1)


Estimator = Callable[[TensorDictBase], tuple[Tensor, Tensor]]
"""Maps a rollout ``[num_envs, num_steps]`` to ``(advantage, return)`` of the same shape."""


class RolloutBuffer:
    """On-device rollout buffer for on-policy algorithms: ``add`` every step, ``finalize``, then ``get``.

    The next ``add`` after a ``get`` starts a new rollout in the same memory. Memory is allocated at the first step,
    with the shapes and dtypes of its tensors. ``obs_dim`` and ``action_dim`` are checked if given; with ``obs_dim``,
    nested observations are flattened. ``buffer_size`` is an alias of ``num_steps``. If ``add_rollout`` is called before
    any ``add``, whole rollouts are kept by reference.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        num_envs: int | None = None,
        obs_dim: int | None = None,
        action_dim: int | None = None,
        device: torch.device | str = "cpu",
        *,
        buffer_size: int | None = None,
    ) -> None:
        if (num_steps is None) == (buffer_size is None):
            raise RolloutError("give the number of steps once, as num_steps or as buffer_size")
        self.num_steps: int = num_steps if num_steps is not None else buffer_size  # type: ignore[assignment]
        self.device = torch.device(device)
        self.num_envs, self.obs_dim, self.action_dim = num_envs, obs_dim, action_dim
        self.storage: TensorDict | None = None
        self.step = 0
        self._rows: dict[str, tuple[Tensor, ...]] = {}  # for each key of the storage, a view per step
        self._nested: dict[str, list[tuple[tuple[str, ...], tuple[Tensor, ...]]]] = {}  # the same for nested keys
        self._adopted: TensorDictBase | None = None
        self._extras: set[str] = set()
        self._handed_out = False
        self._lacks_values = False

    def add(
        self,
        obs: Observation,
        action: Tensor | None = None,
        reward: Tensor | None = None,
        done: Tensor | None = None,
        value: Tensor | None = None,
        logprob: Tensor | None = None,
        **more: Tensor | TensorDictBase,
    ) -> None:
        """Write one step; each tensor is ``[num_envs, ...]``. A single TensorDict is passed to ``add_rollout``.

        ``more`` may hold ``terminated`` (default: ``done``), ``truncated``, ``policy_version``, ``hidden``,
        ``decision``, ``num_actions`` and ``chunk_reward``. Values may be passed to ``finalize`` instead.
        """
        if action is None and isinstance(obs, TensorDictBase):
            return self.add_rollout(obs)
        parts: dict[str, Any]
        parts = {"action": action, "reward": reward, "done": done, "sample_log_prob": logprob, "terminated": done}
        if value is None:
            self._lacks_values = True
        else:
            parts["value"] = value
        parts.update(more)
        if self._handed_out:
            self.clear()
        if self.is_full():
            raise RolloutError(f"all {self.num_steps} steps are written: get() or clear() comes first")
        if self.obs_dim is not None and not isinstance(obs, Tensor):
            obs = flatten_dict_observation(obs)
        if not self.step:  # only the first step is checked
            if self.storage is None:
                self._allocate(obs, parts)
            self._check(obs, parts)
        self._write(obs, parts)
        self.step += 1

    def add_rollout(self, rollout: TensorDictBase) -> None:
        """Store a whole rollout ``[num_envs, num_steps]``: copied if memory is allocated, else kept by reference."""
        check_rollout(rollout)
        num_envs, num_steps = rollout.batch_size
        if num_steps != self.num_steps or self.num_envs not in (None, num_envs):
            expected = f"[{self.num_envs or 'num_envs'}, {self.num_steps}]"
            raise RolloutError(f"expected a rollout {expected}, got {list(rollout.batch_size)}")
        if self.is_full() and not self._handed_out:
            raise RolloutError("the buffer is full: get() or clear() comes first")
        self.clear()
        if self.storage is None:
            self._adopted = rollout
        else:
            self.storage.transpose(0, 1).update_(rollout.select(*self.storage.keys()))
        self.step = self.num_steps

    def finalize(
        self,
        last_value: Tensor | None = None,
        final_value: Tensor | None = None,
        estimator: Estimator | None = None,
        value: Tensor | None = None,
    ) -> None:
        """Compute ``next_value``, and with an ``estimator`` also ``advantage`` and ``return``.

        ``last_value`` ``[num_envs]`` is the value of the observation after the last step (default: zeros).
        ``final_value`` ``[count]`` holds the value of each ``final_observation`` at a time limit (truncated and not
        terminated), ordered by step, then by env. It is required if there is one. With shape ``[num_steps, num_envs]``,
        only the entries at time limits are used, and the GPU is not synchronised. ``value`` ``[num_steps, num_envs]``
        is for steps that were added without values.
        """
        storage = self.full_storage("finalize()")
        if value is not None:
            storage["value"].copy_(value)
        elif self._lacks_values:
            raise RolloutError("steps were added without their values: add(..., value) or finalize(..., value=...)")
        next_value = storage["next_value"]
        next_value[:-1] = storage["value"][1:]
        next_value[-1] = 0.0 if last_value is None else last_value
        next_value.masked_fill_(storage["done"], 0.0)
        cut = storage["truncated"] & ~storage["terminated"]
        if final_value is not None and final_value.shape == cut.shape:
            torch.where(cut, final_value, next_value, out=next_value)
        else:
            expected, given = int(cut.sum()), 0 if final_value is None else final_value.numel()
            if expected != given:
                cause = f"{expected} transitions were cut by a time limit"
                raise RolloutError(f"{cause}, but {given} final values were given")
            if final_value is not None and expected:
                next_value[cut] = final_value
        if estimator is not None:
            advantage, returns = estimator(storage.transpose(0, 1))
            self.set_extras({"advantage": advantage.t(), "return": returns.t()})

    def set_extras(self, extras: Mapping[str, Tensor]) -> None:
        """Attach algorithm-specific tensors ``[num_steps, num_envs, ...]`` for batching."""
        storage = self.full_storage("set_extras()")
        for name, tensor in extras.items():
            if tensor.shape[:2] != storage.batch_size:
                expected = f"[num_steps, num_envs, ...] = {list(storage.batch_size)}"
                raise RolloutError(f"{name}: expected {expected}, got {list(tensor.shape)}")
            storage.set(name, tensor)
            self._extras.add(name)

    @property
    def advantages(self) -> Tensor:
        """Advantages ``[num_steps, num_envs]`` after ``finalize`` with an estimator."""
        return self.full_storage("advantages")["advantage"]

    @property
    def returns(self) -> Tensor:
        """Returns ``[num_steps, num_envs]`` after ``finalize`` with an estimator."""
        return self.full_storage("returns")["return"]

    def get(self, flatten: bool = False) -> TensorDictBase:
        """Return the rollout as views ``[num_envs, num_steps]``, valid until the next ``add``.

        ``flatten=True`` returns a copy ``[num_envs * num_steps]``, ordered by env. Algorithms need the time axis.
        """
        rollout = self._rollout("get()")
        self._handed_out = True
        return rollout.reshape(-1) if flatten else rollout

    def iterate_minibatches(self, batch_size: int) -> Iterator[TensorDict]:
        """Yield one epoch of shuffled minibatches ``[rows]`` with all keys and extras."""
        yield from Minibatches(self._rollout("iterate_minibatches()"), batch_size)

    def is_full(self) -> bool:
        """Return whether all steps of the rollout are written."""
        return self.step == self.num_steps

    def clear(self) -> None:
        """Discard the rollout; the memory stays allocated."""
        self.step = 0
        self._handed_out = self._lacks_values = False
        self._adopted = None
        if self.storage is not None and self._extras:
            self.storage = self.storage.exclude(*self._extras)
            self._extras.clear()

    def __len__(self) -> int:
        """Return the number of transitions written so far."""
        return self.step * (self.num_envs or (self._adopted.batch_size[0] if self._adopted is not None else 0))

    def get_stats(self) -> dict[str, Any]:
        """Return the number of steps and transitions written, the capacity in steps, and the size in bytes."""
        data = self.storage if self.storage is not None else self._adopted
        size = 0 if data is None else data.bytes()
        return {"steps": self.step, "num_steps": self.num_steps, "transitions": len(self), "bytes": size}

    def full_storage(self, what: str) -> TensorDict:
        """Return the storage ``[num_steps, num_envs]`` of a complete rollout; ``what`` names the caller in errors."""
        if self.storage is None or not self.is_full():
            raise RolloutError(f"{what} needs a complete rollout: {self.step} of {self.num_steps} steps are written")
        return self.storage

    def _rollout(self, what: str) -> TensorDictBase:
        return self._adopted if self._adopted is not None else self.full_storage(what).transpose(0, 1)

    def _allocate(self, obs: Observation, like: Mapping[str, Any]) -> None:
        """Allocate memory ``[num_steps, num_envs, ...]`` for tensors like those of the first step."""
        action, log_prob = like["action"], like["sample_log_prob"]
        if action is None:
            raise RolloutError("action: expected [num_envs, ...], got nothing")
        if self.num_envs not in (None, action.shape[0]):
            raise RolloutError(f"expected {self.num_envs} envs, got actions {list(action.shape)}")
        if self.action_dim is not None and action.ndim > 1 and action.shape[-1] != self.action_dim:
            raise RolloutError(f"action: expected {self.action_dim} numbers, got {list(action.shape)}")
        self.num_envs = action.shape[0]
        shape = [self.num_steps, self.num_envs]

        def room(like: Tensor) -> Tensor:
            return torch.zeros(self.num_steps, *like.shape, dtype=like.dtype, device=self.device)

        number = torch.zeros(shape, device=self.device)
        parts: dict[str, Any] = {name: number.clone() for name in ("reward", "value", "next_value", "sample_log_prob")}
        parts |= {name: number.bool() for name in ("terminated", "truncated", "done")}
        parts |= {"policy_version": number.long(), "action": room(action)}
        parts |= {name: room(part) for name in OPTIONAL_KEYS if (part := like.get(name)) is not None}
        if log_prob is not None and log_prob.ndim > 1:  # one per action of a chunk
            parts["sample_log_prob"] = room(log_prob)
        for name, part in (("observation", obs), ("decision", like.get("decision"))):
            if isinstance(part, Tensor):
                parts[name] = room(part)
            elif part is not None:
                parts[name] = stacked = part.apply(room, batch_size=shape)
                self._nested[name] = [(path, leaf.unbind(0)) for path, leaf in sorted_leaves(stacked)]
        self._rows = {name: part.unbind(0) for name, part in parts.items() if isinstance(part, Tensor)}
        self.storage = TensorDict(parts, batch_size=shape, device=self.device)

    def _check(self, obs: Observation, parts: Mapping[str, Any]) -> None:
        """Raise ``RolloutError`` if names or shapes of a step differ from the storage."""
        check_decision(parts.get("decision"), self._nested.get("decision", ()), self.num_envs)
        if self.obs_dim is not None and obs.shape[-1] != self.obs_dim:
            raise RolloutError(f"observation: expected {self.obs_dim} numbers, got {list(obs.shape)}")
        for name, part in parts.items():
            if name == "decision":
                continue
            if name not in self._rows:
                raise RolloutError(f"unknown part {name!r}.{nearest(name, self._rows)}")
            expected = self._rows[name][0].shape
            if part is None or (part.ndim and part.shape != expected):
                got = "nothing" if part is None else list(part.shape)
                raise RolloutError(f"{name}: expected {list(expected)}, got {got}")
        if isinstance(obs, Tensor) == ("observation" in self._nested):
            raise RolloutError("observations must stay as they were at first: nested or flat")

    def _write(self, obs: Observation, parts: Mapping[str, Any]) -> None:
        """Copy a step into its row; on a GPU, tensors of one dtype are copied in one kernel launch."""
        t = self.step
        parts = {**parts, "observation": obs}
        pairs = [(self._rows[name][t], part) for name, part in parts.items() if name not in self._nested]
        pairs += [(rows[t], parts[name].get(path)) for name, leaves in self._nested.items() for path, rows in leaves]
        alike: tuple[list[Tensor], list[Tensor]] = ([], [])
        for row, part in pairs:
            if row.is_cuda and part.shape == row.shape and part.device == row.device:
                alike[0].append(row)
                alike[1].append(part)
            else:
                row.copy_(part)
        if alike[0]:
            copy_together(*alike)


def check_decision(decision: Any, rows: Iterable[tuple[tuple[str, ...], tuple[Tensor, ...]]], num_envs: Any) -> None:
    """Raise ``RolloutError`` unless a decision has the entries and shapes of ``rows``."""
    if decision is not None and not (isinstance(decision, TensorDictBase) and decision.batch_size[:1] == (num_envs,)):
        kind = list(decision.batch_size) if isinstance(decision, TensorDictBase) else type(decision).__name__
        raise RolloutError(f"decision: expected a TensorDict [{num_envs}], got {kind}")
    expected = {"/".join(path): list(row[0].shape) for path, row in rows}
    leaves = [] if decision is None else sorted_leaves(decision)
    got = {"/".join(path): list(leaf.shape) for path, leaf in leaves}
    if got != expected:
        raise RolloutError(f"decision: expected {expected}, as in the first step, got {got}")


class Minibatches:
    """Iterates over shuffled minibatches of a rollout; each iteration is one epoch with a new order.

    Minibatches are ``[rows]``, or ``[sequence_length, rows]`` for recurrent policies, where ``start`` marks the first
    observations of episodes. Their sizes differ by one at most. Each is gathered when it is needed.
    """

    def __init__(
        self,
        rollout: TensorDictBase,
        batch_size: int,
        *,
        sequence_length: int | None = None,
        valid: Tensor | None = None,
    ) -> None:
        """Split a rollout ``[num_envs, num_steps]``; ``valid``, of the same shape, masks the transitions to use."""
        self.num_envs, self.num_steps = rollout.batch_size
        self.sequence_length = sequence_length
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
        """Number of minibatches per epoch."""
        self.cut_together([self.items.numel()])
        length = sequence_length or 1
        self.largest = min(-(-batch_size // length), self.num_envs * self.num_steps // length)
        """Maximum number of items per minibatch, whichever transitions are valid."""
        self.layout = (self.num_envs, self.num_steps, sequence_length, self.largest)
        """Equal for rollouts whose minibatches have the same shapes."""

    def _items(self, valid: Tensor | None) -> Tensor:
        """Return the items to shuffle: row indices, or the row index of each sequence's first step."""
        total = self.num_envs * self.num_steps
        if self.sequence_length is None:
            rows = torch.arange(total, device=self.device)
            return rows if valid is None else valid.t().reshape(-1).nonzero().squeeze(-1)
        first = torch.arange(total, device=self.device).view(-1, self.sequence_length, self.num_envs)[:, 0]
        if valid is not None:  # skip sequences without a valid step
            first = first[valid.t().view(-1, self.sequence_length, self.num_envs).any(dim=1)]
        return first.reshape(-1)

    def cut_together(self, items: Sequence[int]) -> None:
        """Set the number of minibatches from the item counts of all ranks; some may be empty on one rank."""
        self._items_of = items
        length = self.sequence_length or 1
        self.count = min(-(-sum(items) * length // (self.batch_size * len(items))), max(items))

    def shares(self, rank: int) -> list[float]:
        """Return, for each minibatch, the fraction of its items over all ranks that ``rank`` holds."""
        sizes = [
            [items // self.count + (k < items % self.count) for items in self._items_of] for k in range(self.count)
        ]
        return [of_ranks[rank] / sum(of_ranks) for of_ranks in sizes]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[TensorDict]:
        for chosen in self.draw():
            yield self.gather(chosen)

    def draw(self) -> Sequence[Tensor]:
        """Return the items of each minibatch of a new epoch."""
        if not self.count:
            return ()
        order = torch.randperm(self.items.numel(), device=self.items.device)
        return self.items[order].tensor_split(self.count)

    def gather(self, chosen: Tensor) -> TensorDict:
        """Return the minibatch of these items."""
        index, shape = self.locate(chosen)
        return self.rows.apply(lambda leaf: shaped(leaf.index_select(0, index), shape), batch_size=shape)

    def locate(self, chosen: Tensor) -> tuple[Tensor, list[int]]:
        """Return the row indices of these items, flat, and the batch size of their minibatch."""
        if self.sequence_length is None:
            return chosen, [chosen.numel()]
        steps = torch.arange(self.sequence_length, device=chosen.device) * self.num_envs
        return (steps.unsqueeze(1) + chosen).reshape(-1), [self.sequence_length, chosen.numel()]


def shaped(rows: Tensor, shape: list[int]) -> Tensor:
    """Return flat rows reshaped to the batch size ``shape``."""
    return rows if len(shape) == 1 else rows.unflatten(0, shape)
