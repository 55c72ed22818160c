"""Environments for the tests with a Ray cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
from stream_envs import StampEnv

_mine: list[bool] = []


class OneSlowEnv(StampEnv):
    """The first process that makes one is slow, all others are not; ``folder`` is where it is noted."""

    def __init__(self, folder: str, **kwargs: Any) -> None:
        if not _mine:
            try:
                os.close(os.open(Path(folder) / "slow", os.O_CREAT | os.O_EXCL))
                _mine.append(True)
            except FileExistsError:
                _mine.append(False)
        super().__init__(step_seconds=0.05 if _mine[0] else 0.0, **kwargs)


gym.register("OneSlow-v0", entry_point=OneSlowEnv, max_episode_steps=1000)
