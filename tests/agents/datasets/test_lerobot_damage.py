"""Folders are data from elsewhere: damaged or hostile ones give a DatasetError, or the numbers that were recorded."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stream_envs import stream_settings

from embodichain.agents.datasets.frames import INSTRUCTION, Episode, FrameLayout, Leaf
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.errors import DatasetError

pa = pytest.importorskip("pyarrow", reason="needs the extra 'data'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'data'")
pytest.importorskip("av", reason="needs the extra 'data'")

from embodichain.agents.datasets.lerobot import LeRobotReader, LeRobotWriter  # noqa: E402

pytestmark = pytest.mark.extra("data")

LAYOUT = FrameLayout(
    (
        Leaf(("observation", "state"), torch.float32, (6,)),
        Leaf(("observation", "matrix"), torch.float64, (2, 3)),
        Leaf(("observation", "other"), torch.float32, (6,)),
        Leaf(("observation", "image", "front"), torch.uint8, (16, 16, 3)),
        Leaf(("action",), torch.float32, (2,)),
        Leaf(("reward",), torch.float32, ()),
        Leaf(("terminated",), torch.bool, ()),
        Leaf(("truncated",), torch.bool, ()),
    )
)
LENGTHS = (5, 3, 8)
Frames = list[dict[tuple[str, ...], torch.Tensor]]
ODD = (None, -1, 0, 1, 7, 1e308, float("nan"), float("inf"), 2**70, True, "x", "", "../../outside", [], {}, [[1]], [-3])


def written(root: Path) -> Path:
    """Record three short episodes to a new folder."""
    with LeRobotWriter(root, LAYOUT, fps=20, task="push") as writer:
        for index, length in enumerate(LENGTHS):
            rng = np.random.default_rng(index)
            frames: dict[Any, torch.Tensor] = {}
            for leaf in LAYOUT.leaves:
                shape = (length, *leaf.shape)
                values = rng.integers(0, 255, shape) if leaf.dtype == torch.uint8 else rng.normal(size=shape) * 10
                frames[leaf.key] = torch.from_numpy(values).to(leaf.dtype)
            frames[("terminated",)] = torch.arange(length) == length - 1
            frames[("truncated",)] = torch.zeros(length, dtype=torch.bool)
            writer.add(Episode({key: (value,) for key, value in frames.items()}, length, seed=index, success=True))
    return root


def read_all(root: Path) -> Frames:
    reader = LeRobotReader(root)
    episodes = [reader.read(index) for index in range(len(reader))]
    for episode in episodes:
        assert set(episode.frames) == {leaf.key for leaf in reader.layout.leaves}
        for leaf in reader.layout.leaves:
            assert episode.frames[leaf.key][0].shape == (episode.length, *leaf.shape)
            assert episode.frames[leaf.key][0].dtype == leaf.dtype
    return [{key: pieces[0] for key, pieces in episode.frames.items()} for episode in episodes]


def is_part(found: Frames, recorded: Frames) -> bool:
    """Whether what was found is what was recorded; a folder without our own file tells fewer keys, and the words of its
    task as an instruction."""
    said = torch.tensor(list(b"push".ljust(48, b"\0")), dtype=torch.uint8)
    return len(found) == len(recorded) and all(
        (value == said).all() if key == INSTRUCTION else torch.equal(value, there[key])
        for here, there in zip(found, recorded, strict=True)
        for key, value in here.items()
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("recorded") / "set")


@pytest.fixture(scope="module")
def foreign(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, without any checksum and without our own file."""
    folder = tmp_path_factory.mktemp("foreign") / "set"
    shutil.copytree(original, folder)
    (folder / "meta/embodichain.json").unlink()
    for file in folder.rglob("*.parquet"):
        pq.write_table(pq.read_table(file), file)
    return folder


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def pick(rng: np.random.Generator, options: Any) -> Any:
    options = list(options)
    return options[int(rng.integers(len(options)))]


