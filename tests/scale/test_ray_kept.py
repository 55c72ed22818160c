"""Workers that a learner leaves in a Ray cluster: the next one goes on with those that are what it would make."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_envs import make_counting_threads, make_troubled

from embodichain.agents.processes.loaded_code import LoadedCode
from embodichain.agents.rl.collector.ray_hand import Hand
from embodichain.agents.rl.collector.ray_names import is_stray, name_of_rank
from embodichain.errors import CollectorError
from tests.agents.rl.async_cases import NUM_STEPS, make_env, make_learner
from tests.scale.test_ray_rl import learn, ray_collector
from tests.scale.test_ray_security import state_of

pytestmark = pytest.mark.usefixtures("one_thread")
Begin = Callable[..., tuple[Any, Any]]


@pytest.fixture
def begin(cluster: Any, caplog: pytest.LogCaptureFixture) -> Begin:
    """Make a learner and its collector, the workers of which have a name."""
    caplog.set_level("INFO", "embodichain.collector")

    def make(env: Any, **settings: Any) -> tuple[Any, Any]:
        algorithm = make_learner()
        common = {"name": "same", "max_policy_lag": 1, "adopt": "rollout", "step_timeout": 2.0, "orphan_timeout": 30.0}
        return algorithm, ray_collector(algorithm, cluster, env, **common | settings)

    return make


def pids(collector: Any) -> dict[int, int]:
    return {index: hand.pid for index, hand in collector._desk.worker._hands.items()}


def leave(collector: Any) -> None:
    """End a collector as if this process had been killed: its workers stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hand, "kill", lambda self: None)
        collector.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_worker_serves_one_learner_at_a_time_and_goes_on_only_with_what_it_was_made_from(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = functools.partial(make_counting_threads, str(tmp_path))
    (one, first), (_, second) = begin(env), begin(env, num_workers=2)
    learn(one, first, 1)
    pid = pids(first)[0]
    with pytest.raises(CollectorError, match=rf"worker 0 \(process {pid} on .*\) works for another program"):
        second.start()
    learn(one, first, 1)
    assert first.statistics()["async/restarts"] == 0.0
    assert json.loads((tmp_path / "threads.json").read_text()) == {"torch": 1, "simulation": 1}
    leave(first)

    again, third = begin(env)
    learn(again, third, 1)
    leave(third)
    assert caplog.text.count(f"(process {pid} on ") == caplog.text.count("goes on in its environment") == 1

    algorithm, other = begin(env, orphan_timeout=20.0)
    with other:
        learn(algorithm, other, 1)
        assert pids(other)[0] != pid
        assert other.statistics()["async/restarts"] == 0.0
    assert f"worker 0 (process {pid} on " in caplog.text
    assert "of the learner before, was asked for something else: a new one is asked for" in caplog.text
    assert caplog.text.count("goes on in its environment") == 1


def test_a_worker_that_hangs_is_replaced_and_that_is_no_fault(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = functools.partial(make_troubled, str(tmp_path), trouble="hang", at=NUM_STEPS + 1)
    _, first = begin(env, max_restarts=0)
    first.collect()
    pid = pids(first)[0]
    wait_for((tmp_path / "mark").exists)
    leave(first)
    algorithm, second = begin(env, max_restarts=0)
    with second:
        learn(algorithm, second, 1)
        assert pids(second)[0] != pid
        assert second.statistics()["async/restarts"] == 0.0
    assert f"(process {pid} on " in caplog.text
    assert "has not come back from a step for" in caplog.text


_ENV = """
import torch
from tests.agents.rl import async_cases
from kept_rewards import REWARD

class Env(async_cases.Env):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, torch.full_like(reward, REWARD), *rest
"""


def test_a_worker_with_code_that_was_edited_since_is_replaced(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was edited is neither named in the job nor imported by this process after the edit."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kept_envs.py").write_text(_ENV)
    (tmp_path / "kept_rewards.py").write_text("REWARD = 1.0")
    env = functools.partial(importlib.import_module("kept_envs").Env, ends=6, limit=4)

    def reward() -> tuple[float, int]:
        algorithm, collector = begin(env)
        rollout = learn(algorithm, collector, 1)[0]
        pid = pids(collector)[0]
        leave(collector)
        return float(rollout["reward"].unique()), pid

    first, again = reward(), reward()
    assert first == again
    (tmp_path / "kept_rewards.py").write_text("REWARD = 2.0  # edited")
    edited = reward()
    assert edited[0] == 2.0
    assert edited[1] != first[1]
    assert f"has loaded code that was changed since ({tmp_path / 'kept_rewards.py'})" in caplog.text


def test_workers_without_a_place_make_room(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    """A run with two workers, in a cluster that has room for no more, is resumed on two ranks."""
    algorithm, first = begin(make_env(pause=0.02), num_workers=2)
    first.start()
    wait_for(lambda: first._desk.worker.num_workers == 2)
    before = pids(first)
    one_of_two = {"name": name_of_rank("same", 0, 2), "num_workers": 1}
    with pytest.raises(CollectorError, match=r"worker same-\d \(process \d+ on .*\) works for another program"):
        begin(make_env(pause=0.02), **one_of_two)[1].start()
    learn(algorithm, first, 1)
    leave(first)
    algorithm, second = begin(make_env(pause=0.02), **one_of_two)
    with second:
        learn(algorithm, second, 1)
        wait_for(lambda: not any(alive(pid) for pid in before.values()))
    assert caplog.text.count("is not needed any more, and has ended") == 2


def alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def test_whose_place_is_gone() -> None:
    assert not is_stray("run-0", "run", 2)
    assert is_stray("run-2", "run", 2)
    assert is_stray("run-0of2-0", "run", 2)
    assert is_stray("run-0", "run-0of2", 2)
    assert is_stray("run-0of4-0", "run-1of2", 2)
    assert not is_stray("run-0of2-1", "run-1of2", 2)
    assert not is_stray("other-0of4-0", "run-1of2", 2)
    assert not is_stray("run", "run", 2)


_ENDS = """
import sys
from functools import partial
sys.path[:0] = {path!r}
from ray_envs import make_slowly
from tests.agents.rl.async_cases import make_collector, make_learner
settings = dict(worker="ray", address={address!r}, name="ends", max_policy_lag=1, orphan_timeout=3.0)
collector = make_collector(make_learner(), partial(make_slowly, 5.0), **settings)
collector.collect()
worker = collector._desk.worker
print(worker._hands[0].pid, worker.restarts)
"""


def test_a_worker_is_not_left_alone_while_it_builds_and_ends_with_a_program_that_forgets_it(cluster: Any) -> None:
    path = [str(Path(__file__).parents[2]), *map(str, Path(__file__).parents[:2])]
    code = _ENDS.format(path=path, address=cluster.address)
    program = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90)
    pid, restarts = map(int, program.stdout.split())
    assert restarts == 0
    wait_for(lambda: not alive(pid))


def test_code_counts_as_changed_by_its_file_and_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "placed_code.py").write_text("N = 1")
    time.sleep(1.1)
    monkeypatch.setattr("embodichain.agents.processes.loaded_code._BEGAN", time.time_ns())
    monkeypatch.syspath_prepend(str(old))
    importlib.import_module("placed_code")
    monkeypatch.setattr(sys, "modules", {name: sys.modules[name] for name in ("placed_code", "pytest")})
    code = LoadedCode()
    assert code.what_changed([str(old)]) == code.what_changed([]) == ""
    assert code.what_changed([str(new), str(old)]) == str(new / "placed_code.py")
    (old / "placed_code.py").touch()
    assert code.what_changed([str(old)]) == str(old / "placed_code.py")
