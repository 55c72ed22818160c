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

from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.loaded_code import LoadedCode
from embodichain.agents.processes.shared_memory import tensor_of
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.background.loop import (
    CollectionLoop,
    Command,
    NewWeights,
    Ticket,
)
from embodichain.agents.rl.collector.background.station import Station
from embodichain.agents.rl.collector.ray_link import Bytes, Event, RayLink
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.envs.physics.mujoco_cpu import limit_cores
from embodichain.errors import CollectorError
from embodichain.extras import require
from embodichain.utils.tensor_tree import decode

CONCURRENCY = {"claims": 1, "orders": 1, "events": 1}
"""Calls that are answered whatever else is under way: each group has a thread, building the environment another one."""
POLL_SECONDS = 1.0
"""How long a worker waits for something to tell before it shows a mere sign of life."""
_ABSENT_SECONDS = 3 * POLL_SECONDS
"""A learner that has asked for nothing for so long is gone: one that is there asks all the time."""
STEP_SECONDS = 10.0
"""How long the next learner waits at most for the step to end that the one before has begun."""
_ORDERS_PER_CLAIM = 2**40
"""Orders are counted on from another number after every claim."""
CLAIM_SECONDS = _ABSENT_SECONDS + STEP_SECONDS + 7.0
"""A worker that has not answered a claim after so long will not."""


