"""The ways to sample from a live stream: item mode, batch mode, and chunks of variable length.

python examples/agents/datasets/online_dataset_demo.py
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import tyro
from torch.utils.data import DataLoader

from embodichain.agents.datasets import OnlineDataset
from embodichain.agents.datasets.sampler import GMMChunkSampler, UniformChunkSampler
from embodichain.agents.engine.data import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.config import load_config

GYM_CONFIG = Path(__file__).parents[3] / "configs/agents/rl/push_cube/gym_config.json"


@dataclass
class Args:
    """Settings of the demo."""

    gym_config: Path = GYM_CONFIG
    """The environment: the gym_config.json of a task."""
    batches: int = 3
    """Batches to sample in each mode."""
    num_workers: int = 0
    """Processes of each DataLoader; they all sample from the same shared memory."""


def show(title: str, loader: DataLoader, batches: int) -> None:
    """Sample a few batches and print their shapes."""
    print(f"\n{title}")
    for batch in islice(loader, batches):
        line = f"  batch {list(batch.batch_size)}, action {list(batch['action'].shape)}"
        if "mask" in batch:
            line += f", chunks of {batch['mask'].sum(dim=1).tolist()} steps"
        print(line)


def item_mode(engine: OnlineDataEngine, args: Args) -> None:
    """One chunk at a time; the DataLoader makes the batches."""
    dataset = OnlineDataset(engine, chunk_size=16)
    loader = DataLoader(dataset, batch_size=8, num_workers=args.num_workers, collate_fn=OnlineDataset.collate_fn)
    show("item mode: 8 chunks of 16 steps, stacked by the DataLoader", loader, args.batches)


def batch_mode(engine: OnlineDataEngine, args: Args) -> None:
    """Whole batches, gathered at once, which is faster."""
    dataset = OnlineDataset(engine, chunk_size=16, batch_size=8)
    collate = OnlineDataset.passthrough_collate_fn
    loader = DataLoader(dataset, batch_size=None, num_workers=args.num_workers, collate_fn=collate)
    show("batch mode: 8 chunks of 16 steps, gathered by the engine", loader, args.batches)


def dynamic_chunks(engine: OnlineDataEngine, args: Args) -> None:
    """Chunks of random length: per chunk in item mode, per batch in batch mode."""
    uniform = OnlineDataset(engine, chunk_size=UniformChunkSampler(low=4, high=20))
    title = "uniform lengths in item mode: padded to the longest, with a mask"
    show(title, DataLoader(uniform, batch_size=8, num_workers=args.num_workers), args.batches)
    sampler = GMMChunkSampler(means=[4.0, 16.0], stds=[1.0, 3.0], weights=[0.6, 0.4], low=2, high=20)
    mixture = OnlineDataset(engine, chunk_size=sampler, batch_size=8)
    title = "a mixture of short and long in batch mode: one length per batch"
    show(title, DataLoader(mixture, batch_size=None, num_workers=args.num_workers), args.batches)


def main() -> None:
    """Start an engine and sample from it in every mode."""
    args = tyro.cli(Args, description=__doc__)
    torch.manual_seed(0)
    cfg = OnlineDataEngineCfg(
        buffer_size=64,
        max_episode_steps=100,
        state_dim=6,
        gym_config=load_config(args.gym_config),
        action_config={"source": "expert", "only_success": True},
    )
    with OnlineDataEngine(cfg) as engine:
        info = engine.episode_info(0)
        print(f"row 0 holds an episode of {info.length} steps by worker {info.worker}, seed {info.seed}")
        item_mode(engine, args)
        batch_mode(engine, args)
        dynamic_chunks(engine, args)
        print(f"\n{engine.stats()}")


if __name__ == "__main__":
    main()
