"""The LeRobotDataset v3 format: names of files and features, Parquet columns, and mp4 files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodichain.agents.datasets.frames import FrameLayout, Key, Leaf
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
CODEC = "h264"

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
            "video.codec": CODEC,
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


def from_column(column: Any) -> NDArray[Any]:
    """Return the numbers of an Arrow column, lists flattened."""
    arrow = require("pyarrow", extra="data")
    column = column.combine_chunks()
    while arrow.types.is_nested(column.type):
        column = column.flatten()
    return np.array(column.to_numpy(zero_copy_only=False))


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
