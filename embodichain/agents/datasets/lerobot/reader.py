"""The LeRobotDataset v3 format, its names of files and features, and a reader of such folders, whoever wrote them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodichain.agents.datasets.frames import ENDS, Episode, FrameLayout, Key, Leaf
from embodichain.errors import DatasetError
from embodichain.extras import require

CODEBASE_VERSION = "v3.0"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
TASKS_PATH = "meta/tasks.parquet"
INFO_PATH = "meta/info.json"
STATS_PATH = "meta/stats.json"
OWN_PATH = "meta/embodichain.json"
FILES_PER_CHUNK = 1000

DONE = "next.done"
BOOKKEEPING = {"timestamp": "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
"""Columns every LeRobotDataset has."""
_STATES: tuple[Key, ...] = (("observation", "robot", "qpos"), ("observation", "state"))
"""What is called ``observation.state``: the first of these that exists."""

Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Feature:
    """One array of a frame and its name in the dataset."""

    name: str
    leaf: Leaf
    channels_first: bool | None = None
    """Order of a camera's pixels; None for what is no camera."""

    @property
    def is_video(self) -> bool:
        """Whether it is stored as a video."""
        return self.channels_first is not None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a camera."""
        height, width = self.leaf.shape[1:] if self.channels_first else self.leaf.shape[:2]
        return height, width

    @property
    def pixel_format(self) -> str:
        """How the pixels of a camera are stored: one colour for 2 x 2 of them, unless the size is odd."""
        return "yuv444p" if self.size[0] % 2 or self.size[1] % 2 else "yuv420p"

    def describe(self, fps: int) -> dict[str, Any]:
        """Return the entry of this feature in ``info.json``."""
        if not self.is_video:
            dtype = str(self.leaf.dtype).removeprefix("torch.")
            return {"dtype": dtype, "shape": list(self.leaf.shape) or [1], "names": None}
        height, width = self.size
        video = {
            "video.height": height,
            "video.width": width,
            "video.codec": "h264",
            "video.pix_fmt": self.pixel_format,
            "video.is_depth_map": False,
            "video.fps": fps,
            "video.channels": 3,
            "has_audio": False,
        }
        return {"dtype": "video", "shape": [height, width, 3], "names": ["height", "width", "channels"], "info": video}


def features_of(layout: FrameLayout) -> list[Feature]:
    """Name every array of a frame."""
    state = next((key for key in _STATES if layout.shape_of(*key) is not None), None)
    renamed: dict[Key | None, str] = {(name,): f"next.{name}" for name in ("reward", "terminated", "truncated")}
    renamed[state] = "observation.state"
    features = []
    for leaf in layout.leaves:
        if leaf.dtype == torch.uint8 and len(leaf.shape) == 3 and 3 in (leaf.shape[0], leaf.shape[2]):
            camera = leaf.key[2:] if len(leaf.key) > 2 and leaf.key[1] == "image" else leaf.key[1:]
            name = ".".join(("observation.images", *camera))
            features.append(Feature(name, leaf, channels_first=leaf.shape[2] != 3))
        else:
            features.append(Feature(renamed.get(leaf.key, ".".join(leaf.key)), leaf))
    return features


def foreign_features(info: dict[str, Any]) -> list[Feature]:
    """Return what is read of a folder that another program wrote: observations, actions, and a reward if it has one."""
    features = []
    for name, entry in info["features"].items():
        shape = tuple(entry["shape"])
        if entry["dtype"] == "video":
            key: Key = ("observation", "image", name.rpartition(".")[2])
            features.append(Feature(name, Leaf(key, torch.uint8, shape), channels_first=shape[2] != 3))
        elif name == "next.reward":
            features.append(Feature(name, Leaf(("reward",), torch.float32, ())))
        elif name == "action" or name.startswith("observation."):
            features.append(Feature(name, Leaf(tuple(name.split(".")), getattr(torch, entry["dtype"]), shape)))
    return features


def file_indices(number: int) -> dict[str, int]:
    """Return the chunk, and the file in it, of the ``number``-th file of a kind."""
    return {"chunk_index": number // FILES_PER_CHUNK, "file_index": number % FILES_PER_CHUNK}


class LeRobotReader:
    """The episodes of a folder, by number.

    A folder of ours gives the frames back as they were recorded. Of any other, the observations and actions are read;
    a reward it does not have is 0, and the last frame of an episode is marked ``terminated``.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._parquet = require("pyarrow.parquet", extra="data")
        info = self._read_json(INFO_PATH)
        if info.get("codebase_version") != CODEBASE_VERSION:
            raise DatasetError(
                f"{self.root} is a dataset of version {info.get('codebase_version')}, expected {CODEBASE_VERSION}"
            )
        self.info = info
        self.fps = int(info["fps"])
        self._episodes = self._read_episodes()
        self._table: tuple[Path, Any] | None = None
        self._own: list[dict[str, Any]] = []
        self._missing: list[Leaf] = []
        if (self.root / OWN_PATH).exists():
            data = self._read_json(OWN_PATH)
            self.layout = FrameLayout.from_json(data["layout"])
            self._features = features_of(self.layout)
            self._own = data["episodes"]
        else:
            self._features = foreign_features(info)
            self.layout = FrameLayout(tuple(feature.leaf for feature in self._features))
            self._missing = [leaf for leaf in ENDS if self.layout.shape_of(*leaf.key) is None]
            self.layout = FrameLayout((*self.layout.leaves, *self._missing))

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def max_steps(self) -> int:
        """Length of the longest episode."""
        return max(int(row["length"]) for row in self._episodes)

    def read(self, index: int) -> Episode:
        """Return one episode."""
        row = self._episodes[index]
        length, table = int(row["length"]), self._rows(row)
        frames = {leaf.key: torch.zeros(length, *leaf.shape, dtype=leaf.dtype) for leaf in self._missing}
        if ("terminated",) in frames:
            frames[("terminated",)][-1] = True
        for feature in self._features:
            leaf = feature.leaf
            if feature.is_video:
                frames[leaf.key] = self._images(feature, row, length)
            else:
                values = torch.from_numpy(from_column(table[feature.name])).to(leaf.dtype)
                frames[leaf.key] = values.reshape(length, *leaf.shape)
        own = self._own[index] if self._own else {}
        pieces: dict[Key, tuple[Tensor, ...]] = {leaf.key: (frames[leaf.key],) for leaf in self.layout.leaves}
        return Episode(pieces, length, own.get("seed", -1), own.get("success"), own.get("policy_version", -1))

    def _rows(self, row: dict[str, Any]) -> Any:
        """Return the rows of one episode of the Parquet file it is in; the file last used is kept."""
        path = self.root / DATA_PATH.format(**_file_of(row, "data/"))
        if self._table is None or self._table[0] != path:
            self._table = (path, self._parquet.read_table(path, memory_map=True))
        table = self._table[1]
        first = table["index"][0].as_py()
        rows = table.slice(row["dataset_from_index"] - first, row["length"])
        if rows.num_rows != row["length"] or rows["episode_index"][0].as_py() != row["episode_index"]:
            raise DatasetError(f"{path} does not hold the {row['length']} frames of episode {row['episode_index']}")
        return rows

    def _images(self, feature: Feature, row: dict[str, Any], length: int) -> Tensor:
        prefix = f"videos/{feature.name}/"
        path = self.root / VIDEO_PATH.format(video_key=feature.name, **_file_of(row, prefix))
        images = read_images(path, row[f"{prefix}from_timestamp"], length, self.fps)
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(images, -1, 1)) if feature.channels_first else images)

    def _read_episodes(self) -> list[dict[str, Any]]:
        paths = sorted((self.root / "meta" / "episodes").glob("*/*.parquet"))
        rows = [row for path in paths for row in self._parquet.read_table(path).to_pylist()]
        if not rows:
            raise DatasetError(f"{self.root} holds no episodes")
        return sorted(rows, key=lambda row: row["episode_index"])

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.root / name
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DatasetError(f"{self.root} is no LeRobotDataset: there is no {name}") from None
        except ValueError as error:
            raise DatasetError(f"{path} cannot be read: {error}") from None
        return data


