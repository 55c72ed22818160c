"""Physics on a GPU: MuJoCo Warp steps all worlds at once, on tensors shared with torch without copies.

The substeps of one call are captured once as a CUDA graph and replayed on torch's stream, without synchronisation.
Numbers are float32, so trajectories agree with the CPU backend within a tolerance, not bit for bit.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.physics import DERIVING, Images, Physics, Poses, RenderAll
from embodichain.envs.physics.warp_cameras import WarpCameras
from embodichain.envs.scene_cfg import CameraCfg
from embodichain.errors import ConfigError, SimulationError
from embodichain.extras import require
from embodichain.utils.cuda_graphs import copy_where

_LOG = logging.getLogger(__name__)
_GIB = 1024**3
_MEMORY_ERRORS = ("alloc", "out of memory", "maximum representable")
"""Parts of Warp's error messages when there are too many worlds for the memory or for its indices."""
_STATE_FIELDS = ("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl", "mocap_pos", "mocap_quat")
_INPUTS = ("ctrl", "mocap_pos", "mocap_quat")
"""State that a step does not change."""
_MOTION_FIELDS = ("xpos", "xipos", "site_xpos", "cinert", "cvel")
"""Outputs that depend on positions and velocities only; all others are forces, which are zero after a reset."""
_INERTIAL_FIELDS = ("cinert", "cvel")
"""Those of them that ``kinematics`` alone does not compute."""
_FOLLOWS_MASS = (int(mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM), int(mujoco.mjtCamLight.mjCAMLIGHT_TARGETBODYCOM))
"""Modes of cameras and lights that depend on the centre of mass of a body."""
_CONSTANTS = {
    "FIXED": ("body_subtreemass",),
    "KIN0": ("cam_pos0", "cam_poscom0", "cam_mat0", "light_pos0", "light_poscom0", "light_dir0"),
    "INERT0": ("dof_invweight0", "body_invweight0", "tendon_invweight0", "actuator_acc0"),
}
"""Model constants that become per-world, by the group of ``set_const`` that computes them."""
_DERIVED = {
    "body_mass": ("FIXED", "INERT0"),
    **dict.fromkeys(("body_inertia", "body_ipos", "body_iquat", "dof_armature", "actuator_gear"), ("INERT0",)),
}
"""Groups that depend on a field; for other fields, all groups."""
_TOO_LARGE = 1e10  # MuJoCo's own bound for a valid state

_GEOM = mujoco.mjtGeom
_SMOOTH = frozenset((_GEOM.mjGEOM_SPHERE, _GEOM.mjGEOM_ELLIPSOID))
_MAX_CONTACTS = 8
"""Maximum contacts of one pair of bodies: two boxes, or two meshes."""
_CONTACTS = {
    frozenset((_GEOM.mjGEOM_PLANE, _GEOM.mjGEOM_BOX)): 4,
    frozenset((_GEOM.mjGEOM_PLANE, _GEOM.mjGEOM_CYLINDER)): 4,
    frozenset((_GEOM.mjGEOM_PLANE, _GEOM.mjGEOM_CAPSULE)): 2,
    frozenset((_GEOM.mjGEOM_CAPSULE, _GEOM.mjGEOM_BOX)): 2,
    frozenset((_GEOM.mjGEOM_CAPSULE,)): 2,
}
_EQUALITY_ROWS = {mujoco.mjtEq.mjEQ_CONNECT: 3, mujoco.mjtEq.mjEQ_WELD: 6}
_MOST_ROWS = 512  # in scenes with many meshes, never all of them are in contact
_TYPICAL_CONTACTS = 32  # per world; all worlds share one pool of contacts
_GRAIN = 512  # bytes; torch's own alignment


