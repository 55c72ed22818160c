"""Episodes that start from states of demonstrations, so that all stages of a task are practised from the beginning.

A policy that explores from the initial state alone learns a task of several stages one stage after the other. If a
fraction of the episodes starts where an expert has been, the policy learns them at the same time (reference state
initialisation: Peng et al. 2018, arXiv 1804.02717; demonstration resets: Nair et al. 2018, arXiv 1709.10089).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams, channel
from embodichain.envs.task import ResetState

EPISODES = 256
"""Number of demonstrations; they do not depend on the seed and the number of envs."""
STEPS = 200
"""Maximum length of a demonstration, whatever the time limit of episodes."""


class DemonstrationStarts:
    """Replaces a fraction of reset states by random states of demonstrations."""

    def __init__(self, states: ResetState, fraction: float) -> None:
        """``states`` are those of demonstrations, ``[num_states, ...]``."""
        self._states, self._fraction, self._count = states, fraction, states.qpos.shape[0]
        self._channel = channel("demonstration_starts", states.qpos.device)

    def replace(self, env_ids: Tensor, streams: RandomStreams, start: ResetState) -> None:
        """Replace rows of ``start``, the sampled states of these envs; depends on the seeds of their episodes only."""
        chance, place = streams.of(env_ids, self._channel, 0, 2).unbind(1)
        chosen, index, states = chance < self._fraction, (place * self._count).long(), self._states
        start.qpos = _pick(chosen, states.qpos, index, start.qpos)
        start.qvel = _pick(chosen, states.qvel, index, start.qvel)
        for known, sampled in ((states.variables, start.variables), (states.poses, start.poses)):
            for name, values in known.items():
                sampled[name] = _pick(chosen, values, index, sampled[name])


def _pick(chosen: Tensor, states: Tensor, index: Tensor, others: Tensor) -> Tensor:
    """Return ``states[index]`` where ``chosen`` ``[n]`` is true, else ``others`` ``[n, ...]``."""
    picked = states.index_select(0, index).to(others.dtype)
    return torch.where(chosen.view(-1, *[1] * (others.dim() - 1)), picked, others)


@dataclass(frozen=True)
class Demonstrator:
    """How an environment demonstrates its task: starts episodes, and lets the expert act."""

    physics: Physics
    variables: dict[str, Tensor]
    """Task variables, live, ``[num_envs, ...]``."""
    begin: Callable[[Tensor], ResetState]
    """Starts the episodes with these seeds in all envs, and returns their first states."""
    step: Callable[[], Tensor | None]
    """Takes one step of the expert in all envs; returns where the task is solved now, bool ``[num_envs]``."""

    def record(self) -> ResetState | None:
        """Return all states of successful demonstrations, in order, up to the last before success; ``None`` if none."""
        device, num_envs = self.physics.device, self.physics.num_envs
        rounds = []
        for first in range(0, EPISODES, num_envs):
            start = self.begin(first + torch.arange(num_envs, device=device))
            rounds.append(self._episodes(start.poses, min(num_envs, EPISODES - first)))
        found = _combine(lambda parts: torch.cat(tuple(parts)), rounds)
        return found if found.qpos.shape[0] else None

    def _episodes(self, poses: dict[str, Tensor], count: int) -> ResetState:
        """Return the states of the first ``count`` envs, episode by episode, of those that succeed."""
        states: list[ResetState] = []
        solved_at = torch.full((count,), STEPS, device=self.physics.device)
        while len(states) < STEPS and bool((solved_at == STEPS).any()):
            live = ResetState(self.physics.qpos, self.physics.qvel, self.variables, poses)
            states.append(_combine(lambda parts: parts[0][:count].clone(), [live]))
            solved = self.step()
            if solved is not None:
                solved_at = torch.where(solved[:count] & (solved_at == STEPS), len(states), solved_at)
        order = torch.arange(len(states), device=solved_at.device)
        kept = (order < solved_at.unsqueeze(1)) & (solved_at < STEPS).unsqueeze(1)  # [count, len(states)]
        return _combine(lambda parts: torch.stack(tuple(parts), dim=1)[kept], states)


def _combine(function: Callable[[Sequence[Tensor]], Tensor], states: Sequence[ResetState]) -> ResetState:
    """Return the states whose tensors are this function of the corresponding tensors of ``states``."""
    first = states[0]
    return ResetState(
        function([state.qpos for state in states]),
        function([state.qvel for state in states]),
        {name: function([state.variables[name] for state in states]) for name in first.variables},
        {name: function([state.poses[name] for state in states]) for name in first.poses},
    )
