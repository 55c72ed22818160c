"""The learner's side of an asynchronous collection: weights and tickets go out here, rollouts come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from embodichain.agents.rl.buffer.vla_buffer import VLABuffer
from embodichain.agents.rl.collector.background.loop import Delivery, NewWeights, Ticket
from embodichain.agents.rl.collector.background.pacing import Pacing
from embodichain.agents.rl.collector.background.worker import Worker
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.staleness import Staleness
from embodichain.agents.rl.collector.weights import WeightStore
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.random_state import get_random_state, set_random_state
from embodichain.errors import CollectorError

_NOTHING = TensorDict({"return": torch.zeros(0), "length": torch.zeros(0)}, batch_size=[0])
_SAVED = ("number", "statistics", "episodes", "seconds", "waited")


class Desk:
    """Publishes weights, issues tickets, and takes notes about rollouts until the learner takes them.

    Its methods are called by the learner's thread, which is between two updates then; ``on_...`` by the worker's.
    """

    def __init__(self, policy: Policy, buffer: VLABuffer, device: torch.device, cfg: AsyncCfg) -> None:
        self.policy, self.buffer, self.device, self.cfg = policy, buffer, device, cfg
        self.store = WeightStore(policy, cfg)
        self.worker: Worker | None = None
        self.episodes = _NOTHING
        """``return`` and ``length`` of the episodes that ended in the rollout that was taken last."""
        self.statistics: dict[str, float] = {}
        """Averages of that rollout, and how it came about."""
        self._staleness = Staleness(policy, cfg.max_policy_lag, cfg.kl_rows)
        self._pacing = Pacing(cfg.max_policy_lag, 0)
        self._notes: dict[int, Delivery] = {}
        self._waiting_tickets: Sequence[Sequence[int]] = ()

    def open(self, worker: Worker, capacity: int) -> None:
        """Let a worker begin; at most ``capacity`` rollouts are waiting or under way."""
        self.store.publish()
        self.worker, self.buffer.producer = worker, self
        self._pacing = Pacing(self.cfg.max_policy_lag, capacity, self.buffer.first)
        self._pacing.next = self.buffer.next
        for snapshot in self.store.kept():
            worker.send(NewWeights(snapshot))
        for number, version in self._waiting_tickets:  # of a run that is resumed
            worker.send(Ticket(number, version))
            self._pacing.next = number + 1
        self._waiting_tickets = ()
        if self.cfg.max_policy_lag > 0:  # without any lag nothing happens before the learner asks for a rollout
            self._issue()

    def close(self) -> Worker | None:
        """Return the worker, which gets no more orders from here."""
        worker, self.worker = self.worker, None
        if self.buffer.producer is self:
            self.buffer.producer = None
        return worker

    # --- out ------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Send new weights, and let the worker go on as far as the learner has come."""
        if self.worker is not None:
            self._publish()
            if self.cfg.max_policy_lag > 0:
                self._settle()

    def _publish(self) -> None:
        before = self.store.latest
        snapshot = self.store.publish()
        if snapshot is not before and self.worker is not None:
            self.worker.send(NewWeights(snapshot))

    def _settle(self) -> None:
        """Note that the learner is done with all it has taken, and issue what has become possible."""
        self._pacing.settled = self._pacing.taken = self.buffer.first
        self._issue()

    def _issue(self) -> None:
        if self.worker is None or self.store.latest is None:
            return
        shares_random = self.cfg.max_policy_lag == 0 and self.cfg.worker != "thread"
        for ticket in self._pacing.issue(self.store.latest.version):
            self.worker.send(replace(ticket, random=get_random_state() if shares_random else None))

    # --- in: what the buffer tells --------------------------------------------------------------------------------

    def before_get(self) -> None:
        """The learner is between two updates: publish what it has learned, and let the worker go on."""
        self.raise_failure()
        if self.store.is_new():
            self._publish()
        self._settle()

    def after_get(self, taken: Sequence[tuple[int, TensorDictBase]]) -> None:
        """Look at what was taken, and let the worker use the room."""
        for number, rollout in taken:
            note = self._notes.pop(number, None)
            if note is not None:
                self._look_at(note, rollout)
        first = self._pacing.taken = self.buffer.first
        for number in tuple(self._notes):  # the worker's thread may add to them meanwhile
            if number < first:  # it was cleared, or overwritten
                self._notes.pop(number)
        if self.cfg.max_policy_lag > 0:
            self._issue()

    def raise_failure(self) -> None:
        """Raise what keeps the worker from going on."""
        if self.worker is not None:
            self.worker.check()

    def _look_at(self, note: Delivery, rollout: TensorDictBase) -> None:
        if note.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(note.ready)
            for leaf in rollout.values(include_nested=True, leaves_only=True):
                leaf.record_stream(stream)
        if note.random is not None:
            set_random_state(note.random)
        age = self._staleness.measure(rollout)
        self.store.check_stamps(age.versions)
        self.store.forget_before(min(age.versions))
        self.episodes = note.episodes
        self.statistics = note.statistics | age.scalars()
        self.statistics |= {"time/rollout_seconds": note.seconds, "time/collector_wait_seconds": note.waited}
        worker = self.worker
        self.statistics["async/restarts"] = 0.0 if worker is None else float(worker.restarts)
        self.statistics["async/workers"] = 0.0 if worker is None else float(worker.num_workers)

    # --- in: what the worker tells --------------------------------------------------------------------------------

    def on_adopted(self, version: int, digest: int | None) -> None:
        """Check what the worker uses."""
        self.store.acknowledge(version, digest)

    def on_delivery(self, delivery: Delivery, timeout: float) -> None:
        """Put a rollout into the buffer."""
        self._notes[delivery.number] = replace(delivery, rollout=_NOTHING)
        number = self.buffer.add_rollout(delivery.rollout, timeout, copy=False)
        if number != delivery.number:
            raise CollectorError(
                f"rollout {delivery.number} became entry {number}: somebody else fills the buffer, too"
            )

    # --- saving ---------------------------------------------------------------------------------------------------

    def state(self, tickets: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the queue, what is known about its rollouts, and the weights that waiting tickets ask for."""
        needed = {version for _, version in tickets}
        older = [s for s in self.store.kept() if s.version in needed and s is not self.store.latest]
        notes = [self._notes[number] for number in sorted(self._notes)]
        return {
            "queue": self.buffer.state_dict(),
            "notes": [{name: getattr(note, name) for name in _SAVED} for note in notes],
            "weights": [[snapshot.version, snapshot.data] for snapshot in older],
            "tickets": [list(ticket) for ticket in tickets],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the policy has been restored before."""
        self.buffer.load_state_dict(state["queue"])
        self._notes = {note["number"]: Delivery(rollout=_NOTHING, **note) for note in state["notes"]}
        self._waiting_tickets = state["tickets"]
        self.store = WeightStore(self.policy, self.cfg)
        for version, data in state["weights"]:
            self.store.keep(version, data.to(self.policy.device))
        self.store.trust({int(v) for entry in state["queue"]["entries"] for v in entry["policy_version"].unique()})
