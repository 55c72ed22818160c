"""How long ``PushCubeRL`` takes from nothing to 90% success on one GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.policy import Policy
from embodichain.config import load_config
from embodichain.envs.registration import make
from embodichain.envs.vec_env import VecEnv
from embodichain.utils.torch_runtime import seed_everything

CONFIG = Path(__file__).parent.parent / "configs/agents/rl/push_cube/train_config_gpu.json"
EVAL_EVERY, EVAL_ENVS, LIMIT = 10, 1024, 90.0


def learn(seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Train once per seed and report when an evaluation first showed 90% success."""
    return [_learn(seed) for seed in seeds]


def _learn(seed: int) -> dict[str, Any]:
    config = load_config(CONFIG)
    trainer = config["trainer"]
    seed_everything(seed)
    began = time.perf_counter()
    env = make(trainer["gym_config"], num_envs=trainer["num_envs"], seed=seed)
    judge = make(trainer["gym_config"], num_envs=EVAL_ENVS, seed=1_000_003)
    policy = build_policy(config["policy"], env.observation_space, env.action_space, "cuda")
    settings = PPOCfg.from_dict(config["algorithm"]["cfg"] | {"device": "cuda"})
    algorithm, num_steps = PPO(settings, policy), trainer["buffer_size"]
    collector = SyncCollector(env, policy)
    weights = {name: value.clone() for name, value in policy.state_dict().items()}
    algorithm.update(collector.collect(num_steps))  # compiles and records what the training then replays
    success_rate(policy, judge)
    policy.load_state_dict(weights)
    algorithm = PPO(settings, policy)
    torch.cuda.synchronize()
    compiled = time.perf_counter() - began
    curve: list[dict[str, float]] = []
    seconds, iterations = 0.0, 0
    while seconds < LIMIT:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(EVAL_EVERY):
            algorithm.update(collector.collect(num_steps))
        torch.cuda.synchronize()
        seconds += time.perf_counter() - began
        iterations += EVAL_EVERY
        curve.append({"seconds": seconds, "iterations": iterations, "success": success_rate(policy, judge)})
        if curve[-1]["success"] >= 0.9:
            break
    env.close()
    judge.close()
    last = curve[-1]
    steps = iterations * num_steps * trainer["num_envs"]
    bar = f"{100 * last['success']:.0f}% success, {steps:,} steps (bar: 90% in 60 s); {compiled:.0f} s to compile"
    print(f"learn      PushCubeRL, seed {seed:<27d} {seconds:10.1f} s  {steps / seconds:14,.0f}/s  {bar}", flush=True)
    figures = {"seconds": seconds, "compile_seconds": compiled, "steps": steps, "success": last["success"]}
    return {"section": "learn", "name": f"PushCubeRL, seed {seed}", **figures, "bar": bar, "curve": curve}


@torch.no_grad()
def success_rate(policy: Policy, env: VecEnv) -> float:
    """Return the share of the first episode of every env that ends in success, acting without noise."""
    obs, _ = env.reset(seed=1_000_003)
    running = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    solved = torch.zeros_like(running)
    for _ in range(env.max_episode_steps):
        action = policy.get_action(obs, deterministic=True)[0].clamp(-1.0, 1.0)
        obs, _, terminated, truncated, info = env.step(action)
        done = terminated | truncated
        solved |= running & done & (info["metrics"]["success"] > 0)
        running &= ~done
    return float(solved.float().mean())
