"""The environment contract: ``num_envs`` copies of one task, stepped together.

* ``obs`` is a nested TensorDict of batch size ``[num_envs]`` on ``device``: ``robot/qpos``, ``object/pos``,
  ``image/<camera>`` (uint8 ``[num_envs, H, W, 3]``), ... Returned tensors are never modified later.
* ``action`` is a tensor ``[num_envs, action_dim]``, or a dict or TensorDict whose only key is
  ``action_manager.action_type``. Bounded coordinates of a ``Box`` are rescaled to [-1, 1].
  Discrete actions are int64 and start at 0: ``[num_envs]`` for ``Discrete``, ``[num_envs, action_dim]`` for
  ``MultiDiscrete`` and ``MultiBinary``.
* ``reward`` is float32 ``[num_envs]``. ``terminated`` (the task ended) and ``truncated`` (time limit, or the
  simulation diverged) are bool ``[num_envs]``; both may be set.
* A done env resets in the same step: its ``obs`` is the first of the next episode, and ``info["final_observation"]``
  holds the last one of the old episode (of the step before, if the simulation diverged). ``final_observation`` is
  always present and always ``[num_envs]``. Rows of envs that are not done equal ``obs``, so it can always be used to
  bootstrap the value of the next state. On a CPU it is the same object as ``obs`` if no env is done.
* ``info["rewards"]`` and ``info["metrics"]`` map names to ``[num_envs]`` tensors: the weighted reward terms, and the
  metrics of the new state such as ``success``. In a multi-task env, ``task/<name>/<metric>`` is NaN for other tasks.
* ``info["episode_seed"]`` (int64 ``[num_envs]``) identifies the episode that each env is in after the step;
  ``reset(seed=episode_seed)`` starts the same episodes again.
* Spaces describe a single env, without the batch dimension.
* Env ``i`` with seed ``s`` behaves the same for any ``num_envs`` and any number of threads.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.errors import ActionError, EnvContractError

Action: TypeAlias = Tensor | Mapping[str, Tensor] | TensorDictBase
EnvIds: TypeAlias = Tensor | Sequence[int] | None
StepResult: TypeAlias = tuple[TensorDict, Tensor, Tensor, Tensor, dict[str, Any]]


class ActionBounds:
    """Clips continuous actions to the bounds of a space; unbounded sides and discrete actions are left unchanged."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self._limits: tuple[Any, Any] | None = None
        if isinstance(space, gym.spaces.Box) and (np.isfinite(space.low).any() or np.isfinite(space.high).any()):
            bounds = [torch.from_numpy(bound.astype(np.float32)) for bound in (space.low, space.high)]
            same = all(bool((bound == bound.reshape(-1)[0]).all()) for bound in bounds)
            low, high = [float(bound.reshape(-1)[0]) for bound in bounds] if same else bounds
            self._limits = low, high

    def clip(self, action: Tensor) -> Tensor:
        """Return actions ``[num_envs, ...]`` clipped to the bounds."""
        if self._limits is None or not action.is_floating_point():
            return action
        low, high = self._limits
        if isinstance(low, Tensor) and low.device != action.device:
            self._limits = low, high = low.to(action.device), high.to(action.device)
        return action.clamp(low, high)


def random_actions(space: gym.Space[Any], count: int, generator: torch.Generator) -> Tensor:
    """Return uniformly sampled actions ``[count, ...]``; where a bound is missing, the range has width 2."""
    if isinstance(space, gym.spaces.Discrete):
        return torch.randint(int(space.n), (count,), generator=generator)
    counts = choice_counts(space)
    if counts is not None:
        return torch.randint(2**62, (count, len(counts)), generator=generator) % torch.from_numpy(counts)
    if not isinstance(space, gym.spaces.Box):
        raise EnvContractError(f"expected a Box, Discrete, MultiDiscrete or MultiBinary action space, got {space}")
    below, above = np.isfinite(space.low), np.isfinite(space.high)
    lowest = np.where(below, space.low, np.where(above, space.high - 2.0, -1.0))
    highest = np.where(above, space.high, np.where(below, space.low + 2.0, 1.0))
    low, high = (torch.from_numpy(bound.astype(np.float32)) for bound in (lowest, highest))
    return low + (high - low) * torch.rand((count, *space.shape), generator=generator)


def choice_counts(space: gym.Space[Any]) -> np.ndarray | None:
    """Return the choices per action dimension, int64 ``[action_dim]`` (``[]`` if ``Discrete``), else ``None``."""
    if isinstance(space, gym.spaces.Discrete):
        return np.array(space.n, dtype=np.int64)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return space.nvec.astype(np.int64)
    return np.full(space.shape, 2) if isinstance(space, gym.spaces.MultiBinary) else None