def flip_bit(rng: np.random.Generator, file: Path, root: Path) -> None:
    data = bytearray(file.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    file.write_bytes(data)


def truncate(rng: np.random.Generator, file: Path, root: Path) -> None:
    file.write_bytes(file.read_bytes()[: int(rng.integers(file.stat().st_size))])


def overwrite(rng: np.random.Generator, file: Path, root: Path) -> None:
    data = bytearray(file.read_bytes())
    start = int(rng.integers(len(data)))
    data[start : start + 40] = rng.bytes(len(data[start : start + 40]))
    file.write_bytes(data)


def exchange(rng: np.random.Generator, file: Path, root: Path) -> None:
    other = pick(rng, files_of(root))
    one, two = file.read_bytes(), other.read_bytes()
    file.write_bytes(two)
    other.write_bytes(one)


def replace(rng: np.random.Generator, file: Path, root: Path) -> None:
    """Something that is no file takes its place, or nothing."""
    file.unlink()
    kind = int(rng.integers(4))
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        file.symlink_to("/etc/hostname")
    elif kind == 2:
        os.mkfifo(file)


def edit_json(rng: np.random.Generator, file: Path, root: Path) -> None:
    data = json.loads(file.read_text())
    node = data
    while True:
        key = pick(rng, node if isinstance(node, dict) else range(len(node)))
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.7:
            node = node[key]
            continue
        choice = rng.random()
        if choice < 0.2:
            del node[key]
        elif choice < 0.3 and isinstance(node, dict):
            node[str(pick(rng, ODD))] = node.pop(key)
        else:
            node[key] = pick(rng, ODD)
        break
    text = json.dumps(data)
    file.write_text("[" * 3000 + text + "]" * 3000 if rng.random() < 0.05 else text)


def edit_table(rng: np.random.Generator, file: Path, root: Path) -> None:
    table = pq.read_table(file)
    names, rows = table.column_names, table.num_rows
    name = pick(rng, names)
    at, column = names.index(name), table[name]
    kind = int(rng.integers(9))
    if kind == 0:
        other = pick(rng, names)
        swapped = [{name: other, other: name}.get(each, each) for each in names]
        table = table.rename_columns(swapped)
    elif kind == 1:
        table = table.drop_columns([name])
    elif kind == 2:
        table = table.set_column(at, name, pa.array(["text"] * rows))
    elif kind == 3:
        table = table.set_column(at, name, pa.array([None] * rows, column.type))
    elif kind == 4:
        table = table.set_column(at, name, pa.array([pick(rng, (float("nan"), 1e300, -1.0))] * rows))
    elif kind == 5:
        table = table.set_column(at, name, pa.array([pick(rng, (-1, 2**62, 2**31, 0))] * rows))
    elif kind == 6:
        table = table.take(pa.array(rng.permutation(rows)))
    elif kind == 7:
        table = table.slice(0, int(rng.integers(rows)))
    else:
        table = pa.concat_tables([table, table])
    pq.write_table(table, file)


ANYWHERE = (flip_bit, truncate, overwrite, exchange, replace)


def damage(rng: np.random.Generator, root: Path) -> str:
    """Damage one thing; return what it was."""
    edits: list[tuple[Callable[..., None], list[Path]]] = [(do, files_of(root)) for do in ANYWHERE]
    edits += [(edit_json, sorted(root.rglob("*.json")))] * 2
    edits += [(edit_table, sorted(root.rglob("*.parquet")))] * 2
    do, files = pick(rng, edits)
    file = pick(rng, files)
    do(rng, file, root)
    return f"{do.__name__} {file.relative_to(root)}"


def outcome(root: Path) -> Frames | None:
    """Return what is read of a folder, or None where it is refused; any other error fails the test."""
    try:
        return read_all(root)
    except DatasetError:
        return None


@pytest.mark.parametrize("seed", range(4))
def test_damaged_folders_are_refused_or_read_right(original: Path, tmp_path: Path, seed: int) -> None:
    recorded, refused = read_all(original), 0
    for case in range(30):
        rng = np.random.default_rng([seed, case])
        folder = tmp_path / str(case)
        shutil.copytree(original, folder)
        what = damage(rng, folder)
        try:
            found = outcome(folder)
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}: {what}") from error
        refused += found is None
        assert found is None or is_part(found, recorded), f"seed {seed}, case {case}: {what} gave other numbers"
        shutil.rmtree(folder)
    assert refused >= 5  # many kinds of damage do not concern what is read


@pytest.mark.parametrize("seed", range(3))
def test_damaged_folders_of_others_are_refused_or_read(foreign: Path, tmp_path: Path, seed: int) -> None:
    """Without checksums a number may be another one, but it has its shape and type, and nothing else is raised."""
    refused = 0
    for case in range(30):
        rng = np.random.default_rng([seed, case, 7])
        folder = tmp_path / str(case)
        shutil.copytree(foreign, folder)
        what = damage(rng, folder)
        try:
            refused += outcome(folder) is None
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}: {what}") from error
        shutil.rmtree(folder)
    assert refused >= 5  # many kinds of damage do not concern what is read


