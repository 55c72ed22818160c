"""What commands have in common: the log of this package and progress on the terminal, and checks of their options."""

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
"""Ray's switch for lines that are not to be printed: up to 40 when a node or a worker dies, which the log reports."""
_LINE_SECONDS = 10.0
_SPEED_WINDOW = 20
_BAR, _SHORTEST_BAR = 24, 6


def check_counts(counts: Mapping[str, int | None], *problems: str) -> None:
    """Raise ``ConfigError`` for options below 1, and for other problems of a command line."""
    wrong = [f"{name}: expected at least 1, got {n}" for name, n in counts.items() if n is not None and n < 1]
    if wrong or problems:
        raise ConfigError([*wrong, *problems], "command line")


@contextmanager
def shown_messages(rank: int = 0) -> Iterator[None]:
    """Print this package's log on the terminal during the block; of other ranks only warnings, with the rank."""
    added = {name: value for name, value in _DUMPS.items() if name not in os.environ}
    os.environ.update(added)
    log, handler = logging.getLogger("embodichain"), _TerminalHandler(rank)
    former = log.level
    log.addHandler(handler)
    log.setLevel(min(logging.INFO, log.getEffectiveLevel()))
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(former)
        for name in added:
            os.environ.pop(name, None)


class _TerminalHandler(logging.StreamHandler[TextIO]):
    """Prints to what ``sys.stderr`` is at the time: a progress bar or a live table replaces it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.setLevel(logging.WARNING if rank else logging.INFO)
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        self.setStream(sys.stderr)
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return a message with its rank and level; on a terminal its first line is broken between words."""
        origin = f"rank {self._rank}: " if self._rank else ""
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        first, *rest = super().format(record).rstrip().split("\n")
        text = f"{origin}{kind}{first}"
        if sys.stderr.isatty():
            text = textwrap.fill(text, shutil.get_terminal_size().columns - 1, subsequent_indent="  ")
        return "\n".join([text, *rest])


class MessageConsole(Console):
    """Prints to ``stderr``; where Rich would end the program because nobody reads that any more, it goes quiet."""

    def __init__(self, quiet: bool = False, file: IO[str] | None = None, force_terminal: bool | None = None) -> None:
        super().__init__(stderr=True, quiet=quiet, file=file, force_terminal=force_terminal)

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        go_quiet(self)


@contextmanager
def printing(console: Console) -> Iterator[None]:
    """Let a terminal or a pipe that is gone end nothing but what is printed on it."""
    try:
        yield
    except (OSError, SystemExit):  # a console of Rich's own ends the program when a pipe is closed
        go_quiet(console)


def go_quiet(console: Console) -> None:
    """Print nothing more on a console; what its stream still holds must not fail when the program ends, either."""
    console.quiet = True
    if console.file in (sys.__stderr__, sys.__stdout__):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, console.file.fileno())
            os.close(nowhere)


class ProgressView:
    """Shows return, success, steps per second and the time left: a bar on a terminal, a line now and then elsewhere."""

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
        """Show the environment steps so far, the share that is done, and the results of recent episodes if known."""
        self._marks.append((time.monotonic(), step, done))
        parts = [f"{short_number(step)} steps"]
        parts += [] if mean_return is None else [f"return {mean_return:.2f}"]
        parts += [] if success is None else [f"success {success:.0%}"]
        parts += self._speed()
        if self._bar is not None:
            for least in ("steps/s", "return"):  # on a narrow terminal
                if len(" | ".join(parts)) + _SHORTEST_BAR + 3 > self.console.width:
                    parts = [part for part in parts if least not in part]
        text = " | ".join(parts)
        if self._bar is not None:
            room = self.console.width - len(text) - 3  # for the name and the bar: what is said comes first
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
        """Yield steps per second and the time left, over the last iterations."""
        (begin, first, share), (end, last, done) = self._marks[0], self._marks[-1]
        if end > begin:
            yield f"{short_number(round((last - first) / (end - begin)))} steps/s"
            if done > share:
                yield f"{_clock((1.0 - done) * (end - begin) / (done - share))} left"


def short_number(number: int) -> str:
    """Return a number in few characters, such as 102k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
