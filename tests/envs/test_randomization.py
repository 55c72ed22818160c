"""What is drawn anew for an episode or a step: starts, physical parameters, delays, noise, pushes, and curricula."""

import copy
import inspect
import math
import re
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from embodichain.envs import event_terms, motion_events, registration
from embodichain.envs.curricula import Range
from embodichain.envs.randomization import EVENTS, register_event
from embodichain.envs.registration import make_to_watch
from embodichain.envs.wrappers import ChunkedEnv
from embodichain.errors import ConfigError
from tests.envs.rollouts import assert_same, flat, random_actions, record, rows, small

STILL = {"randomize_robot": None, "randomize_target": None}


def with_events(num_envs: int, **events):
    return small("PushCubeRL", num_envs, max_episode_steps=200, env={"events": events})


def cube_field(env, name: str) -> torch.Tensor:
    """The cube's own values of a per-env model field."""
    index = env.physics.model.geom("cube").id if name.startswith("geom") else env.physics.model.body("cube").id
    return env.physics.model_field(name)[:, index]


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_has_the_standard_deviation_asked_for():
    deviations = {"robot/qpos": 0.02, "object/pos": 0.005, "goal/offset": 0.1}
    clean, noisy = small("PushCubeRL", 500), small("PushCubeRL", 500, env={"observations": {"noise": deviations}})
    differences = {name: [] for name in flat(clean.reset(seed=3)[0])}
    noisy.reset(seed=3)
    for _ in range(4):
        ours, theirs = (flat(env.step(torch.zeros(500, 6))[0]) for env in (clean, noisy))
        for name in differences:
            differences[name].append(theirs[name] - ours[name])
    for name, found in differences.items():
        noise = torch.stack(found)
        expected = deviations.get(name, 0.0)
        assert float(noise.std()) == pytest.approx(expected, rel=0.04, abs=1e-12)
        assert abs(float(noise.mean())) <= 5 * expected / noise.numel() ** 0.5
        if expected:
            assert abs(float((noise[1:] * noise[:-1]).mean())) < 0.1 * expected**2  # new at every step


def test_noise_does_not_touch_the_simulation_or_the_reward():
    clean = small("PushCubeRL", 5)
    noisy = small("PushCubeRL", 5, env={"observations": {"noise": {"robot/qpos": 0.5, "goal/pos": 0.5}}})
    for action in random_actions(clean, 15):
        ours, theirs = clean.step(action), noisy.step(action)
        assert torch.equal(ours[1], theirs[1])
    assert torch.equal(clean.physics.state(), noisy.physics.state())


def test_noise_on_what_is_not_observed_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"noise\.robot/qpo: no such observation. Did you mean 'robot/qpos'"):
        small("PushCubeRL", env={"observations": {"noise": {"robot/qpo": 0.1}}})


def test_noise_on_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"noise\.instruction: no such observation"):
        small("PushCubeLanguageRL", env={"observations": {"noise": {"instruction": 0.1}}})


# --- starts -----------------------------------------------------------------------------------------------------------


def test_starts_fill_the_configured_ranges():
    area = {"x": [0.4, 0.5], "y": [-0.1, 0.2], "yaw": [-0.5, 0.5]}
    env = with_events(800, randomize_object_pose=area, randomize_target={"x": [0.6, 0.7], "y": [0.0, 0.0]})
    obs, _ = env.reset(seed=0)
    cube, quat, goal = obs["object", "pos"], obs["object", "quat"], obs["goal", "pos"]
    yaw = 2.0 * torch.atan2(quat[:, 3], quat[:, 0])
    for values, (low, high) in ((cube[:, 0], area["x"]), (cube[:, 1], area["y"]), (yaw, area["yaw"])):
        assert low - 1e-6 <= float(values.min()) < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < float(values.max()) <= high + 1e-6
        assert float(values.mean()) == pytest.approx(0.5 * (low + high), abs=0.05 * (high - low))
    assert goal[:, 1].abs().max() == 0.0
    assert cube[:, 2].min() == cube[:, 2].max() == pytest.approx(0.025)


def test_nothing_is_random_when_every_event_is_off():
    env = small("PushCubeRL", 3, env={"events": {**STILL, "randomize_object_pose": None}})
    first, second = flat(env.reset(seed=0)[0]), flat(env.reset(seed=1)[0])
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.equal(value, value[:1].expand_as(value))


def test_joints_start_around_where_they_are_told_to():
    env = small("ReachRL", 500, env={"events": {"randomize_robot": {"position": 0.3, "velocity": 0.2}}})
    obs, _ = env.reset(seed=0)
    offset = obs["robot", "qpos"] - env.robot.init_qpos.float()
    assert 0.29 < float(offset.abs().max()) <= 0.3 + 1e-6
    assert 0.19 < float(obs["robot", "qvel"].abs().max()) <= 0.2 + 1e-6


# --- friction and mass ------------------------------------------------------------------------------------------------


def test_friction_and_mass_differ_between_envs_and_episodes():
    env = with_events(300, randomize_friction={"scale": [0.5, 1.5]}, randomize_mass={"scale": [0.5, 2.0]})
    nominal = env.physics.model
    for name, low, high in (("body_mass", 0.5, 2.0), ("geom_friction", 0.5, 1.5)):
        values = cube_field(env, name)
        values = values[:, 0] if name == "geom_friction" else values
        standard = float(nominal.geom("cube").friction[0] if name == "geom_friction" else nominal.body("cube").mass[0])
        scale = values / standard
        assert low <= float(scale.min()) < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < float(scale.max()) <= high
        before = values.clone()
        env.reset(env_ids=[5, 2])
        after = cube_field(env, name)
        after = after[:, 0] if name == "geom_friction" else after
        assert torch.nonzero(after != before).reshape(-1).tolist() == [2, 5]
    inertia = cube_field(env, "body_inertia") / torch.tensor(nominal.body("cube").inertia)
    torch.testing.assert_close(inertia[:, 0], cube_field(env, "body_mass") / float(nominal.body("cube").mass[0]))


