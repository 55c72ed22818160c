"""Tasks that are made of scenes: experts solve them, rewards lead there, instructions alone tell which is meant."""

import importlib.util
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch

from embodichain.envs import registration
from embodichain.envs.checker import run_checks
from embodichain.envs.observations import decode_instructions
from embodichain.envs.registration import make
from embodichain.errors import ConfigError, UnknownNameError

TASKS = ["StackCubeRL", "StackCubeLanguageRL", "PlaceInBinRL", "PlaceInBinLanguageRL", "PushAroundRL"]
EXAMPLE = Path(__file__).parents[2] / "examples/envs/press_task.py"


def play(env, act, steps):
    """Return which envs have succeeded, and the return of their first episodes."""
    env.reset()
    solved = torch.zeros(env.num_envs, dtype=torch.bool)
    running, total = ~solved, torch.zeros(env.num_envs)
    for _ in range(steps):
        _, reward, terminated, truncated, info = env.step(act())
        total += reward * running
        solved |= running & (info["metrics"]["success"] > 0)
        running &= ~(terminated | truncated)
        if not bool(running.any()):
            break
    return solved, total


@pytest.mark.parametrize("task", TASKS)
def test_the_expert_solves_it_and_the_reward_tells_it_from_chance_and_from_rest(task):
    with make(task, num_envs=16, seed=7) as env:
        solved, expert = play(env, env.expert_action, env.max_episode_steps)
        assert int(solved.sum()) >= 15
        generator = torch.Generator().manual_seed(0)
        moves = torch.arange(16).unsqueeze(1) < 8  # half of them stand still
        draw = lambda: moves * (2.0 * torch.rand(env.action_manager.shape, generator=generator) - 1.0)  # noqa: E731
        _, others = play(env, draw, env.max_episode_steps // 2)
        assert float(expert[solved].amin()) > float(others.amax())


@pytest.mark.parametrize("task", ["StackCubeRL", "PlaceInBinRL"])
def test_what_remains_shrinks_along_the_experts_way(task):
    """No stage pays less than the one before: resting anywhere on the way costs more than going on."""
    with make(task, num_envs=8, seed=2) as env:
        env.reset()
        best, running = torch.full((8,), 3.0), torch.ones(8, dtype=torch.bool)
        for step in range(env.max_episode_steps):
            _, _, terminated, _, info = env.step(env.expert_action())
            remaining = -2.0 * info["rewards"]["remaining"]
            assert bool((remaining[running] < best[running] + 0.15).all())  # lifting may cost a little
            best = torch.where(running, torch.minimum(best, remaining), best)
            running &= ~terminated
            if step == 3:
                early = remaining.clone()
        assert bool((best < 0.05).all())
        assert bool((early > 0.6).all())


@pytest.mark.parametrize(("task", "groups"), [("StackCubeLanguageRL", 6), ("PlaceInBinLanguageRL", 4)])
def test_only_the_instruction_tells_which_is_meant(task, groups):
    with make(task, num_envs=64, seed=3) as env:
        obs, _ = env.reset()
        words = decode_instructions(obs["instruction"])
        assert len(set(words)) == groups
        table = env.task.instructed.table  # [phrases, choices, length]
        choice = (obs["instruction"][:, None, None] == table).all(-1).any(1).to(torch.int64).argmax(1)
        assert torch.equal(choice, env.task.variables["choice"])
        for text, index in zip(words, choice.tolist(), strict=True):
            named = env.task.instructed.choices[index]
            assert text.index(named["color"]) < text.index(named["other"])
        # With another instruction in the same state, nothing else that is observed changes, and the expert does.
        before, action = obs.exclude("instruction").flatten_keys("/"), env.expert_action()
        state = env.get_state()
        state["variables", "choice"] = (state["variables", "choice"] + 2) % groups  # of another cube
        after = env.set_state(state)
        for key, value in before.items():
            assert torch.equal(value, after.flatten_keys("/")[key]), key
        assert float((env.expert_action() - action).abs().amax(dim=1).median()) > 0.01


def test_both_ways_round_the_obstacle_are_taken_and_kept():
    with make("PushAroundRL", num_envs=32, seed=5) as env:
        obs, _ = env.reset()
        assert "side" not in str(list(obs.flatten_keys("/").keys()))
        side = env.task.variables["side"].clone()
        assert 8 <= int(side.sum()) <= 24
        far, running = torch.zeros(32), torch.ones(32, dtype=torch.bool)
        for _ in range(env.max_episode_steps):
            scene = env.task.read()
            aside = scene["cube_pos"][:, 1] - scene["obstacle_pos"][:, 1]
            far = torch.where(running & (aside.abs() > far.abs()), aside, far)
            _, _, terminated, truncated, _ = env.step(env.expert_action())
            running &= ~(terminated | truncated)
        went_left = far > 0
        assert int((went_left == (side == 0)).sum()) >= 30  # the first side is that of positive y
        # A cube that is already on one side goes on there, whatever was drawn.
        env.reset(seed=5)
        state = env.get_state()
        address = int(env.physics.model.joint("cube").qposadr[0])
        env.physics.qpos[:, address + 1] = 0.1
        chosen = []
        for drawn in (0, 1):
            env.task.variables["side"].fill_(drawn)
            env._scene = None
            chosen.append(env.expert_action())
        assert torch.equal(*chosen)
        env.set_state(state)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (
            {"id": "StackCubeRL", "robot": {"tool": "pusher", "init_qpos": []}},
            "robot.tool: StackCubeRL needs a tool with",
        ),
        ({"id": "StackCubeRL", "env": {"scene": {"objects": {"green": None}}}}, "env.scene: StackCubeRL needs 'green'"),
        ({"id": "PlaceInBinRL", "env": {"scene": {"fixtures": {"bin": None}}}}, "env.scene: PlaceInBinRL needs 'bin'"),
        ({"id": "PushAroundRL", "env": {"scene": {"objects": {"obstacle": {"fixed": False}}}}}, "a box that is fixed"),
        ({"id": "StackCubeLanguageRL", "env": {"language": {"colors": ["red", "yellow"]}}}, "env.language.colors"),
        ({"id": "StackCubeLanguageRL", "env": {"language": {"phrases": ["stack {color}"]}}}, "expected '{other}' once"),
        ({"id": "StackCubeRL", "env": {"language": {}}}, "env.language: StackCubeRL takes no instructions"),
    ],
)
def test_what_a_task_needs_is_said_in_one_error(cfg, message):
    with pytest.raises(ConfigError) as caught:
        make(cfg)
    assert message in str(caught.value)


