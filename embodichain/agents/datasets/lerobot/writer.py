"""Writes episodes to a LeRobotDataset v3 folder, and checks that the folder gives them back."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodichain.agents.datasets.frames import Episode, EpisodeSource, FrameLayout, Key
from embodichain.agents.datasets.lerobot import reader as names
from embodichain.agents.datasets.lerobot.reader import Feature, Images, LeRobotReader, features_of, file_indices
from embodichain.errors import DatasetError
from embodichain.extras import require

_TABLE_MEGABYTES, _VIDEO_MEGABYTES = 100, 200
"""Sizes from which on a file counts as full, and the next one begins."""
_IMAGE_EVERY = 10
"""Every tenth image is enough for the statistics of a camera."""
_KEPT_IMAGE_BYTES = 256 << 20
"""Bytes of original images that are kept for the comparison."""
MIN_PSNR = 25.0
"""Decibels below which an image counts as another one; compression costs less."""


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
        path.parent.mkdir(parents=True, exist_ok=True)
        self.frames = self.nbytes = 0
        self._container = self._av.open(str(path), "w")
        # Two frames per group: any frame is found without decoding many others.
        self._stream = self._container.add_stream("libx264", rate=fps, options={"crf": str(quality), "g": "2"})
        self._stream.height, self._stream.width = feature.size
        self._stream.pix_fmt = feature.pixel_format

    def append(self, images: Images) -> None:
        """Add images at the end."""
        for image in images:
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            packets = self._stream.encode(frame)
            self.nbytes += sum(packet.size for packet in packets)
            self._container.mux(packets)
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
        self._tables: tuple[int, Path, Any] = (0, Path(), None)
        """The number and path of the present Parquet file, and its writer."""
        self._videos: dict[str, tuple[int, VideoFile]] = {}
        self._closed = False

    @property
    def num_episodes(self) -> int:
        """Episodes written so far."""
        return len(self._episodes)

    def add(self, episode: Episode) -> None:
        """Append one episode."""
        arrays = {key: torch.cat(pieces).cpu().numpy() for key, pieces in episode.frames.items()}
        row = {
            "episode_index": self.num_episodes,
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
            columns[names.DONE] = to_column(arrays[("terminated",)] | arrays[("truncated",)])
        columns |= {
            "timestamp": to_column((step / self.fps).astype(np.float32)),
            "frame_index": to_column(step),
            "episode_index": to_column(np.full(length, self.num_episodes)),
            "index": to_column(self._frames + step),
            "task_index": to_column(np.zeros(length, np.int64)),
        }
        table = self._arrow.table(columns)
        number, path, file = self._tables
        if file is not None and path.stat().st_size > _TABLE_MEGABYTES << 20:
            file.close()
            number, file = number + 1, None
        if file is None:
            path = self.root / names.DATA_PATH.format(**file_indices(number))
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._parquet.ParquetWriter(path, table.schema)
        self._tables = (number, path, file)
        file.write_table(table)
        return {f"data/{name}": value for name, value in file_indices(number).items()}

    def _write_images(self, feature: Feature, images: Images) -> dict[str, Any]:
        """Append the images of one episode to the camera's present file, or to a new one if that is full."""
        number, video = self._videos.get(feature.name, (0, None))
        if video is not None and video.nbytes > _VIDEO_MEGABYTES << 20:
            video.close()
            number, video = number + 1, None
        if video is None:
            path = self.root / names.VIDEO_PATH.format(video_key=feature.name, **file_indices(number))
            video = VideoFile(path, feature, self.fps, self._quality)
            self._videos[feature.name] = (number, video)
        start = video.frames / self.fps
        video.append(images)
        entry = {**file_indices(number), "from_timestamp": start, "to_timestamp": video.frames / self.fps}
        return {f"videos/{feature.name}/{name}": value for name, value in entry.items()}

    def close(self) -> None:
        """Finish all files; calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        for file in (self._tables[2], *(video for _, video in self._videos.values())):
            if file is not None:
                file.close()
        if not self._episodes:
            return
        indices = {f"meta/episodes/{name}": value for name, value in file_indices(0).items()}
        path = self.root / names.EPISODES_PATH.format(**file_indices(0))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._parquet.write_table(self._arrow.Table.from_pylist([{**row, **indices} for row in self._episodes]), path)
        self._write_tasks()
        descriptions = {
            names.INFO_PATH: self._info(),
            names.STATS_PATH: {name: value.result() for name, value in self._statistics.items()},
            names.OWN_PATH: {"layout": self.layout.to_json(), "episodes": self._own},
        }
        for name, data in descriptions.items():
            (self.root / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    def _info(self) -> dict[str, Any]:
        columns = dict(names.BOOKKEEPING)
        if {("terminated",), ("truncated",)} <= {leaf.key for leaf in self.layout.leaves}:
            columns[names.DONE] = "bool"
        features = {feature.name: feature.describe(self.fps) for feature in self._features}
        features |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in columns.items()}
        return {
            "codebase_version": names.CODEBASE_VERSION,
            "robot_type": self._robot_type,
            "total_episodes": self.num_episodes,
            "total_frames": self._frames,
            "total_tasks": 1,
            "chunks_size": names.FILES_PER_CHUNK,
            "data_files_size_in_mb": _TABLE_MEGABYTES,
            "video_files_size_in_mb": _VIDEO_MEGABYTES,
            "fps": self.fps,
            "splits": {"train": f"0:{self.num_episodes}"},
            "data_path": names.DATA_PATH,
            "video_path": names.VIDEO_PATH if self._videos else None,
            "features": features,
        }

    def _write_tasks(self) -> None:
        """Write the only task; the metadata tell pandas, with which LeRobot reads it, that its name is the index."""
        kinds = (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_kind, "metadata": None}
            for name, kind, numpy_kind in kinds
        ]
        index = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
        table = self._arrow.table({"task_index": self._arrow.array([0]), "task": self._arrow.array([self.task])})
        self._parquet.write_table(
            table.replace_schema_metadata({"pandas": json.dumps(index)}), self.root / names.TASKS_PATH
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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

    Return the worst likeness of an episode's images to the originals, in decibels; None without cameras.
    """
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
