"""Random numbers that depend on the env and the episode, not on the process.

Each env has a key. Each of its episodes has a seed derived from the key and the episode number. The n-th number of an
episode is a hash of (episode seed, n). Env i with seed s therefore draws the same numbers for any ``num_envs``, device
and order of resets; the state of all streams is one int64 tensor; and an episode can be repeated from its seed. The
hash is the SplitMix64 finaliser, which passes BigCrush as a counter-based generator.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from embodichain.envs.curricula import Curricula

CHANNEL_DRAWS = 1 << 20
"""Maximum count of numbers in one draw from a channel."""
_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MUL1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MUL2 = -7723592293110705685  # 0x94D049BB133111EB
_SEED_MASK = (1 << 62) - 1  # non-negative, for readable logs
_NOISE_DRAWS = 1 << 40  # offset of noise, far beyond the other draws of an episode
_U1, _U11, _U27, _U30, _U31 = (np.uint64(x) for x in (1, 11, 27, 30, 31))
_UGAMMA, _UMUL1, _UMUL2 = (np.uint64(x & (2**64 - 1)) for x in (_GAMMA, _MUL1, _MUL2))
KEY, EPISODE, SEED, DRAWS = range(4)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Hash int64 values (SplitMix64 finaliser, arithmetic modulo 2**64)."""
    x = (x ^ _shift_right(x, 30)) * _MUL1
    x = (x ^ _shift_right(x, 27)) * _MUL2
    return x ^ _shift_right(x, 31)


def _mix_array(x: np.ndarray) -> np.ndarray:
    """The same as ``mix``, on uint64 arrays."""
    x = x ^ (x >> _U30)
    x *= _UMUL1
    x ^= x >> _U27
    x *= _UMUL2
    x ^= x >> _U31
    return x


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Hash two int64 tensors into one; the order matters."""
    if a.device.type == "cpu" and a.dim():  # numpy takes a fifth of torch's time for few numbers
        hashed = _mix_array(_mix_array(a.numpy().view(np.uint64)) + (b.numpy().view(np.uint64) + _U1) * _UGAMMA)
        return torch.from_numpy(hashed.view(np.int64))
    return mix(mix(a) + (b + 1) * _GAMMA)


def _unit_interval(hashed: Tensor) -> Tensor:
    """Map hashed int64 values to float64 in [0, 1); 53 bits fill a double."""
    if hashed.device.type == "cpu":
        return torch.from_numpy((hashed.numpy().view(np.uint64) >> _U11) * 2.0**-53)
    return _shift_right(hashed, 11).to(torch.float64) * 2.0**-53


def channel(name: str, device: torch.device | str) -> Tensor:
    """Return the channel of a name, int64 ``[1]``; draws from different channels are independent."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)


def box_muller(uniform: Tensor) -> Tensor:
    """Transform uniform numbers ``[n, 2 * size]`` in [0, 1) to standard normal ``[n, size]``."""
    first, second = uniform.chunk(2, dim=1)
    return torch.sqrt(-2.0 * torch.log1p(-first)) * torch.cos(2.0 * math.pi * second)


class RandomStreams:
    """One random stream per env; ``state`` is int64 ``[num_envs, 4]``: key, episode, episode seed, number of draws."""

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.state = torch.zeros(num_envs, 4, dtype=torch.int64, device=device)
        self.curricula: Curricula | None = None
        """The current ranges of curricula."""
        self.seed(torch.arange(num_envs, device=device), seed)

    @property
    def episode_seed(self) -> Tensor:
        """A copy of the seed of each env's current episode, int64 ``[num_envs]``."""
        return self.state[:, SEED].clone()

    def seed(self, env_ids: Tensor, seed: int) -> None:
        """Restart the streams of these envs at the first episode of ``(seed, env index)``."""
        root = torch.full_like(env_ids, seed & _SEED_MASK)
        self.state[env_ids, KEY] = combine(root, env_ids)
        self.state[env_ids, EPISODE] = 0

    def next_episode(self, env_ids: Tensor, seeds: Tensor | None = None) -> None:
        """Advance each stream to its next episode, or to the episodes with ``seeds`` ``[len(env_ids)]``."""
        rows = self.state.index_select(0, env_ids)
        key, episode, seed, draws = rows.unbind(1)
        seed.copy_(combine(key, episode) & _SEED_MASK if seeds is None else seeds)
        episode.add_(1)
        draws.zero_()
        self.state.index_copy_(0, env_ids, rows)

    def uniform(self, env_ids: Tensor, size: int, low: float | Tensor = 0.0, high: float | Tensor = 1.0) -> Tensor:
        """Sample float64 ``[len(env_ids), size]`` from [low, high)."""
        draws = self.state[:, DRAWS]
        drawn = draws.index_select(0, env_ids)
        draws.index_copy_(0, env_ids, drawn + size)
        return low + (high - low) * self._unit(env_ids, drawn, size)

    def normal(self, env_ids: Tensor, size: int) -> Tensor:
        """Sample standard normal float64 ``[len(env_ids), size]``."""
        return box_muller(self.uniform(env_ids, 2 * size))

    def of(self, env_ids: Tensor, channel: Tensor, first: Tensor | int, size: int) -> Tensor:
        """Return numbers ``first .. first + size`` of a channel, float64 ``[len(env_ids), size]`` in [0, 1).

        They are a function of (episode seed, channel, first) only; the streams are not advanced.
        """
        seeds = combine(self.state[env_ids, SEED], channel)
        begins = first.unsqueeze(1) if isinstance(first, Tensor) else first
        index = (begins + torch.arange(size, device=self.state.device)).view(-1, size)
        return _unit_interval(combine(seeds.unsqueeze(1), index))

    def noise(self, env_ids: Tensor, step: Tensor, size: int) -> Tensor:
        """Return standard normal float64 ``[len(env_ids), size]``, a function of (episode seed, step) only."""
        return box_muller(self._unit(env_ids, _NOISE_DRAWS + step * (2 * size), 2 * size))

    def _unit(self, env_ids: Tensor, first: Tensor, size: int) -> Tensor:
        """Return numbers ``first .. first + size`` of the episodes' sequences, float64 in [0, 1)."""
        index = first.unsqueeze(1) + torch.arange(size, device=self.state.device)
        seeds = self.state[:, SEED].index_select(0, env_ids)
        return _unit_interval(combine(seeds.unsqueeze(1), index))
