"""What a person sees of a stream and of its workers."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from embodichain.agents.engine import StreamStats, WorkerStats
from embodichain.cli.stream import (
    IDLE,
    WINDOW_SECONDS,
    History,
    Rates,
    Snapshot,
    StreamArgs,
    view,
    worker_table,
    write_scalars,
)

STATS = StreamStats(100, 9.0, 540.0, 3200, 320.0, 2.0, 0.5, 1.5, None, 3, 0, frames=6000)
NOTHING = Rates(0.0, 0.0, 0.0, 0.0, {})


def at_work(index: int, node: str, **changes: object) -> WorkerStats:
    worker = WorkerStats(index, node, 1000 + index, "running", 10, 1.5, 90.0, 0.1, 2.0, 0, frames=600, idle=False)
    return replace(worker, **changes)  # type: ignore[arg-type]


def waiting(index: int, **changes: object) -> WorkerStats:
    return at_work(index, "", **{"state": "waiting", "mean_age_seconds": 0.0, "episodes_written": 0} | changes)


def workers(count: int, nodes: int = 2) -> list[WorkerStats]:
    """Return workers on several nodes in turn; the first one waits for a place."""
    return [waiting(0, restarts=1), *(at_work(i, f"node{i % nodes:02}") for i in range(1, count))]


def printed(table: object, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue().splitlines()


def cells(members: list[WorkerStats], rates: Rates = NOTHING, max_lines: int = 40) -> list[list[str]]:
    """Return the words of the table's lines, without its head."""
    lines = printed(worker_table(members, rates, max_lines))
    assert not any("…" in line for line in lines), "the table does not fit into 80 columns"
    return [line.split() for line in lines[1:]]


def test_workers_at_work_come_first_and_those_that_wait_share_a_line() -> None:
    few = [waiting(0, restarts=1), waiting(1), at_work(2, "box", state="building"), at_work(3, "box")]
    assert cells(few) == [
        ["box", "3", "running", "10", "0.0", "0", "2.0", "s", "0"],
        ["box", "2", "building", "10", "0.0", "0", "2.0", "s", "0"],
        ["-", "2", "more", "waiting", "0", "1"],  # neither rates nor an age
        ["all", "4", "1", "of", "4", "running", "20", "0.0", "0", "2.0", "s", "1"],
    ]


def test_nodes_have_a_line_of_their_own_if_there_are_several() -> None:
    rates = Rates(10.0, 0.0, 0.0, 0.0, {1: (1.0, 60.0), 2: (2.0, 120.0), 3: (4.0, 240.0)})
    lines = cells([at_work(1, "a"), at_work(2, "b"), at_work(3, "b")], rates)
    assert [line[:2] for line in lines] == [["a", "1"], ["b", "2"], ["b", "3"], ["b", "all"], ["all", "3"]]
    assert lines[3][3:] == ["2", "of", "2", "running", "20", "6.0", "360", "2.0", "s", "0"]
    assert lines[4][2:] == ["3", "of", "3", "running", "30", "7.0", "420", "2.0", "s", "0"]


@pytest.mark.parametrize("max_lines", [1, 2, 3, 5, 9, 40])
def test_the_line_about_all_is_there_whatever_the_room(max_lines: int) -> None:
    lines = cells(workers(200, nodes=50), max_lines=max_lines)
    assert len(lines) <= max_lines
    assert lines[-1][:2] == ["all", "200"]
    if max_lines > 1:
        assert lines[-2][:4] == ["-", "1", "more", "waiting"]
    if max_lines > 3:
        assert lines[-3][:2] == [f"{50 - (max_lines - 3)}", "more"]  # nodes
        assert lines[0][:3] == ["node00", "all", "3"]


def test_without_room_for_workers_there_is_a_line_per_node() -> None:
    assert [line[0] for line in cells(workers(25), max_lines=10)] == ["node00", "node01", "-", "all"]


def test_states_are_told() -> None:
    idle = [at_work(0, "box", idle=True), at_work(1, "box", idle=True)]
    assert all(IDLE in line for line in printed(worker_table(idle, NOTHING))[1:])
    silent = printed(worker_table([*idle, at_work(2, "box", silent_seconds=12.3)], NOTHING))
    assert "silent 12 s" in silent[3]
    assert "1 silent 12 s" in silent[4]
    lost = printed(worker_table([*idle, at_work(2, "box", state="unreachable")], NOTHING))
    assert "unreachable" in lost[3]


def test_long_names_are_told_apart_by_their_ends() -> None:
    names = ["ip-10-0-12-34.eu.internal", "ip-10-0-12-35.eu.internal"]
    lines = printed(worker_table([at_work(i, f"worker-pool-a-{name[:13]}") for i, name in enumerate(names)], NOTHING))
    assert lines[1].split()[0].endswith("12-34")
    assert lines[2].split()[0].endswith("12-35")
    assert max(len(line.rstrip()) for line in lines) <= 80


# --- rates --------------------------------------------------------------------------------------------------------


def snapshot(seconds: float, episodes: int) -> Snapshot:
    stats = replace(STATS, episodes_written=episodes, frames=60 * episodes, samples=10 * episodes)
    return Snapshot(seconds, stats, [at_work(0, "box", episodes_written=episodes, frames=60 * episodes)])


def test_rates_are_means_over_several_bursts() -> None:
    history = History(snapshot(0.0, 128))
    for second in range(1, 101):  # 120 episodes at once, every ten seconds
        history.add(snapshot(float(second), 128 + 120 * (second // 10)))
        if second >= WINDOW_SECONDS:
            assert 8.0 <= history.rates().episodes <= 16.0
            assert history.rates().seconds <= WINDOW_SECONDS + 1
    assert history.rates(whole=True).episodes == pytest.approx(12.0)
    assert history.rates(whole=True).frames == pytest.approx(720.0)
    assert history.rates(whole=True).samples == pytest.approx(120.0)
    assert history.rates(whole=True).of_workers[0] == pytest.approx((12.0, 720.0))


def test_the_screen_is_never_too_small_and_the_end_tells_of_the_whole_run() -> None:
    args = StreamArgs("ReachRL", watch=True)
    history = History(Snapshot(0.0, replace(STATS, episodes_written=40, frames=0, samples=0), workers(17)))
    history.add(Snapshot(60.0, STATS, workers(17)))
    for height in (10, 12, 24, 40):
        lines = printed(view(history, args, Console(file=io.StringIO(), width=80, height=height)))
        assert len(lines) < height
        assert lines[-1].split()[:2] == ["all", "17"]
    lines = printed(view(history, args, None))
    assert "mean of the whole run" in lines[0]
    assert lines[2].split()[:3] == ["episodes", "100", "1.0"]
    assert sum(line.startswith("node") for line in lines) == 1 + 16 + 2


def test_scalars_are_written_for_the_stream_and_for_nodes(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as log:
        write_scalars(log, Snapshot(3.2, STATS, workers(4)))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("stream/episodes_per_second")[0].value == 9.0
    assert events.Scalars("nodes/node01/episodes_per_second")[0].value == 3.0
    assert events.Scalars("nodes/node01/workers")[0].step == 3
    assert events.Scalars("nodes/(waiting)/restarts")[0].value == 1.0
    assert "stream/success_rate" not in events.Tags()["scalars"]