@pytest.mark.parametrize("scale", [0.25, 0.5, 1.0])
def test_friction_decides_how_far_the_cube_slides(scale):
    """A sliding cube stops after ``v^2 / (2 mu g)``, less ``v dt / 2``: each step goes on with the speed at its end."""
    env = with_events(
        1,
        **STILL,
        randomize_friction={"scale": [scale, scale]},
        randomize_object_pose={"x": [0.4, 0.4], "y": [0.3, 0.3], "yaw": [0.0, 0.0]},
    )
    for _ in range(5):
        env.step(torch.zeros(1, 6))
    start = float(env.physics.qpos[0, 0])
    env.physics.qvel[0, 0] = 0.5
    for _ in range(30):
        env.step(torch.zeros(1, 6))
    assert abs(float(env.physics.qvel[0, 0])) < 1e-3
    way = 0.5**2 / (2 * 0.8 * scale * 9.81) - 0.5 * env.physics.model.opt.timestep / 2
    assert float(env.physics.qpos[0, 0]) - start == pytest.approx(way, rel=0.03)


def test_a_heavy_cube_moves_less_when_it_is_pushed():
    """The expert's own push, replayed on a cube that is 400 times as heavy: 60 kg."""
    pose = {"x": [0.46, 0.46], "y": [0.0, 0.0], "yaw": [0.0, 0.0]}
    events = {**STILL, "randomize_object_pose": pose}
    light = with_events(1, **events, randomize_mass={"scale": [1.0, 1.0]})
    heavy = with_events(1, **events, randomize_mass={"scale": [400.0, 400.0]})
    actions = light.create_demo_action_list()
    moved = []
    for env in (light, heavy):
        start = env.physics.qpos[0, :2].clone()
        for action in actions[:-1]:
            env.step(action)
        moved.append(float((env.physics.qpos[0, :2] - start).norm()))
    assert moved[0] > 0.1
    assert moved[1] < 0.25 * moved[0]


def test_scaling_by_one_changes_nothing():
    plain = small("PushCubeRL", 3)
    scaled = small(
        "PushCubeRL", 3, env={"events": {"randomize_mass": {"scale": [1, 1]}, "randomize_friction": {"scale": [1, 1]}}}
    )
    for action in random_actions(plain, 10):
        assert torch.equal(plain.step(action)[1], scaled.step(action)[1])
    assert torch.equal(plain.physics.state(), scaled.physics.state())


def test_a_task_without_an_object_refuses_both():
    for event in ("randomize_mass", "randomize_friction"):
        with pytest.raises(ConfigError, match="need an object, and this task has none"):
            small("ReachRL", env={"events": {event: {"scale": [0.5, 2.0]}}})


# --- registered events ------------------------------------------------------------------------------------------------


def test_ones_own_event_writes_a_field_of_the_model_per_env():
    @register_event("test_wind", fields=("opt.wind",))
    def wind(world, rows, draw, speed: Range = (0.0, 5.0)):
        rows["opt.wind"][:, 0] = draw.values(speed, 1)[:, 0]

    event = {"func": "test_wind", "mode": "reset", "params": {"speed": [1.0, 2.0]}}
    env = with_events(20, gust=event)
    drawn = env.physics.model_field("opt.wind")[:, 0]
    assert 1.0 <= float(drawn.min()) < float(drawn.max()) <= 2.0
    few = with_events(3, gust=event, other={"func": "mass", "params": {"range": [0.9, 1.1]}})
    assert torch.equal(few.physics.model_field("opt.wind"), env.physics.model_field("opt.wind")[:3])


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"func": "frction", "params": {}}, r"env\.events\.x\.func: unknown event 'frction'\. Did you mean 'friction'"),
        ({"func": "mass", "params": {"range": [1, 1], "bodes": 1}}, r"x\.params\.bodes: unknown key.*'bodies'"),
        ({"func": "mass", "params": {"range": [1, 2], "bodies": "cub"}}, r"params\.bodies: 'cub' matches.*'cube'"),
        ({"func": "mass", "params": {"range": [-1, 2]}}, r"params\.range: masses must be positive"),
        (
            {"func": "action_delay", "mode": "step", "params": {"steps": [0, 1]}},
            r"x\.mode: action_delay happens in mode",
        ),
    ],
)
def test_a_wrong_event_is_one_error_that_names_its_key(event, message):
    with pytest.raises(ConfigError, match=message) as caught:
        with_events(1, x=event)
    assert len(caught.value.problems) == 1


def test_all_that_is_wrong_with_events_is_one_error():
    wrong = {
        "a": {"func": "mas", "params": {"range": [1, 2]}},
        "b": {"func": "mass", "params": {"rnge": [1, 2]}},
        "c": {"func": "push", "params": {"velocity_range": {}, "body": "cub"}},
    }
    with pytest.raises(ConfigError) as caught:
        with_events(1, **wrong)
    told = "\n".join(caught.value.problems)
    assert "another simulator" not in told
    assert "env.events.a.func: unknown event 'mas'. Did you mean 'mass'" in told
    assert "env.events.b.params.rnge: unknown key" in told
    assert "env.events.c.params.body: the scene has no body 'cub'. Did you mean 'cube'" in told
    with pytest.raises(ConfigError, match="body: the scene has no body 'cube'"):  # and not that no body can be pushed
        small("ReachRL", env={"events": {"x": {"func": "push", "params": {"velocity_range": {}, "body": "cube"}}}})


# --- every event, beside a model that is changed by hand --------------------------------------------------------------


def scaled(field: str, factor: float, index=slice(None)):
    def edit(model: mujoco.MjModel) -> None:
        getattr(model, field)[index] *= factor

    return edit


def body(model, name: str) -> int:
    return model.body(name).id


def heavier(model):
    model.body_mass[1:] *= 1.3
    model.body_inertia[1:] *= 1.3


