"""Rollouts from a Ray cluster: the synchronous numbers without lag, the same bound with it, and workers that die."""

from __future__ import annotations

import heapq
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from embodichain.agents.processes.ray_backend import PlacementCfg, RayCluster
from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint
from embodichain.agents.rl.collector import AsyncCfg, SyncCollector
from embodichain.agents.rl.collector.backends.ray import choose, in_time
from embodichain.agents.rl.config import TrainCfg
from embodichain.errors import ConfigError
from tests.agents.rl.async_cases import NUM_STEPS, make_collector, make_env, make_learner
from tests.programs import start_program, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")


def ray_collector(algorithm: Any, cluster: Any, env: Any = None, **settings: Any) -> Any:
    common = {"worker": "ray", "address": cluster.address, "start_timeout": 150.0, "step_timeout": 60.0}
    return make_collector(algorithm, env, rollouts=6, **common | settings)


def learn(algorithm: Any, collector: Any, iterations: int) -> list[Any]:
    rollouts = []
    for _ in range(iterations):
        rollouts.append(collector.collect(NUM_STEPS).clone())
        algorithm.update(rollouts[-1].clone())
        collector.publish()
    return rollouts


# --- the order of rollouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 3, 7])
def test_no_rollout_becomes_older_than_the_bound(lag: int) -> None:
    """Workers of random speed, a learner of random speed: every rollout within the bound, and never a standstill."""
    chance = random.Random(lag)
    settled, taken, highest, number, now = 0, 0, lag, 0, 0.0
    requests, idle = list(range(lag + 1)), list(range(lag + 1))
    running: dict[int, int] = {}
    arrived: dict[int, int] = {}
    begun: dict[int, int] = {}
    agenda: list[tuple[float, str, int]] = []
    learning = False
    waiting: list[int] = []
    while settled < 300:
        while requests and idle:
            request, worker = requests.pop(0), idle.pop(0)
            running[request], begun[request] = highest, settled
            seconds = chance.expovariate(1.0) * (8 if worker == 0 else 1)
            heapq.heappush(agenda, (now + seconds, f"collected {worker}", request))
        while (chosen := choose(arrived, running.values(), number)) is not None:
            assert number <= arrived.pop(chosen)
            assert number - begun[chosen] <= lag
            waiting.append(chosen)
            number += 1
        if waiting and not learning:
            learning = True
            waiting.pop(0)
            taken += 1
            heapq.heappush(agenda, (now + chance.random(), "learned", 0))
        assert agenda, "everybody waits for everybody"
        now, what, request = heapq.heappop(agenda)
        if what == "learned":
            learning = False
            settled += 1
            highest += 1
            requests.append(highest)
        else:
            arrived[request] = running.pop(request)
            idle.append(int(what.split()[1]))
    assert taken == 300


def test_deadlines_are_compared_in_order() -> None:
    assert in_time([7, 5, 6], 5)
    assert not in_time([5, 5], 5)
    assert choose({10: 9}, [4], 3) == 10  # the other one can still become number 4
    assert choose({10: 9}, [3], 3) is None
    assert choose({10: 9, 11: 3}, [4], 3) == 11


def test_settings_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2 can be at work at once, got 3"):
        AsyncCfg(worker="ray", num_workers=3, max_policy_lag=1).check()
    with pytest.raises(ConfigError, match="need worker 'ray'"):
        AsyncCfg(worker="process", num_workers=2).check()


