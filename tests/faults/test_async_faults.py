"""Simulators that are killed, hang, raise or never start: the run goes on, or ends with a reason."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from functools import partial

import pytest
import torch

from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCollector
from embodichain.agents.rl.collector.backends.thread import STOP_SECONDS
from embodichain.envs.wrappers import GroupedEnv
from embodichain.errors import CollectorError, ConfigError, EnvironmentHungError
from tests.agents.rl.async_cases import NUM_ENVS, NUM_STEPS, Env, make_collector, make_env, make_learner
from tests.programs import ends_soon, is_alive, is_suspended, start_program, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def child_of(collector) -> int:
    return collector._backend._process.pid


def collect_some(collector, count):
    for _ in range(count):
        collector.collect()


TROUBLE = [("kill", {}), ("hang", {"step_timeout": 3.0}), ("exit", {}), ("raise", {})]


@pytest.mark.parametrize(("trouble", "settings"), TROUBLE)
def test_a_simulator_that_dies_hangs_or_raises_mid_rollout_is_replaced(trouble, settings, tmp_path, caplog):
    """Its first process fails in the second step of its second rollout. Afterwards all goes on with new episodes."""
    algorithm = make_learner(n_epochs=1)
    make = make_env(trouble=trouble, mark=str(tmp_path / "happened"))
    with make_collector(algorithm, make, worker="process", max_policy_lag=1, **settings) as collector:
        first = child_of(collector)
        seen = []
        for _ in range(6):
            rollout = collector.collect()
            seen.append(rollout.clone())
            algorithm.update(rollout)
            collector.publish()
        assert collector.statistics()["async/restarts"] == 1.0
        assert child_of(collector) != first
        assert not is_alive(first)
    assert (tmp_path / "happened").exists()
    if trouble == "raise":
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "process raised ValueError: the gripper fell off in step 7; replacing it (1 of 3)" in caplog.text
        assert "in make_trouble" in caplog.text
    versions = torch.stack([rollout["policy_version"] for rollout in seen])
    lags = torch.arange(6).view(-1, 1, 1) - versions
    assert lags.min() >= 0
    assert lags.max() <= 1
    for rollout in seen:  # whole rollouts of real steps, none of them half written
        steps = rollout["observation", "object", "step"][..., 0]
        follows = ~rollout["done"][:, :-1]
        assert torch.equal(steps[:, 1:][follows], steps[:, :-1][follows] + 1)
    assert collector.buffer.get_stats()["taken"] == 6 * NUM_ENVS * NUM_STEPS


@pytest.mark.parametrize("phase", ["waiting", "paused"])
def test_a_process_that_stops_while_it_has_nothing_to_do_is_replaced(phase, caplog):
    """Nobody would ever hear of it: it is in no step that could take too long."""
    algorithm = make_learner()
    with make_collector(algorithm, worker="process", max_policy_lag=0, step_timeout=5.0) as collector:
        algorithm.update(collector.collect())
        if phase == "paused":
            collector.pause()
        wait_until(lambda: not collector._backend._process.heartbeat.is_busy)  # the next rollout is not requested yet
        first = child_of(collector)
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: collector._backend.restarts == 1)
        assert ends_soon(first)
        collector.resume()
        assert collector.collect().batch_size == (NUM_ENVS, NUM_STEPS)
        assert collector.statistics()["async/restarts"] == 1.0
    assert "hung: it has sent no heartbeat for 5 s while it waited for work; replacing it (1 of 3)" in caplog.text


def test_a_thread_that_was_suspended_with_the_program_does_not_hang():
    """The whole program stops for longer than step_timeout, in the middle of a step."""
    script = SUSPENDED.format(root=os.getcwd())
    program = start_program("-c", script)
    assert program.stdout.readline() == "collecting\n"
    wait_until(lambda: is_suspended(program.pid))
    time.sleep(4.0)
    os.kill(program.pid, signal.SIGCONT)
    assert program.communicate(timeout=100)[0] == "collected\n"


SUSPENDED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.agents.rl.async_cases import make_collector, make_env, make_learner
with make_collector(make_learner(), make_env(pause=0.4), step_timeout=3.0, start_timeout=3.0) as collector:
    collector.collect()
    print("collecting", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    collector.collect()
    print("collected", flush=True)
"""


