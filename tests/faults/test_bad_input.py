"""Bad input to a simulated environment: one clear error each, and the simulation is left as it was."""

import pytest
import torch

from embodichain.envs import gl_backend as gl
from embodichain.envs.env_cfg import RobotCfg
from embodichain.envs.registration import make
from embodichain.envs.robots import build_model
from embodichain.errors import (
    ActionError,
    AssetError,
    EnvContractError,
    RenderingError,
    SimulationError,
    UnknownNameError,
)
from tests.envs.rollouts import assert_same, random_actions, record, rows, settings, small

NAN = float("nan")


# --- actions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_a_nan_action_names_env_and_step_and_leaves_the_simulation_alone(value):
    env, untouched = (small("PickCubeRL", 4, env=settings("PickCubeRL")) for _ in range(2))
    actions = random_actions(env, 20)
    record(env, actions[:5])
    record(untouched, actions[:5])
    env.reset(env_ids=[2])
    untouched.reset(env_ids=[2])
    before = env.get_state()
    bad = actions[5].clone()
    bad[2, 3] = value
    with pytest.raises(ActionError, match=r"'delta_qpos' of env 2 at step 0 of its episode is not finite"):
        env.step(bad)
    bad[2, 3], bad[1, 0] = 0.0, value
    with pytest.raises(ActionError, match=r"of env 1 at step 5 of its episode.*the simulation was left as it was"):
        env.step({"delta_qpos": bad})
    assert bool((env.get_state() == before).all())
    assert_same(record(env, actions[5:]), record(untouched, actions[5:]))


@pytest.mark.parametrize(
    "action",
    [
        torch.zeros(4, 5),
        torch.zeros(3, 6),
        torch.zeros(4, 6, 1),
        {"delta_qps": torch.zeros(4, 6)},
        {"delta_qpos": "up"},
        [0.0] * 6,
        None,
        torch.zeros(4, 6, dtype=torch.complex64),
    ],
)
def test_a_wrong_action_leaves_the_simulation_alone(action):
    env = small("PushCubeRL", 4)
    before = env.get_state()
    with pytest.raises(ActionError, match="delta_qpos"):
        env.step(action)
    assert bool((env.get_state() == before).all())


def test_an_action_with_a_gradient_leaves_no_graph_behind():
    env = small("PushCubeRL", 2)
    action = torch.zeros(2, 6, requires_grad=True)
    for _ in range(2):
        obs, reward, *_ = env.step(action)
    assert not reward.requires_grad
    assert not obs["robot", "qpos"].requires_grad
    assert not env.physics.ctrl.requires_grad


# --- names, resets, states --------------------------------------------------------------------------------------------


def test_an_unknown_task_gets_the_nearest_names():
    with pytest.raises(UnknownNameError, match=r"'PushCubeR'.*Did you mean 'PushCubeRL'"):
        make("PushCubeR")


@pytest.mark.parametrize(
    "call",
    [
        lambda env: env.reset(seed=0.5),
        lambda env: env.reset(seed=[1, 2, 3]),
        lambda env: env.reset(seed=-1),
        lambda env: env.reset(seed=torch.zeros(3)),
        lambda env: env.reset(seed=torch.zeros(2, dtype=torch.int64)),
        lambda env: env.reset(env_ids=[3]),
        lambda env: env.reset(env_ids=[0, 0]),
        lambda env: env.reset(env_ids=[0.0]),
        lambda env: env.reset(env_ids="all"),
        lambda env: env.set_state(None),
        lambda env: env.set_state(env.get_state()[:1]),
        lambda env: env.set_state(env.get_state().exclude("streams")),
        lambda env: env.set_state(env.get_state(), env_ids=[0]),
    ],
)
def test_a_wrong_reset_or_state_changes_nothing(call):
    env = small("PushCubeRL", 3, env=settings("PushCubeRL"))
    record(env, random_actions(env, 2))
    before = env.get_state()
    with pytest.raises(EnvContractError):
        call(env)
    assert bool((env.get_state() == before).all())


def test_a_closed_env_says_so():
    env = small("PushCubeRL", 3)
    env.close()
    with pytest.raises(SimulationError, match="closed"):
        env.step(torch.zeros(3, 6))


