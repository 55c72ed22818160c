"""Wrappers: action chunks, and groups of envs that can be stepped separately.

``ChunkedEnv`` takes a chunk of actions ``[num_envs, chunk_size, action_dim]`` per step and observes once, at its end.
An env that ends inside a chunk takes no further actions, and its next episode starts with the next chunk;
``final_observation`` is the one at the end of the episode. ``info["chunk"]`` has ``num_actions`` (int64 ``[num_envs]``,
actions taken) and ``chunk_reward`` (``[num_envs, chunk_size]``, zero for actions not taken). ``reward`` is their
undiscounted sum; algorithms apply their own discount inside a chunk.

``GroupedEnv`` joins several environments into one. A collector can simulate one group while the policy computes the
actions of another.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.random import combine
from embodichain.envs.vec_env import Action, ActionManager, EnvIds, StepOutcome, StepResult, StepsInHalves, VecEnv
from embodichain.errors import ChunkSizeError, ConfigError, EmbodiChainError, EnvContractError

_SEED_BITS = 31


class ChunkTally:
    """Accumulates the steps of one chunk; an env that has ended no longer changes."""

    def __init__(self, actions: Tensor) -> None:
        num_envs, chunk_size, device = actions.shape[0], actions.shape[1], actions.device
        self.active = torch.ones(num_envs, dtype=torch.bool, device=device)
        """Bool ``[num_envs]``: envs that have not ended in this chunk."""
        self.num_actions = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.rewards = torch.zeros(num_envs, chunk_size, device=device)
        self.terminated = torch.zeros_like(self.active)
        self.truncated = torch.zeros_like(self.active)
        self._parts: dict[str, Tensor] = {}
        self._metrics: dict[str, Tensor] = {}
        self._step = 0

    def add(self, outcome: StepOutcome) -> Tensor:
        """Add one step and return which envs ended, bool ``[num_envs]``."""
        active = self.active
        self.rewards[:, self._step] = torch.where(active, outcome.reward, 0.0)
        self._step += 1
        self.num_actions += active
        for name, part in outcome.rewards.items():
            taken = torch.where(active, part, 0.0)
            self._parts[name] = self._parts[name] + taken if name in self._parts else taken
        for name, metric in outcome.metrics.items():
            self._metrics[name] = torch.where(active, metric, self._metrics[name]) if name in self._metrics else metric
        self.terminated |= outcome.terminated & active
        self.truncated |= outcome.truncated & active
        ended = active & (outcome.terminated | outcome.truncated)
        self.active = active & ~ended
        return ended

    def result(self, obs: TensorDict, episode_seed: Tensor, final: TensorDict) -> StepResult:
        """Return the chunk as one step, given the observations after it and at the ends of episodes."""
        info = {
            "final_observation": final,
            "rewards": self._parts,
            "metrics": self._metrics,
            "episode_seed": episode_seed,
            "chunk": {"num_actions": self.num_actions, "chunk_reward": self.rewards},
        }
        return obs, self.rewards.sum(1), self.terminated, self.truncated, info


@runtime_checkable
class DefersResets(Protocol):
    """An environment that can step without observing or resetting, which avoids rendering inside a chunk."""

    def advance(self, action: Action) -> StepOutcome:
        """Step without observing or resetting."""

    def observe(self, mask: Tensor) -> TensorDict:
        """Observe the envs where ``mask`` ``[num_envs]`` is true; other rows stay unchanged."""

    def reset_done(self, done: Tensor) -> tuple[TensorDict, Tensor]:
        """Reset the envs where ``done`` is true; return the observation and the episode seeds of all envs."""


class EnvWrapper(VecEnv):
    """Base class of wrappers around one environment, to which everything but ``step`` is forwarded."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.num_envs, self.device, self.supports_state = env.num_envs, env.device, env.supports_state

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        return self.env.reset(seed, env_ids)

    def get_state(self) -> TensorDict:
        return self.env.get_state()

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        return self.env.set_state(state, env_ids)

    def render(
        self, env_ids: EnvIds = None, camera: str | None = None, size: tuple[int, int] = (240, 320)
    ) -> np.ndarray:
        return self.env.render(env_ids, camera, size)

    def on_episode_end(self, callback: Callable[[Tensor], None] | None) -> bool:
        return self.env.on_episode_end(callback)

    def prepare(self) -> None:
        self.env.prepare()

    def close(self) -> None:
        self.env.close()


