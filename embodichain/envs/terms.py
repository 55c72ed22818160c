"""Reward and observation terms: functions registered by name, for use in a config.

::

    @register_reward("hover")
    def hover(task, scene, action, of: str, height: float = 0.1):
        return torch.exp(-10.0 * (position(scene, of)[:, 2] - height).abs())

    "env": {"rewards": {"terms": {"hold": {"func": "hover", "weight": 2.0, "params": {"of": "cube"}}}}}

A term is written in torch on the measurements of a task (``scene``, ``[n, ...]`` each) and must not synchronise with
the device. ``position(scene, "cube")`` is ``scene["cube_pos"]``; parameters that refer to a thing take such names. A
term may be a class: it is constructed once with its parameters, and called with the arguments of a function.
"""

import dataclasses
import functools
import inspect
import logging
import pkgutil
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from embodichain.config.classes import Config, NotNegative, Positive, configclass
from embodichain.envs.env_cfg import ObservationTermCfg, RewardTermCfg
from embodichain.envs.kinematics import dot, length, mean_square
from embodichain.envs.scene_cfg import OBSERVED_AS
from embodichain.envs.task import Measurements, Scene, Task
from embodichain.envs.task_contract import blamed_on, is_same_code, wrong_number, wrong_rows
from embodichain.errors import ConfigError, nearest

_LOG = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
Place = str | tuple[float, float, float]
"""A measured thing (``"cube"``, ``"ee"``), or a point in the world."""
Symmetry = Literal[1, 2, 4]
"""Number of headings at which a thing looks the same."""
LAST_ACTION = "last_action"
"""The previous action, zero in the first step; in the scene if a term needs it."""


