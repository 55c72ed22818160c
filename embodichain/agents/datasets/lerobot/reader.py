"""Reads the episodes of a LeRobotDataset v3 folder, whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodichain.agents.datasets.frames import ENDS, Episode, FrameLayout, Key, Leaf
from embodichain.agents.datasets.lerobot import format as names
from embodichain.agents.datasets.lerobot.format import Feature, features_of, foreign_features, from_column, read_images
from embodichain.errors import DatasetError
from embodichain.extras import require


class LeRobotReader:
    """The episodes of a folder, by number.

    A folder of ours gives the frames back as they were recorded. Of any other, the observations and actions are read;
    a reward it does not have is 0, and the last frame of an episode is marked ``terminated``.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._parquet = require("pyarrow.parquet", extra="data")
        info = self._read_json(names.INFO_PATH)
        if info.get("codebase_version") != names.CODEBASE_VERSION:
            raise DatasetError(
                f"{self.root} is a dataset of version {info.get('codebase_version')}, expected {names.CODEBASE_VERSION}"
            )
        self.info = info
        self.fps = int(info["fps"])
        self._episodes = self._read_episodes()
        self._table: tuple[Path, Any] | None = None
        self._own: list[dict[str, Any]] = []
        self._missing: list[Leaf] = []
        if (self.root / names.OWN_PATH).exists():
            data = self._read_json(names.OWN_PATH)
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
        path = self.root / names.DATA_PATH.format(**_file_of(row, "data/"))
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
        path = self.root / names.VIDEO_PATH.format(video_key=feature.name, **_file_of(row, prefix))
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
