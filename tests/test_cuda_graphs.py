"""When work is recorded and when it is not, tested without a GPU: a replay calls the recorded function again."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embodichain.agents.rl.algo import PPO, PPOCfg, gradient_steps
from embodichain.agents.rl.algo.gradient_steps import GraphedSteps
from embodichain.agents.rl.algo.grpo import GRPO, GRPOCfg
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector, acting
from embodichain.utils import cuda_graphs
from embodichain.utils.cuda_graphs import WARM_UP, GraphedStep, Recorder, StepParts, concurrent_use, copy_where
from tests.agents.rl.helpers import ScriptedEnv, make_policy


class FakeRecorded:
    """What ``record`` returns: nothing is done until it is replayed."""

    graph = SimpleNamespace(pool=lambda: "pool")
    count = replays = 0
    pools: list[Any] = []

    def __init__(self, work: Callable[[], Any], *, pool: Any = None, stream: Any = None, generator: Any = None) -> None:
        self.work = work
        FakeRecorded.count += 1
        FakeRecorded.pools.append(pool)

    def replay(self) -> Any:
        FakeRecorded.replays += 1
        return self.work()


@pytest.fixture(autouse=True)
def _no_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that other tests have left hanging do not count here."""
    monkeypatch.setattr(cuda_graphs, "_users", cuda_graphs._Users())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRecorded]:
    FakeRecorded.count = FakeRecorded.replays = 0
    FakeRecorded.pools = []
    for module in (gradient_steps, acting):
        monkeypatch.setattr(module, "record", FakeRecorded)
    monkeypatch.setattr(cuda_graphs, "refusing_to_wait", contextlib.nullcontext)
    return FakeRecorded


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_the_last_ordinary_call_must_not_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = []

    @contextlib.contextmanager
    def refuse() -> Any:
        refusing.append(True)
        yield
        refusing.pop()

    monkeypatch.setattr(cuda_graphs, "refusing_to_wait", refuse)
    recorder = Recorder("the test runs")
    assert [recorder.warm_up(lambda: bool(refusing)) for _ in range(WARM_UP)] == [False, False, True]
    assert recorder.ready
    assert lines(caplog) == []


def test_work_that_waits_is_done_again_and_never_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_graphs, "refusing_to_wait", contextlib.nullcontext)
    calls: list[str] = []

    def work() -> int:
        calls.append("work")
        if calls == ["work"] * WARM_UP:
            raise RuntimeError("it waits\nfor the device")
        return len(calls)

    recorder = Recorder("the test runs")
    for _ in range(WARM_UP + 2):
        recorder.warm_up(work, lambda: calls.append("clean up"))
    assert calls == [*["work"] * WARM_UP, "clean up", *["work"] * 3]
    assert not recorder.ready
    assert lines(caplog) == ["the test runs without CUDA graphs, which costs speed: it waits"]


def test_a_failed_recording_is_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> int:
        raise RuntimeError

    recorder = Recorder("the test runs")
    assert recorder.attempt(lambda: 3) == 3
    assert recorder.attempt(fail) is None
    assert not recorder.possible
    assert lines(caplog) == ["the test runs without CUDA graphs, which costs speed: RuntimeError"]


def test_nobody_is_kept_from_waiting_beside_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = []

    @contextlib.contextmanager
    def refuse() -> Any:
        refusals.append(1)
        yield

    monkeypatch.setattr(cuda_graphs, "refusing_to_wait", refuse)
    with concurrent_use():
        alone = Recorder("the test runs")
        for _ in range(WARM_UP):
            alone.warm_up(lambda: None)
    assert alone.ready
    assert refusals == []
    after = Recorder("the test runs")
    for _ in range(WARM_UP):
        after.warm_up(lambda: None)
    assert refusals == [1]


def test_convolutions_are_timed_while_any_thread_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", False)
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(cuda_graphs.timed_convolutions)
    second.enter_context(cuda_graphs.timed_convolutions)
    first.close()  # the second one began before the first one ended
    assert cudnn.benchmark
    second.close()
    assert not cudnn.benchmark


def test_a_collector_in_a_thread_counts_as_another_user() -> None:
    counts = []

    class Env(ScriptedEnv):
        def step(self, action: Any) -> Any:
            counts.append(cuda_graphs._users.count)
            return super().step(action)

    env = Env(2)
    with AsyncCollector(env, make_policy(env), VLABuffer(8), cfg=AsyncCfg(num_steps=4)) as collector:
        collector.collect()
    assert set(counts) == {1}
    assert cuda_graphs._users.count == 0


def test_grpo_evaluates_without_static_rows(fake: type[FakeRecorded]) -> None:
    algorithm = GRPO(GRPOCfg(group_size=2, mixed_precision="bf16"), make_policy(ScriptedEnv(8), "actor_only"))
    algorithm.graphs = GraphedSteps(algorithm._step, algorithm.optimizer, algorithm.validity_key)
    assert not algorithm.graphs.replays_evaluations


