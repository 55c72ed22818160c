"""Physics on the CPU: ``mujoco.batch.Batch`` on native threads, bit-identical to ``mj_step`` env by env."""

import logging
import os
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco import batch
from torch import Tensor

from embodichain.envs.physics import VISUAL, Physics, Poses
from embodichain.envs.physics.contact_forces import ContactForces, computes_contact_forces
from embodichain.errors import SimulationError

_LOG = logging.getLogger(__name__)
# Warnings about bad positions, velocities and accelerations are consecutive.
_UNSTABLE = slice(int(mujoco.mjtWarning.mjWARN_BADQPOS), int(mujoco.mjtWarning.mjWARN_BADQACC) + 1)


_limits: list[int] = []


def available_cores() -> int:
    """Return the number of cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_limits])


def limit_cores(count: int) -> None:
    """Restrict this process to at most ``count`` cores, as reserved by a scheduler."""
    _limits[:] = [count]


def log_warnings() -> None:
    """Send MuJoCo's warnings to the log instead of ``MUJOCO_LOG.TXT``, unless a handler is set already."""
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_log)


def _log(message: str) -> None:
    if "XML contains a 'NaN'" not in message:  # an error that names the element follows
        _LOG.warning("MuJoCo: %s", message)


class _Closed:
    """Replaces the batch of a closed environment; any use raises."""

    def __getattr__(self, name: str) -> Any:
        raise SimulationError("this environment was closed and cannot simulate any more: make a new one")


