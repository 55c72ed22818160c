"""What every candidate of the reinforcement-learning benchmark is given: tasks, settings, networks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from torch import nn

Call = Callable[[], object]
"""Does a piece of work once."""


@dataclass(frozen=True)
class Work:
    """A task and the settings of PPO on it, the same for everybody."""

    env: str
    num_envs: int = 64
    num_steps: int = 128
    epochs: int = 4
    minibatches: int = 4
    width: int = 64
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    max_grad_norm: float = 0.5

    @property
    def transitions(self) -> int:
        """Environment steps of an iteration."""
        return self.num_envs * self.num_steps

    @property
    def batch_size(self) -> int:
        """Transitions of a minibatch."""
        return self.transitions // self.minibatches


CARTPOLE = Work("CartPole-v1")
HALF_CHEETAH = Work("HalfCheetah-v5", num_steps=64, epochs=10, width=256, learning_rate=3e-4)
HALF_CHEETAH_64 = replace(HALF_CHEETAH, width=64)
"""With the networks of the shipped config."""


class Clip(gym.vector.VectorWrapper):
    """Clips actions to their range, as the Gaussian policies here know none."""

    autoreset_mode = property(lambda self: self.env.metadata["autoreset_mode"])

    def step(self, actions: Any) -> Any:
        """Step with clipped actions."""
        space = self.single_action_space
        return self.env.step(np.clip(actions, space.low, space.high) if isinstance(space, gym.spaces.Box) else actions)


def vector_env(work: Work) -> Clip:
    """Return Gymnasium's vector environment of a task, in this process, resetting in the same step."""
    logging.getLogger("embodichain.envs.physics").setLevel(logging.ERROR)  # deprecated words in Gymnasium's files
    options = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return Clip(gym.make_vec(work.env, work.num_envs, vectorization_mode="sync", vector_kwargs=options))


def is_discrete(env: gym.vector.VectorEnv) -> bool:
    """Tell whether actions are choices."""
    return isinstance(env.single_action_space, gym.spaces.Discrete)


def sizes(env: gym.vector.VectorEnv) -> tuple[int, int]:
    """Return the numbers of an observation, and those of an action or of the choices."""
    space: Any = env.single_action_space
    shape: Any = env.single_observation_space.shape
    return int(shape[0]), int(space.n) if is_discrete(env) else int(space.shape[0])


def tanh_network(inputs: int, outputs: int, width: int, last_gain: float) -> nn.Sequential:
    """Return the network that every candidate trains: two hidden layers with tanh."""
    layers = [nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