def loaded(model):
    hand = body(model, "robot/wrist_3")
    nominal = model.body_mass[hand]
    model.body_mass[hand] = nominal + 0.2
    model.body_inertia[hand] *= (nominal + 0.2) / nominal


def shifted(model):
    model.body_ipos[body(model, "robot/forearm")] += (0.01, -0.02, 0.03)


def springy(model):
    model.jnt_stiffness[1:] = 20.0


def sticky(model):
    model.dof_frictionloss[6:] = 3.0


def geared(model):
    model.dof_armature[6:8] += 0.2


def softer(model):
    model.actuator_gainprm[:, 0] *= 0.5
    model.actuator_biasprm[:, 1] *= 0.5
    model.actuator_biasprm[:, 2] *= 0.25


def lighter(model):
    model.opt.gravity[:] *= 0.5


ALONE = {
    "friction": ({"range": [0.1, 0.1], "geoms": "cube"}, scaled("geom_friction", 0.1, (1, 0))),
    "mass": ({"range": [1.3, 1.3]}, heavier),
    "mass added": ({"range": [0.2, 0.2], "bodies": ["wrist_3"], "operation": "add"}, loaded),
    "inertia": ({"range": [1.2, 1.2], "bodies": "robot/.*"}, scaled("body_inertia", 1.2, slice(3, None))),
    "center_of_mass": ({"bodies": "forearm", "x": [0.01, 0.01], "y": [-0.02, -0.02], "z": [0.03, 0.03]}, shifted),
    "joint_damping": ({"range": [3.0, 3.0]}, scaled("dof_damping", 3.0)),
    "joint_friction": ({"range": [3.0, 3.0], "operation": "abs"}, sticky),
    "joint_armature": ({"range": [0.2, 0.2], "joints": "shoulder.*", "operation": "add"}, geared),
    "joint_stiffness": ({"range": [20.0, 20.0], "operation": "abs"}, springy),
    "actuator_gains": ({"kp": [0.5, 0.5], "kd": [0.25, 0.25]}, softer),
    "actuator_strength": ({"range": [0.1, 0.1]}, scaled("actuator_forcerange", 0.1)),
    "gravity": ({"range": [0.5, 0.5]}, lighter),
}


def stepped_by_hand(env, model: mujoco.MjModel, actions: torch.Tensor, hit=None) -> torch.Tensor:
    """Step an env, and its first copy with plain MuJoCo; return both positions after every step."""
    data, pairs = mujoco.MjData(model), []
    data.qpos[:], data.qvel[:] = env.physics.qpos[0].numpy(), env.physics.qvel[0].numpy()
    for number, action in enumerate(actions):
        if hit is not None:
            hit(data, number)
        env.step(action)
        data.ctrl[:] = env.physics.ctrl[0].numpy()
        mujoco.mj_step(model, data, env.task.substeps)
        pairs.append(torch.stack((env.physics.qpos[0].clone(), torch.from_numpy(data.qpos.copy()))))
    return torch.stack(pairs)


@pytest.mark.parametrize("name", ALONE)
def test_an_event_is_the_change_of_the_model_that_one_would_make_by_hand(name):
    params, edit = ALONE[name]
    # A cube that slides and turns shows its friction, a moving arm its masses, joints and motors.
    env = with_events(2, it={"func": name.split()[0], "params": params})
    model = copy.copy(env.physics.model)
    edit(model)
    mujoco.mj_setConst(model, mujoco.MjData(model))
    env.physics.qvel[:, 0], env.physics.qvel[:, 5] = 0.6, 8.0
    actions = random_actions(env, 12)
    state = env.get_state()
    ours, theirs = stepped_by_hand(env, model, actions).unbind(1)
    assert torch.equal(ours, theirs)
    env.set_state(state)
    ours, plain = stepped_by_hand(env, copy.copy(env.physics.model), actions).unbind(1)
    assert float((ours - plain).abs().max()) > 1e-7  # it does something


def test_friction_has_three_kinds():
    for kind, column in (("sliding", 0), ("torsional", 1), ("rolling", 2)):
        params = {"range": [0.3, 0.3], "kind": kind, "bodies": "cube", "operation": "abs"}
        env = with_events(2, it={"func": "friction", "params": params})
        nominal = torch.from_numpy(env.physics.model.geom_friction.copy()).repeat(2, 1, 1)
        nominal[:, env.physics.model.geom("cube").id, column] = 0.3
        assert torch.equal(env.physics.model_field("geom_friction"), nominal)


def test_gravity_leans_by_the_angle_that_is_drawn():
    env = with_events(
        200, it={"func": "gravity", "params": {"range": [9.0, 10.0], "operation": "abs", "tilt": [0.1, 0.2]}}
    )
    drawn = env.physics.model_field("opt.gravity")
    size = drawn.norm(dim=1)
    angle = torch.acos(-drawn[:, 2] / size)
    for values, low, high in ((size, 9.0, 10.0), (angle, 0.1, 0.2)):
        assert low <= float(values.min()) < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < float(values.max()) <= high
    heading = torch.atan2(drawn[:, 1], drawn[:, 0])
    assert float(heading.min()) < -2.9
    assert float(heading.max()) > 2.9


def test_distributions_fill_their_range():
    for distribution, middle in (("uniform", 2.5), ("log_uniform", 2.0), ("gaussian", 2.5)):
        params = {"range": [1.0, 4.0], "bodies": "cube", "distribution": distribution}
        env = with_events(800, it={"func": "mass", "params": params})
        scale = cube_field(env, "body_mass") / float(env.physics.model.body("cube").mass[0])
        assert 1.0 - 1e-9 <= float(scale.min()) < 1.1
        assert 3.9 < float(scale.max()) <= 4.0 + 1e-9
        assert float(scale.median()) == pytest.approx(middle, abs=0.15)
        inside = float(((scale > 1.75) & (scale < 3.25)).double().mean())
        assert inside == pytest.approx(
            {"uniform": 0.5, "log_uniform": 0.447, "gaussian": 0.683}[distribution], abs=0.05
        )


