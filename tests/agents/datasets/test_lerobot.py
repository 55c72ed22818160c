"""Recording to a LeRobotDataset v3 folder and reading it back."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stream_envs import stream_settings

from embodichain.agents.datasets.frames import INSTRUCTION, Episode, FrameLayout, Leaf
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.sources import open_source
from embodichain.errors import DatasetError

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra 'data'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'data'")
pytest.importorskip("pyarrow.compute", reason="needs the extra 'data'")
pytest.importorskip("av", reason="needs the extra 'data'")

from embodichain.agents.datasets.lerobot import (  # noqa: E402
    LeRobotReader,
    LeRobotWriter,
    RecordedEpisodes,
    psnr,
    read_back,
    record,
    roundtrip,
)
from embodichain.agents.datasets.lerobot import statistics as lerobot_statistics  # noqa: E402
from embodichain.agents.datasets.lerobot import writer as lerobot_writer  # noqa: E402
from embodichain.agents.datasets.lerobot.statistics import FeatureStatistics  # noqa: E402

pytestmark = pytest.mark.extra("data")

LAYOUT = FrameLayout(
    (
        Leaf(("observation", "robot", "qpos"), torch.float32, (6,)),
        Leaf(("observation", "matrix"), torch.float64, (2, 3)),
        Leaf(("observation", "held"), torch.float32, (1,)),
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
    step_seconds = None

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
    joints = [f"qpos_{i}" for i in range(6)]
    assert features["observation.state"] == {"dtype": "float32", "shape": [6], "names": joints}
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


QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
STATISTICS = ["count", "max", "mean", "min", *QUANTILES, "std"]


def expected_statistics(values: np.ndarray) -> dict[str, Any]:
    """As LeRobot defines them: element by element of the last axis; a quantile is one of the numbers."""
    count, rows = len(values), np.asarray(values, np.float64).reshape(len(values), -1)
    rows = rows.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
    ordered = np.sort(rows, axis=0)
    entry = {"min": ordered[0], "max": ordered[-1], "mean": rows.mean(0), "std": rows.std(0), "count": [count]}
    return entry | {name: ordered[int(np.ceil(q * len(rows))) - 1] for name, q in QUANTILES.items()}


def test_statistics_are_those_of_the_data(folder: Path) -> None:
    """Every feature has them, those that only count frames included; those of an episode are columns of its row."""
    info, stats = (json.loads((folder / f"meta/{name}.json").read_text()) for name in ("info", "stats"))
    episodes = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet")
    table = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    assert set(stats) == set(info["features"])
    assert {"index", "episode_index", "frame_index", "timestamp", "task_index", "next.done"} <= set(stats)
    columns = {name for name in episodes.column_names if name.startswith("stats/")}
    assert columns == {f"stats/{name}/{statistic}" for name in info["features"] for statistic in STATISTICS}
    starts = np.cumsum([0, *LENGTHS])
    for name, entry in info["features"].items():
        for statistic in STATISTICS:
            kind = episodes.schema.field(f"stats/{name}/{statistic}").type
            inner = "list<element: list<element: list<element: double>>>"
            plain = "list<element: int64>" if statistic == "count" else "list<element: double>"
            assert str(kind) == (inner if entry["dtype"] == "video" and statistic != "count" else plain)
        if entry["dtype"] == "video":
            continue
        values = np.array(table[name].to_pylist())
        parts = [values[start:end] for start, end in pairwise(starts)]
        for part, found in [(values, stats[name])] + [
            (part, {each: episodes[f"stats/{name}/{each}"][i].as_py() for each in STATISTICS})
            for i, part in enumerate(parts)
        ]:
            expected = expected_statistics(part)
            assert sorted(found) == sorted(expected)
            for statistic, value in expected.items():
                assert found[statistic] == pytest.approx(list(value), rel=1e-9, abs=1e-9), (name, statistic)


def test_statistics_of_cameras_are_per_channel(folder: Path) -> None:
    stats = json.loads((folder / "meta/stats.json").read_text())["observation.images.front"]
    episodes, source = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist(), Frames()
    images = [source.advance()[0].frames[("observation", "image", "front")][0].numpy() for _ in LENGTHS]
    for found, values in [(stats, np.concatenate(images))] + [
        ({name: row[f"stats/observation.images.front/{name}"] for name in STATISTICS}, image)
        for row, image in zip(episodes, images, strict=True)
    ]:
        expected = expected_statistics(values.reshape(-1, 3) / 255)
        assert found["count"] == [len(values)]
        for name in set(STATISTICS) - {"count"}:
            assert np.shape(found[name]) == (3, 1, 1)
            assert np.ravel(found[name]) == pytest.approx(expected[name], rel=1e-9)


def test_a_standard_deviation_survives_a_large_mean() -> None:
    statistics, rng = FeatureStatistics(is_camera=False), np.random.default_rng(0)
    parts = [1e9 + rng.normal(size=(n, 2)) * 1e-3 for n in (50, 7, 300)]
    for part in parts:
        statistics.add(part)
    assert statistics.result()["std"] == pytest.approx((np.concatenate(parts) - 1e9).std(0), rel=1e-3)


def test_quantiles_of_many_numbers_are_those_of_an_even_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_statistics, "_KEPT_NUMBERS", 1000)
    statistics = FeatureStatistics(is_camera=False)
    values = np.arange(20_000.0)
    for part in np.split(values, [1, 800, 801, 5000, 13_333]):
        statistics.add(part)
    result = statistics.result()
    assert [result[name][0] for name in QUANTILES] == pytest.approx([q * 20_000 for q in QUANTILES.values()], abs=100)
    assert len(np.concatenate(statistics._kept)) >= 500
    assert len(np.unique(np.diff(np.concatenate(statistics._kept), axis=0))) == 1


def test_one_number_is_a_scalar_as_in_lerobot(folder: Path) -> None:
    """LeRobot reads a feature of shape [1] as a number, and a list of one number breaks it."""
    info = json.loads((folder / "meta/info.json").read_text())
    table = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    assert info["features"]["observation.held"]["shape"] == [1]
    assert str(table.schema.field("observation.held").type) == "float"
    assert LeRobotReader(folder).read(0).frames[("observation", "held")][0].shape == (7, 1)


def append_like_lerobot(folder: Path, length: int) -> None:
    """Append the last frames again, in files of their own, with as many columns as there are."""
    data, episodes = (folder / f"{name}/chunk-000/file-000.parquet" for name in ("data", "meta/episodes"))
    info = json.loads((folder / "meta/info.json").read_text())
    count, frames = info["total_episodes"], info["total_frames"]
    table = pq.read_table(data).slice(frames - length)
    replaced = {
        "episode_index": [count] * length,
        "index": range(frames, frames + length),
        "frame_index": range(length),
    }
    for name, values in replaced.items():
        column = pyarrow.array(list(values), table.schema.field(name).type)
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, data.with_name("file-001.parquet"))
    rows = pq.read_table(episodes)
    row = rows.slice(rows.num_rows - 1).to_pylist()[0]
    row |= {"episode_index": count, "length": length, "data/file_index": 1, "meta/episodes/file_index": 1}
    row |= {"dataset_from_index": frames, "dataset_to_index": frames + length}
    for camera in ("front", "odd"):
        end = row[f"videos/observation.images.{camera}/to_timestamp"]
        row[f"videos/observation.images.{camera}/from_timestamp"] = end - length / info["fps"]
    pq.write_table(pyarrow.Table.from_pylist([row], rows.schema), episodes.with_name("file-001.parquet"))
    info |= {"total_episodes": count + 1, "total_frames": frames + length}
    (folder / "meta/info.json").write_text(json.dumps(info, indent=4))


def test_what_others_append_is_read(folder: Path) -> None:
    before = LeRobotReader(folder).read(2).frames
    append_like_lerobot(folder, 5)
    reader = LeRobotReader(folder)
    assert len(reader) == 5
    last = reader.read(4)
    assert (last.length, last.seed, last.success, last.policy_version) == (5, -1, None, -1)
    assert torch.equal(last.frames[("action",)][0][:4], before[("action",)][0][-4:])
    image = ("observation", "image", "front")
    assert torch.equal(last.frames[image][0][:4], before[image][0][-4:])
    assert torch.equal(reader.read(2).frames[("action",)][0], before[("action",)][0])


def test_a_folder_of_the_first_version_is_read(folder: Path) -> None:
    own = json.loads((folder / "meta/embodichain.json").read_text())
    (folder / "meta/embodichain.json").write_text(json.dumps({name: own[name] for name in ("layout", "episodes")}))
    assert LeRobotReader(folder).read(1).seed == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([("observation", "image", "front"), ("observation", "front")], "observation/front cannot be called"),
        ([("observation", "a", "b"), ("observation", "a.b")], "observation/a.b cannot be called"),
        ([("index",)], "index cannot be called 'index', which is the name of the format"),
        ([("observation", "../up")], "slash"),
    ],
)
def test_names_that_a_folder_cannot_have_are_refused(tmp_path: Path, keys: list[Any], words: str) -> None:
    shape = (16, 16, 3) if "front" in keys[0] else (2,)
    leaves = [Leaf(key, torch.uint8, shape) for key in keys]
    with pytest.raises(DatasetError, match=words):
        LeRobotWriter(tmp_path / "set", FrameLayout((*leaves, *LAYOUT.leaves[-4:])), fps=20, task="push")


def test_state_and_joints_have_names_of_their_own(tmp_path: Path) -> None:
    leaves = [
        Leaf(("observation", "robot", "qpos"), torch.float32, (2,)),
        Leaf(("observation", "state"), torch.float32, (2,)),
    ]
    layout = FrameLayout((*leaves, *LAYOUT.leaves[-3:]))
    with LeRobotWriter(tmp_path / "set", layout, fps=20, task="push") as writer:
        frames = {leaf.key: (torch.full((3, *leaf.shape), i).to(leaf.dtype),) for i, leaf in enumerate(layout.leaves)}
        writer.add(Episode(frames, 3))
    read = LeRobotReader(tmp_path / "set").read(0).frames
    assert all(torch.equal(read[key][0], value[0]) for key, value in frames.items())


def test_full_files_are_followed_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_writer, "_TABLE_MEGABYTES", 0)
    monkeypatch.setattr(lerobot_writer, "_VIDEO_MEGABYTES", 0)
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


def test_a_recording_of_successes_gives_up_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roundtrip, "MOST_FAILURES", 5)

    class Fails(Frames):
        def advance(self) -> list[Episode]:
            return [replace(episode, success=self.count == 3) for episode in super().advance()]

    told = pytest.raises(DatasetError, match="1 of 2 episodes are recorded, and then 5 failed one after the other")
    with LeRobotWriter(tmp_path, LAYOUT, fps=20, task="push") as writer, told:
        list(record(Fails(), writer, 2, only_success=True))


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


@pytest.mark.parametrize("unknown", [None, "next.terminated", "next.truncated"])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_ends_of_somebody_else_are_read(tmp_path: Path, end: str, unknown: str | None) -> None:
    (episode,) = Frames().advance()
    for name in ("terminated", "truncated"):
        episode.frames[(name,)] = (torch.arange(7) == (6 if name == end else 7),)
    with LeRobotWriter(tmp_path / "set", LAYOUT, fps=20, task="push") as writer:
        writer.add(episode)
    (tmp_path / "set/meta/embodichain.json").unlink()
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    info["features"].pop(unknown, None)
    (tmp_path / "set/meta/info.json").write_text(json.dumps(info))
    read = LeRobotReader(tmp_path / "set").read(0)
    for name in ("terminated", "truncated"):
        assert torch.equal(read.frames[(name,)][0], episode.frames[(name,)][0])


@pytest.mark.parametrize("killed_at", range(3))
def test_a_writer_that_is_killed_leaves_no_dataset_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """The description by which others know a dataset comes last, so half a folder is none."""
    written: list[str] = []
    real = Path.write_text

    def kill(path: Path, text: str, **options: Any) -> int:
        if len(written) == killed_at:
            real(path, text[: len(text) // 2], **options)
            raise KeyboardInterrupt
        written.append(path.name)
        return real(path, text, **options)

    writer = LeRobotWriter(tmp_path / "set", LAYOUT, fps=20, task="push")
    writer.add(Frames().advance()[0])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", kill)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    with pytest.raises(DatasetError, match="no LeRobotDataset"):
        LeRobotReader(tmp_path / "set")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: (root / "meta/info.json").unlink(), "no LeRobotDataset"),
        (lambda root: (root / "meta/info.json").write_text("{"), "cannot be read"),
        (lambda root: (root / "meta/info.json").write_text('{"codebase_version": "v1.6"}'), "version v1.6"),
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


def test_each_instruction_is_a_task(tmp_path: Path) -> None:
    cfg = OnlineDataEngineCfg(gym_config={"id": "PushCubeLanguageRL", "num_envs": 2, "max_episode_steps": 3}, seed=3)
    root = tmp_path / "set"
    with closing(open_source(cfg)) as source, LeRobotWriter(root, source.layout, 50, "none") as writer:
        list(record(source, writer, 6))
    reader = LeRobotReader(root)
    said = [bytes(torch.cat(reader.read(i).frames[INSTRUCTION])[0].tolist()).rstrip(b"\0").decode() for i in range(6)]
    assert len(set(said)) > 1
    assert "none" not in said
    assert [reader.read(i).task for i in range(6)] == said
    rows = pq.read_table(root / "meta/tasks.parquet").to_pylist()
    words = {row["task_index"]: row["task"] for row in rows}
    assert sorted(words) == list(range(len(set(said))))
    data = pq.read_table(root / "data/chunk-000/file-000.parquet").to_pydict()
    assert [words[task] for task in data["task_index"]] == [said[episode] for episode in data["episode_index"]]
    episodes = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    assert episodes["tasks"] == [[text] for text in said]
    assert json.loads((root / "meta/info.json").read_text())["total_tasks"] == len(set(said))


def as_version_2(folder: Path) -> Path:
    """Rewrite a recording the way LeRobot 0.3 and before did, from their description of the format."""
    old = folder.with_name("old")
    info = json.loads((folder / "meta/info.json").read_text())
    info |= {"codebase_version": "v2.1", "chunks_size": 3}
    table = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    (old / "meta").mkdir(parents=True)
    (old / "meta/info.json").write_text(json.dumps(info))
    (old / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "push the cube"}) + "\n")
    reader, lines = LeRobotReader(folder), []
    for index, length in enumerate(LENGTHS):
        chunk = f"chunk-{index // 3:03d}"
        rows = table.filter(pyarrow.compute.equal(table["episode_index"], index))
        (old / "data" / chunk).mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, old / "data" / chunk / f"episode_{index:06d}.parquet")
        for feature in (f for f in lerobot_writer.features_of(LAYOUT) if f.is_camera):
            path = old / "videos" / chunk / feature.name / f"episode_{index:06d}.mp4"
            path.parent.mkdir(parents=True, exist_ok=True)
            video = lerobot_writer.VideoFile(path, feature, 20, 12)
            images = torch.cat(reader.read(index).frames[feature.leaf.key]).numpy()
            video.append(np.moveaxis(images, 1, -1) if feature.channels_first else images)
            video.close()
        lines.append(json.dumps({"episode_index": index, "tasks": ["push the cube"], "length": length}))
    (old / "meta/episodes.jsonl").write_text("\n".join(lines) + "\n")
    return old


def test_version_2_is_read(folder: Path) -> None:
    new, old = LeRobotReader(folder), LeRobotReader(as_version_2(folder))
    assert len(old) == len(new)
    assert old.tasks == {0: "push the cube"}
    for index in range(len(new)):
        one, other = new.read(index), old.read(index)
        assert (other.length, other.task) == (one.length, "push the cube")
        said = torch.cat(other.frames[INSTRUCTION])
        assert said.shape == (one.length, 48)
        assert bytes(said[-1].tolist()) == b"push the cube".ljust(48, b"\0")
        for key in (("observation", "matrix"), ("action",), ("reward",)):
            assert torch.equal(torch.cat(one.frames[key]), torch.cat(other.frames[key]))
        images = [torch.cat(episode.frames[("observation", "image", "front")]) for episode in (one, other)]
        assert psnr(*images) > 30


def test_a_damaged_folder_of_version_2_is_named(folder: Path) -> None:
    old = as_version_2(folder)
    (old / "meta/episodes.jsonl").write_text('{"episode_index": 0, "length": "7"}\n')
    with pytest.raises(DatasetError, match=r"episodes.jsonl: length: .* got '7'"):
        LeRobotReader(old)