def find_device(name: str, warp: Any) -> torch.device:
    """Return the torch device of a config, initialised for Warp, or raise an error that says what to change."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device: {name!r} was asked for, but torch finds no CUDA device; use 'cpu', or install a driver and a "
                "torch built for CUDA"
            )
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"device: {name!r} does not exist, this machine has {torch.cuda.device_count()} GPU(s)")
    if warp.config.log_level == warp.LOG_INFO:  # one line per kernel; keep a level set by the user
        warp.config.log_level = warp.LOG_WARNING
    warp.init()
    if device.type == "cpu":
        return device
    if not warp.is_cuda_available():
        raise SimulationError("Warp finds no CUDA driver, though torch does: check that libcuda.so can be loaded")
    # The solver stops when all worlds have converged, which needs conditional graphs (CUDA 12.4).
    if not warp.is_conditional_graph_supported():
        found = ".".join(map(str, warp.get_cuda_driver_version() or ("no", "version")))
        raise SimulationError(
            f"the driver is too old for simulation on the GPU: it supports CUDA {found}, and 12.4 or newer is needed; "
            "update it, or use device 'cpu'"
        )
    return device


def out_of_memory(error: Exception, num_envs: int, device: torch.device) -> Exception:
    """Return the error to raise when allocating worlds failed; if memory ran out, it says what to change."""
    message = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(words in message for words in _MEMORY_ERRORS):
        free = f", {torch.cuda.mem_get_info(device)[0] / _GIB:.1f} GiB of it free" if device.type == "cuda" else ""
        return SimulationError(
            f"{num_envs} worlds do not fit into the memory of {device}{free}: use fewer num_envs, or end other "
            f"programs that use it ({message.splitlines()[0]})"
        )
    return error


class Capacity(NamedTuple):
    """Sizes to allocate: contacts in all worlds together, and constraint rows per world."""

    contacts: int
    rows: int


def capacity(model: mujoco.MjModel, num_envs: int, spare_rows: int = 0) -> Capacity:
    """Return the capacity for the contacts and constraints of a model; MuJoCo Warp drops what exceeds it."""
    rows = spare_rows + sum(_EQUALITY_ROWS.get(mujoco.mjtEq(int(kind)), 1) for kind in model.eq_type)
    for field in (model.dof_frictionloss, model.tendon_frictionloss, model.jnt_limited, model.tendon_limited):
        rows += int(np.count_nonzero(field))
    contacts = 0
    for first in range(model.ngeom):
        for second in range(first + 1, model.ngeom):
            if _can_touch(model, first, second):
                kinds = frozenset(_GEOM(int(model.geom_type[geom])) for geom in (first, second))
                count = 1 if kinds & _SMOOTH else _CONTACTS.get(kinds, _MAX_CONTACTS)
                dimension = max(int(model.geom_condim[first]), int(model.geom_condim[second]))
                contacts, rows = contacts + count, rows + count * _contact_rows(model, dimension)
    for pair in range(model.npair):
        contacts += _MAX_CONTACTS
        rows += _MAX_CONTACTS * _contact_rows(model, int(model.pair_dim[pair]))
    pool = max(contacts, num_envs * min(contacts, _TYPICAL_CONTACTS))
    return Capacity(max(pool, 1), int(np.clip(rows, 1, _MOST_ROWS)))


def _can_touch(model: mujoco.MjModel, first: int, second: int) -> bool:
    """Apply MuJoCo's collision filters: collision bits, same body, parent and child, two fixed bodies."""
    bits = (model.geom_contype[first] & model.geom_conaffinity[second]) | (
        model.geom_contype[second] & model.geom_conaffinity[first]
    )
    one, other = (int(model.body_weldid[model.geom_bodyid[geom]]) for geom in (first, second))
    if not bits or one == other:
        return False
    parents = [int(model.body_weldid[model.body_parentid[body]]) for body in (one, other)]
    related = (one != 0 and parents[1] == one) or (other != 0 and parents[0] == other)
    return not related or bool(model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_FILTERPARENT)


