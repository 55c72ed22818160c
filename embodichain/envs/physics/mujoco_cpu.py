"""Physics on the CPU: ``mujoco.batch.Batch`` on its own threads, bit for bit equal to ``mj_step`` env by env."""

import logging
import os
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco import batch
from torch import Tensor

from embodichain.envs.physics import Physics
from embodichain.errors import SimulationError

_LOG = logging.getLogger(__name__)
# Bad positions, velocities and accelerations: these warnings follow each other.
_UNSTABLE = slice(int(mujoco.mjtWarning.mjWARN_BADQPOS), int(mujoco.mjtWarning.mjWARN_BADQACC) + 1)


_limits: list[int] = []


def available_cores() -> int:
    """Return the number of cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_limits])


def limit_cores(count: int) -> None:
    """Let this process use at most ``count`` cores of its machine, which a scheduler has reserved for it."""
    _limits[:] = [count]


def log_warnings() -> None:
    """Send MuJoCo's warnings to the log instead of ``MUJOCO_LOG.TXT``, unless there is a handler already."""
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(lambda message: _LOG.warning("MuJoCo: %s", message))


class _Closed:
    """Replaces the batch of a closed environment; any use of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise SimulationError("this environment was closed and cannot simulate any more: make a new one")


class MujocoCpuPhysics(Physics):
    """Steps all envs on ``num_threads`` native threads (0: every core this process may use)."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, num_threads: int = 0) -> None:
        log_warnings()
        self.model = model
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self.num_threads = num_threads or available_cores()
        self._batch: Any = batch.Batch(model, nsim=num_envs, nthread=min(self.num_threads, num_envs))
        self._state = torch.from_numpy(self._batch.state)
        # A row of the state is the time, the positions, the velocities, and more.
        time, nq, nv = mujoco.mj_stateSize(model, int(mujoco.mjtState.mjSTATE_TIME)), int(model.nq), int(model.nv)
        self._motion = self._state[:, time : time + nq + nv]
        self.qpos, self.qvel = self._motion[:, :nq], self._motion[:, nq:]
        self.ctrl = torch.from_numpy(self._batch.bind("ctrl"))
        self._sensordata = self._batch.bind("sensordata") if model.nsensordata else np.zeros((num_envs, 0))
        self._sensors_current = False
        self._fields: dict[str, Tensor] = {}
        self._rest = self._state[0].clone()
        self._warned = self._batch.warning.tobytes()

    def step(self, count: int) -> None:
        self._sensors_current = False
        try:
            self._batch.step(nstep=count)
        except batch.SimulationError as error:
            raise SimulationError(f"MuJoCo could not step: {error}") from error
        self.diverged = None
        if self._batch.warning.tobytes() != self._warned:  # MuJoCo counts its warnings; nearly always, there are none
            unstable = self._batch.warning[:, _UNSTABLE, 1].any(axis=1)
            if unstable.any():
                self.diverged = torch.from_numpy(unstable)
            # From zero again, as MuJoCo does when it resets an env: otherwise a second time looks like the first.
            self._batch.warning[:, _UNSTABLE] = 0
            self._warned = self._batch.warning.tobytes()

    def set(self, env_ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        self._sensors_current = False
        self._state[env_ids] = self._rest  # time, actuators, warm start and applied forces as in a new MjData
        self.qpos[env_ids] = qpos.to(torch.float64)
        self.qvel[env_ids] = qvel.to(torch.float64)

    def state(self) -> Tensor:
        return self._state.clone()

    def set_state(self, env_ids: Tensor, state: Tensor) -> None:
        self._sensors_current = False
        self._state.index_copy_(0, env_ids, state)

    def snapshot(self, env_ids: Tensor | None = None) -> Tensor:
        return (self._motion if env_ids is None else self._motion.index_select(0, env_ids)).float()

    @property
    def sensordata(self) -> Tensor:
        # After a step, MuJoCo's sensors describe the state one substep ago; this runs the forward pass in place.
        if not self._sensors_current and self.model.nsensordata:
            saved = self._state.clone()  # the forward pass also updates the solver's warm start
            self._batch.forward()
            self._state.copy_(saved)
            self._sensors_current = True
        return torch.from_numpy(self._sensordata.copy())

    def model_field(self, name: str) -> Tensor:
        if name not in self._fields:
            self._fields[name] = torch.from_numpy(self._batch.expand(name))
        return self._fields[name]

    def refresh_model(self, env_ids: Tensor) -> None:
        self._batch.set_const(torch.unique(env_ids).numpy())  # sorted, as the batch wants them

    def load(self, data: mujoco.MjData, env: int) -> None:
        self._batch.get_data(env, data)

    def close(self) -> None:
        # A view of the state keeps the batch and its threads alive, so the tensors become copies.
        self._state, self._motion, self.qpos, self.qvel, self.ctrl = (
            t.clone() for t in (self._state, self._motion, self.qpos, self.qvel, self.ctrl)
        )
        self._sensordata = self._sensordata.copy()
        self._fields = {name: field.clone() for name, field in self._fields.items()}
        self._batch = _Closed()
