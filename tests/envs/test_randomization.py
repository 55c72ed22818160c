"""What is drawn anew for an episode or a step: starts, friction, mass and observation noise."""

import pytest
import torch

from embodichain.envs.curricula import Range
from embodichain.envs.randomization import register_event
from embodichain.errors import ConfigError
from tests.envs.rollouts import flat, random_actions, small

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
        ({"func": "frction", "params": {}}, r"env\.events\.x .*'frction'.*Did you mean 'friction'"),
        (
            {"func": "mass", "params": {"range": [1, 1], "bodes": 1}},
            r"env\.events\.x\.params\.bodes: unknown key.*'bodies'",
        ),
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
