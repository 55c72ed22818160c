"""What collectors have in common: their interface, and statistics of episodes, kept on the device without waiting."""

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
"""Called with ``obs, action, reward, done, info, next_obs`` after every step; what it raises ends the collection."""


class PolicyStep(NamedTuple):
    """What a policy made of an observation, each part ``[envs, ...]``."""

    obs: Observation
    """What it saw."""
    state: Tensor | None
    """Its recurrent state before that."""
    action: Tensor
    """What it chose."""
    log_prob: Tensor
    """Logarithm of the choice's probability."""
    value: Tensor | None
    """What it expects from here; ``None`` if all observations of a rollout are valued at its end."""
    new_state: Tensor | None = None
    """Its recurrent state afterwards."""
    decision: TensorDictBase | None = None
    """What it needs to value the choice again."""


class BaseCollector(ABC):
    """Lets a policy act in an environment and returns what happened as rollouts."""

    @abstractmethod
    def collect(self, num_steps: int) -> TensorDictBase:
        """Return a rollout ``[num_envs, num_steps]``; see ``buffer/rollout_buffer.py`` for its keys."""

    def publish(self) -> None:  # noqa: B027 - there is nothing to do if the policy itself collects
        """Give the collector the policy's present weights; the learner calls it right after an update."""

    def hold(self) -> AbstractContextManager[None]:
        """Keep the collector between two rollouts, so that its state can be saved."""
        return nullcontext()

    def stop(self) -> None:  # noqa: B027 - there is nothing to do if nothing runs in the background
        """Stop collecting."""

    def close(self) -> None:
        """Stop, and release what it has made itself."""
        self.stop()


class EnvErrors:
    """A context in which an environment is called: tells what it raises from what a policy or a callback does."""

    def __init__(self) -> None:
        self._last: int | None = None  # the error itself would keep alive all that it went through

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._last = self._last if error is None else id(error)

    def include(self, error: Exception) -> bool:
        """Tell whether an environment raised this just now, and not because of what a policy wanted it to do."""
        last, self._last = self._last, None
        return id(error) == last and not isinstance(error, ActionError)


class Recovery(Protocol):
    """What replaces an environment that failed; see ``recovery.py``."""

    seed: int
    """What the seeds of new episodes are derived from."""

    def replace(self, env: VecEnv, error: Exception) -> tuple[VecEnv, Observation]:
        """Return an environment to continue with, and its first observation; ``CollectorError`` beyond the budget."""


def result_to(result: StepResult, device: torch.device) -> StepResult:
    """Return a step's result on a device; ``info`` stays where the environment is."""
    obs, reward, terminated, truncated, info = result
    return obs.to(device), reward.to(device), terminated.to(device), truncated.to(device), info


def collection_threads(policy: nn.Module, num_envs: int) -> int | None:
    """Return 1 if the policy's work per step is too small to share between threads, ``None`` for torch's own choice."""
    size = sum(parameter.numel() for parameter in policy.parameters())
    return 1 if size * num_envs < LARGE_STEP else None


class EpisodeTracker:
    """Follows returns and lengths of episodes across rollouts."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        """Begin with the episodes under way: ``episode_return`` and ``episode_length``, ``[num_envs]`` each."""
        self.episode_return = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.episode_length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None
        self._ended: TensorDict | None = None

    def reset(self) -> None:
        """Forget the episodes under way: all envs have been reset."""
        self.episode_return.zero_()
        self.episode_length.zero_()

    def update(self, reward: Tensor, done: Tensor, num_actions: Tensor | None = None, first_only: bool = False) -> None:
        """Take in a rollout's ``[num_steps, num_envs]``; lengths count actions: one per step, or ``num_actions``.

        ``first_only`` is for rollouts that begin with new episodes: see ``counted_ends``.
        """
        counted = torch.arange(1, reward.shape[0] + 1, device=reward.device).unsqueeze(1)
        returns = reward.double().cumsum(0) + self.episode_return
        lengths = self.episode_length + (counted if num_actions is None else num_actions.cumsum(0))
        last = (done * counted).amax(dim=0, keepdim=True)  # the step at whose end an env last ended; 0: none
        row, has_ended = (last - 1).clamp_min(0), last > 0
        self.episode_return = returns[-1] - torch.where(has_ended, returns.gather(0, row), 0.0)[0]
        self.episode_length = lengths[-1] - torch.where(has_ended, lengths.gather(0, row), 0)[0]
        self._sums, self._ended = (returns, lengths, counted_ends(done, first_only)), None

    @property
    def ended(self) -> TensorDict:
        """``return`` and ``length`` of the last rollout's episodes, in order; this waits for the device once."""
        if self._ended is None:
            none = TensorDict({"return": torch.zeros(0), "length": torch.zeros(0)}, batch_size=[0])
            self._ended = none if self._sums is None else _ended_episodes(*self._sums)
            self._sums = None
        return self._ended