def test_every_element_draws_its_own_value_unless_they_share_one():
    for shared, expected in ((False, 6), (True, 1)):
        env = with_events(1, it={"func": "joint_damping", "params": {"range": [0.5, 2.0], "shared": shared}})
        nominal = torch.from_numpy(env.physics.model.dof_damping[6:])
        assert len({round(float(x), 9) for x in env.physics.model_field("dof_damping")[0, 6:] / nominal}) == expected


# --- pushes, delays and noise -----------------------------------------------------------------------------------------


def test_a_body_begins_at_the_pose_that_is_drawn():
    turns, pose = {"roll": 0.3, "pitch": -0.4, "yaw": 0.5}, {"x": 0.01, "y": -0.02, "z": 0.1}
    ranges = {name: [value, value] for name, value in (turns | pose).items()}
    plain = with_events(3)
    moved = with_events(3, it={"func": "body_pose", "params": {"pose_range": ranges}})
    placed = with_events(3, it={"func": "body_pose", "params": {"pose_range": ranges, "relative": False}})
    entity = {"entity_cfg": {"uid": "cube"}, "position_range": [list(pose.values())] * 2}
    entity |= {"rotation_range": [[math.degrees(angle) for angle in turns.values()]] * 2, "relative_position": False}
    told = with_events(3, it={"func": "randomize_rigid_object_pose", "mode": "reset", "params": entity})
    turn, both = np.zeros(4), np.zeros(4)
    mujoco.mju_euler2Quat(turn, np.array(list(turns.values())), "XYZ")
    for env in range(3):
        before = plain.physics.qpos[env].numpy()
        mujoco.mju_mulQuat(both, turn, before[3:7])
        expected = np.concatenate((before[:3] + list(pose.values()), both, before[7:]))
        np.testing.assert_allclose(moved.physics.qpos[env].numpy(), expected, atol=1e-12)
        expected = np.concatenate((list(pose.values()), turn, before[7:]))
        np.testing.assert_allclose(placed.physics.qpos[env].numpy(), expected, atol=1e-12)
        np.testing.assert_allclose(told.physics.qpos[env].numpy(), expected, atol=1e-12)
    heavy = {"entity_cfg": {"uid": "cube"}, "mass_range": [0.5, 0.5]}
    env = with_events(2, it={"func": "randomize_rigid_object_mass", "mode": "reset", "params": heavy})
    assert cube_field(env, "body_mass").tolist() == [0.5, 0.5]


def test_pushes_change_the_velocity_when_they_are_due():
    push = {"func": "push", "mode": "interval", "interval_range_s": [0.1, 0.1], "params": {}}
    push["params"] = {"velocity_range": {"x": [0.5, 0.5], "yaw": [1.0, 1.0]}}
    env = with_events(2, it=push)
    dt = env.physics.model.opt.timestep * env.task.substeps
    every = round(0.1 / dt)

    def hit(data, number):
        if number and number % every == 0:
            data.qvel[0] += 0.5
            data.qvel[5] += 1.0

    ours, theirs = stepped_by_hand(env, copy.copy(env.physics.model), random_actions(env, 3 * every), hit).unbind(1)
    assert torch.equal(ours, theirs)
    assert float(ours[-1, 0] - ours[0, 0]) > 0.02


def test_the_time_between_pushes_is_drawn():
    push = {"func": "push_joints", "interval_range_s": [0.1, 0.3], "params": {"range": [1.0, 1.0], "joints": "wrist_3"}}
    env = with_events(300, it=push)
    due, dt = env.get_state()["events", "it.due"], env.physics.model.opt.timestep * env.task.substeps
    assert set(due.tolist()) == set(range(round(0.1 / dt), round(0.3 / dt) + 1))


def test_forces_last_as_long_as_they_are_told_to():
    force = {"func": "apply_force", "mode": "reset", "params": {"bodies": "cube", "duration_s": 0.1}}
    force["params"] |= {"force_range": {"x": [1.5, 1.5]}, "torque_range": {"z": [0.01, 0.01]}}
    env = with_events(2, it=force)
    steps = round(0.1 / (env.physics.model.opt.timestep * env.task.substeps))

    def hit(data, number):
        data.xfrc_applied[body(env.physics.model, "cube")] = (1.5, 0, 0, 0, 0, 0.01) if number < steps else 0.0

    ours, theirs = stepped_by_hand(env, copy.copy(env.physics.model), random_actions(env, 2 * steps), hit).unbind(1)
    assert torch.equal(ours, theirs)
    assert float(ours[-1, 0] - ours[0, 0]) > 0.01


def test_delayed_actions_are_earlier_actions():
    for delay in (1, 3):
        late = with_events(3, it={"func": "action_delay", "params": {"steps": [delay, delay]}})
        plain = small("PushCubeRL", 3, max_episode_steps=200)
        actions = random_actions(late, 12)
        for number, action in enumerate(actions):
            late.step(action)
            plain.step(actions[max(number - delay, 0)])
            assert torch.equal(late.physics.qpos, plain.physics.qpos)
    drawn = with_events(60, it={"func": "action_delay", "params": {"steps": [1, 3]}}).get_state()["events", "it.delay"]
    assert set(drawn.tolist()) == {1, 2, 3}


def test_delayed_observations_are_earlier_observations():
    delays = {"robot/qpos": [2, 2], "goal/offset": [0, 3]}
    late = small("PushCubeRL", 6, env={"observations": {"delay": delays, "noise": {"robot/qpos": 0.01}}})
    plain = small("PushCubeRL", 6, env={"observations": {"noise": {"robot/qpos": 0.01}}})
    seen = [flat(plain.reset(seed=2)[0])]
    first = flat(late.reset(seed=2)[0])
    assert all(torch.equal(first[name], value) for name, value in seen[0].items())
    drawn = late.get_state()["events", "observations.delay.goal.offset"]
    assert len(set(drawn.tolist())) > 1
    for number, action in enumerate(random_actions(plain, 11), start=1):
        seen.append(flat(plain.step(action)[0]))
        got = flat(late.step(action)[0])
        for name, value in seen[-1].items():
            expected = seen[max(number - 2, 0)][name] if name == "robot/qpos" else value
            if name == "goal/offset":
                rows = [seen[max(number - int(late_by), 0)][name][env] for env, late_by in enumerate(drawn)]
                expected = torch.stack(rows)
            assert torch.equal(got[name], expected), name