# --- diverging simulations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [1e8, 1e15, NAN])
@pytest.mark.parametrize("task", ["CartPoleRL", "PushCubeRL", "PickCubeRL"])
def test_a_diverging_env_ends_its_episode_and_poisons_nobody(task, speed):
    env, calm = (small(task, 4, max_episode_steps=30, env=settings(task)) for _ in range(2))
    actions = random_actions(env, 12)
    record(env, actions[:3])
    record(calm, actions[:3])
    env.physics.qvel[1] = speed
    env.set_state(env.get_state())
    trace = record(env, actions[3:])
    assert any(bool(said["truncated"][1]) for said in trace[:2])
    assert not any(bool(said["terminated"][1]) for said in trace[:2])
    others = [0, 2, 3]
    assert_same(rows(trace, others), rows(record(calm, actions[3:]), others))
    for said in trace:
        for name, value in said.items():
            assert bool(torch.isfinite(value.float()).all()), name
    ending = next(said for said in trace if bool(said["truncated"][1]))
    assert float(ending["metric/success"][1]) == 0.0


def test_after_divergence_an_episode_is_like_any_other():
    """The episode that follows is the one the stream had in store, bit for bit."""
    env, calm = (small("PushCubeRL", 2, max_episode_steps=30, env=settings("PushCubeRL")) for _ in range(2))
    env.physics.qvel[:] = NAN
    obs, _, _, truncated, info = env.step(torch.zeros(2, 6))
    assert bool(truncated.all())
    expected, _ = calm.reset()
    assert torch.equal(info["episode_seed"], calm.step(torch.zeros(2, 6))[4]["episode_seed"])
    assert bool((obs == expected).all())


# --- models -----------------------------------------------------------------------------------------------------------


BROKEN = {
    "no_xml.xml": "this is no XML",
    "unclosed.xml": "<mujoco><worldbody><geom size='1'/>",
    "element.xml": "<mujoco><worldbody><gem size='1'/></worldbody></mujoco>",
    "attribute.xml": "<mujoco><worldbody><geom sise='1'/></worldbody></mujoco>",
    "number.xml": "<mujoco><worldbody><geom size='big'/></worldbody></mujoco>",
    "include.xml": "<mujoco><include file='nowhere.xml'/></mujoco>",
    "mesh.xml": "<mujoco><asset><mesh name='m' file='nowhere.stl'/></asset></mujoco>",
    "massless.xml": "<mujoco><worldbody><body><freejoint/></body></worldbody></mujoco>",
    "size.xml": "<mujoco><worldbody><geom type='box' size='-1 1 1'/></worldbody></mujoco>",
    "twins.xml": "<mujoco><worldbody><body name='a'/><body name='a'/></worldbody></mujoco>",
    "clash.xml": "<mujoco><worldbody><body name='robot/base'/></worldbody></mujoco>",
    "empty.xml": "",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_an_asset_error_that_names_the_file(tmp_path, name):
    path = tmp_path / name
    path.write_text(BROKEN[name])
    with pytest.raises(AssetError, match=name):
        build_model(path, RobotCfg(tool="pusher"))


def test_a_model_that_is_not_there_is_an_asset_error(tmp_path):
    with pytest.raises(AssetError, match=r"nothing\.xml"):
        build_model(tmp_path / "nothing.xml", RobotCfg(tool="pusher"))
    with pytest.raises(AssetError, match=tmp_path.name):
        build_model(tmp_path, RobotCfg(tool="pusher"))


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_camera_without_gl_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gl, "_found", None)
    monkeypatch.setattr(gl, "_failure", None)
    monkeypatch.setenv("MUJOCO_GL", "disable")
    monkeypatch.delenv(gl.FOUND_VARIABLE, raising=False)
    with pytest.raises(RenderingError, match="apt-get install libosmesa6"):
        small("PushCubeRL", env={"observations": {"cameras": [{"name": "top"}]}})
    with small("PushCubeRL", 2) as env:
        env.step(torch.zeros(2, 6))
        with pytest.raises(RenderingError):
            env.render()


def test_a_camera_that_is_not_there_gets_the_nearest_names():
    with pytest.raises(UnknownNameError, match=r"'tpo'.*'top'"):
        small("PushCubeRL", env={"observations": {"cameras": [{"name": "tpo"}]}})
    with pytest.raises(UnknownNameError, match=r"'sid'.*'side'"):
        small("PushCubeRL").render(camera="sid")
