"""The hash by which a worker that was left behind is known again: settings count, weights do not."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    cfg = AsyncCfg(worker="ray", **changes.pop("cfg", {}))
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
    ],
)
def test_whatever_a_worker_does_differently_is_another_key(changes: dict[str, Any]) -> None:
    assert job_key(job(**changes)) != job_key(job())


def test_settings_of_the_policy_are_part_of_the_key() -> None:
    other = job()
    other.setup.policy.temperature = 2.0
    assert job_key(other) != job_key(job())


def test_weights_and_what_concerns_the_learner_alone_are_not() -> None:
    learner = make_learner("grpo")
    trained = job(seed=5)
    trained.setup.policy.version += 17
    trained.setup.policy.generator = torch.Generator().manual_seed(3)
    assert not torch.equal(next(trained.setup.policy.parameters()), next(learner.policy.parameters()))
    patient = {"patience": 9.0, "max_restarts": 8, "address": "auto", "name": "run", "start_timeout": 2.0}
    assert job_key(trained) == job_key(job()) == job_key(job(cfg=patient))


def test_functions_are_told_apart_by_what_they_do() -> None:
    def adder(count: int) -> Any:
        return lambda value: value + count

    assert fingerprint(adder(1)) == fingerprint(adder(1)) != fingerprint(adder(2))
    assert fingerprint(lambda value: value + 1) != fingerprint(lambda value: value - 1)
    assert fingerprint(functools.partial(max, 1)) != fingerprint(functools.partial(max, 2))
    loop: list[Any] = [1]
    loop.append(loop)
    assert fingerprint(loop) == fingerprint(loop)


def test_another_process_finds_the_same_key() -> None:
    code = "from tests.agents.rl.test_fingerprint import job, job_key; print(job_key(job()))"
    root = Path(__file__).parents[3]
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert printed.stdout.strip() == job_key(job())