class RecordedEpisodes:
    """A folder as an endless source: all its episodes in random order, then again in another."""

    def __init__(self, root: Path | str, seed: int) -> None:
        self._reader = LeRobotReader(root)
        self._generator = np.random.default_rng(seed)
        self._order: list[int] = []
        self.layout = self._reader.layout
        self.max_steps = self._reader.max_steps

    def advance(self) -> list[Episode]:
        if not self._order:
            self._order = self._generator.permutation(len(self._reader)).tolist()
        return [self._reader.read(self._order.pop())]

    def close(self) -> None:
        pass  # no file is held open


def _file_of(row: dict[str, Any], prefix: str) -> dict[str, int]:
    return {name: row[prefix + name] for name in ("chunk_index", "file_index")}


def from_column(column: Any) -> NDArray[Any]:
    """Return the numbers of an Arrow column, lists flattened."""
    arrow = require("pyarrow", extra="data")
    column = column.combine_chunks()
    while arrow.types.is_nested(column.type):
        column = column.flatten()
    return np.array(column.to_numpy(zero_copy_only=False))


def read_images(path: Path, start_seconds: float, count: int, fps: int) -> Images:
    """Return ``count`` images ``[count, height, width, 3]`` of a video, from a time on."""
    av = require("av", extra="data")
    images = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        container.seek(int(start_seconds / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            if frame.time is not None and frame.time < start_seconds - 0.5 / fps:
                continue  # between the key frame before and the frame itself
            images.append(frame.to_ndarray(format="rgb24"))
            if len(images) == count:
                return np.stack(images)
    raise DatasetError(
        f"{path} ends too early: expected {count} frames from {start_seconds:.3f} s on, got {len(images)}"
    )
