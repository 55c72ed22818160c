"""Events that randomise model parameters: friction, masses, joints, actuators and gravity."""

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.curricula import PositiveRange, Range
from embodichain.envs.randomization import Distribution, Draw, EventTerm, Rows, World
from embodichain.errors import ConfigError, nearest

Names = str | list[str]
"""Names of model elements, or regular expressions that match whole names."""
Operation = Literal["scale", "add", "abs"]
"""Whether the sample multiplies the nominal value, is added to it, or replaces it."""
_OBJECTS = {
    "bodies": mujoco.mjtObj.mjOBJ_BODY,
    "geoms": mujoco.mjtObj.mjOBJ_GEOM,
    "joints": mujoco.mjtObj.mjOBJ_JOINT,
    "actuators": mujoco.mjtObj.mjOBJ_ACTUATOR,
}
FREE = int(mujoco.mjtJoint.mjJNT_FREE)
_LARGEST = 1e10
"""MuJoCo's own bound: larger positions, velocities and accelerations count as diverged (``mjMAXVAL``)."""


def names_of(model: mujoco.MjModel, kind: str) -> list[str]:
    """Return the names of all bodies, geoms, joints or actuators; unnamed ones are empty."""
    number = {"bodies": model.nbody, "geoms": model.ngeom, "joints": model.njnt, "actuators": model.nu}[kind]
    return [mujoco.mj_id2name(model, int(_OBJECTS[kind]), index) or "" for index in range(int(number))]


def select(world: World, kind: str, chosen: Names | None, where: Sequence[bool] | np.ndarray, what: str) -> list[int]:
    """Return the ids of the named elements (default: all where ``where`` is true); raise ``ConfigError`` for others."""
    return find_names(world, kind, chosen, names_of(world.model, kind), where, what)


def find_names(
    world: World,
    kind: str,
    chosen: Names | None,
    names: Sequence[str],
    where: Sequence[bool] | np.ndarray,
    what: str,
) -> list[int]:
    """Like ``select``, for elements with these names."""
    if chosen is None:
        found = [index for index in range(len(names)) if where[index]]
        if not found:
            raise ConfigError(f"{world.key}.params.{kind}: the model has no {kind} {what}")
        return found
    found, problems = [], []
    for pattern in [chosen] if isinstance(chosen, str) else chosen:
        try:
            matching = [names.index(pattern)] if pattern in names else _matching(pattern, names)
        except re.error as error:
            problems.append(f"{pattern!r} is no regular expression: {error}")
            continue
        usable = [index for index in matching if where[index]]
        if not matching and not any(names):
            problems.append(
                f"{pattern!r} matches nothing: the model's {kind} have no names; leave this out for all of them"
            )
        elif not matching:
            problem = f"the scene has no body {pattern!r}" if kind == "body" else f"{pattern!r} matches nothing"
            problems.append(f"{problem}.{nearest(pattern, [name for name in names if name])}")
        elif not usable:
            problems.append(f"{pattern!r}: expected {kind} {what}")
        found += [index for index in usable if index not in found]
    if problems or not found:
        raise ConfigError([f"{world.key}.params.{kind}: {p}" for p in problems or ["expected at least one name"]])
    return sorted(found)


def _matching(pattern: str, names: Sequence[str]) -> list[int]:
    """Return the indices of names that a pattern matches, in full or without prefixes such as ``robot/``."""
    compiled, found = re.compile(pattern), []
    for index, name in enumerate(names):
        parts = name.split("/")
        if name and any(compiled.fullmatch("/".join(parts[first:])) for first in range(len(parts))):
            found.append(index)
    return found


def operate(nominal: Any, drawn: Any, operation: Operation) -> Any:
    """Combine a nominal value with a sample."""
    return {"scale": lambda: nominal * drawn, "add": lambda: nominal + drawn, "abs": lambda: 0 * nominal + drawn}[
        operation
    ]()


