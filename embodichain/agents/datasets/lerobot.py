"""LeRobotDataset v3 folders: the format, a writer, a reader of whoever's, and a check of what was written.

::

    meta/info.json                              features, frame rate, totals
    meta/stats.json                             min, max, mean, std of every feature
    meta/tasks.parquet                          what was to be done
    meta/episodes/chunk-000/file-000.parquet    where each episode begins and ends
    meta/embodichain.json                       keys and types of our frames, seed and success of every episode
    data/chunk-000/file-000.parquet             frames of many episodes, one after the other
    videos/<camera>/chunk-000/file-000.mp4      their images, likewise
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodichain.agents.datasets.frames import ENDS, Episode, EpisodeSource, FrameLayout, Key, Leaf
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

_TABLE_MEGABYTES, _VIDEO_MEGABYTES = 100, 200
"""Sizes from which on a file counts as full, and the next one begins."""
_IMAGE_EVERY = 10
"""Every tenth image is enough for the statistics of a camera."""
_KEPT_IMAGE_BYTES = 256 << 20
"""Bytes of original images that are kept for the comparison."""
MIN_PSNR = 25.0
"""Decibels below which an image counts as another one; compression costs less."""

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


def to_column(values: NDArray[Any]) -> Any:
    """Return an array ``[n, ...]`` as an Arrow column: numbers, or (nested) lists of fixed size."""
    arrow = require("pyarrow", extra="data")
    column = arrow.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        column = arrow.FixedSizeListArray.from_arrays(column, size)
    return column


class VideoFile:
    """Writes images ``[n, height, width, 3]`` of many episodes, one after the other, to an mp4 file."""

    def __init__(self, path: Path, feature: Feature, fps: int, quality: int) -> None:
        self._av = require("av", extra="data")
        self.frames = 0
        self._container = self._av.open(str(path), "w")
        # Two frames per group: any frame is found without decoding many others.
        self._stream = self._container.add_stream("libx264", rate=fps, options={"crf": str(quality), "g": "2"})
        self._stream.height, self._stream.width = feature.size
        self._stream.pix_fmt = feature.pixel_format

    def append(self, images: Images) -> None:
        """Add images at the end."""
        for image in images:
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            self._container.mux(self._stream.encode(frame))
        self.frames += len(images)

    def close(self) -> None:
        """Finish the file."""
        self._container.mux(self._stream.encode())
        self._container.close()


class RunningStatistics:
    """Minimum, maximum, mean and standard deviation of a feature, element by element; of a camera, per channel."""

    def __init__(self, is_camera: bool) -> None:
        self._is_camera = is_camera
        self._count = self._weight = 0
        self._sum, self._squares = np.zeros(()), np.zeros(())
        self._min, self._max = np.array(np.inf), np.array(-np.inf)

    def add(self, values: NDArray[Any]) -> None:
        """Take in the frames ``[n, ...]`` of an episode; those of a camera are ``[n, height, width, 3]``."""
        self._count += len(values)
        if self._is_camera:
            values = values[::_IMAGE_EVERY].reshape(-1, values.shape[-1]) / 255.0
        values = values.astype(np.float64)
        self._weight += len(values)
        self._sum = self._sum + values.sum(axis=0)
        self._squares = self._squares + (values**2).sum(axis=0)
        self._min = np.minimum(self._min, values.min(axis=0))
        self._max = np.maximum(self._max, values.max(axis=0))

    def result(self) -> dict[str, Any]:
        """Return the entry of ``stats.json``."""
        mean = self._sum / self._weight
        # E[x^2] - E[x]^2, which rounding may push below zero
        std = np.sqrt(np.maximum(self._squares / self._weight - mean**2, 0.0))
        values = {"min": self._min, "max": self._max, "mean": mean, "std": std}
        shape = (-1, 1, 1) if self._is_camera else (-1,)
        return {**{name: np.reshape(value, shape).tolist() for name, value in values.items()}, "count": [self._count]}


class LeRobotWriter:
    """A new dataset folder; episodes are appended, and ``close`` writes what describes them."""

    def __init__(
        self,
        root: Path | str,
        layout: FrameLayout,
        fps: int,
        task: str,
        robot_type: str | None = None,
        quality: int = 18,
    ) -> None:
        self.root = Path(root)
        if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise DatasetError(f"{self.root} exists and is not an empty folder: choose another")
        self._arrow, self._parquet = require("pyarrow", extra="data"), require("pyarrow.parquet", extra="data")
        require("av", extra="data")
        self.layout, self.fps, self.task = layout, fps, task
        self._robot_type, self._quality = robot_type, quality
        self._features = features_of(layout)
        self._statistics = {feature.name: RunningStatistics(feature.is_video) for feature in self._features}
        self._episodes: list[dict[str, Any]] = []
        self._own: list[dict[str, Any]] = []
        self._frames = 0
        self._files: dict[str, tuple[int, Path, Any]] = {}
        """The number, the path and the writer of the present file of every camera, and of the numbers ("")."""
        self._closed = False

    def add(self, episode: Episode) -> None:
        """Append one episode."""
        arrays = {key: torch.cat(pieces).cpu().numpy() for key, pieces in episode.frames.items()}
        row = {
            "episode_index": len(self._episodes),
            "tasks": [self.task],
            "length": episode.length,
            "dataset_from_index": self._frames,
            "dataset_to_index": self._frames + episode.length,
        }
        row |= self._write_numbers(arrays, episode.length)
        for feature in self._features:
            values = arrays[feature.leaf.key]
            if feature.is_video:
                values = np.moveaxis(values, 1, -1) if feature.channels_first else values
                row |= self._write_images(feature, values)
            self._statistics[feature.name].add(values)
        self._episodes.append(row)
        self._own.append({"seed": episode.seed, "success": episode.success, "policy_version": episode.policy_version})
        self._frames += episode.length

    def _write_numbers(self, arrays: dict[Key, NDArray[Any]], length: int) -> dict[str, Any]:
        """Append the rows of one episode to the present Parquet file, or to a new one if that is full."""
        step = np.arange(length)
        columns = {f.name: to_column(arrays[f.leaf.key]) for f in self._features if not f.is_video}
        if ("terminated",) in arrays and ("truncated",) in arrays:
            columns[DONE] = to_column(arrays[("terminated",)] | arrays[("truncated",)])
        columns |= {
            "timestamp": to_column((step / self.fps).astype(np.float32)),
            "frame_index": to_column(step),
            "episode_index": to_column(np.full(length, len(self._episodes))),
            "index": to_column(self._frames + step),
            "task_index": to_column(np.zeros(length, np.int64)),
        }
        table = self._arrow.table(columns)
        file, indices = self._file(
            "", DATA_PATH, _TABLE_MEGABYTES, lambda path: self._parquet.ParquetWriter(path, table.schema)
        )
        file.write_table(table)
        return {f"data/{name}": value for name, value in indices.items()}

    def _write_images(self, feature: Feature, images: Images) -> dict[str, Any]:
        """Append the images of one episode to the camera's present file, or to a new one if that is full."""
        video, indices = self._file(
            feature.name, VIDEO_PATH, _VIDEO_MEGABYTES, lambda path: VideoFile(path, feature, self.fps, self._quality)
        )
        start = video.frames / self.fps
        video.append(images)
        entry = {**indices, "from_timestamp": start, "to_timestamp": video.frames / self.fps}
        return {f"videos/{feature.name}/{name}": value for name, value in entry.items()}

    def _file(self, camera: str, path: str, megabytes: int, make: Callable[[Path], Any]) -> tuple[Any, dict[str, int]]:
        """Return the present file of a camera, or a new one if that is full, and its indices."""
        number, present, file = self._files.get(camera, (0, self.root, None))
        if file is not None and present.exists() and present.stat().st_size > megabytes << 20:
            file.close()
            number, file = number + 1, None
        if file is None:
            present = self.root / path.format(video_key=camera, **file_indices(number))
            present.parent.mkdir(parents=True, exist_ok=True)
            file = make(present)
            self._files[camera] = (number, present, file)
        return file, file_indices(number)

    def close(self) -> None:
        """Finish all files; calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        for _, _, file in self._files.values():
            file.close()
        if not self._episodes:
            return
        indices = {f"meta/episodes/{name}": value for name, value in file_indices(0).items()}
        path = self.root / EPISODES_PATH.format(**file_indices(0))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._parquet.write_table(self._arrow.Table.from_pylist([{**row, **indices} for row in self._episodes]), path)
        self._write_tasks()
        descriptions = {
            INFO_PATH: self._info(),
            STATS_PATH: {name: value.result() for name, value in self._statistics.items()},
            OWN_PATH: {"layout": self.layout.to_json(), "episodes": self._own},
        }
        for name, data in descriptions.items():
            (self.root / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    def _info(self) -> dict[str, Any]:
        columns = dict(BOOKKEEPING)
        if {("terminated",), ("truncated",)} <= {leaf.key for leaf in self.layout.leaves}:
            columns[DONE] = "bool"
        features = {feature.name: feature.describe(self.fps) for feature in self._features}
        features |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in columns.items()}
        return {
            "codebase_version": CODEBASE_VERSION,
            "robot_type": self._robot_type,
            "total_episodes": len(self._episodes),
            "total_frames": self._frames,
            "total_tasks": 1,
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": _TABLE_MEGABYTES,
            "video_files_size_in_mb": _VIDEO_MEGABYTES,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if any(self._files) else None,
            "features": features,
        }

    def _write_tasks(self) -> None:
        """Write the only task; the metadata tell pandas, with which LeRobot reads it, that its name is the index."""
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_kind, "metadata": None}
            for name, kind, numpy_kind in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        ]
        index = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
        table = self._arrow.table({"task_index": self._arrow.array([0]), "task": self._arrow.array([self.task])})
        self._parquet.write_table(table.replace_schema_metadata({"pandas": json.dumps(index)}), self.root / TASKS_PATH)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LeRobotReader:
    """The episodes of a folder, by number; those of a folder of ours come back as they were recorded.
    In any other folder, a missing reward reads as 0 and the last frame of an episode as ``terminated``."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._parquet = require("pyarrow.parquet", extra="data")
        info = self._read_json(INFO_PATH)
        if info.get("codebase_version") != CODEBASE_VERSION:
            raise DatasetError(
                f"{self.root} is a dataset of version {info.get('codebase_version')}, expected {CODEBASE_VERSION}"
            )
        self.fps = int(info["fps"])
        paths = sorted((self.root / "meta" / "episodes").glob("*/*.parquet"))
        rows = [row for path in paths for row in self._parquet.read_table(path).to_pylist()]
        if not rows:
            raise DatasetError(f"{self.root} holds no episodes")
        self._episodes = sorted(rows, key=lambda row: row["episode_index"])
        self.max_steps = max(int(row["length"]) for row in rows)
        """Length of the longest episode."""
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
                frames[leaf.key] = self._images(feature, row)
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

    def _images(self, feature: Feature, row: dict[str, Any]) -> Tensor:
        """Return the images of one episode from the video they are in."""
        prefix, length, images = f"videos/{feature.name}/", int(row["length"]), []
        path = self.root / VIDEO_PATH.format(video_key=feature.name, **_file_of(row, prefix))
        start = row[f"{prefix}from_timestamp"]
        with require("av", extra="data").open(str(path)) as container:
            stream = container.streams.video[0]
            container.seek(int(start / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                if frame.time is not None and frame.time < start - 0.5 / self.fps:
                    continue  # between the key frame before and the frame itself
                images.append(frame.to_ndarray(format="rgb24"))
                if len(images) == length:
                    stack = np.stack(images)
                    stack = np.ascontiguousarray(np.moveaxis(stack, -1, 1)) if feature.channels_first else stack
                    return torch.from_numpy(stack)
        raise DatasetError(f"{path} ends too early: expected {length} frames from {start:.3f} s on, got {len(images)}")

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


@dataclass
class Trace:
    """What is kept of a recorded episode: checksums of its numbers, and its images while there is room."""

    length: int
    checksums: dict[Key, int]
    images: dict[Key, Tensor]

    @classmethod
    def of(cls, episode: Episode, cameras: set[Key], keep: bool = True) -> Trace:
        """Return the trace of an episode, with its images or without."""
        frames = {key: torch.cat(pieces).contiguous() for key, pieces in episode.frames.items()}
        numbers = {key: value.view(torch.uint8).numpy() for key, value in frames.items() if key not in cameras}
        images = {key: value for key, value in frames.items() if key in cameras and keep}
        return cls(episode.length, {key: zlib.crc32(value.tobytes()) for key, value in numbers.items()}, images)


def record(source: EpisodeSource, writer: LeRobotWriter, episodes: int, only_success: bool = False) -> Iterator[Trace]:
    """Write the next ``episodes`` episodes of a source; yield the trace of each."""
    cameras = {feature.leaf.key for feature in features_of(source.layout) if feature.is_video}
    left, image_bytes = episodes, 0
    while left:
        for episode in source.advance()[:left]:
            episode.check_finite()
            if only_success and not episode.success:
                continue
            writer.add(episode)
            trace = Trace.of(episode, cameras, keep=image_bytes < _KEPT_IMAGE_BYTES)
            image_bytes += sum(image.nbytes for image in trace.images.values())
            left -= 1
            yield trace


def read_back(root: Path, traces: list[Trace]) -> float | None:
    """Compare a folder with what was written to it; raise DatasetError at the first difference.
    Return the worst PSNR of an episode's images, in decibels; None without cameras."""
    reader = LeRobotReader(root)
    if len(reader) != len(traces):
        raise DatasetError(f"{root} holds {len(reader)} episodes, but {len(traces)} were written")
    worst: float | None = None
    for index, trace in enumerate(traces):
        episode = reader.read(index)
        if episode.length != trace.length:
            raise DatasetError(f"episode {index} has {episode.length} frames, but {trace.length} were written")
        again = Trace.of(episode, set(trace.images))
        for key, checksum in trace.checksums.items():
            if again.checksums[key] != checksum:
                raise DatasetError(f"{'/'.join(key)} of episode {index} is not what was written")
        for key, image in trace.images.items():
            likeness = psnr(again.images[key], image)
            if likeness < MIN_PSNR:
                raise DatasetError(f"{'/'.join(key)} of episode {index} looks different: {likeness:.1f} dB")
            worst = likeness if worst is None else min(worst, likeness)
    return worst


def psnr(one: Tensor, other: Tensor) -> float:
    """Return the likeness of two uint8 images in decibels: ``10 log10(255^2 / mean squared difference)``."""
    error = float((one.float() - other.float()).square().mean())
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)
