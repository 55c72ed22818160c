"""Collection by several processes anywhere in a Ray cluster; any of them may die, be slow, or come back.

The way of a ticket: ``send`` queues it -> an idle ``Hand`` gets it, after the latest weights -> its rollout arrives ->
``ray_order`` says which number it becomes -> the learner's buffer.
"""

from __future__ import annotations

import atexit
import logging
import time
from typing import Any

from embodichain.agents.processes.backoff import restart_delay
from embodichain.agents.processes.ray_session import RaySession, no_room
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.background.loop import NewWeights, Order, Ticket
from embodichain.agents.rl.collector.background.watched import LOOK_SECONDS, ROOM_SECONDS, Fault, WatchedWorker
from embodichain.agents.rl.collector.background.worker import FIRST_STEPS, Learner
from embodichain.agents.rl.collector.ray_faults import fault_of_error, fault_of_silence
from embodichain.agents.rl.collector.ray_hand import Hand
from embodichain.agents.rl.collector.ray_link import Event, read_delivery
from embodichain.agents.rl.collector.ray_recruiting import Recruiter
from embodichain.agents.rl.collector.ray_rollouts import Rollouts
from embodichain.agents.rl.collector.ray_staff import Staff
from embodichain.agents.rl.collector.ray_strays import works_for_another
from embodichain.agents.rl.collector.ray_weights import StoredWeights
from embodichain.errors import BufferWaitError, CollectorError
from embodichain.extras import require

log = logging.getLogger("embodichain.collector")

_NOTHING: dict[str, Any] = {"collector": {}, "env": None, "generator": None, "tickets": []}


