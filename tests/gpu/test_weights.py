"""Weights on a GPU: a collector's stream reads whole snapshots while the learner's writes the next ones."""

from __future__ import annotations

import threading

import torch

from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.weights import InferenceCopy, WeightStore, move, without_weights
from tests.agents.rl.helpers import ScriptedEnv, make_policy
from tests.gpu.gpu import on_gpu

pytestmark = on_gpu
DEVICE = torch.device("cuda")


def make_learner() -> torch.nn.Module:
    return move(make_policy(ScriptedEnv(4), actor={"type": "mlp", "hidden_sizes": [1024, 1024]}), DEVICE)


def fill(policy: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(value)


def test_a_thread_reads_whole_snapshots_from_one_slot() -> None:
    learner = make_learner()
    store, copy = WeightStore(learner), InferenceCopy(learner)
    places = [parameter.data_ptr() for parameter in copy.policy.parameters()]
    done, problems, adopted = threading.Event(), list[object](), set[int]()
    store.publish()

    def collect() -> None:
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            while not done.is_set():
                assert store.latest is not None
                version, _ = copy.adopt(store.latest)
                store.acknowledge(version, None)
                adopted.add(version)
                held = {float(bound) for p in copy.policy.parameters() for bound in (p.min(), p.max())}
                if version and held != {float(version)}:
                    problems.append((version, held))

    thread = threading.Thread(target=collect)
    thread.start()
    for version in range(1, 301):
        fill(learner, float(version))
        learner.version += 1
        store.publish()
    done.set()
    thread.join()
    assert not problems
    assert len(adopted) > 3
    assert len(store._slots) == 1
    assert places == [parameter.data_ptr() for parameter in copy.policy.parameters()]


def test_a_policy_that_came_without_weights_gets_them_from_shared_memory() -> None:
    learner = make_learner()
    fill(learner, 3.0)
    store = WeightStore(learner, AsyncCfg(worker="process", verify_weights=True))
    copy = InferenceCopy(move(without_weights(learner), DEVICE))
    assert not copy.has_weights
    store.acknowledge(*copy.adopt(store.publish()))
    assert copy.has_weights
    assert all(parameter.is_cuda and bool((parameter == 3.0).all()) for parameter in copy.policy.parameters())
