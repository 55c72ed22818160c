"""Samples frames at offsets that differ by key: padded chunks, observation history, LeRobot's ``delta_timestamps``.

``sampling.py`` copies whole windows and is faster. Here every frame is gathered separately, so that a window may extend
beyond its episode: the nearest frame of the episode is repeated, and ``NAME_is_pad`` marks it, as in LeRobot.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.datasets.frames import FrameLayout, Key, Leaf, unflatten
from embodichain.agents.engine.sampling import Candidates, WindowSampler
from embodichain.agents.engine.shared_buffer import Ints
from embodichain.envs.vec_env import SEGMENTS
from embodichain.errors import ConfigError, nearest

_TOLERANCE = 1e-4
"""Tolerance in seconds between a delta timestamp and the time of a frame, as in LeRobot."""
_SEGMENT: Key = ("segment",)
_SEPARATOR = re.compile(r"[./]")


@dataclass(frozen=True)
class Offsets:
    """Offsets of the frames to return, in steps before (negative) or after the sampled frame, by key name.

    A name is that of an array (``observation/robot/qpos``) or of a group (``observation``), with slashes or dots; the
    longest matching name applies. Arrays without a match come from the sampled frame alone and have no time axis.
    """

    steps: Mapping[str, tuple[int, ...]]
    span: int = 1
    """Number of steps, starting at the sampled frame, that must lie inside the episode."""
    marked: tuple[str, ...] | None = None
    """Names that get a ``NAME_is_pad``; None: all."""
    weights: tuple[float, ...] | None = None
    """Relative probability of frames of each segment (see ``SEGMENTS``) within an episode; None: uniform."""

    @classmethod
    def of_chunk(cls, chunk_size: int, pad: bool = False, obs_horizon: int = 1) -> Offsets:
        """Return the offsets of a chunk: ``chunk_size`` steps from the sampled frame on. With ``obs_horizon > 1``,
        observations are the last ``obs_horizon`` ones instead. ``pad`` lets chunks extend beyond the episode."""
        ahead, marked = tuple(range(chunk_size)), ["action"] if pad else []
        steps = {"": ahead, "action": ahead}  # "" matches all keys; "action" is listed to be marked
        if obs_horizon > 1:
            steps["observation"] = tuple(range(1 - obs_horizon, 1))
            marked.append("observation")
        return cls(steps, 1 if pad else chunk_size, tuple(marked))

    @classmethod
    def of_timestamps(cls, deltas: Mapping[str, Sequence[float]], fps: float) -> Offsets:
        """Return the offsets of LeRobot's ``delta_timestamps``, given in seconds."""
        if not (math.isfinite(fps) and fps > 0.0):
            raise ConfigError(f"fps: expected a number above 0, got {fps!r}", "delta_timestamps")
        problems, steps = [], {}
        for name, seconds in deltas.items():
            if not isinstance(seconds, Sequence) or not all(map(_is_number, seconds)):
                problems.append(f"{name}: expected a list of seconds such as [-0.1, 0.0], got {seconds!r}")
                continue
            exact = [delta * fps for delta in seconds]
            steps[name] = tuple(round(step) for step in exact)
            off = [s for s, e, r in zip(seconds, exact, steps[name], strict=True) if abs(e - r) > _TOLERANCE * fps]
            if off or not steps[name]:
                got = f"{off[0]:g} s" if off else "none"
                problems.append(f"{name}: expected multiples of {1 / fps:g} s (1/{fps:g}), got {got}")
        if problems:
            raise ConfigError(problems, "delta_timestamps")
        return cls(steps)

    def weighted(self, weights: Mapping[str, float]) -> Offsets:
        """Return a copy with segment weights by name; the default weight is 1."""
        problems = [f"unknown name {name!r}.{nearest(name, SEGMENTS)}" for name in weights if name not in SEGMENTS]
        bad = [name for name, weight in weights.items() if not (_is_number(weight) and weight >= 0.0)]
        problems += [f"{name}: expected a number of at least 0, got {weights[name]!r}" for name in bad]
        if problems:
            raise ConfigError(problems, "segment_weights")
        return replace(self, weights=tuple(float(weights.get(name, 1.0)) for name in SEGMENTS))

    def resolve(self, layout: FrameLayout) -> list[tuple[Leaf, str | None]]:
        """Return each array with its matching name or None; ``ConfigError`` for names that match no array."""
        fitting: list[tuple[Leaf, str | None]] = []
        used = {""}
        for leaf in layout.leaves:
            names = [name for name in self.steps if _fits(name, leaf.key)]
            fitting.append((leaf, max(names, key=len) if names else None))
            used.update(names)
        known = sorted({".".join(leaf.key[:depth]) for leaf in layout.leaves for depth in range(1, len(leaf.key) + 1)})
        wrong = [name for name in self.steps if name not in used]
        if wrong:
            raise ConfigError([f"unknown key {name!r}.{nearest(name, known)}" for name in wrong], "delta_timestamps")
        return fitting


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


