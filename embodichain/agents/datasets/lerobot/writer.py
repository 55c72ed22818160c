"""Writes episodes to a LeRobotDataset v3 folder, one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from embodichain.agents.datasets.frames import Episode, FrameLayout, Key
from embodichain.agents.datasets.lerobot import format as names
from embodichain.agents.datasets.lerobot.format import (
    CODEC,
    MAX_MEGABYTES,
    Feature,
    TableFiles,
    VideoFile,
    features_of,
    to_column,
)
from embodichain.errors import DatasetError
from embodichain.extras import require

# MERGED statistics: Running minimum, maximum, mean and standard deviation of the features of a dataset.


_PICTURE_EVERY = 10
"""Every tenth picture is enough for the statistics of a camera."""


class RunningStatistics:
    """Statistics of one feature, element by element; of a camera, channel by channel in [0, 1]."""

    def __init__(self, is_camera: bool) -> None:
        self._is_camera = is_camera
        self._count = 0
        self._weight = 0
        self._sum: NDArray[Any] | float = 0.0
        self._squares: NDArray[Any] | float = 0.0
        self._min: NDArray[Any] | float = np.inf
        self._max: NDArray[Any] | float = -np.inf

    def add(self, values: NDArray[Any]) -> None:
        """Take in the frames ``[n, ...]`` of an episode; those of a camera are ``[n, height, width, 3]``."""
        self._count += len(values)
        if self._is_camera:
            values = values[::_PICTURE_EVERY].reshape(-1, values.shape[-1]) / 255.0
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


_VIDEO_MEGABYTES = 200
_PANDAS_INDEX = {
    "index_columns": ["task"],
    "column_indexes": [],
    "columns": [
        {
            "name": "task_index",
            "field_name": "task_index",
            "pandas_type": "int64",
            "numpy_type": "int64",
            "metadata": None,
        },
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None},
    ],
    "pandas_version": "2.0.0",
}
"""Tells pandas, with which LeRobot reads the tasks, that their names are the index."""


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
        self._tables = TableFiles(self.root)
        self._closed = False
        self._videos: dict[str, tuple[int, VideoFile]] = {}

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
                row |= self._write_pictures(feature, values)
            self._statistics[feature.name].add(values)
        self._episodes.append(row)
        self._own.append({"seed": episode.seed, "success": episode.success, "policy_version": episode.policy_version})
        self._frames += episode.length

    def _write_numbers(self, arrays: dict[Key, NDArray[Any]], length: int) -> dict[str, Any]:
        """Append the rows of one episode to the present Parquet file, or to a new one if that is full."""
        step = np.arange(length)
        columns = {f.name: to_column(arrays[f.leaf.key]) for f in self._features if not f.is_video}
        if ("terminated",) in arrays and ("truncated",) in arrays:
            columns[names.DONE] = self._arrow.array(arrays[("terminated",)] | arrays[("truncated",)])
        columns |= {
            "timestamp": self._arrow.array((step / self.fps).astype(np.float32)),
            "frame_index": self._arrow.array(step),
            "episode_index": self._arrow.array(np.full(length, self.num_episodes)),
            "index": self._arrow.array(self._frames + step),
            "task_index": self._arrow.array(np.zeros(length, np.int64)),
        }
        place = self._tables.write(self._arrow.table(columns))
        return {f"data/{name}": value for name, value in place.items()}

    def _write_pictures(self, feature: Feature, pictures: NDArray[np.uint8]) -> dict[str, Any]:
        """Append the pictures of one episode to the camera's present file, or to a new one if that is full."""
        number, video = self._videos.get(feature.name, (0, None))
        if video is not None and video.nbytes > _VIDEO_MEGABYTES << 20:
            video.close()
            number, video = number + 1, None
        if video is None:
            path = self.root / names.VIDEO_PATH.format(video_key=feature.name, **names.place(number))
            video = VideoFile(path, feature, self.fps, self._quality)
            self._videos[feature.name] = (number, video)
        start = video.frames / self.fps
        video.append(pictures)
        place = {**names.place(number), "from_timestamp": start, "to_timestamp": video.frames / self.fps}
        return {f"videos/{feature.name}/{name}": value for name, value in place.items()}

    def close(self) -> None:
        """Finish all files; calling it twice is fine."""
        if self._closed or not self._episodes:
            return
        self._closed = True
        self._tables.close()
        for _, video in self._videos.values():
            video.close()
        self._write_episodes()
        self._write_tasks()
        features = {f.name: f.describe(self.fps, CODEC) for f in self._features}
        features |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in names.BOOKKEEPING.items()}
        if {("terminated",), ("truncated",)} <= {leaf.key for leaf in self.layout.leaves}:
            features[names.DONE] = {"dtype": "bool", "shape": [1], "names": None}
        info = {
            "codebase_version": names.CODEBASE_VERSION,
            "robot_type": self._robot_type,
            "total_episodes": self.num_episodes,
            "total_frames": self._frames,
            "total_tasks": 1,
            "chunks_size": names.FILES_PER_CHUNK,
            "data_files_size_in_mb": MAX_MEGABYTES,
            "video_files_size_in_mb": _VIDEO_MEGABYTES,
            "fps": self.fps,
            "splits": {"train": f"0:{self.num_episodes}"},
            "data_path": names.DATA_PATH,
            "video_path": names.VIDEO_PATH if any(f.is_video for f in self._features) else None,
            "features": features,
        }
        self._write_json(names.INFO_PATH, info)
        self._write_json(names.STATS_PATH, {name: value.result() for name, value in self._statistics.items()})
        self._write_json(names.OWN_PATH, {"layout": self.layout.to_json(), "episodes": self._own})

    def _write_episodes(self) -> None:
        place = {f"meta/episodes/{name}": value for name, value in names.place(0).items()}
        path = self.root / names.EPISODES_PATH.format(**names.place(0))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._parquet.write_table(self._arrow.Table.from_pylist([{**row, **place} for row in self._episodes]), path)

    def _write_tasks(self) -> None:
        table = self._arrow.table({"task_index": self._arrow.array([0]), "task": self._arrow.array([self.task])})
        table = table.replace_schema_metadata({"pandas": json.dumps(_PANDAS_INDEX)})
        self._parquet.write_table(table, self.root / names.TASKS_PATH)

    def _write_json(self, path: str, data: Any) -> None:
        (self.root / path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
