"""``embodichain report RUN...``: one HTML file that compares runs, with curves, settings, videos and commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from embodichain.agents.rl.run_records import find_runs
from embodichain.cli.options import parse_options
from embodichain.errors import ConfigError


@dataclass(frozen=True)
class ReportArgs:
    """Write one self-contained HTML file about runs: results, settings and their differences, learning curves with mean
    and band over seeds, videos, time profile, machine and versions, and commands to reproduce."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Folders of runs, of groups of seeds, of sweeps, or of any of these."""
    out: Path | None = None
    """Output file (default: report.html in the given folder, or in the working directory for several)."""
    videos: int = 12
    """Maximum number of videos in the report."""
    title: str | None = None
    """Title of the page (default: the names of the folders)."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = parse_options(ReportArgs, argv, "embodichain report")
    if not args.runs:
        raise ConfigError("expected at least one RUN, such as runs/*; embodichain runs lists them", "command line")
    if args.videos < 0:
        raise ConfigError(f"--videos: expected at least 0, got {args.videos}", "command line")
    from embodichain.agents.rl.reports.page import write_report

    out = args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "report.html"
    if out.is_dir():
        raise ConfigError(f"--out: expected a file, got the folder {out}", "command line")
    console = Console()
    empty = [path for path in args.runs if path.exists() and not find_runs(path)]
    if 0 < len(empty) < len(args.runs):  # runs/* may match a report, or seeds that were stopped before the first began
        message = f"left out, as there is no run in it: {', '.join(map(str, empty))}"
        console.print(message, markup=False, highlight=False, soft_wrap=True)
    runs = [path for path in args.runs if path not in empty] or args.runs
    file = write_report(runs, out, args.videos, args.title)
    size = file.stat().st_size / 2**20
    console.print(f"wrote {file} ({size:.1f} MiB)", markup=False, highlight=False, soft_wrap=True)
    return 0