class CollectorActor:
    """What collects, as a Ray actor.

    It may outlive its learner: the environment stays, in the midst of its episodes, and the next learner that claims it
    with the same ``key`` goes on with it, if the code is still the same. Whatever the old one had ordered is forgotten.
    It works for one learner at a time: another one is refused as long as that one is there.
    """

    def __init__(self, key: str, orphan_timeout: float) -> None:
        """Take note what this is for; nothing heavy happens before ``build``."""
        self._code = LoadedCode()
        self._key, self._learner = key, ""
        self._phase = "new"
        """``new``, ``building``, ``built``, or what keeps this from ever going on."""
        self._station: Station | None = None
        self._link = RayLink()
        self._thread: threading.Thread | None = None
        self._num_steps = 1
        self._lock = threading.Lock()
        self._early: dict[int, tuple[str, tuple[Any, ...]]] = {}
        self._next_order = self._claims = 0
        self._followers: dict[str, Callable[..., None]] = {
            "weights": self._weights,
            "ticket": self._ticket,
            "abandon": self._abandon,
        }
        self._orphan_timeout = orphan_timeout
        self._heard = time.monotonic()
        """When this was last asked for something, by the learner that it works for if there is one."""
        threading.Thread(target=self._mind_the_learner, daemon=True).start()

    def claim(self, learner: str, key: str, sys_path: list[str], patience: float) -> Event:
        """Work for this learner from now on, unless another one is there; say where this is and what it is at.

        A ``new`` one has to be told to build, one that is ``building`` says when it is ready, and one that is ``built``
        goes on in its environment, unless the step it is at takes longer than ``patience``.
        """
        where = _place()
        if not self._is_free_for(learner):
            return where | {"event": "refused"}
        with self._lock:
            before, self._learner, self._heard = self._learner, learner, time.monotonic()
            problem = self._unfitness(key, patience)
            if not problem and before not in ("", learner):
                changed = self._code.what_changed(sys_path)
                problem = f"has loaded code that was changed since ({changed})" if changed else ""
            if problem:
                return where | {"event": "unfit", "why": problem}
            self._link, self._early = RayLink(), {}
            self._next_order = self._claims * _ORDERS_PER_CLAIM  # those given before are never taken for later ones
            self._claims += 1
            if self._phase == "new":
                sys.path += [entry for entry in sys_path if entry not in sys.path]
            elif self._phase == "built":
                self._begin_loop()
            told = {"phase": self._phase, "num_envs": self._num_envs, "first_order": self._next_order}
            return where | {"event": "claimed", **told}

    def build(self, learner: str, job: Job, device: str, seed: int | None, action_seed: int | None) -> None:
        """Build the environment, begin to follow orders, and tell so as an event."""
        with self._lock:
            if learner != self._learner or self._phase != "new":
                return
            self._phase = "building"
        try:
            cfg = job.setup.cfg.replace(seed=action_seed)
            setup = replace(job.setup, device=torch.device(device), cfg=cfg)
            self._station = _build(replace(job, setup=setup), seed)
            self._num_steps = job.num_steps
            self._code.note()
            with self._lock:
                self._phase = "built"
                self._begin_loop()
                self._link.events.put({"event": "ready", "num_envs": self._num_envs})
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner must hear of it
            self._fail(error, self._link)

    def order(self, learner: str, sequence: int, kind: str, *content: Any) -> None:
        """Follow an order once all that were given before it are followed: calls may arrive in any order."""
        with self._lock:
            if learner != self._learner or sequence < self._next_order:
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

    def dismiss(self) -> Event:
        """End this process, unless its learner is still there."""
        if not self._is_free_for(""):
            return _place() | {"event": "refused"}
        os._exit(0)

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _num_envs(self) -> int:
        return 0 if self._station is None else self._station.collector.env.num_envs

    def _is_free_for(self, learner: str) -> bool:
        """Wait until it is known whether the present learner, if it is another one, is still there."""
        asked = time.monotonic()
        while self._learner not in ("", learner) and time.monotonic() - self._heard < _ABSENT_SECONDS:
            if self._heard > asked:
                return False
            time.sleep(0.05)
        return True

    def _unfitness(self, key: str, patience: float) -> str:
        """Return why this cannot do what the key stands for, "" if it can; nothing is being collected afterwards."""
        if key != self._key:
            return "was asked for something else"
        if not self._end_loop(patience):
            return f"has not come back from a step for {self._link.busy_seconds:.0f} s"
        return "" if self._phase in ("new", "building", "built") else self._phase

    def _weights(self, version: int, digest: int, data: Bytes) -> None:
        self._link.orders.put(NewWeights(WeightSnapshot(version, digest, tensor_of(data).clone())))

    def _ticket(self, number: int, version: int, random: tuple[dict[str, Any], Bytes] | None) -> None:
        state = None if random is None else decode(random[0], tensor_of(random[1]))
        self._link.orders.put(Ticket(number, version, state))

    def _abandon(self) -> None:
        """Break off whatever is being collected, after the present step."""
        self._end_loop()
        self._link.orders = queue.SimpleQueue()
        self._link.events.put({"event": "abandoned"})
        self._begin_loop()

    def _begin_loop(self) -> None:
        if self._station is None:
            raise CollectorError("there is no environment")
        self._thread = threading.Thread(target=self._collect, args=(self._station, self._link), daemon=True)
        self._thread.start()

    def _collect(self, station: Station, link: RayLink) -> None:
        try:
            CollectionLoop(station, link, self._num_steps).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner must hear of it
            self._fail(error, link)

    def _end_loop(self, seconds: float | None = None) -> bool:
        """Let the present step be the last one; tell whether it came to its end in time."""
        thread = self._thread
        if thread is not None:
            self._link.orders.put(Command("stop"))
            thread.join(seconds)
            if thread.is_alive():
                return False
            self._thread = None
        return True

    def _fail(self, error: Exception, link: RayLink) -> None:
        self._phase = f"raised {type(error).__name__}"
        link.events.put({"event": "failed", "report": FailureReport.of_exception(0, error).to_json()})

    def _mind_the_learner(self) -> None:
        """End this process when no learner has been heard of for long."""
        while time.monotonic() - self._heard < self._orphan_timeout:
            time.sleep(min(1.0, self._orphan_timeout / 4))
        os._exit(0)


def _build(job: Job, seed: int | None) -> Station:
    """Make the environment, the policy and what brings them together."""
    setup, cores = job.setup, _granted_cores()
    limit_cores(cores)
    torch.set_num_threads(setup.cfg.num_threads or cores)
    setup.policy.to(setup.device).device = setup.device
    station = Station(job.make_env(), setup)
    if seed is not None:
        station.reset(seed)
    return station


def _granted_cores() -> int:
    """Return the cores that Ray has set aside for this process: others on its node count on theirs."""
    granted = require("ray", extra="ray").get_runtime_context().get_assigned_resources()
    return max(1, int(granted.get("CPU", 1)))


def _place() -> Event:
    """Say where this is."""
    node = require("ray", extra="ray").get_runtime_context().get_node_id()
    return {"node_id": node, "node": socket.gethostname(), "pid": os.getpid()}
