"""Pictures that need no OpenGL: an episode seen from above, and text on a frame."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from embodichain.envs.videos import prepare_output

Color = tuple[int, int, int]
BLUE, ORANGE, GREEN, RED = (46, 108, 190), (230, 126, 34), (39, 152, 86), (200, 60, 60)
_INK, _GREY, _GRID, _PAPER = (40, 44, 52), (130, 136, 146), (232, 234, 238), (255, 255, 255)
_SHARP = 3  # everything is drawn this much larger and scaled down, which smooths lines and circles


@dataclass(frozen=True)
class Trail:
    """The way of something over the table: ``points`` ``[n, 2]`` in metres, in time order."""

    name: str
    points: np.ndarray
    color: Color = BLUE


@dataclass(frozen=True)
class Marker:
    """A thing on the table that does not move: a disc or a square of the given radius (half side) in metres."""

    name: str
    position: tuple[float, float]
    radius: float
    color: Color = GREEN
    shape: Literal["disc", "square"] = "disc"


def draw_top_down(
    trails: Sequence[Trail], markers: Sequence[Marker] = (), title: str = "", size: tuple[int, int] = (640, 900)
) -> Image.Image:
    """Draw an episode as seen from above, x to the right and y up, to one scale; ``size`` is (height, width).

    A trail begins at a ring, ends at a dot and grows stronger with time.
    """
    chart = _Chart(_bounds(trails, markers), size)
    chart.axes()
    for marker in markers:
        chart.marker(marker)
    for trail in trails:
        chart.trail(trail)
    chart.scale_bar()
    chart.legend(trails, markers)
    if title:
        chart.text((chart.left, chart.top / 2), title, 20, _INK, "lm")
    return chart.finish()


def _bounds(trails: Sequence[Trail], markers: Sequence[Marker]) -> np.ndarray:
    """Return the corners ``[2, 2]`` (lowest, highest) of all that is to be seen, with some air around it."""
    points = [np.asarray(t.points, dtype=np.float64).reshape(-1, 2) for t in trails]
    for marker in markers:
        points.append(np.asarray(marker.position) + marker.radius * np.array([[-1.0, -1.0], [1.0, 1.0]]))
    every = np.concatenate(points) if points else np.empty((0, 2))
    every = every[np.isfinite(every).all(axis=1)]
    if not len(every):
        return np.array([[-0.5, -0.5], [0.5, 0.5]])
    low, high = every.min(axis=0), every.max(axis=0)
    air = max(0.08 * float((high - low).max()), 0.02)
    return np.stack((low - air, high + air))


@dataclass
class _Chart:
    """Paper with a coordinate system; lengths in its methods are pixels of the finished picture."""

    bounds: np.ndarray
    size: tuple[int, int]
    left: float = 64.0
    top: float = 52.0
    right: float = 190.0  # room for the legend
    bottom: float = 52.0
    image: Image.Image = field(init=False)

    def __post_init__(self) -> None:
        height, width = self.size
        self.image = Image.new("RGB", (width * _SHARP, height * _SHARP), _PAPER)
        self._pen = ImageDraw.Draw(self.image, "RGBA")
        self._box = (self.left, self.top, width - self.right, height - self.bottom)
        room = np.array([self._box[2] - self._box[0], self._box[3] - self._box[1]])
        extent = self.bounds[1] - self.bounds[0]
        self._scale = float((room / extent).min())  # pixels per metre, the same both ways
        middle = self.bounds.mean(axis=0)
        self.bounds = np.stack((middle - room / self._scale / 2, middle + room / self._scale / 2))

    def place(self, points: np.ndarray) -> np.ndarray:
        """Map metres ``[n, 2]`` to pixels ``[n, 2]``."""
        x = self._box[0] + (points[:, 0] - self.bounds[0, 0]) * self._scale
        y = self._box[3] - (points[:, 1] - self.bounds[0, 1]) * self._scale
        return np.stack((x, y), axis=1)

    def line(self, points: Sequence[tuple[float, float]], color: tuple[int, ...], width: float) -> None:
        scaled = [(x * _SHARP, y * _SHARP) for x, y in points]
        self._pen.line(scaled, fill=color, width=round(width * _SHARP), joint="curve")

    def disc(
        self, at: Sequence[float], radius: float, fill: tuple[int, ...], edge: tuple[int, ...], width: float
    ) -> None:
        box = [
            (at[0] - radius) * _SHARP,
            (at[1] - radius) * _SHARP,
            (at[0] + radius) * _SHARP,
            (at[1] + radius) * _SHARP,
        ]
        self._pen.ellipse(box, fill=fill, outline=edge, width=round(width * _SHARP))

    def square(self, at: Sequence[float], radius: float, fill: tuple[int, ...], edge: Color, width: float) -> None:
        box = [
            (at[0] - radius) * _SHARP,
            (at[1] - radius) * _SHARP,
            (at[0] + radius) * _SHARP,
            (at[1] + radius) * _SHARP,
        ]
        self._pen.rectangle(box, fill=fill, outline=edge, width=round(width * _SHARP))

    def text(self, at: Sequence[float], text: str, size: int, color: Color, anchor: str) -> None:
        self._pen.text((at[0] * _SHARP, at[1] * _SHARP), text, color, _font(size * _SHARP), anchor=anchor)

    def axes(self) -> None:
        """Draw the grid with its numbers."""
        x0, y0, x1, y1 = self._box
        step = _round_length(float((self.bounds[1] - self.bounds[0]).max()) / 7)
        digits = max(0, -math.floor(math.log10(step)))
        for axis, name in enumerate("xy"):
            first = math.ceil(self.bounds[0, axis] / step)
            for tick in range(first, math.floor(self.bounds[1, axis] / step) + 1):
                x, y = self.place(np.full((1, 2), tick * step))[0]
                label = f"{tick * step:.{digits}f}"
                if name == "x":
                    self.line([(x, y0), (x, y1)], _GRID, 1)
                    self.text((x, y1 + 8), label, 12, _GREY, "ma")
                else:
                    self.line([(x0, y), (x1, y)], _GRID, 1)
                    self.text((x0 - 8, y), label, 12, _GREY, "rm")
        self.line([(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)], _GREY, 1)
        self.text(((x0 + x1) / 2, y1 + 28), "x [m]", 13, _INK, "ma")
        self.text((14, y0 - 6), "y [m]", 13, _INK, "ls")

    def marker(self, marker: Marker) -> None:
        """Draw a resting thing, translucent, so that trails show through."""
        at, radius = self.place(np.asarray([marker.position], dtype=np.float64))[0], marker.radius * self._scale
        self._shape(at, radius, marker)

    def trail(self, trail: Trail) -> None:
        """Draw a way: faint where it begins, strong where it ends."""
        points = np.asarray(trail.points, dtype=np.float64).reshape(-1, 2)
        pixels = self.place(points[np.isfinite(points).all(axis=1)])
        if not len(pixels):
            return
        for i in range(len(pixels) - 1):
            strength = 0.35 + 0.65 * (i + 1) / (len(pixels) - 1)
            color = tuple(round(255 + (c - 255) * strength) for c in trail.color)
            self.line([tuple(pixels[i]), tuple(pixels[i + 1])], color, 2.5)
            self.disc(pixels[i + 1], 1.2, color, color, 0)
        self.disc(pixels[0], 5.5, _PAPER, trail.color, 2)
        self.disc(pixels[-1], 5.5, trail.color, _PAPER, 1.5)

    def scale_bar(self) -> None:
        """Draw a bar of a round length in the lower right corner."""
        metres = _round_length(0.2 * (self._box[2] - self._box[0]) / self._scale)
        x1, y = self._box[2] - 14, self._box[3] - 14
        x0 = x1 - metres * self._scale
        self.line([(x0, y), (x1, y)], _INK, 2)
        for x in (x0, x1):
            self.line([(x, y - 4), (x, y + 4)], _INK, 2)
        label = f"{metres:g} m" if metres >= 1 else f"{metres * 100:g} cm"
        self.text(((x0 + x1) / 2, y - 8), label, 13, _INK, "ms")

    def legend(self, trails: Sequence[Trail], markers: Sequence[Marker]) -> None:
        """Name what is drawn, on the right."""
        x, y = self._box[2] + 18, self._box[1] + 12
        for trail in trails:
            self.line([(x, y), (x + 26, y)], trail.color, 2.5)
            self.disc((x, y), 4.5, _PAPER, trail.color, 2)
            self.disc((x + 26, y), 4.5, trail.color, _PAPER, 1)
            self.text((x + 38, y), trail.name, 14, _INK, "lm")
            y += 26
        for marker in markers:
            self._shape((x + 13, y), 8, marker)
            self.text((x + 38, y), marker.name, 14, _INK, "lm")
            y += 26
        if trails:
            self.text((x - 5, y + 4), "ring: start, dot: end", 12, _GREY, "lm")

    def finish(self) -> Image.Image:
        """Return the picture at its real size."""
        return self.image.resize((self.size[1], self.size[0]), Image.Resampling.LANCZOS)

    def _shape(self, at: Sequence[float], radius: float, marker: Marker) -> None:
        draw = self.disc if marker.shape == "disc" else self.square
        draw(at, radius, (*marker.color, 60), marker.color, 1.5)


def _round_length(length: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is not above a length."""
    power = 10.0 ** math.floor(math.log10(length))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= length * (1 + 1e-9))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def write_picture(path: str | os.PathLike[str], picture: Image.Image | np.ndarray) -> Path:
    """Write a picture (or a uint8 frame ``[H, W, 3]``) as PNG and return its path."""
    target = prepare_output(path, (".png",))
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(target, format="PNG")
    return target


def caption(frame: np.ndarray, text: str) -> np.ndarray:
    """Return a copy of a frame ``[H, W, 3]`` with a line of text in its lower left corner."""
    image = Image.fromarray(frame)
    size = max(11, frame.shape[0] // 18)
    ImageDraw.Draw(image).text(
        (size * 0.7, frame.shape[0] - size * 0.6),
        text,
        (255, 255, 255),
        _font(size),
        anchor="ls",
        stroke_width=2,
        stroke_fill=_INK,
    )
    return np.asarray(image)
