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


def test_half_as_many_steps_twice_as_long() -> None:
    usual, expected = run()
    longer, found = run(timestep=0.004, substeps=5)
    assert usual.physics.model.opt.timestep == pytest.approx(0.002)
    assert longer.physics.model.opt.timestep == pytest.approx(0.004)
    error = (expected - found).abs().amax(dim=1)
    assert error.median() < 0.02  # radians and metres; the motors of the two lag behind differently
    assert error.max() < 0.1


@pytest.mark.parametrize("timestep", [0.0, -0.1, 0.5, "fast"])
def test_a_step_must_have_a_sane_length(timestep: object) -> None:
    with pytest.raises(ConfigError, match="timestep"):
        make("PushCubeRL", env={"timestep": timestep})
