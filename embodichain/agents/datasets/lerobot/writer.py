"""Writes episodes as a LeRobotDataset v3 folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from embodichain.agents.datasets.frames import Episode, FrameLayout, Key
from embodichain.agents.datasets.lerobot.format import (
    BOOKKEEPING,
    CODEBASE_VERSION,
    DATA_PATH,
    DONE,
    EPISODES_PATH,
    FILES_PER_CHUNK,
    INFO_PATH,
    OWN_PATH,
    STATS_PATH,
    TASKS_PATH,
    VIDEO_PATH,
    Feature,
    checksum_of,
    data_checksum,
    features_of,
    file_indices,
)
from embodichain.agents.datasets.lerobot.statistics import FeatureStatistics
from embodichain.errors import DatasetError, writing
from embodichain.extras import require

_TABLE_MEGABYTES, _VIDEO_MEGABYTES = 100, 200
"""File sizes above which a new file is started."""

Images = NDArray[np.uint8]


def to_column(values: NDArray[Any]) -> Any:
    """Convert an array ``[n, ...]`` to an Arrow column of numbers or (nested) fixed-size lists; ``[n, 1]`` becomes
    numbers, as in LeRobot."""
    arrow = require("pyarrow", extra="data")
    column = arrow.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:] if values.shape[1:] != (1,) else ()):
        column = arrow.FixedSizeListArray.from_arrays(column, size)
    return column


class VideoFile:
    """Writes images ``[n, height, width, 3]`` of consecutive episodes to an mp4 file."""

    def __init__(self, path: Path, feature: Feature, fps: float, quality: int) -> None:
        self._av = require("av", extra="data")
        self.frames = 0
        self._container = self._av.open(str(path), "w")
        # A key frame every two frames, so that random access decodes few others.
        rate = Fraction(fps).limit_denominator(10_000)  # 29.97 is a rate, too
        self._stream = self._container.add_stream("libx264", rate=rate, options={"crf": str(quality), "g": "2"})
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


class LeRobotWriter:
    """Writes a new dataset folder: ``add`` appends episodes, and ``close`` writes the metadata."""

    def __init__(
        self,
        root: Path | str,
        layout: FrameLayout,
        fps: float,
        task: str,
        robot_type: str | None = None,
        quality: int = 18,
        names: Mapping[Key, Sequence[str]] | None = None,
        features: Sequence[Feature] | None = None,
        encodings: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """``task`` is the task of episodes without one; ``names`` has the names of the elements of vectors, and of
        the ids of segmentations.

        ``features`` gives arrays the names of a folder of another program; no ``embodichain.json`` is written then.
        ``encodings`` describes the videos of cameras that are copied, by name.
        """
        self.root = Path(root)
        self._arrow, self._parquet = require("pyarrow", extra="data"), require("pyarrow.parquet", extra="data")
        require("av", extra="data")
        with writing(self.root):
            if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
                raise DatasetError(f"{self.root} exists and is not an empty folder: choose another")
            self._is_new = not self.root.exists()
            self.root.mkdir(parents=True, exist_ok=True)
        self.layout, self.fps, self.task = layout, fps, task
        self._robot_type, self._quality, self._names = robot_type, quality, dict(names or {})
        self._features = features_of(layout) if features is None else [replace(f, in_table=False) for f in features]
        self._is_own, self._encodings = features is None, dict(encodings or {})
        self._copies: dict[str, dict[Path, dict[str, int]]] = {}
        """Indices of copied video files, by camera and source file."""
        self._tasks: dict[str, int] = {}
        """Tasks of the episodes so far, and their indices."""
        self._columns = dict(BOOKKEEPING)
        """Columns besides the features, and their dtypes."""
        if {("terminated",), ("truncated",)} <= {leaf.key for leaf in layout.leaves} and self._is_own:
            self._columns[DONE] = "bool"
        self._statistics = {feature.name: FeatureStatistics(feature.is_camera) for feature in self._features}
        self._statistics |= {name: FeatureStatistics(is_camera=False) for name in self._columns}
        self._episodes: list[dict[str, Any]] = []
        self._own: list[dict[str, Any]] = []
        self._frames = 0
        self._files: dict[str, tuple[int, Path, Any]] = {}
        """Number, path and writer of the current file of every camera, and of the table ("")."""
        self._written: list[Path] = []
        self._closed = False

    def add(self, episode: Episode, videos: Mapping[str, tuple[Path, float]] | None = None) -> None:
        """Append one episode; ``videos`` maps cameras to an existing video, which is copied, and the episode's start in
        it in seconds."""
        with writing(self.root):
            self._add(episode, videos or {})

    def _add(self, episode: Episode, videos: Mapping[str, tuple[Path, float]]) -> None:
        arrays = {key: torch.cat(pieces).cpu().numpy() for key, pieces in episode.frames.items()}
        task = self.task if episode.task is None else episode.task
        number = self._tasks.setdefault(task, len(self._tasks))
        row = {
            "episode_index": len(self._episodes),
            "tasks": [task],
            "length": episode.length,
            "dataset_from_index": self._frames,
            "dataset_to_index": self._frames + episode.length,
        }
        numbers = self._numbers(arrays, episode.length, number)
        row |= self._write_numbers(numbers)
        images = {}
        for feature in (feature for feature in self._features if feature.is_camera):
            values = arrays[feature.leaf.key]
            images[feature.name] = np.moveaxis(values, 1, -1) if feature.channels_first else values
            if feature.name in videos:
                row |= self._copy_video(feature, *videos[feature.name], episode.length)
            else:
                row |= self._write_images(feature, images[feature.name])
        for name, values in (numbers | images).items():
            entry = self._statistics[name].add(values)
            row |= {f"stats/{name}/{statistic}": value for statistic, value in entry.items()}
        self._episodes.append(row)
        self._own.append({"seed": episode.seed, "success": episode.success, "policy_version": episode.policy_version})
        self._frames += episode.length

    def _numbers(self, arrays: dict[Key, NDArray[Any]], length: int, task: int) -> dict[str, NDArray[Any]]:
        """Return the columns of one episode: all features but images, and the bookkeeping columns."""
        step = np.arange(length)
        columns = {f.name: arrays[f.leaf.key] for f in self._features if not f.is_camera}
        if DONE in self._columns:
            columns[DONE] = arrays[("terminated",)] | arrays[("truncated",)]
        return columns | {
            "timestamp": (step / self.fps).astype(np.float32),
            "frame_index": step,
            "episode_index": np.full(length, len(self._episodes)),
            "index": self._frames + step,
            "task_index": np.full(length, task),
        }

    def _write_numbers(self, columns: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """Append the rows of one episode to the current Parquet file; return its indices."""
        table = self._arrow.table({name: to_column(values) for name, values in columns.items()})

        def make(path: Path) -> Any:
            return self._parquet.ParquetWriter(path, table.schema, write_page_checksum=True)

        file, indices = self._file("", DATA_PATH, _TABLE_MEGABYTES, make)
        file.write_table(table)
        return {f"data/{name}": value for name, value in indices.items()}

    def _write_images(self, feature: Feature, images: Images) -> dict[str, Any]:
        """Append the images of one episode to the camera's current video; return its indices and times."""
        video, indices = self._file(
            feature.name, VIDEO_PATH, _VIDEO_MEGABYTES, lambda path: VideoFile(path, feature, self.fps, self._quality)
        )
        start = video.frames / self.fps
        video.append(images)
        entry = {**indices, "from_timestamp": start, "to_timestamp": video.frames / self.fps}
        return {f"videos/{feature.name}/{name}": value for name, value in entry.items()}

    def _copy_video(self, feature: Feature, source: Path, start: float, length: int) -> dict[str, Any]:
        """Copy a video unless it has been copied; return its indices and the episode's times in it."""
        known = self._copies.setdefault(feature.name, {})
        if source not in known:
            known[source] = file_indices(len(known))
            target = self.root / VIDEO_PATH.format(video_key=feature.name, **known[source])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            self._written.append(target)
        entry = {**known[source], "from_timestamp": start, "to_timestamp": start + length / self.fps}
        return {f"videos/{feature.name}/{name}": value for name, value in entry.items()}

    def _file(self, camera: str, path: str, megabytes: int, make: Callable[[Path], Any]) -> tuple[Any, dict[str, int]]:
        """Return the current file of a camera, or a new one if that is full, and its indices."""
        number, current, file = self._files.get(camera, (0, self.root, None))
        if file is not None and current.exists() and current.stat().st_size > megabytes << 20:
            file.close()
            number, file = number + 1, None
        if file is None:
            current = self.root / path.format(video_key=camera, **file_indices(number))
            current.parent.mkdir(parents=True, exist_ok=True)
            file = make(current)
            self._written.append(current)
            self._files[camera] = (number, current, file)
        return file, file_indices(number)

    def close(self) -> None:
        """Finish all files; may be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        with writing(self.root):
            for _, _, file in self._files.values():
                file.close()
            if self._episodes:
                self._write_metadata()
            elif self._is_new and not self._written:
                self.root.rmdir()

    def _write_metadata(self) -> None:
        """Write the ``meta`` folder."""
        self._write_episodes()
        self._write_tasks()
        # Only of files that LeRobot does not rewrite when it appends.
        checksums = {path.relative_to(self.root).as_posix(): checksum_of(path) for path in self._written}
        own = {"version": 2, "fps": self.fps, "layout": self.layout.to_json(), "episodes": self._own}
        own["checksums"] = checksums
        files: dict[str, dict[str, Any]] = {
            STATS_PATH: {name: value.result() for name, value in self._statistics.items()}
        }
        files |= {OWN_PATH: {**own, "crc32": data_checksum(own)}} if self._is_own else {}
        files[INFO_PATH] = self._info()  # last: without it the folder is not a dataset
        for name, data in files.items():
            file = self.root / name
            partial = file.with_name(f".{file.name}.partial")
            partial.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
            partial.replace(file)

    def _write_episodes(self) -> None:
        """Write the location and statistics of each episode."""
        indices = {f"meta/episodes/{name}": value for name, value in file_indices(0).items()}
        path = self.root / EPISODES_PATH.format(**file_indices(0))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write_table(self._arrow.Table.from_pylist([{**row, **indices} for row in self._episodes]), path)
        self._written.append(path)

    def _write_table(self, table: Any, path: Path) -> None:
        self._parquet.write_table(table, path, write_page_checksum=True)

    def _info(self) -> dict[str, Any]:
        names = self._names
        features = {f.name: f.describe(self.fps, names.get(f.leaf.key)) for f in self._features}
        for name, encoding in self._encodings.items():
            features[name]["info"] = encoding
        features |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in self._columns.items()}
        return {
            "codebase_version": CODEBASE_VERSION,
            "robot_type": self._robot_type,
            "total_episodes": len(self._episodes),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": _TABLE_MEGABYTES,
            "video_files_size_in_mb": _VIDEO_MEGABYTES,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if any(self._files) or self._copies else None,
            "features": features,
        }

    def _write_tasks(self) -> None:
        """Write all tasks, with metadata that make ``task`` the index in pandas, as LeRobot expects."""
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_kind, "metadata": None}
            for name, kind, numpy_kind in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        ]
        index = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
        numbers, words = self._arrow.array(self._tasks.values()), self._arrow.array(self._tasks)
        table = self._arrow.table({"task_index": numbers, "task": words})
        self._write_table(table.replace_schema_metadata({"pandas": json.dumps(index)}), self.root / TASKS_PATH)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
