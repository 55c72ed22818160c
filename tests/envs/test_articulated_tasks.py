"""Tasks at fixtures: experts solve them, rewards rise on their way, episodes repeat, words name the target."""

import pytest
import torch

from embodichain.envs.registration import load_gym_config, make
from embodichain.errors import ConfigError
from tests.envs.rollouts import assert_same, random_actions, record, rows
from tests.envs.test_tasks import success_rate

TASKS = (
    "OpenDrawerRL",
    "OpenDrawerLanguageRL",
    "CloseDrawerRL",
    "OpenDoorRL",
    "PressButtonRL",
    "PressButtonLanguageRL",
    "InsertPegRL",
)
LANGUAGE = tuple(task for task in TASKS if "Language" in task)


@pytest.mark.parametrize("task", TASKS)
def test_the_expert_solves_the_task_and_is_paid_more_and_more(task):
    with make(task, num_envs=24, seed=11, env={"terminate_on_success": False}) as env:
        solved, first, last = torch.zeros(24, dtype=torch.bool), None, None
        for _ in range(env.max_episode_steps - 1):
            action = env.expert_action()
            assert action.abs().max() <= 1.0
            obs, _, _, _, info = env.step(action)
            assert all(bool(torch.isfinite(value).all()) for value in obs.values(True, True))
            paid = sum(value for name, value in info["rewards"].items() if name not in ("success", "effort"))
            first = paid if first is None else first
            last = torch.where(solved, paid if last is None else last, paid)  # of the state that solved it
            solved |= info["metrics"]["success"] > 0
            if bool(solved.all()):
                break
        assert float(solved.float().mean()) >= 0.95
        assert float((last - first)[solved].min()) > 0.25
        # All stages kept up until the end of time are worth less than success.
        weights = {**env.task.reward_weights, **env.cfg.env.rewards.weights}
        assert sum(w for name, w in weights.items() if name != "success" and w > 0) / (1 - 0.98) < weights["success"]


def test_experts_drive_joints_as_well():
    for task in ("OpenDrawerRL", "InsertPegRL"):
        with make(task, num_envs=16, seed=3, env={"actions": {"ee_delta": None, "delta_qpos": {"scale": 0.08}}}) as env:
            assert success_rate(env) >= 0.9


@pytest.mark.parametrize("task", ["OpenDrawerLanguageRL", "InsertPegRL"])
def test_envs_do_not_depend_on_their_number_and_states_continue(task):
    small = {"seed": 7, "max_episode_steps": 12}
    with make(task, num_envs=5, num_threads=1, **small) as many, make(task, num_envs=2, **small) as few:
        actions = random_actions(many, 30)
        trace = record(many, actions[:15])
        state = many.get_state()
        trace += record(many, actions[15:])
        assert_same(rows(trace, [0, 1]), record(few, actions[:, :2]))
        many.set_state(state)
        assert_same(trace[15:], record(many, actions[15:]))


@pytest.mark.parametrize("task", TASKS)
def test_fixtures_stand_elsewhere_in_every_episode_and_within_their_range(task):
    with make(task, num_envs=32, seed=0) as env:
        name, fixture = next(iter(env.cfg.env.scene.fixtures.items()))
        area = fixture.pose
        seen = []
        for _ in range(2):
            env.reset()
            place = env.physics.mocap_pos[:, env.physics.mocap_id(name)]
            for axis, (low, high) in enumerate((area.x, area.y)):
                assert low <= float(place[:, axis].min()) < float(place[:, axis].max()) <= high
            seen.append(place.clone())
        assert bool((seen[0] != seen[1]).any(dim=1).all())


