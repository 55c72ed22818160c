"""State by row, and resets: by index on the CPU, by mask on a GPU, without waiting for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.curricula import Curricula
from embodichain.envs.observations import PackedObservation
from embodichain.envs.physics import Physics
from embodichain.envs.random import EPISODE, KEY, RandomStreams
from embodichain.envs.randomization import DomainRandomization
from embodichain.envs.task import ResetState, Task
from embodichain.errors import EnvContractError

_CURRICULA = "curricula"


@dataclass(frozen=True)
class EnvState:
    """Everything of an environment that changes while it simulates; the tensors are the environment's own."""

    physics: Physics
    streams: RandomStreams
    step: Tensor
    """Steps taken in the current episodes, ``[num_envs]``."""
    variables: dict[str, Tensor]
    """The task's own values, such as goals, ``[num_envs, ...]``."""
    domain: DomainRandomization
    curricula: Curricula
    events: dict[str, Tensor]
    """Values of events, delays and the like, ``[num_envs, ...]``."""

    def read(self) -> dict[str, Any]:
        """Return copies of all rows, nested by name."""
        return {
            "physics": self.physics.state(),
            "streams": self.streams.state.clone(),
            "step": self.step.clone(),
            "variables": {name: value.clone() for name, value in self.variables.items()},
            "model": self.domain.state(),
            **({"events": {name: value.clone() for name, value in self.events.items()}} if self.events else {}),
            **({_CURRICULA: self.curricula.state()} if self.curricula.active else {}),
        }

    def write(self, env_ids: Tensor, rows: Any) -> None:
        """Put rows of what :meth:`read` returned, as a nested dict or TensorDict, into these envs."""
        self.physics.set_state(env_ids, rows["physics"])
        self.streams.state.index_copy_(0, env_ids, rows["streams"])
        self.step.index_copy_(0, env_ids, rows["step"])
        for name, value in self.variables.items():
            value.index_copy_(0, env_ids, rows["variables"][name])
        if self.domain.active:
            self.domain.set_state(env_ids, dict(rows["model"].items()))
        for name, value in self.events.items():
            value.index_copy_(0, env_ids, rows["events"][name])
        if _CURRICULA in rows.keys():  # noqa: SIM118 - of a TensorDict, the rows are what it iterates over
            self.curricula.set_state(env_ids, rows[_CURRICULA])


def check_state(state: Any, template: TensorDictBase, count: int) -> None:
    """Raise ``EnvContractError`` unless ``state`` has ``count`` rows of what ``template`` has."""
    if not isinstance(state, TensorDictBase):
        raise EnvContractError(
            f"set_state: expected a TensorDict that get_state() returned, got {type(state).__name__}"
        )
    if tuple(state.batch_size) != (count,):
        raise EnvContractError(f"set_state: expected one row per env, [{count}], got {list(state.batch_size)}")
    wanted, came = template.flatten_keys("/").to_dict(), state.flatten_keys("/").to_dict()
    problems = [f"{name} is missing" for name in wanted if name not in came]
    problems += [f"{name} is unknown here" for name in came if name not in wanted]
    for name in wanted.keys() & came.keys():
        want, got = wanted[name], came[name]
        if want.shape[1:] != got.shape[1:] or want.dtype != got.dtype:
            problems.append(
                f"{name} must be {want.dtype} {list(want.shape[1:])}, not {got.dtype} {list(got.shape[1:])}, per env"
            )
    if problems:
        raise EnvContractError(
            f"set_state: this state is of another task, robot or randomisation: {'; '.join(sorted(problems))}"
        )


Drawn = tuple[ResetState, Tensor]
"""The next reset state of every env, and the random streams after drawing it."""


