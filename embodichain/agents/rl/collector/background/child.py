"""A collecting process: build the environment, then do what the learner's process orders."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from embodichain.agents.processes.channel import Channel
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.shared_memory import Segment
from embodichain.agents.rl.collector.background.child_process import begin_as_child
from embodichain.agents.rl.collector.background.loop import (
    CollectionLoop,
    Command,
    Delivery,
    NewWeights,
    Order,
    Stopped,
    Ticket,
)
from embodichain.agents.rl.collector.background.station import Setup, Station
from embodichain.agents.rl.collector.weights import WeightSnapshot, move, without_weights
from embodichain.envs.vec_env import VecEnv

LAST_BEAT, WORKING, STEPS, NUM_PULSES = range(4)
"""Places in the pulse, int64: time of the last sign of life in ns, whether a step is under way, steps begun."""


@dataclass(frozen=True)
class Job:
    """What a collecting process is to do."""

    make_env: Callable[[], VecEnv]
    setup: Setup
    num_steps: int

    def for_another_process(self) -> Job:
        """Return the job with a policy that can be sent: a copy without weights."""
        return replace(self, setup=replace(self.setup, policy=without_weights(self.setup.policy)))


def main(job: Job, device: str, connection: socket.socket, pulse: Segment) -> None:
    """Collect until told to stop; ``device`` is where the policy belongs."""
    begin_as_child()
    torch.set_num_threads(job.setup.cfg.num_threads or 1)
    channel = Channel(connection)
    try:
        move(job.setup.policy, torch.device(device))
        env = job.make_env()
        try:
            station = Station(env, job.setup)
            _begin(station, channel)
            channel.send("ready", {"num_envs": env.num_envs})
            CollectionLoop(station, ProcessLink(channel, pulse), job.num_steps).run()
        finally:
            env.close()
    except EOFError:
        return  # the learner is gone
    except Exception as error:  # noqa: BLE001 - whatever it is, the learner must hear of it
        channel.send("failed", FailureReport.of_exception(0, error).to_json())


def _begin(station: Station, channel: Channel) -> None:
    """Begin the episodes that the first message asks for."""
    message = channel.receive()
    if message is None:
        raise EOFError
    begin = message.content()
    begun = begin["state"] is not None and station.load(begin["state"])
    if not begun and begin["seed"] is not None:
        station.reset(begin["seed"])


class ProcessLink:
    """The loop's connection with the learner's process."""

    def __init__(self, channel: Channel, pulse: Segment) -> None:
        self._channel = channel
        self._pulse = pulse.view(0, torch.int64, (NUM_PULSES,)).numpy()

    def receive(self, timeout: float | None) -> Order | None:
        """Return the next order, waiting for it at most so long."""
        try:
            message = self._channel.receive(timeout)
        except EOFError:
            raise Stopped from None
        if message is None:
            return None
        if message.kind == "ticket":
            return Ticket(**message.content())
        if message.kind == "weights" and message.segment is not None:
            return NewWeights(WeightSnapshot(**message.content(), data=message.segment.bytes, segment=message.segment))
        return Command(message.content())

    def beat(self, working: bool) -> None:
        """Show a sign of life."""
        self._pulse[STEPS] += working
        self._pulse[LAST_BEAT] = time.monotonic_ns()
        self._pulse[WORKING] = working

    def adopted(self, version: int, digest: int | None) -> None:
        """Acknowledge weights."""
        self._channel.send("adopted", {"version": version, "digest": digest})

    def deliver(self, delivery: Delivery) -> None:
        """Hand over a rollout."""
        self._channel.send("rollout", {"number": delivery.number, **delivery.content()})

    def standing(self, state: dict[str, Any] | None) -> None:
        """Report that nothing moves until further notice."""
        self._channel.send("standing", state)