class ActionManager:
    """Validates the actions of an environment: dict key, shape, dtype and range."""

    def __init__(self, action_type: str, space: gym.Space[Any], num_envs: int, device: torch.device | str) -> None:
        self.action_type = action_type
        self.space = space
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.choices = choice_counts(space)
        """Number of choices per action dimension; ``None`` for continuous actions."""
        self.shape = (num_envs, *(space.shape or ()))
        self.action_dim = int(np.prod(space.shape)) if space.shape else 1

    def unwrap(self, action: Action, step: Tensor | int | None = None) -> Tensor:
        """Return the action as a validated tensor ``[num_envs, ...]`` on the env's device."""
        value = self.unpack(action)
        if tuple(value.shape) != self.shape:
            raise ActionError(
                f"action {self.action_type!r} must have shape {list(self.shape)}, envs first, got {list(value.shape)}"
            )
        if self.choices is not None:
            return self._check_choice(value, self.choices)
        value = value.detach().to(self.device, torch.float32)  # no gradient passes through the simulation
        # A non-finite value makes the sum non-finite. On a GPU this would synchronise; there the physics reports it.
        if value.device.type == "cpu" and not math.isfinite(value.numpy().sum()) and not torch.isfinite(value).all():
            bad = torch.nonzero(~torch.isfinite(value).reshape(self.num_envs, -1).all(dim=1)).reshape(-1)
            env = int(bad[0])
            at = f" at step {int(step[env]) if isinstance(step, Tensor) else step} of its episode"
            raise ActionError(
                f"action {self.action_type!r} of env {env}{'' if step is None else at} is not finite: "
                f"{value[env].tolist()} ({bad.numel()} of {self.num_envs} envs); the simulation was left as it was"
            )
        return value

    def unpack(self, action: Action) -> Tensor:
        """Return the tensor of an action, taken out of its dict if necessary; the shape is not checked."""
        if isinstance(action, Tensor | np.ndarray):
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
        """Return a dense tensor of real numbers; arrays and lists are converted."""
        kinds = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}
        if isinstance(value, Tensor):
            if value.layout == torch.strided and not value.is_complex() and not value.is_meta:
                return value
            got = f"a {value.layout} tensor of {value.dtype} on {value.device}"
        else:
            nested = isinstance(value, Mapping | TensorDictBase)
            try:
                array = np.asarray(None if nested else value)
            except ValueError:  # ragged rows
                array = np.asarray(None)
            if array.dtype.kind in kinds:
                return torch.from_numpy(np.ascontiguousarray(array, dtype=kinds[array.dtype.kind]))
            got = f"another {type(value).__name__}" if nested else f"{type(value).__name__} of {array.dtype}"
        raise ActionError(f"action {self.action_type!r} must hold real numbers, got {got}")

    def _check_choice(self, value: Tensor, counts: np.ndarray) -> Tensor:
        valid = f"[0, {counts.min() if counts.size and (counts == counts.min()).all() else counts.tolist()})"
        is_switch = value.dtype == torch.bool and isinstance(self.space, gym.spaces.MultiBinary)
        if value.is_floating_point() or (value.dtype == torch.bool and not is_switch):
            raise ActionError(f"discrete actions are integers in {valid}, got dtype {value.dtype}")
        value = value.to(self.device, torch.int64)
        if value.device.type == "cpu" and value.numel():
            choices = value.detach().numpy()  # for few numbers, numpy takes a third of torch's time
            if choices.min() < 0 or (choices >= counts).any():
                wrong = ((choices < 0) | (choices >= counts)).reshape(self.num_envs, -1).any(axis=1)
                env = int(np.flatnonzero(wrong)[0])
                raise ActionError(f"action of env {env} must lie in {valid}, got {value[env].tolist()}")
        return value


