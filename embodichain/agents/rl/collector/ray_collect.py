"""A collecting process in a Ray cluster: the loop of ``background/loop.py``, with its orders and events as calls."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodichain.agents.engine.failure import FailureReport
from embodichain.agents.engine.ray_batch import tensor_on
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.background.loop import (
    CollectionLoop,
    Command,
    Delivery,
    NewWeights,
    Order,
    Ticket,
)
from embodichain.agents.rl.collector.background.parcel import pack_into, unpack
from embodichain.agents.rl.collector.background.station import Station
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.errors import CollectorError
from embodichain.extras import require

Event = dict[str, Any]
Bytes = NDArray[np.uint8]


class ArrayMemory:
    """Memory of an array, which Ray puts into its object store as it is."""

    def __init__(self, array: Bytes) -> None:
        self.array, self.nbytes = array, int(array.size)
        self._tensor = tensor_on(array)

    @classmethod
    def create(cls, nbytes: int) -> ArrayMemory:
        """Reserve memory."""
        return cls(np.empty(nbytes, np.uint8))

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the bytes from ``offset`` on as a tensor."""
        count = int(torch.Size(shape).numel())
        return self._tensor[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


class RayLink:
    """The loop's connection with a learner somewhere in the cluster; calls put orders in and take events out."""

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.steps, self._last_beat, self._working = 0, time.monotonic(), False

    @property
    def busy_seconds(self) -> float:
        """Time since the present step began; 0 if there is none."""
        return time.monotonic() - self._last_beat if self._working else 0.0

    def receive(self, timeout: float | None) -> Order | None:
        """Return the next order, waiting for it at most so long."""
        try:
            return self.orders.get(timeout != 0.0, timeout or None)
        except queue.Empty:
            return None

    def beat(self, working: bool) -> None:
        """Show a sign of life."""
        self.steps += working
        self._last_beat, self._working = time.monotonic(), working

    def adopted(self, version: int, digest: int) -> None:
        """Acknowledge weights."""
        self.events.put({"event": "adopted", "version": version, "digest": digest})

    def deliver(self, delivery: Delivery) -> None:
        """Hand over a rollout."""
        words, memory = pack_into(delivery.content(), ArrayMemory.create)
        self.events.put({"event": "rollout", "number": delivery.number, "words": words, "memory": memory.array})

    def standing(self, state: dict[str, Any] | None) -> None:
        """Do nothing: nobody tells a loop in a cluster to stand still."""


def read_delivery(event: Event) -> Delivery:
    """Return the rollout that an event brought; it is copied, for the object store's memory cannot be written to."""
    return Delivery.of(event["number"], unpack(event["words"], ArrayMemory(event["memory"])))


class CollectorActor:
    """What collects, as a Ray actor.

    It may outlive its learner: the environment stays, in the midst of its episodes, and the next learner that opens it
    with the same ``key`` goes on with it. Whatever the old one had ordered is forgotten.
    """

    def __init__(self, sys_path: list[str], orphan_timeout: float) -> None:
        """Take note where modules are; nothing heavy happens before ``open``."""
        sys.path += [entry for entry in sys_path if entry not in sys.path]
        self._key = ""
        self._station: Station | None = None
        self._link = RayLink()
        self._thread: threading.Thread | None = None
        self._num_steps = 1
        self._lock = threading.Lock()
        self._early: dict[int, tuple[str, tuple[Any, ...]]] = {}
        self._next_order = 0
        self._followers: dict[str, Callable[..., None]] = {
            "weights": self._weights,
            "ticket": self._ticket,
            "abandon": self._abandon,
        }
        self._orphan_timeout = orphan_timeout
        self._heard = time.monotonic()
        threading.Thread(target=self._mind_the_learner, daemon=True).start()

    def place(self) -> Event:
        """Say where this is."""
        self._heard = time.monotonic()
        node = require("ray", extra="ray").get_runtime_context().get_node_id()
        return {"event": "placed", "node_id": node, "node": socket.gethostname(), "pid": os.getpid()}

    def open(self, key: str, job: Job, device: str, seed: int | None, action_seed: int | None) -> Event:
        """Build the environment, unless it is there from before, and begin to follow orders."""
        self._heard = time.monotonic()
        try:
            self._end_loop()
            kept = self._station is not None and key == self._key
            if not kept:
                cfg = job.setup.cfg.replace(seed=action_seed)
                setup = replace(job.setup, device=torch.device(device), cfg=cfg)
                self._build(replace(job, setup=setup), seed)
                self._key = key
            self._link, self._early, self._next_order = RayLink(), {}, 0
            return {"event": "ready", "num_envs": self._begin_loop(), "kept": kept}
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner must hear of it
            return _failed(error)

    def order(self, sequence: int, kind: str, *content: Any) -> None:
        """Follow an order once all that were given before it are followed: calls may arrive in any order."""
        with self._lock:
            self._early[sequence] = (kind, content)
            while self._next_order in self._early:
                kind, content = self._early.pop(self._next_order)
                self._next_order += 1
                self._followers[kind](*content)

    def events(self, seconds: float) -> list[Event]:
        """Return what has happened, waiting for it at most so long; the last one is always a sign of life."""
        self._heard = time.monotonic()
        link, events = self._link, []
        try:
            events.append(link.events.get(timeout=seconds))
            while True:
                events.append(link.events.get_nowait())
        except queue.Empty:
            pass
        return [*events, {"event": "alive", "busy": link.busy_seconds, "steps": link.steps}]

    # --- inside ---------------------------------------------------------------------------------------------------

    def _weights(self, version: int, digest: int, data: Bytes) -> None:
        self._link.orders.put(NewWeights(WeightSnapshot(version, digest, tensor_on(data).clone())))

    def _ticket(self, number: int, version: int, random: tuple[dict[str, Any], Bytes] | None) -> None:
        state = None if random is None else unpack(random[0], ArrayMemory(random[1]))
        self._link.orders.put(Ticket(number, version, state))

    def _abandon(self) -> None:
        """Break off whatever is being collected, after the present step."""
        self._end_loop()
        self._link.orders = queue.SimpleQueue()
        self._link.events.put({"event": "abandoned"})
        self._begin_loop()

    def _build(self, job: Job, seed: int | None) -> None:
        if self._station is not None:
            self._station.collector.env.close()
            self._station = None
        setup = job.setup
        torch.set_num_threads(setup.cfg.num_threads or 1)
        setup.policy.to(setup.device).device = setup.device
        station = Station(job.make_env(), setup)
        if seed is not None:
            station.reset(seed)
        self._station, self._num_steps = station, job.num_steps

    def _begin_loop(self) -> int:
        """Begin to follow orders; return the number of environments."""
        station = self._station
        if station is None:
            raise CollectorError("there is no environment")
        self._thread = threading.Thread(target=self._collect, args=(station, self._link), daemon=True)
        self._thread.start()
        return station.collector.env.num_envs

    def _collect(self, station: Station, link: RayLink) -> None:
        try:
            CollectionLoop(station, link, self._num_steps).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner must hear of it
            link.events.put(_failed(error))

    def _end_loop(self) -> None:
        if self._thread is not None:
            self._link.orders.put(Command("stop"))
            self._thread.join()
            self._thread = None

    def _mind_the_learner(self) -> None:
        """End this process when no learner has been heard of for long."""
        while time.monotonic() - self._heard < self._orphan_timeout:
            time.sleep(min(1.0, self._orphan_timeout / 4))
        os._exit(0)


def _failed(error: Exception) -> Event:
    return {"event": "failed", "report": FailureReport.of_exception(0, error).to_json()}
