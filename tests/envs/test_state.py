"""``get_state`` and ``set_state``: the whole simulation, to go on exactly from where it was."""

import pytest
import torch

from embodichain.errors import EnvContractError
from tests.envs.rollouts import TASKS, assert_same, flat, random_actions, record, rows, settings, small


@pytest.mark.parametrize("task", TASKS)
def test_a_restored_state_continues_bitwise(task):
    """Through auto-resets, with noise, mass and friction drawn anew in between."""
    env = small(task, 5, env=settings(task))
    actions = random_actions(env, 45)
    record(env, actions[:17])
    state = env.get_state()
    first = record(env, actions[17:])
    obs = env.set_state(state)
    assert_same(record(env, actions[17:]), first)
    other = small(task, 5, seed=1234, env=settings(task))
    record(other, actions[:8])
    elsewhere = other.set_state(state)
    assert_same(record(other, actions[17:]), first)
    assert all(torch.equal(value, flat(elsewhere)[name]) for name, value in flat(obs).items())


def test_set_state_returns_the_observation_of_that_state():
    env = small("PushCubeRL", 4, env=settings("PushCubeRL"))
    obs = env.step(random_actions(env, 1)[0])[0]
    expected, state = flat(obs), env.get_state()
    record(env, random_actions(env, 9, seed=1))
    restored = flat(env.set_state(state))
    assert all(torch.equal(restored[name], expected[name]) for name in expected)


def test_rows_go_where_they_are_sent():
    """Envs 4, 0 and 2 of one environment continue as envs 1, 3 and 0 of another that has its own life besides."""
    source = small("PickCubeRL", 5, env=settings("PickCubeRL"))
    target = small("PickCubeRL", 4, seed=50, env=settings("PickCubeRL"))
    undisturbed = small("PickCubeRL", 4, seed=50, env=settings("PickCubeRL"))
    record(source, random_actions(source, 9))
    origin, destination = [4, 0, 2], [1, 3, 0]
    target.set_state(source.get_state()[torch.tensor(origin)], env_ids=destination)
    actions = random_actions(source, 20, seed=2)
    sent = random_actions(target, 20, seed=3)
    own = sent.clone()
    sent[:, destination] = actions[:, origin]
    expected = rows(record(source, actions), origin)
    got = record(target, sent)
    assert_same(rows(got, destination), expected)
    assert_same(rows(got, [2]), rows(record(undisturbed, own), [2]))


def test_one_state_fans_out_into_identical_starts():
    env = small("PushCubeRL", 6, env=settings("PushCubeRL"))
    record(env, random_actions(env, 4))
    one = env.get_state()[torch.tensor([3])]
    env.set_state(torch.cat([one] * 6))
    trace = record(env, random_actions(env, 1)[:, :1].expand(15, 6, -1).contiguous())
    for said in trace:
        for name, value in said.items():
            assert torch.equal(value, value[:1].expand_as(value)), name


def test_a_state_is_a_copy():
    env = small("PushCubeRL", 3, env=settings("PushCubeRL"))
    state = env.get_state()
    before = state.clone()
    record(env, random_actions(env, 14))
    assert bool((state == before).all())
    env.set_state(state)
    record(env, random_actions(env, 2))
    assert bool((state == before).all())


def test_a_state_survives_a_file(tmp_path):
    env = small("PushCubeRL", 3, env=settings("PushCubeRL"))
    record(env, random_actions(env, 5))
    env.get_state().memmap(tmp_path / "state")
    first = record(env, random_actions(env, 10, seed=1))
    loaded = type(env.get_state()).load_memmap(tmp_path / "state")
    env.set_state(loaded)
    assert_same(record(env, random_actions(env, 10, seed=1)), first)


def test_what_fits_not_is_refused_and_changes_nothing():
    env, plain = small("PushCubeRL", 3, env=settings("PushCubeRL")), small("PushCubeRL", 3)
    state, other = env.get_state(), small("ReachRL", 3).get_state()
    refused = [
        (env, state[:2], r"one row per env, \[3\], got \[2\]"),
        (env, dict(state), "get_state.* returned, got dict"),
        (env, state.exclude("step"), "step is missing"),
        (env, plain.get_state(), "model/body_mass is missing"),
        (plain, state, "model/body_mass is unknown here"),
        (plain, other, r"physics must be torch\.float64 \[129\]"),
        (plain, plain.get_state().float(), "physics must be torch.float64"),
    ]
    for target, wrong, message in refused:
        before = target.get_state()
        with pytest.raises(EnvContractError, match=message):
            target.set_state(wrong)
        assert bool((target.get_state() == before).all())


def test_domain_randomisation_travels_with_the_state():
    env = small("PushCubeRL", 3, env=settings("PushCubeRL"))
    cube = env.physics.model.body("cube").id
    state = env.get_state()
    masses = env.physics.model_field("body_mass")[:, cube].clone()
    env.reset()
    assert not bool((env.physics.model_field("body_mass")[:, cube] == masses).any())
    env.set_state(state)
    assert torch.equal(env.physics.model_field("body_mass")[:, cube], masses)
