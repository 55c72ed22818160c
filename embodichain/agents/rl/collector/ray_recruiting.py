"""Where the workers of a crew come from: asked for in the cluster, or left there by a learner before."""

from __future__ import annotations

import os
import sys
import uuid
from typing import Any

import torch

import embodichain
from embodichain.agents.processes.ray_session import NAMESPACE, actor_options
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.fingerprint import fingerprint
from embodichain.agents.rl.collector.ray_collect import CONCURRENCY, STEP_SECONDS, CollectorActor
from embodichain.agents.rl.collector.ray_hand import Hand
from embodichain.agents.rl.models.policy import Policy
from embodichain.envs.random import combine
from embodichain.extras import require

_LEARNERS_OWN = (
    "address",
    "kl_rows",
    "max_restarts",
    "name",
    "num_workers",
    "patience",
    "start_timeout",
    "step_timeout",
)
"""Settings that nothing in a worker is made from."""


class Recruiter:
    """Asks for workers and tells them their job."""

    def __init__(self, job: Job, seed: int | None) -> None:
        ray: Any = require("ray", extra="ray")
        self._cfg, self._seed = job.setup.cfg, seed
        self._device = "cuda" if self._cfg.placement.num_gpus > 0 else "cpu"
        self._sys_path = [os.path.abspath(entry) for entry in sys.path]  # "" is this process's folder
        learners = job.setup.policy
        job = job.for_another_process()
        by_value = ray.cloudpickle.list_registry_pickle_by_value()
        self._key = job_key(job, learners, self._device, by_value)
        self._learner = uuid.uuid4().hex
        """Tells this learner from others that may be after the same workers."""
        self._stored_job = ray.put(job)
        self._kind = ray.remote(concurrency_groups=CONCURRENCY)(CollectorActor)

    def hire(self, index: int, restarts: int) -> Hand | None:
        """Ask for a worker; it is there once a node has room for it, or is the one that a learner before has left.

        Returns none where its name is in use by one that cannot be found: by somebody who was quicker, and is to be
        found in a moment, or still by one that has just ended.
        """
        cfg = self._cfg
        options = actor_options(cfg.placement)
        if cfg.address is not None and cfg.name:
            name = f"{cfg.name}-{index}"
            left = left_behind(name)
            detached = options | {"namespace": NAMESPACE, "lifetime": "detached", "name": name}
            try:
                actor, found = (self._make(detached), False) if left is None else (left, True)
            except require("ray", extra="ray").exceptions.ActorAlreadyExistsError:
                return None
        else:
            actor, found = self._make(options), False
        hand = Hand(index, actor, self._learner, restarts, found=found, mine=not found)
        self.claim(hand)
        return hand

    def claim(self, hand: Hand) -> None:
        """Ask a worker to work for this learner, and for no other."""
        claim = hand.actor.claim.options(concurrency_group="claims")
        patience = min(self._cfg.step_timeout, STEP_SECONDS)
        hand.await_(claim.remote(self._learner, self._key, self._sys_path, patience))

    def instruct(self, hand: Hand, replaced: int) -> None:
        """Let a worker build its environment; ``replaced`` is how many workers were replaced so far."""
        hand.build(self._stored_job, self._device, *self._seeds(hand.index + self._cfg.num_workers * replaced))

    def _make(self, options: dict[str, Any]) -> Any:
        return self._kind.options(**options).remote(self._key, self._cfg.orphan_timeout)

    def _seeds(self, number: int) -> tuple[int | None, int | None]:
        """Return the seeds of a worker's episodes and actions; the first one's are those of one that is alone."""
        if number == 0:
            return self._seed, self._cfg.seed
        both = [combine(torch.tensor(seed or 0), torch.tensor(number)) for seed in (self._seed, self._cfg.seed)]
        return int(both[0]) % 2**31, int(both[1]) % 2**31


def job_key(job: Job, policy: Policy, device: str = "cpu", by_value: set[str] | None = None) -> str:
    """Return what stands for all that a worker is made from, but for the weights of the policy.

    ``policy`` is the learner's, of which the job has a copy.
    """
    setup = job.setup
    settings = {name: value for name, value in setup.cfg.to_dict().items() if name not in _LEARNERS_OWN}
    parts = (job.make_env, job.num_steps, setup.policy, setup.callback, setup.start_rollout, settings, device)
    return fingerprint((embodichain.__version__, *parts), (setup.policy, policy), by_value or ())


def left_behind(name: str) -> Any:
    """Return the worker of this name, ``None`` if there is none."""
    try:
        return require("ray", extra="ray").get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
