"""Which seed each episode of a Gymnasium env gets: a hash of (seed, env index, episode number)."""

from __future__ import annotations

import numpy as np
import torch

from embodichain.envs.random import combine

_AHEAD = 64  # episodes whose seeds are computed at once, so that a reset costs a look-up
_MASK = (1 << 31) - 1  # some simulators behind Gymnasium take 32-bit seeds only


class EpisodeSeeds:
    """One counter-based stream of episode seeds in [0, 2**31) per env, the same whatever ``num_envs`` is."""

    def __init__(self, num_envs: int, seed: int) -> None:
        self._key = torch.zeros(num_envs, dtype=torch.int64)
        self._first = np.zeros(num_envs, dtype=np.int64)  # episode number of column 0 of the table
        self._used = np.zeros(num_envs, dtype=np.int64)
        self._table = np.zeros((num_envs, _AHEAD), dtype=np.int64)
        self.seed(np.arange(num_envs), seed)

    def seed(self, env_ids: np.ndarray, seed: int) -> None:
        """Give these envs the streams of ``(seed, env index)`` from their first episode on."""
        ids = torch.from_numpy(env_ids)
        self._key[ids] = combine(torch.full_like(ids, seed & ((1 << 62) - 1)), ids)
        self._first[env_ids] = 0
        self._fill(env_ids)

    def take(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the seeds ``[len(env_ids)]`` of the envs' next episodes and count them as begun."""
        spent = env_ids[self._used[env_ids] == _AHEAD]
        if len(spent):
            self._first[spent] += _AHEAD
            self._fill(spent)
        seeds = self._table[env_ids, self._used[env_ids]]
        self._used[env_ids] += 1
        return seeds

    @property
    def state(self) -> np.ndarray:
        """The streams as int64 ``[num_envs, 2]``: key, number of the next episode."""
        return np.stack([self._key.numpy(), self._first + self._used], axis=1)

    def set_state(self, env_ids: np.ndarray, state: np.ndarray) -> None:
        """Continue the streams of these envs where ``state`` ``[len(env_ids), 2]`` was taken."""
        self._key[torch.from_numpy(env_ids)] = torch.from_numpy(state[:, 0].copy())
        self._first[env_ids] = state[:, 1]
        self._fill(env_ids)

    def _fill(self, env_ids: np.ndarray) -> None:
        episodes = torch.from_numpy(self._first[env_ids]).unsqueeze(1) + torch.arange(_AHEAD)
        keys = self._key[torch.from_numpy(env_ids)].unsqueeze(1)
        self._table[env_ids] = (combine(keys, episodes) & _MASK).numpy()
        self._used[env_ids] = 0
