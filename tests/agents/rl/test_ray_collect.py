"""A worker of a Ray cluster without the cluster: for whom it works, and whether it goes on or has to be replaced."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch

from embodichain.agents.processes.loaded_code import LoadedCode
from embodichain.agents.rl.collector import AsyncCfg, ray_collect
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.background.station import Setup
from embodichain.agents.rl.collector.ray_collect import CollectorActor
from embodichain.agents.rl.collector.weights import WeightStore
from tests.agents.rl.async_cases import NUM_ENVS, NUM_STEPS, make_env, make_learner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> CollectorActor:
    """A worker that nobody has asked for anything, in this process."""
    monkeypatch.setattr(ray_collect, "_place", lambda: {"node": "here", "node_id": "0", "pid": 1})
    monkeypatch.setattr(ray_collect, "_granted_cores", lambda: 1)
    monkeypatch.setattr(ray_collect, "limit_cores", lambda cores: None)
    monkeypatch.setattr(LoadedCode, "what_changed", lambda self, path: "")
    return CollectorActor("key", orphan_timeout=math.inf)  # it would end this process


def claim(actor: CollectorActor, learner: str, key: str = "key") -> dict[str, Any]:
    return actor.claim(learner, key, [], 0.5)


def work(actor: CollectorActor, until: str, **env: Any) -> dict[str, Any]:
    """Let a worker build an environment and collect for a learner until something happens; return that."""
    policy = make_learner().policy
    setup = Setup(policy, torch.device("cpu"), None, None, AsyncCfg(worker="ray"))
    assert claim(actor, "first")["phase"] == "new"
    actor.build("first", Job(make_env(**env), setup, NUM_STEPS), "cpu", 1, 1)
    snapshot = WeightStore(policy).publish()
    actor.order("first", 1, "ticket", 0, 0, None)  # calls may arrive in any order
    actor.order("first", 0, "weights", snapshot.version, snapshot.digest, snapshot.data.numpy())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for event in actor.events("first", 0.05):
            if event["event"] == until or (until == "hang" and event.get("busy", 0.0) > 0.2):
                return event
    raise AssertionError(f"no {until}")


def test_orders_given_before_a_claim_are_not_taken_for_later_ones(actor: CollectorActor) -> None:
    work(actor, "rollout")
    first = claim(actor, "first")["first_order"]  # of the same learner, after its connection was interrupted
    followed: list[int] = []
    actor._followers["weights"] = followed.append
    actor.order("first", 2, "weights", -1)  # late
    actor.order("first", first + 1, "weights", 1)
    actor.order("first", first, "weights", 0)
    actor.order("first", first + 2, "weights", 2)
    assert followed == [0, 1, 2]


def leave(actor: CollectorActor) -> None:
    """Let time go by since the learner was last heard."""
    actor._heard -= 60.0


def test_the_next_learner_goes_on_in_the_environment(actor: CollectorActor) -> None:
    work(actor, "rollout")
    station = actor._station
    leave(actor)
    answer = claim(actor, "second")
    assert (answer["event"], answer["phase"], answer["num_envs"]) == ("claimed", "built", NUM_ENVS)
    assert actor._station is station
    assert [event["event"] for event in actor.events("second", 0.0)] == ["alive"]  # nothing of what was before
    assert actor.events("first", 0.0) == [{"event": "taken"}]


def test_another_learner_is_refused_while_the_first_one_is_there(actor: CollectorActor) -> None:
    work(actor, "rollout")
    ended = threading.Event()

    def listen() -> None:
        while not ended.wait(0.1):
            actor.events("first", 0.1)

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        assert claim(actor, "second")["event"] == "refused"
        assert actor.dismiss()["event"] == "refused"
    finally:
        ended.set()
        listener.join()


@pytest.mark.parametrize(
    ("until", "env", "key", "why"),
    [
        ("rollout", {}, "another key", "was asked for something else"),
        ("failed", {"trouble": "raise", "at": 2}, "key", "raised ValueError"),
        ("hang", {"trouble": "hang", "at": 2}, "key", "has not come back from a step for"),
    ],
)
def test_what_cannot_go_on_says_so(actor: CollectorActor, until: str, env: Any, key: str, why: str) -> None:
    work(actor, until, **env)
    leave(actor)
    answer = claim(actor, "second", key)
    assert answer["event"] == "unfit"
    assert answer["why"].startswith(why)


def test_code_that_was_changed_is_told(actor: CollectorActor, monkeypatch: pytest.MonkeyPatch) -> None:
    work(actor, "rollout")
    leave(actor)
    monkeypatch.setattr(LoadedCode, "what_changed", lambda self, path: "envs.py")
    assert claim(actor, "first")["event"] == "claimed"  # it was there when that was edited, and goes on as it began
    leave(actor)
    assert claim(actor, "second")["why"] == "has loaded code that was changed since (envs.py)"


def test_a_learner_that_comes_while_the_environment_is_built_waits_for_it(actor: CollectorActor) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def make() -> Any:
        begun.set()
        go_on.wait(20)
        return make_env()()

    setup = Setup(make_learner().policy, torch.device("cpu"), None, None, AsyncCfg(worker="ray"))
    claim(actor, "first")
    building = threading.Thread(target=actor.build, args=("first", Job(make, setup, NUM_STEPS), "cpu", 1, 1))
    building.start()
    assert begun.wait(20)
    leave(actor)
    assert claim(actor, "second")["phase"] == "building"
    go_on.set()
    building.join()
    assert {"event": "ready", "num_envs": NUM_ENVS} in actor.events("second", 5.0)
    actor.build("second", Job(make_env(), setup, NUM_STEPS), "cpu", 1, 1)  # one environment is enough
    assert [event["event"] for event in actor.events("second", 0.0)] == ["alive"]
