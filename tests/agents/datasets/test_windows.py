"""Chunks as imitation needs them: padded at an episode's end, past observations, delta timestamps; slips in loaders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stream_envs import gym_config, stream_settings
from tensordict import TensorDict
from torch.utils.data import DataLoader

from embodichain.agents.datasets import OnlineDataset, UniformChunkSampler
from embodichain.agents.datasets.frames import Episode, FrameLayout, Leaf
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.offsets import Offsets, OffsetSampler
from embodichain.agents.engine.sampling import WindowSampler
from embodichain.agents.engine.shared_buffer import SharedBuffer
from embodichain.envs.vec_env import SEGMENTS
from embodichain.errors import ChunkSizeError, ConfigError


@pytest.fixture(scope="module")
def engine() -> Iterator[OnlineDataEngine]:
    """Episodes of 5 to 20 steps; ``state`` is (stamp of the episode, step, length)."""
    settings = stream_settings(refill_threshold=100_000, gym_config=gym_config(pixels=4))
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        yield engine


def take(loader: Any, count: int = 4) -> list[TensorDict]:
    return list(itertools.islice(loader, count))


def check_frames(state: torch.Tensor, padded: torch.Tensor, steps: list[int], now: torch.Tensor) -> None:
    """Every frame is the one at its offset from the drawn one (at step ``now``), or the episode's first or last."""
    stamp, at, length = state.unbind(-1)
    assert (stamp == stamp[:, :1]).all()
    wanted = now[:, None] + torch.tensor(steps, dtype=at.dtype)
    assert torch.equal(at, wanted.clamp_min(0).minimum(length - 1))
    assert torch.equal(padded, (wanted < 0) | (wanted >= length))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_padded_chunk_may_begin_anywhere(engine: OnlineDataEngine, workers: int) -> None:
    """Chunks of 50 out of episodes of 20 steps at most, as ACT and pi0 take them."""
    dataset = OnlineDataset(engine, chunk_size=50, batch_size=64, pad=True)
    starts: set[tuple[float, float]] = set()
    for batch in take(DataLoader(dataset, batch_size=None, num_workers=workers)):
        assert batch.batch_size == torch.Size([64, 50])
        state = batch["observation", "state"]
        assert batch["observation", "image"].shape == (64, 50, 4, 4, 3)
        check_frames(state, batch["action_is_pad"], list(range(50)), state[:, 0, 1])
        starts |= {(row[2].item(), row[1].item()) for row in state[:, 0]}
    assert any(length - 1 == step for length, step in starts)  # the last frame can be the first of a chunk
    assert any(step == 0 for _, step in starts)


def test_past_observations_come_with_the_actions(engine: OnlineDataEngine) -> None:
    for pad in (True, False):
        batch = next(iter(OnlineDataset(engine, chunk_size=4, batch_size=256, pad=pad, obs_horizon=3)))
        assert batch.batch_size == torch.Size([256])
        assert batch["observation", "state"].shape == (256, 3, 3)
        assert batch["action"].shape == (256, 4, 2)
        state = batch["observation", "state"]
        now = state[:, -1, 1]
        check_frames(state, batch["observation_is_pad"], [-2, -1, 0], now)
        assert batch["observation_is_pad"].any()
        assert torch.equal(batch["reward"], state[:, -1:, 0].expand(256, 4))  # which is the stamp
        assert ("action_is_pad" in batch.keys()) is pad  # noqa: SIM118 - it iterates over rows
        if not pad:
            assert (now + 4 <= state[:, -1, 2]).all()


