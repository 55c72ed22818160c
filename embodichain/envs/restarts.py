"""How episodes begin: in some envs by index, as on the CPU, or by mask, as on a GPU, which waits for nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodichain.envs.observations import Seen
from embodichain.envs.starts import StartStore
from embodichain.envs.states import LiveState
from embodichain.envs.task import Start, Task

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
