"""Collection in a process of its own, which is replaced when it dies or hangs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from embodichain.agents.processes.channel import Channel, Message
from embodichain.agents.processes.shared_memory import Segment
from embodichain.agents.rl.collector.background.child import LAST_BEAT, NUM_PULSES, STEPS, WORKING, Job, main
from embodichain.agents.rl.collector.background.child_process import ChildProcess
from embodichain.agents.rl.collector.background.loop import Command, Delivery, NewWeights, Order, Ticket
from embodichain.agents.rl.collector.background.watched import LOOK_SECONDS, ROOM_SECONDS, Fault, WatchedWorker
from embodichain.agents.rl.collector.background.worker import FIRST_STEPS, STOP_SECONDS, Learner
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.envs.random import combine
from embodichain.errors import BufferWaitError, CollectorError

log = logging.getLogger("embodichain.collector")

_GRACE_SECONDS = STOP_SECONDS - 1.0


class ProcessWorker(WatchedWorker):
    """A collecting process and the thread that watches over it.

    What the process was told and has not done yet is remembered, so that the next one can be told the same: a rollout
    that was half collected is collected again, from new episodes, and nothing of the half one is ever seen.
    """

    def __init__(self, job: Job, learner: Learner, state: Mapping[str, Any] | None, seed: int | None) -> None:
        super().__init__(job.setup.cfg, learner)
        self._job = job.for_another_process()
        self._device = str(job.setup.policy.device)
        self._state, self._seed = state, seed
        self._channel: Channel | None = None
        self._process: ChildProcess | None = None
        self._pulse = Segment.create(8 * NUM_PULSES, "a pulse")
        self._beats = self._pulse.view(0, torch.int64, (NUM_PULSES,)).numpy()
        self._started = 0.0
        self._weights: dict[int, WeightSnapshot] = {}
        self._tickets: dict[int, Ticket] = {}
        self._command: Command | None = None
        self.begin()

    # --- the learner's side ---------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """How many collecting processes have an environment: one, or none yet."""
        return int(self._ready.is_set())

    def send(self, order: Order) -> None:
        """Give an order; it is remembered until it is done."""
        with self._lock:
            if isinstance(order, Ticket):
                self._tickets[order.number] = order
            elif isinstance(order, NewWeights):
                if self._cfg.adopt != "lockstep":
                    self._weights.clear()
                self._weights[order.snapshot.version] = order.snapshot
            else:
                self._command = order
                self._reports.clear()
            self._transmit(order)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._spawn()

    def _close(self) -> None:
        """End the process, gracefully, then firmly."""
        if self._channel is not None and self._process is not None:
            self._channel.send("command", "stop", wait=False)
            if self._failure is None:
                self._process.wait(_GRACE_SECONDS)
            self._process.kill()

    def _spawn(self) -> None:
        mine, other = Channel.pair()
        self._beats[:] = 0
        self._started = time.monotonic()
        self._process = ChildProcess(main, (self._job, self._device, other.socket, self._pulse))
        other.close()
        with self._lock:
            self._channel = mine
            mine.send("begin", {"seed": self._seed, "state": self._state}, wait=False)
            for snapshot in self._weights.values():
                self._transmit(NewWeights(snapshot))
            for number in sorted(self._tickets):
                self._transmit(self._tickets[number])
            if self._command is not None and self._command.name in ("pause", "save"):
                self._transmit(self._command)

    def _transmit(self, order: Order) -> None:
        """Send an order, the lock being held, without waiting for a process that may hang."""
        channel = self._channel
        if channel is None:
            return
        if isinstance(order, NewWeights):
            snapshot = order.snapshot
            words = {"version": snapshot.version, "digest": snapshot.digest}
            channel.send("weights", words, snapshot.segment, wait=False)
        elif isinstance(order, Ticket):
            channel.send("ticket", vars(order), wait=False)
        else:
            channel.send("command", order.name, wait=False)

    def _watch(self) -> None:
        if self._channel is None or self._process is None:
            raise CollectorError("there is no collecting process")
        try:
            message = self._channel.receive(LOOK_SECONDS)
        except EOFError:
            return self._replace(Fault(self._process.exit_words()))
        if message is not None:
            self._hear(message)
        words = self._hung_words()
        if words is not None:
            self._replace(Fault(words, hung=True))

    def _hear(self, message: Message) -> None:
        if message.kind == "rollout":
            return self._deliver(message.content(copy=False))
        content = message.content()
        if message.kind == "ready":
            self.num_envs = content["num_envs"]
            self._ready.set()
        elif message.kind == "adopted":
            self._learner.on_adopted(**content)
        elif message.kind == "standing":
            self._reports.put(content)
        elif message.kind == "failed":
            raise Fault.told(content).error("the collecting process")

    def _deliver(self, content: dict[str, Any]) -> None:
        delivery = Delivery.of(number := content.pop("number"), content)
        while not self._stopping.is_set():
            try:
                self._learner.on_delivery(delivery, ROOM_SECONDS)
                break
            except BufferWaitError:
                continue
        with self._lock:
            ticket = self._tickets.pop(number)
            for old in [v for v in self._weights if v < ticket.version]:
                del self._weights[old]

    # --- its life -------------------------------------------------------------------------------------------------

    def _hung_words(self) -> str | None:
        """Return what is wrong with a process that shows no sign of life."""
        now, cfg = time.monotonic(), self._cfg
        if not self._beats[LAST_BEAT]:
            late = now - self._started > cfg.start_timeout
            return f"did not build its environment within start_timeout ({cfg.start_timeout:g} s)" if late else None
        limit = cfg.step_timeout if self._beats[STEPS] > FIRST_STEPS else cfg.start_timeout
        if self._beats[WORKING] and now - self._beats[LAST_BEAT] / 1e9 > limit:
            return f"hung: it has not come back from a step for {limit:g} s"
        return None

    def _replace(self, fault: Fault) -> None:
        """Put a new process in the place of one that died or hung, or give up."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
        if self._stopping.is_set():
            return
        if not self._ready.is_set() or self.restarts >= self._cfg.max_restarts:
            raise fault.error("the collecting process", self.restarts)
        self.restarts += 1
        log.warning(
            "the collecting process %s; replacing it (%d of %d)", fault.what, self.restarts, self._cfg.max_restarts
        )
        self._state = None  # it begins new episodes, others than the first one began
        if self._seed is not None:
            self._seed = int(combine(torch.tensor(self._seed), torch.tensor(self.restarts))) % 2**31
        self._spawn()
