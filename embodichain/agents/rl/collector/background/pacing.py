"""How far a collector may run ahead of its learner.

A rollout is collected when there is a ticket for it. Ticket ``k`` is issued once ``k - settled <= max_policy_lag``,
where ``settled`` counts the rollouts that the learner has finished learning from. Learning from one rollout makes one
new version of the policy, so rollout ``k`` is consumed at most ``max_policy_lag`` versions after its ticket was issued,
and the collector uses weights of that moment or newer ones: no transition is older than the bound, and none is thrown
away for being so.
"""

from __future__ import annotations

from embodichain.agents.rl.collector.background.loop import Ticket


class Pacing:
    """Issues tickets for rollouts, in order."""

    def __init__(self, max_policy_lag: int, capacity: int, first: int = 0) -> None:
        """Begin with rollout ``first``; at most ``capacity`` rollouts are waiting or under way at any time."""
        self.max_policy_lag, self.capacity = max_policy_lag, capacity
        self.settled = self.taken = self.next = first

    def issue(self, version: int) -> list[Ticket]:
        """Return the tickets that have become possible, stamped with the latest version of the weights."""
        last = min(self.settled + self.max_policy_lag, self.taken + self.capacity - 1)
        tickets = [Ticket(number, version) for number in range(self.next, last + 1)]
        self.next = max(self.next, last + 1)
        return tickets