def test_images_can_be_late():
    settings = {"cameras": [{"name": "side", "width": 16, "height": 12}]}
    plain = small("PushCubeRL", 2, env={"observations": settings})
    late = small("PushCubeRL", 2, env={"observations": {**settings, "delay": {"image/side": [1, 1]}}})
    seen = [flat(plain.reset(seed=1)[0])["image/side"]]
    late.reset(seed=1)
    for action in random_actions(plain, 3):
        seen.append(flat(plain.step(action)[0])["image/side"])
        assert torch.equal(flat(late.step(action)[0])["image/side"], seen[-2])
    assert not torch.equal(seen[0], seen[-1])


def test_delays_are_the_same_inside_a_chunk():
    settings = {
        "observations": {
            "delay": {"robot/qpos": [1, 3], "previous": [1, 2]},
            "terms": {"previous": {"func": "last_action"}},
        },
        "events": {"it": {"func": "action_delay", "params": {"steps": [0, 2]}}},
    }
    whole, single = (small("PushCubeRL", 4, env=settings) for _ in range(2))
    chunks = ChunkedEnv(whole, 3)
    whole.reset(seed=1), single.reset(seed=1)
    for actions in random_actions(single, 9).view(3, 3, 4, 6):
        obs = flat(chunks.step(actions.transpose(0, 1))[0])
        for action in actions:
            expected = flat(single.step(action)[0])
        assert all(torch.equal(obs[name], value) for name, value in expected.items())


def test_uniform_noise_is_new_in_every_step_and_a_bias_lasts_for_the_episode():
    noise = {"robot/qpos": {"bias": [0.01, 0.03]}, "robot/qvel": {"uniform": [-0.2, 0.1]}, "goal/pos": {"std": 0.5}}
    noisy = small("PushCubeRL", 300, env={"observations": {"noise": noise}})
    clean = small("PushCubeRL", 300)
    noisy.reset(seed=4), clean.reset(seed=4)
    errors = []
    for action in random_actions(clean, 12):  # the last one begins new episodes
        ours, theirs = (flat(env.step(action)[0]) for env in (clean, noisy))
        errors.append({name: theirs[name] - ours[name] for name in ours})
        assert all(bool((error == 0).all()) for name, error in errors[-1].items() if name not in noise)
    bias = torch.stack([error["robot/qpos"] for error in errors])
    assert float(bias.min()) >= 0.01 - 1e-6
    assert float(bias.max()) <= 0.03 + 1e-6
    assert float(bias[0].std()) == pytest.approx(0.02 / 12**0.5, rel=0.1)
    torch.testing.assert_close(bias[0], bias[10], atol=1e-6, rtol=0)
    assert float((bias[11] - bias[0]).abs().max()) > 0.01
    uniform = torch.stack([error["robot/qvel"] for error in errors])
    assert -0.2 - 1e-5 <= float(uniform.min()) < -0.19
    assert 0.09 < float(uniform.max()) <= 0.1 + 1e-5
    assert float((uniform[0] - uniform[1]).abs().mean()) > 0.05
    assert float(torch.stack([error["goal/pos"] for error in errors]).std()) == pytest.approx(0.5, rel=0.05)


def test_noise_on_actions_reaches_the_robot_but_not_the_reward():
    noisy = with_events(400, it={"func": "action_noise", "params": {"std": 0.1, "bias": [0.2, 0.4]}})
    noisy.reset(seed=0)
    before, actions = noisy.physics.qpos[:, 7:].clone(), torch.zeros(400, 6)
    _, _, _, _, info = noisy.step(actions)
    sent = (noisy.physics.ctrl - before.float()) / noisy.action_manager.term.scale
    assert float(sent.mean()) == pytest.approx(0.3, abs=0.01)
    assert float(sent.std()) == pytest.approx((0.1**2 + 0.2**2 / 12) ** 0.5, rel=0.05)
    assert float(info["rewards"]["effort"].abs().max()) == 0.0


def test_joints_that_are_calibrated_wrongly_measure_and_move_to_other_places():
    """The robot believes to be where its joints are measured, so it goes to a target less the error."""
    wrong = small("ReachRL", 3, env={"events": {"it": {"func": "joint_offset", "params": {"range": [0.02, 0.05]}}}})
    plain = small("ReachRL", 3)
    ours, theirs = (flat(env.reset(seed=0)[0]) for env in (wrong, plain))
    offset = ours["robot/qpos"] - theirs["robot/qpos"]
    assert float(offset.min()) > 0.02 - 1e-6
    assert float(offset.max()) < 0.05 + 1e-6
    assert torch.equal(ours["robot/qvel"], theirs["robot/qvel"])
    still = torch.zeros(3, 6)
    wrong.step(still), plain.step(still)
    torch.testing.assert_close(wrong.physics.ctrl, plain.physics.ctrl, atol=1e-6, rtol=0)  # holds where it really is
    qpos = small("ReachRL", 3, env={"events": wrong.cfg.to_dict()["env"]["events"], "actions": {"qpos": {}}})
    qpos.reset(seed=0)
    qpos.step(still)
    middle = 0.5 * (qpos.robot.lower + qpos.robot.upper)
    torch.testing.assert_close(qpos.physics.ctrl.float(), middle - offset, atol=1e-6, rtol=0)


# --- all of them together ---------------------------------------------------------------------------------------------

