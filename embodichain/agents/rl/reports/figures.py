"""The figures of a report as SVG, drawn by matplotlib: learning curves, timing, the trials of a sweep."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from embodichain.agents.rl.reports.series import Series, SweepResult, curve, curves_of, mean_and_band

_STYLE: dict[str, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
    "text.parse_math": False,  # $ in names is literal
    "svg.hashsalt": "embodichain",
}
_WIDTH, _HEIGHT, _COLUMNS = 4.6, 2.7, 2
_MARGINS, _LINE = (0.15, 0.3, 0.45), 0.22
"""Margins of a panel (right, top, bottom) and height of a line of the legend, in inches."""
_LETTER, _HANDLE = 0.08, 0.7
"""Width of a letter of the legend, and of a line's sample with its margins, in inches."""
_MAX_POINTS = 300
_MARKED_POINTS = 40
"""Curves with fewer points have markers."""
_MINUTES = 60.0
_LEGEND_ENTRIES = 10


def colour(index: int) -> str:
    """Return the colour of a series, the same in all figures and tables."""
    return matplotlib.colors.to_hex(matplotlib.colormaps["tab10" if index < 10 else "tab20"](index % 20))


def curves(series: Sequence[Series], names: Sequence[str], over_time: bool = False) -> str:
    """Draw a panel for each name: thin lines for runs, and for several seeds the mean and standard deviation."""
    panels = [_curve_panel(series, name) for name in names]
    if over_time and names:
        lines = (name for name in names if any(len(curve(run, name)[0]) > 1 for one in series for run in one.runs))
        panels.append(_curve_panel(series, next(lines, names[0]), "time/total_seconds"))
    return _panels(panels)


def _curve_panel(series: Sequence[Series], name: str, over: str = "step") -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        scale = 1.0 if over == "step" else 1.0 / _MINUTES
        for index, one in enumerate(series):
            lines = [curve(run, name, over) for run in one.runs]
            band = mean_and_band(curves_of(one, name, over))
            for x, y in lines:
                thin = _thinned(x * scale, y)
                marker = "." if 0 < len(x) < _MARKED_POINTS else ""
                own = {"alpha": 0.3, "lw": 0.7} if band is not None else {"lw": 1.4, "marker": marker, "ms": 4}
                axes.plot(*thin, color=colour(index), label=_shown(one.label) if band is None else None, **own)
            if band is not None:
                grid, mean, deviation = band
                if len(grid) == 1:  # a line or band of one point is invisible
                    axes.errorbar(grid * scale, mean, deviation, color=colour(index), capsize=3)
                marker = "." if len(grid) < _MARKED_POINTS else ""
                axes.plot(grid * scale, mean, color=colour(index), lw=1.8, marker=marker, ms=6, label=_shown(one.label))
                axes.fill_between(
                    grid * scale, mean - deviation, mean + deviation, color=colour(index), alpha=0.18, lw=0
                )
        axes.set_title(name if over == "step" else f"{name} by time", fontsize=9, loc="left")
        axes.set_xlabel("steps" if over == "step" else "minutes of training")
        if over == "step":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if name.endswith("/success"):
            axes.set_ylim(-0.03, 1.03)

    return draw


