"""The progress bar of the first fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from embodichain.agents.engine.config import OnlineDataEngineCfg


@contextmanager
def fill_progress(cfg: OnlineDataEngineCfg) -> Iterator[Callable[[int], None]]:
    """Show how many episodes of the first fill are there; yields a function to tell it. Silent outside a terminal."""
    console = Console(stderr=True)
    if not cfg.progress or not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting simulation", total=cfg.buffer_size)

        def show(written: int) -> None:
            progress.update(task, completed=min(written, cfg.buffer_size), description="filling the buffer")

        yield show