EVERYTHING = {
    "observations": {
        "noise": {"robot/qpos": {"std": 0.01, "uniform": [-0.01, 0.01], "bias": [-0.1, 0.1]}, "robot/qvel": 0.1},
        "delay": {"object/pos": [0, 3], "robot/qpos": [0, 1]},
    },
    "events": {
        "randomize_mass": {"scale": [0.5, 2.0]},
        "randomize_target": {
            "y": {"curriculum": {"by": "steps", "from": [0, 0], "to": [-0.1, 0.1], "between": [0, 40]}}
        },
        "grip": {"func": "friction", "params": {"range": [0.5, 1.5], "distribution": "gaussian"}},
        "links": {"func": "mass", "params": {"inertia": False, "range": [0.8, 1.2], "bodies": "robot/.*"}},
        "moments": {"func": "inertia", "params": {"range": [0.9, 1.1], "bodies": "robot/.*"}},
        "load": {"func": "center_of_mass", "params": {"bodies": "forearm", "x": [-0.02, 0.02]}},
        "damping": {
            "func": "joint_damping",
            "mode": "interval",
            "interval_range_s": [0.05, 0.1],
            "params": {"range": [1, 2]},
        },
        "dry": {"func": "joint_friction", "params": {"range": [0, 1], "operation": "abs"}},
        "rotor": {"func": "joint_armature", "mode": "step", "params": {"range": [0.5, 1.5]}},
        "servo": {"func": "actuator_gains", "params": {"kp": [0.8, 1.2], "kd": [0.8, 1.2]}},
        "weak": {"func": "actuator_strength", "params": {"range": [0.5, 1.0]}},
        "lean": {"func": "gravity", "params": {"tilt": [0, 0.05]}},
        "bump": {"func": "push", "interval_range_s": [0.04, 0.1], "params": {"velocity_range": {"x": [-0.2, 0.2]}}},
        "pull": {
            "func": "apply_force",
            "interval_range_s": [0.04, 0.1],
            "params": {"bodies": "cube", "force_range": {"y": [-1, 1]}, "duration_s": 0.05},
        },
        "latency": {"func": "action_delay", "params": {"steps": [0, 2]}},
        "jitter": {"func": "action_noise", "params": {"std": 0.1, "bias": [-0.1, 0.1]}},
        "zero": {"func": "joint_offset", "params": {"range": [-0.02, 0.02]}},
        "more": {
            "func": "friction",
            "params": {
                "bodies": "cube",
                "kind": "torsional",
                "range": {"curriculum": {"by": "success", "from": [1, 1], "to": [2, 3], "between": [0, 0.5]}},
            },
        },
    },
}


def test_everything_is_the_same_for_any_number_of_envs_and_threads():
    many = small("PushCubeRL", 5, env=EVERYTHING, num_threads=2)
    few = small("PushCubeRL", 2, env=EVERYTHING, num_threads=1)
    ours, theirs = (record(env, random_actions(env, 40)) for env in (many, few))
    assert_same(rows(ours, slice(0, 2)), theirs)
    assert torch.equal(many.get_state()[:2]["physics"], few.get_state()["physics"])


def test_everything_continues_bit_for_bit_from_a_state():
    env, other = (small("PushCubeRL", 3, env=EVERYTHING, seed=seed) for seed in (1, 2))
    first = random_actions(env, 17)
    for action in first:
        env.step(action)
    state, actions = env.get_state(), random_actions(env, 30, seed=1)
    expected = record(env, actions)
    other.step(first[0])
    other.prepare()  # what was drawn ahead is of other states
    other.set_state(state)
    assert_same(record(other, actions), expected)
    env.set_state(state[[2, 0]], env_ids=[0, 2])
    again = record(env, actions[:, [2, 1, 0]])
    assert_same(rows(again, slice(0, 1)), rows(expected, slice(2, 3)))
    assert_same(rows(again, slice(2, 3)), rows(expected, slice(0, 1)))


def test_an_episode_begins_again_from_its_seed():
    events = {name: event for name, event in EVERYTHING["events"].items() if name not in ("randomize_target", "more")}
    env = small("PushCubeRL", 4, env={**EVERYTHING, "events": events})
    for action in random_actions(env, 15):
        seeds = env.step(action)[4]["episode_seed"]
    again = small("PushCubeRL", 2, env={**EVERYTHING, "events": events}, seed=99)
    again.reset(seed=seeds[[3, 1]])
    env.reset(seed=seeds)
    actions = random_actions(env, 8)
    assert_same(record(again, actions[:, [3, 1]]), rows(record(env, actions), [3, 1]))
    same = small("PushCubeRL", 3, env={**EVERYTHING, "events": events})
    same.reset(seed=seeds[:1].expand(3))  # a group of identical starts
    fields = same.get_state()["model"]
    assert all(bool((value == value[:1]).all()) for value in fields.values())
    assert float(fields["body_mass"].std(dim=0).max()) == 0.0


def test_a_draw_does_not_depend_on_the_other_events():
    link = {"links": EVERYTHING["events"]["links"]}
    alone = with_events(3, **link).physics.model_field("body_mass")[:, 3:]
    among = with_events(3, other=EVERYTHING["events"]["dry"], **link).physics.model_field("body_mass")[:, 3:]
    assert torch.equal(alone, among)


def test_gymnasiums_suite_takes_events_for_its_own_bodies():
    events = {
        "mass": {"func": "mass", "params": {"range": [1.5, 1.5], "bodies": "torso"}},
        "slick": {"func": "friction", "params": {"range": [0.5, 0.5], "geoms": "floor"}},
        "strength": {"func": "actuator_strength", "params": {"range": [0.8, 0.8]}},
        "hit": {"func": "push", "interval_range_s": [0.25, 0.25], "params": {"velocity_range": {"z": [1.0, 1.0]}}},
    }
    env = small("Ant-v5", 3, env={"events": events})
    model = copy.copy(env.physics.model)
    torso = body(model, "torso")
    model.body_mass[torso] *= 1.5
    model.body_inertia[torso] *= 1.5
    model.geom_friction[model.geom("floor").id, 0] *= 0.5
    model.actuator_gainprm[:, 0] *= 0.8
    mujoco.mj_setConst(model, mujoco.MjData(model))

    def hit(data, number):
        data.qvel[2] += number > 0 and number % 5 == 0

    ours, theirs = stepped_by_hand(env, model, random_actions(env, 11), hit).unbind(1)
    assert torch.equal(ours, theirs)
    with pytest.raises(ConfigError, match=r"env\.events\.randomize_mass: Ant-v5 has no such settings"):
        small("Ant-v5", 1, env={"events": {"randomize_mass": {"scale": [1, 2]}}})


