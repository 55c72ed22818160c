"""Base class of collectors, and statistics of episodes that do not synchronise with the GPU."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.envs.vec_env import StepResult, VecEnv
from embodichain.errors import ActionError

LARGE_STEP = 50_000_000
"""Multiplications per environment step above which one thread is no longer the fastest choice."""

StepCallback = Callable[[Observation, Tensor, Tensor, Tensor, dict[str, Any], Observation], None]
"""Called with ``obs, action, reward, done, info, next_obs`` after every step; an exception ends the collection."""


class PolicyStep(NamedTuple):
    """Inputs and outputs of a policy for one step, each ``[envs, ...]``."""

    obs: Observation
    """The observation."""
    state: Tensor | None
    """The recurrent state before it."""
    action: Tensor
    """The sampled action."""
    log_prob: Tensor
    """Log-probability of the action."""
    value: Tensor | None
    """Value of the observation; ``None`` if values are computed at the end of the rollout."""
    new_state: Tensor | None = None
    """The recurrent state after the observation."""
    decision: TensorDictBase | None = None
    """The decision of a policy with ``has_decision``."""


class BaseCollector(ABC):
    """Runs a policy in an environment and returns rollouts."""

    @abstractmethod
    def collect(self, num_steps: int) -> TensorDictBase:
        """Return a rollout ``[num_envs, num_steps]``; see ``buffer/rollout_buffer.py`` for its keys."""

    def publish(self) -> None:  # noqa: B027 - nothing to do if the learner's policy itself collects
        """Publish the policy's weights to the collector; the learner calls it right after an update."""

    def hold(self) -> AbstractContextManager[None]:
        """Pause the collector between two rollouts, so that its state can be saved."""
        return nullcontext()

    def stop(self) -> None:  # noqa: B027 - nothing to do if nothing runs in the background
        """Stop collecting."""

    def close(self) -> None:
        """Stop, and release the resources that the collector has created."""
        self.stop()


class EnvErrors:
    """Context manager around calls of an environment, to tell its errors from those of a policy or a callback."""

    def __init__(self) -> None:
        self._last: int | None = None  # id only: the error would keep its traceback's frames alive

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._last = self._last if error is None else id(error)

    def include(self, error: Exception) -> bool:
        """Return whether the environment has just raised this error, other than for an invalid action."""
        last, self._last = self._last, None
        return id(error) == last and not isinstance(error, ActionError)


class Recovery(Protocol):
    """Replaces an environment that failed; see ``recovery.py``."""

    seed: int
    """Base seed of the new episodes."""

    def replace(self, env: VecEnv, error: Exception) -> tuple[VecEnv, Observation]:
        """Return a working environment and its first observation; ``CollectorError`` if no restarts are left."""


def result_to(result: StepResult, device: torch.device) -> StepResult:
    """Move the result of a step to a device, except ``info``."""
    obs, reward, terminated, truncated, info = result
    return obs.to(device), reward.to(device), terminated.to(device), truncated.to(device), info


def collection_threads(policy: nn.Module, num_envs: int) -> int | None:
    """Return 1 if the policy is too small to profit from several threads, ``None`` for torch's default."""
    size = sum(parameter.numel() for parameter in policy.parameters())
    return 1 if size * num_envs < LARGE_STEP else None


