"""Gymnasium's vector env of this process, with resets of some envs that cost as little as those envs do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class RowwiseSyncVectorEnv(SyncVectorEnv):
    """Resets the rows of ``reset_mask`` alone where observations are plain arrays, and leaves resetting to the caller.

    Gymnasium's own goes through all envs and puts all observations together again, at every step that ends an episode.
    What it returns is overwritten by the next step or reset.
    """

    def __init__(self, makers: Sequence[Callable[[], gym.Env]]) -> None:
        super().__init__(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self._is_array = isinstance(self.single_observation_space, gym.spaces.Box)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those of ``options["reset_mask"]``; with a mask, seeds are a list, one per env."""
        if not self._is_array or options is None or "reset_mask" not in options or isinstance(seed, int):
            return super().reset(seed=seed, options=options)
        rest = {name: value for name, value in options.items() if name != "reset_mask"}
        ids = np.flatnonzero(options["reset_mask"])
        infos: dict[str, Any] = {}
        batch: Any = self._observations
        for env in ids.tolist():
            self._env_obs[env], info = self.envs[env].reset(seed=None if seed is None else seed[env], options=rest)
            batch[env] = self._env_obs[env]
            infos = self._add_info(infos, info, env)
        self._terminations[ids] = self._truncations[ids] = self._autoreset_envs[ids] = False
        return batch, infos
