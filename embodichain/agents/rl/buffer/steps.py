"""Memory for the steps of a rollout: ``[num_steps, num_envs, ...]`` of every part, with a view of each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.rl.buffer.layout import OPTIONAL_KEYS
from embodichain.agents.rl.utils.observations import Observation, sorted_leaves
from embodichain.envs.graphed import copy_together
from embodichain.errors import RolloutError, nearest


class StepRows:
    """Room for ``num_steps`` of everything, in the shapes and types of the first step; writing one is a plain copy."""

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
        if pairs[0][0].is_cuda:
            alike = [(row, part) for row, part in pairs if part.shape == row.shape and part.device == row.device]
            copy_together([row for row, _ in alike], [part for _, part in alike])
            pairs = [(row, part) for row, part in pairs if part.shape != row.shape or part.device != row.device]
        for row, part in pairs:
            row.copy_(part)
