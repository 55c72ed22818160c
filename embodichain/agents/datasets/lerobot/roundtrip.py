"""Records episodes to a folder, and verifies the folder by reading it back."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from embodichain.agents.datasets.frames import Episode, EpisodeSource, Key
from embodichain.agents.datasets.lerobot.format import features_of
from embodichain.agents.datasets.lerobot.reader import LeRobotReader
from embodichain.agents.datasets.lerobot.writer import LeRobotWriter
from embodichain.errors import DatasetError

_KEPT_IMAGE_BYTES = 256 << 20
"""Bytes of original images that are kept for verification."""
MOST_FAILURES = 1000
"""Number of consecutive failed episodes after which a recording of successes gives up."""
MIN_PSNR = 25.0
"""Images with a lower PSNR in decibels count as different; compression alone loses less."""


@dataclass
class Trace:
    """Data to verify a recorded episode: checksums of its arrays, and its images while memory allows."""

    length: int
    checksums: dict[Key, int]
    images: dict[Key, Tensor]
    task: str | None = None
    """Task description that was written; None for the writer's."""
    task_index: int = 0

    @classmethod
    def of(cls, episode: Episode, cameras: set[Key], keep: bool = True) -> Trace:
        """Return the trace of an episode; ``keep`` includes its images."""
        frames = {key: torch.cat(pieces).contiguous() for key, pieces in episode.frames.items()}
        numbers = {key: value.view(torch.uint8).numpy() for key, value in frames.items() if key not in cameras}
        images = {key: value for key, value in frames.items() if key in cameras and keep}
        checksums = {key: zlib.crc32(value.tobytes()) for key, value in numbers.items()}
        return cls(episode.length, checksums, images, episode.task, episode.task_index)


def record(
    source: EpisodeSource, writer: LeRobotWriter, episodes: int, only_success: bool = False, task: str | None = None
) -> Iterator[Trace]:
    """Write the next ``episodes`` episodes of a source; yield the trace of each.
    ``task`` replaces the task of every episode; None keeps them."""
    cameras = {feature.leaf.key for feature in features_of(source.layout) if feature.is_camera}
    left, image_bytes, failures = episodes, 0, 0
    while left:
        for episode in source.advance():
            if left == 0:
                break
            episode.check_finite()
            if only_success and not episode.success:
                failures += 1
                if failures == MOST_FAILURES:
                    status = f"{episodes - left} of {episodes} episodes are recorded, and then {failures} failed"
                    advice = "watch what acts with embodichain play, or keep episodes that fail, too"
                    raise DatasetError(f"{status} one after the other: {advice}")
                continue
            failures = 0
            written = episode if task is None else replace(episode, task=task)
            writer.add(written)
            trace = Trace.of(written, cameras, keep=image_bytes < _KEPT_IMAGE_BYTES)
            image_bytes += sum(image.nbytes for image in trace.images.values())
            left -= 1
            yield trace


def read_back(root: Path, traces: list[Trace]) -> float | None:
    """Compare a folder with the traces of its episodes; ``DatasetError`` at the first difference.
    Returns the lowest PSNR of an episode's images in decibels; None without cameras."""
    reader = LeRobotReader(root)
    if len(reader) != len(traces):
        raise DatasetError(f"{root} holds {len(reader)} episodes, but {len(traces)} were written")
    worst: float | None = None
    for index, trace in enumerate(traces):
        episode = reader.read(index)
        if episode.length != trace.length:
            raise DatasetError(f"episode {index} has {episode.length} frames, but {trace.length} were written")
        again = Trace.of(episode, set(trace.images))
        for key, checksum in trace.checksums.items():
            if again.checksums[key] != checksum:
                raise DatasetError(f"{'/'.join(key)} of episode {index} is not what was written")
        for key, image in trace.images.items():
            similarity = psnr(again.images[key], image)
            if similarity < MIN_PSNR:
                raise DatasetError(f"{'/'.join(key)} of episode {index} looks different: {similarity:.1f} dB")
            worst = similarity if worst is None else min(worst, similarity)
    return worst


def psnr(one: Tensor, other: Tensor) -> float:
    """Return the peak signal-to-noise ratio of two uint8 images in decibels: ``10 log10(255^2 / MSE)``."""
    error = float((one.float() - other.float()).square().mean())
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)