def quaternion_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the rotations ``[..., 4]`` that apply ``b``, then ``a``."""
    (aw, ax, ay, az), (bw, bx, by, bz) = a.unbind(-1), b.unbind(-1)
    parts = (
        aw * bw - ax * bx - ay * by - az * bz,
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
    )
    return torch.stack(parts, dim=-1)


def check_positive(world: World, bounds: tuple[float, float], distribution: Distribution) -> None:
    """Raise ``ConfigError`` if ``log_uniform`` gets a range that is not positive."""
    if distribution == "log_uniform" and bounds[0] <= 0:
        raise ConfigError(f"{world.key}.params.range: log_uniform needs positive numbers, got {list(bounds)}")


class FieldTerm(EventTerm):
    """Randomises elements of one model field."""

    replaces = True

    def __init__(self, world: World, index: tuple[Any, ...], values: dict[str, Any]) -> None:
        """``index`` selects elements, without the env axis; ``values``: ``range, operation, distribution, shared``."""
        super().__init__(world)
        field, self._index = self.fields[0], (slice(None), *index)
        self._nominal = world.tensor(np.array(_field(world.model, field)[tuple(_plain(part) for part in index)]))
        self.range, self.operation = values["range"], values["operation"]
        self._distribution, self._shared = values["distribution"], values["shared"]
        check_positive(world, self.range, self._distribution)
        largest = max(float(end.abs().max()) for end in self.extremes())
        if largest > _LARGEST:
            raise ConfigError(
                f"{world.key}.params.range: expected {field} of at most {_LARGEST:.0e}, beyond which no simulation is "
                f"accurate, and {list(self.range)} ({self.operation}) gives up to {largest:.3g}"
            )
        if self.operation == "scale" and not bool((self._nominal != 0).any()):
            raise ConfigError(f"{world.key}.params.operation: nothing to scale, {field} is 0 there; use add or abs")

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Return the minimum and maximum values that can be sampled."""
        ends = torch.stack([operate(self._nominal, bound, self.operation) for bound in self.range])
        return ends.amin(dim=0), ends.amax(dim=0)

    def require(self, valid: bool, what: str) -> None:
        """Raise ``ConfigError`` unless ``valid``; ``what`` says what is expected."""
        if not valid:
            low, high = (round(float(end), 6) for end in (self.extremes()[0].min(), self.extremes()[1].max()))
            given = f"{list(self.range)} ({self.operation}) gives {low} to {high}"
            raise ConfigError(f"{self.world.key}.params.range: {what}, and {given}")

    def sample(self, draw: Draw) -> Tensor:
        """Return samples ``[n, ...]`` that broadcast with the elements."""
        size = 1 if self._shared else max(1, self._nominal.numel())
        drawn = draw.values(self.range, size, self._distribution)
        return drawn.view(-1, *([1] * self._nominal.dim() if self._shared else self._nominal.shape))

    def apply(self, rows: Rows, draw: Draw) -> None:
        self.write(rows[self.fields[0]], self.sample(draw))

    def write(self, target: Tensor, drawn: Tensor) -> None:
        """Write new values into rows of the field."""
        target[self._index] = operate(self._nominal, drawn, self.operation).to(target.dtype)


def _field(model: mujoco.MjModel, name: str) -> Any:
    return getattr(model.opt, name[4:]) if name.startswith("opt.") else getattr(model, name)


def _plain(part: Any) -> Any:
    return part.cpu().numpy() if isinstance(part, Tensor) else part


def ids_of(world: World, found: list[int]) -> Any:
    """Return an index: a slice if the ids are consecutive, which needs no kernel, else a tensor."""
    if found == list(range(found[0], found[-1] + 1)):
        return slice(found[0], found[-1] + 1)
    return torch.tensor(found, device=world.physics.device)


class Friction(FieldTerm):
    """Friction of geoms: sliding, torsional or rolling."""

    fields = ("geom_friction",)

    def __init__(
        self,
        world: World,
        range: Range,
        geoms: Names | None = None,
        bodies: Names | None = None,
        kind: Literal["sliding", "torsional", "rolling"] = "sliding",
        operation: Operation = "scale",
        distribution: Distribution = "uniform",
        shared: bool = False,
    ) -> None:
        model = world.model
        where = np.ones(model.ngeom, dtype=bool)
        if bodies is not None:
            of = select(world, "bodies", bodies, model.body_geomnum > 0, "with geoms")
            where = np.isin(model.geom_bodyid, of)
        found = select(world, "geoms", geoms, where, "of these bodies" if bodies else "at all")
        column = ("sliding", "torsional", "rolling").index(kind)
        super().__init__(world, (ids_of(world, found), column), _values(locals()))
        self.require(float(self.extremes()[0].min()) >= 0, "friction must not be negative")