# --- what is wrong with a range ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("func", "params", "message"),
    [
        ("mass", {"range": [-0.5, 0.5]}, r"range: masses must be positive, and \[-0.5, 0.5\] \(scale\) gives"),
        ("mass", {"range": [-0.2, 0.0], "bodies": "cube", "operation": "add"}, "range: masses must be positive"),
        ("mass", {"range": [0.0, 1.0], "distribution": "log_uniform"}, "range: log_uniform needs positive numbers"),
        ("mass", {"range": [2.0, 1.0]}, r"range: expected \[low, high\] with low <= high"),
        ("mass", {"range": 2.0}, r"range: expected two numbers"),
        ("mass", {"range": [1, 2], "bodies": "world"}, "bodies: 'world': expected bodies with mass"),
        ("mass", {"range": [1, 2], "bodies": "["}, r"bodies: '\[' is no regular expression"),
        ("mass", {"range": [1, 2], "bodies": []}, "bodies: expected at least one name"),
        ("friction", {"range": [-1.0, 1.0]}, "range: friction must not be negative"),
        ("friction", {"range": [1, 1], "kind": "slidng"}, "kind: expected 'sliding'.*Did you mean 'sliding'"),
        ("inertia", {"range": [0.5, 2.0], "per_axis": True}, "range: no moment of inertia may exceed the sum"),
        ("inertia", {"range": [-1.0, 1.0], "operation": "add"}, "range: moments of inertia must be positive"),
        ("mass", {"range": [1.0, 1e30]}, r"range: expected body_mass of at most 1e\+10.*gives up to"),
        (
            "inertia",
            {"bodies": "(base|cube)", "range": [0.1, 1.9], "per_axis": True},
            "range: .*lets that .* cube",
        ),
        ("joint_damping", {"range": [-1.0, 1.0], "operation": "abs"}, "range: dof_damping must not be negative"),
        ("joint_damping", {"range": [1, 2], "joints": "cube"}, "joints: 'cube': expected joints that are not free"),
        ("joint_friction", {"range": [0.5, 2.0]}, "operation: nothing to scale, dof_frictionloss is 0 there"),
        ("actuator_gains", {"kp": [0.0, 1.0]}, r"kp.*expected greater than 0"),
        ("actuator_strength", {"range": [0.5, 1.0], "actuators": "elbo"}, "actuators: 'elbo' matches nothing.*elbow"),
        ("gravity", {"range": [-1.0, 1.0]}, "range: gravity must not be negative"),
        ("gravity", {"tilt": [-1.0, 1.0]}, "tilt: expected angles from 0 on"),
        ("push", {"velocity_range": {"w": [0, 1]}}, "velocity_range.*expected 'x'"),
        ("push", {"velocity_range": {}}, "velocity_range: expected a range of at least one of x, y, z, roll"),
        ("actuator_gains", {}, r"?: nothing varies; give a range of kp or kd"),
        ("action_noise", {}, r"?: nothing varies; give std, or a range"),
        ("push", {"velocity_range": {}, "body": "cub"}, "body: the scene has no body 'cub'. Did you mean 'cube'"),
        ("push", {"velocity_range": {}, "body": "forearm"}, "body: 'forearm': expected body with a free joint: cube"),
        ("apply_force", {"bodies": "cube", "duration_s": 0.0}, "duration_s.*expected greater than 0"),
        ("action_delay", {"steps": [2, 1]}, r"steps: expected \[fewest, most\] steps"),
        ("action_delay", {"steps": [0, 1000]}, "steps.*expected less than or equal to 100"),
    ],
)
def test_a_range_that_cannot_be_is_one_error(func, params, message):
    with pytest.raises(ConfigError, match=rf"env\.events\.x\.params\.{message}") as caught:
        with_events(1, x={"func": func, "params": params})
    assert len(caught.value.problems) == 1


def test_objects_of_the_scene_take_another_centre_of_mass():
    """A ball whose mass is off its middle rolls; one whose mass is in its middle stays."""
    ball = {"shape": "sphere", "size": [0.03], "pose": {"x": [0.5, 0.5]}}
    tilts = []
    for x in (0.0, 0.015):
        events = {"load": {"func": "center_of_mass", "params": {"bodies": "ball", "x": [x, x]}}}
        env_cfg = {"scene": {"objects": {"ball": ball}}, "events": events}
        with registration.make("ReachRL", num_envs=1, seed=0, env=env_cfg) as env:
            env.reset()
            for _ in range(10):
                env.step(torch.zeros(1, *env.action_space.shape))
            tilts.append(1.0 - float(env.task.read()["ball_quat"][0, 0].abs()))
    assert tilts[0] < 1e-6
    assert tilts[1] > 1e-3


def test_what_has_no_free_joint_and_what_has_no_robot_is_told():
    with pytest.raises(ConfigError, match="no body of the model has a free joint; use push_joints"):
        small("ReachRL", env={"events": {"x": {"func": "push", "params": {"velocity_range": {}}}}})
    with pytest.raises(ConfigError, match="joint_offset needs a task with a robot"):
        small("Ant-v5", env={"events": {"x": {"func": "joint_offset", "params": {"range": [0, 1]}}}})
    offset = {"func": "joint_offset", "params": {"range": [0, 1]}}
    with pytest.raises(ConfigError, match=r"env\.events\.y: the robot's joints have one error, that of x"):
        small("ReachRL", env={"events": {"x": offset, "y": offset}})
    with pytest.raises(ConfigError, match=r"delay\.robot/qpo: no such observation\. Did you mean 'robot/qpos'"):
        small("ReachRL", env={"observations": {"delay": {"robot/qpo": [0, 1]}}})


