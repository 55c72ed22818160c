"""How long to wait before something that failed is tried again."""

from __future__ import annotations

_FIRST_SECONDS = 0.5
_LONGEST_SECONDS = 30.0


def restart_delay(faults: int) -> float:
    """Return the seconds to wait after so many faults: none after the first one, then twice as long each time."""
    return 0.0 if faults <= 1 else min(_FIRST_SECONDS * 2.0 ** (faults - 2), _LONGEST_SECONDS)
