"""Behaviour cloning from a live stream of expert demonstrations, then evaluation in new environments with a video.

    python examples/agents/datasets/train_from_stream.py

One process simulates a robot arm that pushes cubes while this one trains on its demonstrations: a small network
predicts the next eight actions from one observation. Demonstrations never repeat: the buffer is refilled as it is
consumed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.progress import track
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.utils.data import DataLoader

from embodichain.agents.datasets import OnlineDataset
from embodichain.agents.engine.data import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.envs.recording import EpisodeRecorder, EpisodeResult, Summary, roll
from embodichain.envs.registration import make

TASK = "PushCubeRL"


@dataclass
class Args:
    """Settings of the example."""

    steps: int = 2500
    """Gradient steps."""
    batch_size: int = 256
    """Chunks per step."""
    chunk_size: int = 8
    """Actions predicted at once."""
    replan: int = 2
    """Actions executed before the next prediction."""
    episodes: int = 100
    """Episodes of the evaluation."""
    output: Path = Path("outputs/train_from_stream.mp4")
    """Video of the evaluation."""
    seed: int = 0
    """Seed of all random numbers."""


def flatten(observation: TensorDictBase) -> Tensor:
    """Return all vectors of an observation, concatenated."""
    return torch.cat(list(observation.values(include_nested=True, leaves_only=True, sort=True)), dim=-1)


class ChunkPolicy(nn.Module):
    """Predicts the next ``chunk_size`` actions from one observation."""

    def __init__(self, inputs: Tensor, chunk_size: int, action_dim: int, width: int = 256) -> None:
        super().__init__()
        self.register_buffer("mean", inputs.mean(dim=0))
        self.register_buffer("std", inputs.std(dim=0) + 1e-4)
        self.shape = (chunk_size, action_dim)
        sizes = (inputs.shape[1], width, width, width)
        hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.GELU())]
        self.network = nn.Sequential(*hidden, nn.Linear(width, chunk_size * action_dim))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[batch, inputs]`` to actions ``[batch, chunk_size, action_dim]``."""
        return self.network((inputs - self.mean) / self.std).unflatten(-1, self.shape)


class Executor:
    """Executes the first ``replan`` actions of every chunk, then predicts again; each env independently."""

    def __init__(self, policy: ChunkPolicy, num_envs: int, replan: int) -> None:
        self.policy, self.replan = policy, replan
        self.age = torch.full((num_envs,), replan)
        self.plan = torch.zeros(num_envs, *policy.shape)

    @torch.no_grad()
    def __call__(self, observation: TensorDictBase) -> Tensor:
        """Return the next actions ``[num_envs, action_dim]``."""
        due = self.age >= self.replan
        self.plan[due] = self.policy(flatten(observation[due]))
        self.age[due] = 0
        action = self.plan[torch.arange(len(self.age)), self.age]
        self.age += 1
        return action.clamp(-1, 1)

    def forget(self, ended: list[EpisodeResult]) -> None:
        """Drop the chunks of envs that started a new episode."""
        self.age[[episode.env for episode in ended]] = self.replan


def train(engine: OnlineDataEngine, args: Args) -> ChunkPolicy:
    """Minimise the error of the predicted actions on chunks of the stream."""
    dataset = OnlineDataset(engine, chunk_size=args.chunk_size, batch_size=args.batch_size)
    batches = iter(DataLoader(dataset, batch_size=None))
    first = engine.sample_batch(4096, 1)
    policy = ChunkPolicy(flatten(first["observation"])[:, 0], args.chunk_size, first["action"].shape[-1])
    optimizer = torch.optim.AdamW(policy.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=args.steps)
    for _ in track(range(args.steps), description="training"):
        batch = next(batches)
        predicted = policy(flatten(batch["observation"][:, 0]))
        loss = nn.functional.smooth_l1_loss(predicted, batch["action"], beta=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return policy


def evaluate(policy: ChunkPolicy, args: Args) -> tuple[Summary, list[Path]]:
    """Evaluate the policy in new environments and record the first episodes of one."""
    episodes: list[EpisodeResult] = []
    with make(TASK, num_envs=50, seed=args.seed + 1_000_000) as env:
        recorder = EpisodeRecorder(env, args.output, episodes=2, speed=0.5)
        executor = Executor(policy, env.num_envs, args.replan)
        for step in roll(env, executor, args.episodes):
            episodes += step.ended
            executor.forget(step.ended)
            recorder.watch(step)
        return Summary.of(episodes), recorder.finish()


def main() -> float:
    """Train, evaluate, and return the success rate."""
    args = tyro.cli(Args, description=__doc__)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the network is small, and the simulation needs a core, too
    cfg = OnlineDataEngineCfg(
        buffer_size=256,
        max_episode_steps=100,
        gym_config={"id": TASK, "num_envs": 32},
        action_config={"source": "expert", "only_success": True, "terminate_on_success": True, "noise_std": 0.15},
        refill="continuous",
        refill_threshold=100,
        seed=args.seed,
    )
    console, started = Console(), time.monotonic()
    with OnlineDataEngine(cfg) as engine:
        policy = train(engine, args)
        stats = engine.stats()
    console.print(f"learned from {stats.samples:,} chunks of {stats.episodes_written:,} demonstrations")
    summary, files = evaluate(policy, args)
    console.print(
        f"success: {summary.success_rate:.0%} of {summary.episodes} episodes, {time.monotonic() - started:.0f} s"
    )
    console.print("wrote", *files)
    return summary.success_rate or 0.0


if __name__ == "__main__":
    main()
