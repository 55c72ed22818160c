"""Record the episodes of a source to a folder, and check that the folder gives them back."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodichain.agents.datasets.frames import Episode, Key
from embodichain.agents.datasets.lerobot.format import features_of
from embodichain.agents.datasets.lerobot.reader import LeRobotReader
from embodichain.agents.datasets.lerobot.writer import LeRobotWriter
from embodichain.errors import DatasetError

if TYPE_CHECKING:
    from embodichain.agents.engine.sources import EpisodeSource

_KEPT_PICTURES = 256 << 20
"""Bytes of original pictures that are kept for the comparison."""
MIN_PSNR = 25.0
"""Decibels below which a picture counts as another one; compression costs less."""


@dataclass
class Trace:
    """What is remembered of a recorded episode: checksums of its numbers, and its pictures while there is room."""

    length: int
    checksums: dict[Key, int]
    pictures: dict[Key, Tensor]


def record(
    source: EpisodeSource,
    writer: LeRobotWriter,
    episodes: int,
    only_success: bool = False,
    on_episode: Callable[[], None] = lambda: None,
) -> list[Trace]:
    """Write the next ``episodes`` episodes of a source and return their traces."""
    cameras = {feature.leaf.key for feature in features_of(source.layout) if feature.is_video}
    traces: list[Trace] = []
    kept = 0
    while len(traces) < episodes:
        for episode in source.advance()[: episodes - len(traces)]:
            episode.check_finite()
            if only_success and not episode.success:
                continue
            writer.add(episode)
            trace = _trace(episode, cameras, keep=kept < _KEPT_PICTURES)
            kept += sum(picture.nbytes for picture in trace.pictures.values())
            traces.append(trace)
            on_episode()
    return traces


@dataclass(frozen=True)
class ReadBack:
    """The result of reading a folder back."""

    episodes: int
    frames: int
    psnr: float | None
    """Worst likeness of an episode's pictures to the originals, in decibels; None without cameras."""


def read_back(root: Path, traces: list[Trace]) -> ReadBack:
    """Compare a folder with what was written to it; raise DatasetError at the first difference."""
    reader = LeRobotReader(root)
    if len(reader) != len(traces):
        raise DatasetError(f"{root} holds {len(reader)} episodes, but {len(traces)} were written")
    worst: float | None = None
    for index, trace in enumerate(traces):
        episode = reader.read(index)
        if episode.length != trace.length:
            raise DatasetError(f"episode {index} has {episode.length} frames, but {trace.length} were written")
        again = _trace(episode, set(trace.pictures), keep=True)
        for key, checksum in trace.checksums.items():
            if again.checksums[key] != checksum:
                raise DatasetError(f"{'/'.join(key)} of episode {index} is not what was written")
        for key, picture in trace.pictures.items():
            likeness = psnr(again.pictures[key], picture)
            if likeness < MIN_PSNR:
                raise DatasetError(f"{'/'.join(key)} of episode {index} looks different: {likeness:.1f} dB")
            worst = likeness if worst is None else min(worst, likeness)
    return ReadBack(len(traces), sum(trace.length for trace in traces), worst)


def psnr(one: Tensor, other: Tensor) -> float:
    """Return the likeness of two uint8 pictures in decibels: ``10 log10(255^2 / mean squared difference)``."""
    error = float((one.float() - other.float()).square().mean())
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def _trace(episode: Episode, cameras: set[Key], keep: bool) -> Trace:
    frames = {key: torch.cat(pieces).contiguous() for key, pieces in episode.frames.items()}
    numbers = {
        key: zlib.crc32(value.view(torch.uint8).numpy().tobytes())
        for key, value in frames.items()
        if key not in cameras
    }
    pictures = {key: value for key, value in frames.items() if key in cameras and keep}
    return Trace(episode.length, numbers, pictures)