def test_every_page_has_a_checksum_that_is_verified(original: Path, tmp_path: Path) -> None:
    """A bit of the numbers flips, and no other file tells of it."""
    folder = tmp_path / "set"
    shutil.copytree(original, folder)
    (folder / "meta/embodichain.json").unlink()
    file, noticed = folder / "data/chunk-000/file-000.parquet", 0
    intact = file.read_bytes()
    chunk = pq.ParquetFile(file).metadata.row_group(0).column(0)
    end = chunk.data_page_offset + chunk.total_compressed_size - 1
    recorded = read_all(folder)
    for case in range(40):
        rng = np.random.default_rng(case)
        data = bytearray(intact)
        data[int(rng.integers(chunk.data_page_offset, end))] ^= 1 << int(rng.integers(8))
        file.write_bytes(data)
        found = outcome(folder)
        noticed += found is None
        assert found is None or is_part(found, recorded)
    assert noticed > 30


def test_a_folder_that_was_rewritten_on_purpose_can_still_be_read(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(original, folder)
    file = folder / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(file), file)
    with pytest.raises(DatasetError, match=r"file-000\.parquet is damaged.*remove meta/embodichain\.json"):
        read_all(folder)
    (folder / "meta/embodichain.json").unlink()
    assert is_part(read_all(folder), read_all(original))


def video_folder(root: Path, camera: str, video: Path) -> Path:
    """A folder of another program whose camera has a name of its choice."""
    shutil.copytree(video, root)
    (root / "meta/embodichain.json").unlink()
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][camera] = info["features"].pop("observation.images.front")
    (root / "meta/info.json").write_text(json.dumps(info))
    episodes = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(episodes)
    names = [name.replace("videos/observation.images.front/", f"videos/{camera}/") for name in table.column_names]
    pq.write_table(table.rename_columns(names), episodes)
    return root


@pytest.mark.parametrize("camera", ["../../outside", "{outside}", "a/../../../outside", "..", "."])
def test_a_camera_does_not_lead_out_of_the_folder(original: Path, tmp_path: Path, camera: str) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(original / "videos/observation.images.front", outside)
    folder = video_folder(tmp_path / "set", camera.format(outside=outside), original)
    shutil.copytree(outside / "chunk-000", folder / "chunk-000")
    (folder / "videos/a").mkdir()
    with pytest.raises(DatasetError, match="slash"):
        read_all(folder)


@pytest.mark.parametrize(
    "name", ["videos/observation.images.front", "data/chunk-000", "meta/info.json", "meta/episodes"]
)
def test_links_do_not_lead_out_of_the_folder(original: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "set"
    shutil.copytree(original, folder)
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(DatasetError, match="outside of the folder"):
        read_all(folder)


@pytest.mark.parametrize("inside", ["", "sets/push"])
def test_links_of_the_hugging_face_cache_are_followed(original: Path, tmp_path: Path, inside: str) -> None:
    """A downloaded snapshot consists of links to the blobs beside it; the dataset may be a folder of it."""
    snapshot, blobs = tmp_path / "datasets--a--b/snapshots/0123" / inside, tmp_path / "datasets--a--b/blobs"
    shutil.copytree(original, snapshot)
    blobs.mkdir()
    for number, file in enumerate(files_of(snapshot)):
        file.rename(blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), file.parent))
    assert is_part(read_all(snapshot), read_all(original))


def test_paths_of_images_are_not_followed(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "set")
    file = folder / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    names = [f"images/{i}.png" for i in range(table.num_rows)]
    kind = table.schema.field("observation.images.top").type
    paths = pa.array([{"bytes": None, "path": name} for name in names], kind)
    pq.write_table(
        table.set_column(table.column_names.index("observation.images.top"), "observation.images.top", paths), file
    )
    with pytest.raises(DatasetError, match="paths of images are not followed"):
        read_all(folder)


