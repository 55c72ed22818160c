"""Reads the episodes of a LeRobotDataset folder, version 3 or 2, written by us or by another program."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from embodichain.agents.datasets.frames import ENDS, INSTRUCTION, Episode, Key, Leaf, bytes_of
from embodichain.agents.datasets.lerobot.format import (
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
from embodichain.agents.datasets.lerobot.index import column_of, from_column, read_index, read_tasks
from embodichain.errors import DatasetError
from embodichain.extras import require

_INSTRUCTION_BYTES = 48
"""Minimum length of an instruction, as in our tasks."""
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")


class LeRobotReader:
    """The episodes of a folder by index; those that we recorded are read back as they were.

    In folders of other programs, a missing reward is 0, the last frame of an episode is ``terminated``, and the task
    becomes ``observation/instruction``. Checksums of files and Parquet pages, if there are any, are verified first.
    """

    def __init__(self, root: Path | str, whole: bool = False) -> None:
        """``whole`` reads all numeric features under their LeRobot names, as if another program had written them."""
        self.root = Path(root)
        self._parquet = require("pyarrow.parquet", extra="data")
        self._verified: set[str] = set()
        self._table: tuple[str, Any] | None = None
        self._missing: list[Leaf] = []
        with reading(self.root):
            info, own = read_info(self.root), None if whole else read_own(self.root)
            self.info, self.fps = info, info.fps
            self._own = own
            if own is None:
                self._features = foreign_features(info.features, whole)
                keys = {feature.leaf.key for feature in self._features}
                self._missing = [leaf for leaf in ENDS if leaf.key not in keys and not whole]
                self.layout = checked_layout([*(feature.leaf for feature in self._features), *self._missing])
            else:
                self.layout = own.frame_layout()
                self._features = features_of(self.layout)
                if own.fps not in (None, info.fps):
                    raise DatasetError(
                        f"{self.root}: meta/info.json has {info.fps} frames per second, expected {own.fps}"
                    )
            videos = [feature.name for feature in self._features if feature.is_camera and not feature.in_table]
            self._episodes = read_index(self.root, info, videos, self._open_table)
            self.tasks = read_tasks(self.root, info, self._open_table)
            """Tasks in words, by ``task_index``."""
            self._instructions: dict[str, Tensor] = {}
            """Encoded instructions by task, for folders of other programs."""
            if own is None and not whole and any(self.tasks.values()) and self.layout.shape_of(*INSTRUCTION) is None:
                length = max(_INSTRUCTION_BYTES, *(len(words.encode()) for words in self.tasks.values()))
                self._instructions = {words: bytes_of(words, length) for words in ("", *self.tasks.values())}
                self.layout = checked_layout([*self.layout.leaves, Leaf(INSTRUCTION, torch.uint8, (length,))])
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
        """Number of frames of each episode."""
        return [int(length) for length in self._episodes["length"]]

    @property
    def names(self) -> dict[Key, list[str]]:
        """Names of the elements of vectors, and of the ids of segmentations, if the folder has them."""
        entries = {feature.leaf.key: self.info.features.get(feature.name) for feature in self._features}
        found = {key: entry.vector_names or entry.id_names for key, entry in entries.items() if entry is not None}
        return {key: names for key, names in found.items() if names}

    @property
    def tasks_are_instructions(self) -> bool:
        """Whether instructions come from the folder's tasks instead of a feature."""
        return bool(self._instructions)

    @property
    def features(self) -> list[Feature]:
        """The features that are read."""
        return list(self._features)

    @property
    def is_own(self) -> bool:
        """Whether the folder was written by this package, and is read as such."""
        return self._own is not None

    def video_of(self, index: int, camera: str) -> tuple[str, float]:
        """Return the video file of an episode and camera, and the start of the episode in it, in seconds."""
        return str(self._episodes[f"video/{camera}"][index]), float(self._episodes[f"from/{camera}"][index])

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
        own, task = self.origin_of(index), self._task_in(table)
        if self._instructions:
            frames[INSTRUCTION] = self._instructions[task or ""].repeat(length, 1)
        pieces: dict[Key, tuple[Tensor, ...]] = {leaf.key: (frames[leaf.key],) for leaf in self.layout.leaves}
        return Episode(pieces, length, own.seed, own.success, own.policy_version, task)

    def task_of(self, index: int) -> str | None:
        """Return the task of an episode in words; None if unknown."""
        with reading(self.root):
            return self._task_in(self._rows({name: values[index].item() for name, values in self._episodes.items()}))

    def _task_in(self, rows: Any) -> str | None:
        return self.tasks.get(int(self._numbers(rows.slice(0, 1), "task_index")[0])) if self.tasks else None

    def origin_of(self, index: int) -> OwnEpisode:
        """Return seed, success and policy version of an episode that we recorded; defaults for others."""
        number = int(self._episodes["episode_index"][index])
        if self._own is None or number >= len(self._own.episodes):  # written or appended by another program
            return OwnEpisode()
        return self._own.episodes[number]

    def _frames(self, feature: Feature, row: dict[str, Any], table: Any) -> Tensor:
        """Return the frames ``[length, ...]`` of one feature in an episode."""
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
        return from_column(column_of(table, name, self.root), shape, f"{self.root}: {name}")

    def _rows(self, row: dict[str, Any]) -> Any:
        """Return the rows of one episode from its Parquet file; the last file is cached."""
        name = row["data"]
        if self._table is None or self._table[0] != name:
            self._table = (name, self._open_table(name))
        table, first, length = self._table[1], row["first"], row["length"]
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
        """Read a Parquet file and verify its page checksums, if any."""
        with self._parquet.ParquetFile(self._find(name), memory_map=True, page_checksum_verification=True) as file:
            return file.read(columns)

    def _find(self, name: str) -> Path:
        """Return the path of a file, after verifying its checksum if that is known."""
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
        """Decode images ``[length, height, width, 3]`` stored in the table."""
        column, images = column_of(table, feature.name, self.root), []
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
        """Decode the images ``[length, height, width, 3]`` of one episode from its video."""
        length, start = row["length"], row[f"from/{feature.name}"]
        images: list[NDArray[np.uint8]] = []
        path = self._find(row[f"video/{feature.name}"])
        with require("av", extra="data").open(str(path)) as container:
            stream = container.streams.video[0]
            container.seek(int(start / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                late = (frame.time - start) * self.fps - len(images)  # in frames
                if late < -0.5 and not images:
                    continue  # between the preceding key frame and the first frame
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
    """A folder as an infinite source of episodes, shuffled anew in every epoch."""

    def __init__(self, root: Path | str, seed: int) -> None:
        self.reader = LeRobotReader(root)
        self._generator = np.random.default_rng(seed)
        self._order: list[int] = []
        self.layout = self.reader.layout
        self.max_steps = self.reader.max_steps
        self.step_seconds = 1.0 / self.reader.fps

    def advance(self) -> list[Episode]:
        if not self._order:
            self._order = self._generator.permutation(len(self.reader)).tolist()
        return [self.reader.read(self._order.pop())]

    def close(self) -> None:
        pass  # no file is held open
