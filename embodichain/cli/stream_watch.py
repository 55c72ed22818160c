"""The workers of a stream, node by node: as a table, and as scalars for TensorBoard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from embodichain.agents.engine import StreamStats, WorkerStats

MAX_LINES = 24
"""With more workers than this there is one line per node."""


def worker_table(workers: Sequence[WorkerStats]) -> Table:
    """Return one line per worker and one per node; only the latter if there are many workers."""
    from rich.table import Table

    table = Table(title="workers", box=None, padding=(0, 1, 0, 0))  # it has to fit into 80 columns
    for column in ("node", "worker", "state", "episodes", "per s", "steps/s", "silent", "age", "restarts"):
        table.add_column(column, justify="left" if column in ("node", "worker", "state") else "right", no_wrap=True)
    nodes = by_node(workers)
    for node, members in nodes.items():
        if len(workers) <= MAX_LINES:
            for w in members:
                sign = f"{w.silent_seconds:.1f} s" if w.state == "running" else ""
                age = f"{w.mean_age_seconds:.1f} s"
                table.add_row(node, str(w.worker), w.state, *_figures(w), sign, age, str(w.restarts))
        if len(workers) > MAX_LINES or len(nodes) > 1 < len(members):
            table.add_row(*_node_line(node, members), style="bold", end_section=True)
    return table


def by_node(workers: Sequence[WorkerStats]) -> dict[str, list[WorkerStats]]:
    """Return the workers by the name of their node; those without one are ``(waiting)``."""
    nodes: dict[str, list[WorkerStats]] = defaultdict(list)
    for worker in workers:
        nodes[worker.node or "(waiting)"].append(worker)
    return dict(sorted(nodes.items()))


def _figures(worker: WorkerStats) -> tuple[str, str, str]:
    return (
        f"{worker.episodes_written:,}",
        f"{worker.episodes_per_second:,.1f}",
        f"{worker.frames_per_second:,.0f}",
    )


def _node_line(node: str, members: Sequence[WorkerStats]) -> list[str]:
    running = [w for w in members if w.state == "running"]
    sums = node_scalars(members)
    return [
        node,
        "all",
        f"{len(running)} of {len(members)}",
        f"{sum(w.episodes_written for w in members):,}",
        f"{sums['episodes_per_second']:,.1f}",
        f"{sums['frames_per_second']:,.0f}",
        f"{sums['silent_seconds']:.1f} s" if running else "",
        f"{sums['mean_age_seconds']:.1f} s",
        f"{sums['restarts']:.0f}",
    ]


def node_scalars(members: Sequence[WorkerStats]) -> dict[str, float]:
    """Return what is worth watching about a node: sums of rates, the longest silence, the mean age."""
    return {
        "episodes_per_second": sum(w.episodes_per_second for w in members),
        "frames_per_second": sum(w.frames_per_second for w in members),
        "silent_seconds": max(w.silent_seconds for w in members),
        "mean_age_seconds": sum(w.mean_age_seconds for w in members) / len(members),
        "restarts": float(sum(w.restarts for w in members)),
        "workers": float(sum(w.state == "running" for w in members)),
    }


class StreamLog:
    """Writes the figures of a stream as TensorBoard scalars: ``stream/...`` and ``nodes/NAME/...`` over seconds."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a moment to import

        self._writer = SummaryWriter(str(folder))

    def write(self, seconds: float, stats: StreamStats, workers: Sequence[WorkerStats]) -> None:
        """Write the figures of one moment."""
        for name, value in asdict(stats).items():
            if value is not None:
                self._writer.add_scalar(f"stream/{name}", value, int(seconds))
        for node, members in by_node(workers).items():
            for name, value in node_scalars(members).items():
                self._writer.add_scalar(f"nodes/{node}/{name}", value, int(seconds))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