# --- the page of the documentation ------------------------------------------------------------------------------------


def test_the_page_of_the_documentation_says_what_is():
    page = (Path(__file__).parents[2] / "docs/randomization.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(snippets) >= 5
    for snippet in snippets:
        exec(compile(snippet, "docs/randomization.md", "exec"), {})
    told = {name: row for row in re.findall(r"^\| `.*$", page, flags=re.MULTILINE) for name in row.split("`")[1:2]}
    ours = (event_terms.__name__, motion_events.__name__)
    found = {name: EVENTS[name] for name in EVENTS if EVENTS[name].__module__ in ours and "rigid_object" not in name}
    assert len(found) == 18
    for name, event in found.items():
        parameters = list(inspect.signature(event).parameters)[1:]
        assert [parameter for parameter in parameters if f"`{parameter}`" not in told[name]] == [], name
        assert told[name].split(" | ")[1] == ", ".join(event.modes), name


# --- curricula --------------------------------------------------------------------------------------------------------


def curriculum(by: str, between: list[float], **changes):
    return {"curriculum": {"by": by, "from": [0.0, 0.0], "to": [0.1, 0.2], "between": between} | changes}


def goals(env, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the goals' y and how far the range has come, ``[steps, num_envs]`` each, as an expert plays."""
    seen = []
    for _ in range(steps):
        info = env.step(env.expert_action())[4]
        seen.append((env.task.variables["goal"][:, 1].clone(), info["metrics"]["curriculum/randomize_target.y"]))
    return torch.stack([goal for goal, _ in seen]), torch.stack([share for _, share in seen])


def test_a_range_follows_the_steps_between_episodes():
    env = with_events(4, randomize_target={"y": curriculum("steps", [0, 48])})
    env = small("PushCubeRL", 4, env={"events": env.cfg.to_dict()["env"]["events"]})  # as it was written down
    env.reset(seed=0)
    assert float(env.task.variables["goal"][:, 1].abs().max()) == 0.0
    idle, shares = torch.zeros(4, 6), []
    for step in range(1, 73):
        info = env.step(idle)[4]
        shares.append(float(info["metrics"]["curriculum/randomize_target.y"][0]))
        # Episodes have 12 steps; the range of one follows from the steps before the one that came before it.
        share = min(1.0, max(0, step // 12 - 1) * 12 / 48)
        goal = env.task.variables["goal"][:, 1]
        assert 0.1 * share - 1e-6 <= float(goal.min())
        assert float(goal.max()) <= 0.2 * share + 1e-6
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares == sorted(shares)


def test_a_range_follows_success_of_each_env():
    events = {"randomize_target": {"y": curriculum("success", [0.0, 0.6], episodes=2)}}
    env = small("PushCubeRL", 4, max_episode_steps=40, env={"events": events})
    env.reset(seed=1)
    goal, share = goals(env, 120)
    assert bool((share[0] == 0).all())
    assert float(share[-1].max()) == 1.0
    assert float(goal[-1].max()) > 0.1
    # The running success of an env, by hand: every episode counts a half.
    env.reset(seed=1)
    rate, progress = torch.zeros(4), []
    for _ in range(120):
        _, _, terminated, truncated, info = env.step(env.expert_action())
        progress.append(info["metrics"]["curriculum/randomize_target.y"])
        rate = torch.where(terminated | truncated, rate + (info["metrics"]["success"] - rate) / 2, rate)
    assert torch.equal(torch.stack(progress), share)  # from the same seed
    torch.testing.assert_close(env.get_state()["curricula", "now"][:, 0].float(), rate)
    for _ in range(130):  # and back, as success is forgotten
        info = env.step(torch.zeros(4, 6))[4]
    assert float(info["metrics"]["curriculum/randomize_target.y"].max()) < 1.0


def test_to_watch_is_to_see_the_end_of_a_curriculum():
    config = {"id": "PushCubeRL", "env": {"events": {"randomize_target": {"y": curriculum("steps", [0, 10**9])}}}}
    with make_to_watch(config, num_envs=20, seed=0) as env:
        goal = env.task.variables["goal"][:, 1]
        assert 0.1 <= float(goal.min()) < 0.12
        assert 0.18 < float(goal.max()) <= 0.2


@pytest.mark.parametrize(
    ("id", "range", "message"),
    [
        ("PushCubeRL", curriculum("succes", [0, 1]), r"y\.curriculum\.by: expected 'success' or 'steps'.*'success'"),
        ("PushCubeRL", curriculum("success", [0, 2]), r"y: expected curriculum.between within \[0, 1\]"),
        ("PushCubeRL", curriculum("steps", [5, 5]), r"y: expected curriculum.between to be \[begins, arrives\]"),
        ("PushCubeRL", curriculum("steps", [0, 5], too=1), r"y\.curriculum\.too: unknown key.*'to'"),
        ("PushCubeRL", {"curriculum": {"by": "steps"}}, r"y\.curriculum\.from: expected a value"),
        ("PushCubeRL", {"curricula": {}}, r"y: expected \[low, high\] or"),
        ("PushCubeLanguageRL", curriculum("steps", [0, 5], to=[-0.3, 0.3]), "y: the task takes this range as it is"),
    ],
)
def test_a_wrong_curriculum_is_told(id, range, message):
    with pytest.raises(ConfigError, match=message):
        small(id, env={"events": {"randomize_target": {"y": range}}})


def test_success_can_be_followed_only_where_there_is_one():
    event = {"func": "mass", "params": {"range": curriculum("success", [0, 1], **{"from": [1, 1], "to": [1, 2]})}}
    with pytest.raises(ConfigError, match=r"events\.it\.params\.range\.curriculum\.by: the task has no success"):
        small("Ant-v5", env={"events": {"it": event}})
