"""Names of nodes, and what is told of a worker in a cluster that ended; no cluster is needed for that."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from embodichain.agents.engine import OnlineDataEngineCfg
from embodichain.agents.engine.supervisor import Supervisor
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.ray_backend import NodeNames
from embodichain.errors import ClusterError


def test_nodes_of_one_host_are_told_apart_and_one_that_returns_keeps_its_name() -> None:
    alive = {"id1", "id2", "id3"}
    names = NodeNames(lambda: alive)
    assert [names.name(node, "box") for node in ("id1", "id2")] == ["box", "box#2"]
    assert names.name("id3", "other") == "other"
    assert names.name("id1", "box") == "box"
    alive.remove("id2")
    assert names.name("id4", "box") == "box#2"
    alive.clear()
    assert names.name("id5", "box") == "box"


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_node_is_one_line_and_a_dead_process_is_told_once(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    from embodichain.agents.engine import ray_workers
    from embodichain.agents.processes import ray_backend

    monkeypatch.setattr(ray_backend, "node_died", lambda *_: lost)
    worker = ray_workers.RayWorker(cast(Any, None), 3, 0, None)
    worker.node = "box#2"
    text = "class_name: StreamWorker\nThe worker process has died. Exit detail: End of file. " + "Perhaps this. " * 90
    report = worker.end_of(RuntimeError(text))
    assert report.lost == lost
    if lost:
        assert (report.what, report.traceback) == ("is gone with its node box#2", "")
    else:
        assert report.what.startswith("ended: The worker process has died. Exit detail: End of file.")
        assert len(report.what) < 140
        assert report.traceback == text.strip()


def test_who_only_waited_for_a_node_that_died_is_not_counted_as_replaced(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor(OnlineDataEngineCfg(buffer_size=2, max_episode_steps=5, gym_config={"id": "ReachRL"}))
    for started, replaced in ((math.inf, 0), (1.0, 1)):
        worker: Any = SimpleNamespace(index=0, incarnation=4, started=started, kill=lambda: None)
        supervisor._workers[0] = worker
        supervisor._replace(worker, FailureReport(0, "is gone with its node", lost=True))
        assert supervisor.replaced == [replaced]
        assert supervisor._restarts.planned[0][1] == 4 + replaced
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == replaced


def test_a_lost_connection_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    from embodichain.agents.engine.ray_workers import RayCluster, RayPool

    def broken(*_: object) -> Iterator[Any]:
        raise OSError("Broken pipe")
        yield

    monkeypatch.setattr(RayCluster, "is_alive", lambda: True)
    monkeypatch.setattr(RayPool, "_poll", broken)
    pool = object.__new__(RayPool)
    with pytest.raises(ClusterError, match=r"lost \(Broken pipe\): the node of this machine or the head is gone"):
        list(pool.poll(0.1))
