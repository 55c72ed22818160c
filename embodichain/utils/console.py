"""What a command says besides its results: the log of this package, and as little as possible of Ray's."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

_DUMPS = {"RAY_DEDUP_LOGS_SKIP_REGEX": "^(Raylet is terminated|The node with node id|A worker died or was killed)"}
"""Ray's own switch for lines that are not to be printed. When a node or a worker dies it prints up to 40 of them, which
say nothing that the log here does not say."""


@contextmanager
def shown_messages(rank: int = 0) -> Iterator[None]:
    """Print the log of this package on the terminal, warnings as such, until the end of the block.

    Of ranks other than the first one only warnings are shown, with the rank.
    """
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


class _TerminalHandler(logging.Handler):
    """Prints to whatever ``sys.stderr`` is at that moment: a bar or a table that is shown there takes it over."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING if rank else logging.INFO)
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message; on a terminal its first line is broken between words."""
        try:
            self._print(record)
        except Exception:  # noqa: BLE001 - a message that cannot be printed must not end what it tells of
            self.handleError(record)

    def _print(self, record: logging.LogRecord) -> None:
        who = f"rank {self._rank}: " if self._rank else ""
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        first, *rest = self.format(record).rstrip().split("\n")
        text = f"{who}{kind}{first}"
        if sys.stderr.isatty():
            text = textwrap.fill(text, shutil.get_terminal_size().columns - 1, subsequent_indent="  ")
        print(text, *rest, sep="\n", file=sys.stderr)
