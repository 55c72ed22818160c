"""What holds for all tests: those that mostly wait start first, and programs can be interrupted.

Whole files go to one worker of pytest-xdist at a time, so a long one must not be the last to start.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

_FIRST = ("scale", "faults")
_TESTS = Path(__file__).parent

# A shell starts background jobs with SIGINT ignored, and every process below them would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the rooms with long tests first."""
    items.sort(key=lambda item: item.path.relative_to(_TESTS).parts[0] not in _FIRST)
