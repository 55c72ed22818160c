"""Physics on a GPU: MuJoCo Warp steps all worlds at once, on tensors that torch shares without copies.

The substeps of one call are recorded once as a CUDA graph and replayed on torch's stream; nothing here waits for the
device. Numbers are float32, so trajectories agree with the CPU backend within a tolerance, not bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mujoco
import torch
from torch import Tensor

from embodichain.envs.physics.base import Physics, PictureTaker
from embodichain.envs.physics.warp_cameras import WarpCameras
from embodichain.envs.physics.warp_capacity import capacity
from embodichain.envs.physics.warp_device import find_device, out_of_memory
from embodichain.envs.physics.warp_memory import Workspace
from embodichain.envs.rendering import CameraCfg
from embodichain.errors import ConfigError
from embodichain.extras import require

_LOG = logging.getLogger(__name__)
_STATE_FIELDS = ("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl")
_MASS_CONSTANTS = ("body_subtreemass", "dof_invweight0", "body_invweight0", "tendon_invweight0", "actuator_acc0")
_TOO_LARGE = 1e10  # MuJoCo's own bound of a sane state


class MujocoWarpPhysics(Physics):
    """``num_envs`` worlds on one device (``cuda``, ``cuda:1``; ``cpu`` works too and is slow).

    The same actions give the same trajectories up to rounding: contacts come in another order from run to run, and sums
    over them are added up in that order.
    """

    def __init__(self, model: mujoco.MjModel, num_envs: int, device: str = "cuda") -> None:
        self._wp = require("warp", extra="gpu")
        self.device = find_device(device, self._wp)
        self._mjw = require("mujoco_warp", extra="gpu")
        self.model, self.num_envs = model, num_envs
        room = capacity(model, num_envs)
        try:
            with self._wp.ScopedDevice(self._wp.device_from_torch(self.device)):
                self._model = self._mjw.put_model(model)
                self._data = self._mjw.make_data(model, nworld=num_envs, naconmax=room.contacts, njmax=room.rows)
        except NotImplementedError as error:
            raise ConfigError(f"device: MuJoCo Warp cannot simulate this model ({error}); use device 'cpu'") from error
        except (RuntimeError, ValueError) as error:
            raise out_of_memory(error, num_envs, self.device) from error
        arrays = {name: getattr(self._data, name) for name in _STATE_FIELDS}
        self._arrays = {name: self._wp.to_torch(array) for name, array in arrays.items() if array.size}
        empty = torch.zeros(num_envs, 0, device=self.device)
        self.qpos, self.qvel, self.ctrl = (self._arrays.get(name, empty) for name in ("qpos", "qvel", "ctrl"))
        self._columns = {name: array.reshape(num_envs, -1) for name, array in self._arrays.items()}
        self._rest = {name: column[0].clone() for name, column in self._columns.items()}
        self._all = torch.arange(num_envs, device=self.device)
        self._fields: dict[str, Tensor] = {}
        self._graphs: dict[int, Any] = {}
        self._workspace = Workspace(self.device)
        self._diverged = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    # --- simulating -----------------------------------------------------------------------------------------------

    def step(self, count: int) -> None:
        """Advance all worlds; :meth:`settle` completes the step."""
        if self.device.type == "cpu":
            self._substeps(count)
            return
        if count not in self._graphs:
            self._graphs[count] = self._record(lambda: self._substeps(count))
        stream = self._wp.stream_from_torch(torch.cuda.current_stream(self.device))
        self._wp.capture_launch(self._graphs[count], stream=stream)

    def settle(self) -> None:
        """Start worlds over that are no longer sane, as MuJoCo itself does; the environment ends their episodes."""
        sane = (self.qpos.abs().amax(dim=1) < _TOO_LARGE) & (self.qvel.abs().amax(dim=1) < _TOO_LARGE)
        self._diverged = ~sane  # NaN compares as false
        rows = sane.unsqueeze(1)
        for name, column in self._columns.items():
            if name != "ctrl":
                column.copy_(torch.where(rows, column, self._rest[name]))

    def _substeps(self, count: int) -> None:
        if "body_mass" in self._fields:  # constants that follow from masses, for whatever was written to them
            self._mjw.set_const(self._model, self._data, restore=False)
        for _ in range(count):
            self._mjw.step(self._model, self._data)

    def _record(self, work: Callable[[], None]) -> Any:
        """Return a graph of ``work``, run once before to compile and load its kernels; the state is as before."""
        saved = self.state()
        with self._side_stream() as stream, self._wp.ScopedAllocator(stream.device, self._workspace):
            work()
            with self._wp.ScopedCapture(stream=stream) as capture:
                work()
        self.set_state(self._all, saved)
        return capture.graph

    @contextmanager
    def _side_stream(self) -> Iterator[Any]:
        """Let Warp work on a stream that can be recorded (torch's default one cannot), in torch's order."""
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        stream = self._wp.stream_from_torch(side)
        with self._wp.ScopedStream(stream, sync_enter=False, sync_exit=False):
            yield stream
        current.wait_stream(side)

    @contextmanager
    def _torch_stream(self) -> Iterator[None]:
        """Let Warp work on torch's present stream."""
        if self.device.type == "cpu":
            with self._wp.ScopedDevice("cpu"):
                yield
            return
        stream = self._wp.stream_from_torch(torch.cuda.current_stream(self.device))
        with self._wp.ScopedStream(stream, sync_enter=False, sync_exit=False):
            yield

    @property
    def diverged(self) -> Tensor:
        return self._diverged

    @property
    def sensordata(self) -> Tensor:
        if not self.model.nsensordata:
            return torch.zeros(self.num_envs, 0, device=self.device)
        saved = self.state()
        with self._torch_stream():
            self._mjw.forward(self._model, self._data)
        self.set_state(self._all, saved)
        return self._wp.to_torch(self._data.sensordata).clone()

    # --- the state ------------------------------------------------------------------------------------------------

    def set(self, env_ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        for name, column in self._columns.items():
            column[env_ids] = self._rest[name]
        self.qpos[env_ids] = qpos.to(torch.float32)
        self.qvel[env_ids] = qvel.to(torch.float32)

    def set_where(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        new = {**self._rest, "qpos": qpos.to(torch.float32), "qvel": qvel.to(torch.float32)}
        rows = mask.unsqueeze(1)
        for name, column in self._columns.items():
            column.copy_(torch.where(rows, new[name], column))

    def state(self) -> Tensor:
        return torch.cat(list(self._columns.values()), dim=1)

    def set_state(self, env_ids: Tensor, state: Tensor) -> None:
        parts = state.split([column.shape[1] for column in self._columns.values()], dim=1)
        for column, part in zip(self._columns.values(), parts, strict=True):
            column[env_ids] = part

    def load(self, data: mujoco.MjData, env: int) -> None:
        data.qpos[:] = self.qpos[env].cpu().numpy()
        data.qvel[:] = self.qvel[env].cpu().numpy()
        data.ctrl[:] = self.ctrl[env].cpu().numpy()
        data.time = float(self._arrays["time"][env])

    # --- pictures -------------------------------------------------------------------------------------------------

    def open_cameras(self, cfgs: Sequence[CameraCfg]) -> PictureTaker | None:
        parts = (self._wp, self._mjw, self._model, self._data)
        try:
            return WarpCameras(self.model, parts, cfgs, self._torch_stream) if cfgs else None
        except (NotImplementedError, ValueError) as error:
            _LOG.warning("cameras are drawn on the CPU, which costs speed: %s", error)
            return None

    # --- the model ------------------------------------------------------------------------------------------------

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
        if not shared.size:
            return torch.zeros(self.num_envs, 0, device=self.device)
        values = self._wp.to_torch(shared)
        own = values[:1].repeat(self.num_envs, *([1] * (values.dim() - 1))).contiguous()
        setattr(self._model, name, self._wp.from_torch(own, dtype=shared.dtype))
        return own

    def refresh_model(self, env_ids: Tensor) -> None:
        """Nothing is to be done: every step begins by deriving the constants of all worlds."""
