"""Workers of a Ray cluster that fail in any other way than with their node: counted, reported and replaced."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ray_envs import make_in_some_processes, make_troubled
from stream_envs import stream_settings
from torch.utils.data import DataLoader

from embodichain.agents.datasets import OnlineDataset
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg, worker
from embodichain.agents.engine.worker import StreamWorker
from embodichain.agents.processes.pool import restart_delay
from embodichain.agents.rl.collector.backends.ray import RayBackend
from embodichain.agents.rl.collector.weights import WeightSnapshot
from embodichain.errors import ClusterError, CollectorError, WorkerError
from tests.agents.rl.async_cases import NUM_STEPS, make_env, make_learner
from tests.programs import wait_until
from tests.scale.test_ray_rl import learn, ray_collector
from tests.scale.test_ray_stream import nothing_of_ray_is_left, sample_until


def learn_until(algorithm: Any, collector: Any, condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        learn(algorithm, collector, 1)
        assert time.monotonic() < deadline, "waited in vain"


def test_the_pause_before_a_replacement_doubles() -> None:
    assert [restart_delay(faults) for faults in range(1, 6)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert restart_delay(100) == 30.0


# --- streaming ------------------------------------------------------------------------------------------------------


def test_a_constructor_that_fails_is_counted_and_told(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(StreamWorker):
        def __init__(self, job: dict[str, Any]) -> None:
            if job["incarnation"]:
                raise ModuleNotFoundError("this node has no simulator")
            super().__init__(job)

    monkeypatch.setattr(worker, "StreamWorker", Broken)
    settings = stream_settings(workers="ray", address=cluster.address, refill_threshold=4)
    with OnlineDataEngine(OnlineDataEngineCfg(**settings, max_restarts=2)) as engine:
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"(?s)worker 0 ended: .*In the worker.*this node has no simulator"):
            sample_until(engine, lambda: False)
        assert engine.stats().restarts == 2
    assert "worker process has died" in caplog.text
    assert "replacing it (2 of 2)" in caplog.text


def test_a_stream_whose_nodes_are_all_gone_is_an_error(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The head has room for workers of another kind alone. Nothing is wrong as long as no episode is due."""
    cluster.kill()
    cluster.guest = cluster._cluster.add_node(num_cpus=1, resources={"island": 1}, **cluster._node())
    settings = stream_settings(workers="ray", address=cluster.address, refill_threshold=4, worker_timeout=8.0)
    with OnlineDataEngine(OnlineDataEngineCfg(**settings, placement={"resources": {"island": 1}})) as engine:
        loader = iter(DataLoader(OnlineDataset(engine, 4, batch_size=8), batch_size=None, num_workers=1))
        next(loader)
        cluster.kill()
        words = "no node of the cluster had room for a worker for 8 s, since all nodes with workers are gone"
        with pytest.raises(ClusterError, match=words):
            sample_until(engine, lambda: False)
        with pytest.raises(ClusterError, match=words):
            list(loader)
    assert "is gone with its node" in caplog.text
    assert re.search(r"no node of the Ray cluster has had a worker for [4-8] s", caplog.text)


# --- rollouts -------------------------------------------------------------------------------------------------------


def test_a_replacement_that_cannot_open_is_counted_and_told_while_others_work(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make_learner()
    env = functools.partial(make_in_some_processes, str(tmp_path), 2)
    collector = ray_collector(algorithm, cluster, env, num_workers=2, max_policy_lag=1, max_restarts=2)
    with collector:
        pool = collector._backend
        learn_until(algorithm, collector, lambda: pool.num_workers == 2)
        os.kill(next(worker.pid for worker in pool._pool.workers if worker.index == 0), signal.SIGKILL)
        learn_until(algorithm, collector, lambda: pool.restarts == 2)
        words = r"(?s)worker 0 raised ValueError: process 4 has no simulator, after 2 rep.*In the worker:.*Traceback"
        with pytest.raises(CollectorError, match=words) as raised:
            learn(algorithm, collector, 1000)
        assert isinstance(raised.value.__cause__, ValueError)
    assert "worker process has died" in caplog.text
    assert "worker 0 raised ValueError: process 3 has no simulator; replacing it (2 of 2)" in caplog.text
    nothing_of_ray_is_left()


def test_a_worker_that_hangs_is_replaced_and_each_has_the_cores_of_its_placement(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make_learner()
    env = functools.partial(make_troubled, str(tmp_path), trouble="hang", at=NUM_STEPS + 2)
    with ray_collector(algorithm, cluster, env, step_timeout=6.0, max_restarts=1) as collector:
        learn(algorithm, collector, 4)
        assert collector.statistics()["async/restarts"] == 1.0
    assert "worker 0 hung: it has not come back from a step for 6 s; replacing it (1 of 1)" in caplog.text
    assert json.loads((tmp_path / "threads.json").read_text()) == {"torch": 1, "simulation": 1}


def test_a_worker_that_stops_while_it_has_nothing_to_do_is_replaced(
    cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make_learner()
    with ray_collector(algorithm, cluster, make_env(), max_policy_lag=0, step_timeout=5.0) as collector:
        learn(algorithm, collector, 1)
        (waiting,) = collector._backend._pool.workers
        before = waiting.heartbeat.last
        wait_until(lambda: waiting.heartbeat.last > before and not waiting.heartbeat.is_busy)  # it says that it waits
        os.kill(waiting.pid, signal.SIGSTOP)
        wait_until(lambda: collector._backend.restarts == 1)
        learn(algorithm, collector, 2)
    assert "hung: it has sent no heartbeat for 5 s while it waited for work; replacing it (1 of 3)" in caplog.text


def test_a_worker_that_never_worked_is_an_error_at_once(cluster: Any, tmp_path: Path) -> None:
    env = functools.partial(make_in_some_processes, str(tmp_path), 0)
    collector = ray_collector(make_learner(), cluster, env)
    with pytest.raises(CollectorError, match="worker 0 raised ValueError: process 1 has no simulator\n"):
        collector.start()


def test_in_lockstep_a_replacement_gets_the_weights_of_its_request(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process is killed, and the next one is replaced because the weights of a request get lost on the way."""
    import ray

    lag, rollouts, lost = 2, 12, []
    stored = RayBackend._stored_weights

    def lose() -> None:
        raise OSError("the object is lost")

    def lose_one(backend: RayBackend, snapshot: WeightSnapshot) -> Any:
        weights, data = stored(backend, snapshot)
        if snapshot.version == rollouts - 4 and not lost:
            lost.append(snapshot.version)
            data = ray.remote(num_cpus=0)(lose).remote()
        return weights, data

    monkeypatch.setattr(RayBackend, "_stored_weights", lose_one)
    algorithm = make_learner()
    killed = make_env(trouble="kill", at=3 * NUM_STEPS + 2, mark=str(tmp_path / "killed"))
    collector = ray_collector(algorithm, cluster, killed, max_policy_lag=lag, adopt="lockstep")
    with collector:
        stamps = [int(rollout["policy_version"].unique()) for rollout in learn(algorithm, collector, rollouts)]
        pool = collector._backend
        assert pool.restarts == 2
        assert len(collector._store.kept()) <= lag + 2
    assert stamps == [max(0, number - lag) for number in range(rollouts)]
    assert "worker process has died" in caplog.text
    assert "the object is lost" in caplog.text
