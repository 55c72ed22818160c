"""How episodes begin: in some envs by index, as on the CPU, or by mask, as on a GPU, which waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mujoco
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.env_cfg import EventsCfg
from embodichain.envs.observations import Seen
from embodichain.envs.physics import Physics
from embodichain.envs.random import EPISODE, KEY, RandomStreams
from embodichain.envs.task import Start, Task
from embodichain.errors import ConfigError, EnvContractError

# MERGED domain: Domain randomisation: per-env friction and mass of the task's object, drawn when an episode starts.


_MASS_FIELDS = ("body_mass", "body_inertia")


class DomainRandomization:
    """Scales the object's friction and mass per env; does nothing, and costs nothing, unless configured."""

    def __init__(self, events: EventsCfg, physics: Physics, object_body: str | None) -> None:
        self._physics = physics
        self._friction, self._mass = events.randomize_friction, events.randomize_mass
        self.active = self._friction is not None or self._mass is not None
        if not self.active:
            return
        if object_body is None:
            raise ConfigError(
                "env.events: randomize_friction and randomize_mass need an object, and this task has none"
            )
        body = mujoco.mj_name2id(physics.model, int(mujoco.mjtObj.mjOBJ_BODY), object_body)
        first, count = int(physics.model.body_geomadr[body]), int(physics.model.body_geomnum[body])
        self._body, self._geoms = body, slice(first, first + count)
        names: tuple[str, ...] = ("geom_friction",) if self._friction is not None else ()
        names += _MASS_FIELDS if self._mass is not None else ()
        self._nominal = {name: physics.model_field(name)[0].clone() for name in names}

    def apply(self, env_ids: Tensor, streams: RandomStreams) -> None:
        """Draw new values for these envs."""
        if self._friction is not None:
            scale = streams.uniform(env_ids, 1, *self._friction.scale)
            friction = self._nominal["geom_friction"][self._geoms, 0] * scale
            self._write("geom_friction", env_ids, (self._geoms, 0), friction)
        if self._mass is not None:
            scale = streams.uniform(env_ids, 1, *self._mass.scale)
            self._write("body_mass", env_ids, (self._body,), self._nominal["body_mass"][self._body] * scale[:, 0])
            self._write("body_inertia", env_ids, (self._body,), self._nominal["body_inertia"][self._body] * scale)
            self._physics.refresh_model(env_ids)

    def apply_where(self, mask: Tensor, streams: RandomStreams, drawn: Tensor) -> Tensor:
        """Draw new values where ``mask`` ``[num_envs]`` holds, without waiting for the device.

        ``drawn`` is the state of the streams to draw from; what they are afterwards is returned.
        """
        before, fields = streams.state.clone(), self.state()
        env_ids = torch.arange(mask.shape[0], device=mask.device)
        streams.state.copy_(drawn)
        self.apply(env_ids, streams)
        after = streams.state.clone()
        streams.state.copy_(before)
        for name, old in fields.items():
            target = self._physics.model_field(name)
            target.copy_(torch.where(mask.view(-1, *([1] * (old.dim() - 1))), target, old))
        if self._mass is not None:
            self._physics.refresh_model(env_ids)
        return after

    def state(self) -> dict[str, Tensor]:
        """Return the randomised model fields, ``[num_envs, ...]`` each."""
        return {name: self._physics.model_field(name).clone() for name in self._nominal} if self.active else {}

    def set_state(self, env_ids: Tensor, fields: dict[str, Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        for name, values in fields.items():
            self._physics.model_field(name)[env_ids] = values
        if self._mass is not None:
            self._physics.refresh_model(env_ids)

    def _write(self, name: str, env_ids: Tensor, index: tuple[int | slice, ...], values: Tensor) -> None:
        target = self._physics.model_field(name)
        rows = target[env_ids]
        rows[(slice(None), *index)] = values.to(rows.dtype)
        target[env_ids] = rows


# MERGED states: The whole state of a simulated environment by row, and whether a saved one fits.


@dataclass(frozen=True)
class LiveState:
    """Everything of an environment that changes while it simulates; the tensors are the environment's own."""

    physics: Physics
    streams: RandomStreams
    step: Tensor
    """Steps taken in the present episodes, ``[num_envs]``."""
    variables: dict[str, Tensor]
    """The task's own values, such as goals, ``[num_envs, ...]``."""
    domain: DomainRandomization

    def read(self) -> dict[str, Any]:
        """Return copies of all rows, nested by name."""
        return {
            "physics": self.physics.state(),
            "streams": self.streams.state.clone(),
            "step": self.step.clone(),
            "variables": {name: value.clone() for name, value in self.variables.items()},
            "model": self.domain.state(),
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


def check_state(state: Any, template: TensorDictBase, count: int) -> None:
    """Raise ``EnvContractError`` unless ``state`` has ``count`` rows of what ``template`` has."""
    if not isinstance(state, TensorDictBase):
        raise EnvContractError(
            f"set_state: expected a TensorDict that get_state() returned, got {type(state).__name__}"
        )
    if tuple(state.batch_size) != (count,):
        raise EnvContractError(f"set_state: expected one row per env, [{count}], got {list(state.batch_size)}")
    wanted, came = _leaves(template), _leaves(state)
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


def _leaves(state: TensorDictBase) -> dict[str, Tensor]:
    items = state.items(include_nested=True, leaves_only=True)
    return {"/".join(key) if isinstance(key, tuple) else key: value for key, value in items}


# MERGED starts: Starts drawn ahead: the beginnings of many envs' next episodes in one go, kept until they are needed.
#
# How an episode begins follows from its random stream alone, and one start takes nearly as long to draw and to observe
# as
# a hundred. At 64 envs, where more than every second step ends an episode, doing them one by one took as long as
# everything else outside the physics.


class StartStore:
    """Keeps one start per env, with what is observed in it; those that were used are replaced together."""

    def __init__(self, live: LiveState, begin: Callable[[Tensor], Seen]) -> None:
        """``begin`` starts the next episode in some envs and returns what is then observed in them."""
        self._live, self._begin = live, begin
        self._drawn_from = torch.full((live.step.shape[0], 2), -1, dtype=torch.int64)
        self._rows: dict[str, Any] = {}
        self._seen: Seen | None = None

    def enter(self, env_ids: Tensor) -> Seen:
        """Start the next episode in these envs and return what is observed in them."""
        origins = self._origins().index_select(0, env_ids)
        if self._seen is None or not torch.equal(self._drawn_from.index_select(0, env_ids), origins):
            self._seen = self._draw()
        self._live.write(env_ids, _select(self._rows, env_ids))
        return self._seen.rows(env_ids)

    def refill(self) -> None:
        """Draw what was used, now that nobody waits for it."""
        if not torch.equal(self._drawn_from, self._origins()):
            self._seen = self._draw()

    def _origins(self) -> Tensor:
        """What the next episode of each env follows from, ``[num_envs, 2]``."""
        return self._live.streams.state[:, KEY : EPISODE + 1]

    def _draw(self) -> Seen:
        """Draw the starts that are missing or used, leave the envs as they were, and return what all would observe."""
        origins, everything = self._origins(), self._live.read()
        used = torch.nonzero((self._drawn_from != origins).any(dim=1)).reshape(-1)
        try:
            seen = self._begin(used)
            rows = _select(self._live.read(), used)
        finally:
            self._live.write(used, _select(everything, used))
        self._drawn_from[used] = origins[used]
        if self._seen is None:
            self._rows = rows
            return seen
        _assign(self._rows, used, rows)
        return self._seen.with_rows(seen, used)


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


Drawn = tuple[Start, Tensor]
"""The next start of every env, and the random streams as they are once it is drawn."""


class Restarts:
    """Draws how episodes start and puts that into the simulation."""

    def __init__(self, task: Task, live: LiveState, observe: Callable[[Tensor], Seen]) -> None:
        """``observe`` returns what is seen in some envs as they are."""
        self._task, self._live, self._observe = task, live, observe
        self._all = torch.arange(live.physics.num_envs, device=live.physics.device)
        self._store = StartStore(live, self._begin_and_observe)

    def begin(self, env_ids: Tensor, episodes: Tensor | None = None) -> None:
        """Start the next episode in each of these envs, or the ones of these episode seeds."""
        live, variables = self._live, self._task.variables
        live.streams.next_episode(env_ids, episodes)
        start = self._task.sample_start(env_ids, live.streams)
        live.physics.set(env_ids, start.qpos, start.qvel)
        if live.domain.active:
            live.domain.apply(env_ids, live.streams)
        for name, value in start.variables.items():
            if name not in variables:  # the first start, of all envs, tells shapes and types
                variables[name] = torch.empty_like(value)
            variables[name][env_ids] = value
        live.step[env_ids] = 0

    def at(self, env_ids: Tensor) -> Seen:
        """Start the next episode in each of these envs, drawn ahead, and return what is seen in them."""
        return self._store.enter(env_ids)

    def prepare(self) -> None:
        """Draw the starts that were used since the last time."""
        self._store.refill()

    def draw(self) -> Drawn:
        """Draw the next start of every env and leave the streams as they are.

        Finding out which envs need one would mean to wait for the device.
        """
        streams = self._live.streams
        before = streams.state.clone()
        streams.next_episode(self._all)
        start = self._task.sample_start(self._all, streams)
        after = streams.state.clone()
        streams.state.copy_(before)
        return start, after

    def where(self, done: Tensor, drawn: Drawn) -> None:
        """Start what was drawn in the envs where ``done`` ``[num_envs]`` holds."""
        live, (start, streams) = self._live, drawn
        live.physics.set_where(done, start.qpos, start.qvel)
        if live.domain.active:
            streams = live.domain.apply_where(done, live.streams, streams)
        live.streams.state.copy_(torch.where(done.unsqueeze(1), streams, live.streams.state))
        for name, value in start.variables.items():
            mask = done.view(-1, *([1] * (value.dim() - 1)))
            self._task.variables[name].copy_(torch.where(mask, value, self._task.variables[name]))
        live.step.masked_fill_(done, 0)

    def _begin_and_observe(self, env_ids: Tensor) -> Seen:
        self.begin(env_ids)
        return self._observe(env_ids)
