"""Environments for the tests of the data stream: every frame carries a stamp, and faults happen on demand."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from embodichain.agents.engine import register_actor

STAMPS = 1 << 20


class ConstantActor:
    """An actor of the user's own: the action is always the same."""

    version = 5

    def __init__(self, env: Any, **_: Any) -> None:
        self.action = torch.full((env.num_envs, 2), 0.25)

    def __call__(self, observation: Any) -> torch.Tensor:
        return self.action

    def reset(self, env_ids: list[int]) -> None:
        pass


register_actor("constant", ConstantActor)


class StampEnv(gym.Env):
    """Every frame says which episode it is of and which step: ``state = [stamp, step, length]``, ``reward = stamp``.

    Faults: after ``after`` steps in one process the next of ``kinds`` happens that has not happened yet, which is known
    from files in ``folder``: ``raise``, ``hang``, ``nan`` or ``exit``. A process has one fault at the most. Half of the
    first ``solves`` episodes succeed, and none later. Steps after the first ``slow_after`` take ``slow_seconds`` more.
    """

    def __init__(
        self,
        min_steps: int = 5,
        max_steps: int = 20,
        pixels: int = 0,
        step_seconds: float = 0.0,
        solves: int = STAMPS,
        slow_seconds: float = 0.0,
        slow_after: int = STAMPS,
        **fault: Any,
    ) -> None:
        self.lengths = (min_steps, max_steps)
        self.solves = solves
        self.step_seconds = step_seconds
        self.slow_seconds, self.slow_after = slow_seconds, slow_after
        self.fault = fault
        self.total = 0
        self.kind = ""
        spaces: dict[str, gym.Space] = {"state": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)}
        if pixels:
            spaces["image"] = gym.spaces.Box(0, 255, (pixels, pixels, 3), np.uint8)
        self.observation_space = gym.spaces.Dict(spaces)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def _observe(self) -> dict[str, np.ndarray]:
        observation = {"state": np.array([self.stamp, self.at, self.length], np.float32)}
        if "image" in self.observation_space.spaces:
            observation["image"] = np.full(self.observation_space["image"].shape, self.stamp % 256, np.uint8)
        return observation

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.stamp = int(self.np_random.integers(STAMPS))
        self.length = int(self.np_random.integers(self.lengths[0], self.lengths[1] + 1))
        self.at = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.total >= self.slow_after:
            time.sleep(self.slow_seconds)
        self.at += 1
        self.total += 1
        if self.fault and self.total == self.fault["after"]:
            self.kind = _claim_fault(self.fault)
            _fail(self.kind)
        observation = self._observe()
        if self.kind == "nan":
            observation["state"][1] = np.nan
        done = self.at == self.length
        self.solves -= done
        return observation, float(self.stamp), done, False, {"success": self.stamp % 2 == 0 and self.solves >= 0}


_claimed: list[str] = []


def _claim_fault(fault: dict[str, Any]) -> str:
    if _claimed:
        return ""
    for number, kind in enumerate(fault["kinds"]):
        try:
            os.close(os.open(Path(fault["folder"]) / f"fault{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        _claimed.append(kind)
        return kind
    return ""


def _fail(kind: str) -> None:
    if kind == "raise":
        raise ZeroDivisionError("the simulation broke on purpose")
    if kind == "hang":
        time.sleep(3600)
    if kind == "exit":
        os._exit(7)


class LateEnv(StampEnv):
    """The second process that makes one waits until the first one is at work, and fails; ``folder`` says who is who."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.at_work = Path(folder) / "at_work"
        claims = {"after": 0, "kinds": ["first", "second"], "folder": folder}
        if _claim_fault(claims) == "second":
            while not self.at_work.exists():
                time.sleep(0.01)
            raise RuntimeError("there is no simulator for a second process")

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        self.at_work.touch()
        return super().step(action)


gym.register("Late-v0", entry_point=LateEnv, max_episode_steps=1000)
gym.register("Stamp-v0", entry_point=StampEnv, max_episode_steps=1000)


def gym_config(num_envs: int = 4, max_episode_steps: int = 20, **kwargs: Any) -> dict[str, Any]:
    """Return the config of a StampEnv."""
    name = "stream_envs:Stamp-v0"
    return {"id": name, "num_envs": num_envs, "max_episode_steps": max_episode_steps, "kwargs": kwargs}


def stream_settings(**changes: Any) -> dict[str, Any]:
    """Return settings of an engine that streams random episodes of a StampEnv."""
    settings = {
        "buffer_size": 16,
        "max_episode_steps": 20,
        "gym_config": gym_config(),
        "action_config": {"source": "random"},
        "trusted_modules": ["stream_envs"],
        "progress": False,
    }
    return {**settings, **changes}


def check_chunks(batch: Any) -> None:
    """Assert that every chunk is one piece of one episode."""
    state, reward = batch["observation", "state"], batch["reward"]
    stamp, at, length = state.unbind(-1)
    assert (stamp == stamp[:, :1]).all(), "frames of several episodes in one chunk"
    assert (reward == stamp).all(), "reward and observation of different episodes"
    assert (at[:, 1:] - at[:, :-1] == 1).all(), "frames that do not follow each other"
    assert (at < length).all(), "a frame beyond the end of its episode"
    assert (batch["terminated"] == (at == length - 1)).all(), "the end is not where the episode ends"
    if ("observation", "image") in batch.keys(include_nested=True):
        image = batch["observation", "image"].flatten(2)
        assert (image == (stamp % 256).unsqueeze(-1)).all(), "an image of another episode"
