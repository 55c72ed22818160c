"""The snippets of the guide and of the API reference, run as they are printed, on the configs that are shipped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from embodichain.agents.datasets import GMMChunkSampler, OnlineDataset, UniformChunkSampler
from embodichain.agents.engine import OnlineDataEngine
from embodichain.config import load_config
from embodichain.errors import ChunkSizeError

CONFIGS = Path(__file__).parents[3] / "configs/agents"

MINIMAL_SETUP = """
from embodichain.agents.engine.data import OnlineDataEngine, OnlineDataEngineCfg

cfg = OnlineDataEngineCfg(
    buffer_size=2,        # number of trajectories kept in the ring buffer
    state_dim=6,          # example state dimension
    gym_config=your_gym_cfg,  # parsed JSON config for the task
)
engine = OnlineDataEngine(cfg)
engine.start()
"""

WAIT = """
import time
while not engine.is_init:
    time.sleep(0.5)
"""

SHUTDOWN = """
engine.stop()
"""

GUIDE_ITEM_MODE = """
from torch.utils.data import DataLoader
from embodichain.agents.datasets import OnlineDataset

dataset = OnlineDataset(engine, chunk_size=64)
loader = DataLoader(
    dataset,
    batch_size=32,
    collate_fn=OnlineDataset.collate_fn,
)

for batch in loader:
    # batch shape: [32, 64, ...]
    train_step(batch)
"""

GUIDE_BATCH_MODE = """
dataset = OnlineDataset(engine, chunk_size=64, batch_size=32)
loader = DataLoader(
    dataset,
    batch_size=None,
    collate_fn=OnlineDataset.passthrough_collate_fn,
)

for batch in loader:
    # batch shape: [32, 64, ...]
    train_step(batch)
"""

GUIDE_DYNAMIC = """
from embodichain.agents.datasets.sampler import UniformChunkSampler

sampler = UniformChunkSampler(low=16, high=64)
dataset = OnlineDataset(engine, chunk_size=sampler)
"""

GUIDE_MIXTURE = """
from embodichain.agents.datasets.sampler import GMMChunkSampler

sampler = GMMChunkSampler(
    means=[16.0, 64.0],
    stds=[4.0, 8.0],
    weights=[0.6, 0.4],
    low=8,
    high=96,
)
"""

API_ITEM_MODE = """
dataset = OnlineDataset(engine, chunk_size=64)
loader  = DataLoader(dataset, batch_size=32, num_workers=4,
                     collate_fn=OnlineDataset.collate_fn)
for batch in loader:
    # batch has shape [32, 64, ...]
    train_step(batch)
"""

API_BATCH_MODE = """
dataset = OnlineDataset(engine, chunk_size=64, batch_size=32)
loader  = DataLoader(dataset, batch_size=None,
                     collate_fn=OnlineDataset.passthrough_collate_fn)
for batch in loader:
    # batch has shape [32, 64, ...]
    train_step(batch)
"""

API_UNIFORM = """
sampler = UniformChunkSampler(low=16, high=64)
dataset = OnlineDataset(engine, chunk_size=sampler)
loader  = DataLoader(dataset, batch_size=32)
for batch in loader:
    # chunk dimension varies each batch
    train_step(batch)
"""

API_MIXTURE = """
sampler = GMMChunkSampler(
    means=[16.0, 64.0], stds=[4.0, 8.0], weights=[0.6, 0.4],
    low=8, high=96,
)
dataset = OnlineDataset(engine, chunk_size=sampler, batch_size=32)
loader  = DataLoader(dataset, batch_size=None)
for batch in loader:
    train_step(batch)