class TermRegistry(Generic[F]):
    """Functions or classes of one kind by name; their keyword arguments come from a config and are validated."""

    def __init__(self, kind: str, given: Sequence[str], entry_points: Mapping[str, str] | None = None) -> None:
        """``given`` are the arguments that the caller passes; all others are parameters in a config.

        ``entry_points`` are classes ``"module:Class"`` by name, imported on first use.
        """
        self.kind, self.given = kind, tuple(given)
        self._functions: dict[str, F | str] = dict(entry_points or {})
        self._parameters: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Return a decorator that registers a function or class; an earlier one of that name is replaced.

        Names of this package's own functions are refused.
        """

        def add(function: F) -> F:
            first = tuple(inspect.signature(function).parameters)[: len(self.given)]
            if not isinstance(function, type) and first != self.given:
                raise TypeError(f"{self.kind} {name!r}: expected the arguments {self.given} first, got {first}")
            self._check_free(name, function)
            self._functions[name] = function
            self._parameters.pop(name, None)
            return function

        return add

    def _check_free(self, name: str, function: Any) -> None:
        """Refuse the name of another function of this package, and warn of that of another one."""
        before = self._functions.get(name)
        if before is None or is_same_code(before, function):
            return
        old, new = (
            one
            if isinstance(one, str)
            else f"{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', type(one).__name__)}"
            for one in (before, function)
        )
        if old.startswith("embodichain."):
            problem = f"{name!r} is a {self.kind} of this package, {old}, which {new} would replace"
            raise ConfigError(f"{problem}; register it under another name", f"{self.kind} {name!r}")
        _LOG.warning("the %s %r, %s, is replaced by %s; give one of them another name", self.kind, name, old, new)

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __getitem__(self, name: str) -> F:
        found = self._functions[name]
        if isinstance(found, str):
            found = self._functions[name] = pkgutil.resolve_name(found)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._functions)

    @property
    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._functions)

    def resolve(self, name: str, params: Mapping[str, Any], key: str) -> tuple[F, dict[str, Any]]:
        """Return a function and its validated parameters; one ``ConfigError`` lists all problems at ``key``."""
        if name not in self._functions:
            raise ConfigError(f"{key}.func: unknown {self.kind} {name!r}.{nearest(name, self._functions)}")
        try:
            checked = self._parameter_class(name).from_dict(params)
        except ConfigError as error:
            raise ConfigError([f"{key}.params.{problem}" for problem in error.problems]) from None
        return self[name], {f.name: getattr(checked, f.name) for f in dataclasses.fields(checked)}

    def bind(self, name: str, params: Mapping[str, Any], key: str) -> Callable[..., Any]:
        """Return the function with its parameters bound, or an instance of the class."""
        function, checked = self.resolve(name, params, key)
        if not isinstance(function, type):
            return functools.partial(function, **checked)
        try:
            return function(**checked)
        except ConfigError as error:
            raise ConfigError([f"{key}.params.{problem}" for problem in error.problems]) from None

    def _parameter_class(self, name: str) -> Any:
        """Return a config class whose fields are the parameters of a function."""
        if name not in self._parameters:
            function = self[name]
            of_class: Any = function
            annotated = of_class.__init__ if isinstance(function, type) else function
            hints = typing.get_type_hints(annotated, include_extras=True)
            body: dict[str, Any] = {"__annotations__": {}, "__module__": __name__}
            for parameter in inspect.signature(function).parameters.values():
                if parameter.name in self.given or parameter.kind is parameter.VAR_KEYWORD:
                    continue
                body["__annotations__"][parameter.name] = hints.get(parameter.name, _kind_of(parameter.default))
                if parameter.default is not parameter.empty:
                    body[parameter.name] = parameter.default
            self._parameters[name] = configclass(type(f"{name}_params", (), body))
        return self._parameters[name]


def _kind_of(default: Any) -> Any:
    """Return the type of a parameter without an annotation, by its default."""
    if isinstance(default, bool | str):
        return type(default)
    return int | float if isinstance(default, int | float) else Any


RewardTerm = Callable[..., Any]
"""``(task, scene, action, **params)`` -> ``[n]``, unweighted; or a class whose instances are called like that."""
ObservationTerm = Callable[..., Any]
"""``(task, scene, **params)`` -> ``[n, size]`` or ``[n]``, float32; or a class whose instances are called like that."""
REWARDS: TermRegistry[RewardTerm] = TermRegistry("reward function", ("task", "scene", "action"))
OBSERVATIONS: TermRegistry[ObservationTerm] = TermRegistry("observation function", ("task", "scene"))
_uses_last_action: set[Any] = set()


def register_reward(name: str, last_action: bool = False) -> Callable[[F], F]:
    """Register ``(task, scene, action, **params) -> [n]``; ``last_action``: it reads ``scene["last_action"]``."""
    return lambda function: _register(REWARDS, name, last_action, function)


def register_observation(name: str, last_action: bool = False) -> Callable[[F], F]:
    """Register ``(task, scene, **params) -> [n, size]``; ``last_action``: it reads ``scene["last_action"]``."""
    return lambda function: _register(OBSERVATIONS, name, last_action, function)


def _register(registry: TermRegistry[Callable[..., Any]], name: str, last_action: bool, function: F) -> F:
    if last_action:
        _uses_last_action.add(function)
    registry.register(name)(function)
    return function


class RewardTerms:
    """The reward terms of a config, bound to their parameters."""

    def __init__(self, cfgs: Mapping[str, RewardTermCfg | None], task: Task) -> None:
        used = {name: cfg for name, cfg in cfgs.items() if cfg is not None}
        self._task, self._params = task, {name: cfg.params for name, cfg in used.items()}
        self._functions = {name: cfg.func for name, cfg in used.items()}
        self._who = {name: f"the {REWARDS.kind} {cfg.func!r} (env.rewards.terms.{name})" for name, cfg in used.items()}
        self._terms = _bind_all(REWARDS, used, "env.rewards.terms")
        self.weights = {name: cfg.weight for name, cfg in used.items()}
        """Weight of each term."""
        self.removed = [name for name, cfg in cfgs.items() if cfg is None]
        """Terms of the task that the config removes."""
        self.needs_last_action = _need_last_action(REWARDS, used)

    def __call__(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        """Return the unweighted terms, ``[n]`` each."""
        return {name: term(self._task, scene, action) for name, term in self._terms.items()}

    def check(self, scene: Scene, action: Tensor) -> None:
        """Raise one ``ConfigError`` for all terms that read unmeasured quantities, or do not return ``[n]``."""
        problems = []
        for name, term in list(self._terms.items()):
            key = f"env.rewards.terms.{name}"
            try:
                with blamed_on(self._who[name], passes=KeyError):
                    value = term(self._task, scene, action)
            except UnmeasuredError as error:
                problems.append(error.message_at(key, self._params[name]))
                continue
            except ConfigError as error:
                problems += [f"{key}: {problem}" for problem in error.problems]
                continue
            except KeyError:  # quantities that a custom function reads may exist only after a step
                self._terms[name] = self._checked_later(name, term)
                continue
            wrong = wrong_number(value, len(action))
            if wrong is not None:
                problems.append(f"{key}: {wrong} of {self._functions[name]!r}")
        if problems:
            raise ConfigError(problems)

    def _checked_later(self, name: str, term: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a stand-in for a term, which checks its first value and then gives way to it."""
        terms, who, func = self._terms, self._who[name], self._functions[name]

        def first(task: Task, scene: Scene, action: Tensor) -> Tensor:
            measured = Measurements(scene)  # names what is missing
            with blamed_on(who):
                value = term(task, measured, action)
            scene.update(measured)  # what the term keeps there for others
            wrong = wrong_number(value, len(action))
            if wrong is not None:
                raise ConfigError(f"env.rewards.terms.{name}: {wrong} of {func!r}")
            terms[name] = term
            return value

        return first


