"""Console output shared by commands: log messages, training progress, and checks of options."""

import logging
import os
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from embodichain.errors import ConfigError

_DUMPS = {"RAY_DEDUP_LOGS_SKIP_REGEX": "^(Raylet is terminated|The node with node id|A worker died or was killed)"}
"""Lines that Ray must not print: up to 40 when a node or worker dies, which our log reports already."""
_LINE_SECONDS = 10.0
_SPEED_WINDOW = 20
_BAR, _SHORTEST_BAR = 24, 6


def check_counts(counts: Mapping[str, int | None], *problems: str) -> None:
    """Raise ``ConfigError`` if an option is below 1, or if there are other ``problems``."""
    wrong = [f"{name}: expected at least 1, got {n}" for name, n in counts.items() if n is not None and n < 1]
    if wrong or problems:
        raise ConfigError([*wrong, *problems], "command line")


@contextmanager
def shown_messages(rank: int = 0) -> Iterator[None]:
    """Print this package's log messages during the block; ranks other than 0 print warnings only."""
    added = {name: value for name, value in _DUMPS.items() if name not in os.environ}
    os.environ.update(added)
    log, handler = logging.getLogger("embodichain"), _TerminalHandler(rank)
    previous_level = log.level
    log.addHandler(handler)
    log.setLevel(min(logging.INFO, log.getEffectiveLevel()))
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(previous_level)
        for name in added:
            os.environ.pop(name, None)


class _TerminalHandler(logging.StreamHandler[TextIO]):
    """Prints to the current ``sys.stderr``, which a progress bar or a live table may replace."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.setLevel(logging.WARNING if rank else logging.INFO)
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return a message with its rank and level; on a terminal its first line is wrapped."""
        origin = f"rank {self._rank}: " if self._rank else ""
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        first, *rest = super().format(record).rstrip().split("\n")
        text = f"{origin}{kind}{first}"
        if sys.stderr.isatty():
            text = textwrap.fill(text, shutil.get_terminal_size().columns - 1, subsequent_indent="  ")
        return "\n".join([text, *rest])


class MessageConsole(Console):
    """Prints to ``stderr``. On a broken pipe it becomes silent instead of exiting the program, as Rich does."""

    def __init__(self, quiet: bool = False, file: IO[str] | None = None, force_terminal: bool | None = None) -> None:
        super().__init__(stderr=True, quiet=quiet, file=file, force_terminal=force_terminal)

    def on_broken_pipe(self) -> None:
        go_quiet(self)


@contextmanager
def printing(console: Console) -> Iterator[None]:
    """Silence the console instead of failing if its terminal or pipe is closed during the block."""
    try:
        yield
    except (OSError, SystemExit):  # a plain Rich console exits the program on a broken pipe
        go_quiet(console)


def go_quiet(console: Console) -> None:
    """Silence a console, and redirect its stream to /dev/null so that flushing it at exit does not fail."""
    console.quiet = True
    if console.file in (sys.__stderr__, sys.__stdout__):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, console.file.fileno())
            os.close(nowhere)


class ProgressView:
    """Shows return, success, steps per second and remaining time: a bar on a terminal, else a line every 10 s."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.console = console or MessageConsole()
        self._name = name
        self._marks: deque[tuple[float, int, float]] = deque(maxlen=_SPEED_WINDOW)  # time, step, share done
        self._last_line = 0.0
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True))
            self._width = BarColumn(bar_width=_BAR)
            self._bar = Progress(
                TextColumn("{task.description}"), self._width, text, console=self.console, transient=True
            )
            self._task = self._bar.add_task(self._name, total=1.0, text="")
            with printing(self.console):
                self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with printing(self.console):
                self._bar.stop()

    def show(self, step: int, done: float, mean_return: float | None, success: float | None) -> None:
        """Show the environment steps so far, the fraction done, and the results of recent episodes if known."""
        self._marks.append((time.monotonic(), step, done))
        parts = [f"{short_number(step)} steps"]
        parts += [] if mean_return is None else [f"return {mean_return:.2f}"]
        parts += [] if success is None else [f"success {success:.0%}"]
        parts += self._speed()
        if self._bar is not None:
            for dropped in ("steps/s", "return"):  # on a narrow terminal
                if len(" | ".join(parts)) + _SHORTEST_BAR + 3 > self.console.width:
                    parts = [part for part in parts if dropped not in part]
        text = " | ".join(parts)
        if self._bar is not None:
            room = self.console.width - len(text) - 3  # name and bar get what the text leaves
            name = self._name[: max(0, room - _SHORTEST_BAR)]
            self._width.bar_width = max(_SHORTEST_BAR, min(_BAR, room - len(name)))
            with printing(self.console):
                self._bar.update(self._task, description=name, completed=done, text=text)
        elif time.monotonic() - self._last_line > _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.print(f"{self._name}: {text}")

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        with printing(self.console):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _speed(self) -> Iterator[str]:
        """Yield steps per second and the remaining time, estimated from the last iterations."""
        (begin, first, share), (end, last, done) = self._marks[0], self._marks[-1]
        if end > begin:
            yield f"{short_number(round((last - first) / (end - begin)))} steps/s"
            if done > share:
                yield f"{_clock((1.0 - done) * (end - begin) / (done - share))} left"


def short_number(number: int) -> str:
    """Format a number with three digits and a unit, such as 102k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