def _contact_rows(model: mujoco.MjModel, dimension: int) -> int:
    """Return the rows of a contact: 1 without friction, two per direction of a pyramid, one per dimension of a cone."""
    if dimension == 1 or model.opt.cone == mujoco.mjtCone.mjCONE_ELLIPTIC:
        return dimension
    return 2 * (dimension - 1)


class Workspace:
    """A caching allocator for Warp (its ``Allocator`` protocol) that reuses freed memory for arrays of the same size.

    Otherwise a CUDA graph of a step would allocate dozens of arrays at every replay. Memory is reused at once, so all
    work on it must be on one stream or in one graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._used: dict[int, Tensor] = {}

    def allocate(self, size_in_bytes: int) -> int:
        """Return the address of unused memory."""
        size = -(-size_in_bytes // _GRAIN) * _GRAIN
        free = self._free[size]
        block = free.pop() if free else torch.empty(size, dtype=torch.uint8, device=self._device)
        self._used[block.data_ptr()] = block
        return block.data_ptr()

    def deallocate(self, ptr: int, size_in_bytes: int) -> None:
        """Return memory to the cache."""
        block = self._used.pop(ptr)
        self._free[block.numel()].append(block)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""
        blocks = [*self._used.values(), *(block for free in self._free.values() for block in free)]
        return sum(block.numel() for block in blocks)


class MujocoWarpPhysics(Physics):
    """``num_envs`` worlds on one device (``cuda``, ``cuda:1``; ``cpu`` works but is slow).

    Trajectories are reproducible up to rounding: the order of contacts, and of sums over them, differs between runs.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        device: str = "cuda",
        outputs: Sequence[str] = (),
        spare_rows: int = 0,
    ) -> None:
        """``spare_rows`` are constraint rows per world beyond those of the model, such as randomised joint friction."""
        self._wp = require("warp", extra="gpu")
        self.device = find_device(device, self._wp)
        self._mjw = require("mujoco_warp", extra="gpu")
        self.model, self.num_envs = model, num_envs
        size = capacity(model, num_envs, spare_rows)
        try:
            with self._wp.ScopedDevice(self._wp.device_from_torch(self.device)):
                self._model = self._mjw.put_model(model)
                self._data = self._mjw.make_data(model, nworld=num_envs, naconmax=size.contacts, njmax=size.rows)
        except NotImplementedError as error:
            raise ConfigError(f"device: MuJoCo Warp cannot simulate this model ({error}); use device 'cpu'") from error
        except (RuntimeError, ValueError) as error:
            raise out_of_memory(error, num_envs, self.device) from error
        arrays = {name: getattr(self._data, name) for name in _STATE_FIELDS}
        self._arrays = {name: self._wp.to_torch(array) for name, array in arrays.items() if array.size}
        empty = torch.zeros(num_envs, 0, device=self.device)
        self.qpos, self.qvel, self.ctrl = (self._arrays.get(name, empty) for name in ("qpos", "qvel", "ctrl"))
        self.mocap_pos = self._arrays.get("mocap_pos", empty.view(num_envs, 0, 3))
        self.mocap_quat = self._arrays.get("mocap_quat", empty.view(num_envs, 0, 4))
        self.outputs = {name: self._wp.to_torch(getattr(self._data, name)) for name in outputs}
        self._columns = {name: array.reshape(num_envs, -1) for name, array in (self._arrays | self.outputs).items()}
        self._rest = {name: column[0].clone() for name, column in self._columns.items()}
        for name in self.outputs.keys() - set(_MOTION_FIELDS):
            self._rest[name].zero_()
        self._all = torch.arange(num_envs, device=self.device)
        self._fields: dict[str, Tensor] = {}
        self._derived = 0
        """Groups of constants that every step recomputes first."""
        self._graphs: dict[int, Any] = {}
        self._workspace = Workspace(self.device)
        self.diverged = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self._derive_outputs(~self.diverged)

    def step(self, count: int) -> None:
        if self.device.type == "cpu":
            self._substeps(count)
            return
        if count not in self._graphs:
            self._graphs[count] = self._record(lambda: self._substeps(count))
        stream = self._wp.stream_from_torch(torch.cuda.current_stream(self.device))
        self._wp.capture_launch(self._graphs[count], stream=stream)

    def settle(self) -> None:
        # Reset invalid worlds, as MuJoCo does; the environment truncates their episodes.
        largest = torch.linalg.vector_norm(self.snapshot(), ord=math.inf, dim=1)
        self.diverged = ~(largest < _TOO_LARGE)  # NaN compares as false
        for name, column in self._columns.items():
            if name not in _INPUTS:
                copy_where(self.diverged, self._rest[name], column)

    def _substeps(self, count: int) -> None:
        if self._derived:  # constants that depend on written fields
            self._mjw.set_const(self._model, self._data, groups=self._derived, restore=False)
        for _ in range(count):
            self._mjw.step(self._model, self._data)
        if "cfrc_ext" in self.outputs:
            self._mjw.rne_postconstraint(self._model, self._data)

    def _derive_outputs(self, chosen: Tensor) -> None:
        """Recompute the outputs of motion after a reset where ``chosen`` ``[num_envs]`` is true."""
        before = {name: self._columns[name].clone() for name in self.outputs if name in _MOTION_FIELDS}
        if not before:
            return
        with self._torch_stream():
            self._mjw.kinematics(self._model, self._data)
            if any(name in _INERTIAL_FIELDS for name in before):
                self._mjw.com_pos(self._model, self._data)
                self._mjw.com_vel(self._model, self._data)
        others = ~chosen
        for name, old in before.items():
            copy_where(others, old, self._columns[name])

    def _record(self, work: Callable[[], None]) -> Any:
        """Return a CUDA graph of ``work``, after one run that compiles its kernels; the state is restored."""
        saved = self.state()
        with self._side_stream() as stream, self._wp.ScopedAllocator(stream.device, self._workspace):
            work()
            with self._wp.ScopedCapture(stream=stream) as capture:
                work()
        self.set_state(self._all, saved)
        return capture.graph

    @contextmanager
    def _side_stream(self) -> Iterator[Any]:
        """Make Warp use a side stream that can be captured (torch's default one cannot), ordered after torch's work."""
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        stream = self._wp.stream_from_torch(side)
        with self._wp.ScopedStream(stream, sync_enter=False, sync_exit=False):
            yield stream
        current.wait_stream(side)

    @contextmanager
    def _torch_stream(self) -> Iterator[None]:
        """Make Warp use torch's current stream, also while torch captures a graph on it."""
        if self.device.type == "cpu":
            with self._wp.ScopedDevice("cpu"):
                yield
            return
        stream = self._wp.stream_from_torch(torch.cuda.current_stream(self.device))
        with self._wp.ScopedStream(stream, sync_enter=False, sync_exit=False):
            if torch.cuda.is_current_stream_capturing():
                with self._wp.ScopedCapture(stream=stream, external=True):
                    yield
            else:
                yield

    @property
    def sensordata(self) -> Tensor:
        if not self.model.nsensordata:
            return torch.zeros(self.num_envs, 0, device=self.device)
        saved = self.state()
        with self._torch_stream():
            self._mjw.forward(self._model, self._data)
        self.set_state(self._all, saved)
        return self._wp.to_torch(self._data.sensordata).clone()

    def set(self, env_ids: Tensor, qpos: Tensor, qvel: Tensor, poses: Poses | None = None) -> None:
        for name, column in self._columns.items():
            column[env_ids] = self._rest[name]
        self.qpos[env_ids] = qpos.to(torch.float32)
        self.qvel[env_ids] = qvel.to(torch.float32)
        for body, pose in (poses or {}).items():
            index = self.mocap_id(body)
            self.mocap_pos[env_ids, index] = pose[:, :3].to(torch.float32)
            self.mocap_quat[env_ids, index] = pose[:, 3:].to(torch.float32)
        self._derive_outputs(torch.isin(self._all, env_ids))

    def set_where(self, mask: Tensor, qpos: Tensor, qvel: Tensor, poses: Poses | None = None) -> None:
        new = {**self._rest, "qpos": qpos.to(torch.float32), "qvel": qvel.to(torch.float32)}
        for name, part in (("mocap_pos", slice(0, 3)), ("mocap_quat", slice(3, 7))) if poses else ():
            placed = self._rest[name].repeat(self.num_envs, 1).view(self.num_envs, -1, part.stop - part.start)
            for body, pose in (poses or {}).items():
                placed[:, self.mocap_id(body)] = pose[:, part].to(torch.float32)
            new[name] = placed.flatten(1)
        for name, column in self._columns.items():
            if name not in _MOTION_FIELDS:
                copy_where(mask, new[name], column)
        self._derive_outputs(mask)

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
        data.mocap_pos[:] = self.mocap_pos[env].cpu().numpy()
        data.mocap_quat[:] = self.mocap_quat[env].cpu().numpy()
        data.time = float(self._arrays["time"][env])

    def open_cameras(self, cfgs: Sequence[CameraCfg]) -> RenderAll | None:
        if not cfgs:
            return None
        try:
            with self._torch_stream():
                cameras = WarpCameras(
                    self._wp, self._mjw, self.model, self._model, self._data, cfgs, self._fields.keys()
                )
        except (NotImplementedError, ValueError) as error:
            _LOG.warning("cameras are rendered on the CPU, which costs speed: %s", error)
            return None

        modes = (*self.model.cam_mode, *self.model.light_mode)
        follows_mass = any(mode in _FOLLOWS_MASS for mode in modes)

        def render(markers: Mapping[str, Tensor], chosen: Tensor | None) -> Images:
            lagging = {name: output.clone() for name, output in self.outputs.items()}
            cameras.place(markers)
            with self._torch_stream():
                self._mjw.kinematics(self._model, self._data)
                if follows_mass:
                    self._mjw.com_pos(self._model, self._data)
                self._mjw.camlight(self._model, self._data)
            if chosen is not None:
                cameras.look_away(~chosen)
            with self._torch_stream():
                cameras.draw()
            for name, output in lagging.items():  # rendering must not change what a task reads
                self.outputs[name].copy_(output)
            return cameras.images()

        return render

    def model_field(self, name: str) -> Tensor:
        if name not in self._fields:
            self._fields[name] = self._expand(name)
            if name in DERIVING:  # dependent constants become per-world, too
                kinds, groups = self._mjw.SetConstGroup, _DERIVED.get(name, ("FIXED", "KIN0", "INERT0"))
                for group in groups:
                    self._derived |= int(getattr(kinds, group))
                    for constant in _CONSTANTS[group]:
                        if constant not in self._fields:
                            self._fields[constant] = self._expand(constant)
            self._graphs.clear()
        return self._fields[name]

    def _expand(self, name: str) -> Tensor:
        """Give a model field one row per world; ``opt.gravity`` is a field of the options."""
        owner = self._model.opt if name.startswith("opt.") else self._model
        field = name.removeprefix("opt.")
        shared = getattr(owner, field)
        if not shared.size:
            return torch.zeros(self.num_envs, 0, device=self.device)
        values = self._wp.to_torch(shared)
        own = values[:1].repeat(self.num_envs, *([1] * (values.dim() - 1))).contiguous()
        setattr(owner, field, self._wp.from_torch(own, dtype=shared.dtype))
        return own

    def applied_forces(self) -> Tensor:
        forces: Tensor = self._wp.to_torch(self._data.xfrc_applied)
        return forces.view(self.num_envs, -1, 6)

    def refresh_model(self, env_ids: Tensor) -> None:
        pass  # every step recomputes the constants of all worlds
