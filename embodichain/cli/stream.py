"""``embodichain stream CONFIG``: run simulation workers, sample from them, and watch the numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from embodichain.cli.stream_help import HELP, show_help
from embodichain.cli.stream_log import StreamLog
from embodichain.cli.stream_rates import WINDOW_SECONDS, History, Moment, Rates
from embodichain.cli.stream_watch import MAX_LINES, worker_table

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from embodichain.agents.engine import OnlineDataEngine


@dataclass(frozen=True)
class StreamArgs:
    """Stream episodes and show what is going on. Every setting of the engine is a flag, too: --num_workers 2."""

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """File of engine settings, a gym_config.json, or the name of an environment."""
    duration: float | None = None
    """Seconds after which to stop; None goes on until Ctrl-C."""
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
    if HELP & set(argv):
        return show_help(StreamArgs, "embodichain stream", argv)
    args, flags = tyro.cli(StreamArgs, args=list(argv), prog="embodichain stream", return_unknown_args=True)

    from rich.console import Console

    from embodichain.agents.engine import OnlineDataEngine
    from embodichain.agents.engine.files import load_stream_config
    from embodichain.agents.utils.messages import shown_messages
    from embodichain.config.overrides import parse_overrides

    cfg = parse_overrides(load_stream_config(args.config), flags, prog="embodichain stream CONFIG")
    with shown_messages(), OnlineDataEngine(cfg) as engine:
        watch(engine, args, Console())
    return 0


def watch(engine: OnlineDataEngine, args: StreamArgs, console: Console) -> None:
    """Draw from a stream and show what is going on until it is time to end; then tell how the whole run was."""
    from rich.live import Live

    began = time.monotonic()
    log = None if args.tensorboard is None else StreamLog(args.tensorboard)
    now = _look(engine, args, 0.0)
    history = History(now)
    screen = Live(view(now, history, args, console), console=console, transient=True)
    try:
        with screen if console.is_terminal else nullcontext():
            while args.duration is None or time.monotonic() - began < args.duration:
                _draw(engine, args, seconds=1.0 if args.watch else 0.5)
                now = _look(engine, args, time.monotonic() - began)
                history.add(now)
                screen.update(view(now, history, args, console))
                if log is not None:
                    log.write(now)
    except KeyboardInterrupt:
        pass  # the ordinary way to end a stream that has no duration
    finally:
        if log is not None:
            log.close()
    console.print(view(now, history, args, None))


def view(now: Moment, history: History, args: StreamArgs, screen: Console | None) -> Group:
    """Return what is going on as tables that fit a screen; without one, the whole run as tables of any height."""
    from rich.console import Group
    from rich.text import Text

    rates = history.whole() if screen is None else history.recent()
    when = "the whole run" if screen is None else f"the last {min(WINDOW_SECONDS, now.seconds):.0f} s"
    title = Text(f"stream, {now.seconds:.0f} s since the first fill (rates: mean of {when})", style="italic")
    above = summary(now, rates)
    if not args.watch:
        return Group(title, above)
    used = 1 + above.row_count + 1 + 1 + 1 + 1  # title, summary and its head, a blank line, a head, the cursor
    room = MAX_LINES if screen is None else max(screen.size.height - used, 1)
    return Group(title, above, Text(), worker_table(now.workers, rates, room))


def summary(now: Moment, rates: Rates) -> Table:
    """Return the figures of a stream."""
    from rich.table import Table

    stats = now.stats
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "total", "per s"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_column("")
    success = "" if stats.success_rate is None else f", {stats.success_rate:.1%} succeeded"
    filled = f"{stats.refills:,.1f} refills of the buffer{success}"
    age = f"mean age {stats.mean_age_seconds:.1f} s, {stats.mean_age_refills:.2f} refills"
    again = f", {stats.rejected_reads:,} drawn again" if stats.rejected_reads else ""
    table.add_row("episodes", f"{stats.episodes_written:,}", f"{rates.episodes:,.1f}", filled)
    table.add_row("steps", f"{stats.frames:,}", f"{rates.frames:,.0f}", "")
    table.add_row("chunks", f"{stats.samples:,}", f"{rates.samples:,.0f}", age + again)
    if stats.restarts:
        table.add_row("workers", "", "", f"{stats.restarts:,} replaced")
    return table


def _look(engine: OnlineDataEngine, args: StreamArgs, seconds: float) -> Moment:
    """Return what is going on."""
    workers = engine.worker_stats() if args.watch or args.tensorboard is not None else ()
    return Moment(seconds, engine.stats(), workers)


def _draw(engine: OnlineDataEngine, args: StreamArgs, seconds: float) -> None:
    """Draw batches at the rate that was asked for, for a moment."""
    begin, drawn = time.monotonic(), 0
    while (spent := time.monotonic() - begin) < seconds:
        if drawn < spent * args.rate:
            engine.sample_batch(args.batch_size, args.chunk_size, reuse_outputs=True)
            drawn += 1
        else:
            time.sleep(0.001)
