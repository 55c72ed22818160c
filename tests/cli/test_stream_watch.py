"""What a person sees of the workers of a stream."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embodichain.agents.engine import StreamStats, WorkerStats
from embodichain.cli.stream_watch import MAX_LINES, StreamLog, worker_table

STATS = StreamStats(100, 9.0, 540.0, 3200, 320.0, 2.0, 0.5, 1.5, None, 3, 0)


def workers(count: int) -> list[WorkerStats]:
    """Return workers on two nodes in turn; the last one waits for a place."""
    running = [
        WorkerStats(i, f"node{i % 2}", 1000 + i, "running", 10 * i, 1.5, 90.0, 0.1 * i, 2.0 + i, i)
        for i in range(count - 1)
    ]
    return [*running, WorkerStats(count - 1, "", 0, "waiting", 7, 0.0, 0.0, 0.0, 9.0, 1)]


def lines(table: object) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    words = out.getvalue()
    assert "…" not in words, "the table does not fit into 80 columns"
    return [line.split() for line in words.splitlines() if re.match(r"\(waiting\)|node\d", line)]


def test_few_workers_have_a_line_each_and_their_nodes_one() -> None:
    rows = lines(worker_table(workers(4)))
    assert rows[0] == ["(waiting)", "3", "waiting", "7", "0.0", "0", "9.0", "s", "1"]
    assert rows[1] == ["node0", "0", "running", "0", "1.5", "90", "0.0", "s", "2.0", "s", "0"]
    assert rows[3] == ["node0", "all", "2", "of", "2", "20", "3.0", "180", "0.2", "s", "3.0", "s", "2"]
    assert [row[0] for row in rows] == ["(waiting)", "node0", "node0", "node0", "node1"]


def test_many_workers_have_a_line_per_node() -> None:
    rows = lines(worker_table(workers(MAX_LINES + 1)))
    assert [row[0] for row in rows] == ["(waiting)", "node0", "node1"]
    assert rows[1][2:5] == [f"{MAX_LINES // 2}", "of", f"{MAX_LINES // 2}"]
    assert float(rows[1][6]) == 1.5 * MAX_LINES / 2


def test_scalars_are_written_for_the_stream_and_for_nodes(tmp_path: Path) -> None:
    log = StreamLog(tmp_path)
    log.write(3.2, STATS, workers(4))
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("stream/episodes_per_second")[0].value == 9.0
    assert events.Scalars("nodes/node0/episodes_per_second")[0].value == 3.0
    assert events.Scalars("nodes/node0/restarts")[0].step == 3
    assert "stream/success_rate" not in events.Tags()["scalars"]