"""


class SeenEnoughError(Exception):
    """Raised by ``train_step`` to leave a loop that has no end."""


class Session:
    """A user who types one snippet after the other; ``train_step`` keeps the shapes it saw."""

    def __init__(self, steps: int = 3) -> None:
        self.names: dict[str, Any] = {"train_step": self._train_step}
        self.steps = steps
        self.shapes: list[tuple[int, ...]] = []

    def _train_step(self, batch: TensorDict) -> None:
        assert isinstance(batch, TensorDict)
        assert batch["observation", "robot", "qpos"].shape == (*batch.batch_size, self.names["cfg"].state_dim)
        assert torch.isfinite(batch["action"]).all()
        self.shapes.append(tuple(batch.batch_size))
        if len(self.shapes) == self.steps:
            raise SeenEnoughError

    def type(self, snippet: str) -> None:
        exec(compile(snippet, "<documentation>", "exec"), self.names)

    def shapes_of(self, snippet: str) -> list[tuple[int, ...]]:
        self.shapes = []
        with pytest.raises(SeenEnoughError):
            self.type(snippet)
        return self.shapes


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    session = Session()
    session.names["your_gym_cfg"] = load_config(CONFIGS / "rl/push_cube/gym_config.json")
    session.type(MINIMAL_SETUP)
    session.type(WAIT)
    yield session
    pids = session.names["engine"].worker_pids
    session.type(SHUTDOWN)
    session.type(SHUTDOWN)  # safe to call multiple times
    assert len(pids) == 1
    assert subprocess.run(["ps", "-p", str(pids[0])], capture_output=True).returncode != 0


def test_minimal_setup(session: Session) -> None:
    engine: OnlineDataEngine = session.names["engine"]
    assert engine.is_init
    assert engine.buffer_size == 2
    assert engine.shared_buffer.batch_size == torch.Size([2, 100])  # as long as its episodes
    assert [engine.episode_info(row).length for row in range(2)] == [100, 100]  # success does not end them


@pytest.mark.parametrize("snippet", [GUIDE_ITEM_MODE, GUIDE_BATCH_MODE, API_ITEM_MODE, API_BATCH_MODE])
def test_fixed_chunk_sizes(session: Session, snippet: str) -> None:
    session.type("from torch.utils.data import DataLoader\nfrom embodichain.agents.datasets import *")
    assert session.shapes_of(snippet) == [(32, 64)] * 3


def test_dynamic_chunk_sizes(session: Session) -> None:
    session.type("from torch.utils.data import DataLoader\nfrom embodichain.agents.datasets import *")
    session.type(GUIDE_DYNAMIC)
    assert {len(chunk) for chunk, _ in zip(session.names["dataset"], range(200), strict=False)} <= set(range(16, 65))
    session.type(GUIDE_MIXTURE)
    assert 8 <= session.names["sampler"]() <= 96
    torch.manual_seed(0)
    for snippet, low, high in ((API_UNIFORM, 16, 64), (API_MIXTURE, 8, 96)):
        shapes = session.shapes_of(snippet)
        assert all(batch == 32 and low <= size <= high for batch, size in shapes)
    assert len({size for _, size in shapes}) > 1  # one size per batch, and not always the same


def test_a_sampler_of_chunks_that_are_too_long_is_refused_at_the_start(session: Session) -> None:
    samplers = {
        UniformChunkSampler(low=16, high=101): 101,
        GMMChunkSampler(means=[16.0, 64.0], stds=[4.0, 8.0], high=200): 200,
        GMMChunkSampler(means=[16.0, 64.0], stds=[4.0, 8.0]): 64 + 7 * 8,  # once in 10^12 draws it is more than that
    }
    for sampler, longest in samplers.items():
        for batch_size in (None, 4):
            dataset = OnlineDataset(session.names["engine"], chunk_size=sampler, batch_size=batch_size)
            with pytest.raises(ChunkSizeError, match=rf"{type(sampler).__name__}.*{longest} steps.*\b100\b"):
                next(iter(dataset))
        with pytest.raises(ChunkSizeError, match=rf"{longest} steps"):
            next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    within = [UniformChunkSampler(low=16, high=100), GMMChunkSampler(means=[16.0, 44.0], stds=[4.0, 8.0])]
    for sampler in within:  # up to 100 steps
        next(iter(OnlineDataset(session.names["engine"], chunk_size=sampler)))


def test_too_long_a_chunk_is_the_documented_error(session: Session) -> None:
    with pytest.raises(ValueError, match="max_episode_steps"):
        session.names["engine"].sample_batch(2, 301)


def test_the_config_has_the_documented_methods(session: Session) -> None:
    cfg = session.names["cfg"]
    changed = cfg.replace(buffer_size=4)
    assert (changed.buffer_size, cfg.buffer_size, cfg.copy(state_dim=7).state_dim) == (4, 2, 7)
    assert cfg.validate() == []
    assert type(cfg).from_dict(cfg.to_dict()).to_dict() == cfg.to_dict()
