"""On-device storage for one rollout, preallocated and written step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.rl.buffer.rollout import OPTIONAL_KEYS, Minibatches, check_rollout
from embodichain.agents.rl.utils.tensordicts import Observation, flatten_dict_observation, sorted_leaves
from embodichain.errors import RolloutError, nearest
from embodichain.utils.cuda_graphs import copy_together


class StepRows:
    """Memory ``[num_steps, num_envs, ...]`` for the steps of a rollout, with a view of each row: writing is copying."""

    def __init__(
        self, num_steps: int, observation: Observation, like: Mapping[str, Tensor | None], device: torch.device
    ) -> None:
        """Take memory for observations and parts like these, each ``[num_envs, ...]``; ``action`` must be there."""
        action, log_prob = like["action"], like.get("sample_log_prob")
        if action is None:
            raise RolloutError("action: expected [num_envs, ...], got nothing")
        shape = [num_steps, action.shape[0]]

        def room(like: Tensor) -> Tensor:
            return torch.zeros(num_steps, *like.shape, dtype=like.dtype, device=device)

        number = torch.zeros(shape, device=device)
        parts: dict[str, Any] = {name: number.clone() for name in ("reward", "value", "next_value", "sample_log_prob")}
        parts |= {name: number.bool() for name in ("terminated", "truncated", "done")}
        parts |= {"policy_version": number.long(), "action": room(action)}
        parts |= {name: room(part) for name in OPTIONAL_KEYS if (part := like.get(name)) is not None}
        if log_prob is not None and log_prob.ndim > 1:  # one per action of a chunk
            parts["sample_log_prob"] = room(log_prob)
        self._observation: list[tuple[tuple[str, ...], tuple[Tensor, ...]]] = []
        if isinstance(observation, Tensor):
            parts["observation"] = room(observation)
        else:
            stacked = observation.apply(room, batch_size=shape)
            parts["observation"] = stacked
            self._observation = [(path, leaf.unbind(0)) for path, leaf in sorted_leaves(stacked)]
        self._rows = {name: part.unbind(0) for name, part in parts.items() if isinstance(part, Tensor)}
        self.storage = TensorDict(parts, batch_size=shape, device=device)
        """All parts ``[num_steps, num_envs, ...]``."""

    def check(self, obs: Observation, parts: Mapping[str, Tensor | None]) -> None:
        """Raise ``RolloutError`` if names or shapes of a step are not those that there is room for."""
        for name, part in parts.items():
            if name not in self._rows:
                raise RolloutError(f"unknown part {name!r}.{nearest(name, self._rows)}")
            expected = self._rows[name][0].shape
            if part is None or (part.ndim and part.shape != expected):
                got = "nothing" if part is None else list(part.shape)
                raise RolloutError(f"{name}: expected {list(expected)}, got {got}")
        if isinstance(obs, Tensor) == bool(self._observation):
            raise RolloutError("observations must stay as they were at first: nested or flat")

    def write(self, t: int, obs: Observation, parts: Mapping[str, Any]) -> None:
        """Copy a step into row ``t``; on a GPU all parts of a type go together, as each copy is a launch there."""
        pairs = [(self._rows[name][t], part) for name, part in parts.items()]
        if isinstance(obs, Tensor):
            pairs.append((self._rows["observation"][t], obs))
        else:
            pairs += [(rows[t], obs.get(path)) for path, rows in self._observation]
        alike: tuple[list[Tensor], list[Tensor]] = ([], [])
        for row, part in pairs:
            if row.is_cuda and part.shape == row.shape and part.device == row.device:
                alike[0].append(row)
                alike[1].append(part)
            else:
                row.copy_(part)
        if alike[0]:
            copy_together(*alike)


Estimator = Callable[[TensorDictBase], tuple[Tensor, Tensor]]
"""Maps a rollout ``[num_envs, num_steps]`` to ``(advantage, return)`` of the same shape."""


class RolloutBuffer:
    """On-device rollout buffer for on-policy algorithms.

    ``add`` writes one step into preallocated ``[num_steps, num_envs, ...]`` tensors; ``finalize`` completes the
    rollout; ``get`` hands it out as a TensorDict ``[num_envs, num_steps]`` of views (see ``rollout.py`` for the keys).
    It is used once: the next ``add`` after a ``get`` begins a new rollout in the same memory.

    Memory is taken at the first step, in the shapes and dtypes that come; ``obs_dim`` and ``action_dim``, where given,
    are checked, and nested observations are then flattened. The number of steps may also be called ``buffer_size``. A
    buffer that is given whole rollouts (``add_rollout``) before any step keeps them by reference.
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
        self._rows: StepRows | None = None
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
        **more: Tensor,
    ) -> None:
        """Write one step, each part ``[num_envs, ...]``; a whole rollout alone is passed on to ``add_rollout``.

        ``more`` may hold ``terminated`` (default: ``done``), ``truncated``, ``policy_version``, ``hidden``,
        ``num_actions`` and ``chunk_reward``. Values may be left out here and given to ``finalize``, all together.
        """
        if action is None and isinstance(obs, TensorDictBase):
            return self.add_rollout(obs)
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
        rows = self._rows if self.step and self._rows is not None else self._checked_rows(obs, parts)
        rows.write(self.step, obs, parts)
        self.step += 1

    def add_rollout(self, rollout: TensorDictBase) -> None:
        """Take a whole rollout ``[num_envs, num_steps]``: copied into allocated memory, else kept by reference."""
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
        """Complete ``next_value``, and with an ``estimator`` attach ``advantage`` and ``return``.

        ``last_value`` ``[num_envs]`` is the value of the observation after the last step; ``final_value`` ``[count]``
        that of the ``final_observation`` of every transition that a time limit cut (truncated and not terminated), in
        the order of steps, then envs. Both default to zeros, the latter only where there is no such transition. Given
        for all transitions, ``[num_steps, num_envs]``, it counts at those alone, and they are not waited for.
        ``value`` ``[num_steps, num_envs]`` is for steps that were added without.
        """
        storage = self._full_storage("finalize()")
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
        storage = self._full_storage("set_extras()")
        for name, tensor in extras.items():
            if tensor.shape[:2] != storage.batch_size:
                expected = f"[num_steps, num_envs, ...] = {list(storage.batch_size)}"
                raise RolloutError(f"{name}: expected {expected}, got {list(tensor.shape)}")
            storage.set(name, tensor)
            self._extras.add(name)

    @property
    def advantages(self) -> Tensor:
        """Advantages ``[num_steps, num_envs]`` after ``finalize`` with an estimator."""
        return self._full_storage("advantages")["advantage"]

    @property
    def returns(self) -> Tensor:
        """Returns ``[num_steps, num_envs]`` after ``finalize`` with an estimator."""
        return self._full_storage("returns")["return"]

    def get(self, flatten: bool = False) -> TensorDictBase:
        """Hand the rollout out: views ``[num_envs, num_steps]``, valid until the next ``add``.

        ``flatten=True`` copies it to ``[num_envs * num_steps]``, env by env, for looking at; algorithms need the time
        axis.
        """
        rollout = self._rollout("get()")
        self._handed_out = True
        return rollout.reshape(-1) if flatten else rollout

    def iterate_minibatches(self, batch_size: int) -> Iterator[TensorDict]:
        """Yield one epoch of shuffled minibatches ``[rows]`` with all keys and extras."""
        yield from Minibatches(self._rollout("iterate_minibatches()"), batch_size)

    def is_full(self) -> bool:
        """Tell whether all steps of a rollout are there."""
        return self.step == self.num_steps

    def clear(self) -> None:
        """Forget the rollout; the memory stays."""
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
        """Return how full the buffer is and how much memory it holds."""
        data = self.storage if self.storage is not None else self._adopted
        size = 0 if data is None else data.bytes()
        return {"steps": self.step, "num_steps": self.num_steps, "transitions": len(self), "bytes": size}

    def _full_storage(self, what: str) -> TensorDict:
        if self.storage is None or not self.is_full():
            raise RolloutError(f"{what} needs a complete rollout: {self.step} of {self.num_steps} steps are written")
        return self.storage

    def _rollout(self, what: str) -> TensorDictBase:
        return self._adopted if self._adopted is not None else self._full_storage(what).transpose(0, 1)

    def _checked_rows(self, obs: Observation, parts: Mapping[str, Tensor | None]) -> StepRows:
        """Return the memory for steps, if names and shapes of the first one are right; the others are like it."""
        action = parts["action"]
        if action is not None and self._rows is None:
            if self.num_envs not in (None, action.shape[0]):
                raise RolloutError(f"expected {self.num_envs} envs, got actions {list(action.shape)}")
            if self.action_dim is not None and action.ndim > 1 and action.shape[-1] != self.action_dim:
                raise RolloutError(f"action: expected {self.action_dim} numbers, got {list(action.shape)}")
        if self.obs_dim is not None and obs.shape[-1] != self.obs_dim:
            raise RolloutError(f"observation: expected {self.obs_dim} numbers, got {list(obs.shape)}")
        if self._rows is None:
            self._rows = StepRows(self.num_steps, obs, parts, self.device)
            self.storage = self._rows.storage
            self.num_envs = self.storage.batch_size[1]
        self._rows.check(obs, parts)
        return self._rows
