"""Weights between a learner and a collector: a collector uses exactly the weights that were published."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time

import pytest
import torch

from embodichain.agents.processes.channel import Channel
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.weights import (
    InferenceCopy,
    WeightLayout,
    WeightSnapshot,
    WeightStore,
    content_digest,
    move,
    without_weights,
)
from embodichain.errors import WeightsError
from tests.agents.rl.helpers import ScriptedEnv, make_policy

pytestmark = pytest.mark.usefixtures("one_thread")


VERIFY = AsyncCfg(verify_weights=True)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return make_policy(ScriptedEnv(4), normalize_obs=True)


def change(policy, step=1):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01 * step
    policy.version += 1


def test_the_digest_sees_every_tensor(policy):
    seen = {content_digest(policy)}
    assert content_digest(policy) in seen
    for tensor in policy.state_dict().values():
        with torch.no_grad():
            tensor.view(-1)[-1:] += 1
        seen.add(content_digest(policy))
    assert len(seen) == 1 + sum(tensor.numel() > 0 for tensor in policy.state_dict().values())


# --- publishing and adopting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["thread", "process", "ray"])
@pytest.mark.parametrize("verify", [False, True])
def test_copy_adopts_exactly_what_was_published(policy, worker, verify):
    store, copy = WeightStore(policy, AsyncCfg(worker=worker, verify_weights=verify)), InferenceCopy(policy)
    for _ in range(3):
        change(policy)
        snapshot = store.publish()
        store.acknowledge(*copy.adopt(snapshot))
        mine, other = policy.state_dict(), copy.policy.state_dict()
        assert all(torch.equal(mine[name], other[name]) for name in mine)
        assert int(copy.policy.version) == int(policy.version) == snapshot.version
    assert not any(parameter.requires_grad for parameter in copy.policy.parameters())


def test_all_types_survive_the_flat_memory():
    module = torch.nn.Module()
    for name, tensor in {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.tensor(5),
        "d": torch.tensor([True, False, True]),
        "e": torch.zeros(0, 4),
        "f": torch.randn(4, 6).t(),
    }.items():
        module.register_buffer(name, tensor)
    layout = WeightLayout(module)
    data = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(module, data)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for tensor in module.state_dict().values():
        tensor.zero_()
    layout.unpack(data, module)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())


def test_snapshots_do_not_change_with_the_policy(policy):
    store = WeightStore(policy, AsyncCfg(adopt="lockstep", verify_weights=True))
    snapshot = store.publish()
    change(policy)
    kept = snapshot.data.clone()
    assert snapshot.digest == store._digests[0] != content_digest(policy)
    assert store.at(0) is snapshot
    assert store.publish() is store.latest is not snapshot
    assert torch.equal(snapshot.data, kept)
    store.forget_before(1)
    with pytest.raises(WeightsError, match=r"no snapshot of version 0; kept are \[1\]"):
        store.at(0)


def test_weights_that_changed_without_a_new_number_are_an_error(policy):
    store = WeightStore(policy, VERIFY)
    assert store.publish() is store.publish()
    change(policy)
    policy.version -= 1
    with pytest.raises(WeightsError, match=r"still 0.*policy\.version \+= 1"):
        store.publish()


def test_older_versions_cannot_follow(policy):
    store = WeightStore(policy)
    change(policy)
    store.publish()
    policy.version -= 1
    with pytest.raises(WeightsError, match="version 0 comes after version 1"):
        store.publish()


def test_a_copy_that_holds_something_else_is_found_out(policy):
    store, copy = WeightStore(policy, VERIFY), InferenceCopy(policy)
    snapshot = store.publish()
    copy.adopt(snapshot)
    with torch.no_grad():
        next(copy.policy.parameters()).view(-1)[0] += 1e-7
    with pytest.raises(WeightsError, match="other weights than were published"):
        store.acknowledge(snapshot.version, content_digest(copy.policy))


def test_weights_that_never_arrive_are_found_out(policy):
    """A module that replaced its parameters keeps its old ones, whatever is copied to where they were."""
    store, copy = WeightStore(policy, VERIFY), InferenceCopy(policy)
    stuck = {name: tensor.clone() for name, tensor in copy.policy.state_dict().items()}
    copy.policy.state_dict = lambda **_: {name: tensor.clone() for name, tensor in stuck.items()}  # type: ignore[method-assign]
    change(policy)
    snapshot = store.publish()
    with pytest.raises(WeightsError, match="other weights"):
        store.acknowledge(*copy.adopt(snapshot))


def test_stamps_must_have_been_acknowledged(policy):
    store, copy = WeightStore(policy), InferenceCopy(policy)
    snapshot = store.publish()
    with pytest.raises(WeightsError, match=r"\[0\], which no collector acknowledged"):
        store.check_stamps([0])
    store.acknowledge(*copy.adopt(snapshot))
    store.check_stamps([0, 0])
    with pytest.raises(WeightsError, match="adopted version 3"):
        store.acknowledge(3, None)


def test_policies_of_another_shape_do_not_fit(policy):
    other = make_policy(ScriptedEnv(4), actor={"type": "mlp", "hidden_sizes": [8]})
    with pytest.raises(WeightsError, match="bytes of weights"):
        InferenceCopy(other).adopt(WeightStore(policy).publish())


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_two_slots_are_enough_whoever_is_faster(policy, worker):
    store, copy = WeightStore(policy, AsyncCfg(worker=worker)), InferenceCopy(policy)
    memory = set()
    for step in range(20):
        change(policy)
        snapshot = store.publish()
        memory.add(snapshot.data.data_ptr())
        if step % 3 == 0:
            assert copy.adopt(snapshot) == (snapshot.version, None)
            inside = {parameter.untyped_storage().data_ptr() for parameter in copy.policy.parameters()}
            assert inside == {snapshot.data.untyped_storage().data_ptr()}  # no third copy
        else:
            assert int(copy.policy.version) == step - step % 3 + 1  # what is in use stays as it is
    assert len(memory) == 2


def test_a_snapshot_that_was_overtaken_brings_the_newer_weights(policy):
    store, copy = WeightStore(policy, VERIFY), InferenceCopy(policy)
    copy.adopt(store.publish())
    change(policy)
    overtaken = store.publish()
    change(policy)
    newest = store.publish()
    assert overtaken.data.data_ptr() == newest.data.data_ptr()
    assert copy.adopt(overtaken) == (2, newest.digest)
    assert int(copy.policy.version) == 2
    store.acknowledge(2, content_digest(copy.policy))


def test_lockstep_keeps_what_is_asked_for(policy):
    store, copy = WeightStore(policy, AsyncCfg(adopt="lockstep", max_policy_lag=3)), InferenceCopy(policy)
    for version in range(12):
        store.publish()
        change(policy)
        if version >= 3:
            assert copy.adopt(store.at(version - 3)) == (version - 3, None)
            store.forget_before(version - 2)
    assert [snapshot.version for snapshot in store.kept()] == [9, 10, 11]
    assert len(store._slots) <= 3 + 2


def lease_and_die(channel):
    message = channel.receive()
    copy = InferenceCopy(make_policy(ScriptedEnv(4), normalize_obs=True))
    snapshot = WeightSnapshot(**message.content(), data=message.segment.bytes, segment=message.segment)
    channel.send("adopted", copy.adopt(snapshot)[0])
    channel.receive()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_gives_back_its_lease(policy):
    store = WeightStore(policy, AsyncCfg(worker="process"))
    memory = set()
    for _ in range(3):
        snapshot = store.publish()
        memory.add(snapshot.data.data_ptr())
        mine, other = Channel.pair()
        process = multiprocessing.get_context("fork").Process(target=lease_and_die, args=(other,))
        process.start()
        mine.send("weights", {"version": snapshot.version, "digest": None}, snapshot.segment)
        assert mine.receive().content() == snapshot.version
        for _ in range(2):  # there is a slot that the process does not use
            change(policy)
            assert store.publish().data.data_ptr() != snapshot.data.data_ptr()
        mine.send("die")
        process.join()
        mine.close()
        other.close()
        change(policy)
    assert len(memory) <= 2


def test_a_policy_is_sent_without_its_weights(policy):
    sent = without_weights(policy)
    assert all(parameter.is_meta for parameter in sent.parameters())
    assert all(torch.equal(a, b) for a, b in zip(sent.buffers(), policy.buffers(), strict=True))
    change(policy)
    received = pickle.loads(pickle.dumps(sent))  # noqa: S301 - written a moment ago
    copy = InferenceCopy(move(received, torch.device("cpu")))
    assert not copy.has_weights
    copy.adopt(WeightStore(policy).publish())
    assert copy.has_weights
    mine, other = policy.state_dict(), copy.policy.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


# --- under fire ---------------------------------------------------------------------------------------------------


def test_no_inference_sees_torn_weights_while_the_optimiser_writes_at_full_speed():
    """The learner never pauses; the collector checks all of its weights before and after every inference."""
    torch.manual_seed(0)
    env = ScriptedEnv(16)
    learner = make_policy(env, actor={"type": "mlp", "hidden_sizes": [256, 256]})
    store, copy = WeightStore(learner, VERIFY), InferenceCopy(learner)
    store.publish()
    optimizer = torch.optim.Adam(learner.parameters(), lr=1e-2, fused=True)
    done, problems, adopted, inferences = threading.Event(), [], set(), 0
    obs = env.reset(seed=0)[0]

    def collect() -> None:
        nonlocal inferences
        try:
            while not done.is_set():
                snapshot = store.latest
                if snapshot.version not in adopted:
                    version, digest = copy.adopt(snapshot)
                    store.acknowledge(version, digest)
                    adopted.add(version)
                assert content_digest(copy.policy) == store._digests[int(copy.policy.version)]
                with torch.no_grad():
                    copy.policy.act(obs)
                assert content_digest(copy.policy) == store._digests[int(copy.policy.version)]
                inferences += 1
        except (AssertionError, WeightsError) as problem:
            problems.append(problem)

    collector = threading.Thread(target=collect)
    collector.start()
    began = time.monotonic()
    while len(adopted) < 20 or inferences < 100:
        for _ in range(5):
            for parameter in learner.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        learner.version += 1
        store.publish()
        assert not problems
        assert time.monotonic() - began < 200.0
    done.set()
    collector.join()
    assert not problems
    assert len(adopted) >= 20
    assert inferences >= 100
