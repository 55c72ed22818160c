"""Environment state and resets: by index on the CPU, and by mask, without synchronisation, on a GPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.curricula import Curricula
from embodichain.envs.demonstrations import DemonstrationStarts
from embodichain.envs.observations import PackedObservation
from embodichain.envs.physics import Physics
from embodichain.envs.random import EPISODE, KEY, RandomStreams
from embodichain.envs.randomization import DomainRandomization
from embodichain.envs.task import ResetState, Task
from embodichain.errors import EnvContractError
from embodichain.utils.cuda_graphs import copy_where

_CURRICULA = "curricula"


@dataclass(frozen=True)
class EnvState:
    """The full state of an environment; the tensors are live references."""

    physics: Physics
    streams: RandomStreams
    step: Tensor
    """Steps taken in the current episodes, ``[num_envs]``."""
    variables: dict[str, Tensor]
    """Task variables, such as goals, ``[num_envs, ...]``."""
    domain: DomainRandomization
    curricula: Curricula
    events: dict[str, Tensor]
    """State of events, such as delays, ``[num_envs, ...]``."""

    def read(self) -> dict[str, Any]:
        """Return copies of all tensors, nested by name."""
        return {
            "physics": self.physics.state(),
            "streams": self.streams.state.clone(),
            "step": self.step.clone(),
            "variables": {name: value.clone() for name, value in self.variables.items()},
            "model": self.domain.state(),
            **({"events": {name: value.clone() for name, value in self.events.items()}} if self.events else {}),
            **({_CURRICULA: self.curricula.state()} if self.curricula.active else {}),
        }

    def read_rows(self, env_ids: Tensor) -> dict[str, Any]:
        """Return these rows of :meth:`read`, without copying those of other envs."""
        live = {
            "streams": self.streams.state,
            "step": self.step,
            "variables": self.variables,
            "model": self.domain.state(),
            **({"events": self.events} if self.events else {}),
            **({_CURRICULA: self.curricula.state()} if self.curricula.active else {}),
        }
        return {"physics": self.physics.state_rows(env_ids), **_select(live, env_ids)}

    def write(self, env_ids: Tensor, rows: Any) -> None:
        """Write rows returned by :meth:`read`, as a nested dict or TensorDict, into these envs."""
        self.physics.set_state(env_ids, rows["physics"])
        self.streams.state.index_copy_(0, env_ids, rows["streams"])
        self.step.index_copy_(0, env_ids, rows["step"])
        for name, value in self.variables.items():
            value.index_copy_(0, env_ids, rows["variables"][name])
        if self.domain.active:
            self.domain.set_state(env_ids, dict(rows["model"].items()))
        for name, value in self.events.items():
            value.index_copy_(0, env_ids, rows["events"][name])
        if _CURRICULA in rows.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            self.curricula.set_state(env_ids, rows[_CURRICULA])


def check_state(state: Any, template: TensorDictBase, count: int) -> None:
    """Raise ``EnvContractError`` unless ``state`` has ``count`` rows and the entries of ``template``."""
    if not isinstance(state, TensorDictBase):
        raise EnvContractError(
            f"set_state: expected a TensorDict that get_state() returned, got {type(state).__name__}"
        )
    if tuple(state.batch_size) != (count,):
        raise EnvContractError(f"set_state: expected one row per env, [{count}], got {list(state.batch_size)}")
    wanted, given = template.flatten_keys("/").to_dict(), state.flatten_keys("/").to_dict()
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is unknown here" for name in given if name not in wanted]
    for name in wanted.keys() & given.keys():
        want, got = wanted[name], given[name]
        if want.shape[1:] != got.shape[1:] or want.dtype != got.dtype:
            problems.append(
                f"{name} must be {want.dtype} {list(want.shape[1:])}, not {got.dtype} {list(got.shape[1:])}, per env"
            )
    if problems:
        raise EnvContractError(
            f"set_state: this state is of another task, robot or randomisation: {'; '.join(sorted(problems))}. "
            "Give one that get_state() returned in an environment of the same config."
        )


Drawn = tuple[ResetState, Tensor]
"""The next reset state of every env, and the state of the random streams after sampling it."""


class Resets:
    """Samples reset states and writes them into the simulation.

    A reset state depends on its env's random stream only, and sampling one takes nearly as long as sampling a hundred.
    On the CPU, the next reset states of all envs are therefore sampled ahead in one batch.
    """

    def __init__(
        self,
        task: Task,
        state: EnvState,
        observe: Callable[[Tensor], PackedObservation],
        kept: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """``observe(env_ids)`` returns the observation of the current state; ``kept`` maps further variables, which are
        zero at reset, to their sizes."""
        self._task, self._state, self._observe, self._kept = task, state, observe, kept
        self._all = torch.arange(state.physics.num_envs, device=state.physics.device)
        self._ahead: dict[str, Any] = {}
        self._ahead_obs: PackedObservation
        self._episodes = state.streams.state[:, KEY : EPISODE + 1]  # live
        self._drawn_from = torch.full_like(self._origins(), -1)
        self.demonstrations: DemonstrationStarts | None = None
        """Replaces some of the sampled states by states of demonstrations."""

    def begin(self, env_ids: Tensor, episodes: Tensor | None = None) -> ResetState:
        """Start the next episode in each of these envs, or the episodes with these seeds; return their first states."""
        state, variables = self._state, self._task.variables
        state.streams.next_episode(env_ids, episodes)
        start = self._sample(env_ids)
        if state.domain.active:
            state.domain.apply(env_ids, state.streams, start)
        state.physics.set(env_ids, start.qpos, start.qvel, start.poses)
        for name, value in start.variables.items():
            if name not in variables:  # the first reset, of all envs, determines shapes and dtypes
                variables[name] = torch.empty_like(value)
            variables[name][env_ids] = value
        state.step.index_fill_(0, env_ids, 0)
        return start

    def begin_drawn(self, env_ids: Tensor) -> PackedObservation:
        """Start the next episode in each of these envs from the states sampled ahead, and return their observation."""
        self.draw_ahead(env_ids)
        self._state.write(env_ids, _select(self._ahead, env_ids))
        return self._ahead_obs.rows(env_ids)

    def draw_ahead(self, env_ids: Tensor | None = None) -> None:
        """Replace all used reset states if any of these envs (default: all) needs one; the envs stay unchanged."""
        origins = self._origins()
        wanted, available = origins.numpy(), self._drawn_from.numpy()  # few rows of arrays are compared faster
        if env_ids is not None:
            ids = env_ids.numpy()
            wanted, available = wanted.take(ids, axis=0), available.take(ids, axis=0)
        if (available == wanted).all():  # the common case
            return
        outdated = (self._drawn_from != origins).any(dim=1)
        used = outdated.nonzero().view(-1)
        current = self._state.read_rows(used)
        try:
            self.begin(used)
            obs, drawn = self._observe(used), self._state.read_rows(used)
            drawn.pop(_CURRICULA, None)  # advances until the episode starts
        finally:
            self._state.write(used, current)
        self._drawn_from.index_copy_(0, used, origins.index_select(0, used))
        if self._ahead:
            _assign(self._ahead, used, drawn)
            self._ahead_obs = self._ahead_obs.with_rows(obs, used)
        else:
            self._ahead, self._ahead_obs = drawn, obs

    def _origins(self) -> Tensor:
        """Return the values that determine the next episode of each env, int64 ``[num_envs, k]``."""
        curricula = self._state.curricula
        return torch.cat((self._episodes, curricula.origin()), dim=1) if curricula.active else self._episodes

    def draw(self) -> Drawn:
        """Sample the next reset state of every env (selecting some would synchronise); streams are not advanced."""
        streams = self._state.streams
        before = streams.state.clone()
        streams.next_episode(self._all)
        start = self._sample(self._all)
        after = streams.state.clone()
        streams.state.copy_(before)
        return start, after

    def _sample(self, env_ids: Tensor) -> ResetState:
        start = self._task.sample_start(env_ids, self._state.streams)
        if self.demonstrations is not None:
            self.demonstrations.replace(env_ids, self._state.streams, start)
        for name, size in self._kept.items():  # afterwards: no episode begins with an action of the expert
            start.variables[name] = torch.zeros(env_ids.numel(), size, device=env_ids.device)
        return start

    def begin_where(self, done: Tensor, drawn: Drawn) -> None:
        """Start the sampled episodes where ``done`` ``[num_envs]`` is set."""
        state, (start, streams) = self._state, drawn
        if state.domain.active:
            streams = state.domain.apply_where(done, state.streams, streams, start)
        state.physics.set_where(done, start.qpos, start.qvel, start.poses)
        copy_where(done, streams, state.streams.state)
        for name, value in start.variables.items():
            copy_where(done, value, self._task.variables[name])
        state.step.masked_fill_(done, 0)


def _select(tree: Any, env_ids: Tensor) -> Any:
    if isinstance(tree, dict):
        return {key: _select(value, env_ids) for key, value in tree.items()}
    return tree.index_select(0, env_ids)


def _assign(tree: dict[str, Any], env_ids: Tensor, rows: dict[str, Any]) -> None:
    for key, value in rows.items():
        if isinstance(value, dict):
            _assign(tree[key], env_ids, value)
        else:
            tree[key].index_copy_(0, env_ids, value)
