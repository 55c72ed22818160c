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
"""Number of demonstrations; they do not depend on the seed, the device and the number of envs."""
STEPS, LONGEST = 200, 1000
"""Maximum length of a demonstration: that of an episode, but within these bounds."""
LEAST_LEFT = 0.1
"""Fraction of the time limit that remains for an episode that starts right before success."""
HEAD_START = "head_start"
"""The task variable that counts as steps already taken towards the time limit, int64 ``[num_envs]``."""


@dataclass(frozen=True)
class Demonstrations:
    """All states of successful demonstrations up to the last one before success."""

    states: ResetState
    """``[num_states, ...]``: one demonstration after the other, each in order."""
    lengths: Tensor
    """Number of states of each demonstration, at least one, int64."""

    def to(self, device: torch.device) -> "Demonstrations":
        """Return them on a device."""
        return Demonstrations(_combine(lambda parts: parts[0].to(device), [self.states]), self.lengths.to(device))


class DemonstrationStarts:
    """Replaces a fraction of reset states by random states of demonstrations.

    States shortly before success are the most likely: the last stage of a task, such as letting go, may take an expert
    two steps of eighty, and all others are worth nothing without it. A state's distance to success, as a fraction of
    its demonstration, is the square of a uniform number.

    The time limit shrinks with that distance. Otherwise, a policy that misses the last stage would spend all the time
    in states that it knows well, and would seldom start there again.
    """

    def __init__(self, demonstrations: Demonstrations, fraction: float, time_limit: int) -> None:
        self._states, self._fraction = demonstrations.states, fraction
        self._skipped = (1.0 - LEAST_LEFT) * time_limit
        self._lengths, self._ends = demonstrations.lengths, demonstrations.lengths.cumsum(0)
        self._channel = channel("demonstration_starts", self._ends.device)

    def replace(self, env_ids: Tensor, streams: RandomStreams, start: ResetState) -> None:
        """Replace rows of ``start``, the sampled states of these envs; depends on the seeds of their episodes only."""
        chance, which, ahead = streams.of(env_ids, self._channel, 0, 3).unbind(1)
        episode = (which * self._ends.numel()).long()
        distance = ahead.square()
        index = self._ends[episode] - 1 - (distance * self._lengths[episode]).long()
        chosen, states = chance < self._fraction, self._states
        start.qpos = _pick(chosen, states.qpos, index, start.qpos)
        start.qvel = _pick(chosen, states.qvel, index, start.qvel)
        for known, sampled in ((states.variables, start.variables), (states.poses, start.poses)):
            for name in sampled.keys() & known.keys():
                sampled[name] = _pick(chosen, known[name], index, sampled[name])
        start.variables[HEAD_START] = torch.where(chosen, ((1.0 - distance) * self._skipped).long(), 0)
        start.demonstrated = chosen


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
    begin: Callable[[Tensor], tuple[ResetState, Tensor]]
    """Starts the episodes with these seeds in all envs; returns their first states, and where they are solved."""
    step: Callable[[], tuple[Tensor, Tensor]]
    """Takes one step of the expert in all envs; returns where the task is solved now, and where the episode failed."""
    steps: int
    """Maximum length of a demonstration."""

    def record(self) -> Demonstrations | None:
        """Return one demonstration of every env that succeeds; ``None`` if none does."""
        num_envs, device = self.physics.num_envs, self.physics.device
        start, solved = self.begin(torch.arange(num_envs, device=device))
        poses = start.poses
        states = list[ResetState]()
        lengths = torch.zeros(num_envs, dtype=torch.int64, device=device)  # of those that have succeeded
        running = ~solved | solved.all()  # what is solved from the start demonstrates nothing
        while len(states) < self.steps and bool(running.any()):
            live = ResetState(self.physics.qpos, self.physics.qvel, self.variables, poses)
            states.append(_combine(lambda parts: parts[0].clone(), [live]))
            solved, failed = self.step()
            lengths[running & solved & ~failed] = len(states)
            running &= ~(solved | failed)
        kept = torch.arange(len(states), device=device) < lengths.unsqueeze(1)  # [num_envs, len(states)]
        found = _combine(lambda parts: torch.stack(tuple(parts), dim=1)[kept], states)
        lengths = lengths[lengths > 0]
        return Demonstrations(found, lengths) if lengths.numel() else None


def _combine(function: Callable[[Sequence[Tensor]], Tensor], states: Sequence[ResetState]) -> ResetState:
    """Return the states whose tensors are this function of the corresponding tensors of ``states``."""
    first = states[0]
    return ResetState(
        function([state.qpos for state in states]),
        function([state.qvel for state in states]),
        {name: function([state.variables[name] for state in states]) for name in first.variables},
        {name: function([state.poses[name] for state in states]) for name in first.poses},
    )
