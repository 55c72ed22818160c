"""Learning curves as PNG, drawn with Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_LABEL = (250, 22)
"""Size of a series's label."""
Color = tuple[int, int, int]
COLORS: tuple[Color, ...] = ((46, 108, 190), (230, 126, 34), (39, 152, 86), (150, 80, 170))
_INK, _GREY, _GRID = (40, 44, 52), (120, 126, 136), (230, 232, 236)
_SHARP = 2  # drawn larger and scaled down, which smooths lines
_SIZE = (900, 520)
_BOX = (80, 50, 870, 460)  # left, top, right, bottom of the plot


@dataclass(frozen=True)
class Series:
    """Several runs of the same thing: one pair of ``x`` and ``y`` ``[n]`` each."""

    name: str
    runs: Sequence[tuple[np.ndarray, np.ndarray]]


def draw_curves(
    path: Path, title: str, axes: tuple[str, str], series: Sequence[Series], goal: float | None = None
) -> None:
    """Draw every run thin and the mean of each series thick; ``goal`` is a dashed line."""
    points = [(x, y) for entry in series for x, y in entry.runs if len(x)]
    if not points:
        return
    every_y = np.concatenate([y for _, y in points] + ([np.array([goal])] if goal is not None else []))
    paper = _Paper((0.0, max(float(x.max()) for x, _ in points)), (float(every_y.min()), float(every_y.max())))
    paper.frame(title, axes)
    if goal is not None:
        paper.dashes(goal)
    corner = paper.free_corner(points, len(series))
    for number, entry in enumerate(series):
        color = COLORS[number % len(COLORS)]
        for x, y in entry.runs:
            paper.curve(x, y, _pale(color), 1)
            paper.dots(x, y, _pale(color))
        grid, mean = mean_curve(entry.runs)
        paper.curve(grid, mean, color, 3)
        paper.label(corner, number, f"{entry.name} ({len(entry.runs)} run{'s' * (len(entry.runs) > 1)})", color)
    path.parent.mkdir(parents=True, exist_ok=True)
    paper.image.resize(_SIZE, Image.Resampling.LANCZOS).save(path)


def mean_curve(runs: Sequence[tuple[np.ndarray, np.ndarray]], points: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of curves, interpolated linearly, over the range that all of them cover."""
    covered = [(x, y) for x, y in runs if len(x)]
    grid = np.linspace(max(x[0] for x, _ in covered), min(x[-1] for x, _ in covered), points)
    return grid, np.mean([np.interp(grid, x, y) for x, y in covered], axis=0)


class _Paper:
    """A plot with its scales."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        air = 0.05 * (y_range[1] - y_range[0] or 1.0)
        self.x_range, self.y_range = x_range, (y_range[0] - air, y_range[1] + air)
        self.image = Image.new("RGB", (_SIZE[0] * _SHARP, _SIZE[1] * _SHARP), (255, 255, 255))
        self._pen = ImageDraw.Draw(self.image)

    def place(self, x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
        left, top, right, bottom = _BOX
        u = left + (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0] or 1.0) * (right - left)
        v = bottom - (y - self.y_range[0]) / (self.y_range[1] - self.y_range[0]) * (bottom - top)
        return [(a * _SHARP, b * _SHARP) for a, b in zip(u.tolist(), v.tolist(), strict=True)]

    def curve(self, x: np.ndarray, y: np.ndarray, color: Color, width: int) -> None:
        self._pen.line(self.place(x, y), fill=color, width=width * _SHARP, joint="curve")

    def dots(self, x: np.ndarray, y: np.ndarray, color: Color) -> None:
        for u, v in self.place(x, y):
            self._pen.ellipse([u - 2 * _SHARP, v - 2 * _SHARP, u + 2 * _SHARP, v + 2 * _SHARP], fill=color)

    def dashes(self, height: float) -> None:
        edges = np.linspace(*self.x_range, 61)
        for begin, end in zip(edges[:-1:2], edges[1::2], strict=True):
            self.curve(np.array([begin, end]), np.array([height, height]), _GREY, 1)

    def free_corner(self, runs: Sequence[tuple[np.ndarray, np.ndarray]], count: int) -> tuple[int, int]:
        """Return where labels of so many series cover the fewest points: the upper left, or the lower right."""
        left, top, right, bottom = _BOX
        width, height = _LABEL[0], _LABEL[1] * count + 10
        corners = [(left, top), (right - width, bottom - height)]
        points = np.concatenate([np.array(self.place(x, y)) for x, y in runs]) / _SHARP
        covered = [
            int(((points > corner) & (points < np.add(corner, (width, height)))).all(1).sum()) for corner in corners
        ]
        return corners[int(np.argmin(covered))]

    def label(self, corner: tuple[int, int], number: int, text: str, color: Color) -> None:
        at = (corner[0] + 14, corner[1] + 16 + _LABEL[1] * number)
        self._pen.line([(at[0] * _SHARP, at[1] * _SHARP), ((at[0] + 24) * _SHARP, at[1] * _SHARP)], color, 3 * _SHARP)
        self._text((at[0] + 32, at[1]), text, 14, _INK, "lm")

    def frame(self, title: str, axes: tuple[str, str]) -> None:
        left, top, right, bottom = _BOX
        for tick in _ticks(*self.x_range):
            (x, _), _ = self.place(np.array([tick, tick]), np.array(self.y_range))
            self._pen.line([(x, top * _SHARP), (x, bottom * _SHARP)], _GRID, _SHARP)
            self._text((x / _SHARP, bottom + 8), _number(tick), 12, _GREY, "ma")
        for tick in _ticks(*self.y_range):
            (_, y), _ = self.place(np.array(self.x_range), np.array([tick, tick]))
            self._pen.line([(left * _SHARP, y), (right * _SHARP, y)], _GRID, _SHARP)
            self._text((left - 8, y / _SHARP), _number(tick), 12, _GREY, "rm")
        self._text(((left + right) / 2, bottom + 28), axes[0], 13, _INK, "ma")
        self._text((left, top - 8), axes[1], 13, _INK, "ls")
        self._text((right, top - 8), title, 16, _INK, "rs")

    def _text(self, at: tuple[float, float], text: str, size: int, color: Color, anchor: str) -> None:
        font = ImageFont.load_default(size * _SHARP)
        self._pen.text((at[0] * _SHARP, at[1] * _SHARP), text, color, font, anchor=anchor)


def _ticks(low: float, high: float) -> list[float]:
    """Return about six round numbers between two others."""
    raw = (high - low) / 6 or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((f * power for f in (1, 2, 5, 10)), key=lambda s: abs(s - raw))
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _pale(color: Color) -> Color:
    red, green, blue = (round(255 + (part - 255) * 0.35) for part in color)
    return red, green, blue