class ChunkedEnv(EnvWrapper):
    """An environment whose actions are chunks ``[num_envs, chunk_size, action_dim]``."""

    def __init__(self, env: VecEnv, chunk_size: int) -> None:
        if not isinstance(env.action_space, gym.spaces.Box) or len(env.action_space.shape) != 1:
            raise ChunkSizeError(f"chunks are made of actions [action_dim], got the action space {env.action_space}")
        limit = env.max_episode_steps
        if chunk_size < 1 or (limit is not None and chunk_size > limit):
            longest = "inf" if limit is None else limit
            raise ChunkSizeError(
                f"chunk_size must lie in [1, {longest}], the longest episode there is, got {chunk_size}"
            )
        super().__init__(env)
        self.chunk_size = chunk_size
        self.max_episode_steps = None if limit is None else -(-limit // chunk_size)
        self.observation_space = env.observation_space
        low, high = (np.tile(bound, (chunk_size, 1)) for bound in (env.action_space.low, env.action_space.high))
        self.action_space = gym.spaces.Box(low, high, dtype=np.float32)
        self.action_manager = env.action_manager
        self._chunks = ActionManager(env.action_manager.action_type, self.action_space, env.num_envs, env.device)

    def step(self, action: Action) -> StepResult:
        actions = self._chunks.unwrap(action)  # validates all actions before the first step
        return step_deferred(self.env, actions) if isinstance(self.env, DefersResets) else step_each(self.env, actions)


def step_deferred(env: DefersResets, actions: Tensor) -> StepResult:
    """Execute a chunk; an env that ends is observed at once, and reset after the chunk."""
    tally = ChunkTally(actions)
    for action in actions.unbind(1):
        env.observe(tally.add(env.advance(action)))
        if not bool(tally.active.any()):
            break
    final = env.observe(tally.active)
    return tally.result(*env.reset_done(tally.terminated | tally.truncated), final)


def step_each(env: VecEnv, actions: Tensor) -> StepResult:
    """Execute a chunk in an environment that cannot defer resets.

    The remaining actions of a chunk affect the next episode, which is restarted from its seed after the chunk.
    """
    tally = ChunkTally(actions)
    ends: list[tuple[Tensor, TensorDict, Tensor]] = []
    for action in actions.unbind(1):
        obs, reward, terminated, truncated, info = env.step(action)
        ended = tally.add(StepOutcome(info["rewards"], reward, terminated, truncated, info["metrics"]))
        ids = torch.nonzero(ended).reshape(-1)
        if ids.numel():
            ends.append((ids, info["final_observation"][ids], info["episode_seed"][ids]))
        if not bool(tally.active.any()):
            break
    final = obs
    if ends:
        ids, seeds = torch.cat([end[0] for end in ends]), torch.cat([end[2] for end in ends])
        final = obs.clone()
        final[ids] = torch.cat([end[1] for end in ends])
        obs, info = env.reset(seed=seeds, env_ids=ids)
    return tally.result(obs, info["episode_seed"], final)


def chunked(env: VecEnv, chunk_size: int) -> VecEnv:
    """Return the environment with chunks of ``chunk_size`` actions; unchanged if it has them already."""
    present = env.chunk_size if isinstance(env, ChunkedEnv) else 1
    if present == chunk_size:
        return env
    if present != 1:
        raise ChunkSizeError(f"the environment takes chunks of {present} actions, the policy chooses {chunk_size}")
    return ChunkedEnv(env, chunk_size)


class GroupedEnv(VecEnv):
    """Several environments of the same kind as one; group ``g`` holds the envs ``slices[g]``.

    The first group uses the common seed; every other group has a seed derived from it. Groups that simulate in other
    processes make a ``RemoteGroups``, which steps them in parallel.
    """

    is_divisible: bool = True
    """Whether its groups can be wrapped separately and joined again."""

    def __new__(cls, groups: Sequence[VecEnv]) -> Self:
        """Return a ``RemoteGroups`` if all groups simulate in other processes."""
        apart = cls is GroupedEnv and groups and all(isinstance(group, StepsInHalves) for group in groups)
        return super().__new__(RemoteGroups if apart else cls)  # type: ignore[return-value]

    def __init__(self, groups: Sequence[VecEnv]) -> None:
        if not groups:
            raise EnvContractError("expected at least one environment, got none")
        first = groups[0]
        for other in groups[1:]:
            for name in ("device", "max_episode_steps", "observation_space", "action_space"):
                mine, theirs = getattr(first, name), getattr(other, name)
                if mine != theirs:
                    raise EnvContractError(f"groups must be alike, but {name} is {mine} in one and {theirs} in another")
        self.groups = list(groups)
        self.num_envs = sum(group.num_envs for group in groups)
        self.device, self.max_episode_steps = first.device, first.max_episode_steps
        self.observation_space, self.action_space = first.observation_space, first.action_space
        self.action_manager = first.action_manager
        self.supports_state = all(group.supports_state for group in groups)
        self._sizes = [group.num_envs for group in groups]
        ends = np.cumsum([0, *self._sizes]).tolist()
        self.slices = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
        self._obs: list[TensorDict | None] = [None] * len(groups)
        self.num_parts = sum(_num_parts(group) for group in groups)
        """Total number of environments, including those in nested groups."""

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        ids = self.resolve_ids(env_ids)
        checked = self.resolve_seed(seed, ids.numel())
        infos, number = [], 0
        for index, (group, mine, local) in enumerate(self._rows_of(ids)):
            given = checked[mine] if isinstance(checked, Tensor) else _part_seed(checked, number)
            self._obs[index], info = group.reset(given, local)
            infos.append(info)
            number += _num_parts(group)
        return self._joined_obs(), join_parts(infos, self._sizes)

    def step(self, action: Action) -> StepResult:
        parts = self.split(action)
        return self.join([group.step(part) for group, part in zip(self.groups, parts, strict=True)])

    def split(self, action: Action) -> list[Tensor]:
        """Return each group's part of an action, all validated before any group is stepped."""
        manager = ActionManager(self.action_manager.action_type, self.action_space, self.num_envs, self.device)
        return list(manager.unwrap(action).split(self._sizes))

    def join(self, results: Sequence[StepResult], obs: TensorDict | None = None) -> StepResult:
        """Join the step results of all groups; ``obs`` is their joined observation, if known, on any device."""
        self._obs = [result[0] for result in results]
        joined_obs = self._joined_obs() if obs is None else obs
        _, rewards, terminated, truncated, _ = zip(*results, strict=True)
        none_done = all(result[4].get("final_observation") is result[0] for result in results)
        apart = {"final_observation"} if none_done else ()
        infos = [{key: value for key, value in result[4].items() if key not in apart} for result in results]
        joined = join_parts(infos, self._sizes)
        if none_done:  # the same object as the observation
            joined["final_observation"] = joined_obs if obs is None else self._joined_obs()
        return joined_obs, torch.cat(rewards), torch.cat(terminated), torch.cat(truncated), joined

    def get_state(self) -> TensorDict:
        return torch.cat([group.get_state() for group in self.groups])

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        for index, (group, mine, local) in enumerate(self._rows_of(self.resolve_ids(env_ids))):
            self._obs[index] = group.set_state(state[mine.to(state.device or "cpu")], local)
        return self._joined_obs()

    def render(
        self, env_ids: EnvIds = None, camera: str | None = None, size: tuple[int, int] = (240, 320)
    ) -> np.ndarray:
        ids = self.resolve_ids(env_ids)
        images = np.empty((len(ids), *size, 3), dtype=np.uint8)
        for group, mine, local in self._rows_of(ids):
            if local.numel():
                images[mine.cpu().numpy()] = group.render(local, camera, size)
        return images

    def on_episode_end(self, callback: Callable[[Tensor], None] | None) -> bool:
        def of_group(rows: slice) -> Callable[[Tensor], None] | None:
            if callback is None:
                return None

            def call(ended: Tensor) -> None:
                of_all = torch.zeros(self.num_envs, dtype=torch.bool, device=ended.device)
                of_all[rows] = ended
                callback(of_all)

            return call

        able = [group.on_episode_end(of_group(rows)) for group, rows in zip(self.groups, self.slices, strict=True)]
        return all(able)

    def prepare(self) -> None:
        for group in self.groups:
            group.prepare()

    def close(self) -> None:
        for group in self.groups:
            group.close()

    def _rows_of(self, ids: Tensor) -> Iterator[tuple[VecEnv, Tensor, Tensor]]:
        """Yield each group, the mask of ``ids`` that belong to it, and their indices inside the group."""
        for group, rows in zip(self.groups, self.slices, strict=True):
            mine = (ids >= rows.start) & (ids < rows.stop)
            yield group, mine, ids[mine] - rows.start

    def _joined_obs(self) -> TensorDict:
        return torch.cat([obs for obs in self._obs if obs is not None])


class RemoteGroups(StepsInHalves, GroupedEnv):
    """Groups that simulate in other processes, in parallel."""

    groups: list[StepsInHalves]  # type: ignore[assignment]

    def __init__(self, groups: Sequence[StepsInHalves]) -> None:
        super().__init__(groups)
        self._under_way: list[StepsInHalves] = []

    def begin_step(self, action: Action) -> None:
        if self._under_way:
            raise EnvContractError("a step of these environments is under way: finish_step() comes first")
        parts = self.split(action)
        try:
            for group, part in zip(self.groups, parts, strict=True):
                self._under_way.append(group)  # first, as an interrupt may occur in between
                group.begin_step(part)
        except BaseException as error:
            if isinstance(error, Exception):  # the last group did not start
                self._under_way.pop()
            self._settle()
            raise

    def finish_step(self) -> StepResult:
        if not self._under_way:
            raise EnvContractError("no step of these environments is under way: begin_step() comes first")
        results = []
        try:
            while self._under_way:
                results.append(self._under_way.pop(0).finish_step())
        finally:
            self._settle()
        return self.join(results)

    def restart(self) -> None:
        for group in self.groups:
            group.restart()

    def _settle(self) -> None:
        """Finish the steps of all groups after an error."""
        while self._under_way:
            with contextlib.suppress(EmbodiChainError):  # the first error is raised
                self._under_way.pop(0).finish_step()


def make_grouped(make: Callable[[int], VecEnv], num_envs: int, num_groups: int) -> VecEnv:
    """Return ``num_envs`` envs in equal groups made by ``make(num_envs_of_group)``; one group is returned as it is."""
    if num_groups < 1 or num_envs % num_groups:
        raise ConfigError(f"num_envs must be a multiple of the {num_groups} groups of envs, got {num_envs}")
    if num_groups == 1:
        return make(num_envs)
    return GroupedEnv([make(num_envs // num_groups) for _ in range(num_groups)])


def arrange(envs: Sequence[StepsInHalves], num_groups: int) -> StepsInHalves:
    """Return environments that simulate in other processes as ``num_groups`` groups of equal size."""
    if num_groups < 1 or not envs or len(envs) % num_groups:
        raise ConfigError(f"expected a multiple of the {num_groups} groups of envs, got {len(envs)} environments")
    size = len(envs) // num_groups
    parts = [envs[first : first + size] for first in range(0, len(envs), size)]
    groups = [part[0] if size == 1 else RemoteGroups(part) for part in parts]
    return groups[0] if num_groups == 1 else RemoteGroups(groups)


def join_parts(parts: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """Concatenate tensors or arrays ``[envs, ...]`` of nested mappings by key; missing keys become zeros."""
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part.get(key) for part in parts]
        known = next(value for value in values if value is not None)
        if isinstance(known, Mapping) and not isinstance(known, TensorDictBase):
            joined[key] = join_parts([{} if value is None else value for value in values], sizes)
        elif isinstance(known, np.ndarray):
            rows = [np.zeros((n, *known.shape[1:]), known.dtype) for n in sizes]
            joined[key] = np.concatenate([r if v is None else v for r, v in zip(rows, values, strict=True)])
        else:
            pairs = zip(values, sizes, strict=True)
            filled = [known.new_zeros((n, *known.shape[1:])) if value is None else value for value, n in pairs]
            joined[key] = torch.cat(filled)
    return joined


def _num_parts(env: VecEnv) -> int:
    return env.num_parts if isinstance(env, GroupedEnv) else 1


def _part_seed(seed: int | None, number: int) -> int | None:
    """Return the seed of the group that starts with this part; the first one has the common seed."""
    if seed is None or number == 0:
        return seed
    return int(combine(torch.tensor(seed), torch.tensor(number))) % 2**_SEED_BITS
