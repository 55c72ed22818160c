"""Reads the episodes of a LeRobotDataset v3 folder, whoever wrote it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from embodichain.agents.datasets.frames import ENDS, Episode, Key, Leaf
from embodichain.agents.datasets.lerobot.format import (
    DATA_PATH,
    VIDEO_PATH,
    Feature,
    OwnEpisode,
    checked_layout,
    checksum_of,
    features_of,
    find_inside,
    foreign_features,
    read_info,
    read_own,
    reading,
)
from embodichain.errors import DatasetError
from embodichain.extras import require

_INTEGERS = ("episode_index", "length", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index")
"""Columns of ``meta/episodes`` that every folder has."""
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")


class LeRobotReader:
    """The episodes of a folder, by number; those of a folder of ours come back as they were recorded.

    In any other folder, a missing reward reads as 0 and the last frame of an episode as ``terminated``. Files with a
    known checksum are verified before they are read, and so are Parquet pages that have one.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._parquet = require("pyarrow.parquet", extra="data")
        self._verified: set[str] = set()
        self._table: tuple[str, Any] | None = None
        self._missing: list[Leaf] = []
        with reading(self.root):
            info, own = read_info(self.root), read_own(self.root)
            self.fps = info.fps
            self._own = own
            if own is None:
                self._features = foreign_features(info.features)
                keys = {feature.leaf.key for feature in self._features}
                self._missing = [leaf for leaf in ENDS if leaf.key not in keys]
                self.layout = checked_layout([*(feature.leaf for feature in self._features), *self._missing])
            else:
                self.layout = own.frame_layout()
                self._features = features_of(self.layout)
                if own.fps not in (None, info.fps):
                    raise DatasetError(
                        f"{self.root}: meta/info.json has {info.fps} frames per second, expected {own.fps}"
                    )
            self._episodes = self._read_episodes()
            counts = (len(self), int(self._episodes["length"].sum()))
            if counts != (info.total_episodes, info.total_frames):
                raise DatasetError(
                    f"{self.root}: meta/episodes has {counts[0]} episodes with {counts[1]} frames, but meta/info.json "
                    f"counts {info.total_episodes} with {info.total_frames}"
                )
        self.max_steps = int(self._episodes["length"].max())
        """Length of the longest episode."""

    def __len__(self) -> int:
        return len(self._episodes["length"])

    @property
    def lengths(self) -> list[int]:
        """Frames of each episode."""
        return [int(length) for length in self._episodes["length"]]

    def read(self, index: int) -> Episode:
        """Return one episode."""
        row = {name: values[index].item() for name, values in self._episodes.items()}
        with reading(self.root):
            length, table = row["length"], self._rows(row)
            frames = {leaf.key: torch.zeros(length, *leaf.shape, dtype=leaf.dtype) for leaf in self._missing}
            guessed = [key for key in (("terminated",), ("truncated",)) if key in frames]
            for feature in self._features:
                frames[feature.leaf.key] = self._frames(feature, row, table)
            if guessed and not (frames[("terminated",)][-1] or frames[("truncated",)][-1]):
                frames[guessed[0]][-1] = True  # every episode ends
        own = OwnEpisode()
        if self._own is not None and row["episode_index"] < len(self._own.episodes):  # else somebody appended it
            own = self._own.episodes[row["episode_index"]]
        pieces: dict[Key, tuple[Tensor, ...]] = {leaf.key: (frames[leaf.key],) for leaf in self.layout.leaves}
        return Episode(pieces, length, own.seed, own.success, own.policy_version)

    def _frames(self, feature: Feature, row: dict[str, Any], table: Any) -> Tensor:
        """Return the frames ``[length, ...]`` of one feature of an episode."""
        if feature.is_camera:
            images = self._encoded(feature, table) if feature.in_table else self._images(feature, row)
            images = np.moveaxis(images, -1, 1) if feature.channels_first else images
            return torch.from_numpy(np.ascontiguousarray(images))
        leaf, values = feature.leaf, self._numbers(table, feature.name, feature.leaf.shape)
        frames = torch.from_numpy(values)
        converted = frames.to(leaf.dtype)
        if not np.can_cast(values.dtype, converted.numpy().dtype, "same_kind") or (
            not leaf.dtype.is_floating_point and not torch.equal(converted.to(frames.dtype), frames)
        ):
            raise DatasetError(f"{self.root}: {feature.name} holds {values.dtype}, which {leaf.dtype} cannot hold")
        return converted.reshape(row["length"], *leaf.shape)

    def _numbers(self, table: Any, name: str, shape: tuple[int, ...] = ()) -> NDArray[Any]:
        return from_column(self._column(table, name), shape, f"{self.root}: {name}")

    def _column(self, table: Any, name: str) -> Any:
        if table.column_names.count(name) != 1:
            raise DatasetError(
                f"{self.root}: a table has {table.column_names.count(name)} columns {name!r}, expected one"
            )
        return table[name].combine_chunks()

    def _read_episodes(self) -> dict[str, NDArray[Any]]:
        """Return the columns of ``meta/episodes`` that say where the frames of every episode are, in its order."""
        integers, numbers = list(_INTEGERS), []
        for feature in self._features:
            if feature.is_camera and not feature.in_table:
                integers += [f"videos/{feature.name}/{name}" for name in ("chunk_index", "file_index")]
                numbers += [f"videos/{feature.name}/from_timestamp"]
        parts = []
        for path in sorted((self.root / "meta" / "episodes").glob("*/*.parquet")):
            table = self._open_table(path.relative_to(self.root).as_posix(), [*integers, *numbers])
            parts.append({name: self._numbers(table, name) for name in (*integers, *numbers)})
        if not sum(len(part["length"]) for part in parts):
            raise DatasetError(f"{self.root} holds no episodes")
        rows = {name: np.concatenate([part[name] for part in parts]) for name in (*integers, *numbers)}
        for name in integers:
            bounds = (1 if name == "length" else 0, 10**6 if name.endswith(("chunk_index", "file_index")) else 1 << 62)
            self._check(name, rows[name], rows[name].dtype.kind in "iu" and _within(rows[name], *bounds))
        for name in numbers:
            self._check(name, rows[name], rows[name].dtype.kind == "f" and _within(rows[name], 0, 1 << 40))
        index, length = rows["episode_index"], rows["length"]
        self._check("episode_index", index, len(set(index.tolist())) == len(index))
        span = rows["dataset_to_index"] - rows["dataset_from_index"]
        self._check("dataset_to_index", rows["dataset_to_index"], np.array_equal(span, length))
        order = np.argsort(index)
        return {name: values[order] for name, values in rows.items()}

    def _check(self, name: str, values: NDArray[Any], is_right: bool) -> None:
        if not is_right:
            raise DatasetError(f"{self.root}: the column {name} of meta/episodes is wrong: {values[:8].tolist()}")

    def _rows(self, row: dict[str, Any]) -> Any:
        """Return the rows of one episode of the Parquet file it is in; the file last used is kept."""
        name = DATA_PATH.format(**_file_of(row, "data/"))
        if self._table is None or self._table[0] != name:
            self._table = (name, self._open_table(name))
        table, first, length = self._table[1], row["dataset_from_index"], row["length"]
        offset = first - self._numbers(table.slice(0, 1), "index")[0].item()
        rows = table.slice(offset, length) if 0 <= offset <= table.num_rows else table.slice(0, 0)
        expected = {
            "index": np.arange(first, first + rows.num_rows),
            "frame_index": np.arange(rows.num_rows),
            "episode_index": np.full(rows.num_rows, row["episode_index"]),
        }
        found = {name: self._numbers(rows, name) for name in expected}
        if rows.num_rows != length or not all(np.array_equal(found[name], expected[name]) for name in expected):
            raise DatasetError(
                f"{self.root / name} does not hold the {length} frames of episode {row['episode_index']}"
            )
        return rows

    def _open_table(self, name: str, columns: list[str] | None = None) -> Any:
        """Return a Parquet file; with page checksums, where it has them."""
        with self._parquet.ParquetFile(self._find(name), memory_map=True, page_checksum_verification=True) as file:
            return file.read(columns)

    def _find(self, name: str) -> Path:
        """Return a file of the folder that is what was written, as far as that is known."""
        path = find_inside(self.root, name)
        known = None if self._own is None else self._own.checksums.get(name)
        if known is not None and name not in self._verified:
            if known.model_dump() != checksum_of(path):
                raise DatasetError(
                    f"{self.root / name} is damaged: its content does not match its checksum. If another program "
                    "rewrote it on purpose, remove meta/embodichain.json to read the folder as one from elsewhere"
                )
            self._verified.add(name)
        return path

    def _encoded(self, feature: Feature, table: Any) -> NDArray[np.uint8]:
        """Return images ``[length, height, width, 3]`` that are encoded in the table."""
        column, images = self._column(table, feature.name), []
        arrow = require("pyarrow", extra="data")
        blobs = column.field("bytes") if arrow.types.is_struct(column.type) else column
        for blob in blobs:
            if not blob.is_valid:
                raise DatasetError(
                    f"{self.root}: an image of {feature.name} is missing; paths of images are not followed"
                )
            with Image.open(io.BytesIO(blob.as_py()), formats=_IMAGE_FORMATS) as image:
                self._check_size(feature, image.size[::-1])
                images.append(np.asarray(image.convert("RGB")))
        return np.stack(images)

    def _images(self, feature: Feature, row: dict[str, Any]) -> NDArray[np.uint8]:
        """Return the images ``[length, height, width, 3]`` of one episode from the video they are in."""
        prefix, length = f"videos/{feature.name}/", row["length"]
        images: list[NDArray[np.uint8]] = []
        path = self._find(VIDEO_PATH.format(video_key=feature.name, **_file_of(row, prefix)))
        start = row[f"{prefix}from_timestamp"]
        with require("av", extra="data").open(str(path)) as container:
            stream = container.streams.video[0]
            container.seek(int(start / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                late = (frame.time - start) * self.fps - len(images)  # in frames
                if late < -0.5 and not images:
                    continue  # between the key frame before and the frame itself
                if abs(late) > 0.5 or frame.is_corrupt:
                    raise DatasetError(
                        f"{path} is damaged: frame {len(images)} from {start:.3f} s on is missing or broken"
                    )
                self._check_size(feature, (frame.height, frame.width))
                images.append(frame.to_ndarray(format="rgb24"))
                if len(images) == length:
                    return np.stack(images)
        raise DatasetError(f"{path} ends too early: expected {length} frames from {start:.3f} s on, got {len(images)}")

    def _check_size(self, feature: Feature, size: tuple[int, int]) -> None:
        if size != feature.size:
            raise DatasetError(f"{self.root}: {feature.name} has images of {size}, expected {feature.size}")


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


def _within(values: NDArray[Any], low: int, high: int) -> bool:
    return bool(((values >= low) & (values < high)).all())  # False for NaN


def from_column(column: Any, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Return the numbers of an Arrow column whose rows have this shape, lists flattened."""
    arrow, compute = require("pyarrow", extra="data"), require("pyarrow.compute", extra="data")
    kinds, sizes = arrow.types, list(shape)
    while True:
        column = column.storage if isinstance(column, arrow.ExtensionArray) else column
        if column.null_count:
            raise DatasetError(f"{name} has gaps")
        if not (
            kinds.is_list(column.type) or kinds.is_large_list(column.type) or kinds.is_fixed_size_list(column.type)
        ):
            break
        lengths, expected = compute.unique(compute.list_value_length(column)).to_pylist(), sizes.pop(0) if sizes else 1
        if lengths not in ([], [expected]):
            raise DatasetError(f"{name} holds lists of {lengths[:4]} numbers, expected the shape {list(shape)}")
        column = column.flatten()
    is_number = kinds.is_integer(column.type) or kinds.is_floating(column.type) or kinds.is_boolean(column.type)
    if not is_number:
        raise DatasetError(f"{name} holds {column.type}, expected numbers")
    if any(size != 1 for size in sizes):
        raise DatasetError(f"{name} holds single numbers, expected the shape {list(shape)}")
    return np.array(column.to_numpy(zero_copy_only=False))