def _values(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("range", "operation", "distribution", "shared")}


class Mass(FieldTerm):
    """Mass of bodies; their inertia scales in proportion."""

    fields: tuple[str, ...] = ("body_mass", "body_inertia")

    def __init__(
        self,
        world: World,
        range: Range,
        bodies: Names | None = None,
        inertia: bool = True,
        operation: Operation = "scale",
        distribution: Distribution = "uniform",
        shared: bool = False,
    ) -> None:
        found = select(world, "bodies", bodies, world.model.body_mass > 0, "with mass")
        super().__init__(world, (ids_of(world, found),), _values(locals()))
        self.require(float(self.extremes()[0].min()) > 0, "masses must be positive")
        self._inertia = world.tensor(np.array(world.model.body_inertia[found])) if inertia else None
        if not inertia:
            self.fields = ("body_mass",)

    def apply(self, rows: Rows, draw: Draw) -> None:
        drawn = self.sample(draw)
        self.write(rows["body_mass"], drawn)
        if self._inertia is not None:
            scales = self.operation == "scale"
            factor = drawn if scales else operate(self._nominal, drawn, self.operation) / self._nominal
            inertia = rows["body_inertia"]
            inertia[self._index] = (self._inertia * factor.unsqueeze(-1)).to(inertia.dtype)


class Inertia(FieldTerm):
    """Moments of inertia of bodies about their principal axes."""

    fields = ("body_inertia",)

    def __init__(
        self,
        world: World,
        range: Range,
        bodies: Names | None = None,
        per_axis: bool = False,
        operation: Literal["scale", "add"] = "scale",
        distribution: Distribution = "uniform",
    ) -> None:
        found = select(world, "bodies", bodies, world.model.body_mass > 0, "with mass")
        shared = False
        super().__init__(world, (ids_of(world, found),), _values(locals()))
        self._per_axis = per_axis
        low, high = self.extremes()
        self.require(float(low.min()) > 0, "moments of inertia must be positive")
        if per_axis:
            worst = low.sum(dim=-1, keepdim=True) - low - high  # this axis at its maximum, the others at their minimum
        else:
            ends = torch.stack((low, high))
            worst = ends.sum(dim=-1, keepdim=True) - 2 * ends
        slack = (worst / high.amax(dim=-1, keepdim=True)).reshape(-1, len(found), 3).amin(dim=(0, 2))
        names = names_of(world.model, "bodies")
        wrong = [names[index] for index, left in zip(found, slack.tolist(), strict=True) if left <= -1e-9]
        if wrong:
            listed = ", ".join(wrong)
            raise ConfigError(
                f"{world.key}.params.range: no moment of inertia may exceed the sum of the two others, and "
                f"{list(self.range)} ({operation}) lets that happen to {listed}; choose a smaller range, or leave "
                f"these bodies out{', or set per_axis to false' if per_axis else ''}"
            )

    def sample(self, draw: Draw) -> Tensor:
        if self._per_axis:
            return super().sample(draw)
        return draw.values(self.range, self._nominal.shape[0], self._distribution).unsqueeze(-1)


