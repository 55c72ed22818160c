"""Several tasks as one environment: what they agree on, and that each of them behaves as it does alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodichain.envs.checker import run_checks
from embodichain.envs.multi_task import shares_of, task_entries
from embodichain.envs.recording import Summary, roll
from embodichain.envs.registration import make
from embodichain.errors import ConfigError

JOINTS = {"env": {"actions": {"delta_qpos": {"scale": 0.08}}}}
TASKS = [{"id": "PushCubeLanguageRL", "weight": 2}, {"id": "PressButtonLanguageRL", **JOINTS}]


def both(num_envs: int = 3, observations: str = "common", tasks: Any = TASKS, **settings: Any) -> Any:
    kwargs = {"tasks": tasks, "observations": observations}
    return make({"id": "MultiTask", "num_envs": num_envs, "kwargs": kwargs, "seed": 0, **settings})


def test_the_contract_is_kept() -> None:
    results = run_checks(both(max_episode_steps=9), lambda num_envs: both(max(num_envs, 2), max_episode_steps=9), 30)
    broken = {result.name: result.problems for result in results if result.problems}
    assert set(broken) <= {"num_envs"}  # which task an env has depends on how many there are
    assert sum(result.skipped is None for result in results) > 10


def test_each_task_behaves_as_it_does_alone() -> None:
    together, alone = both(), make("PushCubeLanguageRL", num_envs=2, seed=0)
    obs, _ = together.reset(seed=5)
    own, _ = alone.reset(seed=5)
    assert [view.num_envs for view in together.groups] == [2, 1]
    for _ in range(4):
        action = together.expert_action()
        assert torch.equal(action[:2], alone.expert_action())
        obs, reward, *_, info = together.step(action)
        own, own_reward, *_ = alone.step(action[:2])
        assert torch.equal(obs["robot", "qpos"][:2], own["robot", "qpos"])
        assert torch.equal(obs["instruction"][:2], own["instruction"])
        assert torch.equal(reward[:2], own_reward)
    assert sorted(obs.keys()) == ["instruction", "robot"]
    assert bytes(obs["instruction"][2].tolist()).startswith(b"press the ")
    assert torch.isnan(info["metrics"]["task/PressButtonLanguageRL/pressed"]).tolist() == [True, True, False]


def test_all_differences_stand_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        both(observations="same", tasks=["PushCubeRL", "PickCubeRL", "CartPoleRL"])
    message = str(caught.value)
    assert "observation object/held: PickCubeRL has it ([1] float32), PushCubeRL, CartPoleRL has not" in message
    assert "observation robot/qpos: [6] float32 in PushCubeRL, [8] float32 in PickCubeRL, [2] float32 in" in message
    assert "action: delta_qpos (6,) in PushCubeRL" in message
    assert "kwargs.observations is 'same'" in message
    assert '"padded" fills up with zeros' in message


def test_padding_fills_up_with_zeros() -> None:
    env = both(observations="padded", tasks=["PushCubeRL", {"id": "PickCubeRL", "task": "pick up the cube"}])
    obs, _ = env.reset(seed=0)
    assert obs["robot", "qpos"].shape == (3, 8)
    assert (obs["robot", "qpos"][:2, 6:] == 0).all()
    assert (obs["object", "held"][:2] == 0).all()
    assert [bytes(row.tolist()).rstrip(b"\0") for row in obs["instruction"]] == [b"PushCubeRL"] * 2 + [
        b"pick up the cube"
    ]
    most = max(view.env.action_manager.action_dim for view in env.groups)
    assert env.action_space.shape == (most,)
    env.step(torch.zeros(3, most))


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([], "at least one task"),
        ([{"num_envs": 2}], r"tasks\[0\].id: expected the name"),
        ([{"id": "PushCubeRL", "weight": 0}], r"tasks\[0\].weight"),
        ([3], r"tasks\[0\]..*expected settings, a file or an id, got 3"),
    ],
)
def test_bad_lists_are_named(tasks: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        task_entries(tasks, key="tasks")


def test_tasks_whose_info_has_numpy_arrays_can_be_joined() -> None:
    """Gymnasium's own MuJoCo environments report positions at reset, Pendulum reports nothing."""
    tasks = ["Pendulum-v1", {"id": "Hopper-v5", "native": False}]
    with make({"id": "MultiTask", "num_envs": 2, "kwargs": {"tasks": tasks, "observations": "padded"}}) as env:
        info = env.reset(seed=1)[1]["gymnasium"]
        assert info["_x_position"].tolist() == [False, True]
        assert info["x_position"][0] == 0.0 != info["x_position"][1]
        env.step(torch.zeros(2, 3))


def test_shares_are_whole_and_nobody_goes_without() -> None:
    assert shares_of([2, 1], 24) == [16, 8]
    assert shares_of([100, 1, 1], 8) == [6, 1, 1]
    assert shares_of([1, 1, 1], 10) in ([4, 3, 3], [3, 4, 3], [3, 3, 4])
    with pytest.raises(ConfigError, match="one for each task"):
        shares_of([1, 1], 1)


def test_evaluations_tell_the_tasks_apart() -> None:
    env = both(4, max_episode_steps=60)
    ended = [e for step in roll(env, lambda _: env.expert_action(), 4, 1) for e in step.ended]
    tasks = [{name.split("/")[1] for name in e.metrics if name.startswith("task/")} for e in ended]
    assert sorted(next(iter(task)) for task in tasks) == ["PressButtonLanguageRL"] + ["PushCubeLanguageRL"] * 3
    metrics = Summary.of(ended).metrics
    pressed = [e.metrics["task/PressButtonLanguageRL/pressed"] for e in ended if e.env == 3]
    assert metrics["task/PressButtonLanguageRL/pressed"] == pytest.approx(pressed[0])
    assert metrics["task/PushCubeLanguageRL/success"] == sum(bool(e.success) for e in ended if e.env < 3) / 3


def test_few_envs_have_the_first_tasks_and_the_spaces_of_all() -> None:
    one, many = both(1), both(4)
    assert (one.num_envs, one.task_names) == (1, ["PushCubeLanguageRL"])
    assert one.observation_space == many.observation_space
