"""The figures of a stream as scalars for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from embodichain.cli.stream_rates import Moment
from embodichain.cli.stream_watch import by_node, mean_age

if TYPE_CHECKING:
    from embodichain.agents.engine import WorkerStats


class StreamLog:
    """Writes ``stream/...`` and ``nodes/NAME/...`` over seconds; rates are those since the moment before."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a moment to import

        self._writer = SummaryWriter(str(folder))

    def write(self, moment: Moment) -> None:
        """Write the figures of one moment."""
        seconds = int(moment.seconds)
        for name, value in asdict(moment.stats).items():
            if value is not None:
                self._writer.add_scalar(f"stream/{name}", value, seconds)
        for node, members in by_node(moment.workers).items():
            for name, value in node_scalars(members).items():
                self._writer.add_scalar(f"nodes/{node or '(waiting)'}/{name}", value, seconds)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def node_scalars(members: Sequence[WorkerStats]) -> dict[str, float]:
    """Return what is worth watching about a node: sums of rates, the longest silence, the mean age."""
    return {
        "episodes_per_second": sum(w.episodes_per_second for w in members),
        "frames_per_second": sum(w.frames_per_second for w in members),
        "silent_seconds": max(w.silent_seconds for w in members),
        "mean_age_seconds": mean_age(members),
        "restarts": float(sum(w.restarts for w in members)),
        "workers": float(sum(w.state == "running" for w in members)),
    }