class ObservationTerms:
    """The observation terms of a config; each is a leaf of the observation, named by its path."""

    def __init__(self, cfgs: Mapping[str, ObservationTermCfg | None], task: Task) -> None:
        used = {name: cfg for name, cfg in cfgs.items() if cfg is not None}
        self._task, self._params = task, {name: cfg.params for name, cfg in used.items()}
        self._functions = {name: cfg.func for name, cfg in used.items()}
        unclear = [path for path in cfgs if not all(path.split("/"))]
        if unclear:
            expected = "expected a path of names, such as 'cube/offset'"
            raise ConfigError([f"env.observations.terms: {expected}, got {path!r}" for path in unclear])
        self._terms = _bind_all(OBSERVATIONS, used, "env.observations.terms")
        self._removed = [name for name, cfg in cfgs.items() if cfg is None]
        self.needs_last_action = _need_last_action(OBSERVATIONS, used)

    def check(self, scene: Scene) -> None:
        """Raise one ``ConfigError`` for all terms that read unmeasured quantities, or do not return ``[n, ...]``."""
        problems = []
        for path, term in self._terms.items():
            key = f"env.observations.terms.{path}"
            try:
                with blamed_on(f"the {OBSERVATIONS.kind} {self._functions[path]!r} ({key})"):
                    value = term(self._task, scene)
            except UnmeasuredError as error:
                problems.append(error.message_at(key, self._params[path]))
                continue
            except ConfigError as error:
                problems += [f"{key}: {problem}" for problem in error.problems]
                continue
            wrong = wrong_rows(value, self._task.physics.num_envs)
            if wrong is not None:
                problems.append(f"{key}: {wrong} of {self._functions[path]!r}")
                continue
            group = path.split("/")[0]
            if group in OBSERVED_AS.values() and value.dim() < 3:
                problems.append(
                    f"{key}: {group!r} is the group of images [num_envs, height, width, ...], and "
                    f"{self._functions[path]!r} returns {list(value.shape)}; choose another name"
                )
        if problems:
            raise ConfigError(problems)

    def add_to(self, tree: dict[str, Any], scene: Scene) -> dict[str, Any]:
        """Add the terms to the nested observation of a task, and delete the ones that the config removes."""
        for path in self._removed:
            _take_out(tree, path)
        for path, term in self._terms.items():
            value = term(self._task, scene)
            *groups, leaf = path.split("/")
            node = tree
            for group in groups:
                node = node.setdefault(group, {})
                if not isinstance(node, dict):
                    raise ConfigError(f"env.observations.terms.{path}: {group!r} is an observation, not a group")
            if isinstance(node.get(leaf), dict):
                inside = ", ".join(f"{path}/{name}" for name in node[leaf])
                raise ConfigError(f"env.observations.terms.{path}: this is a group, of {inside}; choose another name")
            node[leaf] = value.unsqueeze(1) if value.dim() == 1 else value
        return tree


def _take_out(tree: dict[str, Any], path: str) -> None:
    *groups, leaf = path.split("/")
    nodes = [tree]
    for group in groups:
        inner = nodes[-1].get(group, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"env.observations.terms.{path}: {group!r} is an observation, not a group")
        nodes.append(inner)
    if leaf not in nodes[-1]:
        known = "/".join(groups) or "the observation"
        problem = f"nothing to leave out; {known} has {', '.join(nodes[-1]) or 'nothing'}"
        raise ConfigError(f"env.observations.terms.{path}: {problem}")
    del nodes[-1][leaf]
    for node, group in zip(reversed(nodes[:-1]), reversed(groups), strict=True):
        if not node[group]:
            del node[group]


