"""Events: randomisation at reset, and disturbances during an episode.

A config names registered events (``env.events``). Register your own as a function or a class::

    @register_event("softness", fields=("geom_solref",))
    def softness(world, rows, draw, seconds: Range = (0.02, 0.04)):
        rows["geom_solref"][:, :, 0] = draw.values(seconds, 1)

``fields`` are fields of the MuJoCo model, or ``qpos`` and ``qvel``. ``rows`` holds the values ``[n, ...]`` of some
envs, which the event writes in place; it samples from ``draw`` only. An event is written in torch and runs on the CPU
and, captured in a CUDA graph, on a GPU: it must not use ``.item()`` or data-dependent shapes. The package's events are
in ``event_terms.py``, ``motion_events.py`` and ``visual_events.py``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import mujoco
import torch
from torch import Tensor

from embodichain.envs.curricula import Curricula
from embodichain.envs.env_cfg import EventsCfg, EventTermCfg, ScaleRangeCfg
from embodichain.envs.physics import DERIVING, Physics
from embodichain.envs.random import CHANNEL_DRAWS, RandomStreams, box_muller, channel
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState
from embodichain.envs.terms import TermRegistry
from embodichain.errors import ConfigError
from embodichain.utils.cuda_graphs import copy_where

Distribution = Literal["uniform", "log_uniform", "gaussian"]
"""``uniform`` and ``log_uniform`` within a range; ``gaussian``: normal with its mean in the middle and the bounds at
two standard deviations, clipped to the bounds."""
Rows = dict[str, Tensor]
"""Values of some envs by field, ``[n, ...]`` each."""
_MOTION = ("qpos", "qvel")


class Draw:
    """Random numbers for one event in some envs; they depend on the episode seeds only."""

    def __init__(self, streams: RandomStreams, env_ids: Tensor, channel: Tensor | None, step: Tensor | None) -> None:
        """Without a ``channel``, numbers come from the streams in order; ``step`` separates the draws of an episode."""
        self.env_ids, self.step, self._streams, self._channel = env_ids, step, streams, channel
        self._first: Tensor | int = 0 if step is None else (step + 1) * CHANNEL_DRAWS

    @property
    def count(self) -> int:
        """Number of envs."""
        return self.env_ids.numel()

    def unit(self, size: int) -> Tensor:
        """Sample float64 ``[n, size]`` from [0, 1)."""
        if self._channel is None:
            return self._streams.uniform(self.env_ids, size)
        drawn = self._streams.of(self.env_ids, self._channel, self._first, size)
        self._first = self._first + size
        return drawn

    def normal(self, size: int) -> Tensor:
        """Sample standard normal float64 ``[n, size]``."""
        return box_muller(self.unit(2 * size))

    def values(self, bounds: tuple[float, float], size: int, distribution: Distribution = "uniform") -> Tensor:
        """Sample float64 ``[n, size]`` from a range, which may follow a curriculum."""
        curricula = self._streams.curricula
        low, high = bounds if curricula is None else curricula.bounds(bounds, self.env_ids)
        if distribution == "uniform":
            return low + (high - low) * self.unit(size)
        if distribution == "log_uniform":
            start, end = (torch.log(x) if isinstance(x, Tensor) else math.log(x) for x in (low, high))
            return torch.exp(start + (end - start) * self.unit(size))
        return 0.5 * (low + high) + (0.25 * (high - low)) * self.normal(size).clamp(-2.0, 2.0)

    def steps(self, bounds: tuple[int, int]) -> Tensor:
        """Sample an integer from the bounds, inclusive, int64 ``[n]``."""
        fewest, most = bounds
        return (fewest + torch.floor(self.unit(1)[:, 0] * (most - fewest + 1))).long().clamp(fewest, most)


@dataclass(frozen=True)
class World:
    """What an event can access in its constructor."""

    physics: Physics
    robot: Robot | None
    step_seconds: float
    """Simulated seconds per environment step."""
    action_dim: int
    key: str
    """Path of the event in the config, for error messages."""
    object_body: str | None = None
    """The task's object, if it has one."""

    @property
    def model(self) -> mujoco.MjModel:
        """The model with nominal values."""
        return self.physics.model

    def tensor(self, values: Any) -> Tensor:
        """Return a float64 tensor on the device of the simulation."""
        return torch.tensor(values, dtype=torch.float64, device=self.physics.device)

    def zeros(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return zeros ``[num_envs, *size]`` for a variable of an event."""
        return torch.zeros(self.physics.num_envs, *size, dtype=dtype, device=self.physics.device)


class EventTerm:
    """Base class of events. A subclass takes ``world`` and its parameters, whose types are checked."""

    modes: ClassVar[tuple[str, ...]] = ("reset", "interval", "step")
    """Supported modes; the first is the default."""
    replaces: ClassVar[bool] = False
    """Whether it overwrites model values, so that no other event may write the same elements."""
    fields: tuple[str, ...] = ()
    """Fields it writes: model fields, ``qpos``, ``qvel``."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.variables: dict[str, Tensor] = {}
        """State of the event, ``[num_envs, ...]`` each; saved with the environment's state and included in ``rows``."""

    def begin(self, rows: Rows, draw: Draw) -> None:
        """Write the initial values of ``variables`` into ``rows`` at reset, in every mode."""

    def apply(self, rows: Rows, draw: Draw) -> None:
        """Apply the event: write new values into ``rows``, which holds ``fields`` and ``variables`` of some envs."""

    def act(self, action: Tensor, step: Tensor, draw: Draw) -> Tensor:
        """Return the modified action ``[num_envs, action_dim]``."""
        return action

    def clear(self) -> None:
        """Undo the effect on the previous step; called for all events before any ``every_step``."""

    def every_step(self, step: Tensor) -> None:
        """Apply a lasting effect; called before every step; ``step`` ``[num_envs]`` is its number in the episode."""


class Calibration(EventTerm, ABC):
    """An event that adds an error to measured and commanded joint positions."""

    @property
    @abstractmethod
    def offset(self) -> Tensor:
        """The error of measured joint positions, ``[num_envs, dofs]``."""

    @abstractmethod
    def correct(self, control: Tensor) -> Tensor:
        """Return motor commands ``[num_envs, nu]`` that include the error."""


class _FunctionTerm(EventTerm):
    """An event defined by a function ``(world, rows, draw, **params)``."""

    def __init__(self, world: World, function: Callable[..., None], params: Mapping[str, Any]) -> None:
        super().__init__(world)
        self._function, self._params, self.fields = function, params, _fields_of[function]

    def apply(self, rows: Rows, draw: Draw) -> None:
        self._function(self.world, rows, draw, **self._params)


_HERE = __name__.rpartition(".")[0]
EVENTS: TermRegistry[Any] = TermRegistry(
    "event",
    ("world", "rows", "draw"),
    {
        "friction": f"{_HERE}.event_terms:Friction",
        "mass": f"{_HERE}.event_terms:Mass",
        "inertia": f"{_HERE}.event_terms:Inertia",
        "center_of_mass": f"{_HERE}.event_terms:CenterOfMass",
        "joint_damping": f"{_HERE}.event_terms:JointDamping",
        "joint_friction": f"{_HERE}.event_terms:JointFriction",
        "joint_armature": f"{_HERE}.event_terms:JointArmature",
        "joint_stiffness": f"{_HERE}.event_terms:JointStiffness",
        "actuator_gains": f"{_HERE}.event_terms:ActuatorGains",
        "actuator_strength": f"{_HERE}.event_terms:ActuatorStrength",
        "gravity": f"{_HERE}.event_terms:Gravity",
        "body_pose": f"{_HERE}.motion_events:BodyPose",
        "randomize_rigid_object_pose": f"{_HERE}.motion_events:RigidObjectPose",
        "randomize_rigid_object_mass": f"{_HERE}.motion_events:RigidObjectMass",
        "push": f"{_HERE}.motion_events:Push",
        "push_joints": f"{_HERE}.motion_events:PushJoints",
        "apply_force": f"{_HERE}.motion_events:ApplyForce",
        "action_delay": f"{_HERE}.motion_events:ActionDelay",
        "action_noise": f"{_HERE}.motion_events:ActionNoise",
        "joint_offset": f"{_HERE}.motion_events:JointOffset",
        "geom_color": f"{_HERE}.visual_events:GeomColor",
        "geom_texture": f"{_HERE}.visual_events:GeomTexture",
        "lights": f"{_HERE}.visual_events:Lights",
        "camera_pose": f"{_HERE}.visual_events:CameraPose",
        "camera_fov": f"{_HERE}.visual_events:CameraFov",
    },
)
"""Registered events; those of the package are imported on first use."""
_fields_of: dict[Any, tuple[str, ...]] = {}
_T = TypeVar("_T", bound=Callable[..., Any])


def register_event(name: str, fields: Sequence[str] = ()) -> Callable[[_T], _T]:
    """Return a decorator that registers an ``EventTerm`` class or a function ``(world, rows, draw, **params)``.

    ``fields`` are those that a function writes; a class has an attribute. An existing name is replaced.
    """

    def add(event: _T) -> _T:
        if not isinstance(event, type):
            _fields_of[event] = tuple(fields)
        return EVENTS.register(name)(event)

    return add


def spare_rows(events: EventsCfg, model: mujoco.MjModel) -> int:
    """Return the number of constraints that events may add to a model: friction of joints without any."""
    return int((model.dof_frictionloss == 0).sum()) if _writes(events, "dof_frictionloss") else 0


def prepare_spec(events: EventsCfg, spec: mujoco.MjSpec) -> None:
    """Prepare a model for events that move centres of mass, which MuJoCo takes for centred in simple bodies."""
    if _writes(events, "body_ipos"):
        for body in spec.bodies:
            if body.joints:
                body.simple = 0


def _writes(events: EventsCfg, field: str) -> bool:
    """Return whether any event of a config writes a field of the model."""
    used = [EVENTS[term.func] for term in events.terms.values() if term is not None and term.func in EVENTS]
    return any(field in _fields_of.get(event, getattr(event, "fields", ())) for event in used)


def places(cfg: EventTermCfg) -> bool:
    """Return whether an event only places bodies or joints at reset, and changes nothing of the model."""
    event = EVENTS[cfg.func]
    fields = _fields_of.get(event, getattr(event, "fields", ()))
    mode = cfg.mode or getattr(event, "modes", ("reset",))[0]
    return mode == "reset" and bool(fields) and set(fields) <= set(_MOTION)


class _Event:
    """An event term with its schedule and its random channel."""

    def __init__(
        self, name: str, term: EventTerm, params: Any, mode: str = "reset", between: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """``between`` is the range of seconds between two events."""
        self.name, self.term, self.params, self.mode, self.between = name, term, params, mode, between
        physics = term.world.physics
        self.channel: Tensor | None = channel(f"events.{name}", physics.device)
        """Random channel; ``None`` uses the streams in order."""
        self.clock = channel(f"events.{name}.interval", physics.device)
        self.motion = [field for field in term.fields if field in _MOTION]
        self.due: Tensor | None = None
        if mode == "interval":
            self.due = term.variables["due"] = term.world.zeros(dtype=torch.int64)
        self.live: Rows = dict(term.variables)
        for field in term.fields:
            if field not in _MOTION:
                self.live[field] = model_field(physics, field, term.world.key)
        self.derives = any(field in DERIVING for field in term.fields)

    def wait(self, streams: RandomStreams, env_ids: Tensor, step: Tensor | None) -> Tensor:
        """Sample the number of steps until the next event, int64 ``[n]``."""
        seconds = Draw(streams, env_ids, self.clock, step).values(self.between, 1)[:, 0]
        return torch.round(seconds / self.term.world.step_seconds).long().clamp_min(1)


def model_field(physics: Physics, name: str, key: str) -> Tensor:
    """Return a model field with one row per env; ``ConfigError`` if it does not exist."""
    try:
        return physics.model_field(name)
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: {name!r} is no field of the model that can differ between envs: {error}") from error


class DomainRandomization:
    """Applies the events of a config."""

    def __init__(self, cfg: EventsCfg, world: World, curricula: Curricula) -> None:
        """``world.key`` is the path of ``cfg``."""
        self._physics, self._events = world.physics, [*_object_events(cfg, world), *_config_events(cfg, world)]
        for event in self._events:
            key = f"env.events.{event.name}"
            curricula.add(event.params, event.name, f"{key}.params", used=True)
            curricula.add({"interval_range_s": event.between}, event.name, key, used=True)
        self._later = [event for event in self._events if event.mode != "reset"]
        self._acting = [event for event in self._events if type(event.term).act is not EventTerm.act]
        self._lasting = [event for event in self._events if type(event.term).every_step is not EventTerm.every_step]
        wrong = [event.name for event in self._events if isinstance(event.term, Calibration)]
        if len(wrong) > 1:
            raise ConfigError(f"{world.key}.{wrong[1]}: the robot's joints have one error, that of {wrong[0]}")
        self.calibration = next((term for term in self.terms if isinstance(term, Calibration)), None)
        """The calibration error of the robot's joints, if there is one."""
        self._all = torch.arange(world.physics.num_envs, device=world.physics.device)
        self._model: Rows = {}  # all model fields that differ between envs
        for event in self._events:
            self._model |= {field: value for field, value in event.live.items() if field in event.term.fields}
        self._nominal = {name: value[:1].clone() for name, value in self._model.items()}
        self._derives = any(event.derives for event in self._events)
        self._check_shared(world.key)

    def _check_shared(self, key: str) -> None:
        """Raise ``ConfigError`` if two events overwrite the same elements of the model."""
        replacing = [event for event in self._events if event.term.replaces]
        fields = [field for event in replacing for field in event.term.fields]
        writers: dict[str, list[tuple[str, Tensor]]] = {}
        streams = RandomStreams(1, self._physics.device)
        problems = []
        for event in replacing:
            shared = [field for field in event.term.fields if fields.count(field) > 1]
            if not shared:
                continue
            rows = {f: torch.full_like(self._nominal[f], math.nan) for f in event.term.fields}
            event.term.apply(rows, Draw(streams, self._all[:1], event.channel, None))
            for field in shared:
                written = ~rows[field].isnan()
                others = [name for name, elements in writers.setdefault(field, []) if bool((elements & written).any())]
                if others:
                    problem = f"{others[0]} draws the same elements of {field}; let them choose different ones"
                    advice = ", or set the parameter inertia of mass to false" if field == "body_inertia" else ""
                    problems.append(f"{key}.{event.name}: {problem}{advice}, or leave one out")
                writers[field].append((event.name, written))
        if problems:
            raise ConfigError(problems)

    @property
    def active(self) -> bool:
        """Whether there are any events."""
        return bool(self._events)

    def add(self, name: str, term: EventTerm) -> None:
        """Add a reset event that writes no model fields."""
        self._events.append(_Event(name, term, {}))

    @property
    def terms(self) -> list[EventTerm]:
        """The events, in the order of the config."""
        return [event.term for event in self._events]

    def apply(self, env_ids: Tensor, streams: RandomStreams, start: ResetState) -> None:
        """Apply the events of a reset to these envs; ``start`` is their reset state."""
        for live, rows in self._draw(env_ids, streams, start):
            live[env_ids] = rows
        if self._derives:
            self._physics.refresh_model(env_ids)

    def apply_where(self, mask: Tensor, streams: RandomStreams, drawn: Tensor, start: ResetState) -> Tensor:
        """Like ``apply``, where ``mask`` ``[num_envs]`` is true; returns the stream state ``drawn``, advanced."""
        before = streams.state.clone()
        streams.state.copy_(drawn)
        for live, rows in self._draw(self._all, streams, start):
            copy_where(mask, rows.to(live.dtype), live)
        after = streams.state.clone()
        streams.state.copy_(before)
        if self._derives:
            self._physics.refresh_model(self._all)
        return after

    def before_step(self, step: Tensor, streams: RandomStreams) -> None:
        """Apply the events that are due before step ``step`` ``[num_envs]`` of the episodes."""
        for event in self._later:
            mask = torch.ones_like(step, dtype=torch.bool) if event.due is None else step >= event.due
            if mask.device.type == "cpu" and not bool(mask.any()):
                continue
            live = {**event.live, **{name: getattr(self._physics, name) for name in event.motion}}
            rows = {name: value.clone() for name, value in live.items()}
            event.term.apply(rows, Draw(streams, self._all, event.channel, step))
            if event.due is not None:
                rows["due"] = step + event.wait(streams, self._all, step)
            for name, value in live.items():
                copy_where(mask, rows[name].to(value.dtype), value)
            if event.derives:
                self._physics.refresh_model(mask.nonzero().view(-1) if mask.device.type == "cpu" else self._all)
        for event in self._lasting:
            event.term.clear()
        for event in self._lasting:
            event.term.every_step(step)

    def act(self, action: Tensor, step: Tensor, streams: RandomStreams) -> Tensor:
        """Return the action ``[num_envs, action_dim]`` as modified by the events."""
        for event in self._acting:
            action = event.term.act(action, step, Draw(streams, self._all, event.channel, step))
        return action

    def state(self) -> dict[str, Tensor]:
        """Return copies of the model fields that differ between envs, ``[num_envs, ...]`` each."""
        return {name: value.clone() for name, value in self._model.items()}

    def variables(self) -> dict[str, Tensor]:
        """Return the live variables of all events, ``[num_envs, ...]`` each."""
        events = self._events
        return {f"{e.name}.{name}".replace("/", "."): value for e in events for name, value in e.term.variables.items()}

    def set_state(self, env_ids: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Restore rows of :meth:`state`."""
        for name, values in fields.items():
            self._model[name][env_ids] = values
        if self._derives:
            self._physics.refresh_model(env_ids)

    def _draw(self, ids: Tensor, streams: RandomStreams, start: ResetState) -> list[tuple[Tensor, Tensor]]:
        """Sample the initial values of episodes in these envs; return pairs of live tensors and new rows.

        All fields start from their nominal values, so that nothing of the last episode remains.
        """
        fields = {name: value.repeat(ids.numel(), *[1] * (value.dim() - 1)) for name, value in self._nominal.items()}
        pairs = []
        for event in self._events:
            term, draw = event.term, Draw(streams, ids, event.channel, None)
            rows = {name: value[ids] for name, value in term.variables.items()}
            rows |= {name: fields[name] for name in term.fields if name in fields}
            term.begin(rows, draw)
            if event.mode == "reset":
                rows |= {name: getattr(start, name).clone() for name in event.motion}
                term.apply(rows, draw)
                for name in event.motion:
                    moved = rows[name]
                    if start.demonstrated is not None:
                        moved = torch.where(start.demonstrated.unsqueeze(1), getattr(start, name), moved)
                    setattr(start, name, moved)
            if event.due is not None:
                rows["due"] = event.wait(streams, ids, None)
            fields |= {name: rows[name] for name in term.fields if name in fields}
            pairs += [(value, rows[name]) for name, value in term.variables.items()]
        return pairs + [(self._model[name], rows) for name, rows in fields.items()]


def _config_events(cfg: EventsCfg, world: World) -> list[_Event]:
    """Create all events of a config, or raise all their problems at once."""
    made, problems = [], []
    for name, entry in cfg.terms.items():
        if entry is None:
            continue
        key = f"{world.key}.{name}"
        if "/" in name or "." in name:
            problems.append(f"{key}: expected a name of an event without '/' and '.'")
            continue
        try:
            made.append(_make(name, entry, World(**{**vars(world), "key": key})))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return made


def _make(name: str, cfg: EventTermCfg, world: World) -> _Event:
    event, params = EVENTS.resolve(cfg.func, cfg.params, world.key)
    term = event(world, **params) if isinstance(event, type) else _FunctionTerm(world, event, params)
    mode = cfg.mode or term.modes[0]
    if mode not in term.modes:
        raise ConfigError(f"{world.key}.mode: {cfg.func} happens in mode {' or '.join(term.modes)}, got {mode!r}")
    if mode != "interval" and cfg.interval_range_s != EventTermCfg(cfg.func).interval_range_s:
        problem = f"expected in mode 'interval' only, and this event is of mode {mode!r}"
        raise ConfigError(f"{world.key}.interval_range_s: {problem}; leave it out, or set mode to 'interval'")
    return _Event(name, term, params, mode, cfg.interval_range_s)


def _object_events(cfg: EventsCfg, world: World) -> list[_Event]:
    """Return the events of ``randomize_friction`` and ``randomize_mass``: one factor each for the task's object."""
    chosen: dict[str, tuple[str, ScaleRangeCfg]] = {}
    if cfg.randomize_friction is not None:
        chosen["randomize_friction"] = ("friction", cfg.randomize_friction)
    if cfg.randomize_mass is not None:
        chosen["randomize_mass"] = ("mass", cfg.randomize_mass)
    if chosen and world.object_body is None:
        raise ConfigError(
            "env.events: randomize_friction and randomize_mass need an object, and this task has none; name bodies: "
            '{"func": "mass", "params": {"bodies": ..., "range": [0.8, 1.2]}}'
        )
    made = []
    for name, (func, scale) in chosen.items():
        params = {"bodies": world.object_body, "range": scale.scale, "shared": True}
        event, checked = EVENTS.resolve(func, params, f"{world.key}.{name}")
        made.append(_Event(name, event(world, **checked), checked))
        made[-1].channel = None
    return made
