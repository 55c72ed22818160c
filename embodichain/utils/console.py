"""What commands have in common: the log of this package on the terminal, and checks of their options."""

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from embodichain.errors import ConfigError

_DUMPS = {"RAY_DEDUP_LOGS_SKIP_REGEX": "^(Raylet is terminated|The node with node id|A worker died or was killed)"}
"""Ray's switch for lines that are not to be printed: up to 40 when a node or a worker dies, which the log reports."""


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
