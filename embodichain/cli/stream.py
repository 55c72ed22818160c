"""``embodichain stream CONFIG``: run simulation workers, sample from them, and watch the numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from embodichain.cli.stream_watch import StreamLog, worker_table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from embodichain.agents.engine import OnlineDataEngine, StreamStats


@dataclass(frozen=True)
class StreamArgs:
    """Stream episodes and show what is going on. Every setting of the engine is a flag too: --buffer_size 64."""

    config: Annotated[str, tyro.conf.Positional]
    """File of engine settings, a gym_config.json, or the name of an environment."""
    duration: float | None = None
    """Seconds after which to stop (default: at Ctrl-C)."""
    batch_size: int = 32
    """Chunks per batch that is drawn while the stream runs."""
    chunk_size: int = 8
    """Steps per chunk."""
    rate: float = 50.0
    """Batches per second to draw; 0 draws none."""
    watch: bool = False
    """Show what every worker does, node by node."""
    tensorboard: Path | None = None
    """Folder for TensorBoard scalars of the stream and of every node."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args, flags = tyro.cli(StreamArgs, args=list(argv), prog="embodichain stream", return_unknown_args=True)

    from rich.console import Console
    from rich.live import Live

    from embodichain.agents.engine import OnlineDataEngine
    from embodichain.agents.engine.files import load_stream_config
    from embodichain.config.overrides import parse_overrides

    cfg = parse_overrides(load_stream_config(args.config), flags, prog="embodichain stream CONFIG")
    console = Console()
    log = None if args.tensorboard is None else StreamLog(args.tensorboard)
    with OnlineDataEngine(cfg) as engine:
        started = time.monotonic()
        view = _look(engine, args, 0.0, None)
        try:
            with Live(view, console=console, transient=True) if console.is_terminal else nullcontext() as live:
                while args.duration is None or time.monotonic() - started < args.duration:
                    _draw(engine, args, seconds=1.0 if args.watch else 0.5)
                    view = _look(engine, args, time.monotonic() - started, log)
                    if live is not None:
                        live.update(view)
        except KeyboardInterrupt:
            pass  # the ordinary way to end a stream that has no duration
        finally:
            if log is not None:
                log.close()
        console.print(view)
    return 0


def _look(engine: OnlineDataEngine, args: StreamArgs, seconds: float, log: StreamLog | None) -> Group:
    """Return what is going on, as tables, and write it down if that is wanted."""
    from rich.console import Group

    stats = engine.stats()
    tables = [stats_table(stats, seconds)]
    if args.watch or log is not None:
        workers = engine.worker_stats()
        if args.watch:
            tables.append(worker_table(workers))
        if log is not None:
            log.write(seconds, stats, workers)
    return Group(*tables)


def _draw(engine: OnlineDataEngine, args: StreamArgs, seconds: float) -> None:
    """Draw batches at the rate that was asked for, for a moment."""
    begin, drawn = time.monotonic(), 0
    while (spent := time.monotonic() - begin) < seconds:
        if drawn < spent * args.rate:
            engine.sample_batch(args.batch_size, args.chunk_size, reuse_outputs=True)
            drawn += 1
        else:
            time.sleep(0.001)


def stats_table(stats: StreamStats, seconds: float) -> Table:
    """Return the statistics as a table."""
    from rich.table import Table

    table = Table(title=f"stream, {seconds:.0f} s", show_header=False)
    success = "unknown" if stats.success_rate is None else f"{stats.success_rate:.1%}"
    for name, value in (
        ("episodes written", f"{stats.episodes_written:,}"),
        ("episodes per second", f"{stats.episodes_per_second:,.1f}"),
        ("simulated steps per second", f"{stats.frames_per_second:,.0f}"),
        ("refills of the buffer", f"{stats.refills:,.1f}"),
        ("success of the episodes", success),
        ("chunks sampled", f"{stats.samples:,}"),
        ("chunks per second", f"{stats.samples_per_second:,.0f}"),
        ("mean age of a chunk", f"{stats.mean_age_seconds:.1f} s, {stats.mean_age_refills:.2f} refills"),
        ("chunks drawn again", f"{stats.rejected_reads:,}"),
        ("workers replaced", f"{stats.restarts}"),
    ):
        table.add_row(name, value)
    return table
