"""A worker of a Ray cluster without the cluster: requests, weights that come late, interruptions and failures."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from embodichain.agents.processes.shared_memory import tensor_of
from embodichain.agents.rl.collector import AsyncCfg
from embodichain.agents.rl.collector.backends import ray as ray_actor
from embodichain.agents.rl.collector.backends.ray import RolloutActor
from embodichain.agents.rl.collector.rollout_worker import WorkerSpec
from embodichain.agents.rl.collector.weights import WeightSnapshot, WeightStore
from embodichain.utils.tensor_tree import decode
from tests.agents.rl.async_cases import NUM_ENVS, NUM_STEPS, Env, GatedEnv, make_env, make_learner
from tests.programs import wait_until

pytestmark = pytest.mark.usefixtures("one_thread")


class Learner:
    """Sends an actor in this process what a learner would."""

    def __init__(self, env: Any = None) -> None:
        self.policy = make_learner().policy
        cfg = AsyncCfg(worker="ray")
        self.store = WeightStore(self.policy, cfg)
        spec = WorkerSpec(env or make_env(), self.policy, torch.device("cpu"), None, None, cfg, NUM_STEPS)
        self.spec = spec.for_another_process()
        self.actor = RolloutActor([])
        self.sequence = 0

    def snapshot(self) -> WeightSnapshot:
        self.policy.version += 1
        return self.store.publish()

    def build(self) -> dict[str, Any]:
        return self.actor.build(self.spec, "cpu", 1, 1)

    def collect(self, snapshot: WeightSnapshot) -> dict[str, Any]:
        self.sequence += 1
        weights = (snapshot.version, snapshot.digest)
        return self.actor.collect(self.sequence, 0, weights, snapshot.data.numpy(), None, snapshot.version)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "location_of_actor", dict)
    monkeypatch.setattr(ray_actor, "cores_of_actor", lambda: 1)
    monkeypatch.setattr(ray_actor, "limit_cores", lambda cores: None)


def versions(event: dict[str, Any]) -> list[int]:
    steps = decode(event["content"][0], tensor_of(event["content"][1]))["steps"]
    assert steps.shape == (NUM_STEPS, NUM_ENVS)
    return steps["policy_version"].unique().tolist()


def test_an_environment_is_built_once_and_goes_on_from_rollout_to_rollout() -> None:
    learner = Learner()
    assert learner.build() == {"event": "built", "num_envs": NUM_ENVS}
    worker = learner.actor._worker
    assert learner.build() == {"event": "built", "num_envs": NUM_ENVS}  # its first answer was lost
    assert learner.actor._worker is worker
    first = learner.snapshot()
    event = learner.collect(first)
    assert event["event"] == "rollout"
    assert versions(event) == [first.version]
    again = learner.collect(first)  # nothing is adopted anew, but the learner may have missed the answer before
    assert again["adopted"] == event["adopted"] == {first.version: first.digest}
    assert learner.actor._worker.env.steps == 2 * NUM_STEPS


def test_newer_weights_are_used_from_the_next_step_on_and_older_ones_never() -> None:
    sent = threading.Event()
    learner = Learner(partial(GatedEnv, sent, at=2))
    learner.build()
    old, first, newer = learner.snapshot(), learner.snapshot(), learner.snapshot()

    def send() -> None:
        wait_until(lambda: learner.actor._worker.env.steps == 2)
        for snapshot in (old, newer, first):  # calls may arrive in any order
            learner.actor.adopt((snapshot.version, snapshot.digest), snapshot.data.numpy())
        sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    event = learner.collect(first)
    thread.join()
    assert versions(event) == [first.version, newer.version]
    assert event["adopted"] == {first.version: first.digest, newer.version: newer.digest}


def test_a_rollout_is_interrupted_between_two_steps_and_the_next_one_is_not() -> None:
    interrupted = threading.Event()
    learner = Learner(partial(GatedEnv, interrupted, at=2))
    learner.build()
    snapshot = learner.snapshot()

    def interrupt() -> None:
        wait_until(lambda: learner.actor._worker.env.steps == 2)
        learner.actor.interrupt(learner.sequence)
        interrupted.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert learner.collect(snapshot) == {"event": "interrupted"}
    thread.join()
    assert learner.actor._worker.env.steps == 3  # the one in which it was interrupted is the last one
    assert versions(learner.collect(snapshot)) == [snapshot.version]
    assert learner.actor._worker.env.steps == 3 + NUM_STEPS


class NotingEnv(GatedEnv):
    """Notes when each of its steps ended."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(gate, at=2, pause=0.05)
        self.finished = [time.monotonic()] * 2

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.finished.append(time.monotonic())
        return result


def test_failures_are_reports_and_a_long_step_can_be_seen() -> None:
    learner = Learner(partial(Env, trouble="raise", at=2))
    assert '"raised CollectorError"' in learner.collect(learner.snapshot())["report"]  # nothing was built
    learner.build()
    assert '"raised ValueError"' in learner.collect(learner.snapshot())["report"]

    seen = threading.Event()
    slow = Learner(partial(NotingEnv, seen))
    slow.build()
    thread = threading.Thread(target=slow.collect, args=(slow.snapshot(),))
    thread.start()
    while thread.is_alive():
        before_last = slow.actor._worker.env.finished[-2]  # the heartbeat after the last end may still be on its way
        status = slow.actor.status()
        if status["busy"]:
            assert status["seconds_ago"] <= time.monotonic() - before_last  # not since the rollout began
            if status["seconds_ago"] > 0.2 and slow.actor._worker.env.steps == 2:
                seen.set()  # the step that waits for this goes on
        time.sleep(0.01)
    assert seen.is_set()
    assert not slow.actor.status()["busy"]
    assert slow.actor.status()["steps"] == NUM_STEPS + 1
