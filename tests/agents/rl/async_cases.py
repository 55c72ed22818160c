"""Environments and learners for the tests of asynchronous collection."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector
from tests.agents.rl.helpers import ScriptedEnv, make_policy

NUM_ENVS, NUM_STEPS = 4, 5


class Env(ScriptedEnv):
    """The scripted environment, with trouble on demand in the steps of the first process only."""

    action_manager = None

    def __init__(self, trouble: str = "", at: int = 7, mark: str = "", pause: float = 0.0, **settings: Any) -> None:
        slow, slowness = settings.pop("slow", ""), settings.pop("slowness", 1.0)
        super().__init__(NUM_ENVS, **settings)
        self.trouble, self.at, self.pause, self.steps = trouble, at, pause, 0
        if slow and not Path(slow).exists():  # the first one that is made
            Path(slow).touch()
            self.pause *= slowness
        self.mark = Path(mark) if mark else None

    def step(self, action: Any):
        self.steps += 1
        if self.pause:
            time.sleep(self.pause)
        if self.steps == self.at and self.trouble and not (self.mark is not None and self.mark.exists()):
            if self.mark is not None:
                self.mark.touch()
            self.make_trouble()
        return super().step(action)

    def make_trouble(self) -> None:
        if self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble == "hang":
            time.sleep(1000.0)
        if self.trouble == "exit":
            os._exit(3)
        raise ValueError(f"the gripper fell off in step {self.steps}")


class GatedEnv(Env):
    """Waits in one of its steps until it is let go."""

    def __init__(self, gate: threading.Event, at: int, **settings: Any) -> None:
        super().__init__(at=at, **settings)
        self.gate = gate
        self.waits = threading.Event()

    def step(self, action: Any):
        if self.steps == self.at:
            self.waits.set()
            assert self.gate.wait(100.0)
        return super().step(action)


def make_env(**settings: Any) -> partial[Env]:
    """Return a function that makes an environment in any process."""
    return partial(Env, ends=6, limit=4, **settings)


def make_learner(name: str = "ppo", seed: int = 0, **settings: Any) -> PPO | GRPO:
    """Return an algorithm with a small policy."""
    torch.manual_seed(seed)
    env = Env()
    common = {"batch_size": 8, "n_epochs": 2, "learning_rate": 1e-2}
    if name == "ppo":
        return PPO(PPOCfg(**common | settings), make_policy(env, normalize_obs=True))
    return GRPO(GRPOCfg(**common | {"group_size": 2, "kl_coef": 0.01} | settings), make_policy(env, "actor_only"))


def make_collector(algorithm: PPO | GRPO, env: Any = None, rollouts: int = 4, **settings: Any) -> AsyncCollector:
    """Return a collector for such a learner; ``rollouts`` fit into its buffer."""
    size = NUM_ENVS * settings.get("num_steps", NUM_STEPS)
    cfg = AsyncCfg.from_dict({"num_steps": NUM_STEPS, **settings})
    source = env if env is not None else make_env()
    start = algorithm.start_rollout if isinstance(algorithm, GRPO) else None
    return AsyncCollector(source, algorithm.policy, VLABuffer(rollouts * size), cfg=cfg, start_rollout=start)
