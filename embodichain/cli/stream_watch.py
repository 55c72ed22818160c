"""The workers of a stream as a table that fits the terminal: line by line, or node by node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from embodichain.cli.stream_rates import Rates

if TYPE_CHECKING:
    from rich.table import Table

    from embodichain.agents.engine import WorkerStats

MAX_LINES = 40
"""Longest table where no height of a terminal bounds it."""
IDLE = "idle (buffer full)"
_SILENT_SECONDS = 2.0
"""From then on the time since a worker's last sign of life is shown."""
_NAME_LENGTH = 13
_LEFT = ("node", "worker", "state")
_COLUMNS = (*_LEFT, "episodes", "per s", "steps/s", "age", "restarts")
Line = tuple[str, ...]


def worker_table(workers: Sequence[WorkerStats], rates: Rates, max_lines: int = MAX_LINES) -> Table:
    """Return a line for each worker, for each node with several of them, and for all.

    If these are more than ``max_lines``, workers are left out; then as many nodes as it takes. Workers that wait for a
    node share one line. The last line, about all of them, is always there.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))  # it has to fit into 80 columns
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    nodes = by_node(workers)
    waiting = nodes.pop("", [])
    last = [_sum("-", f"{len(waiting)} more", "waiting", waiting, rates)] if waiting else []
    last.append(_sum("all", str(len(workers)), _state_of_all(workers), workers, rates))
    for line, is_sum in _fitting(nodes, rates, max_lines - len(last)):
        table.add_row(*line, style="bold" if is_sum else None)
    for line in last if max_lines > 1 else last[-1:]:
        table.add_row(*line, style="bold" if line is last[-1] else "dim")
    return table


def by_node(workers: Iterable[WorkerStats]) -> dict[str, list[WorkerStats]]:
    """Return the workers by the name of their node, those that build their environment last; ``""`` if they wait."""
    nodes: dict[str, list[WorkerStats]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: (worker.state != "running", worker.worker)):
        nodes[worker.node if worker.state != "waiting" else ""].append(worker)
    return dict(sorted(nodes.items()))


def mean_age(workers: Sequence[WorkerStats]) -> float:
    """Return the mean age of the workers' episodes; 0 if there are none in the buffer."""
    ages = [worker.mean_age_seconds for worker in workers if worker.mean_age_seconds > 0]
    return sum(ages) / len(ages) if ages else 0.0


def _fitting(nodes: Mapping[str, list[WorkerStats]], rates: Rates, room: int) -> list[tuple[Line, bool]]:
    """Return as many lines about workers and nodes as there is room for, and which of them are sums."""
    each: list[tuple[Line, bool]] = []
    for node, members in nodes.items():
        each += [(_line(worker, rates), False) for worker in members]
        if len(nodes) > 1 and len(members) > 1:
            each.append((_node(node, members, rates), True))
    if len(each) <= room:
        return each
    shown = nodes if len(nodes) <= room else dict(list(nodes.items())[: max(room - 1, 0)])
    lines = [(_node(node, members, rates), False) for node, members in shown.items()]
    others = [worker for node, members in nodes.items() if node not in shown for worker in members]
    if others and room > 0:
        count = len(nodes) - len(shown)
        lines.append((_sum(f"{count} more", f"all {len(others)}", _state_of_all(others), others, rates), False))
    return lines


def _line(worker: WorkerStats, rates: Rates) -> Line:
    return _sum(worker.node, str(worker.worker), _state(worker), [worker], rates)


def _node(node: str, members: Sequence[WorkerStats], rates: Rates) -> Line:
    return _sum(node, f"all {len(members)}", _state_of_all(members), members, rates)


def _sum(node: str, who: str, state: str, workers: Sequence[WorkerStats], rates: Rates) -> Line:
    """Return a line about some workers; without rates and age if all of them wait."""
    episodes, frames = (sum(rates.of_workers.get(w.worker, (0.0, 0.0))[i] for w in workers) for i in (0, 1))
    at_work = any(worker.state != "waiting" for worker in workers)
    return (
        node if len(node) <= _NAME_LENGTH else f"…{node[1 - _NAME_LENGTH :]}",  # names differ at their ends
        who,
        state,
        f"{sum(worker.episodes_written for worker in workers):,}",
        f"{episodes:,.1f}" if at_work else "",
        f"{frames:,.0f}" if at_work else "",
        f"{age:.1f} s" if at_work and (age := mean_age(workers)) > 0 else "",
        str(sum(worker.restarts for worker in workers)),
    )


def _state(worker: WorkerStats) -> str:
    if worker.silent_seconds > _SILENT_SECONDS:
        return f"silent {worker.silent_seconds:.0f} s"
    return IDLE if worker.idle else worker.state


def _state_of_all(workers: Sequence[WorkerStats]) -> str:
    """Return what several workers are doing, in few words."""
    running = [worker for worker in workers if worker.state == "running"]
    silent = [worker.silent_seconds for worker in running if worker.silent_seconds > _SILENT_SECONDS]
    if silent:
        return f"{len(silent)} silent {max(silent):.0f} s"
    if running and all(worker.idle for worker in running):
        return IDLE
    return f"{len(running)} of {len(workers)} running"
