"""Starts drawn ahead: the beginnings of many envs' next episodes in one go, kept until they are needed.

How an episode begins follows from its random stream alone, and one start takes nearly as long to draw and to observe as
a hundred. At 64 envs, where more than every second step ends an episode, doing them one by one took as long as
everything else outside the physics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embodichain.envs.observations import Seen
from embodichain.envs.random import EPISODE, KEY
from embodichain.envs.states import LiveState


class StartStore:
    """Keeps one start per env, with what is observed in it; those that were used are replaced together."""

    def __init__(self, live: LiveState, begin: Callable[[Tensor], Seen]) -> None:
        """``begin`` starts the next episode in some envs and returns what is then observed in them."""
        self._live, self._begin = live, begin
        self._drawn_from = torch.full((live.step.shape[0], 2), -1, dtype=torch.int64)
        self._rows: dict[str, Any] = {}
        self._seen: Seen | None = None

    def enter(self, env_ids: Tensor) -> Seen:
        """Start the next episode in these envs and return what is observed in them."""
        origins = self._origins().index_select(0, env_ids)
        if self._seen is None or not torch.equal(self._drawn_from.index_select(0, env_ids), origins):
            self._seen = self._draw()
        self._live.write(env_ids, _select(self._rows, env_ids))
        return self._seen.rows(env_ids)

    def refill(self) -> None:
        """Draw what was used, now that nobody waits for it."""
        if not torch.equal(self._drawn_from, self._origins()):
            self._seen = self._draw()

    def _origins(self) -> Tensor:
        """What the next episode of each env follows from, ``[num_envs, 2]``."""
        return self._live.streams.state[:, KEY : EPISODE + 1]

    def _draw(self) -> Seen:
        """Draw the starts that are missing or used, leave the envs as they were, and return what all would observe."""
        origins, everything = self._origins(), self._live.read()
        used = torch.nonzero((self._drawn_from != origins).any(dim=1)).reshape(-1)
        try:
            seen = self._begin(used)
            rows = _select(self._live.read(), used)
        finally:
            self._live.write(used, _select(everything, used))
        self._drawn_from[used] = origins[used]
        if self._seen is None:
            self._rows = rows
            return seen
        _assign(self._rows, used, rows)
        return self._seen.with_rows(seen, used)


def _select(tree: Any, env_ids: Tensor) -> Any:
    if isinstance(tree, dict):
        return {key: _select(value, env_ids) for key, value in tree.items()}
    return tree.index_select(0, env_ids)


def _assign(tree: dict[str, Any], env_ids: Tensor, rows: dict[str, Any]) -> None:
    for key, value in rows.items():
        if isinstance(value, dict):
            _assign(tree[key], env_ids, value)
        else:
            tree[key][env_ids] = value
