"""Names of nodes, and the report of a worker whose cluster ended; these tests need no cluster."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from embodichain.agents.engine import OnlineDataEngineCfg
from embodichain.agents.engine.supervisor import Supervisor
from embodichain.agents.processes import ray_backend
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.pool import HangDetector
from embodichain.agents.processes.ray_backend import ActorHandle, ActorPool, NodeNames, RayCluster, RoomWatch
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
    monkeypatch.setattr(ray_backend, "node_died", lambda *_: lost)
    worker = ActorHandle(3, 0, None)
    worker.node = "box#2"
    text = "class_name: StreamWorker\nThe worker process has died. Exit detail: End of file. " + "Perhaps this. " * 90
    report = worker.failure(RuntimeError(text))
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
        supervisor.workers[0] = worker
        supervisor._replace(worker, FailureReport(0, "is gone with its node", lost=True))
        assert supervisor.restarts.replaced == [replaced]
        assert supervisor.restarts.planned[0][1] == 4 + replaced
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == replaced


def test_a_lost_connection_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray'")

    def broken(*_: object) -> Iterator[Any]:
        raise OSError("Broken pipe")
        yield

    monkeypatch.setattr(RayCluster, "is_alive", lambda: True)
    monkeypatch.setattr(ray_backend, "_wait", broken)
    pool = pool_without_cluster()
    with pytest.raises(ClusterError, match=r"lost \(Broken pipe\): the node of this machine or the head is gone"):
        list(pool.answers(0.1))


class FakeRay:
    """As much of Ray as a pool needs: answers are what they bring."""

    class exceptions:  # noqa: N801
        class RayError(Exception):
            pass

        class ActorUnavailableError(RayError):
            pass

    def wait(self, answers: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return answers[:num_returns], answers[num_returns:]

    def get(self, answer: Any) -> Any:
        content = answer()
        if isinstance(content, Exception):
            raise content
        return content

    def is_initialized(self) -> bool:
        return True


def pool_without_cluster() -> ActorPool[ActorHandle]:
    pool: ActorPool[ActorHandle] = object.__new__(ActorPool)
    pool._room, pool._names, pool.workers, pool.is_needed = RoomWatch(60.0, 60.0), NodeNames(set), [], True
    pool._hangs = HangDetector(start_timeout=0.3, step_timeout=0.3)
    return pool


def test_a_worker_that_cannot_be_reached_is_asked_again_until_it_answers_or_counts_as_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(now * 1e9))
    monkeypatch.setattr(time, "sleep", sleep)
    fake, pool = FakeRay(), pool_without_cluster()
    monkeypatch.setattr(ray_backend, "load_ray", lambda: fake)
    monkeypatch.setattr(ray_backend, "node_is_gone", lambda node_id: False)
    location = {"event": "located", "node_id": "id", "node": "box", "pid": 7, "auth_mode": "token"}
    contents: list[Any] = [location]
    actor: Any = SimpleNamespace(locate=SimpleNamespace(remote=lambda: lambda: contents[0]))
    worker = ActorHandle(0, 0, actor)
    pool.workers.append(worker)
    worker.locate()
    assert [kind for _, kind, _ in pool.answers(0.0)] == ["located"]
    assert (worker.node, worker.pid, worker.unreachable, list(worker.calls)) == ("box", 7, False, [])

    contents[0] = fake.exceptions.ActorUnavailableError("is it there?")
    worker.calls.extend([lambda: contents[0], lambda: {"event": "episodes"}])  # what it was asked for is given up
    assert [kind for _, kind, _ in pool.answers(0.0)] == ["unreachable"]
    assert worker.unreachable
    assert len(worker.calls) == 1
    contents[0] = location
    assert [kind for _, kind, _ in pool.answers(0.0)] == ["located"]
    assert not worker.unreachable

    contents[0] = fake.exceptions.ActorUnavailableError("is it there?")
    worker.locate()
    reports: list[FailureReport] = []
    for _ in range(50):
        reports += [content for _, kind, content in pool.answers(0.0) if kind == "failed"]
        if reports:
            break
    assert reports[0].hung
    assert not reports[0].lost


def test_a_node_that_asks_for_no_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayCluster, "_started_here", False)
    for mode in ("disabled", ""):
        with pytest.raises(ClusterError, match=r"does not use token authentication \(node box\)"):
            RayCluster.check_token({"auth_mode": mode, "node": "box"})
    RayCluster.check_token({"auth_mode": "token", "node": "box"})
    monkeypatch.setattr(RayCluster, "_started_here", True)  # nobody else can reach it
    RayCluster.check_token({"auth_mode": "disabled", "node": "here"})


def test_that_all_nodes_are_gone_is_told_only_while_somebody_needs_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(ray_backend.time, "monotonic", lambda: now)
    room = RoomWatch(start_timeout=100.0, absence_timeout=10.0)
    placed: Any = SimpleNamespace(started=1.0)
    waiting: Any = SimpleNamespace(started=math.inf)

    def after(seconds: float, *workers: Any, needed: bool = True, awake: float = 0.0) -> str:
        nonlocal now
        now += seconds
        return room.check(workers, needed, awake)

    assert after(99.0, waiting) == ""
    assert after(2.0, waiting) == "start_timeout (100 s)"
    assert after(0.0, placed, waiting) == ""
    assert after(9.0, waiting, needed=False) == ""
    assert after(4.0, waiting) == ""
    assert after(0.0, waiting, awake=now) == ""
    assert not caplog.records
    assert after(2.0, waiting) == ""
    assert "no node of the Ray cluster has had a worker for 6 s" in caplog.text
    assert after(3.0) == ""  # all have failed, and are asked for again
    assert after(9.0, waiting) == ""
    assert after(2.0, waiting) == "10 s, since all nodes with workers are gone"