class VecEnv(ABC):
    """``num_envs`` copies of one task that step together; the module docstring defines the contract."""

    num_envs: int
    device: torch.device
    max_episode_steps: int | None
    """Steps after which an episode is truncated; ``None`` means no time limit."""
    observation_space: gym.spaces.Dict
    action_space: gym.Space[Any]
    action_manager: ActionManager
    supports_state: bool = True
    """Whether ``get_state`` and ``set_state`` are supported, as in every simulated task."""
    has_expert: bool = True
    """Whether the expert is available, for an environment that implements ``HasExpert``."""

    @property
    def name(self) -> str:
        """Name of the environment in messages."""
        return type(self).__name__

    @abstractmethod
    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        """Start new episodes in ``env_ids`` (default: all) and return the observation of all envs.

        An int seeds the random stream of each of these envs by ``(seed, env index)``. A tensor of episode seeds ``[n]``
        starts exactly those episodes. ``None`` continues the current streams.
        """

    @abstractmethod
    def step(self, action: Action) -> StepResult:
        """Apply one action in every env and return ``(obs, reward, terminated, truncated, info)``."""

    def get_state(self) -> TensorDict:
        """Return the full simulation state as a TensorDict ``[num_envs]``: physics, counters and random streams."""
        raise EnvContractError(f"{type(self).__name__} cannot save its state: see supports_state")

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        """Restore rows of ``get_state`` into ``env_ids`` (default: all) and return the observation of all envs."""
        raise EnvContractError(f"{type(self).__name__} cannot restore a state: see supports_state")

    def render(
        self, env_ids: EnvIds = None, camera: str | None = None, size: tuple[int, int] = (240, 320)
    ) -> np.ndarray:
        """Return uint8 images ``[len(env_ids), H, W, 3]`` of the current state."""
        raise EnvContractError(f"{type(self).__name__} has no camera")

    def on_episode_end(self, callback: Callable[[Tensor], None] | None) -> bool:
        """Call ``callback`` with the mask ``[num_envs]`` of envs whose episodes just ended, before the next ones begin.

        In the callback, ``render`` shows the states in which the episodes ended. ``None`` removes it. Return whether
        this environment can do so. In a chunk of actions, the mask holds envs that ended earlier in the chunk, too.
        """
        return False

    def prepare(self) -> None:  # noqa: B027 - most environments have nothing to prepare
        """Precompute work for coming steps while the caller is idle; this affects speed only."""

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Release threads, processes and GL contexts; may be called more than once."""

    def __enter__(self) -> VecEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def resolve_ids(self, env_ids: EnvIds) -> Tensor:
        """Return ``env_ids`` (unique indices or a bool mask) as a validated int64 tensor; ``None`` means all envs."""
        if env_ids is None:
            return torch.arange(self.num_envs, device=self.device)
        try:
            ids = torch.as_tensor(env_ids, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise EnvContractError(f"env_ids must be integers, got {env_ids!r:.80}: {error}") from None
        if ids.dtype == torch.bool and ids.shape == (self.num_envs,):
            return torch.nonzero(ids).reshape(-1)
        if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
            raise EnvContractError(
                f"env_ids must be integers or a mask of shape [{self.num_envs}], got {ids.dtype} {list(ids.shape)}"
            )
        ids = ids.to(torch.int64).reshape(-1)
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.num_envs):
            raise EnvContractError(f"env_ids must lie in [0, {self.num_envs}), got {ids.tolist()[:10]}")
        if torch.unique(ids).numel() != ids.numel():
            raise EnvContractError(f"env_ids must differ from each other, got {ids.tolist()[:10]}")
        return ids

    def resolve_seed(self, seed: int | Tensor | None, count: int) -> int | Tensor | None:
        """Return the validated ``seed`` argument of ``reset``: ``None``, an int, or int64 episode seeds ``[count]``."""
        if isinstance(seed, Tensor) and seed.dim() > 0:
            if seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool or seed.numel() != count:
                raise EnvContractError(
                    f"reset: {count} envs need an integer tensor [{count}] of episode seeds, "
                    f"got {seed.dtype} {list(seed.shape)}"
                )
            return seed.to(self.device, torch.int64).reshape(-1)
        try:
            number = None if seed is None else operator.index(seed)
        except TypeError:
            raise EnvContractError(
                f"reset: seed must be an int, a tensor of episode seeds or None, got {seed!r:.80}"
            ) from None
        if number is not None and number < 0:
            raise EnvContractError(f"reset: seed must not be negative, got {number}")
        return number


@dataclass(frozen=True)
class StepOutcome:
    """Rewards and flags of one step, before observation and reset; each tensor is ``[num_envs]``."""

    rewards: dict[str, Tensor]
    """Weighted reward terms by name."""
    reward: Tensor
    """Their sum."""
    terminated: Tensor
    """Whether the task ended."""
    truncated: Tensor
    """Whether the time limit was reached or the simulation diverged."""
    metrics: dict[str, Tensor]
    """Metrics of the state reached."""


class StepsInHalves(VecEnv):
    """An environment that simulates in other processes, so that the caller can do other work during a step."""

    @abstractmethod
    def begin_step(self, action: Action) -> None:
        """Start a step; the next call must be ``finish_step``."""

    @abstractmethod
    def finish_step(self) -> StepResult:
        """Wait for the step to finish and return its result."""

    def step(self, action: Action) -> StepResult:
        self.begin_step(action)
        return self.finish_step()

    def restart(self) -> None:
        """Restart the workers that failed; call ``reset`` afterwards."""


SEGMENTS = ("other", "reach", "grasp", "move", "place", "push", "press", "pull", "insert", "hand_over", "leave")
"""Segments of a demonstration; a segment's id is its index in this tuple."""


@runtime_checkable
class MarksSegments(Protocol):
    """An environment whose expert labels its actions with segments."""

    def expert_segment(self) -> Tensor:
        """Return the segment of the last ``expert_action``, int64 indices into ``SEGMENTS`` ``[num_envs]``."""


@runtime_checkable
class HasExpert(Protocol):
    """An environment that can demonstrate its own task."""

    def expert_action(self) -> Tensor:
        """Return the scripted expert's action ``[num_envs, action_dim]`` for the current state."""

    def create_demo_action_list(self) -> list[Tensor]:
        """Return the expert's actions from the current state to the end of the episodes; the state is preserved."""
