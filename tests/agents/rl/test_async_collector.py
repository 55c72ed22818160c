"""Collection beside learning: the same numbers without lag, a bound on it otherwise, and nothing lost or used twice."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch

from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector
from embodichain.agents.rl.collector.async_collector import Pacing
from embodichain.agents.rl.collector.backends.thread import STOP_SECONDS
from embodichain.agents.rl.collector.weights import content_digest
from embodichain.agents.rl.evaluation import evaluate
from embodichain.envs.wrappers import GroupedEnv
from embodichain.errors import CollectorError, ConfigError, EnvironmentHungError, RolloutError, WeightsError
from tests.agents.rl.async_cases import NUM_ENVS, NUM_STEPS, Env, GatedEnv, make_collector, make_env, make_learner
from tests.agents.rl.helpers import make_policy
from tests.programs import wait_until

pytestmark = pytest.mark.usefixtures("one_thread")


def train(algorithm, collector, iterations, publish=True):
    """Collect and learn; return the rollouts and the statistics of each."""
    seen = []
    for _ in range(iterations):
        rollout = collector.collect(NUM_STEPS)
        seen.append((rollout.clone(), collector.statistics(), collector.episodes.clone()))
        algorithm.update(rollout)
        if publish and isinstance(collector, AsyncCollector):
            collector.publish()
    return seen


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def collect_some(collector, count):
    for _ in range(count):
        collector.collect()


def same_rollouts(one, other):
    mine, others = (dict(rollout.items(include_nested=True, leaves_only=True)) for rollout in (one, other))
    return mine.keys() == others.keys() and all(torch.equal(leaf, others[name]) for name, leaf in mine.items())


# --- without lag it is the synchronous algorithm --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo", "grpo"])
@pytest.mark.parametrize("worker", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_no_lag_is_the_synchronous_algorithm_bit_by_bit(name, worker):
    sync, other = make_learner(name), make_learner(name)
    assert same_weights(sync.policy, other.policy)
    start = sync.start_rollout if name == "grpo" else None
    collector = SyncCollector(make_env()(), sync.policy, start_rollout=start)
    collector.reset(seed=3)
    torch.manual_seed(1)
    expected = train(sync, collector, 5)

    collector = make_collector(other, max_policy_lag=0, worker=worker)
    collector.reset(seed=3)
    torch.manual_seed(1)
    with collector:
        actual = train(other, collector, 5)
    for (rollout, statistics, episodes), (twin, more, same) in zip(expected, actual, strict=True):
        assert same_rollouts(rollout, twin)
        assert {name: more[name] for name in statistics} == statistics
        assert torch.equal(episodes["return"], same["return"])
        assert more["async/lag_max"] == more["async/behaviour_kl"] == 0.0
    assert same_weights(sync.policy, other.policy)
    assert not same_weights(make_learner(name).policy, other.policy)


def test_nothing_moves_between_two_rollouts_without_lag():
    """So evaluations, which draw random numbers of their own, leave the training as it is."""
    runs = []
    for evaluates in (False, True):
        algorithm = make_learner()
        with make_collector(algorithm, max_policy_lag=0) as collector:
            for _ in range(3):
                algorithm.update(collector.collect())
                collector.publish()
                if evaluates:
                    evaluate(algorithm.policy, make_env()(), episodes=4, seed=9)
        runs.append(algorithm.policy)
    assert same_weights(*runs)


# --- the bound on the lag -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adopt", ["step", "rollout", "lockstep"])
@pytest.mark.parametrize("lag", [1, 3])
def test_lag_stays_within_its_bound(adopt, lag):
    algorithm = make_learner(n_epochs=1)
    env = Env(pause=0.001, ends=6)
    with make_collector(algorithm, env, rollouts=8, max_policy_lag=lag, adopt=adopt) as collector:
        lags = []
        for iteration in range(12):
            rollout = collector.collect()
            lag_of = int(algorithm.policy.version) - rollout["policy_version"]
            stats = collector.statistics()
            assert (stats["async/lag_min"], stats["async/lag_max"]) == (lag_of.min(), lag_of.max())
            assert stats["async/lag_mean"] == pytest.approx(float(lag_of.double().mean()))
            lags.append((int(lag_of.min()), int(lag_of.max())))
            if iteration % 3 == 2:  # a slow learner lets the collector run ahead as far as it may
                wait_until(lambda: len(collector.buffer) == lag * NUM_ENVS * NUM_STEPS)
            algorithm.update(rollout)
            collector.publish()
            assert (stats["async/behaviour_kl"] > 0.0) == (stats["async/lag_max"] > 0)
    assert all(0 <= low <= high <= lag for low, high in lags)
    assert max(high for _, high in lags) == lag
    if adopt != "step":
        assert all(low == high for low, high in lags)
    if adopt == "lockstep":
        assert [high for _, high in lags] == [min(i, lag) for i in range(12)]


def test_new_weights_are_used_from_the_next_step_on():
    algorithm, gate = make_learner(), threading.Event()
    env = GatedEnv(gate, at=60)
    with make_collector(algorithm, env, num_steps=40, max_policy_lag=1) as collector:
        algorithm.update(collector.collect())
        assert env.waits.wait(100.0)
        collector.publish()  # the second rollout is under way
        gate.set()
        versions = collector.collect()["policy_version"]
    assert versions[0, 0] == 0
    assert versions[0, -1] == 1
    assert (versions.diff(dim=1) >= 0).all()


def test_lockstep_does_not_depend_on_who_is_faster():
    def run(pause, rest):
        algorithm = make_learner()
        with make_collector(algorithm, Env(pause=pause, ends=6), max_policy_lag=2, adopt="lockstep") as collector:
            for _ in range(6):
                rollout = collector.collect()
                time.sleep(rest)
                algorithm.update(rollout)
                collector.publish()
        return algorithm.policy

    assert same_weights(run(0.004, 0.0), run(0.0, 0.02))


def test_groups_of_grpo_stay_on_one_version():
    algorithm = make_learner("grpo")
    with make_collector(algorithm, Env(pause=0.002, ends=6), max_policy_lag=1, adopt="rollout") as collector:
        for _, (rollout, _, _) in enumerate(train(algorithm, collector, 8)):
            groups = rollout["policy_version"].unflatten(0, (-1, algorithm.cfg.group_size))
            assert (groups == groups[:, :1, :1]).all()
            start = rollout["observation", "robot", "qpos"][:, 0, 0].view(-1, 2)
            assert torch.equal(start[:, 0], start[:, 1])


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("per_update", [1, 2, 3])
def test_several_rollouts_per_update_do_not_stall(lag, per_update):
    algorithm = make_learner(n_epochs=1)
    with make_collector(algorithm, max_policy_lag=lag) as collector:
        for _ in range(3):
            rollouts = [collector.collect() for _ in range(per_update)]
            assert all(int(algorithm.policy.version - rollout["policy_version"].min()) <= lag for rollout in rollouts)
            algorithm.update(rollouts[-1])
            collector.publish()


def test_more_updates_per_rollout_than_the_bound_are_an_error():
    algorithm = make_learner(n_epochs=1)
    with make_collector(algorithm, max_policy_lag=1) as collector:
        rollout = collector.collect()
        for _ in range(3):
            algorithm.update(rollout.clone())
        with pytest.raises(WeightsError, match=r"max_policy_lag is 1.*more than once per rollout"):
            collector.collect()


def test_pacing_never_issues_more_than_the_bound_and_the_room():
    pacing = Pacing(max_policy_lag=2, capacity=2)
    assert [request.number for request in pacing.issue(0)] == [0, 1]
    pacing.taken = 1
    assert [request.number for request in pacing.issue(0)] == [2]
    pacing.taken = 2
    assert pacing.issue(0) == []  # room, but nothing was learned yet
    pacing.consumed = 1
    assert [(request.number, request.version) for request in pacing.issue(5)] == [(3, 5)]


# --- what arrives ---------------------------------------------------------------------------------------------------


def test_every_transition_arrives_once_and_in_order():
    """The scripted environment counts its steps: what is missing or comes twice would show."""
    algorithm = make_learner(n_epochs=1)
    with make_collector(algorithm, Env(), max_policy_lag=2) as collector:
        steps = [collector.collect()["observation", "object", "step"][0, :, 0] for _ in range(200)]
    assert torch.cat(steps).tolist() == [float(i) for i in range(200 * NUM_STEPS)]
    assert collector.buffer.get_stats()["taken"] == 200 * NUM_STEPS * NUM_ENVS


@pytest.mark.slow
def test_ten_thousand_rollouts_arrive_once_and_in_order():
    """The whole way, from the environment to the learner, while versions change."""
    algorithm = make_learner(n_epochs=1)
    stamps = []
    with make_collector(algorithm, Env(), num_steps=1, max_policy_lag=2, kl_rows=0) as collector:
        for number in range(10_000):
            rollout = collector.collect()
            stamps.append(float(rollout["observation", "object", "step"][0, 0, 0]))
            if number % 10 == 0:  # what an update does to the collector: another version
                algorithm.policy.version += 1
                collector.publish()
    assert stamps == [float(i) for i in range(10_000)]
    assert collector.buffer.get_stats()["taken"] == 10_000 * NUM_ENVS


def test_no_step_is_taken_with_torn_weights():
    """The learner writes its parameters all the time; every step of the collector is checked where it is taken."""
    algorithm = make_learner()
    problems, steps = [], 0

    def check(*_) -> None:
        nonlocal steps
        steps += 1
        copy = collector._backend._worker.copy
        if content_digest(copy.policy) != collector._store._digests[int(copy.policy.version)]:
            problems.append(int(copy.policy.version))

    env, buffer = Env(pause=0.0005), VLABuffer(4 * NUM_ENVS * NUM_STEPS)
    cfg = AsyncCfg(num_steps=NUM_STEPS, max_policy_lag=1, kl_rows=0, verify_weights=True)
    collector = AsyncCollector(env, algorithm.policy, buffer, callback=check, cfg=cfg)
    with collector:
        for _ in range(40):
            collector.collect()
            for _ in range(20):
                for parameter in algorithm.policy.parameters():
                    parameter.data.add_(torch.randn_like(parameter))
            algorithm.policy.version += 1
            collector.publish()
    assert steps >= 40 * NUM_STEPS
    assert not problems


def test_results_of_rollouts_that_nobody_takes_are_not_kept():
    algorithm = make_learner()
    collector = AsyncCollector(Env(), algorithm.policy, VLABuffer(NUM_ENVS * NUM_STEPS, overwrite=True))
    with collector:
        for _ in range(5):
            collector.collect(NUM_STEPS)
            time.sleep(0.01)  # meanwhile rollouts push each other out
            collector.buffer.clear()
        collector.collect()
        assert len(collector._results) <= 2


def test_rollouts_belong_to_the_learner():
    algorithm = make_learner()
    with make_collector(algorithm, max_policy_lag=2) as collector:
        kept = [collector.collect() for _ in range(4)]
        copies = [rollout.clone() for rollout in kept]
        collect_some(collector, 6)
        assert all(same_rollouts(rollout, copy) for rollout, copy in zip(kept, copies, strict=True))


def test_the_guide_s_loop_with_the_buffer_alone():
    """``is_full`` and ``get`` are enough: weights are published and failures surface on the way."""
    algorithm = make_learner()
    seen = []
    buffer = VLABuffer(buffer_size=20, device="cpu")
    collector = AsyncCollector(Env(), algorithm.policy, buffer, "cpu", lambda *step: seen.append(step))
    collector.start()
    versions = []
    for _ in range(4):
        while not buffer.is_full():
            time.sleep(0.001)
        data = buffer.get(flatten=False)
        assert data.batch_size == (4, 5)
        versions.append(int(data["policy_version"].max()))
        algorithm.update(data)
    collector.stop()
    assert versions[-1] >= 2
    assert len(seen) >= 4 * 5
    with pytest.raises(RolloutError, match="time axis"):
        algorithm.update(VLABuffer.get(buffer, flatten=True) if len(buffer) else data.reshape(-1))


def test_the_learner_s_policy_and_random_numbers_are_left_alone():
    algorithm = make_learner()
    before = torch.get_rng_state()
    with make_collector(algorithm, max_policy_lag=2) as collector:
        collect_some(collector, 3)
        assert torch.equal(torch.get_rng_state(), before)
    assert int(algorithm.policy.version) == 0


def test_groups_of_envs_take_turns_in_the_background():
    algorithm = make_learner(n_epochs=1)
    env = GroupedEnv([Env(), Env()])
    buffer = VLABuffer(4 * 8 * NUM_STEPS)
    cfg = AsyncCfg(pipeline_stages=2, num_steps=NUM_STEPS)
    with AsyncCollector(env, algorithm.policy, buffer, cfg=cfg) as collector:
        versions = []
        for _ in range(6):
            rollout = collector.collect()
            assert rollout.batch_size == (8, NUM_STEPS)
            versions.append(rollout["policy_version"])
            algorithm.update(rollout)
            collector.publish()
    assert all((version == version[:1]).all() for version in versions)
    assert versions[-1].max() >= 4


# --- life -----------------------------------------------------------------------------------------------------------


def test_pause_stands_still_and_resume_goes_on(monkeypatch):
    """It is asked to pause in its 21st step, and does so after that."""
    asked = threading.Event()
    env = GatedEnv(asked, at=20)
    collector = make_collector(make_learner(), env, num_steps=1000, max_policy_lag=1)
    send = collector._backend.send

    def send_and_note(instruction):
        send(instruction)
        if instruction == "pause":
            asked.set()

    monkeypatch.setattr(collector._backend, "send", send_and_note)
    with collector:
        assert env.waits.wait(100.0)
        collector.pause()
        assert env.steps == 21
        time.sleep(0.03)
        assert env.steps == 21
        with pytest.raises(CollectorError, match=r"paused: call resume\(\)"):
            collector.collect()
        collector.resume()
        assert collector.collect()["reward"].shape == (NUM_ENVS, 1000)


def test_start_and_stop_again_and_again():
    algorithm = make_learner()
    collector = make_collector(algorithm, max_policy_lag=1)
    before = set(threading.enumerate())
    for _ in range(3):
        collector.start()
        collector.start()
        algorithm.update(collector.collect())
        collector.stop()
        collector.stop()
        assert set(threading.enumerate()) - before == set()
        assert not collector.is_running
    with pytest.raises(CollectorError, match="not running"):
        collector.pause()


@pytest.mark.parametrize("trouble", ["raise"])
def test_what_goes_wrong_comes_out_in_the_learner_with_its_traceback(trouble):
    algorithm = make_learner()
    collector = make_collector(algorithm, Env(trouble), max_restarts=0)
    with pytest.raises(CollectorError, match="the gripper fell off in step 7") as caught:
        collect_some(collector, 10)
    assert "make_trouble" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(CollectorError, match="the gripper fell off"):
        collector.buffer.is_full()
    collector.stop()


def test_what_a_callback_raises_ends_the_collection():
    def callback(*step):
        raise KeyError("no such log")

    algorithm = make_learner()
    with (
        AsyncCollector(Env(), algorithm.policy, VLABuffer(20), "cpu", callback) as collector,
        pytest.raises(CollectorError, match="no such log"),
    ):
        collector.collect()


def test_a_hung_environment_is_found_and_does_not_hold_up_the_end():
    algorithm = make_learner()
    collector = make_collector(algorithm, Env("hang"), step_timeout=2.5)
    with pytest.raises(EnvironmentHungError, match=r"2\.5 s(.|\n)*make_trouble"):
        collect_some(collector, 10)
    stop_soon(collector)
    with pytest.raises(CollectorError, match="still hangs"):
        collector.start()


def stop_soon(collector):
    """Stop a collector, and make sure that this takes as long as is promised, and a little longer on a busy machine."""
    began = time.monotonic()
    collector.stop()
    assert time.monotonic() - began < 60.0  # an environment that hangs does so for longer
    assert STOP_SECONDS < 5.0


PHASES = ["before the start", "waiting", "full", "simulating", "deciding", "paused", "saving", "failed"]


@pytest.mark.parametrize("phase", PHASES)
def test_stop_returns_in_any_phase(phase, monkeypatch):
    algorithm = make_learner()
    if phase == "deciding":
        act = type(algorithm.policy).act
        monkeypatch.setattr(type(algorithm.policy), "act", lambda *args: (time.sleep(0.2), act(*args))[1])
    env = Env("raise" if phase == "failed" else "", pause=0.2 if phase == "simulating" else 0.0)
    collector = make_collector(algorithm, env, max_policy_lag=0 if phase == "waiting" else 3, rollouts=1)
    if phase != "before the start":
        collector.start()
        time.sleep(0.1)
    if phase == "paused":
        collector.pause()
    with collector.hold() if phase == "saving" else nullcontext():
        stop_soon(collector)
    assert not collector.is_running


def test_a_learner_that_waits_hears_of_the_stop():
    collector = make_collector(make_learner(), Env(pause=0.05), num_steps=1000, max_policy_lag=1)
    heard = []

    def learn() -> None:
        try:
            collector.collect()
        except CollectorError as error:
            heard.append(str(error))

    learner = threading.Thread(target=learn, daemon=True)
    learner.start()
    wait_until(lambda: collector.is_running)
    collector.stop()
    learner.join(100.0)
    assert heard == ["the collector was stopped while a rollout was waited for"]


@pytest.mark.parametrize("trouble", ["hang", "raise"])
def test_trouble_in_one_of_two_groups_comes_out(trouble):
    env = GroupedEnv([Env(), Env(trouble)])
    timeout = 0.5 if trouble == "hang" else 60.0
    cfg = AsyncCfg(pipeline_stages=2, num_steps=NUM_STEPS, step_timeout=timeout, max_restarts=0)
    collector = AsyncCollector(env, make_learner().policy, VLABuffer(16 * NUM_STEPS), cfg=cfg)
    message = r"has not come back from a step for 0\.5 s" if trouble == "hang" else "the gripper fell off in step 7"
    with pytest.raises(CollectorError, match=message):
        collect_some(collector, 10)
    stop_soon(collector)


# --- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_saved_run_goes_on_bit_by_bit(lag, name):
    """In lockstep a run is a function of its seeds: one that was saved, with its queue, and loaded is the same."""

    def state_of(algorithm, collector):
        with collector.hold():
            return (
                {k: v.clone() for k, v in algorithm.policy.state_dict().items()},
                _copied(algorithm.state_dict()),
                _copied(collector.state_dict()),
                collector.env_state().clone(),
                torch.get_rng_state(),
            )

    settings = {"max_policy_lag": lag, "adopt": "lockstep", "rollouts": 5}
    straight = make_learner(name)
    collector = make_collector(straight, **settings)
    collector.reset(seed=5)
    with collector:
        train(straight, collector, 4)
        saved = state_of(straight, collector)
        expected = train(straight, collector, 5)

    resumed = make_learner(name, seed=99)
    collector = make_collector(resumed, **settings)
    policy, algorithm_state, collector_state, env_state, random = saved
    resumed.policy.load_state_dict(policy)
    resumed.load_state_dict(algorithm_state)
    collector.load_state_dict(collector_state, env_state)
    torch.set_rng_state(random)
    with collector:
        actual = train(resumed, collector, 5)
    for (rollout, _, episodes), (twin, _, same) in zip(expected, actual, strict=True):
        assert same_rollouts(rollout, twin)
        assert torch.equal(episodes["return"], same["return"])
    assert same_weights(straight.policy, resumed.policy)


def _copied(value):
    import copy

    return copy.deepcopy(value)


def test_what_was_saved_does_not_change_while_collection_goes_on(monkeypatch):
    """The weights that a waiting request needs are in memory that is written to again once it has been answered."""
    algorithm, saving = make_learner(), threading.Event()
    env = GatedEnv(saving, at=NUM_STEPS)  # the first step of the second rollout
    collector = make_collector(algorithm, env, max_policy_lag=2, adopt="lockstep")
    send = collector._backend.send

    def send_and_note(instruction):
        send(instruction)
        if instruction == "save":
            saving.set()

    monkeypatch.setattr(collector._backend, "send", send_and_note)
    with collector:
        train(algorithm, collector, 1)
        assert env.waits.wait(100.0)
        with collector.hold():
            saved = collector.state_dict()
            assert saved["requests"] == [[2, 0], [3, 1]]
            before = _copied(saved["weights"])
        train(algorithm, collector, 6)
    [[version, data]], [[_, expected]] = saved["weights"], before
    assert version == 0
    assert torch.equal(data, expected)


def test_saving_needs_a_stand():
    algorithm = make_learner()
    with make_collector(algorithm) as collector:
        with pytest.raises(CollectorError, match=r"needs hold\(\)"):
            collector.state_dict()
        with pytest.raises(CollectorError, match=r"call stop\(\) first"):
            collector.reset()
        with collector.hold():
            saved = collector.state_dict()
            assert len(saved["queue"]["entries"]) + len(saved["requests"]) == 2
        collector.collect()


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_policy_lag": -1}, "max_policy_lag"),
        ({"worker": "fibre"}, "worker"),
        ({"adopt": "never"}, "adopt"),
        ({"step_timeout": 0.0}, "step_timeout"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        AsyncCfg.from_dict(settings)


def test_settings_may_be_a_mapping():
    policy = make_policy(Env())
    assert AsyncCollector(Env(), policy, VLABuffer(20), cfg={"num_steps": 5}).cfg == AsyncCfg(num_steps=5)
    with pytest.raises(ConfigError, match="num_step: unknown key"):
        AsyncCollector(Env(), policy, VLABuffer(20), cfg={"num_step": 5})


def test_a_process_needs_a_function_that_makes_the_environment():
    algorithm = make_learner()
    with pytest.raises(ConfigError, match="a function that makes the environment"):
        AsyncCollector(Env(), algorithm.policy, VLABuffer(20), cfg=AsyncCfg(worker="process"))


def test_rollouts_must_fit_and_keep_their_length():
    policy = make_policy(Env())
    with pytest.raises(RolloutError, match="40 transitions, the buffer holds 20"):
        AsyncCollector(Env(), policy, VLABuffer(20)).collect(10)
    with AsyncCollector(Env(), policy, VLABuffer(20)) as collector:
        assert collector.collect().batch_size == (4, 5)
        with pytest.raises(RolloutError, match="expected num_steps to be 5, got 6"):
            collector.collect(6)


def test_somebody_else_s_rollouts_in_the_buffer_are_noticed():
    algorithm = make_learner()
    collector = make_collector(algorithm, Env(pause=0.01), max_policy_lag=1)
    collector.start()
    collector.buffer.add_rollout(SyncCollector(Env(), algorithm.policy).collect(NUM_STEPS))
    with pytest.raises(CollectorError, match="somebody else fills the buffer"):
        collect_some(collector, 5)
    collector.stop()


def test_ppo_still_learns_with_lag():
    """The scripted reward is the position: pushing up pays, and is learned from stale rollouts as well."""
    algorithm = make_learner(learning_rate=3e-2, n_epochs=4)
    assert isinstance(algorithm, PPO)
    assert isinstance(algorithm.cfg, PPOCfg)
    settings = {"num_steps": 20, "max_policy_lag": 2, "adopt": "lockstep"}  # the same numbers on any machine
    with make_collector(algorithm, Env(limit=10), **settings) as collector:
        rewards = []
        for _ in range(25):
            rollout = collector.collect()
            rewards.append(float(rollout["reward"].mean()))
            algorithm.update(rollout)
            collector.publish()
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5.0
