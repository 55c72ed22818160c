"""What a viewer costs a job: the processor time that its environments spend on it.

``python -m benchmarks.viewer_overhead [ENV] [NUM_ENVS]`` times what is called after every step while nobody watches,
and the copy that is made up to thirty times in a second while somebody does, beside the step itself. The viewer is
another process, at low priority (nice 15).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from embodichain.envs.publishing import PublishedStates, Publisher
from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv

_ROUNDS = 40
_PER_SECOND = 30  # copies, at most


def opened(folder: Path) -> PublishedStates:
    """Return the states that the publisher in a folder writes."""
    (file,) = folder.glob("*.json")
    about = json.loads(file.read_text())
    return PublishedStates(file.with_suffix(".states"), about["shown"], about["nq"], about["nmocap"])


def best(work: Callable[[], object], count: int) -> float:
    """Return the processor seconds of a call, the least of some rounds."""
    seconds = []
    for _ in range(_ROUNDS):
        begin = time.process_time()
        for _ in range(count):
            work()
        seconds.append((time.process_time() - begin) / count)
    return min(seconds)


def main() -> None:
    """Measure and print."""
    name, num_envs = (sys.argv[1:] + ["PushCubeRL", "256"][len(sys.argv) - 1 :])[:2]
    torch.set_num_threads(1)
    env = make(name, num_envs=int(num_envs), num_threads=1, seed=0)
    if not isinstance(env, TaskEnv):
        sys.exit(f"{name} is not simulated here")
    with env, tempfile.TemporaryDirectory() as folder:
        action = torch.zeros(env.num_envs, env.action_manager.action_dim)
        reward = torch.zeros(env.num_envs)
        publisher = Publisher(env, Path(folder))
        states = opened(Path(folder))
        step = best(lambda: env.step(action), 5)
        closed = best(lambda: publisher(reward), 1000)
        states.watch(600.0)
        copy = best(lambda: publisher._write(reward), 50)
    print(f"{name}, {num_envs} envs: a step takes {1e6 * step:,.0f} us")
    print(f"  viewer closed: {1e6 * closed:.2f} us, {closed / step:.3%} of every step")
    print(f"  viewer open: {1e6 * copy:.0f} us a copy, at most {_PER_SECOND * copy:.3%} of a core")


if __name__ == "__main__":
    main()
