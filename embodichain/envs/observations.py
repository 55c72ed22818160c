"""From a task's measurements to the observation that is returned: noise, cameras, TensorDict.

All vectors of an observation lie side by side in one matrix, of which the leaves of the TensorDict are views: the whole
is copied, and rows of it replaced, by one operation instead of one per leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.env_cfg import ObservationsCfg
from embodichain.errors import ConfigError, nearest

if TYPE_CHECKING:
    from embodichain.envs.task import Scene
    from embodichain.envs.task_env import TaskEnv

# MERGED language: Instructions as observations: UTF-8 bytes in a fixed number of places, so that they batch, store and
# stream.


def encode_instructions(texts: Sequence[str], length: int) -> Tensor:
    """Return uint8 ``[len(texts), length]``: the bytes of each text, then zeros."""
    table = torch.zeros(len(texts), length, dtype=torch.uint8)
    for row, text in zip(table, texts, strict=True):
        data = text.encode()
        if not data or b"\0" in data or len(data) > length:
            raise ConfigError(f"an instruction has 1 to {length} bytes, none of them zero, got {len(data)}: {text!r}")
        row[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return table


def decode_instructions(instructions: Tensor) -> list[str]:
    """Return the texts of uint8 ``[n, length]``."""
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in instructions.cpu().tolist()]


_PICTURES = "image"


class Seen(NamedTuple):
    """What some envs observe, in memory of its own."""

    vectors: Tensor
    """All float32 vectors, ``[n, columns]``."""
    others: tuple[Tensor, ...]
    """Everything else, such as pictures, ``[n, ...]`` each."""

    def rows(self, env_ids: Tensor) -> Seen:
        """Return a copy of some rows."""
        return Seen(self.vectors.index_select(0, env_ids), tuple(x.index_select(0, env_ids) for x in self.others))

    def with_rows(self, rows: Seen, env_ids: Tensor) -> Seen:
        """Return a copy that is ``rows`` at ``env_ids``."""
        pairs = zip(self.others, rows.others, strict=True)
        others = tuple(old.index_copy(0, env_ids, new) for old, new in pairs)
        return Seen(self.vectors.index_copy(0, env_ids, rows.vectors), others)


class ObservationBuilder:
    """Builds observations of any subset of envs as a pure function of their state."""

    def __init__(self, cfg: ObservationsCfg, env: TaskEnv) -> None:
        self._cfg, self._env = cfg, env
        self._noise = {path: std for path, std in cfg.noise.items() if std > 0}
        self._layout: _Layout | None = None

    def build(self, scene: Scene, env_ids: Tensor) -> Seen:
        """Return what is observed for measurements of these envs."""
        tree = self._env.task.observe(scene)
        if self._cfg.cameras:
            tree[_PICTURES] = self._env.pictures(env_ids)
        if self._layout is None:
            self._layout = _Layout(tree, bool(self._cfg.cameras))
            self._check_noise(self._layout)
        vectors, others = self._layout.take_apart(tree)
        # In memory of its own: what is returned may be normalised in place.
        seen = Seen(
            torch.cat(vectors, dim=1) if vectors else torch.zeros(env_ids.numel(), 0, device=self._env.device),
            tuple(others),
        )
        if self._noise:
            self._add_noise(seen.vectors, env_ids)
        return seen

    def pack(self, seen: Seen) -> TensorDict:
        """Return it as a TensorDict ``[n]`` of views."""
        if self._layout is None:
            raise RuntimeError("nothing was built yet")
        leaves = [*seen.vectors.split_with_sizes(self._layout.sizes, dim=1), *seen.others]
        return _to_tensordict(self._layout.tree, leaves, seen.vectors.shape[:1], self._env.device)

    def space(self, obs: TensorDictBase) -> gym.spaces.Dict:
        """Return the space of one env's observation."""
        return gym.spaces.Dict({key: self._leaf_space(obs[key]) for key in obs.keys()})  # noqa: SIM118

    def _leaf_space(self, value: Any) -> gym.Space[Any]:
        if isinstance(value, TensorDictBase):
            return self.space(value)
        shape = tuple(value.shape[1:])
        if value.dtype == torch.uint8:
            return gym.spaces.Box(0, 255, shape, np.uint8)
        return gym.spaces.Box(-np.inf, np.inf, shape, np.float32)

    def _check_noise(self, layout: _Layout) -> None:
        wrong = [path for path in self._noise if path not in layout.columns]
        if wrong:
            known = list(layout.columns)
            raise ConfigError(
                [f"env.observations.noise.{path}: no such observation.{nearest(path, known)}" for path in wrong]
            )
        self._columns = [layout.columns[path] for path in self._noise]

    def _add_noise(self, vectors: Tensor, env_ids: Tensor) -> None:
        sizes = [columns.stop - columns.start for columns in self._columns]
        noise = self._env.noise(env_ids, sum(sizes)).to(torch.float32).split(sizes, dim=1)
        for columns, std, drawn in zip(self._columns, self._noise.values(), noise, strict=True):
            vectors[:, columns] += std * drawn


class _Layout:
    """Where the leaves of a nested observation go: the first one tells, the others are alike."""

    def __init__(self, tree: dict[str, Any], has_cameras: bool) -> None:
        paths = _paths(tree)
        leaves = {path: _get(tree, path) for path in paths}
        self._vectors = [path for path in paths if leaves[path].dim() == 2 and leaves[path].dtype == torch.float32]
        self._others = [path for path in paths if path not in self._vectors]
        self._taken = _PICTURES if has_cameras else None
        self.sizes = [int(leaves[path].shape[1]) for path in self._vectors]
        ends = np.cumsum(self.sizes).tolist()
        self.columns = {
            "/".join(path): slice(end - size, end)
            for path, size, end in zip(self._vectors, self.sizes, ends, strict=True)
        }
        numbers = {path: number for number, path in enumerate([*self._vectors, *self._others])}
        self.tree = _numbered(tree, numbers)
        """The nested names, with the place of each leaf among the vectors and then the others."""

    def take_apart(self, tree: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the vectors, and copies of the other leaves; pictures have just been taken and need none."""
        others = [(path, _get(tree, path)) for path in self._others]
        return (
            [_get(tree, path) for path in self._vectors],
            [leaf if path[0] == self._taken else leaf.clone() for path, leaf in others],
        )


def _to_tensordict(tree: dict[str, Any], leaves: list[Tensor], size: torch.Size, device: torch.device) -> TensorDict:
    """Build nested TensorDicts; the shapes are ours, so the costly checks of the public constructor are skipped."""
    source = {
        key: _to_tensordict(value, leaves, size, device) if isinstance(value, dict) else leaves[value]
        for key, value in tree.items()
    }
    return TensorDict._new_unsafe(source, batch_size=size, device=device)


def _numbered(tree: dict[str, Any], numbers: dict[tuple[str, ...], int], at: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        key: _numbered(value, numbers, (*at, key)) if isinstance(value, dict) else numbers[(*at, key)]
        for key, value in tree.items()
    }


def _get(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _paths(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    out = []
    for key, value in tree.items():
        out += _paths(value, (*prefix, key)) if isinstance(value, dict) else [(*prefix, key)]
    return out
