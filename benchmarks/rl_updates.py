"""One PPO update by this package and by a bare loop, on the same numbers.

Every function returns a call that does the work once. What the other libraries do is in ``rl_updates_peers.py``.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.rl_work import Call, tanh_network
from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.models import build_policy

STEPS, ENVS, OBS, ACTIONS, WIDTH, EPOCHS, MINIBATCHES = 64, 1024, 48, 12, 256, 5, 4
ROWS = STEPS * ENVS
OBS_SPACE = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
ACTION_SPACE = gym.spaces.Box(-1, 1, (ACTIONS,), np.float32)


def data(steps: int = STEPS, envs: int = ENVS) -> dict[str, Tensor]:
    """Return one rollout of random numbers, ``[steps, envs, ...]``."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(steps, envs, *shape, generator=random)

    action = draw(ACTIONS)
    return {
        "observation": draw(OBS),
        "action": action,
        "reward": draw(),
        "value": draw(),
        "advantage": draw(),
        "return": draw(),
        "next_value": draw(),
        "done": torch.rand(steps, envs, generator=random) < 0.01,
        "sample_log_prob": (-0.5 * action.square() - 0.9189385).sum(-1),
    }


def rollout(rows: dict[str, Tensor]) -> TensorDict:
    """Return the numbers as a rollout of ours, ``[envs, steps]``."""
    keys = ("observation", "action", "reward", "value", "next_value", "done", "sample_log_prob")
    parts: dict[str, Any] = {key: rows[key] for key in keys}
    parts["terminated"], parts["truncated"] = rows["done"], torch.zeros_like(rows["done"])
    parts["policy_version"] = torch.zeros_like(rows["done"], dtype=torch.int64)
    return TensorDict(parts, batch_size=rows["done"].shape).transpose(0, 1)


def ours(rows: dict[str, Tensor]) -> Call:
    """EmbodiChain, advantages included."""
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [WIDTH, WIDTH], "activation": "tanh"}}
    block = {"name": "actor_critic", "actor": network, "critic": network}
    algorithm = PPO(PPOCfg(batch_size=ROWS // MINIBATCHES, n_epochs=EPOCHS), build_policy(block, OBS, ACTIONS, "cpu"))
    given = rollout(rows)
    return lambda: algorithm.update(given)


def forward_backward(rows: dict[str, Tensor]) -> Call:
    """Both networks forward and backward on minibatches, and nothing else: what no update can do without."""
    actor, critic = tanh_network(OBS, ACTIONS, WIDTH, 0.01), tanh_network(OBS, 1, WIDTH, 1.0)
    batch = rows["observation"].flatten(0, 1)[: ROWS // MINIBATCHES].clone()

    def call() -> None:
        for _ in range(EPOCHS * MINIBATCHES):
            (actor(batch).sum() + critic(batch).sum()).backward()

    return call


def bare_loop(rows: dict[str, Tensor]) -> Call:
    """PPO without a framework, as single-file recipes have it."""
    actor, critic = tanh_network(OBS, ACTIONS, WIDTH, 0.01), tanh_network(OBS, 1, WIDTH, 1.0)
    log_std = nn.Parameter(torch.zeros(ACTIONS))
    parameters = [*actor.parameters(), *critic.parameters(), log_std]
    adam = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5)
    obs, action, old, advantage, target = (
        rows[key].flatten(0, 1) for key in ("observation", "action", "sample_log_prob", "advantage", "return")
    )

    def step(index: Tensor) -> None:
        batch = obs[index]
        noise = (action[index] - actor(batch)) * (-log_std).exp()
        log_prob = (-0.5 * noise.square() - log_std - 0.9189385).sum(-1)
        weight = advantage[index]
        weight = (weight - weight.mean()) / (weight.std() + 1e-8)
        ratio = (log_prob - old[index]).exp()
        policy_loss = torch.max(-weight * ratio, -weight * ratio.clamp(0.8, 1.2)).mean()
        loss = policy_loss + 0.5 * (critic(batch).squeeze(-1) - target[index]).square().mean()
        adam.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        adam.step()

    def call() -> None:
        for _ in range(EPOCHS):
            for index in torch.randperm(ROWS).chunk(MINIBATCHES):
                step(index)

    return call
