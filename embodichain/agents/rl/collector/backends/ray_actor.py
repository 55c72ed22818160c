"""Collection of rollouts in a Ray actor: it builds an environment and answers each request with one rollout."""

from __future__ import annotations

import queue
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.ray_backend import Location, cores_of_actor, location_of_actor
from embodichain.agents.processes.shared_memory import tensor_of
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.background.loop import (
    CollectionLoop,
    Delivery,
    NewWeights,
    Order,
    Stopped,
    Ticket,
)
from embodichain.agents.rl.collector.background.station import Station
from embodichain.agents.rl.collector.weights import WeightSnapshot, move
from embodichain.envs.physics.mujoco_cpu import limit_cores
from embodichain.errors import CollectorError
from embodichain.utils.tensor_tree import decode, encode

Event = dict[str, Any]
Bytes = NDArray[np.uint8]
Encoded = tuple[dict[str, Any], Bytes]
"""Nested data with tensors in it: its description, and one block of memory."""
Weights = tuple[int, int | None]
"""Version and hash of a snapshot, the bytes of which travel beside it."""

CONCURRENCY = {"control": 1}
"""Calls of this group are answered while a rollout is collected."""


class RolloutActor:
    """An environment and a policy in a cluster. Calls without a group come one after the other, in order."""

    def __init__(self, sys_path: list[str]) -> None:
        """Prepare; nothing heavy happens before ``build``."""
        sys.path += [entry for entry in sys_path if entry not in sys.path]
        self._station: Station | None = None
        self._loop: CollectionLoop | None = None
        self._link = ActorLink()
        self._num_steps = 1
        self._idle_since = 0.0

    def locate(self) -> Event:
        """Return where this runs."""
        return {"event": "located", **location_of_actor()}

    def build(self, job: Job, device: str, seed: int | None, action_seed: int | None) -> Event:
        """Build the environment, unless it is there already because an answer got lost."""
        try:
            if self._station is None:
                cfg = job.setup.cfg.replace(seed=action_seed)
                setup = replace(job.setup, device=torch.device(device), cfg=cfg)
                self._station = _build(replace(job, setup=setup), seed)
                self._num_steps, self._idle_since = job.num_steps, time.monotonic()
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner reports it
            return _failed(error)
        return {"event": "built", "num_envs": self._station.collector.env.num_envs}

    def collect(
        self, sequence: int, number: int, weights: Weights, data: Bytes, random: Encoded | None, required: int
    ) -> Event:
        """Collect a rollout, beginning with these weights; ``sequence`` counts the calls.

        In lockstep, ``required`` is the version to use.
        """
        waited = time.monotonic() - self._idle_since
        try:
            if self._station is None:
                raise CollectorError("build() comes before collect()")
            link = self._link
            state = None if random is None else decode(random[0], tensor_of(random[1]))
            link.begin(sequence, _snapshot(weights, data), Ticket(number, required, state))
            if self._loop is None:
                self._loop = CollectionLoop(self._station, link, self._num_steps)
            self._loop.run()
            if link.rollout is None:
                self._loop = None  # what it was at is forgotten
                return {"event": "interrupted"}
            description, block = encode(replace(link.rollout, waited=waited).content())
            return {"event": "rollout", "adopted": link.adoptions, "content": (description, block.numpy())}
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner reports it
            return _failed(error)
        finally:
            self._idle_since = time.monotonic()

    # --- calls of the group "control" -----------------------------------------------------------------------------

    def adopt(self, weights: Weights, data: Bytes) -> None:
        """Use newer weights from the next step on."""
        self._link.offer(_snapshot(weights, data))

    def interrupt(self, sequence: int) -> Location:
        """Break off this rollout, or an earlier one, after the present step; return where this runs."""
        self._link.interrupted = sequence
        return self.locate()

    def status(self) -> Event:
        """Return what this is doing: the present rollout, seconds since the present step began, and steps so far."""
        link = self._link
        return {"event": "status", "sequence": link.sequence, "busy": link.busy_seconds, "steps": link.steps}


class ActorLink:
    """The connection of the collection loop with the calls of an actor."""

    def __init__(self) -> None:
        self.sequence = self.interrupted = -1
        self.rollout: Delivery | None = None
        self.adoptions: dict[int, int | None] = {}
        """Hashes of the weights that are used in the present rollout, by version."""
        self.steps = 0
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._newest = -1
        self._last_beat, self._working = time.monotonic(), False

    @property
    def busy_seconds(self) -> float:
        """Time since the present step began; 0 if there is none."""
        return time.monotonic() - self._last_beat if self._working else 0.0

    def begin(self, sequence: int, snapshot: WeightSnapshot, ticket: Ticket) -> None:
        """Begin a rollout."""
        self._orders = queue.SimpleQueue()
        self.rollout = None
        self.adoptions = dict(list(self.adoptions.items())[-1:])  # it begins with those in use, or with newer ones
        self._newest = snapshot.version
        self._orders.put(NewWeights(snapshot))
        self._orders.put(ticket)
        self.sequence = sequence

    def offer(self, snapshot: WeightSnapshot) -> None:
        """Pass newer weights on; calls may arrive in any order."""
        if snapshot.version > self._newest:
            self._newest = snapshot.version
            self._orders.put(NewWeights(snapshot))

    def receive(self, timeout: float | None) -> Order | None:
        """Return the next order, if there is one."""
        if self.rollout is not None or self.interrupted >= self.sequence:
            raise Stopped
        try:
            return self._orders.get_nowait()
        except queue.Empty:
            return None

    def beat(self, working: bool) -> None:
        """Note that a step begins, or that there is nothing to do."""
        self.steps += working
        self._last_beat, self._working = time.monotonic(), working

    def adopted(self, version: int, digest: int | None) -> None:
        """Acknowledge weights."""
        self.adoptions[version] = digest

    def deliver(self, delivery: Delivery) -> None:
        """Take the rollout."""
        self.rollout = delivery

    def standing(self, state: dict[str, Any] | None) -> None:
        """Do nothing: a loop in a cluster is not paused."""


def _build(job: Job, seed: int | None) -> Station:
    """Make the environment, the policy and what brings them together."""
    setup, cores = job.setup, cores_of_actor()
    limit_cores(cores)
    torch.set_num_threads(setup.cfg.num_threads or cores)
    move(setup.policy, setup.device)
    station = Station(job.make_env(), setup)
    if seed is not None:
        station.reset(seed)
    return station


def _snapshot(weights: Weights, data: Bytes) -> WeightSnapshot:
    return WeightSnapshot(*weights, tensor_of(data))


def _failed(error: Exception) -> Event:
    return {"event": "failed", "report": FailureReport.of_exception(0, error).to_json()}
