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
from tests.agents.rl.async_cases import Env, make_env

_mine: list[bool] = []


class OneSlowEnv(StampEnv):
    """The first process that makes one is slow, all others are not; ``folder`` is where it is noted."""

    def __init__(self, folder: str, **kwargs: Any) -> None:
        if not _mine:
            _mine.append(_claim(Path(folder) / "slow"))
        super().__init__(step_seconds=0.25 if _mine[0] else 0.0, **kwargs)


def make_in_some_processes(folder: str, most: int) -> Env:
    """Make an environment, but in no more processes than ``most``; ``folder`` is where they are counted."""
    number = 1
    while not _claim(Path(folder) / f"made{number}"):
        number += 1
    if number > most:
        raise ValueError(f"process {number} has no simulator")
    return make_env(pause=0.05)()  # others need the processor more


def make_troubled(folder: str, **settings: Any) -> Env:
    """Make an environment that gets into trouble once, and count the threads that a simulator and torch have here."""
    simulator = make("CartPoleRL", num_envs=8)
    counts = {"torch": torch.get_num_threads(), "simulation": simulator.physics.num_threads}
    simulator.close()
    (Path(folder) / "threads.json").write_text(json.dumps(counts))
    return make_env(mark=str(Path(folder) / "mark"), **settings)()


def _claim(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


gym.register("OneSlow-v0", entry_point=OneSlowEnv, max_episode_steps=1000)
