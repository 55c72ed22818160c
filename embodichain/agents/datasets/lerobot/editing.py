"""Builds datasets from others: filters, splits and merges folders.

Tables and statistics are rewritten. A camera's videos are copied unchanged if whole files are kept and all have the
same encoding; otherwise they are decoded and encoded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodichain.agents.datasets.frames import Episode, FrameLayout
from embodichain.agents.datasets.lerobot.format import BOOKKEEPING, DONE, SCENE_PATH, is_segmentation, read_own
from embodichain.agents.datasets.lerobot.reader import LeRobotReader
from embodichain.agents.datasets.lerobot.statistics import FeatureStatistics
from embodichain.agents.datasets.lerobot.writer import LeRobotWriter
from embodichain.errors import DatasetError

_NOT_DRAWN = ("num_envs", "max_episode_steps", "seed", "device", "num_threads")
_NOT_DRAWN_OF_TASK = ("terminate_on_success",)
"""Settings of a scene, and of its section ``env``, that do not change how a recorded state is drawn."""


@dataclass(frozen=True)
class EpisodeFacts:
    """Metadata of an episode."""

    index: int
    length: int
    task: str | None
    success: bool | None


def episode_facts(reader: LeRobotReader) -> list[EpisodeFacts]:
    """Return the metadata of every episode, without decoding images."""
    return [
        EpisodeFacts(index, length, reader.task_of(index), reader.origin_of(index).success)
        for index, length in enumerate(reader.lengths)
    ]


def open_folders(folders: Sequence[Path]) -> list[LeRobotReader]:
    """Open folders to merge; if another program wrote one of them, all are read under their LeRobot names.
    Raises ``DatasetError`` with a list of differences if they are incompatible."""
    whole = any(read_own(folder) is None for folder in folders if (folder / "meta").is_dir())
    readers = [LeRobotReader(folder, whole) for folder in folders]
    first = readers[0]
    problems = []
    for other in readers[1:]:
        where = f"{other.root}, unlike {first.root}:"
        if other.fps != first.fps:
            problems.append(f"{where} {other.fps:g} frames per second, not {first.fps:g}")
        if other.info.robot_type != first.info.robot_type:
            problems.append(f"{where} robot {other.info.robot_type}, not {first.info.robot_type}")
        mine, theirs = (
            {f.name: f"{'image' if f.is_camera else f.leaf.dtype} {list(f.leaf.shape)}" for f in reader.features}
            for reader in (first, other)
        )
        problems += [f"{where} {name} is missing" for name in mine if name not in theirs]
        problems += [f"{where} {name} is there" for name in theirs if name not in mine]
        both = [name for name in mine if name in theirs and mine[name] != theirs[name]]
        problems += [f"{where} {name} is {theirs[name]}, not {mine[name]}" for name in both]
        for feature in first.features:  # ids of a segmentation mean bodies of one scene
            named = [reader.names.get(feature.leaf.key) for reader in (first, other)]
            if is_segmentation(feature.leaf.key) and named[0] != named[1]:
                unnamed = "it is not known of which bodies the ids of {} are"
                problem = unnamed if None in named else "the ids of {} are of other bodies"
                problems.append(f"{where} {problem.format(feature.name)}")
    if problems:
        raise DatasetError("the folders cannot be merged:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return readers


def left_out(reader: LeRobotReader) -> list[str]:
    """Return the features that a new folder will lack: text, and images that are not RGB."""
    kept = {feature.name for feature in reader.features} | {*BOOKKEEPING, DONE}
    return [name for name in reader.info.features if name not in kept]


def write_dataset(
    out: Path | str, parts: Sequence[tuple[LeRobotReader, Sequence[int]]], quality: int = 18
) -> Iterator[Episode]:
    """Write chosen episodes of compatible folders to a new folder; yield each one as it is written."""
    first = parts[0][0]
    if not any(chosen for _, chosen in parts):
        raise DatasetError(f"no episode is left for {out}")
    copied = _copied_cameras(parts)
    encodings = {name: first.info.features[name].info or {} for name in copied} if not first.is_own else {}
    writer = LeRobotWriter(
        out,
        first.layout if first.is_own else FrameLayout(tuple(feature.leaf for feature in first.features)),
        int(first.fps) if first.fps.is_integer() else first.fps,
        "",
        first.info.robot_type,
        quality,
        first.names,
        None if first.is_own else first.features,
        encodings,
    )
    with writer:
        for reader, chosen in parts:
            for index in chosen:
                videos = {name: reader.video_of(index, name) for name in copied}
                episode = reader.read(index)
                writer.add(episode, {name: (reader.root / file, at) for name, (file, at) in videos.items()})
                yield episode
    scenes = [_scene_of(reader.root) for reader, _ in parts]
    if scenes[0] is not None and all(scene == scenes[0] for scene in scenes):
        (Path(out) / SCENE_PATH).write_bytes((first.root / SCENE_PATH).read_bytes())


def loses_scene(out: Path, parts: Sequence[tuple[LeRobotReader, Sequence[int]]]) -> bool:
    """Return whether a written folder has no scene although a part of it has one."""
    return not (out / SCENE_PATH).is_file() and any((reader.root / SCENE_PATH).is_file() for reader, _ in parts)


def _scene_of(root: Path) -> Any:
    """Return the settings of a folder's scene that change how it is drawn; ``None`` if it has no scene."""
    file = root / SCENE_PATH
    if not file.is_file():
        return None
    content = file.read_bytes()
    try:
        config = json.loads(content)["gym_config"]
        kept = {name: value for name, value in config.items() if name not in _NOT_DRAWN}
        task = {name: value for name, value in config.get("env", {}).items() if name not in _NOT_DRAWN_OF_TASK}
    except (ValueError, KeyError, TypeError, AttributeError):  # not written by this package
        return content
    return kept | {"env": task}


