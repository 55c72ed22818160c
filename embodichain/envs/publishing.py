"""Publishes the states of a few envs to a viewer in another process, while it is watching.

A process with a folder in ``EMBODICHAIN_VIEWER`` writes three files there for each of its environments: the model, a
description, and memory-mapped numbers. The first number is the time until which a viewer is watching. It is checked
after every step; only if it lies in the future, and at most thirty times per second, states are copied. Publishing
affects neither the simulation nor its random numbers.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # readers need neither torch nor tasks, and start quickly
    from torch import Tensor

    from embodichain.envs.task_env import TaskEnv

FOLDER_VARIABLE = "EMBODICHAIN_VIEWER"
MAX_ENVS = 16
"""Maximum number of published envs."""
_PERIOD = 1.0 / 30.0
_HEADER = 4
_UNTIL, _SEQUENCE, _STEPS = 0, 1, 2
"""Indices in the header: watched until, a sequence number that is odd during a write, and total steps."""
_numbers = itertools.count()


class PublishedStates:
    """The memory-mapped numbers of an environment, written by one process and read by another."""

    def __init__(self, file: Path, num_envs: int, nq: int, nmocap: int, create: bool = False) -> None:
        sizes = (_HEADER, num_envs * nq, num_envs * nmocap * 7, num_envs, num_envs)
        if create:
            file.write_bytes(bytes(8 * sum(sizes)))
        with file.open("r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), 8 * sum(sizes))
        values = np.frombuffer(self._memory, np.float64)
        self.header, qpos, mocap, self.step, self.reward = np.split(values, np.cumsum(sizes)[:-1])
        self.qpos, self.mocap = qpos.reshape(num_envs, nq), mocap.reshape(num_envs, nmocap, 7)

    def watch(self, seconds: float) -> None:
        """Request states for the next seconds; 0 stops them."""
        self.header[_UNTIL] = time.monotonic() + seconds if seconds else 0.0

    @property
    def steps(self) -> int:
        """Total steps of the environment."""
        return int(self.header[_STEPS])

    @property
    def sequence(self) -> int:
        """A number that changes with every state, and is odd during a write."""
        return int(self.header[_SEQUENCE])

    def read(self) -> tuple[NDArray[np.float64], ...] | None:
        """Return copies of positions, mocap poses, steps and rewards; ``None`` during a write."""
        before = self.sequence
        copies = tuple(part.copy() for part in (self.qpos, self.mocap, self.step, self.reward))
        return copies if before == self.sequence and before and not before % 2 else None


class Publisher:
    """Publishes the states of an environment; called after every step."""

    def __init__(self, env: TaskEnv, folder: Path) -> None:
        self._env, model = env, env.physics.model
        self._count = min(env.num_envs, MAX_ENVS)
        name = f"{os.getpid()}_{next(_numbers)}"
        mujoco.mj_saveModel(model, str(folder / f"{name}.mjb"))
        self._states = PublishedStates(
            folder / f"{name}.states", self._count, int(model.nq), int(model.nmocap), create=True
        )
        self._header = self._states.header
        self._next = 0.0
        described = {
            "id": env.name,
            "num_envs": env.num_envs,
            "shown": self._count,
            "nq": int(model.nq),
            "nmocap": int(model.nmocap),
            "camera": env.task.camera,
            "seconds": step_seconds(env),
        }
        partial = folder / f".{name}.partial"
        partial.write_text(json.dumps(described), encoding="utf-8")
        partial.replace(folder / f"{name}.json")  # last, so that readers find the other files

    def __call__(self, reward: Tensor) -> None:
        """Publish the current state if a viewer is watching and the next one is due."""
        header = self._header
        header[_STEPS] += 1.0
        if not header[_UNTIL]:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PERIOD
        if now > header[_UNTIL]:
            header[_UNTIL] = 0.0  # the viewer has gone
            return
        self._write(reward)

    def _write(self, reward: Tensor) -> None:
        out, count, env = self._states, self._count, self._env
        qpos, mocap = positions(env, count)
        self._header[_SEQUENCE] += 1.0
        out.qpos[:], out.mocap[:] = qpos, mocap
        out.step[:] = _host(env.episode_steps[:count])
        out.reward[:] = _host(reward[:count])
        self._header[_SEQUENCE] += 1.0


def positions(env: TaskEnv, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return joint positions ``[count, nq]`` and mocap poses ``[count, nmocap, 7]`` of the first envs, including
    markers such as goals."""
    physics = env.physics
    qpos = np.array(_host(physics.qpos[:count]), np.float64)
    mocap = np.empty((count, int(physics.model.nmocap), 7))
    if mocap.size:
        mocap[..., :3], mocap[..., 3:] = _host(physics.mocap_pos[:count]), _host(physics.mocap_quat[:count])
        for body, places in env.task.markers().items():
            mocap[:, physics.mocap_id(body), :3] = _host(places[:count])
    return qpos, mocap


def step_seconds(env: TaskEnv) -> float:
    """Return the simulated seconds per step."""
    return float(env.physics.model.opt.timestep) * env.task.substeps


def _host(values: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = values.detach().cpu().numpy()
    return array


def publish_if_asked(env: TaskEnv) -> TaskEnv:
    """Publish the states of an environment if this process was started with a viewer."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and os.path.isdir(folder):
        env.on_step = Publisher(env, Path(folder))
    return env
