"""The length of a physics step is a setting: longer ones are faster and lead to nearly the same place."""

from __future__ import annotations

import pytest
import torch

from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv
from embodichain.errors import ConfigError


def run(**env: float) -> tuple[TaskEnv, torch.Tensor]:
    made = make("PushCubeRL", num_envs=16, seed=0, env=env)
    assert isinstance(made, TaskEnv)
    with made:
        for _ in range(10):
            made.step(made.expert_action())
        return made, made.physics.qpos.clone()


def test_twice_as_many_steps_half_as_long() -> None:
    usual, found = run()
    shorter, expected = run(timestep=0.002, substeps=10)
    assert usual.physics.model.opt.timestep == pytest.approx(0.004)
    assert shorter.physics.model.opt.timestep == pytest.approx(0.002)
    error = (expected - found).abs().amax(dim=1)
    assert error.median() < 0.02  # radians and metres; the motors of the two lag behind differently
    assert error.max() < 0.1


@pytest.mark.parametrize("task", ["ReachRL", "PushCubeRL", "PushCubeLanguageRL", "PickCubeRL"])
def test_an_action_of_an_arm_lasts_20_ms(task: str) -> None:
    with make(task) as env:
        assert isinstance(env, TaskEnv)
        assert env.physics.model.opt.timestep * env.cfg.env.substeps == pytest.approx(0.02)


@pytest.mark.parametrize("timestep", [0.0, -0.1, 0.5, "fast"])
def test_a_step_must_have_a_sane_length(timestep: object) -> None:
    with pytest.raises(ConfigError, match="timestep"):
        make("PushCubeRL", env={"timestep": timestep})
