"""The task of part (b) in several sizes, and the demonstrations of its scripted expert."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from benchmarks.async_vla_runs import Sizes
from benchmarks.timing import cores
from embodichain.config import load_config
from embodichain.envs.env_cfg import LanguageCfg
from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.tasks.push_cube import named_goal
from embodichain.envs.vec_env import VecEnv
from embodichain.envs.wrappers import chunked

CONFIGS = Path(__file__).parent.parent / "configs" / "agents" / "rl" / "push_cube"
CHUNK = 4
_EXPERT_STEPS = 40  # the expert is careful and needs more time than an episode has
_NOISE = 0.1  # on the expert's actions, so that there is something to correct


@dataclass(frozen=True)
class Scale:
    """What is large on a GPU and small on a CPU."""

    device: str
    model: dict[str, Any]
    pixels: int
    sizes: Sizes
    expert_envs: int
    expert_decisions: int
    imitation_steps: int
    imitation_batch: int
    eval_envs: int
    episodes: int
    """Of an evaluation."""
    num_threads: int
    """Of a simulation; 0: all cores."""
    processes: int
    """That simulate apart."""


LARGE = Scale(
    device="cuda",
    model={"width": 1024, "depth": 6, "num_heads": 16, "hidden_size": 512, "patch_size": 16},
    pixels=128,
    sizes=Sizes(num_envs=64, num_steps=16, rollouts=25, epochs=4),
    expert_envs=256,
    expert_decisions=64,
    imitation_steps=800,
    imitation_batch=128,
    eval_envs=128,
    episodes=256,
    num_threads=0,
    processes=8,
)
MEDIUM = Scale(
    device="cpu",
    model={"width": 64},
    pixels=48,
    sizes=Sizes(num_envs=64, num_steps=16, rollouts=20, epochs=4),
    expert_envs=256,
    expert_decisions=32,
    imitation_steps=600,
    imitation_batch=64,
    eval_envs=64,
    episodes=128,
    num_threads=1,
    processes=2,
)
SMALL = Scale(
    device="cpu",
    model={"width": 32, "depth": 1, "num_heads": 2, "hidden_size": 32, "patch_size": 16},
    pixels=48,
    sizes=Sizes(num_envs=8, num_steps=4, rollouts=3, epochs=1),
    expert_envs=8,
    expert_decisions=2,
    imitation_steps=10,
    imitation_batch=16,
    eval_envs=16,
    episodes=32,
    num_threads=1,
    processes=2,
)


def make_task(scale: Scale, num_envs: int, cameras: bool = True, max_episode_steps: int | None = None) -> TaskEnv:
    config = load_config(CONFIGS / "gym_config_language_small.json")
    seen = config["env"]["observations"]
    seen["cameras"] = [{**cfg, "width": scale.pixels, "height": scale.pixels} for cfg in seen["cameras"] if cameras]
    config["max_episode_steps"] = max_episode_steps or config["max_episode_steps"]
    env = make(config, num_envs=num_envs, num_threads=scale.num_threads)
    if not isinstance(env, TaskEnv):
        raise TypeError(f"{config['id']} is no task of this package")
    return env


def make_chunked(scale: Scale, num_envs: int) -> VecEnv:
    return chunked(make_task(scale, num_envs), CHUNK)


def demonstrations(scale: Scale) -> tuple[TensorDict, Tensor, Tensor]:
    """Return what the expert sees ``[n]``, what it does ``[n, CHUNK, action_dim]``, and where cube and goal are.

    It is simulated without cameras; pictures of the states in which a decision is due are taken afterwards.
    """
    env = make_task(scale, scale.expert_envs, cameras=False, max_episode_steps=_EXPERT_STEPS)
    env.reset(seed=2)
    states, actions, whole = [], [], []
    for _ in range(scale.expert_decisions):
        states.append(env.get_state())
        taken, running = [], torch.ones(env.num_envs, dtype=torch.bool)
        for index in range(CHUNK):
            taken.append(env.expert_action())
            noisy = taken[-1] + _NOISE * torch.randn_like(taken[-1])
            _, _, terminated, truncated, _ = env.step(noisy.clamp(-1.0, 1.0))
            if index < CHUNK - 1:  # an end after the last action is none inside the chunk
                running &= ~(terminated | truncated)
        actions.append(torch.stack(taken, dim=1))
        whole.append(running)
    env.close()
    keep = torch.cat(whole)
    obs = _pictures(scale, states)[keep]
    goal = named_goal(obs, env.cfg.env.language or LanguageCfg())
    return obs, torch.cat(actions)[keep], torch.cat((obs["object", "pos"][:, :2], goal), dim=1)


def _pictures(scale: Scale, states: Sequence[TensorDictBase]) -> TensorDict:
    """Return the observations of all these states, rendered by several threads."""
    workers = scale.num_threads or min(8, cores())
    count = states[0].batch_size[0]
    envs = [make_task(scale, count, max_episode_steps=_EXPERT_STEPS) for _ in range(workers)]

    def look(worker: int) -> list[TensorDict]:
        return [envs[worker].set_state(state).clone() for state in states[worker::workers]]

    with ThreadPoolExecutor(workers) as pool:
        seen = list(pool.map(look, range(workers)))
    for env in envs:
        env.close()
    return torch.cat([seen[i % workers][i // workers] for i in range(len(states))])
