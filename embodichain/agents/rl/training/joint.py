"""What all ranks of a run have to agree on between two updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from embodichain.agents.rl.utils.ranks import Ranks

Scalars = Mapping[str, float]
_EXTREMES = {"async/lag_min": min, "async/lag_max": max}
_TOTALS = ("episode/count", "async/restarts", "async/workers")


def joint_statistics(ranks: Ranks, steps: int, statistics: Scalars) -> tuple[int, dict[str, float]]:
    """Return the environment steps of all ranks, and the averages of their rollouts."""
    if ranks.count == 1:
        return steps, dict(statistics)
    rows = ranks.exchange([steps, dict(statistics)])
    return sum(row[0] for row in rows), merge_statistics([row[1] for row in rows])


def merge_statistics(rows: Sequence[Scalars]) -> dict[str, float]:
    """Return averages over ranks: those of episodes by the number of episodes, others where a rank has them."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        having = [row for row in rows if name in row]
        values = [row[name] for row in having]
        if name in _EXTREMES:
            merged[name] = _EXTREMES[name](values)
        elif name in _TOTALS:
            merged[name] = sum(values)
        else:
            weights = [row["episode/count"] if name.startswith("episode/") else 1.0 for row in having]
            merged[name] = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    return merged
