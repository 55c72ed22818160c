"""What the runs of asynchronous collection come to: a table, bars, curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.async_vla_runs import WAYS, Outcome, Sizes, Stages
from benchmarks.charts import Series, draw_curves

Runs = Mapping[str, Mapping[int, Outcome]]
"""Outcomes by way and seed."""
Parts = Mapping[str, Mapping[int, Stages]]
"""Stage times by kind of way and seed: a machine is not equally fast all day, so they are measured for each."""
BAR_OF_BOUND = 0.9
BESIDE = "sync, apart"
"""Synchronous, with the same processes side by side."""


@dataclass(frozen=True)
class Row:
    """One way, averaged over its seeds."""

    way: str
    seconds: float
    samples_per_second: float
    speedup: float
    """Over ``sync``: the mean of the ratios, seed by seed, of all runs."""
    ratios: list[float]
    """These ratios."""
    over_beside: list[float]
    """The same over ``sync, apart``, of a way that simulates in the same processes."""
    bound: float
    """Largest speed-up that the stage times allow."""
    of_bound: float
    """Least time that they allow over the time it took: the mean over the seeds, each by the times of its own."""
    lag_mean: float
    lag_max: float
    final: list[float]
    """Final score of every seed, if it was measured."""
    foreign: float

    def __str__(self) -> str:
        final = f"{statistics.mean(self.final):>8.0%}" if self.final else ""
        disturbed = "  *" if self.foreign > 0.1 else ""
        spread = f"{min(self.ratios):.2f}-{max(self.ratios):.2f}"
        return (
            f"{self.way:<26}{self.seconds:>8.1f}{self.samples_per_second:>11,.0f}{self.speedup:>10.2f}{spread:>11}"
            f"{self.bound:>9.2f}{self.of_bound:>9.0%}{self.lag_mean:>7.2f}{self.lag_max:>5.0f}{final}{disturbed}"
        )


HEADER = (
    f"{'way':<26}{'seconds':>8}{'samples/s':>11}{'speed-up':>10}{'from-to':>11}"
    f"{'bound':>9}{'of bound':>9}{'lag':>7}{'max':>5}"
)


class Summary:
    """The table, and whether the bars are met."""

    def __init__(self, sizes: Sizes, parts: Parts, runs: Runs) -> None:
        """``parts`` are the stage times of one of several groups; those of all envs come from the synchronous runs."""
        self.sizes, self.runs = sizes, runs
        self.stages: dict[str, dict[int, Stages]] = {"1": self._stages_of("sync")}
        self.stages |= {kind: dict(measured) for kind, measured in parts.items() if measured}
        if runs.get(BESIDE):
            self.stages["1 apart"] = self._stages_of(BESIDE)
        self.rows = [self._row(way) for way in WAYS if runs.get(way)]

    def _stages_of(self, way: str) -> dict[int, Stages]:
        """Return the stage times of a way in which they follow each other, by seed."""
        steps, found = self.sizes.num_steps, {}
        for seed, run in self.runs[way].items():
            rest = run.seconds / self.sizes.rollouts - run.update - run.simulation - run.inference
            found[seed] = Stages(run.inference / steps, run.simulation / steps, rest)
        return found

    def least(self, way: str, seed: int) -> float:
        """Return the least time of a run: side by side, the slower of collecting and learning counts."""
        groups, count = WAYS[way].groups, self.sizes.rollouts
        beside = self.stages.get("1 apart", {}) if WAYS[way].apart else {}
        rest = beside.get(seed, self.stages["1"][seed]).rest
        collect = self.stages[WAYS[way].kind][seed].bound(groups, self.sizes.num_steps, rest)
        update = self.runs["sync"][seed].update
        if WAYS[way].worker is None:
            return count * (collect + update)
        return collect + (count - 1) * max(collect, update) + update

    def _row(self, way: str) -> Row:
        outcomes, base = self.runs[way], self.runs["sync"]
        seconds = statistics.mean(outcome.seconds for outcome in outcomes.values())
        ratios = _ratios(base, outcomes)
        beside = _ratios(self.runs.get(BESIDE, {}), outcomes) if WAYS[way].apart and way != BESIDE else []
        least = {seed: self.least(way, seed) for seed in outcomes if seed in base}
        return Row(
            way,
            seconds,
            statistics.mean(outcome.samples / outcome.seconds for outcome in outcomes.values()),
            statistics.mean(ratios),
            ratios,
            beside,
            statistics.mean(self.least("sync", seed) / least[seed] for seed in least),
            statistics.mean(least[seed] / outcomes[seed].seconds for seed in least),
            statistics.mean(outcome.lag_mean for outcome in outcomes.values()),
            max(outcome.lag_max for outcome in outcomes.values()),
            [outcome.final for outcome in outcomes.values() if outcome.final is not None],
            max(outcome.foreign for outcome in outcomes.values()),
        )

    def words(self) -> list[str]:
        """Return what is printed."""
        means = {kind: Stages.mean(measured.values()) for kind, measured in self.stages.items()}
        one = means.pop("1")
        parts = ", ".join(
            f"{_named(kind)}: {1000 * part.inference:.1f} and {1000 * part.simulation:.1f} ms"
            for kind, part in means.items()
        )
        update = statistics.mean(outcome.update for outcome in self.runs["sync"].values())
        sizes, seeds = self.sizes, len(self.runs["sync"])
        lines = [
            f"{seeds} seeds; {sizes.num_envs} envs x {sizes.num_steps} decisions, {sizes.rollouts} rollouts, "
            f"{sizes.epochs} epochs per update",
            f"stages: inference {1000 * one.inference:.1f} ms, simulation {1000 * one.simulation:.1f} ms per decision "
            f"({parts}), "
            f"update {1000 * update:.0f} ms and values {1000 * one.rest:.0f} ms per rollout",
            HEADER + ("   final" if self.rows[0].final else ""),
            *(str(row) for row in self.rows),
            *(
                f"{row.way}: {statistics.mean(row.over_beside):.2f} times as fast as {BESIDE}"
                for row in self.rows
                if row.over_beside
            ),
        ]
        return [*lines, "* other programs used the machine"] if any(row.foreign > 0.1 for row in self.rows) else lines

    def misses(self, bar: float) -> list[str]:
        """Return which bars are missed."""
        rows = {row.way: row for row in self.rows}
        asynchronous = [row for row in self.rows if WAYS[row.way].worker is not None]
        best = max(asynchronous, key=lambda row: row.speedup, default=None)
        missed = []
        if best is not None and best.speedup < bar:
            missed.append(f"the best way, {best.way}, is {best.speedup:.2f} times as fast as sync; the bar is {bar}")
        for row in self.rows:
            if row.way != "sync" and row.of_bound < BAR_OF_BOUND:
                missed.append(f"{row.way} reaches {row.of_bound:.1%} of its bound; the bar is {BAR_OF_BOUND:.0%}")
        base = rows["sync"].final
        for row in self.rows:
            if row.way != "sync" and row.final and base and statistics.mean(row.final) < _lowest(base):
                missed.append(
                    f"{row.way} ends at {statistics.mean(row.final):.0%}, sync at {statistics.mean(base):.0%}"
                )
        return missed


def _ratios(base: Mapping[int, Outcome], outcomes: Mapping[int, Outcome]) -> list[float]:
    """Return how many times as long the other way took, seed by seed."""
    return [base[seed].seconds / outcomes[seed].seconds for seed in outcomes if seed in base]


def _named(kind: str) -> str:
    """Return what stage times are of, in words."""
    groups, _, apart = kind.partition(" ")
    return ("all envs" if groups == "1" else f"one of {groups} groups") + (", in processes" if apart else "")


def _lowest(base: Sequence[float]) -> float:
    """Return the mean less the seed-to-seed spread (largest less smallest)."""
    return statistics.mean(base) - (max(base) - min(base))


def draw(folder: Path, name: str, title: str, score: str, runs: Runs) -> None:
    """Draw the learning curves twice: over decisions, and over time."""
    for column, (suffix, axis) in enumerate((("samples", "decisions"), ("seconds", "seconds"))):
        series = [
            Series(way, [_points(outcome, column) for outcome in runs[way].values()]) for way in WAYS if runs.get(way)
        ]
        draw_curves(folder / f"{name}_{suffix}.png", title, (axis, score), series)


def _points(outcome: Outcome, column: int) -> tuple[Any, Any]:
    """Return a curve, averaged over three rollouts in a row, which says more than every wiggle."""
    data = np.array(outcome.curve, dtype=np.float64)
    width = min(3, len(data))
    smooth = np.convolve(data[:, 2], np.ones(width) / width, mode="valid")
    return data[width - 1 :, column], smooth
