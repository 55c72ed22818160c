"""From what a policy says to what the motors get.

An :class:`ActionManager` checks an action and takes it out of its envelope. ``action_terms.py`` has the one that turns
actions into controls for a robot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.vec_env import Action
from embodichain.errors import ActionError


class ActionManager:
    """Knows the one key, the shape and the range of an environment's actions."""

    def __init__(self, action_type: str, space: gym.Space[Any], num_envs: int, device: torch.device | str) -> None:
        self.action_type = action_type
        self.space = space
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.num_choices = int(space.n) if isinstance(space, gym.spaces.Discrete) else 0
        self.shape = (num_envs, *(space.shape or ()))
        self.action_dim = int(np.prod(space.shape)) if space.shape else 1

    def unwrap(self, action: Action, step: Tensor | int | None = None) -> Tensor:
        """Return the action as a checked tensor ``[num_envs, ...]`` on the env's device."""
        value = self._take_out(action)
        if tuple(value.shape) != self.shape:
            raise ActionError(
                f"action {self.action_type!r} must have shape {list(self.shape)}, envs first, got {list(value.shape)}"
            )
        if self.num_choices:
            return self._check_choice(value)
        value = value.detach().to(self.device, torch.float32)  # no gradient passes through the simulation
        # What is not finite makes the sum so, too; only then is it worth a closer look. On a GPU this would wait for
        # the device, so there the simulation guards itself.
        if value.device.type == "cpu" and not math.isfinite(float(value.sum())) and not torch.isfinite(value).all():
            self._raise_not_finite(value, step)
        return value

    def _take_out(self, action: Action) -> Tensor:
        if isinstance(action, Tensor):
            return self._to_tensor(action)
        if isinstance(action, np.ndarray):
            return self._to_tensor(action)
        if isinstance(action, Mapping | TensorDictBase):
            keys = [str(key) for key in action.keys()]  # noqa: SIM118 - a TensorDict iterates over its rows
            if keys != [self.action_type]:
                raise ActionError(f"an action dict has the one key {self.action_type!r}, got {keys}")
            return self._to_tensor(action[self.action_type])
        raise ActionError(
            f"an action is a tensor {list(self.shape)} or a dict with the key {self.action_type!r}, "
            f"got {type(action).__name__}"
        )

    def _to_tensor(self, value: Any) -> Tensor:
        """Return what came as a dense tensor of real numbers; arrays of any layout are taken."""
        if isinstance(value, Tensor):
            if value.layout == torch.strided and not value.is_complex() and not value.is_meta:
                return value
            raise self._not_numbers(f"a {value.layout} tensor of {value.dtype} on {value.device}")
        if isinstance(value, Mapping | TensorDictBase):
            raise self._not_numbers(f"another {type(value).__name__}")
        try:
            array = np.asarray(value)
        except ValueError:  # rows of different lengths
            raise self._not_numbers(type(value).__name__) from None
        if array.dtype.kind not in "fiub":  # floats, signed, unsigned, booleans
            raise self._not_numbers(f"{type(value).__name__} of {array.dtype}")
        kind = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}[array.dtype.kind]
        return torch.from_numpy(np.ascontiguousarray(array, dtype=kind))

    def _not_numbers(self, came: str) -> ActionError:
        return ActionError(f"action {self.action_type!r} must hold real numbers, got {came}")

    def _check_choice(self, value: Tensor) -> Tensor:
        if value.is_floating_point() or value.dtype == torch.bool:
            raise ActionError(f"discrete actions are integers in [0, {self.num_choices}), got dtype {value.dtype}")
        value = value.to(self.device, torch.int64)
        if value.device.type == "cpu" and value.numel():
            choices = value.detach().numpy()  # whose calls on so few numbers cost a third of torch's
            if choices.min() < 0 or choices.max() >= self.num_choices:
                env = int(np.flatnonzero((choices < 0) | (choices >= self.num_choices))[0])
                raise ActionError(f"action of env {env} must lie in [0, {self.num_choices}), got {int(value[env])}")
        return value

    def _raise_not_finite(self, value: Tensor, step: Tensor | int | None) -> None:
        bad = torch.nonzero(~torch.isfinite(value).reshape(self.num_envs, -1).all(dim=1)).reshape(-1)
        env = int(bad[0])
        at = "" if step is None else f" at step {int(step[env]) if isinstance(step, Tensor) else step} of its episode"
        raise ActionError(
            f"action {self.action_type!r} of env {env}{at} is not finite: {value[env].tolist()} "
            f"({bad.numel()} of {self.num_envs} envs); the simulation was left as it was"
        )
