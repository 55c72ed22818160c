"""Random numbers that belong to an env and an episode, not to a process.

Each env has a key; each episode of it has a seed derived from that key and the episode's number; and the n-th number
drawn in an episode is a hash of (episode seed, n). So env i of seed s draws the same numbers whatever ``num_envs``, the
device and the order of resets are, the state of all streams is one int64 tensor, and an episode can be started again
from its seed alone. The hash is the SplitMix64 finaliser, which passes BigCrush as a counter-based generator.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from embodichain.envs.curricula import Curricula

CHANNEL_DRAWS = 1 << 20
"""Numbers that one draw may take from a channel."""
_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MUL1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MUL2 = -7723592293110705685  # 0x94D049BB133111EB
_SEED_MASK = (1 << 62) - 1  # episode seeds are non-negative, so they read well in logs
_NOISE_DRAWS = 1 << 40  # noise takes numbers far beyond those an episode draws one by one
_U1, _U27, _U30, _U31 = np.uint64(1), np.uint64(27), np.uint64(30), np.uint64(31)
_UGAMMA, _UMUL1, _UMUL2 = (np.uint64(x & (2**64 - 1)) for x in (_GAMMA, _MUL1, _MUL2))
KEY, EPISODE, SEED, DRAWS = range(4)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Scramble int64 values (SplitMix64's finaliser, arithmetic modulo 2**64)."""
    x = (x ^ _shift_right(x, 30)) * _MUL1
    x = (x ^ _shift_right(x, 27)) * _MUL2
    return x ^ _shift_right(x, 31)


def _mix_array(x: np.ndarray) -> np.ndarray:
    """Do what ``mix`` does, on uint64."""
    x = (x ^ (x >> _U30)) * _UMUL1
    x = (x ^ (x >> _U27)) * _UMUL2
    return x ^ (x >> _U31)


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Hash two int64 tensors into one, in an order-sensitive way."""
    if a.device.type == "cpu" and a.dim():  # a few numbers at a time: numpy takes a fifth of the time per call
        hashed = _mix_array(_mix_array(a.numpy().view(np.uint64)) + (b.numpy().view(np.uint64) + _U1) * _UGAMMA)
        return torch.from_numpy(hashed.view(np.int64))
    return mix(mix(a) + (b + 1) * _GAMMA)


def channel(name: str, device: torch.device | str) -> Tensor:
    """Return the channel of a name, int64 ``[1]``: draws of different names have nothing to do with each other."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)


def box_muller(uniform: Tensor) -> Tensor:
    """Turn numbers ``[n, 2 * size]`` in [0, 1) into half as many standard normal ones."""
    first, second = uniform.chunk(2, dim=1)
    return torch.sqrt(-2.0 * torch.log1p(-first)) * torch.cos(2.0 * math.pi * second)


class RandomStreams:
    """One random stream per env, kept as ``state`` ``[num_envs, 4]`` int64: key, episode, episode seed, draws made."""

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.state = torch.zeros(num_envs, 4, dtype=torch.int64, device=device)
        self.curricula: Curricula | None = None
        """Where ranges are that follow a curriculum."""
        self.seed(torch.arange(num_envs, device=device), seed)

    @property
    def episode_seed(self) -> Tensor:
        """The seed ``[num_envs]`` of the episode each env is in (a copy)."""
        return self.state[:, SEED].clone()

    def seed(self, env_ids: Tensor, seed: int) -> None:
        """Give these envs the streams of ``(seed, env index)`` from their first episode on."""
        root = torch.full_like(env_ids, seed & _SEED_MASK)
        self.state[env_ids, KEY] = combine(root, env_ids)
        self.state[env_ids, EPISODE] = 0

    def next_episode(self, env_ids: Tensor, seeds: Tensor | None = None) -> None:
        """Enter the next episode of each stream, or the episodes named by ``seeds`` ``[len(env_ids)]``."""
        rows = self.state[env_ids]
        derived = combine(rows[:, KEY], rows[:, EPISODE]) & _SEED_MASK if seeds is None else seeds
        entered = torch.stack((rows[:, EPISODE] + 1, derived, torch.zeros_like(derived)), dim=1)
        self.state[env_ids, EPISODE:] = entered  # episode, seed and draws lie side by side

    def uniform(self, env_ids: Tensor, size: int, low: float | Tensor = 0.0, high: float | Tensor = 1.0) -> Tensor:
        """Draw float64 ``[len(env_ids), size]`` from [low, high)."""
        drawn = self.state[env_ids, DRAWS]
        self.state[env_ids, DRAWS] = drawn + size
        return low + (high - low) * self._unit(env_ids, drawn, size)

    def normal(self, env_ids: Tensor, size: int) -> Tensor:
        """Draw standard normal float64 ``[len(env_ids), size]``."""
        return box_muller(self.uniform(env_ids, 2 * size))

    def of(self, env_ids: Tensor, channel: Tensor, first: Tensor | int, size: int) -> Tensor:
        """Return float64 ``[len(env_ids), size]`` in [0, 1): the numbers ``first ..`` of a channel of the episodes.

        They follow from (episode seed, channel, first) alone: drawing them changes nothing.
        """
        seeds = combine(self.state[env_ids, SEED], channel)
        begins = first.unsqueeze(1) if isinstance(first, Tensor) else first
        index = (begins + torch.arange(size, device=self.state.device)).view(-1, size)
        bits = _shift_right(combine(seeds.unsqueeze(1), index), 11)
        return bits.to(torch.float64) * 2.0**-53

    def noise(self, env_ids: Tensor, step: Tensor, size: int) -> Tensor:
        """Return standard normal float64 ``[len(env_ids), size]``, a function of (episode seed, step) alone."""
        return box_muller(self._unit(env_ids, _NOISE_DRAWS + step * (2 * size), 2 * size))

    def _unit(self, env_ids: Tensor, first: Tensor, size: int) -> Tensor:
        """Return the numbers ``first .. first + size`` of the episodes' sequences, float64 in [0, 1)."""
        index = first.unsqueeze(1) + torch.arange(size, device=self.state.device)
        bits = _shift_right(combine(self.state[env_ids, SEED].unsqueeze(1), index), 11)  # 53 bits fill a double
        return bits.to(torch.float64) * 2.0**-53