def test_delta_timestamps_are_those_of_lerobot(engine: OnlineDataEngine) -> None:
    deltas = {"observation.state": [-0.2, 0.0, 0.1], "action": [0.0, 0.1]}
    dataset = OnlineDataset(engine, batch_size=128, delta_timestamps=deltas, fps=10)
    batch = next(iter(dataset))
    state = batch["observation", "state"]
    check_frames(state, batch["observation.state_is_pad"], [-2, 0, 1], state[:, 1, 1])
    assert batch["observation", "image"].shape == (128, 4, 4, 3)  # no delta, no axis
    assert batch["reward"].shape == (128,)
    assert batch["action_is_pad"].shape == batch["action"].shape[:2] == (128, 2)
    items = DataLoader(OnlineDataset(engine, delta_timestamps=deltas, fps=10), batch_size=8)
    assert next(iter(items))["observation", "state"].shape == (8, 3, 3)


@pytest.mark.parametrize(
    ("deltas", "fps", "message"),
    [
        ({"action": [0.0, 0.03]}, 10, r"action: expected multiples of 0\.1 s.*0\.03 s"),
        ({"actions": [0.0]}, 10, r"unknown key 'actions'.*action"),
        ({"action": []}, 10, "action: expected multiples"),
        ({"action": [0.0]}, None, "give fps="),
        ({"action": [0.0]}, 0, "fps: expected a number above 0, got 0"),
        ({"action": [float("nan")]}, 10, r"action: expected a list of seconds.*\[nan\]"),
        ({"action": 0.0}, 10, r"action: expected a list of seconds"),
    ],
)
def test_wrong_timestamps_are_refused(engine: OnlineDataEngine, deltas: dict, fps: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(iter(OnlineDataset(engine, batch_size=2, delta_timestamps=deltas, fps=fps)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk_size": 2, "delta_timestamps": {"action": [0.0]}},
        {"delta_timestamps": {"action": [0.0]}, "pad": True},
        {"chunk_size": 2, "obs_horizon": 0},
        {"chunk_size": UniformChunkSampler(2, 5), "obs_horizon": 2},
    ],
)
def test_settings_that_contradict_each_other_are_refused(engine: OnlineDataEngine, settings: dict) -> None:
    with pytest.raises(ChunkSizeError):
        OnlineDataset(engine, **settings)


def test_padded_chunks_of_mixed_sizes_say_what_is_padding(engine: OnlineDataEngine) -> None:
    torch.manual_seed(0)
    batch = next(iter(DataLoader(OnlineDataset(engine, UniformChunkSampler(2, 30), pad=True), batch_size=32)))
    assert batch["action_is_pad"][~batch["mask"]].all()
    assert not batch["mask"].all()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("transform", [None, TensorDict.to_dict])
def test_forgetting_batch_size_none_is_noticed(engine: OnlineDataEngine, workers: int, transform: Any) -> None:
    dataset = OnlineDataset(engine, chunk_size=4, batch_size=32, transform=transform)
    with pytest.raises(ChunkSizeError, match=r"DataLoader\(dataset, batch_size=None\)"):
        next(iter(DataLoader(dataset, num_workers=workers)))
    own = next(iter(DataLoader(dataset, batch_size=1, num_workers=workers, collate_fn=lambda batches: batches[0])))
    assert own["action"].shape == (32, 4, 2)  # who puts batches together himself knows why


@pytest.mark.parametrize("first", [True, False], ids=["before the copy", "after the copy"])
def test_no_frame_is_torn_by_rows_that_are_overwritten(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """All rows are written again while a batch is copied, by longer and shorter episodes."""
    layout = FrameLayout((Leaf(("observation", "state"), torch.float32, (3,)), Leaf(("action",), torch.float32, (8,))))
    buffer, stamps, rng = SharedBuffer(layout, 4, 16, 1), itertools.count(), np.random.default_rng(0)

    def write_all() -> None:
        for row in range(4):
            stamp, length = float(next(stamps)), int(rng.integers(3, 17))
            step = torch.arange(length, dtype=torch.float32)
            state = torch.stack((torch.full_like(step, stamp), step, torch.full_like(step, length)), -1)
            frames = {("observation", "state"): (state,), ("action",): (torch.full((length, 8), stamp),)}
            buffer.write(row, 0, Episode(frames, length))

    write_all()
    sampler = OffsetSampler(WindowSampler(buffer), Offsets.of_chunk(8, pad=True, obs_horizon=2))
    copy, copies = sampler._copy, itertools.count()

    def disturbed(*args: Any) -> Any:
        disturbs = next(copies) % 2 == 0
        if disturbs and first:
            write_all()
        copied = copy(*args)
        if disturbs and not first:
            write_all()
        return copied

    monkeypatch.setattr(sampler, "_copy", disturbed)
    for seed in range(20):
        batch, drawn, redrawn = sampler.draw(np.random.default_rng(seed), 32)
        assert redrawn == 32
        state = batch["observation", "state"]
        check_frames(state, batch["observation_is_pad"], [-1, 0], state[:, -1, 1])
        assert torch.equal(state[:, -1, 1], torch.from_numpy(drawn % 16).float())
        written = batch["action"].flatten(1)
        assert torch.equal(written, state[:, :1, 0].expand_as(written))


def test_the_rate_of_a_task_is_known_where_the_stream_is_sampled() -> None:
    task = {"id": "ReachRL", "num_envs": 2, "max_episode_steps": 10, "num_threads": 1}
    with OnlineDataEngine(OnlineDataEngineCfg(buffer_size=2, gym_config=task, progress=False)) as engine:
        assert engine.fps == 50.0
        batch = next(iter(OnlineDataset(engine, batch_size=4, delta_timestamps={"action": [0.0, 0.02, 0.04]})))
        assert batch["action"].shape[:2] == (4, 3)


def test_experts_mark_segments_and_datasets_weigh_them() -> None:
    """Of a cube that is stacked: segments come in their order, say what happens, and are drawn by their weights."""
    task = {"id": "StackCubeRL", "num_envs": 4, "num_threads": 1}
    action = {"source": "expert", "segments": True, "terminate_on_success": True}
    cfg = OnlineDataEngineCfg(buffer_size=4, gym_config=task, action_config=action, progress=False)
    with OnlineDataEngine(cfg) as engine:
        rows = [engine.shared_buffer[row, : engine.episode_info(row).length] for row in range(4)]
        shares = []
        for row in rows:
            names = [SEGMENTS[number] for number in row["segment"].tolist()]
            order = [name for name, _ in itertools.groupby(names)]
            assert order[:4] == ["reach", "grasp", "move", "place"], order
            held = row["observation", "task", "held"].flatten() > 0
            assert not held[[name in ("reach", "grasp") for name in names]].any()
            assert held[[name == "move" for name in names]].float().mean() > 0.9
            weights = torch.tensor([{"grasp": 8.0, "reach": 0.0}.get(name, 1.0) for name in names])
            shares.append(float(weights[[name == "grasp" for name in names]].sum() / weights.sum()))
        batch = next(iter(OnlineDataset(engine, 1, 8000, segment_weights={"grasp": 8.0, "reach": 0.0})))
        drawn = batch["segment"].flatten()
        assert not (drawn == SEGMENTS.index("reach")).any()
        grasped = (drawn == SEGMENTS.index("grasp")).float().mean().item()
        assert grasped == pytest.approx(float(np.mean(shares)), abs=0.03)
        with pytest.raises(ConfigError, match=r"unknown name 'grap'.*grasp"):
            next(iter(OnlineDataset(engine, 1, 8, segment_weights={"grap": 8.0})))


def test_weights_need_a_stream_that_stores_segments(engine: OnlineDataEngine) -> None:
    with pytest.raises(ConfigError, match='"segments": true'):
        next(iter(OnlineDataset(engine, 1, 8, segment_weights={"grasp": 8.0})))
    with pytest.raises(ConfigError, match="only experts mark them"):
        OnlineDataEngineCfg(gym_config={"id": "ReachRL"}, action_config={"source": "random", "segments": True}).check()
