"""The format of a LeRobotDataset v3 folder: paths, features, and validation of the JSON files in ``meta``."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, Strict, StrictInt, ValidationError

from embodichain.agents.datasets.frames import Episode, FrameLayout, Key, Leaf
from embodichain.errors import DatasetError, EmbodiChainError

CODEBASE_VERSION = "v3.0"
"""Version that is written."""
OLD_VERSIONS = ("v2.1", "v2.0")
"""Versions that can also be read: one file per episode, and JSON lines instead of Parquet files in ``meta``."""
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
TASKS_PATH = "meta/tasks.parquet"
INFO_PATH = "meta/info.json"
STATS_PATH = "meta/stats.json"
OWN_PATH = "meta/embodichain.json"
SCENE_PATH = "meta/embodichain_scene.json"
"""Settings of the environment, written if body poses are recorded for the viewer."""
FILES_PER_CHUNK = 1000

DONE = "next.done"
BOOKKEEPING = {"timestamp": "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
"""Columns of every LeRobotDataset."""
_STATES: tuple[Key, ...] = (("observation", "state"), ("observation", "robot", "qpos"))
"""The first of these keys that exists is called ``observation.state``."""
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
"""Supported dtypes."""
_CHANNELS = 3
ID_NAMES = "segmentation.names"
"""Key of the names of a segmentation's ids in the ``info`` of its feature, which LeRobot keeps but does not read."""
_AXES = {r"(.*_)?quat": "wxyz", r"(.*_)?(pos|vel|linvel|angvel|offset|axis)": "xyz"}
"""Names of the elements of vectors, by pattern of the key."""

