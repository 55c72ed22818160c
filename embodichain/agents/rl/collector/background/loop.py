"""What an asynchronous collector does in the background, be it in a thread or in a process.

It waits for a ticket, adopts weights, collects one rollout, delivers it, and begins again. Everything it is told
arrives as an order, and it looks for orders between two environment steps. So it can be paused, stopped and given new
weights there, and nowhere else.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from tensordict import TensorDict, TensorDictBase

from embodichain.agents.rl.collector.background.station import Station
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.agents.rl.utils.random_state import get_random_state, set_random_state
from embodichain.errors import WeightsError


@dataclass(frozen=True)
class Ticket:
    """The permission to collect a rollout."""

    number: int
    """Number of the rollout; they are collected in this order."""
    version: int
    """Latest weights when it was issued; with ``lockstep`` the ones to use."""
    random: dict[str, Any] | None = None
    """Random state to go on from, where collector and learner are to share one although they are two processes."""


@dataclass(frozen=True)
class NewWeights:
    """The learner has published weights."""

    snapshot: WeightSnapshot


@dataclass(frozen=True)
class Command:
    """``pause`` stands still after the present step; ``save`` finishes the rollout, reports its state and stands still;
    ``resume`` goes on; ``stop`` ends.
    """

    name: Literal["pause", "save", "resume", "stop"]


Order = Ticket | NewWeights | Command


@dataclass(frozen=True)
class Delivery:
    """A rollout and what is to be known about it."""

    number: int
    rollout: TensorDictBase
    """``[num_envs, num_steps]``; it belongs to whoever gets it."""
    statistics: dict[str, float]
    episodes: TensorDict
    """``return`` and ``length`` of the episodes that ended in it."""
    seconds: float
    """Time it took to collect."""
    waited: float
    """Time that was spent waiting for its ticket before."""
    random: dict[str, Any] | None = None
    """Random state to go on from, if the ticket brought one."""
    ready: torch.cuda.Event | None = field(default=None, compare=False)
    """On a GPU: when the rollout is complete."""

    def content(self) -> dict[str, Any]:
        """Return what another process is sent."""
        return {
            "steps": self.rollout.transpose(0, 1),  # in the order in which it lies in memory
            "episodes": self.episodes,
            "statistics": self.statistics,
            "seconds": self.seconds,
            "waited": self.waited,
            "random": self.random,
        }

    @staticmethod
    def of(number: int, content: dict[str, Any]) -> Delivery:
        """Return what another process sent."""
        parts = dict(content)
        return Delivery(number, parts.pop("steps").transpose(0, 1), **parts)


class Link(Protocol):
    """The connection of the loop with the learner."""

    def receive(self, timeout: float | None) -> Order | None:
        """Return the next order, waiting for it at most so long."""

    def beat(self, working: bool) -> None:
        """Show a sign of life: a step begins, or there is nothing to do."""

    def adopted(self, version: int, digest: int | None) -> None:
        """Acknowledge weights."""

    def deliver(self, delivery: Delivery) -> None:
        """Hand over a rollout."""

    def standing(self, state: dict[str, Any] | None) -> None:
        """Report that nothing moves until further notice, after ``save`` with the state."""


class Stopped(Exception):  # noqa: N818 - it is no error
    """Somebody asked the loop to end."""


class CollectionLoop:
    """Collects rollouts by tickets, one after the other."""

    def __init__(self, station: Station, link: Link, num_steps: int) -> None:
        self.station, self.link, self.num_steps, self.adopt = station, link, num_steps, station.cfg.adopt
        self.collector = station.collector
        if station.copy.has_weights:
            self.collector.record_policy()
        self.collector.before_step = self._between_steps
        device = self.collector.device
        # Its kernels come first: they are short, and simulation waits for them, while those of an update are long.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._tickets: deque[Ticket] = deque()
        self._snapshots: dict[int, WeightSnapshot] = {}
        self._in_use: int | None = None
        self._standing = False
        self._save_asked = False

    def run(self) -> None:
        """Collect until told to stop."""
        stream: AbstractContextManager[Any] = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with stream:
                while True:
                    self._collect_one()
        except Stopped:
            return
        finally:
            self.link.beat(working=False)

    def _collect_one(self) -> None:
        began = time.monotonic()
        ticket = self._next_ticket()
        ticketed = time.monotonic()
        self.link.beat(working=True)
        self._adopt(ticket.version if self.adopt == "lockstep" else max(self._snapshots))
        if ticket.random is not None:
            set_random_state(ticket.random)
        self.collector.buffer = None  # a rollout belongs to whoever gets it: the next one is written elsewhere
        rollout = self.collector.collect(self.num_steps)
        delivery = Delivery(
            ticket.number,
            rollout,
            self.collector.statistics(),
            self.collector.episodes,
            seconds=time.monotonic() - ticketed,
            waited=ticketed - began,
            random=get_random_state() if ticket.random is not None else None,
            ready=None if self._stream is None else self._stream.record_event(),
        )
        self.link.beat(working=False)
        self.link.deliver(delivery)

    def _next_ticket(self) -> Ticket:
        """Wait for a ticket; this is where the loop can be saved."""
        while True:
            while (order := self.link.receive(0.0)) is not None:
                self._take(order)
            if self._save_asked:
                self._save_asked = False
                self._stand(self.station.state([(ticket.number, ticket.version) for ticket in self._tickets]))
            elif self._standing:
                self._stand(None)
            elif self._tickets:
                return self._tickets.popleft()
            else:
                self._take(self.link.receive(None))

    def _between_steps(self) -> None:
        """Follow orders between two steps of a rollout."""
        while (order := self.link.receive(0.0)) is not None:
            self._take(order)
        if self._standing:
            self._stand(None)
        self.link.beat(working=True)
        if self.adopt == "step":
            self._adopt(max(self._snapshots))

    def _stand(self, state: dict[str, Any] | None) -> None:
        """Do nothing until told to go on."""
        self._standing = True
        self.link.beat(working=False)
        self.link.standing(state)
        while self._standing:
            self._take(self.link.receive(None))

    def _take(self, order: Order | None) -> None:
        if isinstance(order, Ticket):
            self._tickets.append(order)
        elif isinstance(order, NewWeights):
            if self.adopt != "lockstep":
                self._snapshots.clear()
            self._snapshots[order.snapshot.version] = order.snapshot
        elif order is not None:
            if order.name == "stop":
                raise Stopped
            self._standing = order.name == "pause"
            self._save_asked = order.name == "save"

    def _adopt(self, version: int) -> None:
        """Use these weights from now on, and say so."""
        if self._in_use is not None and version <= self._in_use:
            return
        if version not in self._snapshots:
            raise WeightsError(f"version {version} is wanted, but {sorted(self._snapshots)} arrived")
        self._in_use, digest = self.station.copy.adopt(self._snapshots[version])
        self.link.adopted(self._in_use, digest)
        self.collector.record_policy()  # if that had to wait for weights
        for old in [v for v in self._snapshots if v < version]:
            del self._snapshots[old]