class CenterOfMass(EventTerm):
    """Displacement of the centre of mass of bodies, in metres, in the frame of the body."""

    replaces = True
    fields = ("body_ipos",)

    def __init__(
        self,
        world: World,
        bodies: Names | None = None,
        x: Range = (0.0, 0.0),
        y: Range = (0.0, 0.0),
        z: Range = (0.0, 0.0),
        distribution: Literal["uniform", "gaussian"] = "uniform",
    ) -> None:
        super().__init__(world)
        found = select(world, "bodies", bodies, world.model.body_mass > 0, "with mass")
        simple = [index for index in found if world.model.body_simple[index]]
        if simple and not x == y == z == (0.0, 0.0):
            names = ", ".join(names_of(world.model, "bodies")[index] for index in simple)
            problem = 'whose mass MuJoCo takes for centred; write simple="false" at that <body> of the model'
            raise ConfigError(f"{world.key}.params.bodies: {names} are simple bodies, {problem}")
        self._index, self._ranges, self._distribution = (slice(None), ids_of(world, found)), (x, y, z), distribution
        self._nominal = world.tensor(np.array(world.model.body_ipos[found]))

    def apply(self, rows: Rows, draw: Draw) -> None:
        count = self._nominal.shape[0]
        moved = torch.stack([draw.values(r, count, self._distribution) for r in self._ranges], dim=-1)
        target = rows["body_ipos"]
        target[self._index] = (self._nominal + moved).to(target.dtype)


class JointTerm(FieldTerm):
    """Randomises a non-negative property of joints, independently per degree of freedom."""

    of_joints: ClassVar[bool] = False
    """Whether the field has one row per joint instead of one per degree of freedom."""

    def __init__(
        self,
        world: World,
        range: Range,
        joints: Names | None = None,
        operation: Operation = "scale",
        distribution: Distribution = "uniform",
        shared: bool = False,
    ) -> None:
        model = world.model
        found = select(world, "joints", joints, model.jnt_type != FREE, "that are not free")
        if not self.of_joints:
            found = [dof for dof in np.arange(model.nv).tolist() if model.dof_jntid[dof] in found]
        super().__init__(world, (ids_of(world, found),), _values(locals()))
        self.require(float(self.extremes()[0].min()) >= 0, f"{self.fields[0]} must not be negative")


class JointDamping(JointTerm):
    """Damping of joints, in N m s/rad or N s/m."""

    fields = ("dof_damping",)


class JointFriction(JointTerm):
    """Friction loss of joints (dry friction), in N m or N."""

    fields = ("dof_frictionloss",)


class JointArmature(JointTerm):
    """Armature of joints: reflected rotor inertia."""

    fields = ("dof_armature",)


class JointStiffness(JointTerm):
    """Stiffness of joint springs."""

    fields, of_joints = ("jnt_stiffness",), True


class ActuatorGains(EventTerm):
    """Gains of servos: ``kp`` scales gain and position bias, ``kd`` the damping."""

    replaces = True
    fields = ("actuator_gainprm", "actuator_biasprm")

    def __init__(
        self,
        world: World,
        actuators: Names | None = None,
        kp: PositiveRange = (1.0, 1.0),
        kd: PositiveRange = (1.0, 1.0),
        distribution: Distribution = "uniform",
        shared: bool = False,
    ) -> None:
        super().__init__(world)
        if kp == kd == (1.0, 1.0):
            raise ConfigError(f"{world.key}.params: nothing varies; give a range of kp or kd")
        model = world.model
        affine = model.actuator_biastype == int(mujoco.mjtBias.mjBIAS_AFFINE)
        found = select(world, "actuators", actuators, affine, "that are position or velocity servos")
        self._index, self._ranges = (slice(None), ids_of(world, found)), (kp, kd)
        self._distribution, self._shared, self._count = distribution, shared, len(found)
        self._gain = world.tensor(np.array(model.actuator_gainprm[found]))
        self._bias = world.tensor(np.array(model.actuator_biasprm[found]))
        # The gain of a velocity servo, which has no stiffness, counts as damping.
        self._of_velocity = (self._bias[:, 1] == 0) & (self._bias[:, 2] != 0)

    def apply(self, rows: Rows, draw: Draw) -> None:
        size = 1 if self._shared else self._count
        kp, kd = (draw.values(r, size, self._distribution) for r in self._ranges)
        gain, bias = self._gain.repeat(draw.count, 1, 1), self._bias.repeat(draw.count, 1, 1)
        gain[..., 0] *= torch.where(self._of_velocity, kd, kp)
        bias[..., 1] *= kp
        bias[..., 2] *= kd
        for name, values in (("actuator_gainprm", gain), ("actuator_biasprm", bias)):
            rows[name][self._index] = values.to(rows[name].dtype)


