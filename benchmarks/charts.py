"""Learning curves as PNG, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

COLORS = ("#2e6cbe", "#e67e22", "#279856", "#9650aa")
_DPI = 100
_SIZE = (9.0, 5.2)


@dataclass(frozen=True)
class Series:
    """Several runs of the same thing: one pair of ``x`` and ``y`` ``[n]`` each."""

    name: str
    runs: Sequence[tuple[np.ndarray, np.ndarray]]


def draw_curves(
    path: Path, title: str, axes: tuple[str, str], series: Sequence[Series], goal: float | None = None
) -> None:
    """Draw every run thin and the mean of each series thick; ``goal`` is a dashed line."""
    if not any(len(x) for entry in series for x, _ in entry.runs):
        return
    figure = Figure(_SIZE, dpi=_DPI, layout="constrained")
    plot = figure.add_subplot(xlabel=axes[0], ylabel=axes[1])
    plot.set_title(title, loc="left", fontsize=14, pad=12)
    plot.grid(color="#e8eaee")
    plot.set_axisbelow(True)
    plot.spines[["top", "right"]].set_visible(False)
    plot.xaxis.set_major_formatter(EngFormatter(sep=""))
    if goal is not None:
        plot.axhline(goal, color="#787e88", linestyle="--", linewidth=1)
    for number, entry in enumerate(series):
        color = COLORS[number % len(COLORS)]
        for x, y in entry.runs:
            plot.plot(x, y, color=color, alpha=0.35, linewidth=1, marker=".", markersize=5)
        label = f"{entry.name} ({len(entry.runs)} run{'s' * (len(entry.runs) > 1)})"
        plot.plot(*mean_curve(entry.runs), color=color, linewidth=3, label=label)
    plot.set_xlim(left=0.0)
    plot.legend(loc="best", frameon=True, edgecolor="none", framealpha=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def mean_curve(runs: Sequence[tuple[np.ndarray, np.ndarray]], points: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of curves, interpolated linearly, over the range that all of them cover."""
    covered = [(x, y) for x, y in runs if len(x)]
    grid = np.linspace(max(x[0] for x, _ in covered), min(x[-1] for x, _ in covered), points)
    return grid, np.mean([np.interp(grid, x, y) for x, y in covered], axis=0)
