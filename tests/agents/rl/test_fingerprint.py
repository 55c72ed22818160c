"""The hash by which a worker that was left behind is known again: settings count, weights do not."""

from __future__ import annotations

import collections
import functools
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodichain.agents.rl.algo.grpo import GroupStart
from embodichain.agents.rl.collector import AsyncCfg
from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.background.station import Setup
from embodichain.agents.rl.collector.fingerprint import fingerprint
from embodichain.agents.rl.collector.ray_recruiting import job_key
from tests.agents.rl.async_cases import make_env, make_learner


def job(**changes: Any) -> Job:
    policy = make_learner("grpo", seed=changes.pop("seed", 0)).policy
    cfg = AsyncCfg.from_dict({"worker": "ray", **changes.pop("cfg", {})})
    setup = Setup(policy, torch.device("cpu"), None, GroupStart(changes.pop("group_size", 2)), cfg)
    made = Job(changes.pop("make_env", make_env()), setup, changes.pop("num_steps", 5))
    return replace(made, setup=replace(setup, **changes))


def note(*_: Any) -> None:
    """A callback."""


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": 4},
        {"callback": note},
        {"num_steps": 6},
        {"make_env": make_env(pause=0.1)},
        {"cfg": {"adopt": "rollout"}},
        {"cfg": {"seed": 3}},
        {"cfg": {"num_threads": 2}},
        {"cfg": {"placement": {"num_cpus": 2}}},
        {"cfg": {"orphan_timeout": 2.0}},
    ],
)
def test_whatever_a_worker_does_differently_is_another_key(changes: dict[str, Any]) -> None:
    assert key(job(**changes)) != key(job()) == key(job())


def key(of: Job, device: str = "cpu") -> str:
    return job_key(of.for_another_process(), of.setup.policy, device)


def test_the_device_and_settings_of_the_policy_are_part_of_the_key() -> None:
    other = job()
    other.setup.policy.temperature = 2.0
    assert key(other) != key(job()) != key(job(), "cuda")


def test_buffers_that_do_not_travel_with_the_weights_are_part_of_the_key() -> None:
    jobs = [job() for _ in range(3)]
    for one, scale in zip(jobs, (1.0, 1.0, 2.0), strict=True):
        one.setup.policy.register_buffer("scale", torch.tensor([scale]), persistent=False)
    assert key(jobs[0]) == key(jobs[1]) != key(jobs[2])


def test_weights_and_what_concerns_the_learner_alone_are_not() -> None:
    learner = make_learner("grpo")
    trained = job(seed=5)
    trained.setup.policy.version += 17
    trained.setup.policy.generator = torch.Generator().manual_seed(3)
    assert not torch.equal(next(trained.setup.policy.parameters()), next(learner.policy.parameters()))
    patient = {"patience": 9.0, "max_restarts": 8, "address": "auto", "name": "run", "start_timeout": 2.0}
    assert key(trained) == key(job()) == key(job(cfg=patient))


def test_functions_are_told_apart_by_what_they_do() -> None:
    def adder(count: int) -> Any:
        return lambda value: value + count

    assert fingerprint(adder(1)) == fingerprint(adder(1)) != fingerprint(adder(2))
    assert fingerprint(lambda value: value + 1) != fingerprint(lambda value: value - 1)
    assert fingerprint(functools.partial(max, 1)) != fingerprint(functools.partial(max, 2))
    loop: list[Any] = [1]
    loop.append(loop)
    assert fingerprint(loop) == fingerprint(loop)


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: int) -> None:
        self.x = x


class Number(int):
    """A number of a kind of its own."""


def large(value: float) -> Any:
    array = np.zeros(5000)
    array[2500] = value
    return array


@pytest.mark.parametrize("make", [large, Slotted, Number, torch.tensor, {}.fromkeys, collections.deque])
def test_values_are_told_apart_by_their_content(make: Any) -> None:
    values = [(1,), (1,), (2,)] if make in ({}.fromkeys, collections.deque) else [1, 1, 2]
    first, again, changed = (fingerprint(functools.partial(print, make(value))) for value in values)
    assert first == again != changed


_SCRIPT = """
import functools, logging, numpy
from embodichain.agents.rl.collector.fingerprint import fingerprint
N = 4
def helper(): return 1
class Env:
    def step(self): return 1
    @property
    def size(self): return N
def make(): return helper() + N
def apply(change):
    exec(change, globals())
    return fingerprint((lambda: make(), Env))
print(fingerprint((numpy, logging.getLogger("a"), lambda: numpy.zeros(3))))
for change in ["", "", "N = 8", "def helper(): return 2", "class Env:\\n  def step(self): return 2"]:
    print(apply(change))
"""


def test_code_of_a_script_counts_with_all_that_it_uses() -> None:
    """Also the globals, functions and classes that are not named in what is sent; modules count by their names."""
    numpy, first, again, *changed = run(_SCRIPT)
    assert first == again
    assert len({first, *changed}) == 4
    assert numpy == run(_SCRIPT)[0]


def test_what_cannot_be_described_is_never_equal(caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()
    with caplog.at_level("INFO", "embodichain.collector"):
        assert fingerprint(lock) != fingerprint(lock)
    assert "will not be known again" in caplog.text
    assert fingerprint(types.ModuleType("made_up")) != fingerprint(types.ModuleType("made_up"))


def test_modules_that_travel_as_they_are_count_with_their_code() -> None:
    here = fingerprint(make_env, by_value={"tests.agents"})
    assert here != fingerprint(make_env)


def test_a_file_that_is_named_counts_with_its_state(tmp_path: Path) -> None:
    file = tmp_path / "robot.xml"
    before = fingerprint({"path": str(file)})
    file.write_text("<mujoco/>")
    written = fingerprint({"path": str(file)})
    file.write_text("<mujoco><worldbody/></mujoco>")
    assert len({before, written, fingerprint({"path": str(file)})}) == 3
    assert fingerprint(file) == fingerprint(file)


def test_another_process_finds_the_same_key() -> None:
    code = "from tests.agents.rl.test_fingerprint import job, key; print(key(job()))"
    assert run(code) == [key(job())]


def run(code: str) -> list[str]:
    root = Path(__file__).parents[3]
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    return printed.stdout.split()
