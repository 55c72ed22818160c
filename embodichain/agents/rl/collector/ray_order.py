"""In which order the rollouts of several workers may be learned from, so that none becomes too old.

A rollout is begun with the latest weights. At that moment tickets were issued up to number ``d``, and the learner has
learned from number ``d - max_policy_lag - 1``: this one is within the bound if it becomes number ``d`` or an earlier
one. So ``d`` is its deadline. Rollouts get their numbers as they arrive, so that nobody waits for a slow worker without
need; but one that arrives early is held back while taking it would make another one late.
"""

from __future__ import annotations

from collections.abc import Iterable


def in_time(deadlines: Iterable[int], next_number: int) -> bool:
    """Tell whether rollouts can become the numbers from ``next_number`` on, none after its deadline."""
    return all(deadline >= next_number + place for place, deadline in enumerate(sorted(deadlines)))


def choose(arrived: dict[int, int], running: Iterable[int], next_number: int) -> int | None:
    """Return which of the ``arrived`` rollouts (deadlines by key) becomes ``next_number``, None if it must be waited.

    ``running`` are the deadlines of those that are still being collected.
    """
    if not arrived:
        return None
    first = min(arrived, key=lambda key: arrived[key])
    others = [deadline for key, deadline in arrived.items() if key != first]
    return first if in_time([*others, *running], next_number + 1) else None