def _shown(label: str) -> str:
    """Return a label that is shown in legends, which hide those with a leading underscore."""
    return f" {label}" if label.startswith("_") else label


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a curve to at most ``_MAX_POINTS`` points by averaging neighbours, to keep the SVG small."""
    if len(x) <= _MAX_POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), _MAX_POINTS)
    return np.array([x[part].mean() for part in parts]), np.array([y[part].mean() for part in parts])


def timing(series: Sequence[Series], seconds: Sequence[dict[str, float]]) -> str:
    """Draw how the time of each series was spent, in seconds per run."""

    def draw(axes: Axes) -> None:
        kinds = list(dict.fromkeys(kind for row in seconds for kind in row))
        left, labels = np.zeros(len(series)), [textwrap.fill(one.label, 44) for one in series]
        for index, kind in enumerate(kinds):
            values = np.array([row.get(kind, 0.0) for row in seconds])
            axes.barh(
                labels,
                values,
                left=left,
                label=kind,
                color=colour(index),
                height=0.6,
            )
            left += values
        axes.invert_yaxis()
        axes.set_xlabel("seconds per run")
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=5, frameon=False)

    return _panels([draw], width=2 * _WIDTH, height=0.95 + 0.38 * len(series), columns=1, legend=False, left=3.4)


def trials(sweep: SweepResult) -> str:
    """Draw the trials of a sweep: their values in order, and over each setting that was varied."""
    done = [trial for trial in sweep.trials if trial["value"] is not None and trial["state"] == "complete"]
    pruned = [trial for trial in sweep.trials if trial["value"] is not None and trial["state"] == "pruned"]
    space = sweep.group.get("space", {})
    metric = str(sweep.group.get("metric", "value"))

    def history(axes: Axes) -> None:
        axes.plot([t["number"] for t in pruned], [t["value"] for t in pruned], "x", color="0.6", ms=4, label="pruned")
        axes.plot([t["number"] for t in done], [t["value"] for t in done], "o", ms=4, color=colour(0), label="complete")
        if done:
            accumulate = np.maximum.accumulate if sweep.is_maximized else np.minimum.accumulate
            best = accumulate([trial["value"] for trial in done])
            axes.step([trial["number"] for trial in done], best, where="post", color=colour(1), lw=1.4, label="best")
        axes.set_title(f"{metric} of trials", fontsize=9, loc="left")
        axes.set_xlabel("trial")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False)

    def over(name: str) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            for group, marker, shade in ((pruned, "x", "0.6"), (done, "o", colour(0))):
                given = [trial for trial in group if name in trial["params"]]
                values = [trial["params"][name] for trial in given]
                is_plain = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
                x = values if is_plain else [str(value) for value in values]
                axes.scatter(x, [trial["value"] for trial in given], s=16, marker=marker, color=shade)
            if space.get(name, {}).get("log"):
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 4, 7)))
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))  # powers of ten need math text
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"{metric} by {name}", fontsize=9, loc="left")

        return draw

    return _panels([history, *map(over, space)], legend=False)


def _panels(
    draws: Sequence[Callable[[Axes], None]],
    width: float = _WIDTH,
    height: float = _HEIGHT,
    columns: int = _COLUMNS,
    legend: bool = True,
    left: float = 0.6,
) -> str:
    """Draw panels in a grid, with a common legend, and return the SVG element."""
    if not draws:
        return ""
    columns = min(columns, len(draws))
    rows = math.ceil(len(draws) / columns)
    with matplotlib.rc_context(cast(Any, _STYLE)):  # cast, as the keys are a Literal type
        figure = Figure()
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, draw in zip(grid, draws, strict=False):
            draw(axes)
        for axes in grid[len(draws) :]:
            axes.set_visible(False)
        handles, labels = grid[0].get_legend_handles_labels()
        shown = slice(_LEGEND_ENTRIES if legend and len(labels) > 1 else 0)
        letters = [int((width * columns / count - _HANDLE) / _LETTER) for count in (_COLUMNS, 1)]
        ncols = _COLUMNS if all(len(label) <= letters[0] for label in labels[shown]) else 1
        labels = [label if len(label) <= letters[1] else f"{label[: letters[1] - 1]}…" for label in labels]
        below = _LINE * math.ceil(len(labels[shown]) / ncols + 0.5) if labels[shown] else 0.0
        _lay_out(figure, rows, columns, (width, height), left, below)
        if labels[shown]:
            figure.legend(handles[shown], labels[shown], loc="lower center", ncols=ncols, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _lay_out(figure: Figure, rows: int, columns: int, size: tuple[float, float], left: float, below: float) -> None:
    """Arrange panels of a size in inches, with space for labels on their left and for a legend below.

    Matplotlib's layout engines measure every label several times, which takes longer than the drawing.
    """
    (width, height), (right, top, bottom) = size, _MARGINS
    total = width * columns, height * rows + below
    figure.set_size_inches(*total)
    figure.subplots_adjust(
        left=left / total[0],
        right=1 - right / total[0],
        top=1 - top / total[1],
        bottom=(bottom + below) / total[1],
        wspace=(left + right) / (width - left - right),
        hspace=(top + bottom) / (height - top - bottom),
    )
