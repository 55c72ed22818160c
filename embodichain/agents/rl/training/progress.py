"""What a person sees while a run is going on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_LINE_SECONDS = 10.0
_SPEED_WINDOW = 20


@dataclass(frozen=True)
class Standing:
    """How far training has come."""

    step: int
    """Environment steps so far."""
    done: float
    """Share of the training that is over."""
    mean_return: float | None
    """Mean return of recent episodes."""
    success: float | None
    """Their success rate, where the task tells."""


class ProgressView:
    """Shows return, success, steps per second and the time left."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._name = name
        self._marks: deque[tuple[float, int, float]] = deque(maxlen=_SPEED_WINDOW)  # time, step, share done
        self._last_line = 0.0
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}")
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task(self._name, total=1.0, text="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, now: Standing) -> None:
        """Show where training stands."""
        self._marks.append((time.monotonic(), now.step, now.done))
        text = self._text(now)
        if self._bar is not None:
            self._bar.update(self._task, completed=now.done, text=text)
        elif time.monotonic() - self._last_line > _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(f"{self._name}: {text}")

    def say(self, text: str) -> None:
        """Print a line for good."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _text(self, now: Standing) -> str:
        parts = [f"{_short(now.step)} steps"]
        if now.mean_return is not None:
            parts.append(f"return {now.mean_return:.2f}")
        if now.success is not None:
            parts.append(f"success {now.success:.0%}")
        (begin, first, share), (end, last, done) = self._marks[0], self._marks[-1]
        if end > begin:
            parts.append(f"{_short(round((last - first) / (end - begin)))} steps/s")
            if done > share:
                parts.append(f"{_clock((1.0 - done) * (end - begin) / (done - share))} left")
        return " | ".join(parts)


def _short(number: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
