"""Collection by several processes anywhere in a Ray cluster; any of them may die, be slow, or come back.

The way of a ticket: ``send`` queues it -> an idle ``Hand`` gets it, after the latest weights -> its rollout arrives ->
``ray_order`` says which number it becomes -> the learner's buffer.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Any

from embodichain.agents.engine.failure import FailureReport
from embodichain.agents.engine.ray_session import RaySession, lost_node
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.background.loop import Delivery, NewWeights, Order, Ticket
from embodichain.agents.rl.collector.background.worker import FIRST_STEPS, Learner, Reports
from embodichain.agents.rl.collector.ray_collect import Event, read_delivery
from embodichain.agents.rl.collector.ray_hand import POLL_SECONDS, Hand, store_weights
from embodichain.agents.rl.collector.ray_order import choose
from embodichain.agents.rl.collector.ray_recruiting import Recruiter
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.errors import BufferWaitError, ClusterError, CollectorError, EnvironmentHungError
from embodichain.extras import require

log = logging.getLogger("embodichain.collector")

_LOOK_SECONDS = 0.05
_ROOM_SECONDS = 0.2
_NOTHING: dict[str, Any] = {"collector": {}, "env": None, "generator": None, "tickets": []}


class RayCrew:
    """A thread that gives tickets to the workers of a cluster, hears what they say, and replaces them.

    A rollout that was lost with its worker is collected again, by any other, from other episodes.
    """

    def __init__(self, job: Job, learner: Learner, seed: int | None) -> None:
        cfg = job.setup.cfg
        self._session = RaySession(cfg.address, cfg.num_workers, cfg.placement)
        self._ray: Any = require("ray", extra="ray")
        self.num_envs, self.restarts = 0, 0
        self._cfg, self._learner = cfg, learner
        self._recruiter = Recruiter(job, seed)
        self._lock = threading.RLock()
        self._hands: dict[int, Hand] = {}
        self._tickets: deque[Ticket] = deque()
        self._highest = self._next = -1
        """The highest number of a ticket so far, and the number that the next rollout becomes."""
        self._arrived: dict[int, tuple[int, Delivery]] = {}
        self._weights: tuple[WeightSnapshot, Any] | None = None
        self._durations: deque[float] = deque(maxlen=16)
        self._standing = False
        self._asked: str | None = None
        """The command that this thread still has to answer: from then on nothing is delivered."""
        self._failure: Exception | None = None
        self._began = time.monotonic()
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._reports = Reports(self.check)
        self._thread = threading.Thread(target=self._run, name="embodichain-collector", daemon=True)
        self._thread.start()

    # --- the learner's side ---------------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Wait until one environment is there."""
        while not self._ready.wait(_LOOK_SECONDS):
            self.check()

    def send(self, order: Order) -> None:
        """Give an order; what a worker does not finish is given to another."""
        with self._lock:
            if isinstance(order, Ticket):
                self._tickets.append(order)
                self._highest = max(self._highest, order.number)
                self._next = order.number if self._next < 0 else self._next
                self._assign()
            elif isinstance(order, NewWeights):
                self._weights = (order.snapshot, store_weights(order.snapshot))
                for hand in self._hands.values():
                    if hand.ready and not hand.abandoning:
                        hand.send_weights(*self._weights)
            else:
                self._reports.clear()
                self._standing = order.name in ("pause", "save")
                self._asked = order.name if self._standing else None

    def check(self) -> None:
        """Raise what keeps it from going on."""
        if self._failure is not None:
            raise self._failure

    def wait_until_standing(self, timeout: float) -> dict[str, Any] | None:
        """Wait until nothing is delivered any more; rollouts that workers are at are finished, and kept back."""
        return self._reports.wait(timeout)

    def stop(self) -> None:
        """End the workers."""
        self._stopping.set()
        self._thread.join()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for index in range(self._cfg.num_workers):
                self._spawn(index)
            while not self._stopping.is_set():
                self._watch()
        except Exception as error:  # noqa: BLE001 - it is raised in the learner's thread
            self._failure = error
            self._stopping.set()
        finally:
            if RaySession.alive():
                for hand in self._hands.values():
                    hand.kill()
            self._session.close()

    def _watch(self) -> None:
        if not RaySession.alive():
            raise CollectorError("Ray was shut down while rollouts were collected")
        awaited = {hand.awaited: hand for hand in self._hands.values()}
        ready, _ = self._ray.wait(list(awaited), num_returns=1, timeout=_LOOK_SECONDS)
        for answer in ready:
            self._hear(awaited[answer])
        self._deliver()
        with self._lock:
            asked, self._asked = self._asked, None
            if asked is not None:
                self._reports.put(dict(_NOTHING) if asked == "save" else None)
            self._look_for_stragglers()
            self._assign()
        for hand in list(self._hands.values()):
            self._check_pulse(hand)

    def _spawn(self, index: int, restarts: int = 0) -> None:
        hand = self._recruiter.hire(index, restarts)
        with self._lock:
            self._hands[index] = hand

    def _hear(self, hand: Hand) -> None:
        try:
            answer = self._ray.get(hand.awaited)
        except self._ray.exceptions.RayError as error:
            lost = lost_node(error, hand.node_id)
            where = f" {hand.node}" if hand.node else ""
            return self._replace(hand, f"is gone with its node{where}" if lost else "died", lost)
        with self._lock:
            if isinstance(answer, list):
                hand.listen()
            for event in answer if isinstance(answer, list) else [answer]:
                self._take(hand, event)

    def _take(self, hand: Hand, event: Event) -> None:
        kind = event["event"]
        if kind == "placed":
            hand.node, hand.node_id, hand.pid = event["node"], event["node_id"], event["pid"]
            self._recruiter.instruct(hand, self.restarts)
        elif kind == "ready":
            hand.opened(event)
            if event["kept"]:
                log.info("worker %d (process %d on %s) goes on in its environment", hand.index, hand.pid, hand.node)
            if self._weights is not None:
                hand.send_weights(*self._weights)
            self.num_envs = event["num_envs"]
            self._ready.set()
        elif kind == "adopted":
            hand.acknowledged[event["version"]] = event["digest"]
        elif kind == "rollout":
            self._arrive(hand, event)
        elif kind == "abandoned":
            hand.abandoning = False
            if self._weights is not None:
                hand.send_weights(*self._weights)
        elif kind == "failed":
            report = FailureReport.from_json(event["report"])
            text = f"a collecting process {report.what}: {report.message}\n\nIn the process:\n{report.traceback}"
            raise CollectorError(text) from report.original()
        elif kind == "alive":
            limit = self._cfg.step_timeout if event["steps"] > FIRST_STEPS else self._cfg.start_timeout
            if event["busy"] > limit:
                self._replace(hand, f"hung: it has not come back from a step for {limit:g} s", hung=True)

    # --- tickets and rollouts -------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Give tickets to idle workers, the quickest first; the lock is held."""
        if self._standing:
            return
        for hand in sorted(self._hands.values(), key=lambda hand: hand.delays):
            if self._tickets and hand.idle and self._weights is not None:
                hand.give(self._tickets.popleft(), self._highest)

    def _arrive(self, hand: Hand, event: Event) -> None:
        if hand.ticket is None or event["number"] != hand.ticket.number:
            return  # of a rollout that was broken off
        delivery = read_delivery(event)
        for version in delivery.rollout["policy_version"][0].unique().tolist():
            self._learner.on_adopted(version, hand.acknowledged[version])
        newest = max(hand.acknowledged)
        hand.acknowledged = {v: digest for v, digest in hand.acknowledged.items() if v >= newest - 1}
        self._durations.append(time.monotonic() - hand.began)
        self._arrived[delivery.number] = (hand.deadline, delivery)
        hand.ticket, hand.delays = None, 0
        self._assign()

    def _deliver(self) -> None:
        """Number what has arrived, as far as nothing else becomes too old by it, and hand it over.

        The lock is not held meanwhile, for the learner may be waiting for it while the buffer is waiting for the
        learner.
        """
        while not self._standing and not self._stopping.is_set():
            with self._lock:
                chosen = choose({key: place[0] for key, place in self._arrived.items()}, self._running(), self._next)
            if chosen is None:
                return
            try:
                self._learner.on_delivery(replace(self._arrived[chosen][1], number=self._next), _ROOM_SECONDS)
            except BufferWaitError:
                return
            del self._arrived[chosen]
            self._next += 1

    def _running(self) -> list[int]:
        return [hand.deadline for hand in self._hands.values() if hand.ticket is not None]

    def _look_for_stragglers(self) -> None:
        """Break off the rollout that all others have waited for too long."""
        if not self._arrived or self._standing or not self._durations:
            return
        slow = min((hand for hand in self._hands.values() if hand.ticket), key=lambda hand: hand.deadline, default=None)
        usual = statistics.median(self._durations)
        if slow is None or time.monotonic() - slow.began < self._cfg.patience * usual:
            return
        taken = time.monotonic() - slow.began
        log.warning(
            "worker %d on %s has collected for %.1f s, others take %.1f s: its rollout is given to another",
            slow.index,
            slow.node,
            taken,
            usual,
        )
        ticket = slow.abandon()
        slow.delays += 1
        slow.rests_until = time.monotonic() + self._cfg.patience * usual * 2**slow.delays
        if ticket is not None:
            self._tickets.appendleft(ticket)

    # --- their life -----------------------------------------------------------------------------------------------

    def _check_pulse(self, hand: Hand) -> None:
        silent, cfg = time.monotonic() - hand.asked_at, self._cfg
        if hand.ready and silent > POLL_SECONDS + cfg.step_timeout:
            self._replace(hand, f"cannot be reached for {silent:.0f} s", lost=True)
        elif hand.node and not hand.ready and silent > cfg.start_timeout:
            words = f"did not build its environment within start_timeout ({cfg.start_timeout:g} s)"
            self._replace(hand, words, hung=True)
        elif not self._ready.is_set() and not hand.node and time.monotonic() - self._began > cfg.start_timeout:
            free = self._ray.available_resources()
            raise ClusterError(
                f"no node of the cluster had room for a worker within start_timeout ({cfg.start_timeout:g} s): each "
                f"needs {cfg.placement.to_dict()}; free are {free}. Change placement, or add nodes"
            )

    def _replace(self, hand: Hand, what: str, lost: bool = False, hung: bool = False) -> None:
        """Put a new worker in the place of one that died or hung, or give up; what it was at is done by another."""
        hand.kill()
        with self._lock:
            if hand.ticket is not None:
                self._tickets.appendleft(hand.ticket)
            del self._hands[hand.index]
        if not lost and (not self._ready.is_set() or hand.restarts >= self._cfg.max_restarts):
            after = f", after {hand.restarts} replacements" if hand.restarts else ""
            raise (EnvironmentHungError if hung else CollectorError)(f"worker {hand.index} {what}{after}")
        self.restarts += 1
        log.warning("worker %d %s; replacing it", hand.index, what)
        self._spawn(hand.index, hand.restarts + (not lost))
        with self._lock:
            self._assign()