def test_without_lag_a_replaced_simulator_is_waited_for(tmp_path):
    algorithm = make_learner("grpo")
    make = make_env(trouble="kill", mark=str(tmp_path / "happened"))
    with make_collector(algorithm, make, worker="process", max_policy_lag=0) as collector:
        for _ in range(4):
            algorithm.update(collector.collect())
            assert collector.statistics()["async/lag_max"] == 0.0
        assert collector.statistics()["async/restarts"] == 1.0


def test_one_that_fails_again_and_again_is_given_up():
    algorithm = make_learner()
    with (
        make_collector(algorithm, make_env(trouble="kill"), worker="process", max_restarts=1) as collector,
        pytest.raises(CollectorError, match="killed by SIGKILL, after 1 replacements"),
    ):
        collect_some(collector, 9)


def test_one_that_hangs_again_and_again_is_given_up():
    algorithm = make_learner()
    make = make_env(trouble="hang")
    with (
        make_collector(algorithm, make, worker="process", max_restarts=0, step_timeout=0.4) as collector,
        pytest.raises(EnvironmentHungError, match=r"has not come back from a step for 0\.4 s"),
    ):
        collect_some(collector, 9)


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_what_an_environment_keeps_raising_comes_out_with_its_traceback(worker):
    algorithm = make_learner()
    with (
        make_collector(algorithm, make_env(trouble="raise"), worker=worker, max_restarts=1) as collector,
        pytest.raises(CollectorError, match="the gripper fell off in step 7, after 1 replacements") as caught,
    ):
        collect_some(collector, 9)
    assert "make_trouble" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def raise_in_callback(*step: object) -> None:
    raise KeyError("no such log")


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_nobody_is_replaced_because_of_a_callback(worker, caplog):
    policy, cfg = make_learner().policy, {"num_steps": NUM_STEPS, "worker": worker}
    collector = AsyncCollector(make_env(), policy, VLABuffer(40), callback=raise_in_callback, cfg=cfg)
    with collector, pytest.raises(CollectorError, match="no such log"):
        collector.collect()
    assert not caplog.records


