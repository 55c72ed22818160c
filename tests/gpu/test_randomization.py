"""Events, delays and curricula on a GPU: drawn as on the CPU, recorded as CUDA graphs, and part of the state."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from embodichain.envs.task_env import TaskEnv
from tests.envs.test_randomization import EVERYTHING
from tests.gpu.gpu import make_task, simulates

pytestmark = simulates
SHORT = {"num_envs": 32, "max_episode_steps": 12, "env": EVERYTHING}


def drawn(env: TaskEnv) -> dict[str, Tensor]:
    """Return all that events have drawn; what was observed follows from the physics as well."""
    state = env.get_state()
    parts = {f"{part}/{key}": value.cpu() for part in ("model", "events") for key, value in state[part].items()}
    return {name: value for name, value in parts.items() if ".past." not in name}


def walk(env: TaskEnv, actions: Tensor) -> list[Tensor]:
    """Step, and return the episode seeds after every step."""
    return [env.step(action.to(env.device))[4]["episode_seed"].cpu() for action in actions]


def test_everything_is_drawn_as_on_the_cpu_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    actions = torch.rand(40, 32, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with make_task(device="cpu", **SHORT) as cpu, make_task(**SHORT) as gpu, caplog.at_level(logging.WARNING):
        for ours, theirs in zip(walk(cpu, actions), walk(gpu, actions), strict=True):
            same = ours == theirs
            assert same.float().mean() > 0.9  # success ends an episode, which rounding may decide
        assert gpu._graphed is not None
        assert gpu._graphed._replay is not None
        assert "without CUDA graphs" not in caplog.text
        expected, found = drawn(cpu), drawn(gpu)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name][same].double(), value[same].double(), rtol=1e-5, atol=1e-6)
        assert len(set(found["events/latency.delay"].tolist())) > 1


def test_everything_goes_on_from_a_state() -> None:
    actions = torch.rand(40, 32, 6, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with make_task(**SHORT) as env:
        walk(env, actions[:20])
        state = env.get_state()
        seeds, after = walk(env, actions[20:]), drawn(env)
        env.set_state(state)
        again = walk(env, actions[20:])
        same = torch.stack([a == b for a, b in zip(seeds, again, strict=True)]).all(dim=0)
        assert same.float().mean() > 0.9
        for name, value in drawn(env).items():
            assert torch.equal(value[same], after[name][same]), name


def test_friction_of_joints_that_have_none_holds_them() -> None:
    """The model has no friction, so that room for it has to be made; more of it than servos can do slows them down."""
    dry = {"func": "joint_friction", "params": {"range": [500.0, 500.0], "operation": "abs"}}
    moved = []
    for events in ({}, {"dry": dry}):
        with make_task("ReachRL", num_envs=4, env={"events": events}) as env:
            start = env.physics.qpos.clone()
            for _ in range(20):
                env.step(torch.ones(4, 6, device=env.device))
            moved.append((env.physics.qpos - start).abs().amax(dim=0))
    assert float(moved[0].min()) > 0.1
    assert bool((moved[1] < 0.5 * moved[0]).all())


def test_a_delayed_action_is_an_earlier_action_also_in_a_recorded_step() -> None:
    actions = torch.rand(12, 16, 6, generator=torch.Generator().manual_seed(2)) * 2 - 1
    late = {"env": {"events": {"it": {"func": "action_delay", "params": {"steps": [2, 2]}}}}, "num_envs": 16}
    with make_task("ReachRL", **late) as delayed, make_task("ReachRL", num_envs=16) as plain:
        for number in range(12):
            delayed.step(actions[number].to(delayed.device))
            plain.step(actions[max(number - 2, 0)].to(plain.device))
            torch.testing.assert_close(delayed.physics.ctrl, plain.physics.ctrl, rtol=0, atol=1e-4)
