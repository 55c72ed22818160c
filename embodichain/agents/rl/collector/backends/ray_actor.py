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
from embodichain.agents.processes.pool import Heartbeat
from embodichain.agents.processes.ray_backend import cores_of_actor, location_of_actor
from embodichain.agents.processes.shared_memory import tensor_of
from embodichain.agents.rl.collector.rollout_worker import (
    Instruction,
    NewWeights,
    RolloutRequest,
    RolloutResult,
    RolloutWorker,
    Stopped,
    WorkerSpec,
)
from embodichain.agents.rl.collector.weights import WeightSnapshot, move
from embodichain.envs.physics.mujoco_cpu import limit_cores
from embodichain.errors import CollectorError
from embodichain.utils.tensor_tree import decode, encode

Event = dict[str, Any]
Bytes = NDArray[np.uint8]
Encoded = tuple[dict[str, Any], Bytes]
"""Nested data with tensors in it: its description, and one block of memory."""
Weights = tuple[int, str | None]
"""Version and hash of a snapshot, the bytes of which travel beside it."""

CONCURRENCY = {"control": 1}
"""Calls of this group are answered while a rollout is collected."""


class RolloutActor:
    """An environment and a policy in a cluster. Calls without a group come one after the other, in order."""

    def __init__(self, sys_path: list[str]) -> None:
        """Prepare; nothing heavy happens before ``build``."""
        sys.path += [entry for entry in sys_path if entry not in sys.path]
        self._worker: RolloutWorker | None = None
        self._endpoint = ActorEndpoint()
        self._num_steps = 1
        self._idle_since = 0.0

    def build(self, spec: WorkerSpec, device: str, seed: int | None, action_seed: int | None) -> Event:
        """Build the environment, unless it is there already because an answer got lost."""
        try:
            if self._worker is None:
                cfg = spec.cfg.replace(seed=action_seed)
                self._worker = _build(replace(spec, device=torch.device(device), cfg=cfg), seed)
                self._num_steps, self._idle_since = spec.num_steps, time.monotonic()
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner reports it
            return _failed(error)
        return {"event": "built", "num_envs": self._worker.env.num_envs}

    def collect(
        self, sequence: int, number: int, weights: Weights, data: Bytes, random: Encoded | None, required: int
    ) -> Event:
        """Collect a rollout, beginning with these weights; ``sequence`` counts the calls.

        In lockstep, ``required`` is the version to use.
        """
        waited = time.monotonic() - self._idle_since
        try:
            if self._worker is None:
                raise CollectorError("build() comes before collect()")
            endpoint = self._endpoint
            state = None if random is None else decode(random[0], tensor_of(random[1]))
            endpoint.begin(sequence, _snapshot(weights, data), RolloutRequest(number, required, state))
            self._worker.run(endpoint, self._num_steps)
            if endpoint.result is None:
                self._worker.clear()
                return {"event": "interrupted"}
            description, block = encode(replace(endpoint.result, waited=waited).content())
            return {"event": "rollout", "adopted": endpoint.adoptions, "content": (description, block.numpy())}
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner reports it
            return _failed(error)
        finally:
            self._idle_since = time.monotonic()

    # --- calls of the group "control" -----------------------------------------------------------------------------

    def adopt(self, weights: Weights, data: Bytes) -> None:
        """Use newer weights from the next step on."""
        self._endpoint.offer(_snapshot(weights, data))

    def interrupt(self, sequence: int) -> Event:
        """Break off this rollout, or an earlier one, after the present step; return where this runs."""
        self._endpoint.interrupted = sequence
        return location_of_actor()

    def status(self) -> Event:
        """Return the last sign of life."""
        beats = self._endpoint.heartbeat
        seconds_ago = time.monotonic() - beats.last
        return {"event": "status", "seconds_ago": seconds_ago, "steps": beats.steps, "busy": beats.busy}


class ActorEndpoint:
    """The connection of a rollout worker with the calls of an actor."""

    def __init__(self) -> None:
        self.sequence = self.interrupted = -1
        self.result: RolloutResult | None = None
        self.adoptions: dict[int, str | None] = {}
        """Hashes of the weights that are used in the present rollout, by version."""
        self.heartbeat = Heartbeat()
        self.beat = self.heartbeat.beat
        self._instructions: queue.SimpleQueue[Instruction] = queue.SimpleQueue()
        self._newest = -1

    def begin(self, sequence: int, snapshot: WeightSnapshot, request: RolloutRequest) -> None:
        """Begin a rollout."""
        self._instructions = queue.SimpleQueue()
        self.result = None
        self.adoptions = dict(list(self.adoptions.items())[-1:])  # it begins with those in use, or with newer ones
        self._newest = snapshot.version
        self._instructions.put(NewWeights(snapshot))
        self._instructions.put(request)
        self.sequence = sequence

    def offer(self, snapshot: WeightSnapshot) -> None:
        """Pass newer weights on; calls may arrive in any order."""
        if snapshot.version > self._newest:
            self._newest = snapshot.version
            self._instructions.put(NewWeights(snapshot))

    def receive(self, timeout: float | None) -> Instruction | None:
        """Return the next instruction, if there is one."""
        if self.result is not None or self.interrupted >= self.sequence:
            raise Stopped
        try:
            return self._instructions.get_nowait()
        except queue.Empty:
            return None

    def adopted(self, version: int, digest: str | None) -> None:
        """Acknowledge weights."""
        self.adoptions[version] = digest

    def deliver(self, result: RolloutResult) -> None:
        """Take the rollout."""
        self.result = result

    def paused(self, state: dict[str, Any] | None) -> None:
        """Do nothing: a worker in a cluster is not paused."""


def _build(spec: WorkerSpec, seed: int | None) -> RolloutWorker:
    """Make the environment, the policy and what brings them together."""
    cores = cores_of_actor()
    limit_cores(cores)
    torch.set_num_threads(spec.cfg.num_threads or cores)
    move(spec.policy, spec.device)
    worker = RolloutWorker(spec.make_env(), spec)
    if seed is not None:
        worker.reset(seed)
    return worker


def _snapshot(weights: Weights, data: Bytes) -> WeightSnapshot:
    return WeightSnapshot(*weights, tensor_of(data))


def _failed(error: Exception) -> Event:
    return {"event": "failed", "report": FailureReport.of_exception(0, error).to_json()}
