"""Where episodes come from: a simulation with somebody who acts, or a folder of recorded ones."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from embodichain.agents.engine.actors import make_actor
from embodichain.agents.engine.config import ActionSourceCfg, OnlineDataEngineCfg
from embodichain.agents.engine.episode import Episode
from embodichain.agents.engine.layout import FrameLayout
from embodichain.agents.engine.simulation import SimulatedEpisodes


class EpisodeSource(Protocol):
    """Delivers finished episodes, some at a time."""

    layout: FrameLayout
    max_steps: int
    """No episode is longer."""

    def advance(self) -> list[Episode]:
        """Go one step on and return what was finished by it; the episodes are valid until the next call."""

    def close(self) -> None:
        """Release what the source holds."""


def open_source(cfg: OnlineDataEngineCfg, worker: int = 0, incarnation: int = 0) -> EpisodeSource:
    """Open the source of one worker; a worker's replacement (the next incarnation) draws other episodes."""
    action = cfg.check()
    seed = stream_seed(cfg.seed, worker, incarnation)
    if action.source == "dataset":
        return _open_recorded(action, seed)
    return _open_simulation(cfg, action, seed)


def stream_seed(seed: int, worker: int, incarnation: int) -> int:
    """Return the seed of a worker's simulation."""
    return int(
        np.random.SeedSequence(seed, spawn_key=(worker, incarnation)).generate_state(1, np.uint64)[0] >> np.uint64(3)
    )


def _open_simulation(cfg: OnlineDataEngineCfg, action: ActionSourceCfg, seed: int) -> SimulatedEpisodes:
    from embodichain.envs.registration import make

    overrides: dict[str, Any] = {}
    if cfg.num_workers > 1 and "num_threads" not in cfg.gym_config:
        overrides["num_threads"] = max(1, len(os.sched_getaffinity(0)) // cfg.num_workers)
    env = make(cfg.gym_config, trusted_modules=cfg.trusted_modules, **overrides)
    actor = make_actor(action, env, seed + 1, cfg.trusted_modules)
    return SimulatedEpisodes(env, actor, seed, action.noise_std)


def _open_recorded(action: ActionSourceCfg, seed: int) -> EpisodeSource:
    from embodichain.agents.datasets.lerobot import RecordedEpisodes

    return RecordedEpisodes(str(action.path), seed)
