"""Curricula: ranges that move from one interval to another with the success rate or the steps of each env.

::

    "randomize_target": {
        "y": {"curriculum": {"by": "success", "from": [0, 0], "to": [-0.2, 0.2], "between": [0.3, 0.8]}}
    }

Every env follows the curriculum independently: its samples do not depend on ``num_envs`` or on the process, and its
progress is part of the environment's state. A range moves between episodes only.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, WrapValidator
from torch import Tensor

from embodichain.config.classes import Config, Number, Positive, configclass, is_config, shorten
from embodichain.errors import ConfigError, nearest

_WRITTEN = {"by": "by", "from": "start", "to": "end", "between": "between", "episodes": "episodes"}
"""Keys in a config and the fields they set; ``from`` is a keyword of Python."""
Bounds = tuple[float | Tensor, float | Tensor]
"""Lower and upper bound: numbers, or tensors ``[n, k]``."""


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"expected [low, high] with low <= high, got {list(bounds)}")
    return bounds


def _two(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"expected two numbers [low, high], got {shorten(value)}")
    return value


_Pair = Annotated[tuple[Number, Number], BeforeValidator(_two), AfterValidator(_ordered)]


@configclass(frozen=True)
class CurriculumCfg(Config):
    """Movement of a range."""

    by: Literal["success", "steps"]
    """``success``: the running success rate of the env's episodes; ``steps``: the number of steps it has taken."""
    start: _Pair
    """The initial range (``from``)."""
    end: _Pair
    """The final range (``to``)."""
    between: tuple[Number, Number]
    """Success rate or steps at which the range starts to move, and at which it reaches the final range."""
    episodes: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Window of the running success rate, an exponential average: each episode has weight ``1 / episodes``."""


class MovingRange(tuple[float, float]):
    """A range that follows a curriculum; as a tuple, it is the union of all its positions."""

    curriculum: CurriculumCfg

    def __new__(cls, curriculum: CurriculumCfg) -> "MovingRange":
        start, end = curriculum.start, curriculum.end
        made = super().__new__(cls, (min(start[0], end[0]), max(start[1], end[1])))
        made.curriculum = curriculum
        return made

    def __getnewargs__(self) -> tuple[CurriculumCfg]:
        return (self.curriculum,)

    def __hash__(self) -> int:
        return hash(self.curriculum)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MovingRange) and self.curriculum == other.curriculum

    def __ne__(self, other: object) -> bool:
        return not self == other

    def to_data(self) -> dict[str, Any]:
        """Return the range as written in a config."""
        return {"curriculum": {word: getattr(self.curriculum, field) for word, field in _WRITTEN.items()}}


def _read(value: Any, check: Any) -> Any:
    """Parse a range: two numbers, or ``{"curriculum": {...}}``."""
    if isinstance(value, MovingRange):
        check(tuple(value))
        return value
    if not isinstance(value, Mapping):
        return check(_two(value))
    inside = value.get("curriculum")
    if set(value) != {"curriculum"} or not isinstance(inside, Mapping):
        raise ValueError('expected [low, high] or {"curriculum": {"by", "from", "to", "between"}}')
    unknown = [f"curriculum.{key}: unknown key.{nearest(str(key), _WRITTEN)}" for key in inside if key not in _WRITTEN]
    if unknown:
        raise ConfigError(unknown)
    names = {field: word for word, field in _WRITTEN.items()}
    try:
        made = MovingRange(CurriculumCfg.from_dict({_WRITTEN[key]: entry for key, entry in inside.items()}))
    except ConfigError as error:
        problems = [(problem, re.split(r"[.:]", problem, maxsplit=1)[0]) for problem in error.problems]
        written = [names.get(key, key) + problem.removeprefix(key) for problem, key in problems]
        raise ConfigError([f"curriculum.{problem}" for problem in written]) from None
    low, high = made.curriculum.between
    if low >= high:
        raise ValueError(f"expected curriculum.between to be [begins, arrives], which grow, got [{low}, {high}]")
    if made.curriculum.by == "success" and not 0.0 <= low < high <= 1.0:
        raise ValueError(f"expected curriculum.between within [0, 1], as it is a success, got [{low}, {high}]")
    check(tuple(made))
    return made


Range = Annotated[tuple[Number, Number], AfterValidator(_ordered), WrapValidator(_read)]
"""``[low, high]``, or a curriculum between two such ranges."""
PositiveRange = Annotated[tuple[Positive, Positive], AfterValidator(_ordered), WrapValidator(_read)]
"""A ``Range`` of positive numbers."""


def moving_ranges(tree: Any, path: str = "") -> Iterator[tuple[str, MovingRange]]:
    """Yield the path and the range of every curriculum in a config."""
    if isinstance(tree, MovingRange):
        yield path, tree
    elif is_config(tree):
        for name in tree.__dataclass_fields__:
            yield from moving_ranges(getattr(tree, name), f"{path}.{name}" if path else name)
    elif isinstance(tree, Mapping):
        for name, entry in tree.items():
            yield from moving_ranges(entry, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, list | tuple):
        for number, entry in enumerate(tree):
            yield from moving_ranges(entry, f"{path}.{number}")


class Curricula:
    """Tracks the progress of each env, and computes the current bounds of its ranges."""

    def __init__(self, num_envs: int, device: torch.device, final: bool = False) -> None:
        """``final`` keeps all ranges at their final bounds, for evaluation."""
        self._final = final
        self._ranges: dict[str, MovingRange] = {}
        self._keys: dict[str, str] = {}
        self._used: set[MovingRange] = set()
        self._windows: dict[int, int] = {}
        self._like = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self._state: dict[str, Tensor] = {}

    @property
    def active(self) -> bool:
        """Whether any range follows a curriculum."""
        return bool(self._state)

    @property
    def needs_success(self) -> list[str]:
        """Names of the ranges that follow the success rate."""
        return [name for name, given in self._ranges.items() if given.curriculum.by == "success"]

    def add(self, tree: Any, path: str, key: str, used: bool = False) -> None:
        """Register all ranges of the config at ``key``; their names start with ``path``.

        ``used`` marks them as sampled from, see :meth:`check`.
        """
        for inside, given in moving_ranges(tree):
            name = f"{path}.{inside}" if path else inside
            self._ranges[name], self._keys[name] = given, f"{key}.{inside}"
            if used:
                self._used.add(given)
            if not self._final:
                self._windows.setdefault(given.curriculum.episodes, len(self._windows))
        count = len(self._windows)
        if count:  # success rate per window, then steps; values that the current episode uses; ended envs
            rows = self._like.new_zeros(self._like.shape[0], count + 1)
            ended = torch.zeros_like(self._like, dtype=torch.bool)
            self._state = {"now": rows, "latched": rows.clone(), "ended": ended}

    def check(self, has_success: bool) -> None:
        """Raise ``ConfigError`` for ranges that are never sampled from, and for success in a task without it."""
        problems = [
            f"{self._keys[name]}: the task takes this range as it is, so that it cannot follow a curriculum; "
            "give [low, high]"
            for name, given in self._ranges.items()
            if given not in self._used
        ]
        if not has_success:
            problem = "the task has no success to follow; use steps"
            problems += [f"{self._keys[name]}.curriculum.by: {problem}" for name in self.needs_success]
        if problems:
            raise ConfigError(problems)

    def bounds(self, given: tuple[float, float], env_ids: Tensor) -> Bounds:
        """Return the current bounds of a range, ``[n, 1]`` each if it follows a curriculum."""
        if not isinstance(given, MovingRange):
            return given
        self._used.add(given)
        start, end = given.curriculum.start, given.curriculum.end
        if self._final or not self._state:
            return end
        share = self._progress(given, env_ids).unsqueeze(1)
        return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share

    def record(self, ended: Tensor, success: Tensor | None) -> None:
        """Record one step: which envs ended their episode, and which of them succeeded, ``[num_envs]`` each.

        Steps between the end of an episode and its reset are not counted.
        """
        now, before = self._state["now"], self._state["ended"]
        now[:, -1] += (~before).to(now.dtype)
        if success is not None:
            new = (ended & ~before).to(now.dtype)
            for window, column in self._windows.items():
                now[:, column] += new * (success.to(now.dtype) - now[:, column]) / window
        before |= ended

    def begin(self, chosen: Tensor) -> None:
        """Update the bounds used by the next episodes of the envs ``chosen`` ``[num_envs]``, which were just reset."""
        latched = self._state["latched"]
        latched.copy_(torch.where(chosen.unsqueeze(1), self._state["now"], latched))
        self._state["ended"] &= ~chosen

    def clear(self, env_ids: Tensor) -> None:
        """Reset the progress of these envs."""
        for value in self._state.values():
            value[env_ids] = 0

    def metrics(self) -> dict[str, Tensor]:
        """Return the progress of each range in [0, 1], ``[num_envs]`` each."""
        all_ids = torch.arange(self._like.shape[0], device=self._like.device)
        return {f"curriculum/{name}": self._progress(r, all_ids).float() for name, r in self._ranges.items()}

    def origin(self) -> Tensor:
        """Return the values that determine the ranges of the next episodes, as int64 ``[num_envs, k]``."""
        return self._state["latched"].view(torch.int64)

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the state, ``[num_envs, ...]`` each."""
        return {name: value.clone() for name, value in self._state.items()}

    def set_state(self, env_ids: Tensor, rows: Any) -> None:
        """Restore rows of :meth:`state`."""
        for name, value in self._state.items():
            value.index_copy_(0, env_ids, rows[name])

    def _progress(self, given: MovingRange, env_ids: Tensor) -> Tensor:
        cfg = given.curriculum
        column = -1 if cfg.by == "steps" else self._windows[cfg.episodes]
        low, high = cfg.between
        return ((self._state["latched"][env_ids, column] - low) / (high - low)).clamp(0.0, 1.0)
