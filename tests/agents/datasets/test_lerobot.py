"""Recording to a LeRobotDataset v3 folder and reading it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stream_envs import stream_settings

from embodichain.agents.datasets.frames import Episode, FrameLayout, Leaf
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.errors import DatasetError

pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'data'")
pytest.importorskip("av", reason="needs the extra 'data'")

from embodichain.agents.datasets import lerobot  # noqa: E402
from embodichain.agents.datasets.lerobot import (  # noqa: E402
    LeRobotReader,
    LeRobotWriter,
    RecordedEpisodes,
    psnr,
    read_back,
    record,
)

pytestmark = pytest.mark.extra("data")

LAYOUT = FrameLayout(
    (
        Leaf(("observation", "robot", "qpos"), torch.float32, (6,)),
        Leaf(("observation", "matrix"), torch.float64, (2, 3)),
        Leaf(("observation", "image", "front"), torch.uint8, (32, 48, 3)),
        Leaf(("observation", "odd"), torch.uint8, (3, 31, 17)),
        Leaf(("action",), torch.float32, (2,)),
        Leaf(("choice",), torch.int64, ()),
        Leaf(("reward",), torch.float32, ()),
        Leaf(("terminated",), torch.bool, ()),
        Leaf(("truncated",), torch.bool, ()),
    )
)
LENGTHS = [7, 3, 12, 1]


class Frames:
    """A source of smooth pictures and random numbers."""

    layout = LAYOUT
    max_steps = 12

    def __init__(self) -> None:
        self.count = 0

    def advance(self) -> list[Episode]:
        index = self.count
        self.count += 1
        length, rng = LENGTHS[index % len(LENGTHS)], np.random.default_rng(index)
        frames: dict[Any, torch.Tensor] = {}
        for leaf in LAYOUT.leaves:
            shape = (length, *leaf.shape)
            if leaf.dtype == torch.uint8:
                waves = np.sin(np.linspace(0, 3, int(np.prod(shape))) + index).reshape(shape)
                frames[leaf.key] = torch.from_numpy((127 + 100 * waves).astype(np.uint8))
            else:
                frames[leaf.key] = torch.from_numpy(rng.normal(size=shape) * 10).to(leaf.dtype)
        frames[("terminated",)] = torch.arange(length) == length - 1
        frames[("truncated",)] = torch.zeros(length, dtype=torch.bool)
        return [Episode({key: (value,) for key, value in frames.items()}, length, seed=index, success=index % 2 == 0)]

    def close(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with LeRobotWriter(tmp_path / "set", LAYOUT, fps=20, task="push the cube", robot_type="ur5") as writer:
        list(record(Frames(), writer, 4))
    return tmp_path / "set"


def test_numbers_pictures_and_boundaries_survive(folder: Path) -> None:
    reader, source = LeRobotReader(folder), Frames()
    assert len(reader) == 4
    assert reader.layout == LAYOUT
    assert reader.max_steps == 12
    for index in (0, 1, 2, 3, 1):  # and out of order
        source.count = index
        (original,) = source.advance()
        episode = reader.read(index)
        assert (episode.length, episode.seed, episode.success) == (LENGTHS[index], index, index % 2 == 0)
        for leaf in LAYOUT.leaves:
            ours, theirs = original.frames[leaf.key][0], episode.frames[leaf.key][0]
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype
            if leaf.dtype == torch.uint8:
                assert psnr(ours, theirs) > 35
            else:
                assert torch.equal(ours, theirs)


def test_the_folder_has_the_documented_layout(folder: Path) -> None:
    info = json.loads((folder / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"], info["fps"]) == (4, sum(LENGTHS), 20)
    assert info["splits"] == {"train": "0:4"}
    features = info["features"]
    assert features["observation.state"] == {"dtype": "float32", "shape": [6], "names": None}
    assert features["observation.images.front"]["shape"] == [32, 48, 3]
    assert features["observation.images.front"]["dtype"] == "video"
    table = pq.read_table(folder / info["data_path"].format(chunk_index=0, file_index=0))
    assert set(table.column_names) == {name for name, entry in features.items() if entry["dtype"] != "video"}
    assert table["index"].to_pylist() == list(range(sum(LENGTHS)))
    assert table["episode_index"].to_pylist() == [i for i, n in enumerate(LENGTHS) for _ in range(n)]
    assert table["frame_index"].to_pylist() == [step for n in LENGTHS for step in range(n)]
    assert table["next.done"].to_pylist() == table["next.terminated"].to_pylist()
    assert np.allclose(table["timestamp"].to_pylist(), np.array(table["frame_index"].to_pylist()) / 20)
    episodes = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["dataset_from_index"] for row in episodes] == [0, 7, 10, 22]
    assert [row["dataset_to_index"] for row in episodes] == [7, 10, 22, 23]
    assert [row["videos/observation.images.front/from_timestamp"] for row in episodes] == [0, 0.35, 0.5, 1.1]
    assert pq.read_table(folder / "meta/tasks.parquet").to_pylist() == [{"task_index": 0, "task": "push the cube"}]


def test_statistics_are_those_of_the_data(folder: Path) -> None:
    stats = json.loads((folder / "meta/stats.json").read_text())
    reader = LeRobotReader(folder)
    action = torch.cat([reader.read(index).frames[("action",)][0] for index in range(4)]).double()
    assert stats["action"]["count"] == [sum(LENGTHS)]
    for name, value in (("mean", action.mean(0)), ("std", action.std(0, correction=0)), ("min", action.amin(0))):
        assert stats["action"][name] == pytest.approx(value.tolist(), rel=1e-6)
    assert np.shape(stats["observation.images.front"]["mean"]) == (3, 1, 1)
    assert 0 < stats["observation.images.front"]["mean"][0][0][0] < 1


def test_full_files_are_followed_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "_TABLE_MEGABYTES", 0)
    monkeypatch.setattr(lerobot, "_VIDEO_MEGABYTES", 0)
    with LeRobotWriter(tmp_path, LAYOUT, fps=20, task="push") as writer:
        traces = list(record(Frames(), writer, 6))
    assert len(list(tmp_path.glob("data/*/*.parquet"))) == 6
    assert len(list(tmp_path.glob("videos/observation.images.front/*/*.mp4"))) > 1
    assert [trace.length for trace in traces] == [7, 3, 12, 1, 7, 3]
    likeness = read_back(tmp_path, traces)
    assert likeness is not None
    assert likeness > 35


def test_reading_back_notices_what_changed(folder: Path) -> None:
    with LeRobotWriter(folder.parent / "other", LAYOUT, fps=20, task="push") as writer:
        traces = list(record(Frames(), writer, 4))
    read_back(folder, traces)
    traces[2].checksums[("action",)] += 1
    with pytest.raises(DatasetError, match="action of episode 2 is not what was written"):
        read_back(folder, traces)
    traces[1].length = 4
    with pytest.raises(DatasetError, match="episode 1 has 3 frames, but 4"):
        read_back(folder, traces)


def test_only_successes_are_recorded_when_asked(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path, LAYOUT, fps=20, task="push") as writer:
        list(record(Frames(), writer, 3, only_success=True))
    reader = LeRobotReader(tmp_path)
    assert [reader.read(index).seed for index in range(3)] == [0, 2, 4]


def test_a_recorded_source_gives_every_episode_once_per_round(folder: Path) -> None:
    source = RecordedEpisodes(folder, seed=0)
    rounds = [[source.advance()[0].seed for _ in range(4)] for _ in range(5)]
    assert all(sorted(seeds) == [0, 1, 2, 3] for seeds in rounds)
    assert len({tuple(seeds) for seeds in rounds}) > 1


def test_a_folder_of_somebody_else(folder: Path) -> None:
    """Without our own file, observations and actions are read and the rest is made up as documented."""
    (folder / "meta/embodichain.json").unlink()
    reader = LeRobotReader(folder)
    episode = reader.read(2)
    frames = {key: pieces[0] for key, pieces in episode.frames.items()}
    assert set(frames) == {leaf.key for leaf in reader.layout.leaves}
    assert frames[("observation", "state")].shape == (12, 6)
    assert frames[("observation", "image", "front")].shape == (12, 32, 48, 3)
    assert frames[("action",)].shape == (12, 2)
    assert frames[("terminated",)].tolist() == [False] * 11 + [True]
    assert episode.success is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: (root / "meta/info.json").unlink(), "no LeRobotDataset"),
        (lambda root: (root / "meta/info.json").write_text("{"), "cannot be read"),
        (lambda root: (root / "meta/info.json").write_text('{"codebase_version": "v2.1"}'), "version v2.1"),
    ],
)
def test_damaged_folders_are_refused(folder: Path, damage: Any, words: str) -> None:
    damage(folder)
    with pytest.raises(DatasetError, match=words):
        LeRobotReader(folder)


def test_a_folder_that_is_in_use_is_not_written_to(folder: Path) -> None:
    with pytest.raises(DatasetError, match="not an empty folder"):
        LeRobotWriter(folder, LAYOUT, fps=20, task="push")


def test_a_recorded_folder_feeds_an_engine(folder: Path) -> None:
    settings = stream_settings(
        buffer_size=8, gym_config={}, action_config={"source": "dataset", "path": str(folder)}, refill_threshold=1
    )
    original = {seed: LeRobotReader(folder).read(seed).frames[("action",)][0] for seed in range(4)}
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        batch = engine.sample_batch(32, 3)
        assert batch["observation", "image", "front"].shape == (32, 3, 32, 48, 3)
        for row in range(8):
            info = engine.episode_info(row)
            frames = engine.shared_buffer["action"][row, : info.length]
            if engine.episode_info(row) == info:
                assert torch.equal(frames, original[info.seed])
