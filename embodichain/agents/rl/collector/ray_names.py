"""What the workers of a run are called in a cluster: its name, the rank if there are several, and their number."""

from __future__ import annotations

import re

_RANK = re.compile(r"-\d+of(\d+)$")


def name_of_rank(name: str, rank: int, count: int) -> str:
    """Return what the workers of one rank of a run are called, before their number."""
    return name if count == 1 or not name else f"{name}-{rank}of{count}"


def is_stray(actor: str, name: str, num_workers: int) -> bool:
    """Tell whether an actor is of the run whose workers are called ``name``, but has no place in it any more."""
    worker, _, index = actor.rpartition("-")
    if not index.isdigit() or _RANK.sub("", worker) != _RANK.sub("", name):
        return False
    before, now = _RANK.search(worker), _RANK.search(name)
    same_ranks = (before and before[1]) == (now and now[1])
    return not same_ranks or int(index) >= num_workers