def counted_ends(done: Tensor, first_only: bool) -> Tensor:
    """Return where ``[num_steps, num_envs]`` the episodes end that statistics count: where ``done``.

    Where every rollout begins with new episodes, those that it cuts never end, and to count the others would favour
    short ones. So the first episode of each env counts, as in an evaluation, and ends with the rollout at the latest.
    """
    if not first_only:
        return done.clone()
    ends = done & (done.long().cumsum(0) == 1)
    ends[-1] |= ~done.any(0)
    return ends


class DiscountedReturns:
    """Discounted rewards of the episodes under way, ``x_t = r_t + gamma x_{t-1}``; their spread scales rewards."""

    def __init__(self, gamma: float, num_envs: int, device: torch.device) -> None:
        self.gamma = gamma
        self.value = torch.zeros(num_envs, dtype=torch.float64, device=device)
        """What the episodes under way have, ``[num_envs]``."""

    def update(
        self, reward: Tensor, done: Tensor, num_actions: Tensor | None = None, chunk_reward: Tensor | None = None
    ) -> Tensor:
        """Take in a rollout's ``[num_steps, num_envs]`` and return those of its steps; a chunk is ``num_actions``.

        ``chunk_reward`` ``[num_steps, num_envs, chunk_size]`` has the reward of each action of a chunk, which counts as
        a step then: what is returned is that of the last one. Without it, a chunk's reward is that of its last action.
        """
        if num_actions is not None and chunk_reward is not None:
            later = num_actions.unsqueeze(-1) - 1 - torch.arange(chunk_reward.shape[-1], device=reward.device)
            reward = (chunk_reward.double() * self.gamma ** later.clamp_min(0).double()).sum(-1)
        age = torch.ones_like(reward, dtype=torch.float64) if num_actions is None else num_actions.double()
        discounts, goes_on = (self.gamma**age).unbind(0), (~done).double().unbind(0)
        returns = []
        for step, part in enumerate(reward.double().unbind(0)):
            returns.append(torch.addcmul(part, discounts[step], self.value))
            self.value = returns[-1] * goes_on[step]
        return torch.stack(returns)


def _ended_episodes(returns: Tensor, lengths: Tensor, done: Tensor) -> TensorDict:
    """Return the episodes of a rollout in which returns and lengths were added up, whatever ended on the way."""
    env, step = done.t().nonzero(as_tuple=True)  # sorted by env, then by step
    totals = torch.stack([returns[step, env], lengths[step, env].double()])
    same_env = torch.zeros_like(env, dtype=torch.bool)
    same_env[1:] = env[1:] == env[:-1]
    before = torch.where(same_env, totals.roll(1, dims=1), 0.0)  # what belongs to the env's episodes until then
    own = (totals - before)[:, step.argsort(stable=True)]
    return TensorDict({"return": own[0], "length": own[1].long()}, batch_size=[own.shape[1]])


class InfoAverages:
    """Averages ``info["rewards"]`` and ``info["metrics"]`` over a rollout: once, when asked, not in every step."""

    def __init__(self, first_only: bool = False) -> None:
        """Begin a rollout; ``first_only`` if it begins with new episodes: see ``counted_ends``."""
        self._first_only = first_only
        self._infos: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor], Tensor]] = []

    def add(self, info: Mapping[str, Any], done: Tensor) -> None:
        """Take in one step's info and which envs ended an episode, ``[num_envs]``; neither may be changed later."""
        self._infos.append((info.get("rewards", {}), info.get("metrics", {}), done))

    def means(self) -> dict[str, Tensor]:
        """Return the mean of every part over steps and envs, and of every metric at the end of counted episodes."""
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
            if name.startswith("curriculum/"):  # how far ranges have come, which is no property of an episode
                means[name] = measured.sum() / count
                continue
            if name.startswith("task/"):  # of one task of several: NaN in the envs of others
                means[f"episode/{name}"] = torch.where(end, measured, torch.nan).nanmean()
                continue
            means[f"metrics/{name}"] = measured.sum() / count
            means[f"episode/{name}"] = torch.where(end, measured, 0).sum() / episodes
        return means


def summarize(averages: InfoAverages, episodes: TensorDict) -> dict[str, float]:
    """Return the averages of a rollout and of its episodes; this waits for the device once."""
    means = averages.means()  # where the simulation is
    if len(episodes):
        means["episode/return"] = episodes["return"].mean()
        means["episode/length"] = episodes["length"].double().mean()
    here = episodes["return"].device  # where the rollout is
    values = torch.stack([mean.to(here, torch.float64) for mean in means.values()]).tolist() if means else []
    known = {name: value for name, value in zip(means, values, strict=True) if not math.isnan(value)}
    return known | {"episode/count": float(len(episodes))}
