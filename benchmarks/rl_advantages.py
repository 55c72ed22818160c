"""Advantages alone, by this package and by others, on the same numbers.

Every function returns a call that does the work once. The libraries come with the ``peers`` extra.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.rl_updates import ACTION_SPACE, OBS_SPACE
from benchmarks.rl_work import Call
from embodichain.agents.rl.algo import compute_gae

STEPS, ENVS, GAMMA, LAMBDA = 256, 1024, 0.99, 0.95


def ours(rows: dict[str, Tensor]) -> Call:
    """``compute_gae`` on a rollout as collectors store it."""
    parts = [rows[key].t() for key in ("reward", "value", "next_value", "done", "done")]
    return lambda: compute_gae(*parts, gamma=GAMMA, gae_lambda=LAMBDA)


def numpy_loop(rows: dict[str, Tensor]) -> Call:
    """A bare loop of numpy over steps."""
    reward, value, next_value = (rows[key].numpy() for key in ("reward", "value", "next_value"))
    ended = rows["done"].float().numpy()

    def call() -> np.ndarray:
        alive = 1 - ended
        advantage = reward + np.float32(GAMMA) * alive * next_value - value
        decay = np.float32(GAMMA * LAMBDA) * alive
        for t in range(len(advantage) - 2, -1, -1):
            advantage[t] += decay[t] * advantage[t + 1]
        return advantage + value

    return call


def stable_baselines3(rows: dict[str, Tensor]) -> Call:
    """Stable-Baselines3's ``RolloutBuffer``."""
    from stable_baselines3.common.buffers import RolloutBuffer

    steps, envs = rows["reward"].shape
    buffer = RolloutBuffer(steps, OBS_SPACE, ACTION_SPACE, "cpu", LAMBDA, GAMMA, envs)
    buffer.rewards, buffer.values = rows["reward"].numpy(), rows["value"].numpy()
    done = rows["done"].float().numpy()
    buffer.episode_starts = np.concatenate([np.zeros((1, envs), np.float32), done[:-1]])
    last = rows["next_value"][-1]
    return lambda: buffer.compute_returns_and_advantage(last, done[-1])


def rsl_rl(rows: dict[str, Tensor]) -> Call:
    """rsl_rl's ``PPO.compute_returns``."""
    from rsl_rl.algorithms import PPO as RslPPO  # noqa: N811 - not ours
    from rsl_rl.models import MLPModel
    from rsl_rl.storage import RolloutStorage

    steps, envs = rows["reward"].shape
    example = TensorDict({"policy": torch.zeros(envs, 1)}, batch_size=[envs])
    groups, gaussian = {"actor": ["policy"], "critic": ["policy"]}, {"class_name": "GaussianDistribution"}
    actor = MLPModel(example, groups, "actor", 1, [4], "tanh", distribution_cfg=gaussian)
    storage = RolloutStorage("rl", envs, steps, example, [1])
    algorithm = RslPPO(actor, MLPModel(example, groups, "critic", 1, [4], "tanh"), storage)
    for theirs, key in (("rewards", "reward"), ("values", "value"), ("dones", "done")):
        getattr(storage, theirs).copy_(rows[key].unsqueeze(-1))

    def call() -> None:
        with torch.inference_mode():
            algorithm.compute_returns(example)

    return call


def skrl(rows: dict[str, Tensor]) -> Call:
    """skrl's ``compute_gae``."""
    from skrl.agents.torch.ppo.ppo import compute_gae as skrl_gae

    reward, value, done = (rows[key].unsqueeze(-1) for key in ("reward", "value", "done"))
    never, last = torch.zeros_like(done), rows["next_value"][-1].unsqueeze(-1)
    return lambda: skrl_gae(rewards=reward, terminated=done, truncated=never, values=value, last_values=last)


def torchrl(rows: dict[str, Tensor]) -> Call:
    """TorchRL's loop, the faster of its two ways here."""
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    parts = [rows[key].t().contiguous().unsqueeze(-1) for key in ("value", "next_value", "reward", "done")]
    return lambda: generalized_advantage_estimate(GAMMA, LAMBDA, *parts)