def image_folder(root: Path, lengths: tuple[int, ...] = (4, 3)) -> Path:
    """A folder as LeRobot writes it for cameras of type ``image``: PNG files inside of the table, and no video."""
    from PIL import Image

    def png(index: int, step: int) -> bytes:
        stream = io.BytesIO()
        pixels = np.full((8, 12, 3), [10 * index, step, 200], np.uint8)
        pixels[0, 0] = 255
        Image.fromarray(pixels).save(stream, "PNG")
        return stream.getvalue()

    frames = [(index, step) for index, length in enumerate(lengths) for step in range(length)]
    vector = pa.list_(pa.float32(), 2)
    columns = {
        "observation.images.top": pa.array(
            [{"bytes": png(*frame), "path": "frame.png"} for frame in frames],
            pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        ),
        "observation.images.left.rgb": pa.array([png(*frame) for frame in frames], pa.binary()),
        "observation.state": pa.array([[index, step] for index, step in frames], vector),
        "observation.held": pa.array([step for _, step in frames], pa.float32()),
        "action": pa.array([[step, -step] for _, step in frames], vector),
        "timestamp": pa.array([step / 10 for _, step in frames], pa.float32()),
        "frame_index": pa.array([step for _, step in frames]),
        "episode_index": pa.array([index for index, _ in frames]),
        "index": pa.array(range(len(frames))),
        "task_index": pa.array([0] * len(frames)),
    }
    image = {"dtype": "image", "shape": [8, 12, 3], "names": ["height", "width", "channels"]}
    shapes = {"observation.state": [2], "observation.held": [1], "action": [2], "timestamp": [1]}
    features: dict[str, Any] = {name: {"dtype": "float32", "shape": shape} for name, shape in shapes.items()}
    features |= {"observation.images.top": image, "observation.images.left.rgb": image}
    features |= {"observation.task": {"dtype": "string", "shape": [1]}}
    features |= {"observation.images.depth": {"dtype": "image", "shape": [8, 12, 1]}}
    names = ("frame_index", "episode_index", "index", "task_index")
    features |= {name: {"dtype": "int64", "shape": [1]} for name in names}
    info = {
        "codebase_version": "v3.0",
        "fps": 10,
        "total_episodes": len(lengths),
        "total_frames": len(frames),
        "features": features,
    }
    ends = np.cumsum(lengths)
    episodes = {
        "episode_index": range(len(lengths)),
        "length": lengths,
        "dataset_from_index": ends - lengths,
        "dataset_to_index": ends,
        "data/chunk_index": [0] * len(lengths),
        "data/file_index": [0] * len(lengths),
    }
    for name in ("data", "meta/episodes"):
        (root / name / "chunk-000").mkdir(parents=True)
    pq.write_table(pa.table(columns), root / "data/chunk-000/file-000.parquet")
    pq.write_table(
        pa.table({k: list(v) for k, v in episodes.items()}), root / "meta/episodes/chunk-000/file-000.parquet"
    )
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def test_images_in_the_table_are_read(tmp_path: Path) -> None:
    episodes = read_all(image_folder(tmp_path / "set"))
    assert [len(frames[("action",)]) for frames in episodes] == [4, 3]
    for index, frames in enumerate(episodes):
        top = frames[("observation", "image", "top")]
        assert torch.equal(frames[("observation", "image", "left", "rgb")], top)
        assert top.shape == (len(top), 8, 12, 3)
        assert top[:, 3, 4].tolist() == [[10 * index, step, 200] for step in range(len(top))]
        assert top[:, 0, 0].tolist() == [[255] * 3] * len(top)
        assert frames[("observation", "held")].tolist() == [[step] for step in range(len(top))]
        assert ("observation", "image", "depth") not in frames


def test_images_in_the_table_stream(tmp_path: Path) -> None:
    settings = stream_settings(
        buffer_size=4,
        gym_config={},
        action_config={"source": "dataset", "path": str(image_folder(tmp_path / "set"))},
        refill_threshold=1,
    )
    with OnlineDataEngine(OnlineDataEngineCfg(**settings)) as engine:
        batch = engine.sample_batch(16, 2)
    state = batch["observation", "state"]
    assert batch["observation", "image", "top"].shape == (16, 2, 8, 12, 3)
    assert torch.equal(batch["observation", "image", "top"][:, :, 3, 4, 0], (10 * state[..., 0]).to(torch.uint8))
    assert torch.equal(batch["observation", "image", "left", "rgb"][:, :, 3, 4, 1], state[..., 1].to(torch.uint8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [8, 13, 3]}, r"images of \(8, 12\), expected \(8, 13\)"),
        ({"shape": [8, 12]}, "expected height, width and channels"),
        ({"shape": ["8", 12, 3]}, r"meta/info.json: features.observation.images.top.shape.0"),
        ({"dtype": "video"}, "videos/observation.images.top"),
        ({"dtype": "float32"}, "observation.images.top holds struct"),
        ({"dtype": "nn"}, "of type 'nn', which is not read"),
        ({"dtype": None}, "features.observation.images.top.dtype"),
    ],
)
def test_a_wrong_description_of_an_image_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = image_folder(tmp_path / "set")
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["observation.images.top"] |= change
    (folder / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(DatasetError, match=words):
        read_all(folder)


def test_numbers_that_another_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "set")
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["action"]["dtype"] = "int64"
    (folder / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(DatasetError, match=r"action holds float32, which torch\.int64 cannot hold"):
        read_all(folder)
