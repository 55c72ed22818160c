"""The score of a run in a sweep: one number for all of its evaluations.

A single evaluation of a single seed is mostly luck. So the default is the mean of all evaluations, the area under the
learning curve, which does not depend on whether a run continues after it has reached its target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from embodichain.agents.rl.config import TrainerCfg, num_iterations
from embodichain.agents.rl.run_records import RunInfo
from embodichain.config.files import dotted

ScoreKind = Literal["mean", "last", "best"]
Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class Judge:
    """Computes the score of runs."""

    metric: str = "eval/return"
    """Name of a logged number."""
    score: ScoreKind = "mean"
    """Use the mean of the evaluations, the last one, or the best."""
    direction: Direction = "maximize"

    def evaluations(self, run: RunInfo, planned: int | None) -> list[float]:
        """Return the evaluations of a run, in order.

        If a run stopped at its target, its last value is repeated up to ``planned`` evaluations, so that it does not
        score less than a run that reached the target later.
        """
        found = [line.get(self.metric) for line in run.lines]
        values = [float(value) for value in found if value is not None and math.isfinite(value)]
        if values and planned is not None and run.record.reason == "target":
            values += [values[-1]] * (planned - len(values))
        return values

    def of(self, values: Sequence[float]) -> float | None:
        """Return the score of evaluations, ``None`` if there are none."""
        if not values:
            return None
        if self.score == "best":
            return max(values) if self.direction == "maximize" else min(values)
        return values[-1] if self.score == "last" else sum(values) / len(values)

    def rank(self, value: float) -> float:
        """Return a sort key that is lower for better values."""
        return -value if self.direction == "maximize" else value


def chunk_size(policy: Mapping[str, Any]) -> int:
    """Return the number of actions per decision of a ``policy`` block."""
    sizes = [value for name, value in dotted(policy).items() if name.split(".")[-1] == "chunk_size"]
    return max((size for size in sizes if isinstance(size, int)), default=1)


def planned_evaluations(trainer: TrainerCfg, actions: int = 1) -> int | None:
    """Return the number of evaluations of a run that is limited by steps; ``None`` if it is unknown.

    It is unknown for chunks of several ``actions``, which an episode's end cuts short.
    """
    iterations, frequency = num_iterations(trainer), trainer.eval_freq
    if not iterations or actions > 1:
        return None
    rollout = (trainer.num_envs or 1) * trainer.buffer_size
    if not frequency:
        return 1
    if frequency <= rollout:
        return iterations
    total = iterations * rollout
    is_last_due = total // frequency > (total - rollout) // frequency
    return total // frequency + (0 if is_last_due else 1)
