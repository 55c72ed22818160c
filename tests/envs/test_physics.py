"""Batched physics on the CPU: bit for bit what ``mj_step`` does on a single ``MjData``."""

import os

import mujoco
import numpy as np
import pytest
import torch

from embodichain.envs.physics import Physics
from embodichain.envs.physics.mujoco_cpu import MujocoCpuPhysics, available_cores
from embodichain.errors import SimulationError

# An arm over a free ball and a table: joints, contacts, a stateful actuator and sensors of every stage.
XML = """
<mujoco>
  <option timestep="0.002" integrator="implicitfast"/>
  <worldbody>
    <geom type="plane" size="1 1 0.1"/>
    <body name="ball" pos="0.3 0 0.05"><freejoint/><geom name="ball" size="0.05" mass="0.2"/></body>
    <body pos="0 0 0.3">
      <joint name="a" axis="0 1 0" damping="0.1"/><geom type="capsule" fromto="0 0 0 0.2 0 0" size="0.03"/>
      <body pos="0.2 0 0">
        <joint name="b" axis="0 1 0" damping="0.1"/><geom type="capsule" fromto="0 0 0 0.2 0 0" size="0.03"/>
        <site name="tip" pos="0.2 0 0"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <position name="a" joint="a" kp="20"/>
    <general name="b" joint="b" dyntype="filter" dynprm="0.05" gainprm="5"/>
  </actuator>
  <sensor>
    <framepos objtype="site" objname="tip"/><framelinvel objtype="site" objname="tip"/>
    <accelerometer site="tip"/><actuatorfrc actuator="b"/>
  </sensor>
</mujoco>
"""
FULL = int(mujoco.mjtState.mjSTATE_INTEGRATION)


@pytest.fixture(scope="module")
def model():
    return mujoco.MjModel.from_xml_string(XML)