class Kept(Env):
    """Notes every environment that is made, and which of them were closed."""

    made: list[Env] = []
    closed = False

    def __init__(self, **settings: object) -> None:
        super().__init__(ends=6, limit=4, **settings)
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("given", ["function", "environment", "both"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("lag", [0, 2])
def test_an_environment_that_raises_in_a_thread_is_replaced(given, stages, lag, tmp_path, caplog, monkeypatch):
    """It is made again, or reset where nobody knows how. The rollout begins again; lockstep keeps its versions."""
    monkeypatch.setattr(Kept, "made", [])
    settings = {"trouble": "raise", "mark": str(tmp_path / "happened")}
    make = partial(Kept, **settings)
    if stages == 2:
        make = partial(make_groups, settings)
    algorithm = make_learner()
    source, size = make if given == "function" else make(), NUM_ENVS * stages * NUM_STEPS
    cfg = {"num_steps": NUM_STEPS, "max_policy_lag": lag, "adopt": "lockstep", "pipeline_stages": stages}
    buffer, remake = VLABuffer((lag + 1) * size), make if given == "both" else None
    stamps = []
    collector = AsyncCollector(source, algorithm.policy, buffer, cfg=cfg, make_env=remake)
    collector.reset(seed=5)
    with collector:
        for _ in range(8):
            rollout = collector.collect()
            steps = rollout["observation", "object", "step"][..., 0]
            follows = ~rollout["done"][:, :-1]
            assert torch.equal(steps[:, 1:][follows], steps[:, :-1][follows] + 1)
            stamps.append(int(rollout["policy_version"].unique()))
            algorithm.update(rollout)
            collector.publish()
        assert collector.statistics()["async/restarts"] == 1.0
    collector.close()
    assert stamps == [max(0, number - lag) for number in range(8)]
    assert len(Kept.made) == stages * (1 if given == "environment" else 2)
    assert all(env.closed == (given != "environment") for env in Kept.made)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the environment raised ValueError: the gripper fell off in step 7; replacing it (1 of 3)" in caplog.text
    assert "in make_trouble" in caplog.text


def make_groups(settings: dict) -> GroupedEnv:
    return GroupedEnv([Kept(), Kept(**settings)])


def test_a_thread_waits_for_an_environment_that_cannot_be_made_at_once(caplog):
    """Its second and third one fail before they are there; each counts as a replacement."""
    made = []

    def make() -> Env:
        made.append(len(made))
        if len(made) in (2, 3):
            raise OSError(f"no simulator for number {len(made)}")
        return Env(trouble="raise" if len(made) == 1 else "", ends=6, limit=4)

    with make_collector(make_learner(), make) as collector:
        collect_some(collector, 4)
        assert collector.statistics()["async/restarts"] == 3.0
    assert "no simulator for number 3; replacing it (3 of 3)" in caplog.text


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_run_is_resumed_bit_by_bit_from_a_checkpoint_after_a_replacement(worker, tmp_path):
    settings = {"max_policy_lag": 0, "worker": worker}

    def train(algorithm, collector, iterations):
        for _ in range(iterations):
            algorithm.update(collector.collect())
            collector.publish()

    straight = make_learner()
    collector = make_collector(straight, make_env(trouble="raise", mark=str(tmp_path / "happened")), **settings)
    collector.reset(seed=5)
    with collector:
        train(straight, collector, 4)
        assert collector.statistics()["async/restarts"] == 1.0
        with collector.hold():
            policy = {name: tensor.clone() for name, tensor in straight.policy.state_dict().items()}
            adam, saved, env = _copied(straight.state_dict()), _copied(collector.state_dict()), collector.env_state()
            random = torch.get_rng_state()
        train(straight, collector, 3)
    resumed = make_learner(seed=99)
    collector = make_collector(resumed, **settings)
    resumed.policy.load_state_dict(policy)
    resumed.load_state_dict(adam)
    collector.load_state_dict(saved, env)
    torch.set_rng_state(random)
    with collector:
        train(resumed, collector, 3)
    mine, other = straight.policy.state_dict(), resumed.policy.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def broken_env() -> Env:
    raise FileNotFoundError("no such model: robot.xml")


def test_an_environment_that_cannot_be_built_is_an_error_at_the_start():
    collector = make_collector(make_learner(), broken_env, worker="process")
    with pytest.raises(CollectorError, match=r"no such model: robot\.xml"):
        collector.start()
    assert not collector.is_running


def sleepy_env() -> Env:
    time.sleep(1000.0)
    raise AssertionError


def test_an_environment_that_is_never_built_is_an_error_at_the_start():
    collector = make_collector(make_learner(), sleepy_env, worker="process", start_timeout=8.0)
    with pytest.raises(EnvironmentHungError, match=r"did not build its environment within start_timeout"):
        collector.start()


@pytest.mark.parametrize("phase", ["waiting", "simulating", "hanging", "paused", "stopped by a signal"])
def test_stop_returns_in_any_phase_of_a_process(phase):
    trouble = "hang" if phase == "hanging" else ""
    make = make_env(trouble=trouble, at=2, pause=1.0 if phase == "simulating" else 0.0)
    collector = make_collector(make_learner(), make, worker="process", max_policy_lag=0 if phase == "waiting" else 1)
    collector.start()
    child = child_of(collector)
    time.sleep(0.3)
    if phase == "paused":
        collector.pause()
    if phase == "stopped by a signal":
        os.kill(child, signal.SIGSTOP)
    began = time.monotonic()
    collector.stop()
    assert time.monotonic() - began < 60.0  # where the processor is busy; an environment that hangs does so for longer
    assert STOP_SECONDS < 5.0
    assert not is_alive(child)


def test_pausing_and_saving_across_a_replacement(tmp_path):
    """A process that dies while it is asked for its state is replaced by one that answers."""
    algorithm = make_learner()
    with make_collector(algorithm, make_env(pause=0.02), worker="process", num_steps=20, max_policy_lag=1) as collector:
        collector.collect()
        os.kill(child_of(collector), signal.SIGKILL)
        with collector.hold():
            saved, env = collector.state_dict(), collector.env_state()
        assert env.batch_size == (NUM_ENVS,)
        assert len(saved["queue"]["entries"]) + len(saved["requests"]) >= 1
        collector.pause()
        collector.resume()
        collector.collect()


def test_no_request_is_lost_in_a_full_queue():
    """What finds no room in the socket, because the process does not read for a while, is sent later."""
    with make_collector(make_learner(), worker="process", max_policy_lag=0) as collector:
        collector.collect()
        child = child_of(collector)
        os.kill(child, signal.SIGSTOP)
        for _ in range(2000):
            collector._backend.send("resume")
        threading.Timer(1.0, os.kill, (child, signal.SIGCONT)).start()
        assert collector.collect().batch_size == (NUM_ENVS, NUM_STEPS)
        assert collector.statistics()["async/restarts"] == 0.0


@pytest.mark.parametrize("lag", [0, 2])
def test_a_run_in_a_process_goes_on_bit_by_bit(lag):
    settings = {"max_policy_lag": lag, "adopt": "lockstep", "rollouts": 4, "worker": "process"}

    def train(algorithm, collector, iterations):
        for _ in range(iterations):
            algorithm.update(collector.collect())
            collector.publish()

    straight = make_learner()
    collector = make_collector(straight, **settings)
    collector.reset(seed=5)
    with collector:
        train(straight, collector, 3)
        with collector.hold():
            policy = {name: tensor.clone() for name, tensor in straight.policy.state_dict().items()}
            adam, saved, env = _copied(straight.state_dict()), collector.state_dict(), collector.env_state()
            random = torch.get_rng_state()
        train(straight, collector, 3)

    resumed = make_learner(seed=99)
    collector = make_collector(resumed, **settings)
    resumed.policy.load_state_dict(policy)
    resumed.load_state_dict(adam)
    collector.load_state_dict(saved, env)
    torch.set_rng_state(random)
    with collector:
        train(resumed, collector, 3)
    mine, other = straight.policy.state_dict(), resumed.policy.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def _copied(value):
    import copy

    return copy.deepcopy(value)


FORGETFUL = """
import sys, time
sys.path.insert(0, {root!r})
from tests.agents.rl.async_cases import make_collector, make_env, make_learner

if __name__ == "__main__":
    collector = make_collector(make_learner(), make_env(pause=0.05), worker="process")
    collector.start()
    print(collector._backend._process.pid, flush=True)
    if {waits}:
        time.sleep(1000.0)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_no_process_is_left_behind(killed, tmp_path):
    """Neither by a program that forgets stop(), nor by one that is killed."""
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL.format(root=os.getcwd(), waits=killed))
    program = start_program(script)
    child = int(program.stdout.readline())
    if killed:
        program.kill()
    assert program.wait(timeout=120) == (-signal.SIGKILL if killed else 0)
    assert ends_soon(child)


def env_with_children() -> Env:
    return ParentEnv()


class ParentEnv(Env):
    """An environment that starts a process of its own, as many simulators do."""

    def __init__(self) -> None:
        super().__init__(pause=0.01)
        self.helper = subprocess.Popen(["sleep", "1000"])

    def observe(self):
        obs = super().observe()
        if hasattr(self, "helper"):
            obs["object", "episode"] = torch.full((NUM_ENVS,), float(self.helper.pid))
        return obs


def test_what_a_simulator_started_ends_with_it():
    algorithm = make_learner()
    with make_collector(algorithm, env_with_children, worker="process", max_policy_lag=1) as collector:
        helper = int(collector.collect()["observation", "object", "episode"][0, 0])
        assert is_alive(helper)
        os.kill(child_of(collector), signal.SIGKILL)
        collect_some(collector, 4)
        assert ends_soon(helper)
        second = int(collector.collect()["observation", "object", "episode"][0, 0])
    assert second != helper
    assert ends_soon(second)


def test_functions_must_be_picklable():
    collector = make_collector(make_learner(), partial(lambda: Env()), worker="process")
    with pytest.raises(ConfigError, match=r"cannot be sent .*pickle.*functools\.partial"):
        collector.start()