class RayCrew(WatchedWorker):
    """Workers of a cluster and the thread that gives them tickets, hears what they say, and replaces them.

    A rollout that was lost with its worker is collected again, by any other, from other episodes.
    """

    def __init__(self, job: Job, learner: Learner, seed: int | None) -> None:
        cfg = job.setup.cfg
        super().__init__(cfg, learner)
        self._session = RaySession(cfg.address, cfg.num_workers, cfg.placement)
        try:
            self._ray: Any = require("ray", extra="ray")
            self._recruiter = Recruiter(job, seed)
            self._staff = Staff(self._recruiter, cfg, self._lock)
        except BaseException:
            self._session.close()
            raise
        self._hands = self._staff.hands
        self._rollouts = Rollouts()
        self._weights = StoredWeights(cfg.adopt == "lockstep")
        self._standing, self._began = False, time.monotonic()
        self._asked: str | None = None
        """The command that this thread still has to answer: from then on nothing is delivered."""
        atexit.register(self.stop)  # after the session's: workers that would stay are ended before Ray is
        self.begin()

    # --- the learner's side ---------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """How many workers have an environment and follow orders."""
        with self._lock:
            return sum(hand.ready for hand in self._hands.values())

    def send(self, order: Order) -> None:
        """Give an order; what a worker does not finish is given to another."""
        with self._lock:
            if self._stopping.is_set():  # Ray may be shut down
                return
            if isinstance(order, Ticket):
                self._rollouts.add(order)
                self._assign()
            elif isinstance(order, NewWeights):
                self._weights.add(order.snapshot)
                for hand in self._hands.values():
                    if hand.ready and not hand.abandoning:
                        self._weights.send(hand, order.snapshot.version)
            else:
                self._reports.clear()
                self._standing = order.name in ("pause", "save")
                self._asked = order.name if self._standing else None

    # --- the thread -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._staff.fill()

    def _close(self) -> None:
        """End the workers, and let go of everything that is Ray's before it is shut down."""
        atexit.unregister(self.stop)
        try:
            with self._lock:
                self._staff.close()
                self._weights.clear()
                del self._recruiter, self._staff
        finally:
            self._session.close()

    def _watch(self) -> None:
        if not RaySession.alive():
            raise CollectorError("Ray was shut down while rollouts were collected")
        self._staff.fill()
        self._hear()
        self._deliver()
        with self._lock:
            asked, self._asked = self._asked, None
            if asked is not None:
                self._reports.put(dict(_NOTHING) if asked == "save" else None)
            if not self._standing:
                self._rollouts.break_off_straggler(self._hands.values(), self._cfg.patience)
            self._assign()
        for hand in list(self._hands.values()):
            self._check_pulse(hand)

    def _hear(self) -> None:
        """Wait a moment for an answer, and deal with it."""
        for hand, said in self._staff.hear(LOOK_SECONDS):
            if isinstance(said, Exception):
                self._suffer(hand, said)
                return
            with self._lock:
                if self._staff.is_there(hand):  # else an event before this one was its last
                    self._take(hand, said)

    def _take(self, hand: Hand, event: Event) -> None:
        kind = event["event"]
        if kind == "claimed":
            self._agree(hand, event)
        elif kind == "unfit" and hand.claimed:  # it was there, and could not be reached for a while
            self._replace(hand, Fault(event["why"]))
        elif kind == "unfit":
            self._renew(hand, event["why"])
        elif kind == "ready":
            self._begin_with(hand, event["num_envs"])
        elif kind == "adopted":
            hand.acknowledged[event["version"]] = event["digest"]
        elif kind == "rollout":
            self._arrive(hand, event)
        elif kind == "abandoned":
            hand.abandoning = False
            self._weights.send(hand)
        elif kind == "failed":
            self._replace(hand, Fault.told(event["report"]))
        elif kind in ("refused", "taken"):
            self._staff.leave_to_others(hand)
            raise works_for_another(str(hand))
        elif kind == "alive":
            limit = self._cfg.step_timeout if event["steps"] > FIRST_STEPS else self._cfg.start_timeout
            if event["busy"] > limit:
                self._replace(hand, Fault(f"hung: it has not come back from a step for {limit:g} s", hung=True))

    def _agree(self, hand: Hand, event: Event) -> None:
        """Begin with a worker that is there."""
        hand.agreed(event["first_order"])
        if event["phase"] == "new":
            self._recruiter.instruct(hand, self.restarts)
        elif event["phase"] == "built":
            log.info("%s goes on in its environment", hand)
            self._begin_with(hand, event["num_envs"])

    def _begin_with(self, hand: Hand, num_envs: int) -> None:
        """Begin with a worker that has an environment."""
        hand.ready = True
        self._weights.send(hand)
        self.num_envs = num_envs
        self._ready.set()

    def _assign(self) -> None:
        """Give tickets to idle workers; the lock is held."""
        if not self._standing and len(self._weights):
            self._rollouts.assign(self._hands.values())

    def _arrive(self, hand: Hand, event: Event) -> None:
        ticket = hand.ticket
        if ticket is None or event["number"] != ticket.number:
            return  # of a rollout that was broken off
        delivery = read_delivery(event)
        for version in delivery.rollout["policy_version"][0].unique().tolist():
            self._learner.on_adopted(version, hand.acknowledged[version])
        newest = max(hand.acknowledged)
        hand.acknowledged = {v: digest for v, digest in hand.acknowledged.items() if v >= newest - 1}
        self._rollouts.arrive(hand, delivery)
        self._weights.forget_before(ticket.version)
        self._assign()

    def _deliver(self) -> None:
        """Hand over what has arrived, as far as nothing else becomes too old by it.

        The lock is not held meanwhile, for the learner may be waiting for it while the buffer is waiting for the
        learner.
        """
        while not self._standing and not self._stopping.is_set():
            with self._lock:
                delivery = self._rollouts.next_one(self._hands.values())
            if delivery is None:
                return
            try:
                self._learner.on_delivery(delivery, ROOM_SECONDS)
            except BufferWaitError:
                return
            self._rollouts.handed_over()

    # --- their life -----------------------------------------------------------------------------------------------

    def _suffer(self, hand: Hand, error: Exception) -> None:
        """Deal with an answer that did not come."""
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            if hand.doubted:
                self._stopping.wait(LOOK_SECONDS)
            with self._lock:  # it, or its node, may be gone; Ray answers the next question once it knows
                self._rollouts.give_back(hand.ticket)
                hand.doubt()
                self._recruiter.claim(hand)
        elif hand.found and not hand.claimed:
            self._renew(hand, "has ended")
        else:
            self._weights.store_anew()  # they may be what is missing
            self._replace(hand, fault_of_error(error, hand))

    def _check_pulse(self, hand: Hand) -> None:
        fault, patience = fault_of_silence(hand, self._cfg), self._cfg.start_timeout
        if fault is not None:
            self._replace(hand, fault)
        elif self._staff.is_silent(hand):
            self._renew(hand, "does not answer")
        elif not (self._ready.is_set() or hand.node or hand.found) and time.monotonic() - self._began > patience:
            raise no_room(self._cfg.placement, patience)

    def _renew(self, hand: Hand, why: str) -> None:
        """Have a new worker come in the place of one that was left behind and cannot go on; that is no fault."""
        log.info("%s, of the learner before, %s: a new one is asked for", hand, why)
        self._staff.renew(hand)
        self._began = time.monotonic()

    def _replace(self, hand: Hand, fault: Fault) -> None:
        """Have a new worker come in the place of one that cannot go on, or give up; another does what it was at."""
        faults = hand.restarts + (not fault.lost)
        with self._lock:
            self._rollouts.give_back(hand.ticket)
            self._staff.replace(hand, faults, 0.0 if fault.lost else restart_delay(faults))
        never_worked = not self._ready.is_set()
        if not fault.lost and (never_worked or hand.restarts >= self._cfg.max_restarts):
            raise fault.error(f"worker {hand.index}", hand.restarts)
        self.restarts += 1
        count = "" if fault.lost else f" ({faults} of {self._cfg.max_restarts})"
        log.warning("worker %d %s; replacing it%s%s", hand.index, fault.what, count, fault.text and f"\n{fault.text}")
