"""Where the workers of a crew come from: asked for in the cluster, or left there by a learner before."""

from __future__ import annotations

import sys
import uuid
from typing import Any

import torch

import embodichain
from embodichain.agents.processes.ray_session import NAMESPACE, actor_options
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.fingerprint import fingerprint
from embodichain.agents.rl.collector.ray_collect import CollectorActor
from embodichain.agents.rl.collector.ray_hand import Hand
from embodichain.envs.random import combine
from embodichain.extras import require

_LEARNERS_OWN = (
    "address",
    "kl_rows",
    "max_restarts",
    "name",
    "num_workers",
    "orphan_timeout",
    "patience",
    "placement",
    "start_timeout",
    "step_timeout",
)
"""Settings that do not change what a worker does."""


class Recruiter:
    """Asks for workers and tells them their job."""

    def __init__(self, job: Job, seed: int | None) -> None:
        ray: Any = require("ray", extra="ray")
        self._cfg, self._seed = job.setup.cfg, seed
        self._device = "cuda" if self._cfg.placement.num_gpus > 0 else "cpu"
        job = job.for_another_process()
        self._key = job_key(job)
        self._learner = uuid.uuid4().hex
        """Tells this learner from others that may be after the same workers."""
        self._stored_job = ray.put(job)
        self._kind = ray.remote(concurrency_groups={"orders": 1, "events": 1})(CollectorActor)

    def hire(self, index: int, restarts: int) -> Hand:
        """Ask for a worker; it is there once a node has room for it, or is the one that a learner before has left."""
        cfg = self._cfg
        options = actor_options(cfg.placement)
        left = None
        if cfg.address is not None and cfg.name:
            name = f"{cfg.name}-{index}"
            options |= {"name": name, "lifetime": "detached", "get_if_exists": True}
            left = _left_behind(name)
        actor = left or self._kind.options(**options).remote(sys.path, cfg.orphan_timeout)
        hand = Hand(index, actor, self._learner, restarts, found=left is not None)
        hand.await_(hand.actor.place.remote())
        return hand

    def instruct(self, hand: Hand, replaced: int) -> None:
        """Let a worker build its environment; ``replaced`` is how many workers were replaced so far."""
        seeds = self._seeds(hand.index + self._cfg.num_workers * replaced)
        hand.await_(hand.actor.open.remote(self._learner, self._key, self._stored_job, self._device, *seeds))

    def _seeds(self, number: int) -> tuple[int | None, int | None]:
        """Return the seeds of a worker's episodes and actions; the first one's are those of one that is alone."""
        if number == 0:
            return self._seed, self._cfg.seed
        both = [combine(torch.tensor(seed or 0), torch.tensor(number)) for seed in (self._seed, self._cfg.seed)]
        return int(both[0]) % 2**31, int(both[1]) % 2**31


def job_key(job: Job) -> str:
    """Return what tells whether an environment that is there already is at what the job asks for."""
    setup = job.setup
    settings = {name: value for name, value in setup.cfg.to_dict().items() if name not in _LEARNERS_OWN}
    parts = (job.make_env, job.num_steps, setup.policy, setup.callback, setup.start_rollout, settings)
    return fingerprint((embodichain.__version__, *parts))


def _left_behind(name: str) -> Any:
    """Return the worker of this name, ``None`` if there is none."""
    try:
        return require("ray", extra="ray").get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