@pytest.mark.parametrize("task", LANGUAGE)
def test_only_the_instruction_names_the_target(task):
    with make(task, num_envs=12, seed=5) as env:
        obs, _ = env.reset()
        words = [bytes(row.tolist()).rstrip(b"\0").decode() for row in obs["instruction"]]
        target = env.task.variables["choice"].tolist()
        colors = ("red", "green", "blue")
        assert set(target) == {0, 1, 2}
        assert all(colors[index] in text for index, text in zip(target, words, strict=True))
        # Someone who does the same with another part solves nothing, and the metric tells.
        env.task.variables["choice"].copy_((env.task.variables["choice"] + 1) % 3)
        meant = torch.tensor(target)
        wrong, solved = torch.zeros(12), torch.zeros(12)
        for _ in range(70):
            env._scene = None
            action = env.expert_action()
            env.task.variables["choice"].copy_(meant)
            _, _, terminated, _, info = env.step(action)
            solved = torch.maximum(solved, terminated.float())
            wrong = torch.maximum(wrong, info["metrics"]["wrong_button" if "Button" in task else "wrong_drawer"])
            env.task.variables["choice"].copy_((meant + 1) % 3)
        assert float(wrong.mean()) > 0.9
        assert float(solved.mean()) == 0.0


def test_instructions_of_a_config_are_checked():
    language = {"colors": ["red", "blue"], "phrases": ["push {color}", "hit the {color} one"]}
    with make("PressButtonLanguageRL", num_envs=32, seed=0, env={"language": language}) as env:
        env.reset()
        assert set(env._measurements()["target"].tolist()) == {0, 2}
        assert set(env.task.variables["phrase"].tolist()) == {0, 1}
    for wrong, message in (({"colors": ["yellow"]}, "no yellow"), ({"phrases": ["press it"]}, "expected '{color}'")):
        with pytest.raises(ConfigError, match=message):
            make("PressButtonLanguageRL", num_envs=1, env={"language": wrong})


def test_a_tool_without_fingers_is_refused_where_something_is_held():
    with pytest.raises(ConfigError, match="needs a tool with fingers"):
        make("OpenDoorRL", num_envs=1, robot={"tool": "pusher", "init_qpos": [0.0] * 6})


def test_a_dropped_peg_ends_the_episode_without_success():
    with make("InsertPegRL", num_envs=4, seed=0) as env:
        ended = torch.zeros(4, dtype=torch.bool)
        for _ in range(40):
            open_hand = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(4, 4)
            _, _, terminated, _, info = env.step(open_hand)
            assert not bool((info["metrics"]["success"] > 0).any())
            ended |= terminated
        assert bool(ended.all())


@pytest.mark.parametrize("task", TASKS)
def test_a_sparse_reward_is_success_alone(task):
    cfg = load_gym_config(task, num_envs=2, seed=1, env={"rewards": {"mode": "sparse"}})
    with make(cfg) as env:
        _, reward, *_, info = env.step(torch.zeros(env.action_manager.shape))
        assert torch.equal(reward, info["metrics"]["success"])


@pytest.mark.parametrize(
    ("task", "cabinet", "language"),
    [
        ("OpenDoorRL", {"hinge": "right", "pose": {"y": [-0.1, 0.05]}}, None),
        ("OpenDrawerRL", {"drawers": 1, "handle": {"radius": 0.012}, "travel": 0.12}, None),
        ("CloseDrawerRL", {"drawers": 2, "size": [0.24, 0.25, 0.13]}, None),
        ("OpenDrawerLanguageRL", {"drawers": 2, "colors": ["yellow", "red"]}, {"colors": ["yellow", "red"]}),
    ],
)
def test_experts_cope_with_other_furniture(task, cabinet, language):
    changes = {"language": language} if language else {}
    with make(task, num_envs=12, seed=2, env={"scene": {"fixtures": {"cabinet": cabinet}}, **changes}) as env:
        assert success_rate(env) >= 0.9


def test_a_scene_without_the_fixture_of_the_task_says_so():
    for task, name in (("OpenDoorRL", "cabinet"), ("InsertPegRL", "block"), ("PressButtonRL", "panel")):
        with pytest.raises(ConfigError, match=rf"env.scene.fixtures.{name}: {task} needs .*, got nothing"):
            make(task, num_envs=1, env={"scene": {"fixtures": {name: None}}})