def _fits(name: str, key: Key) -> bool:
    """Return whether a name, ours or LeRobot's, is that of an array or of a group that contains it."""
    parts = tuple(_SEPARATOR.split(name)) if name else ()
    if parts[:2] == ("observation", "images"):
        parts = ("observation", "image", *parts[2:])
    is_state = parts == ("observation", "state") and key == ("observation", "robot", "qpos")
    return key[: len(parts)] == parts or is_state


class OffsetSampler:
    """Samples frames together with those at the given offsets; one instance per thread and ``Offsets``."""

    def __init__(self, windows: WindowSampler, offsets: Offsets) -> None:
        self._windows, self._buffer, self._offsets = windows, windows.buffer, offsets
        self._leaves = offsets.resolve(windows.buffer.layout)
        self._steps = {name: torch.tensor(steps) for name, steps in offsets.steps.items()}
        self._marked = tuple(offsets.steps) if offsets.marked is None else offsets.marked
        self._weights = None if offsets.weights is None else np.array(offsets.weights)
        if self._weights is not None and _SEGMENT not in self._buffer.frames:
            problem = 'the stream does not store segments; set "segments": true in its action_config'
            raise ConfigError(problem, "segment_weights")
        sizes = {None if name is None else len(offsets.steps[name]) for _, name in self._leaves}
        self._time_axis = [] if None in sizes or len(sizes) > 1 else [size for size in sizes if size is not None]

    def draw(self, generator: np.random.Generator, batch_size: int) -> tuple[TensorDict, Ints, int]:
        """Return a batch, the sampled frames (``row * max_steps + step``), and the number of redrawn ones.
        The batch is ``[batch_size, chunk_size]`` if all arrays have as many frames, else ``[batch_size]``."""
        known, chosen, picks = self._pick(generator, batch_size)
        values = self._copy(picks, known.length_of(chosen))
        redrawn, changed = 0, self._windows.changed(known, chosen)
        deadline = 0.0
        while len(changed):  # rows that were overwritten during the copy
            redrawn += len(changed)
            known, chosen, again = self._pick(generator, len(changed))
            picks[changed] = again
            index = torch.from_numpy(changed)
            for key, value in self._copy(again, known.length_of(chosen)).items():
                values[key][index] = value
            still = self._windows.changed(known, chosen)
            if len(still) == len(changed):
                deadline = self._windows.wait_for_writers(deadline)
            changed = changed[still]
        return TensorDict(unflatten(values), batch_size=[batch_size, *self._time_axis]), picks, redrawn

    def _pick(self, generator: np.random.Generator, count: int) -> tuple[Candidates, Ints, Ints]:
        """Draw an episode uniformly, then one of its frames, weighted by segment if there are weights."""
        span = self._offsets.span
        known, chosen, picks = self._windows.pick(generator, count, span)
        if self._weights is not None:
            rows, starts = known.rows[chosen], known.length_of(chosen) - (span - 1)
            segments = self._buffer.frames[_SEGMENT][torch.from_numpy(rows)].numpy()
            # A row that is being written may hold any values; its windows are redrawn.
            weights = self._weights[segments.clip(0, len(SEGMENTS) - 1)]
            weights[np.arange(self._buffer.max_steps) >= starts[:, None]] = 0.0
            total = weights.cumsum(axis=1)
            drawn = generator.random(count) * total[:, -1]
            at = (total <= drawn[:, None]).sum(axis=1)
            has_weight = total[:, -1] > 0.0  # if all frames of an episode have weight 0, keep the uniform draw
            picks = np.where(has_weight, rows * self._buffer.max_steps + at, picks)
        return known, chosen, picks

    def _copy(self, picks: Ints, lengths: Ints) -> dict[Key, Tensor]:
        """Return the frames at the offsets from ``picks``, and the padding masks."""
        buffer = self._buffer
        drawn = torch.from_numpy(picks)
        at, last = drawn % buffer.max_steps, torch.from_numpy(lengths) - 1
        first = drawn - at
        index: dict[str, Tensor] = {}
        values: dict[Key, Tensor] = {}
        for name, steps in self._steps.items():
            requested = at[:, None] + steps
            clamped = torch.minimum(requested.clamp_min(0), last[:, None])
            index[name] = first[:, None] + clamped
            if name in self._marked:
                values[f"{name}_is_pad",] = clamped != requested
        for leaf, fitting in self._leaves:
            frames = buffer.frames[leaf.key].flatten(0, 1)
            if fitting is None:
                values[leaf.key] = frames.index_select(0, drawn)
            else:
                flat = index[fitting]
                values[leaf.key] = frames.index_select(0, flat.reshape(-1)).unflatten(0, flat.shape)
        return values
