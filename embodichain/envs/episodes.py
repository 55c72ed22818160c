"""Rolling a policy for a number of episodes, one step at a time, so that a caller can watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.envs.vec_env import VecEnv

ActionSource = Callable[[TensorDict], Tensor]


@dataclass(frozen=True)
class Episode:
    """What became of one episode."""

    env: int
    """Index of the env it ran in."""
    total_reward: float
    """Sum of its rewards."""
    length: int
    """Number of its steps."""
    success: bool | None
    """Whether it ended in success; ``None`` where the environment does not say."""


@dataclass(frozen=True)
class Step:
    """The moment between two steps: ``obs`` belongs to the state the envs are in now."""

    obs: TensorDict
    """Observation of all envs; of those that just ended, the first of the next episode."""
    final_obs: TensorDict
    """What each env last saw before it was reset, if it was."""
    ended: list[Episode]
    """The episodes that ended with the last step and count."""


@dataclass(frozen=True)
class Summary:
    """Averages over episodes."""

    episodes: int
    mean_return: float
    std_return: float
    mean_length: float
    success_rate: float | None

    @staticmethod
    def of(episodes: Sequence[Episode]) -> Summary:
        """Summarise at least one episode."""
        if not episodes:
            raise ValueError("expected at least one episode, got none")
        returns = torch.tensor([e.total_reward for e in episodes], dtype=torch.float64)
        known = [e.success for e in episodes if e.success is not None]
        return Summary(
            episodes=len(episodes),
            mean_return=float(returns.mean()),
            std_return=float(returns.std(correction=0)),
            mean_length=sum(e.length for e in episodes) / len(episodes),
            success_rate=sum(known) / len(known) if known else None,
        )


def roll(env: VecEnv, act: ActionSource, episodes: int, seed: int | None = None) -> Iterator[Step]:
    """Reset, then step until ``episodes`` episodes have ended; yield the start and every moment after a step.

    Each env runs its share of the episodes, so that short ones do not count more often than long ones.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    share = torch.full((env.num_envs,), episodes // env.num_envs)
    share[: episodes % env.num_envs] += 1
    total = torch.zeros(env.num_envs, dtype=torch.float64)
    length = torch.zeros(env.num_envs, dtype=torch.int64)
    obs, _ = env.reset(seed=seed)
    yield Step(obs, obs, [])
    while bool((share > 0).any()):
        obs, reward, terminated, truncated, info = env.step(act(obs))
        total += reward.to("cpu", torch.float64)
        length += info["chunk"]["num_actions"].cpu() if "chunk" in info else 1
        done = (terminated | truncated).cpu()
        ended = _ended(done & (share > 0), total, length, info["metrics"].get("success")) if bool(done.any()) else []
        share -= done.to(share.dtype)
        total[done], length[done] = 0.0, 0
        yield Step(obs, info["final_observation"], ended)


def _ended(counted: Tensor, total: Tensor, length: Tensor, success: Tensor | None) -> list[Episode]:
    ids = torch.nonzero(counted).reshape(-1)
    flags = [None] * len(ids) if success is None else (success.cpu()[ids] > 0.5).tolist()
    rows = zip(ids.tolist(), total[ids].tolist(), length[ids].tolist(), flags, strict=True)
    return [Episode(*row) for row in rows]
