"""One collecting process in a Ray cluster, seen from the learner."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodichain.agents.rl.collector.background.loop import Ticket
from embodichain.agents.rl.collector.background.parcel import pack_into
from embodichain.agents.rl.collector.ray_collect import ArrayMemory, Event
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.extras import require

POLL_SECONDS = 1.0
"""How long a process waits for something to tell before it shows a mere sign of life."""


@dataclass
class Hand:
    """A worker, what it is doing, and what is awaited from it."""

    index: int
    actor: Any
    restarts: int = 0
    """How often it was replaced through a fault of its own."""
    node: str = ""
    node_id: str | None = None
    pid: int = 0
    ready: bool = False
    awaited: Any = None
    """The answer that comes next."""
    asked_at: float = field(default_factory=time.monotonic)
    ticket: Ticket | None = None
    """The rollout it is collecting."""
    deadline: int = 0
    """The last number that this rollout can have."""
    began: float = 0.0
    abandoning: bool = False
    rests_until: float = 0.0
    """A worker that was too slow pauses, before it is asked again."""
    delays: int = 0
    """How often it was too slow since it last was not."""
    acknowledged: dict[int, int] = field(default_factory=dict)
    """Hashes of the weights it has adopted, by version."""
    _sequence: int = 0

    @property
    def idle(self) -> bool:
        """Whether it can collect a rollout now."""
        return self.ready and self.ticket is None and not self.abandoning and time.monotonic() >= self.rests_until

    def await_(self, answer: Any) -> None:
        """Await an answer."""
        self.awaited, self.asked_at = answer, time.monotonic()

    def listen(self) -> None:
        """Await what the worker tells next."""
        self.await_(self.actor.events.options(concurrency_group="events").remote(POLL_SECONDS))

    def send_weights(self, snapshot: WeightSnapshot, stored: Any) -> None:
        """Give it weights, which lie in the object store."""
        self._order("weights", snapshot.version, snapshot.digest, stored)

    def give(self, ticket: Ticket, deadline: int) -> None:
        """Let it collect a rollout."""
        random = None
        if ticket.random is not None:
            words, memory = pack_into(ticket.random, ArrayMemory.create)
            random = (words, memory.array)
        self.ticket, self.deadline, self.began = ticket, deadline, time.monotonic()
        self._order("ticket", ticket.number, ticket.version, random)

    def abandon(self) -> Ticket | None:
        """Break off what it is collecting; return the ticket."""
        ticket, self.ticket, self.abandoning = self.ticket, None, True
        self._order("abandon")
        return ticket

    def opened(self, event: Event) -> None:
        """Note that it follows orders, from the first one on."""
        self.ready, self._sequence = True, 0
        self.listen()

    def kill(self) -> None:
        """End it."""
        require("ray", extra="ray").kill(self.actor, no_restart=True)

    def _order(self, kind: str, *content: Any) -> None:
        order = self.actor.order.options(concurrency_group="orders")
        order.remote(self._sequence, kind, *content)
        self._sequence += 1


def store_weights(snapshot: WeightSnapshot) -> Any:
    """Put weights into the object store, once for all workers; each node fetches them once."""
    data: np.ndarray[Any, Any] = snapshot.data.cpu().numpy()
    return require("ray", extra="ray").put(data)
