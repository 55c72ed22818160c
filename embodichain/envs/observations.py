"""Builds observations from a task's measurements: sensor errors, images and TensorDicts; encodes instructions.

All vectors are views of one matrix, so that a single operation copies all of them or replaces rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.env_cfg import LanguageCfg, NoiseCfg, ObservationsCfg
from embodichain.envs.physics import Images
from embodichain.envs.randomization import Calibration, Draw, EventTerm, Rows, World
from embodichain.errors import ConfigError, nearest

_JOINTS = "robot/qpos"
Path = tuple[str, ...]
Bounds = Mapping[Path, tuple[float, float]]
"""Minimum and maximum of observations, by path."""


def encode_instructions(texts: Sequence[str], length: int) -> Tensor:
    """Return uint8 ``[len(texts), length]``: the UTF-8 bytes of each text, padded with zeros."""
    table = torch.zeros(len(texts), length, dtype=torch.uint8)
    for row, text in zip(table, texts, strict=True):
        data = text.encode()
        if not data or b"\0" in data or len(data) > length:
            raise ConfigError(f"an instruction has 1 to {length} bytes, none of them zero, got {len(data)}: {text!r}")
        row[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return table


def instruction_table(cfg: LanguageCfg, choices: Sequence[Mapping[str, str]]) -> Tensor:
    """Return the encoded phrases for every choice, uint8 ``[phrases, choices, length]``.

    A choice maps the placeholders of a phrase to words: ``{"color": "red"}`` replaces ``{color}``.
    """
    fields = sorted({name for choice in choices for name in choice})
    wrong = [(phrase, name) for phrase in cfg.phrases for name in fields if phrase.count(f"{{{name}}}") != 1]
    if wrong:
        raise ConfigError(
            [f"env.language.phrases: expected '{{{name}}}' once, got {phrase!r}" for phrase, name in wrong]
        )
    texts = []
    for phrase in cfg.phrases:
        for choice in choices:
            text = phrase
            for name, word in choice.items():
                text = text.replace(f"{{{name}}}", word)
            texts.append(text)
    return encode_instructions(texts, cfg.length).view(len(cfg.phrases), len(choices), cfg.length)


def decode_instructions(instructions: Tensor) -> list[str]:
    """Return the texts of instructions, uint8 ``[n, length]``."""
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in instructions.cpu().tolist()]


class PackedObservation(NamedTuple):
    """The observation of some envs, in tensors that nothing else references."""

    vectors: Tensor
    """All float32 vectors, concatenated, ``[n, columns]``."""
    others: tuple[Tensor, ...]
    """All other leaves, such as images, ``[n, ...]`` each."""

    def rows(self, env_ids: Tensor) -> PackedObservation:
        """Return a copy of these rows."""
        others = tuple(x.index_select(0, env_ids) for x in self.others)
        return PackedObservation(self.vectors.index_select(0, env_ids), others)

    def with_rows(self, rows: PackedObservation, env_ids: Tensor) -> PackedObservation:
        """Return a copy whose rows ``env_ids`` are ``rows``."""
        pairs = zip(self.others, rows.others, strict=True)
        others = tuple(old.index_copy(0, env_ids, new) for old, new in pairs)
        return PackedObservation(self.vectors.index_copy(0, env_ids, rows.vectors), others)

    def where(self, mask: Tensor, other: PackedObservation) -> PackedObservation:
        """Return a new observation: this one where ``mask`` ``[n]`` is true, and ``other`` elsewhere."""
        pairs = [(self.vectors, other.vectors), *zip(self.others, other.others, strict=True)]
        first, *rest = (torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, y) for x, y in pairs)
        return PackedObservation(first, tuple(rest))

    def copy(self) -> PackedObservation:
        """Return a copy."""
        return PackedObservation(self.vectors.clone(), tuple(x.clone() for x in self.others))

    def is_finite(self) -> Tensor:
        """Return for each env ``[n]`` whether all its vectors are finite."""
        return torch.linalg.vector_norm(self.vectors, ord=1, dim=1) < torch.inf  # NaN compares as false


class ObservationBuilder:
    """Builds observations as a function of the state only.

    ``noise(env_ids, size)`` returns standard normal samples ``[n, size]``, and ``draw(env_ids)`` a source of other
    random numbers, both for the current step of these envs.
    """

    def __init__(
        self,
        cfg: ObservationsCfg,
        device: torch.device,
        images: Callable[[Tensor], Images],
        noise: Callable[[Tensor, int], Tensor],
        draw: Callable[[Tensor], Draw],
    ) -> None:
        self._cfg, self._device, self._draw_noise, self._draw = cfg, device, noise, draw
        self._images = images if cfg.cameras else None
        errors = {p: given if isinstance(given, NoiseCfg) else NoiseCfg(std=given) for p, given in cfg.noise.items()}
        self._noise = {path: error.std for path, error in errors.items() if error.std > 0}
        self._uniform = {path: error.uniform for path, error in errors.items() if error.uniform != (0.0, 0.0)}
        self._bias = {path: error.bias for path, error in errors.items() if error.bias != (0.0, 0.0)}
        self._sensors: Sensors | None = None
        self.calibration: Calibration | None = None
        """The measurement error of ``robot/qpos``."""
        self.is_fresh = False
        """Whether the task returns newly allocated tensors, which need not be copied."""
        self._tree: dict[str, Any] = {}
        self._order: Tensor | None = None
        """On a GPU: the elements of the packed matrix, vector by vector."""

    def build(self, tree: dict[str, Any], env_ids: Tensor) -> PackedObservation:
        """Return the observation of these envs from the nested observation of their task."""
        images = self._images(env_ids) if self._images is not None else {}
        tree |= images
        leaves = dict(_leaves(tree))
        if not self._tree:
            self._lay_out(leaves)
        vectors = [leaves[path] for path in self._vectors]
        # Copied, as the caller may normalise observations in place. Images have just been rendered.
        others = [leaves[p] if p[0] in images else leaves[p].clone() for p in self._others]
        if len(vectors) == 1 and self.is_fresh:
            packed = vectors[0]
        else:
            packed = torch.cat(vectors, dim=1) if vectors else torch.zeros(env_ids.numel(), 0, device=self._device)
        self._add_errors(packed, env_ids)
        if self._sensors is not None:
            return self._sensors.apply_errors(PackedObservation(packed, tuple(others)), env_ids)
        return PackedObservation(packed, tuple(others))

    def _add_errors(self, packed: Tensor, env_ids: Tensor) -> None:
        """Add calibration errors and noise in place; noise is sampled in every step."""
        if self.calibration is not None and _JOINTS in self._columns:
            packed[:, self._columns[_JOINTS]] += self.calibration.offset[env_ids]
        if self._noise:
            columns = [self._columns[path] for path in self._noise]
            sizes = [column.stop - column.start for column in columns]
            noise = self._draw_noise(env_ids, sum(sizes)).to(torch.float32).split(sizes, dim=1)
            for column, std, drawn in zip(columns, self._noise.values(), noise, strict=True):
                packed[:, column] += std * drawn
        if self._uniform:
            draw = self._draw(env_ids)
            for path, bounds in self._uniform.items():
                column = self._columns[path]
                packed[:, column] += draw.values(bounds, column.stop - column.start).to(torch.float32)

    @property
    def needs_every_step(self) -> bool:
        """Whether observations depend on those of earlier steps, so that every step must be observed."""
        return bool(self._cfg.delay)

    def make_sensors(self, world: World, step: Tensor, example: PackedObservation) -> Sensors | None:
        """Return the event that samples bias and delay, or ``None``; observations include them from now on.

        ``step`` ``[num_envs]`` is live; ``example`` is an observation of all envs.
        """
        if not self._bias and not self._cfg.delay:
            return None
        biased = {path: (bounds, self._columns[path]) for path, bounds in self._bias.items()}
        numbers = {"/".join(path): number for number, path in enumerate(self._others)}
        late: dict[str, tuple[tuple[int, int], slice | int]] = {}
        for path, steps in self._cfg.delay.items():
            late[path] = (steps, self._columns[path] if path in self._columns else numbers[path])
        self._sensors = Sensors(world, step, biased, late, example)
        return self._sensors

    def unpack(self, packed: PackedObservation) -> TensorDict:
        """Return a TensorDict ``[n]`` of views; on a GPU the vectors are copied."""
        if len(self._sizes) == 1:
            vectors: Sequence[Tensor] = [packed.vectors]
        elif self._device.type == "cpu":
            vectors = packed.vectors.split_with_sizes(self._sizes, dim=1)
        else:
            vectors = self._contiguous(packed.vectors)
        return _to_tensordict(self._tree, [*vectors, *packed.others], packed.vectors.shape[:1], self._device)

    def _contiguous(self, packed: Tensor) -> list[Tensor]:
        """Split the columns of a matrix ``[n, columns]`` into contiguous tensors with one kernel.

        Only contiguous tensors can be copied together, by ``copy_together``, which also takes one kernel.
        """
        count = packed.shape[0]
        if not self._sizes:
            return []
        if self._order is None or self._order.numel() != packed.numel():
            indices = torch.arange(packed.numel(), device=packed.device).view_as(packed)
            self._order = torch.cat([part.flatten() for part in indices.split(self._sizes, dim=1)])
        parts = packed.flatten().index_select(0, self._order).split([count * size for size in self._sizes])
        return [part.view(count, size) for part, size in zip(parts, self._sizes, strict=True)]

    def _lay_out(self, leaves: dict[Path, Tensor]) -> None:
        """Assign each leaf of the first observation to a position; later observations have the same leaves."""
        self._vectors = [path for path, leaf in leaves.items() if leaf.dim() == 2 and leaf.dtype == torch.float32]
        self._others = [path for path in leaves if path not in self._vectors]
        self._sizes = [int(leaves[path].shape[1]) for path in self._vectors]
        pairs = zip(self._vectors, self._sizes, np.cumsum(self._sizes).tolist(), strict=True)
        self._columns = {"/".join(path): slice(end - size, end) for path, size, end in pairs}
        everything = [*self._columns, *("/".join(path) for path in self._others)]
        wanted = [("noise", path, [*self._columns]) for path in self._cfg.noise]
        wanted += [("delay", path, everything) for path in self._cfg.delay]
        problems = [
            f"env.observations.{setting}.{path}: no such observation.{nearest(path, known)}"
            for setting, path, known in wanted
            if path not in known
        ]
        if problems:
            raise ConfigError(problems)
        numbers = {path: number for number, path in enumerate([*self._vectors, *self._others])}
        for path in leaves:  # nested names; each leaf's index counts vectors first, then others
            node = self._tree
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = numbers[path]


class Sensors(EventTerm):
    """Sensor errors that last for an episode: a bias and a delay, sampled at reset.

    Recent observations are kept in a ring buffer indexed by the step number. Until an episode is older than the delay,
    its first observation is returned. Building the observation of a state twice therefore gives the same result.
    """

    modes = ("reset",)

    def __init__(
        self,
        world: World,
        step: Tensor,
        biased: Mapping[str, tuple[tuple[float, float], slice]],
        late: Mapping[str, tuple[tuple[int, int], slice | int]],
        example: PackedObservation,
    ) -> None:
        """``biased`` and ``late`` map observations to their bounds, and to their columns or index among the others."""
        super().__init__(world)
        self._step, self._biased, self._late = step, biased, late
        for path, (_, column) in biased.items():
            self.variables[f"bias/{path}"] = world.zeros(column.stop - column.start)
        for path, ((_, most), index) in late.items():
            like = example.vectors[:, index] if isinstance(index, slice) else example.others[index]
            self.variables[f"delay/{path}"] = world.zeros(dtype=torch.int64)
            self.variables[f"past/{path}"] = like.unsqueeze(1).repeat(1, most + 1, *[1] * (like.dim() - 1))

    def apply(self, rows: Rows, draw: Draw) -> None:
        for path, (bounds, column) in self._biased.items():
            rows[f"bias/{path}"] = draw.values(bounds, column.stop - column.start).to(torch.float32)
        for path, (steps, _) in self._late.items():
            rows[f"delay/{path}"] = draw.steps(steps)

    def apply_errors(self, now: PackedObservation, env_ids: Tensor) -> PackedObservation:
        """Return the delayed and biased observation of these envs."""
        vectors, others = now.vectors, list(now.others)
        for path, (_, column) in self._biased.items():
            vectors[:, column] += self.variables[f"bias/{path}"][env_ids]
        for path, (_, index) in self._late.items():
            if isinstance(index, slice):
                vectors[:, index] = self._delayed(path, vectors[:, index], env_ids)
            else:
                others[index] = self._delayed(path, others[index], env_ids)
        return PackedObservation(vectors, tuple(others))

    def _delayed(self, path: str, measured: Tensor, env_ids: Tensor) -> Tensor:
        past, step = self.variables[f"past/{path}"], self._step[env_ids]
        slots = past.shape[1]
        past[env_ids, step % slots] = measured
        return past[env_ids, (step - self.variables[f"delay/{path}"][env_ids]).clamp_min(0) % slots]


def observation_space(obs: TensorDictBase, bounds: Bounds | None = None, prefix: Path = ()) -> gym.spaces.Dict:
    """Return the space of one env's observation; ``bounds`` override the default bounds of a leaf's dtype."""
    known, spaces = bounds or {}, dict[str, gym.Space[Any]]()
    for key in obs.keys():  # noqa: SIM118
        path, value = (*prefix, str(key)), obs[key]
        if isinstance(value, TensorDictBase):
            spaces[key] = observation_space(value, bounds, path)
            continue
        usual = (0, 255) if value.dtype == torch.uint8 else (-np.inf, np.inf)
        kind: Any = {torch.uint8: np.uint8, torch.int32: np.int32}.get(value.dtype, np.float32)
        low, high = known.get(path, usual)
        spaces[key] = gym.spaces.Box(low, high, tuple(value.shape[1:]), kind)
    return gym.spaces.Dict(spaces)


def _to_tensordict(tree: dict[str, Any], leaves: list[Tensor], size: torch.Size, device: torch.device) -> TensorDict:
    """Build nested TensorDicts; the shapes are known, so the costly checks of the public constructor are skipped."""
    source = {
        key: _to_tensordict(value, leaves, size, device) if isinstance(value, dict) else leaves[value]
        for key, value in tree.items()
    }
    return TensorDict._new_unsafe(source, batch_size=size, device=device)


def _leaves(tree: dict[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the leaves of a nested dict with their paths."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value
