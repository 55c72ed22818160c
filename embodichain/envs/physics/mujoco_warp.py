"""Physics on a GPU: MuJoCo Warp steps all worlds at once, on tensors that torch shares without copies.

The substeps of one call are recorded once as a CUDA graph and replayed; nothing here waits for the device. Numbers are
float32, so trajectories agree with the CPU backend within a tolerance, not bit for bit.
"""

from __future__ import annotations

from typing import Any

import mujoco
import torch
from torch import Tensor

from embodichain.envs.physics.base import Physics
from embodichain.errors import ConfigError, SimulationError
from embodichain.extras import require

_STATE_FIELDS = ("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl")
_MASS_CONSTANTS = ("body_subtreemass", "dof_invweight0", "body_invweight0", "actuator_acc0")


class MujocoWarpPhysics(Physics):
    """``num_envs`` worlds on one device (``cuda``, ``cuda:1``; ``cpu`` works too and is slow)."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, device: str = "cuda") -> None:
        self._wp, self._mjw = require("warp", extra="gpu"), require("mujoco_warp", extra="gpu")
        self._wp.config.quiet = True
        self._wp.init()
        self.model = model
        self.num_envs = num_envs
        self.device = _check_device(device)
        self._wp_device = self._wp.device_from_torch(self.device)
        try:
            with self._wp.ScopedDevice(self._wp_device):
                self._model = self._mjw.put_model(model)
                self._data = self._mjw.make_data(model, nworld=num_envs)
        except NotImplementedError as error:
            raise ConfigError(f"device: MuJoCo Warp cannot simulate this model ({error}); use device 'cpu'") from error
        except RuntimeError as error:
            raise SimulationError(
                f"{num_envs} worlds do not fit on {self.device} ({error}); use fewer num_envs or close other programs"
            ) from error
        self._arrays = {name: self._wp.to_torch(getattr(self._data, name)) for name in _STATE_FIELDS}
        self.qpos, self.qvel, self.ctrl = (self._arrays[name] for name in ("qpos", "qvel", "ctrl"))
        self._columns = {name: array.reshape(num_envs, -1) for name, array in self._arrays.items()}
        self._rest = {name: column[0].clone() for name, column in self._columns.items()}
        self._fields: dict[str, Tensor] = {}
        self._graphs: dict[int, Any] = {}
        self._diverged = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    def step(self, count: int) -> None:
        if self.device.type == "cpu":
            self._substeps(count)
        else:
            self._step_cuda(count)
        # A world that is no longer finite starts over, as MuJoCo itself does; the environment ends its episode.
        broken = ~torch.isfinite(self.qpos.sum(dim=1) + self.qvel.sum(dim=1))
        self._diverged = broken
        for name, column in self._columns.items():
            if name != "ctrl":
                column.copy_(torch.where(broken.unsqueeze(1), self._rest[name], column))

    def _step_cuda(self, count: int) -> None:
        stream = self._wp.stream_from_torch(torch.cuda.current_stream(self.device))
        with self._wp.ScopedStream(stream, sync_enter=False, sync_exit=False):
            if torch.cuda.is_current_stream_capturing():  # part of a larger graph
                self._wp.capture_begin(stream=stream, external=True)
                self._substeps(count)
                self._wp.capture_end(stream=stream)
                return
            if count not in self._graphs:
                saved = self.state()
                self._substeps(count)  # compiles and loads what the graph will call
                self.set_state(torch.arange(self.num_envs, device=self.device), saved)
                with self._wp.ScopedCapture(stream=stream) as capture:
                    self._substeps(count)
                self._graphs[count] = capture.graph
            self._wp.capture_launch(self._graphs[count], stream=stream)

    def _substeps(self, count: int) -> None:
        for _ in range(count):
            self._mjw.step(self._model, self._data)

    def set(self, env_ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        for name, column in self._columns.items():
            column[env_ids] = self._rest[name]
        self.qpos[env_ids] = qpos.to(torch.float32)
        self.qvel[env_ids] = qvel.to(torch.float32)

    def set_where(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        new = {**self._rest, "qpos": qpos.to(torch.float32), "qvel": qvel.to(torch.float32)}
        for name, column in self._columns.items():
            column.copy_(torch.where(mask.unsqueeze(1), new[name], column))

    def state(self) -> Tensor:
        return torch.cat(list(self._columns.values()), dim=1)

    def set_state(self, env_ids: Tensor, state: Tensor) -> None:
        parts = state.split([column.shape[1] for column in self._columns.values()], dim=1)
        for column, part in zip(self._columns.values(), parts, strict=True):
            column[env_ids] = part

    @property
    def sensordata(self) -> Tensor:
        if not self.model.nsensordata:
            return torch.zeros(self.num_envs, 0, device=self.device)
        saved = self.state()
        with self._wp.ScopedDevice(self._wp_device):
            self._mjw.forward(self._model, self._data)
        self.set_state(torch.arange(self.num_envs, device=self.device), saved)
        return self._wp.to_torch(self._data.sensordata).clone()

    @property
    def diverged(self) -> Tensor:
        return self._diverged

    def model_field(self, name: str) -> Tensor:
        if name not in self._fields:
            self._fields[name] = self._expand(name)
            if name == "body_mass":  # what follows from masses becomes per-world too
                for constant in _MASS_CONSTANTS:
                    self._expand(constant)
            self._graphs.clear()
        return self._fields[name]

    def _expand(self, name: str) -> Tensor:
        """Give a model field one row per world."""
        shared = getattr(self._model, name)
        values = self._wp.to_torch(shared)
        own = values[:1].repeat(self.num_envs, *([1] * (values.dim() - 1))).contiguous()
        setattr(self._model, name, self._wp.from_torch(own, dtype=shared.dtype))
        return own

    def refresh_model(self, env_ids: Tensor) -> None:
        with self._wp.ScopedDevice(self._wp_device):
            self._mjw.set_const(self._model, self._data)

    def load(self, data: mujoco.MjData, env: int) -> None:
        data.qpos[:] = self.qpos[env].cpu().numpy()
        data.qvel[:] = self.qvel[env].cpu().numpy()
        data.ctrl[:] = self.ctrl[env].cpu().numpy()
        data.time = float(self._arrays["time"][env])


def _check_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device: {name!r} was asked for, but torch finds no CUDA device; use 'cpu'")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device: {name!r} does not exist, this machine has {torch.cuda.device_count()} GPU(s)")
        return torch.device("cuda", index)
    return device