def _copied_cameras(parts: Sequence[tuple[LeRobotReader, Sequence[int]]]) -> list[str]:
    """Return the cameras whose videos can be copied: every file keeps all its episodes, and encodings are equal."""
    first = parts[0][0]
    names = [feature.name for feature in first.features if feature.is_camera and not feature.in_table]
    return [
        name
        for name in names
        if all(_keeps_files(reader, chosen, name) for reader, chosen in parts)
        and all(reader.info.features[name].info == first.info.features[name].info for reader, _ in parts)
    ]


def _keeps_files(reader: LeRobotReader, chosen: Sequence[int], camera: str) -> bool:
    kept = set(chosen)
    files = [reader.video_of(index, camera)[0] for index in range(len(reader))]
    needed = {files[index] for index in kept}
    return all(index in kept for index, file in enumerate(files) if file in needed)


def split_episodes(count: int, shares: Mapping[str, float], seed: int | None) -> dict[str, list[int]]:
    """Split ``count`` episodes by shares that sum to at most 1, at random, or in order if ``seed`` is None."""
    if not shares or min(shares.values()) <= 0 or sum(shares.values()) > 1 + 1e-9:
        raise DatasetError(f"expected positive shares that add up to at most 1, got {dict(shares)}")
    order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
    ends = np.rint(np.cumsum([0.0, *shares.values()]) * count).astype(int)
    parts = zip(shares, ends[:-1], ends[1:], strict=True)
    return {name: sorted(order[begin:end].tolist()) for name, begin, end in parts}


def filter_episodes(
    facts: Iterable[EpisodeFacts], conditions: Mapping[str, Callable[[EpisodeFacts], bool]]
) -> tuple[list[int], dict[str, int]]:
    """Return the indices of episodes that satisfy all conditions, and how many each condition alone drops."""
    facts = list(facts)
    dropped = {name: sum(not holds(fact) for fact in facts) for name, holds in conditions.items()}
    return [fact.index for fact in facts if all(holds(fact) for holds in conditions.values())], dropped


def statistics_of(reader: LeRobotReader) -> dict[str, dict[str, list[float]]]:
    """Return the statistics of every feature, computed from its frames."""
    found = {feature.name: FeatureStatistics(feature.is_camera) for feature in reader.features}
    for index in range(len(reader)):
        episode = reader.read(index)
        for feature in reader.features:
            found[feature.name].add(feature.values(episode))
    return {name: statistics.result() for name, statistics in found.items()}
