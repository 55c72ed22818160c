"""Starts drawn ahead: the beginnings of many envs' next episodes in one go, kept until they are needed.

How an episode begins follows from its random stream alone, and one start takes nearly as long to draw and to observe as
a hundred. At 64 envs, where more than every second step ends an episode, doing them one by one took as long as
everything else outside the physics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.random import EPISODE, KEY
from embodichain.envs.states import LiveState


class StartStore:
    """Keeps one start per env, with what is observed in it; those that were used are replaced together."""

    def __init__(self, live: LiveState, begin: Callable[[Tensor], Any]) -> None:
        """``begin`` starts the next episode in some envs and returns what is then observed, a TensorDict of as many."""
        self._live, self._begin = live, begin
        self._drawn_from = torch.full((live.step.shape[0], 2), -1, dtype=torch.int64)
        self._rows: Any = None
        self._obs: Any = None

    def enter(self, env_ids: Tensor) -> Any:
        """Start the next episode in these envs and return what is observed in them, nested by name."""
        if not torch.equal(self._drawn_from[env_ids], self._origins()[env_ids]):
            self._draw()
        self._live.write(env_ids, _select(self._rows, env_ids))
        return _select(self._obs, env_ids)

    def _origins(self) -> Tensor:
        """What the next episode of each env follows from, ``[num_envs, 2]``."""
        return self._live.streams.state[:, KEY : EPISODE + 1]

    def _draw(self) -> None:
        """Draw the starts that are missing or used, and leave the envs as they were."""
        origins, everything = self._origins(), self._live.read()
        used = torch.nonzero((self._drawn_from != origins).any(dim=1)).reshape(-1)
        obs = _plain(self._begin(used))
        rows = _select(self._live.read(), used)
        self._live.write(used, _select(everything, used))
        self._drawn_from[used] = origins[used]
        if self._rows is None:
            self._rows, self._obs = rows, obs
        else:
            _assign(self._rows, used, rows)
            _assign(self._obs, used, obs)


def _plain(tree: Any) -> Any:
    if isinstance(tree, TensorDictBase):
        return {key: _plain(value) for key, value in tree.items()}
    return tree


def _select(tree: Any, env_ids: Tensor) -> Any:
    return {k: _select(v, env_ids) for k, v in tree.items()} if isinstance(tree, dict) else tree[env_ids]


def _assign(tree: dict[str, Any], env_ids: Tensor, rows: dict[str, Any]) -> None:
    for key, value in rows.items():
        if isinstance(value, dict):
            _assign(tree[key], env_ids, value)
        else:
            tree[key][env_ids] = value
