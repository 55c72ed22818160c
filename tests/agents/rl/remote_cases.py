"""What tests of environments in other processes share."""

from __future__ import annotations

import time

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.envs.actions import ActionManager
from embodichain.envs.registration import make
from embodichain.envs.vec_env import StepResult, VecEnv
from embodichain.envs.wrappers import chunked
from tests.agents.rl.helpers import ScriptedEnv

CAMERA = {"observations": {"cameras": [{"name": "side", "width": 24, "height": 16}]}}


def make_task(task: str, num_envs: int, chunk_size: int = 1, cameras: bool = False) -> VecEnv:
    return chunked(make(task, num_envs=num_envs, num_threads=1, **({"env": CAMERA} if cameras else {})), chunk_size)


def assert_same(here: TensorDict, there: TensorDict) -> None:
    assert here.device == there.device
    names = sorted(map(str, here.keys(include_nested=True, leaves_only=True)))
    assert names == sorted(map(str, there.keys(include_nested=True, leaves_only=True)))
    for name, value in here.items(include_nested=True, leaves_only=True):
        assert torch.equal(value, there[name]), name


class Patient(ScriptedEnv):
    """Takes a while for a step, without any work."""

    action_manager = ActionManager("move", gym.spaces.Box(-1.0, 1.0, (1,)), 2, "cpu")

    def step(self, action: Tensor) -> StepResult:
        time.sleep(0.2)
        return super().step(action)