@pytest.fixture
def example(monkeypatch):
    """The module of the example, which registers its task and its reward term."""
    monkeypatch.setattr(registration, "_TASKS", dict(registration._TASKS))
    spec = importlib.util.spec_from_file_location("press_task", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "press_task", module)
    spec.loader.exec_module(module)
    yield module
    gym.registry.pop("embodichain/PressTask-v0", None)


def test_the_task_of_the_guide_is_short_keeps_the_contract_and_is_solved_by_its_expert(example):
    code = EXAMPLE.read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in (EXAMPLE.parents[2] / "docs/own_task.md").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    with make("PressTask", num_envs=16, seed=0) as env:
        solved, _ = play(env, env.expert_action, env.max_episode_steps)
        assert bool(solved.all())
    assert not [check for check in run_checks(make("PressTask", num_envs=2, seed=0), max_steps=30) if check.problems]


def test_the_guide_picks_something_up_and_an_unmeasured_quantity_is_told(monkeypatch):
    monkeypatch.setattr(registration, "_TASKS", dict(registration._TASKS))
    page = (EXAMPLE.parents[2] / "docs/own_task.md").read_text().partition("`disc_task.py`:\n\n```python\n")[2]
    names = {"__name__": "disc_task"}
    exec(compile(page.partition("```")[0], "disc_task.py", "exec"), names)
    with make("DiscTask", num_envs=8, seed=0) as env:
        solved, _ = play(env, env.expert_action, env.max_episode_steps)
        assert bool(solved.all())
    gym.registry.pop("embodichain/DiscTask-v0", None)

    class Wrong(names["DiscTask"]):
        def success(self, scene):
            return scene["blok_pos"][:, 2] < 0.03

    registration.register_task("DiscTask", Wrong)
    with pytest.raises(UnknownNameError) as caught:
        make("DiscTask")
    assert str(caught.value).startswith("scene['blok_pos']: nothing of that name is measured. Did you mean 'block_pos'")
    assert "is_held(scene, 'cube', width)" in str(caught.value)
    gym.registry.pop("embodichain/DiscTask-v0", None)
