"""Datasets made of others: some episodes of a folder, or those of several folders together.

Numbers are written anew, with statistics of what is in the new folder. Videos are copied as they are where whole files
are kept, and all of them are encoded alike; the images of other cameras are decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodichain.agents.datasets.frames import Episode, FrameLayout
from embodichain.agents.datasets.lerobot.format import BOOKKEEPING, DONE, SCENE_PATH, read_own
from embodichain.agents.datasets.lerobot.reader import LeRobotReader
from embodichain.agents.datasets.lerobot.statistics import FeatureStatistics
from embodichain.agents.datasets.lerobot.writer import LeRobotWriter
from embodichain.errors import DatasetError


@dataclass(frozen=True)
class EpisodeFacts:
    """What is known of an episode without its frames."""

    index: int
    length: int
    task: str | None
    success: bool | None


def episode_facts(reader: LeRobotReader) -> list[EpisodeFacts]:
    """Return what is known of every episode; only the numbers of each are looked at."""
    return [
        EpisodeFacts(index, length, reader.task_of(index), reader.origin_of(index).success)
        for index, length in enumerate(reader.lengths)
    ]


def open_folders(folders: Sequence[Path]) -> list[LeRobotReader]:
    """Open folders to make a dataset of; if one is from elsewhere, all are read by the names that they have.
    ``DatasetError`` lists in what they differ."""
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
    if problems:
        raise DatasetError("the folders cannot be merged:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return readers


def left_out(reader: LeRobotReader) -> list[str]:
    """Return the features of a folder that a new one will not have: text, and images that are not RGB."""
    kept = {feature.name for feature in reader.features} | {*BOOKKEEPING, DONE}
    return [name for name in reader.info.features if name not in kept]


def write_dataset(
    out: Path | str, parts: Sequence[tuple[LeRobotReader, Sequence[int]]], quality: int = 18
) -> Iterator[Episode]:
    """Write episodes of folders, which are alike, to a new one; yield each as it is written."""
    first = parts[0][0]
    if not any(chosen for _, chosen in parts):
        raise DatasetError(f"no episode is left for {out}")
    copied = _copied_cameras(parts)
    encodings = {name: first.info.features[name].info or {} for name in copied} if not first.is_own else {}
    writer = LeRobotWriter(
        out,
        first.layout if first.is_own else FrameLayout(tuple(feature.leaf for feature in first.features)),
        round(first.fps),
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
    scenes = {file.read_bytes() if (file := reader.root / SCENE_PATH).is_file() else b"" for reader, _ in parts}
    if scenes != {b""} and len(scenes) == 1:
        (Path(out) / SCENE_PATH).write_bytes(scenes.pop())


def _copied_cameras(parts: Sequence[tuple[LeRobotReader, Sequence[int]]]) -> list[str]:
    """Return the cameras whose videos can be copied: no file loses an episode, and all are encoded alike."""
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
    """Deal ``count`` episodes out by shares that add up to at most 1, in random order, or in theirs without a seed."""
    if not shares or min(shares.values()) <= 0 or sum(shares.values()) > 1 + 1e-9:
        raise DatasetError(f"expected positive shares that add up to at most 1, got {dict(shares)}")
    order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
    ends = np.rint(np.cumsum([0.0, *shares.values()]) * count).astype(int)
    parts = zip(shares, ends[:-1], ends[1:], strict=True)
    return {name: sorted(order[begin:end].tolist()) for name, begin, end in parts}


def filter_episodes(
    facts: Iterable[EpisodeFacts], conditions: Mapping[str, Callable[[EpisodeFacts], bool]]
) -> tuple[list[int], dict[str, int]]:
    """Return the episodes that fulfil all conditions, and how many each condition alone drops."""
    facts = list(facts)
    dropped = {name: sum(not holds(fact) for fact in facts) for name, holds in conditions.items()}
    return [fact.index for fact in facts if all(holds(fact) for holds in conditions.values())], dropped


def statistics_of(reader: LeRobotReader) -> dict[str, dict[str, list[float]]]:
    """Return the statistics of every feature, computed from its frames."""
    found = {feature.name: FeatureStatistics(feature.is_camera) for feature in reader.features}
    for index in range(len(reader)):
        frames = reader.read(index).frames
        for feature in reader.features:
            values = np.concatenate([piece.numpy() for piece in frames[feature.leaf.key]])
            found[feature.name].add(np.moveaxis(values, 1, -1) if feature.channels_first else values)
    return {name: statistics.result() for name, statistics in found.items()}
