"""Physics on a GPU: MuJoCo Warp steps all worlds at once, on tensors that torch shares without copies.

The substeps of one call are recorded once as CUDA graphs and replayed in torch's order; nothing here waits for the
device. Numbers are float32, so trajectories agree with the CPU backend within a tolerance, not bit for bit.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mujoco
import torch
from torch import Tensor

from embodichain.envs.physics.base import Physics, PictureTaker
from embodichain.envs.physics.warp_cameras import WarpCameras
from embodichain.envs.physics.warp_device import find_device, out_of_memory
from embodichain.envs.physics.warp_worlds import Worlds
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

    def __init__(self, model: mujoco.MjModel, num_envs: int, device: str = "cuda", parts: int = 1) -> None:
        """Make worlds; those of ``parts``, equal in number, are simulated side by side. Cameras need them in one."""
        self._wp = require("warp", extra="gpu")
        self.device = find_device(device, self._wp)
        self._mjw = require("mujoco_warp", extra="gpu")
        self.model, self.num_envs = model, num_envs
        ends = [num_envs * part // parts for part in range(parts + 1)]
        try:
            self._parts = [
                Worlds(self._wp, self._mjw, model, slice(begin, end), self.device)
                for begin, end in itertools.pairwise(ends)
            ]
        except NotImplementedError as error:
            raise ConfigError(f"device: MuJoCo Warp cannot simulate this model ({error}); use device 'cpu'") from error
        except (RuntimeError, ValueError) as error:
            raise out_of_memory(error, num_envs, self.device) from error
        self._arrays = {name: self._joined(name) for name in _STATE_FIELDS if getattr(self._parts[0].data, name).size}
        empty = torch.zeros(num_envs, 0, device=self.device)
        self.qpos, self.qvel, self.ctrl = (self._arrays.get(name, empty) for name in ("qpos", "qvel", "ctrl"))
        self._columns = {name: array.reshape(num_envs, -1) for name, array in self._arrays.items()}
        self._rest = {name: column[0].clone() for name, column in self._columns.items()}
        self._all = torch.arange(num_envs, device=self.device)
        self._fields: dict[str, Tensor] = {}
        self._diverged = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    def _joined(self, name: str) -> Tensor:
        """Return a field of the data of all worlds as one tensor, which they share from now on."""
        if len(self._parts) == 1:
            shared: Tensor = self._wp.to_torch(getattr(self._parts[0].data, name))
            return shared
        whole = torch.cat([self._wp.to_torch(getattr(part.data, name)) for part in self._parts])
        for part in self._parts:
            part.share(name, whole)
        return whole

    # --- simulating -----------------------------------------------------------------------------------------------

    def step(self, count: int) -> None:
        """Advance all worlds; :meth:`settle` completes the step."""
        derive = "body_mass" in self._fields
        if self.device.type == "cpu":
            for part in self._parts:
                part.advance(count, derive)
            return
        if not all(part.is_recorded(count) for part in self._parts):
            saved = self.state()
            for part in self._parts:
                part.record(count, derive)
            self.set_state(self._all, saved)
        current = torch.cuda.current_stream(self.device)
        first, *others = self._parts
        streams = [part.stream for part in others if part.stream is not None]
        for part, stream in zip(others, streams, strict=True):
            stream.wait_stream(current)
            part.replay(count, stream)
        first.replay(count, current)
        for stream in streams:
            current.wait_stream(stream)

    def settle(self) -> None:
        """Start worlds over that are no longer sane, as MuJoCo itself does; the environment ends their episodes."""
        sane = (self.qpos.abs().amax(dim=1) < _TOO_LARGE) & (self.qvel.abs().amax(dim=1) < _TOO_LARGE)
        self._diverged = ~sane  # NaN compares as false
        rows = sane.unsqueeze(1)
        for name, column in self._columns.items():
            if name != "ctrl":
                column.copy_(torch.where(rows, column, self._rest[name]))

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
            for part in self._parts:
                self._mjw.forward(part.model, part.data)
        self.set_state(self._all, saved)
        return torch.cat([self._wp.to_torch(part.data.sensordata) for part in self._parts])

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
        if not cfgs:
            return None
        if len(self._parts) > 1:
            raise ConfigError(f"cameras need all worlds in one part, got {len(self._parts)}: use parts=1")
        simulation = (self._wp, self._mjw, self._parts[0].model, self._parts[0].data)
        try:
            return WarpCameras(self.model, simulation, cfgs, self._torch_stream)
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
        return self._fields[name]

    def _expand(self, name: str) -> Tensor:
        """Give a model field one row per world."""
        shared = getattr(self._parts[0].model, name)
        if not shared.size:
            return torch.zeros(self.num_envs, 0, device=self.device)
        values = self._wp.to_torch(shared)
        own = values[:1].repeat(self.num_envs, *([1] * (values.dim() - 1))).contiguous()
        for part in self._parts:
            part.give(name, own)
        return own

    def refresh_model(self, env_ids: Tensor) -> None:
        """Nothing is to be done: every step begins by deriving the constants of all worlds."""