_Size = Annotated[int, Strict(), Field(ge=1, lt=1 << 31)]
_Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 62)]
_Rate = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class Feature:
    """One array of a frame and its name in the dataset."""

    name: str
    leaf: Leaf
    channels_first: bool | None = None
    """Whether a camera's images are ``[3, height, width]``; None if it is not a camera."""
    in_table: bool = False
    """Whether a camera's images are stored in the Parquet table instead of a video."""

    @property
    def is_camera(self) -> bool:
        """Whether the feature is an image."""
        return self.channels_first is not None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a camera."""
        height, width = self.leaf.shape[1:] if self.channels_first else self.leaf.shape[:2]
        return height, width

    @property
    def pixel_format(self) -> str:
        """Pixel format of a camera's video: chroma is subsampled unless the size is odd."""
        return "yuv444p" if self.size[0] % 2 or self.size[1] % 2 else "yuv420p"

    def values(self, episode: Episode) -> NDArray[Any]:
        """Return the frames ``[length, ...]`` of this feature in an episode; images are channels-last."""
        frames = torch.cat(episode.frames[self.leaf.key]).numpy()
        return np.moveaxis(frames, 1, -1) if self.channels_first else frames

    def describe(self, fps: float, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the entry of this feature in ``info.json``.

        ``names`` of a vector are used if there is one per element; those of a segmentation are of its ids.
        """
        if not self.is_camera:
            dtype, shape = str(self.leaf.dtype).removeprefix("torch."), list(self.leaf.shape) or [1]
            if names is not None and is_segmentation(self.leaf.key):
                return {"dtype": dtype, "shape": shape, "names": None, "info": {ID_NAMES: list(names)}}
            known = list(names) if names is not None and shape == [len(names)] else default_names(self.leaf)
            return {"dtype": dtype, "shape": shape, "names": known}
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


def is_segmentation(key: Key) -> bool:
    """Return whether an array has the ids that a camera sees."""
    return key[:2] == ("observation", "segmentation")


def default_names(leaf: Leaf) -> list[str] | None:
    """Return names for the elements of a vector: axes such as ``xyz`` if the key suggests them, else numbered names;
    None for other arrays and instructions."""
    if leaf.key[0] not in ("observation", "action") or len(leaf.shape) != 1 or leaf.key[-1] == "instruction":
        return None
    name, size = leaf.key[-1], leaf.shape[0]
    axes = next((axes for keys, axes in _AXES.items() if re.fullmatch(keys, name) and len(axes) >= size > 1), None)
    return [name] if size == 1 else list(axes[:size]) if axes else [f"{name}_{i}" for i in range(size)]


def features_of(layout: FrameLayout) -> list[Feature]:
    """Return the feature of every array of a frame; ``DatasetError`` for invalid or duplicate names."""
    state = next((key for key in _STATES if layout.shape_of(*key) is not None), None)
    renamed: dict[Key | None, str] = {(name,): f"next.{name}" for name in ("reward", "terminated", "truncated")}
    renamed[state] = "observation.state"
    features = []
    for leaf in layout.leaves:
        if leaf.dtype == torch.uint8 and len(leaf.shape) == 3 and _CHANNELS in (leaf.shape[0], leaf.shape[2]):
            camera = leaf.key[2:] if len(leaf.key) > 2 and leaf.key[1] == "image" else leaf.key[1:]
            name = ".".join(("observation.images", *camera))
            features.append(Feature(name, leaf, channels_first=leaf.shape[2] != _CHANNELS))
        else:
            features.append(Feature(renamed.get(leaf.key, ".".join(leaf.key)), leaf))
    taken = dict.fromkeys((*BOOKKEEPING, DONE), "the format itself")
    for feature in features:
        check_name(feature.name)
        key = "/".join(feature.leaf.key)
        if feature.name in taken:
            raise DatasetError(f"{key} cannot be called {feature.name!r}, which is the name of {taken[feature.name]}")
        taken[feature.name] = key
    return features


def check_name(name: str) -> None:
    """Raise ``DatasetError`` for names that could escape the folder; LeRobot rejects slashes as well."""
    if not name or name in (".", "..") or any(sign in name for sign in "/\\\0"):
        raise DatasetError(f"the feature {name!r} has a name with a slash, or none; rename it")


class FeatureEntry(BaseModel):
    """Entry of one feature in ``info.json``."""

    dtype: Annotated[str, Strict()]
    shape: Annotated[list[_Size], Field(max_length=8)]
    names: Any = None
    info: dict[str, Any] | None = None
    """Encoding of a camera's videos, or the names of the ids of a segmentation."""

    @property
    def id_names(self) -> list[str] | None:
        """Names of the ids of a segmentation, by id; None if there are none."""
        names = (self.info or {}).get(ID_NAMES)
        return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None

    @property
    def vector_names(self) -> list[str] | None:
        """Names of a vector's elements, given as a list or as ``{axis: list}``; None if there are none."""
        names = self.names
        if isinstance(names, dict) and len(names) == 1:
            names = next(iter(names.values()))
        is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return names if is_list and self.shape == [len(names)] else None


class Info(BaseModel):
    """The part of ``info.json`` that is read."""

    codebase_version: str = CODEBASE_VERSION
    robot_type: str | None = None
    fps: _Rate
    total_episodes: _Count
    total_frames: _Count
    chunks_size: _Size = FILES_PER_CHUNK
    features: dict[str, FeatureEntry]

    @property
    def is_old(self) -> bool:
        """Whether the folder has version 2, with one file per episode."""
        return self.codebase_version in OLD_VERSIONS


class Checksum(BaseModel):
    """Size and CRC-32 of a file."""

    model_config = ConfigDict(extra="forbid")

    bytes: _Count
    crc32: _Count


class OwnEpisode(BaseModel):
    """Metadata of an episode that LeRobot's format does not have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: StrictInt = -1
    success: bool | None = None
    policy_version: StrictInt = -1


class Own(BaseModel):
    """``embodichain.json``; version 1 had neither checksums nor a frame rate."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1, 2] = 1
    layout: list[tuple[Annotated[list[str], Field(min_length=1)], str, list[_Size]]]
    episodes: list[OwnEpisode]
    fps: _Rate | None = None
    checksums: dict[str, Checksum] = {}
    crc32: _Count | None = None

    def frame_layout(self) -> FrameLayout:
        """Return the layout of the recorded frames."""
        leaves = [
            Leaf(tuple(key), torch_dtype("/".join(key), dtype), tuple(shape)) for key, dtype, shape in self.layout
        ]
        return checked_layout(leaves)


def torch_dtype(name: str, dtype: str) -> torch.dtype:
    """Return the dtype of a feature; ``DatasetError`` if it is not supported."""
    if dtype not in _DTYPES:
        raise DatasetError(f"{name} is of type {dtype!r}, which is not read; expected one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def checked_layout(leaves: Sequence[Leaf]) -> FrameLayout:
    """Return a layout; ``DatasetError`` if a key is empty, occurs twice, or is nested in another."""
    keys = {leaf.key for leaf in leaves}
    inner = {key[:depth] for key in keys for depth in range(1, len(key))}
    wrong = next((key for key in keys if not all(key) or key in inner), None)
    if wrong is not None or len(keys) < len(leaves):
        twice = wrong or next(leaf.key for i, leaf in enumerate(leaves) if leaf.key in {o.key for o in leaves[:i]})
        raise DatasetError(f"{'/'.join(twice)}: this key is empty in part, occurs twice, or is inside of another one")
    return FrameLayout(tuple(leaves))


def foreign_features(entries: Mapping[str, FeatureEntry], whole: bool = False) -> list[Feature]:
    """Return the features that are read from a folder of another program: observations, actions, and, if any, reward,
    ``terminated`` and ``truncated``.

    ``whole`` adds all other numeric features under their names. Text and images that are not RGB, such as depth maps,
    are skipped.
    """
    features = []
    for name, entry in entries.items():
        shape = tuple(entry.shape)
        if entry.dtype in ("video", "image"):
            if len(shape) != 3:
                raise DatasetError(f"{name} is an image of shape {list(shape)}, expected height, width and channels")
            if _CHANNELS not in (shape[0], shape[2]):
                continue
            check_name(name)
            camera = name.removeprefix("observation.").removeprefix("images.").split(".")
            leaf = Leaf(("observation", "image", *camera), torch.uint8, shape)
            features.append(Feature(name, leaf, shape[2] != _CHANNELS, in_table=entry.dtype == "image"))
        elif name == "next.reward":
            features.append(Feature(name, Leaf(("reward",), torch.float32, ())))
        elif name in ("next.terminated", "next.truncated") and entry.dtype == "bool" and shape in ((), (1,)):
            features.append(Feature(name, Leaf((name.removeprefix("next."),), torch.bool, ())))
        elif _is_read(name, entry.dtype, whole):
            features.append(Feature(name, Leaf(tuple(name.split(".")), torch_dtype(name, entry.dtype), shape)))
    if not any(feature.name == "action" for feature in features):
        raise DatasetError("there is no feature 'action' in meta/info.json")
    return features


def _is_read(name: str, dtype: str, whole: bool) -> bool:
    """Return whether a feature is read: observations and actions, or with ``whole`` all but bookkeeping columns."""
    if name == "action" or name.startswith("observation."):
        return dtype not in ("string", "language")
    return whole and name not in BOOKKEEPING and dtype in _DTYPES


def file_indices(number: int) -> dict[str, int]:
    """Return chunk and file index of the ``number``-th file of a kind."""
    return {"chunk_index": number // FILES_PER_CHUNK, "file_index": number % FILES_PER_CHUNK}


def checksum_of(file: Path) -> dict[str, int]:
    """Return size and CRC-32 of a file."""
    crc, size = 0, 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": crc}


def data_checksum(data: Mapping[str, Any]) -> int:
    """Return the CRC-32 of JSON data, without its entry ``crc32``."""
    content = {name: value for name, value in data.items() if name != "crc32"}
    return zlib.crc32(json.dumps(content, separators=(",", ":")).encode())


@contextmanager
def reading(root: Path) -> Iterator[None]:
    """Convert any exception of a parser to a ``DatasetError`` that names the folder."""
    try:
        yield
    except EmbodiChainError:
        raise
    except Exception as error:  # parsers raise almost anything for damaged files
        reason = (str(error).strip() or "no further message").splitlines()[0]
        raise DatasetError(f"{root} cannot be read: {type(error).__name__}: {reason}") from error


def find_inside(root: Path, name: str) -> Path:
    """Return the path of a file in a folder; links that leave it are rejected, except in the Hugging Face cache."""
    base, path = root.resolve(), (root / name).resolve()
    blobs = [parent.with_name("blobs") for parent in base.parents if parent.name == "snapshots"]
    if not any(path.is_relative_to(folder) for folder in (base, *blobs)):
        raise DatasetError(f"{root / name} lies outside of the folder")
    if not path.is_file():
        raise DatasetError(f"{root / name} is missing, or no file")
    return path


def read_json(root: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file that holds one object."""
    if not (root / name).exists():
        raise DatasetError(f"{root} is no LeRobotDataset: there is no {name}")
    data = json.loads(find_inside(root, name).read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise DatasetError(f"{root / name} cannot be read: expected an object, got {type(data).__name__}")
    return data


def checked(model: type[_Model], data: Mapping[str, Any], path: Path) -> _Model:
    """Validate data with a pydantic model; ``DatasetError`` names the first invalid entry."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DatasetError(f"{path}: {where}: {first['msg']}, got {first['input']!r:.80}") from None


def read_info(root: Path) -> Info:
    """Read and validate ``info.json``."""
    data = read_json(root, INFO_PATH)
    version = data.get("codebase_version")
    if version not in (CODEBASE_VERSION, *OLD_VERSIONS):
        read = ", ".join((CODEBASE_VERSION, *OLD_VERSIONS))
        raise DatasetError(f"{root} is a dataset of version {version}, expected one of {read}")
    return checked(Info, data, root / INFO_PATH)


def read_own(root: Path) -> Own | None:
    """Read and validate ``embodichain.json``; None if another program wrote the folder."""
    if not (root / OWN_PATH).exists():
        return None
    data = read_json(root, OWN_PATH)
    own = checked(Own, data, root / OWN_PATH)
    if own.version > 1 and (own.fps is None or own.crc32 != data_checksum(data)):
        raise DatasetError(f"{root / OWN_PATH} is damaged: its content does not match its checksum")
    return own