class Resets:
    """Draws how episodes begin and puts that into the simulation.

    A reset state follows from its env's random stream alone, and drawing and observing one takes nearly as long as a
    hundred. So on the CPU those of all envs are drawn ahead, kept until they are needed, and replaced together.
    """

    def __init__(
        self,
        task: Task,
        state: EnvState,
        observe: Callable[[Tensor], PackedObservation],
        kept: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """``observe`` returns the observation of some envs in their present state; ``kept`` are the sizes of further
        variables, which are zero when an episode begins."""
        self._task, self._state, self._observe, self._kept = task, state, observe, kept
        self._all = torch.arange(state.physics.num_envs, device=state.physics.device)
        self._ahead: dict[str, Any] = {}
        self._ahead_obs: PackedObservation
        self._drawn_from = torch.full_like(self._origins(), -1)

    def begin(self, env_ids: Tensor, episodes: Tensor | None = None) -> None:
        """Begin the next episode in each of these envs, or the episodes of these seeds."""
        state, variables = self._state, self._task.variables
        state.streams.next_episode(env_ids, episodes)
        start = self._sample(env_ids)
        if state.domain.active:
            state.domain.apply(env_ids, state.streams, start)
        state.physics.set(env_ids, start.qpos, start.qvel, start.poses)
        for name, value in start.variables.items():
            if name not in variables:  # the first reset, of all envs, gives shapes and types
                variables[name] = torch.empty_like(value)
            variables[name][env_ids] = value
        state.step[env_ids] = 0

    def begin_drawn(self, env_ids: Tensor) -> PackedObservation:
        """Begin the next episode in each of these envs, drawn ahead, and return their observation."""
        self.draw_ahead(env_ids)
        self._state.write(env_ids, _select(self._ahead, env_ids))
        return self._ahead_obs.rows(env_ids)

    def draw_ahead(self, env_ids: Tensor | None = None) -> None:
        """Draw again what was used in any env, if it was in these (default: all); the envs stay as they are."""
        origins = self._origins()
        rows = slice(None) if env_ids is None else env_ids.numpy()
        if np.array_equal(self._drawn_from.numpy()[rows], origins.numpy()[rows]):  # nearly always
            return
        outdated = (self._drawn_from != origins).any(dim=1)
        used, everything = outdated.nonzero().view(-1), self._state.read()
        try:
            self.begin(used)
            obs, drawn = self._observe(used), _select(self._state.read(), used)
            drawn.pop(_CURRICULA, None)  # goes on until the episode begins
        finally:
            self._state.write(used, _select(everything, used))
        self._drawn_from[used] = origins[used]
        if self._ahead:
            _assign(self._ahead, used, drawn)
            self._ahead_obs = self._ahead_obs.with_rows(obs, used)
        else:
            self._ahead, self._ahead_obs = drawn, obs

    def _origins(self) -> Tensor:
        """Return what the next episode of each env follows from, int64 ``[num_envs, k]``."""
        origins = self._state.streams.state[:, KEY : EPISODE + 1]
        curricula = self._state.curricula
        return torch.cat((origins, curricula.origin()), dim=1) if curricula.active else origins

    def draw(self) -> Drawn:
        """Draw the next reset state of every env (choosing some would wait for the device); leave the streams as is."""
        streams = self._state.streams
        before = streams.state.clone()
        streams.next_episode(self._all)
        start = self._sample(self._all)
        after = streams.state.clone()
        streams.state.copy_(before)
        return start, after

    def _sample(self, env_ids: Tensor) -> ResetState:
        start = self._task.sample_start(env_ids, self._state.streams)
        for name, size in self._kept.items():
            start.variables[name] = torch.zeros(env_ids.numel(), size, device=env_ids.device)
        return start

    def begin_where(self, done: Tensor, drawn: Drawn) -> None:
        """Begin the episodes that were drawn in the envs where ``done`` ``[num_envs]`` holds."""
        state, (start, streams) = self._state, drawn
        if state.domain.active:
            streams = state.domain.apply_where(done, state.streams, streams, start)
        state.physics.set_where(done, start.qpos, start.qvel, start.poses)
        state.streams.state.copy_(torch.where(done.unsqueeze(1), streams, state.streams.state))
        for name, value in start.variables.items():
            target = self._task.variables[name]
            target.copy_(torch.where(_like(done, value), value, target))
        state.step.masked_fill_(done, 0)


def _like(mask: Tensor, value: Tensor) -> Tensor:
    """Return a mask ``[n]`` in a shape that broadcasts with ``value`` ``[n, ...]``."""
    return mask.view(-1, *[1] * (value.dim() - 1))


def _select(tree: Any, env_ids: Tensor) -> Any:
    if isinstance(tree, dict):
        return {key: _select(value, env_ids) for key, value in tree.items()}
    return tree.index_select(0, env_ids)


def _assign(tree: dict[str, Any], env_ids: Tensor, rows: dict[str, Any]) -> None:
    for key, value in rows.items():
        if isinstance(value, dict):
            _assign(tree[key], env_ids, value)
        else:
            tree[key][env_ids] = value