class EpisodeTracker:
    """Tracks returns and lengths of episodes across rollouts.

    ``episode_return`` and ``episode_length`` ``[num_envs]`` are those of the running episodes.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.episode_return = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.episode_length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None
        self._ended: TensorDict | None = None

    def reset(self) -> None:
        """Discard the running episodes, after all envs have been reset."""
        self.episode_return.zero_()
        self.episode_length.zero_()

    def update(self, reward: Tensor, done: Tensor, num_actions: Tensor | None = None, first_only: bool = False) -> None:
        """Add a rollout; all tensors are ``[num_steps, num_envs]``.

        Lengths count actions: one per step, or ``num_actions``. ``first_only`` is for rollouts that start with new
        episodes, see ``counted_ends``.
        """
        counted = torch.arange(1, reward.shape[0] + 1, device=reward.device).unsqueeze(1)
        returns = reward.double().cumsum(0) + self.episode_return
        lengths = self.episode_length + (counted if num_actions is None else num_actions.cumsum(0))
        last = (done * counted).amax(dim=0, keepdim=True)  # number of the last done step of each env, 0 if none
        row, has_ended = (last - 1).clamp_min(0), last > 0
        self.episode_return = returns[-1] - torch.where(has_ended, returns.gather(0, row), 0.0)[0]
        self.episode_length = lengths[-1] - torch.where(has_ended, lengths.gather(0, row), 0)[0]
        self._sums, self._ended = (returns, lengths, counted_ends(done, first_only)), None

    @property
    def ended(self) -> TensorDict:
        """``return`` and ``length`` of the episodes that ended in the last rollout, in order; synchronises once."""
        if self._ended is None:
            none = TensorDict({"return": torch.zeros(0), "length": torch.zeros(0)}, batch_size=[0])
            self._ended = none if self._sums is None else _ended_episodes(*self._sums)
            self._sums = None
        return self._ended


def counted_ends(done: Tensor, first_only: bool) -> Tensor:
    """Return a mask ``[num_steps, num_envs]`` of the episode ends that statistics count: by default ``done``.

    If every rollout starts with new episodes (``first_only``), counting only finished ones would favour short episodes.
    So the first episode of each env counts, as in an evaluation, and ends with the rollout at the latest.
    """
    if not first_only:
        return done.clone()
    ends = done & (done.long().cumsum(0) == 1)
    ends[-1] |= ~done.any(0)
    return ends


class DiscountedReturns:
    """Running discounted returns ``x_t = r_t + gamma x_{t-1}`` of all envs, for reward normalisation."""

    def __init__(self, gamma: float, num_envs: int, device: torch.device) -> None:
        self.gamma = gamma
        self.value = torch.zeros(num_envs, dtype=torch.float64, device=device)
        """Discounted returns of the running episodes, ``[num_envs]``."""

    def update(
        self, reward: Tensor, done: Tensor, num_actions: Tensor | None = None, chunk_reward: Tensor | None = None
    ) -> Tensor:
        """Add a rollout and return the discounted return of each step; all ``[num_steps, num_envs]``.

        For chunks of ``num_actions`` actions, ``chunk_reward`` ``[num_steps, num_envs, chunk_size]`` holds the reward
        of each action, and the result is that after the last action. Without it, ``reward`` counts at the last action.
        """
        if num_actions is not None and chunk_reward is not None:
            later = num_actions.unsqueeze(-1) - 1 - torch.arange(chunk_reward.shape[-1], device=reward.device)
            reward = (chunk_reward.double() * self.gamma ** later.clamp_min(0).double()).sum(-1)
        age = torch.ones_like(reward, dtype=torch.float64) if num_actions is None else num_actions.double()
        discounts, continues = (self.gamma**age).unbind(0), (~done).double().unbind(0)
        returns = []
        for step, part in enumerate(reward.double().unbind(0)):
            returns.append(torch.addcmul(part, discounts[step], self.value))
            self.value = returns[-1] * continues[step]
        return torch.stack(returns)


def _ended_episodes(returns: Tensor, lengths: Tensor, done: Tensor) -> TensorDict:
    """Return ``return`` and ``length`` of ended episodes from cumulative sums that were not reset at episode ends."""
    env, step = done.t().nonzero(as_tuple=True)  # sorted by env, then by step
    totals = torch.stack([returns[step, env], lengths[step, env].double()])
    same_env = torch.zeros_like(env, dtype=torch.bool)
    same_env[1:] = env[1:] == env[:-1]
    before = torch.where(same_env, totals.roll(1, dims=1), 0.0)  # sums of the env's earlier episodes
    own = (totals - before)[:, step.argsort(stable=True)]
    return TensorDict({"return": own[0], "length": own[1].long()}, batch_size=[own.shape[1]])


class InfoAverages:
    """Averages ``info["rewards"]`` and ``info["metrics"]`` over a rollout; computed on demand, not in every step."""

    def __init__(self, first_only: bool = False) -> None:
        """Start a rollout; ``first_only`` if it starts with new episodes, see ``counted_ends``."""
        self._first_only = first_only
        self._infos: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor], Tensor]] = []

    def add(self, info: Mapping[str, Any], done: Tensor) -> None:
        """Add the info and ``done`` ``[num_envs]`` of one step, by reference: do not modify them afterwards."""
        self._infos.append((info.get("rewards", {}), info.get("metrics", {}), done))

    def means(self) -> dict[str, Tensor]:
        """Return means over steps and envs, and the means of metrics at the end of counted episodes."""
        if not self._infos:
            return {}
        rewards: dict[str, list[Tensor]] = defaultdict(list)
        metrics: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        ends = counted_ends(torch.stack([done for *_, done in self._infos]), self._first_only)
        for (reward_parts, measures, _), end in zip(self._infos, ends, strict=True):
            for name, part in reward_parts.items():
                rewards[name].append(part)
            for name, part in measures.items():
                metrics[name].append((part, end))
        count = ends.numel()
        means = {f"rewards/{name}": torch.cat(parts).sum() / count for name, parts in rewards.items()}
        ended = [end for (_, measures, _), end in zip(self._infos, ends, strict=True) if measures]
        episodes = torch.cat(ended).sum() if ended else 0
        for name, pairs in metrics.items():
            measured, end = (torch.cat(column) for column in zip(*pairs, strict=True))
            if name.startswith("curriculum/"):  # progress of the curriculum, no property of an episode
                means[name] = measured.sum() / count
                continue
            if name.startswith("task/"):  # metric of one task of several, NaN in the envs of the others
                means[f"episode/{name}"] = torch.where(end, measured, torch.nan).nanmean()
                continue
            means[f"metrics/{name}"] = measured.sum() / count
            means[f"episode/{name}"] = torch.where(end, measured, 0).sum() / episodes
        return means


def summarize(averages: InfoAverages, episodes: TensorDict) -> dict[str, float]:
    """Return the averages of a rollout and of its episodes; synchronises with the device once."""
    means = averages.means()  # on the environment's device
    if len(episodes):
        means["episode/return"] = episodes["return"].mean()
        means["episode/length"] = episodes["length"].double().mean()
    device = episodes["return"].device
    values = torch.stack([mean.to(device, torch.float64) for mean in means.values()]).tolist() if means else []
    known = {name: value for name, value in zip(means, values, strict=True) if not math.isnan(value)}
    return known | {"episode/count": float(len(episodes))}
