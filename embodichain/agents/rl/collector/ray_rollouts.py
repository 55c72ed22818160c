"""Which rollouts the workers of a cluster are to collect, which have arrived, and which number each becomes."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace

from embodichain.agents.rl.collector.background.loop import Delivery, Ticket
from embodichain.agents.rl.collector.ray_hand import Hand
from embodichain.agents.rl.collector.ray_order import choose

log = logging.getLogger("embodichain.collector")


class Rollouts:
    """Tickets on their way to workers, and what came of them."""

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()
        self._highest = self._next = -1
        """The highest number of a ticket so far, and the number that the next rollout becomes."""
        self._arrived: dict[int, tuple[int, Delivery]] = {}
        self._chosen = -1
        self._durations: deque[float] = deque(maxlen=16)

    def add(self, ticket: Ticket) -> None:
        """Have one more rollout collected."""
        self._tickets.append(ticket)
        self._highest = max(self._highest, ticket.number)
        self._next = ticket.number if self._next < 0 else self._next

    def give_back(self, ticket: Ticket | None) -> None:
        """Have a rollout collected by somebody else, before all others."""
        if ticket is not None:
            self._tickets.appendleft(ticket)

    def assign(self, hands: Collection[Hand]) -> None:
        """Give tickets to idle workers, the quickest first."""
        for hand in sorted(hands, key=lambda hand: hand.delays):
            if self._tickets and hand.idle:
                hand.give(self._tickets.popleft(), self._highest)

    def arrive(self, hand: Hand, delivery: Delivery) -> None:
        """Take what a worker has collected."""
        self._durations.append(time.monotonic() - hand.began)
        self._arrived[delivery.number] = (hand.deadline, delivery)
        hand.ticket, hand.delays = None, 0

    def next_one(self, hands: Collection[Hand]) -> Delivery | None:
        """Return what can be learned from next, under its number; ``None`` if something else would become too old."""
        running = [hand.deadline for hand in hands if hand.ticket is not None]
        chosen = choose({key: deadline for key, (deadline, _) in self._arrived.items()}, running, self._next)
        if chosen is None:
            return None
        self._chosen = chosen
        return replace(self._arrived[chosen][1], number=self._next)

    def handed_over(self) -> None:
        """Note that the learner has what ``next_one`` returned."""
        del self._arrived[self._chosen]
        self._next += 1

    def break_off_straggler(self, hands: Collection[Hand], patience: float) -> None:
        """Give the rollout that all others have waited for longer than ``patience`` times the usual to another one."""
        slow = min((hand for hand in hands if hand.ticket), key=lambda hand: hand.deadline, default=None)
        if slow is None or not self._arrived or not self._durations:
            return
        taken, usual = time.monotonic() - slow.began, statistics.median(self._durations)
        if taken < patience * usual:
            return
        words = "worker %d on %s has collected for %.1f s, others take %.1f s: its rollout is given to another"
        log.warning(words, slow.index, slow.node, taken, usual)
        self.give_back(slow.ticket)
        slow.abandon()
        slow.delays += 1
        slow.rests_until = time.monotonic() + patience * usual * 2**slow.delays
