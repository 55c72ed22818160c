"""Which column or video of a LeRobotDataset each array of a frame becomes, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from embodichain.agents.engine.layout import FrameLayout, Key, Leaf

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
BOOKKEEPING = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Columns every LeRobotDataset has."""
_STATES: tuple[Key, ...] = (("observation", "robot", "qpos"), ("observation", "state"))
"""What is called ``observation.state``: the first of these that exists."""
_RENAMED: dict[Key, str] = {(name,): f"next.{name}" for name in ("reward", "terminated", "truncated")}


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

    def describe(self, fps: int, codec: str) -> dict[str, Any]:
        """Return the entry of this feature in ``info.json``."""
        if not self.is_video:
            return {"dtype": _name(self.leaf.dtype), "shape": list(self.leaf.shape) or [1], "names": None}
        height, width = self.size
        video = {
            "video.height": height,
            "video.width": width,
            "video.codec": codec,
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
    return [_feature(leaf, is_state=leaf.key == state) for leaf in layout.leaves]


def _feature(leaf: Leaf, is_state: bool) -> Feature:
    if leaf.dtype == torch.uint8 and len(leaf.shape) == 3 and 3 in (leaf.shape[0], leaf.shape[2]):
        camera = leaf.key[2:] if len(leaf.key) > 2 and leaf.key[1] == "image" else leaf.key[1:]
        return Feature(".".join(("observation.images", *camera)), leaf, channels_first=leaf.shape[2] != 3)
    if is_state:
        return Feature("observation.state", leaf)
    return Feature(_RENAMED.get(leaf.key, ".".join(leaf.key)), leaf)


def foreign_features(info: dict[str, Any]) -> list[Feature]:
    """Return the frames of a folder that somebody else wrote: observations, actions, and a reward if it has one."""
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


def place(number: int) -> dict[str, int]:
    """Return the chunk, and the file in it, of the ``number``-th file of a kind."""
    return {"chunk_index": number // FILES_PER_CHUNK, "file_index": number % FILES_PER_CHUNK}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