def controls(steps: int, num_envs: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.rand(steps, num_envs, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 4.0 * drawn - 2.0


def scattered(physics: MujocoCpuPhysics, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Start each env somewhere else, and return where."""
    generator, count = torch.Generator().manual_seed(seed), physics.num_envs
    qpos = torch.tensor(physics.model.qpos0).repeat(count, 1)
    qpos[:, :2] += 0.2 * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    qpos[:, 7:] += torch.rand(count, 2, generator=generator, dtype=torch.float64)
    qvel = torch.rand(count, physics.model.nv, generator=generator, dtype=torch.float64) - 0.5
    physics.set(torch.arange(count), qpos, qvel)
    return qpos, qvel


def integration_state(model: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
    out = np.empty(mujoco.mj_stateSize(model, FULL))
    mujoco.mj_getState(model, data, out, FULL)
    return out


def plain_loop(models, qpos, qvel, ctrl, substeps) -> np.ndarray:
    """What ``mj_step`` makes of the same starts and controls, one ``MjData`` per env: ``[steps, num_envs, nstate]``."""
    rows = []
    for env, model in enumerate(models):
        data = mujoco.MjData(model)
        data.qpos[:], data.qvel[:] = qpos[env].numpy(), qvel[env].numpy()
        trace = []
        for step in range(ctrl.shape[0]):
            data.ctrl[:] = ctrl[step, env].numpy()
            for _ in range(substeps):
                mujoco.mj_step(model, data)
            trace.append(integration_state(model, data))
        rows.append(trace)
    return np.array(rows).transpose(1, 0, 2)


def run(physics: MujocoCpuPhysics, ctrl: torch.Tensor, substeps: int) -> torch.Tensor:
    states = []
    for row in ctrl:
        physics.ctrl.copy_(row)
        physics.step(substeps)
        states.append(physics.state())
    return torch.stack(states)


@pytest.mark.parametrize("substeps", [1, 3, 10])
def test_steps_equal_mj_step_bitwise(model, substeps):
    physics = MujocoCpuPhysics(model, 6)
    qpos, qvel = scattered(physics)
    ctrl = controls(30, 6)
    expected = plain_loop([model] * 6, qpos, qvel, ctrl, substeps)
    np.testing.assert_array_equal(run(physics, ctrl, substeps).numpy(), expected)
    physics.close()


@pytest.mark.parametrize("threads", [2, 4])
def test_the_number_of_threads_changes_nothing(model, threads):
    traces = []
    for count in (1, threads):
        physics = MujocoCpuPhysics(model, 33, num_threads=count)
        scattered(physics)
        traces.append(run(physics, controls(20, 33), 5))
        physics.close()
    assert torch.equal(*traces)


def test_sensors_describe_the_state_that_is_returned(model):
    physics = MujocoCpuPhysics(model, 5)
    scattered(physics)
    data = mujoco.MjData(model)
    for row in controls(6, 5):
        physics.ctrl.copy_(row)
        physics.step(4)
        sensors = physics.sensordata
        for env in range(5):
            mujoco.mj_setState(model, data, physics.state()[env].numpy(), FULL)
            mujoco.mj_forward(model, data)
            np.testing.assert_array_equal(sensors[env], data.sensordata)
    assert torch.equal(physics.sensordata, sensors)
    physics.close()


def test_asking_for_sensors_does_not_change_the_trajectory(model):
    ctrl, traces = controls(25, 4), []
    for asks in (False, True):
        physics = MujocoCpuPhysics(model, 4)
        scattered(physics)
        states = []
        for row in ctrl:
            physics.ctrl.copy_(row)
            physics.step(3)
            if asks:
                assert physics.sensordata.shape == (4, 10)
            states.append(physics.state())
        traces.append(torch.stack(states))
        physics.close()
    assert torch.equal(*traces)


def test_sensors_follow_a_reset(model):
    physics = MujocoCpuPhysics(model, 2)
    scattered(physics)
    before = physics.sensordata
    physics.set(torch.tensor([1]), physics.qpos[[0]], physics.qvel[[0]])
    after = physics.sensordata
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[0])
    physics.close()


def test_set_leaves_nothing_of_the_past(model):
    fresh, used = MujocoCpuPhysics(model, 3), MujocoCpuPhysics(model, 3)
    qpos, qvel = scattered(fresh)
    scattered(used, seed=9)
    run(used, controls(10, 3), 5)
    untouched = used.state()[1]
    ids = torch.tensor([2, 0])
    used.set(ids, qpos[ids], qvel[ids])
    assert torch.equal(used.state()[ids], fresh.state()[ids])
    assert torch.equal(used.state()[1], untouched)
    np.testing.assert_array_equal(
        run(used, controls(5, 3), 5)[:, ids].numpy(), run(fresh, controls(5, 3), 5)[:, ids].numpy()
    )


def test_a_restored_state_continues_bitwise_even_elsewhere(model):
    first, second = MujocoCpuPhysics(model, 4), MujocoCpuPhysics(model, 6)
    scattered(first)
    run(first, controls(10, 4), 5)
    saved = first.state()
    order = torch.tensor([5, 0, 3, 2])
    second.set_state(order, saved)
    ctrl = controls(10, 4, seed=1)
    wide = torch.zeros(10, 6, 2, dtype=torch.float64)
    wide[:, order] = ctrl
    assert torch.equal(run(first, ctrl, 5), run(second, wide, 5)[:, order])
    assert not torch.equal(saved, first.state())  # state() is a copy


def test_an_unstable_env_is_reported_and_the_others_do_not_notice(model):
    calm, wild = MujocoCpuPhysics(model, 4), MujocoCpuPhysics(model, 4)
    scattered(calm)
    scattered(wild)
    wild.qvel[2, 7] = 1e12
    wild.step(3)
    calm.step(3)
    assert wild.diverged.tolist() == [False, False, True, False]
    assert bool(torch.isfinite(wild.state()).all())
    others = [0, 1, 3]
    assert torch.equal(wild.state()[others], calm.state()[others])
    wild.step(3)
    assert wild.diverged is None
    wild.qpos[1, 0] = float("nan")
    wild.step(1)
    assert wild.diverged.tolist() == [False, True, False, False]
    wild.step(1)
    assert wild.diverged is None
    for column in (wild.qpos, wild.qpos, wild.qvel):  # the same env again and again, in either way
        column[1, 0] = float("nan")
        wild.step(1)
        assert wild.diverged.tolist() == [False, True, False, False]


def test_warnings_go_to_the_log_and_not_into_the_working_directory(model, tmp_path, monkeypatch, caplog):
    """Without a listener, MuJoCo writes a file wherever the process happens to be."""
    monkeypatch.chdir(tmp_path)
    physics = MujocoCpuPhysics(model, 4, num_threads=2)
    scattered(physics)
    physics.qvel[:, 7] = 1e12
    with caplog.at_level("WARNING"):
        physics.step(1)
    assert bool(physics.diverged.all())
    assert "The simulation is unstable" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_snapshot_is_a_copy_of_positions_and_velocities(model):
    physics = MujocoCpuPhysics(model, 4)
    scattered(physics)
    everything, some = physics.snapshot(), physics.snapshot(torch.tensor([3, 1]))
    expected = torch.cat((physics.qpos, physics.qvel), dim=1).to(torch.float32)
    assert torch.equal(everything, expected)
    assert torch.equal(some, expected[[3, 1]])
    assert torch.equal(Physics.snapshot(physics), expected)
    assert torch.equal(Physics.snapshot(physics, torch.tensor([3, 1])), expected[[3, 1]])
    physics.step(1)
    assert torch.equal(everything, expected)


def test_model_fields_per_env_equal_models_of_their_own(model):
    """Mass, inertia and friction per env, against a separately edited ``MjModel`` for each env."""
    physics = MujocoCpuPhysics(model, 4)
    qpos, qvel = scattered(physics)
    scales, models = torch.tensor([0.5, 1.0, 3.0, 10.0], dtype=torch.float64), []
    ball, geom = model.body("ball").id, model.geom("ball").id
    for scale in scales.tolist():
        edited = mujoco.MjModel.from_xml_string(XML)
        edited.body_mass[ball] *= scale
        edited.body_inertia[ball] *= scale
        edited.geom_friction[geom, 0] *= scale
        mujoco.mj_setConst(edited, mujoco.MjData(edited))
        models.append(edited)
    physics.model_field("body_mass")[:, ball] *= scales
    physics.model_field("body_inertia")[:, ball] *= scales.unsqueeze(1)
    physics.model_field("geom_friction")[:, geom, 0] *= scales
    physics.refresh_model(torch.tensor([3, 0, 2, 1]))
    ctrl = controls(30, 4)
    np.testing.assert_array_equal(run(physics, ctrl, 5).numpy(), plain_loop(models, qpos, qvel, ctrl, 5))
    assert model.body_mass[ball] == 0.2  # the shared model is as it was


def test_load_copies_one_env(model):
    physics = MujocoCpuPhysics(model, 3)
    scattered(physics)
    run(physics, controls(4, 3), 5)
    data = mujoco.MjData(model)
    physics.load(data, 2)
    np.testing.assert_array_equal(integration_state(model, data), physics.state()[2])


def test_a_model_without_sensors_has_none():
    physics = MujocoCpuPhysics(mujoco.MjModel.from_xml_string("<mujoco/>"), 3)
    assert physics.sensordata.shape == (3, 0)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_close_ends_the_threads(model):
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    physics = MujocoCpuPhysics(model, 8, num_threads=4)
    physics.step(1)
    assert threads() == before + 3  # the caller's thread works too
    physics.model_field("body_mass")
    physics.close()
    physics.close()
    assert threads() == before
    assert physics.qpos.shape == (8, 9)
    with pytest.raises(SimulationError, match="closed"):
        physics.step(1)


def test_threads_default_to_the_cores_of_this_process(model):
    physics = MujocoCpuPhysics(model, 64)
    assert physics.num_threads == available_cores() == len(os.sched_getaffinity(0))
    physics.close()