class ActuatorStrength(EventTerm):
    """Maximum force of actuators: the force range, or the gain of a motor without one."""

    replaces = True

    def __init__(
        self,
        world: World,
        range: PositiveRange,
        actuators: Names | None = None,
        distribution: Distribution = "uniform",
        shared: bool = False,
    ) -> None:
        super().__init__(world)
        model = world.model
        limited = model.actuator_forcelimited.astype(bool)
        motor = ~limited & (model.actuator_biastype == int(mujoco.mjtBias.mjBIAS_NONE))
        found = select(world, "actuators", actuators, limited | motor, "with a force range, or motors without one")
        self._range, self._distribution, self._size = range, distribution, 1 if shared else len(found)
        self._parts: list[tuple[str, Any, Tensor, Tensor | None]] = []
        for field, mask in (("actuator_forcerange", limited), ("actuator_gainprm", motor)):
            chosen = [index for index in found if mask[index]]
            if chosen:
                place = None if shared else torch.tensor([found.index(i) for i in chosen], device=world.physics.device)
                nominal = world.tensor(np.array(_field(model, field)[chosen]))
                self._parts.append((field, (slice(None), ids_of(world, chosen)), nominal, place))
        self.fields = tuple(field for field, *_ in self._parts)

    def apply(self, rows: Rows, draw: Draw) -> None:
        drawn = draw.values(self._range, self._size, self._distribution)
        for field, index, nominal, place in self._parts:
            factor = drawn if place is None else drawn[:, place]
            if field == "actuator_gainprm":
                new = nominal.repeat(draw.count, 1, 1)
                new[..., 0] *= factor
            else:
                new = nominal * factor.unsqueeze(-1)
            rows[field][index] = new.to(rows[field].dtype)


class Gravity(EventTerm):
    """Magnitude of gravity, and its tilt angle in a random direction."""

    replaces = True
    fields = ("opt.gravity",)

    def __init__(
        self,
        world: World,
        range: Range = (1.0, 1.0),
        operation: Operation = "scale",
        tilt: Range = (0.0, 0.0),
        distribution: Distribution = "uniform",
    ) -> None:
        super().__init__(world)
        nominal = np.array(world.model.opt.gravity)
        self._size = float(np.linalg.norm(nominal))
        lowest = min(float(operate(self._size, end, operation)) for end in range)
        if lowest < 0 or self._size == 0:
            what = "the model has none" if self._size == 0 else f"its magnitude would be {lowest:.4g}"
            raise ConfigError(f"{world.key}.params.range: gravity must not be negative, and {what}")
        check_positive(world, range, distribution)
        if tilt[0] < 0:
            raise ConfigError(f"{world.key}.params.tilt: expected angles from 0 on, in radians, got {list(tilt)}")
        down = nominal / self._size
        side = np.cross(down, [1.0, 0.0, 0.0] if abs(down[0]) < 0.9 else [0.0, 1.0, 0.0])
        side /= np.linalg.norm(side)
        self._axes = world.tensor(np.stack((down, side, np.cross(down, side))))
        self._range, self._operation, self._tilt, self._distribution = range, operation, tilt, distribution
        self._nominal = world.tensor(nominal)

    def apply(self, rows: Rows, draw: Draw) -> None:
        target = rows["opt.gravity"]
        drawn = draw.values(self._range, 1, self._distribution)
        if self._tilt == (0.0, 0.0):
            factor = operate(self._size, drawn, self._operation) / self._size if self._operation != "scale" else drawn
            target[:] = (self._nominal * factor).to(target.dtype)
            return
        size = operate(self._size, drawn, self._operation)
        angle, around = draw.values(self._tilt, 1), 2.0 * torch.pi * draw.unit(1)
        parts = (torch.cos(angle), torch.sin(angle) * torch.cos(around), torch.sin(angle) * torch.sin(around))
        axes = self._axes
        target[:] = (size * (parts[0] * axes[0] + parts[1] * axes[1] + parts[2] * axes[2])).to(target.dtype)
