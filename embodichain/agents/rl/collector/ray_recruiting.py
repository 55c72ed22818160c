"""Where the workers of a crew come from: asked for in the cluster, or left there by a learner before."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch

from embodichain.agents.engine.ray_session import actor_options
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.ray_collect import CollectorActor
from embodichain.agents.rl.collector.ray_hand import Hand
from embodichain.agents.rl.collector.weights import WeightLayout
from embodichain.envs.random import combine
from embodichain.extras import require


class Recruiter:
    """Asks for workers and tells them their job."""

    def __init__(self, job: Job, seed: int | None) -> None:
        ray: Any = require("ray", extra="ray")
        self._cfg, self._seed = job.setup.cfg, seed
        self._device = "cuda" if self._cfg.placement.num_gpus > 0 else "cpu"
        job = job.for_another_process()
        self._key = _key(job)
        self._stored_job = ray.put(job)
        self._kind = ray.remote(concurrency_groups={"orders": 1, "events": 1})(CollectorActor)

    def hire(self, index: int, restarts: int) -> Hand:
        """Ask for a worker; it is there once a node has room for it, or is the one that a learner before has left."""
        cfg = self._cfg
        options = actor_options(cfg.placement)
        if cfg.address is not None and cfg.name:
            options |= {"name": f"{cfg.name}-{index}", "lifetime": "detached", "get_if_exists": True}
        hand = Hand(index, self._kind.options(**options).remote(sys.path, cfg.orphan_timeout), restarts)
        hand.await_(hand.actor.place.remote())
        return hand

    def instruct(self, hand: Hand, replaced: int) -> None:
        """Let a worker build its environment; ``replaced`` is how many workers were replaced so far."""
        seeds = self._seeds(hand.index + self._cfg.num_workers * replaced)
        hand.await_(hand.actor.open.remote(self._key, self._stored_job, self._device, *seeds))

    def _seeds(self, number: int) -> tuple[int | None, int | None]:
        """Return the seeds of a worker's episodes and actions; the first one's are those of one that is alone."""
        if number == 0:
            return self._seed, self._cfg.seed
        both = [combine(torch.tensor(seed or 0), torch.tensor(number)) for seed in (self._seed, self._cfg.seed)]
        return int(both[0]) % 2**31, int(both[1]) % 2**31


def _key(job: Job) -> str:
    """Return what tells whether an environment that is there already is the one that the job asks for."""
    layout = [(place.name, str(place.dtype), tuple(place.shape)) for place in WeightLayout(job.setup.policy).places]
    cfg = job.setup.cfg
    parts = (job.make_env, job.num_steps, layout, cfg.adopt, cfg.max_policy_lag, cfg.pipeline_stages, cfg.seed)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
