"""Make the shared test environments importable, here and in the worker processes."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = str(Path(__file__).parents[2])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)