# --- with a cluster -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_no_lag_is_the_synchronous_algorithm_bit_by_bit(cluster: Any, name: str) -> None:
    sync, other = make_learner(name), make_learner(name)
    collector = SyncCollector(make_env()(), sync.policy, start_rollout=sync.start_rollout if name == "grpo" else None)
    collector.reset(seed=3)
    torch.manual_seed(1)
    expected = learn(sync, collector, 3)
    there = ray_collector(other, cluster, max_policy_lag=0)
    there.reset(seed=3)
    torch.manual_seed(1)
    with there:
        actual = learn(other, there, 3)
    for one, two in zip(expected, actual, strict=True):
        for key, leaf in one.items(include_nested=True, leaves_only=True):
            assert torch.equal(leaf, two[key]), key
    for one, two in zip(sync.policy.state_dict().values(), other.policy.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_a_killed_node_costs_what_is_in_flight_and_is_taken_back(cluster: Any) -> None:
    algorithm = make_learner("grpo")
    settings = {"num_workers": 2, "max_policy_lag": 3, "adopt": "rollout", "max_restarts": 0, "seed": 5}
    collector = ray_collector(algorithm, cluster, make_env(pause=0.02), **settings)
    collector.reset(seed=1)
    with collector:
        pool = collector._backend

        def go_on(condition: Any, at_least: int = 4) -> None:
            deadline, done = time.monotonic() + 120, 0
            while done < at_least or not condition():
                version = int(algorithm.policy.version)
                rollout = learn(algorithm, collector, 1)[0]
                stamps = rollout["policy_version"]
                assert len(stamps.unique()) == 1, "groups of one rollout acted by different weights"
                assert 0 <= version - int(stamps[0, 0]) <= 3
                done += 1
                assert time.monotonic() < deadline, "waited in vain"

        def at_work() -> int:
            return int(pool.num_workers)

        go_on(lambda: at_work() == 2)
        cluster.kill()
        go_on(lambda: pool.restarts >= 1)
        go_on(lambda: at_work() == 1)
        cluster.add()
        go_on(lambda: at_work() == 2)
        assert collector.statistics()["async/restarts"] >= 1


def test_a_slow_worker_does_not_hold_up_the_other(cluster: Any, tmp_path: Any) -> None:
    algorithm = make_learner("ppo")
    slow = make_env(pause=0.02, slow=str(tmp_path / "slow"), slowness=100.0)
    collector = ray_collector(algorithm, cluster, slow, num_workers=2, max_policy_lag=1)
    collector.reset(seed=1)
    with collector:
        pool = collector._backend
        deadline = time.monotonic() + 120
        while pool.num_workers < 2:
            learn(algorithm, collector, 1)
            assert time.monotonic() < deadline
        began = time.monotonic()
        learn(algorithm, collector, 12)
        # In order, every second rollout would be the slow one's: 6 times 5 steps of 2 s.
        assert time.monotonic() - began < 0.5 * 6 * NUM_STEPS * 2.0


def test_the_name_of_a_worker_will_do_in_a_config() -> None:
    cfg = TrainCfg.from_dict({"trainer": {"gym_config": "CartPoleRL", "collector": "ray"}})
    assert cfg.trainer.collector == AsyncCfg(worker="ray")


def run_learner(folder: Path, number: signal.Signals, *arguments: str) -> int:
    """Send a signal to a learner, once both of its workers were at work and it has saved; return its exit code."""
    before = len(metrics(folder))
    with start_program("-m", "embodichain", "train", *arguments) as learner:
        deadline = time.monotonic() + 120
        while not any(line.get("async/workers") == 2 for line in metrics(folder)[before:]) or not saved(folder):
            assert learner.poll() is None, learner.stderr.read()
            assert time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.1)
        learner.send_signal(number)
        learner.communicate(timeout=100)
    return learner.returncode


def metrics(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def saved(folder: Path) -> bool:
    return bool(list((folder / "checkpoints").glob("step_*[1-9]*")))


@pytest.mark.timeout(600)
def test_workers_end_with_a_learner_that_is_killed_and_a_resumed_run_starts_new_ones(
    cluster: Any, tmp_path: Path
) -> None:
    """At last it gets a SIGTERM, as from a scheduler: Ray's own handler would end the program before it has saved."""
    import ray

    run, config = tmp_path / "run", tmp_path / "train.json"
    trainer = {
        "gym_config": {"id": "CartPoleRL", "num_envs": 8},
        "buffer_size": 16,
        "iterations": 100_000,
        "save_freq": 128 * 5,
        "enable_eval": False,
        "run_dir": str(run),
        "collector": {"worker": "ray", "address": cluster.address, "max_policy_lag": 2, "num_workers": 2},
    }
    config.write_text(json.dumps({"trainer": trainer}))
    assert run_learner(run, signal.SIGKILL, str(config)) == -signal.SIGKILL
    reached = load_checkpoint(find_checkpoint(run, "latest"))["trainer"]["global_step"]
    connection = RayCluster(cluster.address, 1, PlacementCfg())
    try:
        wait_until(lambda: ray.available_resources().get("CPU") == 2.0)  # Ray ended them, and nothing is set aside
    finally:
        connection.close()
    assert run_learner(run, signal.SIGTERM, "--resume", str(run)) == 130  # interrupted, and saved
    end = load_checkpoint(find_checkpoint(run, "latest"))["trainer"]["global_step"]
    assert end == metrics(run)[-1]["step"] > reached
