"""Lets a viewer look into environments that another process steps: positions of a few envs, while somebody watches.

A process that finds a folder in ``EMBODICHAIN_VIEWER`` describes each of its environments there, in three files: the
model, what the numbers are, and the numbers, which are mapped into memory. The first number is the time until which
somebody watches. It is looked at after every step; only then, and at most thirty times in a second, states are copied.
Nothing is written that a step reads, and no random number is drawn.
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

if TYPE_CHECKING:  # whoever reads needs neither torch nor tasks, and starts in a moment
    from torch import Tensor

    from embodichain.envs.task_env import TaskEnv

FOLDER_VARIABLE = "EMBODICHAIN_VIEWER"
MAX_ENVS = 16
"""Envs of an environment that are shown."""
_PERIOD = 1.0 / 30.0
_HEADER = 4
_UNTIL, _SEQUENCE, _STEPS = 0, 1, 2
"""Where the header has the time until which somebody watches, a number that is odd during a write, and all steps."""
_numbers = itertools.count()


class PublishedStates:
    """The mapped numbers of an environment; one process publishes them, another one reads."""

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
        """Ask for states during the next seconds; 0 asks for no more."""
        self.header[_UNTIL] = time.monotonic() + seconds if seconds else 0.0

    @property
    def steps(self) -> int:
        """Steps that the environment has had."""
        return int(self.header[_STEPS])

    @property
    def sequence(self) -> int:
        """A number that differs from state to state, and is odd while one is written."""
        return int(self.header[_SEQUENCE])

    def read(self) -> tuple[NDArray[np.float64], ...] | None:
        """Return copies of positions, mocap bodies, steps and rewards; ``None`` if they were being written."""
        before = self.sequence
        copies = tuple(part.copy() for part in (self.qpos, self.mocap, self.step, self.reward))
        return copies if before == self.sequence and before and not before % 2 else None


class Publisher:
    """Publishes the states of an environment; it is called after every step."""

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
        partial.replace(folder / f"{name}.json")  # last: whoever finds it finds the others

    def __call__(self, reward: Tensor) -> None:
        """Publish the present state if somebody watches and it is time."""
        header = self._header
        header[_STEPS] += 1.0
        if not header[_UNTIL]:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PERIOD
        if now > header[_UNTIL]:
            header[_UNTIL] = 0.0  # whoever watched is gone
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
    """Return joint positions ``[count, nq]`` and poses of mocap bodies ``[count, nmocap, 7]`` of the first envs, with
    markers such as goals where they belong."""
    physics = env.physics
    qpos = np.array(_host(physics.qpos[:count]), np.float64)
    mocap = np.empty((count, int(physics.model.nmocap), 7))
    if mocap.size:
        mocap[..., :3], mocap[..., 3:] = _host(physics.mocap_pos[:count]), _host(physics.mocap_quat[:count])
        for body, places in env.task.markers().items():
            mocap[:, physics.mocap_id(body), :3] = _host(places[:count])
    return qpos, mocap


def step_seconds(env: TaskEnv) -> float:
    """Return the simulated time of a step."""
    return float(env.physics.model.opt.timestep) * env.task.substeps


def _host(values: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = values.detach().cpu().numpy()
    return array


def publish_if_asked(env: TaskEnv) -> TaskEnv:
    """Publish the states of an environment where this process was started with a viewer beside it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and os.path.isdir(folder):
        env.on_step = Publisher(env, Path(folder))
    return env
