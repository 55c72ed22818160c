"""Visualizes an episode: a contact sheet with images and plots, or a video of all cameras side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodichain.agents.datasets.frames import Episode
from embodichain.agents.datasets.lerobot.reader import LeRobotReader
from embodichain.envs.recording import VideoWriter, caption, prepare_output
from embodichain.errors import DatasetError

_COLUMNS = 8
_CURVES = 6
"""Maximum number of plots."""
_FIRST = ("action", "observation.state", "next.reward")
"""Features that are plotted first."""
_LONGEST = 16
"""Longer vectors are not plotted."""

Images = NDArray[np.uint8]


def camera_images(reader: LeRobotReader, episode: Episode) -> dict[str, Images]:
    """Return the images ``[length, height, width, 3]`` of every camera."""
    return {feature.name: feature.values(episode) for feature in reader.features if feature.is_camera}


def curves(reader: LeRobotReader, episode: Episode) -> dict[str, NDArray[np.float64]]:
    """Return the first ``_CURVES`` vectors ``[length, n]`` to plot, by feature name."""
    found = {}
    for feature in sorted(reader.features, key=lambda f: _FIRST.index(f.name) if f.name in _FIRST else len(_FIRST)):
        if (
            feature.is_camera
            or feature.leaf.elements > _LONGEST
            or feature.name in ("next.terminated", "next.truncated")
        ):
            continue
        found[feature.name] = feature.values(episode).reshape(episode.length, -1).astype(np.float64)
    return dict(list(found.items())[:_CURVES])


def contact_sheet(reader: LeRobotReader, episode: Episode, out: Path, title: str) -> Path:
    """Write evenly spaced images and plots of the vectors to a PNG file, and return its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes half a second to import
    from matplotlib.figure import Figure

    target = prepare_output(out, (".png",))
    cameras, vectors = camera_images(reader, episode), curves(reader, episode)
    heights = [1.5] * len(cameras) + [1.4] * len(vectors)
    figure = Figure((14, sum(heights) + 1.0), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    grid = figure.add_gridspec(len(heights), _COLUMNS, height_ratios=heights)
    at = np.linspace(0, episode.length - 1, min(_COLUMNS, episode.length)).round().astype(int)
    for row, (name, images) in enumerate(cameras.items()):
        for column, frame in enumerate(at):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(images[frame])
            axes.set_axis_off()
            axes.set_title(f"{frame / reader.fps:.2f} s", fontsize=8, pad=2)
            if column == 0:
                axes.text(-0.06, 0.5, name.rpartition(".")[2], rotation=90, va="center", transform=axes.transAxes)
    seconds = np.arange(episode.length) / reader.fps
    labels = {feature.name: reader.names.get(feature.leaf.key) for feature in reader.features}
    for row, (name, values) in enumerate(vectors.items(), start=len(cameras)):
        axes = figure.add_subplot(grid[row, :])
        lines = axes.plot(seconds, values, linewidth=1.2)
        axes.set_title(name, loc="left", fontsize=9, pad=2)
        axes.margins(x=0)
        axes.tick_params(labelsize=7, labelbottom=row == len(heights) - 1)
        axes.spines[["top", "right"]].set_visible(False)
        named = labels[name]
        if named and 1 < len(named) <= _COLUMNS:
            axes.legend(lines, named, fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        if row == len(heights) - 1:
            axes.set_xlabel("seconds", fontsize=8)
    figure.savefig(target)
    return target


def film(reader: LeRobotReader, episode: Episode, out: Path, title: str) -> Path:
    """Write a video of all cameras side by side, at the recorded frame rate, and return its path."""
    cameras = list(camera_images(reader, episode).values())
    if not cameras:
        raise DatasetError(f"{reader.root} has no cameras to show: --out FILE.png draws curves")
    height = max(images.shape[1] for images in cameras)
    video = VideoWriter(out, reader.fps)
    try:
        for frame in range(episode.length):
            padded = [_padded(images[frame], height) for images in cameras]
            video.append(caption(np.concatenate(padded, axis=1), title))
        video.close()
    finally:
        video.close(keep=False)
    return video.path


def _padded(image: Images, height: int) -> Images:
    """Pad an image at the bottom to this height."""
    missing = height - image.shape[0]
    return np.pad(image, ((0, missing), (0, 0), (0, 0))) if missing else image
