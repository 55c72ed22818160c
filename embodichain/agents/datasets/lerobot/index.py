"""Reads the episode index and the tasks from the ``meta`` folder of a dataset.

Version 3 stores both as Parquet, and many episodes per data file. Version 2 stores both as JSON lines, and one episode
per data file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, Strict

from embodichain.agents.datasets.lerobot.format import (
    DATA_PATH,
    TASKS_PATH,
    VIDEO_PATH,
    Info,
    checked,
    find_inside,
)
from embodichain.errors import DatasetError
from embodichain.extras import require

OLD_EPISODES_PATH, OLD_TASKS_PATH = "meta/episodes.jsonl", "meta/tasks.jsonl"
OLD_DATA_PATH = "data/chunk-{chunk:03d}/episode_{episode:06d}.parquet"
OLD_VIDEO_PATH = "videos/chunk-{chunk:03d}/{video_key}/episode_{episode:06d}.mp4"
_INTEGERS = ("episode_index", "length", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index")
"""Required columns of ``meta/episodes``."""

OpenTable = Callable[[str, list[str] | None], Any]
Index = dict[str, NDArray[Any]]
"""Columns with one entry per episode: ``episode_index``, ``length``, ``first`` (index of its first frame), ``data``
(its Parquet file), and for every video ``video/<name>`` (its file) and ``from/<name>`` (its start in seconds)."""


class _OldEpisode(BaseModel):
    """A line of ``episodes.jsonl``."""

    episode_index: Annotated[int, Strict(), Field(ge=0, lt=1 << 40)]
    length: Annotated[int, Strict(), Field(ge=1, lt=1 << 40)]


class _Task(BaseModel):
    """A line of ``tasks.jsonl``, or a row of ``tasks.parquet``."""

    task_index: Annotated[int, Strict(), Field(ge=0, lt=1 << 40)]
    task: str


def read_index(root: Path, info: Info, videos: Sequence[str], open_table: OpenTable) -> Index:
    """Return the location of every episode's frames, sorted by ``episode_index``."""
    rows = _read_v2(root, info, videos) if info.is_old else _read_v3(root, videos, open_table)
    if not len(rows["length"]):
        raise DatasetError(f"{root} holds no episodes")
    index = rows["episode_index"]
    _check(root, "episode_index", index, len(set(index.tolist())) == len(index))
    order = np.argsort(index)
    rows = {name: values[order] for name, values in rows.items()}
    if "first" not in rows:
        rows["first"] = np.cumsum(rows["length"]) - rows["length"]
    return rows


def _read_v3(root: Path, videos: Sequence[str], open_table: OpenTable) -> Index:
    """Read ``meta/episodes/*/*.parquet`` of version 3."""
    integers, numbers = list(_INTEGERS), []
    for name in videos:
        integers += [f"videos/{name}/{part}" for part in ("chunk_index", "file_index")]
        numbers += [f"videos/{name}/from_timestamp"]
    parts = []
    for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")):
        table = open_table(path.relative_to(root).as_posix(), [*integers, *numbers])
        columns = (*integers, *numbers)
        parts.append({name: from_column(column_of(table, name, root), (), f"{root}: {name}") for name in columns})
    if not sum(len(part["length"]) for part in parts):
        raise DatasetError(f"{root} holds no episodes")
    rows = {name: np.concatenate([part[name] for part in parts]) for name in (*integers, *numbers)}
    for name in integers:
        bounds = (1 if name == "length" else 0, 10**6 if name.endswith(("chunk_index", "file_index")) else 1 << 62)
        _check(root, name, rows[name], rows[name].dtype.kind in "iu" and _within(rows[name], *bounds))
    for name in numbers:
        _check(root, name, rows[name], rows[name].dtype.kind == "f" and _within(rows[name], 0, 1 << 40))
    span = rows["dataset_to_index"] - rows["dataset_from_index"]
    _check(root, "dataset_to_index", rows["dataset_to_index"], np.array_equal(span, rows["length"]))

    def files(prefix: str, path: str, **keys: str) -> NDArray[Any]:
        numbers = zip(rows[f"{prefix}chunk_index"].tolist(), rows[f"{prefix}file_index"].tolist(), strict=True)
        return np.array([path.format(chunk_index=chunk, file_index=file, **keys) for chunk, file in numbers])

    index = {"episode_index": rows["episode_index"], "length": rows["length"], "first": rows["dataset_from_index"]}
    index["data"] = files("data/", DATA_PATH)
    for name in videos:
        index[f"video/{name}"] = files(f"videos/{name}/", VIDEO_PATH, video_key=name)
        index[f"from/{name}"] = rows[f"videos/{name}/from_timestamp"]
    return index


def _read_v2(root: Path, info: Info, videos: Sequence[str]) -> Index:
    """Read ``meta/episodes.jsonl`` of version 2."""
    path = find_inside(root, OLD_EPISODES_PATH)
    episodes = [checked(_OldEpisode, data, path) for data in _lines(path)]
    numbers = [{"chunk": e.episode_index // info.chunks_size, "episode": e.episode_index} for e in episodes]
    index: Index = {
        "episode_index": np.array([e.episode_index for e in episodes], np.int64),
        "length": np.array([e.length for e in episodes], np.int64),
        "data": np.array([OLD_DATA_PATH.format(**part) for part in numbers]),
    }
    for name in videos:
        index[f"video/{name}"] = np.array([OLD_VIDEO_PATH.format(video_key=name, **part) for part in numbers])
        index[f"from/{name}"] = np.zeros(len(episodes))
    return index


def read_tasks(root: Path, info: Info, open_table: OpenTable) -> dict[int, str]:
    """Return the tasks in words by ``task_index``; empty if the folder has none."""
    name = OLD_TASKS_PATH if info.is_old else TASKS_PATH
    if not (root / name).exists():
        return {}
    path = find_inside(root, name)
    if info.is_old:
        rows = _lines(path)
    else:
        # LeRobot writes this with pandas, where the task is the index, named or unnamed.
        rows = open_table(name, None).to_pylist()
        for row in rows:
            row.setdefault("task", row.get("__index_level_0__"))
    tasks = [checked(_Task, row, path) for row in rows]
    return {task.task_index: task.task for task in tasks}


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise DatasetError(f"{path} cannot be read: expected an object in every line")
    return rows


def column_of(table: Any, name: str, root: Path) -> Any:
    """Return the column of this name; ``DatasetError`` unless there is exactly one."""
    if table.column_names.count(name) != 1:
        raise DatasetError(f"{root}: a table has {table.column_names.count(name)} columns {name!r}, expected one")
    return table[name].combine_chunks()


def _check(root: Path, name: str, values: NDArray[Any], is_right: bool) -> None:
    if not is_right:
        raise DatasetError(f"{root}: the column {name} of meta/episodes is wrong: {values[:8].tolist()}")


def _within(values: NDArray[Any], low: int, high: int) -> bool:
    return bool(((values >= low) & (values < high)).all())  # False for NaN


def from_column(column: Any, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Return the numbers of an Arrow column whose rows have this shape, as a flat array."""
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