def _bind_all(
    registry: TermRegistry[F], cfgs: Mapping[str, RewardTermCfg] | Mapping[str, ObservationTermCfg], key: str
) -> dict[str, Callable[..., Tensor]]:
    """Return all terms bound to their parameters, or raise one error with all problems."""
    bound, problems = {}, []
    for name, cfg in cfgs.items():
        try:
            bound[name] = registry.bind(cfg.func, cfg.params, f"{key}.{name}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return bound


def _need_last_action(registry: TermRegistry[Any], cfgs: Mapping[str, Any]) -> bool:
    for cfg in cfgs.values():
        function, params = registry.resolve(cfg.func, cfg.params, "")
        stages = params["stages"] if function is Staged else []
        nested = {str(i): stage for i, stage in enumerate(stages)}
        if function in _uses_last_action or _need_last_action(registry, nested):
            return True
    return False


_PARTS = {"pos": "position", "quat": "orientation", "linvel": "velocity", "angvel": "angular velocity"}


class UnmeasuredError(ConfigError):
    """A term reads a quantity that its task does not measure."""

    def __init__(self, scene: Scene, name: str, part: str = "") -> None:
        """``part`` is a property of a thing: ``quat`` of ``cube`` is ``scene["cube_quat"]``."""
        has = [key.removesuffix(f"_{part}") for key in scene if key.endswith(f"_{part}")] if part else list(scene)
        if part == "pos":  # or a quantity that is itself a position, such as ``goal``
            has += [key for key, value in scene.items() if "_" not in key and value.shape[1:] in ((2,), (3,))]
        asked = f"{_PARTS.get(part, part)} of {name!r}" if part else f"{name!r}"
        self.name, self.message = name, f"the task measures no {asked}.{nearest(name, has)}"
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str], str]]:
        return ConfigError, (self.problems, self.source)

    def message_at(self, key: str, params: Any) -> str:
        """Return the error message with the path of the parameter that has the name, for a term at ``key``."""
        return f"{_path_of(self.name, params, f'{key}.params') or key}: {self.message}"


def _path_of(name: str, given: Any, key: str) -> str | None:
    """Return the path of a value within parameters, or ``None``."""
    if isinstance(given, Mapping):
        inside = given.items()
    elif isinstance(given, list | tuple):
        inside = dict(enumerate(given)).items()
    elif dataclasses.is_dataclass(given):
        inside = vars(given).items()
    else:
        return key if given == name else None
    return next((path for at, value in inside if (path := _path_of(name, value, f"{key}.{at}"))), None)


def measured(scene: Scene, name: str, part: str = "") -> Tensor:
    """Return a quantity of the scene, or ``part`` of a thing; ``ConfigError`` suggests the nearest names."""
    key = f"{name}_{part}" if part else name
    if key not in scene:
        raise UnmeasuredError(scene, name, part)
    return scene[key]


def position(scene: Scene, place: Place) -> Tensor:
    """Return a position ``[n, 3]``: ``scene["cube_pos"]`` for ``"cube"``, or the given point."""
    if isinstance(place, str):
        return scene[place] if place in scene and f"{place}_pos" not in scene else measured(scene, place, "pos")
    some = next(iter(scene.values()))
    return _point(tuple(place), some.device).expand(some.shape[0], 3)


def _place_of(scene: Scene, place: Place, least: int = 1) -> Tensor:
    """Return a position ``[n, 2 or 3]``; ``ConfigError`` if it is not a position or has too few coordinates."""
    found = position(scene, place)
    if found.dim() != 2 or not max(2, least) <= found.shape[1] <= 6:
        expected = "a thing with a height" if least == 3 else "a thing or a place"
        raise ConfigError(f"expected {expected}, and {place!r} is measured in the shape {list(found.shape[1:])}")
    return found


def offset(scene: Scene, of: Place, to: Place) -> Tensor:
    """Return the vector from one place to another, ``[n, 3]``, or ``[n, 2]`` if one of them has no height."""
    start, end = _place_of(scene, of), _place_of(scene, to)
    size = min(start.shape[1], end.shape[1])
    return end[:, :size] - start[:, :size]


def heading(quat: Tensor, symmetry: int = 1) -> Tensor:
    """Return sine and cosine ``[n, 2]`` of ``symmetry`` times the yaw of orientations ``[n, 4]``."""
    w, x, y, z = quat.unbind(1)
    sine, cosine = 2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z)
    for _ in range(symmetry.bit_length() - 1):  # doubles the angle
        sine, cosine = 2.0 * sine * cosine, cosine * cosine - sine * sine
    return torch.stack((sine, cosine), dim=1)


