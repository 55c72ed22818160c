"""``embodichain report RUN...``: one HTML file that compares runs, with curves, settings, videos and commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from embodichain.cli.options import parse_options
from embodichain.errors import ConfigError


@dataclass(frozen=True)
class ReportArgs:
    """Write one HTML file about runs, with everything inside: results, settings and how they differ, learning curves
    with mean and band over seeds, videos, where the time went, machine and versions, and commands to reproduce."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Folders of runs, of runs with several seeds, of sweeps, or of any of these."""
    out: Path | None = None
    """The file (default: report.html in the folder, if one is given; else in this one)."""
    videos: int = 12
    """Most videos in the report; 0 leaves them out."""
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
    file = write_report(args.runs, out, args.videos, args.title)
    size = file.stat().st_size / 2**20
    Console().print(f"wrote {file} ({size:.1f} MiB)", markup=False, highlight=False, soft_wrap=True)
    return 0
