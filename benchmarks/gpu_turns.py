"""How the GPU benchmarks take turns and print: medians over turns, a bar beside each figure that has one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv

ENVS, STEPS = 4096, 24
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [256, 256], "activation": "elu"}}
POLICY = {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK}
LEARNING = {"n_epochs": 5, "batch_size": ENVS * STEPS // 4, "learning_rate": 3e-4, "ent_coef": 0.01, "device": "cuda"}

Row = dict[str, Any]
Turn = tuple[Callable[[], Any], Callable[[], Any]]
"""What is done before a turn, and what is timed."""


def take_turns(contenders: dict[str, Turn], rounds: int, warm_up: int = 4) -> dict[str, float]:
    """Return the median seconds of each contender."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        for name, (prepare, work) in contenders.items():
            prepare()
            synchronize()
            began = time.perf_counter()
            work()
            synchronize()
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def nothing() -> None:
    """Prepare nothing."""


def report(section: str, name: str, seconds: float, units: float, bar: str = "") -> Row:
    """Print one figure and return it."""
    print(f"{section:10s} {name:54s} {seconds * 1e3:10.3f} ms {units / seconds:14,.0f}/s  {bar}", flush=True)
    return {"section": section, "name": name, "seconds": seconds, "per_second": units / seconds, "bar": bar}


def make_env(num_envs: int, id: str = "PushCubeRL", **changes: Any) -> TaskEnv:
    """Return a task on the GPU."""
    made = make(id, num_envs=num_envs, device="cuda", **{"seed": 0, **changes})
    if not isinstance(made, TaskEnv):
        raise TypeError(f"expected one of our own tasks, got {type(made).__name__}")
    return made
