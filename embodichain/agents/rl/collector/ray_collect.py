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

import torch

from embodichain.agents.processes.arrays import tensor_on
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.background.loop import (
    CollectionLoop,
    Command,
    NewWeights,
    Ticket,
)
from embodichain.agents.rl.collector.background.parcel import unpack
from embodichain.agents.rl.collector.background.station import Station
from embodichain.agents.rl.collector.ray_link import ArrayMemory, Bytes, Event, RayLink
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.envs.physics.mujoco_cpu import limit_cores
from embodichain.errors import CollectorError
from embodichain.extras import require

POLL_SECONDS = 1.0
"""How long a worker waits for something to tell before it shows a mere sign of life."""
_ABSENT_SECONDS = 3 * POLL_SECONDS
"""A learner that has asked for nothing for so long is gone: one that is there asks all the time."""


class CollectorActor:
    """What collects, as a Ray actor.

    It may outlive its learner: the environment stays, in the midst of its episodes, and the next learner that opens it
    with the same ``key`` goes on with it. Whatever the old one had ordered is forgotten. It works for one learner at a
    time: another one is refused as long as that one is there.
    """

    def __init__(self, sys_path: list[str], orphan_timeout: float) -> None:
        """Take note where modules are; nothing heavy happens before ``open``."""
        sys.path += [entry for entry in sys_path if entry not in sys.path]
        self._key, self._learner = "", ""
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
        """When this was last asked for something, by the learner that it works for if there is one."""
        threading.Thread(target=self._mind_the_learner, daemon=True).start()

    def place(self) -> Event:
        """Say where this is."""
        node = require("ray", extra="ray").get_runtime_context().get_node_id()
        return {"event": "placed", "node_id": node, "node": socket.gethostname(), "pid": os.getpid()}

    def open(self, learner: str, key: str, job: Job, device: str, seed: int | None, action_seed: int | None) -> Event:
        """Build the environment, unless it is there from before, and begin to follow orders of this learner."""
        if not self._is_free_for(learner):
            return {"event": "refused"}
        self._learner, self._heard = learner, time.monotonic()
        try:
            self._end_loop()
            kept = self._station is not None and key == self._key
            if not kept:
                cfg = job.setup.cfg.replace(seed=action_seed)
                setup = replace(job.setup, device=torch.device(device), cfg=cfg)
                self._build(replace(job, setup=setup), seed)
                self._key = key
            self._heard = time.monotonic()
            self._link, self._early, self._next_order = RayLink(), {}, 0
            return {"event": "ready", "num_envs": self._begin_loop(), "kept": kept}
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner must hear of it
            return _failed(error)

    def order(self, learner: str, sequence: int, kind: str, *content: Any) -> None:
        """Follow an order once all that were given before it are followed: calls may arrive in any order."""
        with self._lock:
            if learner != self._learner:
                return
            self._early[sequence] = (kind, content)
            while self._next_order in self._early:
                kind, content = self._early.pop(self._next_order)
                self._next_order += 1
                self._followers[kind](*content)

    def events(self, learner: str, seconds: float) -> list[Event]:
        """Return what has happened, waiting for it at most so long; the last one is always a sign of life."""
        if learner != self._learner:
            return [{"event": "taken"}]
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

    def _is_free_for(self, learner: str) -> bool:
        """Wait until it is known whether the present learner, if it is another one, is still there."""
        asked = time.monotonic()
        while self._learner not in ("", learner) and time.monotonic() - self._heard < _ABSENT_SECONDS:
            if self._heard > asked:
                return False
            time.sleep(0.05)
        return True

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
        setup, cores = job.setup, _granted_cores()
        limit_cores(cores)
        torch.set_num_threads(setup.cfg.num_threads or cores)
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


def _granted_cores() -> int:
    """Return the cores that Ray has set aside for this process: others on its node count on theirs."""
    granted = require("ray", extra="ray").get_runtime_context().get_assigned_resources()
    return max(1, int(granted.get("CPU", 1)))


def _failed(error: Exception) -> Event:
    return {"event": "failed", "report": FailureReport.of_exception(0, error).to_json()}
