"""From a task's measurements to the observation that is returned: noise, cameras, TensorDict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


class ObservationBuilder:
    """Builds observations of any subset of envs as a pure function of their state."""

    def __init__(self, cfg: ObservationsCfg, env: TaskEnv) -> None:
        self._cfg, self._env = cfg, env
        self._noise = {tuple(path.split("/")): std for path, std in cfg.noise.items() if std > 0}
        self._checked = not self._noise

    def build(self, scene: Scene, env_ids: Tensor) -> TensorDict:
        """Return the observation TensorDict ``[len(env_ids)]`` for measurements of these envs."""
        tree = _copied(self._env.task.observe(scene))
        if self._noise:
            self._add_noise(tree, env_ids)
        if self._cfg.cameras:
            tree["image"] = self._env.pictures(env_ids)
        return _to_tensordict(tree, env_ids.numel(), self._env.device)

    def merge(self, obs: TensorDict, rows: Any, env_ids: Tensor) -> TensorDict:
        """Return a new observation that is ``rows`` (nested by name) at ``env_ids`` and ``obs`` elsewhere."""
        if isinstance(rows, TensorDict) and env_ids.numel() == self._env.num_envs:
            return rows
        return _with_rows(obs, rows, env_ids)

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

    def _add_noise(self, tree: dict[str, Any], env_ids: Tensor) -> None:
        if not self._checked:
            self._check_paths(tree)
        sizes = [_get(tree, path).shape[1] for path in self._noise]
        noise = self._env.noise(env_ids, sum(sizes)).to(torch.float32).split(sizes, dim=1)
        for (path, std), drawn in zip(self._noise.items(), noise, strict=True):
            node = _get(tree, path[:-1])
            node[path[-1]] = node[path[-1]] + std * drawn

    def _check_paths(self, tree: dict[str, Any]) -> None:
        known = ["/".join(path) for path in _paths(tree) if _get(tree, path).is_floating_point()]
        wrong = ["/".join(path) for path in self._noise if "/".join(path) not in known]
        if wrong:
            raise ConfigError(
                [f"env.observations.noise.{path}: no such observation.{nearest(path, known)}" for path in wrong]
            )
        self._checked = True


def _to_tensordict(tree: dict[str, Any], count: int, device: torch.device) -> TensorDict:
    """Build nested TensorDicts; the shapes are ours, so the costly checks of the public constructor are skipped."""
    source = {k: _to_tensordict(v, count, device) if isinstance(v, dict) else v for k, v in tree.items()}
    return TensorDict._new_unsafe(source, batch_size=torch.Size([count]), device=device)


def _copied(tree: dict[str, Any]) -> dict[str, Any]:
    """Copy the leaves: an observation that is normalised in place does not change the env's own measurements."""
    return {key: _copied(value) if isinstance(value, dict) else value.clone() for key, value in tree.items()}


def _with_rows(obs: TensorDict, rows: Any, env_ids: Tensor) -> TensorDict:
    old = obs._tensordict  # the leaves themselves: indexing a TensorDict checks the key each time
    new = rows._tensordict if isinstance(rows, TensorDictBase) else rows
    source = {
        key: _with_rows(old[key], value, env_ids)
        if isinstance(value, dict | TensorDictBase)
        else old[key].index_copy(0, env_ids, value)
        for key, value in new.items()
    }
    return TensorDict._new_unsafe(source, batch_size=obs.batch_size, device=obs.device)


def _get(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _paths(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    out = []
    for key, value in tree.items():
        out += _paths(value, (*prefix, key)) if isinstance(value, dict) else [(*prefix, key)]
    return out
