"""Environments for the tests with a Ray cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from stream_envs import StampEnv

from embodichain.envs.registration import make
from embodichain.envs.vec_env import VecEnv
from tests.agents.rl.async_cases import Env, make_env

_mine: list[bool] = []


class OneSlowEnv(StampEnv):
    """The first process that makes one is slow, all others are not; ``folder`` is where it is noted."""

    def __init__(self, folder: str, **kwargs: Any) -> None:
        if not _mine:
            _mine.append(_claim(Path(folder) / "slow"))
        super().__init__(step_seconds=0.05 if _mine[0] else 0.0, **kwargs)


def make_but_not_the_nth(folder: str, nth: int) -> Env:
    """Make an environment, but fail in the ``nth`` process that tries; ``folder`` is where they are counted."""
    number = 1
    while not _claim(Path(folder) / f"made{number}"):
        number += 1
    if number == nth:
        raise ValueError(f"process {number} has no simulator")
    return make_env()()


def make_counting_threads(folder: str) -> VecEnv:
    """Make an environment, and note how many threads it and torch have."""
    env = make("CartPoleRL", num_envs=8)
    counts = {"torch": torch.get_num_threads(), "simulation": env.physics.num_threads}
    (Path(folder) / "threads.json").write_text(json.dumps(counts))
    return env


def _claim(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


gym.register("OneSlow-v0", entry_point=OneSlowEnv, max_episode_steps=1000)