def tilt(quat: Tensor) -> Tensor:
    """Return the cosine ``[n]`` of the angle between an object's z axis and the vertical."""
    return 1.0 - 2.0 * (quat[:, 1] * quat[:, 1] + quat[:, 2] * quat[:, 2])


@lru_cache(maxsize=256)
def _point(place: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a point on a device, cached because a copy from the host would synchronise."""
    return torch.tensor([place], dtype=torch.float32, device=device)


# Rewards. Those documented to be in [0, 1] increase towards the goal, and can be stages of ``staged``.


@register_reward("success")
def success(task: Task, scene: Scene, action: Tensor) -> Tensor:
    """1 where the task is solved."""
    if "success" not in scene:
        problem = f"{type(task).__name__}.success returns None, so there is no success to reward"
        raise ConfigError(f"{problem}. Return where the task is solved, bool [num_envs], or leave this term out")
    return scene["success"]


@register_reward("alive")
def alive(task: Task, scene: Scene, action: Tensor) -> Tensor:
    """1 in every step."""
    return torch.ones_like(action[:, 0])


@register_reward("distance")
def distance(task: Task, scene: Scene, action: Tensor, of: Place, to: Place) -> Tensor:
    """Distance between two things, in metres."""
    return length(offset(scene, of, to))


@register_reward("near")
def near(task: Task, scene: Scene, action: Tensor, of: Place, to: Place, within: Positive = 0.1) -> Tensor:
    """``1 - tanh(distance / within)``: 1 at distance 0, 0.24 at distance ``within``."""
    return 1.0 - torch.tanh(length(offset(scene, of, to)) / within)


@register_reward("closeness")
def closeness(
    task: Task, scene: Scene, action: Tensor, of: Place, to: Place, start: Positive, end: NotNegative = 0.0
) -> Tensor:
    """Progress in [0, 1] of a distance from ``start`` (0) to ``end`` (1), in metres."""
    if start <= end:
        raise ConfigError(f"closeness: expected a start greater than end, got start {start} and end {end}")
    return ((start - length(offset(scene, of, to))) / (start - end)).clamp(0.0, 1.0)


@register_reward("lifted")
def lifted(task: Task, scene: Scene, action: Tensor, of: str, height: Positive, rest: NotNegative = 0.0) -> Tensor:
    """Progress in [0, 1] of a thing's height from ``rest`` to ``rest + height``, in metres."""
    return ((_place_of(scene, of, least=3)[:, 2] - rest) / height).clamp(0.0, 1.0)


@register_reward("upright")
def upright(task: Task, scene: Scene, action: Tensor, of: str) -> Tensor:
    """Cosine of the angle between a thing's z axis and the vertical."""
    return tilt(measured(scene, of, "quat"))


@register_reward("aligned")
def aligned(task: Task, scene: Scene, action: Tensor, of: str, to: str, symmetry: Symmetry = 1) -> Tensor:
    """Agreement in [0, 1] of two headings; ``symmetry`` 4 means that a quarter turn looks the same."""
    both = (heading(measured(scene, name, "quat"), symmetry) for name in (of, to))
    return 0.5 * (1.0 + dot(*both))


@register_reward("grasped")
def grasped(task: Task, scene: Scene, action: Tensor, of: str, width: Positive, reach: Positive = 0.025) -> Tensor:
    """1 where a thing is held: within ``reach`` of the tool, with the gap of the fingers matching its ``width``."""
    return is_held(scene, of, width, reach).to(torch.float32)


def is_held(scene: Scene, of: str, width: float, reach: float = 0.025) -> Tensor:
    """Return where a thing is held, bool ``[n]``: within ``reach`` of the tool, with the finger gap at its width."""
    gap = measured(scene, "gripper")
    return (length(offset(scene, of, "ee")) < reach) & (gap < width + 0.008) & (gap > width - 0.02)


@register_reward("opened")
def opened(task: Task, scene: Scene, action: Tensor, of: str, target: float, start: float = 0.0) -> Tensor:
    """Progress in [0, 1] of the opening of an articulated part from ``start`` to ``target``."""
    if target == start:
        raise ConfigError(f"opened: expected a target other than start, got {target} for both")
    return ((measured(scene, of, "opening") - start) / (target - start)).clamp(0.0, 1.0)


@register_reward("speed")
def speed(task: Task, scene: Scene, action: Tensor, of: str) -> Tensor:
    """Speed of a thing, in m/s."""
    return length(measured(scene, of, "linvel"))


@register_reward("effort")
def effort(task: Task, scene: Scene, action: Tensor) -> Tensor:
    """Mean square of the action."""
    return mean_square(action)


@register_reward("action_rate", last_action=True)
def action_rate(task: Task, scene: Scene, action: Tensor) -> Tensor:
    """Mean square of the change of action."""
    return mean_square(action - scene[LAST_ACTION])


@register_reward("joint_speed")
def joint_speed(task: Task, scene: Scene, action: Tensor) -> Tensor:
    """Mean square of the robot's joint velocities."""
    return mean_square(measured(scene, "qvel"))


@register_reward("joint_limits")
def joint_limits(task: Task, scene: Scene, action: Tensor, margin: NotNegative = 0.1) -> Tensor:
    """Penetration of joints into a ``margin`` around their limits, summed, in radians or metres."""
    if not hasattr(task, "robot"):
        raise ConfigError(f"{task.cfg.id} knows no robot with limits; leave joint_limits out")
    joints = measured(scene, "qpos")[:, task.robot.joint_columns]
    low, high = task.robot.lower + margin - joints, joints - task.robot.upper + margin
    return (low.clamp_min(0.0) + high.clamp_min(0.0)).sum(dim=1)


@configclass
class StageCfg(Config):
    """One stage: a reward function in [0, 1], and the value at which it is complete."""

    func: str
    """Name of the reward function."""
    params: dict[str, Any] = {}
    """Parameters of the function."""
    done: Positive = 1.0
    """Value at which the next stage starts."""


@register_reward("staged")
class Staged:
    """Progress in [0, 1] through stages: completed stages, plus the value of the current one, divided by their number.

    It increases along the way; a later stage is never rewarded before the earlier ones are complete.
    """

    def __init__(self, stages: list[StageCfg]) -> None:
        if not stages:
            raise ConfigError("stages: expected at least one stage")
        keys = [f"stages.{i}" for i in range(len(stages))]
        bound = [REWARDS.bind(stage.func, stage.params, key) for stage, key in zip(stages, keys, strict=True)]
        self._stages = list(zip(bound, (stage.done for stage in stages), strict=True))

    def __call__(self, task: Task, scene: Scene, action: Tensor) -> Tensor:
        reached = torch.ones_like(action[:, 0])
        total = torch.zeros_like(reached)
        for term, done in self._stages:
            value = term(task, scene, action)
            over = (value >= done).to(torch.float32)
            total = total + reached * torch.maximum(over, (value / done).clamp(0.0, 1.0))
            reached = reached * over
        return total / len(self._stages)


# Observations.


@register_observation("position")
def observe_position(task: Task, scene: Scene, of: str) -> Tensor:
    """Position of a thing, 3."""
    return position(scene, of)


@register_observation("offset")
def observe_offset(task: Task, scene: Scene, of: Place, to: Place) -> Tensor:
    """Vector from one thing to another, 3."""
    return offset(scene, of, to)


@register_observation("distance")
def observe_distance(task: Task, scene: Scene, of: Place, to: Place) -> Tensor:
    """Distance between two things, 1."""
    return length(offset(scene, of, to))


@register_observation("heading")
def observe_heading(task: Task, scene: Scene, of: str, symmetry: Symmetry = 1) -> Tensor:
    """Sine and cosine of a thing's yaw (times its symmetry), 2."""
    return heading(measured(scene, of, "quat"), symmetry)


@register_observation("upright")
def observe_upright(task: Task, scene: Scene, of: str) -> Tensor:
    """Cosine of the angle between a thing's z axis and the vertical, 1."""
    return tilt(measured(scene, of, "quat"))


@register_observation("velocity")
def observe_velocity(task: Task, scene: Scene, of: str) -> Tensor:
    """Linear and angular velocity of a thing, 6."""
    return torch.cat((measured(scene, of, "linvel"), measured(scene, of, "angvel")), dim=1)


@register_observation("grasped")
def observe_grasped(task: Task, scene: Scene, of: str, width: Positive, reach: Positive = 0.025) -> Tensor:
    """1 where a thing is held between the fingers, else 0; 1."""
    return is_held(scene, of, width, reach).to(torch.float32)


@register_observation("measured")
def observe_measured(task: Task, scene: Scene, name: str) -> Tensor:
    """Any quantity of the scene, such as ``drawer_opening``."""
    return measured(scene, name).to(torch.float32)


@register_observation("last_action", last_action=True)
def observe_last_action(task: Task, scene: Scene) -> Tensor:
    """The action that led to this observation; zero after a reset."""
    return scene[LAST_ACTION]
