"""Prints results of episodes: a table of averages, and the paths of written files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

if TYPE_CHECKING:
    from embodichain.envs.recording import EpisodeResult


def print_summary(console: Console, title: str, episodes: Sequence[EpisodeResult], seconds: float) -> None:
    """Print the averages as a table."""
    from embodichain.envs.recording import Summary

    summary = Summary.of(episodes)
    rate = "not reported" if summary.success_rate is None else f"{summary.success_rate:.1%}"
    console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    table = Table("", Column(justify="right"), show_header=False)
    table.add_row("episodes", str(summary.episodes))
    table.add_row("success rate", rate, style="bold")
    table.add_row("mean return", f"{summary.mean_return:.2f} ± {summary.std_return:.2f}")
    table.add_row("mean length", f"{summary.mean_length:.1f} steps")
    for name, value in summary.metrics.items():
        if name != "success":
            table.add_row(name, f"{value:.4g}")
    table.add_row("wall time", f"{seconds:.1f} s")
    console.print(table)


def print_files(console: Console, files: Sequence[Path], problem: str | None) -> None:
    """Print the paths of files, and why there is no video."""
    if problem is not None:
        console.print(f"No video: {problem}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        if not files:
            console.print("There is no trajectory plot either: the observations hold no positions.", style="yellow")
    for file in files:
        console.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)
