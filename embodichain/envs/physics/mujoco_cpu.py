"""Physics on the CPU: MuJoCo's own batch of simulations on its own thread pool.

``mujoco.batch.Batch`` keeps the integration state of every env (positions, velocities, controls, the solver's warm
start) as one row of one float64 array, and one ``MjData`` per *thread*. A step equals ``mj_step`` on a separate
``MjData`` per env, bit for bit, whatever the number of threads.
"""

from __future__ import annotations

import os
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco import batch
from torch import Tensor

from embodichain.envs.physics.base import Physics
from embodichain.errors import SimulationError

# Bad positions, velocities and accelerations: these warnings follow each other.
_UNSTABLE = slice(int(mujoco.mjtWarning.mjWARN_BADQPOS), int(mujoco.mjtWarning.mjWARN_BADQACC) + 1)


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Closed:
    """Stands where the batch was: whatever is asked of it, the answer is that it is gone."""

    def __getattr__(self, name: str) -> Any:
        raise SimulationError("this environment was closed and cannot simulate any more: make a new one")


class MujocoCpuPhysics(Physics):
    """Steps all envs on ``num_threads`` native threads (0: every core this process may use)."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, num_threads: int = 0) -> None:
        self.model = model
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self.num_threads = num_threads or available_cores()
        self._batch: Any = batch.Batch(model, nsim=num_envs, nthread=min(self.num_threads, num_envs))
        self._state = torch.from_numpy(self._batch.state)
        self.qpos = torch.from_numpy(self._batch.bind("qpos"))
        self.qvel = torch.from_numpy(self._batch.bind("qvel"))
        self.ctrl = torch.from_numpy(self._batch.bind("ctrl"))
        self._sensordata = self._batch.bind("sensordata") if model.nsensordata else np.zeros((num_envs, 0))
        self._sensors_current = False
        self._fields: dict[str, Tensor] = {}
        self._rest = self._state[0].clone()
        self._counters = torch.from_numpy(self._batch.warning)[:, _UNSTABLE, 1]
        self._warnings = self._counters.sum(dim=1)
        self._diverged = torch.zeros(num_envs, dtype=torch.bool)

    def step(self, count: int) -> None:
        self._sensors_current = False
        try:
            self._batch.step(nstep=count)
        except batch.SimulationError as error:
            raise SimulationError(f"MuJoCo could not step: {error}") from error
        warnings = self._counters.sum(dim=1)
        self._diverged = warnings != self._warnings
        self._warnings = warnings

    def set(self, env_ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        self._sensors_current = False
        self._state[env_ids] = self._rest  # time, actuators, warm start and applied forces as in a new MjData
        self.qpos[env_ids] = qpos.to(torch.float64)
        self.qvel[env_ids] = qvel.to(torch.float64)

    def set_where(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        env_ids = torch.nonzero(mask).reshape(-1)
        self.set(env_ids, qpos[env_ids], qvel[env_ids])

    def state(self) -> Tensor:
        return self._state.clone()

    def set_state(self, env_ids: Tensor, state: Tensor) -> None:
        self._sensors_current = False
        self._state[env_ids] = state

    @property
    def sensordata(self) -> Tensor:
        # After a step, MuJoCo's sensors describe the state one substep ago; this runs the forward pass in place.
        if not self._sensors_current and self.model.nsensordata:
            saved = self._state.clone()  # the forward pass also updates the solver's warm start
            self._batch.forward()
            self._state.copy_(saved)
            self._sensors_current = True
        return torch.from_numpy(self._sensordata.copy())

    @property
    def diverged(self) -> Tensor:
        return self._diverged

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
        self._state, self.qpos, self.qvel, self.ctrl = (
            t.clone() for t in (self._state, self.qpos, self.qvel, self.ctrl)
        )
        self._sensordata, self._counters = self._sensordata.copy(), self._counters.clone()
        self._fields = {name: field.clone() for name, field in self._fields.items()}
        self._batch = _Closed()