class MujocoCpuPhysics(Physics):
    """Steps all envs on ``num_threads`` native threads (0: all available cores)."""

    motion: Tensor

    def __init__(self, model: mujoco.MjModel, num_envs: int, num_threads: int = 0, outputs: Sequence[str] = ()) -> None:
        log_warnings()
        self.model = model
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self.num_threads = num_threads or available_cores()
        self._batch: Any = batch.Batch(model, nsim=num_envs, nthread=min(self.num_threads, num_envs))
        self._state = torch.from_numpy(self._batch.state)
        # A row of the state starts with time, positions and velocities.
        time, nq, nv = mujoco.mj_stateSize(model, int(mujoco.mjtState.mjSTATE_TIME)), int(model.nq), int(model.nv)
        self._columns = slice(time, time + nq), slice(time + nq, time + nq + nv)
        self.motion = self._state[:, time : time + nq + nv]
        self.qpos, self.qvel = self.motion[:, :nq], self.motion[:, nq:]
        self.ctrl = torch.from_numpy(self._batch.bind("ctrl"))
        self.mocap_pos, self.mocap_quat = self._mocap()
        self._sensordata = self._batch.bind("sensordata") if model.nsensordata else np.zeros((num_envs, 0))
        self._sensors_current = False
        self._fields: dict[str, Tensor] = {}
        self._applied: Tensor | None = None
        self._rest = self._state[0].clone()
        self._warned = self._batch.warning.tobytes()
        self._arrays = {name: self._batch.bind(name) for name in outputs}
        for array in self._arrays.values():
            array.flags.writeable = True  # rows are restored by ``set_state``
        self.outputs = {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        self._forces = None
        if "cfrc_ext" in outputs and not computes_contact_forces(model):
            self._forces = ContactForces(model, self._batch, self._arrays, min(self.num_threads, num_envs))

    def step(self, count: int) -> None:
        self._sensors_current = False
        try:
            if self._forces is not None:
                self._forces.step(count)
            else:
                self._batch.step(nstep=count)
        except (batch.SimulationError, mujoco.FatalError) as error:
            raise SimulationError(f"MuJoCo could not step: {error}") from error
        self.diverged = None
        if self._batch.warning.tobytes() != self._warned:  # MuJoCo counts warnings; usually there are none
            unstable = self._batch.warning[:, _UNSTABLE, 1].any(axis=1)
            if unstable.any():
                self.diverged = torch.from_numpy(unstable)
            # Reset the counters, as MuJoCo does when it resets an env, so that a second divergence is detected.
            self._batch.warning[:, _UNSTABLE] = 0
            self._warned = self._batch.warning.tobytes()

    def _mocap(self) -> tuple[Tensor, Tensor]:
        """Return views of the mocap poses in the state."""
        before, own = 0, mujoco.mjtState.mjSTATE_MOCAP_POS
        for part in range(int(own).bit_length() - 1):
            if (1 << part) & int(mujoco.mjtState.mjSTATE_INTEGRATION):
                before += mujoco.mj_stateSize(self.model, 1 << part)
        count = int(self.model.nmocap)
        pos, quat = self._state[:, before : before + 7 * count].split([3 * count, 4 * count], dim=1)
        return pos.view(self.num_envs, count, 3), quat.view(self.num_envs, count, 4)

    def set(self, env_ids: Tensor, qpos: Tensor, qvel: Tensor, poses: Poses | None = None) -> None:
        self._sensors_current = False
        rows = self._rest.repeat(env_ids.numel(), 1)  # also resets time, actuators, warm start and applied forces
        for columns, values in zip(self._columns, (qpos, qvel), strict=True):
            rows[:, columns] = values
        self._state.index_copy_(0, env_ids, rows)
        for body, pose in (poses or {}).items():
            index, values = self.mocap_id(body), pose.to(torch.float64)
            self.mocap_pos[env_ids, index], self.mocap_quat[env_ids, index] = values[:, :3], values[:, 3:]
        if self.outputs:
            ids = np.unique(env_ids.numpy())
            self._batch.forward(ids)
            if "cfrc_ext" in self._arrays:  # the forward pass does not compute contact forces
                self._arrays["cfrc_ext"][ids] = 0.0

    def state(self) -> Tensor:
        return torch.cat((self._state, *(output.flatten(1) for output in self.outputs.values())), dim=1)

    def state_rows(self, env_ids: Tensor) -> Tensor:
        parts = (self._state, *(output.flatten(1) for output in self.outputs.values()))
        return torch.cat([part.index_select(0, env_ids) for part in parts], dim=1)

    def set_state(self, env_ids: Tensor, state: Tensor) -> None:
        self._sensors_current = False
        ids, rows, own = env_ids.numpy(), state.numpy(), self._state.shape[1]  # faster than tensors for few rows
        self._batch.state[ids] = rows[:, :own]
        for array in self._arrays.values():
            size = array[0].size
            array[ids] = rows[:, own : own + size].reshape(-1, *array.shape[1:])
            own += size

    def snapshot(self, env_ids: Tensor | None = None) -> Tensor:
        return (self.motion if env_ids is None else self.motion.index_select(0, env_ids)).float()

    @property
    def sensordata(self) -> Tensor:
        # After a step, sensors lag by one substep; the forward pass updates them.
        if not self._sensors_current and self.model.nsensordata:
            saved = self.state()  # as the forward pass changes the solver's warm start and the outputs
            self._batch.forward()
            self.set_state(torch.arange(self.num_envs), saved)
            self._sensors_current = True
        return torch.from_numpy(self._sensordata.copy())

    def model_field(self, name: str) -> Tensor:
        if name not in self._fields and name in VISUAL:  # not used by the simulation
            nominal = np.asarray(getattr(self.model, name))[None]
            self._fields[name] = torch.from_numpy(np.repeat(nominal, self.num_envs, axis=0))
        elif name not in self._fields:
            self._fields[name] = torch.from_numpy(self._batch.expand(name))
            if self._forces is not None:
                self._forces.let_models_differ()
        return self._fields[name]

    def applied_forces(self) -> Tensor:
        if self._applied is None:
            self._applied = torch.from_numpy(self._batch.bind("xfrc_applied"))
        return self._applied

    def refresh_model(self, env_ids: Tensor) -> None:
        self._batch.set_const(torch.unique(env_ids).numpy())  # must be sorted

    def load(self, data: mujoco.MjData, env: int) -> None:
        self._batch.get_data(env, data)

    def close(self) -> None:
        # Views of the state keep the batch and its threads alive, so replace them by copies.
        names = ("_state", "motion", "qpos", "qvel", "ctrl", "mocap_pos", "mocap_quat")
        for name in names:
            setattr(self, name, getattr(self, name).clone())
        if self._forces is not None:
            self._forces.close()
            self._forces = None
        self.outputs = {name: output.clone() for name, output in self.outputs.items()}
        self._arrays = {name: output.numpy() for name, output in self.outputs.items()}
        self._sensordata = self._sensordata.copy()
        self._applied = None if self._applied is None else self._applied.clone()
        self._fields = {name: field.clone() for name, field in self._fields.items()}
        self._batch = _Closed()