def test_an_environment_step_that_cannot_be_recorded_stays_ordinary(caplog: pytest.LogCaptureFixture) -> None:
    steps = []
    parts = StepParts(lambda action: steps.append(action), lambda: None, lambda: 1, lambda action, drawn: drawn)

    class Refused(GraphedStep):
        def _record(self, action: torch.Tensor) -> Any:
            raise RuntimeError("no graphs here")

    step = Refused(parts, lambda: lambda: None)
    assert [step(torch.zeros(2)) for _ in range(WARM_UP + 2)] == [1] * (WARM_UP + 2)
    assert len(steps) == WARM_UP + 2
    assert len(lines(caplog)) == 1


def updated(graphed: bool, **settings: Any) -> tuple[PPO, dict[str, float]]:
    torch.manual_seed(0)
    env = ScriptedEnv(8, limit=5)
    policy = make_policy(env)
    algorithm = PPO(PPOCfg(batch_size=24, n_epochs=3, **settings), policy)
    if graphed:
        algorithm.graphs = GraphedSteps(algorithm._step, algorithm.optimizer, algorithm.validity_key)
    collector = SyncCollector(env, policy)
    for _ in range(2):
        metrics = algorithm.update(collector.collect(10).clone())
    return algorithm, metrics


def test_replayed_updates_are_ordinary_updates(fake: type[FakeRecorded]) -> None:
    (ordinary, expected), (replayed, found) = updated(False), updated(True)
    for mine, other in zip(replayed.policy.parameters(), ordinary.policy.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert fake.count == 1  # 80 transitions in four minibatches of 20
    assert fake.replays == 2 * 3 * 4 - WARM_UP
    assert fake.pools == [None]


def test_rollouts_are_evaluated_again_by_replays(fake: type[FakeRecorded]) -> None:
    (ordinary, expected), (replayed, found) = (updated(graphed, mixed_precision="bf16") for graphed in (False, True))
    for mine, other in zip(replayed.policy.parameters(), ordinary.policy.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert fake.count == 2
    assert fake.replays == (2 * 4 - WARM_UP) + (2 * 3 * 4 - WARM_UP)  # minibatches evaluated, and gradient steps
    assert fake.pools == [None, "pool"]


def test_a_new_size_of_minibatch_is_recorded_in_the_same_pool(fake: type[FakeRecorded]) -> None:
    torch.manual_seed(0)
    env = ScriptedEnv(7, limit=5)
    algorithm = PPO(PPOCfg(batch_size=24, n_epochs=2), make_policy(env))
    algorithm.graphs = GraphedSteps(algorithm._step, algorithm.optimizer)
    algorithm.update(SyncCollector(env, algorithm.policy).collect(10))  # 70 transitions: 24, 23 and 23
    assert sorted(algorithm.graphs._graphs) == [23, 24]
    assert fake.pools == [None, "pool"]


def test_a_loss_scale_keeps_updates_from_being_recorded(
    fake: type[FakeRecorded], caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = updated(True)[0]
    algorithm.optimizer.precision = "fp16"
    count = fake.count
    algorithm.graphs = GraphedSteps(algorithm._step, algorithm.optimizer)
    algorithm.update(SyncCollector(ScriptedEnv(8), algorithm.policy).collect(10))
    assert fake.count == count
    assert ["loss scale" in line for line in lines(caplog)] == [True]


def test_replayed_decisions_are_ordinary_decisions(monkeypatch: pytest.MonkeyPatch, fake: type[FakeRecorded]) -> None:
    def rollouts(records: bool) -> list[Any]:
        monkeypatch.setattr(acting, "can_record", lambda policy, device: records)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        torch.manual_seed(0)
        env = ScriptedEnv(5, limit=4)
        policy = make_policy(env)
        collector = SyncCollector(env, policy)
        found = [collector.collect(6).clone()]
        for parameter in policy.parameters():
            parameter.data = parameter.data.clone()  # weights that have moved are recorded anew
        return [*found, collector.collect(6).clone()]

    for mine, other in zip(rollouts(True), rollouts(False), strict=True):
        for name in ("action", "sample_log_prob", "value", "reward"):
            assert torch.equal(mine[name], other[name])
    assert fake.count == 2
    assert fake.replays == 2 * (6 - WARM_UP)


def test_rows_are_copied_where_a_mask_is_true():
    mask = torch.tensor([True, False, True])
    for shape in ((3,), (3, 2), (3, 2, 2)):
        target = torch.full(shape, math.nan)
        copy_where(mask, torch.ones(shape), target)
        assert torch.equal(target.isnan(), ~mask.view(-1, *[1] * (len(shape) - 1)).expand(shape))
    flat = torch.zeros(3, 4)
    copy_where(mask, torch.arange(2.0) + 1, flat[:, ::2])  # one row for all, into a view
    assert flat.tolist() == [[1, 0, 2, 0], [0, 0, 0, 0], [1, 0, 2, 0]]
