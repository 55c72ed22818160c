"""Episode returns and averages of what environments report, kept on the device without waiting for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


class EpisodeTracker:
    """Follows returns and lengths of episodes across rollouts.

    ``episode_return`` (float64) and ``episode_length`` (int64), each ``[num_envs]``, are those of the episodes under
    way.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.episode_return = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.episode_length = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def restart(self) -> None:
        """Forget the episodes under way: all envs have been reset."""
        self.episode_return.zero_()
        self.episode_length.zero_()

    def update(self, reward: Tensor, done: Tensor, num_actions: Tensor | None = None) -> TensorDict:
        """Take in a rollout's ``[num_steps, num_envs]``; return ``return`` and ``length`` of the episodes that ended.

        They come in the order in which they ended. Lengths count actions: one per step, or ``num_actions``.
        """
        num_steps = reward.shape[0]
        returns = reward.double().cumsum(0) + self.episode_return
        counted = torch.arange(1, num_steps + 1, device=reward.device).unsqueeze(1)
        lengths = self.episode_length + (counted if num_actions is None else num_actions.cumsum(0))
        env, step = done.t().nonzero(as_tuple=True)  # sorted by env, then by step
        totals = torch.stack([returns[step, env], lengths[step, env].double()])
        # Sums run over the whole rollout: what belongs to an env's earlier episodes is taken off.
        same_env = torch.zeros_like(env, dtype=torch.bool)
        same_env[1:] = env[1:] == env[:-1]
        before = torch.where(same_env, totals.roll(1, dims=1), 0.0)
        is_last = torch.ones_like(same_env)
        is_last[:-1] = ~same_env[1:]
        ended = torch.zeros(2, reward.shape[1], dtype=torch.float64, device=reward.device)
        ended[:, env[is_last]] = totals[:, is_last]
        self.episode_return = returns[-1] - ended[0]
        self.episode_length = lengths[-1] - ended[1].long()
        own = (totals - before)[:, step.argsort(stable=True)]
        return TensorDict({"return": own[0], "length": own[1].long()}, batch_size=[own.shape[1]])


class InfoAverages:
    """Averages ``info["rewards"]`` and ``info["metrics"]`` over a rollout.

    What steps report is kept as it is, and added up when it is asked for: a few operations per name instead of as many
    per name and step.
    """

    def __init__(self) -> None:
        self._infos: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor], Tensor]] = []

    def add(self, info: Mapping[str, Any], done: Tensor) -> None:
        """Take in one step's info and which envs ended an episode, ``[num_envs]``; neither may be changed later."""
        self._infos.append((info.get("rewards", {}), info.get("metrics", {}), done))

    def means(self) -> dict[str, Tensor]:
        """Return the mean of every part over steps and envs, and of every metric at the end of finished episodes."""
        rewards: dict[str, list[Tensor]] = defaultdict(list)
        metrics: dict[str, list[Tensor]] = defaultdict(list)
        dones: dict[str, list[Tensor]] = defaultdict(list)
        ended: list[Tensor] = []
        for reward_parts, measures, done in self._infos:
            for name, part in reward_parts.items():
                rewards[name].append(part)
            for name, part in measures.items():
                metrics[name].append(part)
                dones[name].append(done)
            ended += [done] if measures else []
        count = len(self._infos) * self._infos[0][2].numel() if self._infos else 1
        means = {f"rewards/{name}": torch.cat(parts).sum() / count for name, parts in rewards.items()}
        if not ended:
            return means
        episodes = torch.cat(ended).sum()
        for name, parts in metrics.items():
            measured = torch.cat(parts)
            means[f"metrics/{name}"] = measured.sum() / count
            means[f"episode/{name}"] = torch.where(torch.cat(dones[name]), measured, 0).sum() / episodes
        return means


def summarize(averages: InfoAverages, episodes: TensorDict) -> dict[str, float]:
    """Return the averages of a rollout and of the episodes that ended in it; this waits for the device once."""
    means = averages.means()  # where the simulation is
    if len(episodes):
        means["episode/return"] = episodes["return"].mean()
        means["episode/length"] = episodes["length"].double().mean()
    here = episodes["return"].device  # where the rollout is
    values = torch.stack([mean.to(here, torch.float64) for mean in means.values()]).tolist() if means else []
    known = {name: value for name, value in zip(means, values, strict=True) if not math.isnan(value)}
    return known | {"episode/count": float(len(episodes))}
