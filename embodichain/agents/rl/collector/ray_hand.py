"""One collecting process in a Ray cluster, seen from the learner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from embodichain.agents.rl.collector.background.loop import Ticket
from embodichain.agents.rl.collector.ray_collect import POLL_SECONDS
from embodichain.agents.rl.collector.ray_link import Event
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.extras import require
from embodichain.utils.tensor_tree import encode


@dataclass
class Hand:
    """A worker, what it is doing, and what is awaited from it."""

    index: int
    actor: Any
    learner: str
    """Who this side is, for workers that may have heard of others."""
    restarts: int = 0
    """How often it was replaced through a fault of its own."""
    found: bool = False
    """Whether it was there before."""
    mine: bool = True
    """Whether it may be ended: one that was found may be somebody else's, until it says otherwise."""
    node: str = ""
    node_id: str | None = None
    pid: int = 0
    claimed: bool = False
    """Whether it has agreed to work for this side."""
    claimed_at: float = 0.0
    ready: bool = False
    doubted: bool = False
    """Whether Ray could not reach it and does not know yet what has become of it."""
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
    _orders: dict[Any, float] = field(default_factory=dict)
    """Orders that it has not followed yet, and when they were given."""

    def __str__(self) -> str:
        return f"worker {self.index} (process {self.pid} on {self.node})" if self.node else f"worker {self.index}"

    @property
    def idle(self) -> bool:
        """Whether it can collect a rollout now."""
        return self.ready and self.ticket is None and not self.abandoning and time.monotonic() >= self.rests_until

    @property
    def oldest_order(self) -> float:
        """Age of the order that has waited longest, in seconds."""
        return time.monotonic() - min(self._orders.values()) if self._orders else 0.0

    def pending(self) -> Iterator[Any]:
        """Return everything that it owes an answer to; one that fails is no less important than one that brings."""
        yield self.awaited
        yield from self._orders

    def await_(self, answer: Any) -> None:
        """Await an answer; a worker that is in doubt has been silent since before."""
        self.awaited, self.asked_at = answer, self.asked_at if self.doubted else time.monotonic()

    def followed(self, order: Any) -> None:
        """Note that an order has been followed."""
        self._orders.pop(order, None)

    def listen(self) -> None:
        """Await what the worker tells next."""
        self.await_(self.actor.events.options(concurrency_group="events").remote(self.learner, POLL_SECONDS))

    def build(self, *job: Any) -> None:
        """Let it build its environment."""
        self._orders[self.actor.build.remote(self.learner, *job)] = time.monotonic()

    def send_weights(self, snapshot: WeightSnapshot, stored: Any) -> None:
        """Give it weights, which lie in the object store."""
        self._order("weights", snapshot.version, snapshot.digest, stored)

    def give(self, ticket: Ticket, deadline: int) -> None:
        """Let it collect a rollout."""
        random = None
        if ticket.random is not None:
            words, block = encode(ticket.random)
            random = (words, block.numpy())
        self.ticket, self.deadline, self.began = ticket, deadline, time.monotonic()
        self._order("ticket", ticket.number, ticket.version, random)

    def abandon(self) -> None:
        """Break off what it is collecting."""
        self.ticket, self.abandoning = None, True
        self._order("abandon")

    def doubt(self) -> None:
        """Note that it may be gone: whatever it was at is given up."""
        self.ready, self.ticket, self.abandoning, self.doubted = False, None, False, True
        self._orders.clear()

    def agreed(self, first_order: int) -> None:
        """Note that it follows orders, which are counted from ``first_order`` on."""
        self.mine = self.claimed = True
        self.doubted, self.claimed_at, self._sequence = False, time.monotonic(), first_order
        self.listen()

    def placed(self, event: Event) -> None:
        """Note where it is, after it was asked to work here."""
        self.node, self.node_id, self.pid = event["node"], event["node_id"], event["pid"]

    def kill(self) -> None:
        """End it, unless it may be somebody else's."""
        if self.mine:
            require("ray", extra="ray").kill(self.actor, no_restart=True)

    def _order(self, kind: str, *content: Any) -> None:
        order = self.actor.order.options(concurrency_group="orders")
        self._orders[order.remote(self.learner, self._sequence, kind, *content)] = time.monotonic()
        self._sequence += 1
