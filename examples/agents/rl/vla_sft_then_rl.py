"""Teach a vision-language-action model by demonstrations, then let reinforcement learning take it further.

    python examples/agents/rl/vla_sft_then_rl.py                     # in small, on two CPU cores: under 10 minutes
    python examples/agents/rl/vla_sft_then_rl.py --algorithm grpo
    python examples/agents/rl/vla_sft_then_rl.py --full              # on a GPU, with as many cores as there are

A robot arm sees a picture, reads "push the cube to the red target" and pushes the cube there. First the model imitates
a scripted expert, whose demonstrations other processes make meanwhile. Then it acts itself: a thread collects what
comes of it while the learner improves it.

In small, the task is easier: two colours, success within 5 cm, pictures of 48 x 48. And time is short: an episode has
16 steps, in which the careful expert itself succeeds in three of ten. Only reinforcement can teach to be faster.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console

from embodichain.agents.engine.data import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.rl.algo.imitation import Imitation, ImitationCfg, warm_up_value
from embodichain.agents.rl.algo.ppo import PPOCfg
from embodichain.agents.rl.config import TrainCfg, complete, override
from embodichain.agents.rl.evaluation import Evaluation, evaluate
from embodichain.agents.rl.models.vla import TinyVLA, save_vla_model
from embodichain.agents.rl.models.vla_policy import VLAPolicy
from embodichain.agents.rl.runs import RunFolder
from embodichain.agents.rl.train import build_trainer
from embodichain.config import load_config, merge
from embodichain.envs.registration import load_gym_config, make
from embodichain.envs.tasks.push_cube import named_goal

CONFIGS = Path(__file__).parents[3] / "configs" / "agents" / "rl" / "push_cube"
CHUNK, LOG_STD = 4, -1.8  # actions per decision, and how far reinforcement strays from what was imitated


@dataclass
class Args:
    """Settings of the example."""

    algorithm: Literal["ppo", "grpo"] = "ppo"
    """What improves the policy after it was cloned."""
    full: bool = False
    """The whole task, on a GPU."""
    seed: int = 0
    """Seed of everything but the evaluation."""
    sft_steps: int | None = None
    """Gradient steps of imitation."""
    sft_seconds: float = 240.0
    """Imitation ends after this time at the latest."""
    rl_iterations: int | None = None
    """Rollouts that reinforcement learns from."""
    rl_seconds: float = 300.0
    """Reinforcement ends after this time at the latest."""
    episodes: int = 256
    """Episodes of each evaluation, the same before and after."""
    output: Path | None = None
    """Folder for the models and the run; default: a new one in runs."""


@dataclass(frozen=True)
class Plan:
    """What is small or full."""

    sft_steps: int
    sft_batch: int
    rl_iterations: int
    num_envs: int
    demonstrations: int  # room for them; they are replaced as they are used
    demonstration_steps: int
    num_workers: int  # processes that make them
    model: dict[str, Any]
    trainable: list[str] | None  # parts of the model that reinforcement changes; None: all
    gym: str
    trainer: dict[str, Any]  # what differs from train_config_vla.json
    algorithm: dict[str, Any]


SMALL = Plan(
    sft_steps=600,
    sft_batch=64,
    rl_iterations=60,
    num_envs=64,
    demonstrations=256,
    demonstration_steps=40,
    num_workers=1,
    model={"width": 64},
    trainable=["to_action", "to_value"],
    gym="gym_config_language_small.json",
    trainer={"buffer_size": 16},
    algorithm={"batch_size": 512, "n_epochs": 4},
)
FULL = Plan(
    sft_steps=1000,
    sft_batch=256,
    rl_iterations=400,
    num_envs=256,
    demonstrations=1536,
    demonstration_steps=60,
    num_workers=12,
    model={"width": 256, "depth": 3},
    trainable=None,
    gym="gym_config_language.json",
    trainer={"device": "cuda", "collect_threads": None, "update_threads": None, "collector": {"pipeline_stages": 4}},
    algorithm={"batch_size": 1920, "mixed_precision": "tf32"},
)
GRPO = {"gamma": 0.98, "group_size": 8, "n_epochs": 3, "learning_rate": 0.0003, "max_grad_norm": 1.0}
GRPO |= {"log_prob_per": "action", "correction": "decoupled"}


def imitate(policy: VLAPolicy, gym_config: dict[str, Any], plan: Plan, args: Args, console: Console) -> str:
    """Learn from a stream of demonstrations; return how many there were."""
    steps, began = args.sft_steps or plan.sft_steps, time.monotonic()
    shown = {"num_envs": min(32, plan.demonstrations // plan.num_workers), "num_threads": 1}
    cfg = OnlineDataEngineCfg(
        buffer_size=plan.demonstrations,
        max_episode_steps=plan.demonstration_steps,
        gym_config=merge(gym_config, shown | {"max_episode_steps": plan.demonstration_steps}),
        action_config={"source": "expert", "only_success": True, "terminate_on_success": True, "noise_std": 0.1},
        refill="continuous",
        refill_threshold=40,
        num_workers=plan.num_workers,
        seed=args.seed,
    )
    language = load_gym_config(gym_config).env.language
    learner = Imitation(ImitationCfg(total_steps=steps), policy)
    with OnlineDataEngine(cfg) as engine:
        for step in range(steps):
            chunks = engine.sample_batch(plan.sft_batch, CHUNK)
            first = chunks["observation"][:, 0]  # beside acting, the model learns to point out the cube and its goal
            points = torch.cat((first["object", "pos"][:, :2], named_goal(first, language)), dim=1)
            error = learner.update(chunks, points)["action_loss"]
            if step % 200 == 199:
                console.print(f"imitation: {step + 1} of {steps} steps, error {float(error):.2f}")
            if time.monotonic() > began + args.sft_seconds:
                break
        return f"{engine.stats().episodes_written:,} demonstrations"


def train_config(args: Args, plan: Plan, gym_config: dict[str, Any], model: Path, run_dir: Path) -> TrainCfg:
    """Return train_config_vla.json for a cloned model, with what the plan changes."""
    config = load_config(CONFIGS / "train_config_vla.json")
    limits = {"iterations": args.rl_iterations or plan.rl_iterations, "max_seconds": args.rl_seconds}
    run = {"run_dir": str(run_dir), "seed": args.seed, "total_steps": None, "enable_eval": False}
    envs = {"gym_config": gym_config, "num_envs": plan.num_envs}
    config["trainer"] = merge(config["trainer"], {**limits, **run, **envs, **plan.trainer})
    # The value must not reshape what imitation taught the model to see.
    config["policy"]["vla_config"] = {"model_path": str(model), "model_config": {"value_shapes_perception": False}}
    config["policy"]["vla_config"]["trainable"] = plan.trainable
    config["algorithm"]["cfg"] |= plan.algorithm
    if args.algorithm == "grpo":  # its rollouts are whole episodes, from equal starts
        config["trainer"]["buffer_size"] = gym_config["max_episode_steps"] // CHUNK
        config["algorithm"] = {"name": "grpo", "cfg": GRPO | plan.algorithm}
    return override(complete(TrainCfg.from_dict(config)), [])


def reinforce(cfg: TrainCfg, warm_up: int, console: Console) -> VLAPolicy:
    """Train by PPO or GRPO while a thread collects; return the policy."""
    trainer = build_trainer(cfg, RunFolder.create(cfg), console=console)
    if cfg.algorithm.name == "ppo":
        value = PPOCfg.from_dict(cfg.algorithm.cfg).replace(learning_rate=1e-3, lr_schedule="constant")
        warm_up_value(trainer.policy, trainer.env, value, cfg.trainer.buffer_size, warm_up)
    result = trainer.train()
    trainer.env.close()
    console.print(f"{cfg.algorithm.name}: {result.global_step:,} steps in {result.seconds:.0f} s")
    return trainer.policy


def main(args: Args, plan: Plan | None = None) -> tuple[Evaluation, Evaluation]:
    """Imitate, reinforce, and return how the policy did in between and in the end."""
    plan, console, began = plan or (FULL if args.full else SMALL), Console(), time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # other cores simulate
    gym_config = load_config(CONFIGS / plan.gym)
    output = args.output or Path("runs") / f"vla_{args.algorithm}_{time.strftime('%Y%m%d-%H%M%S')}"
    with make(gym_config, num_envs=plan.num_envs, seed=args.seed + 1_000_000) as env:
        settings = {"chunk_size": CHUNK, "num_points": 4, "init_log_std": LOG_STD, **plan.model}
        model = TinyVLA.from_spaces(env.observation_space, env.action_space, **settings)
        policy = VLAPolicy(env.observation_space, env.action_space, plan.trainer.get("device", "cpu"), model)
        seen = imitate(policy, gym_config, plan, args, console)
        before = evaluate(policy, env, args.episodes, seed=args.seed + 1_000_000)
        console.print(f"imitated {seen}: success {before.summary.success_rate:.0%} ({time.monotonic() - began:.0f} s)")
        cfg = train_config(args, plan, gym_config, save_vla_model(model, output / "imitated"), output / "run")
        policy = reinforce(cfg, 3, console)
        after = evaluate(policy, env, args.episodes, seed=args.seed + 1_000_000)
    save_vla_model(policy.model, output / "reinforced")
    rates = [f"{evaluation.summary.success_rate:.0%}" for evaluation in (before, after)]
    console.print(f"success {' -> '.join(rates)} over {args.episodes} episodes each ({time.monotonic() - began:.0f} s)")
    return before, after


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
